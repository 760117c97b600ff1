"""The functions to import: a linear layer joined to a collective (the collectives alone: `collectives`).

Weights follow torch.nn.Linear, [N, K] with y = x @ weight.T + bias. In shapes M is rows, K input features, N output
features, _X marks the dimension that is split over the ranks; M may stand for several leading dimensions.

    sharded_matmul           anything that the notation can write; operands lie as the spec says, so w is [K, N]
    all_gather_linear        x [M_X, K], weight [N, K] -> [M, N];    gather_dim=-1: x [M, K_X], weight [N, K] -> [M, N]
                             and several weights at once
    linear_reduce_scatter    x [M, K_X], weight [N, K_X] -> [M_X, N];  scatter_dim=-1: -> [M, N_X]
    linear_all_reduce        x [M, K_X], weight [N, K_X] -> [M, N]
    fsdp_linear              x [M_X, K], weight [N_X, K] -> [M_X, N]

Arguments are checked once, before anything is sent (`arguments`): ranks with the same mistake raise the same error, and
none waits. Ops over shared memory compare what the ranks mean (`workspaces.agreement`), above all `sizes`, which each
rank takes from its own tensors where it is not given. Under torch.autocast operands are cast as F.linear's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import groups, norms
from .calls import arguments, eager, problems
from .calls.settings import described
from .groups import Group
from .norms import Norm
from .op import RANK_ORDER, RMS_NORM, Activation, GatedActivation, NormName, Order
from .options import Options
from .recipes import Float8
from .scaled import Scaled
from .sharding.notation import parse
from .sharding.plan import Partition


def sharded_matmul(
    a: Tensor,
    b: Tensor,
    spec: str,
    mesh: DeviceMesh,
    *,
    sizes: Mapping[str, int | Sequence[int]] | None = None,
    schedule: str = "auto",
    producer: str = "auto",
    float8: Float8 | None = None,
) -> Tensor:
    """The matmul that `spec` writes down, differentiable: `"[M_X, K] @ [K, N_X] -> [M, N_X]"`.

    a and b are this rank's shards, the result is its shard of c. The spec's axes are dimension names of `mesh`. `sizes`
    gives dims that cannot be read off the shards: the global length, split like `torch.tensor_split`, or the length on
    every rank of the axis that splits the dim first. By default a dim has the length of a whole copy on this rank, or
    else this rank's part times the number of ranks; uneven shards need `sizes`. The steps are planned by bytes and
    FLOPs; `fusedtp.explain` shows them. `float8`: as in `all_gather_linear`.

    Raises NotationError for a spec without a plan, ValueError or TypeError for arguments that do not fit it.
    `schedule`, `producer` and other errors as in `all_gather_linear`.
    """
    a, b = arguments.autocast(a, b)
    arguments.check_tensor("a", a)
    arguments.check_tensor("b", b, a, than="a")
    asked = Options(schedule, producer=producer, float8=float8)
    arguments.check_options(asked, a)
    arguments.check_float8(float8, a)
    parsed = parse(spec)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    groups.check_mesh("mesh", mesh)
    names = mesh.mesh_dim_names or ()
    if missing := [axis for axis in parsed.mesh_axes if axis not in names]:
        raise ValueError(f"mesh must have the dimensions {', '.join(missing)} of {spec}, it has {tuple(names)}")
    groups_of = {axis: mesh.get_group(axis) for axis in parsed.mesh_axes}
    lengths, splits = arguments.lengths(parsed, a, b, {axis: group.size() for axis, group in groups_of.items()}, sizes)
    arguments.check_reach(schedule, a, list(groups_of.values()), lengths)
    place = {axis: (group.rank(), group.size()) for axis, group in groups_of.items()}
    given = {name: split for name, split in zip(parsed.dim_names, splits, strict=True) if split}
    partition = Partition(dict(zip(parsed.dim_names, lengths, strict=True)), place, given)
    for name, tensor, sharding in (("a", a, parsed.a), ("b", b, parsed.b)):
        if tuple(tensor.shape) != partition.shape(sharding):
            expected = f"{partition.shape(sharding)} as {sharding}, of {dict(partition.lengths)} in all"
            raise ValueError(f"{name} must have this rank's shape {expected}, got {tuple(tensor.shape)}")
    settings = described(
        str(parsed), [group.group_name for group in groups_of.values()], [rank for rank, _ in place.values()], asked,
        w_transposed=False, by_size=True,
    )  # fmt: skip
    return eager.run_described(a, b, settings, (*lengths, *problems.flat(splits)))


@overload
def all_gather_linear(
    x: Tensor | Scaled, weight: Tensor | Scaled, bias: Tensor | None = None, *, group: Group = None,
    gather_dim: int = 0, sizes: Sequence[int] | None = None, schedule: str = "auto",
    producer: str = "auto", activation: Activation | None = None, out_dtype: torch.dtype | None = None,
    float8: Float8 | None = None, order: Order = RANK_ORDER,
) -> Tensor: ...  # fmt: skip


@overload
def all_gather_linear(
    x: Tensor | Scaled, weight: Sequence[Tensor] | Sequence[Scaled], bias: Sequence[Tensor | None] | None = None, *,
    group: Group = None, gather_dim: int = 0, sizes: Sequence[int] | None = None, schedule: str = "auto",
    producer: str = "auto", activation: Activation | None = None,
    out_dtype: torch.dtype | None = None, float8: Float8 | None = None, order: Order = RANK_ORDER,
) -> tuple[Tensor, ...]: ...  # fmt: skip


@overload
def all_gather_linear(
    x: Tensor | Scaled, weight: Sequence[Tensor] | Sequence[Scaled], bias: Sequence[Tensor | None] | None = None, *,
    activation: GatedActivation, group: Group = None, gather_dim: int = 0, sizes: Sequence[int] | None = None,
    schedule: str = "auto", producer: str = "auto", out_dtype: torch.dtype | None = None,
    float8: Float8 | None = None, order: Order = RANK_ORDER,
) -> Tensor: ...  # fmt: skip


def all_gather_linear(
    x: Tensor | Scaled,
    weight: Tensor | Scaled | Sequence[Tensor] | Sequence[Scaled],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: Group = None,
    gather_dim: int = 0,
    sizes: Sequence[int] | None = None,
    schedule: str = "auto",
    producer: str = "auto",
    activation: Activation | GatedActivation | None = None,
    out_dtype: torch.dtype | None = None,
    float8: Float8 | None = None,
    order: Order = RANK_ORDER,
) -> Tensor | tuple[Tensor, ...]:
    """`F.linear(all_gather(x, gather_dim), weight, bias)` in one op, differentiable.

    x [..., K] is this rank's shard along `gather_dim`, weight [N, K] and bias [N] are this rank's own; the result is
    [..., N] with the whole of `gather_dim`. gather_dim=-1 gathers the features: x [..., sizes[rank]] against a weight
    [N, sum(sizes)]. `sizes` is the length on every rank, by default this rank's length on all. A gathered dim that is
    neither first nor last comes back as a transposed view. Backward: dx is reduce-scattered, x is gathered again for
    dw. `producer` says how `fused` sends x: auto, push (by programs of the kernel), copy (by the copy engine, which a
    graph capture cannot take), or multicast (pushed once, to all ranks, where NVLink's switch can).

    Of several weights, a sequence, with as many biases or None, there is a tuple of results. x is gathered once for all
    of them, in backward too, where the sum of their dx is scattered once. The weights may be of any number of rows, and
    are neither copied nor put together.

    `activation` is applied where the result is made: relu, gelu, gelu_tanh or silu of every result; swiglu or geglu of
    two weights with as many rows, gate and up, which then have one result, silu(gate) * up or gelu(gate) * up. Where a
    gradient is wanted what it is applied to is kept, of relu the result; else nothing more is allocated.

    x and weight may be `Scaled`, float8 with scales, for a result in `out_dtype`, bfloat16 by default, without a
    gradient: x travels in 8 bits, each row with its scale. gather_dim=-1: each rank's part of the features has scales
    of its own. `float8` makes them of tensors: tensorwise, rowwise or rowwise_with_gw_hp, as the recipes of torchao, in
    forward and backward, before anything is sent; results, gradients and what is kept for them stay in x's dtype.

    `order` "tree" adds up as a tree of 8 leaves ("tree-16": of 16), in float32 between ranks too, by `fused`'s kernels
    alone: results and gradients then have the same bits on any number of ranks that divides the leaves, and a row the
    same in any batch. Not for float8; an activation is then torch's, of the rounded product. "any" lets the switch
    of NVLink make sums of all-reduces, in whatever order it does: see docs/guide/switch.md.

    Raises ValueError or TypeError for arguments that do not fit, RuntimeError where torch.distributed is not
    initialised or the ranks of a schedule that is asked for cannot reach each other's memory, PeerTimeout where a rank
    is lost, RanksDisagree where ranks mean different things by the call, NotImplementedError for a second derivative or
    forward-mode differentiation.
    """
    asked, along = Options(schedule, "auto", producer, float8, order, activation), (gather_dim, sizes)
    problem: Any = problems.all_gather_problem
    if not isinstance(weight, list | tuple):
        return eager.apply(problem, x, weight, bias, group, asked, along, out_dtype=out_dtype)  # type: ignore[no-any-return]
    weights, biases = arguments.several(weight, bias)
    if len(weights) == 1:
        return (eager.apply(problem, x, weights[0], biases[0], group, asked, along, out_dtype=out_dtype),)
    return eager.apply(problem, x, weights, biases, group, asked, along, out_dtype=out_dtype)  # type: ignore[no-any-return]


@overload
def linear_reduce_scatter(
    x: Tensor | Scaled, weight: Tensor | Scaled, bias: Tensor | None = None, *, group: Group = None,
    scatter_dim: int = 0, sizes: Sequence[int] | None = None, schedule: str = "auto",
    producer: str = "auto", residual: Tensor | None = None, norm_weight: None = None,
    out_dtype: torch.dtype | None = None, float8: Float8 | None = None, order: Order = RANK_ORDER,
) -> Tensor: ...  # fmt: skip


@overload
def linear_reduce_scatter(
    x: Tensor | Scaled, weight: Tensor | Scaled, bias: Tensor | None = None, *, norm_weight: Tensor,
    norm_bias: Tensor | None = None, norm_eps: float = 1e-6, norm: NormName = "rms_norm", group: Group = None,
    scatter_dim: int = 0, sizes: Sequence[int] | None = None, schedule: str = "auto",
    producer: str = "auto", residual: Tensor | None = None, out_dtype: torch.dtype | None = None,
    float8: Float8 | None = None, order: Order = RANK_ORDER,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def linear_reduce_scatter(
    x: Tensor | Scaled,
    weight: Tensor | Scaled,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    scatter_dim: int = 0,
    sizes: Sequence[int] | None = None,
    schedule: str = "auto",
    producer: str = "auto",
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm: NormName = "rms_norm",
    out_dtype: torch.dtype | None = None,
    float8: Float8 | None = None,
    order: Order = RANK_ORDER,
) -> Tensor | tuple[Tensor, Tensor]:
    """`reduce_scatter(F.linear(x, weight), scatter_dim) + bias + residual` in one op, differentiable.

    x [..., K_r] and weight [N, K_r] are this rank's part of the contraction; the result is the sum over ranks, of which
    this rank keeps its `sizes[rank]` along `scatter_dim` (by default as even as can be). scatter_dim=-1 scatters the
    output features. bias [N] is whole, the same on every rank, and added once. residual lies as the result does on this
    rank and is added where the sum is rounded. Backward: dy is gathered, once for both dx and dw; it is the residual's
    gradient. `float8`, `order` and errors as in `all_gather_linear`; `producer` is of the gather in backward.

    With `norm_weight` [N] there are two results, (normed, y): y as above and its norm, of each row, `norm` rms_norm or
    layer_norm, the latter maybe with `norm_bias` [N]. Both are whole, the same on every rank, and so are their
    gradients: in backward the ranks' terms of these are added up, the only numbers that travel for a norm.

    x and weight may be `Scaled`: each rank scales its own terms, which travel in `out_dtype`, bfloat16 by default.
    """
    asked = Options(schedule, "auto", producer, float8, order)
    normed: Norm | None = None
    if norm_weight is not None or norm_bias is not None or norm != RMS_NORM:
        normed = norms.asked_for(norm, norm_weight, norm_bias, norm_eps)
    problem: Any = problems.reduce_scatter_problem
    along = scatter_dim, sizes
    return eager.apply(problem, x, weight, bias, group, asked, along, residual, normed, out_dtype)  # type: ignore[no-any-return]


@overload
def linear_all_reduce(
    x: Tensor | Scaled, weight: Tensor | Scaled, bias: Tensor | None = None, *, group: Group = None,
    schedule: str = "auto", algorithm: str = "auto", residual: Tensor | None = None,
    norm_weight: None = None, out_dtype: torch.dtype | None = None, float8: Float8 | None = None,
    order: Order = RANK_ORDER,
) -> Tensor: ...  # fmt: skip


@overload
def linear_all_reduce(
    x: Tensor | Scaled, weight: Tensor | Scaled, bias: Tensor | None = None, *, norm_weight: Tensor,
    norm_bias: Tensor | None = None, norm_eps: float = 1e-6, norm: NormName = "rms_norm", group: Group = None,
    schedule: str = "auto", algorithm: str = "auto", residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None, float8: Float8 | None = None, order: Order = RANK_ORDER,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def linear_all_reduce(
    x: Tensor | Scaled,
    weight: Tensor | Scaled,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    schedule: str = "auto",
    algorithm: str = "auto",
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm: NormName = "rms_norm",
    out_dtype: torch.dtype | None = None,
    float8: Float8 | None = None,
    order: Order = RANK_ORDER,
) -> Tensor | tuple[Tensor, Tensor]:
    """`all_reduce(F.linear(x, weight)) + bias + residual` in one op, differentiable.

    x [..., K_r], weight [N, K_r], a whole bias [N] and a whole residual [..., N] give [..., N], the same on every rank.
    `algorithm`, of `fused` and `decomposed`, is auto, one_shot (fewest steps) or two_shot (fewest bytes). Backward
    sends nothing, but for tensorwise float8 its scales' numbers: dy is the same on every rank already. With
    `norm_weight` the result is (normed, y) and Scaled operands are taken, as in `linear_reduce_scatter`. `order` and
    errors as in `all_gather_linear`: with "any" NVLink's switch may make the sums, by two_shot always where it can.
    """
    asked = Options(schedule, algorithm, "auto", float8, order)
    normed: Norm | None = None
    if norm_weight is not None or norm_bias is not None or norm != RMS_NORM:
        normed = norms.asked_for(norm, norm_weight, norm_bias, norm_eps)
    problem: Any = problems.all_reduce_problem
    return eager.apply(problem, x, weight, bias, group, asked, (), residual, normed, out_dtype)  # type: ignore[no-any-return]


def fsdp_linear(
    x: Tensor | Scaled,
    weight_shard: Tensor | Scaled,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    sizes: Sequence[int] | None = None,
    schedule: str = "auto",
    producer: str = "auto",
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
    float8: Float8 | None = None,
    order: Order = RANK_ORDER,
) -> Tensor:
    """`F.linear(x, all_gather(weight_shard), bias)` in one op, differentiable: a fully sharded weight.

    x [..., K] are this rank's own rows, weight_shard [sizes[rank], K] its rows of the weight [N, K], bias [N] whole and
    the same on every rank; the result is [..., N]. `sizes` is by default this rank's length on all. The gathered weight
    is never kept: backward gathers it again for dx, and reduce-scatters dw. `activation`, one without a gate,
    Scaled operands, of which the weight's rows travel, `producer`, `float8`, `order` and errors as in
    `all_gather_linear`.
    """
    asked = Options(schedule, "auto", producer, float8, order, activation)
    problem: Any = problems.fsdp_problem
    return eager.apply(problem, x, weight_shard, bias, group, asked, (sizes,), out_dtype=out_dtype)  # type: ignore[no-any-return]
