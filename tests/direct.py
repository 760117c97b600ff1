"""Tasks run directly, by one schedule, without the functions that people call."""

from __future__ import annotations

from collections.abc import Generator, Sequence
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

# Names of an op's operands, and of those of each further weight, in the order in which tests give them.
_NAMES = {
    "all_gather_matmul": (("a", "b", "bias", "right"), ("b", "bias")),
    "matmul_reduce_scatter": (("a", "b", "bias", "left", "x", "residual"), ("a", "b", "left")),
    "matmul_all_reduce": (("a", "b", "bias", "residual"), ("a", "b")),
}


def named(op: str, *operands: Tensor | None, norm: str = "") -> dict[str, Tensor]:
    """A task's operands by name."""
    first, block = _NAMES.get(op, (("a",), ()))
    more = ("norm_weight", "norm_bias") if norm else (f"{name}{i}" for i in range(1, 99) for name in block)
    return {name: each for name, each in zip((*first, *more), operands, strict=False) if each is not None}


def task_of(op: str, *operands: Tensor | None, sizes: Sequence[int] = (), **options: Any) -> Task:
    """A task on these operands; options: its other fields."""
    given = named(op, *operands, norm=options.get("norm", ""))
    shapes = {
        name: (each.shape[0], each.shape[1]) if each.ndim == 2 else (1, each.shape[0]) for name, each in given.items()
    }
    return Task(OPS[op], shapes, given["a"].dtype, tuple(sizes), **options)


def run(op: str, schedule: str, group: ProcessGroup, *operands: Tensor | None, **options: Any) -> list[Tensor]:
    """The results of a task, of the shapes that it tells; options: those of `task_of`."""
    given, task = named(op, *operands, norm=options.get("norm", "")), task_of(op, *operands, **options)
    outs = Ready(task, schedule, group, given["a"].device).run(given)
    assert [tuple(out.shape) for out in outs] == [tuple(shape) for shape in task.results(group.rank())]
    return outs


def one(op: str, schedule: str, group: ProcessGroup, *operands: Tensor | None, **options: Any) -> Tensor:
    """The only result of a task."""
    (out,) = run(op, schedule, group, *operands, **options)
    return out


# Options of `fused.Fused`.
_HOW = ("producer", "split", "programs")


def results(op: str, ws: Workspace, *operands: Tensor | None, **options: Any) -> Phases:
    """The phases of a task's kernels on a virtual rank, which end with its results."""
    how = {name: options.pop(name) for name in _HOW if name in options}
    task = task_of(op, *operands, **options)
    return in_phases(Prepared("fused", task, ws=ws, **how), named(op, *operands, norm=task.norm))


def phases(op: str, ws: Workspace, *operands: Tensor | None, **options: Any) -> Generator[None, None, Tensor]:
    """The same, which end with its only result; two of them in one row."""
    outs = yield from results(op, ws, *operands, **options)
    return outs[0] if len(outs) == 1 else torch.cat([out.flatten() for out in outs])
