"""The clock that bounds waits: a thread writes the time, in milliseconds, where programs can read it.

A program on a GPU has no portable way to read the time, and one in the interpreter none at all, so the host writes it
into a word of each workspace's host block (pinned memory with a GPU). One daemon thread serves the process; it runs
while there are workspaces.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time

from torch import Tensor

TICK_SECONDS = 0.01
# `budgets` has none over 2,000,000 s; the difference of two times is an int32.
_BEYOND_ANY_BUDGET_MS = 2_050_000_000

_lock = threading.Lock()
# By address: the word, and the tensor that keeps it alive while it is written.
_words: dict[int, tuple[ctypes.c_int32, Tensor]] = {}


class _Clock(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="fusedtp-clock", daemon=True)
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(TICK_SECONDS):
            with _lock:
                for word, _ in _words.values():
                    word.value = now_ms()


_clock: _Clock | None = None


def now_ms() -> int:
    """Milliseconds on the monotonic clock, wrapped to int32."""
    return ctypes.c_int32(time.monotonic_ns() // 1_000_000).value


def drive(block: Tensor) -> None:
    """Write the time to the first element of `block` (int32, in host memory) from now on."""
    global _clock
    word = ctypes.c_int32.from_address(block.data_ptr())
    word.value = now_ms()
    with _lock:
        _words[block.data_ptr()] = (word, block)
        if _clock is None or not _clock.is_alive():
            _clock = _Clock()
            _clock.start()


def release(block: Tensor) -> None:
    """Stop writing to `block`; with the last one the thread ends."""
    with _lock:
        _words.pop(block.data_ptr(), None)
        clock = None if _words else _detached()
    _end(clock)


def _after_fork() -> None:
    # A child has no such thread, the words are its parent's, and the lock may have been held when it was made.
    global _lock, _clock
    _lock, _clock = threading.Lock(), None
    _words.clear()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def stop() -> None:
    """End the thread; nothing is written after this returns, unless another block is driven.

    What still waits on a device has spent its budget then, or the process could not end.
    """
    with _lock:
        clock, left = _detached(), [word for word, _ in _words.values()]
    _end(clock)
    for word in left:
        word.value = ctypes.c_int32(now_ms() + _BEYOND_ANY_BUDGET_MS).value


def _detached() -> _Clock | None:
    # With the lock held: whoever drives a block from here on starts a thread of its own, which this end does not touch.
    global _clock
    clock, _clock = _clock, None
    return clock


def _end(clock: _Clock | None) -> None:
    # Without the lock, which the thread may be waiting for.
    if clock is not None:
        clock.ended.set()
        clock.join()
