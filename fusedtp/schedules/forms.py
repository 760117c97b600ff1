"""What the ops are made of, written once for all schedules: a gather that products consume, a scatter that a product
feeds, and both.

A schedule gives verbs. `gather` takes this rank's part of a matrix to all ranks; any number of products consume its
rows as they arrive, or it is handed out whole. `scatter` takes what each rank has of a sum to whom it belongs, who adds
it up. They are made for a task, which decides their room in the arenas, and then used any number of times.

A form runs in two stages, or three: what waits for peers comes in a later one than what they wait for. A rank of its
own process runs them one after the other; virtual ranks go from one to the next together (`phases`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from ..op import Task
from ..shards import even_sizes

Operands = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Product:
    """A product with X, the gathered matrix.

    rows: X @ other + bias; outer: X.T @ other + bias. transposed: the result is the transposed one, and the bias has an
    element a row of it.
    """

    kind: Literal["rows", "outer"]
    other: Tensor
    bias: Tensor | None = None
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

    def sum(self, bias: Tensor | None, *, own: Tensor | None, last: bool) -> Tensor:
        """The own part of the sum over ranks, + bias. last: the op ends with it."""

    def sum_into(self, bias: Tensor | None, out: Tensor, gather: Any, *, own: Tensor | None) -> None:
        """The own part of the sum, + bias, in its place in `out`, and on its way to all by `gather`."""


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


class Gathering:
    """all_gather, and all_gather_matmul with one product or two. Operands: x, and b, bias, right."""

    def __init__(self, on: Verbs, task: Task) -> None:
        rows, cols = task.shape(0)
        self._first: Literal["rows", "outer"] = "rows" if task.dim == 0 else "outer"
        self._transposed, self._multiplies = task.transposed, task.has(1)
        products = ((self._first,) if task.has(1) else ()) + (("outer",) if task.has(3) else ())
        self._gather = on.gather(
            task.sizes, cols if task.dim == 0 else rows, task.dim, products=products,
            result=task.shape(1)[1] if task.has(1) else 0,
        )  # fmt: skip
        self.stages = self._start, self._finish

    def _start(self, operands: Operands) -> None:
        self._gather.start(operands[0])

    def _finish(self, operands: Operands) -> list[Tensor]:
        if not self._multiplies:
            return [self._gather.whole(operands[0])]
        products = [Product(self._first, operands[1], operands[2], self._transposed)]
        if len(operands) > 3:
            products.append(Product("outer", operands[3]))
        return self._gather.multiply(operands[0], products)


class Scattering:
    """reduce_scatter, and matmul_reduce_scatter, maybe with a gather beside it. Operands: a, and b, bias, left, x."""

    def __init__(self, on: Verbs, task: Task) -> None:
        M, N = task.moved
        self._multiplies, self._gathers = task.op.multiplies, task.has(4)
        self._scatter = on.scatter(
            task.sizes, N if task.dim == 0 else M, task.dim, to_all=False, multiplies=self._multiplies
        )
        if self._gathers:
            self._gather = on.gather(task.sizes, task.shape(4)[1], 0, products=("outer",), result=N)
        self.stages = self._start, self._finish

    def _start(self, operands: Operands) -> None:
        if self._gathers:
            self._gather.start_beside(operands[4])
        if self._multiplies:
            self._scatter.multiply(operands[0], operands[1])
        else:
            self._scatter.put(operands[0])

    def _finish(self, operands: Operands) -> list[Tensor]:
        if not self._multiplies:
            return [self._scatter.sum(None, own=operands[0], last=True)]
        out = self._scatter.sum(operands[2], own=None, last=not self._gathers)
        if not self._gathers:
            return [out]
        _, _, _, left, x = operands
        # left @ X
        return [out, *self._gather.multiply(x, [Product("outer", left.t(), transposed=True)])]


class Reducing:
    """all_reduce and matmul_all_reduce: one-shot, or a scatter and a gather of its sums. Operands: a, and b, bias."""

    def __init__(self, on: Verbs, task: Task) -> None:
        M, N = task.moved
        self._multiplies = task.op.multiplies
        if on.one_shot(task):
            self._scatter = on.scatter((M,), N, 0, to_all=True, multiplies=self._multiplies)
            self.stages: tuple[Any, ...] = self._start, self._sum
            return
        sizes = even_sizes(M, on.world_size)
        self._scatter = on.scatter(sizes, N, 0, to_all=False, multiplies=self._multiplies)
        self._gather = on.gather(sizes, N, 0)
        begin = sum(sizes[: on.rank])
        self._shape, self._part = (M, N), slice(begin, begin + sizes[on.rank])
        self.stages = self._start, self._show, self._finish

    def _start(self, operands: Operands) -> None:
        if self._multiplies:
            self._scatter.multiply(operands[0], operands[1])
        else:
            self._scatter.put(operands[0])

    def _given(self, operands: Operands) -> tuple[Tensor | None, Tensor | None]:
        # The bias, and what was put.
        return (operands[2], None) if self._multiplies else (None, operands[0])

    def _sum(self, operands: Operands) -> list[Tensor]:
        bias, own = self._given(operands)
        return [self._scatter.sum(bias, own=own, last=True)]

    def _show(self, operands: Operands) -> None:
        bias, own = self._given(operands)
        self._out = operands[0].new_empty(self._shape)
        self._scatter.sum_into(bias, self._out, self._gather, own=own)

    def _finish(self, operands: Operands) -> list[Tensor]:
        out = self._out
        del self._out
        return [self._gather.whole(out[self._part], out)]


FORMS = {"gather": Gathering, "scatter": Scattering, "all_reduce": Reducing}
