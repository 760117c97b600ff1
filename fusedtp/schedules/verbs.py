"""Building blocks of the ops, written once for all schedules: a gather, products that take it, and a sum fed by some.

A schedule provides these verbs; `forms` combines them. A gather sends this rank's part of a matrix to all ranks. It
returns a `Pending`, which a product takes in place of the whole matrix: the gather knows nothing of the product. A
scatter sends each rank's terms of a sum to their owners, who add them up. Both are made for a task, which decides their
room in the arenas, and then used any number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from ..epilogue import Epilogue
from ..op import Product, Task
from ..scaled import Matrix

# A task's operands by name, see `op`.
Operands = Mapping[str, Any]


class GatherSpec(NamedTuple):
    """Matrix to gather, of which rank r has `sizes[r]` rows of `other` elements, or columns with dim 1.

    - `kinds`: the kinds of the products that take it.
    - `result`: the columns of all products of the first kind together, from which the tile is chosen.
    - `sums`: whether it gathers sums of the task's scatter (`sum_into`), in the result's dtype.
    """

    sizes: tuple[int, ...]
    other: int
    dim: int
    kinds: tuple[str, ...] = ()
    result: int = 0
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


class Gather:
    """Base of the transports of a matrix to all ranks. float8 scales travel with rows, as bytes.

    - `shape`, `begins`: of X, and each rank's first row. Columns (dim 1) are rows of X.
    - `dim`: 1 if parts are columns.
    - `by_parts`: whether the library multiplies parts as they arrive; otherwise X.
    - `lends`: whether `read` returns memory that a result must not keep: an arena's, or the operand itself.
    """

    shape: tuple[int, int]
    begins: tuple[int, ...]
    dim: int
    by_parts: bool = False
    lends: bool = False

    def bind(self, sizes: tuple[int, ...], other: int) -> None:
        """Gather other rows from now on, as in `GatherSpec`. Those of kernels are made anew instead."""
        raise NotImplementedError

    def start(self, x: Any) -> Pending:
        """Send this rank's part now, or leave it to the kernel of the first product."""
        raise NotImplementedError

    def read(self, of: Pending) -> Matrix:
        """Return X after all parts have arrived. It may be in memory that the next op overwrites."""
        raise NotImplementedError

    def parts(self, of: Pending) -> Iterable[tuple[int, Any]]:
        """Return each rank with its part, columns as columns, in the order of arrival."""
        raise NotImplementedError

    def whole(self, of: Pending, out: Tensor | None = None) -> Tensor:
        """Return X as `Pending.whole` does."""
        made: Any = self.read(of)
        return made if out is None else out.copy_(made)


class Pending(NamedTuple):
    """X, a matrix of which all ranks' parts are on their way, until the op ends. A product takes it like a tensor.

    - `gather`: the transport, which knows the flags to wait for and the memory to read.
    - `x`: this rank's part.
    - `sent`: how the part was sent, or where parts arrive, as the transport needs.
    """

    gather: Gather
    x: Any
    sent: Any = None

    def whole(self, out: Tensor | None = None) -> Tensor:
        """Return X in `out`, which has this rank's part already, or in a new tensor."""
        return self.gather.whole(self, out)


# A function of X, products with X, whose epilogues have one activation, and a tree's leaves. It returns the results.
Multiply: TypeAlias = "Callable[[Pending | Matrix, Sequence[Product], int], list[Tensor]]"


class Scatter(Protocol):
    """Reduce-scatter, or with `to_all` all-to-all of terms, of one task."""

    def bind(self, sizes: tuple[int, ...], other: int) -> None:
        """Sum other rows from now on, like `Gather.bind`."""
        raise NotImplementedError

    def multiply(self, terms: Sequence[tuple[Matrix, Matrix]]) -> None:
        """Set this rank's terms to the sum of these a @ b."""

    def put(self, x: Tensor) -> None:
        """Set this rank's terms to x."""

    def sum(
        self, epilogue: Epilogue, *, own: Tensor | None, last: bool, out: Tensor | None = None
    ) -> list[Tensor]:  # fmt: skip
        """Return this rank's part of the sum with the epilogue, and its norm if asked for.

        - `own`: the input that was `put`, None after a matmul.
        - `last`: no stage follows.
        - `out`: the tensor for the sum; by default a new one.
        """

    def sum_into(self, epilogue: Epilogue, out: Tensor, gather: Any, *, own: Tensor | None) -> Pending:
        """Put this rank's part of the sum, with the epilogue but no norm, in `out`, and send it to all by `gather`."""


class ScheduleImpl(Protocol):
    """Schedule on one rank, for one task. A class of verbs is made of a workspace, or of a group, and the task.

    - `where`: place of an epilogue in this schedule, in words.
    - `sent_by`: how the last run sent the gathered tensor, or "".
    - `sums`: the reduction order if a task may have any.
    - `task`: the task to whose rows the verbs are bound.
    - `by_host`: whether the host makes the protocol's steps; otherwise kernels do.
    - `layout`: the needs of arenas and signals, if the schedule shares memory.
    """

    rank: int
    world_size: int
    task: Any = None
    where: str = "after it"
    by_host: bool = False
    sent_by: str = ""
    sums: str = ""
    layout: Any = None

    def form(self) -> Any:
        """Return the schedule's own form of the task, or None for one of `forms`."""
        return None

    def gather(self, what: GatherSpec) -> Any:
        """Return a `Gather` of a matrix."""

    def product(self, gather: Any) -> Multiply | None:
        """Return the schedule's own product with what `gather` returns, or None for the library's."""
        return None

    def scatter(self, what: ScatterSpec) -> Any:
        """Return a `Scatter` of a sum."""

    def one_shot(self, task: Task) -> bool:
        """Return whether an all-reduce sends all terms to every rank; otherwise to owners, who then send their sums."""

    def end(self) -> None:
        """End the epoch after the last stage, if the host makes the protocol's steps. Kernels end it themselves."""
        return
