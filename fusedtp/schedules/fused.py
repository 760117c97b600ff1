"""Persistent Triton kernels with the collective inside, over symmetric memory.

`kernels.signal` documents the rules. A gather is part of the product that follows it: the first programs of that kernel
push, or copies are issued before it. A sum takes two kernels: the first sends tiles to their owners and does not wait,
the second adds them. With few rows, or sums in the switch, a matmul and all-reduce is one kernel (`OneKernel`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..activations import GATED
from ..cost.overlap import IN_SWITCH, MULTICAST, ONE_KERNEL_ROWS, ONE_SHOT, num_adders
from ..cost.work import Work
from ..epilogue import Epilogue
from ..kernels.choices import applied, of_fields
from ..kernels.configs import LOOP
from ..kernels.epilogue import TileEpilogue, epilogue_of, tensors_of
from ..kernels.gather_matmul import GatherMatmul, own_in_place
from ..kernels.launch import Config, config_for
from ..kernels.layout import Layout
from ..kernels.matmul_all_reduce import MatmulAllReduce, room_of
from ..kernels.matmul_scatter import MatmulScatter
from ..kernels.operands import END, Scales
from ..kernels.push import collect
from ..kernels.reduce import reduce
from ..kernels.ring import ring
from ..op import MATMUL_ALL_REDUCE, Product, Task
from ..scaled import Matrix, Quantized, pack_into, packed_bytes, unpacked
from ..shards import even_sizes, offsets
from ..workspaces.workspace import Workspace
from . import producer as producers
from . import transport
from .forms import Stages
from .local import multiply
from .verbs import Gather, GatherSpec, Operands, Pending, ScatterSpec, ScheduleImpl


class Fused(ScheduleImpl):
    """`verbs.ScheduleImpl` with persistent kernels.

    - `producer`: how gathered rows are sent: `auto`, `push`, `copy` or `multicast`.
    - `split`: run programs that wait for nothing as a separate kernel.
    - `choice`: tile (`kernels.choices.Choice`) that was measured to be faster than the table's, if any.
    - `programs`: number of programs of a kernel; 0 fills the device.
    """

    where = "in the kernel"

    def __init__(
        self, ws: Workspace, task: Task, *, producer: str = "auto", split: bool = False, programs: int = 0,
        choice: Mapping[str, int | str] | None = None,
    ) -> None:  # fmt: skip
        self.ws, self.task, self.producer, self.split = ws, task, producer, split
        self.choice = None if choice is None else of_fields(choice)
        self.programs = programs
        self.rank, self.world_size = ws.rank, ws.world_size
        self.layout = Layout()
        self.config: Config | None = None
        self.scales = "" if task.float8 is None else "blocks" if task.in_blocks else "rows"

    def form(self) -> Any:
        if self.task.algorithm == "ring":
            self.sums = "along the ring"
            return FusedRing(self, self.task)
        return OneKernel(self, self.task) if self._is_one_kernel() else None

    def _is_one_kernel(self) -> bool:
        # `OneKernel` takes neither several blocks nor a tree's leaves. Virtual ranks that share a device have too few
        # programs. Virtual ranks that run in phases need programs without waits in a separate kernel.
        task = self.task
        if task.op is not MATMUL_ALL_REDUCE or len(task.each("b")) > 1 or self.split or self.programs or task.leaves:
            return False
        return task.moved[0] <= ONE_KERNEL_ROWS or self.in_switch

    @property
    def in_switch(self) -> bool:
        """Return whether the switch makes the sums, which it does for an all-reduce only.

        A scatter sends no less through the switch, and could not send while the kernel multiplies.
        """
        if self.task.op.kind == "all_reduce":
            return self.task.algorithm != "ring" and self.way(self.task) == IN_SWITCH
        if self.task.any_order:
            self.sums = "in the order of ranks: a scatter sends no less through the switch"
        return False

    def configure(self, *shape: int, chunks: int = 1) -> Config:
        """Return the op's configuration, chosen once, for a matmul's shape if any, as `config_for` does."""
        if self.config is None:
            config = config_for(
                self.ws.device, self.task.float8 or self.task.dtype, *shape, chunks=chunks,
                blocks=self.task.in_blocks, tree=bool(self.task.leaves),
            )  # fmt: skip
            config = applied(config, self.choice)
            self.config = replace(config, programs=self.programs) if self.programs else config
        return self.config

    def one_shot(self, task: Task) -> bool:
        return self.way(task) == ONE_SHOT

    def way(self, task: Task) -> str:
        """Choose the way of an all-reduce (`transport.way`) and record in `sums` how order 'any' was resolved."""
        found = transport.way(self.ws, "fused", task)
        if task.any_order:
            why = "one shot" if found == ONE_SHOT else "faster so" if self.ws.has_multicast else "no multicast here"
            self.sums = "in the switch" if found == IN_SWITCH else f"in the order of ranks: {why}"
        return found

    def gather(self, what: GatherSpec) -> FusedGather:
        return FusedGather(self, what)

    def scatter(self, what: ScatterSpec) -> FusedScatter:
        return FusedScatter(self, what)

    def product(self, gather: FusedGather) -> FusedProduct | None:
        return FusedProduct(self, gather) if gather.num_in_kernel else None


class FusedGather(Gather):
    """`verbs.Gather` with persistent kernels: the rows' region of the arenas, and who sends them.

    `sent` of its `Pending` is the producer.
    """

    def __init__(self, on: Fused, what: GatherSpec) -> None:
        sizes, other, dim, kinds, result, sums = what
        self._on, self._ws, self.sizes, self.dim = on, on.ws, sizes, dim
        self.shape, self.begins = (sum(sizes), other), offsets(sizes)
        self._part = slice(self.begins[on.rank], self.begins[on.rank + 1])
        float8 = None if sums else on.task.float8
        dtype, most_rows = float8 or on.task.dtype, max(sizes) if dim == 0 else other
        multiplied_in = on.task.multiplied_in if float8 else on.task.dtype_name
        # Whether a tile may have rows of several shards.
        self.joined = bool(kinds) and dim == 0 and producers.joins(on.ws, "gather", *self.shape, multiplied_in)
        rows_of_tiles, chunks = most_rows, 1 if dim else on.world_size
        if self.joined:
            rows_of_tiles, chunks = producers.joined_shape(sum(sizes))
        # A rank without columns of C has pieces of as many rows as the others.
        shape = (rows_of_tiles, result) if result or kinds else ()
        self.config = config = on.configure(*shape, chunks=chunks)
        # Whether rows travel while another kernel multiplies terms of a sum.
        self._beside = bool(on.task.terms) and not sums
        # The number of products in the kernel that gathers. If it is 0, the library multiplies what `collect` gathers.
        self.num_in_kernel = kinds.count(kinds[0]) if kinds and not self._beside else 0
        cols = other if dim == 0 else max(sizes)
        rows = self.shape[0] if dim == 0 else on.world_size * other
        cols = packed_bytes(cols, blocks=on.task.in_blocks) if float8 else cols
        row_bytes = cols * dtype.itemsize
        # Sums have one signal for all of a rank's.
        piece = 0 if sums else producers.piece_rows(row_bytes, config)
        slots = 1 if sums else -(-most_rows // piece)
        self.region = on.layout.region(rows, cols, dtype, slots=slots, piece=piece)
        # Row of a half at which this rank's rows begin.
        self.row = self.region.row + (self.begins[on.rank] if dim == 0 else on.rank * other)
        M, K = self.shape if dim == 0 else (other, self.shape[0])
        self.work = Work(
            "gather", M if result else 0, result, K if result else 0, M * K, on.world_size,
            multiplied_in, by_depth=dim == 1,
        )  # fmt: skip

    def start(self, x: Matrix) -> Pending:
        ws, on = self._ws, self._on
        if ws.reads_peers and on.producer == "auto":
            # Every call on a CPU runs this.
            by = "push"
        else:
            by = producers.choose(ws, self.work, asked_for=on.producer)
        on.sent_by = by
        if not self.num_in_kernel or on.split or by == "copy":
            with_own = self.num_in_kernel > 0 and (self.joined or not own_in_place(x))
            producers.produce(
                ws, on.task.op, x, self.sizes, self.region, producer=by, dst_row=self.row, config=self.config,
                with_own=with_own, beside=self._beside, programs=on.programs,
            )  # fmt: skip
        # Otherwise the first programs of the kernel of the first product push.
        return Pending(self, x, by)

    def read(self, of: Pending) -> Matrix:
        if type(of.x) is Quantized:
            rows = of.x.data.new_empty(self.shape[0], self.region.pitch, dtype=torch.uint8)
            pack_into(rows[self._part], of.x)
            self._collect(rows.view(of.x.data.dtype))
            return unpacked(rows, of.x.shape[1], of.x)
        return self.whole(of)

    def whole(self, of: Pending, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = of.x.new_empty(self.shape)
            out[self._part].copy_(of.x)
        self._collect(out)
        return out

    def _collect(self, out: Tensor) -> None:
        # By the op's last kernel.
        ws = self._ws
        transport.settle(ws)
        collect(
            ws.channel(), self._on.task.op.number, out, ws.table(self.sizes), first_slot=self.region.slot,
            region_row=self.region.row, pitch=self.region.pitch, config=self.config, piece_rows=self.region.piece,
        )  # fmt: skip


class FusedProduct:
    """Products with a `Pending` in one kernel, of which the first programs may push; others follow in the library."""

    def __init__(self, on: Fused, gather: FusedGather) -> None:
        self._on, self._ws, self._gather = on, on.ws, gather
        self._launch: GatherMatmul | None = None
        # The kernel's epilogue, if no tensor of it changes from call to call.
        self._is_fixed = not (any(on.task.epilogue.operands) or on.task.epilogue.keeps)
        self._tile: TileEpilogue | None = None

    def _launcher(self, by: str) -> GatherMatmul:
        ws, on, gather = self._ws, self._on, self._gather
        config, late = producers.gather_config(ws, gather.config, gather.work, on.programs, by)
        self._launch = GatherMatmul(
            on.task.op.number, gather.sizes, on_rows=gather.dim == 0, pitch=gather.region.pitch,
            piece_rows=gather.region.piece, config=config, scales=on.scales, leaves=on.task.leaves,
            switch=by == MULTICAST, late=late, joined=gather.joined,
        )  # fmt: skip
        return self._launch

    def __call__(self, pending: Pending | Matrix, products: Sequence[Product], leaves: int) -> list[Tensor]:
        assert type(pending) is Pending
        on, ws, gather, x, by = self._on, self._ws, self._gather, pending.x, pending.sent
        in_kernel, others = products[: gather.num_in_kernel], products[gather.num_in_kernel :]
        first, transposed = in_kernel[0].epilogue, in_kernel[0].transposed
        M, bs, is_gated = gather.shape[gather.dim], [], first.activation in GATED
        outs: list[Tensor] = []
        cs: list[Tensor] = []
        zs: list[Tensor] = []
        for each in in_kernel:
            N = each.other.shape[1]
            bs.append(each.other)
            # Gate and up give one result.
            if not (outs and is_gated):
                outs.append(x.new_empty((N, M) if transposed else (M, N)) if each.out is None else each.out)
            cs.append(outs[-1].t() if transposed else outs[-1])
            # If the result is transposed, z has the layout of c: only its address is needed.
            if first.keeps:
                zs.append(outs[-1].new_empty_strided(outs[-1].shape, outs[-1].stride()))
        epilogue = self._tile
        if epilogue is None:
            epilogue = epilogue_of([each.epilogue for each in in_kernel], cs, per_row=transposed, zs=zs)
            if self._is_fixed:
                self._tile = epilogue
        own, scales = x, None
        if type(x) is Quantized:
            own, bs, scales = x.data, [b.data for b in bs], scales_of([x], bs)
        launch, issued = self._launch or self._launcher(by), on.split or by == "copy"
        start = partial(launch, ws.channel(), own, bs, cs, epilogue, ws.table(gather.sizes), scales=scales)
        if launch.config.core != LOOP:
            # A core that stores by TMA describes its peers' arenas.
            start = partial(start, arenas=ws.channel().arenas)
        if by == "copy" and not on.split:
            layouts = producers.layouts_of(x, *tensors_of(epilogue), *(each.other for each in in_kernel))
            in_capture = partial(start, pushed=False, last=not others)
            producers.load_for_capture(ws, in_capture, on.task, layouts)
        start(pushed=issued, last=not others and by != "copy")
        if others:
            return [*outs, *multiply(pending, others, leaves)]
        if by == "copy":
            producers.finish(ws)
        return [*outs, *zs]


class FusedScatter:
    """`verbs.Scatter` with persistent kernels. Columns are rows of the transposed problem."""

    def __init__(self, on: Fused, what: ScatterSpec) -> None:
        sizes, other, dim, multiplies, to_all = what
        self._on, self._ws, self._sizes, self._other, self._dim = on, on.ws, sizes, other, dim
        self._to_all, self._multiplies = to_all, multiplies
        begin = sum(sizes[: on.rank])
        self._part = slice(0, None) if to_all else slice(begin, begin + sizes[on.rank])
        self._region_rows = max(sizes)
        # Subtrees are not rounded.
        self._tree = bool(on.task.leaves)
        self._switch = on.in_switch
        multiplied_in = on.task.multiplied_in if on.task.float8 else on.task.dtype_name
        joined = multiplies and not (to_all or self._tree or self._switch) and producers.joins(
            on.ws, "scatter", sum(sizes), other, multiplied_in
        )  # fmt: skip
        rows, chunks = self._region_rows, 1 if to_all else on.world_size
        if joined:
            rows, chunks = producers.joined_shape(sum(sizes))
        # A one-shot sum's tile goes to all ranks, and a joined tile's elements may have an address each: a narrow tile
        # leaves registers for addresses.
        narrow = to_all or (joined and other % 16 != 0)
        shape = (rows, 0 if narrow else other) if multiplies else ()
        self._config = config = on.configure(*shape, chunks=chunks)
        # A kernel that multiplies has one signal for all of its tiles.
        piece = 0 if multiplies else config.block_m
        slots = 1 if multiplies else -(-self._region_rows // piece)
        dtype = torch.float32 if self._tree else on.task.dtype
        self._region = on.layout.region(on.world_size * self._region_rows, other, dtype, slots=slots, piece=piece)
        self._launch = MatmulScatter(
            on.task.op.number, sizes, region_rows=self._region_rows, pitch=self._region.pitch, to_all=to_all,
            config=config, scales=on.scales, leaves=on.task.leaves // on.world_size,
            switch=self._switch, joined=joined,
        )  # fmt: skip

    def multiply(self, terms: Sequence[tuple[Matrix, Matrix]]) -> None:
        if self._dim == 1:
            terms = [(b.t(), a.t()) for a, b in terms]
        ws, scales = self._ws, None
        lefts: Sequence[Any]
        rights: Sequence[Any]
        lefts, rights = zip(*terms, strict=True)
        if type(lefts[0]) is Quantized:
            scales = scales_of(lefts, rights, ws.channel().data.view(self._on.task.dtype))
            lefts, rights = [a.data for a in lefts], [b.data for b in rights]
        channel = ws.channel()
        # A core that stores by TMA describes its peers' arenas.
        arenas = () if self._config.core == LOOP else channel.arenas
        self._launch(channel, lefts, rights, ws.table(self._sizes), scales, arenas)

    def put(self, x: Tensor) -> None:
        producer = "copy" if self._on.producer == "copy" and not self._switch else "push"
        producers.produce(
            self._ws, self._on.task.op, x, self._sizes, self._region, producer=producer,
            dst_row=self._region_rows * (1 if self._switch else self._ws.rank), config=self._config,
            scatter=not self._to_all, with_own=self._switch, switch=self._switch, programs=self._on.programs,
        )  # fmt: skip

    def sum(
        self, epilogue: Epilogue, *, own: Tensor | None, last: bool, out: Tensor | None = None
    ) -> list[Tensor]:  # fmt: skip
        rows = self._sizes[0] if self._to_all else self._sizes[self._ws.rank]
        shape = (rows, self._other) if self._dim == 0 else (self._other, rows)
        if out is None:
            out = torch.empty(shape, dtype=self._on.task.dtype, device=self._ws.device)
        if self._dim == 1:
            epilogue = epilogue.columns(self._part)
        self._reduce(epilogue, out if self._dim == 0 else out.t(), own, last=last)
        return epilogue.with_norm(out)

    def sum_into(self, epilogue: Epilogue, out: Tensor, gather: FusedGather, *, own: Tensor | None) -> Pending:
        mine = out[self._part]
        self._reduce(epilogue, mine, own, gather=gather)
        return Pending(gather, mine)

    def _reduce(
        self,
        epilogue: Epilogue,
        out: Tensor,
        own: Tensor | None,
        *,
        gather: FusedGather | None = None,
        last: bool = True,
    ) -> None:
        if not self._multiplies:
            # The rows that were put may still be in flight, as copies.
            transport.settle(self._ws)
        reduce(
            self._ws.channel(), self._on.task.op.number, out,
            epilogue_of([epilogue], per_row=self._dim == 1), region_rows=self._region_rows,
            pitch=self._region.pitch, per_piece=not self._multiplies, config=self._config,
            own=None if own is None or self._switch else own[self._part],
            result_row=None if gather is None else gather.row,
            result_pitch=None if gather is None or not self._tree else gather.region.pitch,
            second_slot=0 if gather is None else gather.region.slot, last=last, tree=self._tree,
            switch=self._switch,
        )  # fmt: skip


def scales_of(lefts: Sequence[Quantized], rights: Sequence[Quantized], out: Any = END) -> Scales:
    """Return a launch's scales of blocks. `out` is a placeholder: Triton 3.6 cannot compare a tuple with None in it."""
    a, b = [each.for_kernels() for each in lefts], [each.t().for_kernels() for each in rights]
    return Scales(tuple(a), tuple(b), out, END)


class FusedRing:
    """Collective as a ring, in a separate kernel: every rank passes on the data of the previous rank."""

    def __init__(self, on: Fused, task: Task) -> None:
        self._ws, self._task = on.ws, task
        rows, cols = task.moved
        self._sizes = task.sizes or even_sizes(rows, on.world_size)
        self._config = config = on.configure()
        most = -(-max(self._sizes) // config.block_m) * -(-cols // config.block_n)
        region_rows = rows + (rows if task.op.kind == "all_reduce" else 0)
        self._region = on.layout.region(region_rows, cols, task.dtype, slots=2 * len(self._sizes) * most)

    def _run(self, operands: Operands, _: None) -> list[Tensor]:
        ws, x = self._ws, operands["a"]
        out = operands["out"] if "out" in operands else x.new_empty(self._task.results(ws.rank)[0])
        ring(
            ws.channel(), self._task.op.number, x, out, ws.table(self._sizes), self._sizes,
            reduces=self._task.op.kind != "gather", gathers=self._task.op.kind != "scatter", pitch=self._region.pitch,
            config=self._config,
        )  # fmt: skip
        return [out]

    stages: Stages = (_run,)


class OneKernel:
    """Form of a matmul + all-reduce in one kernel, one-shot or two-shot: of few rows, or with sums in the switch.

    Owners of a two-shot sum have columns.
    """

    def __init__(self, on: Fused, task: Task) -> None:
        self._ws, self._task, self._epilogue = on.ws, task, task.epilogue.of(0)
        M, N = task.moved
        to_all = on.one_shot(task)
        switch, few = on.in_switch, M <= ONE_KERNEL_ROWS
        # Few rows get a narrow tile: they have few tiles, and storing to all ranks takes registers for the addresses.
        config = self._config = on.configure(M, 0 if few else N)
        room = room_of(M, N, on.world_size, config, to_all=to_all)
        region = on.layout.region(on.world_size * M, room.cols, task.dtype, slots=room.slots)
        self._places: dict[str, int] = {}
        if not to_all:
            sums = on.layout.region(M, N, task.dtype, slots=room.sums)
            self._places = {"sums_row": sums.row, "sums_pitch": sums.pitch, "second_slot": sums.slot}
        self._launch = MatmulAllReduce(
            task.op.number, on.world_size, on.rank, to_all=to_all, pitch=region.pitch, config=config,
            scales=on.scales, switch=switch,
            adders=0 if few else num_adders(on.ws.hardware, on.world_size),
        )  # fmt: skip
        # Programs count parts of tiles by them.
        assert config.programs <= on.ws.counters.numel()
        self._tile = None if any(self._epilogue.operands) else epilogue_of([self._epilogue])

    def _run(self, operands: Operands, _: None) -> list[Tensor]:
        task, ws = self._task, self._ws
        a, b, epilogue, tile = operands["a"], operands["b"], self._epilogue, self._tile
        if tile is None:
            epilogue = epilogue.bind(operands)
            tile = epilogue_of([epilogue])
        channel = ws.channel()
        scales: Any = None
        if type(a) is Quantized:
            scales = scales_of([a], [b], channel.data.view(task.dtype))
            a, b = a.data, b.data
        out = operands["out"] if "out" in operands else torch.empty(task.moved, dtype=task.dtype, device=ws.device)
        self._launch(channel, a, b, scales, out, tile, ws.counters, **self._places)
        return epilogue.with_norm(out)

    stages: Stages = (_run,)
