"""An interval for a ratio of medians, from the three percentiles that a row keeps.

A row has the median, the 20th and the 80th percentile of its rounds, not the rounds. Assumed: rounds are independent,
and the logarithm of a time is about normal between those percentiles (tails may be heavy: they move none of the three).
With Z = 1.6832, the distance of a standard normal's 20th and 80th percentiles, and n rounds,

    sigma = ln(p80 / p20) / Z        standard error of ln(median) = 1.2533 sigma / sqrt(n)        (1.2533: sqrt(pi / 2))

Errors of several medians add in squares. sigma is itself an estimate from few rounds, and one from two percentiles
knows less than one from all of them: 0.4 (n - 1) degrees of freedom, Welch-Satterthwaite's for a sum, and Student's t
in place of the normal. With that the interval covers its share for 3 to 50 rounds, normal, exponential or heavy-tailed
(`tests/test_bench_compare.py` simulates it).

What no such interval contains is how a machine differs from one run to the next: another clock rate, another placement
in memory. That is why a ratio to the baseline of the same run is compared first, and why a change is best shown twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .store import Row

_Z = 1.6832
_MEDIAN = math.sqrt(math.pi / 2)
_FREEDOM = 0.4
# rows keep six digits: percentiles that are equal there may differ by this much
_LEAST_SIGMA = 1e-6


@dataclass(frozen=True)
class Interval:
    """A ratio and the ends of its confidence interval."""

    ratio: float
    low: float
    high: float

    @property
    def above(self) -> bool:
        """The ratio is above 1 and the whole interval too."""
        return self.low > 1.0

    @property
    def below(self) -> bool:
        """The ratio is below 1 and the whole interval too."""
        return self.high < 1.0

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"


def measured(row: Row) -> bool:
    """Whether a row has what an interval is made of: a clock's positive percentiles over at least two rounds."""
    times = (row.p20_ms, row.median_ms, row.p80_ms)
    return not row.predicted and row.rounds > 1 and all(time is not None and time > 0.0 for time in times)


def ratio(over: Sequence[Row], under: Sequence[Row], confidence: float = 0.95) -> Interval:
    """Product of `over`'s medians divided by the product of `under`'s, with its interval.

    All rows must be `measured` and come from different rounds or different variants of the same. Rounds shared by two
    variants drift together, which makes the interval wider than it need be, not narrower.
    """
    if not 0.5 <= confidence < 1.0:
        raise ValueError(f"confidence must be from 0.5 to below 1, got {confidence}")
    centre = sum(map(_log_median, over)) - sum(map(_log_median, under))
    variances = [(_variance(row), _FREEDOM * (row.rounds - 1)) for row in (*over, *under)]
    variance = sum(each for each, _ in variances)
    freedom = max(0.4, variance**2 / sum(each**2 / degrees for each, degrees in variances))
    half = _student(round(freedom, 1), confidence) * math.sqrt(variance)
    return Interval(math.exp(centre), math.exp(centre - half), math.exp(min(700.0, centre + half)))


def _log_median(row: Row) -> float:
    assert row.median_ms is not None
    return math.log(row.median_ms)


def _variance(row: Row) -> float:
    assert row.p20_ms is not None
    assert row.p80_ms is not None
    sigma = max(_LEAST_SIGMA, math.log(row.p80_ms / row.p20_ms) / _Z)
    return (_MEDIAN * sigma) ** 2 / row.rounds


@lru_cache(maxsize=256)
def _student(freedom: float, confidence: float) -> float:
    """The t with P(|T| < t) = confidence: with T = sqrt(freedom) tan(u), u has density cos(u)^(freedom - 1)."""
    if freedom > 200:
        freedom = 200.0
    edges = np.linspace(0.0, math.pi / 2, 100_001)
    middle = (edges[1:] + edges[:-1]) / 2
    share = np.cumsum(np.cos(middle) ** (freedom - 1.0))
    angle = float(np.interp(confidence, share / share[-1], edges[1:]))
    return math.sqrt(freedom) * math.tan(angle)
