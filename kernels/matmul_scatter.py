"""Matmul + reduce-scatter, and matmul + one-shot all-reduce: the first kernel of both.

partial[M, N] = a_shard_k [M, K_r] @ b_shard_k [K_r, N] is computed tile by tile, rounded once to the wire dtype, and
stored straight into this rank's region of the owner's half, with one signal a tile. Tiles of the next rank come first
and the own rows last, so the owners that have waited longest are served first. The sum is `reduce`, a kernel of its
own: it waits, this one does not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .descriptors import described_left, described_right, fitted_to
from .launch import Channel, Config, options
from .loading import launch
from .matmul import RightOperand, a_local, b_source, locate_in_chunks, locate_whole, matmul_tiles, round_to
from .signal import FIRST_SLOT, OPS, Link, begin, cdiv, count_sent, enter, half, raise_signal


class Partial(NamedTuple):
    """The hooks' context: the link, A, the owners' row table, and where a region lies in a half."""

    link: Link
    a_ptr: tl.tensor
    a_desc: tl.tensor
    stride_am: tl.tensor
    stride_ak: tl.tensor
    table: tl.tensor
    M: tl.tensor
    N: tl.tensor
    K: tl.tensor
    region_row: tl.tensor
    pitch: tl.tensor
    A_BY: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    GROUP_M: tl.constexpr
    UPCAST: tl.constexpr


@triton.jit
def _locate_own_chunk_last(ctx, tile):
    return locate_in_chunks(
        tile, ctx.table, ctx.link.rank + 1, ctx.N, ctx.link.WORLD_SIZE, ctx.BLOCK_M, ctx.BLOCK_N, ctx.GROUP_M
    )


@triton.jit
def _a_local(ctx, tile, i, packed):
    return a_local(ctx, tile.begin + tile.row, packed, ctx.A_BY)


@triton.jit
def _store_to(ctx, dst, tile, partial):
    dtype: tl.constexpr = partial.dtype
    offs_m = tl.arange(0, ctx.BLOCK_M)
    offs_n = tile.col + tl.arange(0, ctx.BLOCK_N)
    mask = (offs_m < tile.rows - tile.row)[:, None] & (offs_n < ctx.N)[None, :]
    rows = (ctx.region_row + tile.row + offs_m).to(tl.int64)
    tl.store(half(ctx.link, dst, dtype) + rows[:, None] * ctx.pitch + offs_n[None, :], partial, mask=mask)
    count_sent(ctx.link, dst, mask, dtype)
    # The reduction visits the owner's tiles row by row; a tile's signal has its place in that order.
    raise_signal(ctx.link, dst, tile.index * cdiv(ctx.N, ctx.BLOCK_N) + tile.col // ctx.BLOCK_N + FIRST_SLOT)


@triton.jit
def _store_to_owner(ctx, tile, packed, acc):
    _store_to(ctx, tile.chunk, tile, round_to(acc, ctx.a_ptr.dtype.element_ty, ctx.UPCAST))


@triton.jit
def _store_to_all(ctx, tile, packed, acc):
    partial = round_to(acc, ctx.a_ptr.dtype.element_ty, ctx.UPCAST)
    # Not unrolled: the addresses of eight arenas at once take registers.
    for i in range(1, ctx.link.WORLD_SIZE + 1):
        _store_to(ctx, (ctx.link.rank + i) % ctx.link.WORLD_SIZE, tile, partial)


@triton.jit
def _matmul_scatter_programs(ctx, b, num_tiles, TO_ALL: tl.constexpr, BLOCK_K: tl.constexpr):
    pid = tl.program_id(0)
    enter(ctx.link, pid)
    # Not flattened: the compiler does not pipeline a loop with a barrier in it, and every tile's signal needs one.
    if TO_ALL:
        matmul_tiles(
            ctx, b, pid, tl.num_programs(0), num_tiles, locate_whole, _a_local, _store_to_all, 1,
            ctx.BLOCK_M, ctx.BLOCK_N, BLOCK_K, ctx.UPCAST, False,
        )  # fmt: skip
    else:
        matmul_tiles(
            ctx, b, pid, tl.num_programs(0), num_tiles, _locate_own_chunk_last, _a_local, _store_to_owner, 1,
            ctx.BLOCK_M, ctx.BLOCK_N, BLOCK_K, ctx.UPCAST, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "fingerprint", "region_row", "num_tiles"])
def _matmul_scatter_kernel(
    a_ptr, b_ptr, a_desc, b_desc, table, peers, rank, fingerprint: tl.int64, region_row, num_tiles, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, pitch, half_bytes, data_offset,
    WORLD_SIZE: tl.constexpr, OP: tl.constexpr, COUNT: tl.constexpr, A_BY: tl.constexpr, B_BY: tl.constexpr,
    TO_ALL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Multiply, store every tile into its owner's half (TO_ALL: into all), signal each tile. Waits for nothing."""
    _matmul_scatter_programs(
        Partial(
            Link(peers, rank, begin(peers, rank), fingerprint, half_bytes, data_offset, WORLD_SIZE, OP, COUNT),
            a_ptr, a_desc, stride_am, stride_ak, table, M, N, K, region_row, pitch,
            A_BY, BLOCK_M, BLOCK_N, GROUP_M, UPCAST,
        ),
        RightOperand(b_source(b_ptr, b_desc, B_BY), stride_bk, stride_bn, N, B_BY),
        num_tiles, TO_ALL, BLOCK_K,
    )  # fmt: skip


def matmul_scatter(
    channel: Channel,
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    table: torch.Tensor,
    sizes: tuple[int, ...],
    *,
    region_rows: int,
    pitch: int,
    to_all: bool,
    config: Config,
    upcast: bool,
) -> None:
    """Enter the epoch and store the tiles of a [M, K] @ b [K, N] into the owners' halves, at this rank's region of
    `region_rows`.
    """
    (M, K), N = a.shape, b.shape[1]
    # The owners count tiles, so their rows and columns are not this rank's to choose.
    config = fitted_to(config, a, b)
    chunks = (M,) if to_all else sizes
    num_tiles = sum(-(-rows // config.block_m) for rows in chunks) * -(-N // config.block_n)
    a_by, a_desc = described_left(a, config)
    b_by, b_desc = described_right(b, config)
    launch(_matmul_scatter_kernel, (config.programs,))(
        a, b, a_desc, b_desc, table, channel.peers, channel.rank, channel.fingerprint,
        channel.rank * region_rows, num_tiles, M, N, K,
        *a.stride(), *b.stride(), pitch, channel.half_bytes, channel.data_offset, channel.world_size, OPS.index(op),
        channel.count_bytes, a_by, b_by, to_all,
        config.block_m, config.block_n, config.block_k, config.group_m, upcast,
        **options(config, a_by, b_by, limit="" if to_all else "scatter any" if pitch % 16 else "scatter"),
    )  # fmt: skip
