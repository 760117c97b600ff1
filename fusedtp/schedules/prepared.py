"""A task on one rank by one schedule, made once and run any number of times."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from .alone import Alone
from .forms import FORMS, Results
from .op import Task

if TYPE_CHECKING:
    from ..workspace import Workspace


T = TypeVar("T")


class Prepared:
    """The verbs of a schedule for a task, and the form that uses them.

    ws: this rank's end of the group's symmetric memory, where the schedule uses it. producer, split: see `fused`.
    """

    def __init__(
        self, schedule: str, task: Task, group: ProcessGroup | None = None, ws: Workspace | None = None, *,
        producer: str = "auto", split: bool = False,
    ) -> None:  # fmt: skip
        self.task, self.schedule, self.ws = task, schedule, ws
        on = self.on = self._verbs(group, producer, split)
        if task.algorithm == "ring" and not isinstance(on, Alone):
            from .fused import Fused, Ring

            if not isinstance(on, Fused):
                raise ValueError("algorithm 'ring' is a kernel: use it with schedule 'fused'")
            self.form: Any = Ring(on, task)
        else:
            self.form = FORMS[task.op.kind](on, task)

    def _verbs(self, group: ProcessGroup | None, producer: str, split: bool) -> Any:
        # Late: `fused` brings Triton in.
        ws = self.ws
        if (group.size() if ws is None and group is not None else ws.world_size if ws is not None else 1) == 1:
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

    def phases(self, *operands: Tensor | None) -> Results:
        """The task in the phases that virtual ranks go through together: room is made up to the first of them."""
        on, ws = self.on, self.ws
        if ws is None or ws.world_size == 1:
            alone: list[Tensor] = yield from self.form.phases(*operands)
            return alone
        ws.require(on.layout.half_bytes, on.layout.slots)
        yield
        on.enter()
        outs: list[Tensor] = yield from self.form.phases(*operands)
        on.leave()
        return outs

    def run(self, *operands: Tensor | None) -> list[Tensor]:
        """The task on this rank of a process of its own; inside `only_loading` its room and its kernels alone."""
        ws = self.ws
        if ws is None or ws.world_size == 1:
            return finish(self.phases(*operands))
        # Late, as above.
        from ..kernels.loading import is_only_loading

        with contextlib.nullcontext() if is_only_loading() else ws.running(self.task.op.name):
            return finish(self.phases(*operands))


def finish(phases: Generator[None, None, T]) -> T:
    """What is left of it, straight through; its results."""
    while True:
        try:
            next(phases)
        except StopIteration as stop:
            found: T = stop.value
            return found
