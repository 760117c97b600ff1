"""Kernels whose time is that of a launch, of a flag, or of signals to all peers: what the cost model assumes.

Each runs on one device: `turns` times the same within one launch. The epoch that they leave in the own arena is that of
the last turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import INTERPRETED
from .launch import FP_FUSION, Channel
from .loading import launch
from .signal import EPOCH, Link, begin, header, raise_signal, raise_to_all, wait

_WARPS = 4


@triton.jit
def _empty_kernel(words):
    """Do nothing."""


@triton.jit(do_not_specialize=["rank", "fingerprint", "slot", "turns"])
def _flags_kernel(group, rank, fingerprint: tl.int64, slot, turns, seen, PAIR: tl.constexpr):
    """Let two programs wait for each other's signal in turns: program 0 raises `slot`, program 1 answers in the next.

    Both signals are in the own arena. One program waits for its own signal, unless PAIR. `seen`: the waits of program 0
    that ended.
    """
    first = begin(group, rank)
    pid, count = tl.program_id(0), 0
    for turn in range(turns):
        link = Link(group, rank, first + turn, fingerprint, 0)
        if pid == 0:
            raise_signal(link, rank, slot)
            count += wait(link, rank, slot + PAIR)
        else:
            wait(link, rank, slot)
            raise_signal(link, rank, slot + 1)
    if pid == 0:
        # The other program has read the epoch, as it has answered.
        tl.store(seen, count)
        tl.store(header(group, rank) + EPOCH, first + turns - 1)


@triton.jit(do_not_specialize=["rank", "fingerprint", "slot", "turns"])
def _signals_kernel(group, rank, fingerprint: tl.int64, slot, turns, AT_ONCE: tl.constexpr):
    """Raise `slot` on all peers, turn after turn: one by one, or AT_ONCE by one exchange of a lane for each peer."""
    first = begin(group, rank)
    for turn in range(turns):
        link = Link(group, rank, first + turn, fingerprint, 0)
        if AT_ONCE:
            raise_to_all(link, slot)
        else:
            dst = (rank + 1) % group.WORLD_SIZE
            while dst != rank:
                raise_signal(link, dst, slot)
                dst = (dst + 1) % group.WORLD_SIZE
    tl.store(header(group, rank) + EPOCH, first + turns - 1)


def empty(words: torch.Tensor) -> None:
    """Launch a kernel that does nothing with a tensor."""
    launch(_empty_kernel, (1,))(words, num_warps=_WARPS, **FP_FUSION)


def flags(channel: Channel, op: int, slot: int, turns: int, seen: torch.Tensor) -> None:
    """Let two programs answer each other in `slot` and the next; `seen` (int32): how many answers came.

    Interpreted programs run one after the other, so one program answers itself.
    """
    pair = not INTERPRETED
    given = channel.group(op), channel.rank, channel.fingerprint, slot, turns, seen, pair
    launch(_flags_kernel, (1 + pair,))(*given, num_warps=_WARPS, **FP_FUSION)


def signals(channel: Channel, op: int, slot: int, turns: int, at_once: bool) -> None:
    """Raise `slot` on every peer, one by one or all at once."""
    given = channel.group(op), channel.rank, channel.fingerprint, slot, turns, at_once
    launch(_signals_kernel, (1,))(*given, num_warps=_WARPS, **FP_FUSION)
