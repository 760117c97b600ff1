"""Plan the jobs of a request: which cases, variants and directions run here, in which order, with which timeout."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from fusedtp.cost.hardware import HARDWARE, of_gpu

from . import providers
from .cases import (
    BOUNDS,
    CHECK_SHAPES,
    COLLECTIVES,
    DIRECTIONS,
    DTYPES,
    EVERY_FLOAT8,
    OPS,
    SCHEDULES,
    SEQUENTIAL,
    SHAPES,
    Case,
    Shape,
    block,
    flops,
    num_results,
    traffic,
)
from .store import Outcome
from .suites import SUITE_OF, SUITES, Size, cases_of, is_long, missing

if TYPE_CHECKING:
    from .timing import Verdict

# Without a GPU kernels are interpreted. Triton must know that before kernels are imported.
INTERPRET = ("TRITON_INTERPRET", "1")
# Timeout of a case, beside a multiple of its estimate: kernels are compiled in it, the interpreter and a loaded machine
# are slow.
JOB_SECONDS, MARGIN = 180.0, 10.0
# Seconds in which ranks start, and in which kernels of a case, and torch's compiled graphs, are compiled.
START_SECONDS, COMPILE_SECONDS = 4.0, 12.0
# Seconds that a call takes in a round beside itself: a spin, a flush, a barrier, a check.
ROUND_SECONDS = 0.01


@dataclass(frozen=True)
class Rates:
    """Rates of one rank for estimates, per second.

    - `flops`: FLOPs of a matmul; `exact`: FLOPs in float64.
    - `drawn`: random numbers; `checked`: elements of results that are compared.
    - `bytes`: bytes sent to a peer.
    - `call`: seconds of a call that does nothing.
    """

    flops: float
    exact: float
    drawn: float
    checked: float
    bytes: float
    call: float = 1e-3


@cache
def rates_of(gpu: str, dtype: str) -> Rates:
    """Return the rates of an idle core, or of a GPU by its driver's name: by the table of hardware, or of an A100."""
    if not gpu:
        # A collective of the backend over loopback.
        return Rates(6e10, 6e10, 1e8, 3.5e7, 4e8)
    machine = of_gpu(gpu) or HARDWARE["a100"]
    known = machine.multiplied(dtype) if machine.knows(dtype) else "bfloat16"
    # Elements are drawn, and compared in float64, at the rate of memory.
    memory = machine.memory * 1e6
    exact = machine.matrix_tflops.get("float64", 1.0) * 1e12 * machine.matrix_fraction
    return Rates(machine.rate(known) * 1e6, exact, memory / 16, memory / 100, machine.link_gbps * 3e8)


@dataclass(frozen=True)
class Job:
    """One case; `timed` says whether the variants are measured after the gate.

    - skipped: (direction, variant) of variants that cannot run. The process that starts the ranks decides; ranks do
      not.
    - absent: outcomes of variants that do not run.
    - gpu: its name, for estimates. patience: seconds that the whole case may take; None: many times its estimate.
    - graph: time each variant as a CUDA graph, if it can be captured.
    """

    case: Case
    variants: tuple[str, ...]
    timed: bool
    seconds: float = 1.0
    rounds: int | None = None
    directions: tuple[str, ...] = ("forward",)
    absent: tuple[Outcome, ...] = ()
    num_gpus: int = 0
    skipped: frozenset[tuple[str, str]] = frozenset()
    patience: float | None = None
    gpu: str = ""
    graph: bool = False

    def variants_of(self, direction: str) -> tuple[str, ...]:
        """Return the variants that run in this direction."""
        return tuple(name for name in self.variants if (direction, name) not in self.skipped)

    def without(self, variant: str, why: Verdict | str) -> Job:
        """Return this job without a variant. why: the failed verdict, or the reason for not running."""
        told: dict[str, Any] = {"not_run": why} if isinstance(why, str) else {"verdict": why}
        gone = [Outcome(variant, each, **told) for each in self.directions if variant in self.variants_of(each)]
        left = tuple(name for name in self.variants if name != variant)
        return replace(self, variants=left, absent=(*self.absent, *gone))

    @property
    def is_long(self) -> bool:
        """Return whether one call takes seconds on a CPU."""
        return is_long(self.case, self.num_gpus)


@dataclass(frozen=True)
class Request:
    """Options of the command line; None is this machine's default. `models` replace sizes.

    - suites: of `SUITES`. sizes: for suites but `ops`, which takes `shapes`.
    - baselines: names of providers, by default `providers.usual`.
    """

    world_sizes: tuple[int, ...] | None = None
    ops: tuple[str, ...] = OPS
    schedules: tuple[str, ...] | None = None
    baselines: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    directions: tuple[str, ...] | None = None
    shapes: tuple[Shape, ...] = ()
    models: tuple[str, ...] = ()
    tokens: tuple[int, ...] | None = None
    seconds: float | None = None
    rounds: int | None = None
    patience: float | None = None
    suites: tuple[str, ...] = ("ops",)
    sizes: tuple[Size, ...] = ()
    graph: bool = False


def world_sizes(most: int) -> tuple[int, ...]:
    """Return the default world sizes: 1, the reference of scaling, 2, 4, 8 and so on up to `most`, and that."""
    return tuple(sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most}))


def plan(request: Request, num_gpus: int, gpu: str = "", world: int = 0) -> list[Job]:
    """Return the jobs of a request, in the order they run; each once, whatever was asked for twice.

    - num_gpus: GPUs of the ranks, on all their nodes. gpu: the name of one, for estimates.
    - world: ranks that a launcher has started; 0 without one.

    ValueError for a model or a size that does not split into that many ranks, and for a backward pass of float8.
    """
    if set(EVERY_FLOAT8) & set(request.dtypes or ()) and set(request.directions or ()) - {"forward"}:
        raise ValueError("fp8 and mxfp8 operands have no gradient: with either, --direction must be forward")
    planner = JobPlanner(request, num_gpus, gpu)
    jobs: list[Job] = []
    for name in request.suites:
        most = world or num_gpus or SUITES[name].most_ranks
        for world_size in request.world_sizes or world_sizes(most):
            jobs += planner.ops(world_size) if name == "ops" else planner.suite(name, world_size)
    once: dict[tuple[object, ...], Job] = {}
    for job in jobs:
        once.setdefault((job.case, job.directions, job.timed), job)
    return list(once.values())


@dataclass
class JobPlanner:
    request: Request
    num_gpus: int
    gpu: str

    def __post_init__(self) -> None:
        # Missing variants that were reported: once is enough for all sizes.
        self.said: set[tuple[object, ...]] = set()

    def ops(self, world_size: int) -> Iterator[Job]:
        """Yield the jobs of matmuls, timed where each rank has a core or a GPU of its own, and else checked."""
        request, num_gpus = self.request, self.num_gpus
        asked = SUITES["ops"].schedules if request.schedules is None else request.schedules
        compiled = 0 < world_size <= num_gpus
        clocked = tuple(name for name in (*SCHEDULES, "auto") if name in asked and (name != "fused" or compiled))
        # Ranks that share a GPU are not timed.
        if num_gpus and not compiled:
            clocked = ()
        if request.models:
            dtypes = request.dtypes or (("bfloat16",) if num_gpus else ("float32",))
            blocks = itertools.product(request.models, request.tokens or (2048,), [world_size], dtypes)
            cases = [case for each in blocks for case in block(*each) if case.op in request.ops]
            for case in cases if compiled or not num_gpus else ():
                both = request.directions or (("forward",) if case.is_float8 else ("forward", "backward"))
                yield self._timed(case, clocked, both)
            return
        for op in request.ops if clocked else ():
            for shape, dtype, directions in _sizes(request, op, world_size, num_gpus):
                yield self._timed(Case(op, *shape, dtype, world_size), clocked, directions)
        # One rank runs no kernel.
        checked = tuple(name for name in asked if name not in clocked and world_size > 1)
        if "fused" in checked:
            checked = ("own_matmul", *checked)
        for op in request.ops if checked else ():
            yield from self._checks(op, world_size, checked)

    def suite(self, name: str, world_size: int) -> Iterator[Job]:
        """Yield the jobs of another suite; none for ranks that share a GPU, which are not timed."""
        request, suite = self.request, SUITES[name]
        if (self.num_gpus and world_size > self.num_gpus) or (world_size == 1 and suite.ops == COLLECTIVES):
            return
        dtypes = request.dtypes or (("bfloat16",) if self.num_gpus else ("float32",))
        variants = suite.variants(self.num_gpus, request.schedules)
        if request.baselines is not None:
            variants = tuple(each for each in variants if each not in suite.others or each in request.baselines)
        directions = tuple(each for each in suite.directions if each in (request.directions or DIRECTIONS))
        plain = [each for each in dtypes if each not in EVERY_FLOAT8]
        given = suite, request.sizes, request.models, request.tokens, plain, world_size, self.num_gpus
        try:
            cases = list(cases_of(*given)) if directions else []
        except ValueError:
            # By default a model is left out on more ranks than can share it.
            if request.world_sizes is not None or world_size <= 2:
                raise
            return
        for case in cases:
            yield self._job(case, variants, directions, suite.seconds)

    def _timed(self, case: Case, schedules: tuple[str, ...], directions: tuple[str, ...]) -> Job:
        # The baselines are part of every timed case, as a speed-up is a ratio within one run.
        bounds = ("matmul", "own_matmul", "comm") if self.num_gpus else BOUNDS
        peers = providers.usual() if self.request.baselines is None else self.request.baselines
        variants = tuple(dict.fromkeys((*bounds, "unfused", SEQUENTIAL, *schedules, *peers)))
        return self._job(case, variants, directions, SUITES["ops"].seconds)

    def _job(self, case: Case, variants: tuple[str, ...], directions: tuple[str, ...], seconds: float) -> Job:
        request, absent, skipped = self.request, [], []
        for direction, name in itertools.product(directions, variants):
            reason = missing(name, case, direction, self.num_gpus)
            if reason:
                skipped.append((direction, name))
            key = case.op, case.world_size, name, direction, reason
            if reason and key not in self.said:
                self.said.add(key)
                absent.append(Outcome(name, direction, not_run=reason))
        return Job(
            case, variants, True, seconds if request.seconds is None else request.seconds, request.rounds, directions,
            tuple(absent), self.num_gpus, frozenset(skipped), request.patience, self.gpu, request.graph,
        )  # fmt: skip

    def _checks(self, op: str, world_size: int, variants: tuple[str, ...]) -> Iterator[Job]:
        # By default only two ranks check the even size, and the gradients of the uneven size.
        request = self.request
        shapes = CHECK_SHAPES if request.directions or world_size == 2 else CHECK_SHAPES[-1:]
        for shape, dtype in itertools.product(shapes, request.dtypes or DTYPES):
            # `both` checks y, dx and dw in one run.
            is_both = shape == CHECK_SHAPES[-1] and world_size == 2 and dtype not in EVERY_FLOAT8
            by_default = ("both",) if is_both else ("forward",)
            case = Case(op, *shape, dtype, world_size)
            asked = request.directions or by_default
            pairs = itertools.product(asked, variants)
            skipped = frozenset((each, name) for each, name in pairs if missing(name, case, each, self.num_gpus))
            yield Job(
                case, variants, False, directions=asked, num_gpus=self.num_gpus, skipped=skipped,
                patience=request.patience, gpu=self.gpu,
            )  # fmt: skip


def _sizes(request: Request, op: str, world_size: int, num_gpus: int) -> list[tuple[Shape, str, tuple[str, ...]]]:
    """Return (shape, dtype, directions) of the timed cases: the request's, or a selection that takes a few minutes."""
    forward = request.directions or ("forward",)
    if request.shapes:
        dtypes = request.dtypes or (("bfloat16",) if num_gpus else ("float32",))
        return [(shape, dtype, forward) for dtype in dtypes for shape in dict.fromkeys(request.shapes)]
    main, sets = ("bfloat16", ("square", "large")) if num_gpus else ("float32", ("small", "medium"))
    shapes = [shape for name in sets for shape in SHAPES[name][op]]
    if not num_gpus and world_size == 2:
        shapes += SHAPES["square"][op] + SHAPES["comm"][op][:2]
    elif not num_gpus and world_size > 2:
        # More ranks than a small machine has cores: only two sizes, one where communication matters.
        shapes = [*SHAPES["medium"][op], *SHAPES["comm"][op][:1]]
    # Time the gradients of a few sizes.
    gradients = shapes if num_gpus else (*SHAPES["small"][op], *SHAPES["medium"][op]) if world_size == 2 else ()
    every = request.directions or DIRECTIONS
    sizes = [(shape, main, every if shape in gradients else forward) for shape in shapes]
    if num_gpus or world_size == 2:
        sizes += [(shape, dtype, forward) for shape in SHAPES["medium"][op] for dtype in DTYPES if dtype != main]
    sizes += [(shape, dtype, forward) for dtype in EVERY_FLOAT8 for shape in shapes]
    return [size for size in sizes if size[1] in (request.dtypes or DTYPES)]


def estimate(job: Job) -> float:
    """Return the estimated seconds of a job: operands, the gate's calls, products and checks, then the rounds."""
    from .timing import LONG_ROUNDS, LONG_SECONDS, MAX_ROUNDS, MIN_ROUNDS

    case, calls_in_a_row = job.case, SUITE_OF[job.case.op].calls
    rates = rates_of(job.gpu if job.num_gpus else "", case.dtype)
    # Ranks that outnumber the cores take turns.
    turns = 1.0 if job.num_gpus else max(1.0, case.world_size / len(os.sched_getaffinity(0)))
    total = turns * case.K * (case.M + case.N) / rates.drawn
    if job.num_gpus and "fused" in job.variants:
        total += COMPILE_SECONDS
    for direction in job.directions:
        count, work = len(job.variants_of(direction)), flops(case, direction)
        sent = sum(num_bytes for _, num_bytes in traffic(case, direction)) if case.world_size > 1 else 0
        call = turns * (work / rates.flops + sent / rates.bytes + rates.call)
        calls = count * (1 if job.is_long else 2)
        checked = num_results(case, direction) / case.world_size / rates.checked
        total += (0.3 if job.num_gpus else 1.0) + calls * (call + turns * checked) + 3 * turns * work / rates.exact
        if job.timed:
            a_round = count * call * calls_in_a_row
            least = job.rounds or (LONG_ROUNDS if a_round > LONG_SECONDS else MIN_ROUNDS)
            # No more than so many rounds are timed, with their barriers and checks.
            most = min(job.seconds, MAX_ROUNDS * (a_round + count * ROUND_SECONDS))
            total += least * a_round if job.rounds else max(most, least * a_round)
    return total


def seconds_of(job: Job) -> float:
    """Return the timeout of a job's ranks: the patience that was asked for, or many times the estimate."""
    return job.patience or JOB_SECONDS + MARGIN * estimate(job)


def wait_seconds(job: Job) -> float:
    """Return an op's timeout, which covers a peer that is still making its float64 products."""
    return seconds_of(job) / 2


def duration(seconds: float) -> str:
    """Return a duration in words: "12 s", "4 min"."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
