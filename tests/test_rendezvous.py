"""Ranks with different histories meet in torch's symmetric memory, which numbers its exchanges by process."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fusedtp.bench.ranks import RankPool
from fusedtp.memory.cuda import meet

from .exchange import VERSIONS, Exchange

# The ranks of successive groups, as in a sweep over world sizes or on a mesh with holes.
HISTORIES = {
    "four after two": ([0, 1], [0, 1, 2, 3]),
    "sweep": ([0], [0, 1], [0, 1, 2, 3], [0, 1], [0, 1, 2, 3]),
    "unsymmetric mesh": ([0, 1, 2], [2, 3], [0, 3], [1, 2, 3], [0, 1, 2, 3]),
}


def meetings(
    world: ProcessGroup, history: tuple[list[int], ...], version: str, ours: bool, seconds: float
) -> list[str]:
    """Return this rank's values of each of its meetings, or the kind of error that ends the meeting."""
    exchange, outcomes = Exchange(version, seconds), []
    groups = [dist.new_group(ranks) for ranks in history]
    for number, group in enumerate(groups):
        if not isinstance(group, ProcessGroup):
            continue
        value = f"{world.rank()}.{number}".encode()
        try:
            if ours:
                values = meet(partial(exchange.rendezvous, value=value), group, f"test/{number}", seconds)
            else:
                values = exchange.rendezvous(group.group_name, value)
            outcomes.append(" ".join(each.decode() for each in values))
        except dist.DistStoreError as error:
            outcomes.append(type(error).__name__)
    dist.barrier(world)
    for group in groups:
        if isinstance(group, ProcessGroup):
            dist.destroy_process_group(group)
    return outcomes


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("history", HISTORIES)
def test_ranks_of_different_histories_meet(pool: RankPool, history: str, version: str) -> None:
    expected = [
        [
            " ".join(f"{member}.{number}" for member in ranks)
            for number, ranks in enumerate(HISTORIES[history])
            if rank in ranks
        ]
        for rank in range(4)
    ]
    assert pool.run(meetings, HISTORIES[history], version, True, 60.0) == expected


@pytest.mark.parametrize("version", ["2.11", "2.13"])
@pytest.mark.parametrize("history", HISTORIES)
def test_in_their_own_groups_they_would_wait_in_vain(pool: RankPool, history: str, version: str) -> None:
    """The model shows torch's fault, which the test above guards against."""
    outcomes = pool.run(meetings, HISTORIES[history], version, False, 0.5)
    assert "DistStoreError" in [each for rank in outcomes for each in rank]


def alone(group: ProcessGroup) -> tuple[str, float, str]:
    """Let rank 0 come alone."""
    begin, said = time.monotonic(), ""
    if group.rank() == 0:
        exchange = Exchange("2.13", 300.0)
        try:
            meet(lambda name: exchange.rendezvous(name, b"x"), group, "test/alone", 0.3)
        except dist.DistStoreError as error:
            said = type(error).__name__
    seconds = time.monotonic() - begin
    dist.barrier(group)
    try:
        dist.distributed_c10d._resolve_process_group("test/alone")  # type: ignore[attr-defined]
    except RuntimeError:
        return said, seconds, "gone"
    return said, seconds, "left"


def test_a_rank_that_waits_in_vain_is_told_in_time(pool: RankPool) -> None:
    (said, seconds, left), other = pool.run(alone, world_size=2)
    assert said == "DistStoreError"
    # Torch's own limit, and the model's, is 300 s.
    assert 0.3 <= seconds < 30
    assert left == other[2] == "gone"
