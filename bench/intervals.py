"""A confidence interval for the ratio of two times, and warnings where times or intervals cannot be relied on.

- Rows of several launches: Student's t of the launches' logarithms. Only such an interval includes how a program
  differs from one start to the next: another placement of ranks and of their memory.
- Rows of one launch: Yuen's t of the logarithms of rounds, which trims a fifth from each end, so disturbed rounds do
  not count. Neighbouring rounds may be alike (a drift, a clock that changes its rate), so n of them count as
  n (1 - r) / (1 + r), the effective sample size, for the lag-1 correlation r of their ranks. Of 5 rounds or fewer
  none can be estimated: they count as independent, and `careful` says what all rows together show.
- Rows without rounds, from older files: from the 20th percentile of one time over the 80th of the other to the reverse.

Variants of one run took turns in the same rounds, so from 8 rounds on their ratio is taken round by round: what slows
both cancels.
`tests/test_bench_compare.py` simulates the coverage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .store import Measurement

# Rows keep six digits, so times that differ by less are equal.
_EQUAL = 1e-6
# Largest interquartile range over median that counts as quiet.
NOISY = 0.2
# Smallest lag-1 correlation of rounds that is worth a warning, and standard errors that it must exceed.
CORRELATED, _ERRORS = 0.25, 2.3
_TRIM = 0.2
# Rounds that say nothing of their correlation, and those from which pairs are worth the degrees of freedom.
_TOO_FEW, _PAIRED = 5, 8


@dataclass(frozen=True)
class Interval:
    """A ratio and the ends of its confidence interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Timing:
    """Milliseconds over the rounds, each the slowest rank's; `total_ms` is all timed iterations together.

    rounds_ms: of each round, in the order that the variants of a case share; empty if not stored. launches: the number
    of rounds in each of several launches, one launch after the other; empty for one launch. host_us: the host's median
    time to issue a GPU's call; None on a CPU. late_rounds: those that the host made longer, as it was late.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    total_ms: float
    rounds: int
    rounds_ms: tuple[float, ...] = ()
    launches: tuple[int, ...] = ()
    host_us: float | None = None
    late_rounds: int = 0

    @classmethod
    def of(cls, rounds_ms: Sequence[float], launches: Sequence[int] = ()) -> Timing:
        p20, median, p80 = np.quantile(rounds_ms, (0.2, 0.5, 0.8)).tolist()
        return cls(median, p20, p80, sum(rounds_ms), len(rounds_ms), tuple(rounds_ms), tuple(launches))

    @classmethod
    def together(cls, timings: Sequence[Timing]) -> Timing:
        """Return one timing of several launches."""
        launches = [timing.rounds for timing in timings] if len(timings) > 1 else ()
        found = cls.of([ms for timing in timings for ms in timing.rounds_ms], launches)
        hosts = [timing.host_us for timing in timings if timing.host_us is not None]
        late = sum(timing.late_rounds for timing in timings)
        return replace(found, host_us=max(hosts, default=None), late_rounds=late)

    def each_of(self, calls: int) -> Timing:
        """Return the timing of one of so many calls in a row."""
        if calls == 1:
            return self
        found = Timing.of([ms / calls for ms in self.rounds_ms], self.launches)
        host_us = None if self.host_us is None else self.host_us / calls
        return replace(found, host_us=host_us, late_rounds=self.late_rounds)

    def over(self, other: Timing) -> Timing:
        """Return this timing over another, round by round: ratios without a unit."""
        paired = self.rounds_ms if self.shares_rounds(other) else ()
        rounds = tuple(mine / its for mine, its in zip(paired, other.rounds_ms, strict=False))
        middle, low, high = self.median_ms / other.median_ms, self.p20_ms / other.p80_ms, self.p80_ms / other.p20_ms
        return Timing(middle, low, high, sum(rounds), self.rounds, rounds, self.launches if rounds else ())

    def shares_rounds(self, other: Timing) -> bool:
        """Return whether both can be variants of the same rounds."""
        return len(self.rounds_ms) == len(other.rounds_ms) and self.launches == other.launches

    def logarithms(self) -> list[Any]:
        """Return the logarithms of the rounds of each launch."""
        return np.split(np.log(self.rounds_ms), np.cumsum(self.launches or (0,))[:-1])


def measured(row: Measurement | None) -> Timing | None:
    """Return a row's timing, or None if it has no positive percentiles over at least two rounds."""
    if row is None:
        return None
    median, p20, p80 = row.median_ms, row.p20_ms, row.p80_ms
    if row.predicted or row.rounds < 2 or not median or not p20 or not p80:
        return None
    return Timing(median, p20, p80, row.total_ms or 0.0, row.rounds, row.rounds_ms, row.launches)


def ratio(over: Timing, under: Timing, confidence: float = 0.95, *, same_run: bool = True) -> Interval:
    """Return the ratio of two medians with its interval.

    - same_run: two variants that took turns in the same rounds. Otherwise both are independent.
    """
    if not 0.5 <= confidence < 1.0:
        raise ValueError(f"confidence must be from 0.5 to below 1, got {confidence}")
    middle = over.median_ms / under.median_ms
    if min(len(over.rounds_ms), len(under.rounds_ms)) < 2:
        return Interval(middle, over.p20_ms / under.p80_ms, over.p80_ms / under.p20_ms)
    pairs = same_run and over.shares_rounds(under) and bool(over.launches or over.rounds >= _PAIRED)
    found = _difference(over.logarithms(), under.logarithms(), pairs)
    if found.variance < _EQUAL**2:
        return Interval(middle, middle, middle)
    from scipy import stats

    half = float(stats.t.ppf((1 + confidence) / 2, found.freedom)) * math.sqrt(found.variance)
    # The interval is that of means. Widen it to contain the ratio of medians.
    low, high = math.exp(max(-700.0, found.value - half)), math.exp(min(700.0, found.value + half))
    return Interval(middle, min(middle, low), max(middle, high))


@dataclass(frozen=True)
class _Mean:
    """A mean of logarithms, the variance of this mean, and its degrees of freedom."""

    value: float
    variance: float
    freedom: float


def _difference(a: Sequence[Any], b: Sequence[Any], pairs: bool) -> _Mean:
    # Of the logarithms of each launch's rounds.
    if pairs:
        return _mean([mine - its for mine, its in zip(a, b, strict=True)])
    one, other = _mean(a), _mean(b)
    value, variance = one.value - other.value, one.variance + other.variance
    if min(len(a), len(b)) == 1 < max(len(a), len(b)):
        # One launch varies as the several launches beside it do, not as its rounds.
        several = one if len(a) > 1 else other
        return _Mean(value, several.variance * (1 + max(len(a), len(b))), several.freedom)
    # Welch's degrees of freedom.
    parts = one.variance**2 / one.freedom + other.variance**2 / other.freedom
    return _Mean(value, variance, variance**2 / parts if parts else one.freedom)


def _mean(launches: Sequence[Any]) -> _Mean:
    # The mean of the launches' medians; of one launch, the trimmed mean of its rounds.
    if len(launches) == 1:
        return _trimmed_mean(launches[0])
    medians = np.array([np.median(each) for each in launches])
    return _Mean(float(medians.mean()), float(medians.var(ddof=1)) / len(medians), len(medians) - 1)


def _trimmed_mean(values: Any) -> _Mean:
    # Yuen's: the variance is that of the values with the trimmed ones moved to the ends of the rest.
    count = len(values)
    cut = int(_TRIM * count)
    kept, inside = count - 2 * cut, np.sort(values)[cut : count - cut]
    variance = np.clip(values, inside[0], inside[-1]).var(ddof=1) * (count - 1) / (kept * (kept - 1))
    # An estimate from few rounds may be anything.
    correlation = max(0.0, min(_correlation(values), 0.9, 1 - _TOO_FEW / count))
    fewer = (1 + correlation) / (1 - correlation)
    return _Mean(float(inside.mean()), float(variance) * fewer, max(min(2.0, kept - 1.0), (kept - 1) / fewer))


def _correlation(values: Any) -> float:
    # Return the lag-1 correlation of the values' ranks, which outliers hardly change. It is estimated too low by about
    # (1 + 4 r) / n, as the mean is estimated too.
    from scipy import stats

    ranks = stats.rankdata(values)
    ranks -= ranks.mean()
    if not (total := ranks @ ranks):
        return 0.0
    found = float(ranks[1:] @ ranks[:-1] / total)
    return found + (1 + 4 * found) / len(values)


def careful(groups: Iterable[Sequence[Timing]]) -> str:
    """Return warnings about timings, or "". A group has the variants that took turns in the same rounds."""
    groups = [[timing for timing in group if timing.rounds_ms] for group in groups]
    quartiles = [np.quantile(timing.rounds_ms, (0.25, 0.5, 0.75)) for group in groups for timing in group]
    told = [noisy([(high - low) / middle for low, middle, high in quartiles])]
    # The mean over a group's variants, which what disturbs a machine makes alike: a group counts as one variant.
    found = [(np.mean([_alike(each) for each in group]), group[0].rounds) for group in groups if group]
    if counts := sum(count for _, count in found):
        correlation = sum(each * count for each, count in found) / counts
        if correlation > max(CORRELATED, _ERRORS / math.sqrt(counts)):
            told.append(
                f"Careful, rounds are not independent: times of neighbouring rounds correlate by {correlation:.1f}, "
                "as where a machine drifts or changes its clock. Intervals are widened for it, medians may be of two "
                "states. Measure again when it is quiet, or with --launches 3 where the command has it."
            )
    return " ".join(filter(None, told))


def _alike(timing: Timing) -> float:
    return float(np.mean([_correlation(each) for each in timing.logarithms()]))


def busy(rows: Iterable[Measurement]) -> str:
    """Return `careful` of these rows' rounds."""
    groups: dict[object, list[Timing]] = {}
    for row in rows:
        if (timing := measured(row)) is not None:
            groups.setdefault((row.machine, row.case), []).append(timing)
    return careful(groups.values())


def noisy(spreads: Sequence[float]) -> str:
    """Return a warning if half of the interquartile ranges over medians exceed `NOISY`, or ""."""
    if not spreads or (middle := float(np.median(spreads))) <= NOISY:
        return ""
    return (
        f"Careful, the machine did something else too: half of the times vary by {middle:.0%} or more from quartile to "
        f"quartile (the limit is {NOISY:.0%}). Measure again when it is quiet, or for longer: --seconds, or --rounds."
    )
