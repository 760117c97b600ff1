"""Which schedule runs an op, and why. The choice is the same on every rank and is never silent.

A name the caller gives wins, or is refused. `auto` takes, on a GPU, the fused kernel for the dtypes it multiplies, and
on a CPU the decomposed one: Triton's interpreter checks kernels there, it does not speed them up. Both need ranks that
can reach each other's memory; where they cannot, `unfused` runs and a warning says so once.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from . import schedules

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_last: Path | None = None
_said: set[str] = set()


@dataclass(frozen=True)
class Path:
    """What ran: the op's name, the schedule's, and why that one."""

    op: str
    schedule: str
    reason: str


def check_schedule(schedule: str) -> None:
    """ValueError unless `schedule` is one that `choose` knows."""
    if schedule != "auto" and schedule not in schedules.NAMES:
        raise ValueError(f"schedule must be one of {', '.join(('auto', *schedules.NAMES))}, got {schedule!r}")


def choose(op: str, schedule: str, *, device: torch.device, dtype: torch.dtype, group: ProcessGroup) -> Path:
    """The path for one call: collective over `group` on the first call with a schedule that needs shared memory."""
    check_schedule(schedule)
    if schedule == "fused" and dtype not in FUSED_DTYPES:
        names = ", ".join(str(each) for each in FUSED_DTYPES)
        raise ValueError(f"{op}: schedule 'fused' multiplies {names}, got {dtype}: use 'decomposed' or 'unfused'")
    if schedule != "auto":
        return Path(op, schedule, "asked for")
    if device.type == "cuda" and dtype not in FUSED_DTYPES:
        return Path(op, "unfused", f"no fused kernel for {dtype}")
    # Late: schedules that need no shared memory must not load what maps it.
    from . import workspace

    reachable, detail = workspace.reachable(group, device)
    if not reachable:
        reason = f"the ranks cannot reach each other's memory ({detail})"
        if reason not in _said:
            _said.add(reason)
            warnings.warn(f"fusedtp runs {op} and what follows unfused: {reason}", stacklevel=2)
        return Path(op, "unfused", reason)
    if device.type == "cuda":
        return Path(op, "fused", detail)
    return Path(op, "decomposed", f"{detail}; kernels would be interpreted on a CPU")


def record(path: Path) -> None:
    """Remember `path` as the last one taken."""
    global _last
    _last = path


def last_path() -> Path | None:
    """The path of this process's last op, or None before the first."""
    return _last
