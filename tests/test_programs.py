"""Random programs, 400 calls on two ranks: every number is right, or every rank is told. Planted bugs are found.

`nox -s soak` runs 100,000 calls. A failure names its program, and `nox -s soak -- --programs --seed S --first N --calls
40` repeats it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch.distributed import ProcessGroup

from fusedtp.bench.ranks import RankError, RankPool
from fusedtp.workspaces import failures
from fusedtp.workspaces.steps import HostSteps

from .soak.mixed import OPS
from .soak.performing import CANNOT_GROW, perform, wrong
from .soak.programs import AXES, SLOW, STEADY, STEPS, WRONG, program
from .soak.runs import WEIGHTS, run_programs

SEED, CALLS = 20, 400


@pytest.fixture(scope="module")
def own_pool() -> Iterator[RankPool]:
    """Start a separate pool, as programs may break their ranks on purpose."""
    with RankPool(2, timeout=300.0, gloo_workers=1) as ranks:
        yield ranks


def test_calls_of_random_programs(own_pool: RankPool) -> None:
    counts, batches = Counter[str](), 0
    # A signal's moment is chance, and a batch may have none that a peer notices.
    while not counts["line: told"] + counts["signal: told"] and batches < 5:
        counts += run_programs(own_pool, CALLS, SEED + batches, slow=False)
        batches += 1
    came = Counter({what: count for what, count in counts.items() if "on a rank" not in what})
    # Two ranks, each of which is in every group.
    assert came.total() == 2 * CALLS * batches
    assert {what.partition(":")[0] for what in came} == {*STEADY, *WRONG}
    # A disagreement is always told. An interruption may go unnoticed, and so may a limit if no memory was needed.
    assert not came["differs: right"]
    assert came["limit: told"]
    for kind in ("line", "signal"):
        assert came[f"{kind}: right"]
    assert came["line: told"] + came["signal: told"]
    assert (
        counts["differs, on a rank: RanksDisagree"] + counts[f"differs, on a rank: {CANNOT_GROW}"]
        > counts["differs, on a rank: PeerTimeout"]
    )


def test_every_kind_of_step_is_drawn_alike_on_every_rank() -> None:
    for world_size in AXES:
        drawn = [program(7, number, world_size, slow=True) for number in range(100)]
        assert drawn == [program(7, number, world_size, slow=True) for number in range(100)]
        steps = [step for steps in drawn for step in steps]
        assert len(steps) == 100 * STEPS
        assert {step.kind for step in steps} == {*STEADY, *WRONG, *SLOW}
        assert {step.call.op for step in steps} == set(OPS)
        assert {step.mode for step in steps} == {"grad", "no_grad", "inference", "made in inference"}
        assert {step.call.schedule for step in steps} == set(WEIGHTS)
        for step in steps:
            assert all(len(sizes) == len(AXES[world_size][step.axis][0]) for sizes in step.call.sizes)
            # A differing rank has another call.
            assert step.kind != "differs" or step.other != step.call


def planted(group: ProcessGroup, what: str, *args: Any) -> None:
    """Run programs on ranks that do not compare their calls, or do not wait for each other either."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(HostSteps, "_disagrees", return_value=False))
        # Not after a timeout either.
        stack.enter_context(mock.patch.object(failures, "differing_ranks", return_value=[]))
        if what == "not waited for":
            stack.enter_context(mock.patch.object(HostSteps, "wait"))
        perform(group, *args)


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("not compared", "a number though the ranks disagree|a wrong number"),
        ("not waited for", "(y|d[xwb]) of Call"),
    ],
)
def test_a_planted_bug_is_found(own_pool: RankPool, what: str, fault: str) -> None:
    with pytest.raises(RankError, match=fault) as caught:
        own_pool.run(planted, what, SEED, 0, 20, dict(WEIGHTS), False, timeout=100.0)
    # The failing rank; others may have been left waiting.
    assert f"of seed {SEED}, behind" in str(caught.value)


RIGHT, TOLD = ["right", "right"], ["right", "PeerTimeout"]


@pytest.mark.parametrize(
    ("kind", "everyone", "fault"),
    [
        ("late", [RIGHT, RIGHT], ""),
        ("late", [TOLD, ["PeerTimeout"]], ""),
        ("late", [RIGHT, TOLD], "an error on some ranks alone"),
        ("line", [["interrupted", "right"], RIGHT], ""),
        ("line", [["interrupted", "wrong: y"], RIGHT], "a wrong number"),
        ("differs", [["RanksDisagree"], ["RanksDisagree"]], ""),
        ("differs", [TOLD, ["RanksDisagree"]], "a number though the ranks disagree"),
    ],
)
def test_what_must_come_of_a_step(kind: str, everyone: list[list[str]], fault: str) -> None:
    (step, *_) = program(1, 1, 2)
    assert wrong(replace(step, kind=kind), everyone) == fault
