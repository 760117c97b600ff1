"""One rank's kernels with every signal raised in advance, on arenas of its own: nothing waits and nothing travels.

Both halves of the own arena hold what the peers would have sent, so a kernel that gathers finds everything there; what
it sends goes to arenas beside its own. Each kernel is a `Preset`: its launch, the check of all that it has written, and
the plain matmul that it is held against, if it multiplies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from fusedtp.kernels import INTERPRETED, signal
from fusedtp.kernels.gather_matmul import gather_matmul
from fusedtp.kernels.launch import Channel, Config, config_for
from fusedtp.kernels.layout import pitch_of
from fusedtp.kernels.matmul_scatter import matmul_scatter
from torch import Tensor

from fusedtp.schedules.producer import piece_rows
from fusedtp.shards import even_sizes, offsets
from fusedtp.workspaces import clock

from .gpu_matmul import own, poisoned
from .oracle import Product

FIRST = signal.FIRST_SLOT.value
# Not the first rank, so that own chunks begin somewhere.
RANK = 1
BUDGET_MS = 5000
Checked = tuple[float, float]


class Arenas:
    """Arenas of `world_size` ranks on one device, all signals raised for as many ops as ever run here."""

    def __init__(self, device: torch.device, world_size: int, half_bytes: int, slots: int) -> None:
        self.world_size = world_size
        self._half_bytes = -(-half_bytes // 4096) * 4096
        words = signal.SIGNALS.value + slots * world_size
        self._begin = -(-words // 64) * 64 * 4
        self.memory = torch.empty(world_size, self._begin + 2 * self._half_bytes, dtype=torch.uint8, device=device)
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
        self._peers = torch.tensor([*addresses, self.host.data_ptr()], dtype=torch.int64).to(device)

    def channel(self) -> Channel:
        """Rank RANK's end."""
        data = self.memory[RANK, self._begin :]
        return Channel(self._peers, data, RANK, self.world_size, self._half_bytes, self._begin)

    def view(self, rank: int, parity: int, row: int, rows: int, pitch: int, dtype: torch.dtype) -> Tensor:
        """Rows `row` .. `row + rows` of a rank's half, `pitch` elements each."""
        begin = self._begin + parity * self._half_bytes + row * pitch * dtype.itemsize
        part = self.memory[rank, begin : begin + rows * pitch * dtype.itemsize]
        return part.view(dtype).view(rows, pitch)

    def fill(self, row: int, x: Tensor, pitch: int) -> None:
        """Put x [rows, cols] into both of the own halves."""
        for parity in range(2):
            self.view(RANK, parity, row, x.shape[0], pitch, x.dtype)[:, : x.shape[1]] = x

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
        slot = wait // len(signal.OPS)
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


def table(device: torch.device, sizes: tuple[int, ...]) -> Tensor:
    """Row offsets as kernels take them."""
    return torch.tensor(offsets(sizes), dtype=torch.int32).to(device)


def gather(
    device: torch.device, dtype: torch.dtype, world_size: int, M: int, N: int, K: int, *, along: int = 0,
    transposed: bool = False, pushed: bool = True, in_place: bool = True, last: bool = True, turned: bool = False,
    seed: int = 0,
) -> Preset:  # fmt: skip
    """all-gather + matmul, x [M, K] cut along rows or contraction. pushed: before this kernel, not by its own programs;
    last: it ends the op; in_place: the own shard is read where it lies; turned: B has adjacent columns.
    """
    whole = normal(device, dtype, M, K, seed=seed)
    b = normal(device, dtype, N, K, seed=seed + 1).t()
    b = b.contiguous() if turned else b
    sizes = even_sizes((M, K)[along], world_size)
    begin = offsets(sizes)[RANK]
    shard = whole.narrow(along, begin, sizes[RANK]).clone()
    # Rows that are not contiguous go through the own arena.
    shard = shard if in_place else shard.t().contiguous().t()
    config = config_for(device, dtype, max(sizes) if along == 0 else M, N)
    pitch = pitch_of(K if along == 0 else max(sizes), dtype)
    piece, rows = piece_rows(pitch * dtype.itemsize, config), M if along == 0 else world_size * M
    slots = FIRST + -(-(max(sizes) if along == 0 else M) // piece)
    arenas = Arenas(device, world_size, rows * pitch * dtype.itemsize, slots)
    if along == 0:
        arenas.fill(0, whole, pitch)
    else:
        for rank, part in enumerate(whole.split(sizes, 1)):
            arenas.fill(rank * M, part, pitch)
    out = poisoned(whole, N, M).t() if transposed else poisoned(whole, M, N)
    at = table(device, sizes)

    def launch() -> None:
        gather_matmul(
            arenas.channel(), shard, b, out, None, at, sizes, gather_dim=along, pitch=pitch, piece_rows=piece,
            pushed=pushed, config=config, upcast=INTERPRETED, transposed=transposed, last=last,
        )  # fmt: skip

    def check() -> Checked:
        found = product().check(out, dtype, "result")
        if not pushed:
            _check_pushed(arenas, shard, begin if along == 0 else RANK * M, pitch)
        return found

    twin = poisoned(whole, N, M).t() if transposed else poisoned(whole, M, N)
    product = functools.cache(lambda: Product(whole, b, (K,)))
    return Preset(
        arenas, launch, check, own(whole, b, twin), lambda: product().check(twin, dtype, "own matmul"), bounded=pushed
    )


def _check_pushed(arenas: Arenas, x: Tensor, row: int, pitch: int) -> None:
    # By the first op, whose epoch is odd.
    for rank in range(arenas.world_size):
        if rank != RANK:
            got = arenas.view(rank, 1, row, x.shape[0], pitch, x.dtype)[:, : x.shape[1]]
            assert torch.equal(got, x), f"rank {rank} has not been sent what was pushed"


def scatter(
    device: torch.device, dtype: torch.dtype, world_size: int, M: int, N: int, K: int, *, to_all: bool = False,
    turned: bool = False, seed: int = 0,
) -> Preset:  # fmt: skip
    """matmul + reduce-scatter's first kernel, or a one-shot all-reduce's. turned: A has adjacent rows."""
    a = normal(device, dtype, M, K, seed=seed)
    b = normal(device, dtype, N, K, seed=seed + 1).t()
    if turned:
        a, b = a.t().contiguous().t(), b.contiguous()
    sizes = even_sizes(M, world_size)
    region_rows, pitch = M if to_all else max(sizes), pitch_of(N, dtype)
    config = config_for(device, dtype, region_rows, 0 if to_all else N)
    arenas = Arenas(
        device, world_size, world_size * region_rows * pitch * dtype.itemsize, slots(config, region_rows, N)
    )
    at = table(device, sizes)

    def launch() -> None:
        op = "matmul_all_reduce" if to_all else "matmul_reduce_scatter"
        matmul_scatter(
            arenas.channel(), op, a, b, at, sizes,
            region_rows=region_rows, pitch=pitch, to_all=to_all, config=config, upcast=INTERPRETED,
        )  # fmt: skip

    def check() -> Checked:
        row = RANK * region_rows
        parts = [
            arenas.view(rank, 1, row, M if to_all else size, pitch, dtype)[:, :N] for rank, size in enumerate(sizes)
        ]
        found = [product().check(part, dtype, "on a rank") for part in (parts if to_all else [torch.cat(parts)])]
        return max(error for error, _ in found), max(ratio for _, ratio in found)

    twin = poisoned(a, M, N)
    product = functools.cache(lambda: Product(a, b, (K,)))
    return Preset(
        arenas, launch, check, own(a, b, twin), lambda: product().check(twin, dtype, "own matmul"), bounded=not to_all
    )


def slots(config: Config, rows: int, cols: int) -> int:
    """Slots of an op with a signal a tile, twice over."""
    return int(FIRST + 2 * -(-rows // config.block_m) * -(-cols // config.block_n))


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
