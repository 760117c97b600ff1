"""Functions to import: a linear layer fused with a collective (the collectives alone: `collectives`).

Weights follow torch.nn.Linear: weight [N, K], y = x @ weight.T + bias. M is rows, K input features, N output features.
_X marks the dim that is split over the ranks. M may stand for several leading dims.

    sharded_matmul           any matmul that the notation can write; operands lie as the spec says, so w is [K, N]
    all_gather_linear        x [M_X, K], weight [N, K] -> [M, N];    gather_dim=-1: x [M, K_X], weight [N, K] -> [M, N]
                             and several weights at once
    linear_reduce_scatter    x [M, K_X], weight [N, K_X] -> [M_X, N];  scatter_dim=-1: -> [M, N_X]
    linear_all_reduce        x [M, K_X], weight [N, K_X] -> [M, N]
    fsdp_linear              x [M_X, K], weight [N_X, K] -> [M_X, N]

Arguments are checked once, before anything is sent (`arguments`): ranks with the same mistake raise the same error, and
none waits. Ops over shared memory also compare the ranks' calls (`workspaces.agreement`), above all `sizes`, which each
rank takes from its own tensors by default. Under torch.autocast, operands are cast like those of F.linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import groups
from .activations import Activation, GatedActivation
from .calls import arguments, autograd, problems
from .epilogue import NO_EPILOGUE, Epilogue, of_norm
from .groups import Group
from .norms import RMS_NORM, NormName
from .op import RANK_ORDER, Options, Order
from .scaled import Float8, Scaled
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
    """Multiply a and b as `spec` says, for example "[M_X, K] @ [K, N_X] -> [M, N_X]"; differentiable.

        c = a @ b        sharded as `spec` says
        da = dc @ b.T    sharded like a
        db = a.T @ dc    sharded like b

    - `a`, `b`: this rank's shards. The result is this rank's shard of c.
    - `spec`: its axes are dimension names of `mesh`. `fusedtp.explain` shows its steps, planned by bytes and FLOPs.
    - `sizes`: by dim, the global length, split like `torch.tensor_split`, or the length on every rank of the axis that
      splits the dim first. By default a dim is as long as a whole copy on this rank, or as this rank's part times the
      number of ranks. Uneven shards need `sizes`.
    - `schedule`, `producer`, `float8`: as in `all_gather_linear`.

    Raises NotationError for a spec without a plan, ValueError or TypeError for arguments that do not fit `spec`, and
    the other errors of `all_gather_linear`.
    """
    a, b = arguments.autocast(a, b)
    arguments.check_tensor("a", a)
    arguments.check_tensor("b", b, a, than="a")
    options = Options(schedule, producer=producer, float8=float8)
    arguments.check_options(options, a)
    arguments.float8_of(float8, a.dtype, "x")
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
    explicit = {name: split for name, split in zip(parsed.dim_names, splits, strict=True) if split}
    partition = Partition(dict(zip(parsed.dim_names, lengths, strict=True)), place, explicit)
    for name, tensor, sharding in (("a", a, parsed.a), ("b", b, parsed.b)):
        if tuple(tensor.shape) != partition.shape(sharding):
            expected = f"{partition.shape(sharding)} as {sharding}, of {dict(partition.lengths)} in all"
            raise ValueError(f"{name} must have this rank's shape {expected}, got {tuple(tensor.shape)}")
    settings = problems.Settings(
        str(parsed), tuple([group.group_name for group in groups_of.values()]),
        tuple([rank for rank, _ in place.values()]), options, w_transposed=False, by_size=True,
    )  # fmt: skip
    described = settings, (*lengths, *problems.flat(splits))
    return autograd.apply(problems.described, a, b, {}, next(iter(groups_of.values()), None), options, described)  # type: ignore[no-any-return]


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
    """Compute `F.linear(all_gather(x, gather_dim), weight, bias)` in one op, differentiable.

        y  = all_gather(x) @ weight.T + bias    [.., N], whole along `gather_dim`
        dx = reduce_scatter(dy @ weight)        like x
        dw = dy.T @ all_gather(x)               like weight; x is gathered again
        db = sum of dy over its rows            [N]

    - `x`: [.., K], this rank's shard along `gather_dim`. With `gather_dim=-1`: [.., sizes[rank]].
    - `weight`, `bias`: [N, K] and [N], this rank's own. With `gather_dim=-1` weight is [N, sum(sizes)].
    - `gather_dim`: if neither the first dim nor the last, the result is a transposed view.
    - `sizes`: length of `gather_dim` on every rank, by default this rank's length on all.
    - `schedule`: auto, fused, decomposed or unfused (docs/choosing.md).
    - `producer`: how `fused` sends x. push: programs of the kernel. copy: the copy engine, which cannot be captured in
      a graph. multicast: one push to all ranks, if NVLink's switch can. auto: the cost model chooses push or copy.
    - `out_dtype`: dtype of the result of `Scaled` operands, bfloat16 by default.
    - `float8`: tensorwise, rowwise or rowwise_with_gw_hp, the recipes of torchao. Operands are cast before they are
      sent, in forward and backward. Results, gradients and saved tensors keep x's dtype.
    - `order`: of the terms of a sum: rank, tree, tree-N or any, see below.

    Several weights, a sequence with equally many biases or None, give a tuple of results. x is gathered once for all of
    them. Backward gathers x once too, and scatters the sum of their dx once. The weights may have different numbers of
    rows, and are not copied or concatenated.

    `activation` is applied in the same op. An `Activation` applies to every result. A `GatedActivation` takes two
    weights with the same number of rows, gate and up, and gives one result, silu(gate) * up or gelu(gate) * up. If a
    gradient is needed, the activation's input is saved (relu: the result). Otherwise nothing more is allocated.

    x and weight may be `Scaled`, float8 with scales, without a gradient. x travels in 8 bits, each row with its scale.
    With `gather_dim=-1`, each rank's part of a row has its own scale.

    `order` "tree" adds in a tree of 8 leaves ("tree-16": 16), in float32 also between ranks. Results and gradients have
    the same bits on any number of ranks that divides the leaves, and a row has the same bits in any batch. Only the
    kernels of `fused` do this. float8 is refused, and torch applies an activation, to the rounded product. "any" lets
    NVLink's switch make the sums of all-reduces, in its own order (docs/guide/switch.md).

    Raises:

    - ValueError or TypeError: arguments do not fit.
    - RuntimeError: torch.distributed is not initialised, or the requested schedule needs memory that ranks cannot
      reach.
    - PeerTimeout: a rank is lost.
    - RanksDisagree: ranks call different ops, shapes or options.
    - NotImplementedError: a second derivative, or forward-mode differentiation.
    """
    options, dims = Options(schedule, "auto", producer, float8, order), (gather_dim, sizes)
    epilogue = NO_EPILOGUE if activation is None else Epilogue(activation=activation)
    problem: Any = problems.all_gather_problem
    if not isinstance(weight, list | tuple):
        return autograd.apply(problem, x, weight, {"bias": bias}, group, options, dims, epilogue, out_dtype)  # type: ignore[no-any-return]
    weights, biases = arguments.several(weight, "bias", bias)
    if len(weights) == 1:
        operands = {"bias": biases[0]}
        return (autograd.apply(problem, x, weights[0], operands, group, options, dims, epilogue, out_dtype),)
    return autograd.apply(problem, x, weights, {"bias": biases}, group, options, dims, epilogue, out_dtype)  # type: ignore[no-any-return]


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
    """Compute `reduce_scatter(F.linear(x, weight), scatter_dim) + bias + residual` in one op, differentiable.

        y  = reduce_scatter(x @ weight.T) + bias + residual    [.., N], this rank's part along `scatter_dim`
        dx = all_gather(dy) @ weight                           like x
        dw = all_gather(dy).T @ x                              like weight; dy is gathered once for dx and dw
        db = all_reduce(sum of dy over its rows)               [N]; all_gather in place of all_reduce if scatter_dim=-1
        dresidual = dy

    - `x`, `weight`: [.., K_r] and [N, K_r], this rank's part of the contraction.
    - `bias`: [N], whole, the same on every rank, added once.
    - `scatter_dim`: -1 scatters the output features.
    - `sizes`: length of `scatter_dim` on every rank, by default as even as possible.
    - `producer`: of the gather in backward.
    - `residual`: of the shape that the result has on this rank, added to the sum.
    - `schedule`, `out_dtype`, `float8`, `order`: as in `all_gather_linear`. So are the errors.

    With `norm_weight` [N] the result is (normed, y): y as above, and the norm of each row of y. `norm` is rms_norm, or
    layer_norm, which may have `norm_bias` [N]. Both parameters are whole, the same on every rank. So are their
    gradients, which backward adds up over the ranks: a norm sends nothing else. A norm needs whole rows: not
    `scatter_dim=-1`.

    x and weight may be `Scaled`. Each rank scales its own terms, which travel in `out_dtype`, bfloat16 by default.
    """
    options = Options(schedule, "auto", producer, float8, order)
    epilogue, operands = NO_EPILOGUE, {"bias": bias, "residual": residual}
    if norm_weight is not None or norm_bias is not None or norm != RMS_NORM:
        epilogue = of_norm(norm, norm_weight, norm_bias, norm_eps)
        operands |= {"norm_weight": norm_weight, "norm_bias": norm_bias}
    problem: Any = problems.reduce_scatter_problem
    dims = scatter_dim, sizes
    return autograd.apply(problem, x, weight, operands, group, options, dims, epilogue, out_dtype)  # type: ignore[no-any-return]


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
    """Compute `all_reduce(F.linear(x, weight)) + bias + residual` in one op, differentiable.

        y  = all_reduce(x @ weight.T) + bias + residual    [.., N], the same on every rank
        dx = dy @ weight                                   like x
        dw = dy.T @ x                                      like weight
        db = sum of dy over its rows                       [N]
        dresidual = dy

    dy is the same on every rank already, so backward sends nothing, except the scales of tensorwise float8.

    - `x`, `weight`: [.., K_r] and [N, K_r], this rank's part of the contraction.
    - `bias`, `residual`: [N] and [.., N], whole, the same on every rank.
    - `algorithm`: of `fused` and `decomposed`: auto, one_shot (fewest steps) or two_shot (fewest bytes).
    - `order`: as in `all_gather_linear`. With "any", two_shot always uses NVLink's switch if there is one.
    - `norm_weight`, `norm_bias`, `norm_eps`, `norm` and `Scaled` operands: as in `linear_reduce_scatter`, except that
      the gradients of a norm's parameters send nothing.
    - `schedule`, `out_dtype`, `float8`: as in `all_gather_linear`. So are the errors.
    """
    options = Options(schedule, algorithm, "auto", float8, order)
    epilogue, operands = NO_EPILOGUE, {"bias": bias, "residual": residual}
    if norm_weight is not None or norm_bias is not None or norm != RMS_NORM:
        epilogue = of_norm(norm, norm_weight, norm_bias, norm_eps)
        operands |= {"norm_weight": norm_weight, "norm_bias": norm_bias}
    problem: Any = problems.all_reduce_problem
    return autograd.apply(problem, x, weight, operands, group, options, (), epilogue, out_dtype)  # type: ignore[no-any-return]


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
    """Compute `F.linear(x, all_gather(weight_shard), bias)`, with a fully sharded weight, in one op, differentiable.

        y  = x @ all_gather(weight_shard).T + bias     [.., N]
        dx = dy @ all_gather(weight_shard)             like x; the weight is gathered again
        dw = reduce_scatter(dy.T @ x)                  like weight_shard
        db = all_reduce(sum of dy over its rows)       [N]

    The gathered weight is never saved.

    - `x`: [.., K], this rank's own rows.
    - `weight_shard`: [sizes[rank], K], this rank's rows of the weight [N, K].
    - `bias`: [N], whole, the same on every rank.
    - `sizes`: rows of the weight on every rank, by default this rank's number on all.
    - `activation`: one without a gate.
    - `schedule`, `producer`, `out_dtype`, `float8`, `order`: as in `all_gather_linear`. So are the errors. With
      `Scaled` operands the weight's rows travel.
    """
    options = Options(schedule, "auto", producer, float8, order)
    epilogue = NO_EPILOGUE if activation is None else Epilogue(activation=activation)
    problem: Any = problems.fsdp_problem
    return autograd.apply(problem, x, weight_shard, {"bias": bias}, group, options, (sizes,), epilogue, out_dtype)  # type: ignore[no-any-return]
