"""One rank's share of an op: the product, and the data that travels with its dtype."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from ..sharding.plan import ITEMSIZE, is_float8, made_of

# A gathered float8 row is followed by its scale in SCALE_BYTES (`scaled.SCALE_BYTES`). In mxfp8 there is one scale for
# each BLOCK elements, padded to a multiple of SCALE_BYTES (`scaled.scale_bytes`).
SCALE_BYTES, BLOCK = 16, 32
# Subtrees travel in this dtype.
SUBTREES = "float32"


@dataclass(frozen=True)
class Work:
    """One rank's share of an op: the product [rows, depth] @ [depth, cols], and `moved` elements gathered or reduced.

    - `rows`: 0 for a collective alone.
    - `dtype`: of the operands.
    - `by_depth`: the gathered matrix is cut along the contraction.
    - `tree`: the contraction is added up as a tree, whose subtrees travel in float32.
    - `switch`: the switch may make the sums of an all-reduce by `fused`.
    """

    kind: Literal["gather", "scatter", "all_reduce"]
    rows: int
    cols: int
    depth: int
    moved: int
    num_ranks: int
    dtype: str
    by_depth: bool = False
    tree: bool = False
    switch: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.cols * self.depth

    @property
    def made(self) -> str:
        """Return the dtype of the product."""
        return made_of(self.dtype)

    @property
    def moved_dtype(self) -> str:
        """Return the dtype of the data that travels: an operand, or the terms of a sum."""
        if self.tree and self.kind != "gather":
            return SUBTREES
        return self.dtype if self.kind == "gather" else self.made

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of scales that travel: float8 has some for each row, times the ranks in `by_depth`."""
        if self.kind != "gather" or not is_float8(self.dtype):
            return 0
        parts = self.num_ranks if self.by_depth else 1
        length = ceil(self.depth / parts) if self.dtype == "mxfp8" else 1
        return SCALE_BYTES * ceil(length / (BLOCK * SCALE_BYTES)) * self.rows * parts

    @property
    def moved_bytes(self) -> int:
        return self.moved * ITEMSIZE[self.moved_dtype] + self.scale_bytes

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that a rank sends, ring or direct alike; an all-reduce is two-shot."""
        n, length = self.num_ranks, ceil(self.moved / self.num_ranks)
        share = length * ITEMSIZE[self.moved_dtype] + ceil(self.scale_bytes / n)
        if self.kind == "all_reduce":
            # Then the sums are gathered.
            share += length * ITEMSIZE[self.made]
        return (n - 1) * share
