"""A KeyboardInterrupt in a call: before one of our own lines, or by a real signal, wherever that finds it.

What a rank does next depends on what its peers have of the call, which `has_sent` looks up in their memory: the same
call again, or the one that comes after it.
"""

from __future__ import annotations

import signal as signal_of_posix
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from fusedtp.kernels import signal
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import workspaces

FOLDERS = tuple(f"{Path(module.__file__ or '').parent}/" for module in (fusedtp, sys.modules["fusedtp.kernels"]))
# Installed it lies in the first of them.
_BENCH = f"{Path(__file__).parent}/"
_CPU = torch.device("cpu")


def before_line(number: int, call: Callable[[], object]) -> tuple[str, bool]:
    """(before which line, whether `call` raised it): a KeyboardInterrupt before the `number`-th line of ours."""
    count, place = 0, ""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count, place
        file = frame.f_code.co_filename
        if not file.startswith(FOLDERS) or file.startswith(_BENCH) or place:
            return None
        count += event == "line"
        if count == number and event == "line":
            place = f"{Path(file).name}:{frame.f_lineno}"
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return place, True
    finally:
        sys.settrace(before)
    return place, False


def by_signal(seconds: float, call: Callable[[], object]) -> bool:
    """Whether `call` was interrupted: the kernel sends SIGALRM after `seconds`, which raises what Ctrl-C does."""
    before = signal_of_posix.signal(signal_of_posix.SIGALRM, signal_of_posix.default_int_handler)
    returned = False
    try:
        try:
            signal_of_posix.setitimer(signal_of_posix.ITIMER_REAL, seconds)
            call()
            returned = True
        finally:
            signal_of_posix.setitimer(signal_of_posix.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        # It may come when the call has returned.
        return not returned
    finally:
        signal_of_posix.signal(signal_of_posix.SIGALRM, before)
    return False


def epoch(group: ProcessGroup) -> int:
    """The last epoch that this rank has ended in `group`, 0 where it has no memory there."""
    ws = workspaces._workspaces.get((group.group_name, _CPU))
    return ws.epoch if ws is not None and ws.made else 0


def has_sent(group: ProcessGroup, before: int) -> bool:
    """Whether a peer has anything of the op behind epoch `before`."""
    ws = workspaces._workspaces.get((group.group_name, _CPU))
    if ws is None or not ws.made:
        return False
    entry = signal.SIGNALS.value + signal.ENTRY_SLOT.value * ws.world_size + ws.rank
    peers = [peer for peer in range(ws.world_size) if peer != ws.rank]
    return any(ws._header(peer)[entry] != before for peer in peers) or bool(ws._header(ws.rank)[signal.GROWING.value])
