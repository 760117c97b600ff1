"""One persistent Triton kernel an op, its collective inside, over symmetric memory. Contract: the header of
`kernels.signal`.

Each op is written as a generator: it makes room, then issues one kernel between two yields. With one process a rank
they run straight through; virtual ranks in one process run them in step, so that all have made room before the first
signal, and every producer is issued before the first consumer (`run_together`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import workspace
from ..kernels import INTERPRETED
from ..kernels.gather_matmul import gather_matmul, own_in_place
from ..kernels.launch import Config, config_for, pitch_of
from ..kernels.matmul import matmul
from ..kernels.matmul_scatter import matmul_scatter
from ..kernels.push import collect, push
from ..kernels.reduce import reduce
from ..kernels.ring import ring
from ..kernels.signal import FIRST_SLOT
from ..shards import even_sizes
from ..workspace import Workspace
from .transport import settle, travelling

Phases = Generator[None, None, Tensor]

# Up to this many bytes of result a one-shot all-reduce sends less latency than it costs in bytes.
ONE_SHOT_BYTES = 256 << 10


def run(ws: Workspace, op: str, phases: Phases) -> Tensor:
    """Issue every phase of one rank's op."""
    with ws.running(op):
        while True:
            try:
                next(phases)
            except StopIteration as stop:
                out: Tensor = stop.value
                return out


def run_together(phases: Sequence[Phases]) -> list[Tensor]:
    """Issue the same op of several virtual ranks phase by phase; their results in rank order."""
    results: dict[int, Tensor] = {}
    while len(results) < len(phases):
        for rank, each in enumerate(phases):
            if rank not in results:
                try:
                    next(each)
                except StopIteration as stop:
                    results[rank] = stop.value
    return [results[rank] for rank in range(len(phases))]


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
) -> Phases:
    """gather(a) @ b + bias, or its transpose. `gathered` [M, K] is filled with gather(a), for gather_dim 0.

    With `split` the pushing programs are a kernel of their own, issued first.
    """
    if ws.world_size == 1:
        if gathered is not None:
            gathered.copy_(a)
        return _local(a, b, bias, transposed=transposed)
    most_rows = max(sizes) if gather_dim == 0 else a.shape[0]
    op, config = "all_gather_matmul", config_for(a.device, a.dtype, most_rows, b.shape[1])
    M, K = (sum(sizes), a.shape[1]) if gather_dim == 0 else (a.shape[0], sum(sizes))
    pitch = pitch_of(K if gather_dim == 0 else max(sizes), a.dtype)
    rows = M if gather_dim == 0 else ws.world_size * M
    pieces = -(-most_rows // config.block_m)
    ws.require(rows * pitch * a.element_size(), FIRST_SLOT.value + pieces)
    yield
    out, c = _out(a, M, b.shape[1], transposed)
    table, begin = ws.table(sizes), sum(sizes[: ws.rank])
    if split:
        push(
            ws.channel(), op, a, table, dst_row=begin if gather_dim == 0 else ws.rank * M,
            pitch=pitch, scatter=False, with_own=not own_in_place(a), config=config,
        )  # fmt: skip
        yield
    gather_matmul(
        ws.channel(), a, b, c, bias, table, sizes, gather_dim=gather_dim, pitch=pitch, pushed=split, config=config,
        upcast=INTERPRETED, transposed=transposed, last=gathered is None,
    )  # fmt: skip
    if gathered is not None:
        gathered[begin : begin + sizes[ws.rank]].copy_(a)
        collect(
            ws.channel(), op, gathered, table,
            first_slot=FIRST_SLOT.value, region_row=0, pitch=pitch, per_tile=False, config=config,
        )  # fmt: skip
    return out


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
    op, config = "matmul_reduce_scatter", config_for(a.device, a.dtype, region_rows, N)
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
    ws: Workspace, a: Tensor, b: Tensor, x: Tensor, sizes: tuple[int, ...], gathered: Tensor
) -> Phases:
    """The own chunk of sum over ranks of a @ b; fills `gathered` [M, C] with gather(x), pushed before a @ b."""
    op, config = "matmul_reduce_scatter", config_for(a.device, a.dtype, max(sizes), b.shape[1])
    out = a.new_empty(sizes[ws.rank], b.shape[1])
    N, cols, region_rows, begin = b.shape[1], x.shape[1], max(sizes), sum(sizes[: ws.rank])
    pitch, x_pitch = pitch_of(N, a.dtype), pitch_of(cols, x.dtype)
    # x's region follows the partial sums', and its signals theirs.
    x_row = -(-ws.world_size * region_rows * pitch // max(1, x_pitch))
    x_slot = FIRST_SLOT.value + _tiles(region_rows, N, config)
    pieces = -(-region_rows // config.block_m)
    ws.require((x_row + sum(sizes)) * x_pitch * a.element_size(), x_slot + pieces)
    yield
    with travelling(ws):
        push(
            ws.channel(), op, x, ws.table(sizes), dst_row=x_row + begin, pitch=x_pitch, scatter=False, with_own=False,
            config=config, first_slot=x_slot,
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
        first_slot=x_slot, region_row=x_row, pitch=x_pitch, per_tile=False, config=config,
    )  # fmt: skip
    return out


def _one_shot(algorithm: str, rows: int, cols: int, itemsize: int) -> bool:
    return algorithm == "one_shot" or (algorithm == "auto" and rows * cols * itemsize <= ONE_SHOT_BYTES)


def matmul_all_reduce_phases(ws: Workspace, a: Tensor, b: Tensor, bias: Tensor | None, algorithm: str) -> Phases:
    """sum over ranks of a @ b, plus bias, on every rank: everybody reduces everything, or each its rows and then shows
    them.
    """
    if ws.world_size == 1:
        return _local(a, b, bias)
    (M, _), N = a.shape, b.shape[1]
    one_shot = _one_shot(algorithm, M, N, a.element_size())
    # Every tile of a one-shot sum is stored to all ranks: a narrow one leaves room for their addresses.
    op, config = "matmul_all_reduce", config_for(a.device, a.dtype, M, 0 if one_shot else N)
    out = a.new_empty(M, N)
    pitch = pitch_of(N, a.dtype)
    sizes = even_sizes(M, ws.world_size)
    region_rows = M if one_shot else max(sizes)
    first, tiles = FIRST_SLOT.value, _tiles(region_rows, N, config)
    result_row = ws.world_size * region_rows
    ws.require((result_row + (0 if one_shot else M)) * pitch * a.element_size(), first + 2 * tiles)
    yield
    matmul_scatter(
        ws.channel(), op, a, b, ws.table(sizes), sizes,
        region_rows=region_rows, pitch=pitch, to_all=one_shot, config=config, upcast=INTERPRETED,
    )  # fmt: skip
    yield
    if one_shot:
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


def all_gather_phases(ws: Workspace, x: Tensor, sizes: tuple[int, ...], algorithm: str) -> Phases:
    """x [sizes[rank], C] of every rank, one below the other."""
    if ws.world_size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    op, config = "all_gather", config_for(x.device, x.dtype)
    cols, begin = x.shape[1], sum(sizes[: ws.rank])
    out = x.new_empty(sum(sizes), cols)
    pitch, table = pitch_of(cols, x.dtype), ws.table(sizes)
    slots = FIRST_SLOT.value + len(sizes) * _tiles(max(sizes), cols, config)
    ws.require(sum(sizes) * pitch * x.element_size(), slots)
    yield
    if algorithm == "ring":
        ring(ws.channel(), op, x, out, table, sizes, pitch=pitch, config=config, upcast=INTERPRETED)
        return out
    push(ws.channel(), op, x, table, dst_row=begin, pitch=pitch, scatter=False, with_own=False, config=config)
    out[begin : begin + sizes[ws.rank]].copy_(x)
    yield
    collect(
        ws.channel(), op, out, table, first_slot=FIRST_SLOT.value, region_row=0, pitch=pitch, per_tile=False,
        config=config,
    )  # fmt: skip
    return out


def reduce_scatter_phases(ws: Workspace, x: Tensor, sizes: tuple[int, ...], algorithm: str) -> Phases:
    """The own rows of the sum over ranks of x [sum(sizes), C]."""
    if ws.world_size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    op, config = "reduce_scatter", config_for(x.device, x.dtype)
    cols, begin, region_rows = x.shape[1], sum(sizes[: ws.rank]), max(sizes)
    out = x.new_empty(sizes[ws.rank], cols)
    pitch, table = pitch_of(cols, x.dtype), ws.table(sizes)
    rows = sum(sizes) if algorithm == "ring" else ws.world_size * region_rows
    ws.require(rows * pitch * x.element_size(), FIRST_SLOT.value + len(sizes) * _tiles(region_rows, cols, config))
    yield
    if algorithm == "ring":
        ring(ws.channel(), op, x, out, table, sizes, pitch=pitch, config=config, upcast=INTERPRETED)
        return out
    push(
        ws.channel(), op, x, table, dst_row=ws.rank * region_rows, pitch=pitch, scatter=True, with_own=False,
        config=config,
    )  # fmt: skip
    yield
    reduce(
        ws.channel(), op, out, None, region_rows=region_rows, pitch=pitch, per_tile=False, config=config,
        upcast=INTERPRETED,
        own=x[begin : begin + sizes[ws.rank]],
    )  # fmt: skip
    return out


def all_reduce_phases(ws: Workspace, x: Tensor, algorithm: str) -> Phases:
    """The sum over ranks of x [R, C], on every rank."""
    if ws.world_size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    op, config = "all_reduce", config_for(x.device, x.dtype)
    rows, cols = x.shape
    out = x.new_empty(rows, cols)
    pitch, sizes = pitch_of(cols, x.dtype), even_sizes(rows, ws.world_size)
    one_shot = _one_shot(algorithm, rows, cols, x.element_size())
    region_rows = rows if one_shot else max(sizes)
    slots = FIRST_SLOT.value + 2 * len(sizes) * _tiles(region_rows, cols, config)
    ws.require((ws.world_size * region_rows + rows) * pitch * x.element_size(), slots)
    yield
    if algorithm == "ring":
        ring(ws.channel(), op, x, out, ws.table(sizes), sizes, pitch=pitch, config=config, upcast=INTERPRETED)
        return out
    push(
        ws.channel(), op, x, ws.table(sizes),
        dst_row=ws.rank * region_rows, pitch=pitch, scatter=not one_shot, with_own=False, config=config,
    )  # fmt: skip
    yield
    if one_shot:
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
    ws = workspace.get(group, a.device)
    phases = gather_matmul_phases(ws, a, b, bias, gather_dim, sizes, transposed=transposed)
    return run(ws, "all_gather_matmul", phases)


def all_gather_two_matmuls(
    a: Tensor, b: Tensor, right: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """See `schedules`."""
    ws = workspace.get(group, a.device)
    gathered = a.new_empty(sum(sizes), a.shape[1])
    first = run(ws, "all_gather_matmul", gather_matmul_phases(ws, a, b, None, 0, sizes, gathered=gathered))
    return first, _local(gathered.t(), right)


def matmul_reduce_scatter(
    a: Tensor, b: Tensor, bias: Tensor | None, *, scatter_dim: int, sizes: tuple[int, ...], group: ProcessGroup
) -> Tensor:
    """See `schedules`."""
    ws = workspace.get(group, a.device)
    return run(ws, "matmul_reduce_scatter", matmul_scatter_phases(ws, a, b, bias, scatter_dim, sizes))


def matmul_scatter_and_gather(
    a: Tensor, b: Tensor, left: Tensor, x: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """See `schedules`."""
    ws = workspace.get(group, a.device)
    if ws.world_size == 1:
        return _local(a, b), _local(left, x)
    gathered = x.new_empty(sum(sizes), x.shape[1])
    phases = matmul_scatter_and_gather_phases(ws, a, b, x, sizes, gathered)
    return run(ws, "matmul_reduce_scatter", phases), _local(left, gathered)


def matmul_all_reduce(
    a: Tensor, b: Tensor, bias: Tensor | None, *, group: ProcessGroup, algorithm: str = "auto"
) -> Tensor:
    """See `schedules`."""
    ws = workspace.get(group, a.device)
    return run(ws, "matmul_all_reduce", matmul_all_reduce_phases(ws, a, b, bias, algorithm))


def all_gather(x: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """See `schedules`."""
    ws = workspace.get(group, x.device)
    return run(ws, "all_gather", all_gather_phases(ws, x, sizes, algorithm))


def reduce_scatter(x: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """See `schedules`."""
    ws = workspace.get(group, x.device)
    return run(ws, "reduce_scatter", reduce_scatter_phases(ws, x, sizes, algorithm))


def all_reduce(x: Tensor, *, group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """See `schedules`."""
    ws = workspace.get(group, x.device)
    return run(ws, "all_reduce", all_reduce_phases(ws, x, algorithm))
