"""Compare between ranks what they were given to split: a style begins with scattering parameters, which would wait for
the group's timeout where a rank has other ones, or none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta

from torch import nn
from torch.distributed import ProcessGroup

from .. import groups
from ..errors import PeerTimeout, RanksDisagree
from ..workspaces import budgets, meaning

_OP = "parallelize"


def parameters_of(model: nn.Module) -> dict[str, str]:
    """By their names, what must be the same on all ranks."""
    return {
        name: f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}"
        for name, each in model.named_parameters(remove_duplicate=False)
    }


def compare(group: ProcessGroup, mine: Mapping[str, str]) -> None:
    """Raise RanksDisagree on every rank alike where they were given different things, with the first of these.

    PeerTimeout names the first rank that has left nothing in the group's store, as it may still be loading, within the
    group's timeout, or the time that `set_timeout` allows.
    """
    if group.size() == 1 or groups.is_fake(group):
        return
    store, rank, seconds = budgets.GroupStore(group), group.rank(), budgets.of_first(group)
    deadline = time.monotonic() + seconds
    # Counted in the store, which may outlive the group.
    call = store.add(f"fusedtp/{_OP}/calls/{rank}", 1)
    keys = [f"fusedtp/{_OP}/{call}/{peer}" for peer in range(group.size())]
    store.set(keys[rank], json.dumps(mine))
    everyone: list[dict[str, str]] = []
    try:
        for key in keys:
            store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
            everyone.append(json.loads(store.get(key)))
    except budgets.StoreSilent:
        raise
    except BaseException as error:
        # A rank that comes later must not go on alone.
        store.delete_key(keys[rank])
        if not isinstance(error, RuntimeError):
            raise
        absent = "it has not called parallelize, or has given up; where it loads for longer, fusedtp.set_timeout allows"
        raise PeerTimeout(_OP, rank, len(everyone), seconds, f"{absent} more") from error
    # A peer that has left this record has read all of the one before.
    store.delete_key(f"fusedtp/{_OP}/{call - 1}/{rank}")
    if text := meaning.difference(_OP, everyone):
        raise RanksDisagree(text, _OP, rank, tuple(everyone))
