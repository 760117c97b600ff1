"""Do the ranks mean the same op? Asked before every op of a call with `debug=True`, and of all calls under
TORCH_DISTRIBUTED_DEBUG=DETAIL, torch's own switch.

Each rank takes lengths from its own tensors. Ranks that take different ones would read and write at different places,
which shared memory cannot notice; comparing them costs a round trip to the group's store an op, so it is only for
finding such a mistake.

Calls are counted, group by group. A rank leaves the record of its n-th call in the group's store, then reads that of
every peer (`workspaces.records`).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import groups
from ..errors import PeerTimeout, RanksDisagree
from ..op import Task
from ..workspaces import budgets, meaning
from ..workspaces.records import Exchange

_GAVE_UP = "gave up on "


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
    if group.size() == 1 or groups.is_fake(group):
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
        store = budgets.GroupStore(group)
        records = _records[group] = _Records(store, generation)
        store.set(f"fusedtp/debug/count/{group.rank()}", str(store.add(f"fusedtp/debug/counts/{group.rank()}", 1)))
    if not records.session:
        records.session = _meet(op, group, records.store, start + seconds)
    records.calls += 1
    store, call, name = records.store, records.calls, group.group_name
    keys = [records.key(call, peer) for peer in range(group.size())]
    exchange = Exchange(
        op, group.rank(), store, keys, seconds, start + seconds,
        f"comparing call {call} of group {name!r}, which that rank has not made in debug mode",
        f"in call {call} of group {name!r}",
    )  # fmt: skip
    everyone = exchange(mine)
    # A peer that has written this record has read all of the one before.
    if call > 1:
        store.delete_key(records.key(call - 1, group.rank()))
    return everyone, call


def _meet(op: str, group: ProcessGroup, store: Any, deadline: float) -> str:
    # The session of ranks that all count anew: how often each has, told by every rank to all until they are told alike.
    # What an earlier session has left in the store is of other counts.
    rank, peers, pause = group.rank(), range(group.size()), 0.001
    counts, said = ([f"fusedtp/debug/{what}/{peer}" for peer in peers] for what in ("count", "session"))
    before, first = "", _read(store, said)
    while True:
        session = ".".join(count or "0" for count in _read(store, counts))
        if session != before:
            store.set(said[rank], session)
            before = session
        now = _read(store, said)
        apart = [peer for peer in peers if now[peer] != session]
        if not apart:
            return session
        if time.monotonic() > deadline:
            # Not one that has waited in vain as well, nor one that is about to hear of another.
            gone = [peer for peer in apart if not now[peer].startswith(_GAVE_UP)] or apart
            missing = next((peer for peer in gone if now[peer] == first[peer]), gone[0])
            # Who comes later must not take this rank for one that is there.
            store.set(said[rank], f"{_GAVE_UP}{missing}")
            detail = f"comparing call 1 of group {group.group_name!r}, "
            if now[missing].startswith(_GAVE_UP):
                detail += f"for which that rank waits no more: it had given up on rank {now[missing][len(_GAVE_UP) :]}"
            else:
                detail += "which that rank has not made in debug mode"
            raise PeerTimeout(op, rank, missing, budgets.of(group), detail)
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _read(store: Any, keys: Sequence[str]) -> list[str]:
    return [store.get(key).decode() if store.check([key]) else "" for key in keys]
