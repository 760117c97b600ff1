"""Rendezvous: exchange arena handles between the ranks of a group.

The first exchange goes through the group's store. Later ones, for larger arenas, go through the present arenas.
Neither is a collective of the backend: a collective would hang if a rank never joins, and would pair the wrong calls if
an interrupted rank tries again.

Store. A rank takes a number, higher than its former ones, and writes its row with the number. When it has used all
ranks' rows, it writes their numbers and its outcome. The exchange is over when all ranks have used the same rows. An
interrupted rank that tries again has another number. Ranks that still wait then use its new row.

Arenas. A rank writes its row into its half for the next op, and increments GROWING. The next op does not use the half
before all ranks have read the row. Then the rank writes its outcome to the header, because a peer may read it later,
and increments GROWING again.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import lanes
from ..errors import PeerTimeout, rank_in
from ..kernels import signal
from . import timeouts
from .clock import Stopwatch
from .steps import HostEpochs, HostSteps
from .timeouts import GroupStore, StoreSilent
from .words import load_acquire, store_release

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.5e-3, 20e-3
_MAKING = "making the workspace"
# A rank that waits longer than this for another at its first op says so.
NOTICE_SECONDS = 10.0

# Lanes of each group whose workspace this rank has begun to make without knowing the outcome.
_unfinished: WeakKeyDictionary[ProcessGroup, set[int]] = WeakKeyDictionary()
# The store's key of rank 0's last text, by lane.
_text_keys: WeakKeyDictionary[ProcessGroup, dict[int, str]] = WeakKeyDictionary()


def _waits() -> Iterator[float]:
    # Yield the seconds waited so far, after a sleep from the second time on.
    ran, poll = Stopwatch(), _FIRST_POLL_SECONDS
    while True:
        yield ran.seconds()
        time.sleep(poll)
        poll = min(2 * poll, _LAST_POLL_SECONDS)


@contextlib.contextmanager
def _lost_store(rank: int, making: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerTimeout | StoreSilent):
            raise
        raise RuntimeError(
            f"{making}: rank {rank} has lost torch.distributed's store, which is in the process of rank 0 unless "
            f"torchrun or the program has put it elsewhere: that process has ended, or cannot be reached ({error})"
        ) from error


class StoreExchange:
    """Exchange through the store of `group`, for the workspace of a lane.

    Waits for rows have the timeout `timeouts.of`, because a rank's first op may come late. After an attempt that did
    not finish they have `timeouts.of_present`, as waits for outcomes always have. A PeerTimeout names the missing rank;
    a longer wait for a row names it on standard error before, once.
    """

    def __init__(self, group: ProcessGroup, lane: int = lanes.ORDINARY) -> None:
        self._store, self._lane = GroupStore(group), lane
        self._making = _MAKING + lanes.said(lane)
        self._rank, self._world_size = group.rank(), group.size()
        self._members = tuple(dist.get_process_group_ranks(group))
        self._group, self._number = group, 0
        # True if this rank broke off last time.
        self._again = self._is_unfinished()
        self._noticed = False
        self._numbers: list[int] = []

    def rows(self, mine: list[int]) -> list[list[int]]:
        """Return every rank's row, in rank order."""
        with _lost_store(self._rank, self._making):
            seconds = self._patience()
            _unfinished.setdefault(self._group, set()).add(self._lane)
            if not self._number:
                self._number = self._store.add(self._key("number", self._rank), 1)
                self._store.set(self._key("row", self._rank), json.dumps([self._number, *mine]))
            rows = [self._waited("row", peer, seconds) for peer in range(self._world_size)]
        self._numbers = [row[0] for row in rows]
        return [row[1:] for row in rows]

    def outcomes(self, mine: list[int]) -> list[list[int]] | None:
        """Return every rank's outcome with these rows; None if a rank has started over."""
        with _lost_store(self._rank, self._making):
            self._store.set(self._key("outcome", self._rank, self._number), json.dumps([self._numbers, mine]))
            outcomes = []
            for peer in range(self._world_size):
                outcome = self._waited("outcome", peer, timeouts.of_present(self._group))
                if outcome is None:
                    return None
                outcomes.append(outcome[1])
            self._tidy_up()
        return outcomes

    @property
    def making(self) -> int:
        """Return rank 0's number of the attempt that made the arenas, the same on all ranks."""
        return self._numbers[0]

    def from_first(self, making: int, text: str | None) -> str:
        """Send rank 0's `text` to every rank of the workspace with the number `making`, and return it.

        Other ranks pass None. Raises PeerTimeout if the text does not come in time.
        """
        with _lost_store(self._rank, self._making):
            key = self._key("told", making)
            if text is not None:
                self._store.set(key, text)
                # All ranks have made a newer workspace: none reads the older text.
                keys = _text_keys.setdefault(self._group, {})
                if (older := keys.get(self._lane, key)) != key:
                    self._store.delete_key(older)
                keys[self._lane] = key
                return text
            waits = _waits()
            while not self._store.check([key]):
                if (waited := next(waits)) > timeouts.of_present(self._group):
                    late = "its measurements have not come"
                    raise PeerTimeout(self._making, self._rank, 0, round(waited, 3), late, members=self._members)
            received: bytes = self._store.get(key)
            return received.decode()

    def ended(self) -> None:
        """Record that this rank has its arenas, or knows that no rank gets them."""
        _unfinished.get(self._group, set()).discard(self._lane)

    def _is_unfinished(self) -> bool:
        return self._lane in _unfinished.get(self._group, ())

    def _tidy_up(self) -> None:
        # A row means that a rank has not finished. The row is overwritten, not deleted, as a peer may be about to read
        # it. The outcomes of former attempts are deleted.
        self._store.set(self._key("row", self._rank), "null")
        before = self._number - 1
        while before and self._forgotten(before):
            before -= 1

    def _forgotten(self, number: int) -> bool:
        # Return whether this rank's former attempt had left anything.
        return any([self._store.delete_key(self._key(what, self._rank, number)) for what in ("outcome", "lost")])

    def _patience(self) -> float:
        # If this rank broke off last time, or a peer has started over, other ranks may have finished and not come.
        return timeouts.of_present(self._group) if self._is_unfinished() else timeouts.of(self._group)

    def _key(self, *parts: str | int) -> str:
        return "/".join(map(str, ("fusedtp/arenas", *([f"lane {self._lane}"] if self._lane else []), *parts)))

    def _read(self, *parts: str | int) -> Any:
        key = self._key(*parts)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _waited(self, what: str, peer: int, seconds: float) -> Any:
        # Return the peer's row, or its outcome with this rank's rows. None if one of the rows has been replaced.
        waits = _waits()
        while True:
            entry = self._read("row", peer) if what == "row" else self._outcome(peer)
            if entry is not None:
                return entry
            if what == "outcome" and self._is_outdated():
                # A rank that is done wrote its outcome before its row was overwritten.
                return self._outcome(peer)
            waited = next(waits)
            if what == "row" and waited > NOTICE_SECONDS and not self._noticed:
                self._noticed = True
                absent = [each for each in range(self._world_size) if self._read("row", each) is None]
                first, mine = f"its first op{lanes.said(self._lane)}", rank_in(self._members, self._rank)
                whom = ", ".join(rank_in(self._members, each) for each in absent)
                notice = f"fusedtp: {mine} has waited {waited:.3g} s at {first} for {whom}"
                print(f"{notice}; it gives up after {seconds:g} s (fusedtp.set_timeout)", file=sys.stderr, flush=True)
            if waited > seconds:
                come, who = "it has not come" if what == "row" else "it has not made its memory", peer
                lost = self._read("lost", peer, self._numbers[peer]) if what == "outcome" else None
                if lost is not None:
                    come = f"rank {peer} has given up on rank {lost}: call fusedtp.destroy for this group on every rank"
                    who = peer if lost == self._rank else lost
                if what == "row" and self._again:
                    come = (
                        f"it has not come again since rank {self._rank} broke off: call fusedtp.destroy for this group "
                        "on every rank, then the op again"
                    )
                # Tell the missing rank, which may come late.
                self._store.set(self._key("lost", self._rank, self._number), json.dumps(who))
                raise PeerTimeout(
                    self._making, self._rank, who, round(waited, 3), come, lost == self._rank, members=self._members
                )

    def _outcome(self, peer: int) -> Any:
        outcome = self._read("outcome", peer, self._numbers[peer])
        return outcome if outcome is not None and outcome[0] == self._numbers else None

    def _is_outdated(self) -> bool:
        rows = [self._read("row", peer) for peer in range(self._world_size)]
        return any(row is None or row[0] != number for row, number in zip(rows, self._numbers, strict=True))


class Halves(HostEpochs, Protocol):
    """A workspace as far as an exchange through its arenas uses it."""

    def tell_peers(self) -> None: ...
    def view(self, peer: int, epoch: int, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor: ...


class ArenaExchange:
    """Exchange through the present arenas of `ws`, for larger ones. Waits have the timeout of an op."""

    def __init__(self, ws: Halves) -> None:
        self._ws, self._steps = ws, HostSteps.beside(ws, "workspace growth")

    def rows(self, mine: list[int]) -> list[list[int]]:
        """Return every rank's row, in rank order."""
        ws = self._ws
        row = partial(ws.view, epoch=self._steps.epoch, offset=0, shape=(1, len(mine)), dtype=torch.int64)
        ws.tell_peers()
        row(ws.rank).copy_(torch.tensor(mine, dtype=torch.int64, device="cpu"))
        self._steps.meet()
        return [row(peer)[0].tolist() for peer in range(ws.world_size)]

    def outcomes(self, mine: list[int]) -> list[list[int]] | None:
        """Return every rank's outcome. Never None: a rank cannot start over."""
        ws, first = self._ws, signal.OUTCOME.value
        words = [[address + 4 * (first + i) for i in range(len(mine))] for address in ws.addresses]
        for word, value in zip(words[ws.rank], mine, strict=True):
            store_release(word, value)
        self._steps.meet()
        return [list(map(load_acquire, each)) for each in words]
