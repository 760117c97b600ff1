"""Arenas on GPUs of one NVLink domain, in torch's symmetric memory.

torch's rendezvous (`torch.distributed._symmetric_memory`, docs of torch >= 2.11) waits forever for a rank that is on
another host or has failed. So the ranks agree through their group: first, that all of them have their memory and can
reach the others'; afterwards, that all have succeeded.

Signals live inside the arena. torch's own signal pad is shared by every group of a process, and two groups collide on
it. TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 allows several ranks on one GPU, for tests.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

# Public in torch.distributed, but untyped there.
from torch._C._distributed_c10d import PrefixStore, Store

from ..torch_private import register_group, store_of, unregister_group
from . import Arena, Exchange, Unreachable
from .gpus import Gpu, Place, link_refusal, refusal, socket_refusal

# torch numbers its exchanges by process, not by group. It leaves keys `CUDASymmetricMemory/<number>/<rank>` in a
# group's store, and each rank counts on from the exchanges it has had so far (`StoreExchange` in
# torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryUtils.hpp of 2.11 to 2.14; pytorch issue 196082). Ranks of
# different histories would wait for keys that nobody writes. So ranks meet in a group made for one rendezvous, whose
# store renumbers the keys: the n-th number that torch uses there is n on every rank. torch 2.15 counts by store, and
# there renumbering changes nothing. The group has a second use: torch remembers, by the group's name, with whom a piece
# of memory has met.

# Between two exchanges a rank works for milliseconds; a rank that failed there never comes to the next.
MEET_SECONDS = 60.0

# torch 2.11 uses <kind>/<number>/<rank>, 2.13 also <kind>/<number>/num_members and last_member (`Store::barrier`).
_NUMBERED = re.compile(r"(.*)/(\d+)/([^/]+)")

Handle = TypeVar("Handle")


class RenumberedStore(Store):
    """`store` for one rendezvous, with keys renumbered by the exchanges made there. No wait exceeds `seconds`.

    torch's C++ code calls these methods, and no others.
    """

    def __init__(self, store: Store, seconds: float = MEET_SECONDS) -> None:
        super().__init__()
        self._store, self._limit = store, timedelta(seconds=seconds)
        self._numbers: dict[str, dict[str, int]] = {}

    def _key(self, key: str) -> str:
        match = _NUMBERED.fullmatch(key)
        if match is None:
            return key
        kind, number, what = match.groups()
        # An exchange begins with this rank's own entry, so numbers are first seen in the order of the exchanges.
        seen = self._numbers.setdefault(kind, {})
        return f"{kind}/{seen.setdefault(number, len(seen))}/{what}"

    def set(self, key: str, value: str) -> None:
        self._store.set(self._key(key), value)

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._key(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return self._store.multi_get([self._key(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        # If torch gives a limit, it is five minutes.
        self._store.wait([self._key(key) for key in keys], min(timeout or self._limit, self._limit))


def meet(
    rendezvous: Callable[[str], Handle], group: dist.ProcessGroup, name: str, seconds: float = MEET_SECONDS
) -> Handle:
    """Return the result of `rendezvous`, called with the name of a group made for this call from the ranks of `group`.

    Collective. `name` is the same on all ranks, and never used before. Raises RuntimeError (torch's DistStoreError) if
    a peer does not come within `seconds`.
    """
    store = RenumberedStore(PrefixStore(name, store_of(group)), seconds)
    private = dist.ProcessGroup(store, group.rank(), group.size())
    # Keep both until the end: torch looks groups up by name and holds them weakly, and a store without its Python
    # object has no methods.
    register_group(name, private)
    try:
        return rendezvous(name)
    finally:
        unregister_group(name)
        del private, store


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
        self, group: dist.ProcessGroup, device: torch.device, gpu: Gpu | None = None, seconds: float = MEET_SECONDS
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
