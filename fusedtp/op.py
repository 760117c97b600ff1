"""Table of the ops: one row each, for registration, dispatch, the cost model, tuning and the benchmark.

A `Task` is an op on operands of given shapes. Operands are matrices with any strides. X is all ranks' rows of the
gathered operand, stacked; S is the sum over ranks.

    all_gather_matmul       a, b, bias, right     X @ b + bias [M, N]; with `right` also X.T @ right [K, R]; if `whole`
                                                  also X [M, K]
    matmul_reduce_scatter   a, b, bias, left, x, residual
                                                  the own rows of S = a @ b, + bias + residual, which has these rows
                                                  only; with `x` also left @ X [L, C], x gathered during a @ b
    matmul_all_reduce       a, b, bias, residual  S = a @ b, + bias + residual [M, N] on every rank
    all_gather              a                     X
    reduce_scatter          a                     the own rows of S
    all_reduce              a                     S

Operands have these names; optional operands may be missing. With several weights, operands are numbered: b, b1, b2.
all_gather and reduce_scatter take `out`, contiguous, for their result; that of a gather has the own rows already.
They need not be adjacent in memory. A gather has a result X @ b + bias for each b, bias. A sum adds a @ b of all a, b,
and has a left @ X for each left.

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


@dataclass(frozen=True)
class Op:
    """Properties of every task of an op.

    - `kind`: of the communication, in the cost model's words.
    - `multiplies`: whether a product goes with it.
    - `algorithms`: besides "auto".
    - `results`, `moved`, `agreed`: see the properties of `Task`.
    """

    name: str
    kind: Kind
    multiplies: bool
    algorithms: tuple[str, ...]
    results: Callable[[Task, int], tuple[Shape, ...]]
    moved: Callable[[Task], Shape]
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

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Tasks are looked up at every call. These fields tell most of them apart, and equality compares all.
        return hash((self.op.name, frozenset(self.shapes.items()), self.dtype, self.sizes, self.dim, self.algorithm))

    def at(self, shapes: Mapping[str, Shape], sizes: tuple[int, ...]) -> Task:
        """Return the task on operands with other numbers of rows. Faster than `dataclasses.replace`."""
        made = object.__new__(Task)
        fields = vars(self).copy()
        fields["shapes"], fields["sizes"] = shapes, sizes
        for name in ("moved", "agreed", "_hash"):
            fields.pop(name, None)
        object.__setattr__(made, "__dict__", fields)
        return made

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

    def results(self, rank: int) -> tuple[Shape, ...]:
        return self.op.results(self, rank)

    @cached_property
    def moved(self) -> Shape:
        """Return the shape of the whole tensor that travels: the gathered operand or the sum, the same on all ranks."""
        return self.op.moved(self)

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


def _gathered(task: Task) -> Shape:
    rows, cols = task.shapes["a"]
    return (sum(task.sizes), cols) if task.dim == 0 else (rows, sum(task.sizes))


def _product(task: Task) -> Shape:
    return task.shapes["a"][0], task.shapes["b"][1]


def _after_gather(task: Task, rank: int) -> tuple[Shape, ...]:
    M, K = _gathered(task)
    columns = [task.shapes[b][1] for b in task.each("b")]
    products = [(N, M) if task.transposed else (M, N) for N in columns]
    right = [(K, task.shapes["right"][1])] if "right" in task.shapes else []
    return (*task.epilogue.results(products), *right, *([(M, K)] if task.epilogue.whole else []))


def _scattered(task: Task, rank: int) -> tuple[Shape, ...]:
    (M, N), own = _product(task), task.sizes[rank]
    first = (own, N) if task.dim == 0 else (M, own)
    lefts = [task.shapes[left][0] for left in task.each("left") if left in task.shapes]
    return (*task.epilogue.results([first]), *((rows, task.shapes["x"][1]) for rows in lefts))


def _agreed_of_product(task: Task) -> Mapping[str, Any]:
    M, N = _product(task)
    agreed: dict[str, Any] = {"M": M, "N": N}
    if task.op.kind == "all_reduce" and (weights := len(task.each("b"))) > 1:
        # The number of weights decides between one shot and two.
        agreed["weights"] = weights
    if "x" in task.shapes:
        return {**agreed, "columns gathered": task.shapes["x"][1]}
    return agreed | task.epilogue.agreed(of_sum=True)


def _agreed_of_gather(task: Task) -> Mapping[str, Any]:
    rows, cols = task.shapes["a"]
    return {"weights": len(task.each("b")), **({"K": cols} if task.dim == 0 else {"M": rows})}


def _columns(task: Task) -> Mapping[str, Any]:
    return {"columns": task.shapes["a"][1]}


ALL_GATHER_MATMUL = Op(
    "all_gather_matmul", "gather", True, (), results=_after_gather, moved=_gathered, agreed=_agreed_of_gather
)
MATMUL_REDUCE_SCATTER = Op(
    "matmul_reduce_scatter", "scatter", True, (), results=_scattered, moved=_product, agreed=_agreed_of_product
)
MATMUL_ALL_REDUCE = Op(
    "matmul_all_reduce", "all_reduce", True, ("one_shot", "two_shot"),
    results=lambda task, rank: tuple(task.epilogue.results([_product(task)])), moved=_product,
    agreed=_agreed_of_product,
)  # fmt: skip
ALL_GATHER = Op(
    "all_gather", "gather", False, ("direct", "ring"),
    results=lambda task, rank: (_gathered(task),), moved=_gathered, agreed=_columns,
)  # fmt: skip
REDUCE_SCATTER = Op(
    "reduce_scatter", "scatter", False, ("direct", "ring"),
    results=lambda task, rank: ((task.sizes[rank], task.shapes["a"][1]),), moved=lambda task: task.shapes["a"],
    agreed=_columns,
)  # fmt: skip
ALL_REDUCE = Op(
    "all_reduce", "all_reduce", False, ("one_shot", "two_shot", "ring"),
    results=lambda task, rank: (task.shapes["a"],), moved=lambda task: task.shapes["a"],
    agreed=lambda task: {"M": task.shapes["a"][0], "N": task.shapes["a"][1]},
)  # fmt: skip

OPS: Mapping[str, Op] = {
    op.name: op
    for op in (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
}
_NUMBERS = {name: number for number, name in enumerate(OPS)}
