"""The sweep: every case through the gate, then the clock, on ranks of our own or on torchrun's.

A job is one case with the variants to run. On a GPU per rank all of them are timed. Without that, `fused` is checked at
small sizes and never timed: on a CPU its kernels run in Triton's interpreter, and ranks that share a GPU take turns on
it. A variant that fails its check, or a job whose ranks fail, gives a row that says so and has no number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from .cases import BOUNDS, CHECK_SHAPES, DTYPES, OPS, SCHEDULES, SHAPES, Case, Problem, Shape
from .machine import Machine
from .ranks import RankError, RankPool
from .store import PASSED, Row
from .timing import Timing, Verdict, gate, measure

# the interpreter and a loaded machine are slow; a rank that hangs is reported after this
JOB_SECONDS = 180.0
# without a GPU kernels can only be interpreted, which Triton must know before they are imported
INTERPRET = ("TRITON_INTERPRET", "1")


@dataclass(frozen=True)
class Job:
    """One case; `timed` says whether the variants are measured after the gate."""

    case: Case
    variants: tuple[str, ...]
    timed: bool
    seconds: float = 1.0
    rounds: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What one job found out about one variant, the same on every rank."""

    variant: str
    verdict: Verdict
    timing: Timing | None = None
    path: str = ""
    threads: int = 0
    backend: str = ""


@dataclass(frozen=True)
class Request:
    """What the command line asks for; None is this machine's default."""

    world_sizes: tuple[int, ...] | None = None
    ops: tuple[str, ...] = OPS
    schedules: tuple[str, ...] = SCHEDULES
    dtypes: tuple[str, ...] | None = None
    shape_sets: tuple[str, ...] | None = None
    shapes: tuple[Shape, ...] = ()
    seconds: float = 1.0
    rounds: int | None = None
    seed: int = 0


def world_sizes(request: Request, num_gpus: int) -> tuple[int, ...]:
    """1, 2, 4, as far as there are GPUs if there are any; up to 8 with 8 of them."""
    if request.world_sizes is not None:
        return request.world_sizes
    return tuple(size for size in (1, 2, 4, 8) if size <= (num_gpus or 4))


def plan(request: Request, num_gpus: int) -> list[Job]:
    """The jobs of a request, in the order they run."""
    jobs = []
    for world_size in world_sizes(request, num_gpus):
        clocked = tuple(
            name for name in SCHEDULES if name in request.schedules and (name != "fused" or 0 < world_size <= num_gpus)
        )
        if num_gpus and world_size > num_gpus:
            clocked = ()
        for op in request.ops:
            for shape, dtype in _sizes(request, op, world_size, num_gpus) if clocked else ():
                # the baseline is part of every timed case: a speed-up is a ratio within one run
                variants = tuple(dict.fromkeys((*BOUNDS, "unfused", *clocked)))
                case = Case(op, *shape, dtype, world_size, request.seed)
                jobs.append(Job(case, variants, True, request.seconds, request.rounds))
        checked = tuple(name for name in request.schedules if name not in clocked)
        for op in request.ops if checked else ():
            for shape in CHECK_SHAPES:
                for dtype in request.dtypes or DTYPES:
                    jobs.append(Job(Case(op, *shape, dtype, world_size, request.seed), checked, False))
    return jobs


def _sizes(request: Request, op: str, world_size: int, num_gpus: int) -> list[tuple[Shape, str]]:
    """(shape, dtype) of the timed cases: what was asked for, or a selection that keeps the whole sweep to minutes."""
    if request.shapes or request.shape_sets is not None:
        named = [shape for name in request.shape_sets or () for shape in SHAPES[name][op]]
        dtypes = request.dtypes or (("bfloat16",) if num_gpus else ("float32",))
        return [(shape, dtype) for dtype in dtypes for shape in dict.fromkeys((*named, *request.shapes))]
    main, sets = ("bfloat16", ("square", "large")) if num_gpus else ("float32", ("small", "medium"))
    shapes = [shape for name in sets for shape in SHAPES[name][op]]
    if not num_gpus and world_size == 2:
        shapes += SHAPES["square"][op] + SHAPES["comm"][op]
    elif not num_gpus and world_size > 2:
        # more ranks than a small machine has cores: one size where communication matters
        shapes += SHAPES["comm"][op][:1]
    sizes = [(shape, main) for shape in shapes]
    if num_gpus or world_size == 2:
        sizes += [(shape, dtype) for shape in SHAPES["medium"][op] for dtype in DTYPES if dtype != main]
    return [(shape, dtype) for shape, dtype in sizes if request.dtypes is None or dtype in request.dtypes]


def run_job(group: Any, job: Job) -> list[Outcome]:
    """One job on this rank; collective over `group`."""
    import torch
    import torch.distributed as dist

    import fusedtp

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    with torch.no_grad():
        problem = Problem(job.case, group, device)
        verdicts: dict[str, Verdict] = {}
        paths: dict[str, str] = {}
        for variant in job.variants:
            verdicts |= gate(problem, (variant,), group)
            taken = fusedtp.last_path() if variant not in BOUNDS else None
            paths[variant] = f"{taken.schedule}: {taken.reason}" if taken else ""
        problem.forget_oracle()
        correct = [name for name in job.variants if job.timed and not verdicts[name].error]
        runners = {name: problem.runner(name) for name in correct}
        timings = measure(runners, group, device, seconds=job.seconds, rounds=job.rounds)
    threads, backend = torch.get_num_threads(), str(dist.get_backend(group))
    return [Outcome(name, verdicts[name], timings.get(name), paths[name], threads, backend) for name in job.variants]


def rows_of(job: Job, outcomes: Iterable[Outcome], machine: Machine) -> list[Row]:
    """The rows of a job's outcomes, with the ratios between them."""
    outcomes = list(outcomes)
    medians = {outcome.variant: outcome.timing.median_ms for outcome in outcomes if outcome.timing}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    rows = []
    for outcome in outcomes:
        timing, verdict, case = outcome.timing, outcome.verdict, job.case
        own, unfused, matmul = (medians.get(name) for name in (outcome.variant, "unfused", "matmul"))
        rows.append(
            Row(
                op=case.op,
                variant=outcome.variant,
                M=case.M,
                N=case.N,
                K=case.K,
                dtype=case.dtype,
                world_size=case.world_size,
                median_ms=timing.median_ms if timing else None,
                p20_ms=timing.p20_ms if timing else None,
                p80_ms=timing.p80_ms if timing else None,
                total_ms=timing.total_ms if timing else None,
                rounds=timing.rounds if timing else 0,
                speedup_vs_unfused=unfused / own if own and unfused and outcome.variant in SCHEDULES else None,
                matmul_fraction=matmul / own if own and matmul and outcome.variant in SCHEDULES else None,
                gate=verdict.error or PASSED,
                max_error=None if verdict.error else verdict.max_error,
                error_ratio=None if verdict.error else verdict.error_ratio,
                interpreted=outcome.variant == "fused" and not machine.num_gpus,
                predicted=False,
                path=outcome.path,
                seed=case.seed,
                machine=machine.name,
                cpu=machine.cpu,
                cores=machine.cores,
                gpu=machine.gpu,
                num_gpus=machine.num_gpus,
                threads=outcome.threads,
                backend=outcome.backend,
                python=machine.python,
                torch=machine.torch,
                triton=machine.triton,
                commit=machine.commit,
                dirty=machine.dirty,
                time_utc=now,
            )
        )
    return rows


def failed(job: Job, text: str) -> list[Outcome]:
    """Outcomes of a job whose ranks failed: no variant has a number."""
    return [Outcome(variant, Verdict(float("nan"), float("nan"), text)) for variant in job.variants]


def rank_environment(num_gpus: int, num_ranks: int) -> dict[str, str]:
    """What ranks started here need set before they import torch and Triton."""
    if not num_gpus:
        return dict([INTERPRET])
    # torch's symmetric memory refuses ranks that share a GPU unless told that it is meant
    return {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if num_ranks > num_gpus else {}


def run_spawned(jobs: Sequence[Job], machine: Machine, done: Callable[[Job], None]) -> list[Row]:
    """Run the jobs on ranks started here; `done` is called after each."""
    num_ranks = max(job.case.world_size for job in jobs)
    env = rank_environment(machine.num_gpus, num_ranks)
    rows: list[Row] = []
    with RankPool(num_ranks, timeout=JOB_SECONDS, env=env) as pool:
        for job in jobs:
            try:
                outcomes = pool.run(run_job, job, world_size=job.case.world_size)[0]
            except RankError as error:
                outcomes = failed(job, str(error))
            rows += rows_of(job, outcomes, machine)
            if any(outcome.verdict.error for outcome in outcomes):
                # a workspace that lost a peer refuses further use: what failed must not fail the next job too
                pool.close()
            done(job)
    return rows


def launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_launched(jobs: Sequence[Job], machine: Machine, done: Callable[[Job], None]) -> list[Row]:
    """Run the jobs as one rank of the launcher's; every rank calls this with the same jobs, rank 0 gets the rows."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    else:
        os.environ.setdefault(*INTERPRET)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=5))
    try:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        groups = {size: dist.new_group(list(range(size))) for size in sorted({job.case.world_size for job in jobs})}
        rows: list[Row] = []
        for job in jobs:
            if rank < job.case.world_size <= world_size:
                rows += rows_of(job, run_job(groups[job.case.world_size], job), machine)
                done(job)
            # ranks outside the group must not start the next job's barrier while this one is timed
            dist.barrier()
        return rows
    finally:
        dist.destroy_process_group()
