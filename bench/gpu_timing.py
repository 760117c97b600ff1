"""Times on one device: each variant by itself, in turns with the others, with a cold cache and inputs that rotate.

Before each call the device's L2 cache is overwritten, and the stream spins until the host has issued the call: what is
between the two events is the device's work, not the time a launch takes. Reported are the median and the 20th and 80th
percentiles over the rounds. Interpreted kernels have a host's clock instead, which only a dry run shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from .timing import Timing

Call = Callable[[], object]

WARM_UP, MIN_ROUNDS, MAX_ROUNDS = 3, 10, 60
# Long enough for the host to issue a launch and two events; about 0.3 ms at 1.5 GHz.
_SPIN_CYCLES = 500_000


class Timer(Protocol):
    """Milliseconds of the calls, one after another, in their order."""

    def times(self, calls: Sequence[Call]) -> list[float]: ...


class DeviceTimer:
    """By the device's events."""

    def __init__(self, device: torch.device) -> None:
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(2 * cache_bytes, dtype=torch.int8, device=device)

    def times(self, calls: Sequence[Call]) -> list[float]:
        """See `Timer`."""
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
        for call, (begin, end) in zip(calls, marks, strict=True):
            self._flush.zero_()
            torch.cuda._sleep(_SPIN_CYCLES)
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [float(begin.elapsed_time(end)) for begin, end in marks]


class HostTimer:
    """By the host's clock."""

    def times(self, calls: Sequence[Call]) -> list[float]:
        """See `Timer`."""
        found = []
        for call in calls:
            begin = time.perf_counter()
            call()
            found.append((time.perf_counter() - begin) * 1e3)
        return found


def timer(device: torch.device) -> Timer:
    """The one for this device."""
    return DeviceTimer(device) if device.type == "cuda" else HostTimer()


def measure(variants: Mapping[str, Sequence[Call]], clock: Timer, seconds: float) -> dict[str, Timing]:
    """The time of each variant, whose calls are the same on different inputs and take turns.

    As many rounds as `seconds` allows, 10 to 60; one where it is 0.
    """
    names, turns = list(variants), 0

    def one_round() -> list[float]:
        nonlocal turns
        # Each round begins one variant further on.
        order = [(turns + step) % len(names) for step in range(len(names))]
        calls = [variants[names[which]] for which in order]
        found = clock.times([each[turns % len(each)] for each in calls])
        turns += 1
        return [time for _, time in sorted(zip(order, found, strict=True))]

    first = 1e-3 * sum([one_round() for _ in range(WARM_UP if seconds else 1)][-1])
    count = min(MAX_ROUNDS, max(MIN_ROUNDS, round(seconds / max(first, 1e-9)))) if seconds else 1
    by_name = zip(names, zip(*[one_round() for _ in range(count)], strict=True), strict=True)
    return {name: Timing.of(times) for name, times in by_name}


class Marks:
    """Milliseconds between marks that wait for all of some streams; on a CPU, which has none, between two readings."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams
        self._events: list[torch.cuda.Event] = []
        self._readings: list[float] = []

    def mark(self) -> None:
        """Here."""
        if not self._streams:
            self._readings.append(time.perf_counter() * 1e3)
            return
        main = torch.cuda.current_stream()
        for stream in self._streams:
            main.wait_stream(stream)
        event = torch.cuda.Event(enable_timing=True)
        event.record(main)
        self._events.append(event)
        for stream in self._streams:
            stream.wait_stream(main)

    def lapses(self) -> list[float]:
        """Between each mark and the next; waits for the device."""
        if not self._streams:
            return [two - one for one, two in zip(self._readings, self._readings[1:], strict=False)]
        self._events[-1].synchronize()
        return [one.elapsed_time(two) for one, two in zip(self._events, self._events[1:], strict=False)]
