"""Made-up rounds of the tracked cases, as a launch of the benchmarks returns them, with known true ratios."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from fusedtp.bench import regress
from fusedtp.bench.machine import Machine
from fusedtp.bench.regress import Launch, Tracked

HERE = Machine("cpu-some-2c", "Some", 2, "", 0, "shared memory", "", "3.11", "2.13", "3.7", "0123", False)
CASES = regress.cases(0)
IDS = [each.id(schedule) for each in CASES for schedule in regress.schedules(0)]
TRUE = {key: 1.5 + 0.1 * number for number, key in enumerate(IDS)}
RATIOS = {f"{key} / matmul": ratio for key, ratio in TRUE.items()} | {
    f"{each.id('decomposed')} / unfused": TRUE[each.id("decomposed")] / TRUE[each.id("unfused")] for each in CASES
}


def noisy(slower: Mapping[str, float], seed: int, num_rounds: int = 32, noise: float = 0.2) -> Launch:
    """Return rounds as on a busy machine, some of them disturbed; `slower`: factor by schedule or id."""
    generator = random.Random(seed)

    def times_of(each: Tracked) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in ("matmul", *regress.schedules(0))}
        for _ in range(num_rounds):
            times["matmul"].append(generator.uniform(2e-3, 4e-3))
            for name in regress.schedules(0):
                key = each.id(name)
                factor = slower.get(key, slower.get(name, 1.0)) * (3 if generator.random() < 0.06 else 1)
                ratio = TRUE[key] * factor * generator.lognormvariate(0, noise)
                times[name].append(times["matmul"][-1] * ratio)
        return times

    return {each: times_of(each) for each in CASES}


def samples(launches: Sequence[Launch]) -> dict[str, list[float]]:
    return regress.samples_of(launches, regress.schedules(0))
