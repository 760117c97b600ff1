"""Lanes: several ops of one group in flight at once.

A lane is a workspace of its own for a group and a device, with its own arenas, epochs, lock and failures. Inside a lane
ops run one after another, and nothing of the protocol changes. Ops of different lanes run beside each other. All ranks
number lanes alike, by what uses them.

Rule: an op in another lane than `ORDINARY` never waits inside a kernel of ours. It waits by stream operations and sends
by the copy engine; on a CPU it waits on a thread. With schedule "unfused" the process group moves the data, as without
this package. Otherwise a kernel of one lane could fill the multiprocessors of one rank,
and a kernel of another lane those of its peer. Each would wait forever for a kernel that cannot start.

`run` can leave an op in flight. On a CPU each lane has a thread, which runs its ops in the order of the calls. On a GPU
an op in flight is on its lane's stream, another op on the current stream.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from . import locks

# Ordinary calls; FSDP2's gathers; FSDP2's reduce-scatters.
ORDINARY, GATHERS, REDUCTIONS = 0, 1, 2
_USES = ("ordinary calls", "FSDP2's gathers", "FSDP2's reduce-scatters")

Lock: TypeAlias = tuple[str, str]

# A lane's thread ends after this time without an op.
_IDLE_SECONDS = 1.0
# At the end of the process, ops in flight have this time to end.
_GRACE_SECONDS = 1.0


def said(lane: int) -> str:
    """Return the end of a message about an op in `lane`, "" for an ordinary one."""
    return f" in lane {lane}, {_USES[lane]}" if lane else ""


def lock(group_name: str, lane: int) -> Lock:
    """Return the key of the lock (`locks.alone`) that an op of a group holds in `lane`."""
    return ("lane", f"{group_name!r}{said(lane)}") if lane else ("group", group_name)


def run(
    key: Lock, op: str, function: Callable[[], object], tensors: Sequence[Tensor], *, in_flight: bool
) -> dist.Work | None:
    """Run the op `function` in the lane with the lock `key`: now, or `in_flight` beside the caller's next work.

    - `tensors`: what the op reads and writes. All are on one device.

    Returns the op in flight, whose `wait` returns when the op has ended, or raises the op's error. On a GPU `wait`
    holds the current stream, not the host. Raises RuntimeError if another thread has an op in flight in this lane.
    """
    device = tensors[0].device
    if device.type == "cuda":
        if in_flight:
            return _OnStream(key, function, tensors)
    elif in_flight:
        return _Lane.of(key).add(op, function)
    else:
        wait_for_others(key, op)
    function()
    return None


def wait_for_others(key: Lock, op: str) -> None:
    """Wait until the ops in flight in a lane have ended. Their errors are left to their own `wait`."""
    if (lane := _lanes.get(key)) is not None:
        lane.wait(op)


def given_back(key: Lock) -> None:
    """Record that a lane's workspace is given back: errors of its ops need not be told any more."""
    for number, each in list(_untold.items()):
        if each.key == key:
            _untold.pop(number, None)


class _InFlight(dist.Work):
    """An op on a lane's thread."""

    def __init__(self, key: Lock, op: str, function: Callable[[], object]) -> None:
        super().__init__()
        self.key, self.op, self.thread = key, op, threading.get_ident()
        self._function: Callable[[], object] | None = function
        self._call, self._inference = locks.current(), torch.is_inference_mode_enabled()
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def perform(self) -> None:
        """Run the op, on the lane's thread."""
        assert self._function is not None
        error: BaseException | None = None
        try:
            with torch.inference_mode(self._inference), torch.no_grad():
                locks.within(self._call, self._function)
        except BaseException as raised:
            error = raised
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Record how the op has ended."""
        # The op's tensors are the caller's again.
        self._error, self._function = error, None
        if error is not None:
            _untold[id(self)] = self
        self._ended.set()

    def has_ended(self, seconds: float | None = None) -> bool:
        """Wait for the op, at most `seconds`, and return whether it has ended."""
        return self._ended.wait(seconds)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the op and raise its error, if any."""
        if not self.has_ended(timeout.total_seconds() or None):
            raise RuntimeError(f"{self.op}: the op has not ended within {timeout.total_seconds():g} s")
        _untold.pop(id(self), None)
        if self._error is not None:
            raise self._error
        return True

    def exception(self) -> BaseException | None:
        """Return the op's error, None if there is none."""
        return self._error

    def abandon(self) -> None:
        """End the op of a parent process, in a child that was forked."""
        # The parent's event may be locked.
        self._ended, self._function = threading.Event(), None
        self._error = RuntimeError(f"{self.op}: this process was forked while its parent had the op in flight")
        self._ended.set()

    def is_completed(self) -> bool:
        """Return whether the op has ended."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Return whether the op has ended without an error."""
        return self._ended.is_set() and self._error is None


class _Lane:
    """The ops in flight of one lane of a group on a CPU, and the thread that runs them."""

    def __init__(self, key: Lock) -> None:
        self._key = key
        # The running op is the first.
        self.ops: deque[_InFlight] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, key: Lock) -> _Lane:
        return _lanes.get(key) or _lanes.setdefault(key, cls(key))

    def add(self, op: str, function: Callable[[], object]) -> _InFlight:
        """Put an op at the end."""
        self._check_thread(op)
        work = _InFlight(self._key, op, function)
        with self._changed:
            # The thread first: an interruption here leaves no op behind that nobody runs.
            # A thread that could not be started is no thread.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name=f"fusedtp-lane {self._key[1]}", daemon=True)
                self._thread.start()
            self.ops.append(work)
            self._changed.notify()
        return work

    def wait(self, op: str) -> None:
        """Wait for the ops in flight."""
        self._check_thread(op)
        for each in list(self.ops):
            each.has_ended()

    def _check_thread(self, op: str) -> None:
        for other in list(self.ops):
            if other.thread != threading.get_ident() and not other.is_completed():
                locks.refuse(self._key, (other.thread, other.op), op)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self.ops:
                    if not self._changed.wait(_IDLE_SECONDS) and not self.ops:
                        self._thread = None
                        return
            self.ops[0].perform()
            self.ops.popleft()


# A lane stays here when its thread has ended.
_lanes: dict[Lock, _Lane] = {}
# Ops that have failed and that nobody has waited for since.
_untold: dict[int, _InFlight] = {}


class _OnStream(dist.Work):
    """An op on a lane's stream, after the work that was on the current stream."""

    def __init__(self, key: Lock, function: Callable[[], object], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._device = tensors[0].device
        side, main = _stream(key, self._device), torch.cuda.current_stream(self._device)
        side.wait_stream(main)
        for each in tensors:
            # The caller may free them before the stream has come this far, also if the op raises.
            each.record_stream(side)
        with torch.cuda.stream(side):
            function()
        self._ended = torch.cuda.Event()
        self._ended.record(side)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let the current stream wait for the op."""
        torch.cuda.current_stream(self._device).wait_event(self._ended)
        return True

    def is_completed(self) -> bool:
        """Return whether the op has ended."""
        return bool(self._ended.query())


@cache
def _stream(key: Lock, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@atexit.register
def _end() -> None:
    # The process ends: ops in flight get a moment. What is lost is told, and is an error of the process.
    until = time.monotonic() + _GRACE_SECONDS
    ops = [each for lane in list(_lanes.values()) for each in list(lane.ops)]
    told = [
        f"{each.op}: the process ends while the op is in flight: call wait() of what started it"
        for each in ops
        if not each.has_ended(max(0.0, until - time.monotonic()))
    ]
    told += [f"{each.exception()} (the op was in flight, and wait() was not called)" for each in _untold.values()]
    if told:
        print(*(f"fusedtp: {each}" for each in told), sep="\n", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _after_fork() -> None:
    # A child has no thread of its parent's.
    for lane in _lanes.values():
        for each in lane.ops:
            each.abandon()
    _lanes.clear()
    _untold.clear()


os.register_at_fork(after_in_child=_after_fork)
