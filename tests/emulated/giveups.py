"""Waits that are given up: a rank is missing, or comes when the budget of the others is just being spent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusedtp import PeerTimeout, reference

from .cases import Shape, issue, problem, value_of, virtual_ranks
from .driver import EmulatedDriver
from .machine import Ran, Schedule

# Of a clock that advances a millisecond at a time, so that a wait looks at it at each of them.
BUDGET_MS = 3
_CLOCK_MS = 2**31 - 3


def _never_wrong(out: Tensor, expected: Tensor, allowed: Tensor, what: str) -> bool:
    """What a rank has that gave up: every element is NaN or right. Whether any is NaN."""
    late = out.isnan()
    reference.check(torch.where(late, expected.to(out.dtype), out).double(), expected, allowed.clamp_min(1e-30), what)
    return bool(late.any())


def missing(
    driver: EmulatedDriver, name: str, world_size: int, dtype: torch.dtype, shape: Shape, schedule: Schedule
) -> Ran:
    """Rank `absent` launches nothing: the others end, name it, and return no number instead; when it comes at last it
    finds that they have given up, and returns none either.
    """
    absent = schedule.seed % world_size
    schedule = replace(schedule, tick=schedule.tick or 0.0003)
    with virtual_ranks(world_size, seconds=BUDGET_MS / 1000, clock_ms=_CLOCK_MS) as ranks:
        start, expected, allowed = problem(name, world_size, dtype, schedule.seed, shape)
        phases = [start(ws, ws.rank) for ws in ranks]
        others = [ws for ws in ranks if ws.rank != absent]
        late = phases[absent]
        next(late)
        outs = dict(
            zip([ws.rank for ws in others], issue(driver, others, [phases[ws.rank] for ws in others]), strict=True)
        )
        first = driver.run(ranks, schedule)
        for ws in others:
            what = f"{name}, rank {ws.rank} of {world_size} without {absent}, seed {schedule.seed}"
            with pytest.raises(PeerTimeout, match=f"rank {ws.rank} waited .* for rank "):
                ws.check()
            _never_wrong(value_of(outs[ws.rank]), expected[ws.rank], allowed[ws.rank], what)
        with driver.on(absent):
            for _ in late:
                pass
        second = driver.run(ranks, replace(schedule, seed=schedule.seed + 1))
        with pytest.raises(PeerTimeout, match=f"rank {absent} waited"):
            ranks[absent].check()
    return Ran(
        *(
            a + b
            for a, b in zip(
                (first.executed, first.stale, first.late), (second.executed, second.stale, second.late), strict=True
            )
        )
    )


def late(
    driver: EmulatedDriver, name: str, world_size: int, dtype: torch.dtype, shape: Shape, schedule: Schedule, by: int
) -> bool:
    """One rank begins `by` ms after the others' budget is spent, or before where that is negative: each rank has the
    right result, or has given up, and then what it has is right or NaN. Whether any gave up.
    """
    held = schedule.seed % world_size
    until = (_CLOCK_MS + BUDGET_MS + by + 2**31) % 2**32 - 2**31
    schedule = replace(schedule, tick=schedule.tick or 0.0003, held=held, held_until=until)
    gave_up = []
    with virtual_ranks(world_size, seconds=BUDGET_MS / 1000, clock_ms=_CLOCK_MS) as ranks:
        start, expected, allowed = problem(name, world_size, dtype, schedule.seed, shape)
        outs = issue(driver, ranks, [start(ws, ws.rank) for ws in ranks])
        driver.run(ranks, schedule)
        for ws in ranks:
            what = f"{name}, rank {ws.rank} of {world_size}, {held} late by {by} ms, seed {schedule.seed}"
            out = value_of(outs[ws.rank])
            try:
                ws.check()
            except PeerTimeout:
                gave_up.append(ws.rank)
                _never_wrong(out, expected[ws.rank], allowed[ws.rank], what)
            else:
                reference.check(out, expected[ws.rank], allowed[ws.rank], what)
    return bool(gave_up)
