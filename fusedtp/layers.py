"""nn.Linear over the ranks of a group: column-parallel, row-parallel, fully sharded, and the MLP made of them.

A layer is a line of notation; its backward is planned from it. N output features, K input features, S the sequence.

    ColumnParallelLinear   [S_X, K] @ [K, N_X] -> [S, N_X]     sequence_parallel=False: [S, K] @ [K, N_X] -> [S, N_X]
    RowParallelLinear      [S, K_X] @ [K_X, N] -> [S_X, N]     sequence_parallel=False: [S, K_X] @ [K_X, N] -> [S, N]
    FSDPLinear             [S_X, K] @ [K, N_X] -> [S_X, N]

`weight` and `bias` are DTensors of nn.Linear's shapes, out features first, `weight.to_local()` this rank's shard:
checkpoints, optimizers, clip_grad_norm_ and fully_shard treat them as the whole matrix (`parameters`). Their mesh is
`group` if that is a DeviceMesh, as fully_shard on another axis of the mesh needs, else one made from the group. With
the same seed on every rank a layer starts as its shard of what nn.Linear would have drawn, whatever the number of
ranks: each rank draws the whole matrix and keeps its part, so for that moment it holds both. A matrix too large for
that is made on `device="meta"` and filled from a checkpoint. Where ranks hold different rows, gradients are those of
the sum of their losses; a result that is whole on every rank is one tensor, and its loss counts once.

By default features are split as DTensor splits them, in pieces of length / ranks rounded up: such a layer can be saved
by any number of ranks and loaded by any other. With other `feature_sizes` the parameters are padded to the longest
shard and fit only the same ranks and sizes; loading them into others is an error.

With `float8`, a recipe (`recipes`), operands are cast before they are sent; parameters and gradients stay as they are.
With `order` "tree" results and gradients have the same bits on any number of ranks, "any" lets NVLink's switch add: see
`all_gather_linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from . import groups, norms
from .calls import arguments, eager, parameters, problems
from .calls.call import Prepare
from .groups import Group
from .norms import Norm
from .op import LAYER_NORM, RANK_ORDER, Activation, GatedActivation, NormName, Order
from .options import Options
from .recipes import Float8
from .sharded_linear import Device, ShardedLinear
from .shards import check_sizes, chunk_sizes


class ColumnParallelLinear(ShardedLinear):
    """y = x @ weight.T + bias, this rank's columns of y.

    weight [out_features, in_features], bias [out_features], of each of which this rank has feature_sizes[rank] rows
    sequence_parallel     x is this rank's part along `gather_dim`, y whole; dx is reduce-scattered, x gathered for dw
    without               x and y are whole along the sequence; dx is all-reduced

    gather_dim: 0 for [sequence, batch, features], 1 for [batch, sequence, features]. feature_sizes: out_features on
    every rank, by default as DTensor splits them. sequence_sizes: x's length on every rank, by default this rank's on
    all; it may be set anew between calls. activation: relu, gelu, gelu_tanh or silu of y, in the same op.
    """

    _bias_is_split = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        group: Group = None,
        sequence_parallel: bool = True,
        gather_dim: int = 0,
        feature_sizes: Sequence[int] | None = None,
        sequence_sizes: Sequence[int] | None = None,
        schedule: str = "auto",
        producer: str = "auto",
        float8: Float8 | None = None,
        activation: Activation | GatedActivation | None = None,
        order: Order = RANK_ORDER,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, device, dtype, group, feature_sizes,
            Options(schedule, "auto", producer, float8, order, activation),
        )  # fmt: skip
        self.sequence_parallel = arguments.flag("sequence_parallel", sequence_parallel)
        self.gather_dim = arguments.sequence_dim("gather_dim", gather_dim)
        self.sequence_sizes = arguments.sequence_sizes(sequence_sizes, self.group)

    def forward(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return self._linear(problems.replicated_problem, x)  # type: ignore[no-any-return]
        along = self.gather_dim, self.sequence_sizes
        return self._linear(problems.all_gather_problem, x, along)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}, gather_dim={self.gather_dim}"
        return text if self.options.activation is None else f"{text}, activation={self.options.activation!r}"


class RowParallelLinear(ShardedLinear):
    """y = sum over ranks of x @ weight.T, + bias; x holds this rank's features.

    weight [out_features, in_features], of which this rank has feature_sizes[rank] columns, bias [out_features], whole
    sequence_parallel     y is this rank's part along `scatter_dim`; dy is gathered once for dx and dw
    without               y is whole on every rank; backward sends nothing (tensorwise float8: the scales' numbers)

    scatter_dim: 0 for [sequence, batch, features], 1 for [batch, sequence, features]. feature_sizes: in_features on
    every rank, by default as DTensor splits them. sequence_sizes: y's length on every rank, by default as even as can
    be; it may be set anew between calls. norm: rms_norm or layer_norm of y, in the same op, with parameters of the
    layer's own, `norm_weight` [out_features] of ones and layer_norm's `norm_bias` of zeros, whole as the bias is; the
    result is then (normed, y).
    """

    _dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        group: Group = None,
        sequence_parallel: bool = True,
        scatter_dim: int = 0,
        feature_sizes: Sequence[int] | None = None,
        sequence_sizes: Sequence[int] | None = None,
        schedule: str = "auto",
        producer: str = "auto",
        float8: Float8 | None = None,
        norm: NormName | None = None,
        norm_eps: float = 1e-6,
        order: Order = RANK_ORDER,
    ) -> None:
        self.norm_eps = norms.check_eps(norm_eps)
        self.norm = None if norm is None else norms.check_name(norm)
        # All is checked before the bias is sent.
        self.sequence_parallel = arguments.flag("sequence_parallel", sequence_parallel)
        self.scatter_dim = arguments.sequence_dim("scatter_dim", scatter_dim)
        self._asked_sizes = sequence_sizes
        super().__init__(
            in_features, out_features, bias, device, dtype, group, feature_sizes,
            Options(schedule, "auto", producer, float8, order),
        )  # fmt: skip

    def _make_more(self, mesh: DeviceMesh, device: Device, dtype: torch.dtype | None) -> None:
        self.sequence_sizes = arguments.sequence_sizes(self._asked_sizes, self.group)
        made = (self.out_features,), mesh, device, dtype
        self.norm_weight = parameters.whole(*made) if self.norm else None
        self.norm_bias = parameters.whole(*made) if self.norm == LAYER_NORM else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As the layers do; of a norm the weight is ones, the bias zeros."""
        super().reset_parameters()
        for each, value in ((self.norm_weight, 1.0), (self.norm_bias, 0.0)):
            if each is not None and not each.is_meta:
                each.fill_(value)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """y; with a residual, which lies as y does, y + residual; with a norm (normed, y)."""
        norm: Norm | None = None
        if self.norm_weight is not None:
            norm = Norm(self.norm or "", self.norm_eps, self.norm_weight, self.norm_bias)
        if not self.sequence_parallel:
            return self._linear(problems.all_reduce_problem, x, (), residual, norm)  # type: ignore[no-any-return]
        along = self.scatter_dim, self.sequence_sizes
        return self._linear(problems.reduce_scatter_problem, x, along, residual, norm)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}, scatter_dim={self.scatter_dim}"
        return text if self.norm is None else f"{text}, norm={self.norm!r}, norm_eps={self.norm_eps}"


class FSDPLinear(ShardedLinear):
    """y = x @ all_gather(weight).T + bias; x and y are this rank's own rows.

    weight [out_features, in_features], of which this rank has feature_sizes[rank] rows, bias [out_features], whole
    forward gathers the weight and keeps only its shard; backward gathers it again and reduce-scatters dw

    feature_sizes: out_features on every rank, by default as DTensor splits them. activation: relu, gelu, gelu_tanh or
    silu of y, in the same op.
    """

    _sums_features = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        group: Group = None,
        feature_sizes: Sequence[int] | None = None,
        schedule: str = "auto",
        producer: str = "auto",
        float8: Float8 | None = None,
        activation: Activation | None = None,
        order: Order = RANK_ORDER,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, device, dtype, group, feature_sizes,
            Options(schedule, "auto", producer, float8, order, activation),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(problems.fsdp_problem, x, (self.feature_sizes,))  # type: ignore[no-any-return]


class _GateUpLinear(ColumnParallelLinear):
    # Two column-parallel matrices, gate's shard then up's below it: one gather of x serves both, and swiglu's result is
    # all that comes out. They start as two nn.Linear would, drawn one after the other.
    _matrices = 2

    def _linear(
        self, prepare: Prepare, x: Tensor, along: tuple[Any, ...] = (), residual: Tensor | None = None,
        norm: Norm | None = None,
    ) -> Any:  # fmt: skip
        self._check_parameters()
        size = self._sizes[self.group.rank()]
        weights = self._own("weight", self.weight, size, 3).unbind()
        biases = (None, None) if self.bias is None else self._own("bias", self.bias, size, 2).unbind()
        return eager.apply(prepare, x, weights, biases, self.group, self.options, along)


class ParallelMLP(nn.Module):
    """Two parallel linears with an activation between them.

    gelu      down_proj(gelu(up_proj(x)))
    swiglu    down_proj(silu(gate) * up), of x with both matrices of gate_up_proj

    The activation is part of the first linear's op. up_proj and gate_up_proj are ColumnParallelLinear, down_proj is
    RowParallelLinear. x is gathered once for gate and up: gate_up_proj.weight is both matrices stacked, [2,
    intermediate_size, hidden_size], its bias [2, intermediate_size], and each rank has the same rows of both. x and y
    are [S_X, ..., hidden_size], S along `sequence_dim` (0 or 1); whole without sequence_parallel. feature_sizes splits
    intermediate_size; the other arguments are those of the linears.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Literal["gelu", "swiglu"] = "gelu",
        group: Group = None,
        sequence_parallel: bool = True,
        sequence_dim: int = 0,
        feature_sizes: Sequence[int] | None = None,
        sequence_sizes: Sequence[int] | None = None,
        schedule: str = "auto",
        producer: str = "auto",
        float8: Float8 | None = None,
        order: Order = RANK_ORDER,
    ) -> None:
        super().__init__()
        if activation not in ("gelu", "swiglu"):
            raise ValueError(f"activation must be gelu or swiglu, got {activation!r}")
        arguments.sequence_dim("sequence_dim", sequence_dim)
        sizes = arguments.features(hidden_size=hidden_size, intermediate_size=intermediate_size)
        hidden_size, intermediate_size = sizes
        world_size = groups.resolve(group).size()
        if feature_sizes is None:
            feature_sizes = chunk_sizes(intermediate_size, world_size)
        feature_sizes = check_sizes(
            feature_sizes, world_size=world_size, length=intermediate_size, name="feature_sizes"
        )  # fmt: skip
        self.activation = activation
        options: dict[str, Any] = {
            "group": group, "sequence_parallel": sequence_parallel, "sequence_sizes": sequence_sizes,
            "schedule": schedule, "producer": producer, "float8": float8, "order": order,
        }  # fmt: skip
        wide: dict[str, Any] = {**options, "gather_dim": sequence_dim}
        if activation == "swiglu":
            twice = [2 * size for size in feature_sizes]
            self.gate_up_proj = _GateUpLinear(
                hidden_size, 2 * intermediate_size, bias, device, dtype, feature_sizes=twice, **wide,
                activation="swiglu",
            )  # fmt: skip
        else:
            self.up_proj = ColumnParallelLinear(
                hidden_size, intermediate_size, bias, device, dtype, feature_sizes=feature_sizes, **wide,
                activation="gelu",
            )  # fmt: skip
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias, device, dtype,
            scatter_dim=sequence_dim, feature_sizes=feature_sizes, **options,
        )  # fmt: skip

    @property
    def sequence_sizes(self) -> tuple[int, ...] | None:
        """x's and y's length on every rank; it may be set anew between calls, for both linears. None: this rank's."""
        return self.down_proj.sequence_sizes

    @sequence_sizes.setter
    def sequence_sizes(self, sizes: Sequence[int] | None) -> None:
        wide = self.up_proj if self.activation == "gelu" else self.gate_up_proj
        wide.sequence_sizes = self.down_proj.sequence_sizes = arguments.sequence_sizes(sizes, self.down_proj.group)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up_proj if self.activation == "gelu" else self.gate_up_proj
        return self.down_proj(wide(x))  # type: ignore[no-any-return]
