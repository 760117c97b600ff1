"""Ranks of which one makes another call than the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

import fusedtp

from .cases import CASES
from .inject import LONG, Meeting, recover

KINDS = ("another shape", "another dtype", "another op")


@dataclass(frozen=True)
class Disagreement:
    """Rank `rank` differs from the others in `kind` at the second call of a case."""

    kind: str
    case: str
    world_size: int
    rank: int

    @property
    def other(self) -> str:
        """The case that is called instead: of another op, and of the same schedule."""
        case = CASES[self.case]
        return f"{case.schedule}: {'all_reduce, one shot' if case.op != 'all_reduce' else 'all_gather'}"


@dataclass
class Said:
    """What one rank saw: its error, and whether it was right before, and again."""

    rank: int
    before: bool = False
    after: bool = False
    error: Exception | None = None


def disagree(group: ProcessGroup, what: Disagreement, name: str) -> Said:
    """Run it on this rank; all of them agree again after `destroy`."""
    guilty, said = group.rank() == what.rank, Said(group.rank())
    case = CASES[what.other if guilty and what.kind == "another op" else what.case]
    meeting = Meeting(group, name)
    fusedtp.set_timeout(LONG)
    said.before = CASES[what.case](group, 0)
    meeting.all("ready")
    try:
        case(
            group, 1, more_rows=int(guilty and what.kind == "another shape"),
            dtype=torch.float16 if guilty and what.kind == "another dtype" else torch.float32,
        )  # fmt: skip
    except Exception as error:
        said.error = error.with_traceback(None)
    # No rank's `destroy` is to overtake another's error.
    meeting.all("told")
    said.after = recover(group, what.case)
    return said


def in_turn(group: ProcessGroup, every: list[Disagreement], name: str) -> list[Said]:
    """One after another."""
    said = [disagree(group, what, f"{name}/{number}") for number, what in enumerate(every)]
    fusedtp.destroy(group)
    return said


def wrong(what: Disagreement, said: list[Said]) -> str:
    """What is not as it must be, or nothing."""
    for each in said:
        if not (each.before and each.after):
            return f"{what}: rank {each.rank} was not right before it or after it: {each}"
        odd = f"rank {what.rank} against {what.world_size - 1} that agree"
        # Behind the name of the op, which is each rank's own.
        text, first = (str(error).partition(": ")[2] for error in (each.error, said[0].error))
        if not isinstance(each.error, fusedtp.RanksDisagree) or text != first:
            return f"{what}: rank {each.rank} was told something else: {each}"
        if f" on rank {what.rank}" not in text or (what.world_size > 2 and odd not in text):
            return f"{what}: rank {each.rank} was not told who: {each}"
    return ""
