"""Norms in a tensor-parallel model: their parameters are whole on every rank, what they normalize is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..calls import arguments, dispatch
from ..calls.parameters import local
from .linears import check_mesh
from .shared import Derived, Sum, derived, replicate


class FusedNormParallel(ParallelStyle):
    """A norm whose input is split over a 1-D mesh: by tokens, between a scatter and a gather, or by heads.

    schedule    of the all-reduce: auto, fused, decomposed or unfused
    debug       compare it with the other ranks' before it runs

    The module goes on normalizing what it is given, this rank's part; what it normalizes along must be whole. Its
    parameters become DTensors, Replicate(), and each rank's part of their gradients is added up in backward: one
    all-reduce for each parameter. Any module will do that reads its own parameters as attributes, like nn.LayerNorm,
    nn.RMSNorm and those of Hugging Face.
    """

    def __init__(self, *, schedule: str = "auto", debug: bool = False) -> None:
        super().__init__()
        dispatch.check_schedule(schedule)
        self.schedule, self.debug = schedule, arguments.flag("debug", debug)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh(device_mesh)
        if isinstance(module, FusedNorm):
            raise NotImplementedError(f"{type(self).__name__}: this {type(module).__name__} has a style already")
        names = tuple(name for name, each in module.named_parameters(recurse=False))
        if not names or any(True for _ in module.children()):
            raise NotImplementedError(
                f"{type(self).__name__} is for a norm with parameters of its own and no modules in it, got "
                f"{type(module).__name__}"
            )
        replicate(module, device_mesh, self.src_data_rank)
        values = tuple((name, _Own(name)) for name in names)
        module.__class__ = derived((FusedNorm, type(module)), values)
        module.gradients = Sum(device_mesh, self.schedule, self.debug)  # type: ignore[assignment]
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}(schedule={self.schedule!r})"


class FusedNorm(Derived):
    """What FusedNormParallel makes of a norm: its code reads this rank's parameters, whose gradients are summed."""

    gradients: Sum
    # How the call under way reads parameters: "part" of an input that is split, "whole" of one that every rank has.
    # Between calls an attribute is the parameter itself, which is what who looks for parameters expects: fully_shard.
    reads = ""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the norm's own; of a DTensor, what each rank has of it."""
        if not isinstance(input, DTensor):
            return self._own("part", input, args, kwargs)
        (placement,) = input.placements
        if isinstance(placement, Shard) and placement.dim % input.ndim == input.ndim - 1:
            raise ValueError(f"{type(self).__name__}: input must not be sharded along its last dim, got {placement}")
        out = self._own("whole" if placement.is_replicate() else "part", input.to_local(), args, kwargs)
        return DTensor.from_local(
            out, input.device_mesh, input.placements, run_check=False, shape=input.shape, stride=input.stride()
        )

    def _own(self, reads: str, input: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.reads = reads
        try:
            return super().forward(input, *args, **kwargs)
        finally:
            self.reads = ""


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
