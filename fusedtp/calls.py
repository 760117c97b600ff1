"""Calls that have not returned: who is interrupted when an op has ended, but before he has its result, makes the call
again, and would meet his peers' next op with it.

A `Call` is open while a function of ours runs that a caller gets a result from. A workspace remembers in which call its
last op was, and takes no further one from another call as long as that one has not returned.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Call:
    """A context, made by the function that enters it; within another one it is that one."""

    __slots__ = ("_frame", "returned")

    def __init__(self) -> None:
        self.returned = False
        self._frame: FrameType | None = sys._getframe(1)

    def __enter__(self) -> None:
        outer = _here.call
        if outer is None or not outer._runs():
            _here.call = self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if _here.call is self:
            _here.call = None
        self._frame = None
        # Last of all: no signal is looked at between here and the caller. A refusal of ours is one on every rank.
        self.returned = kind is None or issubclass(kind, NotImplementedError)

    def is_open(self) -> bool:
        """Whether this thread is in it."""
        return _here.call is self and self._runs()

    def _runs(self) -> bool:
        # An interruption may have kept it from being closed.
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


class _Here(threading.local):
    call: Call | None = None


_here = _Here()


def current() -> Call | None:
    """The call that this thread is in."""
    return _here.call


def one(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: each call is one, but where a compiler traces it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with Call():
            return function(*args, **kwargs)

    return call
