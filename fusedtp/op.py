"""Table of the ops: one row each, for registration, dispatch, the cost model, tuning and the benchmark.

A `Task` is an op on operands of given shapes. Operands are matrices with any strides. X is all ranks' rows of the
gathered operand, stacked; S is the sum over ranks.

    all_gather_matmul       a, b, bias            X @ b + bias [M, N]; if `whole` also X [M, K]
    matmul_reduce_scatter   a, b, bias, residual  the own rows of S = a @ b, + bias + residual, of these rows only
    matmul_all_reduce       a, b, bias, residual  S = a @ b, + bias + residual [M, N] on every rank
    all_gather              a                     X
    reduce_scatter          a                     the own rows of S
    all_reduce              a                     S

Operands have these names; optional operands may be missing. With several weights, operands are numbered: b, b1, b2;
they need not be adjacent in memory. A gather has a result X @ b + bias for each b, bias. A sum adds a @ b of all a, b.
A caller may give tensors for results: `out`, `out1`, .., with any strides.

A task may have `further` products with X, of operands with any other names: all of them take one gather. A
matmul_reduce_scatter gathers no operand of its own, so it may gather one for them (`gathers`), during a @ b.

`dim` 1 replaces rows by columns: of a in a gather, of the result in a scatter. With `transposed` the result is
transposed, and a bias has an element for each row of X @ b, which is now a column.

The steps after the products or the sum, with their operands (bias, residual, a norm's parameters) and further results,
are the task's `epilogue`. An all_gather_matmul may end with an activation, a sum of one a @ b with a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from .epilogue import NO_EPILOGUE, Epilogue, numbered

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int]
Kind = Literal["gather", "scatter", "all_reduce"]

# Order in which terms are added. A tree has this many leaves, unless the order gives a number.
Order: TypeAlias = str
RANK_ORDER, TREE_ORDER, LEAVES, MOST_LEAVES = "rank", "tree", 8, 64
# Any order of ranks' terms: the fastest. Settings store AS_ANY in place of a tree's leaves.
ANY_ORDER, AS_ANY = "any", -1


class Options(NamedTuple):
    """Options of a call, equal on all ranks. `all_gather_linear` documents them."""

    schedule: str = "auto"
    algorithm: str = "auto"
    producer: str = "auto"
    float8: str | None = None
    order: str = RANK_ORDER


class Product(NamedTuple):
    """Product with X, the gathered matrix: names of a task's operands and results early, tensors of a call late.

    `kind` "rows" is X @ other, "outer" is X.T @ other, "whole" is X itself in a new tensor. `transposed`: the result is
    transposed, [other's columns, ..]. Columns of the epilogue are the result's. `out`: the tensor for the result, after
    an activation; None or "" for a new one.
    """

    kind: Literal["rows", "outer", "whole"]
    other: Any = None
    transposed: bool = False
    epilogue: Epilogue = NO_EPILOGUE
    out: Any = None

    def shape(self, X: Shape, shapes: Mapping[str, Shape]) -> Shape:
        """Return the result's shape."""
        made = X if self.kind == "whole" else (X[self.kind == "outer"], shapes[self.other][1])
        return made[::-1] if self.transposed else made


@dataclass(frozen=True)
class Op:
    """Properties of every task of an op.

    - `kind`: of the communication, in the cost model's words.
    - `multiplies`: whether a product goes with it.
    - `algorithms`: besides "auto".
    - `agreed`: see the property of `Task`.
    """

    name: str
    kind: Kind
    multiplies: bool
    algorithms: tuple[str, ...]
    agreed: Callable[[Task], Mapping[str, Any]]

    @property
    def number(self) -> int:
        """Return the op's position in the table, by which kernels know it."""
        return _NUMBERS[self.name]


@dataclass(frozen=True)
class Task:
    """An op on one rank, with the shapes of its operands by name, and a dtype.

    - `dtype`: of the result; sums travel in it.
    - `sizes`: every rank's length of the dim that is gathered or scattered.
    - `dim`, `transposed`: see the module.
    - `algorithm`: one of the op's, or "auto".
    - `float8`: the first operand's dtype, if a and b are float8 with scales (`scaled.Quantized`).
    - `in_blocks`: whether scales are those of blocks.
    - `leaves`: of the contraction, if it is added up as a tree, in float32 also between ranks; else 0.
    - `any_order`: whether the switch may add ranks' terms, in its own order.
    - `further`: products with X after those of each b, without an epilogue.
    - `gathers`: the name of the operand that is gathered: "" for a, if the op gathers.
    - `epilogue`: with names of operands. If X itself is a result (`whole`), columns (dim 1) travel as rows.
    """

    op: Op
    shapes: Mapping[str, Shape]
    dtype: torch.dtype
    sizes: tuple[int, ...] = ()
    dim: int = 0
    transposed: bool = False
    algorithm: str = "auto"
    float8: torch.dtype | None = None
    in_blocks: bool = False
    leaves: int = 0
    any_order: bool = False
    epilogue: Epilogue = NO_EPILOGUE
    further: tuple[Product, ...] = ()
    gathers: str = ""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Tasks are looked up at every call. These fields tell most of them apart, and equality compares all.
        return hash((self.op.name, frozenset(self.shapes.items()), self.dtype, self.sizes, self.dim, self.algorithm))

    def at(self, shapes: Mapping[str, Shape], sizes: tuple[int, ...]) -> Task:
        """Return the task on operands with other numbers of rows. Faster than `dataclasses.replace`."""
        made = object.__new__(Task)
        # Every run reads `moved`.
        moved = _moved(self.op, self.dim, shapes, sizes)
        fields = self._of_any_rows.copy()
        fields["shapes"], fields["sizes"], fields["moved"] = shapes, sizes, moved
        object.__setattr__(made, "__dict__", fields)
        return made

    @cached_property
    def _of_any_rows(self) -> dict[str, Any]:
        # What `at` copies: the fields and cached properties, without those that rows change. It sets three anew.
        return {name: value for name, value in vars(self).items() if name not in ("agreed", "_hash")}

    @cached_property
    def _num_weights(self) -> int:
        return sum(name == "b" or (name[0] == "b" and name[1:].isdigit()) for name in self.shapes)

    def each(self, name: str) -> tuple[str, ...]:
        """Return the operand's name for each weight: b, b1, b2."""
        return numbered(name, self._num_weights)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def multiplied_in(self) -> str:
        """Return the name of the dtype of a and b."""
        if self.in_blocks:
            return "mxfp8"
        return str(self.float8 or self.dtype).removeprefix("torch.")

    @property
    def gathered(self) -> str:
        """Return the name of the operand of which ranks gather the parts, "" for none."""
        return "a" if self.op.kind == "gather" else self.gathers

    @cached_property
    def terms(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of all a, and of all b, of the products a @ b that go into the sum; () for none."""
        if self.op.kind == "gather" or not self.op.multiplies:
            return ()
        return self.each("a"), self.each("b")

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """Return all products with X, in the order of their results, which follow that of a sum."""
        its, names = self.epilogue, self.each("b") if self.op is ALL_GATHER_MATMUL else ()
        kind: Literal["rows", "outer"] = "rows" if self.dim == 0 else "outer"
        # Tensors that a caller may give: none for products before an activation.
        num_made = its.num_results(len(names)) if names else 1
        num_first = num_made + len(names) * its.keeps
        outs = (*numbered("out", num_made), *[""] * len(names))
        first = [Product(kind, b, self.transposed, its.of(i), outs[i]) for i, b in enumerate(names)]
        # X travels as rows if columns are gathered to be returned.
        whole = [Product("whole", transposed=self.dim == 1)] if its.whole else []
        others = (*self.further, *whole)
        outs = numbered("out", num_first + len(others))[num_first:]
        return (*first, *(each._replace(out=out) for each, out in zip(others, outs, strict=True)))

    def results(self, rank: int) -> tuple[Shape, ...]:
        """Return the shapes of the results on a rank: of a sum, of each b, of further products, then of X."""
        gathers, X = self.op.kind == "gather", (0, 0)
        if self.gathered:
            X = sum(self.sizes), self.shapes[self.gathered][1 - self.dim]
        made = [each.shape(X, self.shapes) for each in self.products]
        count = self._num_weights if gathers else 0
        first, (M, N) = made[:count], self.moved
        if not gathers:
            own = self.sizes[rank] if self.sizes else (M, N)[self.dim]
            first = [(own, N) if self.dim == 0 else (M, own)]
        elif not self.op.multiplies:
            first = [X]
        return (*self.epilogue.results(first), *made[count:])

    @cached_property
    def moved(self) -> Shape:
        """Return the shape of the whole tensor that travels: the gathered operand or the sum, the same on all ranks."""
        return _moved(self.op, self.dim, self.shapes, self.sizes)

    @cached_property
    def agreed(self) -> Mapping[str, Any]:
        """Return the values that all ranks must agree on, by name."""
        options: dict[str, Any] = {"sizes": self.sizes} if self.sizes else {}
        if self.op.multiplies and self.sizes:
            options["gather_dim" if self.op.kind == "gather" else "scatter_dim"] = self.dim
        if self.op.name == "all_gather_matmul":
            options["transposed"] = self.transposed
            options |= self.epilogue.agreed(of_sum=False)
            if self.dim == 1:
                options["whole"] = self.epilogue.whole
        if self.op.algorithms:
            options["algorithm"] = self.algorithm
        if self.float8 is not None:
            options["float8"] = self.float8
            options["scales"] = "of blocks" if self.in_blocks else "of rows, or of the tensor"
        if self.leaves and self.op.multiplies and self.op.kind != "gather":
            # If ranks' parts have equal lengths, no leaf crosses the boundary of two parts.
            options["contraction of a rank"] = [self.shapes[a][1] for a in self.each("a")]
        return {**options, **self.op.agreed(self)}


def _moved(op: Op, dim: int, shapes: Mapping[str, Shape], sizes: tuple[int, ...]) -> Shape:
    rows, cols = shapes["a"]
    if op.kind == "gather":
        return (sum(sizes), cols) if dim == 0 else (rows, sum(sizes))
    return rows, shapes["b"][1] if op.multiplies else cols


def _agreed_of_product(task: Task) -> Mapping[str, Any]:
    M, N = task.moved
    agreed: dict[str, Any] = {"M": M, "N": N}
    if task.op.kind == "all_reduce" and (weights := len(task.each("b"))) > 1:
        # The number of weights decides between one shot and two.
        agreed["weights"] = weights
    if task.gathers:
        return {**agreed, "columns gathered": task.shapes[task.gathers][1]}
    return agreed | task.epilogue.agreed(of_sum=True)


def _agreed_of_gather(task: Task) -> Mapping[str, Any]:
    rows, cols = task.shapes["a"]
    return {"weights": len(task.each("b")), **({"K": cols} if task.dim == 0 else {"M": rows})}


def _columns(task: Task) -> Mapping[str, Any]:
    return {"columns": task.shapes["a"][1]}


ALL_GATHER_MATMUL = Op("all_gather_matmul", "gather", True, (), _agreed_of_gather)
MATMUL_REDUCE_SCATTER = Op("matmul_reduce_scatter", "scatter", True, (), _agreed_of_product)
MATMUL_ALL_REDUCE = Op("matmul_all_reduce", "all_reduce", True, ("one_shot", "two_shot"), _agreed_of_product)
ALL_GATHER = Op("all_gather", "gather", False, ("direct", "ring"), _columns)
REDUCE_SCATTER = Op("reduce_scatter", "scatter", False, ("direct", "ring"), _columns)
ALL_REDUCE = Op(
    "all_reduce", "all_reduce", False, ("one_shot", "two_shot", "ring"),
    lambda task: {"M": task.shapes["a"][0], "N": task.shapes["a"][1]},
)  # fmt: skip

OPS: Mapping[str, Op] = {
    op.name: op
    for op in (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
}
_NUMBERS = {name: number for number, name in enumerate(OPS)}
