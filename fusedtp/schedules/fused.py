"""One persistent Triton kernel an op, its collective inside, over symmetric memory. Contract: the header of
`kernels.signal`.

Each op is written as a generator (`phases`): it makes room, then issues one kernel between two yields.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import workspaces
from ..kernels import INTERPRETED
from ..kernels.gather_matmul import gather_matmul, own_in_place
from ..kernels.launch import Config, config_for, pitch_of
from ..kernels.matmul import matmul
from ..kernels.matmul_scatter import matmul_scatter
from ..kernels.push import collect
from ..kernels.reduce import reduce
from ..kernels.ring import ring
from ..kernels.signal import FIRST_SLOT
from ..overlap import Work
from ..shards import even_sizes
from ..workspace import Workspace
from .phases import Phases, run
from .producer import choose, finish, piece_rows, produce, with_pushers
from .transport import one_shot, settle


def _config(ws: Workspace, x: Tensor, *shape: int) -> Config:
    # Of a matmul's shape, if any, as in `config_for`.
    config = config_for(x.device, x.dtype, *shape)
    return replace(config, programs=ws.programs) if ws.programs else config


def _tiles(rows: int, cols: int, config: Config) -> int:
    return -(-rows // config.block_m) * -(-cols // config.block_n)


def _local(a: Tensor, b: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    # a @ b without communication; the result is (a @ b).T, contiguous, if transposed.
    out, c = _out(a, a.shape[0], b.shape[1], transposed)
    config = config_for(a.device, a.dtype, *c.shape)
    matmul(a, b, c, bias, config=config, upcast=INTERPRETED, transposed=transposed)
    return out


def _out(a: Tensor, M: int, N: int, transposed: bool) -> tuple[Tensor, Tensor]:
    # What is returned, and the same memory as the kernel's C [M, N].
    out = a.new_empty((N, M) if transposed else (M, N))
    return out, out.t() if transposed else out


def gather_matmul_phases(
    ws: Workspace,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    gather_dim: int,
    sizes: tuple[int, ...],
    *,
    transposed: bool = False,
    gathered: Tensor | None = None,
    split: bool = False,
    producer: str = "auto",
) -> Phases:
    """gather(a) @ b + bias, or its transpose. `gathered` [M, K] is filled with gather(a), for gather_dim 0.

    producer: see `producer`. With `split` the programs that push are a kernel of their own, issued first.
    """
    if ws.world_size == 1:
        if gathered is not None:
            gathered.copy_(a)
        return _local(a, b, bias, transposed=transposed)
    most_rows = max(sizes) if gather_dim == 0 else a.shape[0]
    op, config = "all_gather_matmul", _config(ws, a, most_rows, b.shape[1])
    M, K = (sum(sizes), a.shape[1]) if gather_dim == 0 else (a.shape[0], sum(sizes))
    pitch = pitch_of(K if gather_dim == 0 else max(sizes), a.dtype)
    rows = M if gather_dim == 0 else ws.world_size * M
    piece = piece_rows(pitch * a.element_size(), config)
    pieces = -(-most_rows // piece)
    ws.require(rows * pitch * a.element_size(), FIRST_SLOT.value + pieces)
    yield
    out, c = _out(a, M, b.shape[1], transposed)
    producer = choose(ws, _gather_work(ws, a, M, b.shape[1], K, by_depth=gather_dim == 1), asked_for=producer)
    table, begin = ws.table(sizes), sum(sizes[: ws.rank])
    issued = split or producer == "copy"
    if issued:
        produce(
            ws, op, a, sizes, producer=producer, dst_row=begin if gather_dim == 0 else ws.rank * M, pitch=pitch,
            config=config, piece=piece, with_own=not own_in_place(a),
        )  # fmt: skip
        yield
    gather_matmul(
        ws.channel(), a, b, c, bias, table, sizes, gather_dim=gather_dim, pitch=pitch, piece_rows=piece, pushed=issued,
        config=with_pushers(ws, config), upcast=INTERPRETED, transposed=transposed,
        last=gathered is None and producer != "copy",
    )  # fmt: skip
    if gathered is not None:
        gathered[begin : begin + sizes[ws.rank]].copy_(a)
        settle(ws)
        collect(
            ws.channel(), op, gathered, table, first_slot=FIRST_SLOT.value, region_row=0, pitch=pitch, per_tile=False,
            piece_rows=piece, config=config,
        )  # fmt: skip
    elif producer == "copy":
        finish(ws, op)
    return out


def _gather_work(ws: Workspace, a: Tensor, M: int, N: int, K: int, *, by_depth: bool = False) -> Work:
    # The cost model's words for a gather of a [M, K] in front of a matmul with N columns, 0 for none.
    dtype = str(a.dtype).removeprefix("torch.")
    return Work("gather", M if N else 0, N, K if N else 0, M * K, ws.world_size, dtype, by_depth=by_depth)


def matmul_scatter_phases(
    ws: Workspace, a: Tensor, b: Tensor, bias: Tensor | None, scatter_dim: int, sizes: tuple[int, ...]
) -> Phases:
    """The own chunk of sum over ranks of a @ b, plus bias. Columns are rows of the transposed problem."""
    if ws.world_size == 1:
        return _local(a, b, bias)
    out = a.new_empty((sizes[ws.rank], b.shape[1]) if scatter_dim == 0 else (a.shape[0], sizes[ws.rank]))
    if scatter_dim == 1:
        a, b = b.t(), a.t()
        if bias is not None:
            bias = bias.split(sizes)[ws.rank]
    N, region_rows = b.shape[1], max(sizes)
    op, config = "matmul_reduce_scatter", _config(ws, a, region_rows, N)
    pitch = pitch_of(N, a.dtype)
    ws.require(
        ws.world_size * region_rows * pitch * a.element_size(), FIRST_SLOT.value + _tiles(region_rows, N, config)
    )
    yield
    matmul_scatter(
        ws.channel(), op, a, b, ws.table(sizes), sizes,
        region_rows=region_rows, pitch=pitch, to_all=False, config=config, upcast=INTERPRETED,
    )  # fmt: skip
    yield
    reduce(
        ws.channel(), op, out if scatter_dim == 0 else out.t(), bias,
        bias_along="columns" if scatter_dim == 0 else "rows",
        region_rows=region_rows, pitch=pitch, per_tile=True, config=config, upcast=INTERPRETED,
    )  # fmt: skip
    return out


def matmul_scatter_and_gather_phases(
    ws: Workspace, a: Tensor, b: Tensor, x: Tensor, sizes: tuple[int, ...], gathered: Tensor, *, producer: str = "auto"
) -> Phases:
    """The own chunk of sum over ranks of a @ b; fills `gathered` [M, C] with gather(x), sent beside a @ b."""
    op, config = "matmul_reduce_scatter", _config(ws, a, max(sizes), b.shape[1])
    out = a.new_empty(sizes[ws.rank], b.shape[1])
    N, cols, region_rows, begin = b.shape[1], x.shape[1], max(sizes), sum(sizes[: ws.rank])
    pitch, x_pitch = pitch_of(N, a.dtype), pitch_of(cols, x.dtype)
    # x's region follows the partial sums', and its signals theirs.
    x_row = -(-ws.world_size * region_rows * pitch // max(1, x_pitch))
    x_slot = FIRST_SLOT.value + _tiles(region_rows, N, config)
    piece = piece_rows(x_pitch * x.element_size(), config)
    pieces = -(-region_rows // piece)
    ws.require((x_row + sum(sizes)) * x_pitch * a.element_size(), x_slot + pieces)
    yield
    # What it can hide behind is the product: rows of every rank by N columns.
    producer = choose(ws, _gather_work(ws, x, sum(sizes), N, cols), asked_for=producer)
    produce(
        ws, op, x, sizes, producer=producer, dst_row=x_row + begin, pitch=x_pitch, config=config, piece=piece,
        first_slot=x_slot, beside=True,
    )  # fmt: skip
    matmul_scatter(
        ws.channel(), op, a, b, ws.table(sizes), sizes,
        region_rows=region_rows, pitch=pitch, to_all=False, config=config, upcast=INTERPRETED,
    )  # fmt: skip
    gathered[begin : begin + sizes[ws.rank]].copy_(x)
    yield
    reduce(
        ws.channel(), op, out, None, region_rows=region_rows, pitch=pitch, per_tile=True, config=config,
        upcast=INTERPRETED, last=False,
    )  # fmt: skip
    settle(ws)
    collect(
        ws.channel(), op, gathered, ws.table(sizes),
        first_slot=x_slot, region_row=x_row, pitch=x_pitch, per_tile=False, piece_rows=piece, config=config,
    )  # fmt: skip
    return out


def matmul_all_reduce_phases(ws: Workspace, a: Tensor, b: Tensor, bias: Tensor | None, algorithm: str) -> Phases:
    """sum over ranks of a @ b, plus bias, on every rank: everybody reduces everything, or each its rows and then shows
    them.
    """
    if ws.world_size == 1:
        return _local(a, b, bias)
    (M, _), N = a.shape, b.shape[1]
    out = a.new_empty(M, N)
    pitch = pitch_of(N, a.dtype)
    at_once = one_shot(ws, "fused", algorithm, out, alone=False)
    sizes = even_sizes(M, ws.world_size)
    region_rows = M if at_once else max(sizes)
    # Every tile of a one-shot sum is stored to all ranks: a narrow one leaves room for their addresses.
    op, config = "matmul_all_reduce", _config(ws, a, region_rows, 0 if at_once else N)
    first, tiles = FIRST_SLOT.value, _tiles(region_rows, N, config)
    result_row = ws.world_size * region_rows
    ws.require((result_row + (0 if at_once else M)) * pitch * a.element_size(), first + 2 * tiles)
    yield
    matmul_scatter(
        ws.channel(), op, a, b, ws.table(sizes), sizes,
        region_rows=region_rows, pitch=pitch, to_all=at_once, config=config, upcast=INTERPRETED,
    )  # fmt: skip
    yield
    if at_once:
        reduce(
            ws.channel(), op, out, bias, region_rows=region_rows, pitch=pitch, per_tile=True, config=config,
            upcast=INTERPRETED,
        )  # fmt: skip
    else:
        yield from _reduce_and_collect(ws, op, out, bias, sizes, region_rows, pitch, config, own=None)
    return out


def _reduce_and_collect(
    ws: Workspace, op: str, out: Tensor, bias: Tensor | None, sizes: tuple[int, ...], region_rows: int, pitch: int,
    config: Config, own: Tensor | None,
) -> Generator[None, None, None]:  # fmt: skip
    # The second half of a two-shot all-reduce: the own rows are summed and stored everywhere, then everybody's are
    # collected.
    result_row, begin = ws.world_size * region_rows, sum(sizes[: ws.rank])
    second_slot = FIRST_SLOT.value + _tiles(region_rows, out.shape[1], config)
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
    op, config = "all_gather", _config(ws, x)
    cols, begin = x.shape[1], sum(sizes[: ws.rank])
    out = x.new_empty(sum(sizes), cols)
    pitch, table = pitch_of(cols, x.dtype), ws.table(sizes)
    piece = piece_rows(pitch * x.element_size(), config)
    slots = max(len(sizes) * _tiles(max(sizes), cols, config), -(-max(sizes) // piece))
    ws.require(sum(sizes) * pitch * x.element_size(), FIRST_SLOT.value + slots)
    yield
    if algorithm == "ring":
        ring(ws.channel(), op, x, out, table, sizes, pitch=pitch, config=config, upcast=INTERPRETED)
        return out
    producer = choose(ws, _gather_work(ws, x, sum(sizes), 0, cols), asked_for=producer)
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
    op, config = "reduce_scatter", _config(ws, x)
    cols, begin, region_rows = x.shape[1], sum(sizes[: ws.rank]), max(sizes)
    out = x.new_empty(sizes[ws.rank], cols)
    pitch, table = pitch_of(cols, x.dtype), ws.table(sizes)
    rows = sum(sizes) if algorithm == "ring" else ws.world_size * region_rows
    ws.require(rows * pitch * x.element_size(), FIRST_SLOT.value + len(sizes) * _tiles(region_rows, cols, config))
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
    op, config = "all_reduce", _config(ws, x)
    rows, cols = x.shape
    out = x.new_empty(rows, cols)
    pitch, sizes = pitch_of(cols, x.dtype), even_sizes(rows, ws.world_size)
    at_once = one_shot(ws, "fused", algorithm, out, alone=True)
    region_rows = rows if at_once else max(sizes)
    slots = FIRST_SLOT.value + 2 * len(sizes) * _tiles(region_rows, cols, config)
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
        yield from _reduce_and_collect(ws, op, out, None, sizes, region_rows, pitch, config, own=x)
    return out


def all_gather_matmul(
    a: Tensor, b: Tensor, bias: Tensor | None, *, gather_dim: int, sizes: tuple[int, ...], group: ProcessGroup,
    transposed: bool = False,
) -> Tensor:  # fmt: skip
    """See `schedules`."""
    ws = workspaces.get(group, a.device)
    phases = gather_matmul_phases(ws, a, b, bias, gather_dim, sizes, transposed=transposed)
    return run(ws, "all_gather_matmul", phases)


def all_gather_two_matmuls(
    a: Tensor, b: Tensor, right: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """See `schedules`."""
    ws = workspaces.get(group, a.device)
    gathered = a.new_empty(sum(sizes), a.shape[1])
    first = run(ws, "all_gather_matmul", gather_matmul_phases(ws, a, b, None, 0, sizes, gathered=gathered))
    return first, _local(gathered.t(), right)


def matmul_reduce_scatter(
    a: Tensor, b: Tensor, bias: Tensor | None, *, scatter_dim: int, sizes: tuple[int, ...], group: ProcessGroup
) -> Tensor:
    """See `schedules`."""
    ws = workspaces.get(group, a.device)
    return run(ws, "matmul_reduce_scatter", matmul_scatter_phases(ws, a, b, bias, scatter_dim, sizes))


def matmul_scatter_and_gather(
    a: Tensor, b: Tensor, left: Tensor, x: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """See `schedules`."""
    ws = workspaces.get(group, a.device)
    if ws.world_size == 1:
        return _local(a, b), _local(left, x)
    gathered = x.new_empty(sum(sizes), x.shape[1])
    phases = matmul_scatter_and_gather_phases(ws, a, b, x, sizes, gathered)
    return run(ws, "matmul_reduce_scatter", phases), _local(left, gathered)


def matmul_all_reduce(
    a: Tensor, b: Tensor, bias: Tensor | None, *, group: ProcessGroup, algorithm: str = "auto"
) -> Tensor:
    """See `schedules`."""
    ws = workspaces.get(group, a.device)
    return run(ws, "matmul_all_reduce", matmul_all_reduce_phases(ws, a, b, bias, algorithm))


def all_gather(x: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """See `schedules`."""
    ws = workspaces.get(group, x.device)
    return run(ws, "all_gather", all_gather_phases(ws, x, sizes, algorithm))


def reduce_scatter(x: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """See `schedules`."""
    ws = workspaces.get(group, x.device)
    return run(ws, "reduce_scatter", reduce_scatter_phases(ws, x, sizes, algorithm))


def all_reduce(x: Tensor, *, group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """See `schedules`."""
    ws = workspaces.get(group, x.device)
    return run(ws, "all_reduce", all_reduce_phases(ws, x, algorithm))
