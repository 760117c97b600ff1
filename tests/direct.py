"""Run tasks directly by one schedule, without the public functions."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp.calls.bound import BoundTask
from fusedtp.epilogue import Epilogue
from fusedtp.op import OPS, Product, Task
from fusedtp.schedules.forms import Prepared
from fusedtp.workspaces.workspace import Workspace

from .virtual_ranks import Phases
from .virtual_ranks import phases as in_phases

# Names of an op's operands, and of the operands of each further weight, in the order in which tests pass them. c: of a
# further product X.T @ c, or transposed in a sum's task, which gathers g for it.
_NAMES = {
    "all_gather_matmul": (("a", "b", "bias", "c"), ("b", "bias")),
    "matmul_reduce_scatter": (("a", "b", "bias", "c", "g", "residual"), ("a", "b", "c")),
    "matmul_all_reduce": (("a", "b", "bias", "residual"), ("a", "b")),
}


def named(op: str, *operands: Tensor | None, norm: str = "") -> dict[str, Tensor]:
    """Return a task's operands by name."""
    first, block = _NAMES.get(op, (("a",), ()))
    more = ("norm_weight", "norm_bias") if norm else (f"{name}{i}" for i in range(1, 99) for name in block)
    given = {name: each for name, each in zip((*first, *more), operands, strict=False) if each is not None}
    # Tests pass the left operand of left @ X.
    return {name: each.t() if name[0] == "c" and "g" in given else each for name, each in given.items()}


def task_of(op: str, *operands: Tensor | None, sizes: Sequence[int] = (), **options: Any) -> Task:
    """Return a task on these operands; options: its other fields, and those of its epilogue."""
    asked = {name: options.pop(name) for name in Epilogue._fields if name in options}
    steps = Epilogue(**{name: value for name, value in asked.items() if value})
    given = named(op, *operands, norm=steps.norm or "")
    shapes = {
        name: (each.shape[0], each.shape[1]) if each.ndim == 2 else (1, each.shape[0]) for name, each in given.items()
    }
    epilogue = steps.named(given, sum(name[0] == "b" and name[1:].isdigit() for name in given) + 1)
    return Task(OPS[op], shapes, given["a"].dtype, tuple(sizes), epilogue=epilogue, **further_of(given), **options)


def further_of(given: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields of a task with further products, those of operands c, c1, .. that are given."""
    gathers = "g" if "g" in given else ""
    further = [Product("outer", name, transposed=bool(gathers)) for name in given if name[0] == "c"]
    return {"further": tuple(further), "gathers": gathers}


def run(op: str, schedule: str, group: ProcessGroup, *operands: Tensor | None, **options: Any) -> list[Tensor]:
    """Run a task, check the shapes of its results and return the results.

    options: those of `task_of`, and `outs`, tensors for the results.
    """
    into = options.pop("outs", ())
    given, task = named(op, *operands, norm=options.get("norm", "")), task_of(op, *operands, **options)
    outs = BoundTask(task, schedule, group, given["a"].device).run(given, into)
    assert [tuple(out.shape) for out in outs] == [tuple(shape) for shape in task.results(group.rank())]
    return outs


def one(op: str, schedule: str, group: ProcessGroup, *operands: Tensor | None, **options: Any) -> Tensor:
    """Return the only result of a task."""
    (out,) = run(op, schedule, group, *operands, **options)
    return out


# Options of `fused.Fused`.
_HOW = ("producer", "split", "programs")


def results(op: str, ws: Workspace, *operands: Tensor | None, **options: Any) -> Phases:
    """Run a task's kernels on a virtual rank phase by phase, and return the results."""
    how = {name: options.pop(name) for name in _HOW if name in options}
    task = task_of(op, *operands, **options)
    return in_phases(Prepared("fused", task, ws=ws, **how), named(op, *operands, norm=task.epilogue.norm or ""))


def phases(op: str, ws: Workspace, *operands: Tensor | None, **options: Any) -> Generator[None, None, Tensor]:
    """Run the phases and return the only result, or several results flattened into one row."""
    outs = yield from results(op, ws, *operands, **options)
    return outs[0] if len(outs) == 1 else torch.cat([out.flatten() for out in outs])
