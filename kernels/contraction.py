"""Products of a tile along the contraction, in the usual order or as a tree.

The usual order is one sum from the first element to the last, chunk after chunk. A tree (`Tiles.LEAVES`) cuts the
contraction into leaves: leaf l is K from l K / LEAVES to (l + 1) K / LEAVES, rounded down. Each leaf is a sum in the
usual order. Leaves are added in pairs, and pairs in pairs.

If ranks split the contraction, each rank has some of all leaves and adds them to a subtree. `reduce` adds the subtrees.
So the reduction order depends neither on the number of ranks nor on where their rows are cut, if `Config` has one tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .operands import Operand
from .scales import dot_of_blocks
from .signal import cdiv


@triton.jit
def dot(a, b, acc):
    """Return acc + a @ b in float32."""
    if a.dtype.primitive_bitwidth == 8:
        # The matrix unit of sm_90 keeps 14 bits of a sum of float8 products. So each block of K, 128 at most, has its
        # own sum, which is then added in float32 (DeepSeek-V3, section 3.3.2). Triton's option for that,
        # `max_num_imprecise_acc`, emits PTX that adds before it waits for the sum. Other targets sum in float32, and
        # the compiler makes one instruction of both.
        return acc + tl.dot(a, b)
    else:
        # "ieee" matters for float32 only: the default would round the operands to tf32.
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def multiply(acc, a, tile, b, A_BY: tl.constexpr, B_BY: tl.constexpr, tiles, IN_PARTS: tl.constexpr):
    """Return acc[BLOCK_M, BLOCK_N] + a[rows of the tile, K chunk] @ b[the same K chunk, columns of the tile].

    IN_PARTS: the chunk is one of several, so B's block scales past its end belong to the next chunk.
    """
    BLOCK_M: tl.constexpr = tiles.BLOCK_M
    BLOCK_K: tl.constexpr = tiles.BLOCK_K
    offs_k = tl.arange(0, BLOCK_K)
    # Past the last row or column pointers wrap around to valid elements, and descriptors read zeros or another chunk's
    # rows. So the loop masks K only: the store drops such rows and columns.
    if A_BY == "pointers":
        offs_m = (tl.arange(0, BLOCK_M) % (tile.rows - tile.row)).to(tl.int64)
        a_ptrs = a.source + offs_m[:, None] * a.stride_m + offs_k[None, :].to(tl.int64) * a.stride_k
        # In 64 bits: the columns of a large matrix may be far apart.
        a_step = tl.full((), BLOCK_K, tl.int64) * a.stride_k
    if B_BY == "pointers":
        offs_n = ((b.col + tl.arange(0, tiles.BLOCK_N)) % b.N).to(tl.int64)
        b_ptrs = b.source + (a.k_begin + offs_k)[:, None].to(tl.int64) * b.stride_k + offs_n[None, :] * b.stride_n
        b_step = tl.full((), BLOCK_K, tl.int64) * b.stride_k
    if tiles.SCALES == "blocks":
        offs_s = tl.arange(0, BLOCK_K // 32)
        rows = (tl.arange(0, BLOCK_M) % (tile.rows - tile.row)).to(tl.int64)
        cols = ((b.col + tl.arange(0, tiles.BLOCK_N)) % b.N).to(tl.int64)
        a_scales = a.scale + rows[:, None] * a.scale_stride + offs_s[None, :]
        first = a.k_begin // 32
        if IN_PARTS and B_BY != "pointers":
            # Chunks that descriptors read are whole blocks of K.
            first = tl.multiple_of(first, BLOCK_K // 32)
        b_scales = b.scale + cols[:, None] * b.scale_stride + (first + offs_s)[None, :]
    for k in range(0, cdiv(a.k_len, BLOCK_K)):
        if A_BY == "pointers":
            a_block = tl.load(a_ptrs, mask=offs_k[None, :] < a.k_len - k * BLOCK_K, other=0.0)
            a_ptrs += a_step
        elif A_BY == "rows":
            a_block = a.source.load([a.layer, a.row, a.first + k * BLOCK_K]).reshape(BLOCK_M, BLOCK_K)
        else:
            a_block = a.source.load([a.layer, a.first + k * BLOCK_K, a.row]).reshape(BLOCK_K, BLOCK_M).T
        if B_BY == "pointers":
            b_block = tl.load(b_ptrs, mask=offs_k[:, None] < a.k_len - k * BLOCK_K, other=0.0)
            b_ptrs += b_step
        elif B_BY == "rows":
            b_block = b.source.load([a.k_begin + k * BLOCK_K, b.col])
        else:
            b_block = b.source.load([b.col, a.k_begin + k * BLOCK_K]).T
        if tiles.SCALES == "blocks":
            a_scale = tl.load(a_scales)
            if IN_PARTS and B_BY == "pointers":
                b_scale = tl.load(b_scales, mask=offs_s[None, :] < cdiv(a.k_len, 32) - k * (BLOCK_K // 32), other=0)
            else:
                b_scale = tl.load(b_scales)
            a_scales += BLOCK_K // 32
            b_scales += BLOCK_K // 32
            acc = dot_of_blocks(a_block, a_scale, b_block, b_scale, acc, tiles)
        else:
            acc = dot(a_block, b_block, acc)
    return acc


@triton.jit
def _begin_of(leaf, K, tiles):
    # K * LEAVES may overflow an int32.
    first = K // tiles.LEAVES * leaf + K % tiles.LEAVES * leaf // tiles.LEAVES
    if tiles.LEAVES_ALIGNED:
        # Without the hint, pointers load one element at a time.
        first = tl.multiple_of(first, 16)
    return first


@triton.jit
def _leaf_of(a, leaf, tiles, BY: tl.constexpr):
    # A leaf of a chunk of A that is the whole contraction on this rank.
    first = _begin_of(leaf, a.k_len, tiles)
    length = _begin_of(leaf + 1, a.k_len, tiles) - first
    source = a.source
    if BY == "pointers":
        source += first.to(tl.int64) * a.stride_k
    # Leaves that descriptors read are whole blocks of K.
    return Operand(
        source, a.stride_m, a.stride_k, a.layer, a.row, first, length, a.packed, a.scale, a.scale_stride,
        a.first + first,
    )  # fmt: skip


@triton.jit
def sum_as_tree(
    ctx, tile, a, packed, leaf, A_CHUNK: tl.constexpr, B_CHUNK: tl.constexpr, NUM_K_CHUNKS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Return the sum of COUNT leaves from `leaf` on, added as a tree.

    a: the chunk of A, if there is one. With several (terms, which wait for nothing) a leaf adds its part of each.
    """
    acc = tl.full((ctx.tiles.BLOCK_M, ctx.tiles.BLOCK_N), 0.0, tl.float32)
    if COUNT > 1:
        # Always two turns, which the compiler cannot know: unrolled, every leaf would have its own loop over K.
        for side in range(0, min(2, 2 + ctx.b.K[0])):
            acc += sum_as_tree(
                ctx, tile, a, packed, leaf + side * (COUNT // 2), A_CHUNK, B_CHUNK, NUM_K_CHUNKS, COUNT // 2
            )
    elif NUM_K_CHUNKS == 1:
        own = _leaf_of(a, leaf, ctx.tiles, ctx.a.BY)
        acc = multiply(acc, own, tile, B_CHUNK(ctx, tile, 0), ctx.a.BY, ctx.b.BY, ctx.tiles, False)
    else:
        for i in range(0, NUM_K_CHUNKS):
            own = _leaf_of(A_CHUNK(ctx, tile, i, packed), leaf, ctx.tiles, ctx.a.BY)
            acc = multiply(acc, own, tile, B_CHUNK(ctx, tile, i), ctx.a.BY, ctx.b.BY, ctx.tiles, False)
    return acc
