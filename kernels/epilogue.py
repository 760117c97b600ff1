"""Epilogue: the steps between a finished block of a result and the store of the block, rounded once.

The steps are bias, residual, activation and gate, in that order. Only `apply` runs them. A tile without steps may also
be stored by TMA (`warp_specialised`). A gated
activation has two results in one place, gate and up, with equal numbers of columns. The program that computes a tile of
up has just stored the gate's tile of the same place, to z or to the result. It loads the gate's tile again after a
barrier, as not every compiler gives a tile's elements to the same threads both times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from .blocks import MOST_UNROLLED, Blocks, pick, stride_of
from .operands import Outputs, outputs_of
from .signal import or_nan

if TYPE_CHECKING:
    from ..epilogue import Epilogue

# Fewest columns that a tile with an activation stores at a time: 64 bytes of a row of 16-bit elements.
PART_COLUMNS = tl.constexpr(32)


class TileEpilogue(NamedTuple):
    """Steps before a tile of the result is rounded; None leaves a step out.

    - `bias`: is added, for each result; of more than MOST_UNROLLED results, some may have none. It has one element for
      each row of C with PER_ROW, else for each column, and is contiguous, as other layouts are rare, and too short for
      a copy to matter.
    - `residual`: [M, N], is added to a sum by its owner.
    - `z`: takes the values before an activation, if they are kept, for each result. It has the layout of C.
    - `ACTIVATION`: see `activated`; "" for none.
    - `GATED`: the activation of the first of two products (the gate) is multiplied with the second product.
    """

    bias: tl.tensor
    PER_ROW: tl.constexpr
    residual: Outputs | None = None
    z: tl.tensor | None = None
    ACTIVATION: tl.constexpr = tl.constexpr("")
    GATED: tl.constexpr = tl.constexpr(False)


# Fields with a tensor for each result.
_OF_RESULTS = ("bias", "z")


def tensors_of(epilogue: TileEpilogue) -> list[torch.Tensor]:
    """Return the tensors for each result."""
    return [x for name in _OF_RESULTS for x in getattr(epilogue, name) or () if x is not None]


def in_table(epilogue: TileEpilogue, blocks: Blocks) -> TileEpilogue:
    """Return the epilogue with its tensors for each result in a table of blocks."""
    return epilogue._replace(**{name: blocks.addresses(getattr(epilogue, name)) for name in _OF_RESULTS})


# Make a constant for launches, once for each value.
constant = cache(tl.constexpr)


def epilogue_of(
    epilogues: Sequence[Epilogue], cs: Sequence[torch.Tensor] = (), *, per_row: bool = False,
    zs: Sequence[torch.Tensor] = (),
) -> TileEpilogue:  # fmt: skip
    """Return the epilogue as a launch passes it; () for no steps.

    - `epilogues`: with tensors, of each block of C in `cs`. A strided bias is copied.
    - `per_row`: whether columns of an epilogue are rows of C, which is transposed.
    - `zs`: as in `TileEpilogue`.
    """
    if not epilogues:
        return TileEpilogue(None, constant(per_row))
    first, residual = epilogues[0], None
    if first.residual is not None:
        residual = outputs_of(first.residual.t() if per_row else first.residual)
    return TileEpilogue(
        _columns([each.bias for each in epilogues], cs, per_row), constant(per_row), residual, tuple(zs) or None,
        constant(first.function), constant(first.is_gated),
    )  # fmt: skip


def _columns(
    given: Sequence[torch.Tensor | None], cs: Sequence[torch.Tensor], per_row: bool
) -> tuple[torch.Tensor | None, ...] | None:  # fmt: skip
    for each in given:
        if each is not None:
            break
    else:
        return None
    if len(given) > MOST_UNROLLED.value:
        return tuple([each if each is None else each.contiguous() for each in given])
    # With few products the kernel adds a bias to each or to none.
    return tuple([
        cs[i].new_zeros(cs[i].shape[0 if per_row else 1]) if each is None else each.contiguous()
        for i, each in enumerate(given)
    ])  # fmt: skip


@triton.jit
def activated(z, NAME: tl.constexpr):
    """Return the activation of z, in float32; NaN stays NaN."""
    if NAME == "relu":
        return tl.where(z < 0.0, 0.0, z)
    elif NAME == "silu":
        return z / (1.0 + tl.exp(-z))
    elif NAME == "gelu":
        # erf of Abramowitz and Stegun, 7.1.26: error at most 1.5e-7, no branch, no cancellation in the tail.
        a = tl.abs(z) * 0.7071067811865476
        t = 1.0 / (1.0 + 0.3275911 * a)
        series = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
        tail = 0.5 * t * series * tl.exp(-a * a)
        return z * tl.where(z < 0.0, tail, 1.0 - tail)
    else:
        tl.static_assert(NAME == "gelu_tanh")
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), with u = sqrt(2 / pi) (z + 0.044715 z^3).
        return z / (1.0 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))


@triton.jit
def apply(epilogue, c, j, rows, cols, in_m, in_n, acc, ok):
    """Apply the epilogue to a block of the j-th result, store the block, and return what is stored.

    rows, cols: of the block, in C; in_m, in_n: those to store. ok: 0 if a wait for the block was given up.
    """
    mask = in_m[:, None] & in_n[None, :]
    rows = rows.to(tl.int64)
    if epilogue.bias is not None:
        bias = pick(epilogue.bias, j, c.COUNT)
        biased = in_m if epilogue.PER_ROW else in_n
        if c.COUNT > MOST_UNROLLED:
            biased = biased & (bias.to(tl.int64) != 0)
        if epilogue.PER_ROW:
            acc += tl.load(bias + rows, mask=biased, other=0.0).to(tl.float32)[:, None]
        else:
            acc += tl.load(bias + cols, mask=biased, other=0.0).to(tl.float32)[None, :]
    rows = rows[:, None]
    cols = cols.to(tl.int64)[None, :]
    if epilogue.residual is not None:
        added = epilogue.residual.ptr[0] + rows * epilogue.residual.stride_m[0] + cols * epilogue.residual.stride_n[0]
        acc += tl.load(added, mask=mask, other=0.0).to(tl.float32)
    acc = or_nan(acc, ok)
    # Offsets are added to a pointer one by one: a sum of both would be a number for each element.
    rows = rows * stride_of(c.stride_m, j, c.COUNT, c.UNIT == 0)
    cols = cols * stride_of(c.stride_n, j, c.COUNT, c.UNIT == 1)
    ptr = pick(c.ptr, j, c.COUNT)
    dtype: tl.constexpr = ptr.dtype.element_ty
    if epilogue.z is not None:
        tl.store(pick(epilogue.z, j, c.COUNT) + rows + cols, acc.to(dtype), mask=mask)
    if epilogue.GATED:
        is_up = mask & (j != 0)
        if epilogue.z is None:
            gate = tl.load(ptr + rows + cols, mask=is_up, other=0.0).to(tl.float32)
            acc = tl.where(j != 0, activated(gate, epilogue.ACTIVATION) * acc, acc)
        else:
            gate = tl.load(epilogue.z[0] + rows + cols, mask=is_up, other=0.0).to(tl.float32)
            acc = activated(gate, epilogue.ACTIVATION) * acc
            mask = is_up
    elif epilogue.ACTIVATION != "":
        acc = activated(acc, epilogue.ACTIVATION)
    result = acc.to(dtype)
    tl.store(ptr + rows + cols, result, mask=mask)
    return result


@triton.jit
def store_tile(epilogue, c, j, N, row, col, left, acc, ok, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Apply the epilogue to the first `left` rows of a tile of the j-th result, N columns wide, and store them."""
    if epilogue.GATED:
        tl.debug_barrier()
    _store_in_parts(epilogue, c, j, N, row, col, left, acc, ok, BLOCK_M, BLOCK_N, BLOCK_N)


@triton.jit
def _store_in_parts(
    epilogue, c, j, N, row, col, left, acc, ok, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLS: tl.constexpr
):
    # A quarter of the columns at a time: a thread has too few registers for a tile, its z and the activation's terms.
    if epilogue.ACTIVATION == "" or COLS <= PART_COLUMNS or COLS * 4 <= BLOCK_N:
        offs_m = tl.arange(0, BLOCK_M)
        offs_n = col + tl.arange(0, COLS)
        apply(epilogue, c, j, row + offs_m, offs_n, offs_m < left, offs_n < N, acc, ok)
    else:
        first, second = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, COLS // 2)), (0, 2, 1)))
        _store_in_parts(epilogue, c, j, N, row, col, left, first, ok, BLOCK_M, BLOCK_N, COLS // 2)
        _store_in_parts(epilogue, c, j, N, row, col + COLS // 2, left, second, ok, BLOCK_M, BLOCK_N, COLS // 2)
