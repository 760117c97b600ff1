"""How the ranks of a group meet to make arenas: through the group's store at first, later through the arenas they have.

Neither is a collective of the backend, which would hang if a rank never comes, and would pair the wrong calls if a rank
is interrupted and comes again.

The store. A rank takes a number, higher than any it had before, and leaves its row under it. When it has used all
ranks' rows, it leaves their numbers and its outcome. All are done when all have used the same rows. A rank that is
interrupted and comes again has another number; the others, if they still wait, then use its new row.

The arenas. A rank writes its row into its half for the coming op, which does not use the half before all have read the
row, and then counts GROWING up. Then it does the same with its outcome, but in the header, as a peer may read that
later.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.distributed import ProcessGroup

from ..errors import PeerTimeout
from ..kernels import signal
from . import timeouts
from .clock import Stopwatch
from .steps import HostSteps, load_acquire, store_release
from .timeouts import GroupStore, StoreSilent

if TYPE_CHECKING:
    from .workspace import Workspace

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.5e-3, 20e-3
_MAKING = "making the workspace"

# Groups in which this rank has begun to make a workspace and not heard how that ended.
_unfinished: WeakSet[ProcessGroup] = WeakSet()
# Where rank 0 has left its text last.
_told: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()


def _waits() -> Iterator[float]:
    # How long it has been, in seconds, each time that it is asked; after the first time with a sleep before.
    ran, poll = Stopwatch(), _FIRST_POLL_SECONDS
    while True:
        yield ran.seconds()
        time.sleep(poll)
        poll = min(2 * poll, _LAST_POLL_SECONDS)


@contextlib.contextmanager
def _lost_store(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerTimeout | StoreSilent):
            raise
        raise RuntimeError(
            f"{_MAKING}: rank {rank} has lost torch.distributed's store, which is in the process of rank 0 unless "
            f"torchrun or the program has put it elsewhere: that process has ended, or cannot be reached ({error})"
        ) from error


class StoreExchange:
    """An `Exchange` through the store of `group`.

    Waits for rows take up to the group's timeout, as a rank's first op of a group may come at any time, unless
    `set_timeout` was called; waits for outcomes up to the budget. After that PeerTimeout names the missing rank.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._store = GroupStore(group)
        self._rank, self._world_size = group.rank(), group.size()
        self._group, self._number = group, 0
        # Whether this rank broke off last time.
        self._again = group in _unfinished
        self._numbers: list[int] = []

    def rows(self, mine: list[int]) -> list[list[int]]:
        """See `Exchange`."""
        with _lost_store(self._rank):
            seconds = self._patience()
            _unfinished.add(self._group)
            if not self._number:
                self._number = self._store.add(self._key("number", self._rank), 1)
                self._store.set(self._key("row", self._rank), json.dumps([self._number, *mine]))
            rows = [self._waited("row", peer, seconds) for peer in range(self._world_size)]
        self._numbers = [row[0] for row in rows]
        return [row[1:] for row in rows]

    def outcomes(self, mine: list[int]) -> list[list[int]] | None:
        """See `Exchange`."""
        with _lost_store(self._rank):
            self._store.set(self._key("outcome", self._rank, self._number), json.dumps([self._numbers, mine]))
            outcomes = []
            for peer in range(self._world_size):
                outcome = self._waited("outcome", peer, timeouts.of(self._group))
                if outcome is None:
                    return None
                outcomes.append(outcome[1])
            self._tidy_up()
        return outcomes

    @property
    def making(self) -> int:
        """The number of what was made, the same on all ranks."""
        return self._numbers[0]

    def from_first(self, making: int, text: str | None) -> str:
        """Rank 0's text, on every rank of the workspace with this number; the others have None.

        Raises PeerTimeout where it does not come within the budget.
        """
        with _lost_store(self._rank):
            key = self._key("told", making)
            if text is not None:
                self._store.set(key, text)
                # All ranks have made another workspace since: nobody reads the older one.
                if (older := _told.get(self._group, key)) != key:
                    self._store.delete_key(older)
                _told[self._group] = key
                return text
            waits = _waits()
            while not self._store.check([key]):
                if (waited := next(waits)) > timeouts.of(self._group):
                    raise PeerTimeout(_MAKING, self._rank, 0, round(waited, 3), "its measurements have not come")
            found: bytes = self._store.get(key)
            return found.decode()

    def ended(self) -> None:
        """To be called when this rank has its arenas, or knows, as all ranks then do, that it cannot."""
        _unfinished.discard(self._group)

    def _tidy_up(self) -> None:
        # A row means that a rank is still at it. The row is overwritten, not deleted, as a peer might be about to read
        # it. An outcome is deleted when all ranks have come to the next one.
        self._store.set(self._key("row", self._rank), "null")
        before = self._number - 1
        while before and self._store.delete_key(self._key("outcome", self._rank, before)):
            before -= 1

    def _patience(self) -> float:
        # If this rank broke off last time, or a peer has begun anew, some may have finished and wait elsewhere.
        return timeouts.of(self._group) if self._group in _unfinished else timeouts.of_first(self._group)

    def _key(self, *parts: str | int) -> str:
        return "/".join(map(str, ("fusedtp/arenas", *parts)))

    def _read(self, *parts: str | int) -> Any:
        key = self._key(*parts)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _waited(self, what: str, peer: int, seconds: float) -> Any:
        # The peer's row; or its outcome of the rows that this rank has used, None if one of these rows has been
        # replaced.
        waits = _waits()
        while True:
            found = self._read("row", peer) if what == "row" else self._outcome(peer)
            if found is not None:
                return found
            if what == "outcome" and self._is_outdated():
                # A rank that is done has left its outcome before its row went.
                return self._outcome(peer)
            if (waited := next(waits)) > seconds:
                come = "it has not come" if what == "row" else "it has not come to its end"
                if what == "row" and self._again:
                    come = (
                        f"it has not come again since rank {self._rank} broke off: call fusedtp.destroy for this group "
                        "on every rank, then the op again"
                    )
                raise PeerTimeout(_MAKING, self._rank, peer, round(waited, 3), come)

    def _outcome(self, peer: int) -> Any:
        outcome = self._read("outcome", peer, self._numbers[peer])
        return outcome if outcome is not None and outcome[0] == self._numbers else None

    def _is_outdated(self) -> bool:
        rows = [self._read("row", peer) for peer in range(self._world_size)]
        return any(row is None or row[0] != number for row, number in zip(rows, self._numbers, strict=True))


class ArenaExchange:
    """An `Exchange` through the arenas that the ranks of `ws` have, for larger ones. Waits have the budget of an op."""

    def __init__(self, ws: Workspace) -> None:
        self._ws, self._steps = ws, HostSteps.beside(ws, "workspace growth")

    def rows(self, mine: list[int]) -> list[list[int]]:
        """See `Exchange`."""
        ws = self._ws
        row = partial(ws.view, epoch=self._steps.epoch, offset=0, shape=(1, len(mine)), dtype=torch.int64)
        ws.tell_peers()
        row(ws.rank).copy_(torch.tensor(mine, dtype=torch.int64, device="cpu"))
        self._steps.meet()
        return [row(peer)[0].tolist() for peer in range(ws.world_size)]

    def outcomes(self, mine: list[int]) -> list[list[int]] | None:
        """See `Exchange`."""
        ws, first = self._ws, signal.OUTCOME.value
        words = [[address + 4 * (first + i) for i in range(len(mine))] for address in ws.addresses]
        for word, value in zip(words[ws.rank], mine, strict=True):
            store_release(word, value)
        self._steps.meet()
        return [list(map(load_acquire, each)) for each in words]
