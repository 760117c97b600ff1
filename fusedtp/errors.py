"""Exceptions that callers are meant to catch."""

from __future__ import annotations


class PeerTimeout(RuntimeError):
    """A peer's signal did not arrive in time.

    Attributes:
        op: the operator's name.
        rank: the rank that waited.
        peer: the rank that is missing.
        seconds: the budget spent.
        detail: what this rank knows of the wait, or "".
        came_late: `peer` is not missing, but gave up on `rank` before.
        explained: `detail` says what `peer` has done.

    After this error the group's workspace refuses use until `fusedtp.destroy(group)`.
    """

    def __init__(
        self, op: str, rank: int, peer: int, seconds: float, detail: str = "", came_late: bool = False,
        explained: bool = False,
    ) -> None:  # fmt: skip
        self.op, self.rank, self.peer, self.seconds, self.detail = op, rank, peer, seconds, detail
        self.came_late, self.explained = came_late, explained
        waited = f"waited {seconds:g} s for rank {peer}"
        if came_late:
            text = f"{op}: rank {rank} came too late: rank {peer} had given up on rank {rank} (rank {rank} {waited})"
        else:
            lost = (
                ", which did not answer: it is lost or late, has raised an error of its own, or made no such call, as "
                "with schedule 'unfused'. Call fusedtp.destroy for this group on every live rank; fusedtp.set_timeout "
                "gives a late rank more time"
            )
            text = f"{op}: rank {rank} {waited}{' in vain' if explained else lost}"
        super().__init__(f"{text} ({detail})" if detail else text)

    def __reduce__(self) -> tuple[type, tuple[str, int, int, float, str, bool, bool]]:
        return type(self), (
            self.op, self.rank, self.peer, self.seconds, self.detail, self.came_late, self.explained,
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
