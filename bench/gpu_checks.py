"""Stages 4 and 5: two and four rank processes on one GPU run `gpu_ranks`, each check a row."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from . import gpu_ranks
from .cases import Item
from .gpu_rows import Run, found
from .ranks import RankError, RankPool
from .rows import Outcome
from .store import Row
from .timing import Verdict

# A check's longest, most of which is compiling; whoever is late is shown with its stacks.
CHECK_SECONDS = 300.0
START_SECONDS = 120.0
REPLAYS = 30


def checks(world_size: int, *, tiny: bool) -> dict[str, tuple[str, tuple[object, ...]]]:
    """By name, the function of `gpu_ranks` and its arguments behind the group; what is most likely to tell first."""
    dtypes = gpu_ranks.DTYPES[: 1 if tiny else 3]
    named: dict[str, tuple[str, tuple[object, ...]]] = {"fresh memory": ("poisoned", ())}
    for dtype in dtypes:
        named[f"collectives {dtype}"] = "collectives", (dtype, tiny)
        named |= {
            f"layers {schedule} {dtype}": ("layers", (schedule, dtype, tiny)) for schedule in ("fused", "decomposed")
        }
    if world_size == 2:
        times = 2 if tiny else REPLAYS
        named["replays"] = "replays", (times, tiny)
        named["replays of a layer"] = "replays_of_a_layer", (times, tiny)
        named["copies"] = "copies", (tiny,)
    return named


def items(world_size: int, *, emulate: bool = False) -> list[Item]:
    """The checks of a stage."""
    return [Item(name, world_size=world_size) for name in checks(world_size, tiny=emulate)]


def work(item: Item, run: Run, pool: RankPool) -> list[Outcome]:
    """Run a check on all ranks; AssertionError with what each says that fails, dies or is late."""
    name, given = checks(item.world_size, tiny=run.emulate)[item.op]
    try:
        results = pool.run(getattr(gpu_ranks, name), *given, timeout=min(CHECK_SECONDS, max(1.0, run.left() - 10)))
    except RankError as error:
        raise AssertionError(str(error)) from error
    assert False not in results, f"{item.op}: {results}"
    return [found("ranks", Verdict(0.0, 0.0))]


def stage(world_size: int, run: Run) -> None:
    """All checks on ranks of their own, started once."""
    env = {"TRITON_INTERPRET": str(int(run.device.type == "cpu")), "FUSEDTP_TUNING": "off"}
    with RankPool(world_size, timeout=START_SECONDS, env=env) as pool:
        for item in items(world_size, emulate=run.emulate):
            run.do(item, functools.partial(work, item, run, pool), needs=45.0, most=CHECK_SECONDS + 60)


def verdicts(world_size: int, rows: Sequence[Row]) -> list[str]:
    """How many checks passed, and which did not."""
    failed = [row for row in rows if not row.passed]
    lines = [f"{world_size} ranks on one device: {len(rows) - len(failed)} of {len(rows)} checks passed"]
    return lines + [f"  WRONG: {row.op}: {row.gate.splitlines()[0]}" for row in failed]
