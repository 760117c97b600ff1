"""Which ops a program runs, for `fusedtp tune --kernels --calls FILE`: FUSEDTP_CALLS=FILE writes each kind once.

A line of JSON for each op, dtype, number of ranks and size that is made ready, by the group's first rank, behind what
the file has. Nothing is written at a call that ran before, so a whole training run can be recorded.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..files import read_text
from ..op import OPS, Task
from ..sharding.plan import ITEMSIZE
from ..workspaces.entries import entry_of

ENVIRONMENT = "FUSEDTP_CALLS"
# Thousands of kinds of calls.
MAX_BYTES = 8 << 20
MOST_RANKS, MOST_LENGTH = 1 << 16, 1 << 40


class Call(NamedTuple):
    """The matmul of an op, whole: y [M, N] = x [M, K] @ w [N, K].T; of a rank's uneven part, times the ranks."""

    op: str
    world_size: int
    dtype: str
    M: int
    N: int
    K: int


# What this process has written, by file: it is not read again. And files that it cannot write.
_written: dict[str, set[Call]] = {}
_refused: set[str] = set()


def of_task(task: Task, world_size: int) -> Call | None:
    """The call that a task is; None for one that multiplies nothing."""
    if not task.op.multiplies or 0 in task.moved:
        return None
    (rows, cols), third = task.moved, task.shape(1)[1]
    if task.op.kind == "gather":
        third = sum([third, *(b[1] for b, _ in task.blocks(task.shapes) if b is not None)])
        sizes = (rows, third * world_size, cols) if task.dim == 0 else (rows, third, cols)
    else:
        sizes = rows, cols, task.shape(0)[1] * world_size
    return None if 0 in sizes else Call(task.op.name, world_size, task.multiplied_in, *sizes)


def record(task: Task, rank: int, world_size: int) -> None:
    """Write the task's call, if calls are recorded and this is the first of its kind; a file that cannot be written is
    warned of, once.
    """
    target = os.environ.get(ENVIRONMENT, "")
    if not target or rank != 0 or world_size == 1 or target in _refused:
        return
    call, written = of_task(task, world_size), _written.setdefault(target, set())
    if call is None or call in written:
        return
    written.add(call)
    try:
        path = Path(target).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        # A line at a time: groups of several processes may share a file.
        with open(path, "a") as file:
            file.write(json.dumps(call._asdict()) + "\n")
    except (OSError, RuntimeError) as error:
        warnings.warn(f"fusedtp records no calls: {ENVIRONMENT} is {target!r}: {error}", stacklevel=3)
        _refused.add(target)


def read(path: Path) -> list[Call]:
    """The calls of a file, each once; ValueError saying which line is none, OSError as of `open`."""
    found: dict[Call, None] = {}
    for number, line in enumerate(read_text(path, max_bytes=MAX_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.setdefault(_parsed(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not a call as {ENVIRONMENT} writes it: {error}") from error
    return list(found)


def _parsed(line: str) -> Call:
    entry = entry_of(line).only(*Call._fields)
    names: Sequence[str] = [name for name, op in OPS.items() if op.multiplies]
    return Call(
        entry.text("op", among=names), entry.integer("world_size", 2, MOST_RANKS), entry.text("dtype", among=ITEMSIZE),
        *(entry.integer(name, 1, MOST_LENGTH) for name in ("M", "N", "K")),
    )  # fmt: skip
