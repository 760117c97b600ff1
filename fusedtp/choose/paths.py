"""Records of how ops ran: `last_path`, `paths`, and `require`, which refuses an op that would run otherwise."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..op import Shape, Task
from ..schedules import NAMES
from ..switch import Switch
from ..workspaces import generation

# Ops that `paths` returns at most.
MOST = 10_000


@dataclass(frozen=True)
class Path:
    """Record of how an op ran, and the reason.

    - `op`: the op's name.
    - `schedule`: fused, decomposed or unfused.
    - `reason`: why this schedule ran.
    - `producer`: how `fused` sent the gathered operand: push, copy or multicast; "" if it gathered nothing.
    - `epilogue`: the activation, residual or norm at the op's end, and where it is applied.
    - `kernel`: the tile that `fusedtp tune --kernels` found, its speed-up over the table's tile, and the size measured.
    - `sums`: with `order="any"`, the reduction order; "" with other orders.
    - `shapes`: of this rank's operands, as the op multiplies them, their dtype, and the number of ranks.

    The repr leaves out what is "".
    """

    op: str
    schedule: str
    reason: str
    producer: str = ""
    epilogue: str = ""
    kernel: str = ""
    sums: str = ""
    shapes: str = ""

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value)
        return f"Path({fields})"


# Paths without the text of their shapes, and what it is made of, if asked for: shapes, dtype, number of ranks.
_Ran: TypeAlias = tuple[Path, "Mapping[str, Shape] | None", str, int]
_last: _Ran | None = None
_ran: deque[_Ran] = deque(maxlen=MOST)
# The schedules that each `require` allows.
_required: list[Switch[tuple[str, ...]]] = []


def record(path: Path, task: Task | None = None, num_ranks: int = 0) -> None:
    """Record an op that ran, for `last_path` and `paths`. The path has the shapes of `task` if that is given."""
    global _last
    _last = (path, None, "", 0) if task is None else (path, task.shapes, task.multiplied_in, num_ranks)
    _ran.append(_last)


def whole(path: Path, shapes: Mapping[str, Shape] | None, dtype: str, num_ranks: int) -> Path:
    """Return the path with the text of these shapes, if any."""
    return path if shapes is None else replace(path, shapes=shapes_of(shapes, dtype, num_ranks))


def last_path() -> Path | None:
    """Return the path of this process's last op, or None before the first op."""
    global _last
    if _last is None:
        return None
    path = whole(*_last)
    _last = path, None, "", 0
    return path


def paths() -> list[Path]:
    """Return the paths of this process's ops since the last call of `paths`, the oldest first; at most the last 10,000.

    Call it once before a step and once after, and it returns the step's ops, those of backward too. A replay of a CUDA
    graph runs none on the host, so it adds none.
    """
    ran = []
    # One at a time, because another thread may add some.
    while _ran:
        ran.append(whole(*_ran.popleft()))
    return ran


def require(*schedules: str) -> Switch[tuple[str, ...]]:
    """Raise RuntimeError in every later op that would run by another schedule, before it sends anything.

    - `schedules`: one or more of "fused", "decomposed" and "unfused".

    This holds until `undo()` or the end of a `with` block, in this process: call it on every rank. The error has the
    reason that `last_path` gives. An op over one rank sends nothing, and runs unfused unless the call names a schedule.
    If several requirements are on, all of them hold.

        with fusedtp.require("fused"):
            loss = model(tokens).loss
            loss.backward()

    Raises ValueError for an unknown schedule.
    """
    if not schedules or any(each not in NAMES for each in schedules):
        raise ValueError(f"require takes one or more of {', '.join(map(repr, NAMES))}, got {schedules!r}")
    switch = Switch(schedules, _required)
    # Prepared calls have passed `check` already.
    generation.changed()
    return switch


def check(path: Path, task: Task, num_ranks: int) -> None:
    """Raise RuntimeError if `require` forbids the path's schedule."""
    for each in _required:
        if path.schedule not in each.value:
            path = whole(path, task.shapes, task.multiplied_in, num_ranks)
            wanted = ", ".join(map(repr, each.value))
            raise RuntimeError(
                f"{path.op} of {path.shapes} would run {path.schedule}, but fusedtp.require({wanted}) is on. "
                f"The reason for {path.schedule}: {path.reason}. To run another schedule, name it: schedule="
                f"{each.value[0]!r}"
            )


def shapes_of(shapes: Mapping[str, Shape], dtype: str, num_ranks: int) -> str:
    """Return the text of `Path.shapes`."""
    text = ", ".join(f"{name} [{rows}, {cols}]" for name, (rows, cols) in shapes.items())
    return f"{text}, {dtype}, {num_ranks} rank{'s' * (num_ranks != 1)}"


def profiled_as(path: Path) -> str:
    """Return the name of the op's range in `torch.profiler`."""
    return f"fusedtp::{path.op} {path.schedule} {path.shapes}"
