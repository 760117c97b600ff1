"""Programs: a plan as an ordered list of tasks on matrices for one rank, with all lengths known.

A program is built once for a call and runs with its tensors, or with fakes to compute shapes only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ..float8 import largest_finite
from ..op import (
    ALL_GATHER,
    ALL_GATHER_MATMUL,
    ALL_REDUCE,
    AS_ANY,
    GATED,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    OPS,
    Op,
    Task,
)
from ..scaled import Cast, Casts
from ..schedules.local import activated, mm, summed, summed_rows
from ..schedules.verbs import Epilogue
from ..sharding import notation
from ..sharding.plan import MatmulPlan, Partition, Plan
from ..sharding.routes import Step, moved
from .matrices import Blocks, Matrix, Named, flat_sizes, operands_of, outermost

# A tensor, its sharding, its cast to float8 (None for none), and its contracted dims.
Use: TypeAlias = tuple[Named, notation.Tensor, "Cast | None", Sequence[str]]


class Builder(Protocol):
    """The part of a `Program` that `cast` uses."""

    partition: Partition

    def add(self, run: Any, reads: Sequence[str], *made: Any) -> tuple[Named, ...]: ...

    def task(self, task: Task, axis: str, operands: Mapping[str, Any], *made: Any) -> tuple[Named, ...]: ...


def cast(program: Builder, given: Sequence[Use]) -> list[Named]:
    """Add the steps that cast these tensors to float8, each once. Tensors without a cast stay unchanged.

    A tensor with a single scale has the same scale on all ranks. The ranks all-gather the largest magnitude, of several
    tensors at once.
    """
    # Keyed by name: symbolic lengths cannot be hashed.
    agreed: dict[str, tuple[str, int]] = {}
    whole = [(x, lies.used) for x, lies, its, _ in given if its is not None and its.whole]
    for axes in dict.fromkeys(axes for _, axes in whole):
        alike = list({x.name: x for x, its in whole if its == axes}.values())
        largest = _largest(program, alike, axes)
        agreed |= {x.name: (largest.name, i) for i, x in enumerate(alike)}
    made: dict[Any, Named] = {}
    found = []
    for x, _, its, contracted in given:
        if its is None:
            found.append(x)
            continue
        key = x.name, its, tuple(contracted)
        if key not in made:
            step = _casting(its, x, contracted, agreed.get(x.name))
            made[key] = program.add(step.run, step.reads, (x.dims, x.lengths))[0]
        found.append(made[key])
    return found


def _largest(program: Builder, xs: Sequence[Named], axes: Sequence[str]) -> Named:
    # [1, len(xs)]: the largest magnitude of each tensor over the ranks of these axes.
    dims, made = (".one", ".each"), _measuring(xs)
    found = program.add(made.run, made.reads, (dims, (1, len(xs))))[0]
    for axis in axes:
        num_ranks = program.partition.place[axis][1]
        if num_ranks > 1:
            task = Task(ALL_GATHER, {"a": (1, len(xs))}, torch.float32, (1,) * num_ranks)
            matrix = Matrix.of(found, dims[:1], dims[1:])
            everyone = program.task(task, axis, {"a": matrix}, (dims, (num_ranks, len(xs))))[0]
            made = _largest_of(everyone)
            found = program.add(made.run, made.reads, (dims, (1, len(xs))))[0]
    return found


class _Made(NamedTuple):
    """Function of a step, which takes all tensors by name, and the names of the tensors that it reads."""

    run: Callable[[dict[str, Any], Any], list[Any]]
    reads: tuple[str, ...]


def _casting(its: Cast, x: Named, contracted: Sequence[str], largest: tuple[str, int] | None) -> _Made:
    """Cast x to float8. For a single scale, `largest` names the tensor [1, ..] with the magnitude, and the column."""
    dims = tuple(i for i, name in enumerate(x.dims) if name in contracted)
    if largest is None:
        return _Made(lambda tensors, runs: [its(tensors[x.name], dims)], (x.name,))
    name, i = largest
    return _Made(lambda tensors, runs: [its(tensors[x.name], dims, tensors[name][0, i])], (x.name, name))


def _measuring(xs: Sequence[Named]) -> _Made:
    """Compute [1, len(xs)]: the largest magnitude of each tensor on this rank."""
    names = tuple(x.name for x in xs)
    return _Made(lambda tensors, runs: [torch.stack([largest_finite(tensors[name]) for name in names])[None]], names)


def _largest_of(everyone: Named) -> _Made:
    """Compute [1, ..]: the largest magnitudes over all ranks."""
    return _Made(lambda tensors, runs: [tensors[everyone.name].amax(0, keepdim=True)], (everyone.name,))


def _bias_gradient(program: Program, plans: Plan, dy: Named) -> Named:
    """Add the gradient of a bias: the sum of dy's rows, over ranks too, with the bias's sharding."""
    # The bias is sharded like w's columns.
    spec = plans.spec
    rows = tuple(name for name in spec.c.names if name != spec.n)
    now = notation.Tensor(spec.c.dims[-1:])
    # The row dims that are split, each with its axis.
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
    # The sum of dy's rows, which may be `split` over one axis: a product with ones that contracts the rows.
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
        operands = {"a": Matrix.of(ones, ("",), (".rows",)), "b": matrix}
        shapes = {name: each.size for name, each in operands.items()}
        task = Task(MATMUL_ALL_REDUCE, shapes, program.dtype, leaves=program.leaves)
        return program.task(task, axis, operands, made)[0]
    whole: Named | None = None
    if split:
        # Leaves would end inside a rank's rows, so every rank gathers all rows and adds them.
        flat = flat_sizes(sizes, order, dy, dim)
        task = Task(ALL_GATHER, {"a": matrix.size}, program.dtype, flat)
        (whole,) = program.task(task, axis, {"a": matrix}, ((".rows", n), (sum(flat), dy.length(n))))
        matrix = Matrix.of(whole, (".rows",), (n,))
    return program.add(
        lambda tensors, runs: [summed_rows(matrix.view(tensors[matrix.name]), program.leaves)], (matrix.name,), made
    )[0]


class Runs(Protocol):
    """Function that runs a task over a mesh axis. `place` is the task's index in the program."""

    def __call__(self, place: int, task: Task, axis: str, operands: Mapping[str, Tensor]) -> list[Tensor]: ...


@dataclass
class _Step:
    # run: takes tensors by name and returns the tensors `made`. frees: tensors that no later step reads.
    run: Callable[[dict[str, Tensor], Runs], Sequence[Tensor]]
    reads: tuple[str, ...]
    made: tuple[str, ...]
    frees: tuple[str, ...] = ()


@dataclass(frozen=True)
class Only:
    """A program of one task.

    - `task`, `axis`: the task and its mesh axis.
    - `operands`: the task's operands, by name.
    - `results`: for each result of the program, its index in the task's results, its shape if it is no matrix, and the
      permutation of its dims, if any.
    """

    task: Task
    axis: str
    operands: Mapping[str, Matrix | str]
    results: tuple[tuple[int, tuple[int, ...] | None, tuple[int, ...] | None], ...]


class Program:
    """Steps from given tensors to results."""

    def __init__(
        self, partition: Partition, dtype: torch.dtype, algorithm: str = "auto", float8: tuple[torch.dtype, ...] = (),
        recipe: Casts | None = None, *, blocks: bool = False, norm: tuple[str, float] = ("", 0.0), leaves: int = 0,
    ) -> None:  # fmt: skip
        self.partition, self.dtype, self._algorithm = partition, dtype, algorithm
        # The dtypes of forward's float8 operands and whether they have block scales, or the recipe that casts operands.
        self._float8, self._blocks, self._recipe = float8, blocks, recipe or {}
        # The name and eps of a task's norm.
        self._norm = norm
        # The fields of `Task` with these names. The argument `leaves` stands for both, as in settings.
        self.leaves, self.any_order = max(0, leaves), leaves == AS_ANY
        self._steps: list[_Step] = []
        self._results: list[tuple[str, tuple[int, ...] | None]] = []
        self._num_names = 0
        self.tasks: list[tuple[Task, str]] = []
        self._last: tuple[Task, str, Mapping[str, Matrix | str], Sequence[tuple[int, ...] | None]] | None = None

    def run(self, tensors: dict[str, Tensor], runs: Runs) -> list[Tensor]:
        """Run the steps on tensors by name and return the results."""
        tensors = {**tensors}
        for step in self._steps:
            for name, out in zip(step.made, step.run(tensors, runs), strict=True):
                tensors[name] = out
            for name in step.frees:
                del tensors[name]
        return [tensors[name] if order is None else tensors[name].permute(order) for name, order in self._results]

    def finish(self, results: Sequence[tuple[Named, tuple[str, ...]]]) -> Program:
        """Set the results, each with the order of its dims, and return the program. No step may be added afterwards."""
        self._results = [(each.name, each.order(dims)) for each, dims in results]
        kept = {name for name, _ in self._results}
        for step in reversed(self._steps):
            step.frees = tuple(
                name for name in dict.fromkeys((*step.reads, *step.made)) if name not in kept and "." in name
            )
            kept.update(step.reads)
        return self

    @property
    def only(self) -> Only | None:
        """Return the program's only step if it is a task, else None."""
        if len(self._steps) != 1 or self._last is None:
            return None
        task, axis, operands, shapes = self._last
        made = self._steps[0].made
        results = [(made.index(name), shapes[made.index(name)], order) for name, order in self._results]
        return Only(task, axis, operands, tuple(results))

    def add(self, run: Any, reads: Sequence[str], *made: tuple[tuple[str, ...], Sequence[int]]) -> tuple[Named, ...]:
        tensors = []
        for dims, lengths in made:
            # A leading dot marks tensors that the program makes. Given tensors have none.
            tensors.append(Named(f".{self._num_names}", dims, tuple(lengths)))
            self._num_names += 1
        self._steps.append(_Step(run, tuple(reads), tuple(each.name for each in tensors)))
        return tuple(tensors)

    def task(
        self, task: Task, axis: str, operands: Mapping[str, Matrix | str],
        *made: tuple[tuple[str, ...], Sequence[int]],
    ) -> tuple[Named, ...]:  # fmt: skip
        # made: the dims and lengths of each result.
        place = len(self.tasks)
        self.tasks.append((task, axis))
        shapes = [None if len(dims) == 2 else tuple(lengths) for dims, lengths in made]

        def run(tensors: dict[str, Tensor], runs: Runs) -> list[Tensor]:
            taken = {
                name: each.view(tensors[each.name]) if isinstance(each, Matrix) else tensors[each]
                for name, each in operands.items()
            }
            outs = runs(place, task, axis, taken)
            return [out if shape is None else out.view(shape) for out, shape in zip(outs, shapes, strict=True)]

        reads = [each if isinstance(each, str) else each.name for each in operands.values()]
        self._last = task, axis, operands, shapes
        return self.add(run, reads, *made)

    def sizes(self, step: Step, before: notation.Tensor) -> tuple[int, ...]:
        """Return every rank's length of the dim that a step gathers, slices or scatters."""
        axes = before.axes(step.dim)
        outer = axes[:-1] if step.kind == "all_gather" else axes
        return self.partition.sizes(step.dim, outer, step.axis)

    def plain(self, step: Step, before: notation.Tensor, x: Named) -> Named:
        """Add a slice or a collective of x without a matmul; none over an axis of one rank."""
        place, num_ranks = self.partition.place[step.axis]
        if num_ranks == 1:
            return x
        if step.kind == "all_reduce":
            return self._all_reduce(step.axis, x)
        sizes, others = self.sizes(step, before), tuple(dim for dim in x.dims if dim != step.dim)
        if step.kind == "slice":
            at, begin, length = x.dims.index(step.dim), sum(sizes[:place]), sizes[place]
            lengths = [length if i == at else each for i, each in enumerate(x.lengths)]
            name = x.name
            return self.add(
                lambda tensors, runs: [tensors[name].narrow(at, begin, length)], (name,), (x.dims, lengths)
            )[0]
        matrix = Matrix.of(x, (step.dim,), others)
        task = Task(OPS[step.kind], {"a": matrix.size}, self.dtype, sizes, any_order=self._of_sums(OPS[step.kind]))
        length = sum(sizes) if step.kind == "all_gather" else sizes[place]
        made = (step.dim, *others), (length, *(x.length(dim) for dim in others))
        return self.task(task, step.axis, {"a": matrix}, made)[0]

    def _all_reduce(self, axis: str, x: Named) -> Named:
        if not math.prod(x.lengths):
            return x
        matrix = Matrix(x.name, None, len(x.lengths) != 2, (math.prod(x.lengths[:-1]), x.lengths[-1]))
        task = Task(ALL_REDUCE, {"a": matrix.size}, self.dtype, any_order=self.any_order)
        return self.task(task, axis, {"a": matrix}, (x.dims, x.lengths))[0]

    def _of_sums(self, op: Op) -> bool:
        # A gather adds no terms.
        return self.any_order and op.kind != "gather"

    def matmul(
        self, plan: MatmulPlan, a: Blocks, b: Blocks, *, biases: Sequence[str | None] = (),
        residual: Named | None = None, norm: Sequence[str] = (), activation: str = "", keeps: bool = False,
        wanted: tuple[str, ...] | None = None, done: Sequence[Step] = (),
    ) -> Blocks:  # fmt: skip
        """Add a planned matmul. It chooses the order of its result's dims.

        - `a`, `b`: blocks. One a and several b have a result for each b. Several a and as many b have one result, the
          sum of the products.
        - `biases`: [N] along the last dim of each result of the matmul, added once.
        - `residual`: has the shape of the final result.
        - `norm`: names of its weight and bias. The normed result follows the sum.
        - `activation`, `keeps`: as of a task. No step may follow an activation.
        - `wanted`: the preferred order of dims in memory.
        - `done`: steps that the operands have already passed.
        """
        before, fused, after = plan.stages(tuple(done))
        now: dict[str, Blocks] = {plan.names[0]: a, plan.names[1]: b}
        lies = dict(zip(plan.names[:2], (plan.a, plan.b), strict=True))
        for step in done:
            if step.tensor in lies:
                lies[step.tensor] = moved(lies[step.tensor], step)
        for step, sharding in before:
            now[step.tensor] = [self.plain(step, sharding, each) for each in now[step.tensor]]
            lies[step.tensor] = moved(sharding, step)
        casts, float8 = self._recipe.get(plan.names[2], {}), self._float8
        if casts:
            uses = [(each, lies[name], casts[name], plan.contraction) for name in now for each in now[name]]
            made = iter(cast(self, uses))
            now = {name: [next(made) for _ in blocks] for name, blocks in now.items()}
            float8 = tuple(casts[name].dtype for name in plan.names[:2])
        assert (residual is None and not norm) or (fused is not None and not after)
        assert not activation or not after
        outs = self._product(
            plan, now[plan.names[0]], now[plan.names[1]], fused, biases, residual, norm, activation,
            keeps, wanted or plan.c.names, float8,
        )  # fmt: skip
        for step, sharding in after:
            outs = [self.plain(step, sharding, out) for out in outs]
        return outs

    def _product(
        self, plan: MatmulPlan, lefts: Blocks, rights: Blocks, fused: tuple[Step, notation.Tensor] | None,
        biases: Sequence[str | None], residual: Named | None, norm: Sequence[str], activation: str, keeps: bool,
        wanted: tuple[str, ...], float8: tuple[torch.dtype, ...],
    ) -> Blocks:  # fmt: skip
        # The matmul, as a task if a collective is fused with it.
        step = fused[0] if fused is not None else None
        dim = step.dim if step is not None else ""
        sizes = self.sizes(*fused) if fused is not None and dim else ()
        # A task gathers its first operand. If the plan gathers the second, the operands are exchanged.
        exchanged = step is not None and step.tensor == plan.names[1]
        if exchanged:
            lefts, rights = rights, lefts
        a, b = lefts[0], rights[0]
        rows = outermost(tuple(name for name in plan.c.names if name in a.dims), dim)
        cols = outermost(tuple(name for name in plan.c.names if name in b.dims), dim)
        contraction = outermost(plan.contraction, dim)
        # The result is [rows, cols], or [cols, rows] if the rows are wanted as its last dims.
        transposed = wanted[-len(rows) :] == rows and wanted[-len(cols) :] != cols
        # A bias runs along the result's last dim in the notation, which is b's and the last of `wanted`.
        assert not any(biases) or transposed == exchanged
        lengths = {name: x.length(name) for names, x in ((rows, a), (cols, b)) for name in names}
        op: Op | None = None
        flat: tuple[int, ...] = ()
        along = 0
        if step is not None and step.kind == "all_gather":
            op, along = ALL_GATHER_MATMUL, int(dim not in rows)
            flat = flat_sizes(sizes, rows if dim in rows else contraction, a, dim)
            lengths |= {dim: sum(sizes)} if dim in rows else {}
        elif step is not None and step.kind == "all_reduce":
            op = MATMUL_ALL_REDUCE
        elif step is not None:
            op, along = MATMUL_REDUCE_SCATTER, int((dim in cols) != transposed)
            flat = flat_sizes(sizes, *((rows, a) if dim in rows else (cols, b)), dim)
            lengths[dim] = sizes[self.partition.place[step.axis][0]]
        dims = (*cols, *rows) if transposed else (*rows, *cols)
        is_sum = len(lefts) > 1
        made = []
        for each in rights[:1] if is_sum else rights:
            own = lengths | {name: each.length(name) for name in cols if name != dim}
            made.append((dims, [own[name] for name in dims]))
        biases, columns = biases or (None,) * len(made), [each[-1] for _, each in made]
        products = made
        made = [*(made[:1] if activation in GATED else made), *(made if keeps or norm else ())]
        pairs = [
            (Matrix.of(left, rows, contraction), Matrix.of(right, contraction, cols))
            for left, right in zip(lefts if is_sum else [a] * len(rights), rights, strict=True)
        ]
        if transposed and op is not ALL_GATHER_MATMUL:
            # Without a gather the transposed product is the same task, which scatters the other dim.
            pairs = [(right.t(), left.t()) for left, right in pairs]
        if op is None or step is None:
            return self._local(pairs, biases, made, Epilogue(activation=activation, keeps=keeps))
        assert (residual is None and not norm) or not transposed
        added = None if residual is None else Matrix.of(residual, rows, cols)
        operands, shapes = operands_of(op, pairs, biases, columns, added, norm)
        algorithm = self._algorithm if op is MATMUL_ALL_REDUCE else "auto"
        turned = transposed and op is ALL_GATHER_MATMUL
        # The float8 dtype of the task's first operand.
        first = float8[int(exchanged)] if float8 else None
        name, eps = self._norm if norm else ("", 0.0)
        task = Task(
            op, shapes, self.dtype, flat, along, turned, algorithm, activation, keeps, first, self._blocks, name, eps,
            self.leaves, self._of_sums(op),
        )  # fmt: skip
        if not self.leaves or not activation:
            return self.task(task, step.axis, operands, *made)
        # With a tree order the activation is always the library's, on the rounded products.
        zs = self.task(replace(task, activation="", keeps=False), step.axis, operands, *products)
        names, epilogue = tuple(z.name for z in zs), Epilogue(activation=activation, keeps=keeps)
        return self.add(lambda tensors, runs: activated(epilogue, [tensors[z] for z in names]), names, *made)

    def _local(
        self, pairs: Sequence[tuple[Matrix, Matrix]], biases: Sequence[str | None],
        made: Sequence[tuple[tuple[str, ...], Sequence[int]]], epilogue: Epilogue,
    ) -> Blocks:  # fmt: skip
        shapes = [None if len(dims) == 2 else tuple(lengths) for dims, lengths in made]

        def run(tensors: dict[str, Tensor], runs: Runs) -> list[Tensor]:
            given = [(a.view(tensors[a.name]), b.view(tensors[b.name])) for a, b in pairs]
            added = [None if bias is None else tensors[bias] for bias in biases]
            if len(added) == 1:
                outs = [summed(given, added[0], self.leaves)]
            else:
                outs = [mm(a, b, bias, self.leaves) for (a, b), bias in zip(given, added, strict=True)]
            outs = activated(epilogue, outs)
            return [out if shape is None else out.view(shape) for out, shape in zip(outs, shapes, strict=True)]

        reads = [each.name for pair in pairs for each in pair] + [bias for bias in biases if bias is not None]
        return self.add(run, reads, *made)

    def gradients(self, plans: Plan, dy: Blocks, x: Named, w: Blocks, needs: Sequence[bool]) -> list[Named | None]:
        """Add the steps for dx, then dw and db of each block; None for gradients that are not needed.

        One task computes dx and dw if one gather serves both (`Plan.together`), or if one of them is scattered while
        the other's operand is gathered (`Plan.side_by_side`).
        """
        needs_x, needs_w, needs_bias = needs[0], needs[1::2], needs[2::2]
        pairs = zip(dy, needs_bias, strict=True)
        dbs = [_bias_gradient(self, plans, each) if needed else None for each, needed in pairs]
        wanted = [i for i, needed in enumerate(needs_w) if needed]
        dx: Named | None = None
        found: Blocks = ()
        # No pair if the recipe casts operands of one gradient only: the gathered operand would travel in two dtypes.
        together = not self._recipe or len({bool(self._recipe.get(name)) for name in ("dx", "dw")}) == 1
        if needs_x and wanted and together and (plans.together or plans.side_by_side):
            dx, *found = self._pair(plans, dy, x, w, wanted)
        else:
            done: tuple[Step, ...] = ()
            if needs_x and wanted and plans.shared:
                # Steps that both gradients begin with.
                done = plans.shared
                for step, before, _ in plans.dx.walked:
                    if replace(step, fused=False) in done:
                        dy = [self.plain(step, before[0], each) for each in dy]
            if needs_x:
                dx = self.matmul(plans.dx, dy, w, wanted=x.dims, done=done)[0]
            if wanted:
                found = self.matmul(plans.dw, [x], [dy[i] for i in wanted], wanted=w[0].dims, done=done)
        dws = dict(zip(wanted, found, strict=True))
        return [dx, *(each for i, db in enumerate(dbs) for each in (dws.get(i), db))]

    def _pair(self, plans: Plan, dy: Blocks, x: Named, w: Blocks, wanted: Sequence[int]) -> Blocks:
        # One task for dx and the wanted dw. It gathers one operand for both, or gathers one and scatters one result:
        #   along rows:  dx = a @ b is scattered (a = dy, b = w); dw = left @ X (left = dy.T, X = gathered x)
        #   along N:     dw = a @ b is scattered (a = dy.T, b = x); dx = left @ W (left = dy, W = gathered w)
        spec, n, k = plans.spec, (plans.spec.n,), (plans.spec.k,)
        lies = {"x": spec.a, "w": spec.b}
        placed = plans.together or plans.side_by_side
        assert placed is not None
        step, before = placed
        sizes = self.sizes(step, before)
        rows = outermost(tuple(name for name in dy[0].dims if name != spec.n), step.dim)
        on_columns = step.dim == spec.n
        flat = sizes if on_columns else flat_sizes(sizes, rows, dy[0], step.dim)
        # The dims contracted in the first product and in the second. An operand gathered for the second product only
        # travels with scales of its rows.
        inner, outer = (rows, n) if on_columns else (n, rows)
        made, then, of_one, of_other = ("dw", "dx", "x", "w") if on_columns else ("dx", "dw", "w", "x")
        casts = self._recipe.get(made, {}), self._recipe.get(then, {})
        uses: list[Use] = []
        for one_dy, one_w in zip(dy, w, strict=True):
            named = {"x": x, "w": one_w}
            uses += [
                (one_dy, spec.c, casts[0].get("dy"), inner), (named[of_one], lies[of_one], casts[0].get(of_one), inner),
                (one_dy, spec.c, None if plans.together else casts[1].get("dy"), outer),
                (named[of_other], lies[of_other], casts[1].get(of_other), outer if plans.together else k),
            ]  # fmt: skip
        taken = cast(self, uses)
        blocks = [
            (Matrix.of(first, outer, inner), Matrix.of(one, inner, k), Matrix.of(second, inner, outer),
             Matrix.of(other, outer, k))
            for first, one, second, other in zip(*(taken[i::4] for i in range(4)), strict=True)
        ]  # fmt: skip
        first, one, _, other = blocks[0]
        if plans.together:
            op, operands = ALL_GATHER_MATMUL, {"a": first, "b": one, "right": other}
        else:
            # The second product has the gathered operand on its right.
            op, operands = MATMUL_REDUCE_SCATTER, {"x": other}
            for i, (first, one, second, _) in enumerate(blocks):
                operands |= {f"a{i or ''}": first, f"b{i or ''}": one}
                if i in wanted:
                    operands[f"left{i or ''}"] = second
        shapes = {name: each.size for name, each in operands.items()}
        float8 = casts[0]["dy"].dtype if casts[0] else None
        task = Task(
            op, shapes, self.dtype, flat, float8=float8, leaves=self.leaves, any_order=self._of_sums(op)
        )  # fmt: skip
        dx = (*rows, spec.k), [*(x.length(name) for name in rows), x.length(spec.k)]
        dws = [((spec.n, spec.k), [w[i].length(spec.n), w[i].length(spec.k)]) for i in wanted]
        if not on_columns:
            return self.task(task, step.axis, operands, dx, *dws)
        dw, found = self.task(task, step.axis, operands, *dws, dx)
        return found, dw
