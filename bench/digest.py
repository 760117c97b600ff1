"""What rows say, in numbers and in sentences: which schedule wins where, by how much, from which size on.

A speed-up is the median of `unfused` over a variant's in the same case, that is, of the same interleaved rounds. A case
is won or lost where the interval of that ratio (`intervals`) leaves out 1; what is between is a tie.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from . import intervals
from .cases import BOUNDS, DTYPES, OPS
from .intervals import Interval
from .report import SHORT_DTYPES, TITLES
from .store import CaseKey, Row

BASELINE = "unfused"
# what no schedule is held against as a rival: the bounds, and our kernel without its waits
ALONE = (*BOUNDS, "own_matmul")
DIRECTIONS = ("forward", "backward", "both")
_ORDER = (*ALONE, BASELINE, "decomposed", "fused", "auto")


def position(name: str, known: Sequence[str]) -> tuple[int, str]:
    """Where a name stands among the known ones; others come last, by name."""
    return (known.index(name), "") if name in known else (len(known), name)


def variants(rows: Iterable[Row]) -> list[str]:
    """The schedules and baselines there are, without the bounds, in the order they are always shown."""
    return sorted({row.variant for row in rows} - set(ALONE), key=lambda name: position(name, _ORDER))


@dataclass
class Case:
    """The rows with a time of one case: measured and predicted, by variant."""

    first: Row
    measured: dict[str, Row] = field(default_factory=dict)
    predicted: dict[str, Row] = field(default_factory=dict)

    @property
    def size(self) -> str:
        row = self.first
        return f"{row.M} x {row.N} x {row.K}"

    @property
    def where(self) -> str:
        """Size, dtype and, of a model's matmul, which."""
        row = self.first
        of = f"{row.layer} at {row.tokens} tokens, " if row.model else ""
        return f"{of}{self.size} {SHORT_DTYPES.get(row.dtype, row.dtype)}"

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
            case = found.setdefault((row.machine, row.case), Case(row))
            (case.predicted if row.predicted else case.measured)[row.variant] = row
    return sorted(found.values(), key=_order)


def _order(case: Case) -> tuple[object, ...]:
    row = case.first
    direction, op = position(row.direction, DIRECTIONS), position(row.op, OPS)
    dtype = position(row.dtype, DTYPES)
    return row.machine, row.model, direction, op, row.world_size, dtype, row.M * row.N * row.K, row.M, row.layer


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(math.log(each) for each in ratios) / len(ratios))


@dataclass(frozen=True)
class Standing:
    """One variant against unfused over the cases of one op, number of ranks and direction, by arithmetic.

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
            return "at no size measured"
        if start is None:
            leads = sum(interval.ratio >= 1.0 for _, interval in self.members)
            return f"at {leads} of {len(self.members)} sizes, not at the largest"
        if start is self.members[0][0]:
            return f"at every size from {start.where}, the smallest"
        return f"from {start.where}"


def standings(found: Sequence[Case]) -> list[Standing]:
    """Every variant but unfused, two ranks or more, in the order of direction, op, ranks and variant."""
    groups: dict[tuple[str, str, str, int, str], list[tuple[Case, Interval]]] = {}
    for case in found:
        row = case.first
        for variant in variants(case.measured.values()):
            interval = case.speedup(variant)
            if variant != BASELINE and row.world_size > 1 and interval is not None:
                key = (row.machine, row.direction, row.op, row.world_size, variant)
                groups.setdefault(key, []).append((case, interval))
    standing = [
        Standing(members[0][0].first, key[-1], tuple(sorted(members, key=lambda member: member[0].gflop)))
        for key, members in groups.items()
    ]
    return sorted(
        standing,
        key=lambda each: (
            each.first.machine,
            position(each.first.direction, DIRECTIONS),
            position(each.first.op, OPS),
            each.first.world_size,
            position(each.variant, _ORDER),
        ),
    )


def headlines(found: Sequence[Case]) -> list[str]:
    """The most important first: each variant over all cases with communication, one sentence or two."""
    lines = []
    by_variant: dict[tuple[str, str], list[tuple[Case, Interval]]] = {}
    for each in standings(found):
        by_variant.setdefault((each.first.direction, each.variant), []).extend(each.members)
    several = len({direction for direction, _ in by_variant}) > 1
    for (direction, variant), members in by_variant.items():
        all_of = Standing(members[0][0].first, variant, tuple(members))
        (best, at_best), (worst, at_worst) = all_of.best, all_of.worst
        ties = len(members) - all_of.won - all_of.lost
        what = f"{variant}, {direction}" if several else variant
        count = f"{len(members)} case{'s' * (len(members) > 1)}"
        lines.append(
            f"{what}: {all_of.mean:.2f}x the speed of {BASELINE} as a geometric mean over {count} with 2 or more "
            f"ranks; faster in {all_of.won}, slower in {all_of.lost}, no difference to be told in {ties}. "
            f"Best {at_best.ratio:.2f}x ({_named(best)}), worst {at_worst.ratio:.2f}x ({_named(worst)})."
        )
    return lines


def _named(case: Case) -> str:
    row = case.first
    return f"{TITLES.get(row.op, row.op)} {case.where} on {row.world_size}"


def hidden(found: Sequence[Case]) -> list[str]:
    """How much of the communication each schedule hides, where rows say so, as the median over cases."""
    shares: dict[str, list[float]] = {}
    for case in found:
        for variant, row in case.measured.items():
            if row.overlap_efficiency is not None and variant not in (*ALONE, BASELINE) and row.world_size > 1:
                shares.setdefault(variant, []).append(row.overlap_efficiency)
    return [
        f"{name} hides {sorted(each)[len(each) // 2]:.0%} (median) of what {BASELINE} spends beyond the matmul."
        for name, each in shares.items()
    ]


@dataclass(frozen=True)
class Total:
    """The matmuls of one transformer block together, in ms by variant; a variant that lacks one of them is left out."""

    first: Row
    layers: tuple[str, ...]
    ms: dict[str, float]
    incomplete: dict[str, tuple[str, ...]]


def totals(found: Sequence[Case]) -> list[Total]:
    """Sums over a block's layers, by model, direction, tokens, ranks and dtype."""
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in found:
        row = case.first
        if row.model:
            key = (row.machine, row.model, position(row.direction, DIRECTIONS), row.tokens, row.world_size, row.dtype)
            groups.setdefault(key, []).append(case)
    blocks = []
    for key in sorted(groups, key=str):
        members = [case for case in groups[key] if case.measured]
        if not members:
            continue
        names = variants(row for case in members for row in case.measured.values())
        sums, incomplete = {}, {}
        for name in ("matmul", *names):
            times = [case.ms(name) for case in members]
            lacking = tuple(case.first.layer for case, ms in zip(members, times, strict=True) if ms is None)
            if lacking:
                incomplete[name] = lacking
            else:
                sums[name] = sum(ms for ms in times if ms is not None)
        blocks.append(Total(members[0].first, tuple(case.first.layer for case in members), sums, incomplete))
    return sorted(blocks, key=lambda each: (each.first.model, each.first.tokens, each.first.world_size))
