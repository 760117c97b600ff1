"""A KeyboardInterrupt in a call: before one of our own lines, or by a real signal at any time."""

from __future__ import annotations

import linecache
import signal as signal_of_posix
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import fusedtp
import fusedtp.bench
import fusedtp.kernels

FOLDERS = tuple(f"{Path(module.__file__ or '').parent}/" for module in (fusedtp, fusedtp.kernels))
# In an installed package `bench` lies in the first folder.
_BENCH = f"{Path(fusedtp.bench.__file__).parent}/"
# A tracer can strike before these lines, but no signal can: the exit of a lock; a `try:` (its instruction does nothing,
# and Python 3.11 leaves it out of the surrounding block); lines of `locks` that call nothing.
_NO_SIGNAL = (
    "with _lock:", "try:", "if key in taken and taken[key] is mine:", "del taken[key]", "_here.call = None",
    "return result",
)  # fmt: skip


def before_line(number: int, call: Callable[[], object], within: str = "") -> tuple[str, bool]:
    """Raise a KeyboardInterrupt before the `number`-th line of ours; return the line, and whether `call` raised it.

    within: count only lines of functions of that name.
    """

    def counts(frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        if not file.startswith(FOLDERS) or file.startswith(_BENCH) or (within and frame.f_code.co_name != within):
            return False
        return linecache.getline(file, frame.f_lineno).strip() not in _NO_SIGNAL

    place, error = struck(number, call, counts)
    return place, error is not None


def struck(
    number: int, call: Callable[[], object], counts: Callable[[FrameType], bool]
) -> tuple[str, KeyboardInterrupt | None]:
    """Raise a KeyboardInterrupt before the `number`-th counted line; return the line ("" if none) and the error of
    `call`.

    counts: called at each frame's start and lines. A frame whose first answer is False is left out.
    """
    count, place = 0, ""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count, place
        counted = not place and counts(frame)
        if event == "line" and counted:
            count += 1
            if count == number:
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return trace if counted or event != "call" else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt as error:
        return place, error
    finally:
        sys.settrace(before)
    return place, None


def by_signal(seconds: float, call: Callable[[], object]) -> bool:
    """Return whether `call` was interrupted: SIGALRM after `seconds` raises what Ctrl-C raises."""
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
        # The signal may arrive after the call has returned.
        return not returned
    finally:
        signal_of_posix.signal(signal_of_posix.SIGALRM, before)
    return False
