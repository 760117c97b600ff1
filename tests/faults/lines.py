"""A KeyboardInterrupt before any line of ours that a rank runs in an op, in making a workspace and in its growth.

The rank makes the same call again where its peers have nothing of it, or else goes on with the next one, as after an op
that has ended: whichever would be right if the workspace took no notice. Its peers know nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from fusedtp.kernels import signal
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import workspaces

from .cases import CASES
from .inject import Meeting

FOLDERS = tuple(f"{Path(module.__file__ or '').parent}/" for module in (fusedtp, sys.modules["fusedtp.kernels"]))
CPU = torch.device("cpu")
# What the call meets: a workspace that fits, none, or one that must grow for these rows.
MEETS = {"a workspace": 0, "no workspace": 0, "one too small": 4096}
SECONDS = 4.0


@dataclass(frozen=True)
class Lines:
    """Every line of `case` from `first` on, `every` so many, on rank `rank` of two."""

    case: str
    meets: str
    rank: int
    first: int = 1
    every: int = 1


@dataclass
class Seen:
    """What a rank saw of one interruption: where it struck, which calls were wrong, and the error after it, if any."""

    place: str = ""
    again: str = ""
    wrong: list[int] = field(default_factory=list)
    error: str = ""
    recovered: bool = True


def interrupted(number: int, call: Callable[[], object]) -> tuple[str, bool]:
    """(before which line, whether `call` raised it): a KeyboardInterrupt before the `number`-th line of ours."""
    count, place = 0, ""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count, place
        if not frame.f_code.co_filename.startswith(FOLDERS) or place:
            return None
        count += event == "line"
        if count == number and event == "line":
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return place, True
    finally:
        sys.settrace(before)
    return place, False


def _epoch(group: ProcessGroup) -> int:
    ws = workspaces._workspaces.get((group.group_name, CPU))
    return ws.epoch if ws is not None and ws.made else 0


def _has_sent(group: ProcessGroup, before: int) -> bool:
    # Whether the peer has anything of the op behind epoch `before`.
    ws = workspaces._workspaces.get((group.group_name, CPU))
    if ws is None or not ws.made:
        return False
    entry = signal.SIGNALS.value + signal.ENTRY_SLOT.value * ws.world_size + ws.rank
    return ws._header(1 - ws.rank)[entry] != before or bool(ws._header(ws.rank)[signal.GROWING.value])


def _goes_on(case: Callable[[int], bool], seen: Seen, numbers: list[int]) -> None:
    for number in numbers:
        try:
            if not case(number):
                seen.wrong.append(number)
        except RuntimeError as error:
            seen.error = f"{type(error).__name__}: {error}"
            return


def at_line(group: ProcessGroup, lines: Lines, number: int, meeting: Meeting) -> Seen:
    """One interruption, on every rank; all have recovered from it afterwards."""
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
    before, numbers = _epoch(group), [2, 3]
    call = lambda n: case(group, n, more_rows=rows)  # noqa: E731
    if guilty:
        seen.place, raised = interrupted(number, lambda: call(2))
        if not raised or _has_sent(group, before):
            numbers = [3]
        seen.again = "next" if numbers == [3] else "again"
    _goes_on(call, seen, numbers)
    meeting.tell("error", seen.error)
    if any(meeting.hear("error", [0, 1])):
        # With memory that no rank has given up: each learns of the other's error first.
        fusedtp.set_timeout(60.0)
        fusedtp.destroy(group)
        meeting.all("destroyed")
        seen.recovered = seen.recovered and case(group, 4)
    return seen


def every_line(group: ProcessGroup, each: Lines, name: str) -> list[Seen]:
    """Line by line, until the call has no more."""
    seen: list[Seen] = []
    number = each.first
    while True:
        meeting = Meeting(group, f"{name}/{number}")
        seen.append(at_line(group, each, number, meeting))
        meeting.tell("place", seen[-1].place)
        if not meeting.hear("place", [each.rank])[0]:
            return seen[:-1]
        number += each.every


def wrong(each: Lines, both: tuple[Seen, Seen]) -> str:
    """What is not as it must be, or nothing."""
    if any(seen.wrong for seen in both):
        said = "returned a wrong number"
    elif bool(both[0].error) != bool(both[1].error):
        said = "ended in an error on one rank alone"
    elif not all(seen.recovered for seen in both):
        said = "was not right after destroy"
    else:
        return ""
    return f"{each}: {said}: {both}"
