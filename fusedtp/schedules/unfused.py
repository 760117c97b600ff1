"""The collective, then the matmul, or the reverse, as a careful user of torch.distributed would write them.

This is the baseline for the other schedules, and the fallback if ranks cannot reach each other's memory. So it makes no
copy that torch.distributed does not require: a scatter is multiplied straight into the buffer that is sent, and a
transposed problem is solved transposed. It calls `torch.ops._c10d_functional`, whose names are the same in every torch
we support. The backend (gloo, NCCL) decides how terms of a sum are rounded. Uneven parts are padded to the longest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import trace
from ..epilogue import Epilogue
from ..op import Task
from ..scaled import Matrix, pack_into, packed_bytes, unpacked
from ..shards import offsets
from ..torch_private import c10d
from .local import sum_into
from .verbs import Gather, GatherSpec, Pending, ScatterSpec, ScheduleImpl


class Unfused(ScheduleImpl):
    """`verbs.ScheduleImpl` with torch.distributed."""

    sums = "as the process group adds"

    def __init__(self, group: ProcessGroup, task: Task) -> None:
        self.task = task
        self.packs, self.blocks = task.float8 is not None, task.in_blocks
        self.group_name = group.group_name
        self.rank, self.world_size = group.rank(), group.size()

    def one_shot(self, task: Task) -> bool:
        """Return True: the backend has an all-reduce, and chooses its algorithm."""
        return True

    def gather(self, what: GatherSpec) -> UnfusedGather:
        return UnfusedGather(self, what)

    def scatter(self, what: ScatterSpec) -> UnfusedScatter:
        return UnfusedScatter(self, what)


class UnfusedGather(Gather):
    """`verbs.Gather` with torch.distributed: one collective of rows padded to the longest part, float8 as bytes."""

    def __init__(self, on: Unfused, what: GatherSpec) -> None:
        self._on, self.dim = on, what.dim
        self.bind(what.sizes, what.other)

    def bind(self, sizes: tuple[int, ...], other: int) -> None:
        on = self._on
        self._sizes, self.begins, self._longest = sizes, offsets(sizes), max(sizes)
        self.shape, self._even = (self.begins[-1], other), self._longest == min(sizes)
        # float8 is multiplied at once if all parts are rows, and equally many.
        self.by_parts = on.packs and (self.dim == 1 or not self._even)
        if on.packs:
            # The rows and columns of each part, as they travel.
            self._parts = [(size, other) if self.dim == 0 else (other, size) for size in sizes]
            self._row_bytes = packed_bytes(max(cols for _, cols in self._parts), blocks=on.blocks)

    def start(self, x: Any) -> Pending:
        if self._on.packs:
            sent = x.data.new_zeros(max(rows for rows, _ in self._parts), self._row_bytes, dtype=torch.uint8)
            pack_into(sent[: x.shape[0]], x)
        else:
            # A collective concatenates rows: transposing this part is cheaper than reordering all parts on arrival.
            rows = x.t() if self.dim == 1 else x
            if rows.shape[0] == self._longest:
                sent = rows.contiguous()
            else:
                sent = rows.new_empty(self._longest, rows.shape[1])
                sent[: rows.shape[0]] = rows
        # Every rank's rows; undefined before `_arrived`.
        arriving = sent.new_empty(sent.shape[0] * self._on.world_size, sent.shape[1])
        if arriving.numel():
            # With `out` this is a plain gather. Without, it is a coalesced one, whose name is too long for gloo: both
            # threads of a group may free the name (ProcessGroupGloo::runLoop, torch 2.11 to 2.15), and the heap is
            # corrupt.
            c10d.all_gather_into_tensor_out(sent, self._on.world_size, self._on.group_name, out=arriving)
        return Pending(self, x, arriving)

    @staticmethod
    def _arrived(of: Pending) -> Tensor:
        arriving, wait = of.sent, c10d.wait_tensor
        if not arriving.numel():
            return arriving  # type: ignore[no-any-return]
        found: Tensor = wait(arriving) if trace.spans is None else trace.timed("collective", -1, wait, arriving)
        return found

    def read(self, of: Pending) -> Matrix:
        arrived = self._arrived(of)
        if self._on.packs:
            return unpacked(arrived, self.shape[1], of.x)
        if self._even:
            return arrived
        parts = zip(arrived.split(self._longest), self._sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])

    def parts(self, of: Pending) -> Iterator[tuple[int, Matrix]]:
        arrived, num_ranks = self._arrived(of), self._on.world_size
        arrived = arrived.view(num_ranks, arrived.shape[0] // num_ranks, self._row_bytes)
        for src, (rows, cols) in enumerate(self._parts):
            yield src, unpacked(arrived[src, :rows], cols, of.x)


class UnfusedScatter:
    """`verbs.Scatter` with torch.distributed."""

    def __init__(self, on: Unfused, what: ScatterSpec) -> None:
        self._on, self._dim, self._to_all = on, what.dim, what.to_all
        self.bind(what.sizes, what.other)

    def bind(self, sizes: tuple[int, ...], other: int) -> None:
        self._sizes, self._begins, self._longest = sizes, offsets(sizes), max(sizes)
        self._even = self._longest == min(sizes)

    def multiply(self, terms: Sequence[tuple[Matrix, Matrix]]) -> None:
        if self._dim == 1:
            # The transposed problem scatters rows; only this rank's part is transposed back.
            terms = [(b.t(), a.t()) for a, b in terms]
        a, b = terms[0]
        num_rows = self._begins[-1] if self._even else self._longest * self._on.world_size
        sent = a.new_empty(num_rows, b.shape[1])
        if self._even:
            with trace.span("multiply"):
                sum_into(terms, sent)
        else:
            # Each part is multiplied into its padded place. Padding is summed too, and cut off afterwards.
            for peer, size in enumerate(self._sizes):
                part = slice(self._begins[peer], self._begins[peer + 1])
                with trace.span("multiply", peer):
                    sum_into([(a[part], b) for a, b in terms], sent[peer * self._longest :][:size])
        self._terms = sent

    def put(self, x: Tensor) -> None:
        if self._even:
            # An all-reduce sums in place.
            self._terms = x.clone(memory_format=torch.contiguous_format) if self._to_all else x.contiguous()
            return
        self._terms = x.new_empty(self._longest * self._on.world_size, x.shape[1])
        for peer, part in enumerate(x.split(list(self._sizes))):
            self._terms[peer * self._longest :][: self._sizes[peer]] = part

    def sum(
        self, epilogue: Epilogue, *, own: Tensor | None, last: bool, out: Tensor | None = None
    ) -> list[Tensor]:  # fmt: skip
        terms, rank, given = self._terms, self._on.rank, out
        del self._terms
        if not self._to_all:
            out = self._reduced(terms)[: self._sizes[rank]]
            out = out.t() if self._dim == 1 else out
            if given is None:
                # Copy, so that the padded buffer is freed.
                out = out.contiguous() if self._dim == 1 else out if self._even else out.clone()
        elif terms.numel():
            with trace.span("collective"):
                out = c10d.wait_tensor(c10d.all_reduce_(terms, "sum", self._on.group_name))
        else:
            out = terms
        if given is not None:
            out = given.copy_(out)
        if self._dim == 1:
            epilogue = epilogue.columns(slice(self._begins[rank], self._begins[rank + 1]))
        return epilogue.finish(out)

    def _reduced(self, terms: Tensor) -> Tensor:
        num_ranks = self._on.world_size
        if not terms.numel():
            return terms.new_empty(terms.shape[0] // num_ranks, terms.shape[1])
        with trace.span("collective"):
            out: Tensor = c10d.wait_tensor(c10d.reduce_scatter_tensor(terms, "sum", num_ranks, self._on.group_name))
        return out
