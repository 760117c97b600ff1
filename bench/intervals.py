"""A confidence interval for the ratio of two times, by Yuen's t-test of the logarithms of their rounds.

`scipy.stats.ttest_ind` trims a fifth from each end, so disturbed rounds do not count. Its coverage is right from 3
rounds on (`tests/test_bench_compare.py` simulates it); that of resampled medians is not. For rows without rounds, from
older files, the interval goes from the 20th percentile of one time over the 80th of the other to the reverse.

No such interval includes how a machine differs from one run to the next: another clock rate, another placement in
memory. So ratios to the baseline of the same run are compared first, and a change is best shown twice.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .store import Measurement

# Rows keep six digits, so times that differ by less are equal.
_EQUAL = 1e-6
# Largest interquartile range over median that counts as quiet.
NOISY = 0.2


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

    rounds_ms: of each round, in the order that the variants of a case share; empty if not stored.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    total_ms: float
    rounds: int
    rounds_ms: tuple[float, ...] = ()

    @classmethod
    def of(cls, rounds_ms: Sequence[float]) -> Timing:
        p20, median, p80 = np.quantile(rounds_ms, (0.2, 0.5, 0.8)).tolist()
        return cls(median, p20, p80, sum(rounds_ms), len(rounds_ms), tuple(rounds_ms))

    def over(self, other: Timing) -> Timing:
        """Return this timing over another, round by round: ratios without a unit."""
        paired = self.rounds_ms if len(self.rounds_ms) == len(other.rounds_ms) else ()
        rounds = tuple(mine / its for mine, its in zip(paired, other.rounds_ms, strict=False))
        middle = self.median_ms / other.median_ms
        return Timing(middle, self.p20_ms / other.p80_ms, self.p80_ms / other.p20_ms, sum(rounds), self.rounds, rounds)


def measured(row: Measurement | None) -> Timing | None:
    """Return a row's timing, or None if it has no positive percentiles over at least two rounds."""
    if row is None:
        return None
    median, p20, p80 = row.median_ms, row.p20_ms, row.p80_ms
    if row.predicted or row.rounds < 2 or not median or not p20 or not p80:
        return None
    return Timing(median, p20, p80, row.total_ms or 0.0, row.rounds, row.rounds_ms)


def ratio(over: Timing, under: Timing, confidence: float = 0.95) -> Interval:
    """Return the ratio of two medians with its interval.

    Two variants of one run drift together in their shared rounds, so the interval is wider than necessary.
    """
    if not 0.5 <= confidence < 1.0:
        raise ValueError(f"confidence must be from 0.5 to below 1, got {confidence}")
    middle = over.median_ms / under.median_ms
    if min(len(over.rounds_ms), len(under.rounds_ms)) < 2:
        return Interval(middle, over.p20_ms / under.p80_ms, over.p80_ms / under.p20_ms)
    a, b = np.log(over.rounds_ms), np.log(under.rounds_ms)
    if max(np.ptp(a), np.ptp(b)) < _EQUAL:
        return Interval(middle, middle, middle)
    from scipy import stats

    with warnings.catch_warnings():
        # scipy warns if all rounds of one timing are equal, as their variance is 0.
        warnings.simplefilter("ignore", RuntimeWarning)
        found = stats.ttest_ind(a, b, equal_var=False, trim=0.2).confidence_interval(confidence)
    # The interval is that of trimmed means. Widen it to contain the ratio of medians.
    return Interval(middle, min(middle, math.exp(found.low)), max(middle, math.exp(min(700.0, found.high))))


def busy(rows: Iterable[Measurement]) -> str:
    """Return `noisy` of these rows' rounds."""
    rounds = [each.rounds_ms for each in map(measured, rows) if each is not None and each.rounds_ms]
    quartiles = [np.quantile(each, (0.25, 0.5, 0.75)) for each in rounds]
    return noisy([(high - low) / middle for low, middle, high in quartiles])


def noisy(spreads: Sequence[float]) -> str:
    """Return a warning if half of the interquartile ranges over medians exceed `NOISY`, or ""."""
    if not spreads or (middle := float(np.median(spreads))) <= NOISY:
        return ""
    return (
        f"Careful, the machine did something else too: half of the times vary by {middle:.0%} or more from quartile to "
        f"quartile (the limit is {NOISY:.0%}). Measure again when it is quiet, or longer with --seconds."
    )
