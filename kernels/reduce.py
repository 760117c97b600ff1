"""Reduction, the owner's side of a scatter: add W regions of the own half, one for each rank, in rank order.

Producers round a partial sum once to the wire dtype. The owner adds in float32, rank 0 first, adds bias and residual,
and rounds once: the same bits on every run, and for every rank that owns the same rows. Subtrees (`contraction`) arrive
in float32 and are added in pairs, and pairs in pairs. If any order is allowed, the switch may add instead
(`multicast`). Every rank's part then lies in its own half, in the owner's region, and the owner loads the sum, in the
wire dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .epilogue import TileEpilogue, apply
from .launch import Channel, Config, moving_options, strip_of
from .loading import Started, launch
from .multicast import behind_store, behind_wait, empty_sum, store_to_all, sum_of_all
from .operands import outputs_of
from .prepared import prepares
from .push import rows_of
from .signal import FIRST_SLOT, Link, begin, cdiv, half, leave, raise_to_all, wait


@triton.jit
def wait_for_parts(link, slot, OWN_IN_PLACE: tl.constexpr):
    """Wait for all ranks' parts under one slot, without the own part if OWN_IN_PLACE.

    Returns 1, or 0 if a wait was given up.
    Waits for: tiles or pieces raised by every rank's multiplying or pushing programs, which wait for nothing.
    """
    ok = 1
    for src in range(0, link.group.WORLD_SIZE):
        if OWN_IN_PLACE:
            if src != link.rank:
                ok &= wait(link, src, slot)
        else:
            ok &= wait(link, src, slot)
    return ok


@triton.jit
def _wait_for_tiles(link, index, num_tiles_n, num_rows, shift, BLOCK_M: tl.constexpr):
    # Wait for the tiles that have the rows of tile `index`, if tiles are joined: one, or two, one below the other. The
    # own rows begin at row `shift` of the first tile.
    first = index // num_tiles_n
    last = (shift + min(num_rows, (first + 1) * BLOCK_M) - 1) // BLOCK_M
    ok = 1
    # Not `range`, as in `wait_for_rows`.
    more = 1
    while more != 0:
        ok &= wait_for_parts(link, index + FIRST_SLOT, False)
        index += num_tiles_n
        first += 1
        more = (first <= last).to(tl.int32)
    return ok


@triton.jit
def _part_of(link, base, own, src, at_m, at_n, mask, region_rows, pitch, OWN_IN_PLACE: tl.constexpr):
    part = base + (src * region_rows + at_m) * pitch + at_n
    if OWN_IN_PLACE:
        if src == link.rank:
            part = own.ptr + at_m * own.stride_m + at_n * own.stride_n
    return tl.load(part, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def sum_of_parts(link, base, own, at_m, at_n, mask, region_rows, pitch, OWN_IN_PLACE: tl.constexpr):
    """Return the sum of all ranks' parts at these places of their regions, in float32, in rank order."""
    acc = empty_sum(mask)
    for src in range(0, link.group.WORLD_SIZE):
        acc += _part_of(link, base, own, src, at_m, at_n, mask, region_rows, pitch, OWN_IN_PLACE)
    return acc


@triton.jit
def tree_of_parts(
    link, base, own, src, at_m, at_n, mask, region_rows, pitch, OWN_IN_PLACE: tl.constexpr, COUNT: tl.constexpr
):
    """Return the sum of the parts of COUNT ranks from `src` on, in float32, added as a tree."""
    acc = empty_sum(mask)
    if COUNT > 1:
        for side in range(0, 2):
            first = src + side * (COUNT // 2)
            acc += tree_of_parts(
                link, base, own, first, at_m, at_n, mask, region_rows, pitch, OWN_IN_PLACE, COUNT // 2
            )  # fmt: skip
    else:
        acc += _part_of(link, base, own, src, at_m, at_n, mask, region_rows, pitch, OWN_IN_PLACE)
    return acc


@triton.jit(do_not_specialize=["rank", "fingerprint", "num_rows", "region_rows", "result_row", "second_slot", "shift"])
def _reduce_kernel(
    x, out, epilogue, group, rank, fingerprint: tl.int64, num_rows, region_rows, result_row, second_slot, pitch,
    result_pitch, shift,
    TREE: tl.constexpr, PER_TILE: tl.constexpr, OWN_IN_PLACE: tl.constexpr, BROADCAST: tl.constexpr, LAST: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr,
    SWITCH: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Sum the regions of the own half into `out`, or with SWITCH this rank's region of all halves.

    BROADCAST: store the sums into the peers' halves too, and signal each tile. LAST: end the epoch. After a broadcast,
    or if a gather is still to be collected, the collecting kernel ends the epoch. JOINED: tiles may have rows of more
    than one owner, and the own rows begin at row `shift` of one.

    Waits for: pieces or tiles raised by the peers' (and the own) previous kernel of this op, which waits for nothing.
    """
    link = Link(group, rank, begin(group, rank), fingerprint, 0)
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    dtype: tl.constexpr = out.ptr[0].dtype.element_ty
    N = out.N[0]
    # A tree's parts are float32. Other parts have the results' dtype and pitch.
    if TREE:
        base = half(link, link.rank, tl.float32)
    else:
        base = half(link, link.rank, dtype)
        result_pitch = pitch
    num_tiles_n = cdiv(N, BLOCK_N)
    offs_m = tl.arange(0, STRIP)
    offs_n = tl.arange(0, BLOCK_N)
    for index in range(pid, cdiv(num_rows, BLOCK_M) * num_tiles_n, num_programs):
        col = index % num_tiles_n * BLOCK_N
        at_n = (col + offs_n).to(tl.int64)[None, :]
        if JOINED:
            ok = _wait_for_tiles(link, index, num_tiles_n, num_rows, shift, BLOCK_M)
        else:
            ok = wait_for_parts(link, (index if PER_TILE else index // num_tiles_n) + FIRST_SLOT, OWN_IN_PLACE)
        if SWITCH:
            # A name of its own: the compiler knows no alignment of what comes out of the fence.
            summed_col = behind_wait(col, ok)
        # A strip of the tile at a time: if nothing is aligned, every element has an address of its own.
        for strip in range(0, BLOCK_M, STRIP):
            row = index // num_tiles_n * BLOCK_M + strip
            left = num_rows - row
            if ALIGNED:
                # Without the hint, contiguous columns are stored one element at a time.
                left = tl.multiple_of(left, 16)
            mask = (offs_m < left)[:, None] & (offs_n < N - col)[None, :]
            at_m = (row + offs_m).to(tl.int64)[:, None]
            if TREE:
                acc = tree_of_parts(
                    link, base, x, 0, at_m, at_n, mask, region_rows, pitch, OWN_IN_PLACE, group.WORLD_SIZE
                )
            elif SWITCH:
                places = (link.rank * region_rows + at_m) * pitch + summed_col
                acc = sum_of_all(link, dtype, places, (offs_m < left)[:, None], N - col, BLOCK_N)
            else:
                acc = sum_of_parts(link, base, x, at_m, at_n, mask, region_rows, pitch, OWN_IN_PLACE)
            result = apply(epilogue, out, 0, row + offs_m, col + offs_n, offs_m < left, offs_n < N - col, acc, ok)
            if BROADCAST and SWITCH:
                places = (result_row + at_m) * result_pitch + col
                store_to_all(link, result, places, (offs_m < left)[:, None], N - col, BLOCK_N)
            elif BROADCAST:
                for i in range(1, link.group.WORLD_SIZE):
                    dst = (link.rank + i) % link.group.WORLD_SIZE
                    tl.store(half(link, dst, dtype) + (result_row + at_m) * result_pitch + at_n, result, mask=mask)
        if BROADCAST:
            if SWITCH:
                behind_store()
            raise_to_all(link, second_slot + index)
    if LAST:
        leave(link, num_programs)


@prepares
def reduce(
    channel: Channel,
    op: int,
    out: torch.Tensor,
    epilogue: TileEpilogue,
    *,
    region_rows: int,
    pitch: int,
    per_tile: bool,
    config: Config,
    own: torch.Tensor | None = None,
    result_row: int | None = None,
    result_pitch: int | None = None,
    second_slot: int = 0,
    last: bool = True,
    tree: bool = False,
    switch: bool = False,
    joined_from: int | None = None,
) -> Started | None:
    """Sum W regions of [region_rows, pitch] into out [rows, cols].

    - `own`: this rank's part [rows, cols], if not in its region.
    - `tree`: regions are float32 subtrees; the number of ranks is a power of two.
    - `switch`: the switch adds this rank's region in the halves of all ranks, this rank included.
    - `result_row`: the result also goes there in every peer's half, with a signal a tile from `second_slot` on. Its
      pitch there is `pitch`, or `result_pitch` with `tree`.
    - `last`: end the epoch, if there is no `result_row`.
    - `joined_from`: tiles may have rows of several owners, and the own rows begin at this row of all.
    """
    rows = out.shape[0]
    return launch(_reduce_kernel, (config.programs,))(
        rows_of(out if own is None else own), outputs_of(out), epilogue, channel.group(op), channel.rank,
        channel.fingerprint, rows, region_rows, result_row or 0, second_slot, pitch, result_pitch,
        (joined_from or 0) % config.block_m, tree, per_tile, own is not None,
        result_row is not None, last and result_row is None, rows % 16 == 0 and out.stride(0) == 1,
        config.block_m, config.block_n, strip_of(config), switch, joined_from is not None, **moving_options(config),
    )  # fmt: skip
