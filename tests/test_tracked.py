"""The measurements of the regression check."""

from __future__ import annotations

import time
from statistics import median

import torch

from fusedtp.bench import regress
from fusedtp.bench.jobs import Job
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.regress import Tracked
from fusedtp.bench.sweep import run_job
from fusedtp.bench.timing import slowed


def test_what_is_planted_takes_that_much_longer() -> None:
    def run() -> str:
        time.sleep(0.02)
        return "result"

    slow = slowed(run, 2.0, torch.device("cpu"))
    start = time.perf_counter()
    assert slow() == "result"
    # at least: sleep and the wait never end early
    assert time.perf_counter() - start >= 0.04


def test_rounds_on_ranks(pool: RankPool) -> None:
    variants = ("matmul", "unfused", "decomposed")
    small = Tracked(regress.Case("matmul_reduce_scatter", 64, 64, 64, "float32", 2), "both")
    job = Job(small.case, variants, True, rounds=5, directions=(small.direction,))
    first, second = pool.run(run_job, job, {"decomposed": 40.0}, world_size=2)
    assert first == second
    times = {outcome.variant: outcome.timing.rounds_ms for outcome in first if outcome.timing}
    assert tuple(times) == variants
    assert all(len(each) == 5 and min(each) > 0 for each in times.values())
    found = regress.samples_of([{small: times}], variants[1:])
    pairs = [("unfused", "matmul"), ("decomposed", "matmul"), ("decomposed", "unfused")]
    assert list(found)[:3] == [f"{small.id(schedule)} / {reference}" for schedule, reference in pairs]
    assert list(found)[3:] == [*(f"{schedule} / {reference}" for schedule, reference in pairs), "matmul"]
    for key, (schedule, reference) in zip(found, pairs, strict=False):
        assert found[key] == [mine / its for mine, its in zip(times[schedule], times[reference], strict=True)]
    # the planted delay on every rank is in the slowest rank's time, even if a round of the other rank was disturbed
    assert median(mine / its for mine, its in zip(times["decomposed"], times["unfused"], strict=True)) > 2
