"""Which workspace a group has on a device: made with its first op, given back by `destroy`, nobody's after a fork."""

from __future__ import annotations

import contextlib
import os
from collections import Counter

import torch
import torch.distributed as dist

from . import budgets, groups, turns
from .groups import Group
from .memory import Unreachable
from .memory.cuda import CudaMemory
from .memory.posix import PosixMemory
from .workspace import Workspace

_workspaces: dict[tuple[str, torch.device], Workspace] = {}
_unreachable: dict[tuple[str, torch.device], str] = {}
# For which group either was made: torch gives the name of one that is destroyed to another.
_made_for: dict[tuple[str, torch.device], dist.ProcessGroup] = {}
# Those of groups that are in use, by what is looked up in no time.
_found: dict[tuple[int, torch.device], tuple[dist.ProcessGroup, Workspace]] = {}
_destroyed: Counter[str | None] = Counter()  # how often each group was; None: all of them


def _key(group: dist.ProcessGroup, device: torch.device) -> tuple[str, torch.device]:
    if device.type == "cuda" and str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return str(group.group_name), device


def get(group: dist.ProcessGroup, device: torch.device, *, epoch: int = 0) -> Workspace:
    """The workspace of `group` on `device`, made on first use (collective), its next op at `epoch` + 1.

    Raises `Unreachable` where ranks share no memory.
    """
    # A group that lives on has no other's number.
    found = _found.get((id(group), device))
    if found is not None and found[0] is group:
        return found[1]
    key = _key(group, device)
    if _made_for.get(key) is not group:
        _forget(key)
        _made_for[key] = group
    if key in _unreachable:
        raise Unreachable(_unreachable[key])
    if key not in _workspaces:
        memory = PosixMemory(group) if device.type == "cpu" else CudaMemory(group, key[1])
        try:
            _workspaces[key] = Workspace(memory, key[1], epoch=epoch, seconds=budgets.of(group))
        except Unreachable as error:
            _unreachable[key] = str(error)
            raise
    _found[id(group), key[1]] = group, _workspaces[key]
    return _workspaces[key]


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

    It is the budget of every wait in shared memory and of debug mode. What goes through the backend, the schedule
    `unfused` and the making of a workspace (on a GPU its growth too), has the timeout of init_process_group or
    new_group.

    Raises ValueError unless 0 < seconds <= 2,000,000 (the clock is an int32 of milliseconds), TypeError for no number;
    for what is no group as in the functions.
    """
    budgets.set_for(None if group is None else groups.resolve(group), seconds)
    for key, workspace in _workspaces.items():
        workspace.set_timeout(budgets.of(_made_for[key]))


def generation(name: str) -> int:
    """How often `destroy` has been called for the group of that name: the same on all ranks that call it alike."""
    return _destroyed[None] + _destroyed[name]


def destroy(group: Group = None) -> None:
    """Give back the symmetric memory of `group`, or of every group of this process. Waits for nobody.

    A later op makes it anew, collectively: every rank of a group calls this after the same op, or none does. A rank
    that goes on with the old memory is told which one has left it (`PeerTimeout`). It may come before or after
    torch.distributed.destroy_process_group, or not at all. Graphs captured before it cannot be replayed.

    Errors for what is no group as in the functions; one that torch.distributed has destroyed already is one still.
    RuntimeError while an op of the group is under way in another thread.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        group = groups.resolve(group)
    name = None if group is None else str(group.group_name)
    keys = [key for key in _made_for if name in (None, key[0])]
    with contextlib.ExitStack() as stack:
        for each in dict.fromkeys(key[0] for key in keys):
            stack.enter_context(turns.Turn("group", each, "destroy"))
        _destroyed[name] += 1
        for key in keys:
            _forget(key)


def _forget(key: tuple[str, torch.device]) -> None:
    _found.clear()
    _made_for.pop(key, None)
    _unreachable.pop(key, None)
    if key in _workspaces:
        _workspaces.pop(key).close()


# A child's copies of its parent's workspaces: never used, and not given back either, which may need its parent's GPU.
_of_parent: list[Workspace] = []


def _after_fork() -> None:
    _of_parent.extend(_workspaces.values())
    for each in (_workspaces, _unreachable, _made_for, _found):
        each.clear()


os.register_at_fork(after_in_child=_after_fork)
