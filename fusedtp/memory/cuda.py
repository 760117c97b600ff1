"""Arenas on GPUs of one NVLink domain, in torch's symmetric memory.

torch's rendezvous (`torch.distributed._symmetric_memory`, docs of torch >= 2.11) waits forever for a rank that is on
another host or has failed. So the ranks agree through their group: first, that all of them have their memory and can
reach the others'; afterwards, that all have succeeded.

Signals live inside the arena. torch's own signal pad is shared by every group of a process, and two groups collide on
it. TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 allows several ranks on one GPU, for tests.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import Arena, Exchange, Unreachable
from .gpus import Gpu, Place, link_refusal, refusal, socket_refusal
from .rendezvous import SECONDS, meet


@dataclass(frozen=True)
class _Offer:
    # A rank's offer to the others before they meet. name: of the group in which they will meet; rank 0's is used.
    place: Place
    num_bytes: int
    epoch: int
    why_not: str
    name: str


class CudaMemory:
    """Arenas of the ranks of `group` on `device`."""

    exchanges = False

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, gpu: Gpu | None = None, seconds: float = SECONDS
    ) -> None:
        self._group, self._gpu, self._seconds = group, gpu or Gpu(device), seconds
        self.rank, self.world_size = group.rank(), group.size()

    def allocate(self, num_bytes: int, header: Tensor, exchange: Exchange | None = None) -> Arena:
        """Allocate as `Memory.allocate` does.

        Raises on every rank, with one reason: `Unreachable` if any rank has no memory left or cannot be mapped by
        another, ValueError if the ranks ask for different arenas. Raises torch.AcceleratorError, from the device
        itself, on the rank where it happens.
        """
        own, why_not = self._own(num_bytes, header)
        name = f"fusedtp/{uuid.uuid4().hex}"
        # After this exchange every rank's header is in place: peers must not signal before.
        offers = self._exchange(_Offer(self._gpu.place(), num_bytes, int(header[0]), why_not, name))
        _check_alike(offers)
        _raise_first([each.why_not for each in offers])
        places = [each.place for each in offers]
        if reason := refusal(places):
            raise Unreachable(reason)
        _raise_first(self._exchange(link_refusal(places, self.rank, self._gpu)))
        assert own is not None
        handle, multicast = self._meet(own, offers[0].name)
        tensors = [
            own if peer == self.rank else handle.get_buffer(peer, (num_bytes,), torch.uint8)
            for peer in range(self.world_size)
        ]
        kept = [handle]

        def release() -> None:
            # Drop the tensors of the peers, and the handle that keeps their memory mapped.
            tensors.clear()
            kept.clear()

        return Arena(tensors, release, multicast)

    def _own(self, num_bytes: int, header: Tensor) -> tuple[Tensor | None, str]:
        # This rank's memory with the header in place, or the reason why there is none.
        try:
            own = self._gpu.empty(num_bytes)
        except torch.AcceleratorError:
            # The device is broken, and so is the way to tell the peers.
            raise
        except RuntimeError as error:
            return None, f"it cannot make an arena of {num_bytes} bytes on its GPU: {_first_line(error)}"
        own.zero_()
        own[: header.numel() * 4].view(torch.int32).copy_(header)
        self._gpu.synchronize()
        return own, socket_refusal()

    def _meet(self, own: Tensor, name: str) -> tuple[Any, int]:
        # torch's handle, and the multicast address if all ranks have one.
        handle, failure, multicast = None, None, 0
        try:
            handle = meet(lambda group: self._gpu.rendezvous(own, group), self._group, name, self._seconds)
            multicast = self._gpu.multicast(handle)
        except RuntimeError as error:
            failure = error
        # A rank that waited in vain did not fail itself: report it only if no other rank gives a reason.
        outcome = "" if failure is None else f"torch's rendezvous failed: {_first_line(failure)}"
        waited = isinstance(failure, dist.DistStoreError)
        outcomes = self._exchange((outcome, waited, multicast != 0))
        try:
            _raise_first(["" if waited else reason for reason, waited, _ in outcomes])
            _raise_first([reason for reason, _, _ in outcomes])
        except Unreachable as agreed:
            # After an error of the device itself no other schedule would help.
            raise failure if isinstance(failure, torch.AcceleratorError) else agreed from failure
        return handle, multicast if all(has for _, _, has in outcomes) else 0

    def _exchange(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.world_size
        with self._gpu.current():
            dist.all_gather_object(everyone, mine, group=self._group)
        return everyone


def _first_line(error: RuntimeError) -> str:
    # torch appends advice and its C++ stack.
    return str(error).partition("\n")[0]


def _raise_first(reasons: list[str]) -> None:
    for rank, reason in enumerate(reasons):
        if reason:
            raise Unreachable(f"rank {rank}: {reason}")


def _check_alike(offers: list[_Offer]) -> None:
    # Ranks that make different calls may meet here: one that grows its arena, say, and one that starts over.
    if any((each.num_bytes, each.epoch) != (offers[0].num_bytes, offers[0].epoch) for each in offers):
        each_rank = ", ".join(f"{each.num_bytes} from epoch {each.epoch} on rank {r}" for r, each in enumerate(offers))
        raise ValueError(
            f"the ranks do not agree on the bytes of an arena: {each_rank}: they make different calls, "
            "or not all of them have called fusedtp.destroy"
        )
