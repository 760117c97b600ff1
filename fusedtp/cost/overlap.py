"""Model of a rank's matmul and communication together: the times behind `cost`, and the choices made by them.

A model is one share of an op on one machine, in microseconds, by the closed forms of `cost.model`. Schedules choose by
it: one-shot or two-shot, pushed or copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import product
from math import ceil, log2
from typing import Literal, NamedTuple

from ..sharding.plan import ITEMSIZE, is_float8
from .hardware import WIDENED, WIDENED_BLOCKS, Hardware
from .work import SUBTREES, Work


# Closed forms of the time that a collective takes alone: NCCL's, and ours through the NVLink switch.
#
# S is the bytes of the whole tensor, n the number of ranks, W the link. Times are microseconds. The library is NCCL
# inside one domain, with its fastest algorithm:
#
#     gather, scatter   ring of short messages (LL)      start + (n-1) ll_hop + (n-1+own) S / (n W ll_fraction)
#                       ring of long ones (Simple)       start + simple_start + (n-1) simple_hop
#                                                        + (n-1+own) S / (n W collective_fraction)
#     all-reduce        ring of short messages (LL)      start + 2 (n-1) ll_hop + (2 (n-1) + own) S / (n W ll_fraction)
#                       tree of short messages (LL)      start + 2 log2 n tree_hop + the same bytes
#                       ring of long ones (Simple)       start + simple_start + 2 (n-1) simple_hop
#                                                        + (2 (n-1) + own) S / (n W collective_fraction)
#                       in the switch (NVLS)             start + switch_start + (n+1) S / (n W switch_fraction)
#
# A rank's own data is handled too, in `own` of a peer's time: two ranks reach less of the link than eight. Short
# messages carry a flag with each word: less latency, less bandwidth. In an all-reduce in the switch, a rank's link
# carries the whole tensor once to the switch, and 1/n of the sums back. A machine whose `switch_fraction` is None has
# no NVLS. NCCL chooses by a table of its own, which is not always the fastest. `library_us` is the library's own time;
# torch adds `torch_us`.
def library_us(kind: str, num_bytes: float, num_ranks: int, machine: Hardware) -> float:
    """Return the microseconds of the library's collective of `num_bytes`, whole, among ranks that reach each other."""
    n, sums = num_ranks, kind == "all_reduce"
    link, steps = machine.link(n), (2 if sums else 1) * (n - 1)
    sent = (steps + machine.own_step) / n * num_bytes / link
    if machine.in_place:
        hops = 2 * ceil(log2(n)) if sums else n - 1
        return machine.collective_start_us + hops * machine.flag_us + sent / machine.collective_fraction
    short = steps * machine.ll_hop_us
    if sums:
        short = min(short, 2 * ceil(log2(n)) * machine.tree_hop_us)
    long = machine.simple_start_us + steps * machine.simple_hop_us + sent / machine.collective_fraction
    ways = [short + sent / machine.ll_fraction, long]
    if sums and machine.switch_fraction is not None:
        ways.append(machine.switch_start_us + (n + 1) / n * num_bytes / link / machine.switch_fraction)
    return machine.collective_start_us + min(ways)


def multicast_us(kind: str, num_bytes: float, num_ranks: int, machine: Hardware) -> float | None:
    """Return the microseconds of the collective as one multimem kernel, or None if the switch cannot add and multicast.

    The kernel reads sums from the switch and stores to all ranks at once. It is timed alone, with two waits of all
    ranks for all ranks, a signal and a poll each. `overlap.Model.in_switch` is the time inside `fused`.
    """
    if machine.multicast_fraction is None or machine.multicast_sum_fraction is None:
        return None
    n, sums = num_ranks, kind == "all_reduce"
    fraction = machine.multicast_sum_fraction if sums else machine.multicast_fraction
    carried = num_bytes * ((n + 1) / n if sums else 1)
    waits = 2 * (machine.flag_us + machine.poll_us)
    return machine.lone_us + waits + carried / (machine.link(n) * fraction)


def elementwise_us(num_bytes: float, machine: Hardware) -> float:
    """Return the microseconds of a lone kernel whose memory reads and writes sum to `num_bytes`."""
    return machine.lone_us + num_bytes / machine.memory


# Up to this many rows, `fused` runs a matmul and all-reduce as one kernel.
ONE_KERNEL_ROWS = 256
# Up to this many rows, a tile of `fused` has rows of several ranks on a machine without a model (`joins`).
JOINED_ROWS = 256
# Up to this many, joined tiles have 64 rows: more multiprocessors have work than with one row of tiles.
JOINED_LOW_ROWS = 256
# A matmul of fewer rows is bound by reading the weight, which every chunk would read again: `schedules.decomposed`
# joins such chunks and multiplies once.
AT_ONCE_ROWS = 256

# Tiles of our kernel: rows, columns, and the fraction of its best rate (`kernels.configs`). The first two are for few
# rows. The first and the last are for 16-bit operands alone, whose best rate the last has. Assumed.
KERNEL_TILES = ((64, 64, 0.75), (64, 128, 0.75), (128, 128, 0.9), (128, 256, 1.0))

# Two kernels cast x, as a compiler makes them: one reads magnitudes, one reads x again and writes. In a microsecond an
# SM casts this many elements: vLLM's cast in NVIDIA AIConfigurator's float8 tables, alike on H100, H200 and Blackwell.
_CAST_LAUNCHES, _CAST_ELEMENTS = 2, 2900

# How `fused` sends gathered data: by programs of the kernel itself, or by the copy engine beside it.
PRODUCERS = ("push", "copy")
# On request, one store to all ranks.
MULTICAST = "multicast"
# A shard is copied in parts of about this size, each with its own start. On an H20 (`hardware`) a part reaches 0.80 of
# an endless copy's rate, and tiles need not wait for a whole shard.
COPY_BYTES = 4 << 20
# The host issues a part, a copy and one call of the driver for its signals, in this share of the time of a chunk of
# `decomposed`, which has a matmul and a wait too. Assumed.
PART_OF_CHUNK = 1 / 3
# GB/s that one pushing program sends: 32 KB at a time, which take 0.8 us to load and 0.3 us to store at 64 bytes a
# clock. Assumed.
PUSHER_GBPS = 30
# GB/s of sums that one program gets from the switch: 8 KB in flight, 1.6 us to all ranks and back. Assumed.
ADDER_GBPS = 5
# Ways of an all-reduce. In IN_SWITCH the switch makes the sums, and one rank asks it for each.
ONE_SHOT, TWO_SHOT, IN_SWITCH = "one_shot", "two_shot", "switch"
# At most one in this many SMs pushes, or adds.
PUSHERS_AT_MOST = 4

# Tiles that a library chooses from to fill all SMs, and the fraction of the rate that they reach: smaller tiles load
# more per FLOP. Fitted to NVIDIA AIConfigurator's tables of bfloat16 matmuls.
_TILES = ((128, 128, 1.0), (128, 64, 0.8), (64, 64, 0.55))
# In at most so many parts, none shorter than this, the library cuts the contraction of 16-bit operands if tiles are few
# (split-K). A second kernel adds the parts. Its float8 kernels do not.
_SPLITS, _SHORTEST = (1, 2, 4, 8), 512


# Fraction of the library's rate that a tree's tile reaches, the first of `KERNEL_TILES`.
TREE_FRACTION = KERNEL_TILES[0][2]


class Grid(NamedTuple):
    """Tiles of our kernel: `parts` chunks of rows, of `down` rows of tiles each, `across` tiles wide; a tile's size."""

    parts: int
    down: int
    across: int
    tile_rows: int
    tile_cols: int

    @property
    def num_tiles(self) -> int:
        return self.parts * self.down * self.across

    def weight_reads(self, programs: int) -> float:
        """Return how often the kernel reads its weight.

        Tiles that `programs` programs multiply at a time, a wave, share columns of the weight in L2. Waves share
        nothing. The tiles of a chunk, at most a group of rows high, follow each other column by column.
        """
        full, rest = divmod(self.num_tiles, programs)
        columns = full * min(self.across, ceil(programs / self.down)) + min(self.across, ceil(rest / self.down))
        return max(1.0, min(columns / self.across, self.parts))


# Columns of the weights at a gather, all ranks' together, as multiples of the gathered columns: those of a decoder's
# attention, of an MLP's up projection, and of gate and up.
_WIDTHS = (1.5, 3.5, 7.0)


def joins(
    kind: Literal["gather", "scatter"], rows: int, cols: int, num_ranks: int, dtype: str, machine: Hardware
) -> bool:
    """Return whether tiles of `fused` have rows of several ranks, by the faster way.

    Joined tiles pad less and read the weight once, but wait for several ranks. All ranks decide alike. They know the
    moved tensor, [rows, cols]. A gather's weight may be split unevenly, so times are added up over several widths. A
    scatter's depth, by which both ways grow alike, is that of an MLP.
    """
    if num_ranks == 1 or not machine.knows(dtype) or machine.in_place:
        return kind == "gather" and rows <= JOINED_ROWS
    if kind == "gather":
        products = [(max(1, int(each * cols / num_ranks)), cols) for each in _WIDTHS]
    else:
        products = [(cols, max(1, 4 * cols // num_ranks))]
    works = [Work(kind, rows, *product, rows * cols, num_ranks, dtype) for product in products]
    joined, cut = (
        sum(Model(work, machine, joined=each).on_device("fused", TWO_SHOT) for work in works) for each in (True, False)
    )
    return joined < cut


class Model:
    """Times of one rank's matmul and its communication on one machine, in microseconds.

    joined: whether tiles of our kernel have rows of several ranks, if not by `joins`.
    """

    def __init__(
        self, work: Work, machine: Hardware, matmul_us: float | None = None, kernel_matmul_us: float | None = None, *,
        joined: bool | None = None,
    ) -> None:  # fmt: skip
        self.work, self.machine, self.n = work, machine, work.num_ranks
        self.given, self.kernel_given = matmul_us, kernel_matmul_us
        self.memory = machine.memory
        # Time from a peer's last store until a program that waits for its signal continues.
        self.wait = machine.flag_us + machine.poll_us
        # The dtype that torch multiplies in, and that of our kernel, which needs units for float8.
        self.torch_dtype = machine.multiplied(work.dtype)
        self.kernel_multiplies = not work.flops or work.dtype in machine.matrix_tflops
        self._kernel_dtype = work.dtype if self.kernel_multiplies else self.torch_dtype
        self._joined = joined
        # The time of a rank's whole matmul, measured or modelled.
        modelled = self.product(work.rows, work.cols, work.depth) if matmul_us is None and work.flops else 0.0
        self.matmul = modelled if matmul_us is None else matmul_us

    @cached_property
    def joined(self) -> bool:
        """Return whether tiles of our kernel have rows of several ranks: a tile waits for them, or goes to them."""
        work = self.work
        if work.by_depth or not work.flops or work.tree:
            return False
        if self._joined is not None:
            return self._joined
        gathers = work.kind == "gather"
        cols = work.depth if gathers else work.cols
        return joins("gather" if gathers else "scatter", work.rows, cols, self.n, work.dtype, self.machine)

    @property
    def adding(self) -> float:
        """Return the time to scale torch's float32 product of a part and add it, for float8 gathered by depth."""
        work = self.work
        if not work.by_depth or not is_float8(work.dtype) or self.torch_dtype != work.dtype:
            return 0.0
        launches = 0.0 if self.machine.in_place else 2 * self.machine.launch_us
        return launches + work.rows * work.cols * 6 * ITEMSIZE[WIDENED] / self.memory

    def product(self, rows: int, cols: int, depth: int, dtype: str = "") -> float:
        """Return the time of a matmul in `dtype` (torch's if empty): the slower of FLOPs in whole waves and bytes."""
        machine, dtype, widening = self.machine, dtype or self.torch_dtype, 0.0
        operands, launches = rows * depth + depth * cols, 1
        num_bytes = operands * ITEMSIZE[dtype] + rows * cols * ITEMSIZE[self.work.made]
        if dtype != self.work.dtype and dtype == WIDENED_BLOCKS:
            # Both operands are converted and multiplied by their scales; the product is written as it is.
            launches += 2 * 3
            widening = operands * (ITEMSIZE[self.work.dtype] + 3 * ITEMSIZE[dtype])
        elif dtype != self.work.dtype:
            # Both operands are written in a wider dtype. The product is read and written to be scaled by rows, by
            # columns and to be rounded.
            wide, launches = ITEMSIZE[dtype], 6
            num_bytes = (operands + rows * cols) * wide
            widening = operands * (ITEMSIZE[self.work.dtype] + wide)
            widening += rows * cols * (5 * wide + ITEMSIZE[self.work.made])
        rate, bytes_us = machine.rate(dtype), num_bytes / self.memory
        if sms := machine.num_sms:
            can_split = [split for split in _SPLITS if ITEMSIZE[dtype] > 1 and depth >= split * _SHORTEST]
            times: list[float] = []
            for (m, n, fraction), split in product(_TILES, can_split or _SPLITS[:1]):
                waves = ceil(ceil(rows / m) * ceil(cols / n) * split / sms)
                tile = 2 * m * n * depth / split * sms / (rate * fraction) + self.stored(m, n)
                added = machine.launch_us + 2 * split * rows * cols * ITEMSIZE[WIDENED] / self.memory
                times.append(max(waves * tile, bytes_us) + (added if split > 1 else 0.0))
            time = min(times)
        else:
            time = max(2 * rows * cols * depth / rate, bytes_us)
        launch = 0.0 if machine.in_place else launches * machine.launch_us
        return time + widening / self.memory + launch

    def stored(self, rows: int, cols: int) -> float:
        """Return the time in which a multiprocessor stores a tile: it multiplies nothing meanwhile."""
        return rows * cols * ITEMSIZE[self.work.made] * self.machine.num_sms / self.memory

    @property
    def cast(self) -> float:
        """Return the time to cast this rank's part of the operand from bfloat16 to float8, before every schedule."""
        work, n = self.work, self.n
        if not work.flops or not is_float8(work.dtype):
            return 0.0
        own = work.rows * work.depth / (n if work.kind == "gather" else 1)
        launches = _CAST_LAUNCHES * (0.0 if self.machine.in_place else self.machine.launch_us)
        casting = own / (self.machine.num_sms * _CAST_ELEMENTS) if self.machine.num_sms else 0.0
        return launches + max(casting, own * (2 * ITEMSIZE[work.made] + ITEMSIZE[work.dtype]) / self.memory)

    @cached_property
    def comm(self) -> float:
        """Return the time of the library's collective alone."""
        n, machine, total = self.n, self.machine, self.work.moved_bytes
        if n == 1:
            return 0.0
        time = library_us(self.work.kind, total, min(n, machine.domain_size), machine) + machine.torch_us
        if n > machine.domain_size:
            # A domain's GPUs together receive the other domains' data while it spreads over the links inside.
            shares, inside = 2 if self.work.kind == "all_reduce" else 1, machine.domain_size
            between = self.network(shares * total / inside, ceil(n / machine.domain_size))
            time = max(time, between) + machine.collective_start_us + machine.torch_us
        return time

    def network(self, num_bytes: float, domains: int) -> float:
        """Return the time of a gather or scatter between domains; `num_bytes` is the whole, for each GPU."""
        if domains == 1:
            return 0.0
        start = (domains - 1) * self.machine.network_start_us
        return start + (domains - 1) / domains * num_bytes / (self.machine.network_gbps * 1e3)

    def _parts(self, cut: bool) -> int:
        return self.n if cut and not self.work.by_depth and not self.joined else 1

    def tiles(self, *, cut: bool) -> tuple[Grid, float]:
        """Return the tiles of our kernel and the time of one; with `cut` a tile has rows of one rank only."""
        work, machine = self.work, self.machine
        parts, dtype = self._parts(cut), self._kernel_dtype
        rows, sms = ceil(work.rows / parts), max(1, machine.num_sms)
        few = rows <= (JOINED_LOW_ROWS if cut and self.joined else KERNEL_TILES[0][0])
        candidates: Sequence[tuple[int, int, float]] = KERNEL_TILES[:2] if few else KERNEL_TILES[2:]
        if ITEMSIZE[dtype] != ITEMSIZE[WIDENED_BLOCKS]:
            candidates = [(*KERNEL_TILES[1 if few else 2][:2], 1.0)]
        rate = machine.rate(dtype) * machine.kernel_fraction * (TREE_FRACTION if work.tree else 1.0) / sms
        slower = 1.0 if self.given is None else self.given / self.product(work.rows, work.cols, work.depth)
        found = [
            (
                Grid(parts, ceil(rows / m), ceil(work.cols / n), m, n),
                slower * (2 * m * n * work.depth / (rate * fraction) + self.stored(m, n)),
            )
            for m, n, fraction in candidates
        ]
        if few and len(found) > 1:
            # Narrow tiles if they give twice as many multiprocessors work (`launch.config_for`).
            grid, time = found[0 if 2 * found[1][0].num_tiles <= sms else 1]
        else:
            grid, time = min(found, key=lambda tile: ceil(tile[0].num_tiles / sms) * tile[1])
        return grid, time if self.kernel_given is None else self.kernel_given / ceil(grid.num_tiles / sms)

    def kernel(self, *, cut: bool, pushers: int = 0) -> float:
        """Return the time of the whole matmul in our kernel, with every signal already raised.

        pushers: programs that push meanwhile. As many multiplying programs start when these end, and have fewer tiles.
        """
        return max(self._multiplied(cut, pushers))

    def _multiplied(self, cut: bool, pushers: int = 0) -> tuple[float, float]:
        # The times that the kernel's tiles take, and its reads and stores.
        work, sms = self.work, max(1, self.machine.num_sms)
        grid, tile = self.tiles(cut=cut)
        count = grid.num_tiles
        late = self.pushing(pushers) if pushers else 0.0
        turns, early = int(late / tile), sms - pushers
        left = max(0, count - turns * early)
        end = max((turns + ceil(left / sms)) * tile, late + ceil(max(0, left - early) / sms) * tile)
        if self.kernel_given is not None:
            return end, 0.0
        operands = grid.weight_reads(sms) * work.depth * work.cols + work.rows * work.depth
        num_bytes = operands * ITEMSIZE[self._kernel_dtype] + work.rows * work.cols * ITEMSIZE[work.made]
        launch = self.machine.launch_us
        return launch + end, launch + num_bytes / self.memory / self.machine.kernel_fraction

    def chunks(self, schedule: str, *, cut: bool = True, pushers: int = 0) -> list[float]:
        """Return the times of the matmul's `n` parts; cut, pushers: of `fused`, as in `kernel`."""
        work, n = self.work, self.n
        if not work.flops:
            return []
        if schedule == "fused":
            return [self.kernel(cut=cut, pushers=pushers) / n] * n
        rows, depth = (work.rows, ceil(work.depth / n)) if work.by_depth else (ceil(work.rows / n), work.depth)
        part = self.product(rows, work.cols, depth)
        if self.given is not None:
            part *= self.given / self.product(work.rows, work.cols, work.depth)
        return [part + self.adding] * n

    def overlapped(self, schedule: str, algorithm: str) -> float:
        """Return the time of the whole op by `fused`, or by `decomposed`, which the host issues chunk by chunk."""
        if self.machine.in_place:
            return self.in_place(algorithm)
        time = self.on_device(schedule, algorithm)
        return time if schedule == "fused" else max(time, self.n * self.machine.chunk_us)

    def on_device(self, schedule: str, algorithm: str, *, cut: bool = True) -> float:
        """Return the time without the host; `cut` as in `chunks`."""
        work, n, machine, total = self.work, self.n, self.machine, self.work.moved_bytes
        by_kernel = schedule == "fused"
        bandwidth = machine.link(n) * (machine.store_fraction if by_kernel else machine.copy_fraction)
        # A kernel stores to its peers without a start for each; each copy has one.
        step = 0.0 if by_kernel else machine.copy_start_us
        in_one = by_kernel and work.kind == "all_reduce" and bool(work.flops) and work.rows <= ONE_KERNEL_ROWS
        launch = 0.0 if in_one else machine.launch_us
        begin = launch + self.wait
        added = total / self.memory
        if algorithm == IN_SWITCH:
            return self.in_switch()
        if algorithm == "ring":
            steps = (n - 1) * (self.wait + total / n / bandwidth)
            return begin + (2 * steps if work.kind == "all_reduce" else steps)
        hop = step + total / n / bandwidth
        # In the one kernel a tile's owner depends on its columns.
        parts = self.chunks(schedule, cut=cut and algorithm != "one_shot" and not in_one)
        if algorithm == "one_shot":
            sent = (n - 1) * (step + total / bandwidth)
            summed = launch + (n + 1) * added
            # Kernels send each tile when it is done, copies send the whole partial sum.
            arrivals = [begin + sent / n * (i + 1) for i in range(n)]
            both = self.recursion(parts, arrivals) if by_kernel else sum(parts) + begin + sent
            return both + summed
        arrivals = [0.0, *(begin + i * hop for i in range(1, n))]
        if work.kind == "gather":
            if by_kernel:
                return min(self.gathered(producer) for producer in PRODUCERS)
            if not work.flops or self.gathers_first:
                return arrivals[-1] + (launch + 2 * total / self.memory) + self.matmul
            return self.recursion(parts, arrivals)
        if by_kernel and not in_one and cut and self.joined:
            time = self._spread(arrivals[-1] - begin)
        else:
            is_cut = by_kernel and not in_one and cut
            time = self._cut(arrivals, wait=self.wait) if is_cut else self.recursion(parts, arrivals)
        time += launch + (n + 1) / n * added
        if work.kind == "all_reduce":
            sums = work.moved * ITEMSIZE[work.made]
            time += begin + (n - 1) * (step + sums / n / bandwidth) + launch + 2 * sums / self.memory
        return time

    def _spread(self, sent: float) -> float:
        # Joined tiles go to all owners alike. The last wave's travel when the kernel has multiplied, unless tiles end
        # one by one, as the weight comes from memory.
        tiles, memory = self._multiplied(cut=True)
        waves = ceil(self.tiles(cut=True)[0].num_tiles / max(1, self.machine.num_sms))
        slow = 1 + self.machine.overlap_slowdown
        tiles += min(tiles, sent / slow) * (1 - 1 / waves) * (slow - 1)
        return max(tiles + sent / waves, tiles / waves + sent, memory) + self.wait

    def in_switch(self) -> float:
        """Return the time of an all-reduce by `fused` with sums in the switch.

        A rank's link carries the whole tensor once, and 1/n of the sums back. After a matmul the op is one kernel: some
        programs add from the first tiles on, others copy sums at the end. Alone the op is three kernels: copy in, add,
        copy out.
        """
        work, n, machine, total = self.work, self.n, self.machine, self.work.moved_bytes
        assert machine.multicast_sum_fraction is not None
        carried = (n + 1) / n * total / (machine.link(n) * machine.multicast_sum_fraction)
        copied = 2 * total / self.memory
        if not work.flops:
            return 3 * machine.launch_us + 2 * self.wait + 2 * copied + carried
        adders = num_adders(machine, n) if work.rows > ONE_KERNEL_ROWS else 0
        programs = max(1, machine.num_sms - adders)
        multiply = self.kernel(cut=False) * machine.num_sms / programs * (1 + machine.overlap_slowdown)
        waves = ceil(self.tiles(cut=False)[0].num_tiles / programs)
        sums = max(multiply / waves + carried, multiply + carried / waves)
        return 2 * self.wait + max(sums + copied / waves, multiply + copied)

    def gathered(self, producer: str) -> float:
        """Return the time of a gather by `fused` with this producer."""
        return self.pushed(num_pushers(self.machine, self.n)) if producer == "push" else self.copied

    def pushing(self, pushers: int) -> float:
        """Return the time in which this many programs store this rank's shard to all peers."""
        rate = min(self.machine.link(self.n) * self.machine.store_fraction, pushers * PUSHER_GBPS * 1e3)
        return (self.n - 1) * self.work.moved_bytes / self.n / rate

    def pushed(self, pushers: int) -> float:
        """Return the time of a gather whose shards are pushed by this many programs, which take SMs from the matmul."""
        hop = self.pushing(pushers) / max(1, self.n - 1)
        return self._arriving(self.machine.launch_us + self.wait, hop, pushers)

    @property
    def copied(self) -> float:
        """Return the time of a gather by copies, which start anew for each part and peer, as the host issues them.

        They need a kernel before and one after the matmul's.
        """
        n, machine, share = self.n, self.machine, self.work.moved_bytes / self.n
        parts = max(1, share // COPY_BYTES)
        hop = parts * machine.copy_start_us + share / (machine.link(n) * machine.copy_fraction)
        hop = max(hop, parts * PART_OF_CHUNK * machine.chunk_us)
        return self._arriving(2 * machine.launch_us + self.wait, hop) + machine.launch_us

    def _arriving(self, begin: float, hop: float, pushers: int = 0) -> float:
        arrivals = [0.0, *(begin + i * hop for i in range(1, self.n))]
        if self.joined:
            return arrivals[-1] + self.kernel(cut=True) - self.machine.launch_us
        after = 0.0 if self.work.flops else self.machine.launch_us + 2 * self.work.moved_bytes / self.memory
        return self._cut(arrivals, pushers) + after

    def _cut(self, arrivals: Sequence[float], pushers: int = 0, wait: float = 0.0) -> float:
        # The recursion for our kernel, whose tiles have rows of one rank each. If a wave of tiles has several chunks,
        # they are multiplied side by side: then the recursion is that of each multiprocessor's tiles. wait: the time
        # until a tile of the last wave is seen.
        parts, sms, launch = self.chunks("fused", pushers=pushers), max(1, self.machine.num_sms), self.machine.launch_us
        grid = self.tiles(cut=True)[0] if parts else None
        if grid is None or grid.parts == 1 or 2 * grid.num_tiles > sms * self.n:
            return self.recursion(parts, arrivals)
        tiles, memory = self._multiplied(True, pushers)
        tile, slow = (tiles - launch) / ceil(grid.num_tiles / sms), 1 + self.machine.overlap_slowdown
        free = [launch] * sms
        for index in range(grid.num_tiles):
            begin = max(free[index % sms], arrivals[index // (grid.down * grid.across)])
            free[index % sms] = begin + tile + min(tile, max(0.0, arrivals[-1] - begin) / slow) * (slow - 1)
        return max(memory + wait, arrivals[-1], *free)

    @property
    def gathers_first(self) -> bool:
        """Return whether `decomposed` gathers all chunks first: if they are short, or products are narrow sums."""
        work = self.work
        if is_float8(work.dtype):
            return False  # float8 parts are multiplied with their own scales
        length = work.depth if work.by_depth else work.rows
        return length <= (AT_ONCE_ROWS - 1) * self.n or (work.by_depth and ITEMSIZE[work.dtype] < 4)

    def recursion(self, parts: Sequence[float], arrivals: Sequence[float]) -> float:
        """Return when the last part is multiplied; a part starts once its data is there and the previous part is done.

        A matmul runs slower while data is in flight. A scatter is this recursion backwards: parts leave in the order in
        which a gather's would arrive.
        """
        slow, end, time = 1 + self.machine.overlap_slowdown, arrivals[-1], 0.0
        for part, arrival in zip(parts, arrivals, strict=False):
            time = max(time, arrival)
            beside = min(part, max(0.0, end - time) / slow)
            time += beside * slow + part - beside
        return max(time, end)

    def in_place(self, algorithm: str) -> float:
        """Return the time of `decomposed` among processes of one CPU: a part is published once, then read in place."""
        work, n, machine = self.work, self.n, self.machine
        total = work.moved_bytes / self.memory
        time = machine.launch_us + machine.flag_us + self.matmul
        if work.kind == "gather":
            return time + 2 * total / n + (2 * total if self.gathers_first or not work.flops else 0.0)
        if algorithm == "one_shot":
            return time + (n + 1) * total
        time += (n + 1) * total / n
        return time + machine.flag_us + 2 * total if work.kind == "all_reduce" else time

    def assumptions(self, data_parallel: int) -> tuple[str, ...]:
        """Return the assumptions that a reader of the numbers has to know."""
        machine, work = self.machine, self.work
        unsure = [name for name, source in machine.sources.items() if source.startswith("assumed")]
        said = ["predicted, not measured", "every rank has an even share and arrives at the same time"]
        if work.flops and self.given is None:
            said.append(f"the library's matmul reaches {machine.matrix_fraction:.0%} of the rate of {machine.title}")
        if work.flops and self.torch_dtype != work.dtype:
            said.append(f"torch multiplies {work.dtype} as {self.torch_dtype} here")
        if work.flops and not self.kernel_multiplies and not machine.in_place:
            does = f"does not multiply {work.dtype}"
            if work.dtype == "mxfp8":
                does = f"makes {work.dtype} {WIDENED_BLOCKS}, at a rate that nobody has measured,"
            said.append(f"our kernel {does} on {machine.title}: no fused")
        elif work.flops and self.kernel_given is None and not machine.in_place:
            reaches = machine.kernel_fraction * (TREE_FRACTION if work.tree else 1.0)
            # Only a measurement on that machine is without the word.
            is_assumed = "assumed" in machine.sources.get("kernel_fraction", "assumed")
            (unsure if is_assumed else said).append(f"our kernel reaches {reaches:.0%} of the library's matmul")
        if work.tree:
            said.append("added up as a tree by fused alone; unfused is the usual order's, to compare with")
            if work.kind != "gather":
                said.append(f"subtrees travel in {SUBTREES}")
        if self.n > machine.domain_size:
            said.append(f"{self.n} ranks span domains of {machine.domain_size}: only unfused runs between them")
        if data_parallel > 1:
            said.append(f"{data_parallel} replicas exchange w's gradient at {machine.network_gbps:g} GB/s a GPU")
        return (*said, f"assumed, not measured there: {', '.join(unsure)}") if unsure else tuple(said)


def way_of(
    rows: int, cols: int, num_ranks: int, dtype: str, machine: Hardware, schedule: str, *, alone: bool,
    switch: bool = False,
) -> str:  # fmt: skip
    """Return the fastest way of an all-reduce of [rows, cols], after a matmul or `alone`.

    The way is `ONE_SHOT`, `TWO_SHOT` or `IN_SWITCH`, the same on all ranks. A weight may be cut unevenly, so the model
    takes the depth of an MLP's matmul, as `tuning` does. Unless the switch can make the sums, the cost of reading the
    weight again for every chunk is left out. `switch` is as in `Work`.
    """
    # Two ranks send as much either way, and a kernel sends tiles one by one: one step is enough.
    if num_ranks == 1 or (num_ranks == 2 and schedule == "fused" and not machine.in_place):
        return ONE_SHOT
    can = switch and schedule == "fused" and machine.multicast_sum_fraction is not None
    if alone or not machine.knows(dtype):
        work = Work("all_reduce", 0, 0, 0, rows * cols, num_ranks, dtype, switch=switch)
    else:
        # With a switch, take a depth between an attention's and an MLP's. The MLP's depth would rule out the switch in
        # cases where it is far faster for an attention; the reverse does not happen.
        depth = max(1, (2 if can else 4) * cols // num_ranks)
        work = Work("all_reduce", rows, cols, depth, rows * cols, num_ranks, dtype, switch=switch)
    model = Model(work, machine)
    if machine.in_place:
        return ONE_SHOT if model.in_place(ONE_SHOT) <= model.in_place(TWO_SHOT) else TWO_SHOT
    # Tiles whose sums the switch makes are not cut by ranks' rows.
    times = {way: model.on_device(schedule, way, cut=can) for way in (ONE_SHOT, TWO_SHOT, *((IN_SWITCH,) * can))}
    return min(times, key=lambda way: times[way])


def num_adders(machine: Hardware, num_ranks: int) -> int:
    """Return how many programs let the switch make this rank's share of the sums at the rate of the link."""
    wanted = ceil(machine.link(num_ranks) / num_ranks / (ADDER_GBPS * 1e3))
    return max(1, min(wanted, machine.num_sms // PUSHERS_AT_MOST))


def num_pushers(machine: Hardware, num_ranks: int, producer: str = "push") -> int:
    """Return how many programs fill the link with stores; with one store to all, the links of the peers."""
    stores = 1 if producer == "push" else max(1, num_ranks - 1)
    wanted = ceil(machine.link(num_ranks) * machine.store_fraction / (PUSHER_GBPS * 1e3) / stores)
    return max(1, min(wanted, machine.num_sms // PUSHERS_AT_MOST))


def producers(work: Work, machine: Hardware) -> dict[str, float]:
    """Return the predicted microseconds of a gather by `fused`, by producer."""
    model = Model(work, machine)
    return {producer: model.gathered(producer) for producer in PRODUCERS}


def late_share(work: Work, machine: Hardware, pushers: int) -> float:
    """Return the end of `pushers` pushing programs of a gather by `fused`, as a fraction of its matmul's time."""
    model = Model(work, machine)
    return model.pushing(pushers) / model.kernel(cut=True)
