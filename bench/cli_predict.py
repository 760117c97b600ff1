"""`fusedtp predict`: what the cost model says about an op, over sizes and numbers of ranks; no rank is started."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Annotated

import typer

from . import arguments

if TYPE_CHECKING:
    from rich.console import Console

    from fusedtp.cost.hardware import Hardware
    from fusedtp.cost.model import Prediction


def hardware_of(name: str, world_size: int) -> Hardware:
    """Return the hardware of a name in the table. `here` is this machine as `fusedtp tune` measured it."""
    from fusedtp.calls import tuning
    from fusedtp.cost.hardware import find, of_gpu

    if name != "here":
        return find(name)
    table, _, ignored = tuning.load()
    machine = None if table is None else of_gpu(str(table.machine["gpu"])) or table.hardware(world_size)
    if machine is None:
        what = "this machine's rates were not measured: run `fusedtp tune` first, with float32 among its dtypes"
        raise ValueError(ignored or what)
    return machine


def predict(
    op: Annotated[str | None, typer.Argument(help="The name of one: --list has them all.")] = None,
    m: Annotated[str, typer.Option("--m", help="Rows of x: 4096, or 512,1024, or 512:8192 for doubling.")] = "8192",
    n: Annotated[str, typer.Option("--n", help="Columns of the whole y, or of a tensor without a matmul.")] = "28672",
    k: Annotated[str, typer.Option("--k", help="The whole contraction.")] = "8192",
    world_size: Annotated[str, typer.Option(help="Ranks, for example 2,4,8 or 2:64.")] = "8",
    dtype: Annotated[
        str,
        typer.Option(help="bfloat16, float16, float32, float64; fp8, mxfp8 or a float8 of torch's, with scales."),
    ] = "bfloat16",
    hardware: Annotated[str, typer.Option(help="A name from --list, or here, as tune measured it.")] = "h100",
    gather_dim: Annotated[int, typer.Option(help="1: what is gathered is split along the contraction.")] = 0,
    algorithm: Annotated[str, typer.Option(help="Of an all-reduce: auto, one_shot, two_shot, ring.")] = "auto",
    matmul_us: Annotated[float | None, typer.Option(help="Measured us of the library's matmul, one size.")] = None,
    kernel_matmul_us: Annotated[
        float | None, typer.Option(help="Measured us of our kernel, signals raised beforehand.")
    ] = None,
    data_parallel: Annotated[int, typer.Option(help="Domains that share w's gradient over the network.")] = 1,
    overlap_network: Annotated[bool, typer.Option(help="Of --data-parallel: hide it behind the matmuls.")] = True,
    casts: Annotated[bool, typer.Option(help="Of fp8: x is made float8 first, by every schedule.")] = True,
    order: Annotated[
        str, typer.Option(help="rank; any: NVLink's switch adds; tree, tree-16: the same bits on any number of ranks.")
    ] = "rank",
    list_: Annotated[bool, typer.Option("--list", help="Show the ops and the hardware with its sources.")] = False,
) -> None:
    """Predict an op's time by each schedule, from its sizes and a table of hardware. Nothing is measured."""
    from fusedtp import cost

    console = arguments.console(160)
    if list_:
        show_hardware(console)
        return
    if op is None:
        raise typer.BadParameter(f"give an op ({', '.join(cost.OPS)}), or --list")
    of_m, of_n, of_k = (arguments.numbers(text, option) for text, option in ((m, "--m"), (n, "--n"), (k, "--k")))
    sizes = list(dict.fromkeys(product(of_m, of_n, of_k)))
    ranks = list(dict.fromkeys(arguments.numbers(world_size, "--world-size")))
    if len(sizes) * len(ranks) > 1 and (matmul_us is not None or kernel_matmul_us is not None):
        raise typer.BadParameter("a measured time is that of one size and one number of ranks")
    # As the functions refuse it; another tree costs the same.
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
        typer.echo(f"{error}", err=True)
        raise typer.Exit(2) from error
    show(predictions, [size for _ in ranks for size in sizes], console)


def show(predictions: list[Prediction], sizes: list[tuple[int, int, int]], console: Console) -> None:
    """Print the table of predictions and, once each, what they assume."""
    from .tables import CellTable

    first, lines = predictions[0], []
    for each, (M, N, K) in zip(predictions, sizes, strict=True):
        times: dict[str, float | None] = {"cast": each.cast_us} if each.cast_us else {}
        times["matmul"] = each.matmul_us if each.flops else None
        times |= {name: getattr(each, f"{name}_us") for name in ("comm", "unfused", "decomposed", "fused", "ceiling")}
        if each.network_us:
            times |= {"network": each.network_us, "exposed": each.network_exposed_us}
        lines.append({
            "M": M, "N": N, "K": K, "ranks": each.work.num_ranks,
            **{f"{name}\nus": time for name, time in times.items()}, "hidden": each.efficiency(each.winner),
            "fastest": each.winner, "speed-up": each.speedup,
            **({"by": each.algorithm} if each.work.kind == "all_reduce" else {}), "sent MB": each.sent_bytes / 1e6,
            "GFLOP": each.flops / 1e9,
        })  # fmt: skip
    title = f"predicted, not measured: {first.op}, {first.work.dtype}, {first.hardware}, microseconds"
    console.print(CellTable.of("predictions", title, lines).printed(sections=False))
    for text in dict.fromkeys(text for each in predictions for text in each.assumptions):
        console.print(f"- {text}", highlight=False)


def show_hardware(console: Console) -> None:
    """Every machine's numbers, each with its source; and the ops."""
    from fusedtp.cost.hardware import HARDWARE, NUMBERS
    from fusedtp.cost.model import OPS

    from .tables import CellTable

    for machine in HARDWARE.values():
        values = {name: getattr(machine, name) for name in NUMBERS if getattr(machine, name) is not None}
        rates = ", ".join(f"{dtype} {rate:g}" for dtype, rate in values["matrix_tflops"].items())
        lines = [
            {"number": name, "value": rates if name == "matrix_tflops" else f"{value:g}",
             "source": machine.sources[name]}
            for name, value in values.items()
        ]  # fmt: skip
        console.print(CellTable.of("hardware", f"{machine.name}: {machine.title}", lines).printed(sections=False))
    console.print(f"ops: {', '.join(OPS)}", highlight=False)
