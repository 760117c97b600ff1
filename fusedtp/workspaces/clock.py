"""Clock for timeouts: a thread writes the time, in milliseconds, to memory that kernels read.

A kernel on a GPU has no portable way to read the time, and an interpreted kernel has none. So the host writes the time
to a word of each workspace's host block (pinned memory with a GPU). One daemon thread serves the process. It runs while
there are workspaces.

Only time in which this process runs counts towards a timeout. After a pause, for example of the whole job, no time
counts for as long as the pause was, up to a second: peers may need it to run again.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from weakref import WeakMethod

from torch import Tensor

TICK_SECONDS = 0.01
# Larger than any timeout, which is at most 2,000,000 s. The difference of two times is an int32.
_BEYOND_ANY_BUDGET_MS = 2_050_000_000
# Largest time that counts between two reads of the clock. Waits and the thread read it every few milliseconds, so in
# the rest of a longer gap the process did not run. Then the largest time that does not count after a gap.
_GAP_SECONDS, _GRACE_SECONDS = 0.1, 1.0

# Reentrant: a workspace may end, and release its block, at any allocation.
_lock = threading.RLock()
# By address: the word, and the tensor that owns its memory.
_words: dict[int, tuple[ctypes.c_int32, Tensor]] = {}
# Methods that the thread calls at every tick, by the same address; with True for the last call.
_looks: dict[int, WeakMethod[Callable[[bool], None]]] = {}


class Stopwatch:
    """Stopwatch of the time in which this process runs, if `seconds` is called every few milliseconds."""

    __slots__ = ("_free_until", "_last", "_seconds")

    def __init__(self) -> None:
        self._last, self._free_until, self._seconds = time.monotonic(), 0.0, 0.0

    def seconds(self) -> float:
        now = time.monotonic()
        passed, self._last = now - self._last, now
        if passed > _GAP_SECONDS:
            self._free_until = now + min(passed, _GRACE_SECONDS)
            passed = _GAP_SECONDS
        elif now < self._free_until:
            passed = 0.0
        self._seconds += passed
        return self._seconds


class _Clock(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="fusedtp-clock", daemon=True)
        self.ended = threading.Event()
        self._begun_ms, self._ran = _now_ms, Stopwatch()

    def run(self) -> None:
        global _now_ms
        while not self.ended.wait(TICK_SECONDS):
            # The holder of the lock may be waiting for this thread to end.
            if not _lock.acquire(timeout=TICK_SECONDS):
                continue
            try:
                _now_ms = self._begun_ms + int(1000 * self._ran.seconds())
                for word, _ in list(_words.values()):
                    word.value = now_ms()
                _look(False)
            finally:
                _lock.release()


_clock: _Clock | None = None
_now_ms = time.monotonic_ns() // 1_000_000


def now_ms() -> int:
    """Return the clock's time in milliseconds from an arbitrary start, wrapped to int32."""
    return ctypes.c_int32(_now_ms).value


def _look(ending: bool) -> None:
    for address, each in list(_looks.items()):
        if (look := each()) is None:
            continue
        try:
            look(ending)
        except MemoryError:
            # It looks again at the next tick.
            continue
        except Exception:
            # As on a broken device. The time goes on for the other waits.
            _looks.pop(address, None)
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


def drive(block: Tensor, look: Callable[[bool], None] | None = None) -> None:
    """Start writing the time to the first element of `block` (int32, in host memory), and calling the method `look`."""
    global _clock
    word = ctypes.c_int32.from_address(block.data_ptr())
    word.value = now_ms()
    with _lock:
        _words[block.data_ptr()] = (word, block)
        if look is not None:
            _looks[block.data_ptr()] = WeakMethod(look)
        if _clock is None or not _clock.is_alive():
            _clock = _Clock()
            try:
                _clock.start()
            except RuntimeError as error:
                raise RuntimeError(
                    f"the thread that keeps the time of waits cannot be started ({error}): this process may have no "
                    "more threads or memory, see ulimit -u and -v. Then call fusedtp.destroy on every rank"
                ) from error


def release(block: Tensor) -> None:
    """Stop writing to `block`. The thread ends with the last block."""
    with _lock:
        _looks.pop(block.data_ptr(), None)
        _words.pop(block.data_ptr(), None)
        clock = None if _words else _detached()
    _end(clock)


def _after_fork() -> None:
    # A child has no clock thread, the words are its parent's, and its copy of the lock may be held.
    global _lock, _clock
    _lock, _clock = threading.RLock(), None
    _words.clear()
    _looks.clear()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def stop() -> None:
    """End the thread. It writes nothing after this returns, unless `drive` is called again.

    Kernels and streams that still wait on a device then give up: otherwise the process could not end.
    """
    with _lock:
        clock, left = _detached(), [word for word, _ in _words.values()]
    _end(clock)
    for word in left:
        word.value = ctypes.c_int32(now_ms() + _BEYOND_ANY_BUDGET_MS).value
    _look(True)


def is_here() -> bool:
    """Return whether the clock's thread calls this."""
    return isinstance(threading.current_thread(), _Clock)


def _detached() -> _Clock | None:
    # The caller holds the lock. A later `drive` starts a new thread, which the caller does not end.
    global _clock
    clock, _clock = _clock, None
    return clock


def _end(clock: _Clock | None) -> None:
    # The caller must not hold the lock, which the thread may be waiting for.
    if clock is not None:
        clock.ended.set()
        # The thread was never started if `drive` was interrupted.
        if clock.is_alive() and clock is not threading.current_thread():
            clock.join()
