"""Matmul + reduce-scatter, and matmul + one-shot all-reduce: the first kernel of both.

The kernel computes partial[M, N] = a_shard_k [M, K_r] @ b_shard_k [K_r, N] tile by tile, rounds once to the wire dtype,
and stores into this rank's region of the owner's half. Tiles of the next rank come first and the own rows last, so no
two ranks store to one owner at a time. If there are few rows, a tile has rows of several owners: else every owner's
tiles would read all of b. This kernel waits for nothing: the sum is another kernel, `reduce`, which waits.

The last program to end signals every owner, once. A signal for each tile would have the program stand in a fence at
system scope, a round trip to the peers of 1 to 2 us, after every tile. Nothing would be gained: the sum begins when the
own kernel has ended, and then the peers' tiles are there or about to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .blocks import MOST_UNROLLED, Blocks, pick
from .cores import chosen
from .descriptors import fitted_to, read_by_all, whole_leaves
from .launch import Channel, Config, Memo, in_16_bytes, options
from .loading import Started, launch
from .matmul import locate_in_chunks, locate_whole, matmul_tiles
from .operands import LaunchParams, Left, Right, Scales, Tiles, a_of_term, b_of_term, left_of, right_of, tiles_of
from .prepared import prepares
from .scales import scale_columns
from .signal import FIRST_SLOT, Link, begin, cdiv, enter, finish, half


class Partial(NamedTuple):
    """Context of the hooks: the link, the operands, the owners' row table, and the place of a region in a half.

    region_row: first row of this rank's region in an owner's half. With SWITCH: number of rows of a region. Tiles then
    stay in the own half, in a region for each owner, where the switch adds them. JOINED: a tile may have rows of more
    than one owner. END: as in `Link`.
    """

    link: Link
    a: Left
    b: Right
    tiles: Tiles
    table: tl.tensor
    M: tl.tensor
    region_row: tl.tensor
    pitch: tl.tensor
    scales: Scales | None
    SWITCH: tl.constexpr
    JOINED: tl.constexpr
    END: tl.constexpr


@triton.jit
def locate_own_chunk_last(ctx, tile):
    """Return the tile-th tile, with tiles cut at owners, own rows last: a LOCATE hook."""
    num_tiles_n = cdiv(ctx.b.N[0], ctx.tiles.BLOCK_N)
    return locate_in_chunks(tile, ctx.table, ctx.link.rank + 1, num_tiles_n, ctx.link.group.WORLD_SIZE, ctx.tiles)


@triton.jit
def store_part(ctx, dst, row, col, tile, partial):
    """Store a tile in a region of rank `dst`'s half, or of the own one (SWITCH).

    row, col: the region's first row, and the tile's column in the region.
    """
    offs_m = tl.arange(0, ctx.tiles.BLOCK_M)
    offs_n = tl.arange(0, ctx.tiles.BLOCK_N)
    mask = (offs_m < tile.rows - tile.row)[:, None] & (offs_n < ctx.b.N[0] - tile.col)[None, :]
    rows = (row + tile.row + offs_m).to(tl.int64)
    base = half(ctx.link, ctx.link.rank if ctx.SWITCH else dst, partial.dtype)
    tl.store(base + rows[:, None] * ctx.pitch + (col + offs_n)[None, :], partial, mask=mask)


@triton.jit
def scaled_term(ctx, tile, i, part):
    """Return the i-th term's float8 product times the scales of its rows and columns."""
    offs_m = tl.arange(0, ctx.tiles.BLOCK_M)
    a_scale = pick(ctx.scales.a, i, ctx.b.COUNT) + tile.begin + tile.row
    scale = tl.load(a_scale + offs_m, mask=offs_m < tile.rows - tile.row, other=0.0)
    b_scale = pick(ctx.scales.b, i, ctx.b.COUNT)
    return scale_columns(part * scale[:, None], b_scale, tile.col, ctx.b.N[0], ctx.tiles.BLOCK_N)


@triton.jit
def rounded(ctx, tile, acc):
    """Return a tile, scaled if float8, rounded to the wire dtype; a subtree stays float32."""
    if ctx.tiles.LEAVES > 0:
        return acc
    elif ctx.scales is None:
        return acc.to(ctx.a.ptr[0].dtype.element_ty)
    else:
        if ctx.b.COUNT == 1 and ctx.tiles.SCALES == "rows":
            acc = scaled_term(ctx, tile, 0, acc)
        return acc.to(ctx.scales.out.dtype.element_ty)


@triton.jit
def _store_to_owner(ctx, tile, packed, acc):
    row = tile.chunk * ctx.region_row if ctx.SWITCH else ctx.region_row
    store_part(ctx, tile.chunk, row, tile.col, tile, rounded(ctx, tile, acc))


@triton.jit
def _store_to_owners(ctx, tile, packed, acc):
    # Each row goes to its owner's half.
    partial = rounded(ctx, tile, acc)
    rows = tile.row + tl.arange(0, ctx.tiles.BLOCK_M)
    cols = tile.col + tl.arange(0, ctx.tiles.BLOCK_N)
    owner = tl.full((ctx.tiles.BLOCK_M,), 0, tl.int32)
    begin = tl.full((ctx.tiles.BLOCK_M,), 0, tl.int32)
    for i in range(1, ctx.link.group.WORLD_SIZE):
        first = tl.load(ctx.table + i)
        owner = tl.where(rows >= first, i, owner)
        begin = tl.where(rows >= first, first, begin)
    base = half(ctx.link, owner, partial.dtype) + (ctx.region_row + rows - begin).to(tl.int64) * ctx.pitch
    tl.store(base[:, None] + cols[None, :], partial, mask=(rows < ctx.M)[:, None] & (cols < ctx.b.N[0])[None, :])


@triton.jit
def _store_to_all(ctx, tile, packed, acc):
    partial = rounded(ctx, tile, acc)
    # Not unrolled: the addresses of eight arenas at once take registers.
    for i in range(1, ctx.link.group.WORLD_SIZE + 1):
        dst = (ctx.link.rank + i) % ctx.link.group.WORLD_SIZE
        store_part(ctx, dst, ctx.region_row, tile.col, tile, partial)


@triton.jit(do_not_specialize=["rank", "fingerprint", "region_row", "num_tiles"])
def _matmul_scatter_kernel(
    a, b, scales, tiles, table, group, rank, fingerprint: tl.int64, region_row, num_tiles, M, pitch,
    TO_ALL: tl.constexpr, SWITCH: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Enter the epoch, multiply, store every tile into its owner's half, and at the end signal every owner.

    TO_ALL: store to all ranks. SWITCH: store into the own half. JOINED: a tile may have several owners.
    Waits for nothing.
    """
    epoch = begin(group, rank)
    pid = tl.program_id(0)
    # The last program has no more tiles than any other, and often one less.
    if pid == tl.num_programs(0) - 1:
        enter(Link(group, rank, epoch, fingerprint, 0))
    matmul_tiles(
        Partial(
            Link(group, rank, epoch, fingerprint, 0), a, b, tiles, table, M, region_row, pitch, scales, SWITCH,
            JOINED, 0,
        ),
        pid, tl.num_programs(0), num_tiles,
        locate_whole if TO_ALL or JOINED else locate_own_chunk_last, a_of_term, b_of_term,
        _store_to_all if TO_ALL else (_store_to_owners if JOINED else _store_to_owner), b.COUNT,
        scaled_term if tiles.SCALES == "rows" and b.COUNT > 1 else None,
    )  # fmt: skip
    finish(Link(group, rank, epoch, fingerprint, 0), tl.num_programs(0), FIRST_SLOT)


class MatmulScatter:
    """Launcher of a scatter: the tiles of a [M, K] @ b [K, N], or of a sum of such terms, go to their owners.

    Tiles go into this rank's region, of `region_rows` rows, of the owners' halves; with `to_all`, of every rank's half.
    switch: into the owners' regions of the own half, from which the switch adds them. joined: a tile may have rows of
    several owners.
    """

    def __init__(
        self, op: int, sizes: tuple[int, ...], *, region_rows: int, pitch: int, to_all: bool, config: Config,
        scales: str = "", leaves: int = 0, switch: bool = False, joined: bool = False,
    ) -> None:  # fmt: skip
        assert switch + to_all + joined < 2
        self._switch, self._joined = switch, joined
        self._op, self._sizes, self._region_rows, self._pitch, self._leaves = op, sizes, region_rows, pitch, leaves
        self._to_all, self._config, self._scales = to_all, config, scales
        self._memo = Memo()

    @prepares
    def __call__(
        self, channel: Channel, lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor], table: torch.Tensor,
        scales: Scales | None = None, arenas: tuple[torch.Tensor, ...] = (),
    ) -> Started | None:  # fmt: skip
        """Launch the kernel; lefts, rights: a and b of each term. arenas: the channel's, for a core that takes them."""
        assert len(lefts) == 1 or not self._to_all
        layouts: list[object] = [lefts[0].dtype]
        for x in (*lefts, *rights):
            layouts += x.shape, x.stride(), x.data_ptr() % 16
        key = tuple(layouts)
        known = self._memo.get(key) or self._memo.keep(key, self._find_out(lefts, rights, scales))
        if known.core is not None:
            started: Started | None = known.core.scatter(
                known,
                channel,
                lefts[0],
                rights[0],
                table,
                scales,
                arenas,
                op=self._op,
                sizes=self._sizes,
                region_rows=self._region_rows,
                pitch=self._pitch,
            )
            return started
        # Not flattened: the place of a tile would be carried through the next one's contraction, in four instructions
        # more a step.
        group = channel.groups.get(self._op) or channel.group(self._op)
        blocks = Blocks(len(lefts), lefts[0].device) if len(lefts) > MOST_UNROLLED.value else None
        if blocks is not None and scales is not None:
            scales = scales._replace(a=blocks.addresses(scales.a), b=blocks.addresses(scales.b))
        return launch(_matmul_scatter_kernel, (known.config.programs,), blocks)(
            left_of(lefts, known.a_by, known.config, blocks), right_of(rights, known.b_by, known.config, blocks),
            scales, known.tiles,
            table, group, channel.rank, channel.fingerprint, self._region_rows * (1 if self._switch else channel.rank),
            known.num_tiles, lefts[0].shape[0], self._pitch, self._to_all, self._switch, self._joined, **known.options,
        )  # fmt: skip

    def _find_out(
        self, lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor], scales: Scales | None
    ) -> LaunchParams:  # fmt: skip
        # Owners count tiles, so a rank cannot choose the rows and columns of a tile by itself.
        leaves, lengths = self._leaves, [a.shape[1] for a in lefts]
        config = fitted_to(whole_leaves(self._config, lengths, leaves), lefts, rights)
        loose = len(lefts) > MOST_UNROLLED.value and not leaves and not in_16_bytes(*lefts, *rights)
        if loose and lefts[0].element_size() == 2:
            # Strides from memory take registers, which elements with an address each need too.
            config = replace(config, block_k=min(config.block_k, config.loose_block_k // 2))
        chunks = lefts[0].shape[:1] if self._to_all or self._joined else self._sizes
        num_tiles = sum(-(-rows // config.block_m) for rows in chunks) * -(-rights[0].shape[1] // config.block_n)
        a_by, b_by = read_by_all(lefts, config), read_by_all(rights, config)
        tiles = tiles_of(config, flatten=False, scales=self._scales, leaves=leaves, lengths=lengths)
        core = chosen(
            config, lefts, a_by, b_by, scales=self._scales, leaves=leaves, switch=self._switch,
            owners=self._to_all or self._joined, sent=lefts[0].dtype if scales is None else scales.out.dtype,
        )  # fmt: skip
        return LaunchParams(config, a_by, b_by, tiles, num_tiles, options(config, a_by, b_by), core=core)
