"""Plan the jobs of a request: which cases, variants and directions run here, in which order, with which timeout."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import providers
from .cases import (
    BOUNDS,
    CHECK_SHAPES,
    DIRECTIONS,
    DTYPES,
    EVERY_FLOAT8,
    OPS,
    OWN,
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

if TYPE_CHECKING:
    from .timing import Verdict

# Without a GPU kernels are interpreted. Triton must know that before kernels are imported.
INTERPRET = ("TRITON_INTERPRET", "1")
# Timeout of a rank, beside the time of its arithmetic at the rate of a slow, shared core. The interpreter and a loaded
# machine are slow.
JOB_SECONDS = 180.0
SLOW_FLOPS = 1e10
# FLOP/s of an idle core, or of a GPU in float64.
FAST_FLOPS = 6e10
# Normal numbers that a core draws in a second, elements that it checks, and seconds in which ranks start.
DRAWN, CHECKED, START_SECONDS = 1e8, 3.5e7, 4.0
# A case with more arithmetic than this, forward and backward on a CPU, takes seconds a call: each variant runs once for
# the gate.
LONG_FLOPS = 1e11


@dataclass(frozen=True)
class Job:
    """One case; `timed` says whether the variants are measured after the gate.

    - skipped: (direction, variant) of variants that cannot run. The process that starts the ranks decides; ranks do
      not.
    - absent: outcomes of variants that do not run.
    - patience: seconds that a rank may be silent, beside the time of its arithmetic.
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
    patience: float = JOB_SECONDS

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

    baselines: names of providers, by default `providers.usual`.
    """

    world_sizes: tuple[int, ...] | None = None
    ops: tuple[str, ...] = OPS
    schedules: tuple[str, ...] = (*SCHEDULES, "auto")
    baselines: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    directions: tuple[str, ...] | None = None
    shape_sets: tuple[str, ...] | None = None
    shapes: tuple[Shape, ...] = ()
    models: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    seconds: float = 1.0
    rounds: int | None = None
    patience: float = JOB_SECONDS


def is_long(case: Case, num_gpus: int) -> bool:
    """Return whether one call takes seconds on a CPU."""
    return not num_gpus and flops(case, "both") > LONG_FLOPS


def missing(variant: str, case: Case, direction: str, num_gpus: int) -> str:
    """Return why a variant cannot run this case here, or "" if it can."""
    if variant == "comm" and not traffic(case, direction):
        return f"{direction} of {case.op} sends nothing"
    if variant == "own_matmul" and case.is_float8:
        return "our kernels with preset flags are given no scales here"
    if variant == SEQUENTIAL and case.world_size == 1:
        return "one rank has nothing to send"
    if variant in ("decomposed", "auto") and case.world_size == 1 and is_long(case, num_gpus):
        return "on one rank it is the library's matmul, as unfused is: left out where a call takes seconds"
    return "" if variant in OWN else providers.named(variant).reason(case, direction, num_gpus)


def world_sizes(request: Request, num_gpus: int) -> tuple[int, ...]:
    """Return the default world sizes: 2 and 4, and 8 with 8 GPUs; no more than GPUs, if there are any."""
    if request.world_sizes is not None:
        return request.world_sizes
    return tuple(size for size in (2, 4, 8) if size <= (num_gpus or 4)) or (1,)


def plan(request: Request, num_gpus: int) -> list[Job]:
    """Return the jobs of a request, in the order they run.

    ValueError for a model that does not split into that many ranks, and for a backward pass of float8.
    """
    if set(EVERY_FLOAT8) & set(request.dtypes or ()) and set(request.directions or ()) - {"forward"}:
        raise ValueError("fp8 and mxfp8 operands have no gradient: with either, --direction must be forward")
    jobs: list[Job] = []
    # Missing variants that were reported: once is enough for all sizes.
    said: set[tuple[object, ...]] = set()
    for world_size in world_sizes(request, num_gpus):
        compiled = 0 < world_size <= num_gpus
        clocked = tuple(
            name for name in (*SCHEDULES, "auto") if name in request.schedules and (name != "fused" or compiled)
        )
        # Ranks that share a GPU are not timed.
        is_timed = compiled or not num_gpus
        if not is_timed:
            clocked = ()
        if request.models:
            blocks = _blocks(request, world_size, num_gpus) if is_timed else ()
            for case in blocks:
                both = request.directions or (("forward",) if case.is_float8 else ("forward", "backward"))
                jobs.append(_timed(case, clocked, both, request, num_gpus, said))
            continue
        for op in request.ops if clocked else ():
            for shape, dtype, directions in _sizes(request, op, world_size, num_gpus):
                case = Case(op, *shape, dtype, world_size)
                jobs.append(_timed(case, clocked, directions, request, num_gpus, said))
        checked = tuple(name for name in request.schedules if name not in clocked)
        if "fused" in checked:
            checked = ("own_matmul", *checked)
        for op in request.ops if checked else ():
            jobs += _checks(op, world_size, checked, request, num_gpus)
    return jobs


def _timed(
    case: Case, schedules: tuple[str, ...], directions: tuple[str, ...], request: Request, num_gpus: int,
    said: set[tuple[object, ...]],
) -> Job:  # fmt: skip
    # The baselines are part of every timed case, as a speed-up is a ratio within one run.
    bounds = ("matmul", "own_matmul", "comm") if num_gpus else BOUNDS
    peers = providers.usual() if request.baselines is None else request.baselines
    variants = tuple(dict.fromkeys((*bounds, "unfused", SEQUENTIAL, *schedules, *peers)))
    absent, skipped = [], []
    for direction, name in itertools.product(directions, variants):
        reason = missing(name, case, direction, num_gpus)
        if reason:
            skipped.append((direction, name))
        key = case.op, case.world_size, name, direction, reason
        if reason and key not in said:
            said.add(key)
            absent.append(Outcome(name, direction, not_run=reason))
    return Job(
        case, variants, True, request.seconds, request.rounds, directions, tuple(absent), num_gpus, frozenset(skipped),
        request.patience,
    )  # fmt: skip


def _checks(op: str, world_size: int, variants: tuple[str, ...], request: Request, num_gpus: int) -> Iterator[Job]:
    # By default only two ranks check the even size, and the gradients of the uneven size.
    shapes = CHECK_SHAPES if request.directions or world_size == 2 else CHECK_SHAPES[-1:]
    for shape, dtype in itertools.product(shapes, request.dtypes or DTYPES):
        # `both` checks y, dx and dw in one run.
        is_both = shape == CHECK_SHAPES[-1] and world_size == 2 and dtype not in EVERY_FLOAT8
        by_default = ("both",) if is_both else ("forward",)
        case = Case(op, *shape, dtype, world_size)
        asked = request.directions or by_default
        pairs = itertools.product(asked, variants)
        skipped = frozenset((each, name) for each, name in pairs if missing(name, case, each, num_gpus))
        yield Job(
            case, variants, False, directions=asked, num_gpus=num_gpus, skipped=skipped, patience=request.patience
        )


def _sizes(request: Request, op: str, world_size: int, num_gpus: int) -> list[tuple[Shape, str, tuple[str, ...]]]:
    """Return (shape, dtype, directions) of the timed cases: the request's, or a selection that takes a few minutes."""
    forward = request.directions or ("forward",)
    if request.shapes or request.shape_sets is not None:
        named = [shape for name in request.shape_sets or () for shape in SHAPES[name][op]]
        dtypes = request.dtypes or (("bfloat16",) if num_gpus else ("float32",))
        return [(shape, dtype, forward) for dtype in dtypes for shape in dict.fromkeys((*named, *request.shapes))]
    main, sets = ("bfloat16", ("square", "large")) if num_gpus else ("float32", ("small", "medium"))
    shapes = [shape for name in sets for shape in SHAPES[name][op]]
    if not num_gpus and world_size == 2:
        shapes += SHAPES["square"][op] + SHAPES["comm"][op][:2]
    elif not num_gpus and world_size > 2:
        # More ranks than a small machine has cores: only one size, where communication matters.
        shapes += SHAPES["comm"][op][:1]
    # Time the gradients of a few sizes.
    gradients = shapes if num_gpus else (*SHAPES["small"][op], *SHAPES["medium"][op]) if world_size == 2 else ()
    every = request.directions or DIRECTIONS
    sizes = [(shape, main, every if shape in gradients else forward) for shape in shapes]
    if num_gpus or world_size == 2:
        sizes += [(shape, dtype, forward) for shape in SHAPES["medium"][op] for dtype in DTYPES if dtype != main]
    sizes += [(shape, dtype, forward) for dtype in EVERY_FLOAT8 for shape in shapes]
    return [size for size in sizes if size[1] in (request.dtypes or DTYPES)]


def _blocks(request: Request, world_size: int, num_gpus: int) -> list[Case]:
    # Return the matmuls of a block of each model at each number of tokens.
    dtypes = request.dtypes or (("bfloat16",) if num_gpus else ("float32",))
    blocks = itertools.product(request.models, request.tokens, [world_size], dtypes)
    return [case for each in blocks for case in block(*each) if case.op in request.ops]


def estimate(job: Job) -> float:
    """Return the estimated seconds of a job: operands, the gate's calls, products and checks, then the rounds."""
    from .timing import LONG_ROUNDS, LONG_SECONDS, MIN_ROUNDS

    # Ranks that outnumber the cores take turns.
    turns = 1.0 if job.num_gpus else max(1.0, job.case.world_size / len(os.sched_getaffinity(0)))
    total = turns * job.case.K * (job.case.M + job.case.N) / DRAWN
    for direction in job.directions:
        count, call = len(job.variants_of(direction)), turns * flops(job.case, direction) / FAST_FLOPS
        calls = count * (1 if job.is_long else 2)
        total += (
            1.0 + (calls + 3) * call + calls * turns * num_results(job.case, direction) / job.case.world_size / CHECKED
        )
        if job.timed:
            least = job.rounds or (LONG_ROUNDS if count * call > LONG_SECONDS else MIN_ROUNDS)
            total += job.seconds if job.num_gpus else max(job.seconds, least * count * call)
    return total


def seconds_of(job: Job) -> float:
    """Return the timeout of a job's ranks."""
    calls = len(job.variants) * (1 + (job.rounds or (5 if job.is_long else 10)))
    # Six more for the float64 products.
    work = sum(flops(job.case, each) * (calls + 6) for each in job.directions)
    return job.patience + work / SLOW_FLOPS


def wait_seconds(job: Job) -> float:
    """Return an op's timeout, which covers a peer that is still making its float64 products."""
    return job.patience / 2 + 6 * max(flops(job.case, each) for each in job.directions) / SLOW_FLOPS
