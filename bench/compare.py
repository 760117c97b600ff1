"""What got faster and what slower from one file of rows to another, each with a confidence interval.

Rows are matched by case and variant. Compared is, by default, a variant's time over the time of `unfused` in the same
file: both were measured in the same interleaved rounds, so a machine that is slower today slows both, and the ratio
survives. `absolute` compares the times themselves. The intervals are those of `intervals`; a row is called faster or
slower only where its interval leaves out 1, and of rows that did not change one in twenty will (at 95 %).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from .intervals import Interval, measured, ratio
from .report import SHORT_DTYPES, TITLES
from .store import CaseKey, Row

if TYPE_CHECKING:
    from rich.console import Console

BASELINE = "unfused"
# what may differ without making the comparison meaningless, but must be known to whoever reads it
_CONDITIONS = ("threads", "backend", "python", "torch", "triton", "driver")

Key: TypeAlias = tuple[CaseKey, str]


@dataclass(frozen=True)
class Change:
    """One variant of one case: B's time over A's, each over its baseline's unless absolute. Above 1 is slower."""

    before: Row
    after: Row
    interval: Interval

    @property
    def verdict(self) -> str:
        return "slower" if self.interval.above else "faster" if self.interval.below else ""


@dataclass(frozen=True)
class Comparison:
    """`drift` is the geometric mean of the baselines' own B over A, None without any; `lost` is without a number."""

    changes: tuple[Change, ...]
    only_before: tuple[Row, ...]
    only_after: tuple[Row, ...]
    lost: tuple[tuple[Row, Row], ...]
    without_baseline: tuple[Row, ...]
    drift: float | None


def machines(rows: Iterable[Row]) -> set[str]:
    """Where the measured rows come from."""
    return {row.machine for row in rows if measured(row)}


def conditions(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """What differs between the two runs besides the code, one line each."""
    lines = []
    for name in _CONDITIONS:
        old, new = (sorted({str(getattr(row, name)) for row in rows if measured(row)}) for rows in (before, after))
        if old and new and old != new:
            lines.append(f"{name}: {', '.join(old)} in A, {', '.join(new)} in B")
    return lines


def compare(
    before: Sequence[Row], after: Sequence[Row], *, absolute: bool = False, confidence: float = 0.95
) -> Comparison:
    """Match and compare the measured rows of two files; slower first. Predicted rows are left out."""
    old, new = _by_key(before), _by_key(after)
    changes, lost, without = [], [], []
    baselines = []
    for key, b in new.items():
        a = old.get(key)
        if a is None or not (measured(a) or measured(b)):
            continue
        if not (measured(a) and measured(b)):
            lost.append((a, b))
            continue
        if b.variant == BASELINE:
            baselines.append(math.log(b.median_ms or math.nan) - math.log(a.median_ms or math.nan))
            if not absolute:
                continue
        if absolute:
            changes.append(Change(a, b, ratio([b], [a], confidence)))
            continue
        base_a, base_b = old.get((a.case, BASELINE)), new.get((b.case, BASELINE))
        if base_a is None or base_b is None or not (measured(base_a) and measured(base_b)):
            without.append(b)
            continue
        changes.append(Change(a, b, ratio([b, base_a], [base_b, a], confidence)))
    changes.sort(key=lambda change: -change.interval.ratio)
    return Comparison(
        tuple(changes),
        tuple(row for key, row in old.items() if key not in new and measured(row)),
        tuple(row for key, row in new.items() if key not in old and measured(row)),
        tuple(lost),
        tuple(without),
        math.exp(sum(baselines) / len(baselines)) if baselines else None,
    )


def _by_key(rows: Iterable[Row]) -> dict[Key, Row]:
    return {(row.case, row.variant): row for row in rows if not row.predicted}


def described(row: Row) -> str:
    """A row's case in one line."""
    of = f", {row.model} {row.layer} at {row.tokens} tokens" if row.model else ""
    size = f"{row.M} x {row.N} x {row.K} {SHORT_DTYPES.get(row.dtype, row.dtype)}"
    return f"{TITLES.get(row.op, row.op)} {size}, {row.direction} on {row.world_size}{of}"


def show(found: Comparison, console: Console, *, absolute: bool, confidence: float, everything: bool) -> None:
    """Print what changed beyond its interval (all that was compared with `everything`), then what could not be."""
    from rich import box
    from rich.table import Table

    what = "B / A, time" if absolute else f"B / A, time over {BASELINE}'s"
    for verdict, style in (("slower", "red"), ("faster", "green"), ("", "dim")):
        members = [change for change in found.changes if change.verdict == verdict]
        if not members or not (verdict or everything):
            continue
        table = Table(title=f"{verdict or 'no difference to be seen'} in B: {len(members)}", box=box.SIMPLE_HEAD)
        table.add_column("case")
        table.add_column("variant")
        for name in ("A, ms", "B, ms", what, f"{confidence:.0%} interval"):
            table.add_column(name, justify="right")
        for change in members if verdict != "faster" else reversed(members):
            a, b, at = change.before, change.after, change.interval
            times = (f"{a.median_ms:.4g}", f"{b.median_ms:.4g}", f"{at.ratio:.3f}", f"{at.low:.3f} to {at.high:.3f}")
            table.add_row(described(b), b.variant, *times, style=style if not verdict else None)
        console.print(table)
    console.print(_summary(found, absolute, confidence), highlight=False)
    for title, rows in (("only in A", found.only_before), ("only in B", found.only_after)):
        for row in rows:
            console.print(f"{title}: {described(row)}, {row.variant}", highlight=False, markup=False)
    for a, b in found.lost:
        for name, other, row in (("A", "B", a), ("B", "A", b)):
            if not measured(row):
                why = row.gate if not row.passed else "not timed"
                text = f"a number in {other}, none in {name} ({why}): {described(b)}, {b.variant}"
                console.print(text, highlight=False, markup=False)
    for row in found.without_baseline:
        text = f"no {BASELINE} in the same case, see --absolute: {described(row)}, {row.variant}"
        console.print(text, highlight=False, markup=False)


def _summary(found: Comparison, absolute: bool, confidence: float) -> str:
    count = {name: sum(change.verdict == name for change in found.changes) for name in ("slower", "faster")}
    total = len(found.changes)
    lines = [f"{total} compared: {count['slower']} slower, {count['faster']} faster beyond the interval."]
    if total:
        mean = math.exp(sum(math.log(change.interval.ratio) for change in found.changes) / total)
        by_chance = total * (1 - confidence)
        lines.append(f"Geometric mean B / A {mean:.3f}; without any change about {by_chance:.1f} would be flagged.")
    if found.drift is not None and not absolute:
        lines.append(f"{BASELINE} itself: B / A {found.drift:.3f} on average, which the other ratios leave out.")
    return "\n".join(lines)
