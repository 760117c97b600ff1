"""One rank's kernels with every signal raised in advance, on arenas of its own: nothing waits and nothing travels.

Both halves of the own arena hold what the peers would have sent, so a kernel that gathers finds everything there; what
it sends goes to arenas beside its own. Each kernel is a `Preset`: its launch, the check of all that it has written, and
the plain matmul that it is held against, if it multiplies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from fusedtp.kernels import INTERPRETED, signal
from fusedtp.kernels.gather_matmul import GatherMatmul
from fusedtp.kernels.launch import Channel, Config, config_for
from fusedtp.kernels.layout import Layout, pitch_of
from fusedtp.kernels.matmul import matmul
from fusedtp.kernels.matmul_all_reduce import MatmulAllReduce, room_of
from fusedtp.kernels.matmul_scatter import MatmulScatter
from fusedtp.kernels.operands import epilogue_of
from torch import Tensor

from fusedtp.op import ALL_GATHER_MATMUL, MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER
from fusedtp.schedules.fused import num_tiles
from fusedtp.schedules.producer import piece_rows
from fusedtp.shards import even_sizes, offsets
from fusedtp.workspaces import clock

from .oracle import Product

# Not the first rank, so that own chunks begin somewhere.
RANK = 1
BUDGET_MS = 5000
Checked = tuple[float, float]
Fill = Callable[[Tensor], None]


class Arenas:
    """Arenas of `world_size` ranks on one device, laid out so, all signals raised for as many ops as ever run here."""

    def __init__(self, device: torch.device, world_size: int, layout: Layout, rank: int = RANK) -> None:
        self.world_size, self.rank = world_size, rank
        self.half_bytes = max(4096, layout.half_bytes)
        words = signal.SIGNALS.value + layout.slots * world_size
        self._begin = -(-words // 64) * 64 * 4
        self.memory = torch.empty(world_size, self._begin + 2 * self.half_bytes, dtype=torch.uint8, device=device)
        # Bytes that are NaN in every dtype.
        self.memory.fill_(0xFF)
        headers = self.memory[:, : self._begin].view(torch.int32)
        headers.zero_()
        headers[:, signal.SIGNALS.value :] = signal.LEAD.value - 2
        # The fingerprint of a channel that is given none.
        headers[:, signal.SIGNALS.value + signal.FINGERPRINT_SLOT.value * world_size :][:, : 4 * world_size] = 0
        headers[:, signal.BUDGET_MS.value] = BUDGET_MS
        self.host = torch.zeros(signal.HOST_WORDS, dtype=torch.int32, pin_memory=device.type == "cuda")
        addresses = [each.data_ptr() for each in self.memory]
        peers = torch.tensor([*addresses, self.host.data_ptr()], dtype=torch.int64).to(device)
        # This rank's end, one for all launches, as a workspace has it.
        self.channel = Channel(peers, self.memory[rank, self._begin :], rank, world_size, self.half_bytes, self._begin)

    def view(self, rank: int, parity: int, row: int, rows: int, pitch: int, dtype: torch.dtype) -> Tensor:
        """Rows `row` .. `row + rows` of a rank's half, `pitch` elements each."""
        begin = self._begin + parity * self.half_bytes + row * pitch * dtype.itemsize
        part = self.memory[rank, begin : begin + rows * pitch * dtype.itemsize]
        return part.view(dtype).view(rows, pitch)

    def fill(self, row: int, x: Tensor, pitch: int) -> None:
        """Put x [rows, cols] into both of the own halves."""
        for parity in range(2):
            self.view(self.rank, parity, row, x.shape[0], pitch, x.dtype)[:, : x.shape[1]] = x

    def check_sent(self, x: Tensor, row: int, pitch: int) -> None:
        """AssertionError unless every peer has x at that row, by the first op, whose epoch is odd."""
        for rank in range(self.world_size):
            if rank != self.rank:
                got = self.view(rank, 1, row, x.shape[0], pitch, x.dtype)[:, : x.shape[1]]
                exact(got, x, f"sent to rank {rank}")

    def run(self, launch: Callable[[], object]) -> None:
        """Launch, wait, and raise AssertionError if any wait was given up."""
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


@dataclass(frozen=True)
class Preset:
    """A kernel's launch; what is wrong with what it wrote; the plain matmul; the bytes that it moves if there is none.

    `bounded`: whether it is to be as fast as that, which a kernel that also pushes, or stores to all, is not.
    """

    arenas: Arenas
    launch: Callable[[], object]
    check: Callable[[], Checked]
    plain: Callable[[], object] | None = None
    check_plain: Callable[[], Checked] | None = None
    moved_bytes: int = 0
    bounded: bool = True


def normal(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Standard normal. On a device that is not there: of that shape."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    random = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=random, device=device).to(dtype)


def table(device: torch.device, sizes: Sequence[int]) -> Tensor:
    """Row offsets as kernels take them."""
    return torch.tensor(offsets(sizes), dtype=torch.int32).to(device)


def poisoned(like: Tensor, M: int, N: int) -> Tensor:
    """[M, N] of NaN: what nothing writes fails every check."""
    return like.new_full((M, N), math.nan)


def plain(a: Tensor, b: Tensor) -> Fill:
    """The launch of the plain matmul, which fills C."""
    config = config_for(a.device, a.dtype, a.shape[0], b.shape[1])
    return lambda out: matmul(a, b, out, epilogue_of(None, per_row=False), config=config, upcast=INTERPRETED)


def gathered(
    shard: Tensor, whole: Tensor, b: Tensor, sizes: tuple[int, ...], rank: int = RANK, *, along: int = 0,
    transposed: bool = False, pushed: bool = True, last: bool = True, config: Config | None = None,
) -> tuple[Arenas, Fill]:  # fmt: skip
    """The launch of whole [M, K] @ b, which fills C, where `shard` is this rank's part of the rows, or of the
    contraction; and its arenas. config: by default the table's. The other options: see `gather`.
    """
    (M, K), N, dtype, world_size = whole.shape, b.shape[1], whole.dtype, len(sizes)
    most, layout = max(sizes) if along == 0 else M, Layout()
    config = config or config_for(whole.device, dtype, most, N)
    rows, cols = (M, K) if along == 0 else (world_size * M, max(sizes))
    piece = piece_rows(cols * dtype.itemsize, config)
    region = layout.region(rows, cols, dtype, slots=-(-most // piece), piece=piece)
    arenas = Arenas(whole.device, world_size, layout, rank)
    for src, part in enumerate(whole.split(sizes, along)):
        arenas.fill(sum(sizes[:src]) if along == 0 else src * M, part, region.pitch)
    at, epilogue = table(whole.device, sizes), epilogue_of(None, per_row=transposed)
    kernel = GatherMatmul(
        ALL_GATHER_MATMUL.number, sizes, gather_dim=along, pitch=region.pitch, piece_rows=piece, config=config,
        upcast=INTERPRETED,
    )  # fmt: skip

    def launch(out: Tensor) -> None:
        kernel(arenas.channel, shard, b, out, epilogue, at, pushed=pushed, last=last)

    return arenas, launch


def scattered(
    a: Tensor, b: Tensor, sizes: tuple[int, ...], rank: int = RANK, *, to_all: bool = False,
    config: Config | None = None,
) -> tuple[Arenas, Callable[[], None], list[Tensor]]:  # fmt: skip
    """The launch of a [M, K] @ b whose tiles go to their owners, or `to_all`; its arenas, and each owner's part there.

    The kernel that adds up is left out, so the epoch stays. config: by default the table's.
    """
    M, N, dtype, world_size = a.shape[0], b.shape[1], a.dtype, len(sizes)
    region_rows, layout = M if to_all else max(sizes), Layout()
    config = config or config_for(a.device, dtype, region_rows, 0 if to_all else N)
    region = layout.region(world_size * region_rows, N, dtype, slots=num_tiles(region_rows, N, config))
    arenas = Arenas(a.device, world_size, layout, rank)
    op, at = MATMUL_ALL_REDUCE if to_all else MATMUL_REDUCE_SCATTER, table(a.device, sizes)

    kernel = MatmulScatter(
        op.number, sizes, region_rows=region_rows, pitch=region.pitch, to_all=to_all, config=config, upcast=INTERPRETED
    )

    def launch() -> None:
        kernel(arenas.channel, [(a, b)], at)

    parts = [
        arenas.view(owner, 1, rank * region_rows, M if to_all else size, region.pitch, dtype)[:, :N]
        for owner, size in enumerate(sizes)
    ]
    return arenas, launch, parts


def reduced(
    a: Tensor, b: Tensor, world_size: int, rank: int = RANK, *, to_all: bool = False, config: Config | None = None
) -> tuple[Arenas, Fill]:
    """The launch of the kernel of few rows: a [M, K] @ b, which fills the columns of C that this rank owns, or all of
    them `to_all`; and its arenas. The peers' parts are zeros there; so are the columns of C that they own.
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
        MATMUL_ALL_REDUCE.number, world_size, rank, to_all=to_all, pitch=region.pitch, config=config, upcast=INTERPRETED
    )  # fmt: skip
    epilogue = epilogue_of(None, per_row=False)
    return arenas, lambda out: kernel(arenas.channel, a, b, None, out, epilogue, arrivals, **places)


def _multiplying(
    arenas: Arenas, launch: Callable[[], object], check: Callable[[Product], Checked], a: Tensor, b: Tensor,
    *, bounded: bool, transposed: bool = False,
) -> Preset:  # fmt: skip
    # Beside the plain matmul of the same.
    product = functools.cache(lambda: Product(a, b, (a.shape[1],)))
    twin = result(a, b, transposed=transposed)
    return Preset(
        arenas, launch, lambda: check(product()), functools.partial(plain(a, b), twin),
        lambda: product().check(twin, a.dtype, "own matmul"), bounded=bounded,
    )  # fmt: skip


def result(a: Tensor, b: Tensor, *, transposed: bool) -> Tensor:
    """Room for a @ b, poisoned; transposed: with adjacent rows."""
    M, N = a.shape[0], b.shape[1]
    return poisoned(a, N, M).t() if transposed else poisoned(a, M, N)


def gather(
    device: torch.device, dtype: torch.dtype, world_size: int, M: int, N: int, K: int, *, along: int = 0,
    transposed: bool = False, pushed: bool = True, in_place: bool = True, last: bool = True, seed: int = 0,
) -> Preset:  # fmt: skip
    """all-gather + matmul, x [M, K] cut along rows or contraction. pushed: before this kernel, not by its own programs;
    last: it ends the op; in_place: the own shard is read where it lies.
    """
    whole, b = normal(device, dtype, M, K, seed=seed), normal(device, dtype, N, K, seed=seed + 1).t()
    sizes = even_sizes((M, K)[along], world_size)
    begin = offsets(sizes)[RANK]
    shard = whole.narrow(along, begin, sizes[RANK]).clone()
    # Rows that are not contiguous go through the own arena.
    shard = shard if in_place else shard.t().contiguous().t()
    arenas, fill = gathered(shard, whole, b, sizes, along=along, transposed=transposed, pushed=pushed, last=last)
    out = result(whole, b, transposed=transposed)

    def check(product: Product) -> Checked:
        found = product.check(out, dtype, "result")
        row, cols = (begin, K) if along == 0 else (RANK * M, max(sizes))
        if not pushed:
            arenas.check_sent(shard, row, pitch_of(cols, dtype))
        return found

    return _multiplying(
        arenas, functools.partial(fill, out), check, whole, b, bounded=pushed, transposed=transposed
    )  # fmt: skip


def scatter(
    device: torch.device, dtype: torch.dtype, world_size: int, M: int, N: int, K: int, *, to_all: bool = False,
    turned: bool = False, seed: int = 0,
) -> Preset:  # fmt: skip
    """matmul + reduce-scatter's first kernel, or a one-shot all-reduce's. turned: A has adjacent rows."""
    a, b = normal(device, dtype, M, K, seed=seed), normal(device, dtype, N, K, seed=seed + 1).t()
    if turned:
        a, b = a.t().contiguous().t(), b.contiguous()
    arenas, launch, parts = scattered(a, b, even_sizes(M, world_size), to_all=to_all)

    def check(product: Product) -> Checked:
        found = [product.check(part, dtype, "on a rank") for part in (parts if to_all else [torch.cat(parts)])]
        return max(error for error, _ in found), max(ratio for _, ratio in found)

    return _multiplying(arenas, launch, check, a, b, bounded=not to_all)


def exact(got: Tensor, want: Tensor, name: str) -> Checked:
    """For what is only moved: bit for bit."""
    assert torch.equal(got, want), f"{name}: {int((got != want).sum())} of {want.numel()} elements differ"
    return 0.0, 0.0


def close(got: Tensor, want: Tensor, allowed: Tensor, name: str) -> Checked:
    """For what is added: every element within `allowed`."""
    error = (got.double() - want).abs()
    ratio = torch.nan_to_num(error / allowed, nan=math.inf).max().item() if error.numel() else 0.0
    wrong = int((~(error <= allowed)).sum())
    assert not wrong, (
        f"{name}: {wrong} of {want.numel()} elements are wrong, the worst by {ratio:.3g} of what is allowed"
    )
    return error.max().item() if error.numel() else 0.0, ratio
