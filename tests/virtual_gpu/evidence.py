"""Units of work for several processes: the instructions that each executes, and the mutants that it finds."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from fusedtp.schedules import producer

from . import float8, giveups, layers, mutants
from .cases import COLLECTIVES, DTYPES, FLOAT8, IN_SWITCH, MATMULS, in_phases, programs_of, run, small
from .driver import EmulatedDriver, device
from .machine import Schedule
from .ptx import without_contraction
from .shapes import Shape

TARGETS = (80, 90)
SEEDS = 20
# Ops with a kernel that collects rows for which an earlier kernel has waited.
COLLECTING = ("gather rows and keep", "scatter and gather")
_WORLDS = (2, 3, 4, 2)


@dataclass(frozen=True)
class Unit:
    """An op of one dtype on one target. `mutated`: run its mutants instead, every `of`-th from `part` on."""

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
    """Results of a unit: executed instructions by kernel and PTX, counts of its runs, and how each mutant was found."""

    unit: Unit
    executed: dict[tuple[str, str], Any]
    whole: set[tuple[str, str]] = field(default_factory=set)
    runs: int = 0
    instructions: int = 0
    stale: int = 0
    gave_up: int = 0
    left_out: int = 0
    failure: str = ""
    found: list[tuple[mutants.Mutant, str]] | None = None


def units(seeds: int = SEEDS) -> list[Unit]:
    """Return a unit for every op, dtype and target."""
    plain = [Unit(t, dtype, op, seeds) for op in MATMULS + COLLECTIVES for t in TARGETS for dtype in DTYPES]
    # e5m2 only changes the values of the bytes.
    first, second, blocks = FLOAT8
    scaled = [(first, op) for op in float8.OPS] + [(second, op) for op in float8.ONE_OF_EACH_KERNEL]
    scaled += [(blocks, op) for op in float8.IN_BLOCKS]
    scaled += [(dtype, op) for op in IN_SWITCH for dtype in DTYPES]
    return plain + [Unit(90, dtype, op, seeds) for dtype, op in scaled]


def layer_units(seeds: int = SEEDS) -> list[Unit]:
    """Return units for forward and gradients of each function of layers, with dtypes and numbers of ranks in turn."""
    return [Unit(target, "all", name, seeds) for name in layers.FUNCTIONS for target in TARGETS]


# The ops with mutants: together they have every kernel, and on sm_90 every kind of instruction.
MUTATED = (
    (80, "bfloat16", "gather rows"), (80, "bfloat16", "scatter rows"), (80, "bfloat16", "all_gather direct"),
    (80, "float16", "all_reduce ring"), (90, "bfloat16", "gather rows"), (90, "float16", "scatter rows"),
    (90, "float8_e4m3fn", "gather rows split"), (90, "float8_e4m3fn", "gather rows"),
    (90, "float8_e4m3fn", "scatter rows"), (90, "mxfp8", "gather rows split"), (90, "mxfp8", "gather contraction"),
    (90, "mxfp8", "scatter rows"), (90, "bfloat16", "matmul two_shot switch"),
    (90, "float16", "all_reduce two_shot switch"),
)  # fmt: skip


def mutated_units(seeds: int, parts: int = 4) -> list[Unit]:
    """Return the mutants' units, in parts for several processes."""
    return [Unit(*each, seeds, True, part, parts) for part in range(parts) for each in MUTATED]


def _schedule(seed: int) -> Schedule:
    # Vary the delay of stores, the share of stale loads, and the number of resident CTAs.
    return Schedule(
        seed, stale=(0.5, 1.0, 0.8)[seed % 3], drain=(0.05, 0.005, 0.02, 0.3)[seed % 4], tick=0.001,
        residents=(64, 1, 3, 2)[seed % 4],
    )  # fmt: skip


def _add(done: Done, ran: Any) -> None:
    done.runs += 1
    done.instructions += ran.executed
    done.stale += ran.stale


def _execute(unit: Unit, driver: EmulatedDriver, done: Done) -> None:
    dtype = (DTYPES | FLOAT8)[unit.dtype]
    shape, fewer = small(unit.target, dtype), small(unit.target, dtype, "empty")
    for seed in range(unit.seeds):
        # With three ranks one has nothing, and the other two exchange data.
        which, world_size = (fewer, 3) if seed % 5 == 4 else (shape, _WORLDS[seed % len(_WORLDS)])
        # Every third run has two epochs in a row, every seventh passes the wrap of epochs.
        ops = [unit.op] * (1 + (seed % 3 == 0))
        epoch = 2**31 - 2 if seed % 7 == 6 else 0
        programs = (2, 1, 3)[seed // 3 % 3]
        _add(
            done,
            run(driver, ops, world_size, dtype, _deep(which, seed), _schedule(seed), epoch=epoch, programs=programs),
        )
    # Such an op has all its waits in one kernel, which is compiled anew for lengths of another kind.
    in_one = unit.op.startswith("matmul ") and not unit.op.endswith("split")
    # More columns than are sent at once; few columns; few rows, in pieces of a tile; long rows of odd lengths.
    others = replace(shape, N=528, K=80), replace(shape, N=96), replace(shape, M=48), replace(fewer, N=520, K=536)
    if unit.dtype == "bfloat16":
        for i, other in enumerate(others):
            piece_bytes = 1 if i == 2 else producer.PIECE_BYTES
            for depth in range(3):
                how, given_up = _schedule(100 + 3 * i + depth), _schedule_of_giving_up(depth)
                with mock.patch.object(producer, "PIECE_BYTES", piece_bytes):
                    world_size = 3 if other.split == "empty" else 2
                    _add(
                        done,
                        run(driver, [unit.op], world_size, dtype, _deep(other, depth), how, programs=programs_of(how)),
                    )
                    if in_one or depth < 1 + unit.op.startswith("gather"):
                        _give_up(done, driver, world_size, _deep(other, depth), given_up)
        copied = unit.op in ("gather rows", "gather contraction", "all_gather direct")
        for seed in range(9):
            # Each rank is missing in turn. With one step of k, waits before a loop over steps are for tiles of many
            # ranks.
            how = _schedule_of_giving_up(seed)
            if unit.op.startswith("gather"):
                for each in (shape, *others):
                    one_step = _deep(each, seed if "contraction" in unit.op else 1)
                    _add(done, giveups.missing(driver, unit.op, 3, dtype, one_step, how))
            if copied:
                if seed % 3 == 0:
                    _add(done, in_phases(driver, unit.op, 3, dtype, _deep(shape, seed // 3), _schedule(seed), "copy"))
                _add(done, giveups.lost(driver, unit.op, 3, dtype, _deep(shape, 1 + seed % 2), how))
    if in_one:
        # Columns of tiles for every rank, whatever its share of the contraction.
        wide = [replace(each, N=each.N + 3 * (64 if dtype == torch.float32 else 256)) for each in (shape, fewer)]
        for seed, each in itertools.product(range(18), (shape, fewer, *others) if unit.dtype == "bfloat16" else wide):
            how, world_size = _schedule_of_giving_up(seed), 2 + seed // 3 % 3
            _add(done, giveups.missing(driver, unit.op, world_size, dtype, _deep(each, seed), how))
        for seed, each in itertools.product(range(9), wide):
            world_size, deep = 2 + seed // 3, _deep(each, seed)
            _add(done, run(driver, [unit.op], world_size, dtype, deep, _schedule(seed)))
            _give_up(done, driver, world_size, deep, _schedule_of_giving_up(seed))
    if unit.dtype in FLOAT8 and unit.op in ("gather rows", "gather contraction"):
        # The host packs rows and scales as they travel.
        for seed in range(3):
            _add(done, in_phases(driver, unit.op, 3, dtype, _deep(shape, seed), _schedule(seed), "copy"))
    # The protocol's code is the same for all dtypes, but compiled for each.
    for seed in range(6 if unit.dtype == "bfloat16" else 3):
        _give_up(done, driver, 3, _deep(fewer, seed), _schedule_of_giving_up(seed))
    # A kernel that gathers has a copy of its waits for each step of k.
    for seed in range(9) if unit.dtype == "bfloat16" or unit.op.startswith("gather") else (0, 3, 4, 6, 8):
        world_size, how = 2 + seed // 3, _schedule_of_giving_up(seed)
        _give_up(done, driver, world_size, _deep(shape, seed), how)
        if seed % 3 == 0:
            for by in (seed // 3 - 1, 3 + 2 * seed // 3):
                done.runs += 1
                done.gave_up += giveups.late(driver, unit.op, world_size, dtype, shape, how, by)


def _give_up(done: Done, driver: EmulatedDriver, world_size: int, shape: Shape, how: Schedule) -> None:
    what = driver, done.unit.op, world_size, (DTYPES | FLOAT8)[done.unit.dtype], shape, how
    _add(done, giveups.missing(*what))
    whole = giveups.disagreeing(*what)
    _add(done, whole)
    # In the middle of the op, for longer than the others wait, and for less.
    for by, tenths in ((3, (5, 7, 9)), (-1, (9, 4, 7))):
        done.runs += 1
        done.gave_up += giveups.late(*what, by, whole.executed * tenths[how.seed % 3] // 10)
    if done.unit.op in COLLECTING:
        _add(done, giveups.alone(*what, "_collect_kernel"))
    done.runs += 1
    done.gave_up += giveups.stopped(*what)


def _differentiate(unit: Unit, driver: EmulatedDriver, done: Done) -> None:
    for seed in range(unit.seeds):
        dtype = DTYPES[("bfloat16", "float32", "float16")[seed % 3]]
        compared = layers.check(driver, unit.op, 2 + seed % 3, dtype, seed)
        assert compared == ["y", "dx", "dw"] * (2 + seed % 3)
        done.runs += 1


def _deep(shape: Shape, seed: int) -> Shape:
    """Return the shape with more, less than one, or two steps of k: a loop's prologue may be all that runs."""
    odd = shape.K % 16
    # The last K is a multiple of 16 even for odd shapes: a rank with an empty shard has such a length anyway.
    return replace(shape, K=(shape.K, shape.K // 3 // 16 * 16 + odd, shape.K * 5 // 9 // 16 * 16)[seed % 3])


def _schedule_of_giving_up(seed: int) -> Schedule:
    return replace(_schedule(seed), tick=0.0, residents=64)


def work(unit: Unit) -> Done:
    """Run a whole unit in this process."""
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    done = Done(unit, {})
    with device(unit.target) as driver:
        try:
            if unit.op in layers.FUNCTIONS:
                _differentiate(unit, driver, done)
            elif unit.mutated:
                dtype = (DTYPES | FLOAT8)[unit.dtype]
                every = [
                    each for name, text in sorted(mutants.sources(driver, unit.op, dtype).items())
                    for each in mutants.mutants(name, text, mutants.kinds_of(dtype))
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
                key = program.name, hashlib.sha256(code_of(text).encode()).hexdigest()
                kept = np.ones(len(program.instructions), bool)
                kept[list(without_contraction(program.source))] = False
                # Two texts may have the same code: combine their counts.
                done.executed[key] = done.executed.get(key, False) | (program.count > 0)[kept]
                if program.whole:
                    done.whole.add(key)
                done.left_out += int(np.count_nonzero(~kept))
    return done


def code_of(text: str) -> str:
    """Return a kernel's PTX without the paths of its sources: Triton's cache is shared with copies elsewhere."""
    return re.sub(r"(?m)^\t\.file\t.*\n", "", text.partition("\t.section\t.debug_")[0])


def in_processes(every: Sequence[Unit]) -> list[Done]:
    """Run all units, one for each processor at a time."""
    count = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("fork").Pool(count, maxtasksperchild=16) as pool:
        return list(pool.imap_unordered(work, every, chunksize=1))


def shares(done: Iterable[Done], *, whole: bool = True) -> dict[tuple[int, str], tuple[int, int, int]]:
    """Return, for each target and kernel, the number of PTX variants, their instructions, and the instructions executed
    in some run. Without `whole`: for variants that only ranks without elements of some operand launch.
    """
    executed: dict[tuple[int, str, str], Any] = {}
    launched: set[tuple[int, str, str]] = set()
    for each in done:
        launched |= {(each.unit.target, *key) for key in each.whole}
        for (name, digest), ran in each.executed.items():
            key = each.unit.target, name, digest
            executed[key] = executed[key] | ran if key in executed else ran
    found: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for (target, name, digest), ran in executed.items():
        if ((target, name, digest) in launched) == whole:
            found[target, name].append(ran)
    return {
        key: (len(each), sum(len(ran) for ran in each), sum(int(np.count_nonzero(ran)) for ran in each))
        for key, each in sorted(found.items())
    }
