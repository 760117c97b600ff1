"""All-gather + matmul: c = gather(a) @ b, with the gather hidden behind the matmul.

- Gathering rows: c[M, N] from a_shard [M_r, K], b [K, N]. A tile waits for the pieces of rows that it reads.
- Gathering the contraction: c[M, N] from a_shard [M, K_r], b [K, N]. A tile visits K chunk by chunk, own first, and
  waits inside its K loop.

Producers are the kernel's first programs (`push`), which store the own rows into the peers' arenas and never wait, or a
kernel or copies issued earlier. The own shard is read in place if its rows are contiguous, else from the own arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl

from .descriptors import of_arena, of_left, of_right
from .gather_known import Known, Plan
from .launch import MOST_KNOWN, Channel, Config
from .loading import launch
from .matmul import locate_among, locate_in_chunks, matmul_tiles, store_rows, unpack
from .operands import (
    NO_MORE,
    Block,
    Epilogue,
    More,
    Operand,
    Result,
    Right,
    Scales,
    Tiles,
    result_of,
    right_of,
)
from .push import Rows, push_to_all, received_scale, wait_for_rows
from .scales import scale_bytes, scale_columns
from .several import b_of_tile, beside, end_of_pairs, first_of, store_gated, tile_columns
from .signal import FIRST_SLOT, Link, before_descriptor, begin, cdiv, enter, half, leave
from .terms import unit, widened


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
    """Layout of the shards: offsets, pitch, rows of a piece, and if lengths, and rows, are multiples of 16."""

    table: tl.tensor
    pitch: tl.tensor
    PIECE: tl.constexpr
    ALIGNED: tl.constexpr
    ROWS_ALIGNED: tl.constexpr


class Gathered(NamedTuple):
    """Context of the hooks. END: as in `Link`."""

    link: Link
    a: Shard
    b: Right
    c: Result
    epilogue: Epilogue
    tiles: Tiles
    chunks: Chunks
    M: tl.tensor
    more: More
    scales: Scales | None
    PUSHERS: tl.constexpr
    END: tl.constexpr


@triton.jit
def _locate_own_chunk_first(ctx, tile):
    if ctx.epilogue.GATED:
        first, is_up = first_of(tile, tl.num_programs(0) - ctx.PUSHERS)
        found = locate_in_chunks(
            first, ctx.chunks.table, ctx.link.rank, cdiv(ctx.b.N, ctx.tiles.BLOCK_N), ctx.link.group.WORLD_SIZE,
            ctx.tiles,
        )  # fmt: skip
        return beside(ctx, found, is_up)
    else:
        return locate_in_chunks(
            tile, ctx.chunks.table, ctx.link.rank, tile_columns(ctx), ctx.link.group.WORLD_SIZE, ctx.tiles
        )


@triton.jit
def _locate_whole(ctx, tile):
    if ctx.epilogue.GATED:
        first, is_up = first_of(tile, tl.num_programs(0) - ctx.PUSHERS)
        return beside(ctx, locate_among(first, ctx.M, cdiv(ctx.b.N, ctx.tiles.BLOCK_N), ctx.tiles), is_up)
    else:
        return locate_among(tile, ctx.M, tile_columns(ctx), ctx.tiles)


@triton.jit
def _arrived_or_own(ctx, src, tile, packed, arena_row, k_begin, k_len):
    # The tile's rows of rank src's shard: in place, or after a wait in the own half, from row `arena_row` on.
    stride = tl.full((), 0, tl.int64) + ctx.chunks.pitch
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
            scale = ctx.scales.a + tile.row.to(tl.int64) * scale_bytes(ctx.a.cols)
            scale_stride = tl.full((), 0, tl.int64) + scale_bytes(ctx.a.cols)
    else:
        # Waits for: pieces raised by rank src's pushing programs, or after its copies.
        end_row = min(tile.row + ctx.tiles.BLOCK_M, tile.rows)
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
def _a_gathered_rows(ctx, tile, i, packed):
    return _arrived_or_own(ctx, tile.chunk, tile, packed, _row(ctx, tile), 0, ctx.b.K)


@triton.jit
def _a_gathered_contraction(ctx, tile, i, packed):
    src = (ctx.link.rank + i) % ctx.link.group.WORLD_SIZE
    k_begin = tl.load(ctx.chunks.table + src)
    k_len = tl.load(ctx.chunks.table + src + 1) - k_begin
    if ctx.chunks.ALIGNED:
        # Without the hint, numbers from a table allow only loads of one element.
        k_begin = tl.multiple_of(k_begin, 16)
        k_len = tl.multiple_of(k_len, 16)
    return _arrived_or_own(ctx, src, tile, packed, src * ctx.M + tile.row, k_begin, k_len)


@triton.jit
def _scales_of(ctx, src, tile, arena_row):
    # Scales of the tile's rows of rank src's shard: the given ones in place, or those in the arrived rows.
    ptr, stride = received_scale(ctx.link, ctx.link.rank, arena_row, ctx.chunks.pitch)
    if ctx.a.IN_PLACE and src == ctx.link.rank:
        ptr = ctx.scales.a + tile.row
        stride = tl.full((), 1, tl.int64)
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
    if ctx.more.COUNT == 0:
        if ctx.tiles.SCALES == "rows":
            acc = scale_columns(acc, ctx.scales.b, col, ctx.b.N, ctx.tiles.BLOCK_N)
        store_rows(ctx.c, ctx.b.N, ctx.epilogue, ctx.tiles, _row(ctx, tile), col, left, acc, ok)
    else:
        N = ctx.b.N
        own_col = col
        first = cdiv(N, ctx.tiles.BLOCK_N) * ctx.tiles.BLOCK_N
        ptr = ctx.c.ptr
        stride_m, stride_n = widened(ctx.c.stride_m), widened(ctx.c.stride_n)
        bias = ctx.epilogue.bias
        z = ctx.epilogue.z
        is_up = 0
        if ctx.tiles.SCALES == "rows":
            scale = ctx.scales.b
        for j in tl.static_range(ctx.more.COUNT):
            if col >= first:
                N = ctx.more.blocks[j].b.N
                own_col = col - first
                ptr = ctx.more.blocks[j].c.ptr
                stride_m = widened(ctx.more.blocks[j].c.stride_m)
                stride_n = widened(ctx.more.blocks[j].c.stride_n)
                if ctx.epilogue.bias is not None:
                    bias = ctx.more.blocks[j].bias
                if ctx.epilogue.z is not None:
                    z = ctx.more.blocks[j].z
                if ctx.tiles.SCALES == "rows":
                    scale = ctx.more.blocks[j].b_scale
                is_up = 1
            first += cdiv(ctx.more.blocks[j].b.N, ctx.tiles.BLOCK_N) * ctx.tiles.BLOCK_N
        stride_m, stride_n = unit(stride_m, ctx.more.C_UNIT == 0), unit(stride_n, ctx.more.C_UNIT == 1)
        if ctx.tiles.SCALES == "rows":
            acc = scale_columns(acc, scale, own_col, N, ctx.tiles.BLOCK_N)
        if ctx.epilogue.GATED:
            store_gated(
                Result(ptr, stride_m, stride_n), z, N,
                Epilogue(bias, False, None, ctx.epilogue.z, ctx.epilogue.ACTIVATION, True),
                ctx.tiles, _row(ctx, tile), own_col, left, acc, ok, is_up,
            )  # fmt: skip
        else:
            store_rows(
                Result(ptr, stride_m, stride_n), N, Epilogue(bias, False, None, z, ctx.epilogue.ACTIVATION, False),
                ctx.tiles, _row(ctx, tile), own_col, left, acc, ok,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "fingerprint", "num_rows", "dst_row", "num_tiles"])
def _gather_matmul_kernel(
    a, b, c, epilogue, more, scales, tiles, chunks, group, rank, fingerprint: tl.int64, num_rows, dst_row, num_tiles, M,
    PUSHERS: tl.constexpr, CONTRACTION: tl.constexpr, LAST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    SWITCH: tl.constexpr,
):  # fmt: skip
    """Push the own shard in programs 0 .. PUSHERS - 1, and multiply in the others.

    Pushing programs signal each piece; with SWITCH they store to all ranks at once. The kernel enters the epoch if
    PUSHERS > 0, and ends the epoch if LAST.

    Waits for: pieces of other ranks' shards, and of the own shard without IN_PLACE, in multiplying programs. Raised by
    programs with lower ids, which wait for nothing, or (PUSHERS = 0) by what was issued earlier.
    """
    link = Link(group, rank, begin(group, rank), fingerprint, 0)
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    if epilogue.GATED:
        num_tiles = end_of_pairs(pid - PUSHERS, num_tiles // 2, num_programs - PUSHERS)
    if PUSHERS > 0:
        enter(link, pid)
    if PUSHERS > 0 and pid < PUSHERS:
        push_to_all(
            link, Rows(a.ptr, a.stride_m, a.stride_k, a.cols, None if scales is None else scales.a), chunks.table, pid,
            PUSHERS, num_rows, dst_row, chunks.pitch, FIRST_SLOT, False, not a.IN_PLACE, chunks.PIECE, BLOCK_R, BLOCK_C,
            SWITCH,
        )  # fmt: skip
    else:
        # Built in the call, as a tuple that is assigned to a name loses its constants.
        matmul_tiles(
            Gathered(
                Link(group, rank, link.epoch, fingerprint, 0), a, b, c, epilogue, tiles, chunks, M, more, scales,
                PUSHERS, 0,
            ),
            pid - PUSHERS, num_programs - PUSHERS, num_tiles,
            _locate_whole if CONTRACTION else _locate_own_chunk_first,
            _a_gathered_contraction if CONTRACTION else _a_gathered_rows, b_of_tile,
            _store_gathered if CONTRACTION else _store_gathered_rows, group.WORLD_SIZE if CONTRACTION else 1,
            _scaled_chunk if CONTRACTION and tiles.SCALES == "rows" else None,
        )  # fmt: skip
    if LAST:
        leave(link, num_programs)


# A further b, its c, its bias, the z that takes its products before an activation, and its float8 scales.
Further: TypeAlias = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None
]  # fmt: skip


class GatherMatmul:
    """Launcher of c [M, N] = gather(a, gather_dim) @ b [K, N] and the epilogue, for one b or several; see `Plan`."""

    def __init__(
        self, op: int, sizes: tuple[int, ...], *, gather_dim: int, pitch: int, piece_rows: int, config: Config,
        scales: str = "", leaves: int = 0, switch: bool = False,
    ) -> None:  # fmt: skip
        # Each rank adds the chunks of a gathered contraction in an order of its own.
        assert gather_dim == 0 or not leaves
        self._op, self._pitch, self._on_rows, self._switch = op, pitch, gather_dim == 0, switch
        self._plan = Plan(sizes, self._on_rows, pitch, piece_rows, config, scales, leaves, switch)
        self._known: dict[object, Known] = {}

    def __call__(
        self,
        channel: Channel,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        epilogue: Epilogue,
        table: torch.Tensor,
        *,
        pushed: bool,
        last: bool = True,
        more: Sequence[Further] = (),
        scales: Scales | None = None,
    ) -> None:
        """Launch the kernel.

        pushed: the pieces of `piece_rows` rows are already under way. Else config.pushers programs push them, or fewer
        for fewer pieces. last: end the epoch. more: all biases then run along columns, and each b has one or none has.
        """
        key = [
            a.dtype, a.shape, a.stride(), a.data_ptr() % 16, b.shape, b.stride(), b.data_ptr() % 16, c.stride(),
            c.data_ptr() % 16, pushed,
        ]  # fmt: skip
        for each, out, *_ in more:
            key += each.shape, each.stride(), each.data_ptr() % 16, out.stride(), out.data_ptr() % 16
        found = tuple(key)
        known = self._known.get(found)
        if known is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            bs, cs = [b, *(each[0] for each in more)], [c, *(each[1] for each in more)]
            known = self._known[found] = self._plan.known(channel, a, bs, cs, pushed, epilogue)
        (s0, s1), own, arena = a.stride(), None, None
        if known.a_by != "pointers":
            arena = of_arena(channel, a.dtype, *known.arena, self._pitch, known.config)
            own = of_left(a, "rows", known.config) if a.numel() and s1 == 1 else arena
        a_by, in_place, b_by, *chunks = known.flags
        b_desc = None if known.b_by == "pointers" else of_right(b, known.b_by, known.config)
        (b0, b1), (K, N), group = b.stride(), b.shape, channel.groups.get(self._op) or channel.group(self._op)
        launch(_gather_matmul_kernel, known.grid)(
            Shard(a, own, arena, s0, s1, a.shape[1], a_by, in_place), Right(b, b_desc, b0, b1, K, N, b_by),
            Result(c, *c.stride()), epilogue, self._more(more, known) if more else NO_MORE, scales, known.tiles,
            Chunks(table, self._pitch, *chunks), group, channel.rank, channel.fingerprint, *known.counts,
            c.shape[0], known.pushers, not self._on_rows, last,
            known.config.copy_rows, known.config.copy_cols, self._switch and not pushed, **known.options,
        )  # fmt: skip

    def _more(self, more: Sequence[Further], known: Known) -> More:
        blocks = [
            Block(None, right_of(b, known.b_by, known.config), result_of(c), bias, z, None, scale, tl.constexpr(0))
            for b, c, bias, z, scale in more
        ]
        return More(tuple(blocks), tl.constexpr(len(blocks)), *known.units)
