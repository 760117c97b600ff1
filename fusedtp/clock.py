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

_lock = threading.Lock()
# By address: the word, and the tensor that keeps it alive while it is written.
_words: dict[int, tuple[ctypes.c_int32, Tensor]] = {}
_thread: threading.Thread | None = None
_stop = threading.Event()


def now_ms() -> int:
    """Milliseconds on the monotonic clock, wrapped to int32."""
    return ctypes.c_int32(time.monotonic_ns() // 1_000_000).value


def _run() -> None:
    while not _stop.wait(TICK_SECONDS):
        with _lock:
            for word, _ in _words.values():
                word.value = now_ms()


def drive(block: Tensor) -> None:
    """Write the time to the first element of `block` (int32, in host memory) from now on."""
    global _thread
    word = ctypes.c_int32.from_address(block.data_ptr())
    word.value = now_ms()
    with _lock:
        _words[block.data_ptr()] = (word, block)
        if _thread is None or not _thread.is_alive():
            _stop.clear()
            _thread = threading.Thread(target=_run, name="fusedtp-clock", daemon=True)
            _thread.start()


def release(block: Tensor) -> None:
    """Stop writing to `block`; with the last one the thread ends."""
    with _lock:
        _words.pop(block.data_ptr(), None)
        last = not _words
    if last:
        stop()


def _after_fork() -> None:
    # A child has no such thread, the words are its parent's, and the lock may have been held when it was made.
    global _lock, _stop, _thread
    _lock, _stop, _thread = threading.Lock(), threading.Event(), None
    _words.clear()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def stop() -> None:
    """End the thread; nothing is written after this returns."""
    _stop.set()
    if _thread is not None and _thread is not threading.current_thread():
        _thread.join()
