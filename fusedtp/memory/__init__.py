"""Where arenas come from. A memory makes one arena a rank, of equal size, and lets every rank address all of them.

    allocate(num_bytes, header, exchange) -> Arena    collective; `header` (int32) is in place in the own arena before
    any peer can reach it

`posix` maps one file in memory into several processes, `cuda` is torch's symmetric memory, `local` holds W virtual
ranks in one process. Nothing above this package knows which one it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Unreachable(RuntimeError):
    """The group's ranks cannot address each other's memory; the text says why, the same on every rank."""


@dataclass
class Arena:
    """Every rank's arena as this rank sees it: uint8 tensors of equal length, indexed by rank. multicast: an address
    that is all ranks' at once (`kernels.multicast`), on all ranks or on none; 0 for none.
    """

    tensors: list[Tensor]
    release: Callable[[], None]
    multicast: int = 0


class Exchange(Protocol):
    """How the ranks tell each other a few numbers while they make arenas. Each wait has an end."""

    def rows(self, mine: list[int]) -> list[list[int]]:
        """Every rank's, in rank order."""
        ...

    def outcomes(self, mine: list[int]) -> list[list[int]] | None:
        """Every rank's outcome with these rows; None if a rank has begun anew since: ask for the rows again."""
        ...


class Memory(Protocol):
    """A source of arenas for one rank of a group."""

    rank: int
    world_size: int
    # Whether `allocate` needs an exchange; otherwise the memory has its own way.
    exchanges: bool

    def allocate(self, num_bytes: int, header: Tensor, exchange: Exchange | None = None) -> Arena:
        """Arenas of at least `num_bytes`, zeroed, the own one starting with `header`, whose first word is the epoch.

        Every rank calls this alike.
        """
        ...
