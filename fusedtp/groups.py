"""Which ranks take part: one resolver for everything that a caller may name a group by."""

from __future__ import annotations

import os
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .torch_private import backend_names, device_types, group_by_name, is_in_torch_dispatch_mode

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | str | None"


# The world that this process was forked with, if it was: its connections and its memory are the parent's.
inherited: Any = None


def _after_fork() -> None:
    global inherited
    inherited = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


os.register_at_fork(after_in_child=_after_fork)


def check_fork() -> None:
    """RuntimeError in a process that was forked after torch.distributed was initialised."""
    if inherited is not None and dist.is_initialized() and dist.group.WORLD is inherited:
        raise RuntimeError(
            f"process {os.getpid()} was forked after torch.distributed was initialised: the process groups and the "
            "memory behind them are its parent's. Start processes before init_process_group, or with "
            "multiprocessing.get_context('spawn'), and call init_process_group in each"
        )


def named(name: str) -> dist.ProcessGroup:
    """The group of a name that `resolve` has seen: fast, for every call. Errors as in `resolve`."""
    if inherited is not None:
        check_fork()
    try:
        return group_by_name(name)
    except (RuntimeError, KeyError, ValueError):
        return resolve(name)


def resolve(group: Group = None) -> dist.ProcessGroup:
    """The process group meant by `group`: itself, its name, a 1-D mesh, or None for the world.

    Raises RuntimeError where torch.distributed is not initialised, or was before this process was forked, ValueError
    for a mesh of more dimensions or an unknown name, TypeError for anything else.
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
    if _leaves_out(group):
        raise ValueError(f"group must have this rank in it, got {group}, GroupMember.NON_GROUP_MEMBER of new_group")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a 1-D mesh, got {group.ndim} dimensions {group.mesh_dim_names}: pick one, mesh['name']"
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


def _leaves_out(group: object) -> bool:
    # What new_group returns to a rank that it leaves out: a plain number.
    return isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER


# The kinds of devices that are known to fit a group: asking it takes longer.
_carried: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


def check_device(group: dist.ProcessGroup, kind: str) -> None:
    """ValueError for a group whose backends do not carry tensors of that kind of device."""
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
    """Whether this process plays one rank of a group that has no others, by torch's backend "fake"."""
    return "fake" in backend_names(group)


# Meshes that have been looked at, by their id, as hashing one takes longer.
_ascending: dict[int, ref[DeviceMesh]] = {}


def check_mesh(name: str, mesh: DeviceMesh) -> None:
    """ValueError for a mesh without this rank, or whose ranks do not ascend, as those of its groups do."""
    if mesh.get_coordinate() is None:
        raise ValueError(f"{name} must have this rank, {dist.get_rank()}, in it, got {mesh}")
    # Its ranks are a tensor, which a mode may take for one of the program's.
    unseen = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    if unseen or (id(mesh) in _ascending and _ascending[id(mesh)]() is mesh):
        return
    ranks = mesh.mesh
    if any(bool((ranks.diff(dim=dim) <= 0).any()) for dim in range(ranks.ndim)):
        raise ValueError(f"{name} must have ranks that ascend along every dimension, got {ranks.tolist()}")
    _ascending[id(mesh)] = ref(mesh)
