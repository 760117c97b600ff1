"""pytest-benchmark timings of what `bench/tracked.py` tracks: the slowest rank's time on its device, not the pool's.

`nox -s bench` runs and saves these; arguments after -- go to pytest (`--benchmark-compare`). Each carries its row, from
rounds in which all variants took turns. To be told of regressions there is `nox -s regress`: on a machine that does
something else too, times of two runs differ more than code does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
from fusedtp.bench.jobs import Job
from fusedtp.bench.machine import describe
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.rows import rows_of
from fusedtp.bench.store import Row
from fusedtp.bench.sweep import rank_environment, run_job
from fusedtp.bench.tracked import CALL_SECONDS, Tracked, cases, num_gpus, rounds_of, schedules

pytest.importorskip("pytest_benchmark")
pytestmark = pytest.mark.bench

ROUNDS = 7
GPUS = num_gpus()
VARIANTS = ("matmul", *schedules(GPUS))


class Stopwatch:
    """A timer that moves only by what ranks have measured."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


STOPWATCH = Stopwatch()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    # not the tests' pool: its ranks fill all fresh memory, which takes time
    num_ranks = max(each.case.world_size for each in cases(GPUS))
    with RankPool(num_ranks, timeout=CALL_SECONDS, env=rank_environment(GPUS, num_ranks)) as pool:
        yield pool


@pytest.fixture(scope="module")
def rows(ranks: RankPool) -> Callable[[Tracked], dict[str, Row]]:
    machine = describe()

    @cache
    def gated_and_timed(tracked: Tracked) -> dict[str, Row]:
        job = Job(tracked.case, VARIANTS, True, directions=(tracked.direction,), num_gpus=GPUS)
        outcomes = ranks.run(run_job, job, world_size=tracked.case.world_size)[0]
        return {row.variant: row for row in rows_of(tracked.case, outcomes, machine)}

    return gated_and_timed


@pytest.mark.benchmark(timer=STOPWATCH)
@pytest.mark.parametrize(
    ("tracked", "variant"), [pytest.param(each, name, id=each.id(name)) for each in cases(GPUS) for name in VARIANTS]
)
def test_variant(
    benchmark: Any,
    ranks: RankPool,
    rows: Callable[[Tracked], dict[str, Row]],
    tracked: Tracked,
    variant: str,
) -> None:
    row = rows(tracked)[variant]
    assert row.passed, row.gate
    benchmark.group = f"{tracked.case}, {tracked.direction}"
    benchmark.extra_info |= asdict(row)
    measured = []

    def round_of_ranks() -> None:
        (times,) = ranks.run(rounds_of, tracked, (variant,), 1, {}, False, world_size=tracked.case.world_size)[0]
        measured.append(times[variant] / 1e3)
        STOPWATCH.seconds += measured[-1]

    benchmark.pedantic(round_of_ranks, rounds=ROUNDS, iterations=1)
    assert len(measured) >= ROUNDS
    assert benchmark.stats.stats.total == pytest.approx(sum(measured[:ROUNDS]))
