"""Failures of a workspace: find them, tell the peers, and raise the error."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import lanes
from ..errors import PeerTimeout, RanksDisagree, rank_in, ranks_in
from ..kernels import signal
from ..memory import Arena
from ..op import OPS
from . import agreement
from .agreement import Fingerprints
from .words import fingerprint_place, raised, store_release, wrapping_difference

# Texts for the values of `signal.LEFT`.
_LEFT = {
    1: "has called fusedtp.destroy",
    2: "left an op with an exception",
    3: "broke off while its memory was made",
}
# Longest time that a rank looks again before it names one of several that say nothing.
_SETTLE_SECONDS = 0.5


def has_entered(header: Sequence[int], peer: int, world_size: int, epoch: int) -> bool:
    """Return whether rank `peer` has entered `epoch`, according to its signal in a header."""
    return raised(header[signal.SIGNALS.value + signal.ENTRY_SLOT.value * world_size + peer], epoch)


def differing_ranks(
    before: Sequence[int], header: Sequence[int], rank: int, world_size: int, epoch: int
) -> list[int]:  # fmt: skip
    """Return the ranks that have entered `epoch` with another fingerprint than `rank`, whose header is `header`.

    before: the same header, read before. Its words are not read all at once, and a rank that enters meanwhile writes
    its fingerprint first.
    """

    def fingerprint(source: int) -> Sequence[int]:
        begin = fingerprint_place(epoch, source, world_size)
        return header[begin : begin + 2]

    return [
        peer
        for peer in range(world_size)
        if peer != rank and has_entered(before, peer, world_size, epoch) and fingerprint(peer) != fingerprint(rank)
    ]


class Failing:
    """Part of a `Workspace` that handles failures. Every later use raises a failure again."""

    rank: int
    world_size: int
    # The global ranks of the group's ranks, if known.
    members: tuple[int, ...]
    lane: int
    device: torch.device
    seconds: float
    words: Tensor
    data_offset: int
    failure: RuntimeError | RanksDisagree | None
    meanings: Fingerprints
    _arena: Arena | None
    _report: Any
    _op: str
    _host_epoch: int

    def _abandon(self, op: str, error: BaseException | None) -> None:
        # Peers may or may not have this rank's data. The next op would take their data for this op as its own.
        self._leave(2)
        # Only the text is kept: the exception would keep its frames alive, and they hold views of the arena.
        what = "an interruption" if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")
        mine = rank_in(self.members, self.rank)
        self.failure = RuntimeError(
            f"{op}: an exception left {mine} in the middle of the op, out of step with its peers"
            f"{lanes.said(self.lane)}: call fusedtp.destroy for this group on every rank before its next op ({what})"
        )

    def _refuse_words(self, words: Any, epoch: int) -> None:
        # Kernels read these words. A kernel that finds GIVEN_UP set does not wait, and passes on NaN.
        actual, expected = f"epoch {words[signal.EPOCH.value]}", str(epoch)
        for name in ("ARRIVED", "TICKETS", "GIVEN_UP"):
            if value := words[getattr(signal, name).value]:
                actual, expected = f"{value} in the word {name}", "0"
        self._leave(2)
        mine = rank_in(self.members, self.rank)
        self.failure = RuntimeError(
            f"{self._op}: {mine} finds {actual} in its memory, where its last op left {expected}: something "
            "else has written there. Call fusedtp.destroy for this group on every rank before its next op"
        )
        raise self.failure

    def _leave(self, why: int) -> None:
        # The host can write the word only if the arena is in host memory.
        if self.device.type == "cpu" and (arena := self._arena) is not None:
            header = arena.tensors[self.rank].data_ptr()
            if why == 2:
                # No peer may grow its memory with this rank.
                store_release(header + 4 * signal.GROWING.value, 0)
            store_release(header + 4 * signal.LEFT.value, why)

    def _check(self) -> None:
        """Raise the failure that a kernel has reported. On a GPU, reports may arrive later."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self._report[signal.REPORT.value]:
            peer, wait, expected, seen = self._report[signal.REPORT.value : signal.REPORT_SEEN.value + 1].tolist()
            slot, op = divmod(wait, signal.NUM_OPS.value)
            self._fail([*OPS][op], peer - 1, slot, expected, seen)

    def give_up(self, op: str, peer: int, slot: int, expected: int, seen: int, seconds: float) -> None:
        """Raise the error of a wait on the host that timed out or whose peer is gone, and tell the peers."""
        self.words[signal.GIVEN_UP.value] = peer + 1
        self._fail(op, peer, slot, expected, seen, min(self.seconds, max(0.001, round(seconds, 3))))

    def disagree(self, op: str, peer: int, epoch: int) -> None:
        """Raise RanksDisagree, because rank `peer` has another op in this epoch, and tell the peers."""
        words = self._header(self.rank)
        own = fingerprint_place(epoch, self.rank, self.world_size)
        fingerprint = int(np.array(words[own : own + 2], dtype=np.int32).view(np.int64)[0])
        # On a GPU the host may have issued further ops since.
        meant = self.meanings.now if self.device.type == "cpu" else self.meanings.by_fingerprint(fingerprint)
        agreement.say(self._text(self.rank), meant.values)
        # After the text: a peer that sees this word reads the text.
        self.words[signal.GIVEN_UP.value] = peer + 1
        op = meant.values.get("op", op)
        everyone = agreement.everyone(
            self._text,
            self.world_size,
            lambda peer: has_entered(words, peer, self.world_size, epoch),
            # A kernel on another rank may find the difference only when its wait times out.
            1.25 * self.seconds + 1,
        )
        text = agreement.difference(op, everyone) or f"{op}: the ranks do not agree, rank {peer} means something else"
        if f"{op}: the ranks do not agree on sizes:" in text:
            text += (
                ". These count rows, a length times the batch. Shards of different lengths need all lengths on every "
                "rank: `sizes`, a layer's `sequence_sizes`, or a DTensor for a style; torch.ops.symm_mem takes equal "
                "shards only"
            )
        text += f"{ranks_in(self.members)}{lanes.said(self.lane)}. "
        text += "Call fusedtp.destroy for this group on every rank before its next op"
        self.failure = RanksDisagree(text, op, self.rank, everyone)
        raise self.failure

    def _text(self, peer: int) -> Tensor:
        assert self._arena is not None
        return self._arena.tensors[peer][self.data_offset - agreement.TEXT_BYTES : self.data_offset]

    def _fail(self, op: str, peer: int, slot: int, expected: int, seen: int, seconds: float | None = None) -> None:
        others = [other for other in range(self.world_size) if other != self.rank]
        before, header = self._header(self.rank), self._header(self.rank)
        differing = differing_ranks(before, header, self.rank, self.world_size, expected)
        if differing := differing or [other for other in others if agreement.heard(self._text(other)) is not None]:
            self.disagree(op, differing[0], expected)
        headers = self._settled()
        who = missing(self.rank, headers, peer)
        what = "its memory to grow: step" if slot == signal.GROWTH_SLOT.value else f"signal slot {slot}: epoch"
        detail = f"{what} {expected} expected, {seen} seen{lanes.said(self.lane)}"
        if about := explain(self.rank, headers, peer, who):
            detail += about + ranks_in(self.members)
        if self.meanings.now.values.get("pass") == "backward" and not has_entered(
            self._header(self.rank), who, self.world_size, expected
        ):
            detail += f"; in a backward pass, which rank {who} makes only where it wants the same gradients as this one"
        if "fusedtp.destroy" not in detail:
            detail += "; every call is refused until fusedtp.destroy has been called for this group on every live rank"
        lost = gave_up_on(headers, who)
        explained = lost is not None or headers[who][signal.LEFT.value] in _LEFT
        waited = seconds or self.seconds
        self.failure = PeerTimeout(op, self.rank, who, waited, detail, lost == self.rank, explained, self.members)
        raise self.failure

    def _settled(self) -> list[list[int]]:
        # A rank that gives up passes on what it has, so a peer's wait ends, and for a moment the peer says nothing.
        until = time.monotonic() + _SETTLE_SECONDS
        while True:
            headers = [self._header(each) for each in range(self.world_size)]
            if len(_silent(headers)) < 2 or time.monotonic() > until:
                return headers
            time.sleep(0.01)

    def _header(self, peer: int) -> list[int]:
        assert self._arena is not None
        words: list[int] = self._arena.tensors[peer][: self.data_offset].view(torch.int32).tolist()
        return words


def missing(rank: int, headers: Sequence[Sequence[int]], peer: int) -> int:
    """Find the rank that caused a timeout, for `rank`, which waited for `peer` in vain.

    Follows the chain of waits, from each rank to the one that it waits for or has given up on. The last rank in the
    chain is the cause, or if the chain is a circle, a rank that another chain ends at. `headers` has the int32 words of
    every rank's header.
    """
    chain = [rank]
    following: int | None = peer
    while following is not None and following not in chain:
        chain.append(following)
        following = _whom(headers, following)
    if following is None:
        return chain[-1]
    # Ranks that have given up on each other: a rank outside was missed first.
    return next((each for each in _silent(headers) if each not in chain), chain[-1])


def _silent(headers: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks that others wait for or have given up on, and that say nothing themselves."""
    whom = [_whom(headers, each) for each in range(len(headers))]
    return sorted({each for each in whom if each is not None and whom[each] is None})


def _whom(headers: Sequence[Sequence[int]], peer: int) -> int | None:
    words, world_size = headers[peer], len(headers)
    if (lost := gave_up_on(headers, peer)) is not None:
        return lost
    source = _rank_in(words, signal.WAITING_FOR.value, world_size)
    if source is None or words[signal.LEFT.value]:
        return None
    slot, expected = words[signal.WAITING_SLOT.value], wrapping_difference(words[signal.EPOCH.value], -1)
    word = signal.SIGNALS.value + slot * world_size + source
    if slot == signal.GROWTH_SLOT.value:
        seen, expected = headers[source][signal.GROWING.value], words[signal.GROWING.value]
    elif slot >= 0 and word < len(words):
        seen = words[word]
    else:
        return None
    # A rank that has the signal it waits for was stopped or killed there: the chain ends.
    return None if raised(seen, expected) else source


def _rank_in(words: Sequence[int], word: int, world_size: int) -> int | None:
    # A rank is stored as its number + 1. Other values, such as 0, name no rank.
    return words[word] - 1 if 0 < words[word] <= world_size else None


def gave_up_on(headers: Sequence[Sequence[int]], peer: int) -> int | None:
    """Return the rank that `peer` has given up on; None if there is none."""
    return _rank_in(headers[peer], signal.GIVEN_UP.value, len(headers))


def explain(rank: int, headers: Sequence[Sequence[int]], peer: int, named: int) -> str:
    """Return the explanation in brackets for the message of `rank` that names `named` in place of `peer`."""
    words, text = headers[named], ""
    if named != peer:
        text += f"; rank {peer} was itself waiting for rank {named}"
    if (lost := gave_up_on(headers, named)) not in (None, rank):
        text += f"; rank {named} had given up on rank {lost}"
    if (what := _LEFT.get(words[signal.LEFT.value])) is not None:
        text += f"; rank {named} {what}: call fusedtp.destroy for this group on every rank, then the op again"
    return text
