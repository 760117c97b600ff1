"""`fusedtp tune --kernels`: for which sizes, and what is shown and kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from . import arguments
from .cases import Case

if TYPE_CHECKING:
    from rich.console import Console

    from fusedtp.calls.kernels_tuned import Tuned
    from fusedtp.calls.tuning import Table as Measurements

    from .tune_kernels import Found

INTERPRETED = "interpreted: checked on CPU ranks, at tiny sizes; no time here means anything, and nothing is kept"
TINY = (96, 80, 64)
# Tokens of a model by default: decode, a batch of it, a short prompt, a long one.
TOKENS = "16,256,2048,8192"


def cases(
    world_sizes: Sequence[int], dtypes: Sequence[str], *, model: str | None, tokens: str | None,
    shapes: Sequence[str] | None, num_gpus: int, console: Console,
) -> list[Case]:  # fmt: skip
    """The sizes that are asked for, each once; of the machine's own by default. BadParameter for what cannot be."""
    from . import models
    from .tune import GPU_SHAPES

    if shapes and model:
        raise typer.BadParameter("--model gives the sizes: leave --shape out")
    if tokens is not None and not model:
        raise typer.BadParameter("--tokens is for the blocks of --model")
    # Wrong ones are told on any machine.
    counts = arguments.numbers(TOKENS if tokens is None else tokens, "--tokens")
    if shapes:
        sizes = [arguments.shape(text) for text in shapes]
        found = [
            Case(op, *each, dtype, n) for n in world_sizes for dtype in dtypes for op in GPU_SHAPES for each in sizes
        ]
    elif not num_gpus:
        named = arguments.names(model, tuple(models.MODELS), "--model") if model else ()
        if named:
            console.print(f"without a GPU no model's sizes are tried: {INTERPRETED}", highlight=False)
        found = [Case(op, *TINY, dtype, n) for n in world_sizes for op in GPU_SHAPES for dtype in dtypes]
    elif model:
        names = arguments.names(model, tuple(models.MODELS), "--model")
        found = []
        for name, count, n, dtype in [(a, b, c, d) for a in names for b in counts for c in world_sizes for d in dtypes]:
            try:
                found += models.block(name, count, n, dtype)
            except ValueError as error:
                raise typer.BadParameter(f"--model: {error}") from error
        found += [case for each in found for case in _decoded(each)]
    else:
        found = [
            Case(op, *shape, dtype, n)
            for n in world_sizes for dtype in dtypes for op, shapes in GPU_SHAPES.items() for shape in shapes
        ]  # fmt: skip
    return _once(found, console)


def _decoded(case: Case) -> list[Case]:
    # Few tokens are whole on every rank: what is summed is all-reduced.
    from fusedtp.cost.overlap import ONE_KERNEL_ROWS
    from fusedtp.op import MATMUL_ALL_REDUCE

    if case.kind != "scatter" or case.M > ONE_KERNEL_ROWS:
        return []
    return [Case(MATMUL_ALL_REDUCE.name, case.M, case.N, case.K, case.dtype, case.world_size)]


def _once(found: Sequence[Case], console: Console) -> list[Case]:
    from .tune_kernels import missing, travelling

    kept: dict[object, Case] = {}
    for case in found:
        if why := missing(case):
            console.print(f"left out: {case}: {why}", highlight=False)
        else:
            kept.setdefault((case.op, case.world_size, case.dtype, travelling(case)), case)
    if not kept:
        raise typer.BadParameter("nothing to tune")
    return list(kept.values())


def tune(
    asked: Sequence[Case], target: Path, machine: dict[str, object], *, seconds: float, again: bool, console: Console
) -> None:
    """Search, keep each finding at once where it was measured on GPUs, and show all; exit with 1 if a size failed."""
    from fusedtp.calls import tuning
    from fusedtp.calls.kernels_tuned import version_here

    from .tune_kernels import tune_kernels

    num_gpus = int(str(machine["num_gpus"]))
    before, _, ignored = tuning.load(target)
    if ignored and num_gpus:
        console.print(f"replaced: {ignored}", highlight=False)
    table = before or tuning.Table(machine, (), {})
    there = {each.size for each in table.kernels if each.version == version_here()} if num_gpus and not again else set()
    wanted = [case for case in asked if _size(case) not in there]
    if len(wanted) < len(asked):
        console.print(
            f"{len(asked) - len(wanted)} of {len(asked)} sizes are there: --again tunes them too", highlight=False
        )
    if not num_gpus:
        console.print(INTERPRETED, highlight=False)
    results: list[Found] = []

    def done(found: Found) -> None:
        nonlocal table
        results.append(found)
        if num_gpus:
            table = table.updated(tuning.Table(table.machine, (), {}, (found.tuned(),)))
            tuning.write(target, tuning.dump(table))

    left: list[Case] = []
    if wanted:
        left = tune_kernels(
            wanted, seconds=seconds, num_gpus=num_gpus, said=lambda text: console.print(text, highlight=False),
            done=done,
        )  # fmt: skip
    title = "tiles, measured on this machine" if num_gpus else f"tiles, {INTERPRETED}"
    show([each.tuned() for each in results], title, console)
    if left:
        goes_on = ": the same command goes on with them" if num_gpus else ""
        console.print(f"{len(left)} of {len(asked)} sizes were not reached in {seconds:g} s{goes_on}", highlight=False)
    if num_gpus:
        console.print(f"{len(table.kernels)} tiles in {target}, {len(results)} of them new", highlight=False)
    failed = len(wanted) - len(left) - len(results)
    if failed:
        console.print(f"{failed} of {len(asked)} sizes failed", style="bold red")
        raise typer.Exit(1)


def _size(case: Case) -> tuple[str, int, str, int, int, int]:
    from .tune_kernels import travelling

    return (case.op, case.world_size, case.dtype, *travelling(case))


def show(tuned: Sequence[Tuned], title: str, console: Console) -> None:
    """A line a size: the table's time, the fastest tile and its time, and by how much it is faster for sure."""
    from fusedtp.kernels.choices import of_fields

    from .tables import Table, milliseconds

    lines = [
        {
            "op": each.op, "ranks": each.world_size, "dtype": each.dtype, "travels": f"{each.rows}x{each.cols}",
            "third": each.third, "the table's\nms": milliseconds(each.usual_ms), "fastest\nms": milliseconds(each.ms),
            "by": f"{each.faster:.2f}x" if each.choice else "nothing",
            "tile": str(of_fields(each.choice)) if each.choice else "the table's",
        }
        for each in tuned
    ]  # fmt: skip
    if lines:
        console.print(Table.of("tiles", title, lines).printed(sections=False))


def shown(table: Measurements, console: Console) -> None:
    """Those of a file that are for this version's kernels; and how many are not."""
    from fusedtp.calls.kernels_tuned import version_here

    current = [each for each in table.kernels if each.version == version_here()]
    show(current, "tiles, measured on this machine", console)
    if others := len(table.kernels) - len(current):
        console.print(
            f"{others} tiles are of another version of fusedtp and are not taken: tune them again", highlight=False
        )
