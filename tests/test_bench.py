"""pytest-benchmark timings of the cases that `bench/regress.py` tracks: the device time of the slowest rank.

`nox -s bench` runs and saves these; arguments after -- go to pytest (`--benchmark-compare`). `test_variant`: seconds,
each with its row. `test_ratio`: ratios of two times of one round, in which all variants took turns; `nox -s regress`
compares them with a baseline. On a shared machine, times of two runs differ more than the code does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from fusedtp.bench.intervals import Timing
from fusedtp.bench.jobs import Job
from fusedtp.bench.machine import describe
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.regress import Tracked, cases, keys_of, num_gpus, planted, samples_of, schedule_means, schedules
from fusedtp.bench.store import Measurement, Outcome, rows_of
from fusedtp.bench.sweep import rank_environment, run_job

pytest.importorskip("pytest_benchmark")
pytestmark = pytest.mark.bench

# A launch goes through all cases PASSES times, with ROUNDS rounds each.
PASSES, ROUNDS = 4, 8
# Seconds that a call waits for its ranks on a busy machine.
CALL_SECONDS = 300.0
LAUNCHES = int(os.environ.get("FUSEDTP_LAUNCHES", "1"))
GPUS = num_gpus()
SCHEDULES = schedules(GPUS)
VARIANTS = ("matmul", *SCHEDULES)
RATIOS = keys_of(cases(GPUS), SCHEDULES)
KEYS = [*RATIOS, *schedule_means(dict.fromkeys(RATIOS, 1.0)), "matmul"]
# For each case its rows by variant.
Launched = dict[Tracked, dict[str, Measurement]]

# A timer that advances only by the times that ranks have measured.
STOPWATCH = {"seconds": 0.0}


def stopwatch() -> float:
    return STOPWATCH["seconds"]


def together(turns: Sequence[Outcome]) -> Outcome:
    """Return one outcome of all rounds, or the first wrong outcome."""
    wrong = [outcome for outcome in turns if outcome.timing is None]
    rounds_ms = [ms for outcome in turns if outcome.timing for ms in outcome.timing.rounds_ms]
    return wrong[0] if wrong else replace(turns[0], timing=Timing.of(rounds_ms))


def launch() -> Launched:
    """Return rows of every case on fresh ranks. The tests' pool fills all fresh memory, which takes time."""
    tracked, plant = cases(GPUS), planted(os.environ.get("FUSEDTP_PLANT", ""), SCHEDULES)
    num_ranks = max(each.case.world_size for each in tracked)
    found: dict[Tracked, list[list[Outcome]]] = {each: [] for each in tracked}
    with RankPool(num_ranks, timeout=CALL_SECONDS, env=rank_environment(GPUS, num_ranks)) as pool:
        for each in tracked * PASSES:
            job = Job(each.case, VARIANTS, True, rounds=ROUNDS, directions=(each.direction,), num_gpus=GPUS)
            found[each].append(pool.run(run_job, job, plant, world_size=each.case.world_size)[0])
    return {
        each: {row.variant: row for row in rows_of(each.case, map(together, zip(*turns, strict=True)), describe())}
        for each, turns in found.items()
    }


@pytest.fixture(scope="module")
def launches() -> list[Launched]:
    found = [launch() for _ in range(LAUNCHES)]
    all_rows = [row for launched in found for rows in launched.values() for row in rows.values()]
    wrong = [f"{row.variant}: {row.gate}" for row in all_rows if row.failed]
    assert not wrong
    return found


@pytest.fixture(scope="module")
def samples(launches: list[Launched]) -> dict[str, list[float]]:
    """Return samples of ratios, and of the matmul alone in seconds."""

    def seconds(launched: Launched) -> dict[Tracked, dict[str, list[float]]]:
        return {
            each: {name: [ms / 1e3 for ms in row.rounds_ms] for name, row in rows.items()}
            for each, rows in launched.items()
        }

    return samples_of(list(map(seconds, launches)), SCHEDULES)


def replay(benchmark: Any, values: Sequence[float]) -> None:
    """Replay measured times as rounds of pytest-benchmark."""
    left = iter(values)

    def one_round() -> None:
        STOPWATCH["seconds"] += next(left)

    benchmark.pedantic(one_round, rounds=len(values), iterations=1)
    assert benchmark.stats is None or benchmark.stats.stats.data == pytest.approx(list(values))


@pytest.mark.benchmark(timer=stopwatch)
@pytest.mark.parametrize(
    ("tracked", "variant"), [pytest.param(each, name, id=each.id(name)) for each in cases(GPUS) for name in VARIANTS]
)
def test_variant(benchmark: Any, launches: list[Launched], tracked: Tracked, variant: str) -> None:
    rows = [launched[tracked][variant] for launched in launches]
    benchmark.group = f"{tracked.case}, {tracked.direction}"
    benchmark.extra_info |= asdict(rows[-1])
    replay(benchmark, [ms / 1e3 for row in rows for ms in row.rounds_ms])


@pytest.mark.benchmark(timer=stopwatch, group="ratios of times in one round")
@pytest.mark.parametrize("key", KEYS)
def test_ratio(benchmark: Any, samples: dict[str, list[float]], key: str) -> None:
    replay(benchmark, samples[key])
