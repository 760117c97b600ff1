"""Library matmuls by chunk over symmetric memory, the next chunk on its way while one is multiplied.

On a CPU nothing travels: a rank publishes its shard in its own arena and the peers multiply it where it lies, or it
multiplies straight into the owner's arena. On a GPU shards are pushed into the peers' arenas by the copy engine on a
side stream; partial results are multiplied locally and pushed likewise. Both publish under a signal a chunk, and wait
chunk by chunk in the order rank, rank + 1, ..

The right choice on a CPU always, and on a GPU for large chunks (a few MB) and library matmuls better than ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import blas, trace, workspaces
from ..kernels.signal import FIRST_SLOT
from ..overlap import FEW_ROWS
from ..shards import even_sizes, offsets
from ..workspace import Workspace
from .transport import (
    Epoch,
    Gathering,
    GatheringWhole,
    Steps,
    aligned,
    gathered,
    one_shot,
    publish,
    published,
    travelling,
)

# On a CPU rows are summed in blocks of about this size, so that a float32 sum of narrower parts stays in cache between
# its terms. On a GPU each block would be a launch for each term.
_SUM_BLOCK_BYTES = 256 << 10


def _matmul_into(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    if out.numel():
        blas.mm_into(a, b, out, bias)


def _sum_into(parts: list[Tensor], bias: Tensor | None, out: Tensor) -> None:
    # In rank order, in float32 (float64 stays itself), rounded once.
    terms = parts if bias is None else [*parts, bias.expand_as(out)]
    rows = max(1, _SUM_BLOCK_BYTES // max(1, out.shape[1] * 4))
    if rows >= out.shape[0] or not out.is_cpu:
        _add_into(terms, out)
        return
    for begin in range(0, out.shape[0], rows):
        _add_into([term[begin : begin + rows] for term in terms], out[begin : begin + rows])


def _add_into(terms: list[Tensor], out: Tensor) -> None:
    if len(terms) == 1:
        out.copy_(terms[0])
    elif not _is_narrow(out):
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out.add_(term)
    else:
        total = terms[0].to(torch.float32)
        for term in terms[1:]:
            total.add_(term)
        out.copy_(total)


def all_gather_matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    *,
    gather_dim: int,
    sizes: tuple[int, ...],
    group: ProcessGroup,
    transposed: bool = False,
) -> Tensor:
    """See `schedules`."""
    if group.size() == 1:
        return _product(a, b, bias, transposed)
    ws = workspaces.get(group, a.device)
    # Nor must a narrow dtype be rounded once a chunk of the contraction.
    if max(sizes) < FEW_ROWS or (gather_dim == 1 and _is_narrow(a)):
        with GatheringWhole(ws, "all_gather_matmul", a if gather_dim == 0 else a.t(), sizes) as rows:
            return _product(rows if gather_dim == 0 else rows.t(), b, bias, transposed)
    begins = offsets(sizes)
    M = sum(sizes) if gather_dim == 0 else a.shape[0]
    out = a.new_empty((b.shape[1], M) if transposed else (M, b.shape[1]))
    with Gathering(ws, "all_gather_matmul", a, sizes, gather_dim) as chunks:
        for i, (src, chunk) in enumerate(chunks):
            part = slice(begins[src], begins[src + 1])
            with trace.span("multiply", src):
                if gather_dim == 0 and transposed:
                    _matmul_into(b.t(), chunk.t(), out[:, part], None if bias is None else bias[part])
                elif gather_dim == 0:
                    _matmul_into(chunk, b, out[part], bias)
                else:
                    left, right = (b[part].t(), chunk.t()) if transposed else (chunk, b[part])
                    if i == 0:
                        _matmul_into(left, right, out, bias)
                    else:
                        blas.add_mm_into(left, right, out)
    return out


def all_gather_two_matmuls(
    a: Tensor, b: Tensor, right: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """See `schedules`."""
    if group.size() == 1:
        return blas.mm(a, b), blas.mm(a.t(), right)
    ws = workspaces.get(group, a.device)
    if max(sizes) < FEW_ROWS or _is_narrow(a):
        with GatheringWhole(ws, "all_gather_matmul", a, sizes) as whole:
            return _product(whole, b, None, False), _product(whole.t(), right, None, False)
    begins = offsets(sizes)
    first, second = a.new_empty(sum(sizes), b.shape[1]), a.new_empty(a.shape[1], right.shape[1])
    with Gathering(ws, "all_gather_matmul", a, sizes, 0) as chunks:
        for i, (src, chunk) in enumerate(chunks):
            part = slice(begins[src], begins[src + 1])
            with trace.span("multiply", src):
                _matmul_into(chunk, b, first[part])
                if i == 0:
                    _matmul_into(chunk.t(), right[part], second)
                else:
                    blas.add_mm_into(chunk.t(), right[part], second)
    return first, second


def _is_narrow(x: Tensor) -> bool:
    return x.dtype not in (torch.float32, torch.float64)


def _product(a: Tensor, b: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    left, right = (b.t(), a.t()) if transposed else (a, b)
    return trace.timed("multiply", -1, blas.mm, left, right, bias)


def _scatter_partials(
    ws: Workspace, steps: Steps, a: Tensor, b: Tensor, scatter_dim: int, sizes: tuple[int, ...], stride: int
) -> list[Tensor]:
    # Multiply each owner's part of a @ b into this rank's slot of its arena, own part last; the own parts, in rank
    # order.
    begins = offsets(sizes)
    if ws.in_place and scatter_dim == 0 and max(sizes) < FEW_ROWS:
        # One matmul into the own arena, from which every owner reads its rows.
        shape = (a.shape[0], b.shape[1])
        trace.timed("multiply", -1, _matmul_into, a, b, ws.view(ws.rank, steps.epoch, 0, shape, a.dtype))
        for i in range(1, ws.world_size):
            steps.signal((ws.rank - i) % ws.world_size, FIRST_SLOT.value)
        own = slice(begins[ws.rank], begins[ws.rank + 1])
        for i in range(1, ws.world_size):
            steps.wait((ws.rank + i) % ws.world_size, FIRST_SLOT.value)
        return [ws.view(src, steps.epoch, 0, shape, a.dtype)[own] for src in range(ws.world_size)]
    shape = (sizes[ws.rank], b.shape[1]) if scatter_dim == 0 else (a.shape[0], sizes[ws.rank])
    for i in range(1, ws.world_size + 1):
        dst = (ws.rank + i) % ws.world_size
        part = slice(begins[dst], begins[dst + 1])
        left, right = (a[part], b) if scatter_dim == 0 else (a, b[:, part])
        slot = ws.view(dst, steps.epoch, ws.rank * stride, (left.shape[0], right.shape[1]), a.dtype)
        if ws.in_place or dst == ws.rank:
            with trace.span("multiply", dst):
                _matmul_into(left, right, slot)
            steps.signal(dst, FIRST_SLOT.value)
        else:
            partial = blas.mm(left, right)
            with travelling(ws):
                slot.copy_(partial)
                if partial.is_cuda:
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
        return blas.mm(a, b, bias)
    ws = workspaces.get(group, a.device)
    other = b.shape[1] if scatter_dim == 0 else a.shape[0]
    stride = aligned(max(sizes) * other * a.element_size())
    if bias is not None and scatter_dim == 1:
        bias = bias.split(sizes)[ws.rank]
    with Epoch(ws, "matmul_reduce_scatter", ws.world_size * stride, 1) as steps:
        parts = _scatter_partials(ws, steps, a, b, scatter_dim, sizes, stride)
        out = a.new_empty(parts[0].shape)
        trace.timed("add", -1, _sum_into, parts, bias, out)
    return out


def matmul_scatter_and_gather(
    a: Tensor, b: Tensor, left: Tensor, x: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """See `schedules`."""
    if group.size() == 1:
        return blas.mm(a, b), blas.mm(left, x)
    ws = workspaces.get(group, a.device)
    begins, cols = offsets(sizes), x.shape[1]
    partial = aligned(max(sizes) * b.shape[1] * a.element_size())
    stride, base = aligned(max(sizes) * cols * x.element_size()), ws.world_size * partial
    slot = FIRST_SLOT.value + 1
    # As in `all_gather_matmul`: whole where chunks would be small, or would round a narrow sum once each.
    at_once = max(sizes) < FEW_ROWS or _is_narrow(x)
    with Epoch(ws, "matmul_reduce_scatter", base + ws.world_size * stride, 2) as steps:
        if at_once:
            whole = gathered(ws, steps, x, sizes, slot, base)
        else:
            publish(ws, steps, x, slot, base + ws.rank * stride)
        parts = _scatter_partials(ws, steps, a, b, 0, sizes, partial)
        scattered = a.new_empty(parts[0].shape)
        _sum_into(parts, None, scattered)
        product = x.new_empty(left.shape[0], cols)
        for i in range(0 if at_once else ws.world_size):
            src = (ws.rank + i) % ws.world_size
            part, chunk = slice(begins[src], begins[src + 1]), x
            if i == 0:
                _matmul_into(left[:, part], chunk, product)
                continue
            chunk = published(ws, steps, src, (sizes[src], cols), x.dtype, slot, base + src * stride)
            blas.add_mm_into(left[:, part], chunk, product)
        if at_once:
            _matmul_into(left, whole(), product)
    return scattered, product


def _share_rows(ws: Workspace, steps: Steps, mine: Tensor, out: Tensor, sizes: tuple[int, ...], offset: int) -> None:
    # The second half of a two-shot all-reduce: every rank shows its finished rows and copies the others'.
    begins = offsets(sizes)
    row_bytes = out.shape[1] * out.element_size()
    publish(ws, steps, mine, FIRST_SLOT.value + 1, offset + begins[ws.rank] * row_bytes)
    for i in range(1, ws.world_size):
        src = (ws.rank + i) % ws.world_size
        shape = (sizes[src], out.shape[1])
        rows = published(ws, steps, src, shape, out.dtype, FIRST_SLOT.value + 1, offset + begins[src] * row_bytes)
        with trace.span("travel", src):
            out[begins[src] : begins[src + 1]] = rows


def matmul_all_reduce(
    a: Tensor, b: Tensor, bias: Tensor | None, *, group: ProcessGroup, algorithm: str = "auto"
) -> Tensor:
    """See `schedules`."""
    if group.size() == 1:
        return blas.mm(a, b, bias)
    ws = workspaces.get(group, a.device)
    out = a.new_empty(a.shape[0], b.shape[1])
    out_bytes = out.numel() * out.element_size()
    if one_shot(ws, "decomposed", algorithm, out, alone=False):
        return _one_shot(ws, "matmul_all_reduce", lambda place: _matmul_into(a, b, place), bias, out)
    sizes = even_sizes(a.shape[0], ws.world_size)
    begin, stride = offsets(sizes)[ws.rank], aligned(max(sizes) * b.shape[1] * a.element_size())
    with Epoch(ws, "matmul_all_reduce", ws.world_size * stride + out_bytes, 2) as steps:
        parts = _scatter_partials(ws, steps, a, b, 0, sizes, stride)
        mine = out[begin : begin + sizes[ws.rank]]
        trace.timed("add", -1, _sum_into, parts, bias, mine)
        _share_rows(ws, steps, mine, out, sizes, ws.world_size * stride)
    return out


def _one_shot(ws: Workspace, name: str, fill: Callable[[Tensor], object], bias: Tensor | None, out: Tensor) -> Tensor:
    # Every rank shows its whole partial, which `fill` writes, and sums everybody's.
    shape = (out.shape[0], out.shape[1])
    stride = aligned(out.numel() * out.element_size())
    with Epoch(ws, name, ws.world_size * stride, 1) as steps:
        mine = ws.view(ws.rank, steps.epoch, ws.rank * stride, shape, out.dtype)
        with trace.span("multiply" if name == "matmul_all_reduce" else "travel"):
            fill(mine)
        if ws.in_place:
            for i in range(1, ws.world_size):
                steps.signal((ws.rank - i) % ws.world_size, FIRST_SLOT.value)
        else:
            publish(ws, steps, mine, FIRST_SLOT.value, ws.rank * stride)
        parts = [
            mine if src == ws.rank else published(ws, steps, src, shape, out.dtype, FIRST_SLOT.value, src * stride)
            for src in range(ws.world_size)
        ]
        trace.timed("add", -1, _sum_into, parts, bias, out)
    return out


def _refuse_ring(algorithm: str) -> None:
    if algorithm == "ring":
        raise ValueError("algorithm 'ring' is a kernel: use it with schedule 'fused'")


def all_gather(x: Tensor, *, sizes: tuple[int, ...], group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """See `schedules`."""
    _refuse_ring(algorithm)
    if group.size() == 1:
        return x.clone(memory_format=torch.contiguous_format)
    ws = workspaces.get(group, x.device)
    begins = offsets(sizes)
    out = x.new_empty(sum(sizes), x.shape[1])
    with Gathering(ws, "all_gather", x, sizes, 0) as chunks:
        for src, chunk in chunks:
            with trace.span("travel", src):
                out[begins[src] : begins[src + 1]] = chunk
    return out


def _scatter_rows(ws: Workspace, steps: Steps, x: Tensor, sizes: tuple[int, ...], stride: int) -> list[Tensor]:
    # Copy each owner's rows of x into this rank's slot of its arena; the own rows of every rank, in rank order.
    begins = offsets(sizes)
    with travelling(ws):
        for i in range(1, ws.world_size):
            dst = (ws.rank + i) % ws.world_size
            rows = x[begins[dst] : begins[dst + 1]]
            with trace.span("travel", dst):
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
    ws = workspaces.get(group, x.device)
    out = x.new_empty(sizes[ws.rank], x.shape[1])
    stride = aligned(max(sizes) * x.shape[1] * x.element_size())
    with Epoch(ws, "reduce_scatter", ws.world_size * stride, 1) as steps:
        parts = _scatter_rows(ws, steps, x, sizes, stride)
        trace.timed("add", -1, _sum_into, parts, None, out)
    return out


def all_reduce(x: Tensor, *, group: ProcessGroup, algorithm: str = "auto") -> Tensor:
    """See `schedules`."""
    _refuse_ring(algorithm)
    if group.size() == 1:
        return x.clone(memory_format=torch.contiguous_format)
    ws = workspaces.get(group, x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_bytes = out.numel() * out.element_size()
    if one_shot(ws, "decomposed", algorithm, out, alone=True):
        return _one_shot(ws, "all_reduce", lambda place: place.copy_(x), None, out)
    sizes = even_sizes(x.shape[0], ws.world_size)
    begin, stride = offsets(sizes)[ws.rank], aligned(max(sizes) * x.shape[1] * x.element_size())
    with Epoch(ws, "all_reduce", ws.world_size * stride + out_bytes, 2) as steps:
        mine = out[begin : begin + sizes[ws.rank]]
        parts = _scatter_rows(ws, steps, x, sizes, stride)
        trace.timed("add", -1, _sum_into, parts, None, mine)
        _share_rows(ws, steps, mine, out, sizes, ws.world_size * stride)
    return out
