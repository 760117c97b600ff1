"""Registry: the workspace of each group, device and lane (`lanes`).

The first op of a lane makes its workspace. All of a group's workspaces are given back by `destroy` or with the group. A
forked child has none.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias
from weakref import ref

import torch
import torch.distributed as dist

from .. import groups, lanes, locks
from ..groups import Group
from ..memory import Unreachable
from ..memory.cuda import CudaMemory
from ..memory.posix import PosixMemory
from . import clock, generation, timeouts
from .rendezvous import StoreExchange
from .workspace import Workspace

# A group's name, a device, and a lane.
_Key: TypeAlias = tuple[str, torch.device, int]

_workspaces: dict[_Key, Workspace] = {}
_unreachable: dict[_Key, str] = {}
# The group for which each entry of `_workspaces` or `_unreachable` was made, because torch may reuse the name of a
# destroyed group. The references are weak, so that the registry does not keep a group's threads and connections alive.
_made_for: dict[_Key, ref[dist.ProcessGroup]] = {}
# The workspaces of groups in use, by a key with a fast lookup.
_cached: dict[tuple[int, torch.device, int], tuple[ref[dist.ProcessGroup], Workspace]] = {}


def _key(group: dist.ProcessGroup, device: torch.device, lane: int) -> _Key:
    if device.type == "cuda" and str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return str(group.group_name), device, lane


def get(group: dist.ProcessGroup, device: torch.device, lane: int = lanes.ORDINARY, *, epoch: int = 0) -> Workspace:
    """Return the workspace of `group` on `device` for `lane`. The first call makes it, collectively, at `epoch`.

    Raises `Unreachable` if ranks cannot share memory.
    """
    # No other group has the id of a living one.
    cached = _cached.get((id(group), device, lane))
    if cached is not None and cached[0]() is group:
        return cached[1]
    key = _key(group, device, lane)
    made_for = _made_for.get(key)
    if made_for is None or made_for() is not group:
        _forget(key)
        made_for = _made_for[key] = ref(group, _group_gone)
    if groups.is_fake(group):
        _unreachable[key] = (
            "the group's backend is 'fake', with no other ranks whose memory could be reached: 'auto' and 'unfused' "
            "give results of the right shapes"
        )
    if lane and key[1].type == "cuda" and torch.version.hip is not None:
        _unreachable[key] = f"streams of AMD GPUs are not known to wait for words of memory{lanes.said(lane)}"
    if key in _unreachable:
        raise Unreachable(_unreachable[key])
    if key not in _workspaces or not _workspaces[key].made:
        _make(group, key, epoch)
    _cached[id(group), key[1], lane] = made_for, _workspaces[key]
    return _workspaces[key]


def _make(group: dist.ProcessGroup, key: _Key, epoch: int) -> None:
    _discard(key, why=3)
    _, device, lane = key
    on_host = device.type == "cpu"
    memory = PosixMemory(group.rank(), group.size()) if on_host else CudaMemory(group, device)
    # Registered before it is made: after an interruption `_discard` finds and closes it, which tells the peers.
    ws = _workspaces[key] = Workspace(
        memory, device, epoch=epoch, seconds=timeouts.of(group), make=False, lane=lane,
        members=tuple(dist.get_process_group_ranks(group)),
    )  # fmt: skip
    exchange = StoreExchange(group, lane) if on_host else None
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
    """Return whether the ranks of `group` can address each other's memory on `device`, and the reason.

    Collective on the first call.
    """
    try:
        get(group, device)
    except Unreachable as error:
        return False, str(error)
    return True, "ranks share memory" if device.type == "cpu" else "ranks reach each other's GPU memory"


def set_timeout(seconds: float, group: Group = None) -> None:
    """Set the timeout of waits for peers, in seconds, for `group`, or for every group of this process.

    The default is the timeout of init_process_group or new_group, so that a rank may save, compile or evaluate for as
    long between two ops. A wait that times out raises `PeerTimeout`. Without `group`, the timeout replaces those that
    were set for single groups.

    Ops of the backend always have the timeout of init_process_group or new_group: schedule `unfused`, and on a GPU
    making and growing a workspace.

    Raises ValueError unless 0 < seconds <= 2,000,000 (the clock is an int32 of milliseconds), TypeError if seconds is
    no number. Errors for `group` are those of the functions.
    """
    timeouts.set_for(None if group is None else groups.resolve(group), seconds)
    for key, workspace in list(_workspaces.items()):
        made_for = _made_for.get(key)
        workspace.set_timeout(timeouts.of(made_for() if made_for is not None else None))


def check(group: Group = None) -> None:
    """Wait for this rank's GPU, and raise the PeerTimeout or RanksDisagree that an op has reported.

    Checks the ops of `group`, or of every group of this process. Every op checks for earlier reports too, without
    waiting. Call this after a loop that replays a captured graph, or at the end of a measurement. It sends nothing, so
    a single rank may call it.

    Errors for `group` are those of the functions.
    """
    name = None if group is None else str(groups.resolve(group).group_name)
    for key, workspace in list(_workspaces.items()):
        if name in (None, key[0]):
            workspace.check()


def destroy(group: Group = None) -> None:
    """Give back the symmetric memory of `group`, or of every group of this process. Waits for no peer.

    A later op makes the memory again, collectively. So every rank of a group must call this after the same op, or none.
    A rank that continues with the old memory gets a `PeerTimeout` that names the rank that left. Graphs captured before
    this call cannot be replayed.

    The memory is also given back with its group. This function may be called before or after
    torch.distributed.destroy_process_group.

    Errors for `group` are those of the functions, but a destroyed group is accepted. Raises RuntimeError while another
    thread runs an op of the group.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        group = groups.resolve(group)
    name = None if group is None else str(group.group_name)
    keys = [key for key in list(_made_for) if name in (None, key[0])]
    give_back: Callable[[], None] = partial(_forget_all, keys)
    for each in dict.fromkeys(lanes.lock(key[0], key[2]) for key in keys):
        give_back = partial(locks.alone, each, "destroy", give_back)
    # Hold the locks of all lanes: if an op is running, no memory is given back.
    give_back()


def _forget_all(keys: Sequence[_Key]) -> None:
    for key in keys:
        _forget(key)


def _forget(key: _Key) -> None:
    _discard(key)
    _unreachable.pop(key, None)
    _made_for.pop(key, None)


def _discard(key: _Key, why: int = 1) -> None:
    _cached.clear()
    generation.changed()
    if (ws := _workspaces.get(key)) is not None:
        # Close first: if that is interrupted, the registry still has the workspace.
        ws.close(why)
        _workspaces.pop(key, None)
        lanes.given_back(lanes.lock(key[0], key[2]))


def _group_gone(made_for: ref[dist.ProcessGroup]) -> None:
    # The group's last reference is gone.
    if sys.is_finalizing():
        return
    if clock.is_here():
        # Giving back waits for kernels, whose waits may end by the clock alone.
        threading.Thread(target=_forget_those_of, args=(made_for,), name="fusedtp-gone").start()
    else:
        _forget_those_of(made_for)


def _forget_those_of(made_for: ref[dist.ProcessGroup]) -> None:
    for key in list(_made_for):
        # Looked up for each, as a new group may have taken the name.
        if _made_for.get(key) is made_for:
            _forget(key)


# A forked child's copies of its parent's workspaces. They are kept unused: closing them may need the parent's GPU.
_of_parent: list[Workspace] = []


def _after_fork() -> None:
    _of_parent.extend(_workspaces.values())
    for each in (_workspaces, _unreachable, _made_for, _cached):
        each.clear()
    # Cached calls hold the parent's workspaces too.
    generation.changed()


os.register_at_fork(after_in_child=_after_fork)
