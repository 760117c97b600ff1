"""Layout of an op's data and signals in a half of an arena, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .signal import FIRST_SLOT

# Alignment of regions: a cache line.
_LINE_BYTES = 64


def pitch_of(cols: int, dtype: torch.dtype) -> int:
    """Return the pitch of an arena row in elements: `cols` rounded up to 16 bytes, so that every row is aligned."""
    per_16_bytes = 16 // dtype.itemsize
    return -(-cols // per_16_bytes) * per_16_bytes


def aligned(num_bytes: int) -> int:
    """Round `num_bytes` up to the alignment of regions."""
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES


@dataclass(frozen=True)
class Region:
    """Rows of a matrix in a half.

    row: the first row, counted from the half's start in rows of this pitch. pitch: elements from one row to the next.
    slot: the first signal. There is one for every `piece` rows, or one for every tile if `piece` is 0.
    """

    row: int
    pitch: int
    slot: int
    piece: int


class Layout:
    """Space and signals that an op takes in a half, region by region."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Give all regions back."""
        self.half_bytes, self.slots = 0, FIRST_SLOT.value

    def take(self, num_bytes: int, slots: int = 1) -> tuple[int, int]:
        """Return the offset of the next `num_bytes`, and the first of the next `slots` slots."""
        offset, slot = self.half_bytes, self.slots
        self.half_bytes, self.slots = aligned(offset + num_bytes), slot + slots
        return offset, slot

    def region(self, rows: int, cols: int, dtype: torch.dtype, *, slots: int, piece: int = 0) -> Region:
        """Return the next region, of `rows` rows with `cols` elements each."""
        pitch = pitch_of(cols, dtype)
        row_bytes = max(1, pitch * dtype.itemsize)
        # Kernels count rows from the half's start.
        row = -(-self.half_bytes // row_bytes)
        _, slot = self.take(row * row_bytes - self.half_bytes + rows * pitch * dtype.itemsize, slots)
        return Region(row, pitch, slot, piece)
