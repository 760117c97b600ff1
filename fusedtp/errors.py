"""Exceptions that callers are meant to catch."""

from __future__ import annotations

from collections.abc import Sequence


def rank_in(members: Sequence[int], rank: int) -> str:
    """Return the name of a group's rank, with its global rank if `members`, all global ranks, number it otherwise."""
    return f"rank {rank}" + (f" (global rank {members[rank]})" if members and members[rank] != rank else "")


def ranks_in(members: Sequence[int]) -> str:
    """Return, for the end of a text, which global ranks the ranks of a group are; "" if they are numbered alike."""
    alike = [*members] == [*range(len(members))]
    return "" if alike else f"; ranks are numbered in the group of global ranks {[*members]}"


class PeerTimeout(RuntimeError):
    """A peer's signal did not arrive in time.

    Attributes:
        op: the operator's name.
        rank: the rank that waited, as the group numbers its ranks.
        peer: the rank that is missing, as the group numbers its ranks.
        members: the global ranks of the group's ranks.
        global_peer: the missing rank, as the job numbers its ranks.
        seconds: the budget spent.
        detail: what this rank knows of the wait, or "".
        came_late: `peer` is not missing, but gave up on `rank` before.
        explained: `detail` says what `peer` has done.

    After this error the group's workspace refuses use until `fusedtp.destroy(group)`.
    """

    def __init__(
        self, op: str, rank: int, peer: int, seconds: float, detail: str = "", came_late: bool = False,
        explained: bool = False, members: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.op, self.rank, self.peer, self.seconds, self.detail = op, rank, peer, seconds, detail
        self.came_late, self.explained, self.members = came_late, explained, members
        self.global_peer = members[peer] if members else peer
        mine, theirs = rank_in(members, rank), rank_in(members, peer)
        waited = f"waited {seconds:g} s for {theirs}"
        if came_late:
            text = f"{op}: {mine} came too late: {theirs} had given up on rank {rank} (rank {rank} {waited})"
        else:
            lost = (
                ", which did not answer: it is lost or late, has raised an error of its own, or made no such call, as "
                "with schedule 'unfused'. Call fusedtp.destroy for this group on every live rank; fusedtp.set_timeout "
                "gives a late rank more time"
            )
            text = f"{op}: {mine} {waited}{' in vain' if explained else lost}"
        super().__init__(f"{text} ({detail})" if detail else text)

    def __reduce__(self) -> tuple[type, tuple[str, int, int, float, str, bool, bool, tuple[int, ...]]]:
        return type(self), (
            self.op, self.rank, self.peer, self.seconds, self.detail, self.came_late, self.explained, self.members,
        )  # fmt: skip


class RanksDisagree(ValueError):
    """The ranks of a group made calls that do not match; every rank raises this error with the difference.

    Attributes: `op` (the operator's name), `rank` (the rank that raises), `meant` (each rank's names and values as
    text; None if the rank wrote none). The group's workspace then refuses use until `fusedtp.destroy(group)` on every
    rank, unless the difference was found before the op began, because ranks needed memory of different sizes.
    """

    def __init__(self, text: str, op: str, rank: int, meant: tuple[dict[str, str] | None, ...]) -> None:
        self.op, self.rank, self.meant = op, rank, meant
        super().__init__(text)

    def __reduce__(self) -> tuple[type, tuple[str, str, int, tuple[dict[str, str] | None, ...]]]:
        return type(self), (str(self), self.op, self.rank, self.meant)


class NotationError(ValueError):
    """A sharding notation string that cannot be parsed or has no valid plan; the message points at the character."""
