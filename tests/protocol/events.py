"""Events: what a rank does to symmetric memory, grouped into kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

# Cells are the elements of an arena's data; recordings use float32 only.
CELL_BYTES = 4


class Access(NamedTuple):
    """One instruction that loads or stores cells of rank `owner`'s arena. Cells count from the start of the data, so
    the two halves have different cells.
    """

    write: bool
    owner: int
    cells: frozenset[int]


class Barrier(NamedTuple):
    """All threads of the program have arrived."""


class Raise(NamedTuple):
    """Set the signal (slot, source) of rank `owner` to `epoch`; a `release` orders all before the last barrier."""

    owner: int
    slot: int
    source: int
    epoch: int
    release: bool


class Wait(NamedTuple):
    """Wait until this rank's signal (slot, source) has reached `epoch`; without `acquire` the wait orders nothing."""

    slot: int
    source: int
    epoch: int
    acquire: bool


class Arrive(NamedTuple):
    """One program of a kernel has finished; only the last program to arrive goes on.

    ordered: what the programs did before is done for the last one, as far as a barrier is behind it.
    """

    ordered: bool


class Advance(NamedTuple):
    """Set this rank's epoch: the op ends."""

    epoch: int


Event = Access | Barrier | Raise | Wait | Arrive | Advance


@dataclass
class Kernel:
    """Programs that run side by side once the kernels `after` (indices) have ended. A stretch of host steps is a kernel
    of one program and one thread, whose every release orders all that came before.
    """

    name: str
    stream: int
    after: tuple[int, ...]
    one_thread: bool
    programs: list[list[Event]] = field(default_factory=list)
