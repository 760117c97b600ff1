"""Parts shared by styles: whole parameters that ranks use separately, and classes derived from a module's own class.

Every rank has such a parameter whole and uses it for its own part of the work. Gradients are added up over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor

from ..calls import operators
from ..calls.parameters import local, watch_all
from .linears import FusedColwiseLinear, FusedColwiseParallel


@dataclass(frozen=True)
class Sum:
    """The mesh and the schedule by which gradients are added up."""

    mesh: DeviceMesh
    schedule: str = "auto"

    def use(self, parameter: Tensor) -> Tensor:
        """Return the whole parameter for this rank's own use; backward adds up the ranks' gradients."""
        whole = local(parameter, parameter.ndim)
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            return whole
        group = self.mesh.get_group().group_name
        own = operators.as_it_is(whole.reshape(1, -1), group, self.schedule)
        return own.view(whole.shape)


class FusedSharedLinear(FusedColwiseLinear):
    """A FusedColwiseLinear whose weight and bias are whole on every rank; a rank uses its own rows of them."""

    gradients: Sum
    own_rows: slice
    _weight, _bias = Replicate(), Replicate()

    def own(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's rows of weight and bias."""
        weight, bias = (
            None if each is None else self.gradients.use(each)[self.own_rows] for each in (self.weight, self.bias)
        )
        assert weight is not None
        return weight, bias


def replicate(module: nn.Module, device_mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Make a module's own parameters DTensors, Replicate()."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        value = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=src_data_rank)
        setattr(module, name, nn.Parameter(value, requires_grad=parameter.requires_grad))


def share(style: FusedColwiseParallel, linear: nn.Linear, device_mesh: DeviceMesh, own_rows: slice) -> None:
    """Give an nn.Linear with whole parameters the style: this rank uses the rows `own_rows`."""
    style.check(linear, device_mesh)
    linear.__class__ = FusedSharedLinear
    assert isinstance(linear, FusedSharedLinear)
    setattr(linear, "_distribute_module_applied", True)  # noqa: B010
    linear.layouts, linear.own_rows = style.layouts_on(device_mesh), own_rows
    linear.gradients = Sum(device_mesh, style.options.schedule)
    watch_all(linear)


class Derived(nn.Module):
    """A module whose class was derived from its own class when needed; the new class has no importable name."""

    # The arguments of `derived`.
    made_of: tuple[tuple[type[nn.Module], ...], tuple[tuple[str, Any], ...]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        _, _, *state = made
        return (_anew, self.made_of, *state)


@cache
def derived(bases: tuple[type[nn.Module], ...], values: tuple[tuple[str, Any], ...] = ()) -> type[nn.Module]:
    """Return a class with these bases, one of them a `Derived`, and these class attributes."""
    kind = next(each for each in bases if not issubclass(each, Derived))
    return type(f"Fused{kind.__name__}", bases, {**dict(values), "made_of": (bases, values)})


def _anew(bases: Any, values: Any) -> nn.Module:
    cls = derived(bases, values)
    return cls.__new__(cls)
