"""`fusedtp tune`: measure a few sizes of every op by every schedule on this machine, for `schedule="auto"`.

Matmuls and collectives are jobs of the sweep, each checked before it is timed. The table keeps quartiles, and by how
much each schedule is slower than the fastest beyond noise. On a CPU the rates for the cost model are measured too, from
collectives of a few bytes and of a few MB.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fusedtp import collectives
from fusedtp.choose.tuning import Sample
from fusedtp.cost.hardware import cpu_rates
from fusedtp.op import ALL_GATHER, ALL_GATHER_MATMUL
from fusedtp.sharding.plan import ITEMSIZE

from .cases import COLLECTIVES, EVERY_FLOAT8, OPS, SHAPES, SHORT_DTYPES, Case, Shape, schedules_here, size_of
from .intervals import Timing, ratio
from .jobs import Job, estimate
from .ranks import RankPool
from .store import PASSED
from .sweep import rank_environment, run_on
from .timing import measure

# A small, a medium and a large size, and one with much communication for its arithmetic.
CPU_SHAPES: dict[str, tuple[Shape, ...]] = {
    op: ((64, 256, 256), *(SHAPES[name][op][0] for name in ("small", "medium", "square", "comm"))) for op in OPS
}
# MLP of a 70B model at few and many tokens.
GPU_SHAPES: dict[str, tuple[Shape, ...]] = {
    op: tuple(
        (tokens, 28672, 8192) if op == ALL_GATHER_MATMUL.name else (tokens, 8192, 28672)
        for tokens in (16, 256, 2048, 8192)
    )
    for op in OPS
}
COLLECTIVE_SHAPES = ((64, 64), (1024, 1024), (4096, 2048))


def host_ms(group: ProcessGroup, seconds: float) -> float:
    """Return an op's cost on the host, from an op that sends nothing and copies a few bytes; collective."""
    groups = [dist.new_group([dist.get_global_rank(group, rank)]) for rank in range(group.size())]
    x, alone = torch.zeros(8, 8), groups[group.rank()]
    runner = {"host": lambda: collectives.all_gather(x, group=alone, schedule="unfused")}
    timings = measure(runner, group, torch.device("cpu"), seconds=seconds)
    dist.barrier(group=group)
    dist.destroy_process_group(alone)
    return timings["host"].median_ms


def kept(timings: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    """Return a `Sample`'s medians, quartiles and ratios to the fastest, of schedules that took turns."""
    quartiles = {name: np.quantile(each.rounds_ms, (0.25, 0.75)).tolist() for name, each in timings.items()}
    fastest = min(timings.values(), key=lambda each: each.median_ms)
    slower = {name: 1.0 if each is fastest else ratio(each, fastest).low for name, each in timings.items()}
    return {
        "ms": {name: each.median_ms for name, each in timings.items()},
        "p25": {name: low for name, (low, _) in quartiles.items()},
        "p75": {name: high for name, (_, high) in quartiles.items()},
        "slower": slower,
    }


def sample_of(case: Case, timings: Mapping[str, Timing]) -> Sample:
    """Return a case's entry in the table."""
    times = {name: timing for name, timing in timings.items() if name != "matmul"}
    op, n, dtype, rows, cols, third = size_of(case)
    return Sample(op, n, dtype, rows, cols, third, **kept(times))


def steps(world_sizes: Sequence[int], dtypes: Sequence[str], num_gpus: int) -> Iterator[Case]:
    """Yield the cases to measure, in order. float8 has no collectives alone."""
    for n, dtype in itertools.product(world_sizes, dtypes):
        if dtype not in EVERY_FLOAT8:
            shapes = [(rows // n * n, cols) for rows, cols in COLLECTIVE_SHAPES]
            yield from (Case(op, rows, cols, cols, dtype, n) for rows, cols in shapes for op in COLLECTIVES)
        for op, sizes in (GPU_SHAPES if num_gpus else CPU_SHAPES).items():
            yield from (Case(op, *shape, dtype, n) for shape in sizes)


def job_of(case: Case, seconds: float, num_gpus: int) -> Job:
    """Return the job of a case: each schedule that is timed here, and of a matmul the library's alone."""
    bounds = ("matmul",) if case.op in OPS else ()
    return Job(case, (*bounds, *schedules_here(num_gpus)), True, seconds, num_gpus=num_gpus)


def about(case: Case, seconds: float, num_gpus: int) -> tuple[str, float]:
    """Return a case in words, and about how many seconds it takes."""
    op, num_ranks, dtype, rows, cols, third = size_of(case)
    other = f", other {third}" * bool(third)
    told = f"{op} {rows} x {cols}{other}, {SHORT_DTYPES.get(dtype, dtype)} on {num_ranks}"
    return told, estimate(job_of(case, seconds, num_gpus))


def tune(
    planned: Sequence[Case], *, seconds: float, num_gpus: int, said: Callable[[str], None],
    done: Callable[[list[Sample]], object],
) -> dict[int, dict[str, Any]]:  # fmt: skip
    """Measure on ranks started here, and return the rates, on CPUs.

    `said` is called for each refused variant, `done` after each step with its samples.
    """
    most = max(case.world_size for case in planned)
    rates: dict[int, dict[str, Any]] = {}
    # By number of ranks: the library's rate in each dtype, and (bytes, ms by schedule) of all-gathers.
    tflops: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    gathers: dict[int, list[tuple[int, Mapping[str, float]]]] = defaultdict(list)
    with RankPool(most, timeout=300, env=rank_environment(num_gpus, most)) as pool:
        for case in planned:
            n, found = case.world_size, time_case(pool, job_of(case, seconds, num_gpus), said)
            schedules = found.keys() - {"matmul"}
            if "matmul" in found:
                rate = 2 * case.M * case.N * case.K / n / found["matmul"].median_ms / 1e9
                tflops[n][case.dtype] = max(rate, tflops[n][case.dtype])
            elif case.op == ALL_GATHER.name and len(schedules) > 1:
                medians = {name: each.median_ms for name, each in found.items()}
                gathers[n].append((case.M * case.N * ITEMSIZE[case.dtype], medians))
            done([sample_of(case, found)] if "unfused" in schedules and len(schedules) > 1 else [])
        for n, found_of in gathers.items() if not num_gpus else ():
            (small, *_), (*_, large) = 2 * [sorted(found_of, key=lambda each: each[0])]
            host = pool.run(host_ms, seconds, world_size=n)[0]
            rates[n] = cpu_rates(n, host, small[1], large[1], (small[0], large[0]), tflops[n])
    return rates


def time_case(pool: RankPool, job: Job, said: Callable[[str], None]) -> dict[str, Timing]:
    """Return the times of each variant that passes; `said` is called for the others, also if their ranks fail."""
    found = {}
    outcomes = run_on(pool, job, {})
    if any(outcome.verdict and outcome.verdict.error for outcome in outcomes):
        # A workspace that lost a peer refuses further use.
        pool.close()
    for outcome in outcomes:
        if outcome.gate != PASSED:
            said(f"refused: {outcome.variant}: {outcome.gate}")
        elif outcome.timing is not None:
            found[outcome.variant] = outcome.timing
    return found
