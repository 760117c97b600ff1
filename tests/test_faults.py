"""Faults between any two steps of any op: a rank that raises, is late, stopped or killed.

Every survivor gets the right exception with the right rank, in time; no rank hangs or returns a wrong number. After
`destroy` the same processes work again, as the same group and as a fresh one. This file runs a fixed sample of the list
in `faults.plan`; `nox -s faults` (FUSEDTP_FAULTS=all) injects every fault. FUSEDTP_FAULTS=write counts them in the
document.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fusedtp.bench.ranks import RankError, RankPool

from . import generated
from .faults import inject, plan, verdict
from .faults.cases import CASES
from .faults.inject import Injection, Outcome

DOCUMENT = Path(__file__).parent.parent / "docs" / "faults.md"
ALL = os.environ.get("FUSEDTP_FAULTS") == "all"
# A default run takes every 37th injection of each world size.
EVERY = 1 if ALL else 37
CHAINS = [*plan.deadly(), *plan.killed_of_three()] if ALL else [plan.deadly()[0]]
# Factors of the timeouts for repetitions, after ranks were kept from running.
PATIENCE = (1, 4, 16)
# Each run needs a new name, as names in a group's store are used once.
numbers = itertools.count()


def report(counted: Sequence[Injection], repeated: int, started: float) -> None:
    """Print the number of injections of each kind, for `pytest -s`."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(each.kind for each in counted).items())
    seconds = time.monotonic() - started
    print(f"\n{len(counted)} injections in {seconds:.1f} s, {repeated} of them repeated: {kinds}")


def patient(pool: RankPool, injections: list[Injection]) -> tuple[list[str], int]:
    """Return the errors of injections, and how many were repeated.

    On a busy machine a survivor may be kept from running for half a timeout, and its peers rightly give up on it. Such
    an injection proves nothing and is repeated with longer timeouts.
    """
    wrong: list[str] = []
    repeated, size = 0, injections[0].world_size
    for factor in PATIENCE:
        longer = [replace(each, seconds=each.seconds * factor) for each in injections]
        by_rank = pool.run(inject.in_turn, longer, f"faults/{next(numbers)}", world_size=size, timeout=1500)
        again = []
        for injection, slower, *outcomes in zip(injections, longer, *by_rank, strict=True):
            said = verdict.wrong(slower, outcomes)
            if said and factor < PATIENCE[-1] and verdict.starved(slower, outcomes):
                again.append(injection)
            elif said:
                wrong.append(said)
        repeated += len(again)
        if not (injections := again):
            break
    return wrong, repeated


def check(pool: RankPool, injections: list[Injection]) -> None:
    started = time.monotonic()
    wrong, repeated = patient(pool, injections)
    assert not wrong, "\n".join(wrong)
    report(injections, repeated, started)


@pytest.mark.parametrize("world_size", plan.WORLD_SIZES)
def test_the_ranks_live_on(pool: RankPool, world_size: int) -> None:
    check(pool, plan.living(world_size)[world_size % EVERY :: EVERY])


def test_a_rank_is_stopped_while_it_waits(pool: RankPool) -> None:
    check(pool, plan.in_a_wait()[:: 1 if ALL else 16])


def in_chain(chain: list[Injection]) -> list[list[Outcome]]:
    """Return the outcomes of the survivors, on a separate pool of ranks that must leave nothing behind."""
    shm = sorted(os.listdir("/dev/shm"))
    with RankPool(chain[0].world_size, timeout=180) as pool:
        pids = pool.pids
        replies = pool.start(inject.one_by_one, chain, "x").wait()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert sorted(os.listdir("/dev/shm")) == shm
    (outcomes,) = (each for each in replies if not isinstance(each, BaseException))
    assert all("SIGKILL" in str(each) for each in replies if isinstance(each, RankError))
    return outcomes


def name(chain: list[Injection]) -> str:
    first = chain[0]
    return f"{first.case}, {first.world_size} ranks, at {first.where}"


@pytest.mark.parametrize("chain", CHAINS, ids=name)
def test_ranks_are_killed_one_by_one(chain: list[Injection]) -> None:
    for factor in PATIENCE:
        longer = [replace(each, seconds=each.seconds * factor) for each in chain]
        seen = list(zip(longer, in_chain(longer), strict=True))
        wrong = [verdict.wrong(each, outcomes) for each, outcomes in seen]
        if not any(verdict.wrong(each, outcomes) and verdict.starved(each, outcomes) for each, outcomes in seen):
            break
    assert not any(wrong), "\n".join(filter(None, wrong))


def test_the_spread_has_every_kind_and_op() -> None:
    here = [each for size in plan.WORLD_SIZES for each in plan.living(size)[size % EVERY :: EVERY]]
    assert {each.kind for each in here} == set(plan.LIVING)
    assert {CASES[each.case].op for each in here} == {case.op for case in CASES.values()}
    assert {each.where for each in here} == set(plan.WHERE)


def test_the_document_counts_what_is_injected() -> None:
    every = [each for size in plan.WORLD_SIZES for each in plan.living(size)]
    every += [*plan.in_a_wait(), *itertools.chain(*plan.deadly(), *plan.killed_of_three())]
    assert len(every) >= 300
    counts = Counter((each.kind, each.world_size) for each in every)
    lines = ["| a rank | " + " | ".join(f"of {size}" for size in plan.WORLD_SIZES) + " |", "|---|" + "---:|" * 3]
    for kind in dict.fromkeys(each.kind for each in every):
        of = " | ".join(str(counts[kind, size]) for size in plan.WORLD_SIZES)
        lines.append(f"| {kind} | {of} |")
    table = "\n".join([*lines, "", f"{len(every)} in all, in {len(CASES)} forms of the ops."])
    generated.as_written(DOCUMENT, "injections", table, "FUSEDTP_FAULTS")
