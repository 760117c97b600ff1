"""The functions to import: a linear layer joined to a collective, and the collectives alone.

Weights follow torch.nn.Linear, [N, K] with y = x @ weight.T + bias. In shapes M is rows, K input features, N output
features, _X marks the dimension that is split over the ranks; M may stand for several leading dimensions.

    all_gather_linear        x [M_X, K], weight [N, K] -> [M, N];    gather_dim=-1: x [M, K_X], weight [N, K] -> [M, N]
    linear_reduce_scatter    x [M, K_X], weight [N, K_X] -> [M_X, N];  scatter_dim=-1: -> [M, N_X]
    linear_all_reduce        x [M, K_X], weight [N, K_X] -> [M, N]

Arguments are checked once, here, before anything is sent: ranks that are wrong alike raise alike, and none waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import dispatch, groups, ops
from .groups import Group
from .shards import check_sizes, even_sizes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ALGORITHMS = {
    "all_gather": ("auto", "direct", "ring"),
    "reduce_scatter": ("auto", "direct", "ring"),
    "all_reduce": ("auto", "one_shot", "two_shot", "ring"),
    "matmul_all_reduce": ("auto", "one_shot", "two_shot"),
}


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
    """`F.linear(all_gather(x, gather_dim), weight, bias)` in one op.

    x [..., K] is this rank's shard along `gather_dim`, weight [N, K] and bias [N] are this rank's own; the result is
    [..., N] with the whole of `gather_dim`. gather_dim=-1 gathers the features: x [..., sizes[rank]] against a weight
    [N, sum(sizes)]. `sizes` is the length on every rank, by default this rank's length on all. A gathered dim that is
    neither first nor last comes back as a transposed view.

    Raises ValueError or TypeError for arguments that do not fit, RuntimeError where torch.distributed is not
    initialised, PeerTimeout where a rank is lost.
    """
    process_group = groups.resolve(group)
    _check_linear(x, weight, bias, schedule)
    dim = _dim("gather_dim", gather_dim, x)
    sizes = _gather_sizes(sizes, process_group, x.shape[dim])
    on_features = dim == x.ndim - 1
    _check_features(sum(sizes) if on_features else x.shape[-1], "x has in all" if on_features else "x has", weight)
    rows, per_row, rest = _rows(x, dim)
    lengths = [size * per_row for size in sizes]
    name = process_group.group_name
    out: Tensor = ops.all_gather_matmul(rows, weight.t(), bias, int(on_features), lengths, name, schedule)
    if on_features:
        return out.view(*rest, weight.shape[0])
    return out.view(sum(sizes), *rest, weight.shape[0]).movedim(0, dim)


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
    """`reduce_scatter(F.linear(x, weight), scatter_dim) + bias` in one op.

    x [..., K_r] and weight [N, K_r] are this rank's part of the contraction; the result is the sum over ranks, of which
    this rank keeps its `sizes[rank]` along `scatter_dim` (by default as even as can be). scatter_dim=-1 scatters the
    output features. bias [N] is whole, the same on every rank, and added once. Errors as in `all_gather_linear`.
    """
    process_group = groups.resolve(group)
    _check_linear(x, weight, bias, schedule)
    _check_features(x.shape[-1], "x has", weight)
    dim = _dim("scatter_dim", scatter_dim, x)
    on_features = dim == x.ndim - 1
    sizes = _scatter_sizes(sizes, process_group, weight.shape[0] if on_features else x.shape[dim])
    rows, per_row, rest = _rows(x, dim)
    lengths = [size * per_row for size in sizes]
    name, local = process_group.group_name, sizes[process_group.rank()]
    out: Tensor = ops.matmul_reduce_scatter(rows, weight.t(), bias, int(on_features), lengths, name, schedule)
    if on_features:
        return out.view(*rest, local)
    return out.view(local, *rest, weight.shape[0]).movedim(0, dim)


def linear_all_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    schedule: str = "auto",
    algorithm: str = "auto",
) -> Tensor:
    """`all_reduce(F.linear(x, weight)) + bias` in one op.

    x [..., K_r], weight [N, K_r] and a whole bias [N] give [..., N], the same on every rank.
    `algorithm` is auto, one_shot (fewest steps) or two_shot (fewest bytes). Errors as in `all_gather_linear`.
    """
    process_group = groups.resolve(group)
    _check_linear(x, weight, bias, schedule)
    _check_features(x.shape[-1], "x has", weight)
    _check_algorithm("matmul_all_reduce", algorithm)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out: Tensor = ops.matmul_all_reduce(rows, weight.t(), bias, process_group.group_name, schedule, algorithm)
    return out.view(*x.shape[:-1], weight.shape[0])


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


def _rows(x: Tensor, dim: int) -> tuple[Tensor, int, tuple[int, ...]]:
    """x [..., K] as rows [., K] with `dim` outermost, the rows that one index of `dim` holds, and the other lead dims.

    The last dim is never moved: for it the rows keep x's order and each index holds one column.
    """
    if dim == x.ndim - 1:
        rest = tuple(x.shape[:-1])
        return x.reshape(math.prod(rest), x.shape[-1]), 1, rest
    moved = x.movedim(dim, 0)
    rest = tuple(moved.shape[1:-1])
    per_row = math.prod(rest)
    return moved.reshape(moved.shape[0] * per_row, x.shape[-1]), per_row, rest


def _check_tensor(name: str, value: object, x: Tensor | None = None) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.dtype not in DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(map(str, DTYPES))}, got {value.dtype}")
    if x is not None and value.dtype != x.dtype:
        raise ValueError(f"{name} must have x's dtype, {x.dtype}, got {value.dtype}")
    if x is not None and value.device != x.device:
        raise ValueError(f"{name} must be on x's device, {x.device}, got {value.device}")
    if torch.is_grad_enabled() and value.requires_grad:
        raise NotImplementedError(
            f"{name} requires a gradient, which these functions do not propagate yet: call them under torch.no_grad()"
        )


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, schedule: str) -> None:
    _check_tensor("x", x)
    _check_tensor("weight", weight, x)
    if x.ndim < 2:
        raise ValueError(f"x must have at least 2 dimensions, [..., K], got shape {tuple(x.shape)}")
    if weight.ndim != 2:
        raise ValueError(f"weight must have 2 dimensions, [N, K], got shape {tuple(weight.shape)}")
    if bias is not None:
        _check_tensor("bias", bias, x)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must have shape ({weight.shape[0]},), weight's rows, got {tuple(bias.shape)}")
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
