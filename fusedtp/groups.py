"""Groups: resolve a process group, its name, a 1-D mesh or None, and check the group."""

from __future__ import annotations

import os
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .torch_private import backend_names, device_types, group_by_name, is_in_torch_dispatch_mode

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | str | None"


# The parent's world if this process was forked, else None. Its connections and memory are the parent's.
inherited: Any = None


def _after_fork() -> None:
    global inherited
    inherited = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


os.register_at_fork(after_in_child=_after_fork)


def check_fork() -> None:
    """Raise RuntimeError in a process that was forked after torch.distributed was initialised."""
    if inherited is not None and dist.is_initialized() and dist.group.WORLD is inherited:
        raise RuntimeError(
            f"process {os.getpid()} was forked after torch.distributed was initialised: the process groups and the "
            "memory behind them are its parent's. Start processes before init_process_group, or with "
            "multiprocessing.get_context('spawn'), and call init_process_group in each"
        )


def named(name: str) -> dist.ProcessGroup:
    """Return the group with a name. Faster than `resolve`, with the same errors."""
    if inherited is not None:
        check_fork()
    try:
        return group_by_name(name)
    except (RuntimeError, KeyError, ValueError):
        return resolve(name)


def resolve(group: Group = None) -> dist.ProcessGroup:
    """Return the process group that `group` names: itself, its name, a 1-D mesh, or None for the world.

    - RuntimeError: torch.distributed is not initialised, or was initialised before this process was forked.
    - ValueError: an unknown name, a group or mesh without this rank, a mesh with several dimensions or with ranks that
      do not ascend.
    - TypeError: any other value.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised: start the ranks with torchrun and call "
            "torch.distributed.init_process_group('gloo') (or 'nccl') before this"
        )
    check_fork()
    if group is None:
        world = dist.group.WORLD
        assert world is not None
        return world
    if isinstance(group, dist.ProcessGroup):
        return group
    # new_group returns this int to ranks that are not in the group.
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"group must have this rank in it, got {group}, GroupMember.NON_GROUP_MEMBER of new_group")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a 1-D mesh, got {group.ndim} dimensions "
                f"{group.mesh_dim_names or 'without names (give mesh_dim_names)'}: pick one, mesh['name']"
            )
        check_mesh("group", group)
        return group.get_group()
    if isinstance(group, str):
        try:
            return group_by_name(group)
        except (RuntimeError, KeyError, ValueError) as error:
            gone = "it may have been destroyed, or this rank is not in it"
            raise ValueError(f"group {group!r} is not the name of a process group of this process: {gone}") from error
    raise TypeError(f"group must be a ProcessGroup, its name, a 1-D DeviceMesh or None, got {type(group).__name__}")


# Cache of the kinds of devices that a group carries.
_carried: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


def check_device(group: dist.ProcessGroup, kind: str) -> None:
    """Raise ValueError if the group's backends do not carry tensors on that kind of device."""
    carried = _carried.setdefault(group, set())
    if kind in carried or kind == "meta":
        return
    kinds = set(device_types(group))
    if kind not in kinds:
        raise ValueError(
            f"group must carry {kind} tensors, got one of {', '.join(sorted(kinds))} only, with backend "
            f"{dist.get_backend(group)}: make it with init_process_group or new_group(backend='cpu:gloo,cuda:nccl')"
        )
    carried.add(kind)


def is_fake(group: dist.ProcessGroup) -> bool:
    """Return whether the group has torch's backend "fake", without other ranks."""
    return "fake" in backend_names(group)


# Cache of checked meshes, by id because hashing a mesh takes longer.
_ascending: dict[int, ref[DeviceMesh]] = {}


def check_mesh(name: str, mesh: DeviceMesh) -> None:
    """Raise ValueError for a mesh without this rank, or with ranks that do not ascend like those of its groups."""
    if mesh.get_coordinate() is None:
        raise ValueError(f"{name} must have this rank, {dist.get_rank()}, in it, got {mesh}")
    # A mesh's ranks are a tensor, which a dispatch mode may take for one of the user's.
    unseen = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    if unseen or (id(mesh) in _ascending and _ascending[id(mesh)]() is mesh):
        return
    ranks = mesh.mesh
    if any(bool((ranks.diff(dim=dim) <= 0).any()) for dim in range(ranks.ndim)):
        raise ValueError(f"{name} must have ranks that ascend along every dimension, got {ranks.tolist()}")
    _ascending[id(mesh)] = ref(mesh)
