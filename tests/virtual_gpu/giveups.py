"""Timeouts: a rank is missing, stops in the middle of an op, is late by about a timeout, or means another op."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from fusedtp import PeerTimeout, RanksDisagree, reference
from fusedtp.workspaces import agreement
from fusedtp.workspaces.agreement import Fingerprint
from fusedtp.workspaces.steps import HostSteps
from fusedtp.workspaces.workspace import Workspace

from .cases import finish, issue, problem, programs_of, run_in_phases, total, virtual_ranks
from .driver import EmulatedDriver
from .machine import Ran, Schedule
from .shapes import Shape, value_of

# The clock advances a millisecond at a time, so a wait looks at each one.
BUDGET_MS = 3
_CLOCK_MS = 2**31 - 3


def _never_wrong(out: Tensor, expected: Tensor, allowed: Tensor, what: str) -> bool:
    """Check that every element of a rank that gave up is NaN or right, and return whether any is NaN."""
    late = out.isnan()
    reference.check(torch.where(late, expected.to(out.dtype), out).double(), expected, allowed.clamp_min(1e-30), what)
    return bool(late.any())


def missing(
    driver: EmulatedDriver, name: str, world_size: int, dtype: torch.dtype, shape: Shape, schedule: Schedule
) -> Ran:
    """Let rank `absent` launch nothing: the others end, name it, and return elements that are right or NaN. At last
    rank `absent` comes, finds that the others have given up, and returns no result either.
    """
    absent = schedule.seed % world_size
    schedule = replace(schedule, tick=schedule.tick or 0.0003)
    with virtual_ranks(
        world_size, seconds=BUDGET_MS / 1000, clock_ms=_CLOCK_MS, programs=programs_of(schedule)
    ) as ranks:
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
            with pytest.raises(PeerTimeout, match=f"rank {ws.rank} (waited|came too late)"):
                ws.check()
            _never_wrong(value_of(outs[ws.rank]), expected[ws.rank], allowed[ws.rank], what)
        with driver.on(absent):
            for _ in late:
                pass
        second = driver.run(ranks, replace(schedule, seed=schedule.seed + 1))
        # Either of the other two ranks may have given up on the other.
        with pytest.raises(PeerTimeout, match=f"rank {absent} (waited|came too late)"):
            ranks[absent].check()
    return total([first, second])


def stopped(
    driver: EmulatedDriver, name: str, world_size: int, dtype: torch.dtype, shape: Shape, schedule: Schedule
) -> bool:
    """Let one rank issue only the first kernel of its op until the rest have ended: each rank has the right result, or
    has given up with elements that are right or NaN. Return whether any gave up.
    """
    held = schedule.seed % world_size
    schedule = replace(schedule, tick=schedule.tick or 0.0003)
    with virtual_ranks(
        world_size, seconds=BUDGET_MS / 1000, clock_ms=_CLOCK_MS, programs=programs_of(schedule)
    ) as ranks:
        start, expected, allowed = problem(name, world_size, dtype, schedule.seed, shape)
        phases = [start(ws, ws.rank) for ws in ranks]
        next(phases[held])
        others = [ws for ws in ranks if ws.rank != held]
        outs = dict(
            zip([ws.rank for ws in others], issue(driver, others, [phases[ws.rank] for ws in others]), strict=True)
        )
        with driver.on(held):
            try:
                next(phases[held])
            except StopIteration as stop:
                outs[held] = stop.value
        driver.run(ranks, schedule)
        if held not in outs:
            outs[held] = finish(driver, ranks[held], phases[held])
            driver.run(ranks, replace(schedule, seed=schedule.seed + 1))
        return _right_or_given_up(ranks, outs, expected, allowed, f"{name}, {held} stopped, seed {schedule.seed}")


def alone(
    driver: EmulatedDriver, name: str, world_size: int, dtype: torch.dtype, shape: Shape, schedule: Schedule, last: str
) -> Ran:
    """Let one rank launch only the kernel `last`, without the kernels that would have waited before it. The others come
    while `last` waits: they give up, and each of their elements is right or NaN.
    """
    odd = schedule.seed % world_size
    with virtual_ranks(
        world_size, seconds=6 * BUDGET_MS / 1000, clock_ms=_CLOCK_MS, programs=programs_of(schedule)
    ) as ranks:
        start, expected, allowed = problem(name, world_size, dtype, schedule.seed, shape)
        driver.launches = lambda rank, kernel: rank != odd or kernel == last
        try:
            outs = issue(driver, ranks, [start(ws, ws.rank) for ws in ranks])
        finally:
            driver.launches = None
        until = (_CLOCK_MS + 3 * BUDGET_MS + 2**31) % 2**32 - 2**31
        held = (odd + 1 + schedule.seed % (world_size - 1)) % world_size
        ran = driver.run(ranks, replace(schedule, tick=0.0001, held=held, held_until=until))
        for ws in ranks:
            if ws.rank != odd:
                with pytest.raises(PeerTimeout, match=f"rank {ws.rank} (waited|came too late)"):
                    ws.check()
            what = f"{name}, rank {ws.rank} of {world_size}, {last} alone on {odd}, seed {schedule.seed}"
            _never_wrong(value_of(outs[ws.rank]), expected[ws.rank], allowed[ws.rank], what)
    return ran


def disagreeing(
    driver: EmulatedDriver, name: str, world_size: int, dtype: torch.dtype, shape: Shape, schedule: Schedule
) -> Ran:
    """Let one rank mean another op that sends the same: every rank is told, at the latest when it leaves."""
    odd = schedule.seed % world_size
    with virtual_ranks(world_size, clock_ms=_CLOCK_MS, programs=programs_of(schedule)) as ranks:
        start, expected, allowed = problem(name, world_size, dtype, schedule.seed, shape)
        for ws in ranks:
            ws.meanings.now = Fingerprint({"op": name, "call": "another" if ws.rank == odd else "this"})
        outs = issue(driver, ranks, [start(ws, ws.rank) for ws in ranks])
        ran = driver.run(ranks, schedule)
        # Real ranks do this by themselves.
        for ws in ranks:
            agreement.say(ws._text(ws.rank), ws.meanings.now.values)
        for ws in ranks:
            what = f"{name}, rank {ws.rank} of {world_size}, {odd} means another op, seed {schedule.seed}"
            with pytest.raises(RanksDisagree, match=r"the ranks do not agree on call: .*another on rank"):
                ws.check()
            _never_wrong(value_of(outs[ws.rank]), expected[ws.rank], allowed[ws.rank], what)
    return ran


def lost(
    driver: EmulatedDriver, name: str, world_size: int, dtype: torch.dtype, shape: Shape, schedule: Schedule
) -> Ran:
    """Let the host copy rows, and lose every other signal, or every signal, of one rank: a rank that needs these rows
    gives up, with elements that are right or NaN.
    """
    odd, step = schedule.seed % world_size, 1 + schedule.seed % 2
    schedule = replace(schedule, tick=schedule.tick or 0.0003)
    write, written = HostSteps.write, itertools.count(schedule.seed)

    def sometimes(steps: HostSteps, dst: int, slot: int, count: int) -> None:
        for each in range(slot, slot + count):
            if steps._ws.rank != odd or next(written) % step:
                write(steps, dst, each, 1)

    with virtual_ranks(
        world_size, seconds=BUDGET_MS / 1000, clock_ms=_CLOCK_MS, programs=programs_of(schedule)
    ) as ranks:
        start, expected, allowed = problem(name, world_size, dtype, schedule.seed, shape, "copy")
        with mock.patch.object(HostSteps, "write", sometimes):
            outs, ran = run_in_phases(driver, ranks, start, schedule)
        gave_up = 0
        for ws, out in zip(ranks, outs, strict=True):
            what = f"{name}, rank {ws.rank} of {world_size}, signals of {odd} lost, seed {schedule.seed}"
            try:
                ws.check()
            except PeerTimeout:
                gave_up += 1
                if out is not None:
                    _never_wrong(value_of(out), expected[ws.rank], allowed[ws.rank], what)
            else:
                assert out is not None, what
                reference.check(value_of(out), expected[ws.rank], allowed[ws.rank], what)
        assert gave_up or step == 2, name
    return ran


def _right_or_given_up(
    ranks: Sequence[Workspace], outs: Mapping[int, Tensor], expected: Sequence[Tensor], allowed: Sequence[Tensor],
    what: str,
) -> bool:  # fmt: skip
    gave_up = False
    for ws in ranks:
        here = f"{what}, rank {ws.rank} of {ws.world_size}"
        out = value_of(outs[ws.rank])
        try:
            ws.check()
        except PeerTimeout:
            gave_up = True
            _never_wrong(out, expected[ws.rank], allowed[ws.rank], here)
        else:
            reference.check(out, expected[ws.rank], allowed[ws.rank], here)
    return gave_up


def late(
    driver: EmulatedDriver, name: str, world_size: int, dtype: torch.dtype, shape: Shape, schedule: Schedule, by: int,
    after: int = 0,
) -> bool:  # fmt: skip
    """Let one rank begin `by` ms after the others' budget is spent (before, if negative), or pause for as long after
    `after` instructions. Each rank has the right result, or has given up with elements that are right or NaN. Return
    whether any gave up.
    """
    held = schedule.seed % world_size
    until = BUDGET_MS + by if after else (_CLOCK_MS + BUDGET_MS + by + 2**31) % 2**32 - 2**31
    schedule = replace(schedule, tick=schedule.tick or 0.0003, held=held, held_until=until, held_after=after)
    with virtual_ranks(
        world_size, seconds=BUDGET_MS / 1000, clock_ms=_CLOCK_MS, programs=programs_of(schedule)
    ) as ranks:
        start, expected, allowed = problem(name, world_size, dtype, schedule.seed, shape)
        outs = issue(driver, ranks, [start(ws, ws.rank) for ws in ranks])
        driver.run(ranks, schedule)
        return _right_or_given_up(
            ranks, dict(enumerate(outs)), expected, allowed, f"{name}, {held} late by {by} ms, seed {schedule.seed}"
        )
