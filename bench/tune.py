"""`fusedtp tune`: measure a few sizes of every op by every schedule on this machine, for `schedule="auto"`.

Ranks of our own time the schedules by the sweep's protocol, each result checked before it is timed. On a CPU the
machine's rates are measured too, from collectives of next to nothing and of a few MB, as the cost model needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp import blas, functional, reference
from fusedtp.calls.tuning import Sample
from fusedtp.shards import even_sizes

from .timing import measure

Shape = tuple[int, int, int]

MATMULS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
# Global M, N, K: a small, a middling and a large one, and one with much to send for what it multiplies.
_SQUARE: tuple[Shape, ...] = ((64, 256, 256), (256, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048))
CPU_SHAPES: dict[str, tuple[Shape, ...]] = {
    "all_gather_matmul": (*_SQUARE, (4096, 512, 4096)),
    "matmul_reduce_scatter": (*_SQUARE, (4096, 4096, 512)),
    "matmul_all_reduce": (*_SQUARE, (4096, 4096, 512)),
}
# The MLP of a 70B model at few and many tokens.
_TOKENS = (16, 256, 2048, 8192)
GPU_SHAPES: dict[str, tuple[Shape, ...]] = {
    "all_gather_matmul": tuple((tokens, 28672, 8192) for tokens in _TOKENS),
    "matmul_reduce_scatter": tuple((tokens, 8192, 28672) for tokens in _TOKENS),
    "matmul_all_reduce": tuple((tokens, 8192, 28672) for tokens in _TOKENS),
}
COLLECTIVE_SHAPES = ((64, 64), (1024, 1024), (4096, 2048))
# A check compares so many rows: tests check all, this only refuses to time what is broken here.
_CHECKED_ROWS = 16


class Operands:
    """One rank's operands of an op at one size: y[M, N] = x[M, K] @ w[N, K].T, drawn alike on every rank."""

    def __init__(self, op: str, shape: Shape, dtype: torch.dtype, group: ProcessGroup, device: torch.device) -> None:
        self.op, self.group, self.dtype = op, group, dtype
        rank, n = group.rank(), group.size()
        M, N, K = shape
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(M, K, generator=generator).to(dtype)
        w = torch.randn(N, K, generator=generator).to(dtype)
        self.sizes, n_sizes, k_sizes = (even_sizes(length, n) for length in (M, N, K))
        own, first = self.sizes[rank], sum(self.sizes[:rank])
        if op == "all_gather_matmul":
            self.x, self.w = x[first : first + own].to(device), reference.chunk(w, 0, rank, n_sizes).to(device)
            left, right, begin, rows = x, reference.chunk(w, 0, rank, n_sizes), 0, M
            self.k_sizes: tuple[int, ...] = (K,)
        else:
            self.x, self.w = (reference.chunk(each, 1, rank, k_sizes).contiguous().to(device) for each in (x, w))
            left, right, self.k_sizes = x, w, k_sizes
            begin, rows = (first, own) if op == "matmul_reduce_scatter" else (0, M)
        self.rows = torch.linspace(0, rows - 1, min(rows, _CHECKED_ROWS)).long()
        self.left, self.right = left[begin + self.rows], right
        self.whole = x.to(device) if op == "all_gather_matmul" else self.x

    def runner(self, schedule: str) -> Callable[[], Tensor]:
        x, w, group, sizes = self.x, self.w, self.group, self.sizes
        if schedule == "matmul":
            return lambda: blas.mm(self.whole, w.t())
        if self.op == "all_gather_matmul":
            return lambda: functional.all_gather_linear(x, w, group=group, sizes=sizes, schedule=schedule)
        if self.op == "matmul_reduce_scatter":
            return lambda: functional.linear_reduce_scatter(x, w, group=group, sizes=sizes, schedule=schedule)
        return lambda: functional.linear_all_reduce(x, w, group=group, schedule=schedule)

    def check(self, out: Tensor, schedule: str) -> None:
        """AssertionError where some rows of `out` are not the unsharded product's."""
        expected = reference.matmul(self.left, self.right.t())
        # A backend may sum in the input's dtype.
        sum_dtype = self.dtype if schedule == "unfused" else torch.float32
        options: dict[str, Any] = {"k_sizes": self.k_sizes, "sum_dtype": sum_dtype}
        allowed = reference.bound(self.left, self.right.t(), self.dtype, **options)
        reference.check(out.cpu()[self.rows], expected, allowed, f"{self.op} by {schedule}")


def agreed(group: ProcessGroup, wrong: str) -> str:
    """The first rank's complaint that there is, the same on every rank."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, wrong, group=group)
    return next((text for text in everyone if text), "")


def time_matmul(
    group: ProcessGroup, op: str, shape: Shape, dtype: str, schedules: Sequence[str], seconds: float
) -> tuple[dict[str, float], str]:
    """(median ms by schedule and of the matmul alone, what was refused); collective."""
    device = device_of_rank()
    with torch.no_grad():
        operands = Operands(op, shape, getattr(torch, dtype), group, device)
        runners, refused = {"matmul": operands.runner("matmul")}, []
        for schedule in schedules:
            wrong = ""
            try:
                results = [operands.runner(schedule)() for _ in range(2)]
                for out in results:
                    operands.check(out, schedule)
            except Exception as error:
                wrong = f"{op} {shape} {dtype} on {group.size()} by {schedule}: {error}"
            if wrong := agreed(group, wrong):
                refused.append(wrong)
            else:
                runners[schedule] = operands.runner(schedule)
        timings = measure(runners, group, device, seconds=seconds)
    return {name: timing.median_ms for name, timing in timings.items()}, "\n".join(refused)


def time_collectives(
    group: ProcessGroup, shape: tuple[int, int], dtype: str, schedules: Sequence[str], seconds: float
) -> dict[str, dict[str, float]]:
    """Median ms of each collective of a tensor [rows, cols] by schedule; collective."""
    device, n = device_of_rank(), group.size()
    rows, cols = shape
    shard = torch.randn(rows // n, cols, device=device).to(getattr(torch, dtype))
    whole = torch.randn(rows // n * n, cols, device=device).to(getattr(torch, dtype))
    runners: dict[str, Callable[[], Tensor]] = {}
    for schedule in schedules:
        for op, x in zip(COLLECTIVES, (shard, whole, whole), strict=True):
            run: Callable[..., Tensor] = getattr(functional, op)
            runners[f"{op} {schedule}"] = partial(run, x, group=group, schedule=schedule)
    with torch.no_grad():
        timings = measure(runners, group, device, seconds=seconds)
    times: dict[str, dict[str, float]] = {op: {} for op in COLLECTIVES}
    for name, timing in timings.items():
        op, schedule = name.split()
        times[op][schedule] = timing.median_ms
    return times


def host_ms(group: ProcessGroup, seconds: float) -> float:
    """An op's cost on the host: one that has nobody to send to, and next to nothing to copy; collective."""
    groups = [dist.new_group([dist.get_global_rank(group, rank)]) for rank in range(group.size())]
    x, alone = torch.zeros(8, 8), groups[group.rank()]
    runner = {"host": lambda: functional.all_gather(x, group=alone, schedule="unfused")}
    timings = measure(runner, group, torch.device("cpu"), seconds=seconds)
    dist.barrier(group=group)
    dist.destroy_process_group(alone)
    return timings["host"].median_ms


def device_of_rank() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def rates_of(
    n: int, host: float, small: Mapping[str, float], large: Mapping[str, float], shapes: Sequence[tuple[int, int]],
    tflops: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
    """`hardware.measured_cpu`'s arguments from the ms of an all-gather of float32 at two shapes, by schedule.

    In place a rank copies its share once to publish it and all of the result out of the arenas, each byte read and
    written; the backend sends the others' shares.
    """
    first, last = (rows * cols * 4 for rows, cols in shapes)
    grown = {name: max(large[name] - small[name], 1e-6) * 1e3 for name in ("decomposed", "unfused")}  # us
    return {
        "matrix_tflops": dict(tflops),
        "memory_gbps": 2 * (1 + 1 / n) * (last - first) / grown["decomposed"] / 1e3,
        "host_us": host * 1e3,
        "flag_us": max(0.0, small["decomposed"] - host) * 1e3,
        "collective_start_us": small["unfused"] * 1e3,
        "collective_gbps": (n - 1) / n * (last - first) / grown["unfused"] / 1e3,
    }


def sample_of(op: str, shape: Shape, dtype: str, n: int, ms: Mapping[str, float]) -> Sample:
    """What a table keeps of a matmul's times."""
    M, N, K = shape
    rows, cols, third = (M, K, -(-N // n)) if op == "all_gather_matmul" else (M, N, -(-K // n))
    return Sample(op, n, dtype, rows, cols, third, {name: time for name, time in ms.items() if name != "matmul"})


def tune(
    world_sizes: Sequence[int], dtypes: Sequence[str], *, seconds: float, shapes: Mapping[str, Sequence[Shape]] | None,
    num_gpus: int, said: Callable[[str], None],
) -> tuple[list[Sample], dict[int, dict[str, Any]]]:  # fmt: skip
    """Samples and rates measured on ranks started here; `said` hears of every step and of what was refused."""
    from .ranks import RankPool
    from .sweep import rank_environment

    schedules = ("unfused", "decomposed", "fused") if num_gpus else ("unfused", "decomposed")
    shapes = shapes or (GPU_SHAPES if num_gpus else CPU_SHAPES)
    samples: list[Sample] = []
    rates: dict[int, dict[str, Any]] = {}
    with RankPool(max(world_sizes), timeout=300, env=rank_environment(num_gpus, max(world_sizes))) as pool:
        for n in world_sizes:
            tflops: dict[str, float] = {}
            for dtype in dtypes:
                collectives = []
                for shape in COLLECTIVE_SHAPES:
                    rows, cols = shape[0] // n * n, shape[1]
                    said(f"collectives of {rows}x{cols} {dtype} on {n}")
                    found = pool.run(time_collectives, (rows, cols), dtype, schedules, seconds, world_size=n)[0]
                    collectives.append(found)
                    samples += [Sample(op, n, dtype, rows, cols, 0, ms) for op, ms in found.items()]
                for op in MATMULS:
                    for sizes in shapes[op]:
                        said(f"{op} {'x'.join(map(str, sizes))} {dtype} on {n}")
                        ms, refused = pool.run(time_matmul, op, sizes, dtype, schedules, seconds, world_size=n)[0]
                        if refused:
                            said(f"refused: {refused}")
                        M, N, K = sizes
                        tflops[dtype] = max(tflops.get(dtype, 0.0), 2 * M * N * K / n / ms["matmul"] / 1e9)
                        if "unfused" in ms and len(ms) > 2:
                            samples.append(sample_of(op, sizes, dtype, n, ms))
                if not num_gpus and dtype == dtypes[0]:
                    ends = [(rows // n * n, cols) for rows, cols in (COLLECTIVE_SHAPES[0], COLLECTIVE_SHAPES[-1])]
                    gathers = [collectives[i]["all_gather"] for i in (0, -1)]
                    host = pool.run(host_ms, seconds, world_size=n)[0]
                    itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
                    rates[n] = rates_of(n, host, gathers[0], gathers[1], ends, tflops)
                    for name in ("memory_gbps", "collective_gbps"):
                        rates[n][name] *= itemsize / 4
                elif not num_gpus:
                    rates[n]["matrix_tflops"] |= tflops
    return samples, rates
