"""Check and time the kernels on one GPU within ten minutes: `python -P -m fusedtp.bench.gpu`. See docs/gpu.md.

The command runs the items of `plan` in order: cases of the registry, by the sweep's gate, clock and rows, with a
budget. An item has a time limit. A variant whose process dies, for example after an illegal memory access, costs the
others of its case nothing: they run again on a fresh process. The run ends in time, and every case has a row. After the
first item, one process for each core compiles the kernels that the timed items launch.
"""

from __future__ import annotations

import os
import re
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from torch.distributed import ProcessGroup

from . import arguments, checks
from .cases import Case, block
from .gpu_kernels import DOWN, FUSED, KERNELS, UP, Size
from .jobs import Job
from .machine import Machine, describe
from .ranks import RankError, RankPool, kept
from .store import PASSED, Measurement, Outcome, rows_of, update
from .suites import SUITE_OF
from .sweep import run_on

# No size of a dry run is larger.
DRY_SIZE = 256
# Longest case, and number of equal failures that end an item.
CASE_SECONDS, MAX_ALIKE = 60.0, 3
NOT_REACHED = "not reached: the run's time is over"


def kernel(name: str, size: Size, dtype: str, *, timed: bool = True, seconds: float = 0.6) -> Job:
    """Return the job of one of `KERNELS` at a size, M, N, K as one rank multiplies them."""
    case = Case("kernel", *size, dtype, 1, layer=name)
    return Job(case, KERNELS[name].variants, timed, seconds, num_gpus=1, patience=CASE_SECONDS)


def check(name: str) -> Job:
    """Return the job of one of `checks.CHECKS`, which is never timed."""
    found = checks.CHECKS[name]
    case = Case("check", *found.size, found.dtype, found.world_size, layer=name)
    return Job(case, ("check",), False, num_gpus=1, patience=CASE_SECONDS)


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


def tiles() -> list[Job]:
    """Time tiles of the own matmul beside torch.mm."""
    sizes = ((8192, 8192, 8192), (8192, 7168, 8192), (8192, 8192, 3584), (512, 7168, 8192), (128, 7168, 8192))
    return [kernel("tiles", size, "bfloat16", seconds=2.0) for size in sizes]


def hooks() -> list[Job]:
    """Time fused kernels with all signals raised in advance, beside the own matmul."""
    found = [kernel(f"{name}, {ranks} ranks", size, "bfloat16")
             for name, (_, sizes) in FUSED.items() for ranks, size in sizes]  # fmt: skip
    for name, (ranks, size) in (("gather rows", UP[0]), ("scatter", DOWN[0])):
        found.append(kernel(f"float8 {name}, {ranks} ranks", size, "float8_e4m3fn"))
    return found


def pushers() -> list[Job]:
    """Time a gather of the own rows alone, sent to seven peers, by number of sending programs."""
    sizes = ((1024, 7168, 8192), (4096, 7168, 8192))
    return [kernel("gather own rows, 8 ranks", size, "bfloat16", seconds=1.5) for size in sizes]


def link() -> list[Job]:
    """Time a gather whose peer's rows are in pinned host memory, copied by a copy engine beside the matmul."""
    if not torch.cuda.is_available():
        return []
    sizes = ((8192, 7168, 4096), (8192, 3584, 4096))
    return [kernel("gather rows over a link", size, "bfloat16", seconds=2.0) for size in sizes]


def sanitized() -> list[Job]:
    """Return the kernels that run at 256 x 256 x 256 under compute-sanitizer."""
    names = ("gather rows, pushing", "scatter", "few-row all-reduce", "gather rows, through the arena")
    few = [kernel(f"{name}, 2 ranks", (64 if "few" in name else 256, 256, 256), "bfloat16", timed=False)
           for name in names]  # fmt: skip
    return [kernel("matmul", (256, 256, 256), "bfloat16", timed=False), *few]


def float16() -> list[Job]:
    """Time fused kernels in float16, and check layers on two ranks."""
    found = [kernel(f"{name}, {sizes[0][0]} ranks", sizes[0][1], "float16")
             for name, (_, sizes) in list(FUSED.items())[:3]]  # fmt: skip
    return found + named("float16")


def named(*items: str) -> list[Job]:
    """Return the jobs of the checks of an item."""
    return [check(name) for name, found in checks.CHECKS.items() if found.item in items]


class Item(NamedTuple):
    """One line of the plan: its time, its jobs, and whether they launch kernels that are compiled beforehand."""

    seconds: float
    jobs: list[Job]
    what: str
    compiles: bool = False


def plan(*, dry_run: bool = False) -> dict[str, Item]:
    """Return the items, the most telling first. A dry run has small sizes and two rounds."""
    small = [kernel("matmul", (256, 256, 256), dtype, timed=False) for dtype in ("float32", "bfloat16")]
    items = {
        "versions": Item(
            20, named("versions") + small, "versions, fabric, multicast; one matmul in float32 and in bfloat16"),
        "matmul": Item(
            55, matmul(), "own matmul beside torch.mm, Llama 3 and few rows; all dtypes against float64", True),
        "tiles": Item(90, tiles(), "six tiles at five sizes beside torch.mm", True),
        "hooks": Item(80, hooks(), "fused kernels, signals raised before, beside the own matmul; float8", True),
        "pushers": Item(30, pushers(), "gather of the own rows with 0, 6, 12 and 33 pushing programs", True),
        "ranks": Item(120, named("ranks"), "two ranks on the one GPU: ops, layers, gradients, graphs, a missing peer"),
        "link": Item(45, link(), "a peer in pinned host memory, its rows copied beside the matmul", True),
        "memcheck": Item(40, named("memcheck"), "kernels at 256 x 256 x 256 under compute-sanitizer"),
        "float16": Item(60, float16(), "fused kernels and layers in float16", True),
        "trees": Item(40, named("trees"), "sums in the order of a tree, on two ranks"),
        "doctor": Item(40, named("doctor"), "fusedtp doctor"),
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
    size = {name: min(getattr(job.case, name), DRY_SIZE) for name in ("M", "N", "K")}
    return replace(job, case=replace(job.case, **size), rounds=2 if job.timed else None)


# Time to end the run, and the least time in which a case may begin.
END_SECONDS, LEAST_SECONDS = 5.0, 4.0
# Seconds for compiling kernels before the timed items, and the name of this step.
COMPILE_SECONDS, KERNEL_STEP = 45.0, "kernels"
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
                problem.runner(variant)()
        # One process for each core shares the device's memory.
        del problem
        torch.cuda.empty_cache()
    return sum(compiled)


def run_item(item: Item, path: Path, machine: Machine, end: float) -> Counter[str]:
    """Run an item's jobs until its own time or the run's (`end`) is over; return the number of rows by status."""
    end, counts, alike = min(time.monotonic() + item.seconds, end), Counter[str](), Counter[str]()
    env = ENVIRONMENT | {"TRITON_INTERPRET": str(int(not torch.cuda.is_available()))}
    pools = {size: RankPool(size, env=env, timeout=item.seconds) for size in {job.case.world_size for job in item.jobs}}
    try:
        for job in item.jobs:
            left = end - time.monotonic()
            if most := [kind for kind, count in alike.items() if count >= MAX_ALIKE]:
                rows = absent(job, f"{MAX_ALIKE} failures alike: {most[0]}", machine)
            elif left < LEAST_SECONDS:
                rows = absent(job, NOT_REACHED, machine)
            else:
                pool = pools[job.case.world_size]
                outcomes = run_on(pool, replace(job, patience=min(CASE_SECONDS, left)), {})
                rows = rows_of(job.case, outcomes, machine)
                if any(row.failed for row in rows):
                    pool.close()
            update(path, rows)
            counts.update("failed" if row.failed else row.gate.partition(":")[0] for row in rows)
            # Failures that differ only in numbers.
            alike.update({re.sub(r"[0-9.e+-]*[0-9]", "#", row.gate.strip().splitlines()[-1])[:200]
                          for row in rows if row.failed})  # fmt: skip
            for row in rows:
                said = f"{row.median_ms:.4g} ms" if row.median_ms else row.path or row.gate.strip().splitlines()[-1]
                size = f"{row.M} x {row.N} x {row.K} {row.dtype}" if row.op == "kernel" else ""
                print(f"  {row.gate.partition(':')[0][:8]:8} {row.layer}, {row.variant} {size}: {said}", flush=True)
    finally:
        for pool in pools.values():
            pool.close()
    return counts


def absent(job: Job, why: str, machine: Machine) -> list[Measurement]:
    """Return the rows of a job that is not run."""
    return rows_of(job.case, [Outcome(name, "forward", not_run=why) for name in job.variants], machine)


def run_all(items: dict[str, Item], out: Path, end: float, machine: Machine) -> Counter[str]:
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
            left = arguments.duration(max(0.0, min(later, end - time.monotonic())))
            print(f"{name:9} {told}; {arguments.duration(time.monotonic() - begin)}, at most {left} left", flush=True)
    return total


def age() -> float:
    """Return the seconds since this process began: its imports are part of the run."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def gpu(
    list_: Annotated[bool, typer.Option("--list", help="Show the plan.")] = False,
    seconds: Annotated[float, typer.Option(help="Time of the whole run.")] = 540.0,
    out: Annotated[Path, typer.Option(help="Folder for rows, which are added to.")] = Path("gpu-rows"),
    item: Annotated[list[str] | None, typer.Option(help="Only this item; may be repeated.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Small sizes, two rounds. Without a GPU kernels are interpreted.")
    ] = False,
    commit: Annotated[str, typer.Option(help="The rows' commit, where no checkout says it.")] = "",
) -> None:
    """Check and time the kernels on one GPU within ten minutes, the most telling first."""
    items = plan(dry_run=dry_run)
    chosen = arguments.names(",".join(item or items), (*items, SANITIZED), "--item")
    if list_:
        print(f"{'s':>4}  {'item':9} what; its rows are in gpu-ITEM.csv")
        for name in chosen:
            print(
                textwrap.fill(
                    f"{items[name].seconds:4.0f}  {name:9} {items[name].what}", 80, subsequent_indent=" " * 16
                )
            )
        return
    if not torch.cuda.is_available() and not dry_run:
        raise typer.BadParameter("this needs a CUDA device, and torch finds none: --dry-run needs none")
    end, machine = time.monotonic() + seconds - age() - END_SECONDS, describe()
    machine = replace(machine, commit=commit or machine.commit)
    print(f"{machine.name}, torch {machine.torch}, triton {machine.triton}, commit {machine.commit}", flush=True)
    items[SANITIZED] = Item(seconds, sanitized(), "")
    try:
        counts = run_all({name: items[name] for name in chosen}, arguments.folder(out), end, machine)
    except KeyboardInterrupt:
        print(f"Stopped: the rows so far are in {out}/gpu-*.csv")
        raise typer.Exit(130) from None
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if set(counts) - {PASSED, "not run"} or counts["failed"]:
        raise typer.Exit(1)


# The item that runs under compute-sanitizer.
SANITIZED = "sanitized"


if __name__ == "__main__":
    # Child processes look up functions by module name.
    from fusedtp.bench.gpu import gpu as command

    arguments.run(command)
