"""Arenas for W virtual ranks in one process on one device: for single-process tests and one-GPU timing."""

from __future__ import annotations

import torch
from torch import Tensor

from . import Arena, Exchange


class _Shared:
    """State shared by the virtual ranks: the arenas of every generation, made by the rank that asks first."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.world_size, self.device = world_size, device
        self.arenas: dict[int, list[Tensor]] = {}

    def tensors(self, generation: int, num_bytes: int) -> list[Tensor]:
        if generation not in self.arenas:
            shape = (self.world_size, num_bytes)
            self.arenas[generation] = list(torch.zeros(shape, dtype=torch.uint8, device=self.device).unbind())
        assert self.arenas[generation][0].numel() == num_bytes, "virtual ranks must allocate alike"
        return self.arenas[generation]


class LocalMemory:
    """One virtual rank's view of memory that all virtual ranks share.

    All ranks must have allocated before any of them signals.
    """

    exchanges = False

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank, self.world_size, self._shared, self._generation = rank, shared.world_size, shared, 0

    def allocate(self, num_bytes: int, header: Tensor, exchange: Exchange | None = None) -> Arena:
        """Allocate as `Memory.allocate` does; the ranks may call one after another."""
        num_bytes = -(-num_bytes // 4096) * 4096
        self._generation += 1
        generation = self._generation
        tensors = self._shared.tensors(generation, num_bytes)
        tensors[self.rank][: header.numel() * 4].view(torch.int32).copy_(header)

        def release() -> None:
            self._shared.arenas.pop(generation, None)

        return Arena(list(tensors), release)


def local_memories(world_size: int, device: torch.device) -> list[LocalMemory]:
    shared = _Shared(world_size, device)
    return [LocalMemory(rank, shared) for rank in range(world_size)]
