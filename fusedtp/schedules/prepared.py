"""A task on one rank by one schedule, made once and run any number of times."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from ..op import Task
from .alone import Alone
from .forms import FORMS, Operands

if TYPE_CHECKING:
    from ..workspaces.workspace import Workspace

T = TypeVar("T")
Phases = Generator[None, None, list[Tensor]]


class Prepared:
    """The verbs of a schedule for a task, and the form that uses them.

    ws: this rank's end of the group's symmetric memory, where the schedule uses it. producer, split: see `fused`.
    """

    def __init__(
        self, schedule: str, task: Task, group: ProcessGroup | None = None, ws: Workspace | None = None, *,
        producer: str = "auto", split: bool = False,
    ) -> None:  # fmt: skip
        self.task, self.schedule = task, schedule
        # One rank has nothing to share.
        self.ws = ws if ws is not None and ws.world_size > 1 else None
        on = self.on = self._verbs(group, producer, split)
        if task.algorithm == "ring" and not isinstance(on, Alone):
            from .fused import Fused, Ring

            if not isinstance(on, Fused):
                raise ValueError("algorithm 'ring' is a kernel: use it with schedule 'fused'")
            self.form: Any = Ring(on, task)
        else:
            self.form = FORMS[task.op.kind](on, task)
        *self._before, self._last = self.form.stages
        # What it needs of a half of each arena, and of the signals.
        self.half_bytes: int = 0 if self.ws is None else on.layout.half_bytes
        self.slots: int = 0 if self.ws is None else on.layout.slots

    def _verbs(self, group: ProcessGroup | None, producer: str, split: bool) -> Any:
        # Late: `fused` brings Triton in.
        ws = self.ws
        if ws is None and (group is None or group.size() == 1):
            return Alone(self.task)
        if ws is None:
            from .unfused import Unfused

            assert group is not None
            return Unfused(group, self.task)
        if self.schedule == "decomposed":
            from .decomposed import Decomposed

            return Decomposed(ws, self.task)
        from .fused import Fused

        return Fused(ws, self.task, producer, split=split)

    def go(self, operands: Operands) -> list[Tensor]:
        """Every stage, on this rank of a process of its own; room is there, and the epoch the workspace's."""
        if self.ws is not None:
            self.on.enter()
        for stage in self._before:
            stage(operands)
        outs: list[Tensor] = self._last(operands)
        if self.ws is not None:
            self.on.leave()
        return outs

    def phases(self, *operands: Tensor | None) -> Phases:
        """The same in phases, which virtual ranks go through together: room is made up to the first `yield`."""
        on, ws = self.on, self.ws
        if ws is not None:
            ws.require(self.half_bytes, self.slots)
            yield
            on.enter()
        for stage in self._before:
            stage(operands)
            yield
        outs: list[Tensor] = self._last(operands)
        if ws is not None:
            on.leave()
        return outs


def finish(phases: Generator[None, None, T]) -> T:
    """What is left of it, straight through; its result."""
    while True:
        try:
            next(phases)
        except StopIteration as stop:
            found: T = stop.value
            return found
