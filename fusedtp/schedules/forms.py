"""Forms of the ops over a schedule's verbs, and `Prepared`: a task on one rank by one schedule, to be run many times.

Each op has one of three forms, written once for all schedules with their verbs. A form runs in one to three stages: a
wait for peers is in a later stage than the sends that it waits for, or in the same kernel. A rank in its own process
runs the stages one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor
from torch.distributed import ProcessGroup

from ..epilogue import NO_EPILOGUE, Epilogue, numbered
from ..op import Task
from ..shards import even_sizes
from . import SCHEDULES
from .local import SingleRank, multiplied
from .verbs import Gather, GatherSpec, Operands, Product, Scatter, ScatterSpec, ScheduleImpl

if TYPE_CHECKING:
    from ..workspaces.workspace import Workspace


# Methods of a form. A form has no attribute with them: it would be freed late, with its views of the arenas.
Stages: TypeAlias = tuple[Callable[[Operands], Any], ...]


class Form:
    """Base of the forms that are written over any schedule's verbs."""

    def at(self, on: ScheduleImpl, task: Task) -> Form:
        """Return the form of a task that differs in its rows alone, over verbs of that task."""
        made = object.__new__(type(self))
        made.__dict__ = vars(self).copy()
        made._take(on, task)
        return made

    def _take(self, on: ScheduleImpl, task: Task) -> None:
        # Take verbs for the task's rows.
        raise NotImplementedError


class Gathering(Form):
    """Form of all_gather, and of all_gather_matmul with any number of products. Operands: see `op`."""

    def __init__(self, on: ScheduleImpl, task: Task) -> None:
        self._first: Literal["rows", "outer"] = "rows" if task.dim == 0 else "outer"
        epilogue = task.epilogue
        self._weights = [(b, epilogue.of(i)) for i, b in enumerate(task.each("b"))]
        self._binds = any(epilogue.operands)
        # `right` is multiplied with rows.
        assert task.dim == 0 or "right" not in task.shapes
        assert not (epilogue.whole and epilogue.activation)
        others = ("outer",) * ("right" in task.shapes) + ("whole",) * epilogue.whole
        products = (self._first,) * len(self._weights) + others
        # A tree's leaves differ from the order in which chunks of the contraction arrive: gather all of it first. So
        # does a gather of columns that returns them: they are stored once.
        self._by_rows = (bool(task.leaves) or epilogue.whole) and task.dim == 1
        # Names of the tensors that a caller may give for the results of each product, "" for none, and of the others.
        count = len(self._weights)
        num_made = epilogue.num_results(count)
        names = numbered("out", num_made + count * epilogue.keeps + len(others))
        self._outs = (names[:num_made] + ("",) * count)[:count]
        self._other_outs = names[num_made + count * epilogue.keeps :]
        num_columns = sum(task.shapes[b][1] for b, _ in self._weights)
        self._gathered = (0, (), num_columns) if self._by_rows else (task.dim, products, num_columns)
        self._take(on, task)

    def _take(self, on: ScheduleImpl, task: Task) -> None:
        self._task = task
        begin = sum(task.sizes[: on.rank])
        self._part = slice(begin, begin + task.sizes[on.rank])
        self._gather: Gather = on.gather(GatherSpec(task.sizes, task.shapes["a"][1 - task.dim], *self._gathered))

    @property
    def stages(self) -> Stages:
        return self._start, self._finish

    def _start(self, operands: Operands) -> None:
        self._gather.start(operands["a"].t() if self._by_rows else operands["a"])

    def _finish(self, operands: Operands) -> list[Tensor]:
        if not self._weights:
            return [self._whole(operands["a"], operands.get("out"))]
        transposed, products = self._task.transposed, []
        for (b, epilogue), out in zip(self._weights, self._outs, strict=True):
            if self._binds:
                # `Epilogue.bind`, inlined because every small op runs this.
                epilogue = Epilogue._make(map(operands.get, epilogue, epilogue))
            products.append(Product(self._first, operands[b], epilogue, transposed, operands.get(out)))
        if "right" in operands:
            products.append(Product("outer", operands["right"], out=operands.get(self._other_outs[0])))
        if self._task.epilogue.whole:
            products.append(Product("whole", transposed=self._by_rows, out=operands.get(self._other_outs[-1])))
        if self._by_rows:
            return multiplied(self._gather.whole(operands["a"].t()), products, self._task.leaves)
        return self._gather.multiply(operands["a"], products)

    def _whole(self, x: Tensor, out: Tensor | None) -> Tensor:
        if out is not None:
            mine = out[self._part]
            if (mine.data_ptr(), mine.stride()) != (x.data_ptr(), x.stride()):
                mine.copy_(x)
        return self._gather.whole(x, out)


class Summing(Form):
    """Base of the forms that sum terms, which are products or the operand itself."""

    def __init__(self, on: ScheduleImpl, task: Task) -> None:
        self._multiplies, self._gathers = task.op.multiplies, "x" in task.shapes
        self._lefts, self._rights, self._epilogue = task.each("a"), task.each("b"), task.epilogue.of(0)
        self._binds = any(self._epilogue.operands)
        self._task: Task
        self._scatter: Scatter
        self._gather: Gather
        self._take(on, task)

    def _start(self, operands: Operands) -> None:
        if self._gathers:
            self._gather.start_beside(operands["x"])
        if self._multiplies:
            take = operands.__getitem__
            self._scatter.multiply(list(zip(map(take, self._lefts), map(take, self._rights), strict=True)))
        else:
            self._scatter.put(operands["a"])


class Scattering(Summing):
    """Form of reduce_scatter, and of matmul_reduce_scatter, maybe with a gather beside it. Operands: see `op`."""

    def _take(self, on: ScheduleImpl, task: Task) -> None:
        self._task = task
        M, N = task.moved
        self._scatter = on.scatter(ScatterSpec(task.sizes, N if task.dim == 0 else M, task.dim, self._multiplies))
        if self._gathers:
            x = GatherSpec(task.sizes, task.shapes["x"][1], 0, ("outer",), result=N, beside=True)
            self._gather = on.gather(x)

    @property
    def stages(self) -> Stages:
        return self._start, self._finish

    def _finish(self, operands: Operands) -> list[Tensor]:
        if not self._multiplies:
            return self._scatter.sum(NO_EPILOGUE, own=operands["a"], last=True, out=operands.get("out"))
        epilogue = self._epilogue.bind(operands) if self._binds else self._epilogue
        outs = self._scatter.sum(epilogue, own=None, last=not self._gathers, out=operands.get("out"))
        if not self._gathers:
            return outs
        # left @ X
        lefts = [operands[name] for name in self._task.each("left") if name in operands]
        given = map(operands.get, numbered("out", 1 + len(lefts))[1:])
        products = [Product("outer", left.t(), NO_EPILOGUE, True, out) for left, out in zip(lefts, given, strict=True)]
        return outs + self._gather.multiply(operands["x"], products)


class Reducing(Summing):
    """Form of all_reduce and matmul_all_reduce: one-shot, or a scatter and a gather of its sums. Operands: see `op`."""

    def _take(self, on: ScheduleImpl, task: Task) -> None:
        self._task = task
        M, N = task.moved
        self._to_all = on.one_shot(task)
        if self._to_all:
            self._scatter = on.scatter(ScatterSpec((M,), N, 0, self._multiplies, to_all=True))
            return
        sizes = even_sizes(M, on.world_size)
        self._scatter = on.scatter(ScatterSpec(sizes, N, 0, self._multiplies))
        self._gather = on.gather(GatherSpec(sizes, N, 0, sums=True))
        begin = sum(sizes[: on.rank])
        # This rank's part of the sum.
        self._shape, self._part = (M, N), slice(begin, begin + sizes[on.rank])

    @property
    def stages(self) -> Stages:
        return (self._start, self._sum) if self._to_all else (self._start, self._show, self._finish)

    def _sum(self, operands: Operands) -> list[Tensor]:
        own = None if self._multiplies else operands["a"]
        epilogue = self._epilogue.bind(operands) if self._binds else self._epilogue
        return self._scatter.sum(epilogue, own=own, last=True, out=operands.get("out"))

    def _show(self, operands: Operands) -> None:
        epilogue, own = self._epilogue.bind(operands), None if self._multiplies else operands["a"]
        self._bound, epilogue = epilogue, epilogue.rows(self._part)
        self._out = operands["out"] if "out" in operands else operands["a"].new_empty(self._shape)
        self._scatter.sum_into(epilogue, self._out, self._gather, own=own)

    def _finish(self, operands: Operands) -> list[Tensor]:
        out, epilogue = self._out, self._bound
        del self._out, self._bound
        # Norm the rows on arrival: sending them normed beside the sums would double the bytes.
        return epilogue.with_norm(self._gather.whole(out[self._part], out))


# Keys: the kind, or the name of an op that has its own form.
FORMS: Mapping[str, Callable[[ScheduleImpl, Task], Any]] = {
    "gather": Gathering, "scatter": Scattering, "all_reduce": Reducing,
}  # fmt: skip


class Prepared:
    """Verbs of a schedule for a task, and the form that uses them.

    `ws` is this rank's end of the group's symmetric memory, if the schedule uses it. `how` holds options of schedules
    with kernels, see `fused.Fused`.
    """

    def __init__(
        self, schedule: str, task: Task, group: ProcessGroup | None = None, ws: Workspace | None = None, **how: Any
    ) -> None:
        self.task, self.schedule = task, schedule
        # One rank has nothing to share.
        self.ws = ws if ws is not None and ws.world_size > 1 else None
        on = self._verbs(group, how)
        self._take(on, on.form() or FORMS.get(task.op.name, FORMS[task.op.kind])(on, task))

    def _take(self, on: Any, form: Any) -> None:
        self.on, self.form = on, form
        *self._before, self._last = form.stages
        # The task's needs of a half of each arena, and of the signals.
        self.half_bytes: int = 0 if self.ws is None else on.layout.half_bytes
        self.slots: int = 0 if self.ws is None else on.layout.slots

    def _verbs(self, group: ProcessGroup | None, how: dict[str, Any]) -> Any:
        if self.ws is None and (group is None or group.size() == 1):
            return SingleRank(self.task.leaves)
        row = SCHEDULES[self.schedule]
        row.check_algorithm(self.task.algorithm, self.schedule)
        return row.load()(self.ws if row.shares_memory else group, self.task, **(how if row.has_kernels else {}))

    def go(self, operands: Operands) -> list[Tensor]:
        """Run every stage, for a rank in its own process. The workspace must have room and have begun the op."""
        ws = self.ws
        if self.on.by_host and ws is not None:
            ws.steps.enter(self.task.op.name)
        for stage in self._before:
            stage(operands)
        outs: list[Tensor] = self._last(operands)
        if ws is not None:
            self.on.end()
        return outs
