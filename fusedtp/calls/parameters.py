"""A layer's parameters: DTensors, which checkpoints, optimizers, FSDP and norms treat as parts of one tensor.

    sharded   this rank's part along one dim; whole   the same on every rank

DTensor cuts a dim in pieces of the length rounded up (`shards.chunk_sizes`), and nothing in torch can be told another
cut. A parameter that is cut otherwise is a DTensor of the longest piece on every rank, the shorter ones padded with
zeros, which gradients, norms and weight decay leave zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..groups import Group
from ..shards import chunk_sizes, offsets
from ..torch_private import (
    device_types,
    dtensor_like,
    is_in_torch_dispatch_mode,
    is_wrapped,
    local_of,
    transforms_active,
    unwrapped,
    without_dispatch,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# Neither DTensor, nor a fake, nor another subclass that the dispatcher would have to be asked about.
PLAIN = (Tensor, nn.Parameter)

# By the name of their group, and for which group: torch may give the name of a destroyed one to another. Both weak: a
# mesh lives as long as parameters that lie on it, and holds its group.
_meshes: dict[tuple[str, str], tuple[ref[ProcessGroup], ref[DeviceMesh]]] = {}


def mesh_of(group: Group, process_group: ProcessGroup, device: torch.device | str | int | None) -> DeviceMesh:
    """The mesh that a layer's parameters lie on: `group` itself if it is one, else one of `process_group`'s ranks."""
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
        # One for all layers of a group: DTensors of two meshes do not go together.
        mesh = DeviceMesh.from_group(process_group, kind)
        for name in [name for name, (_, other) in _meshes.items() if other() is None]:
            del _meshes[name]
        _meshes[process_group.group_name, kind] = ref(process_group), ref(mesh)
    return mesh


@functools.lru_cache(maxsize=1024)
def is_padded(sizes: tuple[int, ...]) -> bool:
    """Whether DTensor would cut otherwise, so that shards are padded."""
    return sizes != chunk_sizes(sum(sizes), len(sizes))


def sharded(
    shape: Sequence[int],
    dim: int,
    sizes: Sequence[int],
    mesh: DeviceMesh,
    device: torch.device | str | int | None,
    dtype: torch.dtype | None,
) -> nn.Parameter:
    """An uninitialised parameter of global `shape` of which rank r of the mesh has `sizes[r]` along `dim`."""
    from torch.distributed.tensor import Shard

    there, here = list(shape), list(shape)
    here[dim] = sizes[mesh.get_local_rank()]
    if is_padded(tuple(sizes)):
        here[dim], there[dim] = max(sizes), max(sizes) * len(sizes)
    return _parameter(torch.empty(here, device=device, dtype=dtype), there, mesh, Shard(dim))


def whole(
    shape: Sequence[int], mesh: DeviceMesh, device: torch.device | str | int | None, dtype: torch.dtype | None
) -> nn.Parameter:
    """An uninitialised parameter that every rank of the mesh has alike."""
    from torch.distributed.tensor import Replicate

    return _parameter(torch.empty(shape, device=device, dtype=dtype), shape, mesh, Replicate())


def _parameter(values: Tensor, shape: Sequence[int], mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    from torch.distributed.tensor import DTensor

    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    value = DTensor.from_local(values, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)
    return nn.Parameter(value)


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor, dim: int | None, sizes: Sequence[int]) -> None:
    """Copy this rank's part of a whole tensor, which every rank has and which is split along `dim` into `sizes`.

    The parameter may be split over further axes by now, as fully_shard does.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        raise RuntimeError(
            f"this parameter is no longer the DTensor that the layer was made with, but {type(parameter).__name__}: "
            "it cannot be told which part of the whole it is"
        )
    if dim is not None and is_padded(tuple(sizes)):
        longest, given = max(sizes), values
        values = given.new_zeros(parameter.shape)
        for rank, (first, size) in enumerate(zip(offsets(sizes), sizes, strict=False)):
            values.narrow(dim, rank * longest, size).copy_(given.narrow(dim, first, size))
    # Nothing is sent: every rank keeps its part of its own copy.
    parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None))


def part(parameter: Any, ndim: int) -> Tensor:
    """What an op reads of a parameter, outside of any graph: the local tensor, leading dims flattened up to `ndim`."""
    tensor: Tensor = parameter if type(parameter) in PLAIN else local_of(parameter)
    return tensor if tensor.ndim <= ndim else tensor.flatten(0, tensor.ndim - ndim)


def local(parameter: Any, ndim: int) -> Tensor:
    """The same, differentiable."""
    if not torch.compiler.is_compiling() and transforms_active():
        return part(_untransformed(parameter), ndim)
    from torch.distributed.tensor import DTensor

    tensor: Tensor = parameter
    if isinstance(parameter, DTensor):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            watch(parameter)
            if is_in_torch_dispatch_mode():
                # By the operators, and before there are views of it, which may not count a change as their own.
                keep(local_of(parameter))
        tensor = parameter.to_local()
    return tensor if tensor.ndim <= ndim else tensor.flatten(0, tensor.ndim - ndim)


@torch.no_grad()
def same_as(rank: int, tensor: Tensor, mesh: DeviceMesh, group: ProcessGroup | None = None) -> None:
    """Give a plain tensor the values that it has on that rank of a 1-D mesh, as distribute_tensor does. group: the
    mesh's, where it may be known to no one else.
    """
    if mesh.size() == 1 or tensor.is_meta or not tensor.numel():
        return
    # The group may carry no tensors of a model that is on a CPU still.
    sent = tensor.detach().to(mesh.device_type, memory_format=torch.contiguous_format)
    dist.broadcast(sent, group=group or mesh.get_group(), group_src=rank)
    tensor.copy_(sent)


class Lies(NamedTuple):
    """How a parameter lies over a group's mesh: its whole shape, and that of this rank's part."""

    mesh: DeviceMesh
    placement: Placement
    shape: tuple[int, ...]
    part: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Any) -> Lies:
        """How a DTensor on a 1-D mesh lies."""
        (placement,) = parameter.placements
        return cls(parameter.device_mesh, placement, tuple(parameter.shape), tuple(local_of(parameter).shape))

    def check(self, name: str, parameter: Any) -> Any:
        """ValueError where a parameter that something has put in place lies otherwise; else its spec, if it has one. A
        plain one is this rank's part, as in torch.func.functional_call.
        """
        if parameter is None:
            return None
        if not torch.compiler.is_compiling() and transforms_active():
            return None
        if type(parameter) in PLAIN or not hasattr(parameter, "placements"):
            fits, got = tuple(parameter.shape) == self.part, f"a plain tensor of {tuple(parameter.shape)}"
        else:
            fits = parameter.placements == (self.placement,) and tuple(parameter.shape) == self.shape
            fits = fits and parameter.device_mesh == self.mesh
            got = f"one of {tuple(parameter.shape)} with {parameter.placements} on {parameter.device_mesh}"
        if not fits:
            raise ValueError(
                f"{name} must be a DTensor of {self.shape} with {self.placement} on {self.mesh}, whose part here has "
                f"{self.part}, got {got}: load a dense state by set_model_state_dict with full_state_dict=True"
            )
        return getattr(parameter, "_spec", None)


@dataclass
class Holder:
    """What is known of the DTensor that a plain tensor is a part of: a tensor that counts its changes, and has nothing
    else of it, its id, and how many there had been when an operator last kept the part.
    """

    changes: Tensor
    identity: int
    seen: int


# torch counts a change of a DTensor on the DTensor alone, and not even there where an optimizer's step is foreach or
# fused, while autograd keeps the DTensor's part. So holders are found beside the memory of a part, by the offset in it.
_HOLDERS = "fusedtp_holders"


def watch(dtensor: Any) -> None:
    """Let `holder` find this DTensor from its part, or a slice of it."""
    mine = local_of(dtensor)
    if dtensor.is_inference() or mine.is_inference():
        return
    holders, at = mine.untyped_storage().__dict__.setdefault(_HOLDERS, {}), mine.storage_offset()
    if at not in holders or holders[at].identity != id(dtensor):
        # Shares the DTensor's version and none of its memory.
        with without_dispatch():
            changes = dtensor.detach()
        holders[at] = Holder(changes, id(dtensor), changes._version)
        _count_steps()


def watch_all(module: nn.Module) -> None:
    """`watch` the module's own parameters, as far as they are DTensors."""
    for each in module._parameters.values():
        if each is not None and hasattr(each, "_local_tensor"):
            watch(each)


class Watched(nn.Module):
    """A module whose own DTensors `holder` finds, also after they were moved."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        made = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        watch_all(self)
        return made


@functools.cache
def _count_steps() -> None:
    def count(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for each in group["params"]:
                mine = None if type(each) in PLAIN else getattr(each, "_local_tensor", None)
                known = None if mine is None else holder(mine)
                if known is not None and known.identity == id(each):
                    torch.autograd.graph.increment_version(each)

    register_optimizer_step_post_hook(count)


def holder(tensor: Tensor) -> Holder | None:
    """That of the DTensor through which a plain tensor may be changed."""
    found: dict[int, Holder] = tensor.untyped_storage().__dict__.get(_HOLDERS, {})
    node: Any = None if found else tensor.grad_fn
    # The to_local() of a DTensor that no layer and no style has made, or a view or two of that.
    for _ in range(3):
        if node is None or len(node.next_functions) != 1:
            break
        name, node = type(node).__name__, node.next_functions[0][0]
        if name == "_ToTorchTensorBackward" and hasattr(node, "variable"):
            watch(node.variable)
            found = tensor.untyped_storage().__dict__.get(_HOLDERS, {})
    at = max((each for each in found if each <= tensor.storage_offset()), default=None) if found else None
    return None if at is None else found[at]


def versions(kept: Sequence[Tensor | None], dtensors: Iterable[Any]) -> list[tuple[int, int, Tensor, int]]:
    """What `check_versions` takes, of tensors that autograd is about to keep; some are parts of these DTensors."""
    for each in dtensors:
        watch(each)
    known = [(at, each, holder(each)) for at, each in enumerate(kept) if each is not None]
    return [(at, id(each), of.changes, of.changes._version) for at, each, of in known if of is not None]


def check_versions(kept: Sequence[Tensor | None], before: Iterable[tuple[int, int, Tensor, int]]) -> None:
    """RuntimeError where one of them was changed through its DTensor since."""
    for at, identity, changes, version in before:
        # Hooks of saved tensors may have given a copy.
        if id(kept[at]) == identity:
            _check(changes, version)


def keep(tensor: Tensor | None, *, is_checked: bool = False) -> None:
    """Before an operator keeps it: let changes through its DTensor, which autograd does not see, count as its own. Not
    those before a backward that `is_checked` already.
    """
    known = None if tensor is None else holder(tensor)
    if tensor is not None and known is not None and known.changes._version != known.seen:
        known.seen = known.changes._version
        if not is_checked:
            torch.autograd.graph.increment_version(tensor)


def check_kept(tensors: Iterable[Tensor]) -> None:
    """RuntimeError where one of these was changed through its DTensor since an operator has kept it."""
    for each in tensors:
        known = holder(each)
        if known is not None:
            _check(known.changes, known.seen)


def _check(changes: Tensor, version: int) -> None:
    if changes._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a DTensor "
            f"of shape {tuple(changes.shape)} is at version {changes._version}; expected version {version} instead. "
            "Change it after backward, or clone() it before it is used"
        )


def _untransformed(parameter: Any) -> Any:
    # torch.func knows DTensors neither wrapped nor closed over: their gradients would be lost.
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
    """A gradient of `part(parameter)` as one of the parameter: laid out like it, with nothing left to be summed."""
    values = grad.contiguous().view(local_of(parameter).shape)
    kind: Any = type(parameter)
    if values.requires_grad:
        made: Tensor = kind.from_local(
            values, parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
        return made
    return dtensor_like(values, parameter)
