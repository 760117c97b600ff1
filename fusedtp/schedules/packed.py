"""Gather of float8 rows for library matmuls: as bytes, with each row's scale behind its data.

A scale travels behind the same signal and in the same collective as its row, so scales cost no launch and no wait. If
rows are gathered, each part is a product of its own, or all parts are one product. Along the contraction a row has a
scale for each rank's part: products of parts are scaled and added in float32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import trace
from ..scaled import Matrix, Quantized, by_columns
from ..scaled_mm import finish, mm, term
from ..shards import offsets
from .local import activated
from .verbs import Product

if TYPE_CHECKING:
    pass


class PackedGather:
    """Base of `verbs.Gather` in float8; a schedule adds how parts travel."""

    # sizes, dim: see `verbs.Verbs`. Rank r's part has `rows[r]` rows of `cols[r]` elements.
    def __init__(self, rank: int, sizes: Sequence[int], other: int, dim: int) -> None:
        self._rank, self._sizes, self._dim, self._begins = rank, sizes, dim, offsets(sizes)
        self._rows = [size if dim == 0 else other for size in sizes]
        self._cols = [other if dim == 0 else size for size in sizes]
        self._num_rows = sum(sizes) if dim == 0 else other

    def _parts(self, x: Quantized) -> Iterator[tuple[int, Quantized]]:
        # Every rank's part with its rank, the own one first.
        raise NotImplementedError

    def multiply(self, x: Quantized, products: Sequence[Product]) -> list[Tensor]:
        outs: list[Tensor] = []
        # Float32 sums of products whose contraction is split over parts.
        wides: dict[int, Tensor] = {}
        for i, each in enumerate(products):
            # Gathered along the contraction, X lies transposed in the parts: X.T @ other is parts @ other.
            across = each.kind == "outer" and self._dim == 0
            shape = (x.shape[1] if across else self._num_rows, each.other.shape[1])
            if self._dim == 1 or across:
                wides[i] = x.data.new_zeros(shape, dtype=torch.float32)
            outs.append(x.new_empty(shape[::-1] if each.transposed else shape))
        for src, part in self._parts(x):
            at = slice(self._begins[src], self._begins[src + 1])
            with trace.span("multiply", src):
                for i, each in enumerate(products):
                    # Rows without columns give zeros, plus a bias.
                    if i not in wides and part.shape[0]:
                        self._put(each, part, at, outs[i])
                    elif i in wides and 0 not in part.shape:
                        left = part if self._dim == 1 else by_columns(part).t()
                        wides[i].add_(term(left, each.other[at]))
        for i, wide in wides.items():
            bias, transposed = products[i].epilogue.bias, products[i].transposed
            # The bias of a transposed result has an element for each of its columns, the product's rows.
            made = finish(wide, products[i].other, bias[:, None] if transposed and bias is not None else bias)
            outs[i].copy_(made.t() if transposed else made)
        return activated(products[0].epilogue, outs)

    @staticmethod
    def _put(product: Product, part: Quantized, at: slice, out: Tensor) -> None:
        bias = product.epilogue.bias
        if product.transposed:
            out[:, at] = mm(product.other.t(), part.t(), bias if bias is None else bias[at])
        else:
            out[at] = mm(part, product.other, bias)

    def start(self, x: Quantized) -> None:
        raise NotImplementedError

    def start_beside(self, x: Quantized) -> None:
        self.start(x)

    def whole(self, x: Matrix, out: Tensor | None = None) -> Tensor:
        """Raise NotImplementedError: only collectives without a matmul use `whole`, and they take no float8."""
        raise NotImplementedError
