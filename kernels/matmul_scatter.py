"""Matmul + reduce-scatter, and matmul + one-shot all-reduce: the first kernel of both.

partial[M, N] = a_shard_k [M, K_r] @ b_shard_k [K_r, N] is computed tile by tile, rounded once to the wire dtype, and
stored straight into this rank's region of the owner's half, with one signal a tile. Tiles of the next rank come first
and the own rows last, so the owners that have waited longest are served first. The sum is `reduce`, a kernel of its
own: it waits, this one does not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .descriptors import fitted_to, read_by
from .launch import MOST_KNOWN, Channel, Config, options
from .loading import launch
from .matmul import (
    Left,
    Right,
    Tiles,
    a_local,
    left_of,
    locate_in_chunks,
    locate_whole,
    matmul_tiles,
    right_of,
    round_to,
    tiles_of,
)
from .signal import FIRST_SLOT, Link, begin, cdiv, enter, half, raise_signal


class Partial(NamedTuple):
    """The hooks' context: the link, the operands, the owners' row table, and where a region lies in a half.

    END: as in `Link`.
    """

    link: Link
    a: Left
    b: Right
    tiles: Tiles
    table: tl.tensor
    M: tl.tensor
    region_row: tl.tensor
    pitch: tl.tensor
    END: tl.constexpr


@triton.jit
def _locate_own_chunk_last(ctx, tile):
    return locate_in_chunks(tile, ctx.table, ctx.link.rank + 1, ctx.b.N, ctx.link.group.WORLD_SIZE, ctx.tiles)


@triton.jit
def _a_local(ctx, tile, i, packed):
    return a_local(ctx, tile.begin + tile.row, packed)


@triton.jit
def _store_to(ctx, dst, tile, partial):
    dtype: tl.constexpr = partial.dtype
    offs_m = tl.arange(0, ctx.tiles.BLOCK_M)
    offs_n = tile.col + tl.arange(0, ctx.tiles.BLOCK_N)
    mask = (offs_m < tile.rows - tile.row)[:, None] & (offs_n < ctx.b.N)[None, :]
    rows = (ctx.region_row + tile.row + offs_m).to(tl.int64)
    tl.store(half(ctx.link, dst, dtype) + rows[:, None] * ctx.pitch + offs_n[None, :], partial, mask=mask)
    # The reduction visits the owner's tiles row by row; a tile's signal has its place in that order.
    index = tile.index * cdiv(ctx.b.N, ctx.tiles.BLOCK_N) + tile.col // ctx.tiles.BLOCK_N
    raise_signal(ctx.link, dst, index + FIRST_SLOT)


@triton.jit
def _store_to_owner(ctx, tile, packed, acc):
    _store_to(ctx, tile.chunk, tile, round_to(acc, ctx.a.ptr.dtype.element_ty, ctx.tiles.UPCAST))


@triton.jit
def _store_to_all(ctx, tile, packed, acc):
    partial = round_to(acc, ctx.a.ptr.dtype.element_ty, ctx.tiles.UPCAST)
    # Not unrolled: the addresses of eight arenas at once take registers.
    for i in range(1, ctx.link.group.WORLD_SIZE + 1):
        _store_to(ctx, (ctx.link.rank + i) % ctx.link.group.WORLD_SIZE, tile, partial)


@triton.jit
def _matmul_scatter_programs(ctx, num_tiles, TO_ALL: tl.constexpr):
    pid = tl.program_id(0)
    enter(ctx.link, pid)
    if TO_ALL:
        matmul_tiles(ctx, pid, tl.num_programs(0), num_tiles, locate_whole, _a_local, _store_to_all, 1)
    else:
        matmul_tiles(ctx, pid, tl.num_programs(0), num_tiles, _locate_own_chunk_last, _a_local, _store_to_owner, 1)


@triton.jit(do_not_specialize=["rank", "fingerprint", "region_row", "num_tiles"])
def _matmul_scatter_kernel(
    a, b, tiles, table, group, rank, fingerprint: tl.int64, region_row, num_tiles, M, pitch, TO_ALL: tl.constexpr
):
    """Multiply, store every tile into its owner's half (TO_ALL: into all), signal each tile. Waits for nothing."""
    _matmul_scatter_programs(
        Partial(Link(group, rank, begin(group, rank), fingerprint, 0), a, b, tiles, table, M, region_row, pitch, 0),
        num_tiles, TO_ALL,
    )  # fmt: skip


class _Known(NamedTuple):
    # What a launch needs, worked out once for operands that are laid out alike.
    config: Config
    a_by: str
    b_by: str
    tiles: Tiles
    num_tiles: int
    options: dict[str, int]


class MatmulScatter:
    """Enters the epoch and stores the tiles of a [M, K] @ b [K, N] into this rank's region, of `region_rows` rows, of
    the owners' halves; with `to_all` of every rank's half.

    What depends on how the operands are laid out is worked out once for each layout, then looked up.
    """

    def __init__(
        self, op: int, sizes: tuple[int, ...], *, region_rows: int, pitch: int, to_all: bool, config: Config,
        upcast: bool,
    ) -> None:  # fmt: skip
        self._op, self._sizes, self._region_rows, self._pitch = op, sizes, region_rows, pitch
        self._to_all, self._config, self._upcast = to_all, config, upcast
        self._known: dict[object, _Known] = {}

    def __call__(self, channel: Channel, a: torch.Tensor, b: torch.Tensor, table: torch.Tensor) -> None:
        """Launch it."""
        key = a.dtype, a.shape, a.stride(), a.data_ptr() % 16, b.shape, b.stride(), b.data_ptr() % 16
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = self._find_out(a, b)
        config = known.config
        # Not flattened: the compiler does not pipeline a loop with a barrier in it, and every tile's signal needs one.
        group = channel.groups.get(self._op) or channel.group(self._op)
        launch(_matmul_scatter_kernel, (config.programs,))(
            left_of(a, known.a_by, config), right_of(b, known.b_by, config), known.tiles, table, group, channel.rank,
            channel.fingerprint, channel.rank * self._region_rows, known.num_tiles, a.shape[0], self._pitch,
            self._to_all, **known.options,
        )  # fmt: skip

    def _find_out(self, a: torch.Tensor, b: torch.Tensor) -> _Known:
        # The owners count tiles, so a rank cannot choose the rows and columns of a tile by itself.
        config, pitch = fitted_to(self._config, a, b), self._pitch
        chunks = a.shape[:1] if self._to_all else self._sizes
        num_tiles = sum(-(-rows // config.block_m) for rows in chunks) * -(-b.shape[1] // config.block_n)
        a_by, b_by = read_by(a, config), read_by(b, config)
        limit = "" if self._to_all else "scatter any" if pitch % 16 else "scatter"
        return _Known(
            config, a_by, b_by, tiles_of(config, flatten=False, upcast=self._upcast), num_tiles,
            options(config, a_by, b_by, limit=limit),
        )  # fmt: skip
