"""Check and time the kernels on one GPU within ten minutes: `python -P -m fusedtp.bench.gpu`. See docs/gpu.md.

The items of `plan` are cases of the registry, which run in order by the sweep's gate, clock and rows, each item with a
budget. After the first item, one process for each core compiles the kernels that the timed items launch. Nothing here
imports more than torch, Triton and numpy.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from fusedtp.files import visible
from fusedtp.machine import Machine, describe

from . import checks
from .cases import Case, block
from .gpu_kernels import DOWN, FEW, FUSED, KERNELS, UP, Size
from .jobs import Job, duration
from .providers import Missing
from .ranks import RankError, RankPool, kept
from .store import NOT_RUN, PASSED, Measurement, read, update
from .suites import SUITE_OF
from .sweep import Budget, run_spawned

# No size of a dry run is larger.
DRY_SIZE = 256


def kernel(name: str, size: Size, dtype: str = "bfloat16", *, timed: bool = True, seconds: float = 0.6) -> Job:
    """Return the job of one of `KERNELS` at a size, M, N, K as one rank multiplies them."""
    case = Case("kernel", *size, dtype, 1, layer=name)
    return Job(case, KERNELS[name].variants, timed, seconds, num_gpus=1)


def named(*items: str) -> list[Job]:
    """Return the jobs of the checks of some items, which are never timed."""
    return [
        Job(Case("check", *found.size, found.dtype, found.world_size, layer=name), ("check",), False, num_gpus=1)
        for name, found in checks.CHECKS.items() if found.item in items
    ]  # fmt: skip


def block_sizes(tokens: int, layers: slice) -> list[Size]:
    """Return the matmul sizes of one rank in a block of Llama 3 8B on four ranks and of 70B on eight."""
    found = []
    for model, ranks in (("llama3-8b", 4), ("llama3-70b", 8)):
        for each in block(model, tokens, ranks, "bfloat16")[layers]:
            by_n, by_k = (ranks, 1) if each.kind == "gather" else (1, ranks)
            found.append((each.M, each.N // by_n, each.K // by_k))
    return found


def matmul() -> list[Job]:
    """Check the own matmul in all dtypes, and time it beside torch.mm."""
    dtypes, few = ("bfloat16", "float16", "float32"), [(M, 7168, 8192) for M in (16, 64, 128, 256)]
    many = [(8192, 8192, 8192), *block_sizes(8192, slice(None)), *block_sizes(512, slice(2, 4))]
    small = [kernel("matmul", size, dtype, timed=False)
             for dtype in dtypes for size in ((300, 264, 200), (256, 256, 256))]  # fmt: skip
    sized = [("bfloat16", size) for size in many + few] + [("float16", size) for size in many[6:9]]
    return small + [kernel("matmul", size, dtype) for dtype, size in sized]


def hooks() -> list[Job]:
    """Time fused kernels with all signals raised in advance, beside the own matmul."""
    found = [kernel(f"{name}, {ranks} ranks", size) for name, (_, sizes) in FUSED.items() for ranks, size in sizes]
    for name, (ranks, size) in (("gather rows", UP[0]), ("scatter", DOWN[0])):
        found.append(kernel(f"float8 {name}, {ranks} ranks", size, "float8_e4m3fn"))
    return found


def sanitized() -> list[Job]:
    """Return the kernels that run at 256 x 256 x 256 under compute-sanitizer."""
    names = ("gather rows, pushing", "scatter", "few-row all-reduce", "gather rows, through the arena")
    few = [kernel(f"{name}, 2 ranks", (64 if "few" in name else 256, 256, 256), timed=False) for name in names]
    return [kernel("matmul", (256, 256, 256), timed=False), *few]


class Item(NamedTuple):
    """One line of the plan: its time, its jobs, and whether they launch kernels that are compiled beforehand."""

    seconds: float
    jobs: list[Job]
    what: str
    compiles: bool = False


def plan(*, dry_run: bool = False) -> dict[str, Item]:
    """Return the items, the most telling first. A dry run has small sizes and two rounds."""
    small = [kernel("matmul", (256, 256, 256), dtype, timed=False) for dtype in ("float32", "bfloat16")]
    firsts = {"gather rows, 8 ranks": UP[0], "scatter, 8 ranks": DOWN[0], "few-row all-reduce, 8 ranks": FEW[0]}
    half = [kernel(name, size, "float16") for name, (_, size) in firsts.items()]
    tiles = ((8192, 8192, 8192), (8192, 7168, 8192), (8192, 8192, 3584), (512, 7168, 8192), (128, 7168, 8192))
    pushers, link = ((1024, 7168, 8192), (4096, 7168, 8192)), ((8192, 7168, 4096), (8192, 3584, 4096))
    items = {
        "versions": Item(
            25, named("versions") + small,
            "versions, fabric, multicast; symmetric memory, its rendezvous, a stream write; small matmuls"),
        "latency": Item(
            15, [kernel("latency", (100, 1, 1)), kernel("launches", (1000, 64, 64))],
            "a launch, a flag between two programs, signals to seven peers, 1,000 launches beside torch.mm", True),
        "matmul": Item(
            55, matmul(), "own matmul beside torch.mm, Llama 3 and few rows; all dtypes against float64", True),
        "ranks": Item(120, named("ranks"), "two ranks on the one GPU: ops, layers, gradients, graphs, a missing peer"),
        "hooks": Item(95, hooks(), "fused kernels, signals raised before, beside the own matmul; float8", True),
        "tiles": Item(
            90, [kernel("tiles", size, seconds=2.0) for size in tiles],
            "six tiles at five sizes beside torch.mm", True),
        "pushers": Item(
            30, [kernel("gather own rows, 8 ranks", size, seconds=1.5) for size in pushers],
            "gather of the own rows with 0, 6, 12 and 33 pushing programs", True),
        "link": Item(
            45, [kernel("gather rows over a link", size, seconds=2.0) for size in link if torch.cuda.is_available()],
            "a peer in pinned host memory, its rows copied beside the matmul", True),
        "memcheck": Item(40, named("memcheck"), "kernels at 256 x 256 x 256 under compute-sanitizer"),
        "float16": Item(60, half + named("float16"), "fused kernels and layers in float16", True),
        "trees": Item(40, named("trees"), "sums in the order of a tree, on two ranks"),
        "doctor": Item(40, named("doctor"), "fusedtp doctor, where typer and rich are installed"),
    }  # fmt: skip
    if not dry_run:
        return items
    # Of checks at several sizes only the least.
    tiny = {" x ".join(map(str, checks.TINY)), "7 x 5", "129 x 1536 x 2048"}
    small_jobs = {
        name: [_small(job) for job in item.jobs
               if " x " not in job.case.layer or any(size in job.case.layer for size in tiny)]
        for name, item in items.items()
    }  # fmt: skip
    return {name: item._replace(jobs=list(dict.fromkeys(small_jobs[name]))) for name, item in items.items()}


def _small(job: Job) -> Job:
    if job.case.op == "check":
        # The seed tells the check that fewer repetitions are enough.
        return replace(job, case=replace(job.case, seed=1))
    # M is also a number of launches, or of flags.
    most = 4 if job.case.layer in ("latency", "launches") else DRY_SIZE
    size = {name: min(getattr(job.case, name), most) for name in ("M", "N", "K")}
    return replace(job, case=replace(job.case, **size), rounds=2 if job.timed else None)


# Time to end the run.
END_SECONDS = 5.0
# Seconds for compiling kernels before the timed items, and the name of this step.
COMPILE_SECONDS, KERNEL_STEP = 45.0, "kernels"
# The item that runs under compute-sanitizer.
SANITIZED = "sanitized"
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1", "FUSEDTP_TUNING": "off", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    # Deterministic mode, which poisons fresh memory, asks cuBLAS for it.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}  # fmt: skip


def compile_kernels(items: Sequence[Item], end: float) -> str:
    """Compile the kernels of the timed items in a process for each core; items compile the kernels that are missing."""
    jobs = [job for item in items if item.compiles for job in item.jobs if job.case.op == "kernel"]
    if not torch.cuda.is_available() or not jobs:
        return "nothing is compiled beforehand"
    begin, count = time.monotonic(), len(os.sched_getaffinity(0))
    with RankPool(count, env=ENVIRONMENT, timeout=min(COMPILE_SECONDS, end - begin)) as pool:
        try:
            found = sum(pool.run(load, jobs))
        except RankError as error:
            return str(error).splitlines()[0]
    return f"{found} kernels in {count} processes, {time.monotonic() - begin:.0f} s"


def load(group: ProcessGroup, jobs: Sequence[Job]) -> int:
    """Compile this process's share of the jobs' kernels, and return how many were compiled."""
    import triton

    from fusedtp.kernels.loading import only_loading

    compiled: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(not cache_hit)
    for job in jobs[group.rank() :: group.size()]:
        with only_loading():
            problem = SUITE_OF[job.case.op].setup(job.case, group, torch.device("cuda", torch.cuda.current_device()))
            for variant in job.variants:
                with contextlib.suppress(Missing):
                    problem.runner(variant)()
        # One process for each core shares the device's memory.
        del problem
        torch.cuda.empty_cache()
    return sum(compiled)


def add(path: Path, rows: Sequence[Measurement]) -> None:
    """Add rows to a file, but for cases that did not run and that an earlier run of this machine has in it."""
    ran = {
        (row.machine, row.case)
        for row in (*rows, *(read(path) if path.exists() else ())) if not row.gate.startswith(NOT_RUN)
    }  # fmt: skip
    new = {row.case for row in rows if not row.gate.startswith(NOT_RUN)}
    update(path, [row for row in rows if row.case in new or (row.machine, row.case) not in ran])


def run_item(item: Item, path: Path, machine: Machine, end: float) -> Counter[str]:
    """Run an item's jobs until its own time or the run's (`end`) is over; return the number of rows by status."""
    counts = Counter[str]()

    def done(job: Job, rows: list[Measurement]) -> None:
        add(path, rows)
        for row in rows:
            last = row.gate.strip().splitlines()[-1]
            counts["failed" if row.failed else row.gate.partition(":")[0]] += 1
            size = f"{row.M} x {row.N} x {row.K} {row.dtype}" if row.op == "kernel" else ""
            told = f"{row.median_ms:.4g} ms" if row.median_ms else row.path or last
            print(visible(f"  {last.partition(':')[0][:8]:8} {row.layer}, {row.variant} {size}: {told}"), flush=True)

    if item.jobs:
        budget = Budget(min(time.monotonic() + item.seconds, end))
        env = ENVIRONMENT | {"TRITON_INTERPRET": str(int(not torch.cuda.is_available()))}
        run_spawned(item.jobs, machine, done, budget=budget, env=env)
    return counts


def run_all(items: Mapping[str, Item], out: Path, end: float, machine: Machine) -> Counter[str]:
    """Run the items; return how many rows there are by status."""
    total = Counter[str]()
    names = list(items)
    with kept():
        # Compile after the first item, if that item compiles little itself.
        place = 0 if items[names[0]].compiles else 1
        todo = [*names[:place], KERNEL_STEP, *names[place:]]
        for number, name in enumerate(todo, 1):
            begin = time.monotonic()
            if name == KERNEL_STEP:
                told = compile_kernels(list(items.values()), end)
            else:
                path = out / f"gpu-{name}.csv"
                counts = run_item(items[name], path, machine, end)
                told = f"{', '.join(f'{count} {status}' for status, count in counts.items())}; {path}"
                total += counts
            later = sum(COMPILE_SECONDS if each == KERNEL_STEP else items[each].seconds for each in todo[number:])
            left = duration(max(0.0, min(later, end - time.monotonic())))
            print(f"{name:9} {told}; {duration(time.monotonic() - begin)}, at most {left} left", flush=True)
    return total


def age() -> float:
    """Return the seconds since this process began: its imports are part of the run."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def main(given: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if anything is wrong or late."""
    parser = argparse.ArgumentParser("fusedtp.bench.gpu", description=(__doc__ or "").partition(":")[0] + ".")
    parser.add_argument("--list", action="store_true", help="show the plan")
    parser.add_argument("--seconds", type=float, default=540.0, help="time of the whole run (540)")
    parser.add_argument("--out", type=Path, default=Path("gpu-rows"), help="folder for rows, which are added to")
    names = (*plan(), SANITIZED)
    parser.add_argument("--item", action="append", choices=names, metavar="ITEM", help="only this one; may be repeated")
    parser.add_argument(
        "--dry-run", action="store_true", help="small sizes, two rounds; without a GPU kernels are interpreted"
    )
    parser.add_argument("--commit", default="", help="the rows' commit, where no checkout says it")
    told = parser.parse_args(given)
    items = plan(dry_run=told.dry_run)
    if told.list:
        print(f"{'s':>4}  {'item':9} what; its rows are in gpu-ITEM.csv")
        for name in told.item or items:
            line = f"{items[name].seconds:4.0f}  {name:9} {items[name].what}"
            print(textwrap.fill(line, 80, subsequent_indent=" " * 16))
        return 0
    if not torch.cuda.is_available() and not told.dry_run:
        parser.error("this needs a CUDA device, and torch finds none: --dry-run needs none")
    try:
        told.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out must be a folder that can be written, got {str(told.out)!r}: {error.strerror}")
    end, machine = time.monotonic() + told.seconds - age() - END_SECONDS, describe()
    machine = replace(machine, commit=told.commit or machine.commit)
    print(f"{machine.name}, torch {machine.torch}, triton {machine.triton}, commit {machine.commit}", flush=True)
    chosen = {name: items[name] for name in told.item or items if name != SANITIZED}
    if SANITIZED in (told.item or ()):
        chosen[SANITIZED] = Item(told.seconds, sanitized(), "")
    try:
        counts = run_all(chosen, told.out, end, machine)
    except KeyboardInterrupt:
        print(f"Stopped: the rows so far are in {told.out}/gpu-*.csv")
        return 130
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return int(bool(set(counts) - {PASSED, "not run"} or counts["failed"]))


if __name__ == "__main__":
    # Child processes look up functions by module name.
    from fusedtp.bench.gpu import main as command

    raise SystemExit(command())
