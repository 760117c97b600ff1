"""Sequences of mixed ops across two groups that share ranks, in an order that is the same on all of them.

Either ranks 0, 1, 2 and ranks 1, 2, 3; or the rows and the columns of a 2 x 2 mesh, as of tensor and data parallelism.
Each group has a workspace of its own, with epochs and halves that move at their own pace. FUSEDTP_SOAK=large (nox -s
soak) takes 1,000 examples.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench.ranks import RankPool

from .harness import LARGE
from .soak.endurance import delay
from .soak.mixed import Call, Operands, draw

EXAMPLES = 1000 if LARGE else 16
# Examples in one call of the pool.
BATCH = 20
# Each layout's two groups, as lists of ranks; of a mesh each axis has two, and every rank is in one of them.
LAYOUTS = {
    "overlapping": ([[0, 1, 2]], [[1, 2, 3]]),
    "mesh": ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
}


@dataclass(frozen=True)
class Example:
    """Calls in their order, each on the first or the second group."""

    layout: str
    calls: tuple[tuple[int, Call], ...]


@st.composite
def sequences(draw_: st.DrawFn) -> Example:
    layout = draw_(st.sampled_from(list(LAYOUTS)))
    world_size = len(LAYOUTS[layout][0][0])
    seeds = draw_(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2**32)), min_size=2, max_size=7))
    return Example(layout, tuple((which, draw(random.Random(seed), world_size)) for which, seed in seeds))


def run_examples(world: ProcessGroup, first: int, examples: Sequence[Example]) -> None:
    """All calls of an example in a row, late by chance, then all checks."""
    # Making a group is collective over all ranks, in one order.
    made = {
        tuple(ranks): dist.new_group(ranks) for axes in LAYOUTS.values() for axis in axes for ranks in axis
    }  # fmt: skip
    for number, example in enumerate(examples, first):
        mine = [
            next((made[tuple(ranks)] for ranks in axis if world.rank() in ranks), None)
            for axis in LAYOUTS[example.layout]
        ]
        issued = []
        for index, (which, call) in enumerate(example.calls):
            group = mine[which]
            if group is not None:
                operands = Operands(call, group.rank())
                time.sleep(delay(number, index, world.rank()))
                issued.append((index, operands, operands.run(group)))
        for index, operands, results in issued:
            try:
                operands.check(results)
            except AssertionError as error:
                error.add_note(f"call {index} on rank {world.rank()} of the whole, in example {number}: {example}")
                raise
    for group in made.values():
        if isinstance(group, ProcessGroup):
            fusedtp.destroy(group)
            dist.destroy_process_group(group)


def test_sequences_across_two_groups(pool: RankPool) -> None:
    examples: list[Example] = []

    @settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(sequences())
    def collect(example: Example) -> None:
        examples.append(example)

    collect()
    assert len(examples) == EXAMPLES
    assert {example.layout for example in examples} == set(LAYOUTS)
    for first in range(0, EXAMPLES, BATCH):
        pool.run(run_examples, first, examples[first : first + BATCH], timeout=600.0)
