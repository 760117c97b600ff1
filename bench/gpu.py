"""The first half hour on a GPU: `python -m fusedtp.bench.gpu`, in stages of a few minutes, the most telling first.

Each stage is a process of its own with a limit of time, and goes on where the last command left off: every result is a
row in results/<machine>/ before the next one begins. What fails or hangs does not stop what follows it, and a process
that loses its device is started anew behind the item that lost it. docs/gpu.md says what comes out.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import arguments
from .rank_main import die_with_parent

if TYPE_CHECKING:
    from .gpu_rows import Run
    from .store import Row

STAGE_SECONDS = 450.0
# Beyond it, for a process to say where it is.
END_SECONDS = 15.0
MAX_STARTS = 5
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    # `python -m` puts this folder first otherwise, and its fusedtp/ has no kernels in it.
    "PYTHONSAFEPATH": "1",
    "TRITON_INTERPRET": "0",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    # Deterministic mode, which poisons fresh memory, asks cuBLAS for it.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # For virtual ranks at once: a queue for each stream, and every kernel loaded before one waits.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUDA_MODULE_LOADING": "EAGER",
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
}
EMULATED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Stage:
    """`file`: its rows. `run` does what is left of it, `verdicts` says what the rows mean."""

    what: str
    file: str
    run: Callable[[Run], None]
    verdicts: Callable[[Sequence[Row]], list[str]]


def stages() -> dict[int, Stage]:
    """By number."""
    from . import gpu_checks, gpu_kernels, gpu_links, gpu_matmul
    from .cases import Item

    def first(run: Run) -> None:
        run.do_all([Item("doctor")], gpu_checks.doctor)
        run.do_all(gpu_matmul.items(emulate=run.emulate), gpu_matmul.work)

    def ranks(count: int, word: str) -> Stage:
        what = f"{word} ranks on one GPU: layers, gradients, collectives" + (", captures" if count == 2 else "")
        run = functools.partial(gpu_checks.stage, count)
        return Stage(what, f"gpu-{word}-ranks.csv", run, functools.partial(gpu_checks.verdicts, count))

    return {
        1: Stage("doctor; the plain matmul right, and beside torch.mm", "gpu-matmul.csv", first, gpu_matmul.verdicts),
        2: Stage("every fused kernel, signals preset, beside the own matmul", "gpu-kernels.csv",
            lambda run: run.do_all(gpu_kernels.items(emulate=run.emulate), gpu_kernels.work), gpu_kernels.verdicts),
        3: Stage("virtual ranks behind emulated links", "gpu-links.csv",
            lambda run: run.do_all(gpu_links.items(emulate=run.emulate), gpu_links.work, needs=40.0),
            gpu_links.verdicts),
        4: ranks(2, "two"),
        5: ranks(4, "four"),
    }  # fmt: skip


def inside(number: int, out: Path, emulate: bool, seconds: float, since: str) -> int:
    """What a stage's process does; how it ends, as in `gpu_rows`. No time: only what the rows mean."""
    import torch

    from .gpu_compiled import Counted
    from .gpu_rows import LOST, DeviceLost, Run, machine_here

    stage, counted = stages()[number], Counted()
    machine = machine_here(emulate=emulate)
    device = torch.device("cpu") if emulate else torch.device("cuda", torch.cuda.current_device())
    run = Run(out / machine.name / stage.file, device, machine, seconds, since=since, watched=True)
    if seconds:
        try:
            stage.run(run)
        except DeviceLost as error:
            print(f"the device is lost to this process: {error}")
            return LOST
        print(counted)
    for line in stage.verdicts(run.rows()):
        print(line + ("  (emulated)" if emulate else ""))
    print(f"rows: {run.path}")
    return run.outcome


# Names the process that a stage must not outlive.
_PARENT = "FUSEDTP_GPU_PARENT"


def _inherited(env: dict[str, str]) -> dict[str, str]:
    return {**os.environ, **env, _PARENT: str(os.getpid())}


def bounded(command: Sequence[str], seconds: float, env: dict[str, str]) -> int | None:
    """The exit status; None if it had to be killed, with all that it had started in its session."""
    process = subprocess.Popen(command, env=_inherited(env), stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def conduct(
    number: int, out: Path, *, emulate: bool, seconds: float, start: Callable[..., int | None] = bounded
) -> str:
    """Run a stage in processes until nothing is left, or no time; how it went."""
    from .gpu_rows import LEFT_OVER, LOST, WRONG
    from .rows import now

    deadline, since = time.monotonic() + seconds, now()
    env = ENVIRONMENT | (EMULATED if emulate else {})

    def process(limit: float) -> int | None:
        command = [sys.executable, "-m", "fusedtp.bench.gpu", "--inside", "--stage", str(number), "--out", str(out),
            "--seconds", f"{limit:.0f}", "--since", since, *(["--emulate"] if emulate else [])]  # fmt: skip
        return start(command, limit + END_SECONDS, env)

    code: int | None = LOST
    for _ in range(MAX_STARTS):
        left = deadline - time.monotonic()
        if left < min(60.0, seconds):
            break
        code = process(left)
        if code is not None and code >= 0 and not code & ~(WRONG | LEFT_OVER):
            words = [
                word
                for bit, word in ((WRONG, "something is wrong"), (LEFT_OVER, "something is left over"))
                if code & bit
            ]
            return " and ".join(words) or "right"
        print(f"stage {number}: its process ended by {'its limit' if code is None else code}", flush=True)
    process(0)
    return "did not end"


def listed() -> list[str]:
    """The stages in words."""
    return [f"{number}  {stage.what}  ({stage.file})" for number, stage in stages().items()]


def gpu(
    list_: Annotated[bool, typer.Option("--list", help="Show the stages.")] = False,
    stage: Annotated[list[int] | None, typer.Option(help="Only this stage, 1 to 5; may be repeated.")] = None,
    emulate: Annotated[
        bool, typer.Option(help="A dry run without a GPU: interpreted, tiny, its rows never kept under results.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the rows, one folder a machine; default results.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Limit of each stage.")] = STAGE_SECONDS,
    kernels: Annotated[Path | None, typer.Option(help="A folder that --compile-for has made.")] = None,
    compile_for: Annotated[str | None, typer.Option(help="Compile for a GPU that is not there: sm_90.")] = None,
    into: Annotated[Path | None, typer.Option(help="Folder for what --compile-for compiles.")] = None,
    inside_: Annotated[bool, typer.Option("--inside", hidden=True)] = False,
    since: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Check and time what a GPU can tell in half an hour, in stages that go on where they left off."""
    if inside_ and _PARENT in os.environ:
        # Whoever ends the command, by whichever signal, ends its stage.
        die_with_parent(int(os.environ[_PARENT]))
    chosen: dict[str, object] = {"--stage": stage, "--emulate": emulate, "--out": out, "--kernels": kernels}
    if seconds != STAGE_SECONDS:
        chosen["--seconds"] = seconds
    compiling: dict[str, object] = {"--compile-for": compile_for, "--into": into}
    if list_:
        _alone("--list", chosen | compiling)
        for line in listed():
            typer.echo(line)
        return
    if compile_for is not None or into is not None:
        _alone("--compile-for", chosen)
        _compile(compile_for, into, inside_)
        return
    numbers = sorted(set(stage or stages()))
    if unknown := [number for number in numbers if number not in stages()]:
        raise typer.BadParameter(f"--stage must be from 1 to {len(stages())}, got {unknown[0]}")
    arguments.at_least(0, seconds, "--seconds", most=STAGE_SECONDS)
    if inside_:
        assert out is not None
        raise typer.Exit(inside(numbers[0], out, emulate, seconds, since))
    if emulate and kernels is not None:
        raise typer.BadParameter("--emulate interprets its kernels: --kernels is of no use with it")
    if emulate and out is not None and "results" in out.resolve().parts:
        raise typer.BadParameter(f"a dry run measures nothing that is to be kept in {out}: give --out another folder")
    if not emulate:
        _check_device()
    if kernels is not None:
        _take(kernels)
    with tempfile.TemporaryDirectory() as temporary:
        place = arguments.folder(out) if out else Path(temporary) if emulate else Path("results")
        _all(numbers, place.resolve(), emulate, seconds)


def _alone(option: str, others: dict[str, object]) -> None:
    if given := [name for name, value in others.items() if value]:
        raise typer.BadParameter(f"{option} does not go with {', '.join(given)}")


def _all(numbers: Sequence[int], out: Path, emulate: bool, seconds: float) -> None:
    ends = {}
    for number in numbers:
        print(f"\nstage {number}: {stages()[number].what}", flush=True)
        begin = time.monotonic()
        ends[number] = conduct(number, out, emulate=emulate, seconds=seconds)
        print(f"stage {number}: {ends[number]}, after {time.monotonic() - begin:.0f} s", flush=True)
    if any(end != "right" for end in ends.values()):
        raise typer.Exit(1)


def _check_device() -> None:
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("this needs a CUDA device, and torch finds none: --emulate is the dry run")


def _take(folder: Path) -> None:
    from . import gpu_compiled

    if different := gpu_compiled.differences(folder, gpu_compiled.target_here()):
        print(f"{folder} is of no use here: {'; '.join(different)}")
    else:
        print(f"{gpu_compiled.take(folder)} compiled kernels taken from {folder}")


def _compile(target: str | None, into: Path | None, here: bool) -> None:
    from . import gpu_compiled

    if target not in gpu_compiled.TARGETS or into is None:
        names = ", ".join(gpu_compiled.TARGETS)
        raise typer.BadParameter(
            f"--compile-for takes one of {names} and needs --into a folder, got {target!r}, {into}"
        )
    if here:
        print(f"{gpu_compiled.compile_all(target, into)} kernels compiled for {target}: {into}")
        return
    into = arguments.folder(into, option="--into")
    if any(into.iterdir()) and not (into / gpu_compiled.ABOUT).exists():
        raise typer.BadParameter(f"--into must be a new folder or one that --compile-for has made, got {str(into)!r}")
    if other := gpu_compiled.begin(target, into):
        raise typer.BadParameter(
            f"--into {into} is of another compiler or target, {'; '.join(other)}: give a new folder"
        )
    command = [sys.executable, "-m", "fusedtp.bench.gpu", "--inside", "--compile-for", target, "--into", str(into)]
    done = subprocess.run(command, env=_inherited(ENVIRONMENT | gpu_compiled.environment(into)))
    raise typer.Exit(done.returncode)


if __name__ == "__main__":
    arguments.run(gpu)
