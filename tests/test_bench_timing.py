"""Ranks with different times run the same rounds, and the slowest rank's time is reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fusedtp.bench import timing
from fusedtp.bench.intervals import Timing
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.timing import LONG_ROUNDS, MAX_ROUNDS, MIN_ROUNDS, measure

CPU = torch.device("cpu")


def sleeping(group: ProcessGroup, rounds: int | None) -> tuple[dict[str, Timing], list[str]]:
    """Measure with rank 1 five times slower than rank 0; return timings and the order of calls."""
    calls: list[str] = []

    def runner(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            time.sleep(seconds * (5 if dist.get_rank(group) == 1 else 1))

        return run

    runners = {"a": runner("a", 0.001), "b": runner("b", 0.002)}
    return measure(runners, group, CPU, seconds=0.12, rounds=rounds), calls


@pytest.mark.parametrize("rounds", [None, 7])
def test_ranks_run_the_same_rounds_and_report_the_slowest(pool: RankPool, rounds: int | None) -> None:
    (first, calls), (second, other_calls) = pool.run(sleeping, rounds, world_size=2)
    assert first == second
    assert calls == other_calls
    assert {timing.rounds for timing in first.values()} == {(len(calls) - 2) // 2}
    # a round takes at least 3 ms on rank 0, which decides; rank 1 alone would run fewer rounds
    assert first["a"].rounds == rounds if rounds else MIN_ROUNDS < first["a"].rounds <= MAX_ROUNDS
    # sleep never ends early, so each time is at least rank 1's
    assert first["a"].p20_ms >= 5
    assert first["b"].p20_ms >= 10
    assert all(timing.p20_ms <= timing.median_ms <= timing.p80_ms <= timing.total_ms for timing in first.values())


def test_variants_take_turns(pool: RankPool) -> None:
    ((_, calls),) = pool.run(sleeping, 4, world_size=1)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab" + "ba"


def sleeping_long(group: ProcessGroup, seconds: float) -> tuple[int, list[str]]:
    """Measure rounds of 3 ms on rank 0 and 15 ms on rank 1; `seconds` is the limit of long rounds, which are kept."""
    with mock.patch.multiple(timing, KEPT_SECONDS=seconds, LONG_SECONDS=seconds):
        timings, calls = sleeping(group, None)
    return timings["a"].rounds, calls


# Long on rank 1 alone: rank 1 must not keep the first round, nor stop after three. Long on both: all rounds count.
@pytest.mark.parametrize(("seconds", "kept"), [(0.01, 0), (0.001, 1)])
def test_rank_0_decides_for_all_whether_a_round_is_long(pool: RankPool, seconds: float, kept: int) -> None:
    (rounds, calls), others = pool.run(sleeping_long, seconds, world_size=2)
    assert (rounds, calls) == others
    assert MIN_ROUNDS < rounds <= MAX_ROUNDS
    assert len(calls) == 2 * (rounds + 1 - kept)


def long_rounds(group: ProcessGroup, long_seconds: float) -> tuple[int, int]:
    calls: list[int] = []
    with mock.patch.multiple(timing, KEPT_SECONDS=0.01, LONG_SECONDS=long_seconds):
        found = measure({"a": lambda: (calls.append(1), time.sleep(0.012))}, group, CPU, seconds=0.0)
    return found["a"].rounds, len(calls)


def test_the_least_number_of_rounds(pool: RankPool) -> None:
    assert pool.run(long_rounds, 0.01, world_size=2) == [(LONG_ROUNDS, LONG_ROUNDS)] * 2
    assert pool.run(long_rounds, 10.0, world_size=2) == [(MIN_ROUNDS, MIN_ROUNDS)] * 2
