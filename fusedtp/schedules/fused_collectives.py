"""The collectives alone as kernels, and what the fused matmuls share with them. Phases as in `fused`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels import INTERPRETED
from ..kernels.launch import Config, config_for, pitch_of
from ..kernels.push import collect
from ..kernels.reduce import reduce
from ..kernels.ring import ring
from ..kernels.signal import FIRST_SLOT
from ..overlap import Work
from ..shards import even_sizes
from ..workspace import Workspace
from .phases import Phases
from .producer import choose, piece_rows, produce
from .transport import one_shot, settle


def config_of(ws: Workspace, x: Tensor, *shape: int) -> Config:
    """The configuration on this device, for a matmul's shape if any, as in `config_for`."""
    config = config_for(x.device, x.dtype, *shape)
    return replace(config, programs=ws.programs) if ws.programs else config


def num_tiles(rows: int, cols: int, config: Config) -> int:
    """Tiles of C [rows, cols]."""
    return -(-rows // config.block_m) * -(-cols // config.block_n)


def gather_work(ws: Workspace, a: Tensor, M: int, N: int, K: int, *, by_depth: bool = False) -> Work:
    """The cost model's words for a gather of a [M, K] in front of a matmul with N columns, 0 for none."""
    dtype = str(a.dtype).removeprefix("torch.")
    return Work("gather", M if N else 0, N, K if N else 0, M * K, ws.world_size, dtype, by_depth=by_depth)


def reduce_and_collect(
    ws: Workspace, op: str, out: Tensor, bias: Tensor | None, sizes: tuple[int, ...], region_rows: int, pitch: int,
    config: Config, own: Tensor | None,
) -> Generator[None, None, None]:  # fmt: skip
    """The second half of a two-shot all-reduce: own rows are summed and stored everywhere, then all are collected."""
    result_row, begin = ws.world_size * region_rows, sum(sizes[: ws.rank])
    second_slot = FIRST_SLOT.value + num_tiles(region_rows, out.shape[1], config)
    mine = out[begin : begin + sizes[ws.rank]]
    reduce(
        ws.channel(), op, mine, bias, region_rows=region_rows, pitch=pitch, per_tile=own is None, config=config,
        upcast=INTERPRETED,
        own=None if own is None else own[begin : begin + sizes[ws.rank]], result_row=result_row + begin,
        second_slot=second_slot,
    )  # fmt: skip
    yield
    collect(
        ws.channel(), op, out, ws.table(sizes),
        first_slot=second_slot, region_row=result_row, pitch=pitch, per_tile=True, config=config,
    )  # fmt: skip


def all_gather_phases(
    ws: Workspace, x: Tensor, sizes: tuple[int, ...], algorithm: str, *, producer: str = "auto"
) -> Phases:
    """x [sizes[rank], C] of every rank, one below the other."""
    if ws.world_size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    op, config = "all_gather", config_of(ws, x)
    cols, begin = x.shape[1], sum(sizes[: ws.rank])
    out = x.new_empty(sum(sizes), cols)
    pitch, table = pitch_of(cols, x.dtype), ws.table(sizes)
    piece = piece_rows(pitch * x.element_size(), config)
    slots = max(len(sizes) * num_tiles(max(sizes), cols, config), -(-max(sizes) // piece))
    ws.require(sum(sizes) * pitch * x.element_size(), FIRST_SLOT.value + slots)
    yield
    if algorithm == "ring":
        ring(ws.channel(), op, x, out, table, sizes, pitch=pitch, config=config, upcast=INTERPRETED)
        return out
    producer = choose(ws, gather_work(ws, x, sum(sizes), 0, cols), asked_for=producer)
    produce(ws, op, x, sizes, producer=producer, dst_row=begin, pitch=pitch, config=config, piece=piece)
    out[begin : begin + sizes[ws.rank]].copy_(x)
    yield
    settle(ws)
    collect(
        ws.channel(), op, out, table, first_slot=FIRST_SLOT.value, region_row=0, pitch=pitch, per_tile=False,
        piece_rows=piece, config=config,
    )  # fmt: skip
    return out


def reduce_scatter_phases(
    ws: Workspace, x: Tensor, sizes: tuple[int, ...], algorithm: str, *, producer: str = "push"
) -> Phases:
    """The own rows of the sum over ranks of x [sum(sizes), C]."""
    if ws.world_size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    op, config = "reduce_scatter", config_of(ws, x)
    cols, begin, region_rows = x.shape[1], sum(sizes[: ws.rank]), max(sizes)
    out = x.new_empty(sizes[ws.rank], cols)
    pitch, table = pitch_of(cols, x.dtype), ws.table(sizes)
    rows = sum(sizes) if algorithm == "ring" else ws.world_size * region_rows
    ws.require(rows * pitch * x.element_size(), FIRST_SLOT.value + len(sizes) * num_tiles(region_rows, cols, config))
    yield
    if algorithm == "ring":
        ring(ws.channel(), op, x, out, table, sizes, pitch=pitch, config=config, upcast=INTERPRETED)
        return out
    produce(
        ws, op, x, sizes, producer=producer, dst_row=ws.rank * region_rows, pitch=pitch, config=config,
        piece=config.block_m, scatter=True,
    )  # fmt: skip
    yield
    settle(ws)
    reduce(
        ws.channel(), op, out, None, region_rows=region_rows, pitch=pitch, per_tile=False, config=config,
        upcast=INTERPRETED,
        own=x[begin : begin + sizes[ws.rank]],
    )  # fmt: skip
    return out


def all_reduce_phases(ws: Workspace, x: Tensor, algorithm: str, *, producer: str = "push") -> Phases:
    """The sum over ranks of x [R, C], on every rank."""
    if ws.world_size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    op, config = "all_reduce", config_of(ws, x)
    rows, cols = x.shape
    out = x.new_empty(rows, cols)
    pitch, sizes = pitch_of(cols, x.dtype), even_sizes(rows, ws.world_size)
    at_once = one_shot(ws, "fused", algorithm, out, alone=True)
    region_rows = rows if at_once else max(sizes)
    slots = FIRST_SLOT.value + 2 * len(sizes) * num_tiles(region_rows, cols, config)
    ws.require((ws.world_size * region_rows + rows) * pitch * x.element_size(), slots)
    yield
    if algorithm == "ring":
        ring(ws.channel(), op, x, out, ws.table(sizes), sizes, pitch=pitch, config=config, upcast=INTERPRETED)
        return out
    produce(
        ws, op, x, sizes, producer=producer, dst_row=ws.rank * region_rows, pitch=pitch, config=config,
        piece=config.block_m, scatter=not at_once,
    )  # fmt: skip
    yield
    settle(ws)
    if at_once:
        reduce(
            ws.channel(), op, out, None, region_rows=rows, pitch=pitch, per_tile=False, config=config,
            upcast=INTERPRETED, own=x,
        )  # fmt: skip
    else:
        yield from reduce_and_collect(ws, op, out, None, sizes, region_rows, pitch, config, own=x)
    return out
