"""Which workspace a group has on a device: made with its first op, given back by `destroy`, nobody's after a fork."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from weakref import ref

import torch
import torch.distributed as dist

from .. import groups, locks
from ..groups import Group
from ..memory import Unreachable
from ..memory.cuda import CudaMemory
from ..memory.posix import PosixMemory
from . import generation, timeouts
from .rendezvous import StoreExchange
from .workspace import Workspace

_workspaces: dict[tuple[str, torch.device], Workspace] = {}
_unreachable: dict[tuple[str, torch.device], str] = {}
# For which group each entry of the two was made: torch may give the name of a destroyed group to another. The
# references are weak: nothing here keeps a group, with its threads and connections, alive when torch.distributed and
# the program are done with it.
_made_for: dict[tuple[str, torch.device], ref[dist.ProcessGroup]] = {}
# The workspaces of groups in use, by a key that is looked up fast.
_found: dict[tuple[int, torch.device], tuple[ref[dist.ProcessGroup], Workspace]] = {}


def _key(group: dist.ProcessGroup, device: torch.device) -> tuple[str, torch.device]:
    if device.type == "cuda" and str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return str(group.group_name), device


def get(group: dist.ProcessGroup, device: torch.device, *, epoch: int = 0) -> Workspace:
    """The workspace of `group` on `device`, made on first use (collective), its next op at `epoch` + 1.

    Raises `Unreachable` where ranks share no memory.
    """
    # As long as a group lives, no other has its id.
    found = _found.get((id(group), device))
    if found is not None and found[0]() is group:
        return found[1]
    key = _key(group, device)
    made_for = _made_for.get(key)
    if made_for is None or made_for() is not group:
        _forget(key)
        made_for = _made_for[key] = ref(group, _group_gone)
    if groups.is_fake(group):
        _unreachable[key] = (
            "the group's backend is 'fake', with no other ranks whose memory could be reached: 'auto' and 'unfused' "
            "give results of the right shapes"
        )
    if key in _unreachable:
        raise Unreachable(_unreachable[key])
    if key not in _workspaces or not _workspaces[key].made:
        _make(group, key, epoch)
    _found[id(group), key[1]] = made_for, _workspaces[key]
    return _workspaces[key]


def _make(group: dist.ProcessGroup, key: tuple[str, torch.device], epoch: int) -> None:
    _discard(key, why=3)
    on_host, device = key[1].type == "cpu", key[1]
    memory = PosixMemory(group.rank(), group.size()) if on_host else CudaMemory(group, device)
    # Put in its place first: after an interruption it is found there and closed, which tells the peers.
    ws = _workspaces[key] = Workspace(memory, device, epoch=epoch, seconds=timeouts.of(group), make=False)
    exchange = StoreExchange(group) if on_host else None
    try:
        ws.make(exchange)
    except BaseException as error:
        _discard(key, why=3)
        if isinstance(error, Unreachable):
            _unreachable[key] = str(error)
        if exchange is not None and isinstance(error, (Unreachable, ValueError)):
            exchange.ended()
        raise
    generation.changed()
    if exchange is not None:
        exchange.ended()


def reachable(group: dist.ProcessGroup, device: torch.device) -> tuple[bool, str]:
    """Whether the ranks of `group` can address each other's memory on `device`, and why (not).

    Collective on the first call.
    """
    try:
        get(group, device)
    except Unreachable as error:
        return False, str(error)
    return True, "ranks share memory" if device.type == "cpu" else "ranks reach each other's GPU memory"


def set_timeout(seconds: float, group: Group = None) -> None:
    """How long a wait for a peer may take before `PeerTimeout`, in seconds (30 at first), from now on: in `group`, or,
    where none is given, in every group of this process, those that had a budget of their own as well.

    It is the budget of every wait in shared memory, and of the wait for peers that a group's first op or `parallelize`
    begins with, which without it have the timeout of init_process_group or new_group. What goes through the backend
    has that timeout: the schedule `unfused`, on a GPU also making a workspace and its growth.

    Raises ValueError unless 0 < seconds <= 2,000,000 (the clock is an int32 of milliseconds), TypeError for no number;
    for what is no group as in the functions.
    """
    timeouts.set_for(None if group is None else groups.resolve(group), seconds)
    for key, workspace in list(_workspaces.items()):
        made_for = _made_for.get(key)
        workspace.set_timeout(timeouts.of(made_for() if made_for is not None else None))


def check(group: Group = None) -> None:
    """Wait for this rank's GPU, and raise the PeerTimeout or RanksDisagree that an op of `group`, or of any group of
    this process where none is given, has reported by then.

    Every op looks for such a report by itself, without waiting. This is for who calls none: a loop that replays a
    captured graph, or the end of a measurement. It sends nothing, so ranks need not call it alike.

    Errors for what is no group as in the functions.
    """
    name = None if group is None else str(groups.resolve(group).group_name)
    for key, workspace in list(_workspaces.items()):
        if name in (None, key[0]):
            workspace.check()


def destroy(group: Group = None) -> None:
    """Give back the symmetric memory of `group`, or of every group of this process. Waits for nobody.

    A later op makes it anew, collectively: every rank of a group calls this after the same op, or none does. A rank
    that goes on with the old memory is told which one has left it (`PeerTimeout`). This may be called before or after
    torch.distributed.destroy_process_group, or not at all: the memory goes with the group. Graphs captured before it
    cannot be replayed.

    Errors for what is no group as in the functions; a group that torch.distributed has destroyed already is accepted.
    RuntimeError while an op of the group is under way in another thread.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        group = groups.resolve(group)
    name = None if group is None else str(group.group_name)
    keys = [key for key in list(_made_for) if name in (None, key[0])]
    give_back: Callable[[], None] = partial(_forget_all, keys)
    for each in dict.fromkeys(key[0] for key in keys):
        give_back = partial(locks.alone, ("group", each), "destroy", give_back)
    # In the turns of all groups: either all of them are given back or, where an op is under way, none.
    give_back()


def _forget_all(keys: Sequence[tuple[str, torch.device]]) -> None:
    for key in keys:
        _forget(key)


def _forget(key: tuple[str, torch.device]) -> None:
    _discard(key)
    _unreachable.pop(key, None)
    _made_for.pop(key, None)


def _discard(key: tuple[str, torch.device], why: int = 1) -> None:
    _found.clear()
    generation.changed()
    if (ws := _workspaces.get(key)) is not None:
        # In this order: if closing is interrupted, the workspace is found again.
        ws.close(why)
        _workspaces.pop(key, None)


def _group_gone(made_for: ref[dist.ProcessGroup]) -> None:
    # torch.distributed has destroyed a group and nobody else has kept it.
    if sys.is_finalizing():
        return
    for key in [key for key, each in list(_made_for.items()) if each is made_for]:
        _forget(key)


# A child's copies of its parent's workspaces: never used, and not given back either, which may need its parent's GPU.
_of_parent: list[Workspace] = []


def _after_fork() -> None:
    _of_parent.extend(_workspaces.values())
    for each in (_workspaces, _unreachable, _made_for, _found):
        each.clear()
    # Calls that were prepared have them too.
    generation.changed()


os.register_at_fork(after_in_child=_after_fork)
