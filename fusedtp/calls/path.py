"""What ran, and why."""

from __future__ import annotations

from dataclasses import dataclass

from ..op import Task


@dataclass(frozen=True)
class Path:
    """What ran: the op's name, the schedule, fused, decomposed or unfused, and why that one. producer: how `fused` sent
    what it gathered, push, copy or multicast, or "" where it gathered nothing. epilogue:
    the activation or the residual that the op ended with, and where: in the kernel; by chunk, a residual as one term
    more of the sum; or after what the library or the process group does, as on one rank. kernel: the tile of `fused`,
    if `fusedtp tune --kernels` found one that is faster than the table's, by how much, and at which size. sums: how
    `fused` adds ranks' terms where `order="any"` lets it choose: in the switch, or in the order of ranks, and why.
    """

    op: str
    schedule: str
    reason: str
    producer: str = ""
    epilogue: str = ""
    kernel: str = ""
    sums: str = ""


def in_any_order(task: Task, schedule: str, world_size: int) -> str:
    """How terms are added where any order will do and the schedule has no choice: a `Path`'s `sums`."""
    if world_size == 1:
        return "of one rank"
    if task.algorithm == "ring":
        return "along the ring"
    return "as the process group adds" if schedule == "unfused" else "in the order of ranks: not by fused"
