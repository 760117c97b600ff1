"""The cost model: how long an op takes by each schedule, in closed forms, for any size, GPU and number of ranks.

M, N, K are global sizes of y[M, N] = x[M, K] @ w[N, K].T over n ranks; S is the bytes of what travels, whole:

    all_gather_matmul        x gathered, S = M K; a rank multiplies [M, K] by [K, N/n]
    fsdp_linear              w gathered, S = N K; a rank multiplies [M/n, K] by [K, N]
    matmul_reduce_scatter    y reduced, S = M N; a rank multiplies [M, K/n] by [K/n, N]
    matmul_all_reduce        the same
    all_gather, reduce_scatter, all_reduce    a tensor [M, N] alone; K is not looked at

    unfused      the library's collective, a ring: start + (n-1) flags + (n-1) S / (n W), before or after the matmul
    decomposed   n library matmuls; chunk i starts when it is there and the one before is done. Of a gather it is there
                 after i copies of (start + S / (n W)). A scatter is a gather run backwards, then a sum of n parts
    fused        the same recursion for one kernel of its own: no launch and no part-filled wave of tiles a chunk
    all-reduce   one-shot: everybody sends everything, (n-1) S / W; two-shot: a scatter, then its result gathered;
                 ring: 2 (n-1) steps of S / (n W)

A matmul beside arriving data is slower by the hardware's overlap_slowdown. On a CPU (`Hardware.in_place`) nothing
travels: a rank publishes its chunk once and peers multiply it where it lies. Beyond one domain of GPUs that reach each
other's memory the op itself runs unfused, its collective over the network between domains and then inside them.
`data_parallel` replicas each have a domain of their own and share w's gradient over the network: see `predict`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2
from typing import Literal

from .hardware import Hardware, find
from .plan import ITEMSIZE

OPS = (
    "all_gather_matmul",
    "fsdp_linear",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
)
ALGORITHMS = ("auto", "one_shot", "two_shot", "ring")

# A chunk of fewer rows is not worth a matmul of its own: `schedules.decomposed` then gathers first.
FEW_ROWS = 256

# Up to this many bytes of result an all-reduce is one-shot, where the caller has not said: as in `schedules`.
ONE_SHOT_BYTES = {"fused": 256 << 10, "decomposed": 64 << 10}

# Tiles that a library chooses from to fill all SMs, and what they reach of the rate: smaller ones load more a FLOP.
# Assumed, from tiles' arithmetic intensity.
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


def work_of(
    op: str, *, M: int, N: int, K: int, world_size: int, dtype: object = "bfloat16", gather_dim: int = 0
) -> Work:
    """The share of one rank; ValueError for an op, a size or a dtype that there is not."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise ValueError(f"dtype must be one of {', '.join(ITEMSIZE)}, got {name}")
    if gather_dim not in (0, 1) or (gather_dim and op != "all_gather_matmul"):
        raise ValueError(f"gather_dim must be 0, or 1 for all_gather_matmul, got {gather_dim} for {op}")
    alone = op in ("all_gather", "reduce_scatter", "all_reduce")
    sizes = {"M": M, "N": N, "world_size": world_size, **({} if alone else {"K": K})}
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes.values()):
        raise ValueError(f"sizes and world_size must be positive integers, got {sizes}")
    n = world_size
    if op == "all_gather_matmul":
        return Work("gather", M, ceil(N / n), K, M * K, n, name, by_depth=gather_dim == 1)
    if op == "fsdp_linear":
        return Work("gather", N, ceil(M / n), K, N * K, n, name)
    kind: Literal["gather", "scatter", "all_reduce"]
    kind = "gather" if op == "all_gather" else "scatter" if op.endswith("reduce_scatter") else "all_reduce"
    return Work(kind, 0, 0, 0, M * N, n, name) if alone else Work(kind, M, N, ceil(K / n), M * N, n, name)


@dataclass(frozen=True)
class Prediction:
    """Predicted microseconds of one op on one rank. Never measured: say so wherever it is shown.

    matmul_us, comm_us: the library's matmul and collective, each alone. A schedule that cannot run there is None.
    network_us: the gradient's exchange between replicas; network_exposed_us: what of it the matmuls do not hide.
    """

    op: str
    work: Work
    hardware: str
    algorithm: str
    matmul_us: float
    comm_us: float
    unfused_us: float
    decomposed_us: float | None
    fused_us: float | None
    network_us: float
    network_exposed_us: float
    assumptions: tuple[str, ...]

    @property
    def times(self) -> dict[str, float]:
        """Microseconds by schedule, of those that can run."""
        times = {"fused": self.fused_us, "decomposed": self.decomposed_us, "unfused": self.unfused_us}
        return {schedule: time for schedule, time in times.items() if time is not None}

    @property
    def winner(self) -> str:
        """The fastest schedule."""
        return min(self.times, key=lambda schedule: self.times[schedule])

    @property
    def best_us(self) -> float:
        return self.times[self.winner]

    @property
    def speedup(self) -> float:
        """Of the winner over `unfused`."""
        return self.unfused_us / self.best_us

    @property
    def ceiling_us(self) -> float:
        """No schedule that hides one behind the other is faster than the longer of the two."""
        return max(self.matmul_us, self.comm_us)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends."""
        return self.work.sent_bytes

    @property
    def flops(self) -> int:
        """FLOPs of a rank."""
        return self.work.flops

    def efficiency(self, schedule: str) -> float | None:
        """The part of what `unfused` adds to the matmul that the schedule hides; None where there is nothing to."""
        exposed = self.unfused_us - self.matmul_us
        time = self.times.get(schedule)
        return None if time is None or exposed <= 0 or not self.flops else 1 - (time - self.matmul_us) / exposed


def predict(
    op: str, *, M: int, N: int, K: int = 1, world_size: int, dtype: object = "bfloat16",
    hardware: str | Hardware = "h100", matmul_us: float | None = None, kernel_matmul_us: float | None = None,
    gather_dim: int = 0, algorithm: str = "auto", data_parallel: int = 1, overlap_network: bool = True,
) -> Prediction:  # fmt: skip
    """Predict one op, y[M, N] = x[M, K] @ w[N, K].T split over `world_size` ranks. Sizes are global, times in us.

    matmul_us, kernel_matmul_us: the measured time of this rank's matmul, of the library's and of our kernel with every
    signal already raised, in place of the model's. gather_dim 1: x is gathered along the contraction. algorithm: of an
    all-reduce, by default what the schedules take for its size; ring for the collectives alone.

    data_parallel: domains that each run this op with w sharded inside, so that a training step also reduce-scatters dw
    and gathers w over the network (ZeRO, HSDP; an all-reduce moves as much). Of that, network_exposed_us is what
    forward, dx and dw, each about as long as this op, do not hide; all of it without overlap_network.

    Raises ValueError with the values for an op, size, dtype, hardware or time that there is not.
    """
    work = work_of(op, M=M, N=N, K=K, world_size=world_size, dtype=dtype, gather_dim=gather_dim)
    machine = find(hardware)
    alone = not work.flops
    if algorithm not in ALGORITHMS or (algorithm == "ring" and not alone):
        raise ValueError(
            f"algorithm must be one of {', '.join(ALGORITHMS[:3])}, or ring without a matmul: {algorithm!r}"
        )
    if algorithm in ("one_shot", "two_shot") and work.kind != "all_reduce":
        raise ValueError(f"algorithm {algorithm!r} is one of an all-reduce, got it for {op}")
    for name, time in (("matmul_us", matmul_us), ("kernel_matmul_us", kernel_matmul_us)):
        if time is not None and (alone or not 0 < time < float("inf")):
            raise ValueError(f"{name} must be a positive time of an op with a matmul, got {time!r} for {op}")
    if data_parallel < 1:
        raise ValueError(f"data_parallel must be 1 or more, got {data_parallel}")
    if data_parallel > 1 and alone:
        raise ValueError(f"data_parallel is for an op with a weight, got {data_parallel} for {op}")
    return estimate(op, work, machine, matmul_us, kernel_matmul_us, algorithm, data_parallel, overlap_network, N * K)


def estimate(
    op: str, work: Work, machine: Hardware, matmul_us: float | None = None, kernel_matmul_us: float | None = None,
    algorithm: str = "auto", data_parallel: int = 1, overlap_network: bool = True, weight: int = 0,
) -> Prediction:  # fmt: skip
    """`predict` for a share that is known; `weight`: elements of w, whole."""
    model = _Model(work, machine, matmul_us, kernel_matmul_us)
    unfused, decomposed, fused = model.matmul + model.comm, None, None
    used = {schedule: _algorithm(work, algorithm, limit) for schedule, limit in ONE_SHOT_BYTES.items()}
    if work.num_ranks == 1:
        decomposed = fused = unfused
    elif work.num_ranks <= machine.domain_size:
        fused = None if machine.in_place else model.overlapped("fused", used["fused"])
        decomposed = None if algorithm == "ring" else model.overlapped("decomposed", used["decomposed"])
    best = min(time for time in (unfused, decomposed, fused) if time is not None)
    network = 2 * model.network(weight * ITEMSIZE[work.dtype] / work.num_ranks, data_parallel)
    exposed = max(0.0, network - 3 * best) if overlap_network else network
    shown = used["decomposed" if machine.in_place else "fused"]
    return Prediction(
        op, work, machine.name, shown, model.matmul, model.comm, unfused, decomposed, fused, network, exposed,
        model.assumptions(data_parallel),
    )  # fmt: skip


def _algorithm(work: Work, algorithm: str, one_shot_bytes: int) -> str:
    if algorithm != "auto":
        return algorithm
    if work.kind != "all_reduce":
        return "direct"
    return "one_shot" if work.moved_bytes <= one_shot_bytes else "two_shot"


class _Model:
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
            if not work.flops or (self.gathers_first and not by_kernel):
                return arrivals[-1] + copy_us + self.matmul
            return self.recursion(parts, arrivals)
        time = self.recursion(parts, arrivals) + sum_us
        if work.kind == "all_reduce":
            time += begin + (n - 1) * hop + copy_us
        return time

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
