"""Ranks of which one makes another call than the others, or more calls, or fewer, all with `debug=True`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

import fusedtp

from .cases import CASES
from .inject import LONG, Meeting, recover

KINDS = ("another shape", "another dtype", "another op", "another order", "fewer calls", "more calls")


@dataclass(frozen=True)
class Disagreement:
    """Rank `rank` differs from the others in `kind` at the second call of a case."""

    kind: str
    case: str
    world_size: int
    rank: int
    seconds: float = 0.5

    @property
    def other(self) -> str:
        """The case that is called instead: of another op, and of the same schedule."""
        case = CASES[self.case]
        return f"{case.schedule}: {'all_reduce, one shot' if case.op != 'all_reduce' else 'all_gather'}"


@dataclass
class Said:
    """What one rank saw: its errors in the order of its calls, and whether it was right before, and again."""

    rank: int
    before: bool = False
    after: bool = False
    errors: list[Exception] = field(default_factory=list)


def disagree(group: ProcessGroup, what: Disagreement, name: str) -> Said:
    """Run it on this rank; all of them agree again afterwards."""
    case, other, guilty = CASES[what.case], CASES[what.other], group.rank() == what.rank
    meeting, said = Meeting(group, name), Said(group.rank())
    everyone = list(range(group.size()))
    fusedtp.set_timeout(LONG)
    said.before = case(group, 0, debug=True)
    meeting.all("ready")
    if what.kind in ("fewer calls", "more calls"):
        fusedtp.set_timeout(what.seconds)
        alone = [what.rank] if what.kind == "more calls" else [rank for rank in everyone if rank != what.rank]
        if group.rank() not in alone:
            meeting.hear("given up", alone)
        if what.kind == "more calls" or not guilty:
            with _kept(said):
                case(group, 1, debug=True)
        meeting.tell("given up")
        # Ranks that count differently are in step again once all have called `destroy`, which is not to overtake them.
        meeting.hear("given up", everyone)
        said.after = recover(group, what.case)
    else:
        calls = [case, other] if what.kind == "another order" else [case]
        if what.kind == "another op":
            calls = [other] if guilty else calls
        for number, call in enumerate(reversed(calls) if guilty else calls, 1):
            with _kept(said):
                call(
                    group, number, debug=True, more_rows=int(guilty and what.kind == "another shape"),
                    dtype=torch.float16 if guilty and what.kind == "another dtype" else torch.float32,
                )  # fmt: skip
        # Nothing was started: no `destroy` is needed.
        said.after = case(group, 3, debug=True) and case(group, 4, debug=True)
    return said


@contextlib.contextmanager
def _kept(said: Said) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        said.errors.append(error.with_traceback(None))


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
        fault = _of_counts(what, each) if what.kind in ("fewer calls", "more calls") else _of_calls(what, each, said[0])
        if fault:
            return f"{what}: rank {each.rank} {fault}: {each}"
    return ""


def _of_calls(what: Disagreement, said: Said, first: Said) -> str:
    if len(said.errors) != 1 + (what.kind == "another order"):
        return "was not told"
    for error, same in zip(said.errors, first.errors, strict=True):
        text = str(error)
        if not isinstance(error, fusedtp.RanksDisagree) or text != str(same):
            return "was told something else"
        odd = f"rank {what.rank} against {what.world_size - 1} that agree"
        if f" on rank {what.rank}" not in text or (what.world_size > 2 and odd not in text):
            return "was not told who"
    return ""


def _of_counts(what: Disagreement, said: Said) -> str:
    guilty = said.rank == what.rank
    if what.kind == "fewer calls" and guilty:
        return "was told" if said.errors else ""
    if len(said.errors) != 1 or not isinstance(error := said.errors[0], fusedtp.PeerTimeout):
        return "has another error"
    if (error.rank, error.peer == what.rank) != (said.rank, not guilty) or error.op != CASES[what.case].op:
        return "names another"
    given_up = what.kind == "more calls" and not guilty
    return (
        "" if ("it had given up on rank" if given_up else "has not made in debug mode") in str(error) else "is not told"
    )
