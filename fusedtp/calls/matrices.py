"""The tensors of a program and the matrices that its tasks see in them.

Tensors carry the names of their dims, so that a weight may be stored [N, K] where the notation says [K, N]: operands
are permuted views, never transposed copies. What a collective joins or cuts is moved to the outermost place of its rows
(or of the contraction), because that is where ranks' parts lie one behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from torch import Tensor

from ..op import ALL_GATHER_MATMUL, Op


@dataclass(frozen=True)
class Named:
    """A tensor of a program: the names of its dims, in the order in which the tensor has them, and their lengths."""

    name: str
    dims: tuple[str, ...]
    lengths: tuple[int, ...]

    def length(self, dim: str) -> int:
        return self.lengths[self.dims.index(dim)]

    def numel(self, dims: Sequence[str]) -> int:
        return math.prod([self.length(dim) for dim in dims])

    def order(self, dims: tuple[str, ...]) -> tuple[int, ...] | None:
        """The permutation that puts the dims in this order; None for the one that they are in."""
        return None if dims == self.dims else tuple(self.dims.index(dim) for dim in dims)


# A tensor by the blocks of its columns N, of which there is one, or one for each of several weights.
Blocks: TypeAlias = Sequence[Named]


@dataclass(frozen=True)
class Matrix:
    """A tensor seen as a matrix: its dims in an `order`, flattened to `shape` (`flat`), and then `transposed`."""

    name: str
    order: tuple[int, ...] | None
    flat: bool
    shape: tuple[int, int]
    transposed: bool = False

    @cached_property
    def how(self) -> Literal["as it is", "transposed", "viewed"]:
        """What `view` amounts to."""
        if self.flat or self.order not in (None, (1, 0)):
            return "viewed"
        return "as it is" if (self.order is None) != self.transposed else "transposed"

    @classmethod
    def of(cls, x: Named, rows: tuple[str, ...], cols: tuple[str, ...]) -> Matrix:
        """x as [rows, cols], each a flattened list of dims."""
        flat = not len(rows) == len(cols) == 1
        return cls(x.name, x.order((*rows, *cols)), flat, (x.numel(rows), x.numel(cols)))

    def t(self) -> Matrix:
        """The transposed one."""
        return replace(self, transposed=not self.transposed)

    @property
    def size(self) -> tuple[int, int]:
        """[rows, cols]."""
        return self.shape[::-1] if self.transposed else self.shape

    def view(self, x: Tensor) -> Tensor:
        """A copy only where dims do not lie one behind the other."""
        x = x if self.order is None else x.permute(self.order)
        x = x.reshape(self.shape) if self.flat else x
        return x.t() if self.transposed else x


def outermost(names: tuple[str, ...], first: str) -> tuple[str, ...]:
    """The names with `first` in front, if it is one of them."""
    return (first, *(name for name in names if name != first)) if first in names else names


def flat_sizes(sizes: tuple[int, ...], names: tuple[str, ...], x: Named, dim: str) -> tuple[int, ...]:
    """The ranks' lengths of x's dims `names` flattened into one; `sizes`: their lengths of `dim`, the outermost one."""
    per_index = x.numel([name for name in names if name != dim])
    return tuple(size * per_index for size in sizes)


def in_order(
    op: Op, pairs: Sequence[tuple[Matrix, Matrix]], biases: Sequence[str | None], columns: Sequence[int],
    residual: Matrix | None, norm: Sequence[str | None],
) -> tuple[list[Matrix | str | None], tuple[tuple[int, int] | None, ...]]:  # fmt: skip
    """The operands of a product in the op's order, and their shapes; a bias has one element for each column."""
    none = (None, None)
    added = [none if bias is None else (bias, (1, length)) for bias, length in zip(biases, columns, strict=True)]
    (a, b), *others = [((a, a.size), (b, b.size)) for a, b in pairs]
    whole = bool(others or norm) or residual is not None
    given: list[Any] = [a, b, added[0], *([none] * (op.operands - 3) if whole else ())]
    if residual is not None:
        given[-1] = residual, residual.size
    for i, (a, b) in enumerate(others, 1):
        given += [b, added[i]] if op is ALL_GATHER_MATMUL else [a, b, none][: op.block]
    given += [none if name is None else (name, (1, columns[0])) for name in norm]
    operands, shapes = zip(*given, strict=True)
    return list(operands), shapes if whole or biases[0] is not None else shapes[:2]
