"""Matmul + all-reduce in one kernel, for few rows, or for any number of rows if the switch adds.

Programs take roles in the order in which they begin (`signal.turn`):
1. Multiply, and send every tile to its owner, or to all ranks. If there are two multiprocessors or more for each tile,
   programs share its contraction.
2. Add up the tiles that this rank owns, and send the sums to all ranks.
3. Copy the peers' sums.

A role waits only for earlier roles, here or on a peer, which are running or over. So the kernel ends in any order of
programs, and no program holds a multiprocessor that an awaited program needs.

Ranks own columns of tiles, T in all: rank r owns those from r * T // W on. A split by rows would pad few rows to a tile
for each rank, and every rank's rows would read the whole weight again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .choices import MOST_SPLITS
from .contraction import multiply
from .descriptors import fitted_to, read_by
from .epilogue import TileEpilogue, apply
from .launch import Channel, Config, Memo, options, strip_of
from .loading import Started, launch
from .matmul import Tile, matmul_tiles
from .matmul_scatter import rounded, store_part
from .multicast import behind_store, behind_wait, store_to_all, sum_of_all
from .operands import (
    LaunchParams,
    Left,
    Operand,
    Right,
    Scales,
    Tiles,
    a_of_term,
    b_of_term,
    left_of,
    outputs_of,
    right_of,
    tiles_of,
)
from .prepared import prepares
from .reduce import sum_of_parts, wait_for_parts
from .signal import FIRST_SLOT, Link, begin, cdiv, enter, half, leave, or_nan, raise_signal, raise_to_all, turn, wait

# Fewest blocks of K in a part: a smaller part is over before its loads are pipelined. `MOST_SPLITS` limits the parts,
# as each of them is stored and loaded again in float32.
LEAST_BLOCKS = 2


class AllReduce(NamedTuple):
    """Context of the hooks: the link, the operands, and the layout of the ranks' parts.

    Parts lie at the start of an owner's half: M rows each, `pitch` elements apart. TO_ALL: every rank owns all tiles.
    SWITCH: parts stay in the own half, in the owner's rows, where the switch adds them. END: as in `Link`.
    """

    link: Link
    a: Left
    b: Right
    tiles: Tiles
    M: tl.tensor
    pitch: tl.tensor
    scales: Scales | None
    TO_ALL: tl.constexpr
    SWITCH: tl.constexpr
    END: tl.constexpr


@triton.jit
def _first_of(ctx, rank, across):
    # The first of a rank's columns of tiles, with `across` columns in all.
    return rank * across // ctx.link.group.WORLD_SIZE


@triton.jit
def _most(ctx, across):
    # The most columns of tiles of an owner.
    if ctx.TO_ALL:
        return across
    else:
        return cdiv(across, ctx.link.group.WORLD_SIZE)


@triton.jit
def _locate(ctx, index):
    # Column by column, those of the next rank first and the own ones last. `Tile.chunk` is the column of tiles.
    across = cdiv(ctx.b.N[0], ctx.tiles.BLOCK_N)
    down = cdiv(ctx.M, ctx.tiles.BLOCK_M)
    col = (index // down + _first_of(ctx, ctx.link.rank + 1, across)) % across
    row = index % down
    return Tile(col, 0, row, row * ctx.tiles.BLOCK_M, ctx.M, col * ctx.tiles.BLOCK_N)


@triton.jit
def _send(ctx, tile, packed, acc):
    partial = rounded(ctx, tile, acc)
    across = cdiv(ctx.b.N[0], ctx.tiles.BLOCK_N)
    slot = tile.index * _most(ctx, across) + FIRST_SLOT
    if ctx.TO_ALL:
        # Not `range`: unrolled, it keeps the addresses of all ranks in registers. The own rank comes last.
        row = ctx.link.rank * ctx.M
        dst = ctx.link.rank
        more = 1
        while more != 0:
            dst = (dst + 1) % ctx.link.group.WORLD_SIZE
            store_part(ctx, dst, row, tile.col, tile, partial)
            more = dst - ctx.link.rank
        raise_to_all(ctx.link, slot + tile.chunk, True)
    else:
        owner = ((tile.chunk + 1) * ctx.link.group.WORLD_SIZE - 1) // across
        col = tile.chunk - _first_of(ctx, owner, across)
        row = (owner if ctx.SWITCH else ctx.link.rank) * ctx.M
        store_part(ctx, owner, row, col * ctx.tiles.BLOCK_N, tile, partial)
        raise_signal(ctx.link, owner, slot + col)


@triton.jit
def _multiply_parts(ctx, sums, arrivals, pid, num_programs, num_tiles, SPLITS: tl.constexpr):
    # A tile has SPLITS parts of the contraction, in whole blocks of K. The last program to finish its part adds all
    # parts, in their order, and sends the tile.
    BLOCK_M: tl.constexpr = ctx.tiles.BLOCK_M
    BLOCK_N: tl.constexpr = ctx.tiles.BLOCK_N
    BLOCK_K: tl.constexpr = ctx.tiles.BLOCK_K
    length = cdiv(cdiv(ctx.b.K[0], BLOCK_K), SPLITS) * BLOCK_K
    places = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    for index in range(pid, num_tiles * SPLITS, num_programs):
        number = index // SPLITS
        tile = _locate(ctx, number)
        first = index % SPLITS * length
        a = a_of_term(ctx, tile, 0, 0)
        source = a.source
        if ctx.a.BY == "pointers":
            source += first.to(tl.int64) * ctx.a.stride_k[0]
        acc = multiply(
            tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32),
            Operand(
                source, a.stride_m, a.stride_k, 0, a.row, first, min(ctx.b.K[0] - first, length), 0, 0, 0, first
            ),
            tile, b_of_term(ctx, tile, 0), ctx.a.BY, ctx.b.BY, ctx.tiles, False,
        )  # fmt: skip
        parts = sums + number.to(tl.int64) * (SPLITS * BLOCK_M * BLOCK_N) + places
        tl.store(parts + index % SPLITS * (BLOCK_M * BLOCK_N), acc)
        # Release what all threads have stored, and acquire what other programs have stored, as in `leave`.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + number, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            acc = tl.load(parts)
            for part in range(1, SPLITS):
                acc += tl.load(parts + part * (BLOCK_M * BLOCK_N))
            # Zero for the next op.
            tl.store(arrivals + number, 0)
            _send(ctx, tile, 0, acc)


@triton.jit
def _sum_tiles(ctx, out, epilogue, pid, num_programs, sums_row, second_slot, sums_pitch, STRIP: tl.constexpr):
    # Add all ranks' parts of this rank's tiles, with the epilogue, into `out` and into every peer's half.
    BLOCK_M: tl.constexpr = ctx.tiles.BLOCK_M
    BLOCK_N: tl.constexpr = ctx.tiles.BLOCK_N
    dtype: tl.constexpr = out.ptr[0].dtype.element_ty
    base = half(ctx.link, ctx.link.rank, dtype)
    across = cdiv(ctx.b.N[0], BLOCK_N)
    if ctx.TO_ALL:
        first = 0
        own = across
    else:
        first = _first_of(ctx, ctx.link.rank, across)
        own = _first_of(ctx, ctx.link.rank + 1, across) - first
    offs_m = tl.arange(0, STRIP)
    offs_n = tl.arange(0, BLOCK_N)
    for index in range(pid, cdiv(ctx.M, BLOCK_M) * own, num_programs):
        down = index // own
        col = index % own
        ok = wait_for_parts(ctx.link, down * _most(ctx, across) + col + FIRST_SLOT, True)
        if ctx.SWITCH:
            # A name of its own, as in `reduce`.
            summed_col = behind_wait(col, ok)
        # Columns of the parts, and of the result.
        from_n = (col * BLOCK_N + offs_n).to(tl.int64)[None, :]
        at_n = ((first + col) * BLOCK_N + offs_n).to(tl.int64)[None, :]
        for strip in range(0, BLOCK_M, STRIP):
            at_m = (down * BLOCK_M + strip + offs_m).to(tl.int64)[:, None]
            mask = (at_m < ctx.M) & (at_n < ctx.b.N[0])
            if ctx.SWITCH:
                width = ctx.b.N[0] - (first + col) * BLOCK_N
                places = (ctx.link.rank * ctx.M + at_m) * ctx.pitch + summed_col * BLOCK_N
                acc = sum_of_all(ctx.link, dtype, places, at_m < ctx.M, width, BLOCK_N)
            else:
                acc = sum_of_parts(ctx.link, base, out, at_m, from_n, mask, ctx.M, ctx.pitch, False)
            result = apply(
                epilogue, out, 0, down * BLOCK_M + strip + offs_m, (first + col) * BLOCK_N + offs_n,
                down * BLOCK_M + strip + offs_m < ctx.M, (first + col) * BLOCK_N + offs_n < ctx.b.N[0], acc, ok,
            )  # fmt: skip
            if ctx.SWITCH:
                places = (sums_row + at_m) * sums_pitch + (first + col) * BLOCK_N
                store_to_all(ctx.link, result, places, at_m < ctx.M, width, BLOCK_N)
            elif not ctx.TO_ALL:
                dst = (ctx.link.rank + 1) % ctx.link.group.WORLD_SIZE
                while dst != ctx.link.rank:
                    tl.store(half(ctx.link, dst, dtype) + (sums_row + at_m) * sums_pitch + at_n, result, mask=mask)
                    dst = (dst + 1) % ctx.link.group.WORLD_SIZE
        if not ctx.TO_ALL:
            if ctx.SWITCH:
                behind_store()
            raise_to_all(ctx.link, second_slot + down * across + first + col)


@triton.jit
def _copy_tiles(ctx, out, pid, num_programs, sums_row, second_slot, sums_pitch, STRIP: tl.constexpr):
    # Copy the peers' tiles, those of the next rank first.
    BLOCK_M: tl.constexpr = ctx.tiles.BLOCK_M
    BLOCK_N: tl.constexpr = ctx.tiles.BLOCK_N
    dtype: tl.constexpr = out.ptr[0].dtype.element_ty
    base = half(ctx.link, ctx.link.rank, dtype)
    across = cdiv(ctx.b.N[0], BLOCK_N)
    down = cdiv(ctx.M, BLOCK_M)
    after = _first_of(ctx, ctx.link.rank + 1, across)
    own = after - _first_of(ctx, ctx.link.rank, across)
    offs_m = tl.arange(0, STRIP)
    offs_n = tl.arange(0, BLOCK_N)
    for index in range(pid, (across - own) * down, num_programs):
        col = (after + index // down) % across
        row = index % down
        owner = ((col + 1) * ctx.link.group.WORLD_SIZE - 1) // across
        ok = wait(ctx.link, owner, second_slot + row * across + col)
        at_n = (col * BLOCK_N + offs_n).to(tl.int64)[None, :]
        for strip in range(0, BLOCK_M, STRIP):
            at_m = (row * BLOCK_M + strip + offs_m).to(tl.int64)[:, None]
            mask = (at_m < ctx.M) & (at_n < ctx.b.N[0])
            block = tl.load(base + (sums_row + at_m) * sums_pitch + at_n, mask=mask, other=0.0)
            tl.store(out.ptr[0] + at_m * out.stride_m[0] + at_n * out.stride_n[0], or_nan(block, ok), mask=mask)


@triton.jit
def _all_reduce_programs(
    ctx, sums, arrivals, out, epilogue, producers, reducers, num_tiles, sums_row, second_slot, sums_pitch,
    SPLITS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    num_programs = tl.num_programs(0)
    place = turn(ctx.link, num_programs)
    # The first program that does not multiply: it has nothing to do yet, and only programs that wait for nothing begin
    # before it.
    if place == min(producers, num_programs - 1):
        enter(ctx.link)
    if place < producers:
        if SPLITS > 1:
            _multiply_parts(ctx, sums, arrivals, place, producers, num_tiles, SPLITS)
        else:
            matmul_tiles(ctx, place, producers, num_tiles, _locate, a_of_term, b_of_term, _send, 1)
    elif place < producers + reducers:
        _sum_tiles(ctx, out, epilogue, place - producers, reducers, sums_row, second_slot, sums_pitch, STRIP)
    elif not ctx.TO_ALL:
        others = producers + reducers
        _copy_tiles(ctx, out, place - others, num_programs - others, sums_row, second_slot, sums_pitch, STRIP)
    leave(ctx.link, num_programs)


@triton.jit(do_not_specialize=["rank", "fingerprint", "num_tiles", "producers", "reducers", "sums_row", "second_slot"])
def _matmul_all_reduce_kernel(
    a, b, scales, tiles, group, rank, fingerprint: tl.int64, num_tiles, M, pitch, sums, arrivals, out,
    epilogue, producers, reducers, sums_row, second_slot, sums_pitch,
    TO_ALL: tl.constexpr, SPLITS: tl.constexpr, STRIP: tl.constexpr, SWITCH: tl.constexpr,
):  # fmt: skip
    """Run the whole op and end its epoch: multiply, send tiles, add the own ones, send sums, copy the peers' sums.

    Waits for: tiles raised by the peers' (and the own) multiplying programs, which wait for nothing; and sums raised by
    the peers' adding programs, which wait for tiles only.
    """
    _all_reduce_programs(
        AllReduce(
            Link(group, rank, begin(group, rank), fingerprint, 0), a, b, tiles, M, pitch, scales, TO_ALL, SWITCH, 0
        ),
        sums, arrivals, out, epilogue, producers, reducers, num_tiles, sums_row, second_slot, sums_pitch, SPLITS, STRIP,
    )  # fmt: skip


def splits_of(num_tiles: int, num_blocks: int, programs: int, chosen: int = 0) -> int:
    """Return the number of parts of a contraction of `num_blocks` blocks of K, at most `MOST_SPLITS`.

    Every multiprocessor gets a part, unless the number is `chosen`. A part has `LEAST_BLOCKS` or more.
    """
    # Each tile has a counter of its own, and there are as many counters as programs.
    most = chosen if 0 < num_tiles <= programs and chosen else programs // max(1, num_tiles)
    wanted = min(most, num_blocks // LEAST_BLOCKS, MOST_SPLITS)
    # No part is empty.
    return 1 if wanted < 2 else -(-num_blocks // -(-num_blocks // wanted))


def roles_of(num_parts: int, own: int, others: int, programs: int, adders: int = 0) -> tuple[int, int, int]:
    """Return how many programs multiply `num_parts` parts of tiles, add `own` tiles, and copy `others`.

    A role has no more programs than multiprocessors, or than parts or tiles. One program always multiplies, as the
    first program enters the epoch. adders: programs that add from the start, on multiprocessors that do not multiply.
    """
    adders = min(own, adders, programs - 1)
    return max(1, min(num_parts, programs - adders)), adders or min(own, programs), min(others, programs)


class Room(NamedTuple):
    """Space of the op in a half: each rank's part [M, cols], slots for an owner's tiles, and slots for all sums."""

    cols: int
    slots: int
    sums: int


def room_of(M: int, N: int, world_size: int, config: Config, *, to_all: bool) -> Room:
    """Return the space for an out [M, N]."""
    down, across = -(-M // config.block_m), -(-N // config.block_n)
    if to_all:
        return Room(N, down * across, 0)
    most = -(-across // world_size)
    return Room(most * config.block_n, down * most, down * across)


class MatmulAllReduce:
    """Launcher of out [M, N] = the sum over ranks of a [M, K] @ b [K, N], and the epilogue: a whole op.

    pitch: of the rows of ranks' parts, which lie at the start of every half (`room_of`). to_all: each rank adds up all
    tiles. switch: the switch adds, as in `reduce`. adders: as in `roles_of`.
    """

    def __init__(
        self, op: int, world_size: int, rank: int, *, to_all: bool, pitch: int, config: Config,
        scales: str = "", switch: bool = False, adders: int = 0,
    ) -> None:  # fmt: skip
        assert not (switch and to_all)
        self._op, self._world_size, self._rank, self._switch = op, world_size, rank, switch
        self._adders = adders
        self._to_all, self._pitch, self._config, self._scales = to_all, pitch, config, scales
        self._memo = Memo()
        self._strip = strip_of(config)

    @prepares
    def __call__(
        self, channel: Channel, a: torch.Tensor, b: torch.Tensor, scales: Scales | None, out: torch.Tensor,
        epilogue: TileEpilogue, arrivals: torch.Tensor, *, sums_row: int = 0, sums_pitch: int = 0, second_slot: int = 0,
    ) -> Started | None:  # fmt: skip
        """Launch the kernel.

        arrivals: zeros (int32), as many as programs, of this workspace alone; zeros again when the kernel ends. Without
        `to_all`, sums lie from row `sums_row` of every half on, with a signal a tile from `second_slot` on.
        """
        key = a.dtype, a.shape, a.stride(), a.data_ptr() % 16, b.shape, b.stride(), b.data_ptr() % 16
        known = self._memo.get(key) or self._memo.keep(key, self._find_out(a, b))
        config, sums = known.config, None
        if known.splits > 1:
            numel = known.splits * known.num_tiles * config.block_m * config.block_n
            sums = torch.empty(numel, dtype=torch.float32, device=a.device)
        group = channel.groups.get(self._op) or channel.group(self._op)
        started = launch(_matmul_all_reduce_kernel, (sum(known.roles),))(
            left_of([a], known.a_by, config), right_of([b], known.b_by, config), scales, known.tiles, group,
            channel.rank, channel.fingerprint, known.num_tiles, a.shape[0], self._pitch, sums,
            None if sums is None else arrivals, outputs_of(out), epilogue, *known.roles[:2], sums_row, second_slot,
            sums_pitch, self._to_all, known.splits, self._strip, self._switch, **known.options,
        )  # fmt: skip
        return None if started is None else started._replace(scratch=sums)

    def _find_out(self, a: torch.Tensor, b: torch.Tensor) -> LaunchParams:
        config, rank, world_size = fitted_to(self._config, [a], [b]), self._rank, self._world_size
        down, across = -(-a.shape[0] // config.block_m), -(-b.shape[1] // config.block_n)
        own = across if self._to_all else (rank + 1) * across // world_size - rank * across // world_size
        a_by, b_by = read_by(a, config), read_by(b, config)
        splits = 1
        if self._scales != "blocks":
            num_blocks = -(-a.shape[1] // config.block_k)
            splits = splits_of(down * across, num_blocks, config.programs, config.splits)
        tiles = tiles_of(config, flatten=False, scales=self._scales)
        roles = roles_of(splits * down * across, down * own, down * (across - own), config.programs, self._adders)
        return LaunchParams(config, a_by, b_by, tiles, down * across, options(config, a_by, b_by), splits, roles)
