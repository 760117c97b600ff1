"""A warp-specialised core of the matmul for sm_90, in Gluon: the other way to run the loop of `matmul`.

One warp loads: it locates tiles, waits for chunks of A that travel, and fills a ring of stages by TMA. Two warpgroups
multiply what has arrived, and store a tile by TMA in halves. So waits, tables and the order of tiles are not in the
warps that multiply. In a gather another warp pushes the own shard by TMA, in all programs. The hooks are those of
`matmul`:

    LOCATE(ctx, index) -> Tile                  place of a tile
    A_CHUNK(ctx, tile, i, packed) -> Operand    i-th chunk of A for a tile, a descriptor; waits for the chunk
    B_CHUNK(ctx, tile, i) -> Columns            columns of B, a descriptor
    A_SCALE(ctx, tile, i) -> pointer, stride    float8: scales of the tile's rows in the i-th chunk
    STORE(ctx, share, ring, row, chunk, packed, acc)
                                                stores a tile that begins at row `row` of C, in a chunk

Each stage has two mbarriers. `full` completes when its copies have arrived, `empty` when both warpgroups have
multiplied them. A note of the tile lies beside the stage, under the same mbarriers, and so do float8 rows' scales.

This module needs Triton's Gluon, so launchers import it when a configuration chooses this core. `refusal` says why a
launch cannot have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .blocks import MOST_UNROLLED, pick
from .descriptors import of_arena, of_left, read_by
from .epilogue import TileEpilogue, apply
from .gather_matmul import (
    Chunks,
    Gathered,
    GatherLaunchParams,
    GatherMatmul,
    Shard,
    a_gathered_contraction,
    a_gathered_rows,
    locate_own_chunk_first,
    locate_whole_gathered,
    scale_of,
    work_indices,
)
from .launch import FP_FUSION, Channel, Config
from .loading import Started, launch
from .matmul import Whole, locate_whole, pack, unpack
from .matmul_scatter import Partial, locate_own_chunk_last
from .operands import (
    END,
    LaunchParams,
    Left,
    Operand,
    Right,
    Scales,
    b_of_term,
    b_of_weight,
    left_of,
    outputs_of,
    right_of,
    tiles_of,
    weight_at,
)
from .push import received_scale
from .signal import (
    ENTRY_SLOT,
    FIRST_SLOT,
    GIVEN_UP,
    LANES,
    SIGNALS,
    TICKETS,
    Link,
    arrives_last,
    begin,
    cdiv,
    fingerprint_of,
    header,
    leave,
    raise_signal,
    read,
)

# Renamed in Triton 3.9.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_FLOAT8 = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}
# Registers of a thread of the loading warp, which polls in a gather; the warps that multiply have the others.
_LOADER_REGISTERS, _WAITER_REGISTERS = 40, 56
# Most stages: more hide no more latency.
_MOST_STAGES = 6
# Rows of a box that a warp pushes at a time, and number of boxes under way.
_BOX_ROWS, _BOXES = 32, 4
# Most sums of a thread in float8, whose products are in registers beside them.
_MOST_FLOAT8_SUMS = 64
# Shared memory of a program for stages and C; mbarriers and notes take less than 1 KiB of the 227 KiB.
_RING_BYTES = 226 << 10


class Ring(NamedTuple):
    """Shared memory: stages of A and B, half a tile of C, mbarriers, and notes: row of C and chunk, and `packed`.

    scales: of float8 rows, float32 [stages, BLOCK_M].
    """

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    c: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    chunks: gl.shared_memory_descriptor
    packed: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor


class Outgoing(NamedTuple):
    """The own shard that a gather pushes, in boxes of a few rows of a block of K.

    - `own`: descriptor of the shard. `regions`: those of its place in every rank's arena, which end where it ends.
    - `ON_ROWS`: it is rows of A, not columns. `BUFFERS`: number of boxes under way. `END`: as in `Link`.
    """

    own: tl.tensor
    regions: tl.tensor
    ON_ROWS: tl.constexpr
    BUFFERS: tl.constexpr
    END: tl.constexpr


class TileRange(NamedTuple):
    """The tiles of a program: first, first + num_programs, .. below `end`, of `num_steps` blocks of K each.

    outs: a descriptor of each C, if tiles are stored by TMA. END: as in `Link`.
    """

    first: tl.tensor
    num_programs: tl.tensor
    end: tl.tensor
    num_steps: tl.tensor
    outs: tl.tensor | None
    END: tl.constexpr


@gluon.jit
def _load_tiles(
    ctx, share, ring, LOCATE: gl.constexpr, A_CHUNK: gl.constexpr, B_CHUNK: gl.constexpr, A_SCALE: gl.constexpr,
    NUM_K_CHUNKS: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = ctx.tiles.BLOCK_M
    STAGES: gl.constexpr = ring.full.shape[0]
    BLOCK_K: gl.constexpr = ctx.tiles.BLOCK_K
    NOTE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ROWS: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [gl.num_warps()], [0])
    step = 0
    for index in range(share.first, share.end, share.num_programs):
        tile = LOCATE(ctx, index)
        packed = pack(tile, BLOCK_M, ctx.tiles.BLOCK_N)
        for i in range(NUM_K_CHUNKS):
            a = A_CHUNK(ctx, tile, i, packed)
            packed = a.packed
            b = B_CHUNK(ctx, tile, i)
            if ctx.tiles.SCALES != "":
                # The chunk's rows have arrived, and their scales with them.
                scale, stride = A_SCALE(ctx, tile, i)
                offs_m = gl.arange(0, BLOCK_M, ROWS)
                of_rows = gl.load(scale + offs_m.to(gl.int64) * stride, mask=offs_m < tile.rows - tile.row, other=0.0)
            for k in range(0, a.k_len, BLOCK_K):
                stage = step % STAGES
                full = ring.full.index(stage)
                mbarrier.wait(ring.empty.index(stage), (step // STAGES & 1) ^ 1)
                ring.rows.index(stage).store(gl.full([1], tile.begin + tile.row, gl.int32, NOTE))
                ring.chunks.index(stage).store(gl.full([1], tile.chunk, gl.int32, NOTE))
                ring.packed.index(stage).store(gl.full([1], packed, gl.int32, NOTE))
                if ctx.tiles.SCALES != "":
                    ring.scales.index(stage).store(of_rows)
                    # One lane counts at the mbarrier for all that have stored.
                    tl.debug_barrier()
                mbarrier.expect(full, a.source.block_type.nbytes + b.source.block_type.nbytes)
                if ctx.a.BY == "rows":
                    _load(a.source, [a.layer, a.row, a.first + k], full, ring.a.index(stage))
                else:
                    _load(a.source, [a.layer, a.first + k, a.row], full, ring.a.index(stage))
                if ctx.b.BY == "rows":
                    _load(b.source, [a.k_begin + k, b.col], full, ring.b.index(stage))
                else:
                    _load(b.source, [b.col, a.k_begin + k], full, ring.b.index(stage))
                step += 1


@gluon.jit
def _note(notes, stage):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(notes.index(stage).load(LAYOUT), 0)


@gluon.jit
def _a_of_stage(ctx, ring, stage):
    if ctx.a.BY == "rows":
        return ring.a.index(stage).reshape((ctx.tiles.BLOCK_M, ctx.tiles.BLOCK_K))
    else:
        return ring.a.index(stage).reshape((ctx.tiles.BLOCK_K, ctx.tiles.BLOCK_M)).permute((1, 0))


@gluon.jit
def _product(ctx, share, ring, step):
    # A tile's product, of the stages from `step` on; the last one is not given back.
    STAGES: gl.constexpr = ring.full.shape[0]
    BLOCK_N: gl.constexpr = ctx.tiles.BLOCK_N
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    acc = gl.zeros((ctx.tiles.BLOCK_M, BLOCK_N), gl.float32, layout=MMA)
    for k in range(share.num_steps):
        stage = step % STAGES
        mbarrier.wait(ring.full.index(stage), step // STAGES & 1)
        b = ring.b.index(stage)
        if ctx.b.BY != "rows":
            b = b.permute((1, 0))
        acc = warpgroup_mma(_a_of_stage(ctx, ring, stage), b, acc, is_async=True)
        # The product before has ended when only this one is under way.
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
        step += 1
    return warpgroup_mma_wait(num_outstanding=0, deps=(acc,))


@gluon.jit
def _half_under_way(ctx, ring, stage, FIRST: gl.constexpr):
    # The product of a stage and the half of its columns from FIRST on, begun.
    HALF: gl.constexpr = ctx.tiles.BLOCK_N // 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HALF, 32])
    zeros = gl.zeros((ctx.tiles.BLOCK_M, HALF), gl.float32, layout=MMA)
    b = ring.b.index(stage).slice(FIRST, HALF, dim=0).permute((1, 0))
    return warpgroup_mma(_a_of_stage(ctx, ring, stage), b, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_scaled(ctx, ring, step, lo, hi, COUNT: gl.constexpr):
    # Add the products of COUNT stages from `step` on to both halves of the columns. One half is multiplied while the
    # other one is added: a wait takes the sum that is added before it, which the compiler would otherwise put behind
    # the last wait. Nothing is under way at the end: ptxas would not see which one a wait in the next turn is for.
    STAGES: gl.constexpr = ring.full.shape[0]
    HALF: gl.constexpr = ctx.tiles.BLOCK_N // 2
    ROWS: gl.constexpr = gl.SliceLayout(1, lo.type.layout)
    stage = step % STAGES
    mbarrier.wait(ring.full.index(stage), step // STAGES & 1)
    first = _half_under_way(ctx, ring, stage, 0)
    second = _half_under_way(ctx, ring, stage, HALF)
    scale = ring.scales.index(stage).load(ROWS)
    lo += warpgroup_mma_wait(num_outstanding=1, deps=(first,)) * scale[:, None]
    for i in gl.static_range(1, COUNT):
        before = stage
        stage = (step + i) % STAGES
        mbarrier.wait(ring.full.index(stage), (step + i) // STAGES & 1)
        first = _half_under_way(ctx, ring, stage, 0)
        second, lo = warpgroup_mma_wait(num_outstanding=1, deps=(second, lo))
        hi += second * scale[:, None]
        mbarrier.arrive(ring.empty.index(before))
        second = _half_under_way(ctx, ring, stage, HALF)
        scale = ring.scales.index(stage).load(ROWS)
        first, hi = warpgroup_mma_wait(num_outstanding=1, deps=(first, hi))
        lo += first * scale[:, None]
    second, lo = warpgroup_mma_wait(num_outstanding=0, deps=(second, lo))
    hi += second * scale[:, None]
    return lo, hi


@gluon.jit
def _scaled_product(ctx, share, ring, step):
    # `_product` of float8 times the scales of its rows. The matrix unit keeps 14 bits of a sum, so each block of K has
    # its own, as in `contraction.dot`.
    STAGES: gl.constexpr = ring.full.shape[0]
    BLOCK_M: gl.constexpr = ctx.tiles.BLOCK_M
    HALF: gl.constexpr = ctx.tiles.BLOCK_N // 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HALF, 32])
    lo = gl.zeros((BLOCK_M, HALF), gl.float32, layout=MMA)
    hi = gl.zeros((BLOCK_M, HALF), gl.float32, layout=MMA)
    for k in range(0, share.num_steps // 2 * 2, 2):
        lo, hi = _add_scaled(ctx, ring, step + k, lo, hi, 2)
        mbarrier.arrive(ring.empty.index((step + k + 1) % STAGES), pred=k + 2 < share.num_steps)
    if share.num_steps % 2 != 0:
        lo, hi = _add_scaled(ctx, ring, step + share.num_steps - 1, lo, hi, 1)
    return gl.join(lo, hi).permute((0, 2, 1)).reshape((BLOCK_M, 2 * HALF))


@gluon.jit
def _multiply_tiles(ctx, share, ring, STORE: gl.constexpr):
    STAGES: gl.constexpr = ring.full.shape[0]
    step = 0
    for _index in range(share.first, share.end, share.num_programs):
        if ctx.tiles.SCALES == "":
            acc = _product(ctx, share, ring, step)
        else:
            acc = _scaled_product(ctx, share, ring, step)
        step += share.num_steps
        last = (step + STAGES - 1) % STAGES
        row = _note(ring.rows, last)
        chunk = _note(ring.chunks, last)
        packed = _note(ring.packed, last)
        mbarrier.arrive(ring.empty.index(last))
        STORE(ctx, share, ring, row, chunk, packed, acc)
    _stored(share.num_steps * 0)


@gluon.jit
def _scaled_columns(scale, col, N, acc):
    # `scale_columns`, with the layout of the tile.
    offs_n = col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    return acc * gl.load(scale + offs_n, mask=offs_n < N, other=0.0)[None, :]


@gluon.jit
def _store_by_tma(desc, buffer, layer, row, col, acc):
    HALF: gl.constexpr = acc.shape[1] // 2
    lo, hi = acc.reshape((acc.shape[0], 2, HALF)).permute((0, 2, 1)).split()
    _store_half(desc, buffer, layer, row, col, lo)
    _store_half(desc, buffer, layer, row, col + HALF, hi)


@gluon.jit
def _store_half(desc, buffer, layer, row, col, part):
    # The store before must have read the buffer.
    tma.store_wait(pendings=0)
    buffer.reshape((part.shape[0], part.shape[1])).store(part.to(desc.dtype))
    fence_async_shared()
    _store(desc, [layer, row, col], buffer)


@gluon.jit
def _store_by_pointers(epilogue, c, j, N, row, col, left, acc, ok):
    # A quarter at a time: a thread has registers for its part of the tile, and for the addresses of some of it.
    if acc.shape[1] > 64:
        lo, hi = acc.reshape((acc.shape[0], 2, acc.shape[1] // 2)).permute((0, 2, 1)).split()
        _store_by_pointers(epilogue, c, j, N, row, col, left, lo, ok)
        _store_by_pointers(epilogue, c, j, N, row, col + acc.shape[1] // 2, left, hi, ok)
    else:
        offs_m = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        offs_n = col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        apply(epilogue, c, j, row + offs_m, offs_n, offs_m < left, offs_n < N, acc, ok)


@gluon.jit
def _store_tile(ctx, share, ring, j, N, row, col, left, acc, ok):
    """Store the first `left` rows of a tile of the j-th C, which has ctx.M rows and N columns, or NaN if not `ok`."""
    if share.outs is None:
        if ctx.epilogue.GATED:
            # Up's tile loads what was stored of the gate's.
            tl.debug_barrier()
        _store_by_pointers(ctx.epilogue, ctx.c, j, N, row, col, left, acc, ok)
    elif (left == ctx.tiles.BLOCK_M) | (row + left == ctx.M):
        # What the descriptor drops is behind C's last row; behind a shard's are another tile's rows.
        if ok == 0:
            acc = gl.full(acc.shape, float("nan"), gl.float32, acc.type.layout)
        _store_by_tma(pick(share.outs, j, ctx.b.COUNT), ring.c, 0, row, col, acc)
    else:
        _store_by_pointers(ctx.epilogue, ctx.c, j, N, row, col, left, acc, ok)


@gluon.jit
def _store_whole(ctx, share, ring, row, chunk, packed, acc):
    col, left, _ = unpack(packed, ctx.tiles.BLOCK_M, ctx.tiles.BLOCK_N, False)
    _store_tile(ctx, share, ring, 0, ctx.b.N[0], row, col, left, acc, 1)


@gluon.jit
def _store_gathered(ctx, share, ring, row, chunk, packed, acc):
    col, left, ok = unpack(packed, ctx.tiles.BLOCK_M, ctx.tiles.BLOCK_N, ctx.chunks.ROWS_ALIGNED)
    if ctx.chunks.ROWS_ALIGNED and ctx.c.UNIT == 0:
        # Contiguous columns are stored 16 bytes at a time. Triton 3.9 forgets the hint, which is on a sum.
        left = left // 16 * 16
    if ctx.chunks.ROWS_ALIGNED:
        row = tl.multiple_of(row, 16)
    j, begin = weight_at(ctx, col)
    N = pick(ctx.b.N, j, ctx.b.COUNT)
    if ctx.tiles.SCALES != "":
        acc = _scaled_columns(pick(ctx.scales.b, j, ctx.b.COUNT), col - begin, N, acc)
    _store_tile(ctx, share, ring, j, N, row, col - begin, left, acc, ok)


@gluon.jit
def _store_to_owner(ctx, share, ring, row, chunk, packed, acc):
    col, _, _ = unpack(packed, ctx.tiles.BLOCK_M, ctx.tiles.BLOCK_N, False)
    if ctx.tiles.SCALES != "":
        acc = _scaled_columns(ctx.scales.b[0], col, ctx.b.N[0], acc)
    in_chunk = row - tl.load(ctx.table + chunk)
    # The owner's descriptor ends at the region's last row.
    _store_by_tma(
        pick(share.outs, chunk, ctx.link.group.WORLD_SIZE, ctx.link.group.WORLD_SIZE), ring.c, ctx.link.epoch & 1,
        ctx.region_row + in_chunk, col, acc,
    )  # fmt: skip


@gluon.jit
def _stored(x):
    # x, when each thread's TMA stores are seen, and have not only read; Triton before 3.8 has no op for that.
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _push_pieces(ctx, outgoing, buffers, arrived):
    # Push pieces of the own shard until none is left, for the rank that needs them soonest first. A program takes the
    # next piece by a counter, so one program on a multiprocessor is enough: no piece waits for a later program.
    link = ctx.link
    WORLD_SIZE: gl.constexpr = ctx.link.group.WORLD_SIZE
    PIECE: gl.constexpr = ctx.chunks.PIECE
    BUFFERS: gl.constexpr = arrived.shape[0]
    AHEAD: gl.constexpr = BUFFERS // 2
    ROWS: gl.constexpr = outgoing.own.block_type.shape[1]
    COLS: gl.constexpr = outgoing.own.block_type.shape[2]
    FIRST: gl.constexpr = 1 if ctx.a.IN_PLACE else 0
    if outgoing.ON_ROWS:
        dst_row = tl.load(ctx.chunks.table + link.rank)
        num_rows = tl.load(ctx.chunks.table + link.rank + 1) - dst_row
    else:
        dst_row = link.rank * ctx.M
        num_rows = ctx.M
    pieces = cdiv(num_rows, PIECE)
    total = pieces * (WORLD_SIZE - FIRST)
    across = cdiv(ctx.a.cols, COLS)
    tickets = header(link.group, link.rank) + TICKETS
    first = 0
    taken = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    while taken < total:
        dst = (link.rank + WORLD_SIZE - FIRST - taken // pieces) % WORLD_SIZE
        row = taken % pieces * PIECE
        rows = min(PIECE, num_rows - row)
        region = pick(outgoing.regions, dst, WORLD_SIZE, WORLD_SIZE)
        num_boxes = cdiv(rows, ROWS) * across
        for i in range(num_boxes + AHEAD):
            if i < num_boxes:
                at = (first + i) % BUFFERS
                # The last store from this buffer has read it.
                tma.store_wait(pendings=BUFFERS - AHEAD - 1)
                mbarrier.expect(arrived.index(at), outgoing.own.block_type.nbytes)
                _load(
                    outgoing.own, [0, row + i // across * ROWS, i % across * COLS], arrived.index(at), buffers.index(at)
                )  # fmt: skip
            if i >= AHEAD:
                box = i - AHEAD
                at = (first + box) % BUFFERS
                mbarrier.wait(arrived.index(at), (first + box) // BUFFERS & 1)
                _store(
                    region, [link.epoch & 1, dst_row + row + box // across * ROWS, box % across * COLS],
                    buffers.index(at),
                )  # fmt: skip
        first += num_boxes
        if ctx.tiles.SCALES != "":
            received, words = received_scale(link, dst, dst_row + row, ctx.chunks.pitch)
            offs = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0])).to(gl.int64)
            for i in range(0, rows, 32):
                scale = gl.load(ctx.scales.a[0] + row + i + offs, mask=offs < rows - i)
                gl.store(received + (i + offs) * words, scale, mask=offs < rows - i)
        raise_signal(link, dst, _stored(row) // PIECE + FIRST_SLOT)
        taken = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    if taken == total + gl.num_programs(0) - 1:
        # No program takes another one before the next kernel.
        tl.store(tickets, 0)


@gluon.jit
def _run(
    ctx, share, outgoing, a_desc, b_desc, STAGES: gl.constexpr, REGISTERS: gl.constexpr, LOCATE: gl.constexpr,
    A_CHUNK: gl.constexpr, B_CHUNK: gl.constexpr, A_SCALE: gl.constexpr, STORE: gl.constexpr,
    NUM_K_CHUNKS: gl.constexpr,
):  # fmt: skip
    # a_desc, b_desc: one of the descriptors of each, as all have one block.
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)  # noqa: RUF005
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)  # noqa: RUF005
    if share.outs is None:
        c = a
    else:
        out = share.outs[0]
        c = gl.allocate_shared_memory(out.dtype, out.block_type.shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = gl.allocate_shared_memory(gl.int32, [STAGES, 1], FLAT)
    chunks = gl.allocate_shared_memory(gl.int32, [STAGES, 1], FLAT)
    packed = gl.allocate_shared_memory(gl.int32, [STAGES, 1], FLAT)
    if ctx.tiles.SCALES == "":
        scales = rows
    else:
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, ctx.tiles.BLOCK_M], FLAT)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    if outgoing is not None:
        boxes = gl.allocate_shared_memory(
            outgoing.own.dtype, [outgoing.BUFFERS] + outgoing.own.block_type.shape, outgoing.own.layout,  # noqa: RUF005
        )  # fmt: skip
        arrived = gl.allocate_shared_memory(gl.int64, [outgoing.BUFFERS, 1], mbarrier.MBarrierLayout())
        for s in gl.static_range(outgoing.BUFFERS):
            mbarrier.init(arrived.index(s), count=1)
    # TMA counts at the mbarriers, in another proxy.
    fence_async_shared()
    ring = Ring(a, b, c, full, empty, rows, chunks, packed, scales)
    if outgoing is None:
        gl.warp_specialize(
            [
                (_multiply_tiles, (ctx, share, ring, STORE)),
                (_load_tiles, (ctx, share, ring, LOCATE, A_CHUNK, B_CHUNK, A_SCALE, NUM_K_CHUNKS)),
            ],
            [1],
            [REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_tiles, (ctx, share, ring, STORE)),
                (_load_tiles, (ctx, share, ring, LOCATE, A_CHUNK, B_CHUNK, A_SCALE, NUM_K_CHUNKS)),
                (_push_pieces, (ctx, outgoing, boxes, arrived)),
            ],
            [1, 1],
            [REGISTERS, REGISTERS],
        )
        for s in gl.static_range(outgoing.BUFFERS):
            mbarrier.invalidate(arrived.index(s))
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(s))
        mbarrier.invalidate(empty.index(s))


@gluon.jit
def _a_whole(ctx, tile, i, packed):
    return Operand(ctx.a.desc[0], 0, 0, 0, tile.begin + tile.row, 0, ctx.b.K[0], packed, 0, 0, 0)


@gluon.jit
def _scale_of_whole(ctx, tile, i):
    return ctx.scales.a[0] + tile.begin + tile.row, 1


@gluon.jit
def _scale_of_rows(ctx, tile, i):
    return scale_of(ctx, tile.chunk, tile, tile.begin + tile.row)


@gluon.jit
def _scale_of_contraction(ctx, tile, i):
    src = (ctx.link.rank + i) % ctx.link.group.WORLD_SIZE
    return scale_of(ctx, src, tile, src * ctx.M + tile.row)


@gluon.jit
def _warp_specialised_matmul_kernel(
    a, b, c, outs, epilogue, tiles, M, STAGES: gl.constexpr, REGISTERS: gl.constexpr
):  # fmt: skip
    """Compute the plain matmul. Waits for nothing; signals nothing."""
    num_tiles = cdiv(M, tiles.BLOCK_M) * cdiv(b.N[0], tiles.BLOCK_N)
    share = TileRange(gl.program_id(0), gl.num_programs(0), num_tiles, cdiv(b.K[0], tiles.BLOCK_K), outs, 0)
    # Built in the call, as a tuple that is assigned to a name loses its constants.
    _run(
        Whole(a, b, c, epilogue, None, tiles, M, 0), share, None, a.desc[0], b.desc[0], STAGES, REGISTERS,
        locate_whole, _a_whole, b_of_term, _scale_of_whole, _store_whole, 1,
    )  # fmt: skip


@gluon.jit
def _enter(link):
    # `enter`, which leaves the layout of its lanes to the compiler, as Gluon does not.
    if read(header(link.group, link.rank) + GIVEN_UP) == 0:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        ranks = gl.arange(0, LANES, LAYOUT)
        for first in range(0, link.group.WORLD_SIZE, LANES):
            dst = first + ranks
            headers = gl.load(link.group.peers + dst, mask=dst < link.group.WORLD_SIZE).to(tl.pointer_type(tl.int32))
            fingerprint = gl.full([LANES], link.fingerprint, gl.int64, LAYOUT)
            gl.atomic_xchg(
                fingerprint_of(link, headers, link.rank), fingerprint, mask=dst < link.group.WORLD_SIZE,
                sem="relaxed", scope="sys",
            )  # fmt: skip
        _raise_to_all(link, ENTRY_SLOT)


@gluon.jit
def _raise_to_all(link, slot):
    # `raise_to_all`, likewise.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tl.debug_barrier()
    for first in range(0, link.group.WORLD_SIZE, LANES):
        dst = first + gl.arange(0, LANES, LAYOUT)
        headers = gl.load(link.group.peers + dst, mask=dst < link.group.WORLD_SIZE).to(tl.pointer_type(tl.int32))
        gl.atomic_xchg(
            headers + SIGNALS + slot * link.group.WORLD_SIZE + link.rank,
            gl.full([LANES], link.epoch, gl.int32, LAYOUT),
            mask=(dst < link.group.WORLD_SIZE) & (dst != link.rank), sem="release", scope="sys",
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rank", "fingerprint", "num_tiles", "num_steps"])
def _warp_specialised_gather_kernel(
    a, b, c, outs, epilogue, scales, tiles, chunks, outgoing, group, rank, fingerprint: tl.int64, num_tiles, num_steps,
    M, CONTRACTION: gl.constexpr, LAST: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Multiply, and push the own shard beside that if it is outgoing: `_gather_matmul_kernel` on this core.

    Waits for: pieces of other ranks' shards, and of the own shard without IN_PLACE, in the warp that loads. Raised by
    the warps that push, which wait for nothing, or by what was issued earlier.
    """
    link = Link(group, rank, begin(group, rank), fingerprint, 0)
    pid = gl.program_id(0)
    num_programs = gl.num_programs(0)
    if outgoing is not None:
        if pid == 0:
            _enter(link)
    first, end = work_indices(
        pid, num_programs, 0, 0, num_tiles // 2 if epilogue.GATED else num_tiles, epilogue.GATED
    )  # fmt: skip
    _run(
        Gathered(Link(group, rank, link.epoch, fingerprint, 0), a, b, c, epilogue, tiles, chunks, M, 0, scales, 0, 0),
        TileRange(first, num_programs, end, num_steps, outs, 0), outgoing, a.arena_desc, b.desc[0], STAGES, REGISTERS,
        locate_whole_gathered if CONTRACTION or chunks.JOINED else locate_own_chunk_first,
        a_gathered_contraction if CONTRACTION else a_gathered_rows, b_of_weight,
        _scale_of_contraction if CONTRACTION else _scale_of_rows, _store_gathered,
        group.WORLD_SIZE if CONTRACTION else 1,
    )  # fmt: skip
    if LAST:
        leave(link, num_programs)


@gluon.jit(do_not_specialize=["rank", "fingerprint", "region_row", "num_tiles"])
def _warp_specialised_scatter_kernel(
    a, b, outs, scales, tiles, table, group, rank, fingerprint: tl.int64, region_row, num_tiles, M,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Enter the epoch, multiply, store every tile into its owner's half, and at the end signal every owner.

    outs: a descriptor of this rank's region in each owner's half. Waits for nothing.
    """
    link = Link(group, rank, begin(group, rank), fingerprint, 0)
    num_programs = gl.num_programs(0)
    if gl.program_id(0) == num_programs - 1:
        _enter(link)
    _run(
        Partial(
            Link(group, rank, link.epoch, fingerprint, 0), a, b, tiles, table, M, region_row, 0, scales, False, False, 0
        ),
        TileRange(gl.program_id(0), num_programs, num_tiles, cdiv(b.K[0], tiles.BLOCK_K), outs, 0),
        None, a.desc[0], b.desc[0], STAGES, REGISTERS, locate_own_chunk_last, _a_whole, b_of_term, _scale_of_whole,
        _store_to_owner, 1,
    )  # fmt: skip
    # As `finish`.
    if arrives_last(link, num_programs):
        _raise_to_all(link, FIRST_SLOT)


def refusal(
    config: Config, lefts: Sequence[torch.Tensor], a_by: str, b_by: str, *, scales: str = "", leaves: int = 0,
    weights: int = 1, pushers: int = 0, switch: bool = False, owners: bool = False, sent: torch.dtype | None = None,
) -> str:  # fmt: skip
    """Return why a launch cannot have this core, or "".

    - `lefts`: A of each term; `weights`: number of B side by side. a_by, b_by: how operands are read.
    - `scales`, `leaves`: as in `Tiles`.
    - `pushers`: programs of the kernel that push.
    - `switch`: tiles or pieces go through the switch. owners: a tile has several owners. `sent`: dtype of tiles that
      travel, if any do.
    """
    dtype = lefts[0].dtype
    if "pointers" in (a_by, b_by):
        return "it reads by descriptors alone, and an operand's layout or alignment has none"
    if scales == "blocks":
        return "it multiplies float8 with scales of rows, not of blocks"
    if dtype not in (_FLOAT8 if scales else _ELEMENTS):
        return f"it multiplies bfloat16, float16, and float8 with scales, not {str(dtype).removeprefix('torch.')}"
    if scales and (a_by, b_by) != ("rows", "columns"):
        return "the matrix unit takes float8 operands whose contraction is contiguous"
    if leaves:
        return "it adds no products in leaves"
    if len(lefts) > 1:
        return f"it adds one product, not {len(lefts)}"
    if weights > MOST_UNROLLED.value:
        return f"it has descriptors of {MOST_UNROLLED.value} weights at most, not {weights}"
    if switch:
        return "it stores to each rank, not through the switch"
    if owners:
        return "a tile that it stores has one owner"
    if sent is not None and sent not in _ELEMENTS:
        return f"it sends tiles of 16 bits, not {str(sent).removeprefix('torch.')}"
    if pushers and lefts[0].stride(1) != 1:
        return "its programs push contiguous rows"
    warpgroups, rest = divmod(config.block_m, 64)
    if rest or config.num_warps != 4 * warpgroups:
        return f"a warpgroup of four warps has 64 rows, not {config.block_m} rows for {config.num_warps} warps"
    if scales and config.block_m * config.block_n > _MOST_FLOAT8_SUMS * 32 * config.num_warps:
        return f"a thread has no registers for float8 products of {config.block_m} x {config.block_n}"
    if stages_of(config, dtype.itemsize, pushes=pushers > 0) < 2:
        return f"two stages of {config.block_m} x {config.block_n} x {config.block_k} do not fit into shared memory"
    return ""


def stages_of(config: Config, itemsize: int, *, pushes: bool = False) -> int:
    """Return how many stages of operands fit, with float8 rows' scales, beside half a tile of C in 16 bits.

    pushes: beside boxes that are pushed, too.
    """
    stage = (config.block_m + config.block_n) * config.block_k * itemsize + 4 * config.block_m * (itemsize == 1)
    room = _RING_BYTES - config.block_m * config.block_n - _BOXES * _BOX_ROWS * config.block_k * itemsize * pushes
    return min(_MOST_STAGES, room // stage)


def _layout(block: list[int], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(block, (_ELEMENTS | _FLOAT8)[dtype])


def _of_gluon(described: Any) -> TensorDescriptor:
    """Return the descriptor of `descriptors` as one of Gluon."""
    block = described.block_shape
    return TensorDescriptor(
        described.base, described.shape, described.strides, block, _layout(block, described.base.dtype)
    )


def _left_of(a: torch.Tensor, by: str, config: Config) -> Left:
    found = left_of([a], by, config)
    return found._replace(desc=tuple(map(_of_gluon, found.desc)))


def _right_of(matrices: Sequence[torch.Tensor], by: str, config: Config, *, terms: bool = True) -> Right:
    found = right_of(matrices, by, config, terms=terms)
    return found._replace(desc=tuple(map(_of_gluon, found.desc)))


def _outs_of(cs: Sequence[torch.Tensor], epilogue: TileEpilogue, config: Config) -> tuple[TensorDescriptor, ...] | None:
    """Return the descriptors of C for TMA, or None if tiles have an epilogue, or a C has no descriptor."""
    block = [1, config.block_m, config.block_n // 2]
    # Names of constants are upper case.
    operands = [each for name, each in zip(epilogue._fields, epilogue, strict=True) if name.islower()]
    steps = epilogue.ACTIVATION.value or any(each is not None for each in operands)
    if steps or any(read_by(c, config) != "rows" for c in cs):
        return None
    return tuple([
        TensorDescriptor(c, [1, *c.shape], [c.shape[0] * c.stride(0), *c.stride()], block, _layout(block, c.dtype))
        for c in cs
    ])  # fmt: skip


def _options(config: Config) -> dict[str, Any]:
    # Triton gives a thread of eight warps 256 registers, of which ptxas knows 255.
    most = {"maxnreg": 248} if config.num_warps == 4 else {}
    return {"num_warps": config.num_warps, **most, **FP_FUSION}


def matmul(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, epilogue: TileEpilogue, a_by: str, b_by: str, config: Config
) -> Started | None:
    """Launch c [M, N] = a [M, K] @ b [K, N] and the epilogue, which `refusal` has allowed."""
    return launch(_warp_specialised_matmul_kernel, (config.programs,))(
        _left_of(a, a_by, config), _right_of([b], b_by, config), outputs_of(c), _outs_of([c], epilogue, config),
        epilogue, tiles_of(config, flatten=False), a.shape[0], stages_of(config, a.element_size()), _LOADER_REGISTERS,
        **_options(config),
    )  # fmt: skip


def _outgoing_of(
    of: GatherMatmul, known: GatherLaunchParams, channel: Channel, a: torch.Tensor, arenas: Sequence[torch.Tensor]
) -> Outgoing:
    num_rows, dst_row, *_ = known.counts
    block = [1, min(_BOX_ROWS, of.piece_rows), known.config.block_k]
    half_length, layout = channel.half_bytes // a.element_size(), _layout(block, a.dtype)

    def region(arena: torch.Tensor) -> TensorDescriptor:
        shape = [2, dst_row + max(1, num_rows), max(1, a.shape[1])]
        return TensorDescriptor(arena.view(a.dtype), shape, [half_length, of.pitch, 1], block, layout)

    own = region(channel.data)
    if a.numel():
        own = TensorDescriptor(a, [1, *a.shape], [num_rows * a.stride(0), *a.stride()], block, layout)
    return Outgoing(own, tuple(map(region, arenas)), tl.constexpr(of.on_rows), tl.constexpr(_BOXES), END)


def gather(
    of: GatherMatmul, known: GatherLaunchParams, channel: Channel, a: torch.Tensor, bs: Sequence[torch.Tensor],
    cs: Sequence[torch.Tensor], epilogue: TileEpilogue, scales: Scales | None, table: torch.Tensor, last: bool,
    arenas: Sequence[torch.Tensor],
) -> Started | None:  # fmt: skip
    """Launch c = gather(a) @ b for each b, which `refusal` has allowed.

    of: the launcher, `known`: its parameters. arenas: the channel's. All programs push if any is to: `late` and skipped
    rounds are of the other core.
    """
    config = known.config
    rows, cols = known.arena
    arena = _of_gluon(of_arena(channel, a.dtype, rows, cols, of.pitch, config))
    own = _of_gluon(of_left(a, "rows", config)) if a.numel() and a.stride(1) == 1 else arena
    a_by, in_place, *chunks = known.flags
    lengths = [bs[0].shape[0]] if of.on_rows else of.sizes
    num_steps = sum(-(-length // config.block_k) for length in lengths)
    outgoing = _outgoing_of(of, known, channel, a, arenas) if known.pushers else None
    return launch(_warp_specialised_gather_kernel, (config.programs,))(
        Shard(a, own, arena, a.stride(0), a.stride(1), a.shape[1], a_by, in_place),
        _right_of(bs, known.b_by, config, terms=False), outputs_of(*cs), _outs_of(cs, epilogue, config), epilogue,
        scales, known.tiles, Chunks(table, of.pitch, *chunks), outgoing, channel.group(of.op), channel.rank,
        channel.fingerprint, known.counts[2], num_steps, cs[0].shape[0], not of.on_rows, last,
        stages_of(config, a.element_size(), pushes=bool(known.pushers)), _WAITER_REGISTERS, **_options(config),
    )  # fmt: skip


def scatter(
    known: LaunchParams, channel: Channel, a: torch.Tensor, b: torch.Tensor, table: torch.Tensor,
    scales: Scales | None, arenas: Sequence[torch.Tensor], *, op: int, sizes: Sequence[int], region_rows: int,
    pitch: int,
) -> Started | None:  # fmt: skip
    """Launch a scatter, which `refusal` has allowed; arguments as in `MatmulScatter`."""
    config, row = known.config, region_rows * channel.rank
    block, dtype = [1, config.block_m, config.block_n // 2], a.dtype if scales is None else scales.out.dtype
    layout, N, half_length = _layout(block, dtype), b.shape[1], channel.half_bytes // dtype.itemsize
    # An owner without rows has no tile.
    outs = [
        TensorDescriptor(arena.view(dtype), [2, row + max(1, rows), N], [half_length, pitch, 1], block, layout)
        for arena, rows in zip(arenas, sizes, strict=True)
    ]
    return launch(_warp_specialised_scatter_kernel, (config.programs,))(
        _left_of(a, known.a_by, config), _right_of([b], known.b_by, config), tuple(outs), scales, known.tiles, table,
        channel.group(op), channel.rank, channel.fingerprint, row, known.num_tiles, a.shape[0],
        stages_of(config, a.element_size()), _LOADER_REGISTERS, **_options(config),
    )  # fmt: skip
