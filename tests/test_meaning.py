"""Ranks that mean different things are told so by default, by every schedule over shared memory: never a wrong number.

The calls are those of `test_agreement`, which makes them in debug mode.
"""

from __future__ import annotations

import time

import pytest
import torch
from fusedtp.bench.ranks import RankPool
from torch.distributed import ProcessGroup

import fusedtp

from .test_agreement import CALLS, Here

SECONDS = 20.0
# A bias's values and the schedule that is asked for are told in debug mode only.
NOT_TOLD = ("values of a bias", "schedule")


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
