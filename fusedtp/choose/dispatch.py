"""Choose the schedule that runs an op. The choice is the same on every rank, and `last_path` gives the reason.

A schedule that the caller names is used or refused. `auto` decides by the first of these that applies:

- a tree order on several ranks: `fused`;
- one rank, or on a GPU a dtype without kernels: `unfused`;
- ranks that cannot reach each other's memory: `unfused`, with one warning;
- a measurement of `fusedtp tune` on this machine: the fastest schedule at the nearest size, corrected to the op's size
  by the cost model;
- a GPU in the hardware table: the schedule that the cost model predicts to be the fastest, or `fused` if its time is
  within 10 % of that;
- another GPU: `fused`;
- a CPU: `decomposed`, because Triton's interpreter is not fast.

`auto` runs float8 fused only on a GPU with float8 units.

Ranks make the same choice because they use the same data. Rank 0 reads the file of measurements and sends it to its
peers, once per group, at the first op that shares memory. Choices are cached.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .. import lanes
from ..cost.hardware import Hardware, of_gpu
from ..float8 import FNUZ, target_of, widens_blocks, without_float8
from ..memory import Unreachable
from ..op import Task
from ..schedules import NAMES, SCHEDULES
from ..shards import size_class
from ..workspaces import generation
from ..workspaces.decisions import Decisions
from . import tuning
from .paths import Path
from .tuning import Tuned

if TYPE_CHECKING:
    from ..workspaces.workspace import Workspace


FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_warned: set[str] = set()


@dataclass(frozen=True)
class SharedConfig:
    """Data that the ranks of a group share for each workspace, so that they make the same choice.

    - `table`: the measurements of `fusedtp tune`, or None.
    - `gpu`: rank 0's GPU in the hardware table, or None.
    - `target`: rank 0's compile target (`target_of`), "" on a CPU.
    """

    table: tuning.Table | None
    gpu: Hardware | None
    target: str = ""


# Neither is emptied by `generation.changed`, which ranks call at different times: sharing is collective.
_shared: WeakKeyDictionary[Workspace, SharedConfig] = WeakKeyDictionary()
_paths: Decisions[Path] = Decisions()


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
        if group.size() == 1:
            return replace(asked_for, reason="asked for; one rank has nothing to send")
        if SCHEDULES[schedule].shares_memory and not _is_capturing(device):
            _shared_config(workspace_of(group, device, lane), group)
        return asked_for
    if group.size() == 1:
        return Path(op, "unfused", "one rank has nothing to send")
    on_gpu = device.type == "cuda"
    if on_gpu and dtype not in FUSED_DTYPES:
        return Path(op, "unfused", f"no fused kernel for {dtype}")
    try:
        ws = workspace_of(group, device, lane)
    except Unreachable as error:
        return _unreachable(op, str(error))
    capturing = _is_capturing(device)
    shared = _shared_config(ws, group)
    switch = task.any_order and ws.has_multicast
    key = (op, dtype, task.float8, task.in_blocks, rounded_shape(task), capturing, switch)
    return _paths.get(ws, key, lambda: _decide(task, group.size(), shared, on_gpu, capturing, switch, lane))


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


def path_in_capture(task: Task, ws: Workspace) -> Path:
    """Return the path that `auto` would choose for a task inside a graph capture on a GPU."""
    return _decide(task, ws.world_size, _shared[ws], True, True, task.any_order and ws.has_multicast)


def tuned_tile(task: Task, ws: Workspace | None) -> Tuned | None:
    """Return the measurement that gives `fused` another tile than the table's, None if there is none."""
    shared = None if ws is None else _shared.get(ws)
    if ws is None or shared is None or shared.table is None:
        return None
    return tuning.nearest_tile(shared.table.kernels, task, ws.world_size)


def _shared_config(ws: Workspace, group: ProcessGroup) -> SharedConfig:
    """Return the workspace's `SharedConfig`. The first call shares rank 0's, collectively."""
    shared = _shared.get(ws)
    if shared is not None:
        return shared
    on_gpu = ws.device.type == "cuda"
    shared, ignored, interruption = _share(ws, group, on_gpu)
    # Before anything is raised: this rank must not share it again, as its peers have it.
    _shared[ws] = shared
    if not on_gpu and shared.table is not None:
        ws.hardware = shared.table.hardware(group.size()) or ws.hardware
        # Drop decisions that used the former `hardware`. Every rank does so.
        generation.changed()
    if interruption is not None:
        raise interruption
    if ignored and ignored not in _warned:
        _warned.add(ignored)
        warnings.warn(f"fusedtp chooses schedules without measurements: {ignored}", stacklevel=3)
    return shared


def rounded_shape(task: Task) -> tuple[int, int] | None:
    """Return the shape that `auto` decides by, of the tensor that travels; None if the caller names an algorithm.

    `unfused` has no algorithm to compare with. Lengths are rounded up by less than an eighth, which no measurement and
    no model tells apart, so that few decisions serve all numbers of rows.
    """
    rows, cols = task.moved
    return (size_class(rows), size_class(cols)) if task.algorithm == "auto" else None


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


def check_interpreted(op: str, ws: Workspace | None) -> None:
    """Raise RuntimeError on every rank if a rank does not interpret kernels."""
    compiling = [0] * (not _is_interpreted()) if ws is None else ws.compiling_ranks()
    if compiling:
        raise RuntimeError(
            f"{op}: on a CPU schedule 'fused' needs Triton's interpreter, which is off on rank "
            f"{', '.join(map(str, compiling))}: on every rank set TRITON_INTERPRET to 1 before fusedtp or triton is "
            "imported (where there is a GPU, unset means off), use tensors on a GPU, or schedule 'decomposed' or "
            "'unfused'"
        )


def workspace_of(group: ProcessGroup, device: torch.device, lane: int = lanes.ORDINARY) -> Workspace:
    """Return the workspace of a group (`registry.get`). The first call makes it, collectively."""
    # A late import: schedules without shared memory must not load the modules that map it.
    from ..workspaces import registry

    return registry.get(group, device, lane)


def _unreachable(op: str, detail: str) -> Path:
    reason = f"the ranks cannot reach each other's memory ({detail})"
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"fusedtp runs {op} and what follows unfused: {reason}", stacklevel=3)
    return Path(op, "unfused", reason)


def _unmeasured(op: str, dtype: str) -> str:
    tune = f"`fusedtp tune --dtype {dtype}` makes one" if dtype in TUNED else "`fusedtp tune` makes none in this dtype"
    return f"there is no valid measurement of this machine for {op} in {dtype} ({tune})"


# The dtypes of the cases of `fusedtp tune`.
TUNED = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "mxfp8")


def _decide(
    task: Task, world_size: int, shared: SharedConfig, on_gpu: bool, capturing: bool, switch: bool = False,
    lane: int = lanes.ORDINARY,
) -> Path:  # fmt: skip
    op, name, shape = task.op.name, task.multiplied_in, rounded_shape(task)
    allowed = tuple(row.name for row in SCHEDULES.values() if row.is_for_auto(on_gpu, capturing, lane))
    lacks = ""
    if on_gpu and task.float8 is not None:
        lacks = without_float8(task.float8, shared.target, blocks=task.in_blocks)
        lacks = lacks or (widens_blocks(shared.target) if task.in_blocks else "")
    if lacks:
        allowed, lacks = tuple(each for each in allowed if not SCHEDULES[each].has_kernels), f"not fused: {lacks}"
    if shape is not None:
        made = tuning.decide(shared.table, shared.gpu, op, name, world_size, *shape, allowed, switch=switch)
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
        received = str(sent[0])
    else:
        # A late import, as in `workspace_of`. The store, not a collective of the backend: an interrupted rank might
        # never join a collective.
        from ..workspaces.rendezvous import StoreExchange

        received = StoreExchange(group, ws.lane).from_first(ws.making, message)
    shared = json.loads(received)
    table = tuning.parse(shared["table"]) if shared["table"] else None
    return SharedConfig(table, of_gpu(shared["gpu"]), shared["target"]), ignored, interruption
