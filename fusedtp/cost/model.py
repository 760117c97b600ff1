"""Cost model: how long an op takes with each schedule, in closed forms, for any size, GPU and number of ranks.

M, N, K are global sizes of y[M, N] = x[M, K] @ w[N, K].T over n ranks. S is the bytes of the whole tensor that travels:

    all_gather_matmul        x gathered, S = M K; a rank multiplies [M, K] by [K, N/n]
    fsdp_linear              w gathered, S = N K; a rank multiplies [M/n, K] by [K, N]
    matmul_reduce_scatter    y reduced, S = M N; a rank multiplies [M, K/n] by [K/n, N]
    matmul_all_reduce        the same
    all_gather, reduce_scatter, all_reduce    a tensor [M, N] alone; K is ignored

    unfused      the library's collective (`overlap.library_us`), before or after the matmul
    decomposed   n library matmuls; chunk i starts when it has arrived and the previous chunk is done. A gather's chunk
                 arrives after i copies of (start + S / (n W)). A scatter is a gather run backwards, then a sum of n
                 parts. On a GPU the op takes at least the time in which the host issues n chunks
    fused        the same recursion for one kernel: no launch and no part-filled wave of tiles for each chunk; but a
                 chunk is whole tiles, and reads all of the operand that does not travel
    all-reduce   one-shot: each rank sends everything to all, (n-1) S / W; two-shot: a scatter, then a gather of its
                 result; ring: 2 (n-1) steps of S / (n W)

In float8, a gather moves one byte an element and the scales: 16 bytes a row, or in mxfp8 one for each 32 elements of a
row, padded to 16. A sum moves bfloat16, the dtype of the product. If a machine has no rate for a float8 dtype, the
library's matmul is a wider one with passes around it, and `fused` is None. The wider dtype is float32, or bfloat16 for
mxfp8 on a GPU. With `casts`, every schedule first casts x to float8.

Arriving data slows a matmul by the hardware's `overlap_slowdown`. On a CPU (`Hardware.in_place`) nothing travels: a
rank publishes its chunk once and peers multiply it in place. Beyond one domain of GPUs that reach each other's memory,
the op runs unfused: its collective crosses the network between domains while the data spreads inside them.
`data_parallel` replicas have a domain each and exchange w's gradient over the network: see `predict`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from ..op import ALL_GATHER_MATMUL, ANY_ORDER, RANK_ORDER, TREE_ORDER
from ..op import OPS as TABLE
from ..sharding.plan import ITEMSIZE, is_float8
from .hardware import Hardware, find
from .overlap import IN_SWITCH, TWO_SHOT, Model, way_of
from .work import Work

FSDP = "fsdp_linear"  # a gather whose weight travels, not its rows
OPS = (ALL_GATHER_MATMUL.name, FSDP, *(name for name in TABLE if name != ALL_GATHER_MATMUL.name))
ALGORITHMS = ("auto", "one_shot", "two_shot", "ring")
SWITCH = "the switch makes the sums of fused"
CAST = "x is made float8 by two kernels, as a compiler fuses it; op by op that takes several times as long"


def work_of(
    op: str, *, M: int, N: int, K: int, world_size: int, dtype: object = "bfloat16", gather_dim: int = 0
) -> Work:
    """Return the share of one rank; ValueError for an unknown op or dtype, or an impossible size."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise ValueError(f"dtype must be one of {', '.join(ITEMSIZE)}, got {name}")
    if gather_dim not in (0, 1) or (gather_dim and op != ALL_GATHER_MATMUL.name):
        raise ValueError(f"gather_dim must be 0, or 1 for {ALL_GATHER_MATMUL.name}, got {gather_dim} for {op}")
    alone = op in TABLE and not TABLE[op].multiplies
    sizes = {"M": M, "N": N, "world_size": world_size, **({} if alone else {"K": K})}
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes.values()):
        raise ValueError(f"sizes and world_size must be positive integers, got {sizes}")
    n = world_size
    if op == ALL_GATHER_MATMUL.name:
        return Work("gather", M, ceil(N / n), K, M * K, n, name, by_depth=gather_dim == 1)
    if op == FSDP:
        return Work("gather", N, ceil(M / n), K, N * K, n, name)
    kind = TABLE[op].kind
    return Work(kind, 0, 0, 0, M * N, n, name) if alone else Work(kind, M, N, ceil(K / n), M * N, n, name)


@dataclass(frozen=True)
class Prediction:
    """Predicted microseconds of one op on one rank. Never measured: say so wherever it is shown.

    - `matmul_us`, `comm_us`: the library's matmul and collective, each alone.
    - `unfused_us`, `decomposed_us`, `fused_us`: None if that schedule cannot run there.
    - `cast_us`: the cast of x to float8, part of every schedule's time and of the bound; 0 if not asked for.
    - `network_us`: the exchange of w and its gradient between replicas.
    - `network_exposed_us`: the part of `network_us` that the matmuls do not hide.
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
    cast_us: float = 0.0

    @property
    def times(self) -> dict[str, float]:
        """Return the microseconds of each schedule that can run."""
        times = {"fused": self.fused_us, "decomposed": self.decomposed_us, "unfused": self.unfused_us}
        return {schedule: time for schedule, time in times.items() if time is not None}

    @property
    def winner(self) -> str:
        """Return the fastest schedule: `unfused` if no other is faster."""
        return min(reversed(self.times), key=lambda schedule: self.times[schedule])

    @property
    def best_us(self) -> float:
        return self.times[self.winner]

    @property
    def speedup(self) -> float:
        """Return the speed-up of the winner over `unfused`; 1 where nothing is done, as in a collective of one rank."""
        return self.unfused_us / self.best_us if self.best_us else 1.0

    @property
    def bound_us(self) -> float:
        """Return the longer of the library's matmul and its collective: the time if one hid the other entirely.

        A schedule that sends faster than the library's collective can be below it.
        """
        return self.cast_us + max(self.matmul_us, self.comm_us)

    @property
    def sent_bytes(self) -> int:
        return self.work.sent_bytes

    @property
    def flops(self) -> int:
        return self.work.flops

    def efficiency(self, schedule: str) -> float | None:
        """Return the part of the time that `unfused` adds to the matmul and `schedule` hides; None without one."""
        least = self.cast_us + self.matmul_us
        exposed = self.unfused_us - least
        time = self.times.get(schedule)
        return None if time is None or exposed <= 0 or not self.flops else 1 - (time - least) / exposed


def predict(
    op: str, *, M: int, N: int, K: int = 1, world_size: int, dtype: object = "bfloat16",
    hardware: str | Hardware = "h100", matmul_us: float | None = None, kernel_matmul_us: float | None = None,
    gather_dim: int = 0, algorithm: str = "auto", data_parallel: int = 1, overlap_network: bool = True,
    casts: bool = True, order: str = RANK_ORDER,
) -> Prediction:  # fmt: skip
    """Predict one op, y[M, N] = x[M, K] @ w[N, K].T split over `world_size` ranks. Sizes are global, times in us.

    - `dtype`: of x and w. In float8, sums and the gradient travel in bfloat16.
    - `matmul_us`, `kernel_matmul_us`: measured times of this rank's matmul, in place of the model's: by the library,
      and by our kernel with every signal already raised.
    - `gather_dim`: 1 gathers x along the contraction.
    - `algorithm`: of an all-reduce; "auto" is the schedules' own choice for the size. "ring" is for collectives alone.
    - `data_parallel`: number of domains that each run this op with w sharded inside. A training step then also
      reduce-scatters dw and gathers w over the network (ZeRO, HSDP; an all-reduce moves as much).
    - `overlap_network`: True hides that exchange behind forward, dx and dw, each about as long as this op;
      `network_exposed_us` is the rest. False exposes all of it.
    - `casts`: whether every schedule has to cast x to float8 first, or x is given in float8.
    - `order`: "rank"; "tree", in which sums travel in float32, only `fused` runs, and `unfused` is that of the usual
      order; or "any", in which `fused` has the switch make the sums of an all-reduce, if the machine's can.

    Raises ValueError with the values for an unknown op, dtype or hardware, and for an impossible size or time.
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
    if order not in (RANK_ORDER, ANY_ORDER, TREE_ORDER):
        raise ValueError(f"order must be {RANK_ORDER}, {ANY_ORDER} or {TREE_ORDER}, got {order!r}")
    work = replace(work, switch=order == ANY_ORDER)
    if order == TREE_ORDER:
        if alone or is_float8(work.dtype) or work.dtype == "float64":
            raise ValueError(f"order {order!r} is for a matmul of 16 or 32 bits, got {op} of {work.dtype}")
        work = replace(work, tree=True)
    if data_parallel < 1:
        raise ValueError(f"data_parallel must be 1 or more, got {data_parallel}")
    if data_parallel > 1 and alone:
        raise ValueError(f"data_parallel is for an op with a weight, got {data_parallel} for {op}")
    return estimate(
        op, work, machine, matmul_us, kernel_matmul_us, algorithm, data_parallel, overlap_network, N * K, casts
    )  # fmt: skip


def estimate(
    op: str, work: Work, machine: Hardware, matmul_us: float | None = None, kernel_matmul_us: float | None = None,
    algorithm: str = "auto", data_parallel: int = 1, overlap_network: bool = True, weight: int = 0,
    casts: bool = False,
) -> Prediction:  # fmt: skip
    """Predict a share that is known, as `predict` does; `weight` is the number of elements of the whole w."""
    model = Model(replace(work, tree=False), machine, matmul_us, kernel_matmul_us)
    tree = Model(work, machine, matmul_us, kernel_matmul_us) if work.tree else model
    cast = model.cast if casts else 0.0
    unfused = cast + model.matmul + model.n * model.adding + model.comm
    decomposed, fused = None, None
    used = {schedule: _algorithm(work, algorithm, machine, schedule) for schedule in ("fused", "decomposed")}
    if work.num_ranks == 1:
        decomposed = fused = unfused
    elif work.num_ranks <= machine.domain_size:
        if not machine.in_place and model.kernel_multiplies:
            fused = cast + tree.overlapped("fused", used["fused"])
        decomposed = (
            None if algorithm == "ring" or work.tree else cast + model.overlapped("decomposed", used["decomposed"])
        )
    best = min(time for time in (unfused, decomposed, fused) if time is not None)
    network = 2 * model.network(weight * ITEMSIZE[work.made] / work.num_ranks, data_parallel)
    exposed = max(0.0, network - 3 * best) if overlap_network else network
    shown = used["decomposed" if machine.in_place else "fused"]
    return Prediction(
        op, work, machine.name, shown, model.matmul, model.comm, unfused, decomposed, fused, network, exposed,
        (*tree.assumptions(data_parallel), *((SWITCH,) * (shown == IN_SWITCH)), *((CAST,) if cast else ())), cast,
    )  # fmt: skip


def _algorithm(work: Work, algorithm: str, machine: Hardware, schedule: str) -> str:
    switch = work.switch and schedule == "fused" and machine.multicast_sum_fraction is not None
    if algorithm != "auto" or work.kind != "all_reduce":
        return IN_SWITCH if switch and algorithm == TWO_SHOT else "direct" if algorithm == "auto" else algorithm
    shape = (work.rows, work.cols) if work.flops else (1, work.moved)
    # The schedules decide the same way, by the dtype that travels.
    return way_of(*shape, work.num_ranks, work.made, machine, schedule, alone=not work.flops, switch=switch)


def verdict(predictions: Sequence[Prediction], sizes: Sequence[tuple[int, int, int]], least: float) -> str:
    """Return what predictions mean, in a sentence. A speed-up of up to `least` is too close to call."""
    best, size = max(zip(predictions, sizes, strict=True), key=lambda pair: pair[0].speedup)
    means = "speed-up is unfused / fastest; bound, the longer of the library's matmul and collective, each alone"
    if any(each.best_us < each.bound_us for each in predictions):
        means += "; fused and decomposed send by themselves and can take less"
    if any(each.network_us for each in predictions):
        means += "; network, what replicas exchange, and exposed, its part that no matmul hides"
    if best.winner == "unfused":
        return f"No gain: unfused is the fastest everywhere ({means})."
    num_gain = sum(each.speedup > least for each in predictions)
    num_close = sum(each.winner != "unfused" for each in predictions) - num_gain
    if num_close:
        means = f"up to {least}x is too close to call: {num_close} of {len(predictions)}; {means}"
    gain = f"Gain in {num_gain} of {len(predictions)}" if num_gain else "Too close to call"
    lengths = size if best.flops else size[:2]
    where = f"at {' x '.join(map(str, lengths))} on {best.work.num_ranks} ranks"
    return f"{gain}, at most {best.speedup:.2f}x by {best.winner} {where} ({means})."
