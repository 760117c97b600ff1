"""The functions to import: a linear layer joined to a collective, and the collectives alone.

Weights follow torch.nn.Linear, [N, K] with y = x @ weight.T + bias. In shapes M is rows, K input features, N output
features, _X marks the dimension that is split over the ranks; M may stand for several leading dimensions.

    sharded_matmul           anything that the notation can write
    all_gather_linear        x [M_X, K], weight [N, K] -> [M, N];    gather_dim=-1: x [M, K_X], weight [N, K] -> [M, N]
    linear_reduce_scatter    x [M, K_X], weight [N, K_X] -> [M_X, N];  scatter_dim=-1: -> [M, N_X]
    linear_all_reduce        x [M, K_X], weight [N, K_X] -> [M, N]
    fsdp_linear              x [M_X, K], weight [N_X, K] -> [M_X, N]

Arguments are checked once, here, before anything is sent: ranks that are wrong alike raise alike, and none waits. What
ranks must agree on (`sizes` above all, which each takes from its own tensors where it is not given) is compared over
the group before every op under TORCH_DISTRIBUTED_DEBUG=DETAIL. Under torch.autocast operands are cast as F.linear's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import dispatch, groups, ops, sharded
from .groups import Group
from .notation import Spec, parse
from .sharded import Problem
from .shards import check_sizes, even_sizes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ALGORITHMS = {
    "all_gather": ("auto", "direct", "ring"),
    "reduce_scatter": ("auto", "direct", "ring"),
    "all_reduce": ("auto", "one_shot", "two_shot", "ring"),
    "matmul_all_reduce": ("auto", "one_shot", "two_shot"),
}


def sharded_matmul(
    a: Tensor,
    b: Tensor,
    spec: str,
    mesh: DeviceMesh,
    *,
    sizes: Mapping[str, int | Sequence[int]] | None = None,
    schedule: str = "auto",
) -> Tensor:
    """The matmul that `spec` writes down, differentiable: `"[M_X, K] @ [K, N_X] -> [M, N_X]"`.

    a and b are this rank's shards, the result is its shard of c. The spec's axes are dimension names of `mesh`. `sizes`
    gives dims that cannot be read off the shards: the global length, split like `torch.tensor_split`, or the length on
    every rank of the axis that splits the dim first. By default a dim is as long as a whole copy of it is here, or this
    rank's part times the ranks, which must then be the same on all: uneven shards need `sizes`. The way is planned by
    bytes and FLOPs; `fusedtp.explain` shows it.

    Raises NotationError for a spec without a plan, ValueError or TypeError for arguments that do not fit it.
    """
    a, b = _autocast(a, b)
    _check_tensor("a", a)
    _check_tensor("b", b, a, than="a")
    dispatch.check_schedule(schedule)
    parsed = parse(spec)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    if missing := [axis for axis in parsed.mesh_axes if axis not in names]:
        raise ValueError(f"mesh must have the dimensions {', '.join(missing)} of {spec}, it has {tuple(names)}")
    groups_of = {axis: mesh.get_group(axis) for axis in parsed.mesh_axes}
    lengths, splits = _lengths(parsed, a, b, {axis: group.size() for axis, group in groups_of.items()}, sizes)
    names = tuple(group.group_name for group in groups_of.values())
    problem = Problem(str(parsed), names, tuple(lengths), _flat(splits), False, True, schedule, "auto")
    partition = problem.partition()
    for name, tensor, sharding in (("a", a, parsed.a), ("b", b, parsed.b)):
        if tuple(tensor.shape) != partition.shape(sharding):
            expected = f"{partition.shape(sharding)} as {sharding}, of {dict(partition.lengths)} in all"
            raise ValueError(f"{name} must have this rank's shape {expected}, got {tuple(tensor.shape)}")
    return sharded.apply(a, b, None, *problem.arguments)


def _lengths(
    spec: Spec, a: Tensor, b: Tensor, ranks: Mapping[str, int], sizes: Mapping[str, int | Sequence[int]] | None
) -> tuple[list[int], list[tuple[int, ...]]]:
    # The global length of every dim of the spec, and its explicit split, () for none.
    for name, tensor, sharding in (("a", a, spec.a), ("b", b, spec.b)):
        if tensor.ndim != len(sharding.dims):
            raise ValueError(f"{name} must have {len(sharding.dims)} dimensions, {sharding}, got {tuple(tensor.shape)}")
    given = dict(sizes or {})
    if unknown := set(given) - set(spec.dim_names):
        raise ValueError(f"sizes names {', '.join(sorted(unknown))}, which {spec} does not have")
    here: dict[str, tuple[int, int]] = {}  # dim -> (number of parts, length): the most whole one that is here
    for tensor, sharding in ((a, spec.a), (b, spec.b)):
        for length, dim in zip(tensor.shape, sharding.dims, strict=True):
            parts = math.prod(ranks[axis] for axis in dim.axes)
            here[dim.name] = min(here.get(dim.name, (parts, parts * length)), (parts, parts * length))
    lengths: list[int] = []
    splits: list[tuple[int, ...]] = []
    for name in spec.dim_names:
        value = given.get(name, here[name][1])
        if isinstance(value, int):
            if value < 0 or isinstance(value, bool):
                raise ValueError(f"sizes[{name!r}] must be a length or one per rank, got {value}")
            lengths.append(value)
            splits.append(())
            continue
        tensors = [sharding for sharding in (spec.a, spec.b, spec.c) if name in sharding.names]
        first = {axes[0] for axes in (sharding.axes(name) for sharding in tensors) if axes}
        if len(first) != 1:
            raise ValueError(f"sizes[{name!r}] must be one length: {spec} has no one axis that splits it first")
        explicit = check_sizes(value, world_size=ranks[first.pop()], name=f"sizes[{name!r}]")
        lengths.append(sum(explicit))
        splits.append(explicit)
    return lengths, splits


def _flat(splits: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(number for split in splits for number in (len(split), *split))


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: str,
    splits: Mapping[str, tuple[int, ...]],
    group: ProcessGroup,
    schedule: str,
    algorithm: str = "auto",
) -> Tensor:
    # One layer: a spec over axis X, with the ranks' lengths of the dims that are split and this rank's of the others.
    # The dims are those of `_spec`; nothing is parsed here, torch.compile could not trace it.
    local = {f"R{i}": length for i, length in enumerate(x.shape[:-1])} | {"K": x.shape[-1], "N": weight.shape[0]}
    lengths = [sum(splits[name]) if name in splits else local[name] for name in local]
    flat = _flat([splits.get(name, ()) for name in local])
    return sharded.apply(x, weight, bias, spec, group.group_name, lengths, flat, True, False, schedule, algorithm)


def _spec(x: Tensor, dim: int | None, contraction: str, weight: str, columns: str, *, x_split: bool) -> str:
    # "[.., R1_X, .., K] @ .. -> ..": dim `dim` of x's rows is split in x (x_split) or in the result.
    rows = [f"R{i}" for i in range(x.ndim - 1)]
    cut = [f"{name}_X" if i == dim else name for i, name in enumerate(rows)]
    before, after = (cut, rows) if x_split else (rows, cut)
    return f"[{', '.join((*before, contraction))}] @ [{weight}] -> [{', '.join((*after, columns))}]"


def all_gather_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    gather_dim: int = 0,
    sizes: Sequence[int] | None = None,
    schedule: str = "auto",
) -> Tensor:
    """`F.linear(all_gather(x, gather_dim), weight, bias)` in one op, differentiable.

    x [..., K] is this rank's shard along `gather_dim`, weight [N, K] and bias [N] are this rank's own; the result is
    [..., N] with the whole of `gather_dim`. gather_dim=-1 gathers the features: x [..., sizes[rank]] against a weight
    [N, sum(sizes)]. `sizes` is the length on every rank, by default this rank's length on all. A gathered dim that is
    neither first nor last comes back as a transposed view. Backward: dx is reduce-scattered, x is gathered again for
    dw.

    Raises ValueError or TypeError for arguments that do not fit, RuntimeError where torch.distributed is not
    initialised, PeerTimeout where a rank is lost.
    """
    process_group = groups.resolve(group)
    x, weight, bias = _autocast(x, weight, bias)
    _check_linear(x, weight, bias, schedule)
    dim = _dim("gather_dim", gather_dim, x)
    sizes = _gather_sizes(sizes, process_group, x.shape[dim])
    on_features = dim == x.ndim - 1
    _check_features(sum(sizes) if on_features else x.shape[-1], "x has in all" if on_features else "x has", weight)
    splits = {"N": (weight.shape[0],) * process_group.size(), "K" if on_features else f"R{dim}": sizes}
    spec = _spec(x, None if on_features else dim, "K_X" if on_features else "K", "K, N_X", "N_X", x_split=True)
    return _linear(x, weight, bias, spec, splits, process_group, schedule)


def linear_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    scatter_dim: int = 0,
    sizes: Sequence[int] | None = None,
    schedule: str = "auto",
) -> Tensor:
    """`reduce_scatter(F.linear(x, weight), scatter_dim) + bias` in one op, differentiable.

    x [..., K_r] and weight [N, K_r] are this rank's part of the contraction; the result is the sum over ranks, of which
    this rank keeps its `sizes[rank]` along `scatter_dim` (by default as even as can be). scatter_dim=-1 scatters the
    output features. bias [N] is whole, the same on every rank, and added once. Backward: dy is gathered, once for both
    dx and dw. Errors as in `all_gather_linear`.
    """
    process_group = groups.resolve(group)
    x, weight, bias = _autocast(x, weight, bias)
    _check_linear(x, weight, bias, schedule)
    _check_features(x.shape[-1], "x has", weight)
    dim = _dim("scatter_dim", scatter_dim, x)
    on_features = dim == x.ndim - 1
    sizes = _scatter_sizes(sizes, process_group, weight.shape[0] if on_features else x.shape[dim])
    splits = {"K": (x.shape[-1],) * process_group.size(), "N" if on_features else f"R{dim}": sizes}
    spec = _spec(x, None if on_features else dim, "K_X", "K_X, N", "N_X" if on_features else "N", x_split=False)
    return _linear(x, weight, bias, spec, splits, process_group, schedule)


def linear_all_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    schedule: str = "auto",
    algorithm: str = "auto",
) -> Tensor:
    """`all_reduce(F.linear(x, weight)) + bias` in one op, differentiable.

    x [..., K_r], weight [N, K_r] and a whole bias [N] give [..., N], the same on every rank.
    `algorithm` is auto, one_shot (fewest steps) or two_shot (fewest bytes). Backward sends nothing: dy is the same on
    every rank already. Errors as in `all_gather_linear`.
    """
    process_group = groups.resolve(group)
    x, weight, bias = _autocast(x, weight, bias)
    _check_linear(x, weight, bias, schedule)
    _check_features(x.shape[-1], "x has", weight)
    _check_algorithm("matmul_all_reduce", algorithm)
    splits = {"K": (x.shape[-1],) * process_group.size()}
    spec = _spec(x, None, "K_X", "K_X, N", "N", x_split=False)
    return _linear(x, weight, bias, spec, splits, process_group, schedule, algorithm)


def fsdp_linear(
    x: Tensor,
    weight_shard: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    sizes: Sequence[int] | None = None,
    schedule: str = "auto",
) -> Tensor:
    """`F.linear(x, all_gather(weight_shard), bias)` in one op, differentiable: a fully sharded weight.

    x [..., K] are this rank's own rows, weight_shard [sizes[rank], K] its rows of the weight [N, K], bias [N] whole and
    the same on every rank; the result is [..., N]. `sizes` is by default this rank's length on all. The gathered weight
    is never kept: backward gathers it again for dx, and reduce-scatters dw. Errors as in `all_gather_linear`.
    """
    process_group = groups.resolve(group)
    sizes = _gather_sizes(sizes, process_group, weight_shard.shape[0] if isinstance(weight_shard, Tensor) else 0)
    x, weight_shard, bias = _autocast(x, weight_shard, bias)
    _check_linear(x, weight_shard, bias, schedule, num_out=sum(sizes))
    _check_features(x.shape[-1], "x has", weight_shard)
    splits = {"N": sizes, "R0": (x.shape[0],) * process_group.size()}
    spec = _spec(x, 0, "K", "K, N_X", "N", x_split=True).replace("-> [R0,", "-> [R0_X,")
    return _linear(x, weight_shard, bias, spec, splits, process_group, schedule)


def all_gather(
    x: Tensor,
    *,
    group: Group = None,
    gather_dim: int = 0,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
    schedule: str = "auto",
) -> Tensor:
    """The ranks' x joined along `gather_dim` in rank order, bit by bit. `algorithm`: auto, direct or ring."""
    process_group = groups.resolve(group)
    _check_collective("all_gather", x, schedule, algorithm)
    dim = _dim("gather_dim", gather_dim, x)
    sizes = _gather_sizes(sizes, process_group, x.shape[dim])
    moved = x.movedim(dim, 0)
    rows = moved.reshape(moved.shape[0], math.prod(moved.shape[1:]))
    out: Tensor = ops.all_gather(rows, list(sizes), process_group.group_name, schedule, algorithm)
    return out.view(sum(sizes), *moved.shape[1:]).movedim(0, dim)


def reduce_scatter(
    x: Tensor,
    *,
    group: Group = None,
    scatter_dim: int = 0,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
    schedule: str = "auto",
) -> Tensor:
    """The ranks' x summed; this rank keeps `sizes[rank]` along `scatter_dim`. `algorithm`: auto, direct or ring."""
    process_group = groups.resolve(group)
    _check_collective("reduce_scatter", x, schedule, algorithm)
    dim = _dim("scatter_dim", scatter_dim, x)
    sizes = _scatter_sizes(sizes, process_group, x.shape[dim])
    moved = x.movedim(dim, 0)
    rows = moved.reshape(moved.shape[0], math.prod(moved.shape[1:]))
    out: Tensor = ops.reduce_scatter(rows, list(sizes), process_group.group_name, schedule, algorithm)
    return out.view(sizes[process_group.rank()], *moved.shape[1:]).movedim(0, dim)


def all_reduce(x: Tensor, *, group: Group = None, algorithm: str = "auto", schedule: str = "auto") -> Tensor:
    """The ranks' x summed, on every rank. `algorithm`: auto, one_shot (fewest steps), two_shot, ring (fewest bytes)."""
    process_group = groups.resolve(group)
    _check_collective("all_reduce", x, schedule, algorithm)
    rows = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    out: Tensor = ops.all_reduce(rows, process_group.group_name, schedule, algorithm)
    return out.view(x.shape)


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    # In the dtype that torch.autocast asks of a matmul here; as they are outside of it, or in float64.
    first = tensors[0]
    if not isinstance(first, Tensor) or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    if first.dtype == torch.float64:
        return tensors
    return tuple(each.to(dtype) if isinstance(each, Tensor) else each for each in tensors)


def _check_tensor(name: str, value: object, x: Tensor | None = None, *, than: str = "x") -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.dtype not in DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(map(str, DTYPES))}, got {value.dtype}")
    if x is not None and value.dtype != x.dtype:
        raise ValueError(f"{name} must have {than}'s dtype, {x.dtype}, got {value.dtype}")
    if x is not None and value.device != x.device:
        raise ValueError(f"{name} must be on {than}'s device, {x.device}, got {value.device}")


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, schedule: str, *, num_out: int | None = None) -> None:
    _check_tensor("x", x)
    _check_tensor("weight", weight, x)
    if x.ndim < 2:
        raise ValueError(f"x must have at least 2 dimensions, [..., K], got shape {tuple(x.shape)}")
    if weight.ndim != 2:
        raise ValueError(f"weight must have 2 dimensions, [N, K], got shape {tuple(weight.shape)}")
    if bias is not None:
        _check_tensor("bias", bias, x)
        num_out = weight.shape[0] if num_out is None else num_out
        if bias.shape != (num_out,):
            raise ValueError(f"bias must have shape ({num_out},), weight's rows, got {tuple(bias.shape)}")
    dispatch.check_schedule(schedule)


def _check_features(num_in: int, who: str, weight: Tensor) -> None:
    if weight.shape[1] != num_in:
        raise ValueError(f"weight must have as many columns as {who} features, {num_in}, got {tuple(weight.shape)}")


def _check_collective(op: str, x: Tensor, schedule: str, algorithm: str) -> None:
    _check_tensor("x", x)
    if x.ndim < 1:
        raise ValueError("x must have at least 1 dimension, got a scalar")
    dispatch.check_schedule(schedule)
    _check_algorithm(op, algorithm)


def _check_algorithm(op: str, algorithm: str) -> None:
    if algorithm not in ALGORITHMS[op]:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS[op])}, got {algorithm!r}")


def _dim(name: str, value: int, x: Tensor) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if not -x.ndim <= value < x.ndim:
        raise ValueError(f"{name} must be in [{-x.ndim}, {x.ndim - 1}] for x of shape {tuple(x.shape)}, got {value}")
    return value % x.ndim


def _gather_sizes(sizes: Sequence[int] | None, group: ProcessGroup, local: int) -> tuple[int, ...]:
    if sizes is None:
        return (local,) * group.size()
    return check_sizes(sizes, world_size=group.size(), rank=group.rank(), local=local)


def _scatter_sizes(sizes: Sequence[int] | None, group: ProcessGroup, length: int) -> tuple[int, ...]:
    if sizes is None:
        return even_sizes(length, group.size())
    return check_sizes(sizes, world_size=group.size(), length=length)
