"""Bound tasks: a task on one rank with its group, device and schedule, run any number of times.

The first run chooses the schedule (`choose.dispatch`). A run takes the lane's lock, begins and ends the op in the
workspace, and records its path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from .. import groups, lanes, locks
from ..choose import dispatch, paths, tuning
from ..choose.paths import Path
from ..cost.overlap import MULTICAST
from ..locks import taken
from ..memory import Unreachable
from ..op import Task
from ..schedules import SCHEDULES
from ..schedules.forms import Prepared
from ..torch_private import graph_task, profiler_is_on
from ..workspaces import agreement, generation
from ..workspaces.agreement import Fingerprint
from ..workspaces.decisions import Decisions

_NOTHING: AbstractContextManager[Any] = nullcontext()
# Numbers of rows for which a call is kept. To make it again takes a tenth of a millisecond.
MAX_ROWS = 8
# Tasks and layouts of operands for which a capture's kernels are loaded.
_loaded: Decisions[None] = Decisions()


class BoundTask(Prepared):
    """A task on one rank with its chosen path, which runs any number of times until `is_stale`.

    - `call`, `rows`: text of the call that the task is part of, and lengths of its dims, for `agreement`.
    - `choice`: fields of the tile of `fused`; by default those measured to be the fastest.

    The first run chooses the path while it holds the lane's lock: a group's first op makes the workspace, which waits
    for peers, and no other op may come in between.
    """

    def __init__(
        self, task: Task, schedule: str, group: ProcessGroup, device: torch.device, *, producer: str = "auto",
        call: str = "", rows: Sequence[tuple[str, int]] = (), choice: Mapping[str, int | str] | None = None,
        lane: int = lanes.ORDINARY,
    ) -> None:  # fmt: skip
        if groups.inherited is not None:
            groups.check_fork()
        self.task, self._device, self._producer, self._choice = task, device, producer, choice
        self._asked_for, self._call, self._rows = schedule, call, rows
        self.version, self.on_gpu = generation.version, device.type == "cuda"
        self._capturing = self.on_gpu and torch.cuda.is_current_stream_capturing()
        self.num_ranks = group.size()
        self._group, self._alone, self.is_prepared = generation.watch(group), self.num_ranks == 1, False
        # Key: whether a backward pass runs.
        self._meanings: dict[bool, Fingerprint] = {}
        # By schedule, as in `agreement.fingerprint_of`.
        self._fixed: dict[str, dict[bool, int]] = {}
        # For `at`: paths by what `auto` decides by, and a task with other rows by schedule, of which the verbs and the
        # form serve all rows.
        self._paths: dict[Any, Path] = {}
        self._alike: dict[str, BoundTask] = {}
        self._lane, self._lock = lane, lanes.lock(str(group.group_name), lane)
        if self._alone:
            self._prepare()

    def at(self, task: Task, rows: Sequence[tuple[str, int]]) -> BoundTask:
        """Return a task that differs from this one in its rows alone. It shares verbs and form, if these serve both.

        A run binds them to its own rows.
        """
        made = object.__new__(BoundTask)
        path = self._paths.get(self._asked_for == "auto" and dispatch.rounded_shape(task))
        like = None if path is None else self._alike[path.schedule]
        is_alike = like is not None and like.version == generation.version and like._capturing == self._capturing
        made.__dict__ = vars(like if is_alike else self).copy()
        made.task, made._rows, made._meanings = task, rows, {}
        if path is not None and is_alike:
            made.path = path
            return made
        made.is_prepared = False
        if self._alone:
            made._prepare()
        return made

    def prepared(self) -> BoundTask:
        """Choose the path before the first run and return this task. Collective if it makes a workspace."""
        if not self.is_prepared:
            locks.alone(self._lock, self.task.op.name, self._prepare)
        return self

    def _prepare(self) -> None:
        task, group, device, producer, choice = self.task, self.group, self._device, self._producer, self._choice
        path = dispatch.choose(task, self._asked_for, group, device, self._lane)
        paths.check(path, task, group.size())
        row, reason, kernel = SCHEDULES[path.schedule], path.reason, ""
        row.check_lane(task.op.name, 0 if self._alone else self._lane)
        self.version = generation.version
        shares = row.shares_memory and not self._alone
        ws = dispatch.workspace_of(group, device, self._lane) if shares else None
        interpreted = row.has_kernels and device.type == "cpu"
        if interpreted:
            dispatch.check_interpreted(task.op.name, ws)
        if producer != "auto" and not row.has_kernels:
            reason += f"; producer={producer!r} has no effect, only 'fused' has one to choose"
        elif producer == MULTICAST and ws is not None:
            lacks, scaled = not ws.has_multicast, task.float8 is not None
            if why := "the memory has no address of all ranks" if lacks else "float8" if scaled else "":
                reason += f"; not multicast: {why}"
        if row.has_kernels and choice is None and (tuned := dispatch.tuned_tile(task, ws)) is not None:
            choice, kernel = tuned.choice, tuning.told(tuned)
        super().__init__(path.schedule, task, group, ws, producer=producer, choice=choice)
        sums = self.on.sums if task.any_order else ""
        self.path = replace(path, reason=reason, kernel=kernel, epilogue=task.epilogue.text(self.on.where), sums=sums)
        self._interpreted = interpreted and shares
        if not row.has_kernels or self._alone:
            self._alike[path.schedule] = self
            self._paths[self._asked_for == "auto" and dispatch.rounded_shape(task)] = self.path
        self.is_prepared = True

    def is_stale(self) -> bool:
        """Return whether `generation.version` has changed, or a graph capture has begun or ended."""
        if generation.gone:
            generation.changed()
        if self.version != generation.version:
            return True
        return self.on_gpu and torch.cuda.is_current_stream_capturing() != self._capturing

    def run(self, operands: Mapping[str, Any], results: Sequence[Tensor | None] = ()) -> list[Tensor]:
        """Run the task on these operands and return its results.

        `results`: tensors for the first results, None for new ones. They may have any strides. Operands must not share
        memory with them, except this rank's part of an all_gather's result. Raises ValueError if one does not fit.
        """
        if results:
            _check_outs(self.task, self.group.rank(), self._device, results)
            operands = {**operands, **{f"out{i or ''}": out for i, out in enumerate(results) if out is not None}}
        # A profiler shows the op as a range, whose name needs the path.
        profiled = record_function(self._name()) if profiler_is_on() else _NOTHING
        with profiled:
            if self._alone:
                outs: list[Tensor] = self.go(operands)
            else:
                # `locks.alone`, inlined because every op runs this.
                key, mine = self._lock, (get_ident(), self.task.op.name)
                try:
                    if (holder := taken.setdefault(key, mine)) is not mine:
                        locks.refuse(key, holder, mine[1])
                    outs = self._run(operands)
                finally:
                    if key in taken and taken[key] is mine:
                        del taken[key]
        path = replace(self.path, producer=self.on.sent_by) if self.on.sent_by else self.path
        paths.record(path, self.task, self.num_ranks)
        return outs

    def _name(self) -> str:
        path, task = self.prepared().path, self.task
        return paths.profiled_as(paths.whole(path, task.shapes, task.multiplied_in, self.num_ranks))

    def _run(self, operands: Mapping[str, Any]) -> list[Tensor]:
        # The caller holds the lane's lock.
        if not self.is_prepared:
            self._prepare()
        elif self.on.task is not self.task:
            self.bind()
        ws, op = self.ws, self.task.op.name
        if self.on_gpu and not self._lane and self._asked_for == "auto" and self.path.schedule != "fused":
            _load_for_capture(self.task, self.group, self._device, operands)
        if ws is None:
            return self.go(operands)
        is_backward = graph_task() != -1
        meant = self._meanings.get(is_backward)
        if meant is None:
            schedule, kind = self.path.schedule, self._device.type
            known = self._fixed.setdefault(schedule, {})
            meant = agreement.fingerprint_of(self.task, schedule, kind, self._call, self._rows, known, is_backward)
            self._meanings[is_backward] = meant
        ws.begin(op, meant)
        try:
            if self.half_bytes > ws.half_bytes or self.slots > ws.slots:
                ws.require(self.half_bytes, self.slots)
            outs = locks.alone(locks.INTERPRETER, op, self.go, operands) if self._interpreted else self.go(operands)
            ws.end()
        except BaseException as error:
            ws.interrupted(op, error)
            raise
        return outs

    @property
    def group(self) -> ProcessGroup:
        """Return the group, which the caller keeps alive."""
        group: ProcessGroup | None = self._group()
        if group is None:
            raise RuntimeError("the process group of this call has been destroyed")
        return group


def _check_outs(task: Task, rank: int, device: torch.device, outs: Sequence[Tensor | None]) -> None:
    """Raise ValueError unless `outs` are tensors for the results of a task."""
    op, shapes = task.op.name, task.results(rank)
    # Products before an activation have the layout of its results; a norm makes its own result.
    num_products = len(task.each("b"))
    epilogue = task.epilogue
    first = 1 if epilogue.norm else epilogue.num_results(num_products)
    kept = range(first, first + (num_products if epilogue.keeps else epilogue.norm is not None))
    if len(outs) > len(shapes):
        raise ValueError(f"{op}: {len(outs)} tensors are given for {len(shapes)} results")
    for i, (out, shape) in enumerate(zip(outs, shapes, strict=False)):
        if out is None:
            continue
        if i in kept:
            raise ValueError(f"{op}: result {i} must be a new tensor: products before an activation and norms are")
        is_whole = epilogue.whole and i == len(shapes) - 1
        expected = (tuple(shape), (task.float8 if is_whole else None) or task.dtype, device)
        if (actual := (tuple(out.shape), out.dtype, out.device)) != expected:
            raise ValueError(f"{op}: the tensor for result {i} must be {expected}, got {actual}")
        if any(length > 1 and stride == 0 for length, stride in zip(out.shape, out.stride(), strict=True)):
            raise ValueError(f"{op}: the tensor for result {i} has one place for several elements: {out.stride()}")


def _load_for_capture(task: Task, group: ProcessGroup, device: torch.device, operands: Mapping[str, Tensor]) -> None:
    """Grow the workspace and load the kernels for the schedule that a graph capture would choose, once.

    The schedule may differ inside a capture, where neither growth nor loading is possible.
    """
    if task.dtype not in dispatch.FUSED_DTYPES or group.size() == 1:
        return
    try:
        ws = dispatch.workspace_of(group, device)
    except Unreachable:
        return
    if not ws.loads_for_capture:
        return
    # Late imports: these load Triton.
    from ..kernels.loading import only_loading
    from ..schedules.producer import layouts_of

    def load() -> None:
        if dispatch.path_in_capture(task, ws).schedule == "fused":
            tuned = dispatch.tuned_tile(task, ws)
            prepared = Prepared("fused", task, group, ws, choice=None if tuned is None else tuned.choice)
            ws.require(prepared.half_bytes, prepared.slots)
            with only_loading():
                prepared.go(operands)

    _loaded.get(ws, (task, *layouts_of(*operands.values())), load)
