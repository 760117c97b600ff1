"""Sequences of mixed ops across groups that share ranks, in an order that is the same on all of them.

The groups are ranks 0, 1, 2 and ranks 1, 2, 3, the rows and the columns of a 2 x 2 mesh, as of tensor and data
parallelism, and two of all ranks. Each group has a workspace of its own, with epochs and halves that move at their own
pace. FUSEDTP_SOAK=large (nox -s soak) takes 4,000 calls.
"""

from __future__ import annotations

from fusedtp.bench.ranks import RankPool

from .harness import LARGE
from .soak.mixed import WEIGHTS
from .soak.programs import STEADY
from .soak.runs import run_programs

CALLS = 4000 if LARGE else 120


def test_sequences_across_two_groups(pool: RankPool) -> None:
    counts = run_programs(pool, CALLS, seed=7, weights=WEIGHTS, steady=True)
    assert {what.partition(":")[0] for what in counts} == set(STEADY)
    assert all(what.endswith(": right") for what in counts)
