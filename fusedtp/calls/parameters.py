"""A layer's parameters: DTensors, which checkpoints, optimizers, FSDP and norms treat as parts of one tensor.

    sharded   this rank's part along one dim; whole   the same on every rank

DTensor cuts a dim in pieces of the length rounded up (`shards.chunk_sizes`), and nothing in torch can be told another
cut. A parameter that is cut otherwise is a DTensor of the longest piece on every rank, the shorter ones padded with
zeros, which gradients, norms and weight decay leave zeros.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..groups import Group
from ..shards import chunk_sizes, offsets
from .registered import transforms_active

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
    kinds = sorted({each.type for each in process_group._device_types})
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
    tensor: Tensor = parameter if type(parameter) in PLAIN else parameter._local_tensor
    return tensor if tensor.ndim <= ndim else tensor.flatten(0, tensor.ndim - ndim)


def local(parameter: Any, ndim: int) -> Tensor:
    """The same, differentiable."""
    if not torch.compiler.is_compiling() and transforms_active():
        return part(_untransformed(parameter), ndim)
    from torch.distributed.tensor import DTensor

    tensor: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return tensor if tensor.ndim <= ndim else tensor.flatten(0, tensor.ndim - ndim)


def _untransformed(parameter: Any) -> Any:
    # torch.func knows DTensors neither wrapped nor closed over: their gradients would be lost.
    inner = parameter
    while torch._C._functorch.is_functorch_wrapped_tensor(inner):
        inner = torch._C._functorch.get_unwrapped(inner)
    wrapped = inner is not parameter
    if type(inner) not in PLAIN and (wrapped or (parameter.requires_grad and torch.is_grad_enabled())):
        raise NotImplementedError(
            "torch.func's transforms do not work with parameters that are DTensors: give the layer this rank's parts, "
            "torch.func.functional_call(layer, {name: p.to_local() for name, p in layer.named_parameters()}, x)"
        )
    return parameter


def as_gradient(grad: Tensor, parameter: Any) -> Tensor:
    """A gradient of `part(parameter)` as one of the parameter: laid out like it, with nothing left to be summed."""
    values = grad.contiguous().view(parameter._local_tensor.shape)
    kind: Any = type(parameter)
    if values.requires_grad:
        made: Tensor = kind.from_local(
            values, parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
        return made
    # The spec is copied, as in torch's own to_local, because sharding propagation may change it.
    return kind(values, copy.copy(parameter._spec), requires_grad=False)  # type: ignore[no-any-return]
