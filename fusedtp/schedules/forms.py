"""Forms of the ops over a schedule's verbs, and `Prepared`: a task on one rank by one schedule, to be run many times.

Each op has one of three forms, written once for all schedules with their verbs. A form runs in two or three stages: a
wait for peers is in a later stage than the sends that it waits for. A rank in its own process runs the stages one after
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.distributed import ProcessGroup

from ..norms import Norm
from ..op import Task
from ..shards import even_sizes
from .local import Alone, multiplied, with_norm
from .verbs import PLAIN, Epilogue, Operands, Product, Verbs

if TYPE_CHECKING:
    from ..workspaces.workspace import Workspace


def _norm(task: Task, operands: Operands) -> Norm | None:
    return Norm(task.norm, task.eps, *operands[task.op.operands :]) if task.norm else None


def _terms(task: Task, operands: Operands) -> list[tuple[Tensor, Tensor]]:
    # One product for each block of a rank's terms of a sum.
    return [(a, b) for a, b, *_ in (operands[:2], *task.blocks(operands))]


class Gathering:
    """Form of all_gather, and of all_gather_matmul with any number of products. Operands: see `op`."""

    def __init__(self, on: Verbs, task: Task) -> None:
        rows, cols = task.shape(0)
        self._first: Literal["rows", "outer"] = "rows" if task.dim == 0 else "outer"
        self._task, self._multiplies = task, task.has(1)
        self._epilogue = Epilogue(activation=task.activation, keeps=task.keeps)
        blocks = [] if not task.has(1) else [task.shape(1), *(b for b, _ in task.blocks(task.shapes))]
        # `right` is multiplied with rows.
        assert task.dim == 0 or not task.has(3)
        products = (self._first,) * len(blocks) + (("outer",) if task.has(3) else ())
        # A tree's leaves differ from the order in which chunks of the contraction arrive: gather all of it first.
        self._turns = bool(task.leaves) and task.dim == 1
        self._gather = on.gather(
            task.sizes, cols if task.dim == 0 else rows, 0 if self._turns else task.dim,
            products=() if self._turns else products, result=sum(b[1] for b in blocks if b is not None),
        )  # fmt: skip
        self.stages = self._start, self._finish

    def _start(self, operands: Operands) -> None:
        self._gather.start(operands[0].t() if self._turns else operands[0])

    def _finish(self, operands: Operands) -> list[Tensor]:
        if not self._multiplies:
            return [self._gather.whole(operands[0])]
        first, transposed = self._first, self._task.transposed
        epilogue = self._epilogue
        own = epilogue if operands[2] is None else epilogue._replace(bias=operands[2])
        products = [Product(first, operands[1], own, transposed)]
        if len(operands) > 3:
            for b, bias in self._task.blocks(operands):
                products.append(Product(first, b, epilogue._replace(bias=bias), transposed))
            if operands[3] is not None:
                products.append(Product("outer", operands[3]))
        if self._turns:
            return multiplied(self._gather.whole(operands[0].t()), products, self._task.leaves)
        return self._gather.multiply(operands[0], products)


class Scattering:
    """Form of reduce_scatter, and of matmul_reduce_scatter, maybe with a gather beside it. Operands: see `op`."""

    def __init__(self, on: Verbs, task: Task) -> None:
        M, N = task.moved
        self._task, self._multiplies, self._gathers = task, task.op.multiplies, task.has(4)
        self._adds = task.adds
        self._is_several = len(task.shapes) > task.op.operands
        self._scatter = on.scatter(
            task.sizes, N if task.dim == 0 else M, task.dim, to_all=False, multiplies=self._multiplies
        )
        if self._gathers:
            self._gather = on.gather(task.sizes, task.shape(4)[1], 0, products=("outer",), result=N, beside=True)
        self.stages = self._start, self._finish

    def _start(self, operands: Operands) -> None:
        if self._gathers:
            self._gather.start_beside(operands[4])
        if self._multiplies:
            terms = _terms(self._task, operands) if self._is_several else ((operands[0], operands[1]),)
            self._scatter.multiply(terms)
        else:
            self._scatter.put(operands[0])

    def _finish(self, operands: Operands) -> list[Tensor]:
        if not self._multiplies:
            return self._scatter.sum(PLAIN, own=operands[0], last=True)
        epilogue = PLAIN
        if operands[2] is not None or self._adds or self._task.norm:
            residual = operands[5] if self._adds else None
            epilogue = Epilogue(operands[2], residual, norm=_norm(self._task, operands))
        outs = self._scatter.sum(epilogue, own=None, last=not self._gathers)
        if not self._gathers:
            return outs
        # left @ X
        lefts = operands[3:4]
        if self._is_several:
            lefts = [*lefts, *(left for _, _, left in self._task.blocks(operands))]
        products = [Product("outer", left.t(), PLAIN, True) for left in lefts if left is not None]
        return outs + self._gather.multiply(operands[4], products)


class Reducing:
    """Form of all_reduce and matmul_all_reduce: one-shot, or a scatter and a gather of its sums. Operands: see `op`."""

    def __init__(self, on: Verbs, task: Task) -> None:
        M, N = task.moved
        self._task, self._multiplies, self._adds = task, task.op.multiplies, task.adds
        self._is_several = len(task.shapes) > task.op.operands
        # This rank's part of the sum.
        self._part = slice(0, None)
        if on.one_shot(task):
            self._scatter = on.scatter((M,), N, 0, to_all=True, multiplies=self._multiplies)
            self.stages: tuple[Any, ...] = self._start, self._sum
            return
        sizes = even_sizes(M, on.world_size)
        self._scatter = on.scatter(sizes, N, 0, to_all=False, multiplies=self._multiplies)
        self._gather = on.gather(sizes, N, 0, sums=True)
        begin = sum(sizes[: on.rank])
        self._shape, self._part = (M, N), slice(begin, begin + sizes[on.rank])
        self.stages = self._start, self._show, self._finish

    def _start(self, operands: Operands) -> None:
        if self._multiplies:
            terms = _terms(self._task, operands) if self._is_several else ((operands[0], operands[1]),)
            self._scatter.multiply(terms)
        else:
            self._scatter.put(operands[0])

    def _given(self, operands: Operands) -> tuple[Epilogue, Tensor | None]:
        # The epilogue, and the tensor that was put.
        if not self._multiplies:
            return PLAIN, operands[0]
        return Epilogue(operands[2], operands[3][self._part] if self._adds else None), None

    def _sum(self, operands: Operands) -> list[Tensor]:
        epilogue, own = self._given(operands)
        return self._scatter.sum(epilogue._replace(norm=_norm(self._task, operands)), own=own, last=True)

    def _show(self, operands: Operands) -> None:
        epilogue, own = self._given(operands)
        self._out = operands[0].new_empty(self._shape)
        self._scatter.sum_into(epilogue, self._out, self._gather, own=own)

    def _finish(self, operands: Operands) -> list[Tensor]:
        out = self._out
        del self._out
        # Norm the rows on arrival: sending them normed beside the sums would double the bytes.
        return with_norm(_norm(self._task, operands), self._gather.whole(out[self._part], out))


# By kind, or by the name of an op that has a form of its own.
FORMS: Mapping[str, Callable[[Verbs, Task], Any]] = {
    "gather": Gathering, "scatter": Scattering, "all_reduce": Reducing,
}  # fmt: skip


class Prepared:
    """Verbs of a schedule for a task, and the form that uses them.

    `ws` is this rank's end of the group's symmetric memory, if the schedule uses it. `how` holds options of
    `fused.Fused`.
    """

    def __init__(
        self, schedule: str, task: Task, group: ProcessGroup | None = None, ws: Workspace | None = None, **how: Any
    ) -> None:
        self.task, self.schedule = task, schedule
        # One rank has nothing to share.
        self.ws = ws if ws is not None and ws.world_size > 1 else None
        on = self.on = self._verbs(group, how)
        if task.algorithm == "ring" and not isinstance(on, Alone):
            from .fused import Fused, FusedRing

            if not isinstance(on, Fused):
                raise ValueError("algorithm 'ring' is a kernel: use it with schedule 'fused'")
            self.form: Any = FusedRing(on, task)
        else:
            form = FORMS.get(task.op.name, FORMS[task.op.kind])
            self.form = self._one_kernel(on) or form(on, task)
        *self._before, self._last = self.form.stages
        # The task's needs of a half of each arena, and of the signals.
        self.half_bytes: int = 0 if self.ws is None else on.layout.half_bytes
        self.slots: int = 0 if self.ws is None else on.layout.slots

    def _verbs(self, group: ProcessGroup | None, how: dict[str, Any]) -> Any:
        ws = self.ws
        if ws is None and (group is None or group.size() == 1):
            return Alone(self.task.leaves)
        # Imported late: a schedule loads modules that others do not need, and `fused` loads Triton.
        if ws is None:
            from .unfused import Unfused

            assert group is not None
            return Unfused(group, self.task)
        if self.schedule == "decomposed":
            from .decomposed import Decomposed

            return Decomposed(ws, self.task)
        if self.schedule == "fused":
            from .fused import Fused

            return Fused(ws, self.task, **how)
        raise ValueError(f"schedule {self.schedule!r} has no verbs over shared memory")

    def _one_kernel(self, on: Any) -> Any:
        if self.ws is None or self.schedule != "fused":
            return None
        # Imported late, as `fused` is.
        from . import one_kernel

        return one_kernel.OneKernel(on, self.task) if one_kernel.is_for(on, self.task) else None

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
