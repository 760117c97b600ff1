"""The one matmul of this package: a persistent tile loop with four hooks.

c[M, N] = a[M, K] @ b[K, N], accumulated in float32. A fused kernel is this loop plus its hooks:

    LOCATE(ctx, tile) -> Tile         place of a tile; sets the order: own chunk first or last, swizzled inside a chunk
    A_CHUNK(ctx, tile, i, packed) -> Operand
                                      i-th chunk of A's contraction for a tile; waits for the chunk if it travels
    B_CHUNK(ctx, tile, i) -> Columns  columns of the B that belongs to the chunk
    STORE(ctx, tile, packed, acc)     stores a finished tile; signals the tile if a rank waits for it

`packed` is one number: a tile's column, its number of rows, and whether all its waits succeeded. With tiles and
contraction in one loop, all that the store needs is carried through every step from the tile's first loads on. A tile
whose wait was given up is stored as NaN: missing data must not pass for a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .blocks import MOST_UNROLLED, Blocks
from .contraction import multiply, sum_as_tree
from .cores import chosen
from .descriptors import fitted_to, read_by_all, whole_leaves
from .epilogue import TileEpilogue, store_tile
from .launch import Config, flattened, options
from .loading import Started, launch
from .operands import Left, Outputs, Right, Scales, Tiles, a_of_term, b_of_term, left_of, outputs_of, right_of, tiles_of
from .prepared import prepares
from .signal import cdiv


class Tile(NamedTuple):
    """A tile at (row, col) of a chunk, which has `rows` rows and begins at row `begin` of C; `index`: its tile row."""

    chunk: tl.tensor
    begin: tl.tensor
    index: tl.tensor
    row: tl.tensor
    rows: tl.tensor
    col: tl.tensor


@triton.jit
def pack(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return a tile's column, its number of rows (1 or more), and a set ok bit (BLOCK_M) in one number.

    The number fits in an int32 if BLOCK_M <= BLOCK_N: with two ranks or more, each has less than 2**30 columns.
    """
    return tile.col // BLOCK_N * (2 * BLOCK_M) + BLOCK_M + min(tile.rows - tile.row, BLOCK_M) - 1


@triton.jit
def unpack(packed, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr):
    """Return (column, rows, 0 if not ok) of a packed number; ALIGNED: rows are always a multiple of 16."""
    rows = packed % BLOCK_M + 1
    if ALIGNED:
        rows = tl.multiple_of(rows, 16)
    return packed // (2 * BLOCK_M) * BLOCK_N, rows, packed & BLOCK_M


@triton.jit
def swizzle(tile, num_tiles_m, num_tiles_n, GROUP_M: tl.constexpr):
    """Return (pid_m, pid_n) of a tile: in columns of GROUP_M tile rows, consecutive tiles share operands in L2."""
    per_group = GROUP_M * num_tiles_n
    first_m = tile // per_group * GROUP_M
    group_m = min(num_tiles_m - first_m, GROUP_M)
    in_group = tile % per_group
    return first_m + in_group % group_m, in_group // group_m


@triton.jit
def locate_in_chunks(tile, table, first, num_tiles_n, WORLD_SIZE: tl.constexpr, tiles):
    """Return the tile-th tile, with chunks of rows visited in the order first, first + 1, .. around the ranks.

    table: row offsets of the chunks (int32, device memory), world_size + 1 of them. Tiles do not straddle chunks.
    """
    chunk = first % WORLD_SIZE
    begin = tl.load(table + chunk)
    rows = tl.load(table + chunk + 1) - begin
    left = tile
    for _ in tl.static_range(1, WORLD_SIZE):
        in_chunk = cdiv(rows, tiles.BLOCK_M) * num_tiles_n
        if left >= in_chunk:
            left -= in_chunk
            chunk = (chunk + 1) % WORLD_SIZE
            begin = tl.load(table + chunk)
            rows = tl.load(table + chunk + 1) - begin
    pid_m, pid_n = swizzle(left, cdiv(rows, tiles.BLOCK_M), num_tiles_n, tiles.GROUP_M)
    return Tile(chunk, begin, pid_m, pid_m * tiles.BLOCK_M, rows, pid_n * tiles.BLOCK_N)


@triton.jit
def _matmul_tile(
    ctx, index, LOCATE: tl.constexpr, A_CHUNK: tl.constexpr, B_CHUNK: tl.constexpr, STORE: tl.constexpr,
    NUM_K_CHUNKS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    tile = LOCATE(ctx, index)
    acc = tl.full((ctx.tiles.BLOCK_M, ctx.tiles.BLOCK_N), 0.0, tl.float32)
    packed = pack(tile, ctx.tiles.BLOCK_M, ctx.tiles.BLOCK_N)
    if ctx.tiles.LEAVES > 0:
        # With several chunks, the terms of a sum, each leaf asks for its own chunks.
        a = A_CHUNK(ctx, tile, 0, packed)
        packed = a.packed
        acc = sum_as_tree(ctx, tile, a, packed, 0, A_CHUNK, B_CHUNK, NUM_K_CHUNKS, ctx.tiles.LEAVES)
    else:
        for i in range(0, NUM_K_CHUNKS):
            # `packed` goes through the waits: else the compiler would carry its parts to the store and pack them there.
            a = A_CHUNK(ctx, tile, i, packed)
            packed = a.packed
            if SCALE is None:
                acc = multiply(acc, a, tile, B_CHUNK(ctx, tile, i), ctx.a.BY, ctx.b.BY, ctx.tiles, NUM_K_CHUNKS > 1)
            else:
                part = tl.full((ctx.tiles.BLOCK_M, ctx.tiles.BLOCK_N), 0.0, tl.float32)
                part = multiply(part, a, tile, B_CHUNK(ctx, tile, i), ctx.a.BY, ctx.b.BY, ctx.tiles, NUM_K_CHUNKS > 1)
                acc += SCALE(ctx, tile, i, part)
    STORE(ctx, tile, packed, acc)


@triton.jit
def matmul_tiles(
    ctx, first, num_programs, end,
    LOCATE: tl.constexpr, A_CHUNK: tl.constexpr, B_CHUNK: tl.constexpr, STORE: tl.constexpr,
    NUM_K_CHUNKS: tl.constexpr, SCALE: tl.constexpr = None,
):  # fmt: skip
    """Compute the tiles first, first + num_programs, .. below `end` of a matmul, in the order of LOCATE.

    ctx: context of the hooks, with a, b and tiles. With FLATTEN the compiler makes one loop of tiles and contraction:
    the first loads of the next tile are under way while this tile is stored.

    SCALE(ctx, tile, i, part): returns the i-th chunk's product times its scales, if each chunk has its own. The product
    is in registers beside the sum, so values that all tiles share are not.
    """
    if ctx.tiles.FLATTEN:
        for index in tl.range(first, end, num_programs, flatten=True):
            _matmul_tile(ctx, index, LOCATE, A_CHUNK, B_CHUNK, STORE, NUM_K_CHUNKS, SCALE)
    elif SCALE is None:
        for index in range(first, end, num_programs):
            _matmul_tile(ctx, index, LOCATE, A_CHUNK, B_CHUNK, STORE, NUM_K_CHUNKS, SCALE)
    else:
        for index in tl.range(first, end, num_programs, disable_licm=True):
            _matmul_tile(ctx, index, LOCATE, A_CHUNK, B_CHUNK, STORE, NUM_K_CHUNKS, SCALE)


class Whole(NamedTuple):
    """Context of the plain matmul, with A and C whole and local, and only block scales. END: as in `Link`."""

    a: Left
    b: Right
    c: Outputs
    epilogue: TileEpilogue
    scales: Scales | None
    tiles: Tiles
    M: tl.tensor
    END: tl.constexpr


@triton.jit
def locate_among(tile, M, num_tiles_n, tiles):
    """Return the tile-th tile of a C [M, ..] that is one chunk, in swizzled order."""
    pid_m, pid_n = swizzle(tile, cdiv(M, tiles.BLOCK_M), num_tiles_n, tiles.GROUP_M)
    return Tile(0, 0, pid_m, pid_m * tiles.BLOCK_M, M, pid_n * tiles.BLOCK_N)


@triton.jit
def locate_whole(ctx, tile):
    """Return the tile-th tile of a C that is one chunk: a LOCATE hook."""
    return locate_among(tile, ctx.M, cdiv(ctx.b.N[0], ctx.tiles.BLOCK_N), ctx.tiles)


@triton.jit
def _store_whole(ctx, tile, packed, acc):
    left = tile.rows - tile.row
    store_tile(
        ctx.epilogue, ctx.c, 0, ctx.b.N[0], tile.row, tile.col, left, acc, 1, ctx.tiles.BLOCK_M, ctx.tiles.BLOCK_N
    )  # fmt: skip


@triton.jit
def _matmul_kernel(a, b, c, epilogue, scales, tiles, M):
    """Compute the plain matmul, or a sum of several. Waits for nothing; signals nothing."""
    num_tiles = cdiv(M, tiles.BLOCK_M) * cdiv(b.N[0], tiles.BLOCK_N)
    # Built in the call, as a tuple that is assigned to a name loses its constants.
    matmul_tiles(
        Whole(a, b, c, epilogue, scales, tiles, M, 0), tl.program_id(0), tl.num_programs(0), num_tiles,
        locate_whole, a_of_term, b_of_term, _store_whole, b.COUNT,
    )  # fmt: skip


@prepares
def matmul(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, epilogue: TileEpilogue, *, config: Config,
    leaves: int = 0, more: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> Started | None:  # fmt: skip
    """Compute c [M, N] = a [M, K] @ b [K, N] and the epilogue, for any strides, without communication.

    more: further a and b whose products are added. leaves: as in `Tiles`.
    """
    lefts, rights = zip((a, b), *more, strict=True)
    lengths = [a.shape[1] for a in lefts]
    config = fitted_to(whole_leaves(config, lengths, leaves), lefts, rights, results=(c,))
    a_by, b_by = read_by_all(lefts, config), read_by_all(rights, config)
    core = chosen(config, lefts, a_by, b_by, leaves=leaves)
    if core is not None:
        started: Started | None = core.matmul(a, b, c, epilogue, a_by, b_by, config)
        return started
    flatten = flattened(config, a_by, b_by) and not leaves
    blocks = Blocks(len(lefts), a.device) if len(lefts) > MOST_UNROLLED.value else None
    return launch(_matmul_kernel, (config.programs,), blocks)(
        left_of(lefts, a_by, config, blocks), right_of(rights, b_by, config, blocks), outputs_of(c), epilogue, None,
        tiles_of(config, flatten=flatten, leaves=leaves, lengths=lengths), a.shape[0], **options(config, a_by, b_by),
    )  # fmt: skip
