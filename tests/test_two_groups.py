"""Sequences of mixed ops across groups that share ranks, in the same order on all ranks.

The groups are ranks 0, 1, 2 and ranks 1, 2, 3; the rows and columns of a 2 x 2 mesh, as in tensor and data parallelism;
and two groups of all ranks. Each group has its own workspace, with epochs and halves that advance independently.
FUSEDTP_SOAK=large (nox -s soak) makes 4,000 calls.
"""

from __future__ import annotations

from fusedtp.bench.ranks import RankPool

from .harness import LARGE
from .soak.mixed import WEIGHTS
from .soak.programs import STEADY
from .soak.runs import run_programs

CALLS = 4000 if LARGE else 120


def test_sequences_across_two_groups(pool: RankPool) -> None:
    counts = run_programs(pool, CALLS, seed=8, weights=WEIGHTS, steady=True)
    assert {what.partition(":")[0] for what in counts} == set(STEADY)
    assert all(what.endswith(": right") for what in counts)
