"""The measuring protocol: gate first, then interleaved rounds whose times are the slowest rank's.

Per iteration: a barrier (on a GPU also a flush of the L2 cache), then the op between two clock readings. On a GPU the
stream spins ahead of the barrier, for longer than the host took to issue the call in the first round: the GPU's work is
timed, and not the launches. Rounds in which the host took longer than the spin are counted (`Timing.late_rounds`): a
call that waits for the GPU always does.

The variants take turns within each round, starting one further every round, so drift affects all alike.
Rank 0 broadcasts the number of rounds: ranks that decide alone run different numbers and hang. An iteration's time is
the maximum over ranks. Every round is stored, with the median and the 20th and 80th percentiles. The clock stops when
everything that the op returned is finished (`operands.finished`), whichever variant it is.

The time includes the barrier's skew: measured after a gloo barrier, 16 us for 2 ranks on 2 cores, 90 us for 4 ranks.
"""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp import torch_private

from .cases import BOUNDS, OWN
from .intervals import Timing
from .operands import Results, Workload, finished, is_unfinished
from .providers import Missing

MIN_ROUNDS, MAX_ROUNDS = 5, 50
# The gate has run everything once, so a first round that takes this long counts.
KEPT_SECONDS = 0.5
# Three rounds are enough if a round takes this long.
LONG_SECONDS, LONG_ROUNDS = 2.0, 3
# Ranks that fail in the same call fail within this time of each other.
AGREE_SECONDS = 3.0
# The spin before a GPU's first reading: cycles of a millisecond at 2 GHz; milliseconds in the first round; from then on
# twice the host's time in that round, within limits.
_CYCLES_PER_MS, FIRST_MS, LEAST_MS, MOST_MS = 2_000_000, 10.0, 0.25, 100.0

# Number of failures of a variant in a group: ranks count alike as long as they fail together.
_failures: Counter[tuple[str, str]] = Counter()


class ProviderFailed(RuntimeError):
    """A provider raised on this rank but not on all, so ranks are out of step. Names the provider, case and rank."""


@dataclass(frozen=True)
class Verdict:
    """A variant's check, the worst over ranks. `error` is empty if every rank passed.

    missing: why a provider could not run after all, as its ranks found; it was not checked then.
    """

    max_error: float = 0.0
    error_ratio: float = 0.0
    error: str = ""
    missing: str = ""

    @classmethod
    def worst(cls, checks: Sequence[tuple[float, float]]) -> Verdict:
        """Return the worst of several passed checks: (largest error, largest error / allowed error) each."""
        return cls(max(error for error, _ in checks), max(ratio for _, ratio in checks))


_UNCOUNTED = nullcontext()


def gate(
    problem: Workload, variants: Sequence[str], group: ProcessGroup, direction: str = "forward", *, once: bool = False,
    counted: AbstractContextManager[object] = _UNCOUNTED,
) -> dict[str, Verdict]:  # fmt: skip
    """Run each variant on the real operands and check its results; all ranks return the same verdicts.

    A result is checked as it is when the call returns: one that is still being written, or waited for, is refused.

    Variants run twice unless `once`, as flags and buffers left by a first call may break a second call. Each call is in
    the context `counted`.
    `ProviderFailed` if a provider raises on some of the ranks, as the ranks are then out of step.
    """
    verdicts = {}
    for variant in variants:
        results: list[Results] = []
        try:
            run = problem.runner(variant, direction)
            # All calls come before the first check: a rank with a wrong result must not leave the others waiting.
            for _ in range(1 if once or variant in BOUNDS else 2):
                with counted:
                    out = run()
                results.append(_copied(out))
                del out
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if variant not in OWN and not _all_failed(group, variant):
                raise ProviderFailed(
                    f"{variant} of {problem.case}, {direction}, rank {problem.rank}: {text}"
                ) from error
            verdicts[variant] = _worst(
                Verdict(missing=str(error)) if isinstance(error, Missing) else Verdict(error=text), group
            )
            continue
        try:
            checks = [problem.check(variant, result, direction) for result in results]
            own = Verdict.worst(checks)
        except AssertionError as error:
            own = Verdict(error=str(error))
        except Exception as error:
            own = Verdict(error=f"{type(error).__name__}: {error}")
        del results
        verdicts[variant] = _worst(own, group)
    return verdicts


def _copied(results: Any) -> Any:
    # Copy each tensor as it is when the call returns. What is written later, or by the next call, does not count.
    if isinstance(results, (tuple, list)):
        return type(results)([_copied(each) for each in results])
    return results.clone() if isinstance(results, Tensor) and not is_unfinished(results) else results


def _worst(own: Verdict, group: ProcessGroup) -> Verdict:
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, own, group=group)
    failed = [verdict for verdict in everyone if verdict.error or verdict.missing]
    return failed[0] if failed else Verdict.worst([(each.max_error, each.error_ratio) for each in everyone])


def _all_failed(group: ProcessGroup, variant: str) -> bool:
    # Return whether every rank reports this failure in time. Ranks use the group's store: a rank that has not failed
    # may be in a collective of the provider, which would match a collective started here.
    store = torch_private.store_of(group)
    number = _failures[group.group_name, variant] = _failures[group.group_name, variant] + 1
    key = f"fusedtp.bench failed {variant} {number}"
    deadline = time.monotonic() + AGREE_SECONDS
    count = store.add(key, 1)
    while count < group.size() and time.monotonic() < deadline:
        time.sleep(0.01)
        count = store.add(key, 0)
    return int(count) >= group.size()


def measure_checked(
    problem: Workload,
    runners: Mapping[str, Callable[[], Any]],
    group: ProcessGroup,
    direction: str,
    *,
    seconds: float = 1.0,
    rounds: int | None = None,
    before: Callable[[str], None] = lambda name: None,
) -> dict[str, tuple[Timing, Verdict]]:
    """Time variants that have passed the gate, and check what they return meanwhile; collective, as `measure`.

    The operands change in place before each round, so a result that was kept, or not computed, is wrong. A few rows of
    each result are checked in every round, and the whole result in the last. This is outside of the clock.
    """
    wrong: dict[str, str] = {}
    checks: dict[str, tuple[float, float]] = {}
    # The same rows are checked on all ranks.
    places = random.Random(problem.case.seed)

    def after(name: str, results: Any, is_last: bool) -> None:
        place = places.random()
        try:
            if is_last:
                checks[name] = problem.check(name, results, direction)
            else:
                problem.glance(name, results, direction, place)
        except Exception as error:
            text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            wrong.setdefault(name, f"right at first, but not in the timed rounds: {text}")

    timings = measure(
        runners, group, problem.device, seconds=seconds, rounds=rounds, before=before, after=after,
        turn=lambda: problem.turn(direction),
    )  # fmt: skip
    return {
        name: (timing, _worst(Verdict(error=wrong[name]) if name in wrong else Verdict.worst([checks[name]]), group))
        for name, timing in timings.items()
    }


def measure(
    runners: Mapping[str, Callable[[], object]],
    group: ProcessGroup | None,
    device: torch.device,
    *,
    seconds: float = 1.0,
    rounds: int | None = None,
    before: Callable[[str], None] = lambda name: None,
    after: Callable[[str, Any, bool], None] = lambda name, result, is_last: None,
    turn: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time the runners; all ranks of the group call this with the same names and get the same numbers.

    - `seconds`: time to spend. Rank 0 derives the number of rounds from it (5 to 50), after a first round that does not
      count. A first round of half a second or more counts; 3 rounds of 2 seconds or more are enough.
    - `rounds`: fixes the number of rounds instead.
    - `before`: called with a runner's name ahead of each of its iterations.
    - `after`: called with the name, the finished result, and whether it is the runner's last, outside of the clock.
    - `turn`: called ahead of each round.
    """
    if not runners:
        return {}
    clock = _CudaClock(group, device, tuple(runners)) if device.type == "cuda" else _HostClock(group)
    names = list(runners)

    spent = 0.0

    def iteration(name: str, is_last: bool) -> tuple[float, float]:
        nonlocal spent
        before(name)
        begin = time.perf_counter()
        *times, result = clock.iteration(name, runners[name])
        spent += time.perf_counter() - begin
        after(name, result, is_last)
        # Freeing a large result returns pages to the system, which is not part of the op.
        del result
        return times[0], times[1]

    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        turn()
        first = torch.tensor([iteration(name, False) for name in names], dtype=torch.float64)
        # On a GPU a round takes longer than its calls: spins and flushes are part of it.
        if device.type != "cuda":
            spent = float(first[:, 0].sum()) / 1e3
        # In the first round spins are longer.
        saved = clock.size([float(host_ms) for host_ms in _slowest(first[:, 1], group, device)])
        spent = max(spent - saved, 1e-9)
        count, counted = _agree_on_rounds(spent, seconds, rounds, group, device)
        # By runner and round: milliseconds of the call, and of the host that issued it.
        times = torch.empty(len(names), count, 2, dtype=torch.float64)
        times[:, 0] = first
        for place in range(counted, count):
            turn()
            for step in range(len(names)):
                which = (place + step) % len(names)
                times[which, place] = torch.tensor(iteration(names[which], place == count - 1))
    finally:
        if enabled:
            gc.enable()
    found = {}
    for name, slowest in zip(names, _slowest(times, group, device), strict=True):
        timing = Timing.of(slowest[:, 0].tolist())
        found[name] = clock.told(name, timing, slowest[:, 1])
    return found


def _slowest(times: Tensor, group: ProcessGroup | None, device: torch.device) -> Tensor:
    slowest = times.to(device)
    if group is not None:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return slowest.cpu()


def _agree_on_rounds(
    round_seconds: float, seconds: float, rounds: int | None, group: ProcessGroup | None, device: torch.device
) -> tuple[int, int]:
    # Return (rounds, 1 if the first round counts, else 0), as rank 0 decides.
    is_long, is_kept = round_seconds >= LONG_SECONDS, round_seconds >= KEPT_SECONDS
    fitting = round(seconds / max(round_seconds, 1e-9))
    own = rounds or min(MAX_ROUNDS, max(LONG_ROUNDS if is_long else MIN_ROUNDS, fitting))
    # At least one round follows, as the last one is known to be the last.
    is_kept = is_kept and own > 1
    if group is None:
        return own, int(is_kept)
    decided = torch.tensor([own, int(is_kept)], device=device)
    dist.broadcast(decided, dist.get_global_rank(group, 0), group=group)
    count, counted = decided.tolist()
    return int(count), int(counted)


def spin(ms: float) -> None:
    """Let the current stream of a GPU spin for so many milliseconds, or longer."""
    torch_private.spin(int(ms * _CYCLES_PER_MS))


class _HostClock:
    """Wall time between two readings, for ops that have ended when they return."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group

    def iteration(self, name: str, run: Callable[[], object]) -> tuple[float, float, Any]:
        """Return the milliseconds of one call on this rank, twice, and what it returned, finished."""
        if self._group is not None:
            dist.barrier(group=self._group)
        start = time.perf_counter()
        result = finished(run())
        elapsed_ms = (time.perf_counter() - start) * 1e3
        return elapsed_ms, elapsed_ms, result

    def size(self, host_ms: Sequence[float]) -> float:
        """Take the host's times of the first round; return 0, as later rounds take as long."""
        return 0.0

    def told(self, name: str, timing: Timing, host_ms: Tensor) -> Timing:
        """Return the timing as it is."""
        return timing


class _CudaClock:
    """Device time between two events, with a cold L2 cache, behind a spin and a barrier on the stream."""

    def __init__(self, group: ProcessGroup | None, device: torch.device, names: Sequence[str]) -> None:
        self._group, self._spin_ms = group, dict.fromkeys(names, FIRST_MS)
        # The barrier of another backend keeps the host until all before it on the stream is over.
        self._is_on_stream = group is not None and "nccl" in dist.get_backend_config(group)
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(2 * cache_bytes, dtype=torch.int8, device=device)
        self._token = torch.zeros(1, device=device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def iteration(self, name: str, run: Callable[[], object]) -> tuple[float, float, Any]:
        """Return the milliseconds of one call, and of the host that issued it, and what it returned, finished."""
        self._flush.zero_()
        if not self._is_on_stream:
            self._barrier()
        spin(self._spin_ms[name])
        # Behind the spin, whose end depends on a GPU's clock.
        if self._is_on_stream:
            self._barrier()
        begin = time.perf_counter()
        self._start.record()
        result = finished(run())
        self._end.record()
        host_ms = (time.perf_counter() - begin) * 1e3
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)), host_ms, result

    def _barrier(self) -> None:
        if self._group is not None:
            dist.all_reduce(self._token, group=self._group)

    def size(self, host_ms: Sequence[float]) -> float:
        """Set the spins by the slowest host's times of the first round; return the seconds that a round saves by it."""
        before = sum(self._spin_ms.values())
        for name, each in zip(self._spin_ms, host_ms, strict=True):
            self._spin_ms[name] = min(MOST_MS, max(LEAST_MS, 2 * each))
        return (before - sum(self._spin_ms.values())) / 1e3

    def told(self, name: str, timing: Timing, host_ms: Tensor) -> Timing:
        """Return the timing with the host's median time, and the number of rounds in which it exceeds the spin."""
        late = int((host_ms > self._spin_ms[name]).sum())
        return replace(timing, host_us=float(host_ms.median()) * 1e3, late_rounds=late)
