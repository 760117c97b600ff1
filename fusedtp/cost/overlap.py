"""How long a rank's matmul and its communication take together: the model behind `cost`, and the choices made by it.

One share of an op on one machine, in microseconds; the closed forms are in the docstring of `cost.model`. Besides
predicting, it decides in the schedules themselves between two ways to move data: one-shot or two-shot, pushed or
copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2
from typing import Literal

from ..sharding.plan import ITEMSIZE
from .hardware import Hardware

# A matmul of fewer rows is bound by reading the weight, which every chunk would read again: `schedules.decomposed` puts
# such chunks together and multiplies at once.
FEW_ROWS = 256

# How the fused schedule sends what is gathered: by programs of the kernel itself, or by the copy engine beside it.
PRODUCERS = ("push", "copy")
# A shard is copied in parts of about this size, each a start of its own: by the figures of H20's copy engine (see
# `hardware`) one reaches 0.80 of an endless copy's rate, and tiles need not wait for a whole shard.
COPY_BYTES = 4 << 20
# What one pushing program sends, GB/s: 8 KB on their way at a time, 0.8 us from memory to the peer. Assumed.
PUSHER_GBPS = 10
# At most one in so many SMs pushes.
PUSHERS_AT_MOST = 4

# Tiles that a library chooses from to fill all SMs, and the part of the rate they reach: smaller ones load more per
# FLOP. Assumed, from tiles' arithmetic intensity.
_TILES = ((128, 128, 1.0), (128, 64, 0.9), (64, 64, 0.75))


@dataclass(frozen=True)
class Work:
    """One rank's share of an op: the product [rows, depth] @ [depth, cols], and `moved` elements gathered or reduced.

    rows of 0: the collective alone. by_depth: what is gathered is cut along the contraction.
    """

    kind: Literal["gather", "scatter", "all_reduce"]
    rows: int
    cols: int
    depth: int
    moved: int
    num_ranks: int
    dtype: str
    by_depth: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.cols * self.depth

    @property
    def moved_bytes(self) -> int:
        return self.moved * ITEMSIZE[self.dtype]

    @property
    def sent_bytes(self) -> int:
        """What a rank sends, ring or direct alike."""
        shares = 2 if self.kind == "all_reduce" else 1
        return shares * (self.num_ranks - 1) * ceil(self.moved / self.num_ranks) * ITEMSIZE[self.dtype]


class Model:
    # One share on one machine. Times in microseconds, so GB/s are 1e3 bytes a unit.
    def __init__(
        self, work: Work, machine: Hardware, matmul_us: float | None = None, kernel_matmul_us: float | None = None
    ) -> None:
        self.work, self.machine, self.n = work, machine, work.num_ranks
        self.given, self.kernel_given = matmul_us, kernel_matmul_us
        # A rank's whole matmul: what was measured, or the model's.
        modelled = self.product(work.rows, work.cols, work.depth) if matmul_us is None and work.flops else 0.0
        self.matmul = modelled if matmul_us is None else matmul_us

    def product(self, rows: int, cols: int, depth: int) -> float:
        """The library's matmul: the slower of its FLOPs, in whole waves of tiles, and its bytes."""
        machine = self.machine
        num_bytes = (rows * depth + depth * cols + rows * cols) * ITEMSIZE[self.work.dtype]
        area = float(rows * cols)
        if machine.num_sms:
            area = min(
                ceil(ceil(rows / m) * ceil(cols / n) / machine.num_sms) * machine.num_sms * m * n / fraction
                for m, n, fraction in _TILES
            )
        launch = 0.0 if machine.in_place else machine.launch_us
        return max(2 * area * depth / machine.rate(self.work.dtype), num_bytes / self.memory) + launch

    @property
    def memory(self) -> float:
        return self.machine.memory_gbps * 1e3

    @cached_property
    def comm(self) -> float:
        """The library's collective alone: a ring, the smallest all-reduces a tree."""
        n, machine, total = self.n, self.machine, self.work.moved_bytes
        if n == 1:
            return 0.0
        shares = 2 if self.work.kind == "all_reduce" else 1
        hops = 2 * ceil(log2(n)) if self.work.kind == "all_reduce" else n - 1
        inside = min(n, machine.domain_size)
        link = machine.link(inside) * machine.collective_fraction
        time = machine.collective_start_us + hops * machine.flag_us + shares * (n - 1) / n * total / link
        if n > machine.domain_size:
            # Every domain's GPUs together bring in what the others have, while it spreads over the links inside.
            between = self.network(shares * total / inside, ceil(n / machine.domain_size))
            time = max(time, between) + machine.collective_start_us
        return time

    def network(self, num_bytes: float, domains: int) -> float:
        """A gather or scatter between domains of `num_bytes` a GPU, whole."""
        if domains == 1:
            return 0.0
        start = (domains - 1) * self.machine.network_start_us
        return start + (domains - 1) / domains * num_bytes / (self.machine.network_gbps * 1e3)

    def chunks(self, schedule: str) -> list[float]:
        """The matmul in as many parts as there are ranks."""
        work, n = self.work, self.n
        if not work.flops:
            return []
        if schedule == "fused":
            own = self.matmul / self.machine.kernel_fraction if self.kernel_given is None else self.kernel_given
            return [own / n] * n
        rows, depth = (work.rows, ceil(work.depth / n)) if work.by_depth else (ceil(work.rows / n), work.depth)
        part = self.product(rows, work.cols, depth)
        if self.given is not None:
            part *= self.given / self.product(work.rows, work.cols, work.depth)
        return [part] * n

    def overlapped(self, schedule: str, algorithm: str) -> float:
        """The whole op by `fused` or `decomposed`."""
        if self.machine.in_place:
            return self.in_place(algorithm)
        work, n, machine, total = self.work, self.n, self.machine, self.work.moved_bytes
        by_kernel = schedule == "fused"
        bandwidth = machine.link(n) * (machine.store_fraction if by_kernel else machine.copy_fraction)
        # Kernels store to all peers in a row; a copy starts anew for each.
        step = 0.0 if by_kernel else machine.copy_start_us
        begin = machine.launch_us + machine.flag_us
        sum_us = machine.launch_us + (n + 1) * total / n / self.memory
        copy_us = machine.launch_us + 2 * total / self.memory
        if algorithm == "ring":
            steps = (n - 1) * (machine.flag_us + total / n / bandwidth)
            return begin + (2 * steps if work.kind == "all_reduce" else steps)
        hop = step + total / n / bandwidth
        parts = self.chunks(schedule)
        if algorithm == "one_shot":
            sent = (n - 1) * (step + total / bandwidth)
            summed = machine.launch_us + (n + 1) * total / self.memory
            # Kernels send a tile when it is done, copies the whole partial.
            arrivals = [begin + sent / n * (i + 1) for i in range(n)]
            both = self.recursion(parts, arrivals) if by_kernel else sum(parts) + begin + sent
            return both + summed
        arrivals = [0.0, *(begin + i * hop for i in range(1, n))]
        if work.kind == "gather":
            if by_kernel:
                return min(self.gathered(producer) for producer in PRODUCERS)
            if not work.flops or self.gathers_first:
                return arrivals[-1] + copy_us + self.matmul
            return self.recursion(parts, arrivals)
        time = self.recursion(parts, arrivals) + sum_us
        if work.kind == "all_reduce":
            time += begin + (n - 1) * hop + copy_us
        return time

    def gathered(self, producer: str) -> float:
        """A gather by `fused`. Pushing takes SMs from the matmul; copies start anew for each part and peer, and need a
        kernel before and one after the matmul's.
        """
        n, machine, share = self.n, self.machine, self.work.moved_bytes / self.n
        begin, after = machine.launch_us + machine.flag_us, 0.0
        if producer == "push":
            hop = share / (machine.link(n) * machine.store_fraction)
            after = (n - 1) * hop * num_pushers(machine, n) / max(1, machine.num_sms) if self.work.flops else 0.0
        else:
            parts = max(1, share // COPY_BYTES)
            hop = parts * machine.copy_start_us + share / (machine.link(n) * machine.copy_fraction)
            begin, after = begin + machine.launch_us, machine.launch_us
        arrivals = [0.0, *(begin + i * hop for i in range(1, n))]
        if not self.work.flops:
            after += machine.launch_us + 2 * self.work.moved_bytes / self.memory
        return self.recursion(self.chunks("fused"), arrivals) + after

    @property
    def gathers_first(self) -> bool:
        """Whether `decomposed` multiplies only when all chunks are there: short ones, or narrow ones to be summed."""
        work = self.work
        length = work.depth if work.by_depth else work.rows
        return length <= (FEW_ROWS - 1) * self.n or (work.by_depth and ITEMSIZE[work.dtype] < 4)

    def recursion(self, parts: Sequence[float], arrivals: Sequence[float]) -> float:
        """When the last part is multiplied: each once its data is there and the one before is done.

        While data is on its way a matmul runs slower. A scatter is this backwards: parts leave in the order in which a
        gather's would arrive.
        """
        slow, end, time = 1 + self.machine.overlap_slowdown, arrivals[-1], 0.0
        for part, arrival in zip(parts, arrivals, strict=False):
            time = max(time, arrival)
            beside = min(part, max(0.0, end - time) / slow)
            time += beside * slow + part - beside
        return max(time, end)

    def in_place(self, algorithm: str) -> float:
        """`decomposed` between processes of one CPU: published once, read or multiplied where it lies."""
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
        """What a reader of the numbers has to know."""
        machine, work = self.machine, self.work
        said = ["predicted, not measured", "every rank has an even share and arrives at the same time"]
        if work.flops and self.given is None:
            said.append(f"the library's matmul reaches {machine.matrix_fraction:.0%} of {machine.title}'s rate")
        if work.flops and self.kernel_given is None and not machine.in_place:
            said.append(f"our kernel reaches {machine.kernel_fraction:.0%} of the library's matmul")
        if self.n > machine.domain_size:
            said.append(f"{self.n} ranks span domains of {machine.domain_size}: only unfused runs between them")
        if data_parallel > 1:
            said.append(f"{data_parallel} replicas exchange w's gradient at {machine.network_gbps:g} GB/s a GPU")
        unsure = [name for name, source in machine.sources.items() if source.startswith("assumed")]
        return (*said, f"assumed, not measured there: {', '.join(unsure)}") if unsure else tuple(said)


def one_shot_wins(
    rows: int, cols: int, num_ranks: int, dtype: str, machine: Hardware, schedule: str, *, alone: bool
) -> bool:
    """Whether an all-reduce of [rows, cols] is faster one-shot than two-shot, behind a matmul or `alone`.

    The same on all ranks: a weight may be cut unevenly, so its matmul is taken for an MLP's, as in `tuning`.
    """
    if num_ranks == 1:
        return True
    if alone or dtype not in machine.matrix_tflops:
        work = Work("all_reduce", 0, 0, 0, rows * cols, num_ranks, dtype)
    else:
        work = Work("all_reduce", rows, cols, max(1, 4 * cols // num_ranks), rows * cols, num_ranks, dtype)
    model = Model(work, machine)
    return model.overlapped(schedule, "one_shot") <= model.overlapped(schedule, "two_shot")


def num_pushers(machine: Hardware, num_ranks: int) -> int:
    """How many programs it takes to fill the link with stores."""
    wanted = ceil(machine.link(num_ranks) * machine.store_fraction / (PUSHER_GBPS * 1e3))
    return max(1, min(wanted, machine.num_sms // PUSHERS_AT_MOST))


def producers(work: Work, machine: Hardware) -> dict[str, float]:
    """Predicted microseconds of a gather by `fused`, by producer."""
    model = Model(work, machine)
    return {producer: model.gathered(producer) for producer in PRODUCERS}
