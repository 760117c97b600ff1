"""One persistent Triton kernel an op, its collective inside, over symmetric memory. Contract: the header of
`kernels.signal`.

Each op is written as a generator (`phases`): it makes room, then issues one kernel between two yields.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from .. import blas, workspaces
from ..kernels import INTERPRETED
from ..kernels.gather_matmul import gather_matmul, own_in_place
from ..kernels.launch import pitch_of
from ..kernels.loading import only_loading
from ..kernels.matmul_scatter import matmul_scatter
from ..kernels.push import collect
from ..kernels.reduce import reduce
from ..kernels.signal import FIRST_SLOT
from ..shards import even_sizes
from ..workspace import Workspace
from .fused_collectives import (
    all_gather_phases,
    all_reduce_phases,
    config_of,
    gather_work,
    num_tiles,
    reduce_and_collect,
    reduce_scatter_phases,
)
from .phases import Phases, run
from .producer import alike, choose, finish, load_for_capture, piece_rows, produce, with_pushers
from .transport import one_shot, settle


def _local(a: Tensor, b: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    # a @ b without communication is the library's; the result is (a @ b).T, contiguous, if transposed.
    return blas.mm(b.t(), a.t(), bias) if transposed else blas.mm(a, b, bias)


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
    op, config = "all_gather_matmul", config_of(ws, a, most_rows, b.shape[1])
    M, K = (sum(sizes), a.shape[1]) if gather_dim == 0 else (a.shape[0], sum(sizes))
    pitch = pitch_of(K if gather_dim == 0 else max(sizes), a.dtype)
    rows = M if gather_dim == 0 else ws.world_size * M
    piece = piece_rows(pitch * a.element_size(), config)
    pieces = -(-most_rows // piece)
    ws.require(rows * pitch * a.element_size(), FIRST_SLOT.value + pieces)
    yield
    out, c = _out(a, M, b.shape[1], transposed)
    producer = choose(ws, gather_work(ws, a, M, b.shape[1], K, by_depth=gather_dim == 1), asked_for=producer)
    table, begin = ws.table(sizes), sum(sizes[: ws.rank])

    def multiply(*, pushed: bool, last: bool) -> None:
        gather_matmul(
            ws.channel(), a, b, c, bias, table, sizes, gather_dim=gather_dim, pitch=pitch, piece_rows=piece,
            pushed=pushed, config=with_pushers(ws, config), upcast=INTERPRETED, transposed=transposed, last=last,
        )  # fmt: skip

    issued = split or producer == "copy"
    if producer == "copy" and not split:
        in_capture = partial(multiply, pushed=False, last=gathered is None)
        load_for_capture(ws, in_capture, op, gather_dim, sizes, transposed, gathered is None, alike(a, b, bias))
    if issued:
        produce(
            ws, op, a, sizes, producer=producer, dst_row=begin if gather_dim == 0 else ws.rank * M, pitch=pitch,
            config=config, piece=piece, with_own=not own_in_place(a),
        )  # fmt: skip
        yield
    multiply(pushed=issued, last=gathered is None and producer != "copy")
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
    op, config = "matmul_reduce_scatter", config_of(ws, a, region_rows, N)
    pitch = pitch_of(N, a.dtype)
    ws.require(
        ws.world_size * region_rows * pitch * a.element_size(), FIRST_SLOT.value + num_tiles(region_rows, N, config)
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
    op, config = "matmul_reduce_scatter", config_of(ws, a, max(sizes), b.shape[1])
    out = a.new_empty(sizes[ws.rank], b.shape[1])
    N, cols, region_rows, begin = b.shape[1], x.shape[1], max(sizes), sum(sizes[: ws.rank])
    pitch, x_pitch = pitch_of(N, a.dtype), pitch_of(cols, x.dtype)
    # x's region follows the partial sums', and its signals theirs.
    x_row = -(-ws.world_size * region_rows * pitch // max(1, x_pitch))
    x_slot = FIRST_SLOT.value + num_tiles(region_rows, N, config)
    piece = piece_rows(x_pitch * x.element_size(), config)
    pieces = -(-region_rows // piece)
    ws.require((x_row + sum(sizes)) * x_pitch * a.element_size(), x_slot + pieces)
    yield
    # What it can hide behind is the product: rows of every rank by N columns.
    producer = choose(ws, gather_work(ws, x, sum(sizes), N, cols), asked_for=producer)
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
    op, config = "matmul_all_reduce", config_of(ws, a, region_rows, 0 if at_once else N)
    first, tiles = FIRST_SLOT.value, num_tiles(region_rows, N, config)
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
        yield from reduce_and_collect(ws, op, out, bias, sizes, region_rows, pitch, config, own=None)
    return out


def all_gather_matmul(
    a: Tensor, b: Tensor, bias: Tensor | None, *, gather_dim: int, sizes: tuple[int, ...], group: ProcessGroup,
    transposed: bool = False, producer: str = "auto",
) -> Tensor:  # fmt: skip
    """See `schedules`."""
    ws = workspaces.get(group, a.device)
    phases = gather_matmul_phases(ws, a, b, bias, gather_dim, sizes, transposed=transposed, producer=producer)
    return run(ws, "all_gather_matmul", phases)


def all_gather_two_matmuls(
    a: Tensor, b: Tensor, right: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup, producer: str = "auto"
) -> tuple[Tensor, Tensor]:
    """See `schedules`."""
    ws = workspaces.get(group, a.device)
    gathered = a.new_empty(sum(sizes), a.shape[1])
    phases = gather_matmul_phases(ws, a, b, None, 0, sizes, gathered=gathered, producer=producer)
    first = run(ws, "all_gather_matmul", phases)
    return first, _local(gathered.t(), right)


def matmul_reduce_scatter(
    a: Tensor, b: Tensor, bias: Tensor | None, *, scatter_dim: int, sizes: tuple[int, ...], group: ProcessGroup
) -> Tensor:
    """See `schedules`."""
    ws = workspaces.get(group, a.device)
    return run(ws, "matmul_reduce_scatter", matmul_scatter_phases(ws, a, b, bias, scatter_dim, sizes))


def matmul_scatter_and_gather(
    a: Tensor, b: Tensor, left: Tensor, x: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup,
    producer: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `schedules`."""
    ws = workspaces.get(group, a.device)
    if ws.world_size == 1:
        return _local(a, b), _local(left, x)
    gathered = x.new_empty(sum(sizes), x.shape[1])
    phases = matmul_scatter_and_gather_phases(ws, a, b, x, sizes, gathered, producer=producer)
    return run(ws, "matmul_reduce_scatter", phases), _local(left, gathered)


def matmul_all_reduce(
    a: Tensor, b: Tensor, bias: Tensor | None, *, group: ProcessGroup, algorithm: str = "auto"
) -> Tensor:
    """See `schedules`."""
    ws = workspaces.get(group, a.device)
    return run(ws, "matmul_all_reduce", matmul_all_reduce_phases(ws, a, b, bias, algorithm))


def all_gather(
    x: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup, algorithm: str = "auto", producer: str = "auto"
) -> Tensor:
    """See `schedules`."""
    ws = workspaces.get(group, x.device)
    return run(ws, "all_gather", all_gather_phases(ws, x, sizes, algorithm, producer=producer))


def reduce_scatter(x: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """See `schedules`."""
    ws = workspaces.get(group, x.device)
    return run(ws, "reduce_scatter", reduce_scatter_phases(ws, x, sizes, algorithm))


def all_reduce(x: Tensor, *, group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """See `schedules`."""
    ws = workspaces.get(group, x.device)
    return run(ws, "all_reduce", all_reduce_phases(ws, x, algorithm))


def load(op: str, *operands: Tensor | None, **options: Any) -> None:
    """Make room for an op of this module and load its kernels, as a graph capture will need them. Starts none."""
    with only_loading():
        globals()[op](*operands, **options)
