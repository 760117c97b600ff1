"""Single kernels on one GPU, with all signals raised beforehand, as cases of the sweep's gate and clock.

A case is one of `KERNELS` at a size; its variants are launches. The first is the baseline. M, N, K are one rank's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp.kernels import INTERPRETED
from fusedtp.kernels import latency as kernels
from fusedtp.kernels.choices import Choice, applied
from fusedtp.kernels.cores import NOT_USED, WARP_SPECIALISED
from fusedtp.kernels.launch import Config, config_for
from fusedtp.kernels.layout import Layout
from fusedtp.kernels.loading import is_only_loading
from fusedtp.kernels.signal import EPOCH, FIRST_SLOT, SIGNALS
from fusedtp.kernels.steps import step
from fusedtp.op import OPS
from fusedtp.reference import ExactProduct, accumulate_in_float32
from fusedtp.scaled import Quantized, scaled
from fusedtp.schedules import preset
from fusedtp.schedules.local import mm
from fusedtp.schedules.producer import part_rows, piece_rows
from fusedtp.shards import even_sizes, offsets

from .cases import Case
from .operands import Operands, Results, Runner, Workload, device_here
from .providers import Missing

# The variant of a fused kernel with the other core.
OTHER = f"fused, {WARP_SPECIALISED}"
Size: TypeAlias = tuple[int, int, int]  # M, N, K as one rank multiplies them
Checked: TypeAlias = tuple[float, float]  # largest error, largest error / allowed error


class Launch(NamedTuple):
    """A launch and the check of its result.

    - arenas: their waits are bounded during the check.
    """

    launch: Callable[[], object]
    check: Callable[[], Checked] = lambda: (0.0, 0.0)
    arenas: preset.Arenas | None = None


Launches: TypeAlias = dict[str, Launch]


def normal(dtype: str, *shape: int, seed: int) -> Tensor:
    """Draw a standard normal tensor on this process's device."""
    device = device_here()
    drawn = torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return drawn.to(getattr(torch, dtype))


class Factors:
    """x [M, K] and a weight [N, K] transposed to [K, N], with their product in float64, made on demand."""

    def __init__(self, dtype: str, M: int, N: int, K: int, seed: int) -> None:
        self.a, self.b = normal(dtype, M, K, seed=2 * seed), normal(dtype, N, K, seed=2 * seed + 1).t()
        self.product = cache(lambda: ExactProduct(self.a, self.b, (K,)))

    def check(self, out: Tensor) -> Checked:
        """Check a result in the operands' dtype."""
        return self.product().check(out, self.a.dtype, "result")

    def filled(self, fill: preset.Fill, arenas: preset.Arenas | None = None, *, transposed: bool = False) -> Launch:
        """Return the launch that fills its own C. transposed: C has adjacent rows."""
        M, N = self.a.shape[0], self.b.shape[1]
        out = preset.poisoned(self.a, N, M).t() if transposed else preset.poisoned(self.a, M, N)
        return Launch(partial(fill, out), lambda: self.check(out), arenas)

    def library(self) -> Launches:
        """Return torch.mm, a baseline."""
        return {"torch.mm": self.filled(lambda out: torch.mm(self.a, self.b, out=out))}

    def own(self) -> Launches:
        """Return the own matmul, a baseline of fused kernels."""
        return {"own_matmul": self.filled(preset.plain(self.a, self.b))}


def plain(dtype: str, *size: int) -> Launches:
    """Make torch.mm and the own matmul, with either core."""
    operands = Factors(dtype, *size)
    fill = preset.plain(operands.a, operands.b, other_core(operands.a, *size[:2]))
    return operands.library() | operands.own() | {WARP_SPECIALISED: no_other(operands.filled(fill))}


def other_core(a: Tensor, rows: int, cols: int) -> Config:
    """Return the table's configuration with the warp-specialised core."""
    return replace(config_for(a.device, a.dtype, rows, cols), core=WARP_SPECIALISED)


def no_other(launch: Launch) -> Launch:
    """Return a launch of the warp-specialised core, which is not run where the kernel would take the loop instead."""
    run = [launch.launch]

    def first() -> object:
        if INTERPRETED:
            raise Missing("interpreted kernels have the loop alone")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=NOT_USED)
            try:
                found = launch.launch()
            except UserWarning as warning:
                raise Missing(str(warning)) from None
        run.append(launch.launch)
        return found

    run.append(first)
    return launch._replace(launch=lambda: run[-1]())


TILES = (
    Choice(128, 256, 64, 8, 3, True), Choice(128, 256, 64, 8, 3), Choice(256, 128, 64, 8, 3, True),
    Choice(128, 128, 64, 8, 4), Choice(128, 128, 128, 8, 3), Choice(64, 256, 64, 4, 4),
)  # fmt: skip


def tiled(dtype: str, *size: int) -> Launches:
    """Make six tiles of the own matmul beside torch.mm."""
    operands = Factors(dtype, *size)
    a, b = operands.a, operands.b
    config = config_for(a.device, a.dtype, *size[:2])
    chosen = {str(each): operands.filled(preset.plain(a, b, applied(config, each))) for each in TILES}
    return operands.library() | chosen


def gather(
    ranks: int, dtype: str, *size: int, along: int = 0, in_place: bool = True, transposed: bool = False,
    pushed: bool = True,
) -> Launches:  # fmt: skip
    """Make all-gather + matmul, x cut along rows or contraction. in_place: the own shard is read in place."""
    operands, sizes = Factors(dtype, *size), even_sizes(size[2 * along], ranks)
    shard = operands.a.narrow(along, offsets(sizes)[preset.RANK], sizes[preset.RANK]).clone()
    # Rows that are not contiguous go through the own arena.
    shard = shard if in_place else shard.t().contiguous().t()
    config = other_core(operands.a, sizes[0] if along == 0 else size[0], size[1])
    loop, other = (
        operands.filled(fill, arenas, transposed=transposed)
        for arenas, fill in (
            preset.gathered(shard, operands.a, operands.b, sizes, along=along, transposed=transposed, pushed=pushed,
                            config=each)
            for each in (None, config)
        )
    )  # fmt: skip
    return operands.own() | {"fused": loop, OTHER: no_other(other)}


def scatter(ranks: int, dtype: str, *size: int, to_all: bool = False, turned: bool = False) -> Launches:
    """Make matmul + reduce-scatter's first kernel, or a one-shot all-reduce's. turned: A has adjacent rows."""
    operands = Factors(dtype, *size)
    if turned:
        operands.a, operands.b = operands.a.t().contiguous().t(), operands.b.contiguous()
    sizes = even_sizes(size[0], ranks)
    config = other_core(operands.a, size[0] if to_all else sizes[0], 0 if to_all else size[1])

    def made(config: Config | None) -> Launch:
        arenas, launch, parts = preset.scattered(operands.a, operands.b, sizes, to_all=to_all, config=config)
        whole = parts if to_all else None
        return Launch(launch, lambda: max(map(operands.check, whole or [torch.cat(parts)])), arenas)

    return operands.own() | {"fused": made(None), OTHER: no_other(made(config))}


def all_reduce(ranks: int, dtype: str, *size: int, to_all: bool = False) -> Launches:
    """Time the one-kernel all-reduce with zero partial sums from the peers."""
    operands, (M, N, K, _) = Factors(dtype, *size), size
    config, out = config_for(operands.a.device, operands.a.dtype, M, 0), preset.poisoned(operands.a, M, N)
    arenas, fill = preset.reduced(operands.a, operands.b, ranks, to_all=to_all, config=config)
    own = slice(None) if to_all else preset.own_columns(N, ranks, config)

    def check() -> Checked:
        return ExactProduct(operands.a, operands.b[:, own], (K,)).check(out[:, own], out.dtype, "result")

    return operands.own() | {"fused": Launch(partial(fill, out), check, arenas)}


def float8(scatters: bool, ranks: int, dtype: str, M: int, N: int, K: int, seed: int) -> Launches:
    """Make a gather or a scatter of float8 rows with their scales, beside the library's scaled matmul."""
    wide = [normal("bfloat16", n, K, seed=2 * seed + i) for i, n in enumerate((M, N))]
    a, w = (Quantized.of(scaled(each, "rowwise"), torch.bfloat16) for each in wide)
    sizes, out = even_sizes(M, ranks), preset.poisoned(wide[0], M, N)
    product = cache(lambda: ExactProduct(*_values(a, w), (K,), torch.bfloat16))
    launch: Callable[[], object]
    if scatters:
        arenas, launch, parts = preset.scattered(a, w.t(), sizes)
    else:
        own = slice(*offsets(sizes)[preset.RANK :][:2])
        arenas, fill = preset.gathered(Quantized(a.data[own], a.scale[own], a.dtype), a, w.t(), sizes)
        launch, parts = partial(fill, out), [out]
    given: list[Tensor] = []

    def check(parts: Sequence[Tensor]) -> Checked:
        return product().check(torch.cat(list(parts)), torch.bfloat16, "result")

    def library() -> None:
        given[:] = [mm(a, w.t())]

    return {
        "scaled mm": Launch(library, lambda: check(given)),
        "fused": Launch(launch, lambda: check(parts), arenas),
    }


def _values(a: Quantized, w: Quantized) -> tuple[Tensor, Tensor]:
    return a.data.double() * a.scale.double(), (w.data.double() * w.scale.double()).t()


# Ranks, and the size: MLPs of Llama 3 70B on eight ranks and of 8B on four, at 8192 tokens; at 512 and fewer.
UP = (8, (8192, 7168, 8192)), (4, (8192, 7168, 4096)), *((8, (M, 7168, 8192)) for M in (512, 384, 128, 16))
DOWN = (8, (8192, 8192, 3584)), (4, (8192, 4096, 3584)), *((8, (M, 8192, 3584)) for M in (512, 384, 128, 16))
FEW = tuple((8, (M, 8192, 3584)) for M in (16, 64, 128))
# The most informative cases first.
FUSED: dict[str, tuple[Callable[..., Launches], Sequence[tuple[int, Size]]]] = {
    "gather rows": (gather, UP),
    "scatter": (scatter, DOWN),
    "few-row all-reduce": (all_reduce, FEW),
    "gather rows, pushing": (partial(gather, pushed=False), UP[:3:2]),
    "few-row all-reduce, one shot": (partial(all_reduce, to_all=True), FEW),
    "gather contraction": (partial(gather, along=1), UP[:1]),
    "gather rows transposed": (partial(gather, transposed=True), UP[:1]),
    "scatter to all": (partial(scatter, to_all=True), DOWN[2:3]),
    "scatter, turned": (partial(scatter, turned=True), DOWN[:1]),
    "gather rows, through the arena": (partial(gather, in_place=False), UP[:1]),
}


PUSHERS = (0, 6, 12, 33)


def pushed(ranks: int, dtype: str, *size: int) -> Launches:
    """Make a gather of the own rows alone, sent to the peers, by number of sending programs."""
    operands, sizes = Factors(dtype, *size), (0, size[0], *[0] * (ranks - 2))
    a, found = operands.a, operands.own()
    for count in PUSHERS:
        config = replace(config_for(a.device, a.dtype, *size[:2]), pushers=count)
        arenas, fill = preset.gathered(a, a, operands.b, sizes, pushed=count == 0, config=config)
        found[f"{count} pushers"] = operands.filled(fill, arenas)
    return found


def linked(dtype: str, M: int, N: int, K: int, seed: int) -> Launches:
    """Make a gather of two halves of rows: rank 0's come from the host, with a signal after each piece."""
    operands, rows, side = Factors(dtype, M, N, K, seed), M // 2, torch.cuda.Stream(priority=-1)
    a, b, far = operands.a, operands.b, operands.a[:rows].cpu().pin_memory()
    config = config_for(a.device, a.dtype, rows, N)
    arenas, fill = preset.gathered(a[rows:].clone(), a, b, (rows, M - rows), last=False, config=config)
    piece = piece_rows(K * a.itemsize, config)
    part, words = part_rows(K * a.itemsize, piece), arenas.words(preset.RANK)
    signals = words.view(torch.uint32)
    # Rank 0's signals, next to the own signals, and the half of the first epoch, which never ends.
    first, count = SIGNALS.value + 2 * FIRST_SLOT.value, -(-rows // piece)
    near = arenas.view(preset.RANK, 1, 0, rows, K, a.dtype)
    (multiply,), waiting = operands.own().values(), operands.filled(fill)

    def copy(behind: Callable[[], object], *, wait: bool = False) -> None:
        main = torch.cuda.current_stream()
        words[first : first + 2 * count : 2] = 0
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for begin in range(0, rows, part):
                end = min(rows, begin + part)
                near[begin:end].copy_(far[begin:end], non_blocking=True)
                for slot in range(begin // piece, -(-end // piece)):
                    torch.ops.symm_mem.stream_write_value32_(signals, first + 2 * slot, 1)
        if wait:
            main.wait_stream(side)
        behind()
        main.wait_stream(side)

    def arrived() -> Checked:
        assert torch.equal(near, a[:rows]), "other rows came over the link"
        return waiting.check()

    near.fill_(torch.nan)
    return {
        "own_matmul": multiply,
        "copy": Launch(lambda: copy(lambda: None)),
        "copy, then matmul": Launch(lambda: copy(waiting.launch, wait=True), arrived, arenas),
        "copy beside matmul, no waits": Launch(lambda: copy(multiply.launch), multiply.check),
        "fused": Launch(lambda: copy(waiting.launch), arrived, arenas),
    }


def latency(dtype: str, turns: int, N: int, K: int, seed: int) -> Launches:
    """Make an empty launch, `enter`, and in one launch each `turns` flags between two programs, and signals to 7 peers.

    A flag's turn is two signals that are waited for, one after the other.
    """
    device, layout = device_here(), Layout()
    slot = layout.region(1, 1, torch.float32, slots=2).slot
    arenas, ranks, count = preset.Arenas(device, 8, layout), range(8), torch.zeros(1, dtype=torch.int32, device=device)
    channel, own = arenas.channel, arenas.words(preset.RANK)
    for rank in ranks:
        # Nothing is raised here.
        arenas.words(rank)[SIGNALS.value + slot * len(ranks) :] = 0
    op = OPS["all_reduce"].number

    def answered() -> Checked:
        assert count.item() == turns, f"{count.item()} of {turns} flags were seen"
        return 0.0, 0.0

    def raised() -> Checked:
        epoch, place = own[EPOCH.value].item(), SIGNALS.value + slot * len(ranks) + preset.RANK
        got = {rank: arenas.words(rank)[place].item() for rank in ranks if rank != preset.RANK}
        assert set(got.values()) == {epoch}, f"signals of epoch {epoch} are {got}"
        return 0.0, 0.0

    def signals(at_once: bool) -> Launch:
        return Launch(lambda: kernels.signals(channel, op, slot, turns, at_once), raised, arenas)

    return {
        "empty": Launch(lambda: kernels.empty(count)),
        "enter": Launch(lambda: step(channel, op, "enter"), arenas=arenas),
        "flags": Launch(lambda: kernels.flags(channel, op, slot, turns, count), answered, arenas),
        "signals one by one": signals(False),
        "signals at once": signals(True),
    }


def launches(dtype: str, M: int, N: int, K: int, seed: int) -> Launches:
    """Make a launch for each of M rows: the same kernel with other operands, which is prepared after the first."""
    operands = Factors(dtype, M, N, K, seed)
    a, b = operands.a, operands.b

    def library(out: Tensor) -> None:
        for row in range(M):
            torch.mm(a[row : row + 1], b, out=out[row : row + 1])

    def own(out: Tensor) -> None:
        for row in range(M):
            preset.plain(a[row : row + 1], b, config)(out[row : row + 1])

    config = config_for(a.device, a.dtype, 1, N)
    return {"torch.mm": operands.filled(library), "own_matmul": operands.filled(own)}


class Kernel(NamedTuple):
    """How to make launches of (dtype, M, N, K, seed), and their names: the baseline's, then the others'."""

    make: Callable[..., Launches]
    variants: tuple[str, ...]


_HOOKS = ("own_matmul", "fused", OTHER)
KERNELS: Mapping[str, Kernel] = {
    "latency": Kernel(latency, ("empty", "enter", "flags", "signals one by one", "signals at once")),
    "launches": Kernel(launches, ("torch.mm", "own_matmul")),
    "matmul": Kernel(plain, ("torch.mm", "own_matmul", WARP_SPECIALISED)),
    "tiles": Kernel(tiled, ("torch.mm", *map(str, TILES))),
    **{
        f"{name}, {count} ranks": Kernel(partial(make, count), _HOOKS[: 2 + ("few-row" not in name)])
        for name, (make, _) in FUSED.items() for count in (2, 4, 8)
    },
    **{
        f"float8 {name}, {count} ranks": Kernel(
            partial(float8, name == "scatter", count), ("scaled mm", "fused"))
        for name in ("gather rows", "scatter") for count in (2, 8)
    },
    "gather own rows, 8 ranks": Kernel(
        partial(pushed, 8), ("own_matmul", *(f"{count} pushers" for count in PUSHERS))
    ),
    "gather rows over a link": Kernel(
        linked, ("own_matmul", "copy", "copy, then matmul", "copy beside matmul, no waits", "fused")
    ),
}  # fmt: skip


class Kernels(Workload):
    """The launches of a kernel's case, with two draws of the operands that take turns."""

    def __init__(self, case: Case, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(case, group.rank(), device)
        accumulate_in_float32()
        size = case.M, case.N, case.K
        make = partial(KERNELS[case.layer].make, case.dtype, *size)
        self._draws, self._at, self._is_timed = [make(0), make(1)] if not is_only_loading() else [make(0)], 0, False

    def _runner(self, variant: str, direction: str) -> Runner:
        def run() -> Results:
            one = self._draws[self._at][variant]
            if one.arenas is None or self._is_timed:
                one.launch()
            else:
                one.arenas.run(one.launch)
            return ()

        return run

    def check(self, variant: str, results: Results, direction: str = "forward") -> Checked:
        """Check what the last launch has filled."""
        return self._draws[self._at][variant].check()

    def turn(self, direction: str) -> None:
        """Take the other draw. Rounds are timed from now on: waits are no longer bounded."""
        self._at, self._is_timed = 1 - self._at, True


def own_matmul(operands: Operands, parts: tuple[str, ...]) -> Runner:
    """Return the closure of `own_matmul`, which returns the same parts as the library's `matmul`.

    `own_matmul` is the fused op without any wait or transfer, so fused - own_matmul is the cost of waiting and of the
    links. A kernel that scatters stores its tiles into local memory instead of its peers'.
    """
    steps = [_step(operands, name) for name in parts]
    return lambda: tuple([step() for step in steps])


def _step(operands: Operands, name: str) -> Callable[[], Tensor | list[Tensor]]:
    # The kernels of the fused schedule on one rank, which gathers for dw next to dx, then multiplies.
    part, sizes, rank = name.removesuffix("_partial"), operands.m_sizes, operands.rank
    a, b = operands.factors(part)
    if operands.case.world_size > 1 and part != name:
        _, scatter, parts = preset.scattered(a, b, sizes, rank)

        def stored() -> list[Tensor]:
            scatter()
            return parts

        return stored
    shard = operands.x if part == "y" else operands.dy
    alone = operands.case.world_size == 1 or operands.case.kind == "all_reduce" or part == "dw"
    if alone:
        fill = preset.plain(a, b)
    else:
        arenas, fill = preset.gathered(shard, a, b, sizes, rank)
        for rows in arenas.filled:
            operands.follows(rows, "x" if part == "y" else "dy")

    def filled() -> Tensor:
        out = a.new_empty(a.shape[0], b.shape[1])
        fill(out)
        return out

    return filled
