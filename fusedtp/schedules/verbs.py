"""What the ops are made of, written once for all schedules: a gather that products consume, a scatter that a product
feeds, and both (`prepared`).

A schedule gives verbs. `gather` takes this rank's part of a matrix to all ranks; any number of products consume its
rows as they arrive, or it is handed out whole. `scatter` takes what each rank has of a sum to whom it belongs, who adds
it up. They are made for a task, which decides their room in the arenas, and then used any number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from ..op import Task

Operands = Sequence[Any]


class Epilogue(NamedTuple):
    """What is done where a result is rounded: a bias is added, an element a column of what was asked for."""

    bias: Tensor | None = None


PLAIN = Epilogue()


@dataclass(frozen=True, slots=True)
class Product:
    """A product with X, the gathered matrix.

    rows: X @ other; outer: X.T @ other. transposed: the result is the transposed one, [other's columns, ..].
    """

    kind: Literal["rows", "outer"]
    other: Tensor
    epilogue: Epilogue = PLAIN
    transposed: bool = False


class Gather(Protocol):
    """One gather of a task. x: this rank's part, the same in every call of a run."""

    def start(self, x: Tensor) -> None:
        """Send this rank's part; it may wait for the first product, which can do it by the way."""

    def start_beside(self, x: Tensor) -> None:
        """Send this rank's part now, beside what is issued next."""

    def multiply(self, x: Tensor, products: Sequence[Product]) -> list[Tensor]:
        """The products, as parts arrive. The op ends with it."""

    def whole(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """All ranks' parts, in `out`, which has the own one, or in a new tensor. The op ends with it."""


class Scatter(Protocol):
    """One scatter of a task: to the owners, or of everything to everybody. own: what was `put`, if anything was."""

    def multiply(self, a: Tensor, b: Tensor) -> None:
        """This rank's terms are a @ b."""

    def put(self, x: Tensor) -> None:
        """This rank's terms are x."""

    def sum(self, epilogue: Epilogue, *, own: Tensor | None, last: bool) -> Tensor:
        """The own part of the sum over ranks, and the epilogue. last: the op ends with it."""

    def sum_into(self, epilogue: Epilogue, out: Tensor, gather: Any, *, own: Tensor | None) -> None:
        """The own part of the sum, and the epilogue, in its place in `out`, and on its way to all by `gather`."""


class Verbs(Protocol):
    """A schedule on one rank, for one task."""

    rank: int
    world_size: int

    def gather(
        self, sizes: Sequence[int], other: int, dim: int, *, products: Sequence[str] = (), result: int = 0
    ) -> Gather:
        """Of a matrix of which this rank has `sizes[rank]` rows of `other` elements, or columns with dim 1.

        products: kinds of those to come; result: how many columns the first of them has.
        """

    def scatter(self, sizes: Sequence[int], other: int, dim: int, *, to_all: bool, multiplies: bool) -> Scatter:
        """Of a sum of which rank r has `sizes[r]` rows of `other` elements, or columns with dim 1; all, `to_all`."""

    def one_shot(self, task: Task) -> bool:
        """Whether an all-reduce is one: all terms to everybody, or to owners who show their sums."""
