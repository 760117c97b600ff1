"""Timeouts of waits: one per group, from `set_timeout`, for peers and for torch.distributed's store."""

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

_DEFAULT_SECONDS = 30.0
# What a store that answers takes to answer, at most.
_ANSWER_SECONDS = 1.0
# For groups without a budget of their own, if one was given; and of those that were given one.
_seconds: float | None = None
_seconds_of: WeakKeyDictionary[ProcessGroup, float] = WeakKeyDictionary()


def of(group: ProcessGroup | None) -> float:
    """The budget of `group`, in seconds; None: of every group that has none of its own."""
    given = _given(group)
    return _DEFAULT_SECONDS if given is None else given


def of_first(group: ProcessGroup) -> float:
    """The budget of a wait for peers that may still be loading: the group's timeout, or what `set_timeout` gave."""
    given = _given(group)
    return timeout_seconds(group) if given is None else given


def _given(group: ProcessGroup | None) -> float | None:
    return _seconds if group is None else _seconds_of.get(group, _seconds)


def set_for(group: ProcessGroup | None, seconds: float) -> None:
    """Set the budget of `group`, or (None) of every group: see `registry.set_timeout` for the errors."""
    global _seconds
    check_number("seconds", seconds)
    if not 0 < seconds <= 2_000_000:
        raise ValueError(f"seconds must be above 0 and at most 2,000,000, got {seconds!r}")
    if group is not None:
        _seconds_of[group] = float(seconds)
        return
    _seconds = float(seconds)
    _seconds_of.clear()


class StoreSilent(RuntimeError):
    """A group's store does not answer."""


class GroupStore:
    """The store of a group, with each request bounded: torch's own client waits for an answer without end.

    Raises StoreSilent where an answer takes longer than the group's budget, or than its timeout if that is shorter.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._store = store_of(group)
        # Weak, as this may be kept for as long as the group lives.
        self._group = ref(group)

    def __getattr__(self, name: str) -> Any:
        return partial(self._answer, None, getattr(self._store, name))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """As the store's."""
        self._answer(timeout.total_seconds() + _ANSWER_SECONDS, self._store.wait, keys, timeout)

    def _answer(self, seconds: float | None, request: Callable[..., Any], *args: Any) -> Any:
        if seconds is None:
            group = self._group()
            seconds = of(group) if group is None else min(of(group), of_first(group))
        answers: list[tuple[Any, BaseException | None]] = []

        def ask() -> None:
            try:
                answers.append((request(*args), None))
            except BaseException as error:
                answers.append((None, error))

        # Its process may be stopped: then the request stays where it is, in torch.
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
        found, error = answers[0]
        if error is not None:
            raise error
        return found
