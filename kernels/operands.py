"""Operands, results and epilogue of the kernels that multiply, as launches pass them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl

from .descriptors import of_left, of_right
from .launch import Config


class Left(NamedTuple):
    """A [M, K], whole and local. BY: how A is read, as in `descriptors`."""

    ptr: tl.tensor
    desc: tl.tensor
    stride_m: tl.tensor
    stride_k: tl.tensor
    BY: tl.constexpr


class Right(NamedTuple):
    """B [K, N], whole and local on every rank. BY: as in `Left`."""

    ptr: tl.tensor
    desc: tl.tensor
    stride_k: tl.tensor
    stride_n: tl.tensor
    K: tl.tensor
    N: tl.tensor
    BY: tl.constexpr


class Result(NamedTuple):
    """C [M, N]."""

    ptr: tl.tensor
    stride_m: tl.tensor
    stride_n: tl.tensor


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


class Epilogue(NamedTuple):
    """Steps before a tile of the result is rounded; None leaves a step out.

    - `bias`: is added. It has one element for each row of C with PER_ROW, else for each column.
    - `residual`: [M, N], is added to a sum by its owner.
    - `z`: takes the values before an activation, if they are kept. It has the layout of C.
    - `ACTIVATION`: see `activated`; "" for none.
    - `GATED`: the activation of the first of two products (the gate) is multiplied with the second product.
    """

    bias: tl.tensor
    PER_ROW: tl.constexpr
    residual: Result | None = None
    z: tl.tensor | None = None
    ACTIVATION: tl.constexpr = tl.constexpr("")
    GATED: tl.constexpr = tl.constexpr(False)


class Block(NamedTuple):
    """A further B of a kernel with several, with its A if products are added, else with its result (None: absent)."""

    a: tl.tensor
    b: tl.tensor
    c: tl.tensor
    bias: tl.tensor
    z: tl.tensor
    a_scale: tl.tensor
    b_scale: tl.tensor
    END: tl.constexpr


class More(NamedTuple):
    """The further blocks, COUNT of them, as Triton 3.6 cannot count them.

    A_UNIT, B_UNIT, C_UNIT: the dimension that is contiguous in all A, all B and all C, or -1. A stride that is chosen
    among several would not show it to the compiler.
    """

    blocks: tl.tensor
    COUNT: tl.constexpr
    A_UNIT: tl.constexpr
    B_UNIT: tl.constexpr
    C_UNIT: tl.constexpr


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


# The last field of a tuple, as a launch passes it; see `Link` in `signal`.
END = tl.constexpr(0)
# `More` of a kernel with one B.
NO_MORE = More((), *map(tl.constexpr, (0, -1, -1, -1)))


def unit_of(matrices: Sequence[torch.Tensor]) -> int:
    """Return the dimension that is contiguous in all of the matrices, or -1."""
    return next((dim for dim in (1, 0) if all(x.stride(dim) == 1 for x in matrices)), -1)


def left_of(a: torch.Tensor, by: str, config: Config) -> Left:
    """Return A as a launch passes it."""
    return Left(a, of_left(a, by, config), a.stride(0), a.stride(1), tl.constexpr(by))


def right_of(b: torch.Tensor, by: str, config: Config) -> Right:
    """Return B as a launch passes it."""
    desc = of_right(b, by, config)
    return Right(b, desc, b.stride(0), b.stride(1), b.shape[0], b.shape[1], tl.constexpr(by))


def result_of(c: torch.Tensor) -> Result:
    """Return C as a launch passes it."""
    return Result(c, c.stride(0), c.stride(1))


# Constants of an `Epilogue` as a launch passes them: PER_ROW, and (ACTIVATION, GATED) by the activation's name.
PER_ROW = (tl.constexpr(False), tl.constexpr(True))
ACTIVATIONS = {
    name: (tl.constexpr(of), tl.constexpr(gated))
    for name, of, gated in (
        *((name, name, False) for name in ("", "relu", "gelu", "gelu_tanh", "silu")),
        ("swiglu", "silu", True), ("geglu", "gelu", True),
    )
}  # fmt: skip


def epilogue_of(bias: torch.Tensor | None, *, per_row: bool) -> Epilogue:
    """Return the epilogue with this bias as a launch passes it."""
    return Epilogue(bias, PER_ROW[per_row])


def tiles_of(config: Config, *, flatten: bool, scales: str = "", leaves: int = 0, lengths: Sequence[int] = ()) -> Tiles:
    """Return the tile of a configuration as a launch passes it; lengths: of the contractions in leaves."""
    aligned = bool(leaves) and all(K % (16 * leaves) == 0 for K in lengths)
    return Tiles(*map(tl.constexpr, (
        config.block_m, config.block_n, config.block_k, config.group_m, flatten, scales, config.scaled_dot,
        leaves, aligned,
    )))  # fmt: skip
