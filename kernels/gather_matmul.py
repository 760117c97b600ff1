"""All-gather + matmul: c = gather(a) @ b, the gather hidden behind the matmul.

Two forms. Gathering rows: c[M, N] from a_shard [M_r, K], b [K, N]; a tile waits for the piece of rows it reads.
Gathering the contraction: c[M, N] from a_shard [M, K_r], b [K, N]; a tile visits K chunk by chunk, own first, and waits
inside its K loop.

The producer is either the kernel's own first programs (`push`: they store the own rows into the peers' arenas and never
wait), or a kernel or copies issued before this one. The own shard is read where it lies when its rows are contiguous,
else it goes through the own arena.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .descriptors import described_gathered, described_right, fitted_to
from .launch import Channel, Config, fitted, flattened, in_16_bytes, options
from .loading import launch
from .matmul import (
    Epilogue,
    Operand,
    Result,
    Right,
    Tiles,
    locate_in_chunks,
    locate_whole,
    matmul_tiles,
    result_of,
    right_of,
    store_rows,
    tiles_of,
    unpack,
)
from .push import Rows, push_to_all, wait_for_rows
from .signal import FIRST_SLOT, Link, before_descriptor, begin, enter, half, leave


class Shard(NamedTuple):
    """The own shard of A, as `Left`; `arena_desc` reads the others'. IN_PLACE: it is read where it lies, and not from
    the own arena.
    """

    ptr: tl.tensor
    own_desc: tl.tensor
    arena_desc: tl.tensor
    stride_m: tl.tensor
    stride_k: tl.tensor
    cols: tl.tensor
    BY: tl.constexpr
    IN_PLACE: tl.constexpr


class Chunks(NamedTuple):
    """How the shards lie: their table, the arenas' pitch, rows a piece, and whether the lengths of shards, and of their
    rows, are multiples of 16.
    """

    table: tl.tensor
    pitch: tl.tensor
    PIECE: tl.constexpr
    ALIGNED: tl.constexpr
    ROWS_ALIGNED: tl.constexpr


class Gathered(NamedTuple):
    """The hooks' context."""

    link: Link
    a: Shard
    b: Right
    c: Result
    epilogue: Epilogue
    tiles: Tiles
    chunks: Chunks
    M: tl.tensor


@triton.jit
def _locate_own_chunk_first(ctx, tile):
    return locate_in_chunks(tile, ctx.chunks.table, ctx.link.rank, ctx.b.N, ctx.link.group.WORLD_SIZE, ctx.tiles)


@triton.jit
def _arrived_or_own(ctx, src, tile, packed, arena_row, k_begin, k_len):
    # Where a tile's rows of rank src's shard lie: the own shard's in place, another's from row `arena_row` of the own
    # half on, once they have arrived.
    stride = tl.full((), 0, tl.int64) + ctx.chunks.pitch
    layer = 0
    row = tile.row
    if ctx.a.IN_PLACE and src == ctx.link.rank:
        if ctx.a.BY == "pointers":
            stride = tl.full((), 0, tl.int64) + ctx.a.stride_m
            source = ctx.a.ptr + tile.row.to(tl.int64) * ctx.a.stride_m
        else:
            source = ctx.a.own_desc
    else:
        # Raised by rank src's pushing programs, or behind its copies.
        end_row = min(tile.row + ctx.tiles.BLOCK_M, tile.rows)
        packed = wait_for_rows(
            ctx.link, src, tile.row, end_row, FIRST_SLOT, packed, ctx.tiles.BLOCK_M, ctx.chunks.PIECE
        )
        if ctx.a.BY == "pointers":
            received = half(ctx.link, ctx.link.rank, ctx.a.ptr.dtype.element_ty)
            source = received + arena_row.to(tl.int64) * ctx.chunks.pitch
        else:
            source = ctx.a.arena_desc
            layer = ctx.link.epoch & 1
            row = before_descriptor(arena_row, packed)
    return Operand(source, stride, 1, layer, row, k_begin, k_len, packed)


@triton.jit
def _row(ctx, tile):
    # Of all chunks. Without the hint, what comes from a table allows stores of one element only to contiguous columns.
    row = tile.begin + tile.row
    if ctx.chunks.ROWS_ALIGNED:
        row = tl.multiple_of(row, 16)
    return row


@triton.jit
def _a_gathered_rows(ctx, tile, i, packed):
    return _arrived_or_own(ctx, tile.chunk, tile, packed, _row(ctx, tile), 0, ctx.b.K)


@triton.jit
def _a_gathered_contraction(ctx, tile, i, packed):
    src = (ctx.link.rank + i) % ctx.link.group.WORLD_SIZE
    k_begin = tl.load(ctx.chunks.table + src)
    k_len = tl.load(ctx.chunks.table + src + 1) - k_begin
    if ctx.chunks.ALIGNED:
        # Without the hint, numbers from a table allow loads of one element only.
        k_begin = tl.multiple_of(k_begin, 16)
        k_len = tl.multiple_of(k_len, 16)
    return _arrived_or_own(ctx, src, tile, packed, src * ctx.M + tile.row, k_begin, k_len)


@triton.jit
def _store_gathered(ctx, tile, packed, acc):
    col, left, ok = unpack(packed, ctx.tiles.BLOCK_M, ctx.tiles.BLOCK_N, ctx.chunks.ROWS_ALIGNED)
    store_rows(ctx, _row(ctx, tile), col, left, acc, ok)


@triton.jit
def _gather_matmul_programs(
    ctx, shard, num_rows, dst_row, num_tiles,
    PUSHERS: tl.constexpr, CONTRACTION: tl.constexpr, LAST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    if PUSHERS > 0:
        enter(ctx.link, pid)
    if PUSHERS > 0 and pid < PUSHERS:
        push_to_all(
            ctx.link, shard, ctx.chunks.table, pid, PUSHERS, num_rows, dst_row, ctx.chunks.pitch,
            FIRST_SLOT, False, not ctx.a.IN_PLACE, ctx.chunks.PIECE, BLOCK_R, BLOCK_C,
        )  # fmt: skip
    elif CONTRACTION:
        matmul_tiles(
            ctx, pid - PUSHERS, num_programs - PUSHERS, num_tiles,
            locate_whole, _a_gathered_contraction, _store_gathered, ctx.link.group.WORLD_SIZE,
        )  # fmt: skip
    else:
        matmul_tiles(
            ctx, pid - PUSHERS, num_programs - PUSHERS, num_tiles,
            _locate_own_chunk_first, _a_gathered_rows, _store_gathered, 1,
        )  # fmt: skip
    if LAST:
        leave(ctx.link, num_programs)


@triton.jit(do_not_specialize=["rank", "fingerprint", "num_rows", "dst_row", "num_tiles"])
def _gather_matmul_kernel(
    a, b, c, epilogue, tiles, chunks, group, rank, fingerprint: tl.int64, num_rows, dst_row, num_tiles, M,
    PUSHERS: tl.constexpr, CONTRACTION: tl.constexpr, LAST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. PUSHERS - 1 push the own shard and signal each piece, without waiting; the others multiply.

    A multiplying program waits for pieces of other ranks' shards (of its own too, without IN_PLACE), which programs
    with lower ids raise before anything else, or which what was issued earlier raises (PUSHERS = 0). It ends the
    epoch if LAST.
    """
    _gather_matmul_programs(
        Gathered(Link(group, rank, begin(group, rank), fingerprint), a, b, c, epilogue, tiles, chunks, M),
        Rows(a.ptr, a.stride_m, a.stride_k, a.cols),
        num_rows, dst_row, num_tiles, PUSHERS, CONTRACTION, LAST, BLOCK_R, BLOCK_C,
    )  # fmt: skip


def own_in_place(a: torch.Tensor) -> bool:
    """Whether the kernel can read this shard where it lies: its rows must be contiguous, as they are in an arena."""
    return a.stride(1) == 1


def _limit(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, pitch: int, aligned: bool, described: bool) -> str:
    # Which limit of registers is known to be enough for a kernel that gathers rows.
    whole = aligned and pitch % 16 == 0 and in_16_bytes(b, c) and not any(n % 16 for n in a.stride() if n != 1)
    # What descriptors read needs no alignment.
    if (described or whole) and c.stride(1) == 1 and c.shape[1] % 16 == c.stride(0) % 16 == c.data_ptr() % 16 == 0:
        return "gather"
    return "gather transposed" if whole and c.stride(0) == 1 else ""


def gather_matmul(
    channel: Channel,
    op: int,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    epilogue: Epilogue,
    table: torch.Tensor,
    sizes: tuple[int, ...],
    *,
    gather_dim: int,
    pitch: int,
    piece_rows: int,
    pushed: bool,
    config: Config,
    upcast: bool,
    last: bool = True,
) -> None:
    """c [M, N] = gather(a, gather_dim) @ b [K, N], and the epilogue.

    With `pushed` the pieces of `piece_rows` rows are already under way; else config.pushers of the kernel's programs
    push them, or as many as there are pieces. `last` ends the epoch.
    """
    (M, N), K = c.shape, b.shape[0]
    rank = channel.rank
    chunks = sizes if gather_dim == 0 else (M,)
    pieces = -(-a.shape[0] // piece_rows) * channel.world_size
    pushers = 0 if pushed else max(1, min(config.pushers, pieces))
    dst_row = sum(sizes[:rank]) if gather_dim == 0 else rank * M
    rows, cols = (M, K) if gather_dim == 0 else (channel.world_size * M, max(sizes))
    # A chunk that ends inside a block of K would be multiplied with rows of B that belong to the next one.
    whole_blocks = gather_dim == 0 or all(size % config.block_k == 0 for size in sizes)
    aligned = all(size % 16 == 0 for size in sizes)
    config = fitted_to(
        config if whole_blocks else replace(config, descriptors=False),
        *((a, b) if own_in_place(a) else (b,)),
        result=c,
    )
    # What lies in the arena.
    if not config.descriptors and (pitch % 16 or (gather_dim == 1 and not aligned)):
        config = fitted(config, stored=True, read=False)
    num_tiles = sum(-(-rows // config.block_m) for rows in chunks) * -(-N // config.block_n)
    a_by, own_desc, arena_desc = described_gathered(a, channel, rows, cols, pitch, config)
    b_by, b_desc = described_right(b, config)
    rows_aligned = aligned if gather_dim == 0 else M % 16 == 0
    limit = "" if gather_dim == 1 else _limit(a, b, c, pitch, aligned, config.descriptors)
    flags = piece_rows, aligned, rows_aligned
    launch(_gather_matmul_kernel, (config.programs + pushers,))(
        Shard(
            a, own_desc, arena_desc, a.stride(0), a.stride(1), a.shape[1], tl.constexpr(a_by),
            tl.constexpr(own_in_place(a)),
        ),
        right_of(b, b_by, b_desc), result_of(c), epilogue,
        tiles_of(config, flatten=gather_dim == 0 and flattened(config, a_by, b_by), upcast=upcast),
        Chunks(table, pitch, *map(tl.constexpr, flags)), channel.group(op), rank, channel.fingerprint,
        a.shape[0], dst_row, num_tiles, M, pushers, gather_dim == 1, last, config.copy_rows, config.copy_cols,
        **options(config, a_by, b_by, limit=limit),
    )  # fmt: skip
