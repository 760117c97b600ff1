"""Run thousands of mixed calls: every result right, memory and descriptors flat, epochs past their wrap-around.

    nox -s soak -- --calls 10000 --seed 7

Ranks make the same calls, which a seed and a number decide (`mixed`), each after a delay of its own, and check every
result. One workspace serves the whole run, and its epoch wraps in the middle. A wrong result, an error or a rank that
does not answer ends the run. The error has the call's number and a command that begins again shortly before the call.

    nox -s soak -- --programs --calls 100000 --seed 7

With `--programs` the calls are those of random programs (`programs`), in which something goes wrong on a rank now and
then: every number is right, or every rank of the group is told. Steps are counted by kind and outcome.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from fusedtp.bench.ranks import RankError, RankPool

from .endurance import WAIT_SECONDS, Sample, make_calls
from .performing import perform
from .programs import STEPS

# Number of samples of memory and descriptors in a run.
SAMPLES = 40
# Number of calls repeated before a failed call in a replay: the failure may need them.
BEFORE = 20
# Weights of the schedules in programs.
WEIGHTS = {"decomposed": 40.0, "unfused": 8.0, "fused": 0.5}
# Programs between two progress messages, and the seconds that one program may take on a busy machine.
PROGRAMS, PROGRAM_SECONDS = 10, 120.0


def soak(
    pool: RankPool,
    calls: int,
    seed: int,
    *,
    num_shapes: int | None = None,
    first: int = 0,
    world_size: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[list[Sample]]:
    """Make `calls` calls and return each rank's samples. A failure raises RankError with a command for a replay.

    num_shapes: number of calls after which shapes repeat with other values; by default a quarter of the calls.
    """
    num_shapes = max(1, calls // 4) if num_shapes is None else num_shapes
    world_size = pool.world_size if world_size is None else world_size
    by_rank: list[list[Sample]] = [[] for _ in range(world_size)]
    # Two of three calls take an epoch or more, so epochs wrap in the first half.
    epoch, step, started = 2**31 - 1 - calls // 4, max(1, calls // SAMPLES), time.monotonic()
    for begin in range(first, first + calls, step):
        count = min(step, first + calls - begin)
        try:
            samples = pool.run(
                make_calls, seed, num_shapes, begin, count, epoch if begin == first else None,
                world_size=world_size, timeout=WAIT_SECONDS + 10.0 * count,
            )  # fmt: skip
        except RankError as error:
            before = min(begin, BEFORE)
            error.add_note(
                f"among calls {begin} to {begin + count - 1}; again: nox -s soak -- --seed {seed} --world-size "
                f"{world_size} --shapes {num_shapes} --first {begin - before} --calls {before + count}"
            )
            raise
        for each, sample in zip(by_rank, samples, strict=True):
            each.append(sample)
        done, seconds = begin + count - first, time.monotonic() - started
        resident = ", ".join(f"{sample.resident_bytes / 2**20:.0f}" for sample in samples)
        say(
            f"{done:6d} of {calls} calls right, {done / seconds:.1f} a second; resident MiB {resident}; "
            f"descriptors {samples[0].num_fds}; epoch {samples[0].epoch}"
        )
    return by_rank


def run_programs(
    pool: RankPool,
    calls: int,
    seed: int,
    *,
    first: int = 0,
    world_size: int | None = None,
    weights: Mapping[str, float] = WEIGHTS,
    slow: bool = True,
    steady: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Counter[str]:
    """Run programs of `calls` steps and count outcomes on all ranks. RankErrors have a command for a replay."""
    world_size = pool.world_size if world_size is None else world_size
    counts: Counter[str] = Counter()
    last = first - (-calls // STEPS)
    for begin in range(first, last, PROGRAMS):
        count = min(PROGRAMS, last - begin)
        try:
            by_rank = pool.run(
                perform, seed, begin, count, dict(weights), slow, steady,
                world_size=world_size, timeout=PROGRAM_SECONDS * count,
            )  # fmt: skip
        except RankError as error:
            error.add_note(
                f"among programs {begin} to {begin + count - 1}, the one that failed is named above; again: nox -s "
                f"soak -- --programs --seed {seed} --world-size {world_size} --first NUMBER --calls {STEPS}"
            )
            raise
        counts = sum(by_rank, counts)
        say(f"{(begin + count - first) * STEPS:6d} of {calls} calls: right, or every rank told")
    return counts
