"""Arenas on GPUs of one NVLink domain: torch's symmetric memory (`torch.distributed._symmetric_memory`, docs of torch
>= 2.11).

Signals live inside the arena: torch's own signal pad is shared by every group of a process, and two groups collide on
it. Several ranks on one GPU are allowed with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1, for tests.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from . import Arena, Exchange, Unreachable


class CudaMemory:
    """Arenas of the ranks of `group` on `device`."""

    exchanges = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.rank, self.world_size = group.rank(), group.size()

    def allocate(self, num_bytes: int, header: Tensor, exchange: Exchange | None = None) -> Arena:
        """See `Memory.allocate`. Raises `Unreachable` where torch cannot map the peers' memory."""
        import torch.distributed._symmetric_memory as symm_mem

        try:
            own = symm_mem.empty(num_bytes, dtype=torch.uint8, device=self._device)
            own.zero_()
            own[: header.numel() * 4].view(torch.int32).copy_(header)
            # The header must be in place before the rendezvous lets a peer reach it.
            torch.cuda.synchronize(self._device)
            handle = symm_mem.rendezvous(own, self._group.group_name)
            # It may know the memory from before and meet nobody: peers must not signal before the header is there.
            met = torch.zeros(1, device=self._device)
            dist.all_reduce(met, group=self._group)
            met.item()
        except RuntimeError as error:
            raise Unreachable(f"torch's symmetric memory refused: {error}") from error
        tensors = [
            own if peer == self.rank else handle.get_buffer(peer, (num_bytes,), torch.uint8)
            for peer in range(self.world_size)
        ]

        def release() -> None:
            # The tensors of the peers, and with them the handle that keeps their memory mapped.
            tensors.clear()

        return Arena(tensors, release)
