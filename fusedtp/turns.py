"""One op of a group at a time in a process, and one interpreted kernel; and calls that have not returned.

Ranks must run a group's ops in the same order. Threads that run them at once would not: here one comes first, there the
other, and two ops that have nothing to do with each other would read each other's signals. Such a call is refused, not
queued: a queue would be in another order on every rank. Threads may use groups of their own at once, and one group in
turn, if the program orders them alike on all ranks.

A caller that is interrupted after an op has ended, but before it has the result, makes the call again, and this would
meet the peers' next op. So a call is `Open` while one of our functions runs for a caller. A workspace remembers which
call made its last op, and takes no op from another call until that one has returned. An exception that the program's
own hooks raise once the op has ended, as torch's early stop of a recomputation does, is no interruption.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, ParamSpec, TypeAlias, TypeVar

import torch

from .torch_private import has_saved_tensors_hooks, is_in_torch_dispatch_mode

P = ParamSpec("P")
R = TypeVar("R")

_REFUSALS = {
    "group": "on the same group, {name!r}: ranks would run the two in different orders. Use a group for each thread, "
    "torch.distributed.new_group(), or let one thread wait for the other on all ranks alike",
    "interpreter": "in Triton's interpreter, which runs one kernel at a time in a process: use schedule 'decomposed' "
    "or 'unfused' in several threads, or 'fused' in one",
}

# By what is taken, and its name: who has it, as the function that took it, its thread, and the op.
_Holder: TypeAlias = "tuple[FrameType, int, str]"
_taken: dict[tuple[str, str], _Holder] = {}
_finding = threading.Lock()


class Turn:
    """A context manager: inside it, this is the only op in the process that has `what` of that name. RuntimeError if
    another op has it.

    what: "group", or "interpreter" under any name, as Triton's interpreter has one state. Nothing has been sent when it
    is refused; the peers of such a rank wait for it until their budget is spent.

    An interruption may strike between any two steps, also just before the turn is given back. So a turn is held only
    while the function that entered it runs, which the next one that wants it checks.
    """

    # Not a generator: every op passes here.
    __slots__ = ("_key", "_op")

    def __init__(self, what: str, name: str, op: str) -> None:
        self._key, self._op = (what, name), op

    def __enter__(self) -> None:
        mine = sys._getframe(1), threading.get_ident(), self._op
        # `setdefault` is one step: the thread that comes first finds its own entry.
        while (holder := _taken.setdefault(self._key, mine)) is not mine:
            if _is_held(holder):
                self._refuse(holder)
            with _finding:
                if _taken.get(self._key) is holder:
                    del _taken[self._key]

    def __exit__(self, *_: object) -> None:
        del _taken[self._key]

    def is_mine(self) -> bool:
        """Whether this thread has it."""
        holder = _taken.get(self._key)
        return holder is not None and holder[1] == threading.get_ident() and _is_held(holder)

    def _refuse(self, holder: _Holder) -> NoReturn:
        (what, name), number = self._key, holder[1]
        thread = next((each.name for each in threading.enumerate() if each.ident == number), "one that has ended")
        refusal = _REFUSALS[what].format(name=name)
        raise RuntimeError(f"{self._op}: {holder[2]} is under way in thread {thread!r} {refusal}")


def _is_held(holder: _Holder) -> bool:
    # Whether the function that took it still runs: a traceback may keep the frame of one that does not.
    taken_by, thread, _ = holder
    frame = sys._current_frames().get(thread)
    while frame is not None and frame is not taken_by:
        frame = frame.f_back
    return frame is not None


class Open:
    """A context manager: a call. Inside another one, the outer one counts.

    handed_over: whether the op, with its result, is with torch, which calls hooks for saved tensors and dispatch modes.
    """

    returned: bool = False
    handed_over: bool = False
    _frame: FrameType | None = None

    def __enter__(self) -> Open:
        self._frame = sys._getframe(1)
        outer = _here.call
        if outer is None or not outer._runs():
            _here.call = self
        else:
            outer.handed_over = False
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if _here.call is self:
            _here.call = None
        elif _here.call is not None:
            _here.call.handed_over = kind is None
        self._frame = None
        # Last of all: Python handles no signal between here and the caller. Our own refusals come on every rank
        # alike.
        self.returned = (
            kind is None or issubclass(kind, NotImplementedError) or (self.handed_over and _is_a_hooks(kind))
        )

    def is_open(self) -> bool:
        """Whether this thread is in it."""
        return _here.call is self and self._runs()

    def _runs(self) -> bool:
        # An interruption may have kept it from being closed.
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


def _is_a_hooks(kind: type[BaseException]) -> bool:
    # Whether there are hooks that may have raised it.
    return issubclass(kind, Exception) and (has_saved_tensors_hooks() or is_in_torch_dispatch_mode())


class _Here(threading.local):
    call: Open | None = None


_here = _Here()


def current() -> Open | None:
    """The call that this thread is in."""
    return _here.call


def one(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: each call of the function is an `Open` one, except where a compiler traces it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with Open():
            return function(*args, **kwargs)

    return call
