"""Library matmuls by chunk over symmetric memory, the next chunk on its way while one is multiplied.

On a CPU nothing travels: a rank publishes its shard in its own arena and the peers multiply it where it lies, or it
multiplies straight into the owner's arena. On a GPU shards are pushed into the peers' arenas by the copy engine on a
side stream; partial results are multiplied locally and pushed likewise. Both publish under a signal a chunk, and wait
chunk by chunk in the order rank, rank + 1, ..

The right choice on a CPU always, and on a GPU for large chunks (a few MB) and library matmuls better than ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import workspace
from ..kernels.signal import FIRST_SLOT
from ..shards import even_sizes, offsets
from ..steps import DeviceSteps, HostSteps
from ..workspace import Workspace

Steps = HostSteps | DeviceSteps

_ALIGNMENT = 64

# A one-shot all-reduce reads every peer's whole partial; beyond this size reducing a slice each and sharing it moves
# less.
ONE_SHOT_BYTES = 64 << 10

# Rows are summed in blocks of about this size, so that a float32 sum of narrower parts stays in cache between its
# terms.
_SUM_BLOCK_BYTES = 256 << 10

_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@contextlib.contextmanager
def _op(ws: Workspace, name: str, half_bytes: int, slots: int) -> Iterator[Steps]:
    # One epoch: room for the op, entry, the op itself, exit.
    with ws.running(name):
        ws.require(half_bytes, FIRST_SLOT.value + slots)
        steps = ws.steps(name)
        steps.enter()
        yield steps
        steps.leave()


@contextlib.contextmanager
def _travelling(ws: Workspace) -> Iterator[None]:
    # On a GPU, what is issued inside runs on a side stream, beside the matmuls that follow.
    if ws.device.type == "cpu":
        yield
        return
    if ws.device not in _side_streams:
        _side_streams[ws.device] = torch.cuda.Stream(ws.device, priority=-1)
    side, main = _side_streams[ws.device], torch.cuda.current_stream(ws.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield


def _settle(ws: Workspace) -> None:
    # The op must not end, nor its inputs be reused, before the side stream has read them.
    if ws.device in _side_streams:
        torch.cuda.current_stream(ws.device).wait_stream(_side_streams[ws.device])


def _matmul_into(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    # out may lie in an arena or be a slice of columns; only rows with a unit stride are written without a copy.
    if out.numel() == 0:
        return
    if bias is not None:
        torch.addmm(bias, a, b, out=out)
    else:
        torch.mm(a, b, out=out)


def _sum_into(parts: list[Tensor], bias: Tensor | None, out: Tensor) -> None:
    # In rank order, in float32 (float64 stays itself), rounded once.
    rows = max(1, _SUM_BLOCK_BYTES // max(1, out.shape[1] * 4))
    wide = torch.promote_types(out.dtype, torch.float32)
    for begin in range(0, out.shape[0], rows):
        block = out[begin : begin + rows]
        terms = [part[begin : begin + rows] for part in parts] + ([] if bias is None else [bias.expand_as(block)])
        if len(terms) == 1:
            block.copy_(terms[0])
        elif wide == out.dtype:
            torch.add(terms[0], terms[1], out=block)
            for term in terms[2:]:
                block.add_(term)
        else:
            total = terms[0].to(wide)
            for term in terms[1:]:
                total.add_(term)
            block.copy_(total)


def _publish(ws: Workspace, steps: Steps, x: Tensor, slot: int, offset: int) -> None:
    # Make x [rows, cols] readable by every peer: in the own arena, or in each peer's at this rank's place.
    shape = (x.shape[0], x.shape[1])
    if ws.in_place:
        ws.view(ws.rank, steps.epoch, offset, shape, x.dtype).copy_(x)
        for i in range(1, ws.world_size):
            steps.signal((ws.rank - i) % ws.world_size, slot)
        return
    with _travelling(ws):
        for i in range(1, ws.world_size):
            dst = (ws.rank - i) % ws.world_size
            ws.view(dst, steps.epoch, offset, shape, x.dtype).copy_(x)
            steps.signal(dst, slot)


def _published(
    ws: Workspace, steps: Steps, src: int, shape: tuple[int, int], dtype: torch.dtype, slot: int, offset: int
) -> Tensor:
    # What rank src has published, once it has.
    steps.wait(src, slot)
    return ws.view(src if ws.in_place else ws.rank, steps.epoch, offset, shape, dtype)


def all_gather_matmul(
    a: Tensor, b: Tensor, bias: Tensor | None, *, gather_dim: int, sizes: tuple[int, ...], group: ProcessGroup
) -> Tensor:
    """See `schedules`."""
    if group.size() == 1:
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    ws = workspace.get(group, a.device)
    rows, cols = a.shape
    stride = _aligned(max(sizes) * (cols if gather_dim == 0 else rows) * a.element_size())
    begins = offsets(sizes)
    contracted = a.dtype not in (torch.float32, torch.float64)
    with _op(ws, "all_gather_matmul", ws.world_size * stride, 1) as steps:
        _publish(ws, steps, a, FIRST_SLOT.value, ws.rank * stride)
        if gather_dim == 0:
            out = a.new_empty(sum(sizes), b.shape[1])
        elif contracted:
            # A narrow dtype must not be rounded once a chunk: the chunks are put side by side and multiplied at once.
            whole = a.new_empty(rows, sum(sizes))
        else:
            out = a.new_empty(rows, b.shape[1])
        for i in range(ws.world_size):
            src = (ws.rank + i) % ws.world_size
            part = slice(begins[src], begins[src + 1])
            shape = (sizes[src], cols) if gather_dim == 0 else (rows, sizes[src])
            chunk = a if i == 0 else _published(ws, steps, src, shape, a.dtype, FIRST_SLOT.value, src * stride)
            if gather_dim == 0:
                _matmul_into(chunk, b, out[part], bias)
            elif contracted:
                whole[:, part] = chunk
            elif i == 0:
                _matmul_into(chunk, b[part], out, bias)
            else:
                out.addmm_(chunk, b[part])
        if gather_dim == 1 and contracted:
            out = torch.mm(whole, b) if bias is None else torch.addmm(bias, whole, b)
        _settle(ws)
    return out


def _scatter_partials(
    ws: Workspace, steps: Steps, a: Tensor, b: Tensor, scatter_dim: int, sizes: tuple[int, ...], stride: int
) -> list[Tensor]:
    # Multiply each owner's part of a @ b into this rank's slot of its arena, own part last; the own parts, in rank
    # order.
    begins = offsets(sizes)
    shape = (sizes[ws.rank], b.shape[1]) if scatter_dim == 0 else (a.shape[0], sizes[ws.rank])
    for i in range(1, ws.world_size + 1):
        dst = (ws.rank + i) % ws.world_size
        part = slice(begins[dst], begins[dst + 1])
        left, right = (a[part], b) if scatter_dim == 0 else (a, b[:, part])
        slot = ws.view(dst, steps.epoch, ws.rank * stride, (left.shape[0], right.shape[1]), a.dtype)
        if ws.in_place or dst == ws.rank:
            _matmul_into(left, right, slot)
            steps.signal(dst, FIRST_SLOT.value)
        else:
            partial = torch.mm(left, right)
            with _travelling(ws):
                slot.copy_(partial)
                partial.record_stream(torch.cuda.current_stream(ws.device))
                steps.signal(dst, FIRST_SLOT.value)
    for i in range(1, ws.world_size):
        steps.wait((ws.rank + i) % ws.world_size, FIRST_SLOT.value)
    return [ws.view(ws.rank, steps.epoch, src * stride, shape, a.dtype) for src in range(ws.world_size)]


def matmul_reduce_scatter(
    a: Tensor, b: Tensor, bias: Tensor | None, *, scatter_dim: int, sizes: tuple[int, ...], group: ProcessGroup
) -> Tensor:
    """See `schedules`."""
    if group.size() == 1:
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    ws = workspace.get(group, a.device)
    other = b.shape[1] if scatter_dim == 0 else a.shape[0]
    stride = _aligned(max(sizes) * other * a.element_size())
    if bias is not None and scatter_dim == 1:
        bias = bias.split(sizes)[ws.rank]
    with _op(ws, "matmul_reduce_scatter", ws.world_size * stride, 1) as steps:
        parts = _scatter_partials(ws, steps, a, b, scatter_dim, sizes, stride)
        out = torch.empty_like(parts[0])
        _sum_into(parts, bias, out)
        _settle(ws)
    return out


def _share_rows(ws: Workspace, steps: Steps, mine: Tensor, out: Tensor, sizes: tuple[int, ...], offset: int) -> None:
    # The second half of a two-shot all-reduce: every rank shows its finished rows and copies the others'.
    begins = offsets(sizes)
    row_bytes = out.shape[1] * out.element_size()
    _publish(ws, steps, mine, FIRST_SLOT.value + 1, offset + begins[ws.rank] * row_bytes)
    for i in range(1, ws.world_size):
        src = (ws.rank + i) % ws.world_size
        shape = (sizes[src], out.shape[1])
        rows = _published(ws, steps, src, shape, out.dtype, FIRST_SLOT.value + 1, offset + begins[src] * row_bytes)
        out[begins[src] : begins[src + 1]] = rows


def matmul_all_reduce(
    a: Tensor, b: Tensor, bias: Tensor | None, *, group: ProcessGroup, algorithm: str = "auto"
) -> Tensor:
    """See `schedules`."""
    if group.size() == 1:
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    ws = workspace.get(group, a.device)
    out = a.new_empty(a.shape[0], b.shape[1])
    out_bytes = out.numel() * out.element_size()
    if algorithm == "one_shot" or (algorithm == "auto" and out_bytes <= ONE_SHOT_BYTES):
        return _one_shot(ws, "matmul_all_reduce", lambda place: _matmul_into(a, b, place), bias, out)
    sizes = even_sizes(a.shape[0], ws.world_size)
    begin, stride = offsets(sizes)[ws.rank], _aligned(max(sizes) * b.shape[1] * a.element_size())
    with _op(ws, "matmul_all_reduce", ws.world_size * stride + out_bytes, 2) as steps:
        parts = _scatter_partials(ws, steps, a, b, 0, sizes, stride)
        mine = out[begin : begin + sizes[ws.rank]]
        _sum_into(parts, bias, mine)
        _share_rows(ws, steps, mine, out, sizes, ws.world_size * stride)
        _settle(ws)
    return out


def _one_shot(ws: Workspace, name: str, fill: Callable[[Tensor], object], bias: Tensor | None, out: Tensor) -> Tensor:
    # Every rank shows its whole partial, which `fill` writes, and sums everybody's.
    shape = (out.shape[0], out.shape[1])
    stride = _aligned(out.numel() * out.element_size())
    with _op(ws, name, ws.world_size * stride, 1) as steps:
        mine = ws.view(ws.rank, steps.epoch, ws.rank * stride, shape, out.dtype)
        fill(mine)
        if ws.in_place:
            for i in range(1, ws.world_size):
                steps.signal((ws.rank - i) % ws.world_size, FIRST_SLOT.value)
        else:
            _publish(ws, steps, mine, FIRST_SLOT.value, ws.rank * stride)
        parts = [
            mine if src == ws.rank else _published(ws, steps, src, shape, out.dtype, FIRST_SLOT.value, src * stride)
            for src in range(ws.world_size)
        ]
        _sum_into(parts, bias, out)
        _settle(ws)
    return out


def _refuse_ring(algorithm: str) -> None:
    if algorithm == "ring":
        raise ValueError("algorithm 'ring' is a kernel: use it with schedule 'fused'")


def all_gather(x: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """See `schedules`."""
    _refuse_ring(algorithm)
    if group.size() == 1:
        return x.clone(memory_format=torch.contiguous_format)
    ws = workspace.get(group, x.device)
    cols, begins = x.shape[1], offsets(sizes)
    out = x.new_empty(sum(sizes), cols)
    stride = _aligned(max(sizes) * cols * x.element_size())
    with _op(ws, "all_gather", ws.world_size * stride, 1) as steps:
        _publish(ws, steps, x, FIRST_SLOT.value, ws.rank * stride)
        out[begins[ws.rank] : begins[ws.rank + 1]] = x
        for i in range(1, ws.world_size):
            src = (ws.rank + i) % ws.world_size
            chunk = _published(ws, steps, src, (sizes[src], cols), x.dtype, FIRST_SLOT.value, src * stride)
            out[begins[src] : begins[src + 1]] = chunk
        _settle(ws)
    return out


def _scatter_rows(ws: Workspace, steps: Steps, x: Tensor, sizes: tuple[int, ...], stride: int) -> list[Tensor]:
    # Copy each owner's rows of x into this rank's slot of its arena; the own rows of every rank, in rank order.
    begins = offsets(sizes)
    with _travelling(ws):
        for i in range(1, ws.world_size):
            dst = (ws.rank + i) % ws.world_size
            rows = x[begins[dst] : begins[dst + 1]]
            ws.view(dst, steps.epoch, ws.rank * stride, (rows.shape[0], rows.shape[1]), x.dtype).copy_(rows)
            steps.signal(dst, FIRST_SLOT.value)
    parts = []
    for src in range(ws.world_size):
        if src == ws.rank:
            parts.append(x[begins[src] : begins[src + 1]])
        else:
            steps.wait(src, FIRST_SLOT.value)
            parts.append(ws.view(ws.rank, steps.epoch, src * stride, (sizes[ws.rank], x.shape[1]), x.dtype))
    return parts


def reduce_scatter(x: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """See `schedules`."""
    _refuse_ring(algorithm)
    if group.size() == 1:
        return x.clone(memory_format=torch.contiguous_format)
    ws = workspace.get(group, x.device)
    out = x.new_empty(sizes[ws.rank], x.shape[1])
    stride = _aligned(max(sizes) * x.shape[1] * x.element_size())
    with _op(ws, "reduce_scatter", ws.world_size * stride, 1) as steps:
        _sum_into(_scatter_rows(ws, steps, x, sizes, stride), None, out)
        _settle(ws)
    return out


def all_reduce(x: Tensor, *, group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """See `schedules`."""
    _refuse_ring(algorithm)
    if group.size() == 1:
        return x.clone(memory_format=torch.contiguous_format)
    ws = workspace.get(group, x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_bytes = out.numel() * out.element_size()
    if algorithm == "one_shot" or (algorithm == "auto" and out_bytes <= ONE_SHOT_BYTES):
        return _one_shot(ws, "all_reduce", lambda place: place.copy_(x), None, out)
    sizes = even_sizes(x.shape[0], ws.world_size)
    begin, stride = offsets(sizes)[ws.rank], _aligned(max(sizes) * x.shape[1] * x.element_size())
    with _op(ws, "all_reduce", ws.world_size * stride + out_bytes, 2) as steps:
        mine = out[begin : begin + sizes[ws.rank]]
        _sum_into(_scatter_rows(ws, steps, x, sizes, stride), None, mine)
        _share_rows(ws, steps, mine, out, sizes, ws.world_size * stride)
        _settle(ws)
    return out
