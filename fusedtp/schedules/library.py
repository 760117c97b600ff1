"""The library's matmuls, as every schedule multiplies that has no kernel of its own for it."""

from __future__ import annotations

import torch
from torch import Tensor


def mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [M, K] @ b [K, N] (+ bias, [N] or as the result) -> [M, N]."""
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def mm_into(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out = a @ b (+ bias)."""
    if not out.numel():
        return
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def add_mm_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a @ b."""
    out.addmm_(a, b)
