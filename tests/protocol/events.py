"""What a rank does to symmetric memory, event by event, and the kernels that they are part of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

# Cells are the elements of an arena's data; recordings use float32 only.
CELL_BYTES = 4


class Access(NamedTuple):
    """Cells of rank `owner`'s arena loaded or stored by one instruction. Cells are counted from the start of the data,
    so both halves have their own.
    """

    write: bool
    owner: int
    cells: frozenset[int]


class Barrier(NamedTuple):
    """All threads of the program have come here."""


class Raise(NamedTuple):
    """The signal (slot, source) in rank `owner`'s arena set to `epoch`; a `release` orders what a barrier put before
    it.
    """

    owner: int
    slot: int
    source: int
    epoch: int
    release: bool


class Wait(NamedTuple):
    """Wait until the own signal (slot, source) has reached `epoch`; without `acquire` nothing is ordered after it."""

    slot: int
    source: int
    epoch: int
    acquire: bool


class Arrive(NamedTuple):
    """One program of the op's last kernel has finished; what follows is done by the last one only."""


class Advance(NamedTuple):
    """The own epoch is set: the op ends."""

    epoch: int


Event = Access | Barrier | Raise | Wait | Arrive | Advance


@dataclass
class Kernel:
    """Programs that run side by side once the kernels `after` (indices) have ended. A host-driven stretch is a kernel
    of one program and one thread: there every release orders what came before it.
    """

    name: str
    stream: int
    after: tuple[int, ...]
    one_thread: bool
    programs: list[list[Event]] = field(default_factory=list)
