"""Programs: a plan as an ordered list of tasks on matrices for one rank, with all lengths known.

A program is built once for a call, which runs it on tensors, or on fakes to compute shapes only. A call that differs in
its rows alone takes the same steps, `at` its own lengths: views and functions read lengths from the tensors.

Tensors have named dims, so a weight can be stored [N, K] if the notation says [K, N]: operands are permuted views, not
transposed copies. The dim that a collective gathers or scatters becomes the outermost of the rows or of the
contraction: there the ranks' parts are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..epilogue import NO_EPILOGUE, RESULT, Epilogue, ended, numbered
from ..float8 import Formats, largest_finite
from ..op import (
    ALL_GATHER,
    ALL_GATHER_MATMUL,
    ALL_REDUCE,
    AS_ANY,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    OPS,
    Op,
    Product,
    Task,
)
from ..scaled import Cast, casts_of
from ..schedules.local import mm, summed, summed_rows
from ..sharding import notation
from ..sharding.plan import MatmulPlan, Partition, Plan
from ..sharding.routes import Step, moved
from .problems import Settings


@dataclass(frozen=True)
class Named:
    """A tensor of a program: its name, and the names and lengths of its dims in storage order."""

    name: str
    dims: tuple[str, ...]
    lengths: tuple[int, ...]

    def length(self, dim: str) -> int:
        return self.lengths[self.dims.index(dim)]

    def numel(self, dims: Sequence[str]) -> int:
        return math.prod([self.length(dim) for dim in dims])

    def order(self, dims: tuple[str, ...]) -> tuple[int, ...] | None:
        """Return the permutation that puts the dims in this order; None if they are in this order."""
        return None if dims == self.dims else tuple(self.dims.index(dim) for dim in dims)


# A tensor as blocks of its columns N: one block for each weight.
Blocks: TypeAlias = Sequence[Named]


@dataclass(frozen=True)
class MatrixView:
    """A tensor seen as a matrix.

    - `name`: the tensor's name.
    - `order`: permutation of the dims, None for none.
    - `dims`: number of dims that are flattened to the rows, and to the columns.
    - `shape`: [rows, cols] before the transpose.
    - `transposed`: whether to transpose last.
    """

    name: str
    order: tuple[int, ...] | None
    dims: tuple[int, int]
    shape: tuple[int, int]
    transposed: bool = False

    @cached_property
    def how(self) -> Literal["as it is", "transposed", "viewed"]:
        """Return the kind of view that `view` makes."""
        if self.dims != (1, 1) or self.order not in (None, (1, 0)):
            return "viewed"
        return "as it is" if (self.order is None) != self.transposed else "transposed"

    @classmethod
    def of(cls, x: Named, rows: tuple[str, ...], cols: tuple[str, ...]) -> MatrixView:
        """Return x as the matrix [rows, cols], each a list of dims. If it is a copy, x's last dim is innermost."""
        if cols and x.dims[-1] in rows:
            return cls.of(x, cols, rows).t()
        return cls(x.name, x.order((*rows, *cols)), (len(rows), len(cols)), (x.numel(rows), x.numel(cols)))

    def t(self) -> MatrixView:
        """Return the transposed matrix."""
        return replace(self, transposed=not self.transposed)

    @property
    def size(self) -> tuple[int, int]:
        """Return [rows, cols]."""
        return self.shape[::-1] if self.transposed else self.shape

    def view(self, x: Tensor) -> Tensor:
        """Return the matrix view of a tensor. Copy it only if flattened dims are not contiguous."""
        x = x if self.order is None else x.permute(self.order)
        if self.dims != (1, 1):
            # Of this tensor: `shape` may be that of other rows.
            rows = self.dims[0]
            x = x.reshape((math.prod(x.shape[:rows]), math.prod(x.shape[rows:])))
        return x.t() if self.transposed else x


def outermost(names: tuple[str, ...], first: str) -> tuple[str, ...]:
    """Return the names with `first` in front, if it is one of them."""
    return (first, *(name for name in names if name != first)) if first in names else names


class Split(NamedTuple):
    """Split of flattened dims over the ranks of `axis`: of the outermost, `dim`, which `outer` axes have split before.

    `others`: this rank's lengths of the other dims.
    """

    dim: str
    outer: tuple[str, ...]
    axis: str
    others: tuple[int, ...] = ()

    def along(self, x: Named, names: tuple[str, ...]) -> Split:
        """Return the split of x's flattened dims `names`."""
        return self._replace(others=tuple([x.length(name) for name in names if name != self.dim]))

    def sizes(self, partition: Partition) -> tuple[int, ...]:
        """Return every rank's length of the flattened dims."""
        sizes = partition.sizes(self.dim, self.outer, self.axis)
        if not self.others:
            return sizes
        per_index = math.prod(partition.again(self.others))
        return tuple([size * per_index for size in sizes])


class OperandDims(NamedTuple):
    """Operands of a matmul a @ b with the dims of its rows, columns and contraction. A dim that travels is outermost.

    `transposed`: whether the result is [cols, rows].
    """

    a: Named
    b: Named
    rows: tuple[str, ...]
    cols: tuple[str, ...]
    contraction: tuple[str, ...]
    transposed: bool

    @classmethod
    def of(cls, plan: MatmulPlan, a: Named, b: Named, travels: str, wanted: tuple[str, ...]) -> OperandDims:
        """Return the sides of a planned matmul. The result is [cols, rows] if rows are `wanted` as the last dims."""
        rows, cols = (outermost(tuple(name for name in plan.c.names if name in x.dims), travels) for x in (a, b))
        transposed = wanted[-len(rows) :] == rows and wanted[-len(cols) :] != cols
        return cls(a, b, rows, cols, outermost(plan.contraction, travels), transposed)

    def result(self, b: Named, changed: dict[str, int]) -> OutputShape:
        """Return the result of a @ b for one of several b. `changed`: as in `Fusion`."""
        lengths = dict(zip((*self.a.dims, *b.dims), (*self.a.lengths, *b.lengths), strict=True)) | changed
        dims = (*self.cols, *self.rows) if self.transposed else (*self.rows, *self.cols)
        return dims, [lengths[name] for name in dims]


class Fusion(NamedTuple):
    """Collective over an axis that is fused with a matmul: the op, its task's `dim`, and the `split` of its sizes.

    `changed`: the length that the collective changes, by dim.
    """

    op: Op
    axis: str
    dim: int
    split: Split | None
    changed: dict[str, int]


def operands_of(
    op: Op, pairs: Sequence[tuple[MatrixView, MatrixView]], epilogue: Epilogue, columns: Sequence[int],
    like_result: Callable[[str], MatrixView],
) -> tuple[dict[str, MatrixView | str], dict[str, tuple[int, int]]]:  # fmt: skip
    """Return the operands of a product by name, and their shapes.

    `columns`: of each result. `like_result`: the view of an epilogue's operand that has the result's shape.
    """
    operands: dict[str, MatrixView | str] = {}
    for a, b, (left, right) in zip(numbered("a", len(pairs)), numbered("b", len(pairs)), pairs, strict=True):
        # The gathered tensor is one operand for all weights.
        if op is not ALL_GATHER_MATMUL or not operands:
            operands[a] = left
        operands[b] = right
    shapes = {name: each.size for name, each in operands.items() if isinstance(each, MatrixView)}
    for kind, i, name in epilogue.names():
        if kind == RESULT:
            operands[name] = view = like_result(name)
            shapes[name] = view.size
        else:
            operands[name], shapes[name] = name, (1, columns[i])
    return operands, shapes


# A tensor, its sharding, its cast to float8 (None for none), and its contracted dims.
CastRequest: TypeAlias = tuple[Named, notation.Tensor, "Cast | None", Sequence[str]]
# Dims and lengths of a tensor that a step makes.
OutputShape: TypeAlias = tuple[tuple[str, ...], Sequence[int]]
# A function of tensors by name.
Local: TypeAlias = Callable[[dict[str, Any]], Sequence[Any]]


# Without eq, as calls look up bound tasks by steps.
@dataclass(eq=False)
class ProgramStep:
    """A step of a program: a task over a mesh axis, or `local`, a function of this rank's tensors by name.

    - `made`: names of the results.
    - `split`: of the task's sizes, if it has any.
    - `shapes`: for each result that is no matrix, its index and shape.
    - `frees`: tensors that no later step reads.
    """

    reads: tuple[str, ...]
    made: tuple[str, ...]
    local: Local | None = None
    task: Task | None = None
    axis: str = ""
    operands: Mapping[str, MatrixView | str] = field(default_factory=dict)
    split: Split | None = None
    shapes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    frees: tuple[str, ...] = ()

    def at(self, partition: Partition) -> ProgramStep:
        """Return the step with results in the shapes that they have with other rows."""
        if not self.shapes:
            return self
        made = object.__new__(ProgramStep)
        made.__dict__ = vars(self).copy()
        made.shapes = tuple([(i, partition.again(shape)) for i, shape in self.shapes])
        return made

    def task_at(self, operands: Mapping[str, Any], partition: Partition) -> Task:
        """Return the task on these operands, with other rows."""
        first, split = self.task, self.split
        assert first is not None
        shapes = {**first.shapes}
        for name, operand in operands.items():
            # Others are a bias, or parameters of a norm.
            if len(shape := operand.shape) == 2:
                shapes[name] = tuple(shape)
        return first.at(shapes, first.sizes if split is None else split.sizes(partition))


def _shapes(tensors: Sequence[Named]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    # `ProgramStep.shapes` of results that come as matrices.
    return tuple([(i, each.lengths) for i, each in enumerate(tensors) if len(each.dims) != 2])


def joined(one: ProgramStep, other: ProgramStep) -> ProgramStep:
    """Return one step for two tasks, the other of which gathers along its contraction.

    It gathers what the one gathers, or during the one's sum. Its products are `further` ones of the one's task, which
    take the gathered matrix by its rows.
    """
    task, then = one.task, other.task
    assert task is not None
    assert then is not None
    assert (one.axis, one.split, task.dim, then.dim) == (other.axis, other.split, 0, 1)
    gathered, *others = [each for each in other.operands.values() if isinstance(each, MatrixView)]
    gathers = {"g": gathered.t()} if task.op.kind == "scatter" else {}
    more = gathers | dict(zip(then.each("c"), others, strict=True))
    task = replace(
        task, shapes={**task.shapes} | {name: each.size for name, each in more.items()}, gathers="".join(gathers),
        further=tuple([Product("outer", c, transposed=then.transposed) for c in then.each("c")]),
    )  # fmt: skip
    shapes = one.shapes + tuple([(i + len(one.made), shape) for i, shape in other.shapes])
    return ProgramStep(
        one.reads + other.reads, one.made + other.made, task=task, axis=one.axis, operands={**one.operands} | more,
        split=one.split, shapes=shapes,
    )  # fmt: skip


class Program:
    """Steps from given tensors to results. A result is a tensor's name and the permutation of its dims, if any."""

    def __init__(self, partition: Partition, dtype: torch.dtype, settings: Settings, formats: Formats) -> None:
        self.partition, self.dtype, self._settings = partition, dtype, settings
        # The dtypes of forward's float8 operands, or the recipe that casts operands.
        self._float8 = tuple([getattr(torch, name) for name in settings.dtypes[:2]])
        self._recipe = casts_of(settings.options.float8 or "", formats)
        # The fields of `Task` with these names.
        self.leaves, self.any_order = max(0, settings.leaves), settings.leaves == AS_ANY
        self.steps: list[ProgramStep] = []
        self.results: list[tuple[str, tuple[int, ...] | None]] = []
        # Whether a step depends on lengths that it cannot read from its tensors; and whether a result is no matrix, so
        # that the program holds its shape, which other rows change.
        self.is_fixed, self.has_shapes = self.leaves > 0, False
        self._num_names = 0

    def at(self, partition: Partition) -> Program:
        """Return the program of a call that differs in its rows alone; of one that `is_fixed` there is none."""
        assert not self.is_fixed
        if not self.has_shapes:
            return self
        made = object.__new__(Program)
        made.steps, made.results = [step.at(partition) for step in self.steps], self.results
        return made

    def finish(self, results: Sequence[tuple[Named, tuple[str, ...]]]) -> Program:
        """Set the results, each with the order of its dims, and return the program. No step may be added afterwards."""
        self.results = [(each.name, each.order(dims)) for each, dims in results]
        self.has_shapes = any(step.shapes for step in self.steps)
        kept = {name for name, _ in self.results}
        for step in reversed(self.steps):
            step.frees = tuple(
                name for name in dict.fromkeys((*step.reads, *step.made)) if name not in kept and "." in name
            )
            kept.update(step.reads)
        return self

    def _named(self, made: Sequence[OutputShape]) -> tuple[Named, ...]:
        # A leading dot marks tensors that the program makes. Given tensors have none.
        begin = self._num_names
        self._num_names += len(made)
        return tuple([Named(f".{begin + i}", dims, tuple(lengths)) for i, (dims, lengths) in enumerate(made)])

    def add(
        self, local: Local, reads: Sequence[str], *made: OutputShape, of_matrices: bool = False
    ) -> tuple[Named, ...]:
        """Add a function of tensors by name, which reads these tensors and returns tensors with these dims.

        `of_matrices`: it returns matrices, like a task.
        """
        tensors = self._named(made)
        shapes = _shapes(tensors) if of_matrices else ()
        self.steps.append(ProgramStep(tuple(reads), tuple([each.name for each in tensors]), local, shapes=shapes))
        return tensors

    def task(
        self, task: Task, axis: str, operands: Mapping[str, MatrixView | str], *made: OutputShape,
        split: Split | None = None,
    ) -> tuple[Named, ...]:  # fmt: skip
        """Add a task over a mesh axis, whose results have these dims. `split`: of its sizes, if rows change them."""
        tensors = self._named(made)
        reads = tuple([each if isinstance(each, str) else each.name for each in operands.values()])
        names = tuple([each.name for each in tensors])
        step = ProgramStep(reads, names, task=task, axis=axis, operands=operands, split=split, shapes=_shapes(tensors))
        self.steps.append(step)
        return tensors

    def _cast(self, uses: Sequence[CastRequest]) -> list[Named]:
        """Cast these tensors to float8, each once; tensors without a cast stay unchanged.

        A tensor with a single scale has the same scale on all ranks, which all-gather the largest magnitudes, those of
        several tensors at once.
        """
        # Keyed by name: symbolic lengths cannot be hashed.
        largest: dict[str, tuple[str, int]] = {}
        whole = [(x.name, lies.used) for x, lies, its, _ in uses if its is not None and its.whole]
        for axes in dict.fromkeys(axes for _, axes in whole):
            names = list(dict.fromkeys(name for name, used in whole if used == axes))
            most = self._largest(names, axes)
            largest |= {name: (most, i) for i, name in enumerate(names)}
        made: dict[Any, Named] = {}
        casted = []
        for x, _, its, contracted in uses:
            key = x.name, its, tuple(contracted)
            if key not in made:
                made[key] = x if its is None else self._casted(x, its, contracted, largest.get(x.name))
            casted.append(made[key])
        return casted

    def _casted(self, x: Named, its: Cast, contracted: Sequence[str], largest: tuple[str, int] | None) -> Named:
        # For a single scale, `largest` names the tensor [1, ..] with the magnitude, and the column.
        dims, made = tuple([i for i, name in enumerate(x.dims) if name in contracted]), (x.dims, x.lengths)
        if largest is None:
            return self.add(lambda tensors: [its(tensors[x.name], dims)], (x.name,), made)[0]
        most, i = largest
        return self.add(lambda tensors: [its(tensors[x.name], dims, tensors[most][0, i])], (x.name, most), made)[0]

    def _largest(self, names: Sequence[str], axes: Sequence[str]) -> str:
        # The tensor [1, len(names)] of the largest magnitude of each tensor over the ranks of these axes.
        dims, count = (".one", ".each"), len(names)
        (largest,) = self.add(
            lambda tensors: [torch.stack([largest_finite(tensors[name]) for name in names])[None]], names,
            (dims, (1, count)),
        )  # fmt: skip
        for axis in axes:
            num_ranks = self.partition.place[axis][1]
            if num_ranks > 1:
                task = Task(ALL_GATHER, {"a": (1, count)}, torch.float32, (1,) * num_ranks)
                matrix = MatrixView.of(largest, dims[:1], dims[1:])
                (everyone,) = self.task(task, axis, {"a": matrix}, (dims, (num_ranks, count)))
                largest = self._largest_of(everyone, (dims, (1, count)))
        return largest.name

    def _largest_of(self, everyone: Named, made: OutputShape) -> Named:
        return self.add(lambda tensors: [tensors[everyone.name].amax(0, keepdim=True)], (everyone.name,), made)[0]

    def _bias_gradient(self, plans: Plan, dy: Named) -> Named:
        """Add the gradient of a bias: the sum of dy's rows, over ranks too, with the bias's sharding."""
        # The bias is sharded like w's columns.
        spec = plans.spec
        rows = tuple(name for name in spec.c.names if name != spec.n)
        now = notation.Tensor(spec.c.dims[-1:])
        # The row dims that are split, each with its axis.
        split = [(name, axis) for name in rows for axis in spec.c.axes(name)]
        if self.leaves:
            db = self._bias_as_tree(dy, rows, spec.n, split)
        else:
            matrix = MatrixView.of(dy, rows, (spec.n,))
            (db,) = self.add(
                lambda tensors: [matrix.view(tensors[matrix.name]).sum(0)], (matrix.name,),
                ((spec.n,), (dy.length(spec.n),)),
            )  # fmt: skip
            for _, axis in split:
                db = self.plain(Step("all_reduce", "db", axis), now, db)
        while now.used and not spec.b.axes(spec.n):
            step = Step("all_gather", "db", now.used[-1], spec.n)
            db, now = self.plain(step, now, db), moved(now, step)
        return db

    def _bias_as_tree(self, dy: Named, rows: tuple[str, ...], n: str, split: Sequence[tuple[str, str]]) -> Named:
        # The sum of dy's rows, which may be `split` over one axis: a product with ones that contracts the rows.
        assert len(split) < 2
        dim, axis = split[0] if split else ("", "")
        order = outermost(rows, dim)
        matrix, made = MatrixView.of(dy, order, (n,)), ((n,), (dy.length(n),))
        length = dy.numel(rows)
        sizes = self.partition.sizes(dim, (), axis) if split else ()
        if len(set(sizes)) == 1:
            (ones,) = self.add(
                lambda tensors: [tensors[dy.name].new_ones(1, length)], (dy.name,), (("", ".rows"), (1, length))
            )
            operands = {"a": MatrixView.of(ones, ("",), (".rows",)), "b": matrix}
            shapes = {name: each.size for name, each in operands.items()}
            task = Task(MATMUL_ALL_REDUCE, shapes, self.dtype, leaves=self.leaves)
            return self.task(task, axis, operands, made)[0]
        if split:
            # Leaves would end inside a rank's rows, so every rank gathers all rows and adds them.
            flat = Split(dim, (), axis).along(dy, order).sizes(self.partition)
            task = Task(ALL_GATHER, {"a": matrix.size}, self.dtype, flat)
            (whole,) = self.task(task, axis, {"a": matrix}, ((".rows", n), (sum(flat), dy.length(n))))
            matrix = MatrixView.of(whole, (".rows",), (n,))
        return self.add(
            lambda tensors: [summed_rows(matrix.view(tensors[matrix.name]), self.leaves)], (matrix.name,), made
        )[0]

    def split(self, step: Step, before: notation.Tensor) -> Split:
        """Return the split of the dim that a step gathers, slices or scatters."""
        axes = before.axes(step.dim)
        return Split(step.dim, axes[:-1] if step.kind == "all_gather" else axes, step.axis)

    def _length_after(self, step: Step, before: notation.Tensor) -> int:
        return self.partition.named(step.dim, moved(before, step).axes(step.dim))

    def plain(self, step: Step, before: notation.Tensor, x: Named) -> Named:
        """Add a slice or a collective of x without a matmul; none over an axis of one rank."""
        place, num_ranks = self.partition.place[step.axis]
        if num_ranks == 1:
            return x
        if step.kind == "all_reduce":
            return self._all_reduce(step.axis, x)
        split, others = self.split(step, before), tuple(dim for dim in x.dims if dim != step.dim)
        sizes, length = split.sizes(self.partition), self._length_after(step, before)
        if step.kind == "slice":
            self.is_fixed = True
            at, begin = x.dims.index(step.dim), sum(sizes[:place])
            lengths = [length if i == at else each for i, each in enumerate(x.lengths)]
            name = x.name
            return self.add(lambda tensors: [tensors[name].narrow(at, begin, length)], (name,), (x.dims, lengths))[0]
        matrix = MatrixView.of(x, (step.dim,), others)
        task = Task(OPS[step.kind], {"a": matrix.size}, self.dtype, sizes, any_order=self._of_sums(OPS[step.kind]))
        made = (step.dim, *others), (length, *(x.length(dim) for dim in others))
        return self.task(task, step.axis, {"a": matrix}, made, split=split)[0]

    def _all_reduce(self, axis: str, x: Named) -> Named:
        if not math.prod(x.lengths):
            return x
        matrix = MatrixView(x.name, None, (len(x.dims) - 1, 1), (math.prod(x.lengths[:-1]), x.lengths[-1]))
        task = Task(ALL_REDUCE, {"a": matrix.size}, self.dtype, any_order=self.any_order)
        return self.task(task, axis, {"a": matrix}, (x.dims, x.lengths))[0]

    def _of_sums(self, op: Op) -> bool:
        # A gather adds no terms.
        return self.any_order and op.kind != "gather"

    def matmul(
        self, plan: MatmulPlan, a: Blocks, b: Blocks, epilogue: Epilogue = NO_EPILOGUE, *,
        wanted: tuple[str, ...] | None = None, done: Sequence[Step] = (),
    ) -> Blocks:  # fmt: skip
        """Add a planned matmul. It chooses the order of its result's dims.

        - `a`, `b`: blocks. One a and several b have a result for each b. Equally many a and b have one result, the sum
          of the products.
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
        casted = iter(self._cast(self._uses(plan, [*now.values()], [*lies.values()])))
        lefts, rights = ([next(casted) for _ in blocks] for blocks in now.values())
        assert (epilogue.residual is None and not epilogue.norm) or (fused is not None and not after)
        assert not epilogue.activation or not after
        outs = self._product(plan, lefts, rights, fused, epilogue, wanted or plan.c.names)
        for step, sharding in after:
            outs = [self.plain(step, sharding, out) for out in outs]
        return outs

    def _uses(
        self, plan: MatmulPlan, operands: Sequence[Blocks], lies: Sequence[notation.Tensor] = (), by_rows: str = ""
    ) -> list[CastRequest]:  # fmt: skip
        """Return the casts of a matmul's operands, with scales along dims that are not contracted.

        - `lies`: their shardings, if not those of the plan.
        - `by_rows`: the operand that travels with scales of its rows, though gathered along the contraction.
        """
        casts, uses = self._recipe.get(plan.names[2], {}), list[CastRequest]()
        for name, sharding, blocks in zip(plan.names, lies or (plan.a, plan.b), operands, strict=False):
            contracted = plan.contraction
            if name == by_rows:
                contracted = tuple([dim for dim in sharding.names if dim not in contracted])
            uses += [(each, sharding, casts.get(name), contracted) for each in blocks]
        return uses

    def _product(
        self, plan: MatmulPlan, lefts: Blocks, rights: Blocks, fused: tuple[Step, notation.Tensor] | None,
        epilogue: Epilogue, wanted: tuple[str, ...],
    ) -> Blocks:  # fmt: skip
        """Add the matmul, as a task if a collective is fused with it."""
        casts = self._recipe.get(plan.names[2])
        float8 = tuple([casts[name].dtype for name in plan.names[:2]]) if casts else self._float8
        step = fused[0] if fused is not None else None
        # A task gathers its first operand. If the plan gathers the second, the operands are exchanged.
        exchanged = step is not None and step.tensor == plan.names[1]
        if exchanged:
            lefts, rights = rights, lefts
        sides = OperandDims.of(plan, lefts[0], rights[0], step.dim if step is not None else "", wanted)
        # A bias runs along the result's last dim in the notation, which is b's and the last of `wanted`.
        assert epilogue.bias is None or sides.transposed == exchanged
        is_sum = len(lefts) > 1
        pairs = [
            (MatrixView.of(left, sides.rows, sides.contraction), MatrixView.of(right, sides.contraction, sides.cols))
            for left, right in zip(lefts if is_sum else [sides.a] * len(rights), rights, strict=True)
        ]
        fusion = None if fused is None else self._fusion(*fused, sides)
        if sides.transposed and (fusion is None or fusion.op is not ALL_GATHER_MATMUL):
            # Without a gather the transposed product is the same task, which scatters the other dim.
            pairs = [(right.t(), left.t()) for left, right in pairs]
            float8 = float8[::-1]
        changed = {} if fusion is None else fusion.changed
        products = [sides.result(right, changed) for right in (rights[:1] if is_sum else rights)]
        if fusion is None:
            return self._local(pairs, epilogue, products)
        its = float8[int(exchanged)] if float8 else None
        return self._task_of(plan, fusion, sides, pairs, epilogue, products, its)

    def _fusion(self, step: Step, before: notation.Tensor, sides: OperandDims) -> Fusion:
        if step.kind == "all_reduce":
            return Fusion(MATMUL_ALL_REDUCE, step.axis, 0, None, {})
        split, on_rows = self.split(step, before), step.dim in sides.rows
        changed = {step.dim: self._length_after(step, before)}
        if step.kind == "all_gather":
            split = split.along(sides.a, sides.rows if on_rows else sides.contraction)
            return Fusion(ALL_GATHER_MATMUL, step.axis, int(not on_rows), split, changed)
        split = split.along(*((sides.a, sides.rows) if on_rows else (sides.b, sides.cols)))
        return Fusion(MATMUL_REDUCE_SCATTER, step.axis, int(on_rows == sides.transposed), split, changed)

    def _task_of(
        self, plan: MatmulPlan, fusion: Fusion, sides: OperandDims, pairs: Sequence[tuple[MatrixView, MatrixView]],
        epilogue: Epilogue, products: Sequence[OutputShape], float8: torch.dtype | None,
    ) -> Blocks:  # fmt: skip
        """Add a matmul with its collective. `float8`: the dtype of the task's first operand, if it is cast."""
        op, settings = fusion.op, self._settings
        assert (epilogue.residual is None and not epilogue.norm) or not sides.transposed
        c, part = plan.c, self.partition.length

        def like_result(name: str) -> MatrixView:
            its = Named(name, c.names, tuple([part(dim, c.axes(dim)) for dim in c.names]))
            return MatrixView.of(its, sides.rows, sides.cols)

        operands, shapes = operands_of(op, pairs, epilogue, [each[-1] for _, each in products], like_result)
        # With a tree order the activation is always the library's, on the rounded products.
        apart = bool(self.leaves and epilogue.activation)
        sizes = () if fusion.split is None else fusion.split.sizes(self.partition)
        task = Task(
            op, shapes, self.dtype, sizes, fusion.dim,
            transposed=sides.transposed and op is ALL_GATHER_MATMUL,
            algorithm=settings.options.algorithm if op is MATMUL_ALL_REDUCE else "auto",
            float8=float8, in_blocks=settings.blocks, leaves=self.leaves, any_order=self._of_sums(op),
            epilogue=epilogue._replace(activation=None, keeps=False) if apart else epilogue,
        )  # fmt: skip
        lengths = dict(zip(sides.a.dims, sides.a.lengths, strict=True)) | fusion.changed
        dims = (*sides.rows, *sides.contraction)
        gathered = [(dims, [lengths[name] for name in dims])] if epilogue.whole else []
        outs = self.task(task, fusion.axis, operands, *task.epilogue.results(products), *gathered, split=fusion.split)
        if not apart:
            return outs
        names, left = tuple(z.name for z in outs), [Epilogue(activation=epilogue.activation, keeps=epilogue.keeps)]
        made = epilogue.results(products)
        return self.add(lambda tensors: ended(left, [tensors[z] for z in names]), names, *made)

    def _local(
        self, pairs: Sequence[tuple[MatrixView, MatrixView]], epilogue: Epilogue, products: Sequence[OutputShape]
    ) -> Blocks:
        each_of, made = [epilogue.of(i) for i in range(len(products))], epilogue.results(products)

        def run(tensors: dict[str, Tensor]) -> list[Tensor]:
            matrices = [(a.view(tensors[a.name]), b.view(tensors[b.name])) for a, b in pairs]
            bound = [each.bind(tensors) for each in each_of]
            if len(bound) == 1:
                outs = [summed(matrices, bound[0].addend, self.leaves)]
            else:
                outs = [mm(a, b, each.addend, self.leaves) for (a, b), each in zip(matrices, bound, strict=True)]
            return ended(bound, outs)

        reads = [each.name for pair in pairs for each in pair] + [name for _, _, name in epilogue.names()]
        return self.add(run, reads, *made, of_matrices=True)

    def gradients(self, plans: Plan, dy: Blocks, x: Named, w: Blocks, needs: Sequence[bool]) -> list[Named | None]:
        """Add the steps for dx, then dw and db of each block; None for gradients that are not needed."""
        needs_x, needs_w, needs_bias = needs[0], needs[1::2], needs[2::2]
        pairs = zip(dy, needs_bias, strict=True)
        dbs = [self._bias_gradient(plans, each) if needed else None for each, needed in pairs]
        wanted = [i for i, needed in enumerate(needs_w) if needed]
        dx: Named | None = None
        of_w: Blocks = ()
        # No pair if the recipe casts operands of one gradient only: the gathered operand would travel in two dtypes.
        casts_alike = bool(self._recipe.get("dx")) == bool(self._recipe.get("dw"))
        if needs_x and wanted and casts_alike and plans.pair:
            made = self._pair(plans.pair, {"dx": (dy, w), "dw": ([x], [dy[i] for i in wanted])})
            (dx,), of_w = made["dx"], made["dw"]
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
                of_w = self.matmul(plans.dw, [x], [dy[i] for i in wanted], wanted=w[0].dims, done=done)
        dws = dict(zip(wanted, of_w, strict=True))
        return [dx, *(each for i, db in enumerate(dbs) for each in (dws.get(i), db))]

    def _pair(
        self, pair: tuple[MatmulPlan, MatmulPlan], operands: Mapping[str, tuple[Blocks, Blocks]]
    ) -> dict[str, Blocks]:  # fmt: skip
        """Add one task for dx and dw, see `Plan.pair`. `operands`: of each by name, as it returns them."""
        first, second = pair
        uses = self._uses(first, operands[first.names[2]])
        uses += self._uses(second, operands[second.names[2]], by_rows=second.steps[0].tensor)
        casted, made = iter(self._cast(uses)), dict[str, Blocks]()
        for plan in pair:
            lefts, rights = ([next(casted) for _ in blocks] for blocks in operands[plan.names[2]])
            # N of dw can be scattered as rows only.
            wanted = plan.c.names[::-1] if plan.names[2] == "dw" else plan.c.names
            made[plan.names[2]] = self._product(plan, lefts, rights, plan.stages()[1], NO_EPILOGUE, wanted)
        self.steps[-2:] = [joined(*self.steps[-2:])]
        return made
