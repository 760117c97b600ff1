"""Records that the ranks of a group leave each other in the group's store, to be compared before they go on.

Not a collective, which would hang if a rank makes another call or none, but waits that time out. A rank that gives up
says on whom, so that those which come later name the rank that is missing, and not the first one to give up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..errors import PeerTimeout
from .budgets import StoreSilent

_GAVE_UP = "gave up on rank"


@dataclass(frozen=True)
class Exchange:
    """One exchange of records: what for (`op`), by which rank, in which store, under which key for each rank.

    `seconds` are allowed, until `deadline`, a time of time.monotonic(). What an error says: `absent` of a rank that has
    left no record, `where` of the place at which another has given up.
    """

    op: str
    rank: int
    store: Any
    keys: Sequence[str]
    seconds: float
    deadline: float
    absent: str
    where: str

    def __call__(self, mine: Mapping[str, str]) -> list[dict[str, str]]:
        """What each rank has left; `mine` is left for them.

        PeerTimeout where one has left nothing by the deadline, naming it, or where all have come behind one that had
        given up, naming that one.
        """
        self.store.set(self.keys[self.rank], json.dumps(mine))
        everyone: list[dict[str, str]] = []
        try:
            for peer in range(len(self.keys)):
                everyone.append(self._read(peer, everyone))
        except BaseException as error:
            # Who comes later must not take this rank for one that goes on.
            lost = str(error.peer) if isinstance(error, PeerTimeout) else ""
            self.store.set(self.keys[self.rank], json.dumps({_GAVE_UP: lost}))
            raise
        for peer, found in enumerate(everyone):
            if _GAVE_UP in found:
                lost = found[_GAVE_UP]
                what = f"had given up on rank {lost}" if lost else "was interrupted"
                spent = round(time.monotonic() - self.deadline + self.seconds, 3)
                raise PeerTimeout(self.op, self.rank, peer, spent, f"it {what} {self.where}")
        return everyone

    def _read(self, peer: int, before: Sequence[dict[str, str]]) -> dict[str, str]:
        try:
            self.store.wait([self.keys[peer]], timedelta(seconds=max(0.001, self.deadline - time.monotonic())))
            found: dict[str, str] = json.loads(self.store.get(self.keys[peer]))
        except StoreSilent:
            raise
        except RuntimeError as error:
            givers = [giver for giver, each in enumerate(before) if each.get(_GAVE_UP) == str(peer)]
            detail = f"{self.absent}; rank {givers[0]} had given up on it" if givers else self.absent
            raise PeerTimeout(self.op, self.rank, peer, self.seconds, detail) from error
        return found
