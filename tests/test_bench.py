"""pytest-benchmark timings of the schedules: what is saved and compared is the slowest rank's time, not the pool's.

`nox -s bench` runs these; arguments after -- go to pytest (`--benchmark-autosave`, `--benchmark-compare`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusedtp.bench.cases import OPS, Case
from fusedtp.bench.problem import Problem
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.timing import gate, measure
from torch.distributed import ProcessGroup

pytestmark = pytest.mark.bench

ROUNDS = 7


class Stopwatch:
    """A timer that moves only by what ranks have measured."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


STOPWATCH = Stopwatch()


def slowest(group: ProcessGroup, case: Case, variant: str, first: bool) -> float:
    # One round, gated before the first; the same number on every rank, in ms.
    device = torch.device("cpu")
    problem = Problem(case, group, device)
    if first and (error := gate(problem, (variant,), group)[variant].error):
        raise AssertionError(error)
    return measure({variant: problem.runner(variant)}, group, device, rounds=1)[variant].median_ms


@pytest.mark.benchmark(timer=STOPWATCH)
@pytest.mark.parametrize("schedule", ["unfused", "decomposed"])
@pytest.mark.parametrize("op", OPS)
def test_schedule(benchmark: Any, pool: RankPool, op: str, schedule: str) -> None:
    case = Case(op, 1024, 1024, 1024, "float32", 2)
    benchmark.group = str(case)
    benchmark.extra_info |= {"op": op, "schedule": schedule, "world_size": case.world_size, "dtype": case.dtype}
    slowest_ms = pool.run(slowest, case, schedule, True, world_size=2)[0]
    assert slowest_ms > 0

    def round_of_ranks() -> None:
        STOPWATCH.seconds += pool.run(slowest, case, schedule, False, world_size=2)[0] / 1e3

    benchmark.pedantic(round_of_ranks, rounds=ROUNDS, iterations=1)
    assert benchmark.stats.stats.min > 0
