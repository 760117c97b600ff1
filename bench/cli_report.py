"""Commands that print and draw what is known: `fusedtp report | compare | timeline | doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.spinner import Spinner

from fusedtp.op import ALL_GATHER_MATMUL

from . import arguments
from .output import LIVE, Console

app = typer.Typer(**arguments.PLAIN)


@app.command()
def report(
    rows: Annotated[list[Path] | None, typer.Argument(help="CSV files of results; default this machine's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of results without CSV files; default results.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print rates, checks, reasons and how to read it.")
    ] = False,
    hardware: Annotated[
        str | None, typer.Option(help="Also draw the cost model's predictions for a name of predict --list, or here.")
    ] = None,
) -> None:
    """Print the tables of stored rows, draw a picture and a page.

    sweep.csv gives sweep.png, sweep.html, which needs no other file, and its pictures as PNGs in sweep-figures/. A
    timeline.json beside it is drawn on the page too.
    """
    from fusedtp.machine import describe

    from . import report as drawing
    from .cli_predict import hardware_of

    console = Console()
    if rows and out is not None:
        raise typer.BadParameter("pictures and pages are written beside the CSV files: leave --out away")
    for path in rows or [(out or Path("results")) / describe().name / "sweep.csv"]:
        stored = arguments.rows(path)
        try:
            modelled = drawing.predictions(stored, partial(hardware_of, hardware)) if hardware is not None else []
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        drawing.show(stored, console, verbose=verbose)
        try:
            with Live(Spinner("dots", "Drawing the pictures and the page"), console=console, **LIVE):
                drawn = drawing.picture(stored, path.with_suffix(".png"))
                malformed = drawing.write([*stored, *modelled], path)
        except OSError as error:
            raise typer.BadParameter(f"pictures and page go beside the rows, and cannot be written: {error}") from error
        if drawn:
            console.print(f"picture: {path.with_suffix('.png')}", soft_wrap=True)
        if malformed:
            console.print(f"no timeline on the page: {malformed}")
        folder = drawing.folder_of(path)
        pictures = f"\nits pictures: {folder}/" if folder.is_dir() else ""
        console.print(f"page: {path.with_suffix('.html')}{pictures}", soft_wrap=True)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="CSV file of results: before.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="CSV file of results: after.")],
    absolute: Annotated[bool, typer.Option(help="Compare times; default is time / unfused of each file.")] = (False),
    confidence: Annotated[float, typer.Option(min=0.5, max=0.9999, help="Level of the confidence intervals.")] = 0.95,
    across_machines: Annotated[bool, typer.Option(help="Compare results of different machines too.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list what did not change, and what is in one file only.")
    ] = False,
) -> None:
    """Say what got faster or slower from A to B.

    Ratios have confidence intervals. Exits with 2 where the files come from different machines or have no case in
    common, whatever the times say.
    """
    from . import compare as comparing

    console = Console()
    old, new = arguments.rows(before), arguments.rows(after)
    found = comparing.compare(old, new, absolute=absolute, confidence=confidence)
    where = [", ".join(sorted(comparing.machines(rows))) for rows in (old, new)]
    if where[0] != where[1]:
        if untimed := [str(path) for path, names in zip((before, after), where, strict=True) if not names]:
            raise typer.BadParameter(f"there is no time to compare in {' and '.join(untimed)}")
        text = f"A was measured on {where[0]}, B on {where[1]}"
        if found.changes and not across_machines:
            in_common = comparing.in_common(found)
            raise typer.BadParameter(f"{text}: give --across-machines to compare them all the same. {in_common}")
        console.print("Warning:", style="bold yellow", end=" ")
        console.print(f"{text}: what differs may be the machine, not the code.")
    for line in comparing.conditions(old, new):
        console.print("differs:", style="yellow", end=" ")
        console.print(line)
    comparing.show(found, console, absolute=absolute, confidence=confidence, everything=everything)
    if not found.changes:
        console.print("Nothing to compare: no case and variant is timed in both files.")
        raise typer.Exit(2)


@app.command()
def timeline(
    op: Annotated[str, typer.Option(help="The op.")] = ALL_GATHER_MATMUL.name,
    shape: Annotated[str, typer.Option(help="Global size M,N,K.")] = "2048,512,2048",
    world_size: Annotated[int, typer.Option(min=2, max=arguments.MAX_RANKS, help="Number of ranks.")] = 2,
    schedule: Annotated[str, typer.Option(help="Schedules that run from the host.")] = "decomposed,sequential,unfused",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="Calls recorded; the median one is shown.")] = 9,
    out: Annotated[Path, typer.Option(help="Folder of results, one folder a machine.")] = Path("results"),
) -> None:
    """Record when each rank multiplies, copies and waits.

    Leaves one call of each schedule as timeline.json, for Perfetto, and timeline.png. Says which schedule is faster
    over all recorded calls, and why the shown one is slower where it is.
    """
    from fusedtp.machine import describe

    from . import timeline as recorded
    from .cases import DTYPES, OPS, Case
    from .ranks import RankError

    console, machine = Console(), describe()
    if 0 < machine.num_gpus < world_size:
        raise typer.BadParameter(f"{world_size} ranks need {world_size} GPUs, this machine has {machine.num_gpus}")
    if "fused" in schedule.split(","):
        raise typer.BadParameter("schedule 'fused' is one kernel: the host cannot see what happens inside")
    schedules = arguments.names(schedule, recorded.SCHEDULES, "--schedule")
    (op,) = arguments.names(op, OPS, "--op")[:1]
    (dtype,) = arguments.names(dtype, DTYPES, "--dtype")[:1]
    case = Case(op, *arguments.shape(shape), dtype, world_size)
    path = arguments.folder(out, machine.name) / "timeline.json"
    try:
        step = f"{case}, {rounds} round{'s' * (rounds > 1)}", 10.0
        with arguments.progress(console, [step], f"{path} is as it was") as done:
            found = recorded.timeline(case, schedules, rounds, machine)
            done()
    except RankError as error:
        console.print(str(error))
        raise typer.Exit(1) from error
    recorded.write(found, path)
    recorded.picture(found, path.with_suffix(".png"))
    for line in recorded.remarks(found):
        console.print(line)
    told = f"trace, for ui.perfetto.dev or chrome://tracing:\n  {path}\npicture: {path.with_suffix('.png')}"
    console.print(told, soft_wrap=True)


@app.command()
def doctor(
    providers: Annotated[bool, typer.Option("--providers", help="List the baselines of `fusedtp sweep` too.")] = False,
) -> None:
    """Say what this machine has and which schedules run here.

    The last line says which one `auto` takes.
    """
    from fusedtp import doctor as examined
    from fusedtp.machine import describe

    from .providers import listing
    from .ranks import RankError, RankPool
    from .sweep import rank_environment

    console, machine = Console(), describe()
    for title, lines in examined.sections(machine).items():
        _section(console, title, lines)
    # Try real ranks, one for each GPU, for a few seconds.
    count = max(2, machine.num_gpus)
    try:
        with RankPool(count, timeout=60.0, env=rank_environment(machine.num_gpus, count)) as pool:
            reached, detail = pool.run(examined.reachable)[0]
    except RankError as error:
        reached, detail = False, f"trying it failed: {error}"
    found = examined.findings(machine, reached, detail)
    _section(console, "Schedules", [*examined.schedule_lines(found)])
    if providers:
        _section(console, "Providers", listing(found.num_gpus))
    console.print(found.verdict)


def _section(console: Console, title: str, lines: Sequence[tuple[str, str]]) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(*line)
    if lines:
        console.print(title, style="bold")
        console.print(table)
