"""Norms at the end of a sum over ranks, on tensors: of the rounded sum y [.., N], along its last dim.

    rms_norm      y / sqrt(mean(y^2) + eps) * weight
    layer_norm    (y - mean(y)) / sqrt(var(y) + eps) * weight + bias

Means are float32, or float64 for float64, and the result is rounded once, to y's dtype. A row has the same bits on
every rank and beside any number of other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .op import LAYER_NORM, NORMS, RMS_NORM

# A block of rows is read three times: from the CPU's second cache, 512 KiB and more on the machines that torch runs on.
_BLOCK_BYTES = 256 << 10


class Norm(NamedTuple):
    """Norm, one of `op.NORMS`, with its parameters [N] and eps."""

    name: str
    eps: float
    weight: Tensor
    bias: Tensor | None = None

    def map(self, made_of: Callable[[Tensor], Tensor]) -> Norm:
        bias = None if self.bias is None else made_of(self.bias)
        return Norm(self.name, self.eps, made_of(self.weight), bias)

    def given(self) -> dict[str, Tensor]:
        """Return the parameters by name, without those that the norm lacks."""
        return {"norm_weight": self.weight} | ({} if self.bias is None else {"norm_bias": self.bias})


def check_name(name: object) -> str:
    if not isinstance(name, str) or name not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {name!r}")
    return name


def check_eps(eps: object) -> float:
    if isinstance(eps, bool) or not isinstance(eps, float | int) or not 0 <= eps < math.inf:
        raise ValueError(f"norm_eps must be a number, 0 or greater and finite, got {eps!r}")
    return float(eps)


def asked_for(name: object, weight: Any, bias: Any, eps: object) -> Norm:
    """Return the norm that a function's arguments ask for; ValueError if they do not fit."""
    name, eps = check_name(name), check_eps(eps)
    if weight is None:
        raise ValueError("norm and norm_bias are for a norm, which takes a norm_weight: got None")
    if bias is not None and name != LAYER_NORM:
        raise ValueError(f"norm_bias is for norm={LAYER_NORM!r}, got one for {name!r}")
    return Norm(name, eps, weight, bias)


def of(norm: Norm, y: Tensor) -> Tensor:
    """Return the norm of y, differentiable."""
    if norm.name == RMS_NORM:
        normed = F.rms_norm(y, norm.weight.shape, norm.weight, norm.eps)
    else:
        normed = F.layer_norm(y, norm.weight.shape, norm.weight, norm.bias, norm.eps)
    # torch.autocast computes norms in float32.
    return normed if normed.dtype == y.dtype else normed.to(y.dtype)


def apply(norm: Norm, y: Tensor) -> Tensor:
    """Return the norm of y [M, N], outside of any graph."""
    if norm.name != RMS_NORM or not y.is_cpu or not y.numel():
        return of(norm, y)
    # torch's own norm passes over memory eight times on a CPU.
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    rows = max(1, _BLOCK_BYTES // (y.shape[1] * 4))
    for begin in range(0, y.shape[0], rows):
        block, made = y[begin : begin + rows], out[begin : begin + rows]
        accurate = block if y.dtype in (torch.float32, torch.float64) else block.float()
        scale = torch.linalg.vector_norm(accurate, dim=1, keepdim=True)
        scale.square_().div_(y.shape[1]).add_(norm.eps).rsqrt_()
        if accurate is block:
            torch.mul(block, scale, out=made).mul_(norm.weight)
        else:
            made.copy_(accurate.mul_(scale).mul_(norm.weight))
    return out


def gradients(norm: Norm, y: Tensor, dnormed: Tensor, needs: tuple[bool, bool, bool]) -> list[Tensor | None]:
    """Return the gradients of y, weight and bias, None if not needed; differentiable themselves in grad mode."""
    again = torch.is_grad_enabled()
    given = y, norm.weight, norm.bias
    if not again:
        given = tuple(  # type: ignore[assignment]
            None if each is None else each.detach().requires_grad_(needed)
            for each, needed in zip(given, needs, strict=True)
        )
    wanted = [each for each, needed in zip(given, needs, strict=True) if needed and each is not None]
    with torch.enable_grad():
        normed = of(Norm(norm.name, norm.eps, given[1], given[2]), given[0])
        found = iter(torch.autograd.grad(normed, wanted, dnormed, create_graph=again))
    return [next(found) if needed else None for needed in needs]
