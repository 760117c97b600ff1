"""Running a plan: every step of one matmul on this rank's shards.

Tensors carry the names of their dims, so that a weight may be stored [N, K] where the notation says [K, N]: operands
are permuted views, never transposed copies. What a collective joins or cuts is moved to the outermost place of its rows
(or of the contraction), because that is where ranks' parts lie one behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import Tensor
from torch.distributed import ProcessGroup

from . import agreement, blas, dispatch, notation, turns
from .meaning import Meaning
from .partition import Partition
from .plan import MatmulPlan
from .redistribute import Step


@dataclass(frozen=True)
class Named:
    """A local tensor and the names of its dims, in the order of its memory's choice."""

    tensor: Tensor
    dims: tuple[str, ...]

    def ordered(self, dims: tuple[str, ...]) -> Tensor:
        """A view with the dims in this order."""
        if dims == self.dims:
            return self.tensor
        return self.tensor.permute([self.dims.index(name) for name in dims])

    def length(self, dim: str) -> int:
        return self.tensor.shape[self.dims.index(dim)]

    def matrix(self, rows: tuple[str, ...], cols: tuple[str, ...]) -> Tensor:
        """As [rows, cols], each a flattened list of dims; a copy only where they do not lie one behind the other."""
        shape = [math.prod(self.length(name) for name in names) for names in (rows, cols)]
        return self.ordered((*rows, *cols)).reshape(shape)


@dataclass(frozen=True)
class Runner:
    """What every step needs: the shards' lengths, the group of each axis, and what was asked for."""

    partition: Partition
    # A runner is kept for the next call: the groups, which torch.distributed may destroy meanwhile, are not.
    groups: Mapping[str, ref[ProcessGroup]]
    schedule: str
    algorithm: str = "auto"
    debug: bool = False
    producer: str = "auto"

    def group(self, axis: str) -> ProcessGroup:
        """The group of an axis."""
        group = self.groups[axis]()
        assert group is not None
        return group

    def call(
        self, op: str, axis: str, x: Tensor, *operands: Tensor | None, meanings: dict[Any, Meaning] | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """One op over one axis, by the schedule that dispatch chooses. meanings: see `Meanings.take`."""
        group = self.group(axis)
        with turns.Turn("group", group.group_name, op):
            if self.debug or agreement.wanted():
                asked_for = {"schedule": self.schedule, "algorithm": self.algorithm}
                agreement.check(op, group, x, *operands, **asked_for, **options)
            if op == "matmul_all_reduce":
                options["algorithm"] = self.algorithm
            return dispatch.run(
                op, self.schedule, group, x, *operands, producer=self.producer, meanings=meanings, **options
            )

    def sizes(self, step: Step, before: notation.Tensor) -> tuple[int, ...]:
        """The ranks' lengths of the dim that a step gathers, slices or scatters."""
        axes = before.axes(step.dim)
        outer = axes[:-1] if step.kind == "all_gather" else axes
        return self.partition.sizes(step.dim, outer, step.axis)

    def plain(self, step: Step, before: notation.Tensor, x: Named) -> Named:
        """A slice or an unfused collective; over an axis of one rank there is nothing to do."""
        place, num_ranks = self.partition.place[step.axis]
        if num_ranks == 1:
            return x
        if step.kind == "all_reduce":
            if not x.tensor.numel():
                return x
            flat = x.tensor.reshape(-1, x.tensor.shape[-1])
            return Named(self.call("all_reduce", step.axis, flat).view(x.tensor.shape), x.dims)
        sizes = self.sizes(step, before)
        if step.kind == "slice":
            return Named(x.tensor.narrow(x.dims.index(step.dim), sum(sizes[:place]), sizes[place]), x.dims)
        others = tuple(name for name in x.dims if name != step.dim)
        out = self.call(step.kind, step.axis, x.matrix((step.dim,), others), sizes=sizes)
        shape = [out.shape[0], *(x.length(name) for name in others)]
        return Named(out.view(shape), (step.dim, *others))


def outermost(names: tuple[str, ...], first: str) -> tuple[str, ...]:
    """The names with `first` in front, if it is one of them."""
    return (first, *(name for name in names if name != first)) if first in names else names


def flat_sizes(sizes: tuple[int, ...], names: tuple[str, ...], x: Named, dim: str) -> tuple[int, ...]:
    """The ranks' lengths of the flattened dims `names` of x, `sizes` being theirs of `dim`, the outermost."""
    per_index = math.prod(x.length(name) for name in names if name != dim)
    return tuple(size * per_index for size in sizes)


@dataclass(frozen=True)
class Matrix:
    """A tensor as a matrix, worked out once: the order of its dims, and the shape where there are more than two."""

    order: tuple[int, ...] | None
    shape: tuple[int, int] | None

    @classmethod
    def of(cls, x: Named, rows: tuple[str, ...], cols: tuple[str, ...]) -> Matrix:
        """The view [rows, cols] of x, each a flattened list of dims."""
        dims = (*rows, *cols)
        shape = (math.prod(x.length(name) for name in rows), math.prod(x.length(name) for name in cols))
        order = None if dims == x.dims else tuple(x.dims.index(name) for name in dims)
        return cls(order, None if len(rows) == len(cols) == 1 else shape)

    def view(self, x: Tensor) -> Tensor:
        """A tensor like the one that it was made for; a copy only where dims do not lie one behind the other."""
        x = x if self.order is None else x.permute(self.order)
        return x if self.shape is None else x.reshape(self.shape)


@dataclass(frozen=True)
class _Product:
    """The local matmul with the collective fused with it, `op` over `axis`, if any: everything but the tensors."""

    swapped: bool  # the plan's second operand is the operator's first
    turned: bool  # the transposed problem, right.T @ left.T
    left: Matrix
    right: Matrix
    op: str
    axis: str
    options: Mapping[str, Any]
    shape: tuple[int, ...] | None
    dims: tuple[str, ...]
    meanings: dict[Any, Meaning] = field(default_factory=dict, compare=False, repr=False)

    def run(self, run: Runner, a: Tensor, b: Tensor, bias: Tensor | None) -> Named:
        if self.swapped:
            a, b = b, a
        left, right = self.left.view(a), self.right.view(b)
        if self.turned:
            left, right = right.t(), left.t()
        if self.op:
            out = run.call(self.op, self.axis, left, right, bias, meanings=self.meanings, **self.options)
        else:
            out = blas.mm(left, right, bias)
        return Named(out if self.shape is None else out.view(self.shape), self.dims)


def _product(
    run: Runner,
    plan: MatmulPlan,
    a: Named,
    b: Named,
    fused: tuple[Step, notation.Tensor] | None,
    has_bias: bool,
    wanted: tuple[str, ...],
) -> _Product:
    # `wanted`: the order of dims the caller would like.
    step = fused[0] if fused is not None else None
    dim = step.dim if step is not None else ""
    sizes = run.sizes(*fused) if fused is not None and dim else ()
    rows = outermost(tuple(name for name in plan.c.names if name in a.dims), dim)
    cols = outermost(tuple(name for name in plan.c.names if name in b.dims), dim)
    contraction = outermost(plan.contraction, dim)
    # The operand that is gathered is the operator's first, so where it is the second here the two change places.
    swapped = step is not None and step.tensor == plan.names[1]
    if swapped:
        a, b, rows, cols = b, a, cols, rows
    # The result is [rows, cols], or [cols, rows] where its last dims had better be the rows.
    flipped = wanted[-len(rows) :] == rows and wanted[-len(cols) :] != cols
    # A bias runs along the last dim of the notation's result, b's, and that is what `wanted` has put last.
    assert not has_bias or flipped == swapped
    lengths = {name: x.length(name) for names, x in ((rows, a), (cols, b)) for name in names}
    op, options = "", {}
    if step is not None and step.kind == "all_gather":
        flat = flat_sizes(sizes, rows if dim in rows else contraction, a, dim)
        op, options = "all_gather_matmul", {"gather_dim": int(dim not in rows), "sizes": flat, "transposed": flipped}
        lengths |= {dim: sum(sizes)} if dim in rows else {}
    elif step is not None and step.kind == "all_reduce":
        op = "matmul_all_reduce"
    elif step is not None:
        flat = flat_sizes(sizes, *((rows, a) if dim in rows else (cols, b)), dim)
        op, options = "matmul_reduce_scatter", {"scatter_dim": int((dim in cols) != flipped), "sizes": flat}
        lengths[dim] = sizes[run.partition.place[step.axis][0]]
    dims = (*cols, *rows) if flipped else (*rows, *cols)
    return _Product(
        swapped=swapped,
        # Without a gather either way round is the same op: the transposed problem scatters the other dim.
        turned=flipped and op != "all_gather_matmul",
        left=Matrix.of(a, rows, contraction),
        right=Matrix.of(b, contraction, cols),
        op=op,
        axis=step.axis if step is not None else "",
        options=options,
        shape=None if len(dims) == 2 else tuple(lengths[name] for name in dims),
        dims=dims,
    )


def only_product(run: Runner, plan: MatmulPlan, a: tuple[str, ...], b: tuple[str, ...], has_bias: bool) -> Any:
    """What `execute` has run of operands with these dims, where that was one op with its result as it is wanted."""
    before, _, after = plan.stages()
    product: _Product | None = run.partition.products.get((plan, a, b, None, (), not has_bias))
    return product if product is not None and not before and not after and product.dims == plan.c.names else None


def execute(
    run: Runner,
    plan: MatmulPlan,
    a: Named,
    b: Named,
    *,
    bias: Tensor | None = None,
    wanted: tuple[str, ...] | None = None,
    done: Sequence[Step] = (),
) -> Named:
    """The result of one planned matmul from this rank's shards of its operands, dims in an order of its own choice.

    bias: [N] along the last dim of the result as it is after the matmul; added once. wanted: the order of dims in which
    the result is best contiguous. done: steps that its operands have been through already.
    """
    done = tuple(done)
    before, fused, after = plan.stages(done)
    now = {plan.names[0]: a, plan.names[1]: b}
    for step, sharding in before:
        now[step.tensor] = run.plain(step, sharding, now[step.tensor])
    a, b = now[plan.names[0]], now[plan.names[1]]
    # A layer multiplies the same shapes again and again: what they decide is worked out once.
    key, products = (plan, a.dims, b.dims, wanted, done, bias is None), run.partition.products
    product = products.get(key)
    if product is None:
        product = products[key] = _product(run, plan, a, b, fused, bias is not None, wanted or plan.c.names)
    out: Named = product.run(run, a.tensor, b.tensor, bias)
    for step, sharding in after:
        out = run.plain(step, sharding, out)
    return out
