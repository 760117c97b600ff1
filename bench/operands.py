"""One rank's operands of a case, and the closure of a differentiable call on them.

Every rank draws the same whole x, w and dy, standard normal, from the case's seed and cuts its shards out of them (as
even as can be where W does not divide), so each can compare its own part of y, dx and dw with the unsharded products in
float64. Inputs of ones would let a chunk taken for another pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp import reference
from fusedtp.shards import even_sizes

from .cases import Case

# A list is one tensor that lies in several places, one below the other.
Results = tuple[Tensor | list[Tensor], ...]
Runner = Callable[[], Results]


class Operands:
    """x, w and dy of `case`: this rank's shards, in the layout of the op, and whole. Making them sends nothing."""

    def __init__(self, case: Case, group: ProcessGroup, device: torch.device) -> None:
        self.case, self.group, self.device = case, group, device
        rank, world_size = group.rank(), group.size()
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.m_sizes, self.n_sizes, self.k_sizes = (even_sizes(size, world_size) for size in (case.M, case.N, case.K))
        self._generator = torch.Generator().manual_seed(case.seed)
        self.x_whole = self._normal(case.M, case.K)  # [M, K]
        self.w_whole = self._normal(case.N, case.K)  # [N, K]
        if case.op == "all_gather_matmul":
            self.x = reference.chunk(self.x_whole, 0, rank, self.m_sizes).clone()
            self.w = reference.chunk(self.w_whole, 0, rank, self.n_sizes).clone()
        else:
            self.x = reference.chunk(self.x_whole, 1, rank, self.k_sizes).contiguous()
            self.w = reference.chunk(self.w_whole, 1, rank, self.k_sizes).contiguous()
        self._dy: tuple[Tensor, Tensor] | None = None

    def _normal(self, rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, generator=self._generator).to(self.device, self.dtype)

    @property
    def dy(self) -> Tensor:
        """This rank's shard of the gradient of y, sharded as y is. Drawn when a backward pass asks for it."""
        return self._gradient()[0]

    @property
    def dy_whole(self) -> Tensor:
        """The gradient of the whole y [M, N]."""
        return self._gradient()[1]

    def _gradient(self) -> tuple[Tensor, Tensor]:
        if self._dy is None:
            whole, rank = self._normal(self.case.M, self.case.N), self.group.rank()
            mine = whole
            if self.case.op == "all_gather_matmul":
                mine = reference.chunk(whole, 1, rank, self.n_sizes).contiguous()
            elif self.case.op == "matmul_reduce_scatter":
                mine = reference.chunk(whole, 0, rank, self.m_sizes).clone()
            self._dy = mine, whole
        return self._dy


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
