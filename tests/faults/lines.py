"""A KeyboardInterrupt before any line of ours that a rank runs in an op, in making a workspace and in growing one.

The interrupted rank has no result and repeats the call. Its peers know nothing of the interruption.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.distributed import ProcessGroup

import fusedtp

from ..soak import interruptions
from .cases import CASES
from .inject import Meeting

# State before the call: a workspace that fits, no workspace, or one that must grow for these rows.
MEETS = {"a workspace": 0, "no workspace": 0, "one too small": 4096}
SECONDS = 2.0
# This many lines after a call's last line, no more lines come from a longer wait.
BEYOND = 40


@dataclass(frozen=True)
class Lines:
    """Lines of `case` to interrupt: each `every`-th from `first` on, on rank `rank` of two, in functions `within`."""

    case: str
    meets: str
    rank: int
    first: int = 1
    every: int = 1
    within: str = ""


@dataclass
class Seen:
    """One rank's outcome of one interruption: its place, the wrong calls, and the error after it, if any."""

    place: str = ""
    again: str = ""
    wrong: list[int] = field(default_factory=list)
    error: str = ""
    recovered: bool = True


def _goes_on(case: Callable[[int], bool], seen: Seen, numbers: list[int]) -> None:
    for number in numbers:
        try:
            if not case(number):
                seen.wrong.append(number)
        except RuntimeError as error:
            seen.error = f"{type(error).__name__}: {error}"
            return


def at_line(group: ProcessGroup, lines: Lines, number: int, meeting: Meeting) -> Seen:
    """Interrupt the call once and return what this rank saw; every rank runs this, and recovers afterwards."""
    case, guilty, seen = CASES[lines.case], group.rank() == lines.rank, Seen()
    rows = MEETS[lines.meets]
    fresh = lines.meets != "a workspace" or number == lines.first
    if fresh:
        fusedtp.set_timeout(60.0)
        meeting.all("left")
        fusedtp.destroy(group)
        seen.recovered = case(group, 1)
    if lines.meets == "no workspace":
        meeting.all("used")
        fusedtp.destroy(group)
    fusedtp.set_timeout(SECONDS)
    meeting.all("ready")
    numbers = [2, 3]
    call = lambda n: case(group, n, more_rows=rows)  # noqa: E731
    if guilty:
        seen.place, raised = interruptions.before_line(number, lambda: call(2), lines.within)
        if not raised:
            numbers = [3]
        seen.again = "next" if numbers == [3] else "again"
    _goes_on(call, seen, numbers)
    meeting.tell("error", seen.error)
    if any(meeting.hear("error", [0, 1])):
        # Each rank learns of the other's error before any rank gives memory back.
        fusedtp.set_timeout(60.0)
        fusedtp.destroy(group)
        meeting.all("destroyed")
        seen.recovered = seen.recovered and case(group, 4)
    return seen


def every_line(group: ProcessGroup, each: Lines, name: str) -> list[Seen]:
    """Interrupt the call line by line until it has no more lines; a call that waits longer has more."""
    seen: list[Seen] = []
    number, missed = each.first, 0
    while missed < (1 if each.within else max(2, BEYOND // each.every)):
        meeting = Meeting(group, f"{name}/{number}")
        seen.append(at_line(group, each, number, meeting))
        meeting.tell("place", seen[-1].place)
        missed = 0 if meeting.hear("place", [each.rank])[0] else missed + 1
        number += each.every
    return seen


def wrong(each: Lines, both: tuple[Seen, Seen]) -> str:
    """Return what is wrong, or ""."""
    if any(seen.wrong for seen in both):
        said = "returned a wrong number"
    elif bool(both[0].error) != bool(both[1].error):
        said = "ended in an error on one rank alone"
    elif not all(seen.recovered for seen in both):
        said = "was not right after destroy"
    else:
        return ""
    return f"{each}: {said}: {both}"
