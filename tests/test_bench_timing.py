"""Ranks with different times run the same rounds, and the slowest rank's time is reported."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fusedtp.bench import timing
from fusedtp.bench.intervals import Timing
from fusedtp.bench.operands import finished, is_unfinished
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.timing import LONG_ROUNDS, MAX_ROUNDS, MIN_ROUNDS, measure

CPU = torch.device("cpu")


def sleeping(group: ProcessGroup, rounds: int | None, more: float = 0.0) -> tuple[dict[str, Timing], list[str]]:
    """Measure with rank 1 five times slower than rank 0; return timings and the order of calls.

    more: seconds that the first round takes longer on rank 1.
    """
    calls: list[str] = []

    def runner(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            slow = dist.get_rank(group) == 1
            time.sleep(seconds * (5 if slow else 1) + (more / 2 if slow and len(calls) <= 4 else 0))

        return run

    runners = {"a": runner("a", 0.001), "b": runner("b", 0.002)}
    # More than five rounds fit also if a busy machine delays the first one by a tenth of a second.
    return measure(runners, group, CPU, seconds=0.6, rounds=rounds), calls


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
    """Measure a first round of 3 ms on rank 0 and more than 200 ms on rank 1, with this limit of long rounds."""
    with mock.patch.multiple(timing, KEPT_SECONDS=seconds, LONG_SECONDS=seconds):
        timings, calls = sleeping(group, None, more=0.2)
    return timings["a"].rounds, calls


# Long on rank 1 alone: rank 1 must not keep the first round, nor stop after three. Long on both: all rounds count.
@pytest.mark.parametrize(("seconds", "kept"), [(0.2, 0), (0.001, 1)])
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


class Event:
    """Stand-in for an event of a GPU, on the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


def spinning(group: ProcessGroup) -> float:
    """Return the least time of an op that waits for its peer, where rank 1's spin is 40 ms longer."""

    def spin(ms: float) -> None:
        time.sleep(0.04 * group.rank())

    with (
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=mock.Mock(L2_cache_size=64)),
        mock.patch.object(timing, "spin", spin),
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
    ):
        clock = timing._CudaClock(group, CPU, ["op"])
        return min(clock.iteration("op", lambda: dist.barrier(group=group))[0] for _ in range(5))


def test_a_spin_that_a_slow_clock_makes_longer_is_no_part_of_the_time(pool: RankPool) -> None:
    assert max(pool.run(spinning, world_size=2)) < 20


def test_rounds_on_a_gpu_fill_the_time_by_later_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of 12 calls takes 142 ms at first, and 25 ms with the spins that are set by it: 41 fit into a second."""
    now = [0.0]

    class Clock(timing._CudaClock):
        def __init__(self, group: object, device: object, names: Sequence[str]) -> None:
            self._spin_ms = dict.fromkeys(names, timing.FIRST_MS)

        def iteration(self, name: str, run: Callable[[], object]) -> tuple[float, float, Any]:
            now[0] += (0.3 + self._spin_ms[name] + 1.5) / 1e3
            return 1.5, 0.06, run()

    monkeypatch.setattr(timing, "_CudaClock", Clock)
    monkeypatch.setattr(timing, "time", mock.Mock(perf_counter=lambda: now[0]))
    monkeypatch.setattr(timing, "_slowest", lambda times, *_: times)
    found = measure(dict.fromkeys("abcdefghijkl", lambda: None), None, torch.device("cuda"), seconds=1.0)
    assert {each.rounds for each in found.values()} == {41}


LATE_SECONDS = 0.02


def asynchronous(group: ProcessGroup) -> dict[str, Any]:
    """Return closures whose results rank 1 delays, by the kind of value that they return."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, ones = DeviceMesh.from_group(group, "cpu"), torch.ones(2, 3)
    term = DTensor.from_local(ones, mesh, [Partial()], run_check=False)

    def reduced() -> torch.Tensor:
        return functional.all_reduce(ones, "sum", group)

    def leaf() -> torch.Tensor:
        # A gradient, as torch's styles leave it.
        x = ones.clone().requires_grad_()
        x.grad = reduced()
        return x

    def future() -> Any:
        found: Any = torch.futures.Future()
        threading.Timer(LATE_SECONDS, found.set_result, (ones * group.size(),)).start()
        return found

    return {
        "tensor": lambda: (reduced(),),
        "nested": lambda: [{"y": (reduced(),)}, reduced()],
        "dtensor": lambda: term.redistribute(placements=[Replicate()], async_op=True),
        "gradient": lambda: {"dx": leaf().grad},
        "work": lambda: dist.all_reduce(ones.clone(), group=group, async_op=True),
        "future": future,
    }


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dist.Work):
        return []
    return [each for part in (value.values() if isinstance(value, dict) else value) for each in tensors_of(part)]


def waits_for_each_kind(group: ProcessGroup) -> dict[str, tuple[float, list[tuple[str, list[Any]]]]]:
    """Return for each closure its time, where rank 1 begins each call late, and the tensors once `finished`."""
    clock, found = timing._HostClock(group), {}
    for name, run in asynchronous(group).items():

        def late(run: Callable[[], object] = run) -> object:
            if group.rank() == 1:
                time.sleep(LATE_SECONDS)
            return run()

        value = finished(run())
        assert not any(is_unfinished(each) for each in tensors_of(value))
        told = [(type(each).__name__, each.tolist()) for each in tensors_of(value)]
        found[name] = min(clock.iteration(name, late)[0] for _ in range(3)), told
    return found


def test_the_clock_stops_when_every_part_of_a_result_is_finished(pool: RankPool) -> None:
    for found in pool.run(waits_for_each_kind, world_size=2):
        for name, (own_ms, told) in found.items():
            assert told or name == "work"
            assert all(each == ("Tensor", [[2.0] * 3] * 2) for each in told), (name, told)
            # On rank 0 this is the wait for rank 1.
            assert own_ms >= 0.8e3 * LATE_SECONDS, name
