"""Parse options, read stored rows, and show progress, for all commands."""

from __future__ import annotations

import contextlib
import math
import os
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from . import output
from .jobs import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console

    from .cases import Shape
    from .store import Measurement


# Help and errors are plain text, never truncated.
PLAIN: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}

# Short names of dtypes.
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

# Each rank is a process; no machine has so many GPUs.
MAX_RANKS = 256


@contextlib.contextmanager
def progress(console: Console, steps: Sequence[tuple[str, float]], kept: str) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step: it moves a bar, or prints a line in a log, with the time left.

    Ctrl-C prints `kept`, or that no step had ended, and exits with 130.

    - steps: a description and the estimated seconds of each step.
    """
    total, begin = sum(seconds for _, seconds in steps), time.monotonic()
    console.print(f"{len(steps)} step{'s' * (len(steps) > 1)}, {expected(total)}; Ctrl-C ends it")
    text = TextColumn("{task.fields[left]} left: {task.description}", markup=False)
    columns = (TimeElapsedColumn(), BarColumn(12), text)
    with Progress(*columns, console=console, disable=not console.is_terminal, **output.LIVE) as bar:
        first = 0.0
        task, left = (
            bar.add_task(f"start of ranks, {steps[0][0]}", total=total, left=duration(total)),
            iter(enumerate(steps, 1)),
        )

        def done() -> None:
            nonlocal first
            number, (text, _) = next(left)
            past, rest = time.monotonic() - begin, sum(seconds for _, seconds in steps[number:])
            # Assume the pace so far for the share of the rest that is over: that of a few steps may be anything. Leave
            # out the first step, which starts the ranks.
            first = first or past
            over = sum(seconds for _, seconds in steps[1:number])
            if over + rest > 0:
                rest *= 1 + (past - first - over) / (over + rest)
            next_text = steps[min(number, len(steps) - 1)][0]
            bar.update(task, completed=past, total=past + rest, left=duration(rest), description=next_text)
            if not console.is_terminal:
                console.print(f"{number}/{len(steps)}, after {duration(past)}, about {duration(rest)} left: {text}")

        try:
            yield done
        except KeyboardInterrupt:
            bar.stop()
            told = kept if first else "no step had ended, and no file was changed"
            console.print(f"Stopped after {duration(time.monotonic() - begin)}:\n{told}", soft_wrap=True)
            raise typer.Exit(130) from None


def expected(seconds: float) -> str:
    """Return an estimate in words, of the seconds on an idle machine: a range if this machine does something else.

    A process that shares cores takes its part of them, and ranks that wait for each other up to twice as long.
    """
    others = os.getloadavg()[0] / (os.cpu_count() or 1)
    if others < 0.25:
        return f"about {duration(seconds)}"
    return f"{duration(seconds)} to {duration(2 * (1 + others) * seconds)}, as the machine does something else too"


def names(text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Return comma-separated names, each once; BadParameter for an unknown name, or for none."""
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in found if name not in known]
    if unknown or not found:
        raise typer.BadParameter(f"{what} must be among {', '.join(known)}, got {text!r}")
    return found


def dtype(text: str, float8: str) -> str:
    """Return a dtype's full name; fp8 stands for `float8`, which depends on the machine."""
    return float8 if text.strip() == "fp8" else _SHORT.get(text.strip(), text.strip())


def dtypes_here(text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Return the `names` of dtypes, short or long; fp8 stands for the float8 dtype that this machine multiplies."""
    import torch

    from ..float8 import native

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fp8 = str(native(device).e4m3).removeprefix("torch.")
    return names(",".join(dtype(each, fp8) for each in text.split(",")), known, what)


def order(text: str, num_ranks: int) -> str:
    """Return the reduction order, checked for a number of ranks; BadParameter for an invalid order."""
    from fusedtp.op import Options

    from ..calls.arguments import leaves_of

    try:
        leaves_of(Options(order=text), num_ranks)
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from None
    return text


def numbers(text: str, what: str, most: int = 2**31 - 1) -> tuple[int, ...]:
    """Return integers from 1 to `most`, separated by commas or x; BadParameter for anything else.

    256:4096 means 256, 512, 1024, 2048, 4096.
    """
    found: list[int] = []
    try:
        for part in text.replace("x", ",").split(","):
            first, _, last = part.partition(":")
            found.append(int(first))
            if last and int(last) < found[-1]:
                raise typer.BadParameter(f"{what} must double upwards, got {text!r}")
            while last and 0 < 2 * found[-1] <= int(last):
                found.append(2 * found[-1])
            if last and found[-1] != int(last):
                raise typer.BadParameter(f"{what} {part}: {first} doubled again and again is never {last}")
    except ValueError:
        raise typer.BadParameter(f"{what} must be integers, got {text!r}") from None
    if min(found) < 1:
        raise typer.BadParameter(f"{what} must be positive, got {text!r}")
    if max(found) > most:
        raise typer.BadParameter(f"{what} must be at most {most}, got {text!r}")
    return tuple(found)


def ranks(text: str) -> tuple[int, ...]:
    """Return numbers of ranks that may be started on one machine, each once."""
    return tuple(dict.fromkeys(numbers(text, "--world-size", MAX_RANKS)))


def lengths(text: str | None, option: str) -> dict[str, int] | None:
    """Return lengths from comma-separated NAME=NUMBER, each name once; BadParameter for anything else."""
    if text is None:
        return None
    found: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(-?[0-9]+)\s*", part)
        if match is None:
            raise typer.BadParameter(f"{option} takes NAME=NUMBER, comma-separated, got {text!r}")
        if match[1] in found:
            raise typer.BadParameter(f"{option} must have each name once, got {match[1]} twice in {text!r}")
        found[match[1]] = int(match[2])
    return found


def finite(value: float | None) -> float | None:
    """Return the value; BadParameter if not finite, as an option's limits do not refuse NaN."""
    if value is None or math.isfinite(value):
        return value
    raise typer.BadParameter(f"{value} is no finite number")


def folder(out: Path, name: str = "", option: str = "--out") -> Path:
    """Return the folder `out`/`name`, created if missing; BadParameter, before any measurement, if not writable."""
    if why := _unwritable(out / name):
        raise typer.BadParameter(f"{option} must be a folder that can be written, got {str(out)!r}: {why}")
    return out / name


def file(path: Path, option: str) -> Path:
    """Return the path of a file to write, in a folder that is created if missing; BadParameter if not writable."""
    if why := "it is a folder" if path.is_dir() else _unwritable(path.parent):
        raise typer.BadParameter(f"{option} must be a file that can be written, got {str(path)!r}: {why}")
    return path


def _unwritable(path: Path) -> str:
    # Why no file can be written in this folder, or "".
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return ""
    except OSError as error:
        return f"{path}: {error.strerror}"


def shape(text: str, option: str = "--shape", lengths: str = "M,N,K") -> Shape:
    """Return three lengths."""
    found = numbers(text, option)
    if len(found) != 3:
        raise typer.BadParameter(f"{option} must be {lengths}, got {text!r}")
    return found[0], found[1], found[2]


def rows(path: Path, remedy: str = "") -> list[Measurement]:
    """Return the rows of a file. BadParameter gives the reason if there are none, and the remedy."""
    from . import store

    try:
        return store.read(path)
    except FileNotFoundError as error:
        raise typer.BadParameter(f"there is no file {path}") from error
    except (ValueError, OSError) as error:
        raise typer.BadParameter(f"{error}{remedy}") from error


def run(command: Callable[..., None]) -> None:
    """Run the command of a module that is started by `python -m`."""
    app = typer.Typer(**PLAIN)
    app.command()(command)
    with output.streams():
        app()
