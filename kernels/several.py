"""Hooks of a matmul with several B: their tiles lie side by side, and each B begins at a tile of its own.

A gated activation has two B with equal numbers of columns, gate and up. The program that computes a tile of up has just
stored the gate's tile of the same place, to z or to the result. It loads the gate's tile again after a barrier, as not
every compiler gives a tile's elements to the same threads both times.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activations import activated
from .matmul import PART_COLUMNS, Tile, bias_at, halves, or_nan
from .operands import Columns
from .scales import scale_bytes
from .signal import cdiv
from .terms import b_whole, unit, widened


@triton.jit
def tile_columns(ctx):
    """Return the number of columns of tiles of all results, side by side."""
    count = cdiv(ctx.b.N, ctx.tiles.BLOCK_N)
    for i in tl.static_range(ctx.more.COUNT):
        count += cdiv(ctx.more.blocks[i].b.N, ctx.tiles.BLOCK_N)
    return count


@triton.jit
def b_of_tile(ctx, tile, i):
    """Return a tile's columns of its B: a B_CHUNK hook."""
    if ctx.more.COUNT == 0:
        return b_whole(ctx, tile, i)
    else:
        N = ctx.b.N
        col = tile.col
        first = cdiv(N, ctx.tiles.BLOCK_N) * ctx.tiles.BLOCK_N
        if ctx.b.BY == "pointers":
            source = ctx.b.ptr
            stride_k, stride_n = widened(ctx.b.stride_k), widened(ctx.b.stride_n)
        else:
            source = ctx.b.desc
            stride_k, stride_n = widened(0), widened(0)
        if ctx.tiles.SCALES == "blocks":
            scale = ctx.scales.b
        else:
            scale = 0
        for j in tl.static_range(ctx.more.COUNT):
            if tile.col >= first:
                N = ctx.more.blocks[j].b.N
                col = tile.col - first
                if ctx.tiles.SCALES == "blocks":
                    scale = ctx.more.blocks[j].b_scale
                if ctx.b.BY == "pointers":
                    source = ctx.more.blocks[j].b.ptr
                    stride_k = widened(ctx.more.blocks[j].b.stride_k)
                    stride_n = widened(ctx.more.blocks[j].b.stride_n)
                else:
                    source = ctx.more.blocks[j].b.desc
            first += cdiv(ctx.more.blocks[j].b.N, ctx.tiles.BLOCK_N) * ctx.tiles.BLOCK_N
        stride_k, stride_n = unit(stride_k, ctx.more.B_UNIT == 0), unit(stride_n, ctx.more.B_UNIT == 1)
        return Columns(source, stride_k, stride_n, N, col, scale, scale_bytes(ctx.b.K))


@triton.jit
def first_of(index, num_programs):
    """Return the gate's tile of the same place as the index-th tile, and 1 if the index-th tile is up's, else 0."""
    turn = index // num_programs
    return turn // 2 * num_programs + index % num_programs, turn % 2


@triton.jit
def end_of_pairs(pid, num_pairs, num_programs):
    """Return the end of a program's tiles, two for each of pid, pid + num_programs, .. below num_pairs."""
    return pid + 2 * cdiv(max(num_pairs - pid, 0), num_programs) * num_programs


@triton.jit
def beside(ctx, tile, is_up):
    """Return the gate's tile, or up's tile of the same place if `is_up`."""
    first = cdiv(ctx.b.N, ctx.tiles.BLOCK_N) * ctx.tiles.BLOCK_N
    return Tile(tile.chunk, tile.begin, tile.index, tile.row, tile.rows, tile.col + is_up * first)


@triton.jit
def store_gated(c, z, N, epilogue, tiles, row, col, left, acc, ok, is_up):
    """Store a tile of the gate, or the result: the gate's activation times a tile of up.

    z: takes this tile if gate and up are kept. `epilogue.z` is the gate's.
    """
    tl.debug_barrier()
    _store_in_parts(c, z, N, epilogue, tiles, row, col, left, acc, ok, is_up, tiles.BLOCK_N)


@triton.jit
def _store_in_parts(c, z, N, epilogue, tiles, row, col, left, acc, ok, is_up, COLS: tl.constexpr):
    if COLS <= PART_COLUMNS or COLS * 4 <= tiles.BLOCK_N:
        _store_columns(c, z, N, epilogue, tiles, row, col, left, acc, ok, is_up, COLS)
    else:
        first, second = halves(acc, tiles.BLOCK_M, COLS)
        _store_in_parts(c, z, N, epilogue, tiles, row, col, left, first, ok, is_up, COLS // 2)
        _store_in_parts(c, z, N, epilogue, tiles, row, col + COLS // 2, left, second, ok, is_up, COLS // 2)


@triton.jit
def _store_columns(c, z, N, epilogue, tiles, row, col, left, acc, ok, is_up, COLS: tl.constexpr):
    offs_m = tl.arange(0, tiles.BLOCK_M)
    offs_n = col + tl.arange(0, COLS)
    mask = (offs_m < left)[:, None] & (offs_n < N)[None, :]
    rows = (row + offs_m).to(tl.int64)
    if epilogue.bias is not None:
        acc += bias_at(epilogue, offs_n, offs_n < N)[None, :]
    acc = or_nan(acc, ok)
    at = rows[:, None] * c.stride_m + offs_n[None, :].to(tl.int64) * c.stride_n
    dtype: tl.constexpr = c.ptr.dtype.element_ty
    up = mask & (is_up != 0)
    if epilogue.z is not None:
        tl.store(z + at, acc.to(dtype), mask=mask)
        gate = tl.load(epilogue.z + at, mask=up, other=0.0).to(tl.float32)
        tl.store(c.ptr + at, (activated(gate, epilogue.ACTIVATION) * acc).to(dtype), mask=up)
    else:
        gate = tl.load(c.ptr + at, mask=up, other=0.0).to(tl.float32)
        made = tl.where(is_up != 0, activated(gate, epilogue.ACTIVATION) * acc, acc)
        tl.store(c.ptr + at, made.to(dtype), mask=mask)
