"""The command line, `fusedtp`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from . import arguments, cli_predict, cli_report, cli_tune
from .output import Console, streams
from .ranks import NotJoined

if TYPE_CHECKING:
    from .jobs import Job
    from .store import Measurement


class Folding(TyperGroup):
    """Commands whose errors are lines, folded at the console's width."""

    def main(self, *args: Any, **extra: Any) -> Any:
        with streams():
            return super().main(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        # The base is click's UsageError, or that of a typer with a click of its own.
        usage_error: Any = typer.BadParameter.__base__
        try:
            return super().invoke(ctx)
        except NotJoined as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from error
        except usage_error as error:
            width, text = Console().width, f"Error: {error.format_message()}"
            # A notation's error points at a character in its next line.
            if "\n" not in text:
                folded = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
                error.format_message = lambda: folded.removeprefix("Error: ")
            raise


app = typer.Typer(
    cls=Folding,
    help="Tensor-parallel matmuls fused with their collectives: measure them on this machine.",
    epilog="On a machine with a GPU, `python -P -m fusedtp.bench.gpu` checks and times the kernels in ten minutes.",
    no_args_is_help=True, **arguments.PLAIN,
)  # fmt: skip
app.command()(cli_predict.plan)
app.command()(cli_predict.predict)
app.command()(cli_predict.explain)
app.add_typer(cli_report.app)
app.command()(cli_tune.tune)


def _version(asked: bool) -> None:
    if asked:
        import fusedtp

        typer.echo(f"fusedtp {fusedtp.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def sweep(
    suite: Annotated[
        str,
        typer.Option(
            help="ops: matmuls with a collective; mlp, grouped, decode: layers; block: a whole transformer block, "
            "forward and a step; collectives: against bytes. Comma-separated."
        ),
    ] = "ops",
    world_size: Annotated[
        str | None,
        typer.Option(
            help="Numbers of ranks; default 1, 2, 4 .. up to the GPUs, or the launcher's ranks; on CPUs a few."
        ),
    ] = None,
    op: Annotated[
        str | None,
        typer.Option(
            help="Of the suite ops: all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce; default all."
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="unfused, decomposed, fused, auto; comma-separated. unfused and sequential are always timed."
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            "--baselines",
            help="Other libraries to compare with, comma-separated, or none; fusedtp doctor --providers lists them.",
        ),
    ] = None,
    direction: Annotated[
        str | None, typer.Option(help="forward, backward, both; default forward, and all three at a few sizes.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16, and fp8 or mxfp8, forward alone; comma-separated.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="One global size: M,N,K, or the lengths of the one suite that is given; may be repeated."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Sizes of these models' blocks: llama3-8b, .., or a config.json of Hugging Face.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of the models' blocks: 512,2048, or 16:16384 for doubling.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, callback=arguments.finite, help="Time for the rounds of one case; default by suite, 1."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of each case, in place of --seconds.")] = None,
    graph: Annotated[
        bool, typer.Option("--graph", help="On GPUs: time each variant as a CUDA graph, if it can be captured.")
    ] = False,
    launches: Annotated[
        int, typer.Option(min=1, help="Times to run all timed cases, on fresh ranks; intervals are then over launches.")
    ] = 1,
    patience: Annotated[
        float | None,
        typer.Option(
            min=1,
            callback=arguments.finite,
            help="Seconds that one case may take in all; default three minutes and ten times its estimate.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print rates, checks, reasons and how to read it.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for rows and pictures, one folder a machine: sweep.csv, or SUITE.csv of one.")
    ] = Path("results"),
) -> None:
    """Check and time every schedule on this machine.

    Prints tables and a verdict, and keeps rows as CSV and a picture. Exits with 1 if any check failed.

    Starts its own ranks, or uses those it was launched as (torchrun --no-python --nproc-per-node 2 fusedtp sweep).
    """
    from . import cases, providers
    from .suites import SUITES

    suites = arguments.names(suite, tuple(SUITES), "--suite")
    if model and shape:
        raise typer.BadParameter("--model gives the sizes: leave --shape out")
    if tokens is not None and (shape or ("ops" in suites and not model)):
        raise typer.BadParameter("--tokens is for the blocks of --model")
    if op is not None and "ops" not in suites:
        raise typer.BadParameter("--op chooses among the suite ops, which --suite leaves out")
    if shape and len(suites) > 1:
        raise typer.BadParameter("--shape has the lengths of one suite: give one --suite")
    if shape and suites == ("block",):
        raise typer.BadParameter("a block has heads besides its lengths: give --model in place of --shape")
    others = tuple(dict.fromkeys(each for name in suites for each in SUITES[name].others))
    lists = {
        "ops": (op, cases.OPS, "--op"), "schedules": (schedule, (*cases.SCHEDULES, "auto"), "--schedule"),
        "baselines": (baseline, tuple(dict.fromkeys((*providers.found().providers, *others, "none"))), "--baseline"),
        "directions": (direction, cases.DIRECTIONS, "--direction"),
    }  # fmt: skip
    given: dict[str, Any] = {
        name: arguments.names(text, known, option)
        for name, (text, known, option) in lists.items() if text is not None
    }  # fmt: skip
    if dtype is not None:
        given["dtypes"] = arguments.dtypes_here(dtype, cases.EVERY_DTYPE, "--dtype")
    if "baselines" in given:
        given["baselines"] = tuple(name for name in given["baselines"] if name != "none")
    if suites == ("ops",):
        given["shapes"] = tuple(arguments.shape(text) for text in shape or ())
    else:
        given["sizes"] = tuple(arguments.numbers(text, "--shape") for text in shape or ())
    given |= {"seconds": seconds, "rounds": rounds, "patience": patience, "graph": graph}
    name = "sweep" if suites == ("ops",) or len(suites) > 1 else suites[0]
    _run(suites, world_size, model, tokens, given, out / name, launches=launches, verbose=verbose)


def _run(
    suites: tuple[str, ...], world_size: str | None, model: str | None, tokens: str | None, given: dict[str, Any],
    out: Path, *, launches: int, verbose: bool,
) -> None:  # fmt: skip
    # Plan, run, keep and show suites of cases. out: the folder, and the name of the file of rows.
    from fusedtp.machine import describe

    from . import cases, providers, store
    from .jobs import START_SECONDS, Request, estimate, plan
    from .sweep import join, launched, run_launched, run_spawned

    machine = describe()
    try:
        here = launched()
        models = tuple(filter(None, (model or "").split(",")))
        for each in models:
            cases.sizes_of(each)
    except ValueError as error:
        raise typer.BadParameter(f"{'--model: ' * ('model' in str(error))}{error}") from error
    num_gpus = machine.num_gpus if here is None else here.num_gpus(machine.num_gpus)
    sizes = None if world_size is None else arguments.ranks(world_size)
    if here is not None and sizes and max(sizes) > here.world_size:
        raise typer.BadParameter(f"--world-size {world_size}: {here.world_size} ranks were launched")
    if here is not None and launches > 1:
        raise typer.BadParameter("--launches starts fresh ranks, which a launcher's command cannot: leave it out")
    if given.get("graph") and not num_gpus:
        raise typer.BadParameter("--graph captures CUDA graphs: without a GPU there are none")
    request = Request(
        suites=suites, world_sizes=sizes, models=models,
        tokens=arguments.numbers(tokens, "--tokens") if tokens is not None else None, **given,
    )  # fmt: skip
    speaks = here is None or here.rank == 0
    console = Console(quiet=not speaks)
    path = arguments.folder(out.parent, machine.name) / f"{out.name}.csv"
    if path.exists():
        # Fail before minutes are spent on rows that could not be added to the file.
        arguments.rows(path, "; move it away to write a new one")
    try:
        jobs = plan(request, num_gpus, machine.gpu, 0 if here is None else here.world_size)
    except ValueError as error:
        raise typer.BadParameter(f"{'--shape: ' * bool(given.get('sizes'))}{error}") from error
    if not jobs:
        raise typer.BadParameter("nothing to run: no size is left for these ops, dtypes, directions and world sizes")
    for text in providers.found().warnings:
        console.print(f"warning: {text}", style="yellow")
    if checked := dict.fromkeys(f"{job.case.M} x {job.case.N} x {job.case.K}" for job in jobs if not job.timed):
        console.print(f"Also checked, not timed: kernels at {' and '.join(checked)}, as odd sizes take other code")
    if not machine.num_gpus and (most := max(job.case.world_size for job in jobs)) > machine.cores:
        console.print(
            f"{most} ranks on {machine.cores} cores take turns: their times say little about a larger machine"
        )
    if here is not None:
        join(here, jobs)
    run = partial(run_spawned, launches=launches) if here is None else run_launched
    kept = f"the rows of what had ended are in\n{path}\n`fusedtp report` with this file shows them"
    steps = [(f"{job.case}{', checked' * (not job.timed)}", estimate(job)) for job in jobs]
    steps[0] = steps[0][0], steps[0][1] + START_SECONDS
    # Jobs that are only checked run once.
    steps += (launches - 1) * [step for step, job in zip(steps, jobs, strict=True) if job.timed]
    with arguments.progress(console, steps, kept) as step:

        def done(job: Job, new: list[Measurement]) -> None:
            if speaks:
                store.update(path, new)
            step()

        rows = run(jobs, machine, done)
    if speaks:
        _keep(rows, store.update(path, rows), path, console, verbose)


def _keep(rows: list[Measurement], together: list[Measurement], path: Path, console: Console, verbose: bool) -> None:
    # Show the rows of a sweep, draw the picture of all; exit with 1 if a check failed.
    from . import report

    report.show(rows, console, verbose=verbose)
    drawn = report.picture(together, path.with_suffix(".png"))
    told = f"{len(rows)} rows" + f" ({len(together)} in the file)" * (len(together) > len(rows))
    console.print(f"{told}: {path}", soft_wrap=True)
    if drawn:
        console.print(f"picture: {path.with_suffix('.png')}", soft_wrap=True)
    if num_failed := sum(row.failed for row in rows):
        console.print(f"{num_failed} of {len(rows)} rows did not pass the check", style="bold red")
        raise typer.Exit(1)


@app.command()
def train(
    steps: Annotated[int, typer.Option(min=1, help="Steps of every run.")] = 50,
    fused_steps: Annotated[int, typer.Option(min=1, help="Steps with interpreted kernels.")] = 10,
    order: Annotated[
        str,
        typer.Option(help="Order of sums: rank; any; tree (8 leaves) or tree-N: the same bits on any number of ranks."),
    ] = "rank",
    out: Annotated[Path, typer.Option(help="Folder for the curves, one folder a machine.")] = Path("results"),
) -> None:
    """Train a small decoder by every schedule: losses must agree.

    On a 2 x 2 mesh of CPU ranks, and in one process, which is the reference.
    """
    from fusedtp.machine import describe

    from . import train as training
    from .cases import ranks

    arguments.order(order, 4)
    console = Console()
    folder = arguments.folder(out, describe().name)
    settings, csv = training.Training(steps=steps, order=order), folder / "train.csv"
    seconds = {"process": 0.05, "fused": 3.0}
    planned = [
        (f"{name}, {num} step{'s' * (num != 1)}", num * seconds.get(name.rpartition(" ")[2], 0.2))
        for name, num in training.runs(settings, min(fused_steps, steps)).items()
    ]
    # Each size starts its own ranks.
    sizes = (1, 2, 4)
    planned += [(f"log-probabilities on {ranks(size)}", 6.0) for size in sizes]
    num_runs = len(planned) - len(sizes)
    console.print(f"{num_runs} runs of training, then log-probabilities on 1, 2 and 4 ranks, bit for bit")
    with arguments.progress(console, planned, f"{csv}\nis written once its {num_runs} runs have ended") as done:
        curves = training.compare(settings, min(fused_steps, steps), folder, done)
        bits = training.compare_bits(training.of_order(order), sizes, done)
    reference, *_ = curves.values()
    for name, losses in curves.items():
        far = max(abs(loss - other) for loss, other in zip(losses, reference, strict=False))
        count = f"{len(losses):3} step{'s' * (len(losses) != 1)}"
        console.print(f"{name:24} {count:9}  loss {losses[0]:.4f} -> {losses[-1]:.4f}  off by {far:.1e}")
    console.print(f"curves: {csv}\npicture: {csv.with_suffix('.png')}", soft_wrap=True)
    console.print("log-probabilities, compared with those of 1 rank, batch 1:")
    for num_ranks, batch, same, far in bits[1:]:
        told = "the same bits" if same else f"other bits, off by {far:.1e}"
        console.print(f"log-probabilities, order {order}, {ranks(num_ranks)}, batch {batch}: {told}")


@app.command()
def overhead(
    out: Annotated[Path, typer.Option(help="The file that rows are added to.")] = Path("overhead.csv"),
    rounds: Annotated[int, typer.Option(min=2, help="Rounds, of which medians and quartiles are kept.")] = 15,
) -> None:
    """Measure a call's cost on its host, in microseconds.

    That is the time of a call on CPU ranks, less its matmul, copies and waits.
    """
    from . import overhead as measuring
    from .cases import ranks

    console, out = Console(), arguments.file(out, "--out")
    steps = [(ranks(size), 0.5 * rounds) for size in (1, 2)]
    with arguments.progress(console, steps, f"{out} is as it was") as done:
        frame = measuring.overhead(out, rounds, done)
    measuring.table(frame).print(console)
    if frame["q1_us"].min() < 0:
        console.print("Careful, calls took less than their parts: take more --rounds, on a quiet machine.")
    console.print(f"both: forward and backward. Rows added to {out}", soft_wrap=True)


def main() -> None:
    """Run the `fusedtp` command."""
    app()


if __name__ == "__main__":
    main()
