"""Base of the linear layers: their parameters are made, split, drawn, saved and loaded here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import groups
from .calls import arguments, autograd, dispatch, parameters
from .calls.call import Prepare
from .groups import Group
from .norms import Norm
from .options import Options
from .shards import check_sizes, chunk_sizes

Device = torch.device | str | int | None

# Prefix of a buffer's name; the length of every rank's shard follows.
_PADDED = "padded_sizes"


class ShardedLinear(parameters.Watched):
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
    ) -> None:
        super().__init__()
        dispatch.check_schedule(options.schedule)
        arguments.check_producer(options.producer, options.schedule)
        arguments.activation_of(options.activation, self._matrices)
        arguments.flag("bias", bias)
        arguments.parameter_options(device, dtype)
        self.group: ProcessGroup = groups.resolve(group)
        in_features, out_features = arguments.features(in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        made_in = dtype or torch.get_default_dtype()
        arguments.float8_of(options.float8, made_in, "parameters")
        self.options = options
        self.feature_sizes = self._sizes_of(feature_sizes, (out_features, in_features)[self._dim])
        if arguments.leaves_of(options, self.group.size(), made_in) > 0 and self._sums_features:
            arguments.check_even(options.order, self.feature_sizes)
        lead = (self._matrices,) * (self._matrices > 1)
        rows = out_features // self._matrices
        # How each matrix is split, and along which dims of the parameters.
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
        parameters.watch_all(self)
        # Each parameter's layout, and the DTensor spec that was last found to match it.
        self._lies = {name: parameters.Lies.of(each) for name, each in self.named_parameters()}
        self._known: dict[str, Any] = dict.fromkeys(self._lies)
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

    def _sizes_of(self, sizes: Sequence[int] | None, length: int) -> tuple[int, ...]:
        world_size = self.group.size()
        if sizes is None:
            return tuple(self._matrices * size for size in chunk_sizes(length // self._matrices, world_size))
        return check_sizes(sizes, world_size=world_size, length=length, name="feature_sizes")

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
        self, prepare: Prepare, x: Tensor, along: tuple[Any, ...] = (), residual: Tensor | None = None,
        norm: Norm | None = None,
    ) -> Any:  # fmt: skip
        for name, known in self._known.items():
            if known is None or getattr(self._parameters.get(name), "_spec", None) is not known:
                self._check_parameters()
                break
        if not self._is_padded:
            return autograd.apply(
                prepare, x, self.weight, self.bias, self.group, self.options, along, residual, norm, of_layer=True
            )
        size = self._sizes[self.group.rank()]
        weight = self._own("weight", self.weight, size, 2)
        bias = None if self.bias is None else self._own("bias", self.bias, size, 1)
        norm = None if norm is None else norm.map(lambda each: parameters.local(each, 1))
        return autograd.apply(prepare, x, weight, bias, self.group, self.options, along, residual, norm)

    def _check_parameters(self) -> None:
        for name, lies in self._lies.items():
            # `_parameters` lacks a computed parameter, such as that of a parametrization.
            self._known[name] = lies.check(name, getattr(self, name))

    def _own(self, name: str, parameter: Tensor, size: int, ndim: int) -> Tensor:
        value, dim = parameters.local(parameter, parameter.ndim), self._dims[name]
        return parameters.local(value if dim is None else value.narrow(dim, 0, size), ndim)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        stem = f"{prefix}{_PADDED}_"
        theirs = [key.removeprefix(stem) for key in state_dict if key.startswith(stem)]
        if theirs and not (self._is_padded and f"{prefix}{self._padded_name}" in state_dict):
            shards = theirs[0].replace("_", ", ")
            errors.append(
                f"{prefix}weight is padded for shards of ({shards}), this layer's are {self._sizes}: "
                "feature_sizes that are not as DTensor splits them hold for the same ranks only"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

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
        if (found := (dist.get_process_group_ranks(group), group.rank())) != (ranks, rank):
            raise ValueError(
                f"this {type(self).__name__} was made by rank {rank} of group {name!r} with ranks {ranks}, and here it "
                f"meets rank {found[1]} of {found[0]}: save its state_dict() by torch.distributed.checkpoint"
            )
        super().__setstate__({**state, "group": group})  # type: ignore[no-untyped-call]
        parameters.watch_all(self)
