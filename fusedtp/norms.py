"""Norms at the end of a sum over ranks, on tensors: of the rounded sum y [.., N], along its last dim.

    rms_norm      y / sqrt(mean(y^2) + eps) * weight
    layer_norm    (y - mean(y)) / sqrt(var(y) + eps) * weight + bias

Means are float32, or float64 for float64, and the result is rounded once, to y's dtype. A row has the same bits on
every rank and beside any number of other rows.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

NormName: TypeAlias = Literal["rms_norm", "layer_norm"]
RMS_NORM, LAYER_NORM = NORMS = get_args(NormName)

# A block of rows is read three times: from the CPU's second cache, 512 KiB and more on the machines that torch runs on.
_BLOCK_BYTES = 256 << 10


def check_name(name: object) -> str:
    if not isinstance(name, str) or name not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {name!r}")
    return name


def check_eps(eps: object) -> float:
    if isinstance(eps, bool) or not isinstance(eps, float | int) or not 0 <= eps < math.inf:
        raise ValueError(f"norm_eps must be a number, 0 or greater and finite, got {eps!r}")
    return float(eps)


def check(name: object, weight: Any, bias: Any, eps: object) -> tuple[str, float]:
    """Return the name and eps of the norm that a function's arguments ask for; ValueError if they do not fit."""
    name, eps = check_name(name), check_eps(eps)
    if weight is None:
        raise ValueError("norm and norm_bias are for a norm, which takes a norm_weight: got None")
    if bias is not None and name != LAYER_NORM:
        raise ValueError(f"norm_bias is for norm={LAYER_NORM!r}, got one for {name!r}")
    return name, eps


def of(name: str, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the norm of y, differentiable."""
    if name == RMS_NORM:
        normed = F.rms_norm(y, weight.shape, weight, eps)
    else:
        normed = F.layer_norm(y, weight.shape, weight, bias, eps)
    # torch.autocast computes norms in float32.
    return normed if normed.dtype == y.dtype else normed.to(y.dtype)


def apply(name: str, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the norm of y [M, N], outside of any graph."""
    if name != RMS_NORM or not y.is_cpu or not y.numel():
        return of(name, y, weight, bias, eps)
    # torch's own norm passes over memory eight times on a CPU.
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    rows = max(1, _BLOCK_BYTES // (y.shape[1] * 4))
    for begin in range(0, y.shape[0], rows):
        block, made = y[begin : begin + rows], out[begin : begin + rows]
        accurate = block if y.dtype in (torch.float32, torch.float64) else block.float()
        scale = torch.linalg.vector_norm(accurate, dim=1, keepdim=True)
        scale.square_().div_(y.shape[1]).add_(eps).rsqrt_()
        if accurate is block:
            torch.mul(block, scale, out=made).mul_(weight)
        else:
            made.copy_(accurate.mul_(scale).mul_(weight))
    return out


def gradients(
    name: str, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dnormed: Tensor,
    needs: tuple[bool, bool, bool],
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of y, weight and bias, None if not needed; differentiable themselves in grad mode."""
    again = torch.is_grad_enabled()
    given = y, weight, bias
    if not again:
        given = tuple(  # type: ignore[assignment]
            None if each is None else each.detach().requires_grad_(needed)
            for each, needed in zip(given, needs, strict=True)
        )
    wanted = [each for each, needed in zip(given, needs, strict=True) if needed and each is not None]
    with torch.enable_grad():
        normed = of(name, given[0], given[1], given[2], eps)
        found = iter(torch.autograd.grad(normed, wanted, dnormed, create_graph=again))
    return [next(found) if needed else None for needed in needs]
