"""Sources of arenas. A memory makes one arena for each rank, of equal size, and lets every rank address all of them.

    allocate(num_bytes, header, exchange) -> Arena    collective; `header` (int32) is in place in the own arena before
    any peer can reach it

`posix` maps a file in memory of each rank into all processes, `cuda` is torch's symmetric memory, `local` holds W
virtual ranks in one process. Code above this package does not know which of them it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Unreachable(RuntimeError):
    """The group's ranks cannot address each other's memory; the text gives the reason, the same on every rank."""


def differing(asked: Sequence[tuple[int, int]]) -> str:
    """Return the error of ranks that ask for different arenas, given each rank's bytes and epoch.

    Ranks that make different calls may meet here: one that grows its arena, say, and one that starts over.
    """
    each_rank = ", ".join(f"{size} from epoch {epoch} on rank {rank}" for rank, (size, epoch) in enumerate(asked))
    return (
        f"the ranks do not agree on the bytes of an arena: {each_rank}: they make different calls, "
        "or not all of them have called fusedtp.destroy"
    )


@dataclass
class Arena:
    """Every rank's arena as this rank sees it: uint8 tensors of equal length, indexed by rank.

    `multicast` is an address of all ranks' arenas at once (`kernels.multicast`), on all ranks or on none; 0 for none.
    """

    tensors: list[Tensor]
    release: Callable[[], None]
    multicast: int = 0


class Exchange(Protocol):
    """Exchange of a few numbers between the ranks while they make arenas. Every wait has a time limit."""

    def rows(self, mine: list[int]) -> list[list[int]]:
        """Return every rank's row, in rank order."""

    def outcomes(self, mine: list[int]) -> list[list[int]] | None:
        """Return every rank's outcome with these rows; None if a rank has started over: ask for the rows again."""


class Memory(Protocol):
    """Source of arenas for one rank of a group."""

    rank: int
    world_size: int
    # True if `allocate` needs an exchange; otherwise the memory has its own.
    exchanges: bool

    def allocate(self, num_bytes: int, header: Tensor, exchange: Exchange | None = None) -> Arena:
        """Allocate zeroed arenas of at least `num_bytes`; the own one starts with `header`.

        The first word of `header` is the epoch. Collective: every rank makes the same call.
        """
