"""Table of the schedules: three ways to run a task, with the same verbs, operands and results.

    fused         persistent Triton kernels: one for a gather, two for a sum
    decomposed    library matmuls by chunk; on a GPU the next chunk is in flight while one is multiplied
    unfused       the collective, then the matmul, through the process group's backend: the baseline and the fallback

The ops are rows of the table in `op`; `verbs` defines what a schedule provides for them. Operands are 2-D with any
strides, and any size may be 0. `sizes` is the same tuple on every rank. Results are new and contiguous, or in tensors
that the caller gives, with any strides.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from .. import lanes


class Schedule(NamedTuple):
    """A row of the table of schedules. Its module has its name.

    - `verbs`: name of the class of its `verbs.ScheduleImpl` in the module.
    - `has_kernels`: whether Triton kernels multiply, and wait for peers. On a CPU they are interpreted, which is never
      fast.
    - `in_graphs`: whether a CUDA graph can capture the schedule. Copies to addresses chosen on the host cannot be
      captured.
    - `shares_memory`: whether it runs over a `Workspace`, else through the process group.
    - `algorithms`: those that a caller may name, if the op has them; `lacks`: the error for others.
    """

    name: str
    verbs: str
    has_kernels: bool = False
    in_graphs: bool = True
    shares_memory: bool = True
    algorithms: tuple[str, ...] = ("direct", "one_shot", "two_shot", "ring")
    lacks: str = ""

    def is_for_auto(self, on_gpu: bool, capturing: bool, lane: int = lanes.ORDINARY) -> bool:
        """Return whether `auto` may choose the schedule there."""
        return ((on_gpu and not lane) or not self.has_kernels) and (self.in_graphs or not capturing)

    def check_lane(self, op: str, lane: int) -> None:
        """Raise ValueError if the schedule waits in kernels, which only lane 0 may (`lanes`)."""
        if lane and self.has_kernels:
            raise ValueError(
                f"{op}: schedule {self.name!r} waits for peers inside kernels, which may not run beside those of other "
                f"ops: use 'auto', 'decomposed' or 'unfused'{lanes.said(lane)}"
            )

    def check_algorithm(self, algorithm: str, asked_for: str) -> None:
        """Raise ValueError if the schedule has no such algorithm. `asked_for`: the schedule that the caller named."""
        if algorithm not in ("auto", *self.algorithms):
            raise ValueError(self.lacks.format(algorithm=algorithm, schedule=asked_for))

    def load(self) -> Any:
        """Return the class of its verbs. The module may load what other schedules do not need: `fused` loads Triton."""
        return getattr(import_module(f"{__name__}.{self.name}"), self.verbs)


_NO_KERNEL = "schedule {schedule!r} has no algorithm {algorithm!r}: schedule 'fused' has a kernel for it"
_BY_BACKEND = (
    "algorithm must be 'auto', as schedule 'unfused' has no algorithm {algorithm!r}: the process group's backend picks "
    "its own; or use schedule 'decomposed' or 'fused'"
)

# `auto` prefers the first. The last is the baseline.
SCHEDULES: Mapping[str, Schedule] = {
    row.name: row
    for row in (
        Schedule("fused", "Fused", has_kernels=True),
        Schedule(
            "decomposed",
            "Decomposed",
            in_graphs=False,
            algorithms=("direct", "one_shot", "two_shot"),
            lacks=_NO_KERNEL,
        ),
        Schedule("unfused", "Unfused", shares_memory=False, algorithms=(), lacks=_BY_BACKEND),
    )
}
NAMES = tuple(SCHEDULES)
