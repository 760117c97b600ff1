"""Launch one rank's kernels with every signal raised in advance: nothing waits and nothing travels.

Both halves of the own arena hold the peers' data, so a kernel that gathers finds all rows there. The peers' arenas are
on the same device, and a kernel that sends stores into them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels import signal
from ..kernels.epilogue import epilogue_of
from ..kernels.gather_matmul import GatherMatmul
from ..kernels.launch import Channel, Config, config_for
from ..kernels.layout import Layout
from ..kernels.matmul import matmul
from ..kernels.matmul_all_reduce import MatmulAllReduce, room_of
from ..kernels.matmul_scatter import MatmulScatter
from ..op import ALL_GATHER_MATMUL, MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER
from ..scaled import Matrix, Quantized, pack_into, packed_bytes
from ..shards import offsets
from ..workspaces import clock
from .fused import scales_of
from .producer import piece_rows

# Not the first rank, so that own chunks do not begin at 0.
RANK = 1
BUDGET_MS = 5000
Fill = Callable[[Tensor], object]


class Arenas:
    """Arenas of `world_size` ranks on one device, with all signals raised for more ops than ever run here."""

    def __init__(self, device: torch.device, world_size: int, layout: Layout, rank: int = RANK) -> None:
        self.world_size, self.rank = world_size, rank
        self.half_bytes = max(4096, layout.half_bytes)
        # What `fill` has put here.
        self.filled: list[Tensor] = []
        words = signal.SIGNALS.value + layout.slots * world_size
        self._begin = -(-words // 64) * 64 * 4
        self.memory = torch.empty(world_size, self._begin + 2 * self.half_bytes, dtype=torch.uint8, device=device)
        # Bytes that are NaN in every dtype.
        self.memory.fill_(0xFF)
        headers = self.memory[:, : self._begin].view(torch.int32)
        headers.zero_()
        headers[:, signal.SIGNALS.value :] = signal.LEAD.value - 2
        # The default fingerprint of a channel.
        headers[:, signal.SIGNALS.value + signal.FINGERPRINT_SLOT.value * world_size :][:, : 4 * world_size] = 0
        headers[:, signal.BUDGET_MS.value] = BUDGET_MS
        pinned = device.type == "cuda"
        self.host = torch.zeros(signal.HOST_WORDS, dtype=torch.int32, device="cpu", pin_memory=pinned)
        addresses = [each.data_ptr() for each in self.memory]
        peers = torch.tensor([*addresses, self.host.data_ptr()], dtype=torch.int64, device=device)
        # One channel for all launches, as in a workspace.
        halves = tuple(each[self._begin :] for each in self.memory)
        self.channel = Channel(
            peers, halves[rank], rank, world_size, self.half_bytes, self._begin, arenas=halves
        )  # fmt: skip

    def words(self, rank: int) -> Tensor:
        """Return the header of a rank's arena (int32), signals included."""
        return self.memory[rank, : self._begin].view(torch.int32)

    def view(self, rank: int, parity: int, row: int, rows: int, pitch: int, dtype: torch.dtype) -> Tensor:
        """Return rows `row` .. `row + rows` of a rank's half, `pitch` elements each."""
        begin = self._begin + parity * self.half_bytes + row * pitch * dtype.itemsize
        part = self.memory[rank, begin : begin + rows * pitch * dtype.itemsize]
        return part.view(dtype).view(rows, pitch)

    def fill(self, row: int, x: Tensor, pitch: int) -> None:
        """Put x [rows, cols] into both of the own halves."""
        for parity in range(2):
            self.filled.append(self.view(self.rank, parity, row, x.shape[0], pitch, x.dtype)[:, : x.shape[1]])
            self.filled[-1].copy_(x)

    def run(self, launch: Callable[[], object]) -> None:
        """Launch, synchronize, and raise AssertionError if a wait timed out."""
        word = self.host[signal.CLOCK_MS.value :]
        clock.drive(word)
        try:
            launch()
            if self.memory.device.type == "cuda":
                torch.cuda.synchronize(self.memory.device)
        finally:
            clock.release(word)
        peer, wait, expected, seen = self.host[signal.REPORT.value : signal.REPORT_SEEN.value + 1].tolist()
        slot = wait // signal.NUM_OPS.value
        assert not peer, f"gave up waiting for rank {peer - 1}, slot {slot}: epoch {expected} expected, {seen} seen"


def table(device: torch.device, sizes: tuple[int, ...]) -> Tensor:
    """Return the row table of a kernel."""
    return torch.tensor(offsets(sizes), dtype=torch.int32, device=device)


def poisoned(like: Tensor, M: int, N: int) -> Tensor:
    """Return [M, N] of NaN, so that elements never written fail every check."""
    return like.new_full((M, N), math.nan)


def plain(a: Tensor, b: Tensor, config: Config | None = None) -> Fill:
    """Return the launch of the plain matmul, which fills C."""
    config = config or config_for(a.device, a.dtype, a.shape[0], b.shape[1])
    return lambda out: matmul(a, b, out, epilogue_of(()), config=config)


def _data(x: Matrix) -> Tensor:
    return x.data if isinstance(x, Quantized) else x


def gathered(
    shard: Matrix, whole: Matrix, b: Matrix, sizes: tuple[int, ...], rank: int = RANK, *, along: int = 0,
    transposed: bool = False, pushed: bool = True, last: bool = True, config: Config | None = None,
) -> tuple[Arenas, Fill]:  # fmt: skip
    """Return the arenas and the launch of whole [M, K] @ b [K, N], which fills C.

    - shard: this rank's part of the rows, or of the contraction (`along` 1). All three may be float8 with row scales.
    - transposed: C has adjacent rows.
    - pushed: rows are sent before this kernel, not by its own programs.
    - last: the kernel ends the op.
    - config: by default the table's.
    """
    (M, K), N, dtype, world_size = whole.shape, b.shape[1], _data(whole).dtype, len(sizes)
    float8 = isinstance(whole, Quantized)
    most, layout = max(sizes) if along == 0 else M, Layout()
    config = config or config_for(whole.device, dtype, most, N)
    rows, cols = (M, packed_bytes(K) if float8 else K) if along == 0 else (world_size * M, max(sizes))
    piece = piece_rows(cols * dtype.itemsize, config)
    region = layout.region(rows, cols, dtype, slots=-(-most // piece), piece=piece)
    arenas = Arenas(whole.device, world_size, layout, rank)
    scales = None
    if isinstance(whole, Quantized):
        assert along == 0
        assert isinstance(shard, Quantized)
        assert isinstance(b, Quantized)
        packed = torch.zeros(M, cols, dtype=torch.uint8, device=whole.device)
        pack_into(packed, whole)
        arenas.fill(0, packed.view(dtype), region.pitch)
        scales = scales_of([shard], [b])
    else:
        for src, part in enumerate(whole.split(sizes, along)):
            arenas.fill(sum(sizes[:src]) if along == 0 else src * M, part, region.pitch)
    at, epilogue = table(whole.device, sizes), epilogue_of((), per_row=transposed)
    kernel = GatherMatmul(
        ALL_GATHER_MATMUL.number, sizes, on_rows=along == 0, pitch=region.pitch, piece_rows=piece, config=config,
        scales="rows" if float8 else "",
    )  # fmt: skip
    own, other = _data(shard), _data(b)

    def launch(out: Tensor) -> None:
        kernel(
            arenas.channel, own, [other], [out], epilogue, at, pushed=pushed, last=last, scales=scales,
            arenas=arenas.channel.arenas,
        )  # fmt: skip

    return arenas, launch


def scattered(
    a: Matrix, b: Matrix, sizes: tuple[int, ...], rank: int = RANK, *, to_all: bool = False,
    config: Config | None = None,
) -> tuple[Arenas, Callable[[], None], list[Tensor]]:  # fmt: skip
    """Return the arenas, the launch of a [M, K] @ b whose tiles go to their owners, or `to_all`, and each owner's part.

    The kernel that adds is not launched, so the epoch does not end. config: by default the table's.
    """
    M, N, dtype, world_size = a.shape[0], b.shape[1], a.dtype, len(sizes)
    region_rows, layout = M if to_all else max(sizes), Layout()
    config = config or config_for(a.device, _data(a).dtype, region_rows, 0 if to_all else N)
    region = layout.region(world_size * region_rows, N, dtype, slots=1)
    arenas = Arenas(a.device, world_size, layout, rank)
    op, at = MATMUL_ALL_REDUCE if to_all else MATMUL_REDUCE_SCATTER, table(a.device, sizes)
    scales = None
    if isinstance(a, Quantized):
        assert isinstance(b, Quantized)
        scales = scales_of([a], [b], arenas.channel.data.view(dtype))
    kernel = MatmulScatter(
        op.number, sizes, region_rows=region_rows, pitch=region.pitch, to_all=to_all, config=config,
        scales="" if scales is None else "rows",
    )  # fmt: skip
    lefts, rights = [_data(a)], [_data(b)]

    def launch() -> None:
        kernel(arenas.channel, lefts, rights, at, scales, arenas.channel.arenas)

    parts = [
        arenas.view(owner, 1, rank * region_rows, M if to_all else size, region.pitch, dtype)[:, :N]
        for owner, size in enumerate(sizes)
    ]
    return arenas, launch, parts


def reduced(
    a: Tensor, b: Tensor, world_size: int, rank: int = RANK, *, to_all: bool = False, config: Config | None = None
) -> tuple[Arenas, Fill]:
    """Return the arenas and the launch of the kernel of few rows, a [M, K] @ b.

    The kernel fills the columns of C that this rank owns, or all columns with `to_all`. The peers' parts of these
    columns are zeros; so are the columns of C that the peers own.
    """
    M, N, dtype, layout = a.shape[0], b.shape[1], a.dtype, Layout()
    config = config or config_for(a.device, dtype, M, 0)
    room = room_of(M, N, world_size, config, to_all=to_all)
    region = layout.region(world_size * M, room.cols, dtype, slots=room.slots)
    places: dict[str, int] = {}
    if not to_all:
        sums = layout.region(M, N, dtype, slots=room.sums)
        places = {"sums_row": sums.row, "sums_pitch": sums.pitch, "second_slot": sums.slot}
    arenas = Arenas(a.device, world_size, layout, rank)
    arenas.memory[rank, -2 * arenas.half_bytes :].zero_()
    arrivals = torch.zeros(config.programs, dtype=torch.int32, device=a.device)
    kernel = MatmulAllReduce(
        MATMUL_ALL_REDUCE.number, world_size, rank, to_all=to_all, pitch=region.pitch, config=config
    )  # fmt: skip
    epilogue = epilogue_of(())
    return arenas, lambda out: kernel(arenas.channel, a, b, None, out, epilogue, arrivals, **places)


def own_columns(N: int, world_size: int, config: Config, rank: int = RANK) -> slice:
    """Return the columns of C that `rank` owns in the kernel of few rows, which are whole columns of tiles."""
    across = -(-N // config.block_n)
    first, last = rank * across // world_size, (rank + 1) * across // world_size
    return slice(first * config.block_n, last * config.block_n)
