"""All-gather + matmul: c = gather(a) @ b, with the gather hidden behind the matmul.

- Gathering rows: c[M, N] from a_shard [M_r, K], b [K, N]. A tile waits for the pieces of rows that it reads. Tiles have
  rows of one shard, or, if there are few rows, of several: else every shard's tiles would read all of b.
- Gathering the contraction: c[M, N] from a_shard [M, K_r], b [K, N]. A tile visits K chunk by chunk, own first, and
  waits inside its K loop.

Producers are the kernel's first programs (`push`), which store the own rows into the peers' arenas and never wait, or a
kernel or copies issued earlier. The own shard is read in place if its rows are contiguous, else from the own arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .blocks import MOST_UNROLLED, Blocks, entry, pick
from .cores import chosen
from .descriptors import fitted_to, of_arena, of_left, read_by_all, read_gathered_by, whole_leaves
from .epilogue import TileEpilogue, in_table, store_tile
from .launch import Channel, Config, Memo, copy_rows_of, fitted, flattened, options
from .loading import Started, launch
from .matmul import Tile, locate_among, locate_in_chunks, matmul_tiles, unpack
from .operands import (
    Operand,
    Outputs,
    Right,
    Scales,
    Tiles,
    b_of_weight,
    outputs_of,
    right_of,
    tiles_of,
    weight_at,
)
from .prepared import prepares
from .push import LocalRows, push_to_all, received_scale, wait_for_rows
from .scales import scale_bytes, scale_columns
from .signal import FIRST_SLOT, Link, before_descriptor, begin, cdiv, enter, half, leave, wait


class Shard(NamedTuple):
    """The own shard of A, like `Left`, read in place or from the own arena; `arena_desc` reads other ranks' shards."""

    ptr: tl.tensor
    own_desc: tl.tensor
    arena_desc: tl.tensor
    stride_m: tl.tensor
    stride_k: tl.tensor
    cols: tl.tensor
    BY: tl.constexpr
    IN_PLACE: tl.constexpr


class Chunks(NamedTuple):
    """Layout of the shards: offsets, pitch, rows of a piece, and whether lengths and rows are multiples of 16.

    JOINED: a tile may have rows of several shards.
    """

    table: tl.tensor
    pitch: tl.tensor
    PIECE: tl.constexpr
    ALIGNED: tl.constexpr
    ROWS_ALIGNED: tl.constexpr
    JOINED: tl.constexpr


class Gathered(NamedTuple):
    """Context of the hooks.

    PUSHERS: programs that push. skipped_rounds: rounds of tiles that the last PUSHERS other programs skip. END: as in
    `Link`.
    """

    link: Link
    a: Shard
    b: Right
    c: Outputs
    epilogue: TileEpilogue
    tiles: Tiles
    chunks: Chunks
    M: tl.tensor
    skipped_rounds: tl.tensor
    scales: Scales | None
    PUSHERS: tl.constexpr
    END: tl.constexpr


@triton.jit
def tile_columns(ctx):
    """Return the number of columns of tiles of all results, side by side."""
    if ctx.b.COUNT > MOST_UNROLLED:
        return entry(ctx.b.first, ctx.b.COUNT)
    else:
        count = 0
        for i in tl.static_range(ctx.b.COUNT):
            count += cdiv(ctx.b.N[i], ctx.tiles.BLOCK_N)
        return count


@triton.jit
def tile_index(index, num_programs, late_programs, skipped_rounds):
    """Map a work index to a tile, round-robin; the last `late_programs` start `skipped_rounds` rounds later.

    They have no multiprocessor until the pushing programs end.
    """
    return index - min(index // num_programs, skipped_rounds) * late_programs


@triton.jit
def pair_index(index, num_programs):
    """Return the gate's work index of a pair of tiles, and 1 if the tile at `index` is up's, else 0."""
    round_index = index // num_programs
    return round_index // 2 * num_programs + index % num_programs, round_index % 2


@triton.jit
def work_indices(pid, num_programs, late_programs, skipped_rounds, num_tiles, PAIRS: tl.constexpr):
    """Return the first and the end of a program's work indices, num_programs apart; with PAIRS two for each tile."""
    first = pid
    if pid >= num_programs - late_programs:
        first += skipped_rounds * num_programs
    end = num_tiles + skipped_rounds * late_programs
    if PAIRS:
        end = pid + 2 * cdiv(max(end - pid, 0), num_programs) * num_programs
        first = pid + 2 * (first - pid)
    return first, end


@triton.jit
def _beside(ctx, tile, is_up):
    # The gate's tile, or up's tile of the same pair if `is_up`.
    begin = cdiv(ctx.b.N[0], ctx.tiles.BLOCK_N) * ctx.tiles.BLOCK_N
    return Tile(tile.chunk, tile.begin, tile.index, tile.row, tile.rows, tile.col + is_up * begin)


@triton.jit
def _tile_at(ctx, index):
    # The tile, or the pair, at a work index, the columns of tiles to count them by, and 1 for up's tile of a pair.
    num_programs = tl.num_programs(0) - ctx.PUSHERS
    if ctx.epilogue.GATED:
        index, is_up = pair_index(index, num_programs)
        columns = cdiv(ctx.b.N[0], ctx.tiles.BLOCK_N)
    else:
        is_up = 0
        columns = tile_columns(ctx)
    if ctx.PUSHERS > 0:
        index = tile_index(index, num_programs, ctx.PUSHERS, ctx.skipped_rounds)
    return index, columns, is_up


@triton.jit
def locate_own_chunk_first(ctx, index):
    """Return the tile at a work index, with tiles cut at shards, own shard first: a LOCATE hook."""
    index, columns, is_up = _tile_at(ctx, index)
    tile = locate_in_chunks(
        index, ctx.chunks.table, ctx.link.rank, columns, ctx.link.group.WORLD_SIZE, ctx.tiles
    )  # fmt: skip
    return _beside(ctx, tile, is_up) if ctx.epilogue.GATED else tile


@triton.jit
def locate_whole_gathered(ctx, index):
    """Return the tile at a work index of a C that is one chunk: a LOCATE hook."""
    index, columns, is_up = _tile_at(ctx, index)
    tile = locate_among(index, ctx.M, columns, ctx.tiles)
    return _beside(ctx, tile, is_up) if ctx.epilogue.GATED else tile


@triton.jit
def _wait_for_shards(ctx, row, end_row, packed):
    # Wait for rows row .. end_row - 1, at least one, of all shards together: piece by piece, as in `wait_for_rows`.
    src = 0
    more = 1
    while more != 0:
        while tl.load(ctx.chunks.table + src + 1) <= row:
            src += 1
        begin = tl.load(ctx.chunks.table + src)
        piece = (row - begin) // ctx.chunks.PIECE
        ok = wait(ctx.link, src, piece + FIRST_SLOT)
        packed = tl.where(ok != 0, packed, packed & ~ctx.tiles.BLOCK_M)
        row = min(begin + (piece + 1) * ctx.chunks.PIECE, tl.load(ctx.chunks.table + src + 1))
        more = (row < end_row).to(tl.int32)
    return packed


@triton.jit
def _arrived_or_own(ctx, src, tile, packed, arena_row, k_begin, k_len):
    # The tile's rows of rank src's shard: in place, or after a wait in the own half, from row `arena_row` on.
    if ctx.a.BY == "pointers":
        stride = tl.full((), 0, tl.int64) + ctx.chunks.pitch
    else:
        # A descriptor has its own strides.
        stride = 0
    layer = 0
    row = tile.row
    if ctx.tiles.SCALES == "blocks":
        # Arrived rows have their scales behind their data.
        behind = cdiv(k_len, 16) * 16
        scale = half(ctx.link, ctx.link.rank, tl.uint8) + arena_row.to(tl.int64) * ctx.chunks.pitch + behind
        scale_stride = tl.full((), 0, tl.int64) + ctx.chunks.pitch
    else:
        scale = 0
        scale_stride = 0
    if ctx.a.IN_PLACE and src == ctx.link.rank:
        if ctx.a.BY == "pointers":
            stride = tl.full((), 0, tl.int64) + ctx.a.stride_m
            source = ctx.a.ptr + tile.row.to(tl.int64) * ctx.a.stride_m
        else:
            source = ctx.a.own_desc
        if ctx.tiles.SCALES == "blocks":
            scale = ctx.scales.a[0] + tile.row.to(tl.int64) * scale_bytes(ctx.a.cols)
            scale_stride = tl.full((), 0, tl.int64) + scale_bytes(ctx.a.cols)
    else:
        # Waits for: pieces raised by rank src's pushing programs, or after its copies.
        end_row = min(tile.row + ctx.tiles.BLOCK_M, tile.rows)
        if ctx.chunks.JOINED:
            packed = _wait_for_shards(ctx, tile.row, end_row, packed)
        else:
            packed = wait_for_rows(
                ctx.link, src, tile.row, end_row, FIRST_SLOT, packed, ctx.tiles.BLOCK_M, ctx.chunks.PIECE
            )
        if ctx.a.BY == "pointers":
            received = half(ctx.link, ctx.link.rank, ctx.a.ptr.dtype.element_ty)
            source = received + arena_row.to(tl.int64) * ctx.chunks.pitch
        else:
            source = ctx.a.arena_desc
            layer = ctx.link.epoch & 1
            row = before_descriptor(arena_row, packed)
    return Operand(source, stride, 1, layer, row, k_begin, k_len, packed, scale, scale_stride, 0)


@triton.jit
def _row(ctx, tile):
    # The row counted over all chunks. Without the hint, contiguous columns of C are stored one element at a time.
    row = tile.begin + tile.row
    if ctx.chunks.ROWS_ALIGNED:
        row = tl.multiple_of(row, 16)
    return row


@triton.jit
def a_gathered_rows(ctx, tile, i, packed):
    """Return the tile's rows, which have arrived: an A_CHUNK hook. Waits for their pieces."""
    return _arrived_or_own(ctx, tile.chunk, tile, packed, _row(ctx, tile), 0, ctx.b.K[0])


@triton.jit
def a_gathered_contraction(ctx, tile, i, packed):
    """Return the tile's rows of the i-th shard of the contraction, own first: an A_CHUNK hook. Waits for pieces."""
    src = (ctx.link.rank + i) % ctx.link.group.WORLD_SIZE
    k_begin = tl.load(ctx.chunks.table + src)
    k_len = tl.load(ctx.chunks.table + src + 1) - k_begin
    if ctx.chunks.ALIGNED:
        # Without the hint, numbers from a table allow only loads of one element.
        k_begin = tl.multiple_of(k_begin, 16)
        k_len = tl.multiple_of(k_len, 16)
    return _arrived_or_own(ctx, src, tile, packed, src * ctx.M + tile.row, k_begin, k_len)


@triton.jit
def scale_of(ctx, src, tile, arena_row):
    """Return the pointer to the scale of the tile's first row of rank `src`'s shard, and the scales' stride.

    Scales are the given ones in place, or those in the arrived rows, from row `arena_row` of the half on.
    """
    ptr, stride = received_scale(ctx.link, ctx.link.rank, arena_row, ctx.chunks.pitch)
    if ctx.a.IN_PLACE and src == ctx.link.rank:
        ptr = ctx.scales.a[0] + tile.row
        stride = tl.cast(1, tl.int64)
    return ptr, stride


@triton.jit
def _scales_of(ctx, src, tile, arena_row):
    ptr, stride = scale_of(ctx, src, tile, arena_row)
    offs_m = tl.arange(0, ctx.tiles.BLOCK_M)
    return tl.load(ptr + offs_m.to(tl.int64) * stride, mask=offs_m < tile.rows - tile.row, other=0.0)


@triton.jit
def _scaled_chunk(ctx, tile, i, part):
    src = (ctx.link.rank + i) % ctx.link.group.WORLD_SIZE
    return part * _scales_of(ctx, src, tile, src * ctx.M + tile.row)[:, None]


@triton.jit
def _store_gathered_rows(ctx, tile, packed, acc):
    if ctx.tiles.SCALES == "rows":
        acc = acc * _scales_of(ctx, tile.chunk, tile, _row(ctx, tile))[:, None]
    _store_gathered(ctx, tile, packed, acc)


@triton.jit
def _store_gathered(ctx, tile, packed, acc):
    col, left, ok = unpack(packed, ctx.tiles.BLOCK_M, ctx.tiles.BLOCK_N, ctx.chunks.ROWS_ALIGNED)
    if ctx.chunks.ROWS_ALIGNED and ctx.c.UNIT == 0:
        # Contiguous columns are stored 16 bytes at a time. Triton 3.9 forgets the hint, which is on a sum.
        left = left // 16 * 16
    j, begin = weight_at(ctx, col)
    N = pick(ctx.b.N, j, ctx.b.COUNT)
    if ctx.tiles.SCALES == "rows":
        acc = scale_columns(acc, pick(ctx.scales.b, j, ctx.b.COUNT), col - begin, N, ctx.tiles.BLOCK_N)
    store_tile(
        ctx.epilogue, ctx.c, j, N, _row(ctx, tile), col - begin, left, acc, ok, ctx.tiles.BLOCK_M, ctx.tiles.BLOCK_N
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "fingerprint", "num_rows", "dst_row", "num_tiles", "skipped_rounds"])
def _gather_matmul_kernel(
    a, b, c, epilogue, scales, tiles, chunks, group, rank, fingerprint: tl.int64, num_rows, dst_row, num_tiles,
    skipped_rounds, M, PUSHERS: tl.constexpr, CONTRACTION: tl.constexpr, LAST: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, SWITCH: tl.constexpr,
):  # fmt: skip
    """Push the own shard in programs 0 .. PUSHERS - 1, and multiply in the others.

    Pushing programs signal each piece; with SWITCH they store to all ranks at once. The kernel enters the epoch if
    PUSHERS > 0, and ends the epoch if LAST. The op's first region holds the gathered rows: the own shard's `num_rows`
    begin at its row `dst_row`, and pieces have slots from FIRST_SLOT on. `num_tiles`,
    `skipped_rounds`: see `work_indices`.

    Waits for: pieces of other ranks' shards, and of the own shard without IN_PLACE, in multiplying programs. Raised by
    programs with lower ids, which wait for nothing, or (PUSHERS = 0) by what was issued earlier.
    """
    link = Link(group, rank, begin(group, rank), fingerprint, 0)
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    if PUSHERS > 0:
        if pid == 0:
            enter(link)
    if PUSHERS > 0 and pid < PUSHERS:
        push_to_all(
            link, LocalRows(a.ptr, a.stride_m, a.stride_k, a.cols, None if scales is None else scales.a[0]),
            chunks.table, pid, PUSHERS, num_rows, dst_row, chunks.pitch, FIRST_SLOT, False, not a.IN_PLACE,
            chunks.PIECE, BLOCK_R, BLOCK_C, SWITCH,
        )  # fmt: skip
    else:
        first, end = work_indices(
            pid - PUSHERS, num_programs - PUSHERS, PUSHERS, skipped_rounds,
            num_tiles // 2 if epilogue.GATED else num_tiles, epilogue.GATED,
        )  # fmt: skip
        # Built in the call, as a tuple that is assigned to a name loses its constants.
        matmul_tiles(
            Gathered(
                Link(group, rank, link.epoch, fingerprint, 0), a, b, c, epilogue, tiles, chunks, M, skipped_rounds,
                scales, PUSHERS, 0,
            ),
            first, num_programs - PUSHERS, end,
            locate_whole_gathered if CONTRACTION or chunks.JOINED else locate_own_chunk_first,
            a_gathered_contraction if CONTRACTION else a_gathered_rows, b_of_weight,
            _store_gathered if CONTRACTION else _store_gathered_rows, group.WORLD_SIZE if CONTRACTION else 1,
            _scaled_chunk if CONTRACTION and tiles.SCALES == "rows" else None,
        )  # fmt: skip
    if LAST:
        leave(link, num_programs)


def own_in_place(a: torch.Tensor) -> bool:
    """Return whether the kernel can read this shard in place: its rows must be contiguous, as in an arena."""
    return a.stride(1) == 1


def rounds_to_skip(num_tiles: int, programs: int, pushers: int, late: float) -> int:
    """Return the number of rounds that the last `pushers` multiplying programs skip, so that all programs end together.

    late: as in `GatherMatmul`.
    """
    early = programs - pushers
    # A round takes the time of a tile. The late programs start inside the last skipped round.
    return min(int(late * -(-num_tiles // programs)), num_tiles // early) if pushers and early > 0 else 0


class GatherLaunchParams(NamedTuple):
    """Launch parameters: how operands are read, the tile, the programs, and the compiler's options."""

    config: Config
    a_by: str
    b_by: str
    arena: tuple[int, int]
    tiles: Tiles
    flags: tuple[tl.constexpr, ...]
    options: dict[str, int]
    grid: tuple[int]
    counts: tuple[int, int, int, int]
    pushers: int
    copy_rows: int
    # The module of another core than the loop.
    core: Any = None


# Without eq, as prepared launches are looked up by their launcher's identity.
@dataclass(eq=False)
class GatherMatmul:
    """Launcher of c [M, N] = gather(a) @ b [K, N] and the epilogue, for one b or several.

    - `sizes`: of the shards of rows, or of the contraction if not `on_rows`; `pitch`: of an arena's rows.
    - `piece_rows`: rows of a shard for each signal.
    - `scales`, `leaves`: as in `Tiles`. `switch`: each piece is pushed once, not to each rank.
    - `joined`: tiles may have rows of several shards. The own shard is pushed to the own arena too.
    - `late`: end of the pushing programs as a fraction of the matmul's time, if the last multiplying programs cannot
      start before; else 0.
    """

    op: int
    sizes: tuple[int, ...]
    on_rows: bool
    pitch: int
    piece_rows: int
    config: Config
    scales: str = ""
    leaves: int = 0
    switch: bool = False
    late: float = 0.0
    joined: bool = False

    def __post_init__(self) -> None:
        # Each rank adds the chunks of a gathered contraction in its own order.
        assert self.on_rows or not self.leaves
        self._memo = Memo()

    @prepares
    def __call__(
        self, channel: Channel, a: torch.Tensor, bs: Sequence[torch.Tensor], cs: Sequence[torch.Tensor],
        epilogue: TileEpilogue, table: torch.Tensor, *, pushed: bool, last: bool = True, scales: Scales | None = None,
        arenas: tuple[torch.Tensor, ...] = (),
    ) -> Started | None:  # fmt: skip
        """Launch the kernel.

        bs, cs: each b and its c. pushed: the pieces are already under way. Else config.pushers programs push them, or
        fewer for fewer pieces. last: end the epoch. arenas: the channel's, for a core that takes them.
        """
        layouts: list[object] = [pushed, a.dtype]
        for x in (a, *bs, *cs):
            layouts += x.shape, x.stride(), x.data_ptr() % 16
        key = tuple(layouts)
        known = self._memo.get(key) or self._memo.keep(key, self._find_out(channel, a, bs, cs, pushed, epilogue))
        if known.core is not None:
            started: Started | None = known.core.gather(
                self, known, channel, a, bs, cs, epilogue, scales, table, last, arenas
            )
            return started
        (s0, s1), own, arena, config = a.stride(), None, None, known.config
        if known.a_by != "pointers":
            rows, cols = known.arena
            arena = of_arena(channel, a.dtype, rows, cols, self.pitch, config)
            own = of_left(a, "rows", config) if a.numel() and s1 == 1 else arena
        a_by, in_place, *chunks = known.flags
        group = channel.groups.get(self.op) or channel.group(self.op)
        blocks = Blocks(len(bs), a.device) if len(bs) > MOST_UNROLLED.value else None
        if blocks is not None:
            epilogue = in_table(epilogue, blocks)
            scales = None if scales is None else scales._replace(b=blocks.addresses(scales.b))
        return launch(_gather_matmul_kernel, known.grid, blocks)(
            Shard(a, own, arena, s0, s1, a.shape[1], a_by, in_place),
            right_of(bs, known.b_by, config, blocks, terms=False), outputs_of(*cs, blocks=blocks), epilogue, scales,
            known.tiles, Chunks(table, self.pitch, *chunks), group, channel.rank, channel.fingerprint, *known.counts,
            cs[0].shape[0], known.pushers, not self.on_rows, last, known.copy_rows, config.copy_cols,
            self.switch and not pushed, **known.options,
        )  # fmt: skip

    def _find_out(
        self, channel: Channel, a: torch.Tensor, bs: Sequence[torch.Tensor], cs: Sequence[torch.Tensor], pushed: bool,
        epilogue: TileEpilogue,
    ) -> GatherLaunchParams:  # fmt: skip
        M, K, sizes, pitch, config = cs[0].shape[0], bs[0].shape[0], self.sizes, self.pitch, self.config
        on_rows, rank, in_place = self.on_rows, channel.rank, own_in_place(a) and not self.joined
        pieces = -(-a.shape[0] // self.piece_rows) * (1 if self.switch else channel.world_size)
        pushers = 0 if pushed else max(1, min(config.pushers, pieces))
        rows, cols = (M, K) if on_rows else (channel.world_size * M, max(sizes))
        # A chunk that ends inside a block of K would be multiplied with rows of B that belong to the next chunk.
        whole_blocks = on_rows or all(size % config.block_k == 0 for size in sizes)
        aligned = all(size % 16 == 0 for size in sizes)
        config = whole_leaves(config if whole_blocks else replace(config, descriptors=False), [K], self.leaves)
        config = fitted_to(config, *(([a], bs) if in_place else [bs]), results=cs)
        # The part in the arena may be unaligned too.
        loose_leaves = bool(self.leaves) and K % (16 * self.leaves) != 0
        if not config.descriptors and (pitch % 16 or loose_leaves or (not on_rows and not aligned)):
            config = fitted(config, stored=True, read=False)
        in_chunks = on_rows and not self.joined
        num_tiles = sum(-(-rows // config.block_m) for rows in (sizes if in_chunks else (M,)))
        num_tiles *= sum(-(-each.shape[1] // config.block_n) for each in bs)
        pairs = num_tiles // 2 if epilogue.GATED.value else num_tiles
        skipped_rounds = rounds_to_skip(pairs, config.programs, pushers, self.late)
        a_by, b_by = read_gathered_by(a, rows, cols, config), read_by_all(bs, config)
        flatten = on_rows and flattened(config, a_by, b_by) and not self.leaves
        if epilogue.ACTIVATION.value:
            # Storing an activation takes registers: one loop would keep some of them on the stack.
            flatten = False
        rows_aligned = aligned if in_chunks else M % 16 == 0
        flags = a_by, in_place, self.piece_rows, aligned, rows_aligned, self.joined
        return GatherLaunchParams(
            config, a_by, b_by, (rows, cols),
            tiles_of(config, flatten=flatten, scales=self.scales, leaves=self.leaves, lengths=(K,)),
            tuple(map(tl.constexpr, flags)), options(config, a_by, b_by), (config.programs + pushers,),
            (a.shape[0], sum(sizes[:rank]) if on_rows else rank * M, num_tiles, skipped_rounds),
            pushers,
            copy_rows_of(config, a, pitch),
            chosen(
                config, [a], a_by, b_by, scales=self.scales, leaves=self.leaves, weights=len(bs), pushers=pushers,
                switch=self.switch,
            ),
        )  # fmt: skip
