"""Locks: one running op per group and process, one interpreted kernel per process, and calls that have not returned.

Ranks must run a group's ops in the same order. Threads that run ops at once would not: on one rank one op comes first,
on another rank the other, and two unrelated ops would read each other's signals. Such a call is refused, not queued: a
queue would be in another order on every rank. Threads may use groups of their own at once, and one group in turn, if
the program orders them alike on all ranks.

A caller that is interrupted after an op has ended, but before it has the result, makes the call again, and this would
meet the peers' next op. So a workspace remembers which call made its last op, and refuses an op of another call unless
that one has returned.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
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

# What can be taken, and its name.
_Key: TypeAlias = tuple[str, str]
# Triton's interpreter has one state a process.
INTERPRETER: _Key = ("interpreter", "")
# By what is taken: the thread that has it, and for which op.
_taken: dict[_Key, tuple[int, str]] = {}
# A child has none of its parent's other threads.
os.register_at_fork(after_in_child=_taken.clear)


def alone(key: _Key, op: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the function while no other op in the process has `key`, ("group", its name) or INTERPRETER.

    RuntimeError if another op has it. Nothing has been sent then; the peers of such a rank wait for it until their
    budget is spent.
    """
    mine = (threading.get_ident(), op)
    try:
        # `setdefault` is one step: the thread that comes first finds its own entry.
        if (holder := _taken.setdefault(key, mine)) is not mine:
            _refuse(key, holder, op)
        return function(*args, **kwargs)
    finally:
        # Nothing is called here: Python handles signals at calls, so no interruption comes in between.
        if key in _taken and _taken[key] is mine:
            del _taken[key]


def is_mine(key: _Key) -> bool:
    """Return whether this thread has it."""
    holder = _taken.get(key)
    return holder is not None and holder[0] == threading.get_ident()


def _refuse(key: _Key, holder: tuple[int, str], op: str) -> NoReturn:
    what, name = key
    number, other = holder
    thread = next((each.name for each in threading.enumerate() if each.ident == number), "one that has ended")
    raise RuntimeError(f"{op}: {other} is under way in thread {thread!r} {_REFUSALS[what].format(name=name)}")


class Open:
    """A call of one of our functions. `returned`: whether the caller has its result, or an error that leaves the ranks
    in step.
    """

    returned = False


class _Here(threading.local):
    call: Open | None = None


_here = _Here()


def current() -> Open | None:
    """The call that this thread is in."""
    return _here.call


def one(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: each call of the function is an `Open` one, unless it is part of another, or a compiler traces."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _here.call is not None or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        mine = Open()
        try:
            _here.call = mine
            result = function(*args, **kwargs)
        except Exception as error:
            # Our own refusals come on every rank alike. Hooks and modes of the program run behind an op that has ended:
            # torch stops a recomputation by an exception of a hook.
            refused = isinstance(error, NotImplementedError)
            mine.returned = refused or has_saved_tensors_hooks() or is_in_torch_dispatch_mode()
            raise
        finally:
            # From here to the caller nothing is called, see `alone`.
            _here.call = None
        mine.returned = True
        return result

    return call
