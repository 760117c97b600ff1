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

# By what is taken, and its name: the op that has it, and its thread's number.
_taken: dict[tuple[str, str], tuple[str, int]] = {}


class Turn:
    """A context: the only op that has `what` of that name in this process. RuntimeError where there is another.

    what: "group", or "interpreter" under any name, as Triton's interpreter has one state. Nothing has been sent when it
    is refused; the peers of such a rank wait for it until their budget is spent.
    """

    # Not a generator: every op passes here.
    __slots__ = ("_key", "_op")

    def __init__(self, what: str, name: str, op: str) -> None:
        self._key, self._op = (what, name), op

    def __enter__(self) -> None:
        mine = (self._op, threading.get_ident())
        # One step of the dict's: whichever thread comes first finds its own.
        holder = _taken.setdefault(self._key, mine)
        if holder is not mine:
            (what, name), (op, number) = self._key, holder
            thread = next((each.name for each in threading.enumerate() if each.ident == number), "one that has ended")
            refusal = _REFUSALS[what].format(name=name)
            raise RuntimeError(f"{self._op}: {op} is under way in thread {thread!r} {refusal}")

    def __exit__(self, *_: object) -> None:
        del _taken[self._key]
