"""Single steps of the protocol as one-program kernels, for schedules that are driven from the host."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import Channel
from .loading import launch
from .signal import OPS, Link, begin, enter, leave, raise_signal, wait


@triton.jit
def _step(link, peer, slot, STEP: tl.constexpr):
    if STEP == "enter":
        enter(link, 0)
    elif STEP == "signal":
        raise_signal(link, peer, slot)
    elif STEP == "wait":
        wait(link, peer, slot)
    else:
        leave(link, 1)


@triton.jit(do_not_specialize=["rank", "fingerprint", "peer", "slot"])
def _step_kernel(
    peers, rank, fingerprint: tl.int64, peer, slot, half_bytes, data_offset,
    WORLD_SIZE: tl.constexpr, OP: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One step, ordered with the work before and after it by the stream.

    A wait's kernel ends when the signal is there, or its budget.
    """
    _step(
        Link(peers, rank, begin(peers, rank), fingerprint, half_bytes, data_offset, WORLD_SIZE, OP, COUNT),
        peer, slot, STEP,
    )  # fmt: skip


def step(channel: Channel, op: str, name: str, peer: int = 0, slot: int = 0) -> None:
    """Issue `name` (enter, signal, wait or leave) on the current stream; `peer` and `slot` for signal and wait."""
    launch(_step_kernel, (1,))(
        channel.peers, channel.rank, channel.fingerprint, peer, slot, channel.half_bytes, channel.data_offset,
        channel.world_size, OPS.index(op), channel.count_bytes, name, num_warps=1,
    )  # fmt: skip
