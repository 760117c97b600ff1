"""Operands and results of the kernels that multiply, as launches pass them and as kernels read them.

Each field of `Left`, `Right`, `Outputs` and `Scales` is a column of a table of blocks (`blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .blocks import MOST_UNROLLED, Blocks, block_at, entry, pick, stride_of
from .descriptors import of_left, of_right
from .launch import Config
from .scales import scale_bytes
from .signal import cdiv


class Left(NamedTuple):
    """A [M, K] of each block, whole and local.

    - `UNIT`: the dimension that is contiguous in all A, or -1. A picked stride would not show it to the compiler.
    - `BY`: how A is read, as in `descriptors`.
    """

    ptr: tl.tensor
    desc: tl.tensor
    stride_m: tl.tensor
    stride_k: tl.tensor
    UNIT: tl.constexpr
    BY: tl.constexpr


class Right(NamedTuple):
    """B [K, N] of each block, whole and local on every rank.

    COUNT: number of blocks, as Triton 3.6 cannot count them. UNIT, BY: as in `Left`. first: each weight's first column
    of tiles, and the number of them, if the table is in memory.
    """

    ptr: tl.tensor
    desc: tl.tensor
    stride_k: tl.tensor
    stride_n: tl.tensor
    K: tl.tensor
    N: tl.tensor
    first: tl.tensor
    COUNT: tl.constexpr
    UNIT: tl.constexpr
    BY: tl.constexpr


class Outputs(NamedTuple):
    """C [M, N] of each block, or the one result of a sum; COUNT, UNIT: as in `Right`."""

    ptr: tl.tensor
    stride_m: tl.tensor
    stride_n: tl.tensor
    N: tl.tensor
    COUNT: tl.constexpr
    UNIT: tl.constexpr


class Scales(NamedTuple):
    """Scales of float8 operands, whose values are data * scale; `Tiles.SCALES` names the kind.

    - "rows": a [rows of A on this rank], b [N], float32. A row that travels has its scale in the last 16 bytes of its
      pitch.
    - "blocks": for 32 elements each along the contraction, a [rows, ceil(K / 32)], b the same for the rows of its
      transpose. uint8: 127 + the exponent of a power of two. Rows of scales are padded by zeros to a multiple of 16. A
      row that travels has its scales from the first multiple of 16 bytes behind its data on.
    - `out`: has the dtype of tiles that travel, if any do.
    """

    a: tl.tensor
    b: tl.tensor
    out: tl.tensor
    END: tl.constexpr


class Tiles(NamedTuple):
    """Shape of a tile and the way it is computed.

    - `GROUP_M`: see `swizzle`.
    - `FLATTEN`, `SCALED_DOT`: as in `Config`.
    - `SCALES`: "rows" or "blocks", see `Scales`; "" for operands without scales.
    - `LEAVES`: leaves of a contraction that is added as a tree (`contraction`), a power of two, or 0.
    - `LEAVES_ALIGNED`: leaves begin at multiples of 16.
    """

    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    GROUP_M: tl.constexpr
    FLATTEN: tl.constexpr
    SCALES: tl.constexpr
    SCALED_DOT: tl.constexpr
    LEAVES: tl.constexpr
    LEAVES_ALIGNED: tl.constexpr


class Operand(NamedTuple):
    """A tile's rows of A along one chunk of the contraction, the columns k_begin .. k_begin + k_len - 1 of A.

    - `source`: pointer to the first element, or the descriptor, in which the first element is (layer, row, first).
    - `scale`: pointer to the first row's block scales, `scale_stride` bytes from the next row's; 0 without scales.
    """

    source: tl.tensor
    stride_m: tl.tensor
    stride_k: tl.tensor
    layer: tl.tensor
    row: tl.tensor
    k_begin: tl.tensor
    k_len: tl.tensor
    packed: tl.tensor
    scale: tl.tensor
    scale_stride: tl.tensor
    first: tl.tensor


class Columns(NamedTuple):
    """A tile's columns of B: those from `col` on, of N.

    source: pointer to B's first element, which the strides are for, or B's descriptor. scale: of B's first column.
    """

    source: tl.tensor
    stride_k: tl.tensor
    stride_n: tl.tensor
    N: tl.tensor
    col: tl.tensor
    scale: tl.tensor
    scale_stride: tl.tensor


class LaunchParams(NamedTuple):
    """Launch parameters of a kernel that scatters; splits, roles: of `matmul_all_reduce`; core: as in a gather."""

    config: Config
    a_by: str
    b_by: str
    tiles: Tiles
    num_tiles: int
    options: dict[str, int]
    splits: int = 1
    roles: tuple[int, int, int] = (0, 0, 0)
    core: Any = None


# The last field of a tuple, as a launch passes it; see `Link` in `signal`.
END = tl.constexpr(0)


def _unit_of(matrices: Sequence[torch.Tensor]) -> tl.constexpr:
    return tl.constexpr(next((dim for dim in (1, 0) if all(x.stride(dim) == 1 for x in matrices)), -1))


def left_of(matrices: Sequence[torch.Tensor], by: str, config: Config, blocks: Blocks | None = None) -> Left:
    """Return the A of all blocks as a launch passes them, or as columns of `blocks`."""
    unit, how = _unit_of(matrices), tl.constexpr(by)
    if blocks is not None:
        return Left(blocks.addresses(matrices), END, *blocks.strides(matrices, unit.value), unit, how)
    rows, cols = zip(*(a.stride() for a in matrices), strict=True)
    descs = tuple([of_left(a, by, config) for a in matrices])
    return Left(tuple(matrices), descs, rows, cols, unit, how)


def right_of(
    matrices: Sequence[torch.Tensor], by: str, config: Config, blocks: Blocks | None = None, *, terms: bool = True
) -> Right:
    """Return the B of all blocks as a launch passes them, or as columns of `blocks`.

    terms: blocks are terms of a sum, with one N, else weights side by side, with one K.
    """
    K, N = zip(*(b.shape for b in matrices), strict=True)
    count, unit, how = tl.constexpr(len(N)), _unit_of(matrices), tl.constexpr(by)
    if blocks is None:
        rows, cols = zip(*(b.stride() for b in matrices), strict=True)
        descs = tuple([of_right(b, by, config) for b in matrices])
        return Right(tuple(matrices), descs, rows, cols, K, N, END, count, unit, how)
    of_b = blocks.addresses(matrices), END, *blocks.strides(matrices, unit.value)
    if terms:
        return Right(*of_b, blocks.lengths(K), N[:1], END, count, unit, how)
    first = blocks.indices([0, *accumulate(-(-n // config.block_n) for n in N)])
    return Right(*of_b, K[:1], blocks.lengths(N), first, count, unit, how)


def outputs_of(*matrices: torch.Tensor, blocks: Blocks | None = None) -> Outputs:
    """Return the C of all blocks as a launch passes them, or as columns of `blocks`."""
    rows, cols = zip(*(c.stride() for c in matrices), strict=True)
    N, count, unit = tuple([c.shape[1] for c in matrices]), tl.constexpr(len(matrices)), _unit_of(matrices)
    if blocks is not None:
        return Outputs(blocks.addresses(matrices), *blocks.strides(matrices, unit.value), N[:1], count, unit)
    return Outputs(matrices, rows, cols, N, count, unit)


def tiles_of(config: Config, *, flatten: bool, scales: str = "", leaves: int = 0, lengths: Sequence[int] = ()) -> Tiles:
    """Return the tile of a configuration as a launch passes it; lengths: of the contractions in leaves."""
    aligned = bool(leaves) and all(K % (16 * leaves) == 0 for K in lengths)
    return Tiles(*map(tl.constexpr, (
        config.block_m, config.block_n, config.block_k, config.group_m, flatten, scales, config.scaled_dot,
        leaves, aligned,
    )))  # fmt: skip


@triton.jit
def a_of_term(ctx, tile, i, packed):
    """Return the tile's rows of the i-th term's A, with all of K: an A_CHUNK hook. Waits for nothing."""
    row = tile.begin + tile.row
    k_len = pick(ctx.b.K, i, ctx.b.COUNT)
    if ctx.a.BY == "pointers":
        stride_m = stride_of(ctx.a.stride_m, i, ctx.b.COUNT, ctx.a.UNIT == 0)
        stride_k = stride_of(ctx.a.stride_k, i, ctx.b.COUNT, ctx.a.UNIT == 1)
        source = pick(ctx.a.ptr, i, ctx.b.COUNT) + row.to(tl.int64) * stride_m
    else:
        # A descriptor has its own strides, and Triton 3.6 cannot return None.
        source = pick(ctx.a.desc, i, ctx.b.COUNT)
        stride_m, stride_k = 0, 0
    if ctx.tiles.SCALES == "blocks":
        # Several float8 terms are those of gradients, which have no block scales.
        tl.static_assert(ctx.b.COUNT == 1)
        scale = ctx.scales.a[0] + row.to(tl.int64) * scale_bytes(k_len)
    else:
        scale = 0
    return Operand(source, stride_m, stride_k, 0, row, 0, k_len, packed, scale, scale_bytes(k_len), 0)


@triton.jit
def _columns_of(ctx, j, N, col):
    if ctx.b.BY == "pointers":
        source = pick(ctx.b.ptr, j, ctx.b.COUNT)
        stride_k = stride_of(ctx.b.stride_k, j, ctx.b.COUNT, ctx.b.UNIT == 0)
        stride_n = stride_of(ctx.b.stride_n, j, ctx.b.COUNT, ctx.b.UNIT == 1)
    else:
        source = pick(ctx.b.desc, j, ctx.b.COUNT)
        stride_k, stride_n = 0, 0
    if ctx.tiles.SCALES == "blocks":
        scale = pick(ctx.scales.b, j, ctx.b.COUNT)
    else:
        scale = 0
    return Columns(source, stride_k, stride_n, N, col, scale, scale_bytes(ctx.b.K[0]))


@triton.jit
def b_of_term(ctx, tile, i):
    """Return a tile's columns of the i-th term's B: a B_CHUNK hook."""
    return _columns_of(ctx, i, ctx.b.N[0], tile.col)


@triton.jit
def weight_at(ctx, col):
    """Return the weight of a tile's column, and where the weight begins: weights lie side by side, in whole tiles."""
    if ctx.b.COUNT > MOST_UNROLLED:
        j = block_at(ctx.b.first, col // ctx.tiles.BLOCK_N, ctx.b.COUNT)
        begin = entry(ctx.b.first, j) * ctx.tiles.BLOCK_N
    else:
        j = 0
        begin = 0
        end = 0
        for i in tl.static_range(ctx.b.COUNT - 1):
            end += cdiv(ctx.b.N[i], ctx.tiles.BLOCK_N) * ctx.tiles.BLOCK_N
            if col >= end:
                j = i + 1
                begin = end
    return j, begin


@triton.jit
def b_of_weight(ctx, tile, i):
    """Return a tile's columns of its weight: a B_CHUNK hook."""
    j, begin = weight_at(ctx, tile.col)
    return _columns_of(ctx, j, pick(ctx.b.N, j, ctx.b.COUNT), tile.col - begin)
