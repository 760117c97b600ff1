"""Producers and collectors: the programs that move rows between a rank's tensors and its peers' arenas.

- `push_rows` stores rows of a local tensor into a peer's half, PIECE rows at a time, and raises one signal a piece.
- `wait_for_rows` waits for the pieces that hold some rows, whether these programs or the host's copies fill them.
- `collect` waits for pieces, or for sums that a reduction has broadcast, and copies them out of the own arena.

Rows in an arena are contiguous and `pitch` elements apart, whatever the strides of their source.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import FP_FUSION, Channel, Config, copy_rows_of, moving_options, strip_of
from .loading import Started, launch
from .multicast import behind_store, store_to_all
from .prepared import prepares
from .scales import scale_bytes
from .signal import FIRST_SLOT, Link, begin, cdiv, enter, half, leave, or_nan, raise_signal, raise_to_all, wait

# Rows whose block scales are sent at a time.
SCALE_ROWS = tl.constexpr(256)


class LocalRows(NamedTuple):
    """A local matrix: pointer, strides, columns, and float8 scales of rows or blocks, which travel with the rows."""

    ptr: tl.tensor
    stride_m: tl.tensor
    stride_n: tl.tensor
    cols: tl.tensor
    scale: tl.tensor | None = None


def rows_of(x: torch.Tensor, scale: torch.Tensor | None = None) -> LocalRows:
    """Return a matrix as a launch passes it; scale: of float8 rows."""
    return LocalRows(x, x.stride(0), x.stride(1), x.shape[1], scale)


@triton.jit
def send_block(src_ptr, src_m, src_n, dst_ptr, pitch, rows, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Store rows x cols elements to an arena, BLOCK_R x BLOCK_C at a time."""
    offs_r = tl.arange(0, BLOCK_R).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C).to(tl.int64)
    for row in range(0, rows, BLOCK_R):
        for col in range(0, cols, BLOCK_C):
            mask = (offs_r < rows - row)[:, None] & (offs_c < cols - col)[None, :]
            block = tl.load(src_ptr + (row + offs_r)[:, None] * src_m + (col + offs_c)[None, :] * src_n, mask=mask)
            tl.store(dst_ptr + (row + offs_r)[:, None] * pitch + (col + offs_c)[None, :], block, mask=mask)


@triton.jit
def received_scale(link, rank, row, pitch):
    """Return the pointer to the scale in the last 16 bytes of float8 row `row` of the half, and the scales' stride."""
    words = tl.cast(pitch // 4, tl.int64)
    return half(link, rank, tl.float32) + row * words + words - 4, words


@triton.jit
def _send_scales(link, src_ptr, dst, dst_row, pitch, rows, BLOCK_R: tl.constexpr):
    dst_ptr, words = received_scale(link, dst, dst_row, pitch)
    offs_r = tl.arange(0, BLOCK_R).to(tl.int64)
    for row in range(0, rows, BLOCK_R):
        mask = offs_r < rows - row
        scale = tl.load(src_ptr + row + offs_r, mask=mask)
        tl.store(dst_ptr + (row + offs_r) * words, scale, mask=mask)


@triton.jit
def _send_block_scales(link, src, first, dst, dst_row, pitch, rows):
    # Includes the zero padding: 16 bytes a thread.
    count = scale_bytes(src.cols)
    dst_ptr = half(link, dst, tl.uint8) + dst_row.to(tl.int64) * pitch + cdiv(src.cols, 16) * 16
    send_block(src.scale + first.to(tl.int64) * count, count, 1, dst_ptr, pitch, rows, count, SCALE_ROWS, 16)


@triton.jit
def push_rows(
    link, src, pid, num_pushers, first, num_rows, dst, dst_row, pitch, first_slot,
    PIECE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, SWITCH: tl.constexpr = False,
):  # fmt: skip
    """Store rows first .. first + num_rows - 1 of `src` into rank `dst`'s half, or the own one (SWITCH), at `dst_row`.

    This program stores the pieces pid, pid + num_pushers, .. and raises slot first_slot + piece at `dst` for each.
    """
    dtype: tl.constexpr = src.ptr.dtype.element_ty
    base = half(link, link.rank if SWITCH else dst, dtype)
    for piece in range(pid, cdiv(num_rows, PIECE), num_pushers):
        row = piece * PIECE
        rows = min(num_rows - row, PIECE)
        send_block(
            src.ptr + (first + row).to(tl.int64) * src.stride_m, src.stride_m, src.stride_n,
            base + (dst_row + row).to(tl.int64) * pitch, pitch,
            rows, src.cols, BLOCK_R, BLOCK_C,
        )  # fmt: skip
        if src.scale is not None and src.scale.dtype.element_ty == tl.uint8:
            _send_block_scales(link, src, first + row, dst, dst_row + row, pitch, rows)
        elif src.scale is not None:
            _send_scales(link, src.scale + first + row, dst, dst_row + row, pitch, rows, BLOCK_R)
        raise_signal(link, dst, piece + first_slot)


@triton.jit
def _push_at_once(
    link, src, pid, num_pushers, num_rows, dst_row, pitch, first_slot,
    WITH_OWN: tl.constexpr, PIECE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # Store every row once, to all halves, and signal every piece to each peer.
    offs_r = tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
    offs_c = tl.arange(0, BLOCK_C).to(tl.int64)[None, :]
    for piece in range(pid, cdiv(num_rows, PIECE), num_pushers):
        end = min((piece + 1) * PIECE, num_rows)
        for row in range(piece * PIECE, end, BLOCK_R):
            for col in range(0, src.cols, BLOCK_C):
                mask = (offs_r < end - row) & (offs_c < src.cols - col)
                block = tl.load(
                    src.ptr + (row + offs_r) * src.stride_m + (col + offs_c) * src.stride_n, mask=mask, other=0.0
                )
                places = (dst_row + row + offs_r) * pitch + col
                store_to_all(link, block, places, offs_r < end - row, src.cols - col, BLOCK_C)
        behind_store()
        raise_to_all(link, piece + first_slot, WITH_OWN)


@triton.jit
def push_to_all(
    link, src, table, pid, num_pushers, num_rows, dst_row, pitch, first_slot,
    SCATTER: tl.constexpr, WITH_OWN: tl.constexpr, PIECE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    SWITCH: tl.constexpr = False,
):  # fmt: skip
    """Push to every peer: all `num_rows` rows of `src`, or with SCATTER the rows that `table` gives to that peer.

    With SWITCH, all rows go to all peers at once, and SCATTER rows stay in the own half, in that peer's region of
    `dst_row` rows. WITH_OWN pushes to this rank's own arena too, first. The peer that needs these rows soonest comes
    next: each visits the shards in the order own rank, next rank, .. The pieces for all peers are dealt out to the
    programs in turn, so that no program is idle because one shard has few.
    """
    if SWITCH and not SCATTER:
        _push_at_once(
            link, src, pid, num_pushers, num_rows, dst_row, pitch, first_slot, WITH_OWN, PIECE, BLOCK_R, BLOCK_C
        )
    turn = pid
    for i in range(0 if WITH_OWN else 1, 0 if SWITCH and not SCATTER else link.group.WORLD_SIZE):
        dst = (link.rank + link.group.WORLD_SIZE - i) % link.group.WORLD_SIZE
        if SCATTER:
            first = tl.load(table + dst)
            rows = tl.load(table + dst + 1) - first
            row = dst * dst_row if SWITCH else dst_row
            push_rows(
                link, src, turn, num_pushers, first, rows, dst, row, pitch, first_slot, PIECE, BLOCK_R, BLOCK_C, SWITCH
            )
            turn = (turn + num_pushers - cdiv(rows, PIECE) % num_pushers) % num_pushers
        else:
            push_rows(
                link, src, turn, num_pushers, 0, num_rows, dst, dst_row, pitch, first_slot, PIECE, BLOCK_R, BLOCK_C
            )
            turn = (turn + num_pushers - cdiv(num_rows, PIECE) % num_pushers) % num_pushers


@triton.jit
def wait_for_rows(link, src, begin_row, end_row, first_slot, state, OK: tl.constexpr, PIECE: tl.constexpr):
    """Wait until rank `src`'s rows begin_row .. end_row - 1, at least one, have arrived.

    Returns `state`, with its bit `OK` cleared if a wait was given up.
    Waits for: a slot a piece from `first_slot` on, raised by rank src's `push_rows`, or after its copies.
    """
    piece = begin_row // PIECE
    # Not `range`: such a loop may run zero times. Checks of the compiled code could not tell that path around the wait
    # from a load that is too early.
    more = 1
    while more != 0:
        state = tl.where(wait(link, src, piece + first_slot) != 0, state, state & ~OK)
        piece += 1
        more = (piece * PIECE < end_row).to(tl.int32)
    return state


@triton.jit(do_not_specialize=["rank", "fingerprint", "num_rows", "dst_row", "first_slot"])
def _push_kernel(
    x, table, group, rank, fingerprint: tl.int64, num_rows, dst_row, first_slot, pitch,
    SCATTER: tl.constexpr, WITH_OWN: tl.constexpr, PIECE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    SWITCH: tl.constexpr,
):  # fmt: skip
    """Enter the epoch and push rows, as an op's first kernel. Signals pieces; waits for nothing."""
    link = Link(group, rank, begin(group, rank), fingerprint, 0)
    pid = tl.program_id(0)
    if pid == 0:
        enter(link)
    push_to_all(
        link, x, table, pid, tl.num_programs(0), num_rows, dst_row, pitch, first_slot,
        SCATTER, WITH_OWN, PIECE, BLOCK_R, BLOCK_C, SWITCH,
    )  # fmt: skip


@prepares
def push(
    channel: Channel,
    op: int,
    x: torch.Tensor,
    table: torch.Tensor,
    *,
    dst_row: int,
    pitch: int,
    scatter: bool,
    with_own: bool,
    config: Config,
    piece_rows: int,
    first_slot: int = FIRST_SLOT.value,
    scale: torch.Tensor | None = None,
    switch: bool = False,
) -> Started | None:
    """Enter the epoch and push x [rows, cols] to every peer's half from row `dst_row` on.

    - `scatter`: push to each peer its rows of `table`.
    - `piece_rows`: rows for each signal; signals start at `first_slot`. `scale`: of float8 rows.
    - `switch`: with `scatter`, rows stay in the own half, from row dst * dst_row on, where the switch adds them. Else
      each row is stored once, to all ranks.
    """
    rows = x.shape[0]
    pieces = -(-rows // piece_rows) * (1 if scatter or switch else channel.world_size)
    return launch(_push_kernel, (max(1, min(config.pushers, pieces)),))(
        rows_of(x, scale), table, channel.group(op), channel.rank, channel.fingerprint, rows, dst_row, first_slot,
        pitch, scatter, with_own, piece_rows, copy_rows_of(config, x, pitch), config.copy_cols, switch, **FP_FUSION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "fingerprint", "first_slot"])
def _collect_kernel(
    out, table, group, rank, fingerprint: tl.int64, first_slot, region_row, pitch,
    PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Copy the peers' chunks out of the own arena and leave the epoch, as an op's last kernel.

    Waits for: pieces raised by the peers' `_push_kernel` or after their copies, or without pieces (PIECE = 0) their
    `_reduce_kernel`. All are issued before this kernel on every rank.
    """
    link = Link(group, rank, begin(group, rank), fingerprint, 0)
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    dtype: tl.constexpr = out.ptr.dtype.element_ty
    base = half(link, link.rank, dtype)
    num_tiles_n = cdiv(out.cols, BLOCK_N)
    offs_m = tl.arange(0, STRIP)
    offs_n = tl.arange(0, BLOCK_N)
    one = tl.full((), 1, tl.int32)
    for i in range(1, link.group.WORLD_SIZE):
        src = (link.rank + i) % link.group.WORLD_SIZE
        first = tl.load(table + src)
        rows = tl.load(table + src + 1) - first
        if PIECE == 0:
            ok = wait(link, src, first_slot)
        for index in range(pid, cdiv(rows, BLOCK_M) * num_tiles_n, num_programs):
            row = first + index // num_tiles_n * BLOCK_M
            if PIECE > 0:
                end_row = min(row - first + BLOCK_M, rows)
                ok = wait_for_rows(link, src, row - first, end_row, first_slot, one, 1, PIECE)
            col = index % num_tiles_n * BLOCK_N
            at_n = (col + offs_n).to(tl.int64)[None, :]
            # A strip of the tile at a time: if nothing is aligned, every element has an address of its own.
            for strip in range(0, BLOCK_M, STRIP):
                mask = (offs_m < first + rows - row - strip)[:, None] & (offs_n < out.cols - col)[None, :]
                at_m = (row + strip + offs_m).to(tl.int64)[:, None]
                block = tl.load(base + (region_row + at_m) * pitch + at_n, mask=mask, other=0.0)
                block = or_nan(block, ok)
                tl.store(out.ptr + at_m * out.stride_m + at_n * out.stride_n, block, mask=mask)
    leave(link, num_programs)


@prepares
def collect(
    channel: Channel,
    op: int,
    out: torch.Tensor,
    table: torch.Tensor,
    *,
    first_slot: int,
    region_row: int,
    pitch: int,
    config: Config,
    piece_rows: int,
) -> Started | None:
    """Copy the peers' chunks of out [sum(sizes), cols] from row `region_row` of the own half on, and end the epoch.

    Chunks come in pieces of `piece_rows` rows with a slot each, or whole (0).
    """
    return launch(_collect_kernel, (config.programs,))(
        rows_of(out), table, channel.group(op), channel.rank, channel.fingerprint, first_slot, region_row, pitch,
        piece_rows, config.block_m, config.block_n, strip_of(config), **moving_options(config),
    )  # fmt: skip
