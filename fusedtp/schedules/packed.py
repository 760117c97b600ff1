"""How float8 rows are gathered where the library multiplies: as bytes, each row with its scale behind its data.

Behind the same signal and in the same collective, so that scales cost no launch and no wait. Where rows are gathered,
each part is a product of its own, or all of them are one. Along the contraction a row has a scale for each rank's part:
products of parts are scaled and added in float32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import trace
from ..scaled import Matrix, Quantized, by_columns
from ..scaled_mm import finish, mm, term
from ..shards import offsets
from .alone import activated
from .verbs import Product


class PackedGather:
    """See `verbs.Gather`; a schedule says how parts travel."""

    # sizes, dim: see `verbs.Verbs`. A rank's part has `rows[r]` rows of `cols[r]` elements.
    def __init__(self, rank: int, sizes: Sequence[int], other: int, dim: int) -> None:
        self._rank, self._sizes, self._dim, self._begins = rank, sizes, dim, offsets(sizes)
        self._rows = [size if dim == 0 else other for size in sizes]
        self._cols = [other if dim == 0 else size for size in sizes]
        self._num_rows = sum(sizes) if dim == 0 else other

    def _parts(self, x: Quantized) -> Iterator[tuple[int, Quantized]]:
        # Every rank's part with its rank, the own one first.
        raise NotImplementedError

    def multiply(self, x: Quantized, products: Sequence[Product]) -> list[Tensor]:
        """The products, part by part."""
        outs: list[Tensor] = []
        # Of what is contracted part by part, in float32.
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
                    # Rows without columns make zeros, with a bias.
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
        """Send this rank's rows."""
        raise NotImplementedError

    def start_beside(self, x: Quantized) -> None:
        """See `verbs.Gather`."""
        self.start(x)

    def whole(self, x: Matrix, out: Tensor | None = None) -> Tensor:
        """A collective's alone."""
        raise NotImplementedError
