"""Do the ranks apply the same plan to the same model? What a style does first is to scatter parameters, which would
wait for the group's timeout where a rank has other ones, or none.

A rank leaves what it has been given in the group's store, then reads that of every peer (`workspaces.records`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import nn
from torch.distributed import ProcessGroup

from .. import groups
from ..errors import RanksDisagree
from ..workspaces import budgets, meaning
from ..workspaces.records import Exchange

_OP = "parallelize"


def parameters_of(model: nn.Module) -> dict[str, str]:
    """By their names, what must be the same on all ranks."""
    return {
        name: f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}"
        for name, each in model.named_parameters(remove_duplicate=False)
    }


def compare(group: ProcessGroup, mine: Mapping[str, str]) -> None:
    """Raise RanksDisagree on every rank alike where they were given different things, with the first of these.

    PeerTimeout where a rank does not come, as it may still be loading, within the group's timeout, or the time that
    `set_timeout` allows; who comes later has it too.
    """
    if group.size() == 1 or groups.is_fake(group):
        return
    store = budgets.GroupStore(group)
    rank, start, seconds = group.rank(), time.monotonic(), budgets.of_first(group)
    # Counted in the store, which may outlive the group.
    call = store.add(f"fusedtp/{_OP}/calls/{rank}", 1)
    keys = [f"fusedtp/{_OP}/{call}/{peer}" for peer in range(group.size())]
    absent = "it has not called parallelize; where it loads for longer, fusedtp.set_timeout allows more"
    everyone = Exchange(_OP, rank, store, keys, seconds, start + seconds, absent, "before this one came")(mine)
    # A peer that has left this record has read all of the one before.
    store.delete_key(f"fusedtp/{_OP}/{call - 1}/{rank}")
    if text := meaning.difference(_OP, everyone):
        raise RanksDisagree(text, _OP, rank, tuple(everyone))
