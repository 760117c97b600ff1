"""What the commands share: reading options, stored rows, and where to print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress

    from .cases import Shape
    from .store import Row


def console() -> Console:
    """Standard output, wide enough for a table also where it is no terminal."""
    terminal = Console()
    # a table folded to 80 columns cannot be read in a log either
    return terminal if terminal.is_terminal else Console(width=180)


def names(text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Comma-separated names, each once; BadParameter for one that is not known, or for none."""
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in found if name not in known]
    if unknown or not found:
        raise typer.BadParameter(f"{what} must be among {', '.join(known)}, got {text!r}")
    return found


def numbers(text: str, what: str) -> tuple[int, ...]:
    """Positive integers separated by commas or x; BadParameter for anything else."""
    try:
        found = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise typer.BadParameter(f"{what} must be integers, got {text!r}") from None
    if min(found) < 1:
        raise typer.BadParameter(f"{what} must be positive, got {text!r}")
    return found


def shape(text: str) -> Shape:
    """M,N,K."""
    found = numbers(text, "--shape")
    if len(found) != 3:
        raise typer.BadParameter(f"--shape must be M,N,K, got {text!r}")
    return found[0], found[1], found[2]


def progress(terminal: Console) -> Progress:
    """A bar that leaves nothing behind."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=terminal, transient=True, disable=terminal.quiet)


def rows(path: Path) -> list[Row]:
    """The rows of a file; BadParameter saying why it has none of ours."""
    from . import store

    try:
        return store.read(path)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
