"""torch's rendezvous of symmetric memory, for ranks whose earlier groups differ.

torch numbers its exchanges by process, not by group. It leaves keys `CUDASymmetricMemory/<number>/<rank>` in a group's
store, and each rank counts on from the exchanges it has had so far (`StoreExchange` in
torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryUtils.hpp of 2.11 to 2.14; pytorch issue 196082). Ranks of
different histories would wait for keys that nobody writes. So they meet in a group made for one rendezvous, whose store
renumbers the keys: the n-th number that torch uses there is n on every rank. torch 2.15 counts by store, and there the
renumbering changes nothing.

A group for one rendezvous has a second use: torch remembers, by the group's name, with whom a piece of memory has met.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

# Public in torch.distributed, but untyped there.
from torch._C._distributed_c10d import PrefixStore, Store

from ..torch_private import register_group, store_of, unregister_group

# Between two exchanges a rank works for milliseconds; a rank that failed there never comes to the next.
SECONDS = 60.0

# torch 2.11 uses <kind>/<number>/<rank>, 2.13 also <kind>/<number>/num_members and last_member (`Store::barrier`).
_NUMBERED = re.compile(r"(.*)/(\d+)/([^/]+)")

Handle = TypeVar("Handle")


class RenumberedStore(Store):
    """`store` for one rendezvous, with keys renumbered by the exchanges made there. No wait exceeds `seconds`.

    torch's C++ code calls these methods, and no others.
    """

    def __init__(self, store: Store, seconds: float = SECONDS) -> None:
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


def meet(rendezvous: Callable[[str], Handle], group: dist.ProcessGroup, name: str, seconds: float = SECONDS) -> Handle:
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
