"""Layers: nn.Linear over the ranks of a group, column-parallel, row-parallel or fully sharded, and an MLP made of them.

A layer is a line of notation, from which its backward is planned. N is output features, K input features, S the
sequence.

    ColumnParallelLinear   [S_X, K] @ [K, N_X] -> [S, N_X]     sequence_parallel=False: [S, K] @ [K, N_X] -> [S, N_X]
    RowParallelLinear      [S, K_X] @ [K_X, N] -> [S_X, N]     sequence_parallel=False: [S, K_X] @ [K_X, N] -> [S, N]
    FSDPLinear             [S_X, K] @ [K, N_X] -> [S_X, N]

Parameters: `weight` and `bias` are DTensors of nn.Linear's shapes, `weight.to_local()` is this rank's shard.
Checkpoints, optimizers, clip_grad_norm_ and fully_shard treat them as the whole matrix (`parameters`). Their mesh is
`group` if that is a DeviceMesh, else one made from the group. fully_shard on another axis needs the former.

Initial values: With the same seed on every rank, a layer starts as its shard of nn.Linear's values, on any number
of ranks. Each rank draws the whole matrix and keeps its part, so it holds both for a moment. If the matrix is too large
for that, make the layer on `device="meta"` and load a checkpoint.

Gradients: If ranks hold different rows, gradients are those of the sum of their losses. A result that is whole on
every rank is one tensor, and its loss counts once.

Uneven features: By default features are split as DTensor splits them, in pieces of length / ranks rounded up. Any
number of ranks can save such a layer, and any other can load it. With other `feature_sizes` the parameters are padded
to the longest shard. They fit only the same ranks and sizes; loading them into others is an error.

`float8` casts operands before they are sent; parameters and gradients keep their dtype. `order` is that of
`all_gather_linear`: "tree" gives the same bits on any number of ranks, "any" lets NVLink's switch add.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import groups, norms
from .activations import Activation, GatedActivation
from .calls import arguments, autograd, parameters, problems
from .calls.call import ProblemFunction
from .calls.parameters import Device
from .choose import dispatch
from .epilogue import NO_EPILOGUE, Epilogue
from .groups import Group
from .norms import LAYER_NORM, NormName
from .op import RANK_ORDER, Options, Order
from .scaled import Float8
from .shards import check_sizes, chunk_sizes

# Prefix of a buffer's name; the length of every rank's shard follows.
_PADDED = "padded_sizes"


class ShardedLinear(parameters.TrackedModule):
    """Linear layer whose parameters are split over the ranks of a group.

    The weight is split along its output features (`_dim` 0) or its input features (`_dim` 1).
    """

    # Several matrices of one shape are stacked along a leading dim; otherwise DTensor could not split each of them.
    _dim = 0
    _bias_is_split = False
    # True if the ranks' features are terms of a sum, in forward or backward.
    _sums_features = True
    _matrices = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        device: Device,
        dtype: torch.dtype | None,
        group: Group,
        feature_sizes: Sequence[int] | None,
        options: Options,
        epilogue: Epilogue = NO_EPILOGUE,
    ) -> None:
        super().__init__()
        dispatch.check_schedule(options.schedule)
        arguments.check_producer(options.producer, options.schedule)
        arguments.activation_of(epilogue.activation, self._matrices)
        arguments.flag("bias", bias)
        arguments.parameter_options(device, dtype)
        self.group: ProcessGroup = groups.resolve(group)
        in_features, out_features = arguments.features(in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        made_in = dtype or torch.get_default_dtype()
        arguments.float8_of(options.float8, made_in, "parameters")
        # Without the operands, which each call reads.
        self.options, self.epilogue = options, epilogue
        length, world_size = (out_features, in_features)[self._dim], self.group.size()
        if feature_sizes is None:
            pieces = chunk_sizes(length // self._matrices, world_size)
            feature_sizes = tuple(self._matrices * size for size in pieces)
        self.feature_sizes = check_sizes(feature_sizes, world_size=world_size, length=length, name="feature_sizes")
        if arguments.leaves_of(options, world_size, made_in) > 0 and self._sums_features:
            arguments.check_even(options.order, self.feature_sizes)
        lead = (self._matrices,) * (self._matrices > 1)
        rows = out_features // self._matrices
        # Split of each matrix, and the dims of the parameters that are split.
        self._sizes = tuple(size // self._matrices for size in self.feature_sizes)
        self._dims = {"weight": len(lead) + self._dim, "bias": len(lead) if self._bias_is_split else None}
        mesh = parameters.mesh_of(group, self.group, device)
        made = mesh, device, dtype
        self.weight = parameters.sharded((*lead, rows, in_features), len(lead) + self._dim, self._sizes, *made)
        self.bias: nn.Parameter | None = None
        if bias and self._bias_is_split:
            self.bias = parameters.sharded((*lead, rows), len(lead), self._sizes, *made)
        elif bias:
            self.bias = parameters.whole((out_features,), *made)
        self._make_more(*made)
        self.keep_layout()
        self._is_padded = parameters.is_padded(self._sizes)
        if self._is_padded:
            # The shapes alone would fit other sizes with the same longest shard. torch.distributed.checkpoint.load
            # loads in place and compares names only, before it writes anything.
            self.register_buffer(self._padded_name, torch.tensor(self._sizes, dtype=torch.int64, device=device))
        self.reset_parameters()

    @property
    def _padded_name(self) -> str:
        return "_".join(map(str, (_PADDED, *self._sizes)))

    def _make_more(self, mesh: DeviceMesh, device: Device, dtype: torch.dtype | None) -> None:
        """Make parameters that only some layers have."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw nn.Linear's initial values and keep this rank's part; a parameter on the meta device draws nothing.

        With the same seed on every rank, the parts are those of one draw. The group's first rank sends a bias that is
        whole on every rank, so all ranks must call this.
        """
        if self._is_padded:
            self.get_buffer(self._padded_name).copy_(torch.tensor(self._sizes, dtype=torch.int64, device="cpu"))
        rows, weight, bias = self.out_features // self._matrices, self.weight, self.bias
        drawn = [
            nn.Linear(self.in_features, rows, bias is not None, weight.device, weight.dtype)
            for _ in range(self._matrices)
        ]
        for name, parameter in (("weight", weight), ("bias", bias)):
            if parameter is not None and not parameter.is_meta:
                values = [getattr(each, name) for each in drawn]
                parameters.fill(
                    parameter, values[0] if len(values) == 1 else torch.stack(values), self._dims[name], self._sizes
                )
                if self._dims[name] is None:
                    own = parameters.part(parameter, parameter.ndim)
                    parameters.same_as(0, own, self._lies[name].mesh, self.group)

    def _linear(
        self, problem: ProblemFunction, x: Tensor, dims: tuple[Any, ...] = (), residual: Tensor | None = None,
        **operands: Any,
    ) -> Any:  # fmt: skip
        weight, operands["bias"] = self.read("weight", "bias")
        if residual is not None:
            operands["residual"] = residual
        options, epilogue = (self.group, self.options, dims), self.epilogue
        if not self._is_padded and self._matrices == 1:
            return autograd.apply(problem, x, weight, operands, *options, epilogue, of_layer=True)
        size, several = self._sizes[self.group.rank()], self._matrices > 1
        weight = self._own("weight", weight, size, 2 + several)
        bias = operands["bias"]
        operands["bias"] = bias = None if bias is None else self._own("bias", bias, size, 1 + several)
        if several:
            weight = weight.unbind()
            operands["bias"] = (None,) * self._matrices if bias is None else bias.unbind()
        for name, each in operands.items():
            if name.startswith("norm") and each is not None:
                operands[name] = parameters.local(each, 1)
        return autograd.apply(problem, x, weight, operands, *options, epilogue)

    def _own(self, name: str, parameter: Tensor, size: int, ndim: int) -> Tensor:
        value, dim = parameters.local(parameter, parameter.ndim), self._dims[name]
        return parameters.local(value if dim is None else value.narrow(dim, 0, size), ndim)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        stem = f"{prefix}{_PADDED}_"
        theirs = [key.removeprefix(stem) for key in state_dict if key.startswith(stem)]
        if theirs and not (self._is_padded and f"{prefix}{self._padded_name}" in state_dict):
            shards = theirs[0].replace("_", ", ")
            *_, errors = args
            errors.append(
                f"{prefix}weight is padded for shards of ({shards}), this layer's are {self._sizes}: "
                "feature_sizes that are not as DTensor splits them hold for the same ranks only"
            )
            return
        parameters.own_parts(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        split = ", ".join(map(str, self.feature_sizes))
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        text = f"{text}, feature_sizes=({split}), rank={self.group.rank()}, schedule={self.options.schedule!r}"
        return text if self.options.float8 is None else f"{text}, float8={self.options.float8!r}"

    def __getstate__(self) -> dict[str, Any]:
        # A process group can be neither copied nor pickled. Its name can, and means the same group on a copy. The
        # process that loads the layer may have another group of that name.
        ranks = dist.get_process_group_ranks(self.group)
        return {
            **self.__dict__,
            "_known": dict.fromkeys(self._lies),
            "group": (self.group.group_name, ranks, self.group.rank()),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        name, ranks, rank = state["group"]
        group = groups.resolve(name)
        if (here := (dist.get_process_group_ranks(group), group.rank())) != (ranks, rank):
            raise ValueError(
                f"this {type(self).__name__} was made by rank {rank} of group {name!r} with ranks {ranks}, and here it "
                f"meets rank {here[1]} of {here[0]}: save its state_dict() by torch.distributed.checkpoint"
            )
        super().__setstate__({**state, "group": group})  # type: ignore[no-untyped-call]
        parameters.watch_all(self)


class ColumnParallelLinear(ShardedLinear):
    """Linear layer split by output features: y = x @ weight.T + bias, this rank's columns of y.

        sequence_parallel=True     y  = all_gather(x) @ weight.T + bias    x is this rank's part along `gather_dim`
                                   dx = reduce_scatter(dy @ weight)
                                   dw = dy.T @ all_gather(x)
        sequence_parallel=False    y  = x @ weight.T + bias                x is whole
                                   dx = all_reduce(dy @ weight)
                                   dw = dy.T @ x
        both                       db = sum of dy over its rows

    `weight` is [out_features, in_features] and `bias` [out_features]; this rank has feature_sizes[rank] rows of both.

    - `gather_dim`: 0 for [sequence, batch, features], 1 for [batch, sequence, features].
    - `feature_sizes`: out_features on every rank, by default as DTensor splits them.
    - `sequence_sizes`: length of x on every rank, by default this rank's on all. It may be set anew between calls.
    - `activation`: an `Activation` of y, in the same op.
    - the other options: as in `all_gather_linear`.
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
            Options(schedule, "auto", producer, float8, order), Epilogue(activation=activation),
        )  # fmt: skip
        self.sequence_parallel = arguments.flag("sequence_parallel", sequence_parallel)
        self.gather_dim = arguments.sequence_dim("gather_dim", gather_dim)
        self.sequence_sizes = arguments.sequence_sizes(sequence_sizes, self.group)

    def forward(self, x: Tensor) -> Tensor:
        """Return y [.., rows of all ranks, this rank's features] of x [.., own rows, in_features].

        Without `sequence_parallel`, x has all rows, which are the same on every rank.
        """
        if not self.sequence_parallel:
            return self._linear(problems.replicated_problem, x)  # type: ignore[no-any-return]
        dims = self.gather_dim, self.sequence_sizes
        return self._linear(problems.all_gather_problem, x, dims)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}, gather_dim={self.gather_dim}"
        return text if self.epilogue.activation is None else f"{text}, activation={self.epilogue.activation!r}"


class RowParallelLinear(ShardedLinear):
    """Linear layer split by input features: y = sum over ranks of x @ weight.T, + bias.

        sequence_parallel=True     y  = reduce_scatter(x @ weight.T) + bias    this rank's part along `scatter_dim`
                                   dx = all_gather(dy) @ weight                dy is gathered once for dx and dw
                                   dw = all_gather(dy).T @ x
                                   db = all_reduce(sum of dy over its rows)
        sequence_parallel=False    y  = all_reduce(x @ weight.T) + bias        whole on every rank
                                   dx = dy @ weight                            sends nothing (tensorwise float8: scales)
                                   dw = dy.T @ x
                                   db = sum of dy over its rows

    x has this rank's features. `weight` is [out_features, in_features]; this rank has feature_sizes[rank] columns.
    `bias` [out_features] is whole.

    - `scatter_dim`: 0 for [sequence, batch, features], 1 for [batch, sequence, features].
    - `feature_sizes`: in_features on every rank, by default as DTensor splits them.
    - `sequence_sizes`: length of y on every rank, by default as even as possible. It may be set anew between calls.
    - `norm`: rms_norm or layer_norm of y, in the same op; the result is then (normed, y). The layer has the parameters,
      whole on every rank: `norm_weight` [out_features], at first ones, and for layer_norm `norm_bias`, at first zeros.
    - the other options: as in `linear_reduce_scatter`.
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
        # Check everything before the bias is sent.
        self.sequence_parallel = arguments.flag("sequence_parallel", sequence_parallel)
        self.scatter_dim = arguments.sequence_dim("scatter_dim", scatter_dim)
        self.sequence_sizes = arguments.sequence_sizes(sequence_sizes, groups.resolve(group))
        super().__init__(
            in_features, out_features, bias, device, dtype, group, feature_sizes,
            Options(schedule, "auto", producer, float8, order),
            NO_EPILOGUE if norm is None else Epilogue(norm=self.norm, eps=self.norm_eps),
        )  # fmt: skip

    def _make_more(self, mesh: DeviceMesh, device: Device, dtype: torch.dtype | None) -> None:
        made = (self.out_features,), mesh, device, dtype
        self.norm_weight = parameters.whole(*made) if self.norm else None
        self.norm_bias = parameters.whole(*made) if self.norm == LAYER_NORM else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weight and bias as all layers do; set a norm's weight to ones and its bias to zeros."""
        super().reset_parameters()
        for each, value in ((self.norm_weight, 1.0), (self.norm_bias, 0.0)):
            if each is not None and not each.is_meta:
                each.fill_(value)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return y [.., own rows, out_features] of x [.., all rows, this rank's features]; with a norm (normed, y).

        `residual`, which is split like y, is added to it. Without `sequence_parallel`, y has all rows on every rank.
        """
        names = ("norm_weight", "norm_bias") if self.norm else ()
        of_norm = dict(zip(names, self.read(*names), strict=True)) if names else {}
        if not self.sequence_parallel:
            return self._linear(problems.all_reduce_problem, x, (), residual, **of_norm)  # type: ignore[no-any-return]
        dims = self.scatter_dim, self.sequence_sizes
        return self._linear(problems.reduce_scatter_problem, x, dims, residual, **of_norm)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}, scatter_dim={self.scatter_dim}"
        return text if self.norm is None else f"{text}, norm={self.norm!r}, norm_eps={self.norm_eps}"


class FSDPLinear(ShardedLinear):
    """Linear layer with a fully sharded weight: y = x @ all_gather(weight).T + bias; x and y are this rank's own rows.

        y  = x @ all_gather(weight).T + bias
        dx = dy @ all_gather(weight)                the weight is gathered again; only its shard is kept
        dw = reduce_scatter(dy.T @ x)
        db = all_reduce(sum of dy over its rows)

    `weight` is [out_features, in_features]; this rank has feature_sizes[rank] rows. `bias` [out_features] is whole.

    - `feature_sizes`: out_features on every rank, by default as DTensor splits them.
    - `activation`: an `Activation` of y, in the same op.
    - the other options: as in `fsdp_linear`.
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
            Options(schedule, "auto", producer, float8, order), Epilogue(activation=activation),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return y [.., out_features] of this rank's own rows x [.., in_features]."""
        return self._linear(problems.fsdp_problem, x, (self.feature_sizes,))  # type: ignore[no-any-return]


class _GateUpLinear(ColumnParallelLinear):
    # Two column-parallel matrices, gate's shard with up's below it. One gather of x serves both, and the op returns
    # only swiglu's result. Initial values are those of two nn.Linear, drawn one after the other.
    _matrices = 2


class ParallelMLP(nn.Module):
    """MLP: two parallel linears with an activation between them, which is part of the first linear's op.

        gelu      y = down_proj(gelu(up_proj(x)))
        swiglu    y = down_proj(silu(gate) * up), gate and up: x with the two matrices of gate_up_proj

    x and y are [S_X, .., hidden_size], split along `sequence_dim` (0 or 1); whole if sequence_parallel=False. up_proj
    and gate_up_proj are ColumnParallelLinear, down_proj is RowParallelLinear.

    gate_up_proj.weight is both matrices stacked, [2, intermediate_size, hidden_size], its bias [2, intermediate_size].
    Each rank has the same rows of both, and x is gathered once for both. `feature_sizes` splits intermediate_size. The
    other arguments are those of the linears.
    """

    up_proj: ColumnParallelLinear
    gate_up_proj: ColumnParallelLinear

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
        kind, name = (_GateUpLinear, "gate_up_proj") if activation == "swiglu" else (ColumnParallelLinear, "up_proj")
        wide = kind(
            hidden_size, kind._matrices * intermediate_size, bias, device, dtype, gather_dim=sequence_dim,
            feature_sizes=[kind._matrices * size for size in feature_sizes], activation=activation, **options,
        )  # fmt: skip
        self.add_module(name, wide)
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias, device, dtype,
            scatter_dim=sequence_dim, feature_sizes=feature_sizes, **options,
        )  # fmt: skip

    @property
    def sequence_sizes(self) -> tuple[int, ...] | None:
        """Return the length of x and y on every rank; set it between calls, for both linears.

        None: x has this rank's length on every rank, and y is split as evenly as possible.
        """
        return self.down_proj.sequence_sizes

    @sequence_sizes.setter
    def sequence_sizes(self, sizes: Sequence[int] | None) -> None:
        wide = self.up_proj if self.activation == "gelu" else self.gate_up_proj
        wide.sequence_sizes = self.down_proj.sequence_sizes = arguments.sequence_sizes(sizes, self.down_proj.group)

    def forward(self, x: Tensor) -> Tensor:
        """Return y of x, both [.., own rows, hidden_size]; without `sequence_parallel`, both have all rows."""
        wide = self.up_proj if self.activation == "gelu" else self.gate_up_proj
        return self.down_proj(wide(x))  # type: ignore[no-any-return]
