"""What stages do in processes of their own. Stages 4 and 5: two and four ranks on one GPU run `gpu_ranks`, each check a
row. Stage 1: what `fusedtp doctor` says of the machine, kept beside its rows.
"""

from __future__ import annotations

import functools
import subprocess
import sys
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
CALL_SECONDS = 120.0
REPLAYS = 30
DOCTOR_SECONDS = 80.0


def checks(world_size: int, *, tiny: bool) -> dict[str, tuple[str, tuple[object, ...]]]:
    """By name, the function of `gpu_ranks` and its arguments behind the group; what is most likely to tell first."""
    dtypes = gpu_ranks.DTYPES[: 1 if tiny else 3]
    named: dict[str, tuple[str, tuple[object, ...]]] = {"fresh memory": ("poisoned", ())}
    for dtype in dtypes:
        named[f"collectives {dtype}"] = "collectives", (dtype, tiny)
        named |= {
            f"layers {schedule} {dtype}": ("layers", (schedule, dtype, tiny)) for schedule in ("fused", "decomposed")
        }
        named[f"trees {dtype}"] = "trees", (dtype, tiny)
        named[f"switch {dtype}"] = "switch", (dtype, tiny)
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
    return [found("ranks", Verdict())]


def stage(world_size: int, run: Run) -> None:
    """All checks on ranks of their own, started once."""
    env = {"TRITON_INTERPRET": str(int(run.device.type == "cpu")), "FUSEDTP_TUNING": "off"}
    with RankPool(world_size, timeout=CALL_SECONDS, env=env) as pool:
        each = functools.partial(work, pool=pool)
        run.do_all(items(world_size, emulate=run.emulate), each, needs=45.0, most=CHECK_SECONDS + 60)


def verdicts(world_size: int, rows: Sequence[Row]) -> list[str]:
    """How many checks passed, and which did not."""
    failed = [row for row in rows if not row.passed]
    lines = [f"{world_size} ranks on one device: {len(rows) - len(failed)} of {len(rows)} checks passed"]
    return lines + [f"  WRONG: {row.op}: {row.gate.splitlines()[0]}" for row in failed]


def doctor(item: Item, run: Run) -> list[Outcome]:
    """Write what it says, once a commit; AssertionError with its last words where it fails or is late."""
    command = [sys.executable, "-X", "faulthandler", "-m", "fusedtp.bench.cli", "doctor"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOCTOR_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"doctor took more than {DOCTOR_SECONDS:g} s: {error.output!r}") from error
    assert done.returncode == 0, f"doctor ended with status {done.returncode}: {done.stderr[-2000:]}"
    run.path.with_name("gpu-doctor.txt").write_text(done.stdout)
    print(done.stdout)
    return [found("doctor", Verdict())]
