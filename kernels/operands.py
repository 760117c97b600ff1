"""The operands and results of the kernels that multiply, as launches give them, and the epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl

from .descriptors import of_left, of_right
from .launch import Config


class Left(NamedTuple):
    """A [M, K], whole and local: read by pointers, or by a descriptor. BY says how, as in `descriptors`."""

    ptr: tl.tensor
    desc: tl.tensor
    stride_m: tl.tensor
    stride_k: tl.tensor
    BY: tl.constexpr


class Right(NamedTuple):
    """B [K, N], whole and local on every rank; BY as in `Left`."""

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
    """Of float8 operands, whose values are data * scale: a [rows of A on this rank], b [N], float32. A row that travels
    has its scale in the last 16 bytes of its pitch. out: of the dtype of tiles that travel, where any do.

    With `Tiles.SCALES` "blocks": of 32 elements each along the contraction, a [rows, ceil(K / 32)], b the same of the
    rows of its transpose, uint8: 127 + the exponent of a power of two. Rows of scales are padded by zeros to a multiple
    of 16. A row that travels has them from the first multiple of 16 bytes behind its data on.
    """

    a: tl.tensor
    b: tl.tensor
    out: tl.tensor
    END: tl.constexpr


class Epilogue(NamedTuple):
    """What is done before a tile of the result is rounded; None for what is not.

    bias: is added; it has one element for each row of C with PER_ROW, else for each column. residual: [M, N], is added
    to a sum by its owner. ACTIVATION: see `activated`; "" for none. GATED: it is that of the first of two products,
    with which the second is multiplied. z: lies as C, and takes what comes before an activation, if that is kept.
    """

    bias: tl.tensor
    PER_ROW: tl.constexpr
    residual: Result | None = None
    z: tl.tensor | None = None
    ACTIVATION: tl.constexpr = tl.constexpr("")
    GATED: tl.constexpr = tl.constexpr(False)


class Block(NamedTuple):
    """A further B of a kernel with several: its own A where their products are added, its own result where they are not
    (None for what there is not). a_scale, b_scale: of float8.
    """

    a: tl.tensor
    b: tl.tensor
    c: tl.tensor
    bias: tl.tensor
    z: tl.tensor
    a_scale: tl.tensor
    b_scale: tl.tensor
    END: tl.constexpr


class More(NamedTuple):
    """The further blocks, COUNT of them, as Triton 3.6 cannot count them. All are laid out like the first: A_UNIT,
    B_UNIT, C_UNIT are the dimension of A, B and C whose elements are adjacent in each of them, or -1. What is chosen
    among them would not show it.
    """

    blocks: tl.tensor
    COUNT: tl.constexpr
    A_UNIT: tl.constexpr
    B_UNIT: tl.constexpr
    C_UNIT: tl.constexpr


class Tiles(NamedTuple):
    """The shape of a tile. GROUP_M: see `swizzle`; FLATTEN: whether the loops over tiles and contraction are made one;
    SCALES: "" for operands without, "rows" or "blocks", see `Scales`; SCALED_DOT: whether the matrix unit multiplies
    blocks with their scales. LEAVES: of a contraction that is added up as a tree, see `contraction`, a power of
    two, or 0; LEAVES_ALIGNED: whether they begin at multiples of 16.
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
    """A's rows of a tile along one chunk of the contraction, which is the columns k_begin .. k_begin + k_len of A.

    If it is read by pointers, `source` points to the first element. If by a descriptor, `source` is the descriptor, and
    the first element is its (layer, row, first). scale: where the first row's block scales lie, `scale_stride` bytes
    from the next row's; 0 without.
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
    """B's columns of a tile: those from `col` on, of N. `source` points to B's first element, or is its descriptor; the
    strides hold for pointers. scale: as in `Operand`, of B's first column.
    """

    source: tl.tensor
    stride_k: tl.tensor
    stride_n: tl.tensor
    N: tl.tensor
    col: tl.tensor
    scale: tl.tensor
    scale_stride: tl.tensor


# As a launch gives the last field of a tuple, see `Link` in `signal`.
END = tl.constexpr(0)
# As a launch gives More to a kernel with one B.
NO_MORE = More((), *map(tl.constexpr, (0, -1, -1, -1)))


def unit_of(matrices: Sequence[torch.Tensor]) -> int:
    """The dimension whose elements are adjacent in all of the matrices, or -1."""
    return next((dim for dim in (1, 0) if all(x.stride(dim) == 1 for x in matrices)), -1)


def left_of(a: torch.Tensor, by: str, config: Config) -> Left:
    """A as a launch gives it."""
    return Left(a, of_left(a, by, config), a.stride(0), a.stride(1), tl.constexpr(by))


def right_of(b: torch.Tensor, by: str, config: Config) -> Right:
    """B as a launch gives it."""
    desc = of_right(b, by, config)
    return Right(b, desc, b.stride(0), b.stride(1), b.shape[0], b.shape[1], tl.constexpr(by))


def result_of(c: torch.Tensor) -> Result:
    """C as a launch gives it."""
    return Result(c, c.stride(0), c.stride(1))


# As a launch gives Epilogue.PER_ROW, and an activation's constants by its name.
PER_ROW = (tl.constexpr(False), tl.constexpr(True))
ACTIVATIONS = {
    name: (tl.constexpr(of), tl.constexpr(gated))
    for name, of, gated in (
        *((name, name, False) for name in ("", "relu", "gelu", "gelu_tanh", "silu")),
        ("swiglu", "silu", True), ("geglu", "gelu", True),
    )
}  # fmt: skip


def epilogue_of(bias: torch.Tensor | None, *, per_row: bool) -> Epilogue:
    """A bias as a launch gives it."""
    return Epilogue(bias, PER_ROW[per_row])


def tiles_of(config: Config, *, flatten: bool, scales: str = "", leaves: int = 0, lengths: Sequence[int] = ()) -> Tiles:
    """The tile of a configuration as a launch gives it; lengths: of the contractions that are in leaves."""
    aligned = bool(leaves) and all(K % (16 * leaves) == 0 for K in lengths)
    return Tiles(*map(tl.constexpr, (
        config.block_m, config.block_n, config.block_k, config.group_m, flatten, scales, config.scaled_dot,
        leaves, aligned,
    )))  # fmt: skip
