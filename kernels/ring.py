"""Ring collectives: every rank sends only to the next rank, and sends the fewest bytes possible.

- Reduce-scatter: chunk c starts at rank c + 1 and adds one rank's rows at every hop until it reaches its owner c.
- All-gather: every chunk travels around the ring.
- All-reduce: both phases in one kernel. Each rank sends 2 (n - 1) / n of the buffer.

The running sum is rounded to the wire dtype at every hop: anything else would send more bytes. The reduction order of
chunk c is fixed: c + 1, c + 2, .., c. Every rank gets the same bits, though not the bits of a one-shot sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Channel, Config, moving_options, strip_of
from .loading import Started, launch
from .prepared import prepares
from .push import rows_of
from .signal import FIRST_SLOT, Link, begin, cdiv, enter, half, leave, or_nan, raise_signal, wait


class RingLayout(NamedTuple):
    """Layout of the chunks: row table, most pieces of a chunk, region and first slot of the gather phase."""

    table: tl.tensor
    max_pieces: tl.tensor
    pitch: tl.tensor
    gather_row: tl.tensor
    gather_slot: tl.tensor
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    STRIP: tl.constexpr


@triton.jit
def _send(link, ring, row, at_m, at_n, mask, block):
    dst = (link.rank + 1) % link.group.WORLD_SIZE
    dtype: tl.constexpr = block.dtype
    tl.store(half(link, dst, dtype) + (row + at_m) * ring.pitch + at_n, block, mask=mask)


@triton.jit
def _signal_next(link, slot):
    raise_signal(link, (link.rank + 1) % link.group.WORLD_SIZE, slot)


@triton.jit
def _strip_of_tile(ring, index, strip, rows, cols):
    """Return a chunk's rows and columns in one strip of its tile `index`, and the mask of those in the chunk."""
    num_tiles_n = cdiv(cols, ring.BLOCK_N)
    at_m = (index // num_tiles_n * ring.BLOCK_M + strip + tl.arange(0, ring.STRIP)).to(tl.int64)[:, None]
    at_n = (index % num_tiles_n * ring.BLOCK_N + tl.arange(0, ring.BLOCK_N)).to(tl.int64)[None, :]
    return at_m, at_n, (at_m < rows) & (at_n < cols)


@triton.jit
def _reduce_phase(link, ring, x, out, out_row, pid, num_programs, KEEP: tl.constexpr):
    # Step t sends chunk rank - 1 - t on. The last step's chunk is the own one: it stays, in `out` at row `out_row`.
    prev = (link.rank + link.group.WORLD_SIZE - 1) % link.group.WORLD_SIZE
    dtype: tl.constexpr = x.ptr.dtype.element_ty
    received = half(link, link.rank, dtype)
    num_tiles_n = cdiv(x.cols, ring.BLOCK_N)
    for step in range(0, link.group.WORLD_SIZE):
        chunk = (link.rank + 2 * link.group.WORLD_SIZE - 1 - step) % link.group.WORLD_SIZE
        first = tl.load(ring.table + chunk)
        rows = tl.load(ring.table + chunk + 1) - first
        for index in range(pid, cdiv(rows, ring.BLOCK_M) * num_tiles_n, num_programs):
            slot = chunk * ring.max_pieces + index + FIRST_SLOT
            ok = 1
            if step > 0:
                # Raised by the previous rank's program of this id, one step earlier.
                ok = wait(link, prev, slot)
            # A strip of the tile at a time: if nothing is aligned, every element has an address of its own.
            for strip in range(0, ring.BLOCK_M, ring.STRIP):
                at_m, at_n, mask = _strip_of_tile(ring, index, strip, rows, x.cols)
                block = tl.load(x.ptr + (first + at_m) * x.stride_m + at_n * x.stride_n, mask=mask, other=0.0)
                if step > 0:
                    total = tl.load(received + (first + at_m) * ring.pitch + at_n, mask=mask, other=0.0).to(tl.float32)
                    total += block.to(tl.float32)
                    block = or_nan(total, ok).to(dtype)
                if step < link.group.WORLD_SIZE - 1:
                    _send(link, ring, first, at_m, at_n, mask, block)
                else:
                    tl.store(out.ptr + (out_row + at_m) * out.stride_m + at_n * out.stride_n, block, mask=mask)
                    if KEEP:
                        # The first hop of the gather phase.
                        _send(link, ring, ring.gather_row + first, at_m, at_n, mask, block)
            if step < link.group.WORLD_SIZE - 1:
                _signal_next(link, slot)
            elif KEEP:
                _signal_next(link, ring.gather_slot + chunk * ring.max_pieces + index)


@triton.jit
def _gather_phase(link, ring, out, pid, num_programs):
    # Step t receives chunk rank - 1 - t and sends it on, except to the rank that owns it.
    prev = (link.rank + link.group.WORLD_SIZE - 1) % link.group.WORLD_SIZE
    dtype: tl.constexpr = out.ptr.dtype.element_ty
    received = half(link, link.rank, dtype)
    num_tiles_n = cdiv(out.cols, ring.BLOCK_N)
    for step in range(0, link.group.WORLD_SIZE - 1):
        chunk = (link.rank + 2 * link.group.WORLD_SIZE - 1 - step) % link.group.WORLD_SIZE
        first = tl.load(ring.table + chunk)
        rows = tl.load(ring.table + chunk + 1) - first
        for index in range(pid, cdiv(rows, ring.BLOCK_M) * num_tiles_n, num_programs):
            slot = ring.gather_slot + chunk * ring.max_pieces + index
            # Raised by the previous rank's program of this id, one step earlier (in step 0 as the chunk's owner).
            ok = wait(link, prev, slot)
            for strip in range(0, ring.BLOCK_M, ring.STRIP):
                at_m, at_n, mask = _strip_of_tile(ring, index, strip, rows, out.cols)
                block = tl.load(received + (ring.gather_row + first + at_m) * ring.pitch + at_n, mask=mask, other=0.0)
                block = or_nan(block, ok)
                tl.store(out.ptr + (first + at_m) * out.stride_m + at_n * out.stride_n, block, mask=mask)
                if step < link.group.WORLD_SIZE - 2:
                    _send(link, ring, ring.gather_row + first, at_m, at_n, mask, block)
            if step < link.group.WORLD_SIZE - 2:
                _signal_next(link, slot)


@triton.jit
def _send_own(link, ring, x, out, pid, num_programs):
    first = tl.load(ring.table + link.rank)
    rows = tl.load(ring.table + link.rank + 1) - first
    num_tiles_n = cdiv(x.cols, ring.BLOCK_N)
    for index in range(pid, cdiv(rows, ring.BLOCK_M) * num_tiles_n, num_programs):
        for strip in range(0, ring.BLOCK_M, ring.STRIP):
            at_m, at_n, mask = _strip_of_tile(ring, index, strip, rows, x.cols)
            block = tl.load(x.ptr + at_m * x.stride_m + at_n * x.stride_n, mask=mask, other=0.0)
            tl.store(out.ptr + (first + at_m) * out.stride_m + at_n * out.stride_n, block, mask=mask)
            _send(link, ring, ring.gather_row + first, at_m, at_n, mask, block)
        _signal_next(link, ring.gather_slot + link.rank * ring.max_pieces + index)


@triton.jit
def _ring_programs(link, ring, x, out, REDUCE: tl.constexpr, GATHER: tl.constexpr):
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    if pid == 0:
        enter(link)
    if REDUCE:
        out_row = tl.load(ring.table + link.rank) if GATHER else 0
        _reduce_phase(link, ring, x, out, out_row, pid, num_programs, GATHER)
    else:
        _send_own(link, ring, x, out, pid, num_programs)
    if GATHER:
        _gather_phase(link, ring, out, pid, num_programs)
    leave(link, num_programs)


@triton.jit(do_not_specialize=["rank", "fingerprint", "max_pieces", "gather_row", "gather_slot"])
def _ring_kernel(
    x, out, table, group, rank, fingerprint: tl.int64, max_pieces, gather_row, gather_slot, pitch,
    REDUCE: tl.constexpr, GATHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Run the reduce phase, the gather phase, or both; enter the epoch before and leave it after.

    Program p handles the tiles p, p + programs, .. of every chunk, on every rank alike.

    Waits for: the previous rank's program p, which raised the signal one step earlier. The first step of the kernel
    waits for nothing, so by induction over the steps every wait ends.
    """
    _ring_programs(
        Link(group, rank, begin(group, rank), fingerprint, 0),
        RingLayout(table, max_pieces, pitch, gather_row, gather_slot, BLOCK_M, BLOCK_N, STRIP),
        x, out, REDUCE, GATHER,
    )  # fmt: skip


@prepares
def ring(
    channel: Channel,
    op: int,
    x: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    sizes: tuple[int, ...],
    *,
    reduces: bool,
    gathers: bool,
    pitch: int,
    config: Config,
) -> Started | None:
    """Run a reduce-scatter, an all-gather, or both, from x to out, both [rows, cols]."""
    cols = x.shape[1]
    max_pieces = max(-(-rows // config.block_m) for rows in sizes) * -(-cols // config.block_n)
    return launch(_ring_kernel, (config.programs,))(
        rows_of(x), rows_of(out), table, channel.group(op), channel.rank, channel.fingerprint, max_pieces,
        sum(sizes) if reduces else 0, FIRST_SLOT.value + (len(sizes) * max_pieces if reduces else 0), pitch, reduces,
        gathers, config.block_m, config.block_n, strip_of(config, 2), **moving_options(config),
    )  # fmt: skip
