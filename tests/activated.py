"""What a result after an activation, and its gradients, may be off by.

Bounds are those of `reference`, carried through f: where z may be off by e, f(z) may by L e and f'(z) by L2 e, L and L2
being the most that |f'| and |f''| are; a step of relu's may be on the other side where |z| <= e.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedtp import reference
from fusedtp.op import GATED

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"),
}  # fmt: skip
# At most 1.13 and 1.09 (gelu, at sqrt(2)), 1.10 (silu); of second derivatives 0.80 (gelu, at 0).
L, L2 = 1.14, 0.9
# Rounding inside of f, by what is subtracted there: eight roundings of terms up to 1 + |z|.
ROUNDINGS = 8


def _function(name: str) -> Callable[[Tensor], Tensor]:
    if name not in FUNCTIONS:
        raise KeyError(f"{name}: add its formula to FUNCTIONS, and raise L and L2 where |f'| or |f''| is more")
    return FUNCTIONS[name]


class Near:
    """Values in float64, and how far from them a result may be."""

    def __init__(self, value: Tensor, off: Tensor, dtype: torch.dtype) -> None:
        self.value, self.off, self.dtype = value, off, dtype
        self._eps = torch.finfo(dtype).eps
        self._eps_inside = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps

    def _made(self, value: Tensor, off: Tensor, roundings: int = 1) -> Near:
        return Near(value, off + roundings * self._eps * value.abs() + reference.underflow(self.dtype, 1), self.dtype)

    def times(self, other: Near) -> Near:
        """Both multiplied, and rounded."""
        off = self.value.abs() * other.off + self.off * other.value.abs() + self.off * other.off
        return self._made(self.value * other.value, off)

    def through(self, name: str) -> Near:
        """f of it, rounded."""
        inside = ROUNDINGS * self._eps_inside * (1 + self.value.abs())
        return self._made(_function(name)(self.value), L * self.off + inside)

    def slope(self, name: str) -> Near:
        """f' of it."""
        z = self.value.clone().requires_grad_()
        (slope,) = torch.autograd.grad(_function(name)(z).sum(), z)
        inside = ROUNDINGS * self._eps_inside * (1 + self.value.abs())
        jump = (self.value.abs() <= self.off).double() if name == "relu" else L2 * self.off
        return self._made(slope, jump + inside)


def near(x: Tensor) -> Near:
    """A tensor as it is."""
    return Near(x.double(), torch.zeros_like(x, dtype=torch.float64), x.dtype)


def product(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Near:
    """a @ b.T + bias, of which nothing is summed over ranks."""
    return Near(reference.matmul(a, b.t(), bias), reference.bound(a, b.t(), dtype, bias=bias, sum_dtype=dtype), dtype)


def results(name: str, zs: Sequence[Near]) -> list[Near]:
    """Every y."""
    if name not in GATED:
        return [z.through(name) for z in zs]
    return [zs[0].through(GATED[name]).times(zs[1])]


def gradients(name: str, dys: Sequence[Tensor], zs: Sequence[Near]) -> list[Near]:
    """Every dz."""
    if name not in GATED:
        return [near(dy).times(z.slope(name)) for dy, z in zip(dys, zs, strict=True)]
    (dy,), (gate, up), function = dys, zs, GATED[name]
    return [near(dy).times(up).times(gate.slope(function)), near(dy).times(gate.through(function))]


def contracted(dz: Sequence[Near], other: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of dz @ other, rounded after each of them."""
    dtype, sizes = dz[0].dtype, [each.value.shape[1] for each in dz]
    left, off, right = (
        torch.cat(each, dim) for each, dim in (([d.value for d in dz], 1), ([d.off for d in dz], 1), (list(other), 0))
    )
    # What dz is off by is contracted too; rounding that is of second order.
    allowed = reference.bound(left, right, dtype, k_sizes=sizes, sum_dtype=dtype)
    return reference.matmul(left, right), allowed + 1.01 * (off @ right.double().abs())
