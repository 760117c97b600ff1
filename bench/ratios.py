"""pytest-benchmark for the cases that `regress` tracks: ratios of two times of one round, a number a launch.

`python -m fusedtp.bench.ratios` runs these, as `nox -s bench` does. Arguments go to pytest (`--benchmark-save=NAME`,
`--benchmark-compare`, `--benchmark-compare-fail=median:10%`, `-k all_gather`). A "round" in its table is a launch on
fresh ranks: the median of ratios over all rounds in which the variants took turns. Times on a shared machine differ
more from run to run than the code does, so they are in `extra_info` only, with their rows. `regress` judges a run by a
saved one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from fusedtp.machine import describe

from .cases import schedules_here as schedules
from .intervals import Timing
from .jobs import Job
from .ranks import RankPool
from .regress import BENCHMARKS, Tracked, cases, differences, keys_of, num_gpus, planted
from .regress import LAUNCHES as DEFAULT_LAUNCHES
from .store import Measurement, Outcome, rows_of
from .sweep import rank_environment, run_job, together

# A launch goes through all cases PASSES times, with ROUNDS rounds each.
PASSES, ROUNDS = 4, 8
# Seconds that a call waits for its ranks on a busy machine.
CALL_SECONDS = 300.0
LAUNCHES = int(os.environ.get("FUSEDTP_LAUNCHES", DEFAULT_LAUNCHES))
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


def slowed(outcome: Outcome, factor: float) -> Outcome:
    """Return an outcome whose rounds took so many times as long."""
    if outcome.timing is None:
        return outcome
    return replace(outcome, timing=Timing.of([factor * ms for ms in outcome.timing.rounds_ms]))


def launch(tracked: Sequence[Tracked]) -> Launched:
    """Return rows of these cases on fresh ranks. The tests' pool fills all fresh memory, which takes time."""
    plant = planted(os.environ.get("FUSEDTP_PLANT", ""), SCHEDULES)
    num_ranks = max(each.case.world_size for each in tracked)
    found: dict[Tracked, list[list[Outcome]]] = {each: [] for each in tracked}
    with RankPool(num_ranks, timeout=CALL_SECONDS, env=rank_environment(GPUS, num_ranks)) as pool:
        for each in (*tracked,) * PASSES:
            job = Job(each.case, VARIANTS, True, rounds=ROUNDS, directions=(each.direction,), num_gpus=GPUS)
            found[each].append(pool.run(run_job, job, world_size=each.case.world_size)[0])
    made: Launched = {}
    for each, turns in found.items():
        outcomes = [slowed(outcome, plant.get(outcome.variant, 1.0)) for outcome in together(turns)]
        made[each] = {row.variant: row for row in rows_of(each.case, outcomes, describe())}
    return made


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest) -> list[Launched]:
    """Return LAUNCHES launches of the cases that were selected, for example by -k."""
    chosen = {KEYS[item.callspec.params["key"]][0] for item in request.session.items if hasattr(item, "callspec")}
    found = [launch([each for each in cases(GPUS) if each in chosen]) for _ in range(LAUNCHES)]
    all_rows = [row for launched in found for rows in launched.values() for row in rows.values()]
    wrong = [f"{row.variant}: {row.gate}" for row in all_rows if row.failed]
    if wrong:
        pytest.fail("; ".join(wrong))
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


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_generate_machine_info() -> dict[str, Any]:
    return {name: value for name, value in asdict(describe()).items() if name not in ("commit", "dirty")}


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_generate_commit_info() -> dict[str, Any]:
    here = describe()
    return {"id": here.commit, "dirty": here.dirty}


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_scale_unit(unit: str) -> tuple[str, float] | None:
    """Show ratios unscaled."""
    return ("", 1.0) if unit == "seconds" else None


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_compare_machine_info(
    machine_info: Mapping[str, Any], compared_benchmark: Mapping[str, Any]
) -> None:
    if different := differences(compared_benchmark["machine_info"], machine_info):
        raise pytest.UsageError(f"saved on another machine: {different}")


def main(given: Sequence[str]) -> int:
    """Run this module by pytest, as its own plugin, and return the exit code. No file of the folder is read."""
    options = ("-p", BENCHMARKS, "-p", "no:cacheprovider", "-c", os.devnull, "--noconftest")
    rootdir = f"--rootdir={Path(__file__).parent}"  # the benchmarks' names begin there
    return pytest.main(["--pyargs", BENCHMARKS, *options, rootdir, *given])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
