"""`fusedtp tune`: measure a few sizes of every op by every schedule on this machine, for `schedule="auto"`.

Matmuls are jobs of the sweep, each result checked before it is timed; collectives alone take turns by its clock. Of
each time the quartiles are kept, and by how much a schedule is slower than the fastest beyond the noise of both. On a
CPU the machine's rates are measured too, from collectives of next to nothing and of a few MB, as the cost model needs
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp import collectives
from fusedtp.calls.tuning import Sample
from fusedtp.op import ALL_GATHER, ALL_GATHER_MATMUL
from fusedtp.op import OPS as TABLE
from fusedtp.sharding.plan import ITEMSIZE

from .cases import EVERY_FLOAT8, OPS, SHAPES, Case, Shape
from .intervals import Timing, ratio
from .jobs import Job, seconds_of
from .operands import device_here
from .ranks import RankPool
from .store import PASSED
from .sweep import rank_environment, run_job
from .timing import measure

COLLECTIVES = tuple(name for name, op in TABLE.items() if not op.multiplies)
# A small, a middling and a large one, and one with much to send for what it multiplies.
CPU_SHAPES: dict[str, tuple[Shape, ...]] = {
    op: ((64, 256, 256), *(SHAPES[name][op][0] for name in ("small", "medium", "square", "comm"))) for op in OPS
}
# The MLP of a 70B model at few and many tokens.
GPU_SHAPES: dict[str, tuple[Shape, ...]] = {
    op: tuple(
        (tokens, 28672, 8192) if op == ALL_GATHER_MATMUL.name else (tokens, 8192, 28672)
        for tokens in (16, 256, 2048, 8192)
    )
    for op in OPS
}
COLLECTIVE_SHAPES = ((64, 64), (1024, 1024), (4096, 2048))


def time_collectives(
    group: ProcessGroup, shape: tuple[int, int], dtype: str, schedules: Sequence[str], seconds: float
) -> dict[str, dict[str, Timing]]:
    """Return the times of each collective of a tensor [rows, cols] by schedule; collective."""
    device, (rows, cols) = device_here(), shape
    whole = torch.randn(rows, cols, device=device).to(getattr(torch, dtype))
    runners: dict[str, Callable[[], Tensor]] = {}
    for op in COLLECTIVES:
        x = whole[: rows // group.size()] if TABLE[op].kind == "gather" else whole
        call: Callable[..., Tensor] = getattr(collectives, op)
        runners |= {f"{op} {name}": partial(call, x, group=group, schedule=name) for name in schedules}
    with torch.no_grad():
        timings = measure(runners, group, device, seconds=seconds)
    return {op: {name: timings[f"{op} {name}"] for name in schedules} for op in COLLECTIVES}


def host_ms(group: ProcessGroup, seconds: float) -> float:
    """Return an op's cost on the host: one that has nobody to send to, and next to nothing to copy; collective."""
    groups = [dist.new_group([dist.get_global_rank(group, rank)]) for rank in range(group.size())]
    x, alone = torch.zeros(8, 8), groups[group.rank()]
    runner = {"host": lambda: collectives.all_gather(x, group=alone, schedule="unfused")}
    timings = measure(runner, group, torch.device("cpu"), seconds=seconds)
    dist.barrier(group=group)
    dist.destroy_process_group(alone)
    return timings["host"].median_ms


def rates_of(
    n: int, host: float, small: Mapping[str, float], large: Mapping[str, float], num_bytes: Sequence[int],
    tflops: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
    """`hardware.measured_cpu`'s arguments from the ms of an all-gather of two numbers of bytes, by schedule.

    In place a rank copies its share once to publish it and all of the result out of the arenas, each byte read and
    written; the backend sends the others' shares.
    """
    more = num_bytes[1] - num_bytes[0]
    grown = {name: max(large[name] - small[name], 1e-6) * 1e3 for name in ("decomposed", "unfused")}  # us
    return {
        "matrix_tflops": dict(tflops),
        "memory_gbps": 2 * (1 + 1 / n) * more / grown["decomposed"] / 1e3,
        "host_us": host * 1e3,
        "flag_us": max(0.0, small["decomposed"] - host) * 1e3,
        "collective_start_us": small["unfused"] * 1e3,
        "collective_gbps": (n - 1) / n * more / grown["unfused"] / 1e3,
    }


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
    """Return what a table keeps of a matmul's times."""
    n, (cols, third) = case.world_size, (case.K, case.N) if case.kind == "gather" else (case.N, case.K)
    times = {name: timing for name, timing in timings.items() if name != "matmul"}
    return Sample(case.op, n, case.dtype, case.M, cols, -(-third // n), **kept(times))


def tune(
    world_sizes: Sequence[int], dtypes: Sequence[str], *, seconds: float, num_gpus: int, said: Callable[[str], None]
) -> tuple[list[Sample], dict[int, dict[str, Any]]]:
    """Return samples and rates measured on ranks started here; `said` hears of every step and of what was refused."""
    schedules = ("unfused", "decomposed", "fused") if num_gpus else ("unfused", "decomposed")
    samples: list[Sample] = []
    rates: dict[int, dict[str, Any]] = {}
    with RankPool(max(world_sizes), timeout=300, env=rank_environment(num_gpus, max(world_sizes))) as pool:
        for n in world_sizes:
            # float8 has no collectives alone, so the machine's rates are those of another dtype, if any is measured.
            for dtype in sorted(dtypes, key=EVERY_FLOAT8.__contains__):
                shapes = [] if dtype in EVERY_FLOAT8 else [(rows // n * n, cols) for rows, cols in COLLECTIVE_SHAPES]
                gathers: list[Mapping[str, float]] = []
                for rows, cols in shapes:
                    said(f"collectives of {rows}x{cols} {dtype} on {n}")
                    found = pool.run(time_collectives, (rows, cols), dtype, schedules, seconds, world_size=n)[0]
                    samples += [Sample(op, n, dtype, rows, cols, 0, **kept(each)) for op, each in found.items()]
                    gathers.append({name: each.median_ms for name, each in found[ALL_GATHER.name].items()})
                timed = [
                    time_matmul(pool, Case(op, *shape, dtype, n), schedules, seconds, num_gpus, said)
                    for op, each in (GPU_SHAPES if num_gpus else CPU_SHAPES).items() for shape in each
                ]  # fmt: skip
                samples += [sample_of(case, each) for case, each in timed if "unfused" in each and len(each) > 2]
                if num_gpus:
                    continue
                # The matmul alone is the library's: none of ours that could be refused.
                rate = max(2 * case.M * case.N * case.K / n / each["matmul"].median_ms / 1e9 for case, each in timed)
                tflops = {dtype: rate}
                if n in rates:
                    rates[n]["matrix_tflops"] |= tflops
                if n in rates or not shapes:
                    continue
                num_bytes = [rows * cols * ITEMSIZE[dtype] for rows, cols in (shapes[0], shapes[-1])]
                host = pool.run(host_ms, seconds, world_size=n)[0]
                rates[n] = rates_of(n, host, gathers[0], gathers[-1], num_bytes, tflops)
    return samples, rates


def time_matmul(
    pool: RankPool, case: Case, schedules: Sequence[str], seconds: float, num_gpus: int, said: Callable[[str], None]
) -> tuple[Case, dict[str, Timing]]:
    """Return the times of each schedule that is right, and of the matmul alone."""
    said(str(case))
    job = Job(case, ("matmul", *schedules), True, seconds, num_gpus=num_gpus)
    found = {}
    for outcome in pool.run(run_job, job, world_size=case.world_size, timeout=seconds_of(job))[0]:
        if outcome.gate != PASSED:
            said(f"refused: {outcome.variant}: {outcome.gate}")
        elif outcome.timing is not None:
            found[outcome.variant] = outcome.timing
    return case, found
