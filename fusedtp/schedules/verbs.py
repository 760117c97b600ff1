"""Building blocks of the ops, written once for all schedules: a gather that feeds products, and a scatter fed by one.

A schedule provides these two verbs; `forms` combines them. `gather` sends this rank's part of a matrix to all ranks:
any number of products consume the rows as they arrive, or the caller gets the whole matrix. `scatter` sends each rank's
terms of a sum to their owners, who add them up. Both are made for a task, which decides their room in the arenas, and
then used any number of times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from ..epilogue import NO_EPILOGUE, Epilogue
from ..op import Task
from ..scaled import Matrix

# A task's operands by name, see `op`.
Operands = Mapping[str, Any]


class Product(NamedTuple):
    """Product with X, the gathered matrix.

    `kind` "rows" is X @ other, "outer" is X.T @ other, "whole" is X itself in a new tensor. `transposed`: the result is
    transposed, [other's columns, ..]. Columns of the epilogue are the result's. `out`: the tensor for the result, after
    an activation; by default a new one.
    """

    kind: Literal["rows", "outer", "whole"]
    other: Matrix = None
    epilogue: Epilogue = NO_EPILOGUE
    transposed: bool = False
    out: Tensor | None = None


class GatherSpec(NamedTuple):
    """Matrix to gather, of which rank r has `sizes[r]` rows of `other` elements, or columns with dim 1.

    - `products`: the kinds of the products to come.
    - `result`: the columns of all products of the first kind together, from which the tile is chosen.
    - `beside`: whether the gather is in flight during something else (`start_beside`).
    - `sums`: whether it gathers sums of the task's scatter (`sum_into`), in the result's dtype.
    """

    sizes: tuple[int, ...]
    other: int
    dim: int
    products: tuple[str, ...] = ()
    result: int = 0
    beside: bool = False
    sums: bool = False


class ScatterSpec(NamedTuple):
    """Sum of which rank r owns `sizes[r]` rows of `other` elements, or columns with dim 1.

    - `multiplies`: whether terms are products, else tensors that are `put`.
    - `to_all`: every rank owns the whole sum.
    """

    sizes: tuple[int, ...]
    other: int
    dim: int
    multiplies: bool
    to_all: bool = False


class Gather(Protocol):
    """One gather of a task. x is this rank's part: pass the same x to every method. float8 scales travel with rows."""

    def start(self, x: Matrix) -> None:
        """Send this rank's part now, or leave it to the kernel of the first product."""

    def start_beside(self, x: Tensor) -> None:
        """Send this rank's part now, beside the work issued next."""

    def multiply(self, x: Matrix, products: Sequence[Product]) -> list[Tensor]:
        """Compute the products as parts arrive, with epilogues of the same activation."""

    def whole(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return all ranks' parts, in `out`, which has this rank's part already, or in a new tensor."""


class Scatter(Protocol):
    """Reduce-scatter, or with `to_all` all-to-all of terms, of one task. own: the input, if there is no matmul."""

    def multiply(self, terms: Sequence[tuple[Matrix, Matrix]]) -> None:
        """Set this rank's terms to the sum of these a @ b."""

    def put(self, x: Tensor) -> None:
        """Set this rank's terms to x."""

    def sum(
        self, epilogue: Epilogue, *, own: Tensor | None, last: bool, out: Tensor | None = None
    ) -> list[Tensor]:  # fmt: skip
        """Return this rank's part of the sum with the epilogue, and its norm if asked for.

        - `last`: no stage follows.
        - `out`: the tensor for the sum; by default a new one.
        """

    def sum_into(self, epilogue: Epilogue, out: Tensor, gather: Any, *, own: Tensor | None) -> None:
        """Put this rank's part of the sum, with the epilogue but no norm, in `out`, and send it to all by `gather`."""


class ScheduleImpl(Protocol):
    """Schedule on one rank, for one task. A class of verbs is made of a workspace, or of a group, and the task.

    - `where`: place of an epilogue in this schedule, in words.
    - `sent_by`: how the last run sent the gathered tensor, or "".
    - `sums`: the reduction order if a task may have any.
    - `by_host`: whether the host makes the protocol's steps; otherwise kernels do.
    - `layout`: the needs of arenas and signals, if the schedule shares memory.
    """

    rank: int
    world_size: int
    where: str = "after it"
    by_host: bool = False
    sent_by: str = ""
    sums: str = ""
    layout: Any = None

    def at(self, task: Task) -> Any:
        """Return the verbs for a task that differs in its rows alone. Those of kernels are made anew instead."""
        raise NotImplementedError

    def form(self) -> Any:
        """Return the schedule's own form of the task, or None for one of `forms`."""
        return None

    def gather(self, what: GatherSpec) -> Any:
        """Return a `Gather` of a matrix."""

    def scatter(self, what: ScatterSpec) -> Any:
        """Return a `Scatter` of a sum."""

    def one_shot(self, task: Task) -> bool:
        """Return whether an all-reduce sends all terms to every rank; otherwise to owners, who then send their sums."""

    def end(self) -> None:
        """End the epoch after the last stage, if the host makes the protocol's steps. Kernels end it themselves."""
        return
