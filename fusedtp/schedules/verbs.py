"""What the ops are made of, written once for all schedules: a gather that products consume, a scatter that a product
feeds, and both (`prepared`).

A schedule provides these two verbs. `gather` sends this rank's part of a matrix to all ranks; any number of products
consume the rows as they arrive, or the matrix is handed out whole. `scatter` sends each rank's terms of a sum to their
owners, who add them up. Both are made for a task, which decides their room in the arenas, and then used any number of
times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from ..norms import Norm
from ..op import Task
from ..scaled import Matrix

Operands = Sequence[Any]


class Epilogue(NamedTuple):
    """What is done where a result is rounded: a bias is added, one element for each column of the result asked for, and
    a residual, which lies as this rank's part of the result.

    activation: of a product, or a gated one of two, which has one result ("" for none). If it `keeps` them, the
    products themselves are results too, behind the others. norm: of the rows of a sum, a result behind it.
    """

    bias: Tensor | None = None
    residual: Tensor | None = None
    activation: str = ""
    keeps: bool = False
    norm: Norm | None = None


PLAIN = Epilogue()


class Product(NamedTuple):
    """A product with X, the gathered matrix.

    rows: X @ other; outer: X.T @ other. transposed: the result is transposed, [other's columns, ..].
    """

    kind: Literal["rows", "outer"]
    other: Matrix
    epilogue: Epilogue = PLAIN
    transposed: bool = False


class Gather(Protocol):
    """One gather of a task. x: this rank's part, the same in every call of a run. Of float8 the scales travel
    with their rows.
    """

    def start(self, x: Matrix) -> None:
        """Send this rank's part, now or with the first product, whose kernel may do it."""

    def start_beside(self, x: Tensor) -> None:
        """Send this rank's part now, beside what is issued next."""

    def multiply(self, x: Matrix, products: Sequence[Product]) -> list[Tensor]:
        """The products, as parts arrive, with their epilogues, whose activation is the same. The op ends with it."""

    def whole(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """All ranks' parts, in `out`, which has the own one, or in a new tensor. The op ends with it."""


class Scatter(Protocol):
    """One scatter of a task: to the owners, or of everything to everybody. own: what was `put`, if anything was."""

    def multiply(self, terms: Sequence[tuple[Matrix, Matrix]]) -> None:
        """This rank's terms are the sum of these a @ b."""

    def put(self, x: Tensor) -> None:
        """This rank's terms are x."""

    def sum(self, epilogue: Epilogue, *, own: Tensor | None, last: bool) -> list[Tensor]:
        """This rank's part of the sum over ranks, with the epilogue, and its norm, where one is asked for. last: the op
        ends with it.
        """

    def sum_into(self, epilogue: Epilogue, out: Tensor, gather: Any, *, own: Tensor | None) -> None:
        """Put this rank's part of the sum, with the epilogue but no norm, in its place in `out`, and send it to all by
        `gather`.
        """


class Verbs(Protocol):
    """A schedule on one rank, for one task.

    where: where it does an epilogue, in words; by_host: whether the host makes the protocol's steps, else kernels do.
    sent_by: how the last run sent what it gathered, or "". layout: what it needs of the arenas and of the signals, if
    it shares memory.
    """

    rank: int
    world_size: int
    where: str
    by_host: bool
    sent_by: str
    layout: Any

    def gather(
        self, sizes: Sequence[int], other: int, dim: int, *, products: Sequence[str] = (), result: int = 0,
        beside: bool = False, sums: bool = False,
    ) -> Gather:  # fmt: skip
        """A gather of a matrix of which rank r has `sizes[r]` rows of `other` elements, or columns with dim 1.

        products: the kinds of the products to come; result: how many columns those like the first one have in all.
        beside: it is under way during something else (`start_beside`). sums: of sums that a scatter of the task makes
        (`sum_into`), in the result's dtype.
        """

    def scatter(self, sizes: Sequence[int], other: int, dim: int, *, to_all: bool, multiplies: bool) -> Scatter:
        """A scatter of a sum of which rank r owns `sizes[r]` rows of `other` elements, or columns with dim 1; with
        `to_all` every rank owns all.
        """

    def one_shot(self, task: Task) -> bool:
        """Whether an all-reduce sends all terms to every rank; else to owners, who then send out their sums."""

    def end(self) -> None:
        """Called behind the last stage, if it shares memory."""
