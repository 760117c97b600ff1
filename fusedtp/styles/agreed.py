"""Do the ranks apply the same plan to the same model? What a style does first is to scatter parameters, which would
wait for the group's timeout where a rank has other ones, or none.

A rank leaves what it has been given in the group's store, then reads that of every peer, as `calls.agreement` does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from ..errors import PeerTimeout, RanksDisagree
from ..workspaces import budgets, meaning

_OP = "parallelize"
_GAVE_UP = "gave up"


def parameters_of(model: nn.Module) -> dict[str, str]:
    """By their names, what must be the same on all ranks."""
    return {
        name: f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}"
        for name, each in model.named_parameters(remove_duplicate=False)
    }


def compare(group: ProcessGroup, mine: Mapping[str, str]) -> None:
    """Raise RanksDisagree on every rank alike where they were given different things, with the first of these.

    PeerTimeout where a rank does not come, as it may still be loading, within the group's timeout, or the time that
    `set_timeout` allows this group; who comes later has it too.
    """
    if group.size() == 1:
        return
    # There is no public way to a group's own store.
    store: Any = dist.distributed_c10d._get_process_group_store(group)
    rank, start, seconds = group.rank(), time.monotonic(), _patience(group)
    # Counted in the store, which may outlive the group.
    call = store.add(f"fusedtp/{_OP}/calls/{rank}", 1)
    keys = [f"fusedtp/{_OP}/{call}/{peer}" for peer in range(group.size())]
    store.set(keys[rank], json.dumps(mine))
    try:
        everyone = [_read(store, key, rank, peer, start + seconds, seconds) for peer, key in enumerate(keys)]
    except BaseException:
        # Who comes later must not take this rank for one that goes on.
        store.set(keys[rank], json.dumps({_GAVE_UP: ""}))
        raise
    # A peer that has left this record has read all of the one before.
    store.delete_key(f"fusedtp/{_OP}/{call - 1}/{rank}")
    if text := meaning.difference(_OP, everyone):
        raise RanksDisagree(text, _OP, rank, tuple(everyone))


def _patience(group: ProcessGroup) -> float:
    own = budgets.own(group)
    if own is not None:
        return own
    # There is no public way to a group's own timeout.
    backend: Any = group._get_backend(group._device_types[0])
    return float(backend.options._timeout.total_seconds())


def _read(store: Any, key: str, rank: int, peer: int, deadline: float, seconds: float) -> dict[str, str]:
    try:
        store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        found: dict[str, str] = json.loads(store.get(key))
    except RuntimeError as error:
        detail = "it has not called parallelize; where it loads for longer, fusedtp.set_timeout allows more"
        raise PeerTimeout(_OP, rank, peer, seconds, detail) from error
    if _GAVE_UP in found:
        waited = round(time.monotonic() - deadline + seconds, 3)
        raise PeerTimeout(_OP, rank, peer, waited, "it had given up on another rank before this one came")
    return found
