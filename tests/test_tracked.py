"""The measurements of the regression check."""

from __future__ import annotations

from statistics import median

from fusedtp.bench import regress
from fusedtp.bench.intervals import Timing
from fusedtp.bench.jobs import Job
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.ratios import ratio_of, slowed, together
from fusedtp.bench.regress import Tracked
from fusedtp.bench.store import Outcome
from fusedtp.bench.sweep import run_job
from fusedtp.bench.timing import Verdict


def test_rounds_on_ranks(pool: RankPool) -> None:
    variants = ("matmul", "unfused", "decomposed")
    small = Tracked(regress.Case("matmul_reduce_scatter", 64, 64, 64, "float32", 2), "both")
    job = Job(small.case, variants, True, rounds=5, directions=(small.direction,))
    first, second = pool.run(run_job, job, world_size=2)
    assert first == second
    times = {outcome.variant: outcome.timing.rounds_ms for outcome in first if outcome.timing}
    assert tuple(times) == variants
    assert all(len(each) == 5 and min(each) > 0 for each in times.values())


def test_what_is_planted_scales_the_rounds() -> None:
    turns = [Outcome("decomposed", "forward", Verdict(), Timing.of([1.0, 2.0])) for _ in range(2)]
    (joined,) = together([[turn] for turn in turns])
    timing = slowed(joined, 1.5).timing
    assert timing is not None
    assert timing.rounds_ms == (1.5, 3.0, 1.5, 3.0)
    wrong = Outcome("decomposed", "forward", Verdict(error="wrong"))
    assert [slowed(each, 1.5) for each in together([[*turns], [wrong]])] == [wrong]


def test_ratios_are_of_the_same_round(make_row: object) -> None:
    over, under = (make_row(rounds_ms=rounds, median_ms=1.0) for rounds in ((2.0, 8.0, 30.0), (1.0, 2.0, 10.0)))  # type: ignore[operator]
    assert ratio_of(over, under) == median((2.0, 4.0, 3.0))
