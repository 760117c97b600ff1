"""Library matmuls by chunk over symmetric memory. On a GPU the next chunk is in flight while one is multiplied.

On a CPU nothing travels: a rank publishes its part in its own arena, and the peers multiply it in place; they copy
parts of few rows, and multiply all of them at once. Terms of a sum are multiplied straight into the owner's arena; few
rows, and terms of which every rank needs the sum, into the own one, from which the owners add.

On a GPU the copy engine pushes parts into the peers' arenas on a side stream; terms of a sum are multiplied locally and
pushed likewise. On both, each part has a signal, and ranks wait part by part in the order rank, rank + 1, ..

Use it always on a CPU; on a GPU, for large chunks (a few MB) and if library matmuls are better than ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import trace
from ..cost.overlap import AT_ONCE_ROWS, ONE_SHOT
from ..epilogue import Epilogue
from ..kernels.layout import Layout, aligned
from ..op import Task
from ..scaled import Matrix, Quantized, pack_into, packed_bytes, unpacked
from ..shards import offsets
from ..workspaces.workspace import Workspace
from . import transport
from .local import NARROW, padded, sum_into, summed
from .transport import travelling
from .verbs import Gather, GatherSpec, Pending, ScatterSpec, ScheduleImpl

# On a CPU rows are summed in blocks of about this size: a float32 sum of narrower parts stays in cache between terms.
# On a GPU each block would be a launch for each term.
_SUM_BLOCK_BYTES = 256 << 10

# In a half: this rank's part in its arena; all parts, stacked, in its own half; and the others' ranks in the order of
# arrival, with their parts, and with the place of each in the stack.
Places: TypeAlias = tuple[Tensor, Tensor, list[tuple[int, Tensor, Tensor]]]


class Decomposed(ScheduleImpl):
    """`verbs.ScheduleImpl` with library matmuls by chunk."""

    where, sums, by_host = "by chunk", "in the order of ranks: not by fused", True

    def __init__(self, ws: Workspace, task: Task) -> None:
        self.ws, self.task, self.dtype = ws, task, task.dtype
        self.is_float8, self.in_blocks = task.float8 is not None, task.in_blocks
        self.rank, self.world_size = ws.rank, ws.world_size
        # The other ranks, in the order in which this rank takes their parts; then in the order in which they need its
        # part.
        self.others = [(ws.rank + i) % ws.world_size for i in range(1, ws.world_size)]
        self.before = [(ws.rank - i) % ws.world_size for i in range(1, ws.world_size)]
        self.layout = Layout()
        self.is_narrow = task.dtype not in (torch.float32, torch.float64)

    def one_shot(self, task: Task) -> bool:
        return transport.way(self.ws, "decomposed", task) == ONE_SHOT

    def gather(self, what: GatherSpec) -> DecomposedGather:
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

    The workspace caches the views of each half, and drops them with its arenas. They also go with the verb, and with
    its rows: of other rows it has other views.
    """

    # Keys of the views of each half.
    _keys: tuple[object, ...] = ()

    def __init__(self, ws: Workspace) -> None:
        self._ws, self._keys = ws, (object(), object())

    def _drop(self) -> None:
        for key in self._keys:
            self._ws.views.pop(key, None)

    __del__ = _drop

    def _lay_out(self) -> Any:
        # Return the views of the half that the current op uses.
        half = self._ws.steps.epoch & 1
        return self._ws.keep(self._keys[half], self._views(half))

    def _views(self, half: int) -> Any:
        raise NotImplementedError


class DecomposedGather(Laid, Gather):
    """`verbs.Gather` by chunk, or at once if chunks are small or if each would round a narrow sum once more.

    float8 travels by chunk, as bytes.
    """

    lends = True

    def __init__(self, on: Decomposed, what: GatherSpec) -> None:
        super().__init__(on.ws)
        self._layout, self._others, self._before, self.dim = on.layout, on.others, on.before, what.dim
        self._packs = on.is_float8 and not what.sums
        self._dtype, self._in_blocks = torch.uint8 if self._packs else on.dtype, on.in_blocks
        # Parts with fewer rows are multiplied at once.
        at_once = bool(what.kinds) and not self._packs
        narrow = "outer" in what.kinds and on.is_narrow
        self._few: float = 0 if not at_once else math.inf if narrow else AT_ONCE_ROWS
        self.bind(what.sizes, what.other)

    def bind(self, sizes: tuple[int, ...], other: int) -> None:
        self._drop()
        self.begins = begins = offsets(sizes)
        self.shape, self._sizes, longest, item_bytes = (begins[-1], other), sizes, max(sizes), self._dtype.itemsize
        self._at_once = longest < self._few
        self.by_parts = not self._at_once
        if self._at_once:
            # Parts of one matrix are stacked.
            self._offset, self._slot = self._layout.take(begins[-1] * other * item_bytes)
            return
        # The shape of each part in an arena. Columns are sent unchanged if each chunk is multiplied alone.
        self._shapes = [(other, size) if self.dim == 1 else (size, other) for size in sizes]
        if self._packs:
            self._cols = [cols for _, cols in self._shapes]
            self._shapes = [(rows, packed_bytes(cols, blocks=self._in_blocks)) for rows, cols in self._shapes]
        # Each part has room for the longest, if peers push it. Where it is read in place, an arena has its owner's part
        # alone.
        self._stride = aligned(max([rows * cols for rows, cols in self._shapes]) * item_bytes)
        num_parts = 1 if self._ws.reads_peers else len(sizes)
        self._offset, self._slot = self._layout.take(num_parts * self._stride)

    def _views(self, half: int) -> Places:
        ws, own, others = self._ws, self._ws.rank, []
        mine = whole = self._part(half, own, own)
        if self._at_once:
            whole = ws.view(own, half, self._offset, self.shape, self._dtype)
        for src in self._others:
            theirs = place = self._part(half, src if ws.reads_peers else own, src)
            if self._at_once and ws.reads_peers:
                place = self._part(half, own, src)
            others.append((src, theirs, place))
        return mine, whole, others

    def _part(self, half: int, holder: int, src: int) -> Tensor:
        # Return rank src's part in rank holder's half.
        if self._at_once:
            shape = self._sizes[src], self.shape[1]
            at = self.begins[src] * shape[1] * self._dtype.itemsize
        else:
            shape, at = self._shapes[src], 0 if self._ws.reads_peers else src * self._stride
        return self._ws.view(holder, half, self._offset + at, shape, self._dtype)

    def start(self, x: Any) -> Pending:
        ws, steps, half = self._ws, self._ws.steps, self._ws.steps.epoch & 1
        places = ws.views.get(self._keys[half]) or self._lay_out()
        mine, rows = places[0], x.t() if self.dim == 1 and self._at_once else x
        if self._packs:
            trace.timed("travel", ws.rank, pack_into, mine, x)
            rows = mine
        elif ws.reads_peers or self._at_once:
            # Otherwise x is pushed, and multiplied, where it is.
            if trace.spans is None:
                mine.copy_(rows)
            else:
                trace.timed("travel", ws.rank, mine.copy_, rows)
        if ws.reads_peers:
            for dst in self._before:
                steps.signal(dst, self._slot)
        else:
            self._push(rows, half)
        return Pending(self, x, places)

    def _push(self, rows: Tensor, half: int) -> None:
        ws = self._ws
        with travelling(ws):
            for dst in self._before:
                self._part(half, dst, ws.rank).copy_(rows)
                ws.steps.signal(dst, self._slot)

    def read(self, of: Pending) -> Tensor:
        # Stack all parts in the own half until the op ends. Every small op runs this.
        steps, reads_peers = self._ws.steps, self._ws.reads_peers
        _, whole, others = of.sent
        for src, theirs, place in others:
            steps.wait(src, self._slot)
            if reads_peers:
                place.copy_(theirs) if trace.spans is None else trace.timed("travel", src, place.copy_, theirs)
        return whole  # type: ignore[no-any-return]

    def parts(self, of: Pending) -> Iterator[tuple[int, Matrix]]:
        steps, slot = self._ws.steps, self._slot
        yield self._ws.rank, of.x
        for src, theirs, _ in of.sent[2]:
            steps.wait(src, slot)
            yield src, unpacked(theirs, self._cols[src], of.x) if self._packs else theirs

    def whole(self, of: Pending, out: Tensor | None = None) -> Tensor:
        begins, own = self.begins, self._ws.rank
        if out is None:
            out = of.x.new_empty(self.shape)
            with trace.span("travel", own):
                out[begins[own] : begins[own + 1]] = of.x
        steps = self._ws.steps
        for src, theirs, _ in of.sent[2]:
            steps.wait(src, self._slot)
            with trace.span("travel", src):
                out[begins[src] : begins[src + 1]] = theirs
        return out


class DecomposedScatter(Laid):
    """`verbs.Scatter` by chunk.

    Terms lie in the owner's half, by rank. On a CPU all terms lie in the own half if they have few rows or the sum is
    one-shot.
    """

    def __init__(self, on: Decomposed, what: ScatterSpec) -> None:
        super().__init__(on.ws)
        self._layout, self._others, self._before = on.layout, on.others, on.before
        self._dtype, self._dim, self._to_all = on.dtype, what.dim, what.to_all
        self._may_be_in_own = what.multiplies and not what.to_all and what.dim == 0 and on.ws.reads_peers
        self.bind(what.sizes, what.other)

    def bind(self, sizes: tuple[int, ...], other: int) -> None:
        self._drop()
        ws, longest = self._ws, max(sizes)
        self._sizes, self._other, self._begins = sizes, other, offsets(sizes)
        begins = self._begins
        # In a one-shot sum every rank owns all of it.
        self._part = slice(0, None) if self._to_all else slice(begins[ws.rank], begins[ws.rank + 1])
        self._row_bytes = other * self._dtype.itemsize
        self._stride = aligned(longest * self._row_bytes)
        self._in_own = self._may_be_in_own and longest < AT_ONCE_ROWS
        num_bytes = begins[-1] * self._row_bytes if self._in_own else 0
        self._offset, self._slot = self._layout.take(max(num_bytes, ws.world_size * self._stride))
        # Each owner and its part of the sum, this rank last.
        owners = () if self._to_all else (*self._others, ws.rank)
        self._owners = [(dst, slice(begins[dst], begins[dst + 1])) for dst in owners]

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
                if dst != ws.rank:
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

    def sum_into(self, epilogue: Epilogue, out: Tensor, gather: DecomposedGather, *, own: Tensor | None) -> Pending:
        mine = out[self._part]
        trace.timed("add", -1, _sum_into, self._terms(own), epilogue, mine)
        return gather.start(mine)


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
