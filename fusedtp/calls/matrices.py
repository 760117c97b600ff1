"""Tensors of a program with named dims, and matrix views of them for tasks.

Named dims let a weight be stored [N, K] if the notation says [K, N]: operands are permuted views, not transposed
copies. The dim that a collective gathers or scatters becomes the outermost of the rows or of the contraction: there the
ranks' parts are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from torch import Tensor

from ..op import ALL_GATHER_MATMUL, Op, numbered


@dataclass(frozen=True)
class Named:
    """A tensor of a program: its name, and the names and lengths of its dims in storage order."""

    name: str
    dims: tuple[str, ...]
    lengths: tuple[int, ...]

    def length(self, dim: str) -> int:
        return self.lengths[self.dims.index(dim)]

    def numel(self, dims: Sequence[str]) -> int:
        return math.prod([self.length(dim) for dim in dims])

    def order(self, dims: tuple[str, ...]) -> tuple[int, ...] | None:
        """Return the permutation that puts the dims in this order; None if they are in this order."""
        return None if dims == self.dims else tuple(self.dims.index(dim) for dim in dims)


# A tensor as blocks of its columns N: one block for each weight.
Blocks: TypeAlias = Sequence[Named]


@dataclass(frozen=True)
class Matrix:
    """A tensor seen as a matrix.

    - `name`: the tensor's name.
    - `order`: permutation of the dims, None for none.
    - `flat`: whether to flatten the dims to `shape`.
    - `shape`: [rows, cols] before the transpose.
    - `transposed`: whether to transpose last.
    """

    name: str
    order: tuple[int, ...] | None
    flat: bool
    shape: tuple[int, int]
    transposed: bool = False

    @cached_property
    def how(self) -> Literal["as it is", "transposed", "viewed"]:
        """Return the kind of view that `view` makes."""
        if self.flat or self.order not in (None, (1, 0)):
            return "viewed"
        return "as it is" if (self.order is None) != self.transposed else "transposed"

    @classmethod
    def of(cls, x: Named, rows: tuple[str, ...], cols: tuple[str, ...]) -> Matrix:
        """Return x as the matrix [rows, cols]. Each of the two is a list of dims."""
        flat = not len(rows) == len(cols) == 1
        return cls(x.name, x.order((*rows, *cols)), flat, (x.numel(rows), x.numel(cols)))

    def t(self) -> Matrix:
        """Return the transposed matrix."""
        return replace(self, transposed=not self.transposed)

    @property
    def size(self) -> tuple[int, int]:
        """Return [rows, cols]."""
        return self.shape[::-1] if self.transposed else self.shape

    def view(self, x: Tensor) -> Tensor:
        """Return the matrix view of a tensor. Copy it only if flattened dims are not contiguous."""
        x = x if self.order is None else x.permute(self.order)
        x = x.reshape(self.shape) if self.flat else x
        return x.t() if self.transposed else x


def outermost(names: tuple[str, ...], first: str) -> tuple[str, ...]:
    """Return the names with `first` in front, if it is one of them."""
    return (first, *(name for name in names if name != first)) if first in names else names


def flat_sizes(sizes: tuple[int, ...], names: tuple[str, ...], x: Named, dim: str) -> tuple[int, ...]:
    """Return every rank's length of x's flattened dims `names`, given every rank's length of the outermost `dim`."""
    per_index = x.numel([name for name in names if name != dim])
    return tuple(size * per_index for size in sizes)


def operands_of(
    op: Op, pairs: Sequence[tuple[Matrix, Matrix]], biases: Sequence[str | None], columns: Sequence[int],
    residual: Matrix | None, norm: Sequence[str],
) -> tuple[dict[str, Matrix | str], dict[str, tuple[int, int]]]:  # fmt: skip
    """Return the operands of a product by name, and their shapes. A bias has an element for each column."""
    operands: dict[str, Matrix | str] = {}
    for a, b, (left, right) in zip(numbered("a", len(pairs)), numbered("b", len(pairs)), pairs, strict=True):
        # What is gathered is one operand for all weights.
        if op is not ALL_GATHER_MATMUL or not operands:
            operands[a] = left
        operands[b] = right
    if residual is not None:
        operands["residual"] = residual
    shapes = {name: each.size for name, each in operands.items() if isinstance(each, Matrix)}
    for name, bias, length in zip(numbered("bias", len(biases)), biases, columns, strict=True):
        if bias is not None:
            operands[name], shapes[name] = bias, (1, length)
    for name in norm:
        operands[name], shapes[name] = name, (1, columns[0])
    return operands, shapes
