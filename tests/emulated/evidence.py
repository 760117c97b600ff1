"""What is executed: units of work for several processes, what each of them has executed, and which mutants it found."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from fusedtp.schedules import producer

from . import giveups, mutants
from .cases import COLLECTIVES, DTYPES, MATMULS, in_phases, run, small
from .driver import EmulatedDriver, device
from .machine import Schedule

TARGETS = (80, 90)
SEEDS = 20
_WORLDS = (2, 3, 4, 2)


@dataclass(frozen=True)
class Unit:
    """An op of one dtype on one target; `mutated`: which of its mutants, every `of`-th from `part` on."""

    target: int
    dtype: str
    op: str
    seeds: int = SEEDS
    mutated: bool = False
    part: int = 0
    of: int = 1

    def __str__(self) -> str:
        return f"{'mutants of ' * self.mutated}{self.op}, {self.dtype}, sm_{self.target}"


@dataclass
class Done:
    """What a unit has executed, by kernel and its PTX: which instructions; what it ran; how each mutant was found."""

    unit: Unit
    executed: dict[tuple[str, str], Any]
    runs: int = 0
    instructions: int = 0
    stale: int = 0
    gave_up: int = 0
    failure: str = ""
    found: list[tuple[mutants.Mutant, str]] | None = None


def units(seeds: int = SEEDS) -> list[Unit]:
    """Every op, dtype and target."""
    return [Unit(t, dtype, op, seeds) for op in MATMULS + COLLECTIVES for t in TARGETS for dtype in DTYPES]


# Where mutants are planted: together these have every kernel, and on sm_90 every kind of instruction.
MUTATED = (
    (80, "bfloat16", "gather rows"), (80, "bfloat16", "scatter rows"), (80, "bfloat16", "all_gather direct"),
    (80, "float16", "all_reduce ring"), (90, "bfloat16", "gather rows"), (90, "float16", "scatter rows"),
)  # fmt: skip


def mutated_units(seeds: int, parts: int = 4) -> list[Unit]:
    """The mutants, in parts for several processes."""
    return [Unit(*each, seeds, True, part, parts) for part in range(parts) for each in MUTATED]


def _schedule(seed: int) -> Schedule:
    # How long stores wait, how many loads see the past, how many CTAs of a rank are there at once.
    return Schedule(
        seed, stale=(0.5, 1.0, 0.8)[seed % 3], drain=(0.05, 0.005, 0.02, 0.3)[seed % 4], tick=0.001,
        residents=(64, 1, 3, 2)[seed % 4],
    )  # fmt: skip


def _add(done: Done, ran: Any) -> None:
    done.runs += 1
    done.instructions += ran.executed
    done.stale += ran.stale


def _execute(unit: Unit, driver: EmulatedDriver, done: Done) -> None:
    dtype = DTYPES[unit.dtype]
    shape, fewer = small(unit.target, dtype), small(unit.target, dtype, "empty")
    for seed in range(unit.seeds):
        which, world_size = (fewer, 2) if seed % 5 == 4 else (shape, _WORLDS[seed % len(_WORLDS)])
        # Every third run has two epochs one behind the other, every seventh passes the wrap of the epoch.
        ops = [unit.op] * (1 + (seed % 3 == 0))
        epoch = 2**31 - 2 if seed % 7 == 6 else 0
        _add(done, run(driver, ops, world_size, dtype, which, _schedule(seed), epoch=epoch))
    if unit.dtype == "bfloat16":
        # More columns than are sent at once; few columns; few rows, in pieces of a tile.
        for i, other in enumerate((replace(shape, N=528, K=80), replace(shape, N=96), replace(shape, M=48))):
            pieces = mock.patch.object(producer, "PIECE_BYTES", 1) if i == 2 else contextlib.nullcontext()
            with pieces:
                _add(done, run(driver, [unit.op], 2, dtype, other, _schedule(100 + i)))
                _add(done, giveups.missing(driver, unit.op, 2, dtype, other, _schedule_of_giving_up(i)))
        if unit.op in ("gather rows", "gather contraction", "all_gather direct"):
            _add(done, in_phases(driver, unit.op, 3, dtype, shape, _schedule(0), "copy"))
    _add(done, giveups.missing(driver, unit.op, 2, dtype, fewer, _schedule_of_giving_up(4)))
    for seed in range(min(unit.seeds, 4)):
        world_size, how = _WORLDS[seed], _schedule_of_giving_up(seed)
        _add(done, giveups.missing(driver, unit.op, world_size, dtype, shape, how))
        for by in (seed % 3 - 1, 3 + 2 * seed):
            done.runs += 1
            done.gave_up += giveups.late(driver, unit.op, world_size, dtype, shape, how, by)


def _schedule_of_giving_up(seed: int) -> Schedule:
    return replace(_schedule(seed), tick=0.0, residents=64)


def work(unit: Unit) -> Done:
    """All of a unit, in this process."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    done = Done(unit, {})
    dtype = DTYPES[unit.dtype]
    with device(unit.target) as driver:
        try:
            if unit.mutated:
                every = [
                    each for name, text in sorted(mutants.sources(driver, unit.op, dtype).items())
                    for each in mutants.mutants(name, text)
                ]  # fmt: skip
                done.found = [
                    (each, mutants.find(driver, unit.op, dtype, each, unit.seeds))
                    for each in every[unit.part :: unit.of]
                ]
            else:
                _execute(unit, driver, done)
        except Exception as error:
            done.failure = f"{unit}: {type(error).__name__}: {error}"
        if not unit.mutated:
            for text, program in driver.programs.items():
                key = program.name, hashlib.sha256(text.encode()).hexdigest()
                done.executed[key] = program.count > 0
    return done


def in_processes(every: Sequence[Unit]) -> list[Done]:
    """All units, as many at once as there are processors."""
    count = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("fork").Pool(count) as pool:
        return list(pool.imap_unordered(work, every, chunksize=1))


def shares(done: Iterable[Done]) -> dict[tuple[int, str], tuple[int, int, int]]:
    """By target and kernel: how many different PTX it has, how many instructions they have and how many were executed
    in some run."""
    executed: dict[tuple[int, str, str], Any] = {}
    for each in done:
        for (name, digest), ran in each.executed.items():
            key = each.unit.target, name, digest
            executed[key] = executed[key] | ran if key in executed else ran
    found: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for (target, name, _), ran in executed.items():
        found[target, name].append(ran)
    return {
        key: (len(each), sum(len(ran) for ran in each), sum(int(np.count_nonzero(ran)) for ran in each))
        for key, each in sorted(found.items())
    }
