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
from .signal import FIRST_SLOT, Link, begin, cdiv, finish, half, leave, wait


@triton.jit
def wait_for_parts(link, slot, WITH_OWN: tl.constexpr):
    """Wait for the peers' parts under one slot, and for the own part if this kernel makes it (WITH_OWN).

    Returns 1, or 0 if a wait was given up.
    Waits for: what every rank's multiplying or pushing programs raise, which wait for nothing.
    """
    ok = 1
    for i in range(0 if WITH_OWN else 1, link.group.WORLD_SIZE):
        ok &= wait(link, (link.rank + i) % link.group.WORLD_SIZE, slot)
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


@triton.jit(do_not_specialize=["rank", "fingerprint", "num_rows", "region_rows", "result_row", "second_slot"])
def _reduce_kernel(
    x, out, epilogue, group, rank, fingerprint: tl.int64, num_rows, region_rows, result_row, second_slot, pitch,
    result_pitch, TREE: tl.constexpr, PER_PIECE: tl.constexpr, OWN_IN_PLACE: tl.constexpr, BROADCAST: tl.constexpr,
    LAST: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr,
    SWITCH: tl.constexpr,
):  # fmt: skip
    """Sum the regions of the own half into `out`, or with SWITCH this rank's region of all halves.

    BROADCAST: store the sums into the peers' halves too, and signal them at the end. LAST: end the epoch. After a
    broadcast, or if a gather is still to be collected, the collecting kernel ends the epoch.

    Waits for: the peers' previous kernel of this op, which waits for nothing, or with PER_PIECE for its pieces. The own
    previous kernel has ended.
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
    if not PER_PIECE:
        ok = wait_for_parts(link, FIRST_SLOT, False)
    for index in range(pid, cdiv(num_rows, BLOCK_M) * num_tiles_n, num_programs):
        col = index % num_tiles_n * BLOCK_N
        at_n = (col + offs_n).to(tl.int64)[None, :]
        if PER_PIECE:
            ok = wait_for_parts(link, index // num_tiles_n + FIRST_SLOT, False)
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
        finish(link, num_programs, second_slot)
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
    per_piece: bool,
    config: Config,
    own: torch.Tensor | None = None,
    result_row: int | None = None,
    result_pitch: int | None = None,
    second_slot: int = 0,
    last: bool = True,
    tree: bool = False,
    switch: bool = False,
) -> Started | None:
    """Sum W regions of [region_rows, pitch] into out [rows, cols].

    - `per_piece`: parts come in pieces of a tile's rows, with a slot each; else under one slot.
    - `own`: this rank's part [rows, cols], if not in its region.
    - `tree`: regions are float32 subtrees; the number of ranks is a power of two.
    - `switch`: the switch adds this rank's region in the halves of all ranks, this rank included.
    - `result_row`: the result also goes there in every peer's half, under `second_slot`. Its pitch there is `pitch`, or
      `result_pitch` with `tree`.
    - `last`: end the epoch, if there is no `result_row`.
    """
    rows = out.shape[0]
    return launch(_reduce_kernel, (config.programs,))(
        rows_of(out if own is None else own), outputs_of(out), epilogue, channel.group(op), channel.rank,
        channel.fingerprint, rows, region_rows, result_row or 0, second_slot, pitch, result_pitch,
        tree, per_piece, own is not None,
        result_row is not None, last and result_row is None, rows % 16 == 0 and out.stride(0) == 1,
        config.block_m, config.block_n, strip_of(config), switch, **moving_options(config),
    )  # fmt: skip
