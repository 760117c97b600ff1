"""The gradient of a bias: the sum of dy's rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..op import ALL_GATHER, MATMUL_ALL_REDUCE, Task
from ..schedules.alone import summed_rows
from ..sharding import notation
from ..sharding.plan import Plan
from ..sharding.redistribute import Step, moved
from .matrices import Matrix, Named, flat_sizes, outermost

if TYPE_CHECKING:
    from .program import Program


def gradient(program: Program, plans: Plan, dy: Named) -> Named:
    """The sum of dy's rows, over the ranks that hold other rows too, as the bias lies."""
    # If w has only this rank's columns, so has the bias; if w has all of them, the bias is whole too.
    spec = plans.spec
    rows = tuple(name for name in spec.c.names if name != spec.n)
    now = notation.Tensor(spec.c.dims[-1:])
    # Ranks that hold other rows hold other terms.
    split = [(name, axis) for name in rows for axis in spec.c.axes(name)]
    if program.leaves:
        db = _as_tree(program, dy, rows, spec.n, split)
    else:
        matrix = Matrix.of(dy, rows, (spec.n,))
        db = program.add(
            lambda tensors, runs: [matrix.view(tensors[matrix.name]).sum(0)], (matrix.name,),
            ((spec.n,), (dy.length(spec.n),)),
        )[0]  # fmt: skip
        for _, axis in split:
            db = program.plain(Step("all_reduce", "db", axis), now, db)
    while now.used and not spec.b.axes(spec.n):
        step = Step("all_gather", "db", now.used[-1], spec.n)
        db, now = program.plain(step, now, db), moved(now, step)
    return db


def _as_tree(program: Program, dy: Named, rows: tuple[str, ...], n: str, split: Sequence[tuple[str, str]]) -> Named:
    # The sum of dy's rows, which may be `split` over one axis: a product with ones, whose contraction is the rows.
    assert len(split) < 2
    dim, axis = split[0] if split else ("", "")
    order = outermost(rows, dim)
    matrix, made = Matrix.of(dy, order, (n,)), ((n,), (dy.length(n),))
    length = math.prod(dy.length(name) for name in rows)
    sizes = program.partition.sizes(dim, (), axis) if split else ()
    if len(set(sizes)) == 1:
        (ones,) = program.add(
            lambda tensors, runs: [tensors[dy.name].new_ones(1, length)], (dy.name,), (("", ".rows"), (1, length))
        )
        operands = Matrix.of(ones, ("",), (".rows",)), matrix, None, None
        shapes = tuple(None if each is None else each.size for each in operands)
        task = Task(MATMUL_ALL_REDUCE, shapes, program.dtype, leaves=program.leaves)
        return program.task(task, axis, operands, made)[0]
    whole: Named | None = None
    if split:
        # Leaves would end in the middle of a rank's rows: one adds up all of them.
        flat = flat_sizes(sizes, order, dy, dim)
        task = Task(ALL_GATHER, (matrix.size,), program.dtype, flat)
        (whole,) = program.task(task, axis, (matrix,), ((".rows", n), (sum(flat), dy.length(n))))
        matrix = Matrix.of(whole, (".rows",), (n,))
    return program.add(
        lambda tensors, runs: [summed_rows(matrix.view(tensors[matrix.name]), program.leaves)], (matrix.name,), made
    )[0]
