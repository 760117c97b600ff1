"""Tasks run directly, by one schedule, without the functions that people call."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp.calls.dispatch import Ready
from fusedtp.op import OPS, Task
from fusedtp.schedules.forms import Prepared
from fusedtp.workspaces.workspace import Workspace

from .virtual_ranks import Phases
from .virtual_ranks import phases as in_phases


def run(op: str, schedule: str, group: ProcessGroup, *operands: Tensor | None, **options: Any) -> list[Tensor]:
    """The results of a task; options: those of `Task.of`."""
    x = operands[0]
    assert x is not None
    task = Task.of(OPS[op], *operands, **options)
    return Ready(task, schedule, group, x.device).run(_all(task, operands))


def one(op: str, schedule: str, group: ProcessGroup, *operands: Tensor | None, **options: Any) -> Tensor:
    """The only result of a task."""
    (out,) = run(op, schedule, group, *operands, **options)
    return out


# Options of `fused.Fused`.
_HOW = ("producer", "split", "programs")


def results(op: str, ws: Workspace, *operands: Tensor | None, **options: Any) -> Phases:
    """The phases of a task's kernels on a virtual rank, which end with its results."""
    how = {name: options.pop(name) for name in _HOW if name in options}
    task = Task.of(OPS[op], *operands, **options)
    return in_phases(Prepared("fused", task, ws=ws, **how), *_all(task, operands))


def phases(op: str, ws: Workspace, *operands: Tensor | None, **options: Any) -> Generator[None, None, Tensor]:
    """The same, which end with its only result; two of them in one row."""
    outs = yield from results(op, ws, *operands, **options)
    return outs[0] if len(outs) == 1 else torch.cat([out.flatten() for out in outs])


def _all(task: Task, operands: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    # A product's bias is an operand also where it is not given.
    return (*operands, None) if task.op.multiplies and len(operands) == 2 else operands
