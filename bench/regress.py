"""Compare this checkout with the stored baseline of this machine: `nox -s regress`, exit status 1 if it is slower.

Times on a shared machine vary more from hour to hour than by a regression. So the baseline holds ratios, medians over
rounds of two times of one round (`timing`): of every schedule to the matmul alone, and to `unfused`. A busy machine may
move one of the ratios; a schedule's slowdown is the lesser of both. A slowdown of all schedules is therefore reported
as `unfused`.

There are two limits: one for the geometric mean of a schedule's slowdowns over all cases, and a wider one for a single
case. A regression is over its limit in every one of LAUNCHES launches on fresh ranks, because only a new launch draws
the placement of ranks and their memory again.

A launch is a run of the benchmarks of tests/test_bench.py. pytest-benchmark saves the baseline,
results/<machine>/regress.json, from a run of BASELINE_LAUNCHES launches.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeAlias

import torch
import typer

from fusedtp.files import Entry, entry_of, read_text, replace

from . import arguments, store
from .cases import OPS, SHAPES, Case
from .cases import schedules_here as schedules
from .machine import Machine, describe

# Below the middle between 1 and 1.3, as the least of LAUNCHES launches counts.
SCHEDULE_LIMIT, CASE_LIMIT = 1.12, 1.25
LAUNCHES, BASELINE_LAUNCHES = 4, 4
# Seconds of a launch on two idle cores.
LAUNCH_SECONDS = 30.0
# Slowdown of the matmul alone from which a busy machine is mentioned beside a regression.
BUSY = 1.5
BENCHMARKS = Path("tests/test_bench.py")
# Fields that identify a machine. Driver and versions are not among them: they may be the change to be judged.
IDENTITY = ("name", "cpu", "cores", "gpu", "num_gpus", "links")
# Range of plausible numbers in a file.
_LIMITS = (1e-9, 1e9)


REFERENCES = ("matmul", "unfused")


@dataclass(frozen=True)
class Tracked:
    """A case in one direction."""

    case: Case
    direction: str

    def id(self, variant: str) -> str:
        """Return the stored name, which must stay the same for the same benchmark."""
        case = self.case
        size = f"{case.M}x{case.N}x{case.K}"
        return f"{case.op}-{size}-{case.dtype}-{case.world_size}-{self.direction}-{variant}"


# Times of each variant, round by round, on one set of ranks.
Launch: TypeAlias = Mapping[Tracked, Mapping[str, Sequence[float]]]


def num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cases(gpus: int) -> tuple[Tracked, ...]:
    """Return the cases tracked on a machine with `gpus` GPUs: every op, one size forward, one with gradients."""
    found = []
    for op in OPS:
        if gpus:
            world_size = max(size for size in (1, 2, 4, 8) if size <= gpus)
            sizes = (SHAPES["large"][op][0], "forward"), (SHAPES["square"][op][0], "both")
            dtype = "bfloat16"
        else:
            # Long enough for the matmul to count, short enough for many rounds.
            world_size, dtype = 2, "float32"
            sizes = (SHAPES["medium"][op][0], "forward"), ((512, 512, 512), "both")
        found += [Tracked(Case(op, *shape, dtype, world_size), direction) for shape, direction in sizes]
    return tuple(found)


def keys_of(tracked: Iterable[Tracked], names: Sequence[str]) -> dict[str, tuple[Tracked, str, str]]:
    """Return the case, schedule and reference of every ratio, by "id / reference"."""
    return {
        f"{each.id(schedule)} / {reference}": (each, schedule, reference)
        for each in tracked for schedule in names for reference in REFERENCES if schedule != reference
    }  # fmt: skip


def schedule_means(values: Mapping[str, float]) -> dict[str, float]:
    """Return geometric means over the cases: from "id / reference" to "schedule / reference"."""
    names = {key: key.rpartition("-")[2] for key in values}
    return {name: geometric_mean(values[key] for key in values if names[key] == name) for name in names.values()}


def samples_of(launches: Sequence[Launch], names: Sequence[str]) -> dict[str, list[float]]:
    """Return every ratio in every round, by benchmark.

    Also return for each launch the means over cases of each schedule's median ratios, and of the matmul's medians in s.
    """
    found: dict[str, list[float]] = {}
    for launched in launches:
        ratios = {
            key: [mine / its for mine, its in zip(launched[each][schedule], launched[each][reference], strict=True)]
            for key, (each, schedule, reference) in keys_of(launched, names).items()
        }
        alone = geometric_mean(median(times["matmul"]) for times in launched.values())
        means = schedule_means({key: median(values) for key, values in ratios.items()}) | {"matmul": alone}
        for key, values in (ratios | {name: [mean] for name, mean in means.items()}).items():
            found.setdefault(key, []).extend(values)
    return found


class NotComparable(ValueError):
    """A baseline that does not apply to this run: malformed, another machine's, or of other cases."""


@dataclass(frozen=True)
class Measured:
    """Medians: of ratios by "id / reference", and, in s and over all cases, of the matmul alone.

    spread: the launches' lowest and highest mean over cases by "schedule / reference". about: commit and time.
    """

    ratios: Mapping[str, float]
    matmul: float
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    about: str = ""


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return the differences between two machines in words; empty for one machine with any versions."""
    pairs = {name: (theirs.get(name), ours.get(name)) for name in IDENTITY}
    return ", ".join(f"{name} {their!r} there, {our!r} here" for name, (their, our) in pairs.items() if their != our)


def read(path: Path, machine: Machine) -> Measured:
    """Read a baseline without changing the file. NotComparable unless valid and measured on this machine."""
    try:
        content = entry_of(read_text(path, max_bytes=store.MAX_BYTES))
        theirs, found = _benchmarks(content, asdict(machine))
        different = differences(theirs, asdict(machine))
    except (OSError, ValueError) as error:
        raise NotComparable(f"{path} is not a baseline ({error}); move it away to write a new one") from error
    if different:
        raise NotComparable(f"{path} is another machine's: {different}. Ratios of two machines cannot be compared")
    return found


def _benchmarks(content: Entry, machine: Mapping[str, Any]) -> tuple[Mapping[str, Any], Measured]:
    # Ignore further fields of other versions of pytest-benchmark.
    theirs = content.entry("machine_info").only(*(name for name in machine if name not in ("commit", "dirty")))
    commit = content.entry("commit_info").text("id")
    found: dict[str, dict[str, float]] = {}
    for benchmark in content.entries("benchmarks"):
        key, stats = benchmark.text("param"), benchmark.entry("stats")
        if found.setdefault(key, {}):
            raise ValueError(f"{benchmark.where('param')} is already another benchmark's: {key}")
        found[key] |= {name: stats.number(name, *_LIMITS) for name in ("median", "min", "max")}
    matmul = Entry(found, "benchmarks").value("matmul")["median"]
    spread = {key: (stats["min"], stats["max"]) for key, stats in found.items() if "-" not in key and key != "matmul"}
    ratios = {key: stats["median"] for key, stats in found.items() if "-" in key}
    return theirs.values, Measured(ratios, matmul, spread, f"commit {commit}, {content.text('datetime')}")


def run(folder: Path, launches: int, plant: str, against: Path | None = None) -> Path:
    """Run the benchmarks on `launches` fresh sets of ranks; return the file that pytest-benchmark saves in `folder`.

    pytest-benchmark shows the results beside those of the file `against`. Exit with 1 if a benchmark fails, for example
    with a wrong result.
    """
    if not BENCHMARKS.exists():
        raise ValueError(f"there is no {BENCHMARKS}: run it in the folder of a checkout")
    options = [f"--benchmark-storage={folder}", "--benchmark-save=run", "-q", "-k", "test_ratio"]
    options += [f"--benchmark-compare={against}", "--benchmark-sort=name"] if against else ["--benchmark-quiet"]
    env = {**os.environ, "FUSEDTP_LAUNCHES": str(launches), "FUSEDTP_PLANT": plant}
    # -P, as this folder's fusedtp/ is not the installed package.
    if subprocess.run([sys.executable, "-P", "-m", "pytest", str(BENCHMARKS), *options], env=env).returncode:
        raise typer.Exit(1)
    (saved,) = folder.rglob("*_run.json")
    return saved


def limit(name: str) -> float:
    """Return the limit of an id (with dashes) or of a schedule; the matmul has none."""
    return CASE_LIMIT if "-" in name else math.inf if name == "matmul" else SCHEDULE_LIMIT


def excess(slowdowns: Mapping[str, float]) -> dict[str, float]:
    """Return the slowdowns above their limits."""
    return {name: by for name, by in slowdowns.items() if by > limit(name)}


def lesser(values: Mapping[str, float]) -> dict[str, float]:
    """Return the least over references: from "name / reference" to "name"."""
    names = {key: key.partition(" / ")[0] for key in values}
    return {name: min(values[key] for key in values if names[key] == name) for name in names.values()}


def check_cases(baseline: Measured, keys: Iterable[str]) -> None:
    """Raise NotComparable unless the baseline has exactly these ratios."""
    new, gone = sorted(set(keys) - set(baseline.ratios)), sorted(set(baseline.ratios) - set(keys))
    if new or gone:
        lacks = (
            f"it lacks {len(new)}, such as {new[0]}" if new else f"{len(gone)} are not measured now, such as {gone[0]}"
        )
        raise NotComparable(f"the baseline is of other cases ({lacks}): --save a new one")


def judge(now: Measured, baseline: Measured) -> dict[str, float]:
    """Return slowdowns against the baseline, which has the same ids; 1 means equally fast.

    First each schedule over all of its ids, then each id, then `matmul` alone: its time, which shows the machine's
    state.
    """
    by_key = {key: ratio / baseline.ratios[key] for key, ratio in now.ratios.items()}
    return lesser(schedule_means(by_key)) | lesser(by_key) | {"matmul": now.matmul / baseline.matmul}


def compare(path: Path, machine: Machine, plant: str, say: Callable[[str], None]) -> dict[str, float]:
    """Launch until nothing is over its limit in all launches, at most LAUNCHES times; return the least times."""
    baseline, begin = read(path, machine), time.monotonic()
    least: dict[str, float] = {}
    for number in range(1, LAUNCHES + 1):
        with TemporaryDirectory() as folder:
            # If a limit was exceeded, pytest-benchmark shows all results beside the baseline.
            against = path if number > 1 else None
            new = judge(read(run(Path(folder), 1, plant, against), machine), baseline)
        least = {name: min(by, least.get(name, by)) for name, by in new.items()}
        if not excess(least):
            break
        over = ", ".join(f"{name} {by:.2f}" for name, by in excess(least).items())
        left = arguments.duration((LAUNCHES - number) * (time.monotonic() - begin) / number)
        say(f"over the limit in {number} of {LAUNCHES} launches: {over}; at most {left} left")
    return least


def save(path: Path, machine: Machine, say: Callable[[str], None]) -> None:
    """Measure a baseline and store it at `path`. NotComparable if its launches do not agree with each other."""
    with TemporaryDirectory() as folder:
        saved = run(Path(folder), BASELINE_LAUNCHES, "")
        spread, content = read(saved, machine).spread, saved.read_bytes()
    for name, (low, high) in spread.items():
        if high > low * SCHEDULE_LIMIT:
            raise NotComparable(
                f"no baseline: {name} was {low:.2f} to {high:.2f} in {BASELINE_LAUNCHES} launches, "
                f"too far apart to find a regression by {SCHEDULE_LIMIT:g}; try again when less else runs"
            )
        say(f"{name}: {low:.3f} to {high:.3f} in {BASELINE_LAUNCHES} launches")
    replace(path, content)


def planted(text: str, known: Sequence[str]) -> dict[str, float]:
    """Return {"decomposed": 1.3} for "decomposed=1.3". ValueError for an unknown schedule, or a factor of 1 or less."""
    plant = {}
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"(\w+)=([0-9]+\.?[0-9]*)", part)
        if found is None or found[1] not in known or not 1 < float(found[2]) < math.inf:
            raise ValueError(f"--plant takes SCHEDULE=FACTOR, one of {', '.join(known)} and above 1, got {part!r}")
        plant[found[1]] = float(found[2])
    return plant


def regress(
    save_baseline: Annotated[bool, typer.Option("--save", help="Measure this machine's baseline anew.")] = False,
    plant: Annotated[
        str, typer.Option(help="Make a schedule slower to see the alarm, for example decomposed=1.3.")
    ] = "",
    repeat: Annotated[int, typer.Option(min=1, help="Judge so many times, and count.")] = 1,
    baseline: Annotated[Path | None, typer.Option(help="The baseline; default this machine's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of results, one folder a machine.")] = Path("results"),
) -> None:
    """Hold every schedule's time, in multiples of others of the same run, against this machine's stored baseline.

    Exits with 1 for a regression, 2 for a baseline that cannot be compared with. Without a baseline one is measured.
    """
    gpus, machine = num_gpus(), describe()
    path = baseline or out / machine.name / "regress.json"
    failures: list[dict[str, float]] = []
    begin = time.monotonic()
    try:
        factors = planted(plant, schedules(gpus))
        if factors and save_baseline:
            raise ValueError("--plant makes the code slower on purpose, which is nothing to --save")
        if factors and not path.exists():
            raise ValueError(f"--plant needs a baseline, and there is no {path}: run without it first")
        if baseline is not None and not baseline.exists() and not save_baseline:
            raise ValueError(f"there is no {baseline}")
        # Check the file also before replacing it, so that a foreign file stays.
        stored = read(path, machine) if path.exists() else None
        if stored is None or save_baseline:
            typer.echo(f"{'new' if stored else 'no'} baseline for {machine.name}: measuring one, then {path}")
            typer.echo(f"about {arguments.duration(BASELINE_LAUNCHES * LAUNCH_SECONDS)}")
            save(path, machine, typer.echo)
            return
        typer.echo(f"baseline: {path}, {stored.about}")
        check_cases(stored, keys_of(cases(gpus), schedules(gpus)))
        each = arguments.duration(LAUNCH_SECONDS)
        typer.echo(f"1 to {LAUNCHES} launches, about {each} each: more than one if something is slower")
        for number in range(1, repeat + 1):
            found = compare(path, machine, plant, typer.echo)
            for name, by in found.items():
                typer.echo(f"{by:6.3f} of {limit(name):g} {'SLOWER' if by > limit(name) else '      '} {name}")
            failures += [found] if excess(found) else []
            if repeat > 1:
                left = arguments.duration((repeat - number) * (time.monotonic() - begin) / number)
                typer.echo(f"{number - len(failures)} of {number} passed, about {left} left")
    except ValueError as error:
        typer.echo(f"{error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo(f"Stopped: {path} is as it was")
        raise typer.Exit(130) from None
    if failures:
        typer.echo(f"slower than the baseline in {len(failures)} of {repeat}")
        if (busier := failures[-1]["matmul"]) > BUSY:
            typer.echo(
                f"The matmul alone takes {busier:.1f} times as long as for the baseline: this machine does more now, "
                "which costs ranks that wait for each other more. Try again when it is quiet"
            )
        raise typer.Exit(1)


if __name__ == "__main__":
    arguments.run(regress)
