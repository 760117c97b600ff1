"""`fusedtp tune --kernels`: find the fastest tile of the `fused` kernels for a size, on the GPUs of this machine.

The candidates are the tiles that fit on a multiprocessor, and the table's tile with other numbers of parts of the
contraction (all-reduce of few rows) or of programs that push (gather). On sm_90 the table's tile and its neighbours are
tried with the warp-specialised core too.

1. Each rank multiplies alone with every candidate, with every signal raised in advance (`preset`).
2. The fastest few run as the whole op on all ranks, in turns with the table's tile.
3. The winner and the table's tile run again in separate rounds, as the least of many times is biased.

A candidate that cannot be compiled, or gives a wrong result on any rank, is refused before it is timed.

With interpreted kernels the same runs at tiny sizes: everything is checked, and times are meaningless.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp.calls.bound import BoundTask
from fusedtp.choose.tuning import Tuned, version_here
from fusedtp.kernels import INTERPRETED, choices, cores
from fusedtp.kernels.choices import Choice, applied, of_config
from fusedtp.kernels.loading import only_loading
from fusedtp.op import OPS, Task
from fusedtp.reference import ExactProduct
from fusedtp.scaled import Quantized, Scaled
from fusedtp.schedules import preset
from fusedtp.schedules.fused import OneKernel

from .cases import MXFP8, Case, size_of
from .intervals import Timing, ratio
from .problem import Problem
from .ranks import RankError, RankPool
from .sweep import rank_environment
from .timing import measure

T = TypeVar("T")

# Number of candidates that reach step 2; candidates for parts of a contraction, and for programs that push.
FINALISTS, SPLITS, PUSHERS = 4, (1, 2, 4, 8), (4, 8, 16, 32, 64)
# Number of tiles among which those are that are tried with the other core, besides the table's.
OTHER_CORE = 8
# Rounds of a candidate in step 1, and in step 3.
ROUNDS_ALONE, ROUNDS_LAST = 10, 30
# Numbers of tiles and rounds with interpreted kernels, as an interpreted op takes a second.
TINY_TILES, TINY_ROUNDS = 2, 2
# Least time for a size: with less, it would end before its kernels are compiled.
LEAST_SECONDS = 10.0


@dataclass
class TileSearch:
    """Result of the search for a case: tiles as text, in the order in which they were tried.

    - alone, together: ms by tile, of the matmul on each rank and of the whole op.
    - refused: why tiles were not timed.
    - usual: the table's tile.
    - ms, usual_ms, faster: as in `Tuned`.
    - cut_short: the time ended before all tiles were tried.
    """

    case: Case
    usual: str = ""
    best: str = ""
    choice: dict[str, int | str] | None = None
    ms: float = 0.0
    usual_ms: float = 0.0
    faster: float = 0.0
    alone: dict[str, float] = field(default_factory=dict)
    together: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    cut_short: bool = False

    def tuned(self) -> Tuned:
        """Return the entry in the table of measurements."""
        measured = self.choice, self.ms, self.usual_ms, self.faster
        return Tuned(*size_of(self.case), *measured, version_here())


def missing(case: Case) -> str:
    """Return why a case has no tiles to choose, or ""."""
    if case.dtype == MXFP8:
        return "operands with scales of blocks have one tile, that of their matrix unit"
    return "one rank runs no kernel" if case.world_size == 1 else ""


class Search:
    """Search for one case on this rank of `group`; every method is collective. seconds: by rank 0's clock."""

    def __init__(self, group: ProcessGroup, case: Case, seconds: float) -> None:
        self._group, self._case, self._deadline = group, case, time.monotonic() + seconds
        self._device = torch.device("cpu" if INTERPRETED else f"cuda:{torch.cuda.current_device()}")
        self._tiny = INTERPRETED
        self.problem = problem = Problem(case, group, self._device)
        x, w = (Quantized.of(each, problem.dtype) if type(each) is Scaled else each for each in (problem.x, problem.w))
        self._operands = {"a": x, "b": w.t()}
        shapes = {name: (each.shape[0], each.shape[1]) for name, each in self._operands.items()}
        float8 = problem.x.data.dtype if case.is_float8 else None
        self._task = Task(
            OPS[case.op], shapes, problem.dtype, problem.m_sizes if case.kind != "all_reduce" else (), float8=float8
        )
        self._ready: dict[Choice | None, BoundTask] = {
            None: BoundTask(self._task, "fused", group, self._device).prepared()
        }
        on = self._ready[None].on
        self._config, self._to_all = on.config, case.kind == "all_reduce" and on.one_shot(self._task)
        self.usual: Choice = of_config(self._config)
        self.found = TileSearch(case, str(self.usual))

    def all_right(self, error: str) -> tuple[str, bool]:
        """Return the error of the first rank that failed, or "", and whether there is time left."""
        everyone: list[Any] = [None] * self._group.size()
        dist.all_gather_object(everyone, (error, self._deadline - time.monotonic()), group=self._group)
        errors = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text]
        return errors[0] if errors else "", everyone[0][1] > 0

    def _tried(self, attempt: Callable[[], T]) -> tuple[T | None, str]:
        # Return the result, and the error of a kernel, of a check, or of the compiler.
        try:
            with warnings.catch_warnings():
                # A launch that its core does not take would have the loop.
                warnings.filterwarnings("error", message=cores.NOT_USED)
                return attempt(), ""
        except Exception as error:
            return None, f"{type(error).__name__}: {error}".splitlines()[0]

    def _room(self) -> dict[str, Any]:
        if self._tiny:
            return {"shared_bytes": 1 << 30, "lanes": 32}
        import triton

        properties = triton.runtime.driver.active.utils.get_device_properties(self._device.index)
        return {"shared_bytes": properties["max_shared_mem"], "lanes": 64 if torch.version.hip else 32}

    @property
    def _has_other_core(self) -> bool:
        return not INTERPRETED and not torch.version.hip and torch.cuda.get_device_capability(self._device)[0] == 9

    def candidates(self) -> list[Choice]:
        """Return other choices than the table's."""
        case, sizes = self._case, self.problem.m_sizes
        rows = case.M if case.kind == "all_reduce" else max(sizes)
        cols = -(-case.N // case.world_size) if case.kind == "gather" else case.N
        # wgmma and tcgen05 multiply 64 rows and more; mma and MFMA 16 and 32.
        least = 64 if self._config.descriptors else 32
        itemsize = (self._task.float8 or self._task.dtype).itemsize
        found = choices.tiles(self._config, rows, cols, itemsize, least_rows=least, **self._room())
        if isinstance(self._ready[None].form, OneKernel):
            found += [self.usual._replace(splits=count) for count in SPLITS]
        elif self._has_other_core:
            # First, so that a search that is cut short has compared the cores.
            found = choices.on_other_core((self.usual, *found[:OTHER_CORE])) + found
        return found[:TINY_TILES] if self._tiny else found

    def alone(self, tried: Iterable[Choice]) -> bool:
        """Check and time the matmul of each choice with preset signals; return whether there is time left."""
        left = True
        for choice in tried:
            name = str(choice)
            if name in self.found.alone or name in self.found.refused:
                continue
            launch, failed = self._tried(partial(self._preset, choice))
            error, left = self.all_right(failed)
            if error or launch is None:
                self.found.refused[name] = error
            else:
                rounds = 1 if self._tiny else ROUNDS_ALONE
                times = measure({name: launch}, self._group, self._device, rounds=rounds)
                self.found.alone[name] = times[name].median_ms
            # Free the launch with its arenas.
            del launch
            if not left:
                break
        return left

    def _preset(self, choice: Choice) -> Callable[[], object]:
        # Return the choice's launch, which ran once and passed its check.
        launch: Callable[[], object]
        problem, config = self.problem, applied(self._config, choice)
        a, b = problem.factors("y")
        rank, sizes, own = problem.rank, problem.m_sizes, slice(None)
        out = preset.poisoned(a, a.shape[0], b.shape[1])
        if self._case.kind == "gather":
            arenas, fill = preset.gathered(problem.x_own, a, b, sizes, rank, config=config)
            launch, parts = partial(fill, out), [out]
        elif isinstance(self._ready[None].form, OneKernel):
            arenas, fill = preset.reduced(a, b, len(sizes), rank, to_all=self._to_all, config=config)
            if not self._to_all:
                own = preset.own_columns(b.shape[1], len(sizes), config, rank)
            launch, parts = partial(fill, out), [out[:, own]]
        else:
            arenas, launch, parts = preset.scattered(a, b, sizes, rank, to_all=self._to_all, config=config)
        arenas.run(launch)
        whole = parts[-1] if self._to_all else torch.cat(parts)
        # The tile may decide which columns this rank has. The product is then that of these columns.
        product = self._product if own == slice(None) else ExactProduct(a, b[:, own], (a.shape[1],))
        product.check(whole, a.dtype, str(choice))
        return launch

    @cached_property
    def _product(self) -> ExactProduct:
        a, b = self.problem.factors("y")
        return ExactProduct(a, b, (a.shape[1],))

    def together(
        self, tried: Sequence[Choice | None], seconds: float, rounds: int | None = None
    ) -> dict[Choice | None, Timing]:
        """Time the whole op with each choice that passes on all ranks, in turns; None is the table's choice."""
        runners = {}
        for choice in tried:
            if (name := str(choice or self.usual)) in self.found.refused:
                continue
            if error := self._checked(choice):
                self.found.refused[name] = error
            else:
                runners[name] = choice
        ready = {name: partial(self._ready[choice].run, self._operands) for name, choice in runners.items()}
        times = measure(ready, self._group, self._device, seconds=seconds, rounds=TINY_ROUNDS if self._tiny else rounds)
        self.found.together |= {name: timing.median_ms for name, timing in times.items()}
        return {runners[name]: timing for name, timing in times.items()}

    def _checked(self, choice: Choice | None) -> str:
        def load() -> None:
            if choice not in self._ready:
                chosen = None if choice is None else choice._asdict()
                ready = BoundTask(self._task, "fused", self._group, self._device, choice=chosen)
                self._ready[choice] = ready.prepared()
            ready = self._ready[choice]
            assert ready.ws is not None
            if not self._tiny:
                with only_loading():
                    ready.go(self._operands)

        def run() -> None:
            # Twice, as flags and buffers left by a first call may break a second call.
            for _ in range(1 if self._tiny else 2):
                results.append(self._ready[choice].run(self._operands)[0])

        def check() -> None:
            for out in results:
                self.problem.check("fused", (out,), "forward")

        results: list[Tensor] = []
        # A rank that cannot start the kernel must not leave the others waiting in their kernels.
        for step in (load, run, check):
            error, _ = self.all_right(self._tried(step)[1])
            if error:
                return error
        return ""


@torch.no_grad()
def search(group: ProcessGroup, case: Case, seconds: float) -> TileSearch:
    """Search for the fastest tile of a case, for about `seconds`; collective over `group`."""
    on = Search(group, case, seconds)
    found = on.found
    tried = {str(choice): choice for choice in (on.usual, *on.candidates())}
    left = True
    if not case.is_float8:
        left = on.alone(tried.values())
        finalists = sorted(found.alone, key=lambda name: found.alone[name])[:FINALISTS]
    else:
        # Presets have no scales, so skip step 1 and try the table's neighbours first.
        finalists = list(tried)[: 4 * FINALISTS]
    chosen = [tried[name] for name in finalists if name != found.usual]
    if left and case.kind == "gather" and not on._tiny:
        chosen += [on.usual._replace(pushers=count) for count in PUSHERS]
    times = on.together([None, *chosen], seconds / 5)
    if None not in times:
        raise RuntimeError(f"the table's own tile is refused: {found.refused[found.usual]}")
    best = min(times, key=lambda choice: times[choice].median_ms)
    _, left = on.all_right("")
    last = on.together(list(dict.fromkeys((None, best))), seconds / 10, ROUNDS_LAST)
    usual, own = last[None], last.get(best, last[None])
    found.cut_short, found.best, found.faster = not left, found.usual, 1.0
    found.ms = found.usual_ms = usual.median_ms
    if best is not None:
        found.faster = ratio(usual, own).low
        if found.faster > 1:
            found.choice, found.best, found.ms = best._asdict(), str(best), own.median_ms
    return found


def tune_kernels(
    cases: Sequence[Case], *, seconds: float, num_gpus: int, said: Callable[[str], None],
    done: Callable[[TileSearch | None], None],
) -> list[Case]:  # fmt: skip
    """Search for each case in turn, for `seconds` in all, on ranks started here; return the cases not reached.

    `done` is called at once with each result, or with None for a failure, so results survive if the rest is cut off.
    `said` is called with lines about results and refusals.
    """
    deadline = time.monotonic() + seconds
    most = max(case.world_size for case in cases)
    env = rank_environment(num_gpus, most) | {"FUSEDTP_TUNING": "off"}
    with RankPool(most, timeout=300 + seconds, env=env) as pool:
        for number, case in enumerate(cases):
            left = deadline - time.monotonic()
            if left < (LEAST_SECONDS if num_gpus else 0):
                return list(cases[number:])
            share = left / (len(cases) - number)
            try:
                found = pool.run(search, case, share, world_size=case.world_size, timeout=300 + share)[0]
            except RankError as error:
                said(f"failed: {case}: {error}")
                done(None)
                continue
            said(told(found))
            for name, why in found.refused.items():
                said(f"refused: {name}: {why}")
            done(found)
    return []


def told(found: TileSearch) -> str:
    """Return a line about a search."""
    cut = ", cut short" if found.cut_short else ""
    tried = f"{len(found.alone)} tiles alone and {len(found.together)} together, {len(found.refused)} refused{cut}"
    return f"  {tried}: {found.best}"
