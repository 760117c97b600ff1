"""The sharded matmul as one registered, differentiable operator: forward and backward are plans, run step by step.

    y[M.., N] = x[M.., K] @ w[K, N]     forward   plan.forward
    dx = dy @ w.T                       backward  plan.dx, if x needs a gradient
    dw = x.T @ dy                                 plan.dw, if w needs one
    db = sum of dy over its rows                  then over the ranks that hold other rows, if the bias needs one

Saved: the local shards of x (for dw) and w (for dx), never anything gathered; backward gathers again. What dx and dw
both gather of dy is gathered once. The operator is opaque to torch.compile; its fake runs the same steps on shapes
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from . import groups, notation
from .execute import Named, Runner, execute, only_product
from .notation import Spec, parse
from .pairs import pair
from .partition import Partition
from .plan import Plan, plan
from .redistribute import Step, moved
from .registered import operator

# Between the group names, which an operator takes as one string.
SEPARATOR = "\n"


@dataclass(frozen=True)
class Problem:
    """Everything about one call but its tensors, as the operator's plain arguments carry it.

    group_names: one a mesh axis, in the spec's order. ranks: this rank's number in each; uneven shapes hang on it, and
    what a compiler has kept of one rank's graph, on disk too, must not be taken for another's. lengths: one a dim, in
    the spec's order. splits: for each dim the number of explicit lengths, then those. w_transposed: w is stored [N, K].
    by_size: plan by bytes and FLOPs, not the usual way.
    """

    spec: str
    group_names: tuple[str, ...]
    ranks: tuple[int, ...]
    lengths: tuple[int, ...]
    splits: tuple[int, ...]
    w_transposed: bool
    by_size: bool
    schedule: str
    algorithm: str
    debug: bool = False
    producer: str = "auto"

    @classmethod
    def of(
        cls,
        spec: str,
        group_names: str,
        ranks: Sequence[int],
        lengths: Sequence[int],
        splits: Sequence[int],
        *rest: Any,
    ) -> Problem:
        out: Problem = _cached(_problem, spec, group_names, tuple(ranks), tuple(lengths), tuple(splits), *rest)
        return out

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The operator's arguments after its tensors."""
        spec, names, *rest = astuple(self)
        return spec, SEPARATOR.join(names), *rest

    @cached_property
    def parsed(self) -> Spec:
        return parse(self.spec)

    @cached_property
    def dims(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The names of the dims of x, w and y in the order in which they are stored."""
        spec = self.parsed
        w = (spec.n, spec.k) if self.w_transposed else (spec.k, spec.n)
        return spec.a.names, w, spec.c.names

    def partition(self) -> Partition:
        """This rank's view of the lengths."""
        members = (groups.resolve(name) for name in self.group_names)
        places = tuple((rank, group.size()) for rank, group in zip(self.ranks, members, strict=True))
        out: Partition = _cached(_partition, self, places)
        return out

    def plan(self, dtype: torch.dtype) -> Plan:
        """The plan that every rank makes alike."""
        sizes = tuple(groups.named(name).size() for name in self.group_names) if self.by_size else ()
        key = (dtype, sizes)
        if key not in self._plans:
            spec = self.parsed
            by_size = (self.spec, spec.dim_names, self.lengths, spec.mesh_axes, sizes, str(dtype))
            self._plans[key] = _plan_by_size(*by_size) if self.by_size else plan(self.spec)
        return self._plans[key]

    @cached_property
    def _plans(self) -> dict[tuple[torch.dtype, tuple[int, ...]], Plan]:
        return {}

    def runner(self, fake: bool) -> Runner:
        """What runs the steps, or their shapes."""
        kept = self.ready(("runner", fake))
        if kept is not None:
            return kept[0]
        by_axis = {
            axis: ref(groups.named(name)) for axis, name in zip(self.parsed.mesh_axes, self.group_names, strict=True)
        }
        kind = _Shapes if fake else Runner
        said = "" if fake else self._said()
        runner = kind(self.partition(), by_axis, self.schedule, self.algorithm, self.debug, self.producer, said)
        self._ready["runner", fake] = runner, None
        return runner

    def _said(self) -> str:
        # The spec, which names the dims of rows, and the lengths of those that are whole; not where a rank has rows of
        # its own, as in a fully sharded layer.
        spec, lengths = self.parsed, dict(zip(self.parsed.dim_names, self.lengths, strict=True))
        rows = [name for name in spec.a.names if name != spec.k]
        if any(spec.a.axes(name) and spec.a.axes(name) == spec.c.axes(name) for name in rows):
            return self.spec
        whole = [name for name in rows if not spec.a.axes(name) and not spec.c.axes(name)]
        return ", ".join((self.spec, *(f"{name}={lengths[name]}" for name in whole)))

    @cached_property
    def _ready(self) -> dict[tuple[Any, ...], tuple[Runner, Any]]:
        return {}

    def ready(self, key: tuple[Any, ...]) -> tuple[Runner, Any] | None:
        """What is kept under that key, while its groups are those of their names."""
        kept = self._ready.get(key)
        if kept is not None:
            for name, group in zip(self.group_names, kept[0].groups.values(), strict=True):
                # One that was destroyed may have been made anew under its name.
                if groups.named(name) is not group():
                    return None
        return kept

    def keep(self, key: tuple[Any, ...], runner: Runner, op: Any) -> None:
        """A call that is one op and nothing else, for the calls to come."""
        if op is not None:
            self._ready[key] = runner, op


# A layer makes the same call again and again: what depends on its arguments alone is made once.


def _cached(make: Any, *args: Any) -> Any:
    # Lengths that torch.compile leaves open cannot be hashed: those calls, made once a graph, are not kept.
    try:
        return make(*args)
    except TypeError as error:
        if "SymInt" not in str(error):
            raise
        return make.__wrapped__(*args)


@lru_cache(maxsize=4096)
def _problem(spec: str, group_names: str, *rest: Any) -> Problem:
    return Problem(spec, tuple(group_names.split(SEPARATOR)) if group_names else (), *rest)


@lru_cache(maxsize=4096)
def _partition(problem: Problem, places: tuple[tuple[int, int], ...]) -> Partition:
    spec = problem.parsed
    splits, rest = {}, list(problem.splits)
    for name in spec.dim_names:
        count, rest = rest[0], rest[1:]
        if count:
            splits[name], rest = tuple(rest[:count]), rest[count:]
    lengths = dict(zip(spec.dim_names, problem.lengths, strict=True))
    return Partition(lengths, dict(zip(spec.mesh_axes, places, strict=True)), splits)


@lru_cache(maxsize=1024)
def _plan_by_size(
    spec: str,
    dims: tuple[str, ...],
    lengths: tuple[int, ...],
    axes: tuple[str, ...],
    ranks: tuple[int, ...],
    dtype: str,
) -> Plan:
    sizes, mesh = dict(zip(dims, lengths, strict=True)), dict(zip(axes, ranks, strict=True))
    return plan(spec, sizes=sizes, mesh=mesh, dtype=dtype)


class _Shapes(Runner):
    """Runs no collective: makes tensors of the shapes and strides that one would give."""

    def call(self, op: str, axis: str, x: Tensor, *operands: Tensor | None, **options: Any) -> Any:
        sizes, rank = options.get("sizes", ()), self.partition.place[axis][0]
        if op == "all_reduce":
            return x.new_empty(x.shape)
        if op == "all_gather":
            return x.new_empty(sum(sizes), x.shape[1])
        if op == "reduce_scatter":
            return x.new_empty(sizes[rank], x.shape[1])
        b = operands[0]
        assert b is not None
        if op == "all_gather_two_matmuls":
            right = operands[1]
            assert right is not None
            return x.new_empty(sum(sizes), b.shape[1]), x.new_empty(x.shape[1], right.shape[1])
        if op == "matmul_scatter_and_gather":
            left, gathered = operands[1:]
            assert left is not None
            assert gathered is not None
            return x.new_empty(sizes[rank], b.shape[1]), x.new_empty(left.shape[0], gathered.shape[1])
        rows, cols = x.shape[0], b.shape[1]
        if op == "all_gather_matmul":
            rows = sum(sizes) if options["gather_dim"] == 0 else rows
            return x.new_empty((cols, rows) if options["transposed"] else (rows, cols))
        if op == "matmul_reduce_scatter":
            return x.new_empty((sizes[rank], cols) if options["scatter_dim"] == 0 else (rows, sizes[rank]))
        return x.new_empty(rows, cols)


def forward(x: Tensor, w: Tensor, bias: Tensor | None, problem: Problem, *, fake: bool = False) -> Tensor:
    """y on this rank, or its shape, without a gradient."""
    ready = problem.ready(("forward", x.dtype, bias is None)) if not fake else None
    if ready is not None:
        runner, product = ready
        only: Tensor = product.run(runner, x, w, bias).tensor
        return only
    dims_x, dims_w, dims_y = problem.dims
    plan, run = problem.plan(x.dtype).forward, problem.runner(fake)
    out = execute(run, plan, Named(x, dims_x), Named(w, dims_w), bias=bias).ordered(dims_y)
    if not fake and plan.c.names == dims_y:
        problem.keep(("forward", x.dtype, bias is None), run, only_product(run, plan, dims_x, dims_w, bias is not None))
    return out


def backward(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    needs: tuple[bool, bool, bool],
    problem: Problem,
    *,
    fake: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, db) on this rank; needs: of which of them.

    x and w are [0] where they are not needed; so is a gradient that nobody asked for.
    """
    dims_x, dims_w, dims_y = problem.dims
    needs_x, needs_w, needs_bias = needs
    ready = problem.ready(("pair", dy.dtype)) if needs_x and needs_w and not needs_bias and not fake else None
    if ready is not None:
        named_dx, named_dw = ready[1].run(ready[0], dy, x, w)
        return named_dx.ordered(dims_x), named_dw.ordered(dims_w), dy.new_empty(0)
    run, plans = problem.runner(fake), problem.plan(dy.dtype)
    named = Named(dy, dims_y)
    # A tensor for each: an operator's results may not share memory.
    db = _bias_gradient(run, problem.parsed, named) if needs_bias else dy.new_empty(0)
    done: tuple[Step, ...] = ()
    both = pair(run, plans, named, Named(x, dims_x), Named(w, dims_w)) if needs_x and needs_w else None
    if both is not None:
        if not fake:
            problem.keep(("pair", dy.dtype), run, both)
        named_dx, named_dw = both.run(run, dy, x, w)
        return named_dx.ordered(dims_x), named_dw.ordered(dims_w), db
    dx, dw = dy.new_empty(0), dy.new_empty(0)
    if needs_x and needs_w and plans.shared:
        done = plans.shared
        for step, before, _ in plans.dx.walk():
            if replace(step, fused=False) in done:
                named = run.plain(step, before[0], named)
    if needs_x:
        dx = execute(run, plans.dx, named, Named(w, dims_w), wanted=dims_x, done=done).ordered(dims_x)
    if needs_w:
        dw = execute(run, plans.dw, Named(x, dims_x), named, wanted=dims_w, done=done).ordered(dims_w)
    return dx, dw, db


def _bias_gradient(run: Runner, spec: Spec, dy: Named) -> Tensor:
    # This rank's columns where w holds no others; of a w with all columns the bias is whole too.
    rows = tuple(name for name in spec.c.names if name != spec.n)
    db, now = Named(dy.matrix(rows, (spec.n,)).sum(0), (spec.n,)), notation.Tensor(spec.c.dims[-1:])
    # Ranks that hold other rows hold other terms.
    for axis in (axis for name in rows for axis in spec.c.axes(name)):
        db = run.plain(Step("all_reduce", "db", axis), now, db)
    while now.used and not spec.b.axes(spec.n):
        step = Step("all_gather", "db", now.used[-1], spec.n)
        db, now = run.plain(step, now, db), moved(now, step)
    return db.tensor


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, *ctx.problem = inputs
    needs_x, needs_w = ctx.needs_input_grad[:2]
    # Local shards only, and only those that a gradient will be made of.
    ctx.save_for_backward(x if needs_w else None, w if needs_x else None)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
    x, w = (dy.new_empty(0) if saved is None else saved for saved in ctx.saved_tensors)
    out = sharded_matmul_backward(dy, x, w, needs_x, needs_w, needs_bias, *ctx.problem)
    wanted = zip(out, (needs_x, needs_w, needs_bias), strict=True)
    return (*(grad if needed else None for grad, needed in wanted), *(None for _ in ctx.problem))


def _fake(
    x: Tensor, w: Tensor, bias: Tensor | None, spec: str, group_names: str, ranks: Sequence[int],
    lengths: Sequence[int], splits: Sequence[int], w_transposed: bool, by_size: bool, schedule: str, algorithm: str,
    debug: bool = False, producer: str = "auto",
) -> Tensor:  # fmt: skip
    problem = Problem.of(
        spec, group_names, ranks, lengths, splits, w_transposed, by_size, schedule, algorithm, debug, producer
    )
    return forward(x, w, bias, problem, fake=True)


@operator("sharded_matmul", _fake, _gradients, _setup)
def sharded_matmul(
    x: Tensor, w: Tensor, bias: Tensor | None, spec: str, group_names: str, ranks: Sequence[int],
    lengths: Sequence[int], splits: Sequence[int], w_transposed: bool, by_size: bool, schedule: str, algorithm: str,
    debug: bool = False, producer: str = "auto",
) -> Tensor:  # fmt: skip
    """y = x @ w + bias on shards; the arguments after the tensors are those of `Problem`."""
    problem = Problem.of(
        spec, group_names, ranks, lengths, splits, w_transposed, by_size, schedule, algorithm, debug, producer
    )
    return forward(x, w, bias, problem)


def _fake_backward(
    dy: Tensor, x: Tensor, w: Tensor, needs_x: bool, needs_w: bool, needs_bias: bool, spec: str,
    group_names: str, ranks: Sequence[int], lengths: Sequence[int], splits: Sequence[int], w_transposed: bool,
    by_size: bool, schedule: str, algorithm: str, debug: bool = False, producer: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    problem = Problem.of(
        spec, group_names, ranks, lengths, splits, w_transposed, by_size, schedule, algorithm, debug, producer
    )
    return backward(dy, x, w, (needs_x, needs_w, needs_bias), problem, fake=True)


def _refuse_second(ctx: Any, *grads: Tensor) -> Any:
    raise NotImplementedError(
        "second derivatives of fusedtp's matmuls are not implemented: what was computed with create_graph=True can be "
        "used, but not differentiated with respect to what they were given"
    )


@operator("sharded_matmul_backward", _fake_backward, _refuse_second)
def sharded_matmul_backward(
    dy: Tensor, x: Tensor, w: Tensor, needs_x: bool, needs_w: bool, needs_bias: bool, spec: str,
    group_names: str, ranks: Sequence[int], lengths: Sequence[int], splits: Sequence[int], w_transposed: bool,
    by_size: bool, schedule: str, algorithm: str, debug: bool = False, producer: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dw, db), each [0] where it is not needed; so may x and w be."""
    problem = Problem.of(
        spec, group_names, ranks, lengths, splits, w_transposed, by_size, schedule, algorithm, debug, producer
    )
    return backward(dy, x, w, (needs_x, needs_w, needs_bias), problem)
