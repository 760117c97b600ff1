"""Operands of every op of the table, and their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedtp.shards import even_sizes

# Rows, columns, contraction, and columns of the second product. FEW: few rows. TILES: several of the interpreter's
# tiles in each shard and direction. MANY: more rows than any schedule multiplies at once.
FEW, TILES, MANY = (13, 10, 9, 7), (300, 70, 9, 7), (800, 20, 9, 7)


class Given(NamedTuple):
    """One rank's operands and options, and its results in float64."""

    operands: tuple[Tensor | None, ...]
    options: dict[str, Any]
    results: list[Tensor]


class Whole:
    """All ranks' matrices, the same on each rank."""

    def __init__(self, rank: int, world_size: int, shape: tuple[int, int, int, int] = FEW) -> None:
        self.rank, self.world_size, self.shape = rank, world_size, shape
        self.rows = even_sizes(shape[0], world_size)
        self._random = torch.Generator().manual_seed(7)

    def matrix(self, *shape: int) -> Tensor:
        """Return a new matrix with float32 values."""
        return torch.randn(*shape, generator=self._random).double()

    def each(self, *shape: int) -> list[Tensor]:
        """Return one new matrix for each rank."""
        return [self.matrix(*shape) for _ in range(self.world_size)]


def _all_gather_matmul(whole: Whole) -> Given:
    M, N, K, R = whole.shape
    x, bias = whole.matrix(M, K), whole.matrix(N)
    b, right = whole.each(K, N)[whole.rank], whole.each(M, R)[whole.rank]
    operands = (x.split(whole.rows)[whole.rank], b, bias, right)
    return Given(operands, {"sizes": whole.rows}, [x @ b + bias, x.t() @ right])


def _matmul_reduce_scatter(whole: Whole) -> Given:
    M, N, K, R = whole.shape
    a, b, bias, x = whole.each(M, K), whole.each(K, N), whole.matrix(N), whole.matrix(M, R)
    left = whole.each(K, M)[whole.rank]
    total = sum(one @ other for one, other in zip(a, b, strict=True)) + bias
    residual = whole.each(whole.rows[whole.rank], N)[whole.rank]
    operands = (a[whole.rank], b[whole.rank], bias, left, x.split(whole.rows)[whole.rank], residual)
    return Given(operands, {"sizes": whole.rows}, [residual + total.split(whole.rows)[whole.rank], left @ x])


def _matmul_all_reduce(whole: Whole) -> Given:
    M, N, K, _ = whole.shape
    a, b, bias, residual = whole.each(M, K), whole.each(K, N), whole.matrix(N), whole.matrix(M, N)
    total = sum(one @ other for one, other in zip(a, b, strict=True)) + bias + residual
    return Given((a[whole.rank], b[whole.rank], bias, residual), {}, [total])


def _all_gather(whole: Whole) -> Given:
    M, K = whole.shape[:2]
    x = whole.matrix(M, K)
    return Given((x.split(whole.rows)[whole.rank],), {"sizes": whole.rows}, [x])


def _reduce_scatter(whole: Whole) -> Given:
    M, K = whole.shape[:2]
    x = whole.each(M, K)
    return Given((x[whole.rank],), {"sizes": whole.rows}, [torch.stack(x).sum(0).split(whole.rows)[whole.rank]])


def _all_reduce(whole: Whole) -> Given:
    M, K = whole.shape[:2]
    x = whole.each(M, K)
    return Given((x[whole.rank],), {}, [torch.stack(x).sum(0)])


OPERANDS: dict[str, Callable[[Whole], Given]] = {
    "all_gather_matmul": _all_gather_matmul,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "matmul_all_reduce": _matmul_all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
}
