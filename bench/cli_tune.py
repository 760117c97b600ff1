"""`fusedtp tune`: what `schedule="auto"` decides from, measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from . import arguments, cli_tune_kernels
from .arguments import at_least, ranks
from .cases import EVERY_DTYPE

if TYPE_CHECKING:
    from rich.console import Console

    from fusedtp.calls.tuning import Sample
    from fusedtp.calls.tuning import Table as Measurements

# Of its median, how far apart a time's quartiles may be: on a quiet machine they are less.
NOISY = 0.2


def tune(
    world_size: Annotated[
        str | None, typer.Option(help="Numbers of ranks, default 2,4, or 2,4,8 as far as there are GPUs.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Comma-separated; default float32, on GPUs bfloat16; fp8 and mxfp8 too.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Time for the rounds of one size, default 0.5; with --kernels for all, 600.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file, default where auto reads it.")] = None,
    show: Annotated[bool, typer.Option(help="Print the table that is there, measure nothing.")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Find the fastest tile of each size for fused.")] = False,
    model: Annotated[str | None, typer.Option(help="With --kernels: the matmuls of a block of these models.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Of --model, default 16,256,2048,8192.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="With --kernels: one global size M,N,K; may be repeated.")
    ] = None,
    again: Annotated[bool, typer.Option(help="With --kernels: tune the file's sizes again.")] = False,
) -> None:
    """Measure a few sizes of every op and schedule here, a minute or two, and write them for schedule="auto".

    The schedules of a size take turns, round by round. The file is FUSEDTP_TUNING, or fusedtp/tuning.json in the user's
    cache folder.

    The columns: travels, rows x columns of what is sent, of all ranks together; third, the product's remaining length
    on a rank, none for a collective alone; of each schedule the median ms of the slowest rank and, in brackets, the
    quartiles; fastest, the schedule with the least median; by, how many times as long the next one takes at least, by
    the 95 % interval of the ratio. Where that is not above 1 the difference is noise: auto takes what it would take
    without a measurement, unless that is slower beyond noise.

    With --kernels: which tile, how many warps and stages, and in a gather how many programs that push, are the fastest
    for a size, tried on the GPUs here, each checked before it is timed. All ranks of a group take what rank 0's file
    says. What was found is kept at once, so a command that was cut off goes on where it was. On a machine without a GPU
    the same runs interpreted, at tiny sizes, and nothing is kept.
    """
    from fusedtp.calls import tuning

    at_least(0, seconds, "--seconds")
    if not kernels and (model or tokens or shape or again):
        raise typer.BadParameter("--model, --tokens, --shape and --again are for --kernels")
    console = arguments.console(140)
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
        cli_tune_kernels.shown(table, console)
        return

    machine = tuning.identity()
    num_gpus = machine["num_gpus"]
    world_sizes = ranks(world_size) if world_size is not None else tuple(n for n in (2, 4, 8) if n <= (num_gpus or 4))
    dtypes = arguments.dtypes_here(
        ("bfloat16" if num_gpus else "float32") if dtype is None else dtype, EVERY_DTYPE, "--dtype"
    )  # fmt: skip
    if not world_sizes or min(world_sizes) < 2 or (num_gpus and max(world_sizes) > num_gpus):
        raise typer.BadParameter(f"nothing to measure with {world_sizes or 'fewer than two'} ranks on {num_gpus} GPUs")
    if kernels:
        # Where kernels are interpreted two ranks show what there is to see.
        sizes = world_sizes if world_size is not None or num_gpus else world_sizes[:1]
        asked = cli_tune_kernels.cases(
            sizes, dtypes, model=model, tokens=tokens, shapes=shape, num_gpus=num_gpus, console=console
        )
        total = 600.0 if seconds is None else seconds
        cli_tune_kernels.tune(asked, target, machine, seconds=total, again=again, console=console)
        return
    from .tune import tune as measure

    samples, rates = measure(
        world_sizes, dtypes, seconds=0.5 if seconds is None else seconds, num_gpus=num_gpus,
        said=lambda text: console.print(text, highlight=False),
    )  # fmt: skip
    table = tuning.Table(machine, tuple(samples), rates)
    before, _, ignored = tuning.load(target)
    if before is not None:
        table = before.updated(table)
    elif ignored:
        console.print(f"replaced: {ignored}", highlight=False)
    tuning.write(target, tuning.dump(table))
    show_table(table, console)
    console.print(f"{len(table.samples)} measurements in {target}, {len(samples)} of them new", highlight=False)


def noisy(samples: Sequence[Sample]) -> str:
    """A warning where half of the times spread over more than `NOISY` of their median between the quartiles, or ""."""
    spreads = [
        (each.p75[name] - each.p25[name]) / each.ms[name] for each in samples for name in each.p75.keys() & each.p25
    ]
    if not spreads or (middle := median(spreads)) <= NOISY:
        return ""
    return (
        f"Careful, the machine did something else too: between the quartiles of a time lie {middle:.0%} of its median, "
        f"more than {NOISY:.0%} in half of them. Measure again when it is quiet, or longer with --seconds."
    )


def show_table(measured: Measurements, console: Console) -> None:
    """The measurements, which schedule is the fastest at each, whether that is more than noise, and the rates."""
    from .tables import Table, milliseconds

    lines, num_noise = [], 0
    for sample in measured.samples:
        line = {"op": sample.op, "ranks": sample.world_size, "dtype": sample.dtype}
        line |= {"travels": f"{sample.rows}x{sample.cols}", "third": sample.third or None}
        for name, ms in sample.ms.items():
            ends = [milliseconds(each[name]) for each in (sample.p25, sample.p75) if name in each]
            line[f"{name}\nms (quartiles)"] = f"{milliseconds(ms)} ({' to '.join(ends)})" if ends else milliseconds(ms)
        fastest = min(sample.ms, key=lambda name: sample.ms[name])
        least = min((ratio for name, ratio in sample.slower.items() if name != fastest), default=None)
        num_noise += least is not None and least <= 1
        by = "" if least is None else f"{least:.2f}x" if least > 1 else "noise"
        lines.append(line | {"fastest": fastest, "by": by})
    console.print(Table.of("tuning", "measured on this machine", lines).printed(sections=False))
    if num_noise:
        told = f"In {num_noise} of {len(lines)} lines the difference is noise"
        what = "auto takes what it would without a measurement, unless that is slower beyond noise"
        console.print(f"{told}: {what}.", highlight=False)
    if warning := noisy(measured.samples):
        console.print(warning, style="bold yellow", highlight=False)
    for n in measured.rates:
        machine = measured.hardware(n)
        assert machine is not None
        rates = ", ".join(f"{dtype} {1e3 * rate:.1f}" for dtype, rate in machine.matrix_tflops.items())
        console.print(
            f"{n} ranks: {rates} GFLOP/s each, memory {machine.memory_gbps:.1f} GB/s, an op {machine.launch_us:.0f} us,"
            f" a wait {machine.flag_us:.0f} us, the backend {machine.collective_start_us:.0f} us"
            f" and {machine.link_gbps:.2f} GB/s",
            highlight=False,
        )
