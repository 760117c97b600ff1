"""The clock that bounds waits counts the time in which this process runs, and ends with the last workspace."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusedtp.workspaces import clock
from fusedtp.workspaces.words import wrapping_difference


class _LockThen:
    """A lock that calls `then` as soon as it has been released for the first time."""

    def __init__(self, lock: Any, then: Callable[[], object]) -> None:
        self._lock, self._then, self.acquire = lock, [then], lock.acquire

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self._lock.release()
        if self._then and threading.current_thread() is threading.main_thread():
            self._then.pop()()


def test_clock_driven_while_the_last_word_is_released_goes_on() -> None:
    """Another thread may drive a block after the last block's release, before the clock's thread ends."""
    first, second = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    others = [block for _, block in clock._words.values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "_words", {})
        clock.drive(first)
        patch.setattr(clock, "_lock", _LockThen(clock._lock, lambda: clock.drive(second)))
        clock.release(first)
        second[0] = before = clock.now_ms() - 1_000_000
        deadline = time.monotonic() + 5
        while int(second) == before and time.monotonic() < deadline:
            os.sched_yield()
        goes_on = int(second) != before
        clock.release(second)
    for block in others:
        clock.drive(block)
    assert goes_on


class _Broken:
    looks = 0

    def look(self, ending: bool) -> None:
        # What takes memory may fail, and be right at the next look.
        self.looks += 1
        if self.looks < 3:
            raise MemoryError
        raise RuntimeError("device-side assert triggered")


def test_the_time_goes_on_beside_a_device_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: said.append(args.exc_value))
    block, broken = torch.zeros(1, dtype=torch.int32), _Broken()
    clock.drive(block, broken.look)
    try:
        for _ in range(4):
            block[0] = before = clock.now_ms() - 1_000_000
            deadline = time.monotonic() + 5
            while int(block) == before and time.monotonic() < deadline:
                time.sleep(0.001)
            assert int(block) != before
        assert [str(each) for each in said] == ["device-side assert triggered"]
    finally:
        clock.release(block)


def test_the_clock_is_left_at_the_end_of_every_wait() -> None:
    block = torch.zeros(1, dtype=torch.int32)
    clock.drive(block)
    try:
        clock.stop()
        assert wrapping_difference(int(block), clock.now_ms()) > 2_000_000_000
    finally:
        clock.release(block)


class Time:
    """A stand-in for `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_time_in_which_a_process_did_not_run_is_not_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Time()
    monkeypatch.setattr(clock, "time", now)
    ran = clock.Stopwatch()

    def run(seconds: float) -> None:
        for _ in range(round(seconds / 0.01)):
            now.now += 0.01
            ran.seconds()

    run(2)
    assert ran.seconds() == pytest.approx(2)
    # After a stop of a minute, peers that were stopped too have a second to resume before more time is counted.
    now.now += 60
    assert ran.seconds() == pytest.approx(2.1)
    run(0.9)
    assert ran.seconds() == pytest.approx(2.1)
    run(5)
    assert ran.seconds() == pytest.approx(7, abs=0.05)


def test_the_clock_of_kernels_stands_still_while_the_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    word, now = torch.zeros(1, dtype=torch.int32), Time()
    monkeypatch.setattr(clock, "time", now)
    clock.drive(word)
    try:
        first = int(word)
        now.now += 3600
        deadline = time.monotonic() + 20
        while int(word) == first and time.monotonic() < deadline:
            os.sched_yield()
        assert 0 < wrapping_difference(int(word), first) <= 2 * 100
    finally:
        clock.release(word)
