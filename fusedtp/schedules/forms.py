"""`Form`: a task over a schedule's verbs, and `Prepared`: it on one rank by one schedule, to be run many times.

A form runs in one to three stages: a wait for peers is in a later stage than the sends that it waits for, or in the
same kernel. A rank in its own process runs the stages one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor
from torch.distributed import ProcessGroup

from ..epilogue import Epilogue
from ..op import Product, Task
from ..shards import even_sizes
from . import SCHEDULES
from .local import SingleRank, multiply
from .verbs import GatherSpec, Multiply, Operands, Pending, ScatterSpec, ScheduleImpl

if TYPE_CHECKING:
    from ..workspaces.workspace import Workspace

# Functions of a form, the operands, and what the stage before has returned. They are not bound to the form, which would
# be freed late, with its views of the arenas. So would be what is in flight.
Stages: TypeAlias = tuple[Callable[[Any, Operands, Any], Any], ...]


class Form:
    """Any task: the gather that it starts, the sum that its terms go into, and the products with what is gathered.

    In an all-reduce that is not one-shot, the gather is of the sums.
    """

    def __init__(self, on: ScheduleImpl, task: Task) -> None:
        its = task.epilogue
        assert not (its.whole and its.activation)
        # X.T @ other needs X by rows.
        assert task.dim == 0 or not task.further
        self._multiplies, self._binds = task.op.multiplies, any(its.operands)
        self._gathered, self._products, self._terms = task.gathered, task.products, task.terms
        self._epilogue, self._leaves = its.of(0), task.leaves
        self._scatter: Any
        self._gather: Any
        self._multiply: Multiply
        # A tree's leaves differ from the order in which chunks of the contraction arrive: gather all of it first. So
        # does a gather of columns that returns them: they are stored once.
        self._by_rows = bool(self._products) and task.dim == 1 and (task.leaves > 0 or its.whole)
        self._take(on, task)

    def _take(self, on: ScheduleImpl, task: Task) -> None:
        kind, dim, (M, N) = task.op.kind, task.dim, task.moved
        self._to_all = kind == "all_reduce" and on.one_shot(task)
        self._sums_travel = kind == "all_reduce" and not self._to_all
        sizes = self._lay(on, task)
        self._scatter = self._gather = None
        if kind != "gather":
            what = ScatterSpec(sizes, M if dim == 1 else N, dim, self._multiplies, self._to_all)
            self._scatter = on.scatter(what)
        if self._sums_travel:
            self._gather = on.gather(GatherSpec(sizes, N, 0, sums=True))
        elif task.gathered:
            other, kinds = task.shapes[task.gathered][1 - dim], tuple([each.kind for each in self._products])
            columns = N if kind == "scatter" else sum(task.shapes[b][1] for b in task.each("b"))
            dim, kinds = (0, ()) if self._by_rows else (dim, kinds)
            self._gather = on.gather(GatherSpec(sizes, other, dim, kinds, columns))
        self._multiply = (self._products and self._gather and on.product(self._gather)) or multiply
        own = type(self)
        self.stages: Stages = (own._start, own._show, own._finish) if self._sums_travel else (own._start, own._results)

    def _lay(self, on: ScheduleImpl, task: Task) -> tuple[int, ...]:
        # Take the task's rows, and return every rank's.
        self._shape, sizes = task.moved, task.sizes
        sizes = sizes or ((self._shape[0],) if self._to_all else even_sizes(self._shape[0], on.world_size))
        # This rank's part of X, or of the sum. One rank has all of it, with any rows.
        begin = sum(sizes[: on.rank])
        self._part = slice(None) if self._to_all or on.world_size == 1 else slice(begin, begin + sizes[on.rank])
        return sizes

    def bind(self, on: ScheduleImpl, task: Task) -> None:
        """Bind the verbs to the rows of a task, which differs in them alone from the task that the form is made of."""
        if (self._sums_travel or self._to_all) and on.one_shot(task) != self._to_all:
            self._take(on, task)
            return
        sizes, dim, (M, N) = self._lay(on, task), task.dim, self._shape
        if self._scatter is not None:
            self._scatter.bind(sizes, M if dim == 1 else N)
        if self._gather is not None:
            self._gather.bind(sizes, N if self._sums_travel else task.shapes[self._gathered][1 - dim])

    def _start(self, operands: Operands, _: None) -> Pending | None:
        pending: Pending | None = None
        if self._gathered:
            x = operands[self._gathered]
            pending = self._gather.start(x.t() if self._by_rows else x)
        if self._terms:
            take, (lefts, rights) = operands.__getitem__, self._terms
            self._scatter.multiply(list(zip(map(take, lefts), map(take, rights), strict=True)))
        elif self._scatter is not None:
            self._scatter.put(operands["a"])
        return pending

    def _results(self, operands: Operands, pending: Pending | None) -> list[Tensor]:
        outs: list[Tensor] = []
        if self._scatter is not None:
            own, out = None if self._terms else operands["a"], operands.get("out")
            outs = self._scatter.sum(self._bound(operands), own=own, last=pending is None, out=out)
        if pending is None:
            return outs
        if not self._products:
            return [self._whole(pending, operands.get("out"))]
        products, get = [], operands.get
        for kind, other, transposed, epilogue, out in self._products:
            if self._binds:
                # `Epilogue.bind`, inlined because every small op runs this.
                epilogue = Epilogue._make(map(get, epilogue, epilogue))
            products.append(Product(kind, get(other), transposed, epilogue, get(out)))
        x = pending.whole() if self._by_rows else pending
        made = self._multiply(x, products, self._leaves)
        return [*outs, *made] if outs else made

    def _bound(self, operands: Operands) -> Epilogue:
        return self._epilogue.bind(operands) if self._binds else self._epilogue

    def _whole(self, pending: Pending, out: Tensor | None) -> Tensor:
        if out is not None:
            x, mine = pending.x, out[self._part]
            if (mine.data_ptr(), mine.stride()) != (x.data_ptr(), x.stride()):
                mine.copy_(x)
        return pending.whole(out)

    def _show(self, operands: Operands, _: None) -> tuple[Pending, Tensor, Epilogue]:
        epilogue, own = self._bound(operands), None if self._terms else operands["a"]
        out = operands["out"] if "out" in operands else operands["a"].new_empty(self._shape)
        return self._scatter.sum_into(epilogue.rows(self._part), out, self._gather, own=own), out, epilogue

    def _finish(self, _: Operands, shown: tuple[Pending, Tensor, Epilogue]) -> list[Tensor]:
        pending, out, epilogue = shown
        # Norm the rows on arrival: sending them normed beside the sums would double the bytes.
        return epilogue.with_norm(pending.whole(out))


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
        self.on = on = self._verbs(group, how)
        self.form = on.form() or Form(on, task)
        # The task's needs of a half of each arena, and of the signals.
        self.half_bytes: int = 0 if self.ws is None else on.layout.half_bytes
        self.slots: int = 0 if self.ws is None else on.layout.slots

    def bind(self) -> None:
        """Bind verbs and form to this task's rows, after a task that shares them. No op may be running on them."""
        on, task = self.on, self.task
        # An interruption leaves them bound to no rows.
        on.task = None
        if self.ws is None:
            self.form.bind(on, task)
        else:
            layout = on.layout
            layout.clear()
            self.form.bind(on, task)
            self.half_bytes, self.slots = layout.half_bytes, layout.slots
        on.task = task

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
        # What is in flight goes from stage to stage, and is freed with the op. The last stage returns the results.
        form: Any = self.form
        state: Any = None
        for stage in form.stages:
            state = stage(form, operands, state)
        if ws is not None:
            self.on.end()
        outs: list[Tensor] = state
        return outs
