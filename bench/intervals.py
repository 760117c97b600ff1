"""A confidence interval for the ratio of two times, by Yuen's t-test of the logarithms of their rounds.

`scipy.stats.ttest_ind`, with a fifth trimmed from each end: rounds that something else has struck do not count, and it
covers its share from 3 rounds on (`tests/test_bench_compare.py` simulates it), which resampled medians do not. Of rows
without their rounds, as older files have them, it is what their percentiles leave open: from the 20th of one time over
the 80th of the other to the reverse.

What no such interval contains is how a machine differs from one run to the next: another clock rate, another placement
in memory. That is why a ratio to the baseline of the same run is compared first, and why a change is best shown twice.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .store import Row

if TYPE_CHECKING:
    from .timing import Timing

# rows keep six digits: times that differ by less are equal
_EQUAL = 1e-6


@dataclass(frozen=True)
class Interval:
    """A ratio and the ends of its confidence interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Sample:
    """A time, or the ratio of two from the same rounds: median, percentiles, and its rounds where they are kept."""

    median: float
    p20: float
    p80: float
    rounds: tuple[float, ...] = ()

    @classmethod
    def of(cls, timing: Timing) -> Sample:
        return cls(timing.median_ms, timing.p20_ms, timing.p80_ms, timing.rounds_ms)

    def over(self, other: Sample) -> Sample:
        """This over another's, round by round."""
        paired = self.rounds if len(self.rounds) == len(other.rounds) else ()
        rounds = tuple(mine / its for mine, its in zip(paired, other.rounds, strict=False))
        return Sample(self.median / other.median, self.p20 / other.p80, self.p80 / other.p20, rounds)


def sample(row: Row | None) -> Sample | None:
    """A row's, if it has what an interval is made of: a clock's positive percentiles over at least two rounds."""
    if row is None:
        return None
    median, p20, p80 = row.median_ms, row.p20_ms, row.p80_ms
    if row.predicted or row.rounds < 2 or not median or not p20 or not p80:
        return None
    return Sample(median, p20, p80, row.rounds_ms)


def ratio(over: Sample, under: Sample, confidence: float = 0.95) -> Interval:
    """The ratio of two medians with its interval.

    Rounds that two variants of one run share drift together, which makes the interval wider than it need be.
    """
    if not 0.5 <= confidence < 1.0:
        raise ValueError(f"confidence must be from 0.5 to below 1, got {confidence}")
    middle = over.median / under.median
    if min(len(over.rounds), len(under.rounds)) < 2:
        return Interval(middle, over.p20 / under.p80, over.p80 / under.p20)
    a, b = np.log(over.rounds), np.log(under.rounds)
    if max(np.ptp(a), np.ptp(b)) < _EQUAL:
        return Interval(middle, middle, middle)
    from scipy import stats

    with warnings.catch_warnings():
        # of one whose rounds are all alike: its variance is none
        warnings.simplefilter("ignore", RuntimeWarning)
        found = stats.ttest_ind(a, b, equal_var=False, trim=0.2).confidence_interval(confidence)
    # of trimmed means: the ratio of medians is in it, also where both differ by a rounding alone
    return Interval(middle, min(middle, math.exp(found.low)), max(middle, math.exp(min(700.0, found.high))))
