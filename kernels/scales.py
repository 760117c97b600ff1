"""Scales of float8 operands: of rows and columns, or of blocks of 32 along the contraction (mxfp8)."""

from __future__ import annotations

import triton
import triton.language as tl

from .signal import _INTERPRETED, cdiv


@triton.jit
def scale_columns(acc, scale, col, N, BLOCK_N: tl.constexpr):
    """Return acc times B's scales of the columns from `col` on, of N."""
    offs_n = col + tl.arange(0, BLOCK_N)
    return acc * tl.load(scale + offs_n, mask=offs_n < N, other=0.0)[None, :]


@triton.jit
def scale_bytes(K):
    """Return the bytes from one row's block scales to the next row's, for a contraction of K."""
    return cdiv(K, 512) * 16


@triton.jit
def dequantized(x, scale):
    """Return x [R, K] in float8 times its block scales [R, K / 32], in bfloat16 (float32 in the interpreter).

    A product is exact in bfloat16, unless it is below bfloat16's normal numbers.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1]
    dtype: tl.constexpr = tl.float32 if _INTERPRETED else tl.bfloat16
    # Scale 0 is a power of two below the normal numbers. Scale 255 is NaN.
    if _INTERPRETED:
        bits = tl.where(scale == 0, 0x400000, scale.to(tl.int32) << 23)
        power = tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        bits = tl.where(scale == 0, 0x40, scale.to(tl.int16) << 7)
        power = tl.where(scale == 255, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if x.dtype == tl.float8e5 and not _INTERPRETED:
        # The upper half of float16. Converting directly to bfloat16, Triton makes numbers of infinities and NaN.
        x = x.to(tl.float16)
    blocks = tl.reshape(x.to(dtype), (ROWS, COLS // 32, 32)) * power[:, :, None]
    return tl.reshape(blocks, (ROWS, COLS))


@triton.jit
def dot_of_blocks(a, a_scale, b, b_scale, acc, tiles):
    """Return acc + (a * its scales) @ (b * its scales) in float32; a_scale [M, K / 32], b_scale [N, K / 32]."""
    if tiles.SCALED_DOT:
        A_IN: tl.constexpr = "e5m2" if a.dtype == tl.float8e5 else "e4m3"
        B_IN: tl.constexpr = "e5m2" if b.dtype == tl.float8e5 else "e4m3"
        return tl.dot_scaled(a, a_scale, A_IN, b, b_scale, B_IN, acc)
    else:
        wide = dequantized(b.T, b_scale).T
        return tl.dot(dequantized(a, a_scale), wide, acc, input_precision="ieee")
