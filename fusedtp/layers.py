"""nn.Linear over the ranks of a group: column-parallel, row-parallel, fully sharded, and the MLP made of them.

A layer is a line of notation; its backward is planned from it. N output features, K input features, S the sequence.

    ColumnParallelLinear   [S_X, K] @ [K, N_X] -> [S, N_X]     sequence_parallel=False: [S, K] @ [K, N_X] -> [S, N_X]
    RowParallelLinear      [S, K_X] @ [K_X, N] -> [S_X, N]     sequence_parallel=False: [S, K_X] @ [K_X, N] -> [S, N]
    FSDPLinear             [S_X, K] @ [K, N_X] -> [S_X, N]

`weight` is this rank's shard, a plain parameter, out features first as in nn.Linear. With the same seed on every rank a
layer starts as its shard of what nn.Linear would have drawn, whatever the number of ranks: each rank draws the whole
matrix and keeps its part, so for that moment it holds both. A matrix too large for that is made on `device="meta"` and
filled from a checkpoint. Where ranks hold different rows, gradients are those of the sum of their losses; a result
that is whole on every rank is one tensor, and its loss counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from . import arguments, dispatch, functional, groups, repeated
from .groups import Group
from .shards import check_sizes, even_sizes, offsets

Device = torch.device | str | int | None


def linear_of_replicated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group = None,
    schedule: str = "auto",
    debug: bool = False,
) -> Tensor:
    """`F.linear` of an x that is whole on every rank and a weight and bias that are this rank's columns.

    x [..., K], weight [N_r, K], bias [N_r] -> [..., N_r]. Nothing is sent; backward all-reduces dx. Errors as in
    `all_gather_linear`.
    """
    process_group = groups.resolve(group)
    x, weight, bias = arguments.autocast(x, weight, bias)
    return repeated.call(_linear_of_replicated, x, weight, bias, process_group, schedule, debug)


def _linear_of_replicated(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, schedule: str, debug: bool
) -> tuple[Any, ...]:
    arguments.check_linear(x, weight, bias, schedule, debug)
    arguments.check_features(x.shape[-1], "x has", weight)
    splits = {"N": (weight.shape[0],) * group.size()}
    spec = functional.layer_spec(x, None, "K", "K, N_X", "N_X", x_split=True)
    return functional.layer(x, weight, spec, splits, group, schedule, debug)


class _ShardedLinear(nn.Module):
    # What the layers share: this rank's shard of nn.Linear's parameters, weight cut along `_dim`.
    _dim = 0
    _bias_is_split = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        device: Device,
        dtype: torch.dtype | None,
        group: Group,
        feature_sizes: Sequence[int] | None,
        schedule: str,
        debug: bool,
    ) -> None:
        super().__init__()
        dispatch.check_schedule(schedule)
        arguments.flag("bias", bias)
        arguments.parameter_options(device, dtype)
        self.group: ProcessGroup = groups.resolve(group)
        in_features, out_features = arguments.features(in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.schedule, self.debug = schedule, arguments.flag("debug", debug)
        rank, world_size = self.group.rank(), self.group.size()
        shape = [out_features, in_features]
        if feature_sizes is None:
            self.feature_sizes = even_sizes(shape[self._dim], world_size)
        else:
            self.feature_sizes = check_sizes(
                feature_sizes, world_size=world_size, length=shape[self._dim], name="feature_sizes"
            )
        shape[self._dim] = self.feature_sizes[rank]
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        length = shape[0] if self._bias_is_split else out_features
        self.bias = nn.Parameter(torch.empty(length, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw what nn.Linear would draw, on every rank alike, and keep this rank's shard."""
        self._draw(self.weight, self.bias, self.out_features, self.feature_sizes)

    @torch.no_grad()
    def _draw(self, weight: Tensor, bias: Tensor | None, out_features: int, sizes: Sequence[int]) -> None:
        rank = self.group.rank()
        whole = nn.Linear(self.in_features, out_features, bias is not None, weight.device, weight.dtype)
        weight.copy_(whole.weight.narrow(self._dim, offsets(sizes)[rank], sizes[rank]))
        if bias is not None:
            bias.copy_(whole.bias.narrow(0, offsets(sizes)[rank], sizes[rank]) if self._bias_is_split else whole.bias)

    def extra_repr(self) -> str:
        split = ", ".join(map(str, self.feature_sizes))
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{text}, feature_sizes=({split}), rank={self.group.rank()}, schedule={self.schedule!r}"

    def __getstate__(self) -> dict[str, Any]:
        # A process group can be neither copied nor pickled; its name can, and means the same group on a copy.
        return {**self.__dict__, "group": self.group.group_name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "group": groups.resolve(state["group"])})  # type: ignore[no-untyped-call]


class ColumnParallelLinear(_ShardedLinear):
    """y = x @ weight.T + bias, this rank's columns of y.

    weight [feature_sizes[rank], in_features], bias [feature_sizes[rank]]
    sequence_parallel     x is this rank's part along `gather_dim`, y whole; dx is reduce-scattered, x gathered for dw
    without               x and y are whole along the sequence; dx is all-reduced

    gather_dim: 0 for [sequence, batch, features], 1 for [batch, sequence, features]. feature_sizes: out_features on
    every rank, by default as even as can be. sequence_sizes: x's length on every rank, by default this rank's on all;
    it may be set anew between calls.
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
        debug: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, group, feature_sizes, schedule, debug)
        self.sequence_parallel = arguments.flag("sequence_parallel", sequence_parallel)
        self.gather_dim = arguments.sequence_dim("gather_dim", gather_dim)
        self.sequence_sizes = arguments.sequence_sizes(sequence_sizes, self.group)

    def forward(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return linear_of_replicated(
                x, self.weight, self.bias, group=self.group, schedule=self.schedule, debug=self.debug
            )
        return functional.all_gather_linear(
            x, self.weight, self.bias,
            group=self.group, gather_dim=self.gather_dim, sizes=self.sequence_sizes, schedule=self.schedule,
            debug=self.debug,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}, gather_dim={self.gather_dim}"


class RowParallelLinear(_ShardedLinear):
    """y = sum over ranks of x @ weight.T, + bias; x holds this rank's features.

    weight [out_features, feature_sizes[rank]], bias [out_features], whole and the same on every rank
    sequence_parallel     y is this rank's part along `scatter_dim`; dy is gathered once for dx and dw
    without               y is whole on every rank; backward sends nothing

    scatter_dim: 0 for [sequence, batch, features], 1 for [batch, sequence, features]. feature_sizes: in_features on
    every rank, by default as even as can be. sequence_sizes: y's length on every rank, by default as even as can be; it
    may be set anew between calls.
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
        debug: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, group, feature_sizes, schedule, debug)
        self.sequence_parallel = arguments.flag("sequence_parallel", sequence_parallel)
        self.scatter_dim = arguments.sequence_dim("scatter_dim", scatter_dim)
        self.sequence_sizes = arguments.sequence_sizes(sequence_sizes, self.group)

    def forward(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return functional.linear_all_reduce(
                x, self.weight, self.bias, group=self.group, schedule=self.schedule, debug=self.debug
            )
        return functional.linear_reduce_scatter(
            x, self.weight, self.bias,
            group=self.group, scatter_dim=self.scatter_dim, sizes=self.sequence_sizes, schedule=self.schedule,
            debug=self.debug,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}, scatter_dim={self.scatter_dim}"


class FSDPLinear(_ShardedLinear):
    """y = x @ all_gather(weight).T + bias; x and y are this rank's own rows.

    weight [feature_sizes[rank], in_features], bias [out_features], whole and the same on every rank
    forward gathers the weight and keeps only its shard; backward gathers it again and reduce-scatters dw

    feature_sizes: out_features on every rank, by default as even as can be.
    """

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
        debug: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, group, feature_sizes, schedule, debug)

    def forward(self, x: Tensor) -> Tensor:
        return functional.fsdp_linear(
            x, self.weight, self.bias,
            group=self.group, sizes=self.feature_sizes, schedule=self.schedule, debug=self.debug,
        )  # fmt: skip


class _GateUpLinear(ColumnParallelLinear):
    # Two column-parallel matrices below each other, gate's shard then up's: one gather of x serves both.

    def reset_parameters(self) -> None:
        # What two nn.Linear would draw, one after the other.
        sizes = [size // 2 for size in self.feature_sizes]
        halves = zip(self.weight.chunk(2), (None, None) if self.bias is None else self.bias.chunk(2), strict=True)
        for weight, bias in halves:
            self._draw(weight, bias, self.out_features // 2, sizes)


class ParallelMLP(nn.Module):
    """Two parallel linears with an activation between them, which needs nothing from other ranks.

    gelu      down_proj(gelu(up_proj(x)))
    swiglu    down_proj(silu(gate) * up), gate and up being the halves of gate_up_proj(x)

    up_proj and gate_up_proj are ColumnParallelLinear, down_proj is RowParallelLinear. gate_up_proj.weight is this
    rank's rows of the gate's [intermediate_size, hidden_size] matrix, then its rows of up's: x is gathered once for
    both. x and y are [S_X, ..., hidden_size], S along `sequence_dim` (0 or 1); whole without sequence_parallel.
    feature_sizes splits intermediate_size; the other arguments are those of the linears.
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
        debug: bool = False,
    ) -> None:
        super().__init__()
        if activation not in ("gelu", "swiglu"):
            raise ValueError(f"activation must be gelu or swiglu, got {activation!r}")
        arguments.sequence_dim("sequence_dim", sequence_dim)
        hidden_size, intermediate_size = arguments.features(
            hidden_size=hidden_size, intermediate_size=intermediate_size
        )  # fmt: skip
        group = groups.resolve(group)
        length = {"world_size": group.size(), "length": intermediate_size}
        if feature_sizes is None:
            feature_sizes = even_sizes(intermediate_size, group.size())
        feature_sizes = check_sizes(feature_sizes, **length, name="feature_sizes")
        self.activation = activation
        options: dict[str, Any] = {
            "group": group,
            "sequence_parallel": sequence_parallel,
            "sequence_sizes": sequence_sizes,
            "schedule": schedule,
            "debug": debug,
        }
        wide: dict[str, Any] = {**options, "gather_dim": sequence_dim}
        if activation == "swiglu":
            twice = [2 * size for size in feature_sizes]
            self.gate_up_proj = _GateUpLinear(
                hidden_size, 2 * intermediate_size, bias, device, dtype, feature_sizes=twice, **wide
            )
        else:
            self.up_proj = ColumnParallelLinear(
                hidden_size, intermediate_size, bias, device, dtype, feature_sizes=feature_sizes, **wide
            )
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias, device, dtype,
            scatter_dim=sequence_dim, feature_sizes=feature_sizes, **options,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if self.activation == "gelu":
            return self.down_proj(F.gelu(self.up_proj(x)))  # type: ignore[no-any-return]
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]
