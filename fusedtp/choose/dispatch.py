"""Choose the schedule that runs an op. The choice is the same on every rank, and `last_path` gives the reason.

A schedule that the caller names is used or refused. `auto` decides by the first of these that applies:

- one rank, or on a GPU a dtype without kernels: `unfused`;
- ranks that cannot reach each other's memory: `unfused`, with one warning;
- a measurement of `fusedtp tune` on this machine: the fastest schedule at the nearest size, corrected to the op's size
  by the cost model;
- a GPU in the hardware table: the schedule that the cost model predicts to be the fastest;
- another GPU: `fused`;
- a CPU: `decomposed`, because Triton's interpreter is not fast.

`auto` runs float8 fused only on a GPU with float8 units.

Ranks make the same choice because they use the same data. Rank 0 reads the file of measurements and sends it to its
peers, once per group, at the first op that shares memory. Choices are cached.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from .. import groups, lanes, locks
from ..cost.hardware import Hardware, of_gpu
from ..cost.overlap import MULTICAST
from ..float8 import FNUZ, target_of, widens_blocks, without_float8
from ..memory import Unreachable
from ..op import Task
from ..schedules import NAMES, SCHEDULES
from ..schedules.forms import Prepared
from ..shards import size_class
from ..torch_private import graph_task, profiler_is_on
from ..workspaces import agreement, generation
from ..workspaces.agreement import Fingerprint
from . import paths, tuning
from .paths import Path
from .tuning import Tuned

if TYPE_CHECKING:
    from ..workspaces.workspace import Workspace


FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_said: set[str] = set()
_NOTHING: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True)
class SharedConfig:
    """Data that the ranks of a group share, so that they make the same choice.

    - `table`: the measurements of `fusedtp tune`, or None.
    - `gpu`: rank 0's GPU in the hardware table, or None.
    - `target`: rank 0's compile target (`target_of`), "" on a CPU.
    """

    table: tuning.Table | None
    gpu: Hardware | None
    target: str = ""


def check_schedule(schedule: str) -> None:
    """Raise ValueError unless `schedule` is "auto" or the name of a schedule."""
    if schedule != "auto" and schedule not in NAMES:
        raise ValueError(f"schedule must be one of {', '.join(('auto', *NAMES))}, got {schedule!r}")


def choose(
    task: Task, schedule: str, group: ProcessGroup, device: torch.device, lane: int = lanes.ORDINARY
) -> Path:  # fmt: skip
    """Return the path of a task. A group's first call is collective if the schedule may need shared memory."""
    op, dtype = task.op.name, task.dtype
    if task.leaves:
        return _as_tree(task, group)
    if schedule != "auto":
        asked_for = _asked_for(op, schedule, dtype)
        check_units(task, schedule, group, device)
        # `decomposed` needs no `SharedConfig`. But peers may name another schedule, which ranks find only if all come
        # this far. A capture can only run ops that have run before.
        if SCHEDULES[schedule].shares_memory and group.size() > 1 and not _is_capturing(device):
            _know(_workspaces().get(group, device, lane), group)
        return asked_for
    if group.size() == 1:
        return Path(op, "unfused", "one rank has nothing to send")
    on_gpu = device.type == "cuda"
    if on_gpu and dtype not in FUSED_DTYPES:
        return Path(op, "unfused", f"no fused kernel for {dtype}")
    try:
        ws = _workspaces().get(group, device, lane)
    except Unreachable as error:
        return _unreachable(op, str(error))
    capturing = _is_capturing(device)
    _know(ws, group)
    switch = task.any_order and ws.has_multicast
    key = (op, dtype, task.float8, task.in_blocks, _shape(task), capturing, switch)
    path: Path = ws.decided(key, lambda: _decide(task, group.size(), ws.knowledge, on_gpu, capturing, switch, lane))
    return path


def _as_tree(task: Task, group: ProcessGroup) -> Path:
    # The schedule asked for applies to the call's other ops, which only move data.
    check_dtype(task.dtype, f"{task.op.name}: ")
    ranks = "on one rank too" if group.size() == 1 else "and float32 between ranks"
    return Path(task.op.name, "fused", f"added up as a tree of {task.leaves} leaves, which only kernels do, {ranks}")


def check_units(task: Task, schedule: str, group: ProcessGroup, device: torch.device) -> None:
    """Raise RuntimeError if `schedule` has kernels, which cannot multiply the task's float8 dtype."""
    if task.float8 is not None and group.size() > 1 and schedule != "auto" and SCHEDULES[schedule].has_kernels:
        _check_float8(task.op.name, task.float8, task.in_blocks, device)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _tuned(task: Task, ws: Workspace | None) -> Tuned | None:
    # Return the measurement that gives `fused` another tile than the table's, if any.
    if ws is None or ws.knowledge is None or ws.knowledge.table is None:
        return None
    return tuning.nearest_tile(ws.knowledge.table.kernels, task, ws.world_size)


def _know(ws: Workspace, group: ProcessGroup) -> None:
    # Share rank 0's `SharedConfig`, once per group.
    if ws.knowledge is not None:
        return
    on_gpu = ws.device.type == "cuda"
    ws.knowledge, ignored, interruption = _share(ws, group, on_gpu)
    if not on_gpu and ws.knowledge.table is not None:
        ws.hardware = ws.knowledge.table.hardware(group.size()) or ws.hardware
        # Drop decisions that used the former `hardware`. Every rank does so.
        generation.changed()
    # Only after `ws.knowledge` is set: this rank must not share it again, as its peers have it.
    if interruption is not None:
        raise interruption
    if ignored and ignored not in _said:
        _said.add(ignored)
        warnings.warn(f"fusedtp chooses schedules without measurements: {ignored}", stacklevel=3)


def _shape(task: Task) -> tuple[int, int] | None:
    # None if the caller names an algorithm: `unfused` has none to compare with. Lengths are rounded up by less than an
    # eighth, which no measurement and no model tells apart, so that few decisions serve all numbers of rows.
    rows, cols = task.moved
    return (size_class(rows), size_class(cols)) if task.algorithm == "auto" else None


class BoundTask(Prepared):
    """A task on one rank with its chosen path, which runs any number of times until `is_stale`.

    - `call`, `rows`: text of the call that the task is part of, and lengths of its dims, for `agreement`.
    - `choice`: fields of the tile of `fused`; by default those measured to be the fastest.

    The first run chooses the path while it holds the group's lock: a group's first op makes the workspace, which waits
    for peers, and no other op may come in between.
    """

    def __init__(
        self, task: Task, schedule: str, group: ProcessGroup, device: torch.device, *, producer: str = "auto",
        call: str = "", rows: Sequence[tuple[str, int]] = (), choice: Mapping[str, int] | None = None,
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
        # For `at`: paths by what `auto` decides by, and a task with other rows by schedule, if verbs need not be made
        # anew.
        self._paths: dict[Any, Path] = {}
        self._alike: dict[str, BoundTask] = {}
        self._lane, self._lock = lane, lanes.lock(str(group.group_name), lane)
        if self._alone:
            self._prepare()

    def at(self, task: Task, rows: Sequence[tuple[str, int]]) -> BoundTask:
        """Return a task that differs from this one in its rows alone."""
        made = object.__new__(BoundTask)
        made.__dict__ = vars(self).copy()
        made.task, made._rows, made._meanings = task, rows, {}
        path = self._paths.get(self._asked_for == "auto" and _shape(task))
        like = None if path is None else self._alike[path.schedule]
        if path and like and like.version == generation.version and like._capturing == self._capturing:
            made.path, made.schedule, made.ws, on = path, like.schedule, like.ws, like.on.at(task)
            made.is_prepared = True
            made._take(on, like.form.at(on, task))
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
        path = choose(task, self._asked_for, group, device, self._lane)
        paths.check(path, task, group.size())
        row, reason, kernel = SCHEDULES[path.schedule], path.reason, ""
        row.check_lane(task.op.name, 0 if self._alone else self._lane)
        self.version = generation.version
        shares = row.shares_memory and not self._alone
        ws = _workspaces().get(group, device, self._lane) if shares else None
        interpreted = row.has_kernels and device.type == "cpu"
        if interpreted:
            _check_interpreted(task.op.name, ws)
        if producer != "auto" and not row.has_kernels:
            reason += f"; producer={producer!r} has no effect, only 'fused' has one to choose"
        elif producer == MULTICAST and ws is not None:
            lacks, scaled = not ws.has_multicast, task.float8 is not None
            if why := "the memory has no address of all ranks" if lacks else "float8" if scaled else "":
                reason += f"; not multicast: {why}"
        if row.has_kernels and choice is None and (tuned := _tuned(task, ws)) is not None:
            choice, kernel = tuned.choice, tuning.told(tuned)
        super().__init__(path.schedule, task, group, ws, producer=producer, choice=choice)
        sums = self.on.sums if task.any_order else ""
        self.path = replace(path, reason=reason, kernel=kernel, epilogue=task.epilogue.text(self.on.where), sums=sums)
        self._interpreted = interpreted and shares
        if not row.has_kernels or self._alone:
            self._alike[path.schedule] = self
            self._paths[self._asked_for == "auto" and _shape(task)] = self.path
        self.is_prepared = True

    def is_stale(self) -> bool:
        """Return whether `generation.version` has changed, or a graph capture has begun or ended."""
        if generation.gone:
            generation.changed()
        if self.version != generation.version:
            return True
        return self.on_gpu and torch.cuda.is_current_stream_capturing() != self._capturing

    def run(self, operands: Mapping[str, Any], given: Sequence[Tensor | None] = ()) -> list[Tensor]:
        """Run the task on these operands and return its results.

        `given`: tensors for the first results, None for new ones. They may have any strides. Operands must not share
        memory with them, except this rank's part of an all_gather's result. Raises ValueError if one does not fit.
        """
        if given:
            _check_outs(self.task, self.group.rank(), self._device, given)
            operands = {**operands, **{f"out{i or ''}": out for i, out in enumerate(given) if out is not None}}
        # A profiler shows the op as a range, whose name needs the path.
        profiled = record_function(self._name()) if profiler_is_on() else _NOTHING
        with profiled:
            if self._alone:
                outs: list[Tensor] = self.go(operands)
            else:
                outs = locks.alone(self._lock, self.task.op.name, self._run, operands)
        path = replace(self.path, producer=self.on.sent_by) if self.on.sent_by else self.path
        paths.record(path, self.task, self.num_ranks)
        return outs

    def _name(self) -> str:
        path, task = self.prepared().path, self.task
        return paths.profiled_as(paths.whole(path, task.shapes, task.multiplied_in, self.num_ranks))

    def _run(self, operands: Mapping[str, Any]) -> list[Tensor]:
        # The caller holds the group's lock.
        if not self.is_prepared:
            self._prepare()
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
            meant = agreement.fingerprint_of(self.task, schedule, kind, self._call, self._rows, known)
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

    def pass_by(self) -> None:
        """Set `last_path` for a call on one rank that F.linear computes."""
        paths.record(self.path, self.task, self.num_ranks)

    @property
    def group(self) -> ProcessGroup:
        """Return the group, which the caller keeps alive."""
        group: ProcessGroup | None = self._group()
        assert group is not None
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
        if (found := (tuple(out.shape), out.dtype, out.device)) != expected:
            raise ValueError(f"{op}: the tensor for result {i} must be {expected}, got {found}")
        if any(length > 1 and stride == 0 for length, stride in zip(out.shape, out.stride(), strict=True)):
            raise ValueError(f"{op}: the tensor for result {i} has one place for several elements: {out.stride()}")


def _load_for_capture(task: Task, group: ProcessGroup, device: torch.device, operands: Mapping[str, Tensor]) -> None:
    """Grow the workspace and load the kernels for the schedule that a graph capture would choose, once.

    The schedule may differ inside a capture, where neither growth nor loading is possible.
    """
    registry = _workspaces()
    if task.dtype not in FUSED_DTYPES or group.size() == 1 or not registry.reachable(group, device)[0]:
        return
    ws = registry.get(group, device)
    if not ws.loads_for_capture:
        return
    # Late imports: these load Triton.
    from ..kernels.loading import only_loading
    from ..schedules.producer import layouts_of

    def load() -> bool:
        switch = task.any_order and ws.has_multicast
        if _decide(task, group.size(), ws.knowledge, True, True, switch).schedule == "fused":
            tuned = _tuned(task, ws)
            prepared = Prepared("fused", task, group, ws, choice=None if tuned is None else tuned.choice)
            ws.require(prepared.half_bytes, prepared.slots)
            with only_loading():
                prepared.go(operands)
        return True

    ws.decided(("loaded", task, *layouts_of(*operands.values())), load)


@cache
def _asked_for(op: str, schedule: str, dtype: torch.dtype) -> Path:
    check_schedule(schedule)
    if SCHEDULES[schedule].has_kernels:
        check_dtype(dtype, f"{op}: ")
    return Path(op, schedule, "asked for")


def check_dtype(dtype: torch.dtype, what: str = "") -> None:
    """Raise ValueError unless kernels multiply the dtype. `what` begins the error."""
    if dtype not in FUSED_DTYPES:
        names = ", ".join(str(each) for each in FUSED_DTYPES)
        raise ValueError(f"{what}schedule 'fused' multiplies {names}, got {dtype}: use 'decomposed' or 'unfused'")


@cache
def _check_float8(op: str, dtype: torch.dtype, blocks: bool, device: torch.device) -> None:
    if device.type == "cuda":
        why = without_float8(dtype, target_of(device), blocks=blocks)
    else:
        why = "Triton's interpreter does not know it" if dtype in FNUZ else ""
    if why:
        raise RuntimeError(
            f"{op}: schedule 'fused' cannot multiply {dtype} here: {why}: use 'auto', 'decomposed' or 'unfused', or "
            "operands in bfloat16"
        )


@cache
def _is_interpreted() -> bool:
    # A late import: it loads Triton.
    from ..kernels import INTERPRETED

    return INTERPRETED


def _check_interpreted(op: str, ws: Workspace | None) -> None:
    """Raise RuntimeError on every rank if a rank does not interpret kernels."""
    compiling = [0] * (not _is_interpreted()) if ws is None else ws.compiling_ranks()
    if compiling:
        raise RuntimeError(
            f"{op}: on a CPU schedule 'fused' needs Triton's interpreter, which is off on rank "
            f"{', '.join(map(str, compiling))}: on every rank set TRITON_INTERPRET to 1 before fusedtp or triton is "
            "imported (where there is a GPU, unset means off), use tensors on a GPU, or schedule 'decomposed' or "
            "'unfused'"
        )


@cache
def _workspaces() -> ModuleType:
    # A late import: schedules without shared memory must not load the modules that map it.
    from ..workspaces import registry

    return registry


def _unreachable(op: str, detail: str) -> Path:
    reason = f"the ranks cannot reach each other's memory ({detail})"
    if reason not in _said:
        _said.add(reason)
        warnings.warn(f"fusedtp runs {op} and what follows unfused: {reason}", stacklevel=3)
    return Path(op, "unfused", reason)


def _unmeasured(op: str, dtype: str) -> str:
    tune = f"`fusedtp tune --dtype {dtype}`"
    return f"there is no valid measurement of this machine for {op} in {dtype} ({tune} makes one)"


def _decide(
    task: Task, world_size: int, knowledge: SharedConfig, on_gpu: bool, capturing: bool, switch: bool = False,
    lane: int = lanes.ORDINARY,
) -> Path:  # fmt: skip
    op, name, shape = task.op.name, task.multiplied_in, _shape(task)
    allowed = tuple(row.name for row in SCHEDULES.values() if row.is_for_auto(on_gpu, capturing, lane))
    lacks = ""
    if on_gpu and task.float8 is not None:
        lacks = without_float8(task.float8, knowledge.target, blocks=task.in_blocks)
        lacks = lacks or (widens_blocks(knowledge.target) if task.in_blocks else "")
    if lacks:
        allowed, lacks = tuple(each for each in allowed if not SCHEDULES[each].has_kernels), f"not fused: {lacks}"
    if shape is not None:
        made = tuning.decide(knowledge.table, knowledge.gpu, op, name, world_size, *shape, allowed, switch=switch)
        if made is not None:
            schedule, reason = made
            return Path(op, schedule, f"{reason}; {lacks}" if lacks else reason)
    if lacks:
        # A named algorithm rules `unfused` out.
        return Path(op, allowed[0] if shape is None else "unfused", lacks)
    if on_gpu and lane:
        return Path(op, allowed[0], f"no kernel may wait for peers{lanes.said(lane)}")
    if on_gpu:
        return Path(op, "fused", f"ranks reach each other's GPU memory, and {_unmeasured(op, name)}")
    return Path(op, "decomposed", f"ranks share memory, and {_unmeasured(op, name)}")


def _share(ws: Workspace, group: ProcessGroup, on_gpu: bool) -> tuple[SharedConfig, str, BaseException | None]:
    """Share rank 0's table of measurements and GPU with all ranks. Collective.

    Return the `SharedConfig`, why a table is ignored ("" if none is), and an interruption that rank 0 must raise, if
    any. Peers get a message from rank 0 even after an error there.
    """
    message: str | None = None
    ignored, interruption = "", None
    if group.rank() == 0:
        text, gpu, target = "", "", ""
        try:
            gpu, target = (torch.cuda.get_device_name(), target_of()) if on_gpu else ("", "")
            _, text, ignored = tuning.load()
        except BaseException as error:
            ignored = f"{type(error).__name__}: {error}"
            interruption = None if isinstance(error, Exception) else error
        message = json.dumps({"table": text, "gpu": gpu, "target": target})
    if on_gpu:
        sent = [message]
        dist.broadcast_object_list(sent, dist.get_global_rank(group, 0), group)
        found = str(sent[0])
    else:
        # A late import, as in `_workspaces`. The store, not a collective of the backend: an interrupted rank might
        # never join a collective.
        from ..workspaces.rendezvous import StoreExchange

        found = StoreExchange(group, ws.lane).from_first(ws.making, message)
    shared = json.loads(found)
    table = tuning.parse(shared["table"]) if shared["table"] else None
    return SharedConfig(table, of_gpu(shared["gpu"]), shared["target"]), ignored, interruption
