"""dx and dw of a layer in one op, where one gather serves both (`Plan.together`) or where one gradient is scattered
while the operand of the other is gathered (`Plan.side_by_side`).

Everything but the tensors is worked out once for the lengths at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .execute import Matrix, Named, Runner, flat_sizes, outermost
from .meaning import Meaning
from .plan import Plan


@dataclass(frozen=True)
class Pair:
    """An op that gives both gradients.

    operands: the op's, each as which of (dy, x, w) it is, and that as a matrix. shape: dx's, where it has more than two
    dims. dims: of dx and of dw, as they come out.
    """

    op: str
    axis: str
    sizes: tuple[int, ...]
    operands: tuple[tuple[int, Matrix], ...]
    dw_first: bool
    shape: tuple[int, ...] | None
    dims: tuple[tuple[str, ...], tuple[str, ...]]
    meanings: dict[Any, Meaning] = field(default_factory=dict, compare=False, repr=False)

    def run(self, run: Runner, *tensors: Tensor) -> tuple[Named, Named]:
        """dx and dw from this rank's shards of dy, x and w."""
        operands = [matrix.view(tensors[which]) for which, matrix in self.operands]
        dx, dw = run.call(self.op, self.axis, *operands, meanings=self.meanings, sizes=self.sizes)
        if self.dw_first:
            dx, dw = dw, dx
        return Named(dx if self.shape is None else dx.view(self.shape), self.dims[0]), Named(dw, self.dims[1])


def pair(run: Runner, plans: Plan, dy: Named, x: Named, w: Named) -> Pair | None:
    """The op for both gradients of these operands; None where there is none."""
    if plans.together is None and plans.side_by_side is None:
        return None
    key, products = ("pair", plans.dx, dy.dims, x.dims, w.dims), run.partition.products
    if key not in products:
        products[key] = _pair(run, plans, dy, x, w)
    made: Pair = products[key]
    return made


def _pair(run: Runner, plans: Plan, dy: Named, x: Named, w: Named) -> Pair:
    spec, n, k = plans.spec, (plans.spec.n,), (plans.spec.k,)
    placed = plans.together
    if placed is None:
        assert plans.side_by_side is not None
        placed = plans.side_by_side[0]
    step, before = placed
    sizes = run.sizes(step, before)
    rows = outermost(tuple(name for name in dy.dims if name != spec.n), step.dim)
    dy_columns, dy_rows = (0, Matrix.of(dy, n, rows)), (0, Matrix.of(dy, rows, n))
    x_matrix, w_matrix = (1, Matrix.of(x, rows, k)), (2, Matrix.of(w, n, k))
    # Along N it is dy.T that is gathered, or dw = dy.T @ x that is scattered; along a row dy, or dx = dy @ w.T.
    on_columns = step.dim == spec.n
    operands: tuple[tuple[int, Matrix], ...]
    if plans.together:
        operands = (dy_columns, x_matrix, w_matrix) if on_columns else (dy_rows, w_matrix, x_matrix)
    elif on_columns:
        operands = (dy_columns, x_matrix, dy_rows, w_matrix)
    else:
        operands = (dy_rows, w_matrix, dy_columns, x_matrix)
    shape = tuple([*(x.length(name) for name in rows), x.length(spec.k)])
    return Pair(
        op="all_gather_two_matmuls" if plans.together else "matmul_scatter_and_gather",
        axis=step.axis,
        sizes=sizes if on_columns else flat_sizes(sizes, rows, dy, step.dim),
        operands=operands,
        dw_first=on_columns,
        shape=shape if len(shape) > 2 else None,
        dims=((*rows, spec.k), (spec.n, spec.k)),
    )
