"""`decomposed`'s gather of float8, through the arenas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import trace
from ..kernels.layout import aligned
from ..scaled import Quantized, pack_into, packed_bytes, unpacked
from .packed import PackedGather
from .transport import travelling

if TYPE_CHECKING:
    from .decomposed import Decomposed


class DecomposedGather(PackedGather):
    """Gather of float8: on a CPU parts are read in place, on a GPU the copy engine pushes them."""

    def __init__(self, on: Decomposed, sizes: Sequence[int], other: int, dim: int) -> None:
        super().__init__(on.rank, sizes, other, dim)
        self._ws, self._in_blocks = on.ws, on.task.in_blocks
        pairs = zip(self._rows, self._cols, strict=True)
        self._stride = aligned(max(rows * packed_bytes(cols, blocks=self._in_blocks) for rows, cols in pairs))
        self._offset, self._slot = on.layout.take(len(sizes) * self._stride)

    def _part(self, holder: int, src: int) -> Tensor:
        # The bytes of rank src's rows in rank holder's half.
        shape = self._rows[src], packed_bytes(self._cols[src], blocks=self._in_blocks)
        return self._ws.view(holder, self._ws.steps.epoch, self._offset + src * self._stride, shape, torch.uint8)

    def start(self, x: Quantized) -> None:
        ws, steps, own = self._ws, self._ws.steps, self._rank
        mine = self._part(own, own)
        trace.timed("travel", own, pack_into, mine, x)
        with travelling(ws):
            for i in range(1, ws.world_size):
                dst = (own - i) % ws.world_size
                if not ws.in_place:
                    self._part(dst, own).copy_(mine)
                steps.signal(dst, self._slot)

    def _parts(self, x: Quantized) -> Iterator[tuple[int, Quantized]]:
        ws, own = self._ws, self._rank
        yield own, x
        for i in range(1, ws.world_size):
            src = (own + i) % ws.world_size
            ws.steps.wait(src, self._slot)
            yield src, unpacked(self._part(src if ws.in_place else own, src), self._cols[src], x)
