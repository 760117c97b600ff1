"""What regression tracking measures: times of every schedule and of the matmul alone, taken in turns.

A round is one call of `timing.measure` with one counted iteration: every variant once, each the slowest rank's time, so
that whatever else the machine does in these milliseconds meets all of them. What is tracked are ratios of two times of
one round, and the median of those over rounds. A launch is a fresh set of ranks that goes through all cases several
times: where the system puts ranks and their memory changes times too, and only a new launch draws that again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

import fusedtp

from .cases import OPS, SHAPES, Case
from .problem import Problem
from .ranks import RankPool
from .sweep import rank_environment
from .timing import gate, measure

# What a launch does on this machine: all cases PASSES times, ROUNDS rounds each.
PASSES, ROUNDS = 4, 8
# How long an op waits for a peer, and a call for its ranks, on a machine with much else to do.
WAIT_SECONDS, CALL_SECONDS = 110.0, 300.0


@dataclass(frozen=True)
class Tracked:
    """A case in one direction."""

    case: Case
    direction: str

    def id(self, variant: str) -> str:
        """The name that is stored: it must not change while what it names does not."""
        case = self.case
        size = f"{case.M}x{case.N}x{case.K}"
        return f"{case.op}-{size}-{case.dtype}-{case.world_size}-{self.direction}-{variant}"


def num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def schedules(gpus: int) -> tuple[str, ...]:
    """Those that run at full speed here: interpreted kernels are not timed."""
    return ("unfused", "decomposed", "fused") if gpus else ("unfused", "decomposed")


def cases(gpus: int) -> tuple[Tracked, ...]:
    """What is tracked on a machine with so many GPUs: every op, one size forward and one with its gradients."""
    found = []
    for op in OPS:
        if gpus:
            world_size = max(size for size in (1, 2, 4, 8) if size <= gpus)
            sizes = (SHAPES["large"][op][0], "forward"), (SHAPES["square"][op][0], "both")
            dtype = "bfloat16"
        else:
            # long enough for the matmul to count, short enough for many rounds
            world_size, dtype = 2, "float32"
            sizes = (SHAPES["medium"][op][0], "forward"), ((512, 512, 512), "both")
        found += [Tracked(Case(op, *shape, dtype, world_size), direction) for shape, direction in sizes]
    return tuple(found)


def slowed(run: Callable[[], object], factor: float, device: torch.device) -> Callable[[], object]:
    """`run` followed by a busy wait, together `factor` times as long; `run` itself for 1."""
    if factor == 1:
        return run

    def wait_for_device() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def slow() -> object:
        wait_for_device()
        start = time.perf_counter()
        result = run()
        wait_for_device()
        end = start + factor * (time.perf_counter() - start)
        while time.perf_counter() < end:
            pass
        return result

    return slow


def rounds_of(
    group: ProcessGroup, tracked: Tracked, variants: Sequence[str], rounds: int, plant: Mapping[str, float], check: bool
) -> list[dict[str, float]]:
    """On a rank: milliseconds of each variant in each round, the slowest rank's, the same on every rank.

    `plant` makes variants slower by a factor. AssertionError when `check` finds a wrong result.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    fusedtp.set_timeout(WAIT_SECONDS)
    with torch.no_grad():
        problem = Problem(tracked.case, group, device)
        if check:
            for verdict in gate(problem, variants, group, tracked.direction).values():
                if verdict.error:
                    raise AssertionError(verdict.error)
            problem.forget_oracle()
        runners = {
            name: slowed(problem.runner(name, tracked.direction), plant.get(name, 1.0), device) for name in variants
        }
        # `measure` collects garbage each time: it shall not look at all that is imported again and again
        gc.collect()
        gc.freeze()
        try:
            found = []
            for turn in range(rounds):
                first = turn % len(variants)
                order = (*variants[first:], *variants[:first])
                timings = measure({name: runners[name] for name in order}, group, device, rounds=1)
                found.append({name: timings[name].median_ms for name in variants})
        finally:
            gc.unfreeze()
    return found


def launch(
    tracked: Sequence[Tracked],
    gpus: int,
    *,
    passes: int = PASSES,
    rounds: int = ROUNDS,
    plant: Mapping[str, float] | None = None,
) -> dict[Tracked, list[dict[str, float]]]:
    """The rounds of every case on fresh ranks. RankError for ranks that fail, also for a wrong result."""
    num_ranks = max(each.case.world_size for each in tracked)
    variants = ("matmul", *schedules(gpus))
    found: dict[Tracked, list[dict[str, float]]] = {each: [] for each in tracked}
    with RankPool(num_ranks, timeout=CALL_SECONDS, env=rank_environment(gpus, num_ranks)) as pool:
        for turn in range(passes):
            for each in tracked:
                arguments = each, variants, rounds, dict(plant or {}), turn == 0
                found[each] += pool.run(rounds_of, *arguments, world_size=each.case.world_size)[0]
    return found
