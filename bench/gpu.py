"""Check and time the kernels on one GPU within ten minutes: `python -P -m fusedtp.bench.gpu`. See docs/gpu.md.

The command runs the items of `PLAN` in order. Each item is a function of a `Run`, with its own process and time limit.
If a process dies, for example after an illegal memory access, another process continues after the case that failed. The
run ends in time, and every item has a row. After the first item, one process for each core compiles the kernels that
the timed items launch.
"""

from __future__ import annotations

import csv
import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
import triton
import typer
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp.kernels.choices import Choice, applied
from fusedtp.kernels.launch import config_for
from fusedtp.kernels.signal import FIRST_SLOT, SIGNALS
from fusedtp.memory.cuda import Driver
from fusedtp.scaled import Quantized, scaled
from fusedtp.schedules.local import mm
from fusedtp.schedules.producer import part_rows, piece_rows
from fusedtp.shards import even_sizes, offsets

from . import arguments, forks, gpu_ranks, preset
from .cases import block
from .gpu_cases import (
    COLUMNS,
    CUT,
    ERROR,
    MAX_ALIKE,
    NOT_REACHED,
    NOT_RUN,
    PASSED,
    Checked,
    ItemEnded,
    RowsFile,
    Run,
    Size,
    Variant,
    Variants,
)
from .machine import describe
from .operands import device_here
from .oracle import ExactProduct
from .ranks import RankError, RankPool
from .store import now


def normal(dtype: str, *shape: int, seed: int) -> Tensor:
    """Draw a standard normal tensor on this process's device."""
    device = device_here()
    drawn = torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return drawn.to(getattr(torch, dtype))


class Factors:
    """x [M, K] and a weight [N, K] transposed to [K, N], with their product in float64, made on demand."""

    def __init__(self, dtype: str, M: int, N: int, K: int, seed: int) -> None:
        self.a, self.b = normal(dtype, M, K, seed=2 * seed), normal(dtype, N, K, seed=2 * seed + 1).t()
        self.product = cache(lambda: ExactProduct(self.a, self.b, (K,)))

    def check(self, out: Tensor) -> Checked:
        """Check a result in the operands' dtype."""
        return self.product().check(out, self.a.dtype, "result")

    def filled(self, fill: preset.Fill, arenas: preset.Arenas | None = None, *, transposed: bool = False) -> Variant:
        """Return the variant that fills its own C. transposed: C has adjacent rows."""
        M, N = self.a.shape[0], self.b.shape[1]
        out = preset.poisoned(self.a, N, M).t() if transposed else preset.poisoned(self.a, M, N)
        return Variant(partial(fill, out), lambda: self.check(out), arenas)

    def library(self) -> Variants:
        """Return torch.mm, a baseline."""
        return {"torch.mm": self.filled(lambda out: torch.mm(self.a, self.b, out=out))}

    def own(self) -> Variants:
        """Return the own matmul, a baseline of fused kernels."""
        return {"own_matmul": self.filled(preset.plain(self.a, self.b))}


def versions(run: Run) -> None:
    """Add a row that describes the machine, and multiply once in float32 and in bfloat16."""
    found = sys.version.split()[0], torch.__version__, torch.version.cuda, triton.__version__
    run.ask("python, torch, cuda, triton", lambda: found)
    if run.device.type == "cuda":
        run.ask("device", lambda: torch.cuda.get_device_properties(run.device))
        # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED and CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED in cuda.h.
        for name, number in (("fabric handles", 128), ("multicast", 132)):
            run.ask(name, partial(lambda number: Driver().attribute(number, 0), number))
        run.ask("fabric", fabric)
    for dtype in ("float32", "bfloat16"):
        run.case("matmul", (256, 256, 256), dtype, partial(plain, dtype), timed=False)


def fabric() -> str:
    """Return NVML's state of the NVLink fabric of GPU 0."""
    nvml, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    # nvmlGpuFabricInfo_t in nvml.h: the cluster's 16 bytes, status, clique, and the state in one byte.
    info = (ctypes.c_uint32 * 7)()
    codes = [nvml.nvmlInit_v2(), nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))]
    codes.append(nvml.nvmlDeviceGetGpuFabricInfo(device, info))
    states = "not supported", "not started", "in progress", "completed"
    return f"codes {codes}, state {states[info[6] & 3]}, status {info[4]}, clique {info[5]}, {bytes(info)[:16].hex()}"


def plain(dtype: str, *size: int) -> Variants:
    """Make torch.mm and the own matmul."""
    operands = Factors(dtype, *size)
    return operands.library() | operands.own()


def block_sizes(tokens: int, layers: slice) -> list[Size]:
    """Return the matmul sizes of one rank in a block of Llama 3 8B on four ranks and of 70B on eight."""
    found = []
    for model, ranks in (("llama3-8b", 4), ("llama3-70b", 8)):
        for each in block(model, tokens, ranks, "bfloat16")[layers]:
            by_n, by_k = (ranks, 1) if each.kind == "gather" else (1, ranks)
            found.append((each.M, each.N // by_n, each.K // by_k))
    return found


def matmul(run: Run) -> None:
    """Check the own matmul in all dtypes, and time it beside torch.mm."""
    for dtype in ("bfloat16", "float16", "float32"):
        for size in ((300, 264, 200), (256, 256, 256)):
            run.case("matmul", size, dtype, partial(plain, dtype), timed=False)
    many = [(8192, 8192, 8192), *block_sizes(8192, slice(None)), *block_sizes(512, slice(2, 4))]
    few = [(M, 7168, 8192) for M in (16, 64, 128, 256)]
    for dtype, sizes in (("bfloat16", many + few), ("float16", many[6:9])):
        for size in sizes:
            run.case("matmul", size, dtype, partial(plain, dtype))


# Longest check on ranks.
RANKS_SECONDS = 50.0

TILES = (
    Choice(128, 256, 64, 8, 3, True), Choice(128, 256, 64, 8, 3), Choice(256, 128, 64, 8, 3, True),
    Choice(128, 128, 64, 8, 4), Choice(128, 128, 128, 8, 3), Choice(64, 256, 64, 4, 4),
)  # fmt: skip


def tiles(run: Run) -> None:
    """Time tiles of the own matmul beside torch.mm."""

    def make(*size: int) -> Variants:
        operands = Factors("bfloat16", *size)
        a, b = operands.a, operands.b
        config = config_for(a.device, a.dtype, *size[:2])
        chosen = {str(each): operands.filled(preset.plain(a, b, applied(config, each))) for each in TILES}
        return operands.library() | chosen

    for size in ((8192, 8192, 8192), (8192, 7168, 8192), (8192, 8192, 3584), (512, 7168, 8192), (128, 7168, 8192)):
        run.case("matmul", size, "bfloat16", make, seconds=2.0)


def gather(
    dtype: str, ranks: int, *size: int, along: int = 0, in_place: bool = True, transposed: bool = False,
    pushed: bool = True,
) -> Variants:  # fmt: skip
    """Make all-gather + matmul, x cut along rows or contraction. in_place: the own shard is read in place."""
    operands, sizes = Factors(dtype, *size), even_sizes(size[2 * along], ranks)
    shard = operands.a.narrow(along, offsets(sizes)[preset.RANK], sizes[preset.RANK]).clone()
    # Rows that are not contiguous go through the own arena.
    shard = shard if in_place else shard.t().contiguous().t()
    arenas, fill = preset.gathered(
        shard, operands.a, operands.b, sizes, along=along, transposed=transposed, pushed=pushed
    )
    return operands.own() | {"fused": operands.filled(fill, arenas, transposed=transposed)}


def scatter(dtype: str, ranks: int, *size: int, to_all: bool = False, turned: bool = False) -> Variants:
    """Make matmul + reduce-scatter's first kernel, or a one-shot all-reduce's. turned: A has adjacent rows."""
    operands = Factors(dtype, *size)
    if turned:
        operands.a, operands.b = operands.a.t().contiguous().t(), operands.b.contiguous()
    arenas, launch, parts = preset.scattered(operands.a, operands.b, even_sizes(size[0], ranks), to_all=to_all)

    def check() -> Checked:
        return max(map(operands.check, parts if to_all else [torch.cat(parts)]))

    return operands.own() | {"fused": Variant(launch, check, arenas)}


def all_reduce(dtype: str, ranks: int, *size: int, to_all: bool = False) -> Variants:
    """Time the one-kernel all-reduce with zero partial sums from the peers."""
    operands, (M, N, K, _) = Factors(dtype, *size), size
    config, out = config_for(operands.a.device, operands.a.dtype, M, 0), preset.poisoned(operands.a, M, N)
    arenas, fill = preset.reduced(operands.a, operands.b, ranks, to_all=to_all, config=config)
    own = slice(None) if to_all else preset.own_columns(N, ranks, config)

    def check() -> Checked:
        return ExactProduct(operands.a, operands.b[:, own], (K,)).check(out[:, own], out.dtype, "result")

    return operands.own() | {"fused": Variant(partial(fill, out), check, arenas)}


def float8(scatters: bool, ranks: int, M: int, N: int, K: int, seed: int) -> Variants:
    """Make a gather or a scatter of float8 rows with their scales, beside the library's scaled matmul."""
    wide = [normal("bfloat16", n, K, seed=2 * seed + i) for i, n in enumerate((M, N))]
    a, w = (Quantized.of(scaled(each, "rowwise"), torch.bfloat16) for each in wide)
    sizes, out = even_sizes(M, ranks), preset.poisoned(wide[0], M, N)
    product = cache(lambda: ExactProduct(*_values(a, w), (K,), torch.bfloat16))
    launch: Callable[[], object]
    if scatters:
        arenas, launch, parts = preset.scattered(a, w.t(), sizes)
    else:
        own = slice(*offsets(sizes)[preset.RANK :][:2])
        arenas, fill = preset.gathered(Quantized(a.data[own], a.scale[own], a.dtype), a, w.t(), sizes)
        launch, parts = partial(fill, out), [out]
    given: list[Tensor] = []

    def check(parts: Sequence[Tensor]) -> Checked:
        return product().check(torch.cat(list(parts)), torch.bfloat16, "result")

    def library() -> None:
        given[:] = [mm(a, w.t())]

    return {
        "scaled mm": Variant(library, lambda: check(given)),
        "fused": Variant(launch, lambda: check(parts), arenas),
    }


def _values(a: Quantized, w: Quantized) -> tuple[Tensor, Tensor]:
    return a.data.double() * a.scale.double(), (w.data.double() * w.scale.double()).t()


# Ranks, and the size: MLPs of Llama 3 70B on eight ranks and of 8B on four, at 8192 tokens and at 512; decoding.
UP = (8, (8192, 7168, 8192)), (4, (8192, 7168, 4096)), (8, (512, 7168, 8192))
DOWN = (8, (8192, 8192, 3584)), (4, (8192, 4096, 3584)), (8, (512, 8192, 3584))
FEW = (8, (16, 8192, 3584)), (8, (64, 8192, 3584))
# The most informative cases first.
FUSED: dict[str, tuple[Callable[..., Variants], Sequence[tuple[int, Size]]]] = {
    "gather rows": (gather, UP),
    "scatter": (scatter, DOWN),
    "few-row all-reduce": (all_reduce, FEW),
    "gather rows, pushing": (partial(gather, pushed=False), UP[::2]),
    "few-row all-reduce, one shot": (partial(all_reduce, to_all=True), FEW),
    "gather contraction": (partial(gather, along=1), UP[:1]),
    "gather rows transposed": (partial(gather, transposed=True), UP[:1]),
    "scatter to all": (partial(scatter, to_all=True), DOWN[2:]),
    "scatter, turned": (partial(scatter, turned=True), DOWN[:1]),
    "gather rows, through the arena": (partial(gather, in_place=False), UP[:1]),
}


def hooks(run: Run) -> None:
    """Time fused kernels with all signals raised in advance, beside the own matmul."""
    for name, (make, sizes) in FUSED.items():
        for ranks, size in sizes:
            run.case(name, size, "bfloat16", partial(make, "bfloat16", ranks), world_size=ranks)
    for name, scatters, (ranks, size) in (("gather rows", False, UP[0]), ("scatter", True, DOWN[0])):
        run.case(name, size, "float8_e4m3fn", partial(float8, scatters, ranks), world_size=ranks)


def pushers(run: Run) -> None:
    """Time a gather of the own rows alone, sent to seven peers, by number of sending programs."""

    def make(*size: int) -> Variants:
        operands, sizes = Factors("bfloat16", *size), (0, size[0], *[0] * 6)
        a, found = operands.a, operands.own()
        for count in (0, 6, 12, 33):
            config = replace(config_for(a.device, a.dtype, *size[:2]), pushers=count)
            arenas, fill = preset.gathered(a, a, operands.b, sizes, pushed=count == 0, config=config)
            found[f"{count} pushers"] = operands.filled(fill, arenas)
        return found

    for size in ((1024, 7168, 8192), (4096, 7168, 8192)):
        run.case("gather own rows", size, "bfloat16", make, world_size=8, seconds=1.5)


def link(run: Run) -> None:
    """Time a gather whose peer's rows are in pinned host memory, copied by a copy engine beside the matmul."""
    if run.device.type != "cuda":
        run.rows.add(NOT_RUN, item="link", detail="there is no copy engine on a CPU", dry_run=run.dry_run)
        return
    for size in ((8192, 7168, 4096), (8192, 3584, 4096)):
        # The host issues a copy for each part and a write for each piece.
        run.case("gather rows", size, "bfloat16", linked, world_size=2, seconds=2.0, launches=40)


def linked(M: int, N: int, K: int, seed: int) -> Variants:
    """Make a gather of two halves of rows: rank 0's come from the host, with a signal after each piece."""
    operands, rows, side = Factors("bfloat16", M, N, K, seed), M // 2, torch.cuda.Stream(priority=-1)
    a, b, far = operands.a, operands.b, operands.a[:rows].cpu().pin_memory()
    config = config_for(a.device, a.dtype, rows, N)
    arenas, fill = preset.gathered(a[rows:].clone(), a, b, (rows, M - rows), last=False, config=config)
    piece = piece_rows(K * a.itemsize, config)
    part, words = part_rows(K * a.itemsize, piece), arenas.words(preset.RANK)
    signals = words.view(torch.uint32)
    # Rank 0's signals, next to the own signals, and the half of the first epoch, which never ends.
    first, count = SIGNALS.value + 2 * FIRST_SLOT.value, -(-rows // piece)
    near = arenas.view(preset.RANK, 1, 0, rows, K, a.dtype)
    (multiply,), waiting = operands.own().values(), operands.filled(fill)

    def copy(behind: Callable[[], object], *, wait: bool = False) -> None:
        main = torch.cuda.current_stream()
        words[first : first + 2 * count : 2] = 0
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for begin in range(0, rows, part):
                end = min(rows, begin + part)
                near[begin:end].copy_(far[begin:end], non_blocking=True)
                for slot in range(begin // piece, -(-end // piece)):
                    torch.ops.symm_mem.stream_write_value32_(signals, first + 2 * slot, 1)
        if wait:
            main.wait_stream(side)
        behind()
        main.wait_stream(side)

    def arrived() -> Checked:
        assert torch.equal(near, a[:rows]), "other rows came over the link"
        return waiting.check()

    near.fill_(torch.nan)
    return {
        "own_matmul": multiply,
        "copy": Variant(lambda: copy(lambda: None), num_bytes=far.nbytes),
        "copy, then matmul": Variant(lambda: copy(waiting.launch, wait=True), arrived, arenas),
        "copy beside matmul, no waits": Variant(lambda: copy(multiply.launch), multiply.check),
        "fused": Variant(lambda: copy(waiting.launch), arrived, arenas),
    }


def memcheck(run: Run) -> None:
    """Run kernels of 256 x 256 x 256 under compute-sanitizer."""
    if "FUSEDTP_SANITIZED" in os.environ:
        run.case("matmul", (256, 256, 256), "bfloat16", partial(plain, "bfloat16"), timed=False)
        for name in ("gather rows, pushing", "scatter", "few-row all-reduce", "gather rows, through the arena"):
            size = 64 if "few" in name else 256, 256, 256
            run.case(name, size, "bfloat16", partial(FUSED[name][0], "bfloat16", 2), world_size=2, timed=False)
        return
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None or run.device.type != "cuda":
        run.rows.add(NOT_RUN, item="memcheck", detail="no compute-sanitizer, or no GPU", dry_run=run.dry_run)
        return

    def sanitized() -> str:
        # The child process adds rows to the same file. Without torch's cache, memory past a tensor is unallocated.
        shared = json.dumps(dict(run.rows.shared))
        env = os.environ | {"FUSEDTP_SANITIZED": shared, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        tool = (found, "--tool", "memcheck", "--error-exitcode", "86")
        done = subprocess.run(
            [*tool, sys.executable, "-P", "-m", "fusedtp.bench.gpu", "--out", str(run.rows.path.parent)],
            env=env, capture_output=True, text=True, timeout=PLAN["memcheck"].seconds,
        )  # fmt: skip
        print(done.stdout, done.stderr)
        last = (done.stdout.strip() or "no output").splitlines()[-1]
        assert done.returncode == 0, f"compute-sanitizer ended with {done.returncode}: {last}"
        return last

    run.ask("memcheck", sanitized)


Check: TypeAlias = tuple[Callable[..., object], tuple[Any, ...]]


def on_ranks(run: Run, dtype: str, checks: Mapping[str, Check]) -> None:
    """Run checks on two ranks that share the GPU; each check is a function of `gpu_ranks` and its arguments."""
    if run.share is not None:
        return
    with RankPool(2, timeout=RANKS_SECONDS) as pool:
        for name, (check, given) in checks.items():
            run.ask(name, partial(pool.run, check, *given), dtype=dtype, world_size=2)


def layers(run: Run, schedule: str, dtype: str) -> dict[str, Check]:
    """Return the checks of layers at every size, the largest first."""
    sizes = [gpu_ranks.TINY] if run.dry_run else gpu_ranks.SIZES[::-1]
    return {
        f"{op} {schedule} {size}": (gpu_ranks.layer, (op, schedule, dtype, size))
        for size in sizes
        for op in gpu_ranks.LAYERS
    }


def ranks(run: Run) -> None:
    """Check ops, layers, gradients, graphs and timeouts on two ranks that share the GPU."""
    times = 2 if run.dry_run else 30
    on_ranks(run, "bfloat16", {
        **layers(run, "fused", "bfloat16"),
        **{f"collectives {size}": (gpu_ranks.collectives, ("bfloat16", size)) for size in ((260, 300), (7, 5))},
        "replays": (gpu_ranks.replays, (times,)),
        "replays on streams": (gpu_ranks.replays_on_streams, (times,)),
        "replays of a layer": (gpu_ranks.replays_of_a_layer, (times,)),
        "a missing peer": (gpu_ranks.missing, ()),
        "copies": (gpu_ranks.copies, (gpu_ranks.TINY if run.dry_run else gpu_ranks.SIZES[1],)),
        **layers(run, "decomposed", "bfloat16"),
    })  # fmt: skip


def float16(run: Run) -> None:
    """Time fused kernels in float16, and check layers on two ranks."""
    for name in itertools.islice(FUSED, 3):
        make, ((count, size), *_) = FUSED[name]
        run.case(name, size, "float16", partial(make, "float16", count), world_size=count)
    on_ranks(run, "float16", layers(run, "fused", "float16"))


def trees(run: Run) -> None:
    """Check sums in the order of a tree on two ranks that share the GPU."""
    sizes = [(19, 24, 40)] if run.dry_run else [(300, 264, 1000), (129, 1536, 2048)]
    on_ranks(run, "bfloat16", {f"trees {size}": (gpu_ranks.trees, ("bfloat16", size)) for size in sizes})


def doctor(run: Run) -> None:
    """Run `fusedtp doctor`."""

    def said() -> str:
        command = [sys.executable, "-P", "-m", "fusedtp.bench.cli", "doctor"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PLAN["doctor"].seconds)
        assert done.returncode == 0, f"doctor ended with status {done.returncode}: {done.stderr[-400:]}"
        return done.stdout

    run.ask("doctor", said)


class Item(NamedTuple):
    """One line of the plan: its time, and whether it launches kernels that are compiled beforehand."""

    seconds: float
    work: Callable[[Run], None]
    what: str
    compiles: bool = False


PLAN = {
    "versions": Item(20, versions, "versions, fabric, multicast; one matmul in float32 and in bfloat16"),
    "matmul": Item(55, matmul, "own matmul beside torch.mm, Llama 3 and few rows; all dtypes against float64", True),
    "tiles": Item(90, tiles, "six tiles at five sizes beside torch.mm", True),
    "hooks": Item(80, hooks, "fused kernels, signals raised before, beside the own matmul; float8", True),
    "pushers": Item(30, pushers, "gather of the own rows with 0, 6, 12 and 33 pushing programs", True),
    "ranks": Item(120, ranks, "two ranks on the one GPU: ops, layers, gradients, graphs, a missing peer"),
    "link": Item(45, link, "a peer in pinned host memory, its rows copied beside the matmul", True),
    "memcheck": Item(40, memcheck, "kernels at 256 x 256 x 256 under compute-sanitizer"),
    "float16": Item(60, float16, "fused kernels and layers in float16", True),
    "trees": Item(40, trees, "sums in the order of a tree, on two ranks"),
    "doctor": Item(40, doctor, "fusedtp doctor"),
}

# Time to end the run, and the least time in which an item may begin.
END_SECONDS, LEAST_SECONDS = 5.0, 6.0
# Seconds for compiling kernels before the timed items, and the name of these rows.
COMPILE_SECONDS, KERNELS = 45.0, "kernels"
# Most processes of one item.
MAX_STARTS = 3
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1", "FUSEDTP_TUNING": "off", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    # Deterministic mode, which poisons fresh memory, asks cuBLAS for it.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}  # fmt: skip


def compile_kernels(items: Sequence[str], rows: RowsFile, shared: Mapping[str, str], end: float) -> None:
    """Compile the kernels of the timed items in a process for each core; items compile the kernels that are missing."""
    items = [item for item in items if PLAN[item].compiles]
    if not torch.cuda.is_available() or not items:
        rows.add(NOT_RUN, item=KERNELS, detail="nothing is compiled beforehand")
        return
    begin, count = time.monotonic(), len(os.sched_getaffinity(0))
    seconds = min(COMPILE_SECONDS, end - begin)
    with RankPool(count, env=ENVIRONMENT, timeout=seconds) as pool:
        try:
            found = sum(pool.run(work, items, rows.path, shared, 0, False, True))
        except RankError as error:
            rows.add(CUT, item=KERNELS, detail=str(error).splitlines()[0])
            return
    rows.add(item=KERNELS, detail=f"{found} kernels in {count} processes, {time.monotonic() - begin:.0f} s")


def work(
    group: ProcessGroup, items: Sequence[str], path: Path, shared: Mapping[str, object], first: int, dry_run: bool,
    compiles: bool = False,
) -> int:  # fmt: skip
    """Run the items' cases in this process, or compile its share of their kernels; return how many were compiled.

    Rows go to `path`, output to the text file beside it.
    """
    with path.with_suffix(".txt").open("a") as text:
        os.dup2(text.fileno(), 1)
        os.dup2(text.fileno(), 2)
    compiled: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(not cache_hit)
    share = (group.rank(), group.size()) if compiles else None
    run, begin = Run(RowsFile(path, shared), "", first=first, share=share, dry_run=dry_run), time.monotonic()
    for run.item in items:
        try:
            PLAN[run.item].work(run)
        except ItemEnded as error:
            detail = f"{MAX_ALIKE} failures alike: {error}"
            run.rows.add(CUT, item=run.item, case=run.number, detail=detail, dry_run=dry_run)
    if not compiles:
        kernels = f"{sum(compiled)} kernels compiled, {compiled.count(False)} found"
        detail = f"{kernels}, {time.monotonic() - begin:.0f} s"
        run.rows.add(item=run.item, op="the item", detail=detail, dry_run=dry_run)
    return sum(compiled)


def run_item(item: str, rows: RowsFile, shared: Mapping[str, str], end: float, *, dry_run: bool) -> None:
    """Run an item in a process that is forked for it, until its own time or the run's (`end`) is over."""
    add, begin = partial(rows.add, item=item, dry_run=dry_run), time.monotonic()
    end, first = min(begin + PLAN[item].seconds, end), 0
    if end - begin < LEAST_SECONDS:
        add(NOT_REACHED, detail="the run's time is over")
        return
    env = ENVIRONMENT | {"TRITON_INTERPRET": str(int(not torch.cuda.is_available()))}
    for start in range(1, MAX_STARTS + 1):
        with RankPool(1, env=env, timeout=PLAN[item].seconds) as pool:
            try:
                pool.run(work, [item], rows.path, shared, first, dry_run, timeout=end - time.monotonic())
                return
            except RankError as error:
                with rows.path.with_suffix(".txt").open("a") as text:
                    print(error, file=text)
                number, _, case = error.notes.get(0, "").partition(" ")
                where, how = {"case": number or -1, "op": case}, error.failures[0].splitlines()[0]
        if how.startswith("gave no answer"):
            add(CUT, detail=how, **where)
            return
        add(ERROR, detail=f"its process {how}", **where)
        if start == MAX_STARTS or end - time.monotonic() < LEAST_SECONDS:
            add(CUT, detail=f"its process died {start} times", **where)
            return
        first = int(number or -1) + 1


def run_all(items: Sequence[str], out: Path, end: float, *, dry_run: bool, commit: str) -> Counter[str]:
    """Run the items; return how many rows there are by status."""
    here, total = describe(), Counter[str]()
    shared = {name: getattr(here, name) for name in ("gpu", "driver", "python", "torch", "triton")}
    shared |= {"run": now(), "machine": here.name, "commit": commit or here.commit}
    print(*(f"{name} {value}" for name, value in shared.items() if value), sep=", ")
    with forks.kept():
        # Compile after the first item, if that item compiles little itself.
        place = 0 if PLAN[items[0]].compiles else 1
        todo = [*items[:place], KERNELS, *items[place:]]
        for number, item in enumerate(todo, 1):
            rows, begin = RowsFile(out / f"gpu-{item}.csv", shared), time.monotonic()
            before = rows.path.stat().st_size
            if item == KERNELS:
                compile_kernels(items, rows, shared, end)
            else:
                run_item(item, rows, shared, end, dry_run=dry_run)
            with rows.path.open() as file:
                file.seek(before)
                counts = Counter(row["status"] for row in csv.DictReader(file, COLUMNS))
            told = ", ".join(f"{count} {status}" for status, count in counts.items())
            later = sum(COMPILE_SECONDS if each == KERNELS else PLAN[each].seconds for each in todo[number:])
            left = arguments.duration(max(0.0, min(later, end - time.monotonic())))
            seconds = arguments.duration(time.monotonic() - begin)
            print(f"{item:9} {told}; {seconds}, at most {left} left; {rows.path}", flush=True)
            total += counts
    return total


def age() -> float:
    """Return the seconds since this process began: its imports are part of the run."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def gpu(
    list_: Annotated[bool, typer.Option("--list", help="Show the plan.")] = False,
    seconds: Annotated[float, typer.Option(help="Time of the whole run.")] = 540.0,
    out: Annotated[Path, typer.Option(help="Folder for rows and texts, which are added to.")] = Path("gpu-rows"),
    item: Annotated[list[str] | None, typer.Option(help="Only this item; may be repeated.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Small sizes, two rounds. Without a GPU kernels are interpreted.")
    ] = False,
    commit: Annotated[str, typer.Option(help="The rows' commit, where no checkout says it.")] = "",
) -> None:
    """Check and time the kernels on one GPU within ten minutes, the most telling first."""
    if "FUSEDTP_SANITIZED" in os.environ:
        shared = json.loads(os.environ["FUSEDTP_SANITIZED"])
        PLAN["memcheck"].work(Run(RowsFile(out / "gpu-memcheck.csv", shared), "memcheck"))
        return
    items = arguments.names(",".join(item or PLAN), tuple(PLAN), "--item")
    if list_:
        print(f"{'s':>4}  {'item':9} what; its rows are in gpu-ITEM.csv")
        for name in items:
            line = f"{PLAN[name].seconds:4.0f}  {name:9} {PLAN[name].what}"
            print(textwrap.fill(line, 80, subsequent_indent=" " * 16))
        return
    if not torch.cuda.is_available() and not dry_run:
        raise typer.BadParameter("this needs a CUDA device, and torch finds none: --dry-run needs none")
    end = time.monotonic() + seconds - age() - END_SECONDS
    try:
        counts = run_all(items, arguments.folder(out), end, dry_run=dry_run, commit=commit)
    except KeyboardInterrupt:
        print(f"Stopped: the rows so far are in {out}/gpu-*.csv")
        raise typer.Exit(130) from None
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if set(counts) - {PASSED, NOT_RUN}:
        raise typer.Exit(1)


if __name__ == "__main__":
    # Child processes look up functions by module name.
    from fusedtp.bench.gpu import gpu as command

    arguments.run(command)
