"""Checks that are cases without a time: of two ranks that share one GPU, and of the machine (`CHECKS`).

Every rank of the group runs each function. Ranks that share a GPU are time-sliced, so nothing is timed. On a machine
without a GPU the kernels are interpreted.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import reference
from fusedtp.machine import nvml_of
from fusedtp.op import OPS as TABLE
from fusedtp.op import Op
from fusedtp.reference import accumulate_in_float32
from fusedtp.shards import even_sizes
from fusedtp.workspaces import registry

from . import store
from .cases import Case
from .operands import Operands, Results, Runner, Workload, device_here, passes
from .problem import Problem
from .providers import Missing

# M, N, K: one tile and less; sizes that are no multiples of tiles; several waves of tiles. A dry run has the first.
SIZES = ((64, 48, 40), (300, 264, 200), (1024, 1536, 512))
TINY = (21, 18, 14)
LAYERS = {
    "all_gather_linear": "all_gather_matmul", "linear_reduce_scatter": "matmul_reduce_scatter",
    "linear_all_reduce": "matmul_all_reduce",
}  # fmt: skip
# Timeouts: of each wait in a kernel, far below the limit of a check; and of the wait for a missing peer.
WAIT_SECONDS, MISSING_SECONDS = 20.0, 2.0


def prepare() -> torch.device:
    """Make fresh memory NaN and the library's matmuls accumulate in float32, as the derived bound assumes."""
    accumulate_in_float32()
    # Only deterministic mode makes the allocator fill memory; "warn" turns the mode's errors into warnings.
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    registry.set_timeout(WAIT_SECONDS)
    return device_here()


def algorithms(op: Op, schedule: str) -> tuple[str, ...]:
    """Return the algorithms of an op to check: a ring is a kernel, and a process group picks its own."""
    return tuple(each for each in op.algorithms if each != "ring" or schedule == "fused") or ("auto",)


def _leaf(x: Tensor, device: torch.device) -> Tensor:
    return x.detach().clone().to(device).requires_grad_()


def layer(
    group: ProcessGroup, op: str, schedule: str, dtype: str, size: tuple[int, int, int], producer: str = "auto"
) -> str:
    """Check a layer with its gradients by every algorithm, twice in a row on one workspace; return the producer."""
    device, row = prepare(), TABLE[LAYERS[op]]
    for seed in range(2):
        problem = Problem(Case(row.name, *size, dtype, group.size(), seed), group, device)
        for algorithm in algorithms(row, schedule):
            given = {"algorithm": algorithm} if row.kind == "all_reduce" else {"producer": producer}
            call = problem.linear(group, schedule=schedule, **given)
            problem.check(schedule, passes(call, problem.x, problem.w, problem, "both")(), "both")
    registry.get(group, device).check()
    path = fusedtp.last_path()
    fusedtp.destroy()
    return "" if path is None else path.producer


def copies(group: ProcessGroup, size: tuple[int, int, int]) -> None:
    """Check layers in which rank 0 copies gathered rows and the others push them, then all copy."""
    for everybody in (False, True):
        producer = "copy" if everybody or group.rank() == 0 else "push"
        for op in LAYERS:
            layer(group, op, "fused", "bfloat16", size, producer)
        x = torch.ones(4, 8, device=prepare())
        fusedtp.all_gather(x, group=group, schedule="fused", producer=producer)
        path = fusedtp.last_path()
        assert path is not None
        assert path.producer == producer, f"gathered by {path.producer}, not by {producer}"
    fusedtp.destroy()


def collectives(group: ProcessGroup, dtype: str, size: tuple[int, int]) -> None:
    """Check every collective by every algorithm: bit for bit, or within the bound and alike in two runs."""
    device, rank, sizes = prepare(), group.rank(), even_sizes(size[0], group.size())
    random = torch.Generator().manual_seed(size[0])
    terms = [torch.randn(size, generator=random).to(getattr(torch, dtype)) for _ in sizes]
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        for algorithm in algorithms(TABLE[name], "fused"):
            x, expected = terms[rank], reference.total(terms)
            # A ring sends its running sum in the operands' dtype.
            bound = reference.total_bound(terms, x.dtype, sum_dtype=x.dtype if algorithm == "ring" else torch.float32)
            given: dict[str, Any] = {"algorithm": algorithm} if name == "all_reduce" else {"sizes": sizes}
            if name == "all_gather":
                x, expected = reference.chunk(terms[0], 0, rank, sizes), terms[0].double()
                bound = torch.zeros_like(expected)
            elif name == "reduce_scatter":
                expected, bound = (reference.chunk(each, 0, rank, sizes) for each in (expected, bound))
            first, again = (
                getattr(fusedtp, name)(x.to(device), group=group, schedule="fused", **given).cpu() for _ in range(2)
            )
            reference.check(first, expected, bound, f"{name} {algorithm}")
            assert torch.equal(first, again), f"{name} {algorithm}: other bits in a second run"
    fusedtp.destroy()


def missing(group: ProcessGroup) -> str:
    """Check that a rank raises `PeerTimeout` with the number of a missing peer; return the message."""
    device, said = prepare(), ""
    x = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
    fusedtp.all_reduce(x, group=group, schedule="fused")
    registry.get(group, device).check()
    registry.set_timeout(MISSING_SECONDS)
    if group.rank() == 0:
        try:
            fusedtp.all_reduce(x, group=group, schedule="fused")
            registry.get(group, device).check()
        except fusedtp.PeerTimeout as error:
            said = str(error)
        assert "rank 1" in said, f"rank 1 did not come, and this was said: {said!r}"
    # A barrier of the backend keeps the peer alive until rank 0's timeout.
    dist.barrier(group=group)
    fusedtp.destroy()
    return said


def trees(group: ProcessGroup, dtype: str, size: tuple[int, int, int]) -> str:
    """Check that sums in the order of a tree equal those of one rank bit for bit, forward and backward."""
    device, count, n, rank = prepare(), 0, group.size(), group.rank()
    alone, _ = dist.new_subgroups(1)
    bias = torch.randn(size[1], generator=torch.Generator().manual_seed(1)).to(device, getattr(torch, dtype))
    for name, algorithm in (
        ("all_gather_linear", ""),
        ("linear_reduce_scatter", ""),
        ("linear_all_reduce", "one_shot"),
        ("linear_all_reduce", "two_shot"),
    ):
        whole = Operands(Case(LAYERS[name], *size, dtype, n), rank, device)
        own_bias = reference.chunk(bias, 0, rank, whole.n_sizes) if whole.gathers else bias
        given: dict[str, Any] = {"algorithm": algorithm} if algorithm else {"sizes": whole.m_sizes}
        found = []
        for on, options, operands, dy in (
            (group, given, (whole.x, whole.w, own_bias), whole.dy),
            (alone, {}, (whole.x_whole, whole.w_whole, bias), whole.dy_whole),
        ):
            leaves = [_leaf(each, device) for each in operands]
            y = getattr(fusedtp, name)(*leaves, group=on, order="tree", **options)
            found.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
        mine, (y, dx, dw, db) = found
        cut = whole.own("y", y), whole.own("x", dx), whole.own("w", dw)
        db = reference.chunk(db, 0, rank, whole.n_sizes) if whole.gathers else db
        for what, got, want in zip(("y", "dx", "dw", "db"), mine, (*cut, db), strict=True):
            assert torch.equal(got, want), f"{name} {algorithm}: other bits of {what} on {n} ranks"
            count += 1
    dist.destroy_process_group(alone)
    fusedtp.destroy()
    return f"{count} results"


def captured(step: Callable[[], list[Tensor]], device: torch.device) -> tuple[Callable[[], Any], list[Tensor]]:
    """Return a function that replays `step`, and the tensors that a replay fills. A CPU runs the step again."""
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        return graph.replay, found
    found = step()

    def again() -> None:
        for old, new in zip(found, step(), strict=True):
            old.detach().copy_(new.detach())

    return again, found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def replays(group: ProcessGroup, times: int) -> None:
    """Replay one captured op with new inputs: the epoch advances on the device, so halves alternate."""
    device, M, K, N = prepare(), 96, 64, 80
    x, weight = (torch.randn(shape, device=device).bfloat16() for shape in ((M, K), (N, K)))

    def once(schedule: str = "fused") -> Tensor:
        return fusedtp.linear_all_reduce(x, weight, group=group, schedule=schedule)

    with torch.no_grad():
        once()
        _synchronize(device)
        replay, (y,) = captured(lambda: [once()], device)
        for i in range(times):
            x.copy_(torch.randn(M, K, generator=torch.Generator().manual_seed(i * 100 + group.rank())))
            replay()
            expected = once("unfused")
            _synchronize(device)
            torch.testing.assert_close(y, expected, rtol=0.05, atol=0.5)
            # An op that the host drives must find the epoch that the replays have reached.
            torch.testing.assert_close(once("decomposed"), expected, rtol=0.05, atol=0.5)
    fusedtp.destroy()


def replays_on_streams(group: ProcessGroup, times: int) -> None:
    """Replay two graphs on two streams, one with branches, and run ops on two more; no stream waits for another."""
    device, M, K, N = prepare(), 48, 64, 80
    random = torch.Generator().manual_seed(group.rank())
    xs = [torch.randn(M, K, generator=random).bfloat16().to(device) for _ in range(3)]
    weight = torch.randn(N, K, generator=random).bfloat16().to(device)
    on_gpu = device.type == "cuda"
    streams = [torch.cuda.Stream(device) if on_gpu else None for _ in range(4)]

    def once(i: int, schedule: str = "fused") -> Tensor:
        return fusedtp.linear_all_reduce(xs[i], weight, group=group, schedule=schedule)

    def branches() -> list[Tensor]:
        # A fork of a fork; each branch has ops before and after another branch's.
        one, two = streams[:2]
        if one is None or two is None:
            return [once(i) for i in (0, 1, 2, 0, 1)]
        main = torch.cuda.current_stream()
        one.wait_stream(main)
        with torch.cuda.stream(one):
            found = [once(0)]
            two.wait_stream(one)
        with torch.cuda.stream(two):
            found.append(once(1))
        found.append(once(2))
        with torch.cuda.stream(one):
            found.append(once(0))
        with torch.cuda.stream(two):
            found.append(once(1))
        main.wait_stream(one)
        main.wait_stream(two)
        return found

    with torch.no_grad():
        once(0)
        _synchronize(device)
        first, of_first = captured(branches, device)
        second, of_second = captured(lambda: [once(2)], device)
        for _ in range(times):
            for x in xs:
                x.copy_(torch.randn(M, K, generator=random))
            _synchronize(device)
            found = []
            for i, (stream, issue) in enumerate(zip(streams, (first, None, second, None), strict=True)):
                with torch.cuda.stream(stream):
                    if issue is None:
                        found.append(once(i - 1))
                    else:
                        issue()
            with torch.cuda.stream(streams[2]):
                first()
            found += [once(1), *of_first, *of_second]
            _synchronize(device)
            expected = [once(i, "unfused") for i in range(3)]
            for got, i in zip(found, (0, 2, 1, 0, 1, 2, 0, 1, 2), strict=True):
                torch.testing.assert_close(got, expected[i], rtol=0.05, atol=0.5)
    fusedtp.destroy()


def replays_of_a_layer(group: ProcessGroup, times: int) -> None:
    """Replay an MLP's forward and backward in one graph: both gathers and both scatters, new inputs at every replay."""
    device, rank, world_size = prepare(), group.rank(), group.size()
    random = torch.Generator().manual_seed(rank)
    rows, features, hidden = 64, 48, 40
    up, down = (
        _leaf(torch.randn(shape, generator=random).bfloat16(), device)
        for shape in ((hidden, features), (features, hidden))
    )
    x = _leaf(torch.randn(rows, features, generator=random).bfloat16(), device)
    dy = torch.zeros(rows, features, dtype=torch.bfloat16, device=device)

    def step(schedule: str = "fused") -> list[Tensor]:
        h = fusedtp.all_gather_linear(x, up, group=group, schedule=schedule)
        y = fusedtp.linear_reduce_scatter(torch.relu(h), down, group=group, schedule=schedule)
        return [y, *torch.autograd.grad(y, (x, up, down), dy)]

    _warm_up(step, device)
    # Twice on one stream: the second run begins with an op that does not use the side stream of the first.
    for _ in range(2):
        replay, found = captured(step, device)
    for i in range(times):
        random.manual_seed(i * world_size + rank)
        with torch.no_grad():
            x.copy_(torch.randn(rows, features, generator=random))
            dy.copy_(torch.randn(rows, features, generator=random))
        replay()
        for got, want, what in zip(found, step("unfused"), ("y", "dx", "dup", "ddown"), strict=True):
            torch.testing.assert_close(got, want, rtol=0.05, atol=1.0, msg=functools.partial("{}: {}".format, what))
    fusedtp.destroy()


def _warm_up(step: Callable[[], object], device: torch.device) -> None:
    if device.type != "cuda":
        step()
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def versions(group: ProcessGroup) -> str:
    """Return what describes the GPU: versions, and support of fabric handles and multicast."""
    import triton

    from fusedtp.memory.cuda import Driver

    said = f"python {sys.version.split()[0]}, torch {torch.__version__}, cuda {torch.version.cuda}"
    said += f", triton {triton.__version__}"
    if not torch.cuda.is_available():
        return said
    # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED and CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED in cuda.h.
    found = [
        f"{name} {Driver().attribute(number, 0)}" for name, number in (("fabric handles", 128), ("multicast", 132))
    ]
    return ", ".join([said, str(torch.cuda.get_device_properties(0)), *found, f"fabric: {fabric()}"])


def fabric() -> str:
    """Return NVML's state of the NVLink fabric of GPU 0."""
    # nvmlGpuFabricInfo_t in nvml.h: the cluster's 16 bytes, status, clique, and the state in one byte.
    info = (ctypes.c_uint32 * 7)()
    try:
        nvml, gpu = nvml_of(0)
        code = nvml.nvmlDeviceGetGpuFabricInfo(gpu, info)
    except (OSError, AttributeError) as error:
        return f"unknown: {error}"
    states = "not supported", "not started", "in progress", "completed"
    told = f"status {info[4]}, clique {info[5]}, {bytes(info)[:16].hex()}"
    return f"error {code}, state {states[info[6] & 3]}, {told}"


def symmetric_memory(group: ProcessGroup) -> str:
    """Check that this rank allocates symmetric memory, exchanges it with itself, and writes it by a stream operation.

    Return the seconds of each.
    """
    if not torch.cuda.is_available():
        raise Missing("symmetric memory on one GPU needs a GPU")
    from fusedtp.memory.cuda import Gpu

    importlib.import_module("torch.distributed._symmetric_memory")
    memory, times = Gpu(device_here()), [time.perf_counter()]
    own = memory.empty(4096)
    times.append(time.perf_counter())
    handle = memory.rendezvous(own, group.group_name)
    words = handle.get_buffer(group.rank(), (1024,), torch.uint32)
    times.append(time.perf_counter())
    words.view(torch.int32).zero_()
    torch.ops.symm_mem.stream_write_value32_(words, 5, 7)
    torch.cuda.synchronize()
    seen = own.view(torch.int32)[:8].tolist()
    assert seen == [0, 0, 0, 0, 0, 7, 0, 0], f"a stream operation wrote 7 to word 5 of 8, which are {seen}"
    times.append(time.perf_counter())
    spent = [f"{last - first:.3f} s" for first, last in itertools.pairwise(times)]
    return "allocated in {}, exchanged in {}, written in {}".format(*spent)


def doctor(group: ProcessGroup) -> str:
    """Return what `fusedtp doctor` says."""
    if lacking := [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]:
        raise Missing(f"the command line needs {' and '.join(lacking)}")
    command = [sys.executable, "-P", "-m", "fusedtp.bench.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"doctor ended with status {done.returncode}: {done.stderr[-400:]}"
    return done.stdout


def memcheck(group: ProcessGroup) -> str:
    """Run the kernels of the GPU command's item `sanitized` under compute-sanitizer."""
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None or not torch.cuda.is_available():
        raise Missing("no compute-sanitizer, or no GPU")
    return sanitized(found)


def sanitized(sanitizer: str) -> str:
    """Run the item `sanitized` under that program and return its last line; `Missing` if it is refused here."""
    tool = (sanitizer, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", str(FOUND))
    with tempfile.TemporaryDirectory() as out:
        # Without torch's cache, memory past a tensor is unallocated.
        done = subprocess.run(
            [*tool, sys.executable, "-P", "-m", "fusedtp.bench.gpu", "--item", "sanitized", "--out", out],
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        rows = [row for path in Path(out).glob("*.csv") for row in store.read(path)]
    last = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[-1]
    # A machine may not let the sanitizer attach, or may not let CUDA start below it.
    if done.returncode not in (0, FOUND) and not any(row.passed for row in rows):
        raise Missing(f"compute-sanitizer is refused here, it ended with {done.returncode}: {last}")
    assert done.returncode == 0, f"compute-sanitizer ended with {done.returncode}: {last}"
    return last


# Exit status of the sanitizer that has found an error.
FOUND = 86


class Check(NamedTuple):
    """A function of a group, and its arguments; `item`: of the GPU command. size, dtype: for the row."""

    item: str
    run: Callable[..., object]
    given: tuple[Any, ...] = ()
    world_size: int = 2
    size: tuple[int, int, int] = (1, 1, 1)
    dtype: str = "bfloat16"


def _layers(item: str, schedule: str, dtype: str) -> dict[str, Check]:
    # The largest size first.
    return {
        f"{op} {schedule} {' x '.join(map(str, size))} {dtype}":
            Check(item, layer, (op, schedule, dtype, size), 2, size, dtype)
        for size in (*SIZES[::-1], TINY) for op in LAYERS
    }  # fmt: skip


CHECKS: Mapping[str, Check] = {
    "versions": Check("versions", versions, world_size=1),
    "symmetric memory": Check("versions", symmetric_memory, world_size=1),
    **_layers("ranks", "fused", "bfloat16"),
    "collectives 260 x 300": Check("ranks", collectives, ("bfloat16", (260, 300))),
    "collectives 7 x 5": Check("ranks", collectives, ("bfloat16", (7, 5))),
    "replays": Check("ranks", replays, (30,)),
    "replays on streams": Check("ranks", replays_on_streams, (30,)),
    "replays of a layer": Check("ranks", replays_of_a_layer, (30,)),
    "a missing peer": Check("ranks", missing),
    "copies": Check("ranks", copies, (SIZES[1],)),
    **_layers("ranks", "decomposed", "bfloat16"),
    "memcheck": Check("memcheck", memcheck, world_size=1),
    **_layers("float16", "fused", "float16"),
    "trees 300 x 264 x 1000": Check("trees", trees, ("bfloat16", (300, 264, 1000)), 2, (300, 264, 1000)),
    "trees 129 x 1536 x 2048": Check("trees", trees, ("bfloat16", (129, 1536, 2048)), 2, (129, 1536, 2048)),
    "doctor": Check("doctor", doctor, world_size=1),
}
# What a dry run, which may be interpreted, takes in place of the checks at other sizes.
DRY: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("replays", "replays on streams", "replays of a layer"), (2,)), "copies": (TINY,),
    "trees 129 x 1536 x 2048": ("bfloat16", (19, 24, 40)),
}  # fmt: skip


class Checks(Workload):
    """A check as a case: its one variant runs it, and `said` is its answer."""

    def __init__(self, case: Case, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(case, group.rank(), device)
        self._group = group

    def _runner(self, variant: str, direction: str) -> Runner:
        found = CHECKS[self.case.layer]
        given = DRY.get(self.case.layer, found.given) if self.case.seed else found.given

        def run() -> Results:
            # Gradients are part of the checks.
            with torch.enable_grad():
                self.said = str(found.run(self._group, *given) or "")[:2000]
            return ()

        return run

    def check(self, variant: str, results: Results, direction: str = "forward") -> tuple[float, float]:
        """Return no error: a check that fails raises."""
        return 0.0, 0.0
