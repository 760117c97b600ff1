"""Do the ranks mean the same op? Asked before every op of a call with `debug=True`, and of all calls under
TORCH_DISTRIBUTED_DEBUG=DETAIL, torch's own switch.

Each rank takes lengths from its own tensors. Ranks that take different ones would read and write at different places,
which shared memory cannot notice; comparing them costs a round trip to the group's store an op, so it is only for
finding such a mistake.

Calls are counted, group by group. A rank leaves the record of its n-th call in the group's store, then reads that of
every peer: not a collective, which would hang if a rank makes another call or none, but a wait that times out.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import PeerTimeout, RanksDisagree
from ..op import Task
from ..workspaces import budgets, meaning

_GAVE_UP = "gave up on rank"


@dataclass
class _Records:
    # What this rank has written into a group's store. `session`: what ranks that count together have agreed on; they
    # count anew after `destroy`, which is local, so its calls, `generation`, need not be as many on every rank.
    store: Any
    generation: int
    session: str = ""
    calls: int = 0

    def key(self, call: int, rank: int) -> str:
        return f"fusedtp/debug/{self.session}/{call}/{rank}"


_records: WeakKeyDictionary[ProcessGroup, _Records] = WeakKeyDictionary()


def check(task: Task, group: ProcessGroup, operands: Sequence[Tensor | None], schedule: str, call: str) -> None:
    """Compare what the ranks of `group` must have in common in this task.

    RanksDisagree on every rank alike, with each rank's value of what differs, and the rank that stands alone with it.
    PeerTimeout where a rank has not made as many calls on this group within the time that `set_timeout` allows; the
    ranks may then count differently until all have called `destroy`.
    """
    if group.size() == 1:
        return
    op, x = task.op.name, operands[0]
    assert x is not None
    mine = meaning.of(task, schedule, x.device.type, call).values
    everyone, number = _exchange(op, group, {**mine, **_values(task, operands)})
    if text := meaning.difference(op, everyone, f"call {number} of group {group.group_name!r}"):
        raise RanksDisagree(text, op, group.rank(), tuple(everyone))


def _values(task: Task, operands: Sequence[Tensor | None]) -> dict[str, str]:
    # Values that every rank holds a copy of: a bias along a dim that is whole, and a norm's parameters. Their
    # checksums, for which a GPU is waited for.
    if task.op.kind == "gather" and not task.transposed:
        return {}
    copies = {"bias": operands[2] if task.has(2) else None}
    if task.norm:
        copies |= zip(("norm_weight", "norm_bias"), operands[task.op.operands :], strict=False)
    sums = {}
    for name, each in copies.items():
        if each is not None:
            held = each.detach().contiguous().view(torch.uint8).cpu()
            sums[f"the {name}'s values, which have the checksum"] = f"{zlib.crc32(held.numpy().tobytes()):#010x}"
    return sums


def _exchange(op: str, group: ProcessGroup, mine: dict[str, str]) -> tuple[list[dict[str, str]], int]:
    # Every rank's record of this call, and the number of the call.
    # Late: what maps shared memory need not be there where nothing else asks for it.
    from ..workspaces import registry

    records, generation = _records.get(group), registry.generation(group.group_name)
    start, seconds = time.monotonic(), budgets.of(group)
    if records is None or records.generation != generation:
        # There is no public way to a group's own store.
        store = dist.distributed_c10d._get_process_group_store(group)
        records = _records[group] = _Records(store, generation)
        store.set(f"fusedtp/debug/count/{group.rank()}", str(store.add(f"fusedtp/debug/counts/{group.rank()}", 1)))
    if not records.session:
        records.session = _meet(op, group, records.store, start + seconds)
    records.calls += 1
    store, rank, call = records.store, group.rank(), records.calls
    store.set(records.key(call, rank), json.dumps(mine))
    everyone: list[dict[str, str]] = []
    for peer in range(group.size()):
        waited = time.monotonic() - start
        try:
            store.wait([records.key(call, peer)], timedelta(seconds=max(0.001, seconds - waited)))
            everyone.append(json.loads(store.get(records.key(call, peer))))
        except RuntimeError as error:
            store.set(records.key(call, rank), json.dumps({**mine, _GAVE_UP: str(peer)}))
            detail = f"comparing call {call} of group {group.group_name!r}, which that rank has not made in debug mode"
            raise PeerTimeout(op, rank, peer, seconds, detail) from error
        if _GAVE_UP in everyone[-1]:
            detail = f"it had given up on rank {everyone[-1][_GAVE_UP]} in call {call} of group {group.group_name!r}"
            raise PeerTimeout(op, rank, peer, round(time.monotonic() - start, 3), detail)
    # A peer that has written this record has read all of the one before.
    if call > 1:
        store.delete_key(records.key(call - 1, rank))
    return everyone, call


def _meet(op: str, group: ProcessGroup, store: Any, deadline: float) -> str:
    # The session of ranks that all count anew: how often each has, told by every rank to all until they are told alike.
    # What an earlier session has left in the store is of other counts.
    rank, peers, pause = group.rank(), range(group.size()), 0.001
    said = [f"fusedtp/debug/session/{peer}" for peer in peers]
    before = ""
    while True:
        counts = [f"fusedtp/debug/count/{peer}" for peer in peers]
        there = [store.check([key]) for key in counts]
        session = ".".join(store.get(key).decode() if known else "0" for key, known in zip(counts, there, strict=True))
        if session != before:
            store.set(said[rank], session)
            before = session
        apart = [peer for peer in peers if not store.check([said[peer]]) or store.get(said[peer]).decode() != session]
        if not apart:
            return session
        if time.monotonic() > deadline:
            # Who comes later must not take it for one that is there.
            store.set(said[rank], "")
            detail = f"comparing call 1 of group {group.group_name!r}, which that rank has not made in debug mode"
            raise PeerTimeout(op, rank, apart[0], budgets.of(group), detail)
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
