"""Do the ranks mean the same op? Asked before every op of a call with `debug=True`, and of all calls under
TORCH_DISTRIBUTED_DEBUG=DETAIL, torch's own switch.

Each rank takes lengths from its own tensors. Ranks that take different ones would read and write at different places,
which shared memory cannot notice; comparing them costs a round trip to the group's store an op, so it is for finding
such a mistake.

Calls are counted, group by group. A rank leaves the record of its n-th call in the group's store, then reads that of
every peer: no collective, which would hang where a rank makes another call or none, but a wait with an end.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level

from . import budgets
from .errors import PeerTimeout

_GAVE_UP = "gave up on rank"


@dataclass
class _Records:
    # What this rank has written into a group's store. `born` keeps a group apart from an earlier one of its name, and
    # `generation` what came after a `destroy` from what came before: calls are counted anew.
    store: Any
    born: int
    generation: int
    calls: int = 0

    def key(self, call: int, rank: int) -> str:
        return f"fusedtp/debug/{self.born}/{self.generation}/{call}/{rank}"


_records: WeakKeyDictionary[ProcessGroup, _Records] = WeakKeyDictionary()


def wanted() -> bool:
    """Whether torch.distributed checks in detail."""
    return get_debug_level() == DebugLevel.DETAIL


def check(op: str, group: ProcessGroup, x: Tensor, *operands: Tensor | None, **options: Any) -> None:
    """Compare what the ranks of `group` must have in common in this call.

    ValueError on every rank alike, with each rank's value of what differs, and the rank that stands alone with it.
    PeerTimeout where a rank has not made as many calls on this group within the time that `set_timeout` allows; the
    ranks may then count differently until all have called `destroy`.
    """
    if group.size() == 1:
        return
    mine = {"op": op, "device": x.device.type, "dtype": x.dtype, **options, **_lengths(op, x, *operands, **options)}
    everyone, call = _exchange(op, group, {name: str(value) for name, value in mine.items()})
    for name in dict.fromkeys(name for each in everyone for name in each):
        values = [each.get(name, "not given") for each in everyone]
        if len(set(values)) > 1:
            what = (op, name) if name != "op" else (f"call {call} of group {group.group_name!r}", "the op")
            each_rank = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(f"{what[0]}: the ranks do not agree on {what[1]}: {each_rank}{_odd_one_out(values)}")


def _odd_one_out(values: list[str]) -> str:
    usual, count = Counter(values).most_common(1)[0]
    odd = [rank for rank, value in enumerate(values) if value != usual]
    if count <= len(values) / 2 or len(values) < 3:
        return ""
    return f": {'rank' if len(odd) == 1 else 'ranks'} {', '.join(map(str, odd))} against {count} that agree"


def _exchange(op: str, group: ProcessGroup, mine: dict[str, str]) -> tuple[list[dict[str, str]], int]:
    # Every rank's record of this call, and the number of the call.
    # Late: what maps shared memory need not be there where nothing else asks for it.
    from . import workspaces

    records, generation = _records.get(group), workspaces.generation(group.group_name)
    if records is None:
        # There is no public way to a group's own store.
        store = dist.distributed_c10d._get_process_group_store(group)
        records = _records[group] = _Records(store, store.add(f"fusedtp/debug/{group.rank()}", 1), generation)
    if records.generation != generation:
        records.generation, records.calls = generation, 0
    records.calls += 1
    store, rank, call = records.store, group.rank(), records.calls
    store.set(records.key(call, rank), json.dumps(mine))
    everyone: list[dict[str, str]] = []
    start, seconds = time.monotonic(), budgets.of(group)
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


def _lengths(op: str, x: Tensor, *operands: Tensor | None, **options: Any) -> dict[str, Any]:
    # What is neither a rank's own nor one of `sizes`.
    if op in ("all_gather", "reduce_scatter", "all_gather_two_matmuls"):
        return {"columns": x.shape[1]}
    if op == "all_gather_matmul":
        return {"K": x.shape[1]} if options["gather_dim"] == 0 else {"M": x.shape[0]}
    if op == "all_reduce":
        return {"M": x.shape[0], "N": x.shape[1]}
    b, *rest = operands
    assert b is not None
    if op == "matmul_scatter_and_gather":
        gathered = rest[1].shape[1] if rest[1] is not None else 0
        return {"M": x.shape[0], "N": b.shape[1], "columns gathered": gathered}
    return {"M": x.shape[0], "N": b.shape[1], "bias": "none" if rest[0] is None else "given"}
