"""`fusedtp predict | explain | plan`: what the cost model and the planners say. No rank is started."""

from __future__ import annotations

import textwrap
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import arguments
from .output import Console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fusedtp.cost.hardware import Hardware
    from fusedtp.cost.model import Prediction

    from .tables import CellTable


def hardware_of(name: str, world_size: int) -> Hardware:
    """Return the hardware of a name in the table. `here` is this machine as `fusedtp tune` measured it."""
    from fusedtp.choose.tuning import hardware_here
    from fusedtp.cost.hardware import HARDWARE, find

    if name.lower() not in (*HARDWARE, "here"):
        raise typer.BadParameter(f"--hardware must be among here, {', '.join(HARDWARE)}, got {name!r}")
    return find(name) if name.lower() in HARDWARE else hardware_here(world_size)


def predict(
    op: Annotated[str | None, typer.Argument(help="Name of the op, from --list.")] = None,
    m: Annotated[str, typer.Option("--m", help="Rows of x: 4096, or 512,1024, or 512:8192 for doubling.")] = "8192",
    n: Annotated[str, typer.Option("--n", help="Columns of the whole y, or of a tensor without a matmul.")] = "28672",
    k: Annotated[str, typer.Option("--k", help="The whole contraction.")] = "8192",
    world_size: Annotated[str, typer.Option(help="Ranks, for example 2,4,8 or 2:64.")] = "8",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float16, float32, float64; fp8, mxfp8 or a float8 of torch's, with scales. Default "
            "bfloat16, with --hardware here float32."
        ),
    ] = None,
    hardware: Annotated[str, typer.Option(help="A name from --list, or here, as tune measured it.")] = "h100",
    gather_dim: Annotated[int, typer.Option(help="1: x is split along the contraction, not along rows.")] = 0,
    algorithm: Annotated[str, typer.Option(help="For an all-reduce: auto, one_shot, two_shot, ring.")] = "auto",
    matmul_us: Annotated[float | None, typer.Option(help="Measured us of the library's matmul, one size.")] = None,
    kernel_matmul_us: Annotated[float | None, typer.Option(help="Measured us of our kernel, without waits.")] = None,
    data_parallel: Annotated[int, typer.Option(help="Replicas that exchange w's gradient over the network.")] = 1,
    overlap_network: Annotated[bool, typer.Option(help="With --data-parallel: hide it behind the matmuls.")] = True,
    casts: Annotated[bool, typer.Option(help="With fp8: every schedule casts x to float8 first.")] = True,
    order: Annotated[
        str, typer.Option(help="rank; any: NVLink's switch adds; tree, tree-16: the same bits on any number of ranks.")
    ] = "rank",
    csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV, with all columns.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw time over M as this PNG.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the ops and the hardware with its sources.")] = False,
) -> None:
    """Predict an op's time by each schedule.

    Nothing is measured: the times follow from sizes and a table of hardware.
    """
    from fusedtp import cost
    from fusedtp.choose.tuning import MODEL_ERROR
    from fusedtp.cost.model import verdict
    from fusedtp.op import OPS

    console = Console()
    if list_:
        show_hardware(console)
        return
    if op is None:
        raise typer.BadParameter(f"give an op ({', '.join(cost.OPS)}), or --list")
    if picture is not None and arguments.file(picture, "--picture").suffix != ".png":
        raise typer.BadParameter(f"--picture must end in .png, got {str(picture)!r}")
    dtype = dtype or ("float32" if hardware == "here" else "bfloat16")
    of_m, of_n, of_k = (arguments.numbers(text, option) for text, option in ((m, "--m"), (n, "--n"), (k, "--k")))
    # A collective alone has no contraction.
    of_k = of_k if op not in OPS or OPS[op].multiplies else of_k[:1]
    sizes = list(dict.fromkeys(product(of_m, of_n, of_k)))
    ranks = list(dict.fromkeys(arguments.numbers(world_size, "--world-size")))
    if len(sizes) * len(ranks) > 1 and (matmul_us is not None or kernel_matmul_us is not None):
        raise typer.BadParameter("a measured time is that of one size and one number of ranks")
    # Refuse an order that the ops refuse. All trees cost the same.
    for num_ranks in ranks:
        arguments.order(order, num_ranks)
    try:
        machines = {num_ranks: hardware_of(hardware, num_ranks) for num_ranks in ranks}
        predictions = [
            cost.predict(
                op, M=M, N=N, K=K, world_size=num_ranks, hardware=machines[num_ranks],
                dtype=arguments.dtype(dtype, machines[num_ranks].float8),
                gather_dim=gather_dim, algorithm=algorithm, matmul_us=matmul_us, kernel_matmul_us=kernel_matmul_us,
                data_parallel=data_parallel, overlap_network=overlap_network,
                casts=casts, order=order.partition("-")[0],
            )
            for num_ranks in ranks
            for M, N, K in sizes
        ]  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(f"{error}") from error
    of_each = [size for _ in ranks for size in sizes]
    table = table_of(predictions, of_each, in_us=csv)
    if picture is not None:
        draw(predictions, of_each, picture)
    if csv:
        typer.echo(table.cells.rename(columns=lambda name: name.replace("\n", " ")).to_csv(index=False), nl=False)
        return
    table.print(console)
    for text in list(dict.fromkeys(text for each in predictions for text in each.assumptions))[1:]:
        console.print(f"- {text}")
    console.print(verdict(predictions, of_each, MODEL_ERROR))
    if picture is not None:
        console.print(f"picture: {picture}", soft_wrap=True)


def draw(predictions: Sequence[Prediction], sizes: Sequence[tuple[int, int, int]], path: Path) -> None:
    """Save the picture of predictions."""
    import pandas as pd

    from . import figures, theme

    lines = [
        {"M": M, "N": N, "K": K, "ranks": each.work.num_ranks, "unfused_us": each.unfused_us, "best_us": each.best_us,
         "bound_us": each.bound_us}
        for each, (M, N, K) in zip(predictions, sizes, strict=True)
    ]  # fmt: skip
    first = predictions[0]
    title = f"{first.op}, {first.work.dtype}, {first.hardware}, predicted"
    with theme.style():
        theme.save(figures.predicted(pd.DataFrame(lines), title), path)


def table_of(predictions: Sequence[Prediction], sizes: Sequence[tuple[int, int, int]], in_us: bool) -> CellTable:
    """Return the predictions as a table, a line each; without `in_us`, in ms if `unfused` takes over 100 ms."""
    from fusedtp.schedules import NAMES

    from .tables import SIZE, CellTable

    first, lines = predictions[0], []
    unit, per_us = ("us", 1.0) if in_us or max(each.unfused_us for each in predictions) <= 1e5 else ("ms", 1e-3)
    for each, size in zip(predictions, sizes, strict=True):
        times = {name: getattr(each, f"{name}_us") for name in reversed(NAMES)}
        times["bound"] = each.bound_us
        parts: dict[str, float | None] = {"matmul": each.matmul_us if each.flops else None, "comm": each.comm_us}
        parts["cast"] = each.cast_us or None
        if each.network_us:
            parts |= {"network": each.network_us, "exposed": each.network_exposed_us}
        lengths = size if each.flops else size[:2]
        lines.append({
            SIZE if each.flops else "M x N": " x ".join(map(str, lengths)), "ranks": each.work.num_ranks,
            **{f"{name}\n{unit}": time and time * per_us for name, time in times.items()},
            "fastest": each.winner, "speed-up": each.speedup,
            "by": each.algorithm if each.work.kind == "all_reduce" else None,
            **{f"{name}\n{unit}": time and time * per_us for name, time in parts.items()},
            "of unfused\nhidden": each.efficiency(each.winner), "sent\nMB": each.sent_bytes / 1e6,
            "GFLOP": each.flops / 1e9,
        })  # fmt: skip
    title = f"predicted, not measured: {first.op}, {first.work.dtype}, {first.hardware}"
    # With replicas, the network's columns are what was asked for.
    optional = ("GFLOP", "MB", "hidden", "cast", "comm", "matmul", "by") + ("bound", "fastest") * bool(first.network_us)
    return CellTable.of("predictions", title, lines, optional=optional)


def show_hardware(console: Console) -> None:
    """Print the ops and the table of hardware."""
    from fusedtp.cost.hardware import listing
    from fusedtp.cost.model import OPS

    for title, lines in (("", [f"ops: {', '.join(OPS)}"]), *listing()):
        if title:
            console.print(title, style="bold")
        for line in lines:
            # Do not break an address, however long.
            folded = textwrap.wrap(
                line, console.width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
            )
            typer.echo("\n".join(folded))


def explain(
    spec: Annotated[str | None, typer.Argument(help="A notation string, or a named layer such as FSDP.")] = None,
    sizes: Annotated[str | None, typer.Option(help="Global lengths, M=8192,K=4096,...")] = None,
    mesh: Annotated[str | None, typer.Option(help="Ranks on each axis, X=8.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of x and w, to count bytes; fp8 too.")] = "bfloat16",
    hardware: Annotated[str | None, typer.Option(help="Predict times for it: see fusedtp predict --list.")] = None,
    table: Annotated[bool, typer.Option(help="Print the table of named layers and their collectives.")] = False,
) -> None:
    """Show the steps, bytes and FLOPs of a sharded matmul.

    For y and both gradients: collectives, the bytes that a rank sends, and the FLOPs that it computes.
    """
    from fusedtp import explain as describe
    from fusedtp.cost.hardware import OCP, find
    from fusedtp.explain import NAMED
    from fusedtp.explain import table as communication_table

    if (spec is None) != table:
        raise typer.BadParameter("give a notation string or a named layer, or --table")
    if spec is None:
        for row in communication_table():
            typer.echo(f"{row.name}: {row.notation}\n  forward: {row.forward}\n  dx: {row.dx}\n  dw: {row.dw}")
        return
    spec = {name.lower(): name for name in NAMED}.get(spec.lower(), spec)
    if "[" not in spec and spec not in NAMED:
        raise typer.BadParameter(f"no layer is named {spec!r}: see --table; or give a notation string")
    try:
        lengths, ranks = arguments.lengths(sizes, "--sizes"), arguments.lengths(mesh, "--mesh")
        meant = arguments.dtype(dtype, OCP if hardware is None else find(hardware).float8)
        found = describe(spec, sizes=lengths, mesh=ranks, dtype=meant, hardware=hardware)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(f"{error}") from error
    typer.echo(str(found))


def plan(
    config: Annotated[str, typer.Argument(help="A config.json or its folder, or a model's name on the hub.")],
    world_size: Annotated[int, typer.Option(min=1, help="Ranks to split over.")] = 2,
    sequence_parallel: Annotated[bool, typer.Option(help="Split tokens between the matmuls.")] = True,
) -> None:
    """Show how a Hugging Face decoder would be split over ranks.

    That is what fusedtp.parallelize would make of it: a style for each module, or why it cannot.
    """
    from rich.padding import Padding

    from fusedtp.hf.plan import plan_of

    try:
        (title, *lines), notes = plan_of(config, world_size, sequence_parallel=sequence_parallel)
    except (ImportError, OSError, ValueError, NotImplementedError) as error:
        raise typer.BadParameter(f"{error}") from error
    console = Console()
    console.print(title, style="bold")
    for line in lines:
        text = line.lstrip(" ")
        console.print(Padding(text, (0, 0, 0, len(line) - len(text)), expand=False))
    for note in notes:
        typer.echo(note, err=True)
