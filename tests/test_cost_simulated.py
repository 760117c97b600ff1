"""The cost model of `fused` against a discrete-event simulation of the grids that are launched.

Every rank does the same, so one rank is simulated: its sends are also its arrivals, at the same times. Programs,
multiprocessors, the order of tiles and the link are those of the kernels; rates and latencies are those of the model.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from unittest import mock

import pytest
import torch

from fusedtp.cost.hardware import Hardware, find
from fusedtp.cost.model import work_of
from fusedtp.cost.overlap import KERNEL_TILES, PUSHER_GBPS, Model, late_share, num_pushers
from fusedtp.cost.work import Work
from fusedtp.kernels import launch
from fusedtp.kernels.configs import NARROW_RATE, Config, compiled_config, shape_class
from fusedtp.kernels.gather_matmul import rounds_to_skip
from fusedtp.kernels.matmul import Tile
from fusedtp.schedules.producer import joined_shape, piece_rows
from fusedtp.shards import even_sizes

from . import generated
from .test_cost_published import DOCUMENT
from .test_tile_order import Shape, deal


@dataclass(frozen=True)
class Grid:
    """One rank's part of an op on an H100: its tiles, and the time of each on its own multiprocessor, in us."""

    work: Work
    machine: Hardware
    pushers: int = 0

    @cached_property
    def config(self) -> Config:
        n = self.work.num_ranks
        rows = -(-self.work.rows // n)
        shape = shape_class(rows, self.work.cols, chunks=n, programs=self.machine.num_sms)
        return replace(compiled_config("sm_90", 2, shape), programs=self.machine.num_sms)

    @cached_property
    def shape(self) -> Shape:
        config, work = self.config, self.work
        sizes = even_sizes(work.rows, work.num_ranks)
        return Shape(sizes, work.cols, config.block_m, config.block_n, config.group_m)

    @property
    def tile_us(self) -> float:
        config, machine = self.config, self.machine
        rate = machine.rate(self.work.dtype) * machine.kernel_fraction * (1.0 if config.block_n > 128 else NARROW_RATE)
        stored = config.block_m * config.block_n * 2 / (machine.memory / machine.num_sms)
        return 2 * config.block_m * config.block_n * self.work.depth / (rate / machine.num_sms) + stored

    def pushed(self) -> Iterator[tuple[int, int, float]]:
        """Yield (distance of the peer, piece, time) of this rank's pushes, in order."""
        work, machine, n = self.work, self.machine, self.work.num_ranks
        row_bytes = 2 * work.depth
        rows = piece_rows(row_bytes, self.config)
        rate = min(PUSHER_GBPS * 1e3, machine.link(n) * machine.store_fraction / self.pushers)
        free, turn = [machine.launch_us] * self.pushers, 0
        for peer in range(1, n):
            for piece, begin in enumerate(range(0, self.shape.sizes[0], rows)):
                free[turn] += min(rows, self.shape.sizes[0] - begin) * row_bytes / rate
                yield peer, piece, free[turn]
                turn = (turn + 1) % self.pushers

    def gathered(self, *, weighed: bool = True) -> float:
        """Return when the last tile of a gather is stored; `weighed`: late programs get fewer tiles."""
        work, machine, config = self.work, self.machine, self.config
        tiles, slow = self.shape.order("gather"), 1 + machine.overlap_slowdown
        arrivals: dict[tuple[int, int], float] = {}
        ends = [0.0] * self.pushers
        for i, (peer, piece, time) in enumerate(self.pushed()):
            arrivals[peer, piece] = time + machine.flag_us + machine.poll_us
            ends[i % self.pushers] = time
        last, rows = max(ends), piece_rows(2 * work.depth, config)
        late = late_share(work, machine, self.pushers)
        skipped = rounds_to_skip(len(tiles), config.programs, self.pushers, late if weighed else 0.0)
        dealt = deal(len(tiles), config.programs, self.pushers, skipped, pairs=False)
        # A multiprocessor runs one program at a time.
        free = [*ends, *[machine.launch_us] * (machine.num_sms - self.pushers)]
        heapq.heapify(free)
        over = 0.0
        for mine in dealt:
            time = heapq.heappop(free)
            for index in mine:
                tile = tiles[index]
                if tile.chunk:
                    pieces = range(tile.row // rows, -(-min(tile.row + config.block_m, tile.rows) // rows))
                    time = max(time, *(arrivals[tile.chunk, piece] for piece in pieces))
                beside = min(self.tile_us, max(0.0, last - time) / slow)
                time += beside * slow + self.tile_us - beside
            heapq.heappush(free, time)
            over = max(over, time)
        return max(over, last)

    def scattered(self) -> float:
        """Return when a scatter's sums are stored: every tile leaves over the link, own tiles last, then the sum."""
        work, machine, config, n = self.work, self.machine, self.config, self.work.num_ranks
        tiles, slow = self.shape.order("scatter"), 1 + machine.overlap_slowdown
        tile_bytes = 2 * config.block_m * config.block_n
        store = tile_bytes / (machine.link(n) * machine.store_fraction)
        link, busy, ends = machine.launch_us, 0.0, [machine.launch_us] * machine.num_sms
        sent = sum(tile.chunk != self.shape.rank for tile in tiles)
        for i, _ in enumerate(tiles):
            # Programs run in step, and the link carries tiles in the order in which they finish.
            pid = i % machine.num_sms
            busy = link if pid == 0 else busy
            beside = min(self.tile_us, max(0.0, busy - ends[pid]) / slow)
            time = ends[pid] + beside * slow + self.tile_us - beside
            if i < sent:
                link = max(link, time) + store
            ends[pid] = time
        added = work.moved_bytes / machine.memory
        return max(*ends, link + machine.flag_us + machine.poll_us) + machine.launch_us + (n + 1) / n * added


@dataclass(frozen=True)
class Few:
    """One rank's part of an op of few rows on an H100. Tiles share what they read with those of the same wave."""

    work: Work
    machine: Hardware
    joined: bool

    @cached_property
    def config(self) -> Config:
        rows, chunks = -(-self.work.rows // self.work.num_ranks), self.work.num_ranks
        if self.joined:
            rows, chunks = joined_shape(self.work.rows)
        with (
            mock.patch.object(launch, "INTERPRETED", False),
            mock.patch.object(launch, "_target", return_value="sm_90"),
            mock.patch.object(launch, "_num_multiprocessors", return_value=self.machine.num_sms),
        ):
            return launch.config_for(torch.device("cuda"), torch.bfloat16, rows, self.work.cols, chunks=chunks)

    @cached_property
    def tiles(self) -> list[Tile]:
        config, work = self.config, self.work
        sizes = (work.rows,) if self.joined else even_sizes(work.rows, work.num_ranks)
        return Shape(sizes, work.cols, config.block_m, config.block_n, config.group_m).order(work.kind)

    @cached_property
    def tile_us(self) -> float:
        config, machine, m, n = self.config, self.machine, self.config.block_m, self.config.block_n
        (fraction,) = (each[2] for each in KERNEL_TILES if each[:2] == (m, n))
        rate = machine.rate(self.work.dtype) * machine.kernel_fraction * fraction / machine.num_sms
        stored = m * n * 2 / (machine.memory / machine.num_sms)
        return 2 * config.block_m * config.block_n * self.work.depth / rate + stored

    @property
    def hop(self) -> float:
        """Return the time in which one peer's share travels."""
        share = self.work.moved_bytes / self.work.num_ranks
        return share / (self.machine.link(self.work.num_ranks) * self.machine.store_fraction)

    def multiplied(self, arrivals: Sequence[float], busy: float) -> Iterator[tuple[Tile, float]]:
        """Yield each tile with the time at which it is stored, in order; the link is busy until `busy`.

        A tile needs its columns of the weight, and its rows. The first tile of a wave that needs them reads them, one
        read after the other; the others find them in L2.
        """
        machine, config, depth = self.machine, self.config, self.work.depth
        slow, reads = 1 + machine.overlap_slowdown, machine.memory * machine.kernel_fraction
        free, memory = [machine.launch_us] * machine.num_sms, machine.launch_us
        here: dict[tuple[str, int, int], tuple[int, float]] = {}
        for i, tile in enumerate(self.tiles):
            begin = max(heapq.heappop(free), max(arrivals) if self.joined else arrivals[tile.chunk])
            end = begin + self.tile_us
            rows = ("rows", tile.chunk, tile.index)
            for key, length in ((("column", 0, tile.col), config.block_n), (rows, config.block_m)):
                last, there = here.get(key, (-machine.num_sms, 0.0))
                if i - last >= machine.num_sms:
                    memory = there = max(memory, begin) + 2 * length * depth / reads
                here[key] = i, there
                end = max(end, there)
            end += min(end - begin, max(0.0, busy - begin) / slow) * (slow - 1)
            heapq.heappush(free, end)
            yield tile, end

    def simulated(self) -> float:
        """Return when a gather's last tile, or a scatter's last sum, is stored."""
        machine, n, work = self.machine, self.work.num_ranks, self.work
        wait = machine.flag_us + machine.poll_us
        if work.kind == "gather":
            arrivals = [0.0, *(machine.launch_us + wait + i * self.hop for i in range(1, n))]
            return max(end for _, end in self.multiplied(arrivals, 0.0 if self.joined else arrivals[-1]))
        # The link carries tiles in the order in which they are stored; of a joined tile all but this rank's rows.
        link, over = machine.launch_us, 0.0
        per_row = self.hop / (work.rows / n) / work.cols * self.config.block_n
        for tile, end in sorted(self.multiplied([0.0] * n, (n - 1) * self.hop), key=lambda each: each[1]):
            rows = min(self.config.block_m, tile.rows - tile.row) * ((n - 1) / n if self.joined else tile.chunk != 0)
            link = max(link, end) + rows * per_row
            over = max(over, end)
        return max(over, link + wait) + machine.launch_us + (n + 1) / n * work.moved_bytes / machine.memory


# Of Llama 8B on 2 and 4 ranks, and of 70B on 8: N and K of up and of down, whole.
FEW_ROWS = (16, 64, 128, 256, 384, 512, 1024)
FEW_SIZES = {2: (28672, 4096), 4: (28672, 4096), 8: (57344, 8192)}


def few(kind: str, M: int, n: int) -> Work:
    """Return a rank's share of the up projection, or of the down projection."""
    N, K = FEW_SIZES[n]
    if kind == "gather":
        return work_of("all_gather_matmul", M=M, N=N, K=K, world_size=n)
    return work_of("matmul_reduce_scatter", M=M, N=K, K=N // 2, world_size=n)


def few_row(kind: str, M: int, n: int) -> list[str]:
    """Return a row of the second table: unfused, both ways of `fused`, and the one that is taken, simulated."""
    machine, work = find("h100"), few(kind, M, n)
    model = Model(work, machine)
    ways = {each: Model(work, machine, joined=each).on_device("fused", "two_shot") for each in (False, True)}
    times = (model.matmul + model.comm, *ways.values(), Few(work, machine, model.joined).simulated())
    taken = "joined" if model.joined else "cut"
    return [kind, f"{M} x {work.cols} x {work.depth}", str(n), *(f"{time:.0f}" for time in times), taken]


def few_markdown() -> str:
    rows = [few_row(kind, M, n) for kind in ("gather", "scatter") for n in FEW_SIZES for M in FEW_ROWS]
    lines = [
        "| op | M x N x K of a rank | ranks | unfused, us | cut at ranks, us | joined, us | simulated, us | taken |",
        "|---|---|---:|---:|---:|---:|---:|---|",
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]
    return "\n".join(lines)


# Sizes of Llama 8B, 70B and 405B: M tokens, N, K, ranks.
GATHERS = [(16384, 28672, 8192, 8), (8192, 28672, 8192, 8), (16384, 53248, 16384, 8), (8192, 28672, 8192, 4)]
SCATTERS = [(8192, 8192, 28672, 4), (16384, 8192, 28672, 2), (16384, 16384, 53248, 8), (8192, 4096, 14336, 2)]


def gather(M: int, N: int, K: int, n: int, pushers: int = 0) -> Grid:
    machine = find("h100")
    work = work_of("all_gather_matmul", M=M, N=N, K=K, world_size=n)
    return Grid(work, machine, pushers or num_pushers(machine, n))


def scatter(M: int, N: int, K: int, n: int) -> Grid:
    return Grid(work_of("matmul_reduce_scatter", M=M, N=N, K=K, world_size=n), find("h100"))


def row(op: str, size: tuple[int, int, int, int]) -> list[str]:
    """Return a row of the table: the bound, the times before and now, and the model's time."""
    M, N, K, n = size
    grid = gather(*size) if op == "gather" else scatter(*size)
    model = Model(grid.work, grid.machine)
    bound = max(model.matmul, model.comm)
    if op == "gather":
        # Before: as many pushers as 10 GB/s each would need, and equal numbers of tiles for all programs.
        before, now, said = gather(*size, 33).gathered(weighed=False), grid.gathered(), model.gathered("push")
        best = f"{min(now, model.copied) / bound:.2f}"
    else:
        now = before = grid.scattered()
        said, best = model.on_device("fused", "two_shot"), f"{now / bound:.2f}"
    times = [f"{time:.0f}" for time in (bound, before, now, said)]
    return [op, f"{M} x {N} x {K}", str(n), *times, best]


def markdown() -> str:
    rows = [row(op, size) for op, sizes in (("gather", GATHERS), ("scatter", SCATTERS)) for size in sizes]
    lines = [
        "| op | M x N x K | ranks | bound, us | simulated before, us | simulated, us | model, us | best / bound |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]
    return "\n".join(lines)


@pytest.mark.parametrize("size", [*GATHERS, (4096, 28672, 8192, 8), (16384, 14336, 4096, 8), (8192, 57344, 8192, 8)])
def test_a_gather_takes_as_long_as_the_model_says(size: tuple[int, int, int, int]) -> None:
    grid = gather(*size)
    assert grid.gathered() == pytest.approx(Model(grid.work, grid.machine).gathered("push"), rel=0.05)
    assert grid.gathered() < gather(*size, 33).gathered(weighed=False) / 1.07


@pytest.mark.parametrize("size", [*SCATTERS, (8192, 8192, 28672, 8), (16384, 8192, 28672, 8)])
def test_a_scatter_takes_as_long_as_the_model_says(size: tuple[int, int, int, int]) -> None:
    grid = scatter(*size)
    assert grid.scattered() == pytest.approx(Model(grid.work, grid.machine).on_device("fused", "two_shot"), rel=0.05)


@pytest.mark.parametrize("n", FEW_SIZES)
@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_few_rows_take_as_long_as_the_model_says(kind: str, n: int) -> None:
    """By the way that is taken, which is hardly ever the slower one."""
    machine = find("h100")
    for M in FEW_ROWS:
        work = few(kind, M, n)
        joined = Model(work, machine).joined
        time = Model(work, machine, joined=joined).on_device("fused", "two_shot")
        assert Few(work, machine, joined).simulated() == pytest.approx(time, rel=0.05), M
        # A gather is decided for all widths of a decoder's weights together.
        assert time <= 1.25 * Few(work, machine, not joined).simulated(), M


def test_the_tables_are_generated() -> None:
    generated.as_written(DOCUMENT, "deal", markdown(), "FUSEDTP_COST")
    generated.as_written(DOCUMENT, "few", few_markdown(), "FUSEDTP_COST")
