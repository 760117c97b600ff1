"""Norms and dropouts in a tensor-parallel model: parameters are whole on every rank, the tokens are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from ..calls import arguments, dispatch
from ..calls.parameters import local
from ..scaled import check_dense
from .linears import as_dtensor, check_mesh, met_before, positive
from .shared import Derived, Sum, derived, replicate


class FusedNormParallel(ParallelStyle):
    """A norm, or an nn.Dropout, of this rank's tokens: torch's SequenceParallel over a 1-D mesh.

    sequence_dim      along which the tokens of a plain input are split, as many on every rank; a DTensor is laid out so
    use_local_output  return this rank's tensor rather than a DTensor
    schedule          of the all-reduce: auto, fused, decomposed or unfused

    The module goes on normalizing what it is given, this rank's part; what it normalizes along must be whole. Its
    parameters become DTensors, Replicate(), and each rank's part of their gradients is added up in backward: one
    all-reduce for each parameter. Any module will do that has no modules in it and reads its own parameters as
    attributes, like nn.LayerNorm, nn.RMSNorm and those of Hugging Face. An nn.Dropout draws for the whole sequence, and
    each rank keeps its part: ranks that were seeded alike stay so, however many tokens each has.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False, schedule: str = "auto") -> None:
        super().__init__()
        if not isinstance(sequence_dim, int) or isinstance(sequence_dim, bool):
            raise TypeError(f"sequence_dim must be an int, got {sequence_dim!r}")
        dispatch.check_schedule(schedule)
        self.tokens: Shard | None = Shard(sequence_dim)
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
        replicate(module, device_mesh, self.src_data_rank)
        values = tuple((name, _Own(name)) for name in names)
        made: Any = module
        made.__class__ = derived((FusedDropout if kind == "Dropout" else FusedNorm, type(module)), values)
        made._distribute_module_applied = True
        made.gradients = Sum(device_mesh, self.schedule)
        made.tokens, made.use_local_output = self.tokens, self.use_local_output
        return module

    def __repr__(self) -> str:
        tokens = "" if self.tokens is None else f"sequence_dim={self.tokens.dim}, "
        tokens += f"use_local_output={self.use_local_output}, " * (self.tokens is not None)
        return f"{type(self).__name__}({tokens}schedule={self.schedule!r})"


class AsGiven(FusedNormParallel):
    """The same of a module that is given either DTensors, in any layout, or plain tensors that every rank has whole."""

    def __init__(self, *, schedule: str = "auto") -> None:
        super().__init__(schedule=schedule)
        self.tokens = None


class FusedNorm(Derived):
    """What FusedNormParallel makes of a norm: its code reads this rank's parameters, whose gradients are summed."""

    gradients: Sum
    # How tokens are split; None where that is as the input says, and a plain one is whole.
    tokens: Shard | None
    use_local_output: bool
    # How the call under way reads parameters: "part" of an input that is split, "whole" of one that every rank has.
    # Between calls an attribute is the parameter itself, which is what who looks for parameters expects: fully_shard.
    reads = ""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the norm's own, of what each rank has."""
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
        # The input as a DTensor, laid out as the style says; as it is where the style says nothing.
        check_dense("input", input)
        if self.tokens is None:
            return input
        tokens = positive(self.tokens, input.ndim, "sequence_dim")
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
    """What FusedNormParallel makes of an nn.Dropout: it drops what it would drop in one process."""

    p: float
    training: bool
    # Of the whole, where a plain input is this rank's features.
    num_features = 0

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As nn.Dropout's of the whole, this rank's part of that."""
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
            # There DTensor itself keeps the ranks' random states together.
            return F.dropout(x, self.p)
        noise = F.dropout(torch.ones(x.shape, dtype=x.dtype, device=x.device), self.p)
        own = distribute_tensor(noise, x.device_mesh, x.placements, src_data_rank=None).to_local()
        return x * as_dtensor(own, x.device_mesh, x.placements[0], tuple(x.shape))


@dataclass(frozen=True)
class _Own:
    # One of a norm's parameters, as its code reads it.
    name: str

    def __get__(self, module: FusedNorm, owner: Any = None) -> Tensor:
        parameter = module._parameters[self.name]
        assert parameter is not None
        if not module.reads:
            return parameter
        if module.reads == "part" and parameter.requires_grad:
            return module.gradients.use(parameter)
        whole = local(parameter, parameter.ndim)
        # A change of the parameter does not count as one of its part, which the norm's own code keeps.
        return whole.clone() if torch.is_grad_enabled() else whole

    def __set__(self, module: FusedNorm, value: Any) -> None:
        raise AttributeError(f"{self.name} is set as a parameter, to an nn.Parameter")
