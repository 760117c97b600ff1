"""Spans of the host's side of an op in this process, kept only during `recording`.

Otherwise `span` costs a quarter of a microsecond. Times are of `time.perf_counter_ns`, on Linux the system's monotonic
clock, so the times of several processes of one machine can be compared. Spans do not show a GPU's work, which the host
only issues, unless the recording has a clock that marks the current stream.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# travel: a chunk is copied; multiply: a chunk is multiplied; wait: for a peer's signal; add: partial sums are added;
# collective: torch.distributed's, waits and copies in one.
KINDS = ("travel", "multiply", "wait", "add", "collective")


class Span(NamedTuple):
    """Span of one of KINDS; `peer` is the rank of the chunk or signal, -1 for no single rank."""

    kind: str
    peer: int
    begin_ns: int
    end_ns: int


# The clock of a recording: anything that it returns is kept as a span's begin and end.
_clock: Callable[[], Any] = time.perf_counter_ns
# Kept during a recording, else None.
spans: list[Span] | None = None
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class _Open:
    __slots__ = ("_begin_ns", "_kind", "_peer")

    def __init__(self, kind: str, peer: int) -> None:
        self._kind, self._peer = kind, peer

    def __enter__(self) -> None:
        self._begin_ns = _clock()

    def __exit__(self, *_: object) -> None:
        if spans is not None:
            spans.append(Span(self._kind, self._peer, self._begin_ns, _clock()))


def span(kind: str, peer: int = -1) -> AbstractContextManager[None]:
    """Return a context manager that records a piece of work during `recording`."""
    return _NOTHING if spans is None else _Open(kind, peer)


def timed(kind: str, peer: int, function: Callable[..., T], *args: Any) -> T:
    """Call `function(*args)` in a span, for functions that take hardly longer than entering a context manager."""
    if spans is None:
        return function(*args)
    with _Open(kind, peer):
        return function(*args)


@contextlib.contextmanager
def recording(clock: Callable[[], Any] = time.perf_counter_ns) -> Iterator[list[Span]]:
    """Record the spans that end inside, in the order of their ends; RuntimeError during another recording.

    clock: gives the begin and the end of a span, for example an event on the current stream.
    """
    global spans, _clock
    if spans is not None:
        raise RuntimeError("spans are being recorded already: one recording at a time")
    kept = spans = []
    _clock = clock
    try:
        yield kept
    finally:
        spans, _clock = None, time.perf_counter_ns
