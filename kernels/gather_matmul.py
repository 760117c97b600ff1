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
    Operand,
    RightOperand,
    b_source,
    bias_along,
    locate_in_chunks,
    locate_whole,
    matmul_tiles,
    store_rows,
    unpack,
)
from .push import Rows, push_to_all, wait_for_rows
from .signal import FIRST_SLOT, OPS, Link, before_descriptor, begin, enter, half, leave


class Gathered(NamedTuple):
    """The hooks' context: the link, the own shard of A, the chunk table, where chunks lie in the own half, and C."""

    link: Link
    a_ptr: tl.tensor
    own_desc: tl.tensor
    arena_desc: tl.tensor
    stride_am: tl.tensor
    table: tl.tensor
    pitch: tl.tensor
    c_ptr: tl.tensor
    stride_cm: tl.tensor
    stride_cn: tl.tensor
    bias_ptr: tl.tensor
    M: tl.tensor
    N: tl.tensor
    A_BY: tl.constexpr
    BIAS: tl.constexpr
    OWN_IN_PLACE: tl.constexpr
    ALIGNED: tl.constexpr
    ROWS_ALIGNED: tl.constexpr
    K: tl.tensor
    PIECE: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    GROUP_M: tl.constexpr
    UPCAST: tl.constexpr


@triton.jit
def _locate_own_chunk_first(ctx, tile):
    return locate_in_chunks(
        tile, ctx.table, ctx.link.rank, ctx.N, ctx.link.WORLD_SIZE, ctx.BLOCK_M, ctx.BLOCK_N, ctx.GROUP_M
    )


@triton.jit
def _arrived_or_own(ctx, src, tile, packed, arena_row, k_begin, k_len):
    # Where a tile's rows of rank src's shard lie: the own shard's in place, another's from row `arena_row` of the own
    # half on, once they have arrived.
    stride = tl.full((), 0, tl.int64) + ctx.pitch
    layer = 0
    row = tile.row
    if ctx.OWN_IN_PLACE and src == ctx.link.rank:
        if ctx.A_BY == "pointers":
            stride = tl.full((), 0, tl.int64) + ctx.stride_am
            source = ctx.a_ptr + tile.row.to(tl.int64) * ctx.stride_am
        else:
            source = ctx.own_desc
    else:
        # Raised by rank src's pushing programs, or behind its copies.
        end_row = min(tile.row + ctx.BLOCK_M, tile.rows)
        packed = wait_for_rows(ctx.link, src, tile.row, end_row, FIRST_SLOT, packed, ctx.BLOCK_M, ctx.PIECE)
        if ctx.A_BY == "pointers":
            source = half(ctx.link, ctx.link.rank, ctx.a_ptr.dtype.element_ty) + arena_row.to(tl.int64) * ctx.pitch
        else:
            source = ctx.arena_desc
            layer = ctx.link.epoch & 1
            row = before_descriptor(arena_row, packed)
    return Operand(source, stride, 1, layer, row, k_begin, k_len, packed)


@triton.jit
def _row(ctx, tile):
    # Of all chunks. Without the hint, what comes from a table allows stores of one element only to contiguous columns.
    row = tile.begin + tile.row
    if ctx.ROWS_ALIGNED:
        row = tl.multiple_of(row, 16)
    return row


@triton.jit
def _a_gathered_rows(ctx, tile, i, packed):
    return _arrived_or_own(ctx, tile.chunk, tile, packed, _row(ctx, tile), 0, ctx.K)


@triton.jit
def _a_gathered_contraction(ctx, tile, i, packed):
    src = (ctx.link.rank + i) % ctx.link.WORLD_SIZE
    k_begin = tl.load(ctx.table + src)
    k_len = tl.load(ctx.table + src + 1) - k_begin
    if ctx.ALIGNED:
        # Without the hint, numbers from a table allow loads of one element only.
        k_begin = tl.multiple_of(k_begin, 16)
        k_len = tl.multiple_of(k_len, 16)
    return _arrived_or_own(ctx, src, tile, packed, src * ctx.M + tile.row, k_begin, k_len)


@triton.jit
def _store_gathered(ctx, tile, packed, acc):
    col, left, ok = unpack(packed, ctx.BLOCK_M, ctx.BLOCK_N, ctx.ROWS_ALIGNED)
    store_rows(ctx, _row(ctx, tile), col, left, acc, ok)


@triton.jit
def _gather_matmul_programs(
    ctx, shard, b, num_rows, dst_row, num_tiles,
    PUSHERS: tl.constexpr, CONTRACTION: tl.constexpr, LAST: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    if PUSHERS > 0:
        enter(ctx.link, pid)
    if PUSHERS > 0 and pid < PUSHERS:
        push_to_all(
            ctx.link, shard, ctx.table, pid, PUSHERS, num_rows, dst_row, ctx.pitch,
            FIRST_SLOT, False, not ctx.OWN_IN_PLACE, ctx.PIECE, BLOCK_R, BLOCK_C,
        )  # fmt: skip
    elif CONTRACTION:
        matmul_tiles(
            ctx, b, pid - PUSHERS, num_programs - PUSHERS, num_tiles,
            locate_whole, _a_gathered_contraction, _store_gathered, ctx.link.WORLD_SIZE,
            ctx.BLOCK_M, ctx.BLOCK_N, BLOCK_K, ctx.UPCAST, FLATTEN,
        )  # fmt: skip
    else:
        matmul_tiles(
            ctx, b, pid - PUSHERS, num_programs - PUSHERS, num_tiles,
            _locate_own_chunk_first, _a_gathered_rows, _store_gathered, 1,
            ctx.BLOCK_M, ctx.BLOCK_N, BLOCK_K, ctx.UPCAST, FLATTEN,
        )  # fmt: skip
    if LAST:
        leave(ctx.link, num_programs)


@triton.jit(do_not_specialize=["rank", "fingerprint", "num_rows", "dst_row", "num_tiles"])
def _gather_matmul_kernel(
    a_ptr, b_ptr, c_ptr, bias_ptr, own_desc, arena_desc, b_desc, table, peers, rank, fingerprint: tl.int64,
    num_rows, dst_row, num_tiles,
    M, N, K, shard_cols,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn, pitch, half_bytes, data_offset,
    WORLD_SIZE: tl.constexpr, OP: tl.constexpr, COUNT: tl.constexpr, A_BY: tl.constexpr, B_BY: tl.constexpr,
    BIAS: tl.constexpr, OWN_IN_PLACE: tl.constexpr, ALIGNED: tl.constexpr, ROWS_ALIGNED: tl.constexpr,
    PUSHERS: tl.constexpr, CONTRACTION: tl.constexpr, LAST: tl.constexpr, PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, FLATTEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. PUSHERS - 1 push the own shard and signal each piece, without waiting; the others multiply.

    A multiplying program waits for pieces of other ranks' shards (of its own too, without OWN_IN_PLACE), which programs
    with lower ids raise before anything else, or which what was issued earlier raises (PUSHERS = 0). It ends the
    epoch if LAST.
    """
    _gather_matmul_programs(
        Gathered(
            Link(peers, rank, begin(peers, rank), fingerprint, half_bytes, data_offset, WORLD_SIZE, OP, COUNT),
            a_ptr, own_desc, arena_desc, stride_am, table, pitch, c_ptr, stride_cm, stride_cn, bias_ptr, M, N,
            A_BY, BIAS, OWN_IN_PLACE, ALIGNED, ROWS_ALIGNED, K, PIECE, BLOCK_M, BLOCK_N, GROUP_M, UPCAST,
        ),
        Rows(a_ptr, stride_am, stride_ak, shard_cols),
        RightOperand(b_source(b_ptr, b_desc, B_BY), stride_bk, stride_bn, N, B_BY),
        num_rows, dst_row, num_tiles, PUSHERS, CONTRACTION, LAST, BLOCK_K, BLOCK_R, BLOCK_C, FLATTEN,
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
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    sizes: tuple[int, ...],
    *,
    gather_dim: int,
    pitch: int,
    piece_rows: int,
    pushed: bool,
    config: Config,
    upcast: bool,
    transposed: bool = False,
    last: bool = True,
) -> None:
    """c [M, N] = gather(a, gather_dim) @ b + bias [N], or [M] if `transposed`.

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
    launch(_gather_matmul_kernel, (config.programs + pushers,))(
        a, b, c, c if bias is None else bias, own_desc, arena_desc, b_desc, table, channel.peers, rank,
        channel.fingerprint, a.shape[0],
        dst_row, num_tiles, M, N, K, a.shape[1], *a.stride(), *b.stride(), *c.stride(), pitch, channel.half_bytes,
        channel.data_offset, channel.world_size, OPS.index("all_gather_matmul"), channel.count_bytes, a_by, b_by,
        bias_along(bias, transposed), own_in_place(a), aligned, rows_aligned, pushers, gather_dim == 1, last,
        piece_rows, config.block_m, config.block_n, config.block_k, config.group_m, config.copy_rows, config.copy_cols,
        flattened(config, a_by, b_by), upcast,
        **options(config, a_by, b_by, limit=limit),
    )  # fmt: skip
