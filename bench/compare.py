"""What got faster and what slower from one file of rows to another, each with a confidence interval.

Rows are matched by case and variant. Compared is, by default, a variant's time over the time of `unfused` in the same
round of the same file, so a machine that is slower today slows both, and the ratio survives. `absolute` compares the
times themselves. A row is called faster or slower only where its interval (`intervals`) leaves out 1, and of rows that
did not change one in twenty will (at 95 %).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import TYPE_CHECKING

from .cases import SHORT_DTYPES, TITLES
from .frames import BASELINE
from .intervals import Interval, ratio, sample
from .store import Row
from .tables import Table

if TYPE_CHECKING:
    from rich.console import Console

# what may differ without making the comparison meaningless, but must be known to whoever reads it
_CONDITIONS = ("threads", "backend", "python", "torch", "triton", "driver")


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
    return {row.machine for row in rows if sample(row)}


def conditions(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """What differs between the two runs besides the code, one line each."""
    lines = []
    for name in _CONDITIONS:
        old, new = (sorted({str(getattr(row, name)) for row in rows if sample(row)}) for rows in (before, after))
        if old and new and old != new:
            lines.append(f"{name}: {', '.join(old)} in A, {', '.join(new)} in B")
    return lines


def compare(
    before: Sequence[Row], after: Sequence[Row], *, absolute: bool = False, confidence: float = 0.95
) -> Comparison:
    """Match and compare the measured rows of two files; slower first. Predicted rows are left out."""
    old, new = ({(row.case, row.variant): row for row in rows if not row.predicted} for rows in (before, after))
    changes, lost, without, drifts = [], [], [], []
    for key, b in new.items():
        a = old.get(key)
        mine_a, mine_b = sample(a), sample(b)
        if a is None or not (mine_a or mine_b):
            continue
        if mine_a is None or mine_b is None:
            lost.append((a, b))
            continue
        if b.variant == BASELINE:
            drifts.append(mine_b.median / mine_a.median)
        if not absolute:
            if b.variant == BASELINE:
                continue
            base_a, base_b = old.get((a.case, BASELINE)), new.get((b.case, BASELINE))
            under, over = sample(base_a), sample(base_b)
            if under is None or over is None:
                without.append(b)
                continue
            mine_a, mine_b = mine_a.over(under), mine_b.over(over)
        changes.append(Change(a, b, ratio(mine_b, mine_a, confidence)))
    changes.sort(key=lambda change: -change.interval.ratio)
    return Comparison(
        tuple(changes),
        tuple(row for key, row in old.items() if key not in new and sample(row)),
        tuple(row for key, row in new.items() if key not in old and sample(row)),
        tuple(lost),
        tuple(without),
        geometric_mean(drifts) if drifts else None,
    )


def described(row: Row) -> str:
    """A row's case in one line."""
    of = f", {row.model} {row.layer} at {row.tokens} tokens" if row.model else ""
    size = f"{row.M} x {row.N} x {row.K} {SHORT_DTYPES.get(row.dtype, row.dtype)}"
    return f"{TITLES.get(row.op, row.op)} {size}, {row.direction} on {row.world_size}{of}"


def show(found: Comparison, console: Console, *, absolute: bool, confidence: float, everything: bool) -> None:
    """Print what changed beyond its interval (all that was compared with `everything`), then what could not be."""
    what = "B / A, time" if absolute else f"B / A, time over {BASELINE}'s"
    for verdict in ("slower", "faster", *([""] if everything else [])):
        members = [change for change in found.changes if change.verdict == verdict]
        lines = []
        for change in reversed(members) if verdict == "faster" else members:
            a, b, at = change.before, change.after, change.interval
            line = {
                "case": described(b),
                "variant": b.variant,
                "A\nmedian, ms": a.median_ms,
                "B\nmedian, ms": b.median_ms,
            }
            line |= {f"{what}\nratio": at.ratio, f"{confidence:.0%} interval\nfrom": at.low, "\nto": at.high}
            lines.append(line)
        if lines:
            table = Table.of("", f"{verdict or 'no difference to be seen'} in B: {len(members)}", lines)
            console.print(table.printed(sections=False), style=None if verdict else "dim")
    console.print(_summary(found, absolute, confidence), highlight=False)
    told = [f"only in A: {described(row)}, {row.variant}" for row in found.only_before]
    told += [f"only in B: {described(row)}, {row.variant}" for row in found.only_after]
    for a, b in found.lost:
        name, other, row = ("A", "B", a) if sample(a) is None else ("B", "A", b)
        why = row.gate if not row.passed else "not timed"
        told.append(f"a number in {other}, none in {name} ({why}): {described(b)}, {b.variant}")
    told += [
        f"no {BASELINE} in the same case, see --absolute: {described(row)}, {row.variant}"
        for row in found.without_baseline
    ]
    for text in told:
        console.print(text, highlight=False, markup=False)


def _summary(found: Comparison, absolute: bool, confidence: float) -> str:
    count = {name: sum(change.verdict == name for change in found.changes) for name in ("slower", "faster")}
    total = len(found.changes)
    lines = [f"{total} compared: {count['slower']} slower, {count['faster']} faster beyond the interval."]
    if total:
        mean = geometric_mean(change.interval.ratio for change in found.changes)
        by_chance = total * (1 - confidence)
        lines.append(f"Geometric mean B / A {mean:.3f}; without any change about {by_chance:.1f} would be flagged.")
    if found.drift is not None and not absolute:
        lines.append(f"{BASELINE} itself: B / A {found.drift:.3f} on average, which the other ratios leave out.")
    return "\n".join(lines)
