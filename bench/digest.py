"""What rows say, in numbers and in sentences: which schedule wins where, by how much, from which size on.

A speed-up is the median of `unfused` over a variant's in the same case, that is, of the same interleaved rounds. A case
is won or lost where the interval of that ratio (`intervals`) leaves out 1; what is between is a tie.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from . import intervals
from .cases import BOUNDS, DIRECTIONS, DTYPES, OPS
from .intervals import Interval
from .report import SHORT_DTYPES, TITLES
from .store import CaseKey, Row

BASELINE = "unfused"
# what no schedule is held against as a rival: the bounds, and our kernel without its waits
ALONE = (*BOUNDS, "own_matmul")
_ORDER = (*ALONE, BASELINE, "decomposed", "fused", "auto")


def position(name: str, known: Sequence[str]) -> tuple[int, str]:
    """Where a name stands among the known ones; others come last, by name."""
    return (known.index(name), "") if name in known else (len(known), name)


def variants(rows: Iterable[Row]) -> list[str]:
    """The schedules and baselines there are, without the bounds, in the order they are always shown."""
    return sorted({row.variant for row in rows} - set(ALONE), key=lambda name: position(name, _ORDER))


@dataclass
class Case:
    """The rows with a time of one case, measured and predicted, by variant; `place` is where it is among the rows."""

    first: Row
    place: int
    measured: dict[str, Row] = field(default_factory=dict)
    predicted: dict[str, Row] = field(default_factory=dict)

    @property
    def matmul(self) -> str:
        """The op's name, or that of the model's layer."""
        return self.first.layer or TITLES.get(self.first.op, self.first.op)

    @property
    def size(self) -> str:
        row = self.first
        return f"{row.M} x {row.N} x {row.K}"

    @property
    def where(self) -> str:
        """The size among those of the same matmul: of a model's, the tokens."""
        row = self.first
        return f"{row.tokens} tokens" if row.model else f"{self.size} {SHORT_DTYPES.get(row.dtype, row.dtype)}"

    @property
    def gflop(self) -> float:
        """A rank's arithmetic, in GFLOP."""
        row = self.first
        return 2e-9 * row.M * row.N * row.K / row.world_size

    def ms(self, variant: str) -> float | None:
        row = self.measured.get(variant)
        return row.median_ms if row else None

    def ceiling_ms(self) -> float | None:
        """The longer of the matmul and the communication: what no overlap gets below."""
        given = next((row.ceiling_ms for row in self.measured.values() if row.ceiling_ms is not None), None)
        bounds = [value for name in BOUNDS if (value := self.ms(name)) is not None]
        return given if given is not None else max(bounds) if len(bounds) == len(BOUNDS) else None

    def speedup(self, variant: str) -> Interval | None:
        """Of a measured variant over unfused; without percentiles the interval is everything."""
        base, row = self.measured.get(BASELINE), self.measured.get(variant)
        if base is None or row is None or not base.median_ms or not row.median_ms:
            return None
        if intervals.measured(base) and intervals.measured(row):
            return intervals.ratio([base], [row])
        return Interval(base.median_ms / row.median_ms, 0.0, math.inf)


def cases(rows: Iterable[Row]) -> list[Case]:
    """Cases with a time on one machine each, by machine, model, direction, op, ranks, dtype and arithmetic."""
    found: dict[tuple[str, CaseKey], Case] = {}
    for row in rows:
        if row.median_ms is not None:
            case = found.setdefault((row.machine, row.case), Case(row, len(found)))
            (case.predicted if row.predicted else case.measured)[row.variant] = row
    return sorted(found.values(), key=_order)


def _order(case: Case) -> tuple[object, ...]:
    row = case.first
    direction, op = position(row.direction, DIRECTIONS), position(row.op, OPS)
    dtype = position(row.dtype, DTYPES)
    return row.machine, row.model, direction, op, row.world_size, dtype, row.M * row.N * row.K, row.M, row.layer


def matmuls(found: Iterable[Case]) -> list[str]:
    """Every case's `matmul` once: ops in their usual order, a model's layers in that of the rows."""
    places: dict[str, tuple[object, ...]] = {}
    for case in sorted(found, key=lambda each: each.place):
        op = position(case.first.op, OPS)
        places.setdefault(case.matmul, (1, case.place) if case.first.layer else (0, op))
    return sorted(places, key=lambda name: places[name])


def milliseconds(value: float) -> str:
    """Three digits, and no power of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(math.log(each) for each in ratios) / len(ratios))


@dataclass(frozen=True)
class Standing:
    """One variant against unfused over the cases of one matmul, number of ranks and direction, by arithmetic.

    won, lost: beyond the interval. since: the smallest case from which on its median is the shorter one in all; None
    where it is not in the largest.
    """

    first: Row
    variant: str
    members: tuple[tuple[Case, Interval], ...]

    @property
    def mean(self) -> float:
        return geometric_mean([interval.ratio for _, interval in self.members])

    @property
    def won(self) -> int:
        return sum(interval.above for _, interval in self.members)

    @property
    def lost(self) -> int:
        return sum(interval.below for _, interval in self.members)

    @property
    def best(self) -> tuple[Case, Interval]:
        return max(self.members, key=lambda member: member[1].ratio)

    @property
    def worst(self) -> tuple[Case, Interval]:
        return min(self.members, key=lambda member: member[1].ratio)

    @property
    def since(self) -> Case | None:
        start = None
        for case, interval in reversed(self.members):
            if interval.ratio < 1.0:
                break
            start = case
        return start

    def crossover(self) -> str:
        """From which size on it is faster, in words."""
        start = self.since
        if all(interval.ratio < 1.0 for _, interval in self.members):
            return "never"
        if start is None:
            leads = sum(interval.ratio >= 1.0 for _, interval in self.members)
            return f"at {leads} of {len(self.members)}, not the largest"
        if start is self.members[0][0]:
            return "always"
        return f"from {start.where}"


def standings(found: Sequence[Case]) -> list[Standing]:
    """Every variant but unfused, two ranks or more, in the order of direction, matmul, ranks and variant."""
    groups: dict[tuple[str, str, str, str, int, str], list[tuple[Case, Interval]]] = {}
    for case in found:
        row = case.first
        for variant in variants(case.measured.values()):
            interval = case.speedup(variant)
            if variant != BASELINE and row.world_size > 1 and interval is not None:
                key = (row.machine, row.model, row.direction, case.matmul, row.world_size, variant)
                groups.setdefault(key, []).append((case, interval))
    names = matmuls(found)
    standing = [
        Standing(members[0][0].first, key[-1], tuple(sorted(members, key=lambda member: member[0].gflop)))
        for key, members in groups.items()
    ]
    return sorted(
        standing,
        key=lambda each: (
            each.first.machine,
            each.first.model,
            position(each.first.direction, DIRECTIONS),
            names.index(each.members[0][0].matmul),
            each.first.world_size,
            position(each.variant, _ORDER),
        ),
    )


def overall(found: Sequence[Case]) -> list[Standing]:
    """Every variant but unfused over all its cases with two ranks or more, by direction; the best first."""
    groups: dict[tuple[str, str], list[tuple[Case, Interval]]] = {}
    for each in standings(found):
        groups.setdefault((each.first.direction, each.variant), []).extend(each.members)
    merged = [Standing(members[0][0].first, variant, tuple(members)) for (_, variant), members in groups.items()]
    return sorted(merged, key=lambda each: (position(each.first.direction, DIRECTIONS), -each.mean))


def headlines(found: Sequence[Case]) -> list[str]:
    """Which schedule is the fastest, a sentence a direction, and what the numbers should not be taken for."""
    lines = []
    best: dict[str, Standing] = {}
    for each in overall(found):
        best.setdefault(each.first.direction, each)
    for direction, each in best.items():
        (_, most), (_, least), count = each.best, each.worst, len(each.members)
        if each.mean < 1.0:
            begin = f"{BASELINE} is the fastest on average; next is {each.variant} at"
        else:
            begin = f"{each.variant} is the fastest on average, at"
        cases_of = f"{count} case{'s' * (count > 1)} with 2 or more ranks"
        lines.append(
            f"{direction.capitalize()}: {begin} {each.mean:.2f}x the speed of {BASELINE} (geometric mean over "
            f"{cases_of}; from {least.ratio:.2f}x to {most.ratio:.2f}x). It is faster in {each.won}, slower in "
            f"{each.lost}, and cannot be told apart in {count - each.won - each.lost}."
        )
    on_cpu = [case.first for case in found if case.measured and not case.first.gpu and case.first.cores]
    crowded = sorted({row.world_size for row in on_cpu if row.world_size * row.threads > row.cores})
    if crowded:
        sizes = " and ".join(str(size) for size in crowded)
        lines.append(
            f"With {sizes} ranks there are more threads than cores: ranks take turns, and those times say how a "
            "schedule bears that, not what it would take on cores of its own."
        )
    return lines


def hidden(each: Standing) -> float | None:
    """The median share of what unfused spends beyond the matmul that a schedule hides, where rows say so."""
    shares = sorted(
        share for case, _ in each.members if (share := case.measured[each.variant].overlap_efficiency) is not None
    )
    return shares[len(shares) // 2] if shares else None
