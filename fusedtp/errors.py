"""Exceptions that callers are meant to catch."""

from __future__ import annotations


class PeerTimeout(RuntimeError):
    """A peer's signal did not arrive in time.

    Attributes: `op` (the operator's name), `rank` (who waited), `peer` (who is missing), `seconds` (the budget spent).
    After it the group's workspace refuses use until `fusedtp.destroy(group)`.
    """

    def __init__(self, op: str, rank: int, peer: int, seconds: float, detail: str = "") -> None:
        self.op, self.rank, self.peer, self.seconds, self.detail = op, rank, peer, seconds, detail
        text = f"{op}: rank {rank} waited {seconds:g} s for rank {peer}, which did not answer"
        super().__init__(f"{text} ({detail})" if detail else text)

    def __reduce__(self) -> tuple[type, tuple[str, int, int, float, str]]:
        return type(self), (self.op, self.rank, self.peer, self.seconds, self.detail)


class NotationError(ValueError):
    """A sharding notation string that cannot be parsed or has no valid plan; the message points at the character."""
