"""pytest-benchmark for the cases that `bench/regress.py` tracks: ratios of two times of one round, a number a launch.

`nox -s bench` runs these; arguments after -- go to pytest (`--benchmark-save=NAME`, `--benchmark-compare`,
`--benchmark-compare-fail=median:10%`, `-k all_gather`). A "round" in its table is a launch on fresh ranks: the median
of ratios over all rounds in which the variants took turns. Times on a shared machine differ more from run to run than
the code does, so they are in `extra_info` only, with their rows. `nox -s regress` judges a run by a saved one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from fusedtp.bench.intervals import Timing
from fusedtp.bench.jobs import Job
from fusedtp.bench.machine import describe
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.regress import LAUNCHES as CHECKED
from fusedtp.bench.regress import Tracked, cases, keys_of, num_gpus, planted, schedules
from fusedtp.bench.store import Measurement, Outcome, rows_of
from fusedtp.bench.sweep import rank_environment, run_job

pytest.importorskip("pytest_benchmark")
pytestmark = pytest.mark.bench

# A launch goes through all cases PASSES times, with ROUNDS rounds each.
PASSES, ROUNDS = 4, 8
# Seconds that a call waits for its ranks on a busy machine.
CALL_SECONDS = 300.0
LAUNCHES = int(os.environ.get("FUSEDTP_LAUNCHES", CHECKED))
GPUS = num_gpus()
SCHEDULES = schedules(GPUS)
VARIANTS = ("matmul", *SCHEDULES)
KEYS = keys_of(cases(GPUS), SCHEDULES)
# For each case its rows by variant.
Launched = dict[Tracked, dict[str, Measurement]]

# A timer that advances only by what ranks have measured.
STOPWATCH = {"seconds": 0.0}


def stopwatch() -> float:
    return STOPWATCH["seconds"]


def together(turns: Sequence[Outcome], plant: Mapping[str, float]) -> Outcome:
    """Return one outcome of all rounds, as much slower as planted, or the first wrong outcome."""
    wrong = [outcome for outcome in turns if outcome.timing is None]
    factor = plant.get(turns[0].variant, 1.0)
    rounds_ms = [factor * ms for outcome in turns if outcome.timing for ms in outcome.timing.rounds_ms]
    return wrong[0] if wrong else replace(turns[0], timing=Timing.of(rounds_ms))


def launch(tracked: Sequence[Tracked]) -> Launched:
    """Return rows of these cases on fresh ranks. The tests' pool fills all fresh memory, which takes time."""
    plant = planted(os.environ.get("FUSEDTP_PLANT", ""), SCHEDULES)
    num_ranks = max(each.case.world_size for each in tracked)
    found: dict[Tracked, list[list[Outcome]]] = {each: [] for each in tracked}
    with RankPool(num_ranks, timeout=CALL_SECONDS, env=rank_environment(GPUS, num_ranks)) as pool:
        for each in (*tracked,) * PASSES:
            job = Job(each.case, VARIANTS, True, rounds=ROUNDS, directions=(each.direction,), num_gpus=GPUS)
            found[each].append(pool.run(run_job, job, world_size=each.case.world_size)[0])
    return {
        each: {
            row.variant: row
            for row in rows_of(
                each.case, [together(outcomes, plant) for outcomes in zip(*turns, strict=True)], describe()
            )
        }
        for each, turns in found.items()
    }


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest) -> list[Launched]:
    """Return LAUNCHES launches of the cases that were selected, for example by -k."""
    chosen = {KEYS[item.callspec.params["key"]][0] for item in request.session.items if hasattr(item, "callspec")}
    found = [launch([each for each in cases(GPUS) if each in chosen]) for _ in range(LAUNCHES)]
    all_rows = [row for launched in found for rows in launched.values() for row in rows.values()]
    wrong = [f"{row.variant}: {row.gate}" for row in all_rows if row.failed]
    assert not wrong
    return found


def ratio_of(over: Measurement, under: Measurement) -> float:
    """Return the median of the ratios of each round."""
    return median(mine / its for mine, its in zip(over.rounds_ms, under.rounds_ms, strict=True))


@pytest.mark.benchmark(timer=stopwatch, group="ratios of times in one round")
@pytest.mark.parametrize("key", KEYS)
def test_ratio(benchmark: Any, launches: list[Launched], key: str) -> None:
    each, schedule, reference = KEYS[key]
    rows = [launched[each] for launched in launches]
    values = [ratio_of(row[schedule], row[reference]) for row in rows]
    row = rows[-1][schedule]
    benchmark.extra_info |= {"matmul_ms": median(of["matmul"].median_ms or 0.0 for of in rows)}
    benchmark.extra_info |= {"median_ms": row.median_ms, "path": row.path, "error_ratio": row.error_ratio}
    left = iter(values)

    def one_round() -> None:
        STOPWATCH["seconds"] += next(left)

    benchmark.pedantic(one_round, rounds=len(values), iterations=1)
    assert benchmark.stats is None or benchmark.stats.stats.data == pytest.approx(values)
