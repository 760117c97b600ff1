"""Which schedule runs an op, and why. The choice is the same on every rank and is never silent.

A name the caller gives wins, or is refused. `auto` takes what `fusedtp tune` measured to be the fastest at the nearest
size on this machine, corrected to the size at hand by the cost model. Without a measurement it takes on a GPU what the
cost model predicts, or the fused schedule where the hardware table does not have that GPU, and on a CPU the decomposed
schedule: Triton's interpreter checks kernels there, it does not speed them up. float8 is fused only on a GPU that has
units for it. All but `unfused` need ranks that can reach each other's memory; where they cannot, it runs and a warning
says so once.

Ranks agree because they decide from the same data: rank 0 reads the file of measurements and tells its peers, once a
group, with the first op that shares memory. Each choice is then made once and looked up.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import groups, locks, schedules
from ..cost.hardware import Hardware, of_gpu
from ..cost.overlap import MULTICAST
from ..float8 import FNUZ, target_of, widens_blocks, without_float8
from ..memory import Unreachable
from ..op import Task
from ..schedules.forms import Prepared
from ..torch_private import graph_task
from ..workspaces import agreement, generation
from ..workspaces.agreement import Meaning
from . import kernels_tuned, tuning
from .kernels_tuned import Tuned

if TYPE_CHECKING:
    from ..workspaces.workspace import Workspace


@dataclass(frozen=True)
class Path:
    """What ran: the op's name, the schedule, fused, decomposed or unfused, and why that one. producer: how `fused` sent
    what it gathered, push, copy or multicast, or "" where it gathered nothing. epilogue:
    the activation or the residual that the op ended with, and where: in the kernel; by chunk, a residual as one term
    more of the sum; or after what the library or the process group does, as on one rank. kernel: the tile of `fused`,
    if `fusedtp tune --kernels` found one that is faster than the table's, by how much, and at which size. sums: how
    `fused` adds ranks' terms where `order="any"` lets it choose: in the switch, or in the order of ranks, and why.
    """

    op: str
    schedule: str
    reason: str
    producer: str = ""
    epilogue: str = ""
    kernel: str = ""
    sums: str = ""


def in_any_order(task: Task, schedule: str, world_size: int) -> str:
    """How terms are added where any order will do and the schedule has no choice: a `Path`'s `sums`."""
    if world_size == 1:
        return "of one rank"
    if task.algorithm == "ring":
        return "along the ring"
    return "as the process group adds" if schedule == "unfused" else "in the order of ranks: not by fused"


FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_last: Path | None = None
_said: set[str] = set()


@dataclass(frozen=True)
class Knowledge:
    """What the ranks of a group know alike: the table of measurements, and what rank 0's GPU is (`target_of`)."""

    table: tuning.Table | None
    gpu: Hardware | None
    target: str = ""


def check_schedule(schedule: str) -> None:
    """ValueError unless `schedule` is one that `choose` knows."""
    if schedule != "auto" and schedule not in schedules.NAMES:
        raise ValueError(f"schedule must be one of {', '.join(('auto', *schedules.NAMES))}, got {schedule!r}")


def choose(task: Task, schedule: str, group: ProcessGroup, device: torch.device) -> Path:
    """The path of a task: collective over `group` on the first call with a schedule that needs shared memory."""
    op, dtype, name = task.op.name, task.dtype, schedule
    if task.leaves:
        return _as_tree(task, group)
    if name != "auto":
        check_units(task, name, group, device)
        asked_for = _asked_for(op, name, dtype)
        # `decomposed` needs nothing of it, but peers may ask for another schedule, which is told once all have come so
        # far. A capture can run nothing that has not been run before.
        if name != "unfused" and group.size() > 1 and not _is_capturing(device):
            _know(group, device)
        return asked_for
    if group.size() == 1:
        return Path(op, "unfused", "one rank has nothing to send")
    on_gpu = device.type == "cuda"
    if on_gpu and dtype not in FUSED_DTYPES:
        return Path(op, "unfused", f"no fused kernel for {dtype}")
    try:
        ws = _workspaces().get(group, device)
    except Unreachable as error:
        return _unreachable(op, str(error))
    capturing = _is_capturing(device)
    _know(group, device)
    switch = task.any_order and ws.has_multicast
    key = (op, dtype, task.float8, task.in_blocks, _shape(task), capturing, switch)
    path: Path = ws.decided(key, lambda: _decide(task, group.size(), ws.knowledge, on_gpu, capturing, switch))
    return path


def _as_tree(task: Task, group: ProcessGroup) -> Path:
    # Whatever is asked for: an op of the same call that moves data alone may run by any schedule.
    _check_dtype(task.op.name, task.dtype)
    ranks = "on one rank too" if group.size() == 1 else "and float32 between ranks"
    return Path(task.op.name, "fused", f"added up as a tree of {task.leaves} leaves, which only kernels do, {ranks}")


def check_units(task: Task, schedule: str, group: ProcessGroup, device: torch.device) -> None:
    """RuntimeError where `fused` is asked for and kernels cannot multiply the task's float8."""
    if schedule == "fused" and task.float8 is not None and group.size() > 1:
        _check_float8(task.op.name, task.float8, task.in_blocks, device)


def _know(group: ProcessGroup, device: torch.device) -> None:
    # What rank 0 tells its peers, once a group.
    ws = _workspaces().get(group, device)
    if ws.knowledge is None:
        _learn(ws, group, device.type == "cuda")


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _tuned(task: Task, ws: Workspace | None) -> Tuned | None:
    # The measurement by which `fused` takes another tile than the table's, if one does.
    if ws is None or ws.knowledge is None or ws.knowledge.table is None:
        return None
    return kernels_tuned.nearest(ws.knowledge.table.kernels, task, ws.world_size)


def _learn(ws: Workspace, group: ProcessGroup, on_gpu: bool) -> None:
    ws.knowledge, ignored, interruption = _share(ws, group, on_gpu)
    if not on_gpu and ws.knowledge.table is not None:
        ws.hardware = ws.knowledge.table.hardware(group.size()) or ws.hardware
        # What was decided with the other: on every rank alike, as a rank that decides anew must agree.
        generation.changed()
    # Only now, when this rank too knows what its peers were told, and will not ask them again.
    if interruption is not None:
        raise interruption
    if ignored and ignored not in _said:
        _said.add(ignored)
        warnings.warn(f"fusedtp chooses schedules without measurements: {ignored}", stacklevel=4)


def _shape(task: Task) -> tuple[int, int] | None:
    # None where the caller asks for an algorithm: `unfused` has none, so nothing was measured to compare with.
    return task.moved if task.algorithm == "auto" else None


class Ready(Prepared):
    """A task on one rank, by the path that was chosen for it: found once, run any number of times.

    It holds until `is_stale`. call: what the task is part of, see `agreement`. choice: of the tile of `fused`, by
    default what was measured to be the fastest. The path is chosen in the turn of the first run: a group's first op
    makes the workspace, which waits for peers, and no other caller may come in between.
    """

    def __init__(
        self, task: Task, schedule: str, group: ProcessGroup, device: torch.device, *, producer: str = "auto",
        call: str = "", choice: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        if groups.inherited is not None:
            groups.check_fork()
        self.task, self._device, self._producer, self._choice = task, device, producer, choice
        self._asked_for, self._call = schedule, call
        self.version, self.on_gpu = generation.version, device.type == "cuda"
        self._capturing = self.on_gpu and torch.cuda.is_current_stream_capturing()
        self._group, self._alone, self._is_prepared = generation.watch(group), group.size() == 1, False
        # By whether it is part of a backward pass.
        self._meanings: dict[bool, Meaning] = {}
        self._turn = ("group", str(group.group_name))
        if self._alone:
            self._prepare()

    def prepared(self) -> Ready:
        """This task with its path chosen, before its first run: collective where that makes a workspace."""
        locks.alone(self._turn, self.task.op.name, self._prepare_once)
        return self

    def _prepare_once(self) -> None:
        if not self._is_prepared:
            self._prepare()

    def _prepare(self) -> None:
        task, group, device, producer, choice = self.task, self.group, self._device, self._producer, self._choice
        self.path = choose(task, self._asked_for, group, device)
        interpreted = self.path.schedule == "fused" and device.type == "cpu"
        if interpreted and not _is_interpreted():
            now = os.environ.get("TRITON_INTERPRET") or "unset, which means off where there is a GPU"
            raise RuntimeError(
                f"{task.op.name}: on a CPU schedule 'fused' needs Triton's interpreter, which is off: "
                f"TRITON_INTERPRET is {now}. Set it to 1 before fusedtp or triton is imported, use tensors on a GPU, "
                "or schedule 'decomposed' or 'unfused'"
            )
        if producer != "auto" and self.path.schedule != "fused":
            reason = f"{self.path.reason}; producer={producer!r} has no effect, only 'fused' has one to choose"
            self.path = replace(self.path, reason=reason)
        self.version = generation.version
        shares = self.path.schedule != "unfused" and not self._alone
        ws = _workspaces().get(group, device) if shares else None
        if producer == MULTICAST and self.path.schedule == "fused" and ws is not None:
            lacks, scaled = not ws.has_multicast, task.float8 is not None
            if why := "the memory has no address of all ranks" if lacks else "float8" if scaled else "":
                self.path = replace(self.path, reason=f"{self.path.reason}; not multicast: {why}")
        if self.path.schedule == "fused" and choice is None and (tuned := _tuned(task, ws)) is not None:
            choice, self.path = tuned.choice, replace(self.path, kernel=kernels_tuned.told(tuned))
        super().__init__(self.path.schedule, task, group, ws, producer=producer, choice=choice)
        ends_with = [f"{each} {self.on.where}" for each in (task.activation, "residual" * task.adds) if each]
        if task.norm:
            ends_with.append(f"{task.norm} after it")
        if ends_with:
            self.path = replace(self.path, epilogue=", ".join(ends_with))
        if task.any_order:
            said = getattr(self.on, "sums", "")
            self.path = replace(self.path, sums=said or in_any_order(task, self.path.schedule, group.size()))
        self._interpreted = interpreted and shares
        self._is_prepared = True

    def is_stale(self) -> bool:
        """Whether memory has been made or given back since, or a graph capture has begun or ended."""
        if generation.gone:
            generation.changed()
        if self.version != generation.version:
            return True
        return self.on_gpu and torch.cuda.is_current_stream_capturing() != self._capturing

    def run(self, operands: Sequence[Any]) -> list[Tensor]:
        """The task on these operands."""
        global _last
        if self._alone:
            _last = self.path
            return self.go(operands)
        outs: list[Tensor] = locks.alone(self._turn, self.task.op.name, self._run, operands)
        _last = replace(self.path, producer=self.on.sent_by) if self.on.sent_by else self.path
        return outs

    def _run(self, operands: Sequence[Any]) -> list[Tensor]:
        # In the group's turn.
        if not self._is_prepared:
            self._prepare()
        ws, op = self.ws, self.task.op.name
        if self.on_gpu and self._asked_for == "auto" and self.path.schedule != "fused":
            _load_for_capture(self.task, self.group, self._device, operands)
        if ws is None:
            return self.go(operands)
        meant = self._meanings.get(graph_task() != -1) or self._means()
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
        """To be called for a task of one rank that the caller runs itself."""
        global _last
        _last = self.path

    @property
    def group(self) -> ProcessGroup:
        """The group; the caller keeps it alive."""
        group: ProcessGroup | None = self._group()
        assert group is not None
        return group

    def _means(self) -> Meaning:
        meant = agreement.meaning_of(self.task, self.path.schedule, self._device.type, self._call)
        self._meanings[graph_task() != -1] = meant
        return meant


def _load_for_capture(task: Task, group: ProcessGroup, device: torch.device, operands: Sequence[Tensor | None]) -> None:
    """To be called before an op for which a capture may choose another schedule: make room for that one, and load its
    kernels, once.
    """
    registry = _workspaces()
    if task.dtype not in FUSED_DTYPES or group.size() == 1 or not registry.reachable(group, device)[0]:
        return
    ws = registry.get(group, device)
    if not ws.loads_for_capture:
        return
    # Late: they bring Triton in.
    from ..kernels.loading import only_loading
    from ..schedules.producer import alike

    def load() -> bool:
        switch = task.any_order and ws.has_multicast
        if _decide(task, group.size(), ws.knowledge, True, True, switch).schedule == "fused":
            tuned = _tuned(task, ws)
            prepared = Prepared("fused", task, group, ws, choice=None if tuned is None else tuned.choice)
            ws.require(prepared.half_bytes, prepared.slots)
            with only_loading():
                prepared.go(operands)
        return True

    ws.decided(("loaded", task, *alike(*operands)), load)


@cache
def _asked_for(op: str, schedule: str, dtype: torch.dtype) -> Path:
    check_schedule(schedule)
    if schedule == "fused":
        _check_dtype(op, dtype)
    return Path(op, schedule, "asked for")


def _check_dtype(op: str, dtype: torch.dtype) -> None:
    if dtype not in FUSED_DTYPES:
        names = ", ".join(str(each) for each in FUSED_DTYPES)
        raise ValueError(f"{op}: schedule 'fused' multiplies {names}, got {dtype}: use 'decomposed' or 'unfused'")


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
    # Late: it loads Triton.
    from ..kernels import INTERPRETED

    return INTERPRETED


@cache
def _workspaces() -> ModuleType:
    # Late: schedules that need no shared memory must not load what maps it.
    from ..workspaces import registry

    return registry


def _unreachable(op: str, detail: str) -> Path:
    reason = f"the ranks cannot reach each other's memory ({detail})"
    if reason not in _said:
        _said.add(reason)
        warnings.warn(f"fusedtp runs {op} and what follows unfused: {reason}", stacklevel=3)
    return Path(op, "unfused", reason)


def _decide(
    task: Task, world_size: int, knowledge: Knowledge, on_gpu: bool, capturing: bool, switch: bool = False
) -> Path:  # fmt: skip
    op, name, shape = task.op.name, task.multiplied_in, _shape(task)
    # Copies to addresses chosen on the host cannot be captured; interpreted kernels are never fast.
    cannot = "fused" if not on_gpu else "decomposed" if capturing else ""
    allowed = tuple(each for each in schedules.NAMES if each != cannot)
    lacks = ""
    if on_gpu and task.float8 is not None:
        lacks = without_float8(task.float8, knowledge.target, blocks=task.in_blocks)
        lacks = lacks or (widens_blocks(knowledge.target) if task.in_blocks else "")
    if lacks:
        allowed, lacks = tuple(each for each in allowed if each != "fused"), f"not fused: {lacks}"
    if shape is not None:
        made = tuning.decide(knowledge.table, knowledge.gpu, op, name, world_size, *shape, allowed, switch=switch)
        if made is not None:
            schedule, reason = made
            return Path(op, schedule, f"{reason}; {lacks}" if lacks else reason)
    if lacks:
        # Only the chunks' algorithm can be asked for.
        return Path(op, allowed[0] if shape is None else "unfused", lacks)
    if on_gpu:
        return Path(op, "fused", "ranks reach each other's GPU memory; nothing was measured or is known of this GPU")
    return Path(op, "decomposed", f"ranks share memory; nothing was measured here for {op} in {name}")


def _share(ws: Workspace, group: ProcessGroup, on_gpu: bool) -> tuple[Knowledge, str, BaseException | None]:
    """Rank 0's table and the name of its GPU, on all ranks; why there is no table; the interruption, if any.
    Collective.

    Whatever goes wrong on rank 0, its peers wait for a message and get one.
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
        # Late, as in `_workspaces`. Not a collective: a rank that is interrupted before might never come to it.
        from ..workspaces.rendezvous import StoreExchange

        found = StoreExchange(group).from_first(ws.making, message)
    shared = json.loads(found)
    table = tuning.parse(shared["table"]) if shared["table"] else None
    return Knowledge(table, of_gpu(shared["gpu"]), shared["target"]), ignored, interruption


def last_path() -> Path | None:
    """The path of this process's last op, or None before the first."""
    return _last
