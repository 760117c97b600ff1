"""Compare two files of rows: list which variants got faster or slower, each with a confidence interval.

Rows are matched by case and variant. By default `compare` takes each variant's time over the time of `unfused` in the
same round. A slower machine slows both, so the ratio stays. The matmul and the collective, each alone, have no such
ratio. `absolute` compares the times themselves, theirs too. A row is faster or slower if its interval (`intervals`)
leaves out 1.

At 95 %, that happens to one in twenty rows that did not change, if either file has several launches, as the interval
then includes how launches differ. Otherwise it happens to more rows, and nobody knows to how many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import TYPE_CHECKING

from .cases import ALONE, COLLECTIVES, SHORT_DTYPES, TITLES
from .frames import BASELINE, lengths
from .intervals import Interval, busy, measured, ratio
from .store import Measurement
from .tables import SIZE, CellTable

if TYPE_CHECKING:
    from rich.console import Console

# Fields that may differ between comparable runs, but must be shown.
_CONDITIONS = ("threads", "backend", "python", "torch", "triton", "driver", "cuda", "nccl", "nccl_env")
# Largest number of rows of one kind that are listed; more are only counted.
_LISTED = 3


@dataclass(frozen=True)
class Change:
    """One variant of one case: time in B over A, each over its baseline unless absolute. Above 1 is slower."""

    before: Measurement
    after: Measurement
    interval: Interval

    @property
    def verdict(self) -> str:
        return "slower" if self.interval.low > 1 else "faster" if self.interval.high < 1 else ""


@dataclass
class Comparison:
    """Rows measured in A (`before`) and in B (`after`), or only in one of them (`only_before`, `only_after`).

    `drifts`: the baselines' own B over A. `lost`: rows without a number in A or in B.
    """

    before: list[Measurement] = field(default_factory=list)
    after: list[Measurement] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    only_before: list[Measurement] = field(default_factory=list)
    only_after: list[Measurement] = field(default_factory=list)
    lost: list[tuple[Measurement, Measurement]] = field(default_factory=list)
    without_baseline: list[Measurement] = field(default_factory=list)
    drifts: list[float] = field(default_factory=list)


def machines(rows: Iterable[Measurement]) -> set[str]:
    """Return the machines of the measured rows."""
    return {row.machine for row in rows if measured(row)}


def conditions(before: Sequence[Measurement], after: Sequence[Measurement]) -> list[str]:
    """Return the differences between the two runs besides the code, one line each."""
    lines = []
    for name in _CONDITIONS:
        old, new = (sorted({str(getattr(row, name)) for row in rows if measured(row)}) for rows in (before, after))
        if old and new and old != new:
            lines.append(f"{name}: {', '.join(old)} in A, {', '.join(new)} in B")
    return lines


def compare(
    before: Sequence[Measurement], after: Sequence[Measurement], *, absolute: bool = False, confidence: float = 0.95
) -> Comparison:
    """Match and compare the measured rows of two files; slower first. Predicted rows are left out."""
    old, new = ({(row.case, row.variant): row for row in rows if not row.predicted} for rows in (before, after))
    timed = [[row for row in rows.values() if measured(row)] for rows in (old, new)]
    found = Comparison(before=timed[0], after=timed[1])
    found.only_before += [row for row in found.before if (row.case, row.variant) not in new]
    found.only_after += [row for row in found.after if (row.case, row.variant) not in old]
    for key in (key for key in new if key in old):
        a, b = old[key], new[key]
        time_a, time_b = measured(a), measured(b)
        if time_a is None or time_b is None:
            found.lost += [(a, b)] if time_a or time_b else []
            continue
        if b.variant == BASELINE:
            found.drifts.append(time_b.median_ms / time_a.median_ms)
        if not absolute:
            if b.variant in (BASELINE, *ALONE):
                continue
            base_a, base_b = (measured(rows.get((b.case, BASELINE))) for rows in (old, new))
            if base_a is None or base_b is None:
                found.without_baseline.append(b)
                continue
            time_a, time_b = time_a.over(base_a), time_b.over(base_b)
        found.changes.append(Change(a, b, ratio(time_b, time_a, confidence, same_run=False)))
    found.changes.sort(key=lambda change: -change.interval.ratio)
    return found


def described(row: Measurement) -> str:
    """Return a row's case and variant in one line."""
    of = f", {row.model} {row.layer} at {row.tokens} tokens" if row.model else ""
    return f"{TITLES.get(row.op, row.op)} {_size(row)}, {row.direction} on {row.world_size}{of}, {row.variant}"


def _size(row: Measurement) -> str:
    return f"{lengths(row)} {SHORT_DTYPES.get(row.dtype, row.dtype)}"


def _section(row: Measurement) -> str:
    return ", ".join(filter(None, (TITLES.get(row.op, row.op), row.model, row.direction, row.variant)))


def in_common(found: Comparison) -> str:
    """Return how many rows each file has, and how many of them the other file has too."""
    both = len(found.before) - len(found.only_before) - sum(measured(a) is not None for a, _ in found.lost)
    return f"Timed rows: {len(found.before)} in A, {len(found.after)} in B, {both} in both (same case and variant)."


def _apart(found: Comparison, everything: bool) -> list[str]:
    # Rows that could not be compared, and why: listed if they are few or `everything` is set, else counted.
    kinds = {"only in A": found.only_before, "only in B": found.only_after}
    for a, b in found.lost:
        name, other, row = ("A", "B", a) if measured(a) is None else ("B", "A", b)
        why = "not timed" if row.passed else row.gate
        kinds.setdefault(f"timed in {other}, not in {name} ({why})", []).append(b)
    kinds[f"no time of {BASELINE} in the same case, compared with --absolute only"] = found.without_baseline
    told = []
    for why, rows in kinds.items():
        if everything or len(rows) <= _LISTED:
            told += [f"{why}: {described(row)}" for row in rows]
        else:
            told.append(f"{why}: {len(rows)} rows; --all lists them")
    return told


def show(found: Comparison, console: Console, *, absolute: bool, confidence: float, everything: bool) -> None:
    """Print the rows that changed beyond their interval, then the rows that could not be compared.

    If the latter are many, they are only counted. With `everything`, all rows are listed.
    """
    what = "B / A of times" if absolute else f"B / A of (time / {BASELINE})"
    count, total = {"slower": 0, "faster": 0, "": 0}, len(found.changes)
    for verdict in count:
        lines = [
            {
                "op": _section(each.after), "layer": each.after.layer,
                "M x N" if each.after.op in COLLECTIVES else SIZE: _size(each.after),
                "ranks": each.after.world_size,
                "A\nms": each.before.median_ms, "B\nms": each.after.median_ms, "B / A\nratio": each.interval.ratio,
                f"{confidence:.0%} interval\n": f"{each.interval.low:.3f} to {each.interval.high:.3f}",
            }
            for each in found.changes if each.verdict == verdict
        ]  # fmt: skip
        count[verdict] = len(lines)
        if lines and (verdict or everything):
            title = f"{verdict or 'no significant difference'} in B: {len(lines)}, {what}"
            table = CellTable.of("", title, lines[::-1] if verdict == "faster" else lines)
            table.print(console, "op", None if verdict else "dim")
    told = [in_common(found)]
    told += [
        f"{name}: {warning}" for name, rows in (("A", found.before), ("B", found.after)) if (warning := busy(rows))
    ]
    if found.drifts and not absolute:
        drift = geometric_mean(found.drifts)
        told += [f"{BASELINE} itself: geometric mean of B / A {drift:.3f}; the other ratios are relative to it."]
    if total:
        counts, level = f"{count['slower']} slower, {count['faster']} faster", f"{confidence:.0%} confidence"
        told += [f"{total} ratios, {what}: {counts} in B, at {level}."]
        mean = geometric_mean(each.interval.ratio for each in found.changes)
        told += [f"Geometric mean of B / A: {mean:.3f}."]
        single = sum(not (each.before.launches or each.after.launches) for each in found.changes)
        if single:
            told += [
                f"{single} ratios are of one launch in A and one in B. Launches of the same code differ by a few "
                "percent, which these intervals leave out: more of them differ by chance than the level says. Measure "
                "with fusedtp sweep --launches 3."
            ]
        if by_launch := total - single:
            by_chance = by_launch * (1 - confidence)
            told += [f"Without a change about {by_chance:.1f} of {by_launch} ratios over launches differ by chance."]
    told += _apart(found, everything)
    for line in told:
        console.print(line)
