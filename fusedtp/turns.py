"""One op of a group at a time in a process, and one interpreted kernel.

Ranks must run a group's ops in the same order. Threads that run them at once would not: here one comes first, there the
other, and two ops that have nothing to do with each other would read each other's signals. Such a call is refused, not
queued: a queue would be in another order on every rank. Threads may use groups of their own at once, and one group in
turn, if the program orders them alike on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

# By what is taken: the op that has it, and its thread.
_taken: dict[str, tuple[str, str]] = {}


@contextlib.contextmanager
def _turn(what: str, op: str, refusal: str) -> Iterator[None]:
    mine = (op, threading.current_thread().name)
    # One step of the dict's: whichever thread comes first finds its own.
    holder = _taken.setdefault(what, mine)
    if holder is not mine:
        raise RuntimeError(f"{op}: {holder[0]} is under way in thread {holder[1]!r} {refusal}")
    try:
        yield
    finally:
        del _taken[what]


def of_group(name: str, op: str) -> contextlib.AbstractContextManager[None]:
    """The only op of that group in this process while inside. RuntimeError, before anything is sent, where it is not.

    The peers of a rank that is refused wait for it until their budget is spent.
    """
    return _turn(
        f"group {name}",
        op,
        f"on the same group, {name!r}: ranks would run the two in different orders. Use a group for each thread, "
        "torch.distributed.new_group(), or let one thread wait for the other on all ranks alike",
    )


def of_interpreter(op: str) -> contextlib.AbstractContextManager[None]:
    """The only interpreted op of this process while inside: Triton's interpreter has one state. Errors as above."""
    return _turn(
        "interpreter",
        op,
        "in Triton's interpreter, which runs one kernel at a time in a process: use schedule 'decomposed' or "
        "'unfused' in several threads, or 'fused' in one",
    )
