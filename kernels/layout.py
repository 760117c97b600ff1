"""Where an op's data and signals lie in a half of an arena, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .signal import FIRST_SLOT

# Regions begin at multiples of this, a cache line.
_LINE_BYTES = 64


def pitch_of(cols: int, dtype: torch.dtype) -> int:
    """Elements from one arena row to the next: `cols` rounded up to 16 bytes, so that every row starts aligned."""
    per_16_bytes = 16 // dtype.itemsize
    return -(-cols // per_16_bytes) * per_16_bytes


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to where the next region may begin."""
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES


@dataclass(frozen=True)
class Region:
    """Rows of a matrix in a half.

    row: the first one, counted from the half's beginning in rows of this pitch. pitch: elements from one row to the
    next. slot: the first signal; there is one for every `piece` rows, or, with a piece of 0, one for every tile.
    """

    row: int
    pitch: int
    slot: int
    piece: int


class Layout:
    """What an op needs of a half and of the signals, region by region."""

    def __init__(self) -> None:
        self.half_bytes, self.slots = 0, FIRST_SLOT.value

    def take(self, num_bytes: int, slots: int = 1) -> tuple[int, int]:
        """The offset of the next `num_bytes`, and the first of so many slots."""
        offset, slot = self.half_bytes, self.slots
        self.half_bytes, self.slots = aligned(offset + num_bytes), slot + slots
        return offset, slot

    def region(self, rows: int, cols: int, dtype: torch.dtype, *, slots: int, piece: int = 0) -> Region:
        """The next `rows` rows of `cols` elements."""
        pitch = pitch_of(cols, dtype)
        row_bytes = max(1, pitch * dtype.itemsize)
        # Kernels count rows from the half's beginning.
        row = -(-self.half_bytes // row_bytes)
        _, slot = self.take(row * row_bytes - self.half_bytes + rows * pitch * dtype.itemsize, slots)
        return Region(row, pitch, slot, piece)
