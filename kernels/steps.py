"""Single steps of the protocol as kernels of one program, for schedules that the host drives."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import FP_FUSION, Channel
from .loading import Started, launch
from .prepared import prepares
from .signal import Link, begin, enter, leave, raise_signal, wait


@triton.jit(do_not_specialize=["rank", "fingerprint", "peer", "slot"])
def _step_kernel(group, rank, fingerprint: tl.int64, peer, slot, STEP: tl.constexpr):
    """Run one step, ordered by the stream with the work before and after it.

    The kernel of a wait ends when the signal is there or the wait is given up.
    """
    link = Link(group, rank, begin(group, rank), fingerprint, 0)
    if STEP == "enter":
        enter(link)
    elif STEP == "signal":
        raise_signal(link, peer, slot)
    elif STEP == "wait":
        wait(link, peer, slot)
    else:
        leave(link, 1)


@prepares
def step(channel: Channel, op: int, name: str, peer: int = 0, slot: int = 0) -> Started | None:
    """Issue `name` (enter, signal, wait or leave) on the current stream; signal and wait take `peer` and `slot`."""
    group = channel.group(op)
    return launch(_step_kernel, (1,))(
        group, channel.rank, channel.fingerprint, peer, slot, name, num_warps=1, **FP_FUSION
    )
