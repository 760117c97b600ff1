"""Locks: one running op per lane of a group, one interpreted kernel per process, and calls that have not returned.

Ranks must run a group's ops in the same order. Concurrent threads would run ops in another order on every rank, and
unrelated ops would read each other's signals. So a call is refused while another op of its group runs. A queue would
not help, because its order would differ between ranks. Concurrent threads may use different groups, on GPUs if the
program orders the ops of all groups alike on all ranks. Threads may share a group in the same way.

A caller that is interrupted after an op, but before it has the result, makes the call again. The repeated op would meet
the peers' next op. So a workspace stores the call of its last op, and refuses an op of another call until the stored
call has returned.
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
    "group": "on the same group, {name!r}: ranks would run the two in different orders. Let one thread wait for the "
    "other on all ranks alike, or on a CPU use a group for each thread, torch.distributed.new_group()",
    "lane": "on the same group, {name}: ranks would run the two in different orders. Let one thread make all calls of "
    "a lane, or let one thread wait for the other on all ranks alike",
    "interpreter": "in Triton's interpreter, which runs one kernel at a time in a process: use schedule 'decomposed' "
    "or 'unfused' in several threads, or 'fused' in one",
}

# Kind and name of a lock.
_Key: TypeAlias = tuple[str, str]
# Triton's interpreter has one state per process.
INTERPRETER: _Key = ("interpreter", "")
# By lock: the thread that holds the lock, and the op.
taken: dict[_Key, tuple[int, str]] = {}
# A forked child does not have its parent's other threads.
os.register_at_fork(after_in_child=taken.clear)


def alone(key: _Key, op: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the function while holding the lock `key`, of `lanes.lock` or INTERPRETER.

    Raises RuntimeError if another op holds the lock. Then nothing has been sent, and peers that wait for this rank time
    out.
    """
    mine = (threading.get_ident(), op)
    try:
        # `setdefault` is atomic: only the first thread gets its own entry.
        if (holder := taken.setdefault(key, mine)) is not mine:
            refuse(key, holder, op)
        return function(*args, **kwargs)
    finally:
        # No calls here: Python handles signals at calls, so no interruption comes before the lock is released.
        if key in taken and taken[key] is mine:
            del taken[key]


def is_mine(key: _Key) -> bool:
    """Return whether this thread holds the lock."""
    holder = taken.get(key)
    return holder is not None and holder[0] == threading.get_ident()


def refuse(key: _Key, holder: tuple[int, str], op: str) -> NoReturn:
    """Raise RuntimeError: `holder`, a thread and its op, is in the way of `op`."""
    what, name = key
    number, other = holder
    thread = next((each.name for each in threading.enumerate() if each.ident == number), "one that has ended")
    raise RuntimeError(f"{op}: {other} is under way in thread {thread!r} {_REFUSALS[what].format(name=name)}")


class ActiveCall:
    """Call of a function of this package.

    `returned` is true if the caller has the result, or an error after which ranks are still in the same order of ops.
    """

    returned = False


class _Here(threading.local):
    call: ActiveCall | None = None


_here = _Here()


def current() -> ActiveCall | None:
    """Return the call that this thread is in, or None."""
    return _here.call


def within(call: ActiveCall | None, function: Callable[[], R]) -> R:
    """Call the function in this thread as a part of `call`, which was made in another."""
    try:
        _here.call = call
        return function()
    finally:
        _here.call = None


def one(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that each call is `ActiveCall`, except inside another call or under a compiler."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _here.call is not None or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        mine = ActiveCall()
        try:
            _here.call = mine
            result = function(*args, **kwargs)
        except Exception as error:
            # Every rank raises the same NotImplementedError. Hooks and modes of the user run after an op has ended, and
            # torch stops a recomputation by an exception in a hook.
            refused = isinstance(error, NotImplementedError)
            mine.returned = refused or has_saved_tensors_hooks() or is_in_torch_dispatch_mode()
            raise
        finally:
            # No calls from here to the caller, as in `alone`.
            _here.call = None
        mine.returned = True
        return result

    return call
