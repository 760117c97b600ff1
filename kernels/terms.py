"""Terms of a sum: whole, local operands of one product, or of several products that are added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .launch import Config
from .operands import Block, Columns, More, Operand, left_of, right_of, unit_of
from .scales import scale_bytes


@triton.jit
def widened(stride):
    """Return a stride as a number to choose among several, as a stride of 1 is a constant to the compiler."""
    return tl.full((), 0, tl.int64) + stride


@triton.jit
def unit(stride, IS_ONE: tl.constexpr):
    """Return a chosen stride, or the constant 1 if the stride is known to be 1."""
    if IS_ONE:
        return 1
    else:
        return stride


@triton.jit
def a_local(ctx, row, packed):
    """Return A's rows from `row` on with all of K, for a whole and local A. Waits for nothing."""
    if ctx.a.BY == "pointers":
        source = ctx.a.ptr + row.to(tl.int64) * ctx.a.stride_m
        stride_m, stride_k = ctx.a.stride_m, ctx.a.stride_k
    else:
        # A descriptor has its own strides, and Triton 3.6 cannot return None.
        source = ctx.a.desc
        stride_m, stride_k = 0, 0
    if ctx.tiles.SCALES == "blocks":
        scale = ctx.scales.a + row.to(tl.int64) * scale_bytes(ctx.b.K)
    else:
        scale = 0
    return Operand(source, stride_m, stride_k, 0, row, 0, ctx.b.K, packed, scale, scale_bytes(ctx.b.K), 0)


@triton.jit
def b_whole(ctx, tile, i):
    """Return a tile's columns of the only B: a B_CHUNK hook."""
    if ctx.b.BY == "pointers":
        source = ctx.b.ptr
        stride_k, stride_n = ctx.b.stride_k, ctx.b.stride_n
    else:
        source = ctx.b.desc
        stride_k, stride_n = 0, 0
    if ctx.tiles.SCALES == "blocks":
        scale = ctx.scales.b
    else:
        scale = 0
    return Columns(source, stride_k, stride_n, ctx.b.N, tile.col, scale, scale_bytes(ctx.b.K))


@triton.jit
def a_of_term(ctx, tile, i, packed):
    """Return the A of the i-th term: an A_CHUNK hook. Waits for nothing."""
    if ctx.more.COUNT == 0:
        return a_local(ctx, tile.begin + tile.row, packed)
    else:
        row = tile.begin + tile.row
        k_len = ctx.b.K
        if ctx.a.BY == "pointers":
            source = ctx.a.ptr + row.to(tl.int64) * ctx.a.stride_m
            stride_m, stride_k = widened(ctx.a.stride_m), widened(ctx.a.stride_k)
        else:
            source = ctx.a.desc
            stride_m, stride_k = widened(0), widened(0)
        for j in tl.static_range(ctx.more.COUNT):
            if i == j + 1:
                k_len = ctx.more.blocks[j].b.K
                if ctx.a.BY == "pointers":
                    source = ctx.more.blocks[j].a.ptr + row.to(tl.int64) * ctx.more.blocks[j].a.stride_m
                    stride_m = widened(ctx.more.blocks[j].a.stride_m)
                    stride_k = widened(ctx.more.blocks[j].a.stride_k)
                else:
                    source = ctx.more.blocks[j].a.desc
        stride_m, stride_k = unit(stride_m, ctx.more.A_UNIT == 0), unit(stride_k, ctx.more.A_UNIT == 1)
        # Several float8 terms are those of gradients, which have no block scales.
        tl.static_assert(ctx.tiles.SCALES != "blocks")
        return Operand(source, stride_m, stride_k, 0, row, 0, k_len, packed, 0, 0, 0)


@triton.jit
def b_of_term(ctx, tile, i):
    """Return a tile's columns of the B of the i-th term: a B_CHUNK hook."""
    if ctx.more.COUNT == 0:
        return b_whole(ctx, tile, i)
    else:
        if ctx.b.BY == "pointers":
            source = ctx.b.ptr
            stride_k, stride_n = widened(ctx.b.stride_k), widened(ctx.b.stride_n)
        else:
            source = ctx.b.desc
            stride_k, stride_n = widened(0), widened(0)
        for j in tl.static_range(ctx.more.COUNT):
            if i == j + 1:
                if ctx.b.BY == "pointers":
                    source = ctx.more.blocks[j].b.ptr
                    stride_k = widened(ctx.more.blocks[j].b.stride_k)
                    stride_n = widened(ctx.more.blocks[j].b.stride_n)
                else:
                    source = ctx.more.blocks[j].b.desc
        stride_k, stride_n = unit(stride_k, ctx.more.B_UNIT == 0), unit(stride_n, ctx.more.B_UNIT == 1)
        return Columns(source, stride_k, stride_n, ctx.b.N, tile.col, 0, 0)


def further(
    terms: Sequence[tuple[torch.Tensor, torch.Tensor]], a_by: str, b_by: str, config: Config,
    scales: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> More:  # fmt: skip
    """Return all terms but the first as a launch passes them; scales: theirs, if float8."""
    given = scales if scales is not None else [(None, None)] * (len(terms) - 1)
    blocks = [
        Block(left_of(a, a_by, config), right_of(b, b_by, config), None, None, None, *its, tl.constexpr(0))
        for (a, b), its in zip(terms[1:], given, strict=True)
    ]
    units = unit_of([a for a, _ in terms]), unit_of([b for _, b in terms]), -1
    return More(tuple(blocks), *map(tl.constexpr, (len(blocks), *units)))
