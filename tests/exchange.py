"""A model of how torch's symmetric memory exchanges records between ranks, key by key over a real store.

Source: `StoreExchange` (torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryUtils.hpp) and
`make_peer_alloc_info` (CUDASymmetricMemory.cu).
- 2.11 waits for each peer's key and gets it; a barrier is one more exchange.
- 2.13 gets all keys at once; `Store::barrier` counts members. `mended` (pytorch pull 196350) counts for each store.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, _resolve_process_group

VERSIONS = ("2.11", "2.13", "mended")


class Exchange:
    """All exchanges of one process. No wait is longer than `seconds`."""

    def __init__(self, version: str, seconds: float) -> None:
        assert version in VERSIONS
        self._version, self._limit = version, timedelta(seconds=seconds)
        self._counts: Counter[Any] = Counter()
        self._stores: dict[str, Store] = {}

    def _next(self, store: Store) -> str:
        counted = store if self._version == "mended" else "all"
        number, self._counts[counted] = self._counts[counted], self._counts[counted] + 1
        return f"CUDASymmetricMemory/{number}"

    def all_gather(self, store: Store, rank: int, world_size: int, value: bytes) -> list[bytes]:
        """Return every rank's value."""
        prefix = self._next(store)
        keys = [f"{prefix}/{peer}" for peer in range(world_size)]
        store.set(keys[rank], value.decode())
        if self._version == "2.11":
            values = []
            for peer in range(world_size):
                if peer != rank:
                    store.wait([keys[peer]], self._limit)
                values.append(value if peer == rank else store.get(keys[peer]))
            return values
        store.wait(keys, self._limit)
        return store.multi_get(keys)

    def barrier(self, store: Store, rank: int, world_size: int) -> None:
        """Wait until all ranks are here."""
        if self._version == "2.11":
            self.all_gather(store, rank, world_size, b"0")
            return
        prefix = self._next(store)
        if store.add(f"{prefix}/num_members", 1) == world_size:
            store.set(f"{prefix}/last_member", "1")
        store.wait([f"{prefix}/last_member"], self._limit)

    def rendezvous(self, name: str, value: bytes) -> list[bytes]:
        """Exchange values as a rendezvous in the group `name` does, and return every rank's value."""
        group = _resolve_process_group(name)
        # PrefixStore is C++, as in torch, and calls into a store that is written in Python.
        store = PrefixStore("torch", group.get_group_store())
        self._stores[name] = store
        values = self.all_gather(store, group.rank(), group.size(), value)
        self.barrier(store, group.rank(), group.size())
        # The last exchange tells each rank whether multicast works.
        assert self.all_gather(store, group.rank(), group.size(), b"1") == [b"1"] * group.size()
        return values
