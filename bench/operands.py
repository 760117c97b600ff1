"""One rank's operands of a case, what it multiplies and must find, and the closure of a differentiable call on them.

Every rank draws the same whole x, w and dy, standard normal, from the case's seed and cuts its shards out of them (as
even as can be where W does not divide), so each can compare its own part of y, dx and dw with the unsharded products in
float64. Inputs of ones would let a chunk taken for another pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from fusedtp import reference
from fusedtp.shards import even_sizes

from .cases import Case
from .oracle import Product

# A list is one tensor that lies in several places, one below the other.
Results = tuple[Tensor | list[Tensor], ...]
Runner = Callable[[], Results]

# The dims along which x, w and y are split; y of an all-reduce is whole.
_SPLIT: dict[str, tuple[int, int, int | None]] = {
    "gather": (0, 0, 1),
    "scatter": (1, 1, 0),
    "all_reduce": (1, 1, None),
}


def device_here() -> torch.device:
    """The GPU of this process, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class Operands:
    """x, w and dy of `case`: this rank's shards, in the layout of the op, and whole. Making them sends nothing."""

    def __init__(self, case: Case, rank: int, device: torch.device) -> None:
        self.case, self.device = case, device
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.gathers = case.kind == "gather"
        self.m_sizes, self.n_sizes, self.k_sizes = (
            even_sizes(size, case.world_size) for size in (case.M, case.N, case.K)
        )
        self._generator = torch.Generator().manual_seed(case.seed)
        self.x_whole = self._normal(case.M, case.K)  # [M, K]
        self.w_whole = self._normal(case.N, case.K)  # [N, K]
        self._dy_whole: Tensor | None = None
        self._cut(rank)

    def _normal(self, rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, generator=self._generator).to(self.device, self.dtype)

    def _cut(self, rank: int) -> None:
        self.rank = rank
        self.x = self._own(0, self.x_whole, self.m_sizes, self.k_sizes)
        self.w = self._own(1, self.w_whole, self.n_sizes, self.k_sizes)
        self._dy: Tensor | None = None
        self._products: dict[str, Product] = {}

    def _own(self, which: int, whole: Tensor, *sizes: tuple[int, ...]) -> Tensor:
        dim = _SPLIT[self.case.kind][which]
        if dim is None:
            return whole
        return reference.chunk(whole, dim, self.rank, sizes[dim]).clone(memory_format=torch.contiguous_format)

    def of_rank(self, rank: int) -> Operands:
        """Another rank's, without drawing them again."""
        other = copy.copy(self)
        other._cut(rank)
        return other

    @property
    def dy_whole(self) -> Tensor:
        """The gradient of the whole y [M, N]. Drawn when a backward pass asks for it."""
        if self._dy_whole is None:
            self._dy_whole = self._normal(self.case.M, self.case.N)
        return self._dy_whole

    @property
    def dy(self) -> Tensor:
        """This rank's shard of it, sharded as y is."""
        if self._dy is None:
            self._dy = self._own(2, self.dy_whole, self.m_sizes, self.n_sizes)
        return self._dy

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """What this rank multiplies for y, dx or dw when all that is gathered is there."""
        if name == "y":
            return self.x_whole if self.gathers else self.x, self.w.t()
        dy = self.dy if self.gathers else self.dy_whole
        return (dy, self.w) if name == "dx" else (dy.t(), self.x_whole if self.gathers else self.x)

    def product(self, name: str) -> Product:
        """What this rank's part of y, dx or dw must be, made once."""
        if name not in self._products:
            a, b = self.factors(name)
            cut: tuple[int, ...] = (b.shape[0],)
            if name == ("dx" if self.gathers else "y"):
                # The sum over ranks of their products, and mostly this rank's rows of it.
                a, b, cut = (
                    (self.dy_whole, self.w_whole, self.n_sizes)
                    if self.gathers
                    else (self.x_whole, self.w_whole.t(), self.k_sizes)
                )
                if self.case.kind != "all_reduce":
                    a = reference.chunk(a, 0, self.rank, self.m_sizes)
            self._products[name] = Product(a, b, cut)
        return self._products[name]


def passes(
    call: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    w: Tensor,
    operands: Operands,
    direction: str,
    local: Callable[[Tensor], Tensor] | None = None,
) -> Runner:
    """The closure of one direction of y = call(x, w). backward differentiates one y again and again: collective here.

    `local` takes this rank's shard out of a gradient that is not a plain tensor.
    """

    def forward() -> Results:
        with torch.no_grad():
            return (call(x, w),)

    if direction == "forward":
        return forward
    leaves = [each if each.requires_grad else each.detach().requires_grad_() for each in (x, w)]

    def differentiate(y: Tensor, keep: bool) -> Results:
        grads = torch.autograd.grad(y, leaves, operands.dy, retain_graph=keep)
        return grads if local is None else tuple([local(grad) for grad in grads])

    def both() -> Results:
        with torch.enable_grad():
            y = call(*leaves)
        return (y.detach(), *differentiate(y, False))

    if direction == "both":
        return both
    with torch.enable_grad():
        y = call(*leaves)
    return lambda: differentiate(y, True)
