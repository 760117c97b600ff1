"""One op of a group at a time in a process, and one interpreted kernel.

Ranks must run a group's ops in the same order. Threads that run them at once would not: here one comes first, there the
other, and two ops that have nothing to do with each other would read each other's signals. Such a call is refused, not
queued: a queue would be in another order on every rank. Threads may use groups of their own at once, and one group in
turn, if the program orders them alike on all ranks.
"""

from __future__ import annotations

import threading

_REFUSALS = {
    "group": "on the same group, {name!r}: ranks would run the two in different orders. Use a group for each thread, "
    "torch.distributed.new_group(), or let one thread wait for the other on all ranks alike",
    "interpreter": "in Triton's interpreter, which runs one kernel at a time in a process: use schedule 'decomposed' "
    "or 'unfused' in several threads, or 'fused' in one",
}

# By what is taken, and its name: the op that has it, and its thread.
_taken: dict[tuple[str, str], tuple[str, threading.Thread]] = {}


class _Turn:
    # Not a generator: every op passes here.
    __slots__ = ("_key", "_op")

    def __init__(self, what: str, name: str, op: str) -> None:
        self._key, self._op = (what, name), op

    def __enter__(self) -> None:
        mine = (self._op, threading.current_thread())
        # One step of the dict's: whichever thread comes first finds its own.
        holder = _taken.setdefault(self._key, mine)
        if holder is not mine:
            (what, name), (op, thread) = self._key, holder
            refusal = _REFUSALS[what].format(name=name)
            raise RuntimeError(f"{self._op}: {op} is under way in thread {thread.name!r} {refusal}")

    def __exit__(self, *_: object) -> None:
        del _taken[self._key]


def of_group(name: str, op: str) -> _Turn:
    """A context: the only op of that group in this process. RuntimeError, before anything is sent, where it is not.

    The peers of a rank that is refused wait for it until their budget is spent.
    """
    return _Turn("group", name, op)


def of_interpreter(op: str) -> _Turn:
    """A context: the only interpreted op of this process, as Triton's interpreter has one state. Errors as above."""
    return _Turn("interpreter", "", op)
