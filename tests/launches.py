"""Launches of the tracked cases: made up, with known true ratios, and recorded."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from fusedtp.bench import regress
from fusedtp.machine import Machine

HERE = Machine("cpu-some-2c", "Some", 2, "", 0, "shared memory", "", "3.11", "2.13", "3.7", "0123", False)
CASES = regress.cases(0)
KEYS = regress.keys_of(CASES, regress.schedules(0))
IDS = [each.id(schedule) for each in CASES for schedule in regress.schedules(0)]
# By case and schedule, a number a launch: unchanged code on a shared machine with two cores, over one baseline.
RECORDED = (
    (1.055, 1.025, 1.036, 1.002, 1.012),  # all_gather_matmul-1024x1024x1024-forward-unfused
    (1.059, 0.988, 0.997, 0.979, 0.984),  # all_gather_matmul-1024x1024x1024-forward-decomposed
    (1.031, 0.954, 0.851, 0.897, 1.037),  # all_gather_matmul-512x512x512-both-unfused
    (1.066, 0.899, 1.077, 0.968, 1.068),  # all_gather_matmul-512x512x512-both-decomposed
    (1.051, 0.980, 0.972, 0.974, 0.961),  # matmul_reduce_scatter-1024x1024x1024-forward-unfused
    (0.936, 0.992, 1.065, 1.014, 1.067),  # matmul_reduce_scatter-1024x1024x1024-forward-decomposed
    (0.906, 0.884, 1.072, 0.854, 0.874),  # matmul_reduce_scatter-512x512x512-both-unfused
    (0.957, 0.880, 0.987, 0.980, 0.817),  # matmul_reduce_scatter-512x512x512-both-decomposed
    (0.988, 0.991, 0.920, 0.904, 0.924),  # matmul_all_reduce-1024x1024x1024-forward-unfused
    (0.957, 0.935, 1.043, 1.017, 1.005),  # matmul_all_reduce-1024x1024x1024-forward-decomposed
    (1.002, 0.958, 1.028, 0.968, 0.891),  # matmul_all_reduce-512x512x512-both-unfused
    (1.085, 0.993, 0.904, 0.975, 1.047),  # matmul_all_reduce-512x512x512-both-decomposed
)


def recorded(count: int, slower: Mapping[str, float], seed: int) -> dict[str, list[float]]:
    """Return so many of the recorded launches by key, drawn with repetition. slower: factor by schedule."""
    by_id = dict(zip(IDS, RECORDED, strict=True))
    drawn = random.Random(seed).choices(range(len(RECORDED[0])), k=count)
    return {
        key: [by_id[each.id(schedule)][at] * slower.get(schedule, 1.0) / slower.get(reference, 1.0) for at in drawn]
        for key, (each, schedule, reference) in KEYS.items()
    }


def noisy(
    slower: Mapping[str, float], seed: int, count: int, spread: float = 0.03, keys: regress.Keys = KEYS
) -> dict[str, list[float]]:
    """Return launches whose times differ by `spread`, by key; `slower`: factor by schedule or id."""
    generator = random.Random(seed)
    names = {schedule for _, schedule, _ in keys.values()} | {"matmul"}
    times: dict[tuple[regress.Tracked, str], Sequence[float]] = {}
    for each in {each: None for each, _, _ in keys.values()}:
        for number, name in enumerate(sorted(names)):
            factor = (1 + number) * slower.get(each.id(name), slower.get(name, 1.0))
            times[each, name] = [factor * generator.lognormvariate(0, spread) for _ in range(count)]
    return {
        key: [mine / its for mine, its in zip(times[each, schedule], times[each, reference], strict=True)]
        for key, (each, schedule, reference) in keys.items()
    }
