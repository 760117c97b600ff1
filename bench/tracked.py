"""What regression tracking measures: times of every schedule and of the matmul alone, taken in turns.

What is tracked are ratios of two times of one round (`timing`), as whatever else the machine does in these milliseconds
meets both. `tests/test_bench.py` measures them, and makes a benchmark of pytest-benchmark of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import TypeAlias

import torch

from .cases import OPS, SHAPES, Case

REFERENCES = ("matmul", "unfused")


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


# Times of every variant, round by round, on one set of ranks.
Launch: TypeAlias = Mapping[Tracked, Mapping[str, Sequence[float]]]


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


def keys_of(tracked: Iterable[Tracked], names: Sequence[str]) -> dict[str, tuple[Tracked, str, str]]:
    """By "id / reference": the case, the schedule and the reference of every ratio."""
    return {
        f"{each.id(schedule)} / {reference}": (each, schedule, reference)
        for each in tracked for schedule in names for reference in REFERENCES if schedule != reference
    }  # fmt: skip


def schedule_means(values: Mapping[str, float]) -> dict[str, float]:
    """From "id / reference" to "schedule / reference": geometric means over the cases."""
    names = {key: key.rpartition("-")[2] for key in values}
    return {name: geometric_mean(values[key] for key in values if names[key] == name) for name in names.values()}


def samples_of(launches: Sequence[Launch], names: Sequence[str]) -> dict[str, list[float]]:
    """By benchmark: every ratio in every round; of each launch the means over cases of a schedule's medians, and, in s,
    of the matmul's.
    """
    found: dict[str, list[float]] = {}
    for launched in launches:
        ratios = {
            key: [mine / its for mine, its in zip(launched[each][schedule], launched[each][reference], strict=True)]
            for key, (each, schedule, reference) in keys_of(launched, names).items()
        }
        alone = geometric_mean(median(times["matmul"]) for times in launched.values())
        means = schedule_means({key: median(values) for key, values in ratios.items()}) | {"matmul": alone}
        for key, values in (ratios | {name: [mean] for name, mean in means.items()}).items():
            found.setdefault(key, []).extend(values)
    return found
