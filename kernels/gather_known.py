"""Launch parameters of the gathering matmul, worked out once for each layout of the operands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton.language as tl

from .descriptors import fitted_to, read_by_all, read_gathered_by, whole_leaves
from .launch import Channel, Config, fitted, flattened, in_16_bytes, options
from .operands import Epilogue, Tiles, tiles_of, unit_of


def own_in_place(a: torch.Tensor) -> bool:
    """Return whether the kernel can read this shard in place: its rows must be contiguous, as in an arena."""
    return a.stride(1) == 1


def _limit(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, pitch: int, aligned: bool, described: bool) -> str:
    # The register limit that is known to suffice for a kernel that gathers rows.
    whole = aligned and pitch % 16 == 0 and in_16_bytes(b, c) and not any(n % 16 for n in a.stride() if n != 1)
    # Reading by descriptors needs no further alignment.
    if (described or whole) and c.stride(1) == 1 and c.shape[1] % 16 == c.stride(0) % 16 == c.data_ptr() % 16 == 0:
        return "gather"
    return "gather transposed" if whole and c.stride(0) == 1 else ""


class Known(NamedTuple):
    """Launch parameters: how operands are read, the tile, the programs, and the compiler's options."""

    config: Config
    a_by: str
    b_by: str
    arena: tuple[int, int]
    tiles: Tiles
    flags: tuple[tl.constexpr, ...]
    options: dict[str, int]
    grid: tuple[int]
    counts: tuple[int, int, int]
    pushers: int
    units: tuple[tl.constexpr, tl.constexpr, tl.constexpr]


@dataclass(frozen=True)
class Plan:
    """A gather of shards of `sizes`, of rows if `on_rows`, else of the contraction.

    pitch: of an arena's rows. scales, leaves: as in `Tiles`. switch: each piece is pushed once, not to each rank.
    """

    sizes: tuple[int, ...]
    on_rows: bool
    pitch: int
    piece_rows: int
    config: Config
    scales: str = ""
    leaves: int = 0
    switch: bool = False

    def known(
        self, channel: Channel, a: torch.Tensor, bs: list[torch.Tensor], cs: list[torch.Tensor], pushed: bool,
        epilogue: Epilogue,
    ) -> Known:  # fmt: skip
        """Return the launch parameters for these operands and results; with `pushed` no program pushes."""
        b, c = bs[0], cs[0]
        M, K, sizes, pitch, config = c.shape[0], b.shape[0], self.sizes, self.pitch, self.config
        on_rows, rank, in_place = self.on_rows, channel.rank, own_in_place(a)
        pieces = -(-a.shape[0] // self.piece_rows) * (1 if self.switch else channel.world_size)
        pushers = 0 if pushed else max(1, min(config.pushers, pieces))
        rows, cols = (M, K) if on_rows else (channel.world_size * M, max(sizes))
        # A chunk that ends inside a block of K would be multiplied with rows of B that belong to the next chunk.
        whole_blocks = on_rows or all(size % config.block_k == 0 for size in sizes)
        aligned = all(size % 16 == 0 for size in sizes)
        config = whole_leaves(config if whole_blocks else replace(config, descriptors=False), [K], self.leaves)
        config = fitted_to(config, *((a, *bs) if in_place else bs), results=cs)
        # The part in the arena may be unaligned too.
        loose_leaves = bool(self.leaves) and K % (16 * self.leaves) != 0
        if not config.descriptors and (pitch % 16 or loose_leaves or (not on_rows and not aligned)):
            config = fitted(config, stored=True, read=False)
        num_tiles = sum(-(-rows // config.block_m) for rows in (sizes if on_rows else (M,)))
        num_tiles *= sum(-(-each.shape[1] // config.block_n) for each in bs)
        a_by, b_by = read_gathered_by(a, rows, cols, config), read_by_all(bs, config)
        flatten = on_rows and flattened(config, a_by, b_by) and not self.leaves
        if epilogue.ACTIVATION.value:
            # Storing an activation takes registers: one loop would keep some of them on the stack.
            limit, flatten = "activated", False
        else:
            limit = _limit(a, b, c, pitch, aligned, config.descriptors) if on_rows and len(bs) == 1 else ""
        rows_aligned = aligned if on_rows else M % 16 == 0
        flags = a_by, in_place, b_by, self.piece_rows, aligned, rows_aligned
        return Known(
            config, a_by, b_by, (rows, cols),
            tiles_of(config, flatten=flatten, scales=self.scales, leaves=self.leaves, lengths=(K,)),
            tuple(map(tl.constexpr, flags)), options(config, a_by, b_by, limit=limit), (config.programs + pushers,),
            (a.shape[0], sum(sizes[:rank]) if on_rows else rank * M, num_tiles), pushers,
            (tl.constexpr(-1), tl.constexpr(unit_of(bs)), tl.constexpr(unit_of(cs))),
        )  # fmt: skip
