"""The collective, then the matmul, or the reverse, as a careful user of torch.distributed would write them.

This is the baseline for the other schedules, and the fallback if ranks cannot reach each other's memory. So it makes no
copy that torch.distributed does not require: a scatter is multiplied straight into the buffer that is sent, and a
transposed problem is solved transposed. It calls `torch.ops._c10d_functional`, whose names are the same in every torch
we support. The backend (gloo, NCCL) decides how terms of a sum are rounded. Uneven parts are padded to the longest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import trace
from ..epilogue import Epilogue
from ..op import Task
from ..scaled import Matrix, Quantized, pack_into, packed_bytes, unpacked
from ..shards import offsets
from ..torch_private import c10d
from .local import PackedGather, multiplied, sum_into
from .verbs import GatherSpec, Product, ScatterSpec, ScheduleImpl


class Unfused(ScheduleImpl):
    """`verbs.ScheduleImpl` with torch.distributed."""

    sums = "as the process group adds"

    def __init__(self, group: ProcessGroup, task: Task) -> None:
        self._float8, self.blocks = task.float8 is not None, task.in_blocks
        self.group_name = group.group_name
        self.rank, self.world_size = group.rank(), group.size()

    def at(self, task: Task) -> Unfused:
        return self

    def one_shot(self, task: Task) -> bool:
        """Return True: the backend has an all-reduce, and chooses its algorithm."""
        return True

    def gather(self, what: GatherSpec) -> UnfusedGather | UnfusedPackedGather:
        return UnfusedPackedGather(self, what) if self._float8 else UnfusedGather(self, what)

    def scatter(self, what: ScatterSpec) -> UnfusedScatter:
        return UnfusedScatter(self, what)


class UnfusedGather:
    """`verbs.Gather` with torch.distributed."""

    def __init__(self, on: Unfused, what: GatherSpec) -> None:
        self._on, self._sizes, self._dim, self._longest = on, what.sizes, what.dim, max(what.sizes)
        self._even = len(set(what.sizes)) == 1

    def start(self, x: Tensor) -> None:
        # A collective concatenates rows: transposing this part is cheaper than reordering all parts on arrival.
        x = x.t() if self._dim == 1 else x
        # Every rank's rows, padded to the longest part; undefined before `_arrived`.
        longest, num_ranks, columns = self._longest, self._on.world_size, x.shape[1]
        if longest == 0 or columns == 0:
            self._arriving = x.new_empty(longest * num_ranks, columns)
            return
        if x.shape[0] == longest:
            sent = x.contiguous()
        else:
            sent = x.new_empty(longest, columns)
            sent[: x.shape[0]] = x
        # With `out` this is a plain gather. Without, it is a coalesced one, whose name is too long for gloo: both
        # threads of a group may free the name (ProcessGroupGloo::runLoop, torch 2.11 to 2.15), and the heap is corrupt.
        self._arriving = sent.new_empty(longest * num_ranks, columns)
        c10d.all_gather_into_tensor_out(sent, num_ranks, self._on.group_name, out=self._arriving)

    start_beside = start

    def _arrived(self) -> Tensor:
        arriving, longest = self._arriving, self._longest
        del self._arriving
        gathered, wait = arriving, c10d.wait_tensor
        if arriving.numel():
            gathered = wait(arriving) if trace.spans is None else trace.timed("collective", -1, wait, arriving)
        if self._even:
            return gathered
        parts = zip(gathered.split(longest), self._sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])

    def multiply(self, x: Tensor, products: Sequence[Product]) -> list[Tensor]:
        whole = self._arrived()
        if trace.spans is not None:
            return trace.timed("multiply", -1, multiplied, whole, products)
        return multiplied(whole, products)

    def whole(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._arrived() if out is None else out.copy_(self._arrived())


class UnfusedPackedGather(PackedGather):
    """Gather of float8 by one collective, of rows padded to the largest number and length."""

    def __init__(self, on: Unfused, what: GatherSpec) -> None:
        super().__init__(on.rank, what)
        self._on, self._row_bytes = on, packed_bytes(max(self._cols), blocks=on.blocks)

    def start(self, x: Quantized) -> None:
        sent = x.data.new_zeros(max(self._rows), self._row_bytes, dtype=torch.uint8)
        pack_into(sent[: x.shape[0]], x)
        self._arriving = sent.new_empty(self._on.world_size, *sent.shape)
        if sent.numel():
            whole = self._arriving.view(-1, sent.shape[1])
            c10d.all_gather_into_tensor_out(sent, self._on.world_size, self._on.group_name, out=whole)

    def _arrived(self) -> Tensor:
        arriving = self._arriving
        del self._arriving
        if arriving.numel():
            with trace.span("collective"):
                c10d.wait_tensor(arriving.view(-1, arriving.shape[2]))
        return arriving

    def _parts(self, x: Quantized) -> Iterator[tuple[int, Quantized]]:
        for src, rows in enumerate(self._arrived()):
            yield src, unpacked(rows[: self._rows[src]], self._cols[src], x)

    def multiply(self, x: Quantized, products: Sequence[Product]) -> list[Tensor]:
        """Multiply equal row parts at once, others part by part."""
        if self._dim == 1 or len(set(self._rows)) > 1:
            return super().multiply(x, products)
        whole = unpacked(self._arrived().flatten(0, 1), x.shape[1], x)
        with trace.span("multiply"):
            return multiplied(whole, products)


class UnfusedScatter:
    """`verbs.Scatter` with torch.distributed."""

    def __init__(self, on: Unfused, what: ScatterSpec) -> None:
        self._on, self._sizes, self._dim, self._to_all = on, what.sizes, what.dim, what.to_all
        self._begins, self._longest = offsets(what.sizes), max(what.sizes)
        self._even = len(set(what.sizes)) == 1

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
