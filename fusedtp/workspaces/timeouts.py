"""Timeouts of waits for peers and for torch.distributed's store: one per group, from `set_timeout`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.distributed import ProcessGroup

from ..shards import check_number
from ..torch_private import store_of, timeout_seconds
from .clock import Stopwatch

# The timeout of ranks that are there: they have come to make their memory, or the store that they share answers.
_PRESENT_SECONDS = 30.0
_MOST_SECONDS = 2_000_000
# Largest time that a working store takes to answer.
_ANSWER_SECONDS = 1.0
# The timeout set for all groups, None if none was; then the timeouts set for single groups.
_seconds: float | None = None
_seconds_of: WeakKeyDictionary[ProcessGroup, float] = WeakKeyDictionary()


def of(group: ProcessGroup | None) -> float:
    """Return the timeout of waits for peers, which may be loading, saving or compiling, in seconds.

    It is that of `set_timeout`, or if that was not called, the group's in torch.distributed. None: of a group that is
    gone.
    """
    if group is None or _own_seconds(group) is not None:
        return of_present(group)
    return min(timeout_seconds(group), _MOST_SECONDS)


def of_present(group: ProcessGroup | None) -> float:
    """Return the timeout of waits for ranks that are there: that of `set_timeout`, or 30 s."""
    seconds = _own_seconds(group)
    return _PRESENT_SECONDS if seconds is None else seconds


def _own_seconds(group: ProcessGroup | None) -> float | None:
    return _seconds if group is None else _seconds_of.get(group, _seconds)


def set_for(group: ProcessGroup | None, seconds: float) -> None:
    """Set the timeout of `group`, or for None of every group. `registry.set_timeout` has the errors."""
    global _seconds
    check_number("seconds", seconds)
    if not 0 < seconds <= _MOST_SECONDS:
        raise ValueError(f"seconds must be above 0 and at most 2,000,000, got {seconds!r}")
    if group is not None:
        _seconds_of[group] = float(seconds)
        return
    _seconds = float(seconds)
    _seconds_of.clear()


class StoreSilent(RuntimeError):
    """A group's store does not answer."""


class GroupStore:
    """Store of a group with a timeout for each request. torch's own client waits without end.

    A request raises StoreSilent after the smaller of `of_present` and `of`. `wait` does so a second after its own
    timeout.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._store = store_of(group)
        # A weak reference, so that this object does not keep the group alive.
        self._group = ref(group)

    def __getattr__(self, name: str) -> Any:
        return partial(self._answer, None, getattr(self._store, name))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait for keys, like the store's method."""
        self._answer(timeout.total_seconds() + _ANSWER_SECONDS, self._store.wait, keys, timeout)

    def _answer(self, seconds: float | None, request: Callable[..., Any], *args: Any) -> Any:
        if seconds is None:
            group = self._group()
            seconds = min(of_present(group), of(group))
        answers: list[tuple[Any, BaseException | None]] = []

        def ask() -> None:
            try:
                answers.append((request(*args), None))
            except BaseException as error:
                answers.append((None, error))

        # A thread, because the store's process may be stopped. Then the request never returns from torch.
        asks, ran = threading.Thread(target=ask, name="fusedtp-store", daemon=True), Stopwatch()
        asks.start()
        while not answers:
            asks.join(0.02)
            if not answers and ran.seconds() > seconds:
                raise StoreSilent(
                    f"torch.distributed's store has not answered for {seconds:g} s: it is in the process of rank 0 "
                    "unless torchrun or the program has put it elsewhere, and that process is stopped, or cannot be "
                    "reached. Let it go on or start the ranks anew; fusedtp.set_timeout allows more"
                )
        answer, error = answers[0]
        if error is not None:
            raise error
        return answer
