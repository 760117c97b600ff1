"""Library matmuls by chunk over symmetric memory. On a GPU the next chunk is in flight while one is multiplied.

On a CPU nothing travels: a rank publishes its part in its own arena and the peers multiply it in place, or it
multiplies straight into its own arena, from which the owners add. On a GPU the copy engine pushes parts into the peers'
arenas on a side stream; terms of a sum are multiplied locally and pushed likewise. On both, each part has a signal, and
ranks wait part by part in the order rank, rank + 1, ..

Use it always on a CPU; on a GPU, for large chunks (a few MB) and if library matmuls are better than ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import trace
from ..cost.overlap import FEW_ROWS, ONE_SHOT
from ..epilogue import Epilogue, end, ended, into
from ..kernels.layout import Layout, aligned
from ..op import Task
from ..scaled import Matrix, Quantized, pack_into, packed_bytes, unpacked
from ..shards import offsets
from ..workspaces.workspace import Workspace
from . import transport
from .local import NARROW, PackedGather, mm, padded, sum_into, summed
from .transport import travelling
from .verbs import GatherSpec, Product, ScatterSpec, ScheduleImpl

# On a CPU rows are summed in blocks of about this size: a float32 sum of narrower parts stays in cache between terms.
# On a GPU each block would be a launch for each term.
_SUM_BLOCK_BYTES = 256 << 10

# In a half: this rank's part in its arena; all parts, stacked, in its own half; and the others' parts with their ranks,
# in the order of arrival.
Places: TypeAlias = tuple[Tensor, Tensor, list[tuple[int, Tensor]]]


class Decomposed(ScheduleImpl):
    """`verbs.ScheduleImpl` with library matmuls by chunk."""

    where, sums, by_host = "by chunk", "in the order of ranks: not by fused", True

    def __init__(self, ws: Workspace, task: Task) -> None:
        self.ws, self.task = ws, task
        self.rank, self.world_size = ws.rank, ws.world_size
        # The other ranks, in the order in which this rank takes their parts; then in the order in which they need its
        # part.
        self.others = [(ws.rank + i) % ws.world_size for i in range(1, ws.world_size)]
        self.before = [(ws.rank - i) % ws.world_size for i in range(1, ws.world_size)]
        self.layout = Layout()
        self.is_narrow = task.dtype not in (torch.float32, torch.float64)

    def at(self, task: Task) -> Decomposed:
        # Gathers and scatters read none of the task's rows here.
        self.layout = Layout()
        return self

    def one_shot(self, task: Task) -> bool:
        return transport.way(self.ws, "decomposed", task) == ONE_SHOT

    def gather(self, what: GatherSpec) -> DecomposedGather | DecomposedPackedGather:
        if self.task.float8 is not None and not what.sums:
            return DecomposedPackedGather(self, what)
        return DecomposedGather(self, what)

    def scatter(self, what: ScatterSpec) -> DecomposedScatter:
        return DecomposedScatter(self, what)

    def end(self) -> None:
        """End the epoch, after copies that are in flight."""
        if not self.ws.reads_peers:
            transport.settle(self.ws)
        self.ws.steps.leave()


class Laid:
    """Base of verbs that read and write views of the arenas.

    The workspace caches the views of each half, and drops them with its arenas. They also go with the verb: a verb of
    other rows has other views.
    """

    _ws: Workspace
    # Of each half.
    _keys: tuple[object, ...] = ()

    def __del__(self) -> None:
        for key in self._keys:
            self._ws.views.pop(key, None)

    def _lay_out(self) -> Any:
        # Return the views of the half that the current op uses.
        half = self._ws.steps.epoch & 1
        return self._ws.keep(self._keys[half], self._views(half))

    def _views(self, half: int) -> Any:
        raise NotImplementedError


class DecomposedGather(Laid):
    """`verbs.Gather` by chunk, or at once if chunks are small or if each would round a narrow sum once more."""

    def __init__(self, on: Decomposed, what: GatherSpec) -> None:
        self._ws, self._keys = on.ws, (object(), object())
        sizes, other, self._dim, products, *_ = what
        self._sizes, self._begins, longest = sizes, offsets(sizes), max(sizes)
        self._shape, self._dtype = (self._begins[-1], other), on.task.dtype
        self._at_once = bool(products) and (longest < FEW_ROWS or ("outer" in products and on.is_narrow))
        row_bytes = other * self._dtype.itemsize
        self._others, self._before = on.others, on.before
        # Parts of one matrix are stacked. Otherwise each part has room for the longest, if peers push it, and where it
        # is read in place, an arena has its owner's part alone.
        stride, begins = aligned(longest * row_bytes), self._begins
        if self._at_once:
            num_bytes, at = begins[-1] * row_bytes, [begin * row_bytes for begin in begins[:-1]]
        elif on.ws.reads_peers:
            num_bytes, at = stride, [0] * len(sizes)
        else:
            num_bytes, at = len(sizes) * stride, [src * stride for src in range(len(sizes))]
        offset, self._slot = on.layout.take(num_bytes)
        self._at = [offset + each for each in at]

    def _views(self, half: int) -> Places:
        ws, own = self._ws, self._ws.rank
        if self._at_once:
            whole = ws.view(own, half, self._at[0], self._shape, self._dtype)
            mine = whole[self._begins[own] : self._begins[own + 1]]
        else:
            mine = whole = self._part(half, own, own)
        return mine, whole, [(src, self._part(half, src if ws.reads_peers else own, src)) for src in self._others]

    def _part(self, half: int, holder: int, src: int) -> Tensor:
        # Return rank src's part in rank holder's half.
        size, other = self._sizes[src], self._shape[1]
        shape = (other, size) if self._dim == 1 and not self._at_once else (size, other)
        return self._ws.view(holder, half, self._at[src], shape, self._dtype)

    def start(self, x: Tensor) -> None:
        ws, steps = self._ws, self._ws.steps
        # Return x in the layout of an arena: columns are published unchanged if each chunk is multiplied alone.
        rows = x.t() if self._dim == 1 and self._at_once else x
        if not ws.reads_peers:
            self._push(rows)
            return
        mine = (ws.views.get(self._keys[steps.epoch & 1]) or self._lay_out())[0]
        if trace.spans is None:
            mine.copy_(rows)
        else:
            trace.timed("travel", ws.rank, mine.copy_, rows)
        for dst in self._before:
            steps.signal(dst, self._slot)

    start_beside = start

    def _push(self, rows: Tensor) -> None:
        ws, steps, half = self._ws, self._ws.steps, self._ws.steps.epoch & 1
        if self._at_once:
            (ws.views.get(self._keys[half]) or self._lay_out())[0].copy_(rows)
        with travelling(ws):
            for dst in self._before:
                self._part(half, dst, ws.rank).copy_(rows)
                steps.signal(dst, self._slot)

    def multiply(self, x: Tensor, products: Sequence[Product]) -> list[Tensor]:
        if self._at_once:
            # Stack all parts in the own half until the op ends. Written out here, as every small op runs this.
            ws, begins, steps, outs = self._ws, self._begins, self._ws.steps, list[Tensor]()
            _, whole, others = ws.views.get(self._keys[steps.epoch & 1]) or self._lay_out()
            for src, theirs in others:
                steps.wait(src, self._slot)
                if ws.reads_peers:
                    copy = whole[begins[src] : begins[src + 1]].copy_
                    copy(theirs) if trace.spans is None else trace.timed("travel", src, copy, theirs)
            for each in products:
                if each.kind == "whole":
                    outs.append(whole.clone() if each.out is None else each.out.copy_(whole))
                    continue
                if each.transposed:
                    left, right = each.other.t(), whole.t() if each.kind == "rows" else whole
                else:
                    left, right = whole if each.kind == "rows" else whole.t(), each.other
                if left.dtype in NARROW:
                    left, right = padded(left, right)
                # The epilogue's `addend`.
                bias, out = each.epilogue.bias, None if each.epilogue.keeps else each.out
                if trace.spans is not None:
                    outs.append(trace.timed("multiply", -1, mm, left, right, bias, 0, out))
                elif bias is None:
                    outs.append(torch.mm(left, right, out=out))
                else:
                    outs.append(torch.addmm(bias, left, right, out=out))
            if not products[0].epilogue.ends:
                return outs
            return ended([each.epilogue for each in products], outs, [each.out for each in products])
        outs = []
        for each in products:
            M, N = self._shape if each.kind == "whole" else (self._shape[each.kind == "outer"], each.other.shape[1])
            given = None if each.epilogue.keeps else each.out
            outs.append(x.new_empty((N, M) if each.transposed else (M, N)) if given is None else given)
        epilogues, by_rows = [each.epilogue for each in products], products[0].kind == "rows"
        ends, transposed = epilogues[0].ends, products[0].transposed
        ys = into(epilogues[0], outs, [each.out for each in products]) if ends else outs
        ws, steps = self._ws, self._ws.steps
        parts = (ws.views.get(self._keys[steps.epoch & 1]) or self._lay_out())[2]
        for i, (src, chunk) in enumerate(((self._ws.rank, x), *parts)):
            if i:
                steps.wait(src, self._slot)
            # As rows, in either layout of the chunk.
            rows = chunk.t() if self._dim == 1 else chunk
            part = slice(self._begins[src], self._begins[src + 1])
            add = self._add if trace.spans is None else partial(trace.timed, "multiply", src, self._add)
            its = epilogues
            if transposed and by_rows:
                its = [each.columns(part) for each in epilogues]
            for each, epilogue, out in zip(products, its, outs, strict=True):
                add(each, epilogue, rows, part, out, i == 0)
            if ends and by_rows:
                # The rows are in cache.
                at = (slice(None), part) if transposed else part
                end(its, [out[at] for out in outs], [y[at] for y in ys])
        if ends and not by_rows:
            end(epilogues, outs, ys)
        return [*ys, *outs] if epilogues[0].keeps else ys

    @staticmethod
    def _add(product: Product, epilogue: Epilogue, rows: Tensor, part: slice, out: Tensor, first: bool) -> None:
        # Add the contribution of the rows `part` of X to a product.
        if product.kind == "whole":
            out[part] = rows
            return
        bias, transposed = epilogue.addend, product.transposed
        if product.kind == "rows":
            left, right = rows, product.other
            out = out[:, part] if transposed else out[part]
        else:
            left, right = rows.t(), product.other[part]
        if transposed:
            left, right = right.t(), left.t()
        if not out.numel():
            return
        if out.dtype in NARROW:
            left, right = padded(left, right)
        if not first and product.kind == "outer":
            out.addmm_(left, right)
        elif bias is None:
            torch.mm(left, right, out=out)
        else:
            torch.addmm(bias, left, right, out=out)

    def whole(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        begins, own = self._begins, self._ws.rank
        if out is None:
            out = x.new_empty(self._shape)
            with trace.span("travel", own):
                out[begins[own] : begins[own + 1]] = x
        ws, steps = self._ws, self._ws.steps
        for src, theirs in (ws.views.get(self._keys[steps.epoch & 1]) or self._lay_out())[2]:
            steps.wait(src, self._slot)
            with trace.span("travel", src):
                out[begins[src] : begins[src + 1]] = theirs
        return out


class DecomposedPackedGather(PackedGather):
    """Gather of float8: on a CPU parts are read in place, on a GPU the copy engine pushes them."""

    def __init__(self, on: Decomposed, what: GatherSpec) -> None:
        super().__init__(on.rank, what)
        self._ws, self._in_blocks = on.ws, on.task.in_blocks
        pairs = zip(self._rows, self._cols, strict=True)
        self._stride = aligned(max(rows * packed_bytes(cols, blocks=self._in_blocks) for rows, cols in pairs))
        self._offset, self._slot = on.layout.take(len(self._sizes) * self._stride)

    def _part(self, holder: int, src: int) -> Tensor:
        # Return the bytes of rank src's rows in rank holder's half.
        shape = self._rows[src], packed_bytes(self._cols[src], blocks=self._in_blocks)
        return self._ws.view(holder, self._ws.steps.epoch, self._offset + src * self._stride, shape, torch.uint8)

    def start(self, x: Quantized) -> None:
        ws, steps, own = self._ws, self._ws.steps, self._rank
        mine = self._part(own, own)
        trace.timed("travel", own, pack_into, mine, x)
        with travelling(ws):
            for i in range(1, ws.world_size):
                dst = (own - i) % ws.world_size
                if not ws.reads_peers:
                    self._part(dst, own).copy_(mine)
                steps.signal(dst, self._slot)

    def _parts(self, x: Quantized) -> Iterator[tuple[int, Quantized]]:
        ws, own = self._ws, self._rank
        yield own, x
        for i in range(1, ws.world_size):
            src = (own + i) % ws.world_size
            ws.steps.wait(src, self._slot)
            yield src, unpacked(self._part(src if ws.reads_peers else own, src), self._cols[src], x)


class DecomposedScatter(Laid):
    """`verbs.Scatter` by chunk.

    Terms lie in the owner's half, by rank. On a CPU all terms lie in the own half if they have few rows or the sum is
    one-shot.
    """

    def __init__(self, on: Decomposed, what: ScatterSpec) -> None:
        self._ws, self._keys, self._dtype = on.ws, (object(), object()), on.task.dtype
        sizes, other, dim, multiplies, to_all = what
        self._sizes, self._other, self._dim, self._to_all = sizes, other, dim, to_all
        self._begins = offsets(sizes)
        # In a one-shot sum every rank owns all of it.
        self._part = slice(0, None) if to_all else slice(self._begins[on.rank], self._begins[on.rank + 1])
        self._row_bytes = other * self._dtype.itemsize
        self._stride = aligned(max(sizes) * self._row_bytes)
        self._in_own = multiplies and not to_all and dim == 0 and max(sizes) < FEW_ROWS and on.ws.reads_peers
        num_bytes = self._begins[-1] * self._row_bytes if self._in_own else 0
        self._offset, self._slot = on.layout.take(max(num_bytes, on.world_size * self._stride))
        self._others, self._before = on.others, on.before
        # Each owner and its part of the sum, this rank last.
        owners = () if to_all else (*on.others, on.rank)
        self._owners = [(dst, slice(self._begins[dst], self._begins[dst + 1])) for dst in owners]

    def _views(self, half: int) -> tuple[Tensor, list[Tensor]]:
        # The own terms, if they are in one place, and every rank's terms of this rank's part.
        ws, rank, every = self._ws, self._ws.rank, range(self._ws.world_size)
        rows = self._begins[-1] if self._to_all else self._sizes[rank]
        if self._in_own:
            mine = self._view(half, rank, 0, self._begins[-1])
            at, shape = self._offset + self._begins[rank] * self._row_bytes, (rows, self._other)
            return mine, [ws.view(src, half, at, shape, self._dtype) for src in every]
        in_theirs = self._to_all and ws.reads_peers
        mine = self._view(half, rank, rank, rows)
        return mine, [self._view(half, src if in_theirs else rank, src, rows) for src in every]

    def _view(self, half: int, holder: int, src: int, rows: int) -> Tensor:
        # Return rank src's terms in rank holder's half: `rows` rows, or columns with dim 1.
        shape = (rows, self._other) if self._dim == 0 else (self._other, rows)
        return self._ws.view(holder, half, self._offset + src * self._stride, shape, self._dtype)

    def multiply(self, terms: Sequence[tuple[Matrix, Matrix]]) -> None:
        ws, steps = self._ws, self._ws.steps
        if self._in_own or self._to_all:
            mine = (ws.views.get(self._keys[steps.epoch & 1]) or self._lay_out())[0]
            _multiply_into(terms, mine, -1)
            self._show(mine)
            return
        for dst, part in self._owners:
            theirs = [(a[part], b) if self._dim == 0 else (a, b[:, part]) for a, b in terms]
            place = self._view(steps.epoch, dst, ws.rank, self._sizes[dst])
            if ws.reads_peers or dst == ws.rank:
                _multiply_into(theirs, place, dst)
                steps.signal(dst, self._slot)
            else:
                total = summed(theirs)
                with travelling(ws):
                    self._send(total, place, dst)

    def put(self, x: Tensor) -> None:
        ws, epoch = self._ws, self._ws.steps.epoch
        if self._to_all:
            mine = (ws.views.get(self._keys[epoch & 1]) or self._lay_out())[0]
            trace.timed("travel", -1, mine.copy_, x)
            self._show(mine)
            return
        with travelling(ws):
            for dst, part in self._owners:
                # The own rows are added in place.
                if dst != ws.rank:
                    with trace.span("travel", dst):
                        self._send(x[part], self._view(epoch, dst, ws.rank, self._sizes[dst]), dst)

    def _send(self, terms: Tensor, place: Tensor, dst: int) -> None:
        place.copy_(terms)
        if terms.is_cuda:
            terms.record_stream(torch.cuda.current_stream(self._ws.device))
        self._ws.steps.signal(dst, self._slot)

    def _show(self, mine: Tensor) -> None:
        # Publish the terms to every peer, in place or as a copy.
        ws, steps = self._ws, self._ws.steps
        if ws.reads_peers:
            for dst in self._before:
                steps.signal(dst, self._slot)
            return
        with travelling(ws):
            for dst in self._before:
                self._send(mine, self._view(steps.epoch, dst, ws.rank, self._begins[-1]), dst)

    def _terms(self, own: Tensor | None) -> list[Tensor]:
        # Return all ranks' terms of this rank's part, in rank order, after their arrival. own: the tensor that was
        # `put`.
        ws, steps = self._ws, self._ws.steps
        for src in self._others:
            steps.wait(src, self._slot)
        terms: list[Tensor] = (ws.views.get(self._keys[steps.epoch & 1]) or self._lay_out())[1]
        if own is not None and not self._to_all:
            terms = [*terms[: ws.rank], own[self._part], *terms[ws.rank + 1 :]]
        return terms

    def sum(
        self, epilogue: Epilogue, *, own: Tensor | None, last: bool, out: Tensor | None = None
    ) -> list[Tensor]:  # fmt: skip
        terms = self._terms(own)
        if out is None:
            out = torch.empty_like(terms[0], memory_format=torch.contiguous_format)
        if self._dim == 1:
            epilogue = epilogue.columns(self._part)
        if trace.spans is None:
            _sum_into(terms, epilogue, out)
        else:
            trace.timed("add", -1, _sum_into, terms, epilogue, out)
        return [out] if epilogue.norm is None else epilogue.with_norm(out)

    def sum_into(self, epilogue: Epilogue, out: Tensor, gather: DecomposedGather, *, own: Tensor | None) -> None:
        mine = out[self._part]
        trace.timed("add", -1, _sum_into, self._terms(own), epilogue, mine)
        gather.start(mine)


def _multiply_into(terms: Sequence[tuple[Matrix, Matrix]], out: Tensor, peer: int) -> None:
    if trace.spans is not None:
        trace.timed("multiply", peer, sum_into, terms, out)
    elif len(terms) > 1 or type(terms[0][0]) is Quantized:
        sum_into(terms, out)
    elif out.numel():
        torch.mm(*(padded(*terms[0]) if out.dtype in NARROW else terms[0]), out=out)


def _sum_into(terms: list[Tensor], epilogue: Epilogue, out: Tensor) -> None:
    # Sum in rank order, in float32 (float64 stays float64), with the epilogue but no norm, rounded once.
    rows = max(1, _SUM_BLOCK_BYTES // max(1, out.shape[1] * 4))
    if rows >= out.shape[0] or not out.is_cpu:
        _add_into(terms, epilogue, out)
        return
    for begin in range(0, out.shape[0], rows):
        block = slice(begin, begin + rows)
        _add_into([term[block] for term in terms], epilogue.rows(block), out[block])


def _add_into(terms: list[Tensor], epilogue: Epilogue, out: Tensor) -> None:
    first, second, *others = terms
    if out.dtype in (torch.float32, torch.float64):
        total = torch.add(first, second, out=out)
    else:
        total = first.to(torch.float32).add_(second)
    for term in others:
        total.add_(term)
    epilogue.add_to(total)
    if total is not out:
        out.copy_(total)
