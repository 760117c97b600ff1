"""The one matmul of this package: a persistent tile loop with three hooks.

c[M, N] = a[M, K] @ b[K, N], accumulated in float32. A fused kernel is this loop plus its hooks:

    LOCATE(ctx, tile) -> Tile         where a tile lies; orders them, own chunk first or last, swizzled inside each
    A_CHUNK(ctx, tile, i, packed) -> Operand
                                      where the i-th chunk of A's contraction lies for a tile; waits if it travels
    B_CHUNK(ctx, tile, i) -> Columns  which columns of which B belong to it
    STORE(ctx, tile, packed, acc)     stores a finished tile, and signals it if somebody waits for it

`packed` is a tile's column, its number of rows and whether all its waits succeeded, in one number: where the loops over
tiles and contraction are made one, all that the store needs is carried through every step from the tile's first loads
on. A tile with a wait that was given up is stored as NaN: missing data must not pass for a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .activations import activated
from .contraction import multiply, sum_as_tree
from .descriptors import fitted_to, read_by_all, whole_leaves
from .launch import Config, flattened, options
from .loading import launch
from .operands import (
    NO_MORE,
    Epilogue,
    Left,
    More,
    Result,
    Right,
    Scales,
    Tiles,
    left_of,
    result_of,
    right_of,
    tiles_of,
)
from .signal import cdiv
from .terms import a_of_term, b_of_term, further

# The fewest columns of a tile with an activation that are stored at once: 64 bytes of a row.
PART_COLUMNS = tl.constexpr(32)


class Tile(NamedTuple):
    """A tile of C. It begins at column `col` and at row `row` of `chunk`, which has `rows` rows and begins at row
    `begin` of C; `index` is the number of its tile row in the chunk.
    """

    chunk: tl.tensor
    begin: tl.tensor
    index: tl.tensor
    row: tl.tensor
    rows: tl.tensor
    col: tl.tensor


@triton.jit
def or_nan(x, ok):
    """x, or NaN everywhere if a wait it depends on was given up: missing data must not pass for a result."""
    return tl.where(ok != 0, x, tl.full((), float("nan"), tl.float32).to(x.dtype))


@triton.jit
def empty_sum(mask):
    """-0.0 for each element of mask, as float32: adding it changes no number, where +0.0 would change -0.0."""
    # Of -0.0 itself `tl.full` makes +0.0.
    return tl.full(mask.shape, -(2**31), tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def pack(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """In one number: a tile's column, its number of rows (1 or more), and that it is ok (bit BLOCK_M).

    It fits in an int32 if BLOCK_M <= BLOCK_N: with two ranks or more, each has less than 2**30 columns.
    """
    return tile.col // BLOCK_N * (2 * BLOCK_M) + BLOCK_M + min(tile.rows - tile.row, BLOCK_M) - 1


@triton.jit
def unpack(packed, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr):
    """(column, rows, 0 if not ok) of what `pack` made; ALIGNED if rows are always a multiple of 16."""
    rows = packed % BLOCK_M + 1
    if ALIGNED:
        rows = tl.multiple_of(rows, 16)
    return packed // (2 * BLOCK_M) * BLOCK_N, rows, packed & BLOCK_M


@triton.jit
def swizzle(tile, num_tiles_m, num_tiles_n, GROUP_M: tl.constexpr):
    """(pid_m, pid_n) of a tile: columns of GROUP_M tile rows, so that neighbours in time share operands in L2."""
    per_group = GROUP_M * num_tiles_n
    first_m = tile // per_group * GROUP_M
    group_m = min(num_tiles_m - first_m, GROUP_M)
    in_group = tile % per_group
    return first_m + in_group % group_m, in_group // group_m


@triton.jit
def locate_in_chunks(tile, table, first, num_tiles_n, WORLD_SIZE: tl.constexpr, tiles):
    """The tile-th tile when chunks of rows are visited in the order first, first + 1, .. around the ranks.

    `table` (int32, device memory) holds the chunks' row offsets, world_size + 1 of them. Tiles do not straddle chunks.
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
        # Of several chunks, which are terms of a sum, each leaf asks for its own.
        a = A_CHUNK(ctx, tile, 0, packed)
        packed = a.packed
        acc = sum_as_tree(ctx, tile, a, packed, 0, A_CHUNK, B_CHUNK, NUM_K_CHUNKS, ctx.tiles.LEAVES)
    else:
        for i in range(0, NUM_K_CHUNKS):
            # `packed` goes through the waits: otherwise the compiler would pack at the store and carry the parts until
            # there.
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
    ctx, pid, num_programs, num_tiles,
    LOCATE: tl.constexpr, A_CHUNK: tl.constexpr, B_CHUNK: tl.constexpr, STORE: tl.constexpr,
    NUM_K_CHUNKS: tl.constexpr, SCALE: tl.constexpr = None,
):  # fmt: skip
    """The tiles pid, pid + num_programs, .. of a matmul, in the order that LOCATE gives them.

    With FLATTEN the compiler makes one loop of the tiles' and the contraction's: the first loads of the next tile are
    under way while this one is stored. ctx: the hooks' context, with a, b and tiles.
    SCALE(ctx, tile, i, part): what the i-th chunk of the contraction gives, times its scales, where each has its own.
    A chunk's tile is in registers beside the sum then, and what is the same for all tiles is not kept in others.
    """
    if ctx.tiles.FLATTEN:
        for index in tl.range(pid, num_tiles, num_programs, flatten=True):
            _matmul_tile(ctx, index, LOCATE, A_CHUNK, B_CHUNK, STORE, NUM_K_CHUNKS, SCALE)
    elif SCALE is None:
        for index in range(pid, num_tiles, num_programs):
            _matmul_tile(ctx, index, LOCATE, A_CHUNK, B_CHUNK, STORE, NUM_K_CHUNKS, SCALE)
    else:
        for index in tl.range(pid, num_tiles, num_programs, disable_licm=True):
            _matmul_tile(ctx, index, LOCATE, A_CHUNK, B_CHUNK, STORE, NUM_K_CHUNKS, SCALE)


class Whole(NamedTuple):
    """The plain matmul's context: A and C whole and local; of scales those of blocks. END: as in `Link`."""

    a: Left
    b: Right
    c: Result
    epilogue: Epilogue
    scales: Scales | None
    tiles: Tiles
    M: tl.tensor
    more: More
    END: tl.constexpr


@triton.jit
def bias_at(epilogue, at, mask):
    """The epilogue's bias for those rows or columns, in float32; 0 where the mask says that there are none."""
    return tl.load(epilogue.bias + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def halves(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The left and the right half of its columns."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLS // 2)), (0, 2, 1)))


@triton.jit
def store_rows(c, N, epilogue, tiles, row, col, left, acc, ok):
    """Store the first `left` rows of a tile to C at (row, col), after the epilogue, rounded once; to z what an
    activation is applied to, if it is kept.
    """
    _store_in_parts(c, N, epilogue, tiles, row, col, left, acc, ok, tiles.BLOCK_N)


@triton.jit
def _store_in_parts(c, N, epilogue, tiles, row, col, left, acc, ok, COLS: tl.constexpr):
    # A quarter of the columns at a time: a tile, what is kept of it and an activation's terms are more than a thread
    # has registers for.
    if epilogue.ACTIVATION == "" or COLS <= PART_COLUMNS or COLS * 4 <= tiles.BLOCK_N:
        _store_columns(c, N, epilogue, tiles, row, col, left, acc, ok, COLS)
    else:
        first, second = halves(acc, tiles.BLOCK_M, COLS)
        _store_in_parts(c, N, epilogue, tiles, row, col, left, first, ok, COLS // 2)
        _store_in_parts(c, N, epilogue, tiles, row, col + COLS // 2, left, second, ok, COLS // 2)


@triton.jit
def _store_columns(c, N, epilogue, tiles, row, col, left, acc, ok, COLS: tl.constexpr):
    offs_m = tl.arange(0, tiles.BLOCK_M)
    offs_n = col + tl.arange(0, COLS)
    mask = (offs_m < left)[:, None] & (offs_n < N)[None, :]
    rows = (row + offs_m).to(tl.int64)
    if epilogue.bias is not None:
        if epilogue.PER_ROW:
            acc += bias_at(epilogue, rows, offs_m < left)[:, None]
        else:
            acc += bias_at(epilogue, offs_n, offs_n < N)[None, :]
    acc = or_nan(acc, ok)
    if epilogue.z is not None:
        z_ptrs = epilogue.z + rows[:, None] * c.stride_m + offs_n[None, :].to(tl.int64) * c.stride_n
        tl.store(z_ptrs, acc.to(c.ptr.dtype.element_ty), mask=mask)
    if epilogue.ACTIVATION != "":
        acc = activated(acc, epilogue.ACTIVATION)
    c_ptrs = c.ptr + rows[:, None] * c.stride_m + offs_n[None, :].to(tl.int64) * c.stride_n
    tl.store(c_ptrs, acc.to(c.ptr.dtype.element_ty), mask=mask)


@triton.jit
def locate_among(tile, M, num_tiles_n, tiles):
    """The tile-th tile of a C [M, ..] that is one chunk: plain swizzled order."""
    pid_m, pid_n = swizzle(tile, cdiv(M, tiles.BLOCK_M), num_tiles_n, tiles.GROUP_M)
    return Tile(0, 0, pid_m, pid_m * tiles.BLOCK_M, M, pid_n * tiles.BLOCK_N)


@triton.jit
def locate_whole(ctx, tile):
    """LOCATE for a C that is one chunk."""
    return locate_among(tile, ctx.M, cdiv(ctx.b.N, ctx.tiles.BLOCK_N), ctx.tiles)


@triton.jit
def _store_whole(ctx, tile, packed, acc):
    store_rows(ctx.c, ctx.b.N, ctx.epilogue, ctx.tiles, tile.row, tile.col, tile.rows - tile.row, acc, 1)


@triton.jit
def _matmul_kernel(a, b, c, epilogue, scales, tiles, M, more):
    """The plain matmul. Nobody waits and nobody signals."""
    num_tiles = cdiv(M, tiles.BLOCK_M) * cdiv(b.N, tiles.BLOCK_N)
    # Built in the call: a tuple that is assigned to a name loses its constants.
    matmul_tiles(
        Whole(a, b, c, epilogue, scales, tiles, M, more, 0), tl.program_id(0), tl.num_programs(0), num_tiles,
        locate_whole, a_of_term, b_of_term, _store_whole, 1 + more.COUNT,
    )  # fmt: skip


def matmul(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, epilogue: Epilogue, *, config: Config,
    leaves: int = 0, more: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> None:  # fmt: skip
    """c [M, N] = a [M, K] @ b [K, N], and the epilogue; any strides, no communication. more: further a and b whose
    products are added. leaves: as in `Tiles`.
    """
    terms = [(a, b), *more]
    lefts, rights = [a for a, _ in terms], [b for _, b in terms]
    lengths = [a.shape[1] for a in lefts]
    config = fitted_to(whole_leaves(config, lengths, leaves), *lefts, *rights, results=(c,))
    a_by, b_by = read_by_all(lefts, config), read_by_all(rights, config)
    flatten = flattened(config, a_by, b_by) and not leaves
    launch(_matmul_kernel, (config.programs,))(
        left_of(a, a_by, config), right_of(b, b_by, config), result_of(c), epilogue, None,
        tiles_of(config, flatten=flatten, leaves=leaves, lengths=lengths), a.shape[0],
        further(terms, a_by, b_by, config) if more else NO_MORE, **options(config, a_by, b_by),
    )  # fmt: skip
