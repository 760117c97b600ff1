"""Norms and dropouts in a tensor-parallel model: parameters are whole on every rank, tokens are split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from ..calls import arguments
from ..calls.parameters import as_dtensor, local
from ..choose import dispatch
from ..scaled import check_dense
from .linears import Derived, Sum, Tokens, check_mesh, convert, derived, distribute, met_before, positive


class FusedNormParallel(ParallelStyle):
    """Style for a norm, or an nn.Dropout, of this rank's tokens: torch's SequenceParallel over a 1-D mesh.

    - `sequence_dim`: dim along which the tokens of a plain input are split, with the same number on every rank. A
      DTensor is redistributed so.
    - `use_local_output`: return this rank's tensor rather than a DTensor.
    - `schedule`: of the all-reduce: auto, fused, decomposed or unfused.

    The module normalizes this rank's part of its input. The dims that it normalizes over must be whole. Its parameters
    become DTensors, Replicate(). Backward adds up the ranks' gradients of each parameter by one all-reduce.

    Any module works that has no child modules and reads its own parameters as attributes, such as nn.LayerNorm,
    nn.RMSNorm and Hugging Face's norms. An nn.Dropout draws for the whole sequence, and each rank keeps its part. So
    ranks with the same seed stay in step, however many tokens each has.
    """

    tokens: Tokens | None = None

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False, schedule: str = "auto") -> None:
        super().__init__()
        if not isinstance(sequence_dim, int) or isinstance(sequence_dim, bool):
            raise TypeError(f"sequence_dim must be an int, got {sequence_dim!r}")
        dispatch.check_schedule(schedule)
        self.split: Shard | None = Shard(sequence_dim)
        self.use_local_output = arguments.flag("use_local_output", use_local_output)
        self.schedule = schedule

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh(device_mesh)
        name, kind = type(self).__name__, type(module).__name__
        if isinstance(module, FusedNorm):
            raise NotImplementedError(f"{name}: this {kind} has a style already")
        if any(True for _ in module.children()) or (
            isinstance(module, nn.modules.dropout._DropoutNd) and type(module) is not nn.Dropout
        ):
            raise NotImplementedError(f"{name} is for nn.Dropout and for a norm with no modules in it, got {kind}")
        if reason := met_before(module):
            raise NotImplementedError(f"{name} is for nn.Dropout and for norms, got {reason}")
        names = tuple(name for name, each in module.named_parameters(recurse=False))
        distribute(module, device_mesh, self.src_data_rank)
        values = tuple((name, _Own(name)) for name in names)
        cls = derived((FusedDropout if type(module) is nn.Dropout else FusedNorm, type(module)), values)
        attributes = {name: getattr(self, name) for name in ("split", "tokens", "use_local_output")}
        return convert(module, cls, gradients=Sum(device_mesh, self.schedule), **attributes)

    def __repr__(self) -> str:
        tokens = "" if self.split is None else f"sequence_dim={self.split.dim}, "
        tokens += f"use_local_output={self.use_local_output}, " * (self.split is not None)
        return f"{type(self).__name__}({tokens}schedule={self.schedule!r})"


class AsGiven(FusedNormParallel):
    """Style like FusedNormParallel, for inputs that are DTensors in any layout or plain tensors whole on every rank."""

    def __init__(self, *, schedule: str = "auto") -> None:
        super().__init__(schedule=schedule)
        self.split = None


class FusedNorm(Derived):
    """Class that FusedNormParallel gives a norm: the norm's code reads this rank's parameters; gradients are summed."""

    gradients: Sum
    # Split of the tokens. None: that of the input; a plain input is whole.
    split: Shard | None
    tokens: Tokens | None
    use_local_output: bool
    # How the running call reads parameters: "part" if the input is split, "whole" if every rank has all of it. Between
    # calls an attribute is the parameter itself, as fully_shard expects.
    reads = ""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the norm's own forward on this rank's part."""
        x = self._received(input)
        if not isinstance(x, DTensor):
            return self._own("whole", x, args, kwargs)
        (placement,) = x.placements
        if isinstance(placement, Shard) and placement.dim % x.ndim == x.ndim - 1:
            raise ValueError(f"{type(self).__name__}: input must not be sharded along its last dim, got {placement}")
        out = self._own("whole" if placement.is_replicate() else "part", x.to_local(), args, kwargs)
        if self.use_local_output:
            return out
        return as_dtensor(out, x.device_mesh, placement, (*x.shape[:-1], out.shape[-1]))

    def _received(self, input: Tensor) -> Tensor:
        # Return the input as a DTensor in the style's layout; unchanged if the style has none.
        check_dense("input", input)
        is_whole = self.tokens is not None and self.tokens.are_whole and not isinstance(input, DTensor)
        if self.split is None or is_whole:
            return input
        tokens = positive(self.split, input.ndim, "sequence_dim")
        if not isinstance(input, DTensor):
            return DTensor.from_local(input, self.gradients.mesh, [tokens], run_check=False)
        return input if input.placements == (tokens,) else input.redistribute(placements=[tokens])

    def _own(self, reads: str, input: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.reads = reads
        try:
            return super().forward(input, *args, **kwargs)
        finally:
            self.reads = ""


class FusedDropout(FusedNorm):
    """The class that FusedNormParallel gives an nn.Dropout: it drops the same elements as in one process."""

    p: float
    training: bool
    # Features of the whole, if a plain input has this rank's part of them; otherwise 0.
    num_features = 0

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's part of nn.Dropout's result for the whole input."""
        if self.num_features:
            whole = *input.shape[:-1], self.num_features
            return self._dropped(as_dtensor(input, self.gradients.mesh, Shard(input.ndim - 1), whole)).to_local()
        x = self._received(input)
        y = self._dropped(x) if isinstance(x, DTensor) else self._own("", x, args, kwargs)
        return y.to_local() if self.use_local_output and isinstance(y, DTensor) else y

    def _dropped(self, x: DTensor) -> Any:
        if not self.training:
            return x
        if x.device.type != "cpu":
            # On GPUs DTensor itself keeps the ranks' random states together.
            return F.dropout(x, self.p)
        noise = F.dropout(torch.ones(x.shape, dtype=x.dtype, device=x.device), self.p)
        own = distribute_tensor(noise, x.device_mesh, x.placements, src_data_rank=None).to_local()
        return x * as_dtensor(own, x.device_mesh, x.placements[0], tuple(x.shape))


@dataclass(frozen=True)
class _Own:
    # Descriptor of one of a norm's parameters, as the norm's code reads it.
    name: str

    def __get__(self, module: FusedNorm, owner: Any = None) -> Tensor:
        if self.name not in module._parameters:
            raise NotImplementedError(
                f"the {self.name} of this {type(module).__name__} cannot be computed before each call, as by "
                "torch.nn.utils.parametrize: its style adds up the ranks' gradients of the parameter itself"
            )
        parameter = module._parameters[self.name]
        assert parameter is not None
        if not module.reads:
            return parameter
        if module.reads == "part" and parameter.requires_grad:
            return module.gradients.use(parameter)
        whole = local(parameter, parameter.ndim)
        # The norm's own code saves this part, which does not count changes of the parameter: copy it.
        return whole.clone() if torch.is_grad_enabled() else whole

    def __set__(self, module: FusedNorm, value: Any) -> None:
        raise AttributeError(f"{self.name} is set as a parameter, to an nn.Parameter")
