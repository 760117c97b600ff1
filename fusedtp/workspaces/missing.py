"""Whom to name when a wait is given up: not the peer that was waited for if that one was itself stuck behind another.

All of it is read from the ranks' headers (`kernels.signal`), which say whom a rank waits for and on which slot, whom it
has given up on, and whether it has left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from ..kernels import signal
from .clock import Stopwatch
from .steps import raised, wrapping_difference

# How long a rank that is alive may take to show it.
GRACE_SECONDS = 1.0

# By LEFT, in `signal`.
_LEFT = {
    1: "has called fusedtp.destroy",
    2: "left an op with an exception",
    3: "broke off while its memory was made",
}

# A rank's header, int32 by int32, with the signals that it has seen.
Header: TypeAlias = Callable[[int], list[int]]


def really_missing(rank: int, world_size: int, header: Header, peer: int, seconds: float) -> int:
    """The rank that `rank`, which waited for `peer` in vain for `seconds`, should name.

    That is the rank at the end of the chain of ranks that wait for each other. If it says nothing, or if another rank
    has given up on a different one, it has a while to show that it is alive: such a rank will soon wait, or give up.
    """
    ran, patience = Stopwatch(), min(GRACE_SECONDS, seconds / 2)
    while True:
        # As they are at one time: a rank may say something between two looks.
        now = [header(each) for each in range(world_size)].__getitem__
        first = _follow(rank, world_size, now, peer)
        givers = [
            other for other in range(world_size)
            if other != rank and _given_up(world_size, now, other) not in (None, rank)
        ]  # fmt: skip
        ends = [_follow(rank, world_size, now, giver) for giver in givers]
        rivals = [end for end in ends if end != first and _is_silent(world_size, now, end)]
        if not _is_silent(world_size, now, first):
            # It waits for this rank, or has given up on it: this rank is late itself, or was stuck behind a third one.
            if rivals:
                return rivals[0]
            if not givers:
                return first
        elif not rivals and (now(first)[signal.LEFT.value] or ran.seconds() > patience):
            return first
        if ran.seconds() > GRACE_SECONDS:
            return first
        time.sleep(0.01)


def explain(world_size: int, header: Header, peer: int, missing: int) -> str:
    """What to add to a message that names rank `missing` in place of `peer`: what is known of it."""
    words, text = header(missing), ""
    if missing != peer:
        text += f"; rank {peer} was itself waiting for rank {missing}"
    if (lost := _rank_in(words, signal.GIVEN_UP.value, world_size)) is not None:
        text += f"; rank {missing} had given up on rank {lost}"
    if (what := _LEFT.get(words[signal.LEFT.value])) is not None:
        text += f"; rank {missing} {what}: call fusedtp.destroy for this group on every rank, then the op again"
    return text


def _given_up(world_size: int, header: Header, peer: int) -> int | None:
    # Whom that rank has given up on.
    return _rank_in(header(peer), signal.GIVEN_UP.value, world_size)


def _is_silent(world_size: int, header: Header, peer: int) -> bool:
    # Whether that rank neither waits nor has given up, as one that is dead, stopped, gone or busy.
    words = header(peer)
    if _rank_in(words, signal.GIVEN_UP.value, world_size) is not None:
        return False
    if words[signal.LEFT.value]:
        return True
    return _waits_for(world_size, header, words) is None


def _waits_for(world_size: int, header: Header, words: list[int]) -> int | None:
    source = _rank_in(words, signal.WAITING_FOR.value, world_size)
    if source is None:
        return None
    slot, expected = words[signal.WAITING_SLOT.value], wrapping_difference(words[signal.EPOCH.value], -1)
    word = signal.SIGNALS.value + slot * world_size + source
    if slot == signal.GROWTH_SLOT.value:
        seen, expected = header(source)[signal.GROWING.value], words[signal.GROWING.value]
    elif slot < 0 or word >= len(words):
        return None
    else:
        seen = words[word]
    # A rank that already has the signal it says it waits for was stopped or killed there.
    return None if raised(seen, expected) else source


def _rank_in(words: list[int], word: int, world_size: int) -> int | None:
    # A rank is written as its number + 1. Any other value was not written by this protocol, and says nothing.
    return words[word] - 1 if 0 < words[word] <= world_size else None


def _follow(rank: int, world_size: int, header: Header, peer: int) -> int:
    # From each rank to the one that it waits for, up to the last one, which waits for nobody as far as is known.
    chain = [rank]
    while peer not in chain:
        chain.append(peer)
        words = header(peer)
        if (lost := _rank_in(words, signal.GIVEN_UP.value, world_size)) is not None:
            peer = lost
        elif words[signal.LEFT.value]:
            break
        elif (source := _waits_for(world_size, header, words)) is not None:
            peer = source
    return chain[-1]
