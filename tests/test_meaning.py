"""Ranks that mean different things are told so by default, by every schedule over shared memory: never a wrong number.

The calls are those of `test_agreement`, which makes them in debug mode.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fusedtp.bench import generated
from fusedtp.bench.ranks import RankPool
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import fusedtp
from fusedtp import op
from fusedtp.op import Task
from fusedtp.workspaces import disagreement, meaning
from fusedtp.workspaces.steps import HostSteps

from .test_agreement import CALLS, Here

SECONDS = 20.0
DOCUMENT = Path(__file__).parent.parent / "docs" / "faults.md"
# By schedule, the calls whose difference every rank was told.
TOLD: dict[str, set[str]] = {}
# A bias's values, and what goes through the backend instead, are told in debug mode only.
NOT_TOLD = ("values of a bias", "schedule: `unfused`")


def disagreed(group: ProcessGroup, schedule: str) -> dict[str, tuple[str, float]]:
    """The error of each call and how long it took, after one that is alike everywhere; all destroy what failed."""
    fusedtp.set_timeout(SECONDS, group)
    found = {}
    for name, (call, _) in CALLS.items():
        if name in NOT_TOLD:
            continue
        here = Here(group, schedule=schedule)
        call(here, False)
        begin = time.monotonic()
        try:
            call(here, group.rank() == 1)
        except fusedtp.RanksDisagree as error:
            found[name] = str(error), time.monotonic() - begin
            with pytest.raises(fusedtp.RanksDisagree):
                fusedtp.all_gather(torch.ones(1, 1), group=group, schedule="decomposed")
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}", time.monotonic() - begin
        else:
            found[name] = "a number", 0.0
        fusedtp.destroy(group)
    return found


@pytest.mark.parametrize("schedule", ["decomposed", "fused"])
def test_all_ranks_are_told_who_differs(pool: RankPool, schedule: str) -> None:
    found = pool.run(disagreed, schedule, world_size=3)
    wrong = {
        name: (said, expected)
        for name, (_, expected) in CALLS.items()
        for told in found
        if name in told and expected.split(": rank 1 against")[0] not in (said := told[name][0])
    }
    assert not wrong
    TOLD[schedule] = {name for name in CALLS if all(name in told for told in found)}


REDUCED = Task(op.ALL_REDUCE, ((3, 4),), torch.float32)
GATHERED = Task(op.ALL_GATHER_MATMUL, ((3, 4), (4, 5), None, None), torch.bfloat16, (3, 3))
SUMMED = Task(op.MATMUL_ALL_REDUCE, ((3, 4), (4, 5), None, None, None), torch.bfloat16, norm=op.RMS_NORM, eps=1e-6)
# By field, a task and what else a rank may mean by that one.
OTHERWISE: dict[str, tuple[Task, object]] = {
    "op": (REDUCED, op.ALL_GATHER), "shapes": (REDUCED, ((3, 5),)), "dtype": (REDUCED, torch.bfloat16),
    "sizes": (GATHERED, (3, 4)), "dim": (GATHERED, 1), "transposed": (GATHERED, True), "algorithm": (REDUCED, "ring"),
    "activation": (GATHERED, "relu"), "keeps": (replace(GATHERED, activation="silu"), True),
    "float8": (GATHERED, torch.float8_e4m3fn), "in_blocks": (replace(GATHERED, float8=torch.float8_e4m3fn), True),
    "norm": (SUMMED, op.LAYER_NORM), "eps": (SUMMED, 1e-5), "leaves": (REDUCED, 8), "any_order": (REDUCED, True),
}  # fmt: skip
# Fields that ranks may mean each by itself, and why.
OWN = {"keeps": "a rank keeps its products for its own gradients, and they do not travel"}


@pytest.mark.parametrize("name", [each.name for each in fields(Task)])
def test_every_option_of_a_task_is_compared(name: str) -> None:
    assert name in OTHERWISE, (
        f"Task.{name}: name it in `Task.agreed`, if all ranks must mean it alike, or else say in OWN why not; and give "
        "OTHERWISE a task and another value"
    )
    task, value = OTHERWISE[name]
    one, other = (meaning.of(each, "fused", "cpu") for each in (task, replace(task, **{name: value})))  # type: ignore[arg-type]
    if name in OWN:
        assert one.values == other.values, f"Task.{name} is compared: take it out of OWN"
    else:
        assert one.values != other.values, f"Task.{name}: all ranks must mean it alike, name it in `Task.agreed`"
        assert one.fingerprint != other.fingerprint


def test_all_that_is_said_of_tasks_is_of_a_field() -> None:
    assert OWN.keys() <= OTHERWISE.keys() <= {each.name for each in fields(Task)}


def amid(group: ProcessGroup, late: int) -> tuple[bool, str]:
    """An op that rank `late` is still leaving when the others come to the next one, which rank 1 means otherwise:
    whether the first one is right, and what the second one says.

    Of the others each sends to one peer only, so rank 1 finds out in a wait, and other waits follow.
    """
    fusedtp.set_timeout(SECONDS, group)
    rank, leave = group.rank(), HostSteps.leave

    def leave_late(steps: HostSteps) -> None:
        time.sleep(1.0)
        leave(steps)

    x, w = torch.ones(6, 5), torch.ones(4, 5)
    with mock.patch.object(HostSteps, "leave", leave_late if rank == late else leave):
        y = fusedtp.linear_all_reduce(x, w, group=group, schedule="decomposed")
    call = partial(fusedtp.all_gather_linear, x, w) if rank == 1 else partial(fusedtp.all_reduce, x, algorithm="ring")
    with pytest.raises(fusedtp.RanksDisagree) as caught:
        call(group=group, schedule="fused")
    fusedtp.destroy(group)
    return torch.equal(y, torch.full((6, 4), 5.0 * group.size())), str(caught.value)


@pytest.mark.parametrize("late", [0, 2])
def test_the_op_before_is_right_on_a_rank_that_is_late(pool: RankPool, late: int) -> None:
    found = pool.run(amid, late, world_size=3)
    assert [right for right, _ in found] == [True] * 3
    assert all("rank 1 " in said for _, said in found), found


@pytest.mark.parametrize("seconds", [0.2, None])
def test_a_rank_that_has_not_come_yet_is_waited_for_a_little(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None
) -> None:
    """It says what it means when it comes; or it is gone, and the others do not wait out their budget for it."""
    monkeypatch.setattr(disagreement, "GRACE_SECONDS", 0.6)
    places = [torch.zeros(disagreement.TEXT_BYTES, dtype=torch.uint8) for _ in range(2)]
    disagreement.say(places[0], {"M": "3"})
    if seconds is not None:
        threading.Timer(seconds, disagreement.say, (places[1], {"M": "4"})).start()
    begin = time.monotonic()
    said = disagreement.everyone(places.__getitem__, 2, lambda peer: False, 30.0)
    assert said == ({"M": "3"}, None if seconds is None else {"M": "4"})
    assert time.monotonic() - begin < 10


def test_the_table_is_in_the_document() -> None:
    """FUSEDTP_MEANING=write writes it."""
    if len(TOLD) < 2:
        pytest.skip("comes with the tests of both schedules")
    lines = ["| what rank 1 does otherwise | by default | with `debug=True` |", "|---|---|---|"]
    for name in CALLS:
        by_default = "all ranks are told" if all(name in told for told in TOLD.values()) else "not compared"
        lines.append(f"| {name} | {by_default} | all ranks are told |")
    table, text = "\n".join(lines), DOCUMENT.read_text()
    if os.environ.get("FUSEDTP_MEANING") == "write":
        generated.rewrite(DOCUMENT, "meanings", table)
        return
    assert generated.replaced(text, "meanings", table) == text


def uneven(group: ProcessGroup, schedule: str) -> list[str]:
    """Plain tokens of a sequence-parallel style, 7 over 2 ranks, whose lengths torch takes to be even; and a rank that
    has to grow its memory where the other has not.
    """
    fusedtp.set_timeout(5.0, group)
    said, rank, say = [], group.rank(), disagreement.say

    def late(*args: Any) -> None:
        # Whoever finds out first is long in saying what it meant.
        time.sleep(0.1 * rank)
        say(*args)

    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))
    style = fusedtp.FusedColwiseParallel(input_layouts=Shard(0), schedule=schedule)
    linear = style._apply(nn.Linear(6, 4), mesh)
    for call in (
        lambda: linear(torch.ones(4 - rank, 6)),
        lambda: fusedtp.all_gather(torch.ones(4 + 4000 * rank, 64), group=group, schedule=schedule),
        lambda: fusedtp.all_gather(torch.ones(9000 * (1 + rank), 64), group=group, schedule=schedule),
    ):
        begin = time.monotonic()
        with (
            mock.patch.object(disagreement, "say", late),
            pytest.raises((ValueError, fusedtp.PeerTimeout)) as caught,
        ):
            call()
        # A kernel that waits for one that grows finds out when its budget is spent, and tells the other then.
        assert time.monotonic() - begin < SECONDS
        said.append(str(caught.value))
        fusedtp.destroy(group)
        assert fusedtp.all_gather(torch.ones(2, 2), group=group, schedule=schedule).shape == (4, 2)
    return said


@pytest.mark.parametrize("schedule", ["decomposed", "fused"])
def test_lengths_that_are_not_those_of_the_others(pool: RankPool, schedule: str) -> None:
    tokens, growth, both_grow = zip(*pool.run(uneven, schedule, world_size=2), strict=True)
    assert tokens[0] == tokens[1]
    assert "do not agree on sizes: (4, 4) on rank 0, (3, 3) on rank 1" in tokens[0]
    assert growth[0] == growth[1]
    assert "do not agree on sizes: (4, 4) on rank 0, (4004, 4004) on rank 1" in growth[0]
    # Whoever is told first may have called destroy before the other has looked.
    assert any("do not agree on the bytes of an arena" in each for each in both_grow)
    assert all("do not agree" in each or "has called fusedtp.destroy" in each for each in both_grow)


def late_gradient(group: ProcessGroup) -> str:
    """A gradient that only rank 0 wants, and what it is told."""
    fusedtp.set_timeout(2.0, group)
    x = torch.ones(4, 6, requires_grad=group.rank() == 0)
    y = fusedtp.all_gather_linear(x, torch.ones(5, 6), group=group, schedule="decomposed")
    if group.rank() == 1:
        return ""
    with pytest.raises(fusedtp.PeerTimeout) as caught:
        y.sum().backward()
    return str(caught.value)


@pytest.mark.usefixtures("destroyed_on_all_ranks")
def test_a_backward_that_only_one_rank_makes(pool: RankPool) -> None:
    first, _ = pool.run(late_gradient, world_size=2)
    pool.run(forget, world_size=2)
    assert "in a backward pass" in first
    assert "which rank 1 makes only where it wants the same gradients" in first


def forget(group: ProcessGroup) -> None:
    fusedtp.destroy()
    fusedtp.set_timeout(110)
