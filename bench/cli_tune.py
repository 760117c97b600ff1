"""`fusedtp tune`: measure this machine for `schedule="auto"`; with --kernels, the fastest tiles of `fused`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusedtp.choose import tuning
from fusedtp.choose.tuning import Sample, Tuned, version_here
from fusedtp.choose.tuning import Table as Measurements
from fusedtp.cost.overlap import ONE_KERNEL_ROWS
from fusedtp.op import MATMUL_ALL_REDUCE

from . import arguments
from .cases import EVERY_DTYPE, MODELS, OPS, Case, block, size_of
from .output import Console

if TYPE_CHECKING:
    from .tune_kernels import TileSearch

INTERPRETED = "interpreted: checked on CPU ranks, at tiny sizes; no time here means anything, and nothing is kept"
TINY = (96, 80, 64)
# Largest product M N K that the interpreter multiplies in about a second.
MOST_INTERPRETED = 128**3
# Default tokens of a model: decode, a batch of it, a short prompt, a long prompt.
TOKENS = "16,256,2048,8192"


def tune(
    world_size: Annotated[
        str | None, typer.Option(help="Numbers of ranks, default 2,4, or 2,4,8 as far as there are GPUs.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Comma-separated; default float32, on GPUs bfloat16; fp8 and mxfp8 too.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=arguments.finite,
            help="Time for the rounds of one size, default 0.5; with --kernels for all, 600.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file, default where auto reads it.")] = None,
    show: Annotated[bool, typer.Option(help="Print the stored table, measure nothing.")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Find the fastest tile of each size for fused.")] = False,
    model: Annotated[str | None, typer.Option(help="With --kernels: the matmuls of a block of these models.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of --model; default 16,256,2048,8192.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="With --kernels: one global size M,N,K; may be repeated.")
    ] = None,
    again: Annotated[bool, typer.Option(help="With --kernels: tune the file's sizes again.")] = False,
) -> None:
    """Measure this machine, for schedule="auto".

    Times a few sizes of every op by every schedule, in turns, in a minute or two. The file is FUSEDTP_TUNING, or
    fusedtp/tuning.json in the user's cache folder.

    The columns:

    \b
    travels     rows x columns of what is sent, of all ranks together
    other length
                the product's remaining length on a rank, none for a
                collective alone
    unfused, decomposed, fused
                the median of the slowest rank, and where there is room its
                quartiles, 25 to 75 %
    fastest     the schedule with the least median
    by          how many times as long the next one takes at least, by the
                95 % interval of the ratio

    Where `by` is not above 1 the difference is noise: auto takes what it would take without a measurement, unless that
    is slower beyond noise.

    With --kernels: which tile, how many warps and stages, and in a gather how many programs that push, are the fastest
    for a size, tried on the GPUs here, each checked before it is timed. All ranks of a group take what rank 0's file
    says. What was found is kept at once, so a command that was cut off goes on where it was. On a machine without a GPU
    the same runs interpreted, at tiny sizes, and nothing is kept: --model and larger sizes are refused there.
    """
    if not kernels and (model or tokens or shape or again):
        raise typer.BadParameter("--model, --tokens, --shape and --again are for --kernels")
    console = Console()
    try:
        target = out or tuning.path()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if target is None:
        raise typer.BadParameter(f"{tuning.ENVIRONMENT} is off: give --out")
    if show:
        table, _, ignored = tuning.load(target)
        if table is None:
            raise typer.BadParameter(ignored or f"there is no {target}: run fusedtp tune")
        show_table(table, console)
        show_current_tiles(table, console)
        return

    arguments.file(target, "--out" if out else f"the file of measurements ({tuning.ENVIRONMENT})")
    machine = tuning.identity()
    num_gpus = machine["num_gpus"]
    world_sizes = (2, 4, 8) if world_size is None else arguments.ranks(world_size)
    if world_size is None:
        world_sizes = tuple(n for n in world_sizes if n <= (num_gpus or 4))
    dtypes = arguments.dtypes_here(dtype or ("bfloat16" if num_gpus else "float32"), EVERY_DTYPE, "--dtype")
    if min(world_sizes, default=2) < 2:
        raise typer.BadParameter(f"--world-size needs 2 or more, got {world_size}")
    if num_gpus and (most := max(world_sizes, default=2)) > num_gpus:
        raise typer.BadParameter(f"{most} ranks need {most} GPUs, this machine has {num_gpus}")
    if kernels:
        # With interpreted kernels nothing is stored, so two ranks are enough.
        sizes = world_sizes if world_size is not None or num_gpus else world_sizes[:1]
        asked = _asked(sizes, dtypes, model=model, tokens=tokens, shapes=shape, num_gpus=num_gpus)
        cases, of_all = _once(asked, console), 600.0 if seconds is None else seconds
        tune_tiles(cases, target, machine, seconds=of_all, again=again, console=console)
        return
    from . import tune as measuring

    each_seconds = 0.5 if seconds is None else seconds
    planned = list(measuring.steps(world_sizes, dtypes, num_gpus))
    named = [measuring.about(step, each_seconds, num_gpus) for step in planned]
    before, _, ignored = tuning.load(target)
    if ignored:
        console.print(f"replaced: {ignored}")
    measured, num_new = before or tuning.Table(machine, (), {}), 0

    def done(new: Sequence[Sample]) -> None:
        nonlocal measured, num_new
        measured, num_new = measured.updated(tuning.Table(machine, tuple(new), {})), num_new + len(new)
        tuning.write(target, tuning.dump(measured))
        step()

    kept = f"the sizes measured so far are in\n{target}\nThe next fusedtp tune measures all of its sizes again."
    with arguments.progress(console, named, kept) as step:
        rates = measuring.tune(planned, seconds=each_seconds, num_gpus=num_gpus, said=console.print, done=done)
    measured = measured.updated(tuning.Table(machine, (), rates))
    tuning.write(target, tuning.dump(measured))
    show_table(measured, console)
    console.print(f"{len(measured.samples)} measurements in {target}, {num_new} of them new")


def show_table(measured: Measurements, console: Console) -> None:
    """Print the measurements, the fastest schedule of each, whether the difference exceeds noise, and the rates."""
    from .intervals import noisy
    from .tables import CellTable, milliseconds

    lines, num_noise = [], 0
    for sample in measured.samples:
        line: dict[str, object] = {"op": sample.op, "ranks": sample.world_size, "dtype": sample.dtype}
        line |= {"travels": f"{sample.rows} x {sample.cols}", "other\nlength": sample.third or None}
        for name, ms in sample.ms.items():
            line[f"{name}\nms"] = ms
            if name in sample.p25.keys() & sample.p75:
                ends = milliseconds(sample.p25[name]), milliseconds(sample.p75[name])
                line[f"{name}\n25 to 75 %"] = " to ".join(ends)
        fastest = min(sample.ms, key=lambda name: sample.ms[name])
        least = min((ratio for name, ratio in sample.slower.items() if name != fastest), default=None)
        num_noise += least is not None and least <= 1
        by = "" if least is None else "noise" if least <= 1 else ">1.00x" if least < 1.005 else f"{least:.2f}x"
        lines.append(line | {"fastest": fastest, "by": by})
    CellTable.of("tuning", "measured on this machine", lines, optional=("25 to 75 %",)).print(console, "op")
    if num_noise:
        told = f"In {num_noise} of {len(lines)} lines the difference is noise"
        unless = ", unless that is slower beyond noise" * any(len(sample.ms) > 2 for sample in measured.samples)
        what = f"auto takes what it would without a measurement{unless}"
        console.print(f"{told}: {what}.")
    spreads = [
        (each.p75[name] - each.p25[name]) / each.ms[name]
        for each in measured.samples for name in each.p75.keys() & each.p25
    ]  # fmt: skip
    if warning := noisy(spreads):
        console.print(warning, style="bold yellow")
    for n in measured.rates:
        machine = measured.hardware(n)
        assert machine is not None
        rates = ", ".join(f"{dtype} {1e3 * rate:.1f}" for dtype, rate in machine.matrix_tflops.items())
        console.print(
            f"{n} ranks: {rates} GFLOP/s each, memory {machine.memory_gbps:.1f} GB/s; an op starts in "
            f"{machine.launch_us:.0f} us, a signal takes {machine.flag_us:.0f} us; the backend's collective starts in "
            f"{machine.collective_start_us:.0f} us, then each rank receives {machine.link_gbps:.2f} GB/s"
        )


def _asked(
    world_sizes: Sequence[int], dtypes: Sequence[str], *, model: str | None, tokens: str | None,
    shapes: Sequence[str] | None, num_gpus: int,
) -> list[Case]:  # fmt: skip
    # Return the cases to tune, by default the machine's own sizes. BadParameter for sizes that cannot be tuned.
    from .tune import GPU_SHAPES

    if shapes and model:
        raise typer.BadParameter("--model gives the sizes: leave --shape out")
    if tokens is not None and not model:
        raise typer.BadParameter("--tokens is for the blocks of --model")
    # Refuse wrong numbers on any machine.
    counts = arguments.numbers(TOKENS if tokens is None else tokens, "--tokens")
    names = arguments.names(model, tuple(MODELS), "--model") if model else ()
    sizes = [arguments.shape(text) for text in shapes or ()]
    if not num_gpus and (model or any(math.prod(size) > MOST_INTERPRETED for size in sizes)):
        raise typer.BadParameter(
            "without a GPU kernels are interpreted: leave --model out, and give each --shape a product M x N x K of at "
            f"most {MOST_INTERPRETED}, for example 128,128,128"
        )
    if names:
        try:
            blocks = [block(*each) for each in itertools.product(names, counts, world_sizes, dtypes)]
        except ValueError as error:
            raise typer.BadParameter(f"--model: {error}") from error
        found = [case for cases in blocks for case in cases]
        return found + [case for each in found for case in _decoded(each)]
    of_all = sizes or ([] if num_gpus else [TINY])
    pairs = itertools.product(world_sizes, dtypes, OPS)
    return [Case(op, *size, dtype, n) for n, dtype, op in pairs for size in of_all or GPU_SHAPES[op]]


def _decoded(case: Case) -> list[Case]:
    # Few tokens are whole on every rank, so partial sums are all-reduced.
    if case.kind != "scatter" or case.M > ONE_KERNEL_ROWS:
        return []
    return [Case(MATMUL_ALL_REDUCE.name, case.M, case.N, case.K, case.dtype, case.world_size)]


def _once(found: Iterable[Case], console: Console) -> list[Case]:
    from .tune_kernels import missing

    kept: dict[object, Case] = {}
    for case in found:
        if why := missing(case):
            console.print(f"left out: {case}: {why}")
        else:
            kept.setdefault(size_of(case), case)
    if not kept:
        raise typer.BadParameter("nothing to tune")
    return list(kept.values())


def tune_tiles(
    asked: Sequence[Case], target: Path, machine: dict[str, object], *, seconds: float, again: bool, console: Console
) -> None:
    """Search, store each result at once if measured on GPUs, and show all; exit with 1 if a size failed."""
    from .tune_kernels import tune_kernels

    said = console.print
    num_gpus = int(str(machine["num_gpus"]))
    before, _, ignored = tuning.load(target)
    if ignored and num_gpus:
        said(f"replaced: {ignored}")
    table = before or tuning.Table(machine, (), {})
    there = {each.size for each in table.kernels if each.version == version_here()} if num_gpus and not again else set()
    wanted = [case for case in asked if size_of(case) not in there]
    if len(wanted) < len(asked):
        said(f"{len(asked) - len(wanted)} of {len(asked)} sizes are there: --again tunes them too")
    if not num_gpus:
        said(INTERPRETED)
    results: list[TileSearch] = []

    def done(found: TileSearch | None) -> None:
        nonlocal table
        if found is not None:
            results.append(found)
            if num_gpus:
                table = table.updated(tuning.Table(table.machine, (), {}, (found.tuned(),)))
                tuning.write(target, tuning.dump(table))
        step()

    left: list[Case] = []
    if wanted:
        kept = f"the tiles found are in\n{target}\nThe same command goes on." if num_gpus else "nothing is kept"
        with arguments.progress(console, [(str(case), seconds / len(wanted)) for case in wanted], kept) as step:
            left = tune_kernels(wanted, seconds=seconds, num_gpus=num_gpus, said=said, done=done)
    show_tiles([each.tuned() for each in results], "measured on this machine" if num_gpus else INTERPRETED, console)
    if left:
        goes_on = ": the same command goes on with them" if num_gpus else ""
        said(f"{len(left)} of {len(asked)} sizes were not reached in {seconds:g} s{goes_on}")
    if num_gpus:
        said(f"{len(table.kernels)} tiles in {target}, {len(results)} of them new")
    if failed := len(wanted) - len(left) - len(results):
        said(f"{failed} of {len(asked)} sizes failed", style="bold red")
        raise typer.Exit(1)


def show_tiles(tuned: Sequence[Tuned], how: str, console: Console) -> None:
    """Print a line a size: the table's time, the fastest tile and its time, and by how much it is faster for sure."""
    from fusedtp.kernels.choices import of_fields

    from .tables import CellTable

    lines = [
        {
            "op": each.op, "ranks": each.world_size, "dtype": each.dtype, "travels": f"{each.rows} x {each.cols}",
            "other\nlength": each.third, "the table's\nms": each.usual_ms, "fastest\nms": each.ms,
            "by": "no difference" if not each.choice or each.faster < 1.005 else f"{each.faster:.2f}x",
            "tile": str(of_fields(each.choice)) if each.choice else "the table's",
        }
        for each in tuned
    ]  # fmt: skip
    if lines:
        CellTable.of("tiles", f"tiles, {how}", lines).print(console, "op")


def show_current_tiles(table: Measurements, console: Console) -> None:
    """Print a file's choices for this version's kernels, and the number of choices for others."""
    current = [each for each in table.kernels if each.version == version_here()]
    show_tiles(current, "measured on this machine", console)
    if others := len(table.kernels) - len(current):
        console.print(f"{others} tiles are of another version of fusedtp and are not taken: tune them again")
