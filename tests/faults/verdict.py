"""The expected outcome of an injection: right numbers, or the right exception that names the right rank, in time."""

from __future__ import annotations

import re

import fusedtp

from .cases import CASES
from .inject import CALLS, RAISING, Injection, Outcome
from .points import NOTHING_SENT

# Faults that no rank may notice.
HARMLESS = ("is late", "is stopped", "is stopped in a wait")
# Seconds beyond the timeouts, for the steps of an op and the polls between two looks at the clock on a busy machine.
SLACK = 5.0


def starved(injection: Injection, outcomes: list[Outcome]) -> bool:
    """Return whether a rank was kept from running so long that its peers rightly gave up on it.

    A guilty rank counts only where it does not wait on purpose: where it raises.
    """
    own = [each.own_seconds for each in outcomes if each.rank != injection.rank or injection.kind in RAISING]
    return max(own) > injection.seconds / 2


def wrong(injection: Injection, outcomes: list[Outcome]) -> str:
    """Return what is wrong, or "". `outcomes`: of all living ranks, the guilty rank included."""
    # A call that ended before its first signal was repeated.
    harmless = injection.kind in HARMLESS or (
        injection.kind in RAISING and any(each.step in NOTHING_SENT for each in outcomes if each.rank == injection.rank)
    )
    for each in outcomes:
        if harmless and not each.wrong and (each.error, each.right) != (None, CALLS):
            return f"{injection}: rank {each.rank} noticed what it should not: {each}"
        said = _wrong_number(injection, each) or (
            "" if harmless else _guilty(injection, each) if each.rank == injection.rank else _survivor(injection, each)
        )
        if said:
            return f"{injection}: rank {each.rank} {said}: {each}"
    return ""


def _wrong_number(injection: Injection, outcome: Outcome) -> str:
    if outcome.wrong:
        return "returned a wrong number"
    if outcome.left:
        return "has left memory"
    return "" if outcome.recovered else "was not right after destroy"


def _survivor(injection: Injection, outcome: Outcome) -> str:
    error = outcome.error
    if not isinstance(error, fusedtp.PeerTimeout):
        return "has another error"
    expected = (CASES[injection.case].op, outcome.rank, injection.rank)
    if (error.op, error.rank, error.peer) != expected:
        return f"does not say {expected}"
    # A survivor waits once for the guilty rank, and at the end of the op once for a peer that gave up earlier.
    if not outcome.seconds < 2 * injection.seconds + SLACK:
        return "was not in time"
    return "" if _same(outcome) else "was not refused with the same words"


def _guilty(injection: Injection, outcome: Outcome) -> str:
    error, again = outcome.error, outcome.again
    if injection.kind in RAISING:
        planted = isinstance(error, KeyboardInterrupt) or "Planted" in repr(error)
        if not planted:
            return "has another error"
        said = type(again) is RuntimeError and CASES[injection.case].op in str(again) and "destroy" in str(again)
        return "" if said else "could call again"
    if not isinstance(error, fusedtp.PeerTimeout):
        return "has another error"
    if error.peer == injection.rank or (error.op, error.rank) != (CASES[injection.case].op, outcome.rank):
        return "names another"
    # In a ring the peer may have waited for this rank through another, which is then the one that it gave up on.
    given_up = re.search(r"had given up on rank (\d+)", str(error))
    others = {injection.rank, *range(injection.world_size if "ring" in injection.case else 0)} - {error.peer}
    if given_up is None or int(given_up[1]) not in others:
        return "is not told that it was given up"
    return "" if _same(outcome) else "was not refused with the same words"


def _same(outcome: Outcome) -> bool:
    return type(outcome.again) is type(outcome.error) and str(outcome.again) == str(outcome.error)
