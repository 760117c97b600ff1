"""Which schedule runs an op, and why. The choice is the same on every rank and is never silent.

A name the caller gives wins, or is refused. `auto` takes what `fusedtp tune` measured to be the fastest at the nearest
size on this machine, corrected to the size at hand by the cost model. Without a measurement it takes on a GPU what the
cost model predicts, or the fused schedule where the hardware table does not have that GPU, and on a CPU the decomposed
schedule: Triton's interpreter checks kernels there, it does not speed them up. All but `unfused` need ranks that can
reach each other's memory; where they cannot, it runs and a warning says so once.

Ranks agree because they decide from the same: rank 0 reads the file of measurements and broadcasts it, once a group,
with the first `auto`. Each choice is then made once and looked up.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from . import schedules, tuning, turns
from .hardware import Hardware, of_gpu
from .meaning import Meaning
from .memory import Unreachable

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# An op that does more than one that is measured is decided as that one.
_MEASURED_AS = {"all_gather_two_matmuls": "all_gather_matmul", "matmul_scatter_and_gather": "matmul_reduce_scatter"}

# Those whose fused form has a producer.
_GATHERING = ("all_gather_matmul", "all_gather_two_matmuls", "matmul_scatter_and_gather", "all_gather")

# Shapes may never repeat. What is forgotten is decided anew, alike on all ranks, from what they know alike.
_MAX_CHOICES = 4096

_last: Path | None = None
_said: set[str] = set()


@dataclass(frozen=True)
class Path:
    """What ran: the op's name, the schedule's, and why that one. producer: how `fused` sent what it gathered."""

    op: str
    schedule: str
    reason: str
    producer: str = ""


@dataclass(frozen=True)
class Knowledge:
    """What the ranks of a group know alike: the table of measurements, and what rank 0's GPU is."""

    table: tuning.Table | None
    gpu: Hardware | None


def check_schedule(schedule: str) -> None:
    """ValueError unless `schedule` is one that `choose` knows."""
    if schedule != "auto" and schedule not in schedules.NAMES:
        raise ValueError(f"schedule must be one of {', '.join(('auto', *schedules.NAMES))}, got {schedule!r}")


def travels(
    op: str, x: Tensor, operands: Sequence[Tensor | None], options: Mapping[str, Any]
) -> tuple[int, int] | None:  # fmt: skip
    """The shape of what an op sends, whole: the gathered operand, or the sum. All ranks see the same.

    x: the op's first operand, operands: the others. None where the caller asks for an algorithm: `unfused` has none.
    """
    if options.get("algorithm", "auto") != "auto":
        return None
    rows, cols = x.shape
    if op.startswith("all_gather"):
        return sum(options["sizes"]), rows if options.get("gather_dim") else cols
    if op.startswith("matmul"):
        b = operands[0]
        assert b is not None
        return rows, b.shape[1]
    return rows, cols


def choose(
    op: str,
    schedule: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    group: ProcessGroup,
    shape: tuple[int, int] | None = None,
) -> Path:
    """The path for one call: collective over `group` on the first call with a schedule that needs shared memory.

    shape: what `travels`; without it `auto` does not look at sizes.
    """
    if schedule != "auto":
        return _asked_for(op, schedule, dtype)
    if shape is not None and group.size() == 1:
        return Path(op, "unfused", "one rank has nothing to send")
    on_gpu = device.type == "cuda"
    if on_gpu and dtype not in FUSED_DTYPES:
        return Path(op, "unfused", f"no fused kernel for {dtype}")
    try:
        ws = _workspaces().get(group, device)
        choices = ws.choices
    except Unreachable as error:
        return _unreachable(op, str(error))
    capturing = on_gpu and torch.cuda.is_current_stream_capturing()
    key = (op, dtype, shape, capturing)
    path: Path | None = choices.get(key)
    if path is None:
        knowledge = choices.get(Knowledge)
        if knowledge is None:
            shared, ignored, interruption = _share(group, on_gpu)
            knowledge = choices[Knowledge] = shared
            if not on_gpu and knowledge.table is not None:
                ws.hardware = knowledge.table.hardware(group.size()) or ws.hardware
            # Only now, when this rank too knows what its peers were told, and asks them no more.
            if interruption is not None:
                raise interruption
            if ignored and ignored not in _said:
                _said.add(ignored)
                warnings.warn(f"fusedtp chooses schedules without measurements: {ignored}", stacklevel=3)
        if len(choices) >= _MAX_CHOICES:
            choices.clear()
            choices[Knowledge] = knowledge
        path = choices[key] = _decide(op, dtype, group.size(), shape, knowledge, on_gpu, capturing)
    return path


def run(
    op: str,
    schedule: str,
    group: ProcessGroup,
    x: Tensor,
    *operands: Tensor | None,
    producer: str = "auto",
    meanings: dict[Any, Meaning] | None = None,
    **options: Any,
) -> Any:
    """The op on x and `operands` by the schedule that is chosen for it, which is recorded.

    producer: how `fused` sends what the op gathers, where it does. meanings: see `Meanings.take`.
    """
    shape = travels(op, x, operands, options) if schedule == "auto" else None
    path = choose(op, schedule, device=x.device, dtype=x.dtype, group=group, shape=shape)
    function = getattr(schedules.load(path.schedule), op)
    if path.schedule != "unfused" and group.size() > 1:
        _workspaces().get(group, x.device).meanings.take(op, path.schedule, x, operands, options, meanings)
    if path.schedule == "fused":
        if producer != "auto" and op in _GATHERING:
            options["producer"] = producer
    elif schedule == "auto" and group.size() > 1:
        _load_for_capture(op, group, x, operands, options, shape)
    if path.schedule == "fused" and x.device.type == "cpu":
        if not _is_interpreted():
            raise RuntimeError(
                f"{op}: schedule 'fused' runs on a CPU in Triton's interpreter alone, which TRITON_INTERPRET="
                f"{os.environ.get('TRITON_INTERPRET', '')} keeps out of this process: unset it before fusedtp or "
                "triton is imported, or use 'decomposed' or 'unfused'"
            )
        with turns.Turn("interpreter", "", op):
            out = function(x, *operands, group=group, **options)
    else:
        out = function(x, *operands, group=group, **options)
    record(path)
    return out


def _load_for_capture(
    op: str, group: ProcessGroup, x: Tensor, operands: Sequence[Tensor | None], options: Mapping[str, Any],
    shape: tuple[int, int] | None,
) -> None:  # fmt: skip
    """Before an op that runs here in a way that a capture would not take: load the kernels that one would, once."""
    workspaces = _workspaces()
    if x.dtype not in FUSED_DTYPES or not workspaces.reachable(group, x.device)[0]:
        return
    ws = workspaces.get(group, x.device)
    if not ws.loads_for_capture:
        return
    key = ("loaded", op, shape, *options.items(), *schedules.load("producer").alike(x, *operands))
    if key in ws.choices:
        return
    path = _decide(op, x.dtype, group.size(), shape, ws.choices[Knowledge], True, True)
    if path.schedule == "fused":
        schedules.load("fused").load(op, x, *operands, group=group, **options)
    ws.choices[key] = path


@cache
def _asked_for(op: str, schedule: str, dtype: torch.dtype) -> Path:
    check_schedule(schedule)
    if schedule == "fused" and dtype not in FUSED_DTYPES:
        names = ", ".join(str(each) for each in FUSED_DTYPES)
        raise ValueError(f"{op}: schedule 'fused' multiplies {names}, got {dtype}: use 'decomposed' or 'unfused'")
    return Path(op, schedule, "asked for")


@cache
def _is_interpreted() -> bool:
    # Late: it loads Triton.
    from .kernels import INTERPRETED

    return INTERPRETED


@cache
def _workspaces() -> ModuleType:
    # Late: schedules that need no shared memory must not load what maps it.
    from . import workspaces

    return workspaces


def _unreachable(op: str, detail: str) -> Path:
    reason = f"the ranks cannot reach each other's memory ({detail})"
    if reason not in _said:
        _said.add(reason)
        warnings.warn(f"fusedtp runs {op} and what follows unfused: {reason}", stacklevel=3)
    return Path(op, "unfused", reason)


def _decide(
    op: str, dtype: torch.dtype, world_size: int, shape: tuple[int, int] | None, knowledge: Knowledge, on_gpu: bool,
    capturing: bool,
) -> Path:  # fmt: skip
    # Copies to addresses chosen on the host cannot be captured; interpreted kernels are never fast.
    allowed = ("fused", "unfused") if capturing else ("fused", "decomposed", "unfused")
    allowed = allowed if on_gpu else ("decomposed", "unfused")
    name = str(dtype).removeprefix("torch.")
    if shape is not None:
        made = tuning.decide(
            knowledge.table, knowledge.gpu, _MEASURED_AS.get(op, op), name, world_size, *shape, allowed
        )  # fmt: skip
        if made is not None:
            return Path(op, *made)
    if on_gpu:
        return Path(op, "fused", "ranks reach each other's GPU memory; nothing was measured or is known of this GPU")
    return Path(op, "decomposed", f"ranks share memory; nothing was measured here for {op} in {name}")


def _share(group: ProcessGroup, on_gpu: bool) -> tuple[Knowledge, str, BaseException | None]:
    """Rank 0's table and the name of its GPU, on all ranks; why there is no table; what interrupted. Collective.

    Whatever goes wrong on rank 0, its peers wait for a message and get one.
    """
    message, ignored, interruption = [""], "", None
    if group.rank() == 0:
        text, gpu = "", ""
        try:
            gpu = torch.cuda.get_device_name() if on_gpu else ""
            _, text, ignored = tuning.load()
        except BaseException as error:
            ignored = f"{type(error).__name__}: {error}"
            interruption = None if isinstance(error, Exception) else error
        message = [json.dumps({"table": text, "gpu": gpu})]
    dist.broadcast_object_list(message, dist.get_global_rank(group, 0), group)
    shared = json.loads(message[0])
    table = tuning.parse(shared["table"]) if shared["table"] else None
    return Knowledge(table, of_gpu(shared["gpu"])), ignored, interruption


def record(path: Path) -> None:
    """Remember `path` as the last one taken."""
    global _last
    producer = schedules.load("producer").taken() if path.schedule == "fused" else ""
    _last = replace(path, producer=producer) if producer else path


def last_path() -> Path | None:
    """The path of this process's last op, or None before the first."""
    return _last
