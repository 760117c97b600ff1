"""A layer's parameters: DTensors, which checkpoints, optimizers, FSDP and gradient norms treat as parts of one tensor.

    sharded   this rank's part along one dim
    whole     the same on every rank

DTensor splits a dim in chunks of the length rounded up (`shards.chunk_sizes`), and torch has no other split. A
parameter with another split is a DTensor with chunks of the longest part. Shorter parts are padded with zeros, which
gradients, norms and weight decay leave zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..groups import Group
from ..shards import chunk_sizes, offsets
from ..torch_private import (
    device_types,
    dtensor_like,
    is_in_torch_dispatch_mode,
    is_wrapped,
    local_of,
    on_multi_tensor_changes,
    transforms_active,
    unwrapped,
    without_dispatch,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

Device = torch.device | str | int | None
# Types without their own dispatch: no DTensor, fake tensor or other subclass.
PLAIN = (Tensor, nn.Parameter)

# Meshes by the group's name and the kind of device. The group itself is stored too, because torch may reuse the name of
# a destroyed group. References are weak: parameters keep their mesh alive, and a mesh keeps its group alive.
_meshes: dict[tuple[str, str], tuple[ref[ProcessGroup], ref[DeviceMesh]]] = {}


def mesh_of(group: Group, process_group: ProcessGroup, device: Device) -> DeviceMesh:
    """Return the mesh of a layer's parameters: `group` if it is a mesh, else one over the ranks of `process_group`."""
    if isinstance(group, DeviceMesh):
        return group
    kinds = sorted(device_types(process_group))
    kind = torch.empty(0, dtype=torch.uint8, device=device).device.type
    if kind not in kinds:
        # The layer is on meta, or on a CPU before it is moved to a device of the group.
        kind = "cuda" if "cuda" in kinds and torch.cuda.is_available() else kinds[0]
    known = _meshes.get((process_group.group_name, kind))
    mesh = known[1]() if known is not None and known[0]() is process_group else None
    if mesh is None:
        # One mesh for all layers of a group: ops cannot mix DTensors of two meshes.
        mesh = DeviceMesh.from_group(process_group, kind)
        for name in [name for name, (_, other) in _meshes.items() if other() is None]:
            del _meshes[name]
        _meshes[process_group.group_name, kind] = ref(process_group), ref(mesh)
    return mesh


@functools.lru_cache(maxsize=1024)
def is_padded(sizes: tuple[int, ...]) -> bool:
    """Return whether shards are padded, because DTensor would split otherwise."""
    return sizes != chunk_sizes(sum(sizes), len(sizes))


def sharded(
    shape: Sequence[int], dim: int, sizes: Sequence[int], mesh: DeviceMesh, device: Device, dtype: torch.dtype | None
) -> nn.Parameter:
    """Return an uninitialised parameter of global `shape` of which rank r of the mesh has `sizes[r]` along `dim`."""
    from torch.distributed.tensor import Shard

    there, here = list(shape), list(shape)
    here[dim] = sizes[mesh.get_local_rank()]
    if is_padded(tuple(sizes)):
        here[dim], there[dim] = max(sizes), max(sizes) * len(sizes)
    return nn.Parameter(as_dtensor(torch.empty(here, device=device, dtype=dtype), mesh, Shard(dim), there))


def whole(shape: Sequence[int], mesh: DeviceMesh, device: Device, dtype: torch.dtype | None) -> nn.Parameter:
    """Return an uninitialised parameter that is the same on every rank of the mesh."""
    from torch.distributed.tensor import Replicate

    return nn.Parameter(as_dtensor(torch.empty(shape, device=device, dtype=dtype), mesh, Replicate(), shape))


def as_dtensor(y: Tensor, mesh: DeviceMesh, made: Placement, shape: Sequence[int]) -> DTensor:
    """Return y, whose placement in a whole tensor of `shape` is `made`, as a DTensor."""
    from torch.distributed.tensor import DTensor

    # A DTensor's strides are those of the whole tensor. Wrong ones would mislead a view of it.
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(y.contiguous(), mesh, [made], run_check=False, shape=torch.Size(shape), stride=strides)


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor, dim: int | None, sizes: Sequence[int]) -> None:
    """Copy this rank's part of whole `values`, which every rank has, to a parameter split along `dim` into `sizes`.

    The parameter may be split over further mesh axes, as by fully_shard.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        raise RuntimeError(
            f"this parameter is no longer the DTensor that the layer was made with, but {type(parameter).__name__}: "
            "it cannot be told which part of the whole it is"
        )
    if dim is not None and is_padded(tuple(sizes)):
        longest, dense = max(sizes), values
        values = dense.new_zeros(parameter.shape)
        for rank, (first, size) in enumerate(zip(offsets(sizes), sizes, strict=False)):
            values.narrow(dim, rank * longest, size).copy_(dense.narrow(dim, first, size))
    parameter.copy_(part_of(values, parameter))


def part_of(values: Tensor, like: DTensor) -> DTensor:
    """Return whole `values`, which every rank has, as a DTensor in the layout of `like`; nothing is sent.

    torch's distribute_tensor cuts in the order of the mesh's axes. fully_shard cuts what later axes have cut already:
    where lengths do not divide, those are other rows.
    """
    from torch.distributed.tensor import DTensor

    mesh, own = like.device_mesh, values.detach()
    place = mesh.get_coordinate()
    assert place is not None
    # `split_factor` of fully_shard's placement: the number of parts that there were before its cut.
    cuts = [(getattr(each, "split_factor", 1), axis, each) for axis, each in enumerate(like.placements)]
    for _, axis, each in sorted(cuts, key=lambda cut: cut[:2]):
        if not each.is_replicate():
            dim: int = each.dim  # type: ignore[attr-defined]
            # A mesh may outlive its groups, by which get_local_rank looks.
            sizes, rank = chunk_sizes(own.shape[dim], mesh.size(axis)), place[axis]
            own = own.narrow(dim, sum(sizes[:rank]), sizes[rank])
    here = local_of(like)
    assert own.shape == here.shape, f"{like.placements} of {tuple(values.shape)}: {tuple(own.shape)}"
    if not own.is_meta:
        device = mesh.device_type if here.is_meta else here.device
        own = own.to(device, copy=True, memory_format=torch.contiguous_format)
    return DTensor.from_local(own, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def own_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace whole plain tensors of a state by this rank's parts, as a DTensor takes only DTensors; nothing is sent.

    Every rank loads the same state. This is a pre-hook of load_state_dict.
    """
    own: Mapping[str, Any] = module._parameters
    for name, parameter in own.items():
        value: Any = state_dict.get(f"{prefix}{name}")
        if hasattr(parameter, "placements") and type(value) in PLAIN and value.shape == parameter.shape:
            state_dict[f"{prefix}{name}"] = part_of(value, parameter)


def part(parameter: Any, ndim: int) -> Tensor:
    """Return a parameter's local tensor, outside of any graph, with leading dims flattened to have `ndim` dims."""
    tensor: Tensor = parameter if type(parameter) in PLAIN else local_of(parameter)
    return tensor if tensor.ndim <= ndim else tensor.flatten(0, tensor.ndim - ndim)


def local(parameter: Any, ndim: int) -> Tensor:
    """Return `part` of the parameter, differentiably."""
    if not torch.compiler.is_compiling() and transforms_active():
        return part(_untransformed(parameter), ndim)
    from torch.distributed.tensor import DTensor

    tensor: Tensor = parameter
    if isinstance(parameter, DTensor):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            watch(parameter)
            if is_in_torch_dispatch_mode():
                # Operators keep the local tensor. Register it before views exist, which may not count its changes.
                keep(local_of(parameter))
            tensor = _Local.apply(parameter)  # type: ignore[no-untyped-call]
        else:
            tensor = parameter.to_local()
    return tensor if tensor.ndim <= ndim else tensor.flatten(0, tensor.ndim - ndim)


class _Local(torch.autograd.Function):
    # to_local() of torch 2.11 gives a gradient the strides of even shards, and torch then gathers it where it is kept.

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.parameter = parameter
        own = local_of(parameter)
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else as_gradient(grad, ctx.parameter)


@torch.no_grad()
def same_as(rank: int, tensor: Tensor, mesh: DeviceMesh, group: ProcessGroup | None = None) -> None:
    """Give a plain tensor the values that it has on rank `rank` of a 1-D mesh, as distribute_tensor does.

    `group` is the mesh's group, by default that of `mesh.get_group()`.
    """
    if mesh.size() == 1 or tensor.is_meta or not tensor.numel():
        return
    # The model may still be on a CPU, whose tensors the group may not carry.
    sent = tensor.detach().to(mesh.device_type, memory_format=torch.contiguous_format)
    dist.broadcast(sent, group=group or mesh.get_group(), group_src=rank)
    tensor.copy_(sent)


class ParameterLayout(NamedTuple):
    """Layout of a parameter over a group's mesh, with its global shape and the shape of this rank's part."""

    mesh: DeviceMesh
    placement: Placement
    shape: tuple[int, ...]
    part: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Any) -> ParameterLayout:
        """Return the layout of a DTensor on a 1-D mesh."""
        (placement,) = parameter.placements
        return cls(parameter.device_mesh, placement, tuple(parameter.shape), tuple(local_of(parameter).shape))

    def check(self, name: str, parameter: Any) -> Any:
        """Raise ValueError if a parameter, which other code may have replaced, has another layout.

        Return its DTensor spec, if it has one. A plain tensor is this rank's part, as in torch.func.functional_call.
        """
        if parameter is None:
            return None
        if not torch.compiler.is_compiling() and transforms_active():
            return None
        is_plain = type(parameter) in PLAIN or not hasattr(parameter, "placements")
        if is_plain:
            fits = tuple(parameter.shape) == self.part
        else:
            fits = parameter.placements == (self.placement,) and tuple(parameter.shape) == self.shape
            fits = fits and parameter.device_mesh == self.mesh
        if not fits:
            # Not before: the compiler of torch 2.14 cannot trace the text of a placement.
            placed = "" if is_plain else f" with {parameter.placements} on {parameter.device_mesh}"
            got = f"{'a plain tensor' if is_plain else 'one'} of {tuple(parameter.shape)}{placed}"
            raise ValueError(
                f"{name} must be a DTensor of {self.shape} with {self.placement} on {self.mesh}, whose part here has "
                f"{self.part}, got {got}: load a dense state by set_model_state_dict with full_state_dict=True"
            )
        return getattr(parameter, "_spec", None)


@dataclass
class DTensorRecord:
    """Record of the DTensor that a plain tensor is the local part of.

    - `changes`: a tensor that shares only the DTensor's version counter.
    - `identity`: the DTensor's id. A later DTensor may have the same one.
    - `part`: the DTensor's local tensor, which no later DTensor has. The DTensor itself may have no weak reference:
      `Module.to` swaps parameters.
    - `seen`: the version when an operator last kept the part, `_NEVER` if none has.
    """

    changes: Tensor
    identity: int
    part: ref[Tensor]
    seen: int


# torch counts a change of a DTensor on the DTensor only, and a multi-tensor op's not even there (`_count_changes`).
# Autograd saves the local part, whose version does not change. So each storage has a table of holders, by offset in the
# storage.
_HOLDERS = "fusedtp_holders"
_NEVER = -1


def watch(dtensor: Any) -> None:
    """Let `holder` find this DTensor from its local part or a slice of the part."""
    mine = local_of(dtensor)
    if dtensor.is_inference() or mine.is_inference():
        return
    holders, at = mine.untyped_storage().__dict__.setdefault(_HOLDERS, {}), mine.storage_offset()
    known = holders.get(at)
    if known is None or known.identity != id(dtensor) or known.part() is not mine:
        # Shares the DTensor's version counter and none of its memory.
        with without_dispatch():
            changes = dtensor.detach()
        holders[at] = DTensorRecord(changes, id(dtensor), ref(mine), _NEVER)
        _count_changes()


def watch_all(module: nn.Module) -> None:
    """Call `watch` for each of the module's own parameters that is a DTensor."""
    for each in module._parameters.values():
        if each is not None and hasattr(each, "_local_tensor"):
            watch(each)


class TrackedModule(nn.Module):
    """Module whose own parameters are DTensors: `holder` finds them, also after `_apply` has moved them."""

    # Each parameter's layout, and the DTensor spec that was last found to match it.
    _lies: dict[str, ParameterLayout]
    _known: dict[str, Any]

    def keep_layout(self) -> None:
        """Record each parameter's layout; `check_parameters` raises if it changes."""
        own: dict[str, Any] = {name: each for name, each in self._parameters.items() if hasattr(each, "_local_tensor")}
        self._lies = {name: ParameterLayout.of(each) for name, each in own.items()}
        self._known = {name: each._spec for name, each in own.items()}
        watch_all(self)

    def read(self, *names: str) -> list[Any]:
        """Return the parameters with these names; ValueError if other code has replaced one by another layout.

        A call reads each parameter once: a parametrization computes it, and may draw random numbers or count its calls.
        """
        values, own, cls = [], self._parameters, type(self)
        for name in names:
            # `getattr` would call torch's `__getattr__`, in Python.
            each: Any = own[name] if name in own and not hasattr(cls, name) else getattr(self, name)
            known = self._known.get(name)
            if (known is None or getattr(each, "_spec", None) is not known) and name in self._lies:
                found = self._lies[name].check(name, each)
                # A graph that changed what it is guarded by would be compiled again at its second call.
                if not torch.compiler.is_compiling():
                    self._known[name] = found
            values.append(each)
        return values

    def computes(self, *names: str) -> bool:
        """Return whether a parameter with one of these names is computed when it is read, or before each call."""
        return any([name not in self._parameters or hasattr(type(self), name) for name in names])

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        made = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        watch_all(self)
        return made


@functools.cache
def _count_changes() -> None:
    # Foreach and fused optimizers, averages of weights and `torch._foreach_*_` itself.
    def count(dtensor: Any) -> None:
        mine = local_of(dtensor)
        if type(mine) in PLAIN and not dtensor.is_inference() and holder(mine) is not None:
            torch.autograd.graph.increment_version(dtensor)

    on_multi_tensor_changes(count)


def holder(tensor: Tensor) -> DTensorRecord | None:
    """Return the record of the DTensor whose local part `tensor` is or is a slice of, or None."""
    records: dict[int, DTensorRecord] = tensor.untyped_storage().__dict__.get(_HOLDERS, {})
    node: Any = None if records else tensor.grad_fn
    # The to_local() of a DTensor that the user made, or up to two views of it.
    for _ in range(3):
        if node is None or len(node.next_functions) != 1:
            break
        name, node = type(node).__name__, node.next_functions[0][0]
        if name == "_ToTorchTensorBackward" and hasattr(node, "variable"):
            watch(node.variable)
            records = tensor.untyped_storage().__dict__.get(_HOLDERS, {})
    at = max((each for each in records if each <= tensor.storage_offset()), default=None) if records else None
    return None if at is None else records[at]


def versions(kept: Sequence[Tensor | None], dtensors: Iterable[Any]) -> list[tuple[int, int, Tensor, int]]:
    """Return, for `check_versions`, the DTensor versions of tensors that autograd is about to save.

    `dtensors` are DTensors that some of the tensors may be parts of.
    """
    for each in dtensors:
        watch(each)
    known = [(at, each, holder(each)) for at, each in enumerate(kept) if each is not None]
    return [(at, id(each), of.changes, of.changes._version) for at, each, of in known if of is not None]


def check_versions(kept: Sequence[Tensor | None], before: Iterable[tuple[int, int, Tensor, int]]) -> None:
    """Raise RuntimeError if a saved tensor was changed through its DTensor after `versions`."""
    for at, identity, changes, version in before:
        # A hook of saved tensors may have returned a copy.
        if id(kept[at]) == identity:
            _check(changes, version)


def keep(tensor: Tensor | None, *, is_checked: bool = False) -> None:
    """Copy a DTensor's version counter to its local tensor, so that autograd sees in-place changes of the DTensor.

    Called before an operator saves the tensor. Changes before the first of them do not count. Nor do any with
    `is_checked`, for a backward that has called `check_versions`.
    """
    known = None if tensor is None else holder(tensor)
    if tensor is not None and known is not None and known.changes._version != known.seen:
        is_first, known.seen = known.seen == _NEVER, known.changes._version
        if not (is_checked or is_first):
            torch.autograd.graph.increment_version(tensor)


def check_kept(tensors: Iterable[Tensor]) -> None:
    """Raise RuntimeError if a tensor was changed through its DTensor after an operator saved it."""
    for each in tensors:
        known = holder(each)
        if known is not None and known.seen != _NEVER:
            _check(known.changes, known.seen)


def _check(changes: Tensor, version: int) -> None:
    if changes._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a DTensor "
            f"of shape {tuple(changes.shape)} is at version {changes._version}; expected version {version} instead. "
            "Change it after backward, or clone() it before it is used"
        )


def _untransformed(parameter: Any) -> Any:
    # torch.func supports DTensors neither wrapped nor closed over: their gradients would be lost.
    inner = parameter
    while is_wrapped(inner):
        inner = unwrapped(inner)
    wrapped = inner is not parameter
    if type(inner) not in PLAIN and (wrapped or (parameter.requires_grad and torch.is_grad_enabled())):
        raise NotImplementedError(
            "torch.func's transforms do not work with parameters that are DTensors: give the layer this rank's parts, "
            "torch.func.functional_call(layer, {name: p.to_local() for name, p in layer.named_parameters()}, x)"
        )
    return parameter


def as_gradient(grad: Tensor, parameter: Any) -> Tensor:
    """Return a gradient of `part(parameter)` as a DTensor with the parameter's layout, which needs no further sum."""
    values = grad.contiguous().view(local_of(parameter).shape)
    kind: Any = type(parameter)
    if values.requires_grad:
        made: Tensor = kind.from_local(
            values, parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
        return made
    return dtensor_like(values, parameter)
