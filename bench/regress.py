"""Compare the installed package with a stored baseline of this machine: exit status 1 if it is slower.

    python -m fusedtp.bench.regress --out FOLDER    # nox -s regress: in a checkout, to results/

Times on a shared machine vary more from hour to hour than by a regression. So a benchmark of `ratios` is a
ratio of two times of one round: of every schedule to the matmul alone, and to `unfused`. A launch on fresh ranks, which
draws their placement and memory again, gives one number for each: the median over its rounds.

A slowdown is the median of LAUNCHES launches over the baseline's. It is over its limit if it exceeds what the spread of
the baseline's own launches explains (`limits`). A busy machine may move one of the references, and so may a faster
`unfused`: a schedule is slower only if it is over the limits of both. A slowdown of all schedules is therefore reported
as `unfused`. What is over a limit is launched again, as often, and judged by all launches.

Judged are each case, and each schedule on each number of ranks by its geometric mean over the cases, whose limit is
closer. Baselines are files of pytest-benchmark, in the folder that `nox -s bench` saves to: a history, of which the
newest counts.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean, median, stdev
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeAlias

import torch
import typer

from fusedtp.files import Entry, entry_of, read_text
from fusedtp.machine import Machine, describe

from . import arguments, store
from .cases import OPS, SHAPES, Case, ranks
from .cases import schedules_here as schedules

# Launches of a check, which are doubled if one is over a limit, and of a baseline.
LAUNCHES, BASELINE_LAUNCHES = 6, 10
# Standard deviations of the difference of two medians that noise does not reach, of a schedule's mean and of one of its
# many cases, and the smallest limit.
DEVIATIONS, CASE_DEVIATIONS, LEAST_LIMIT = 4.0, 6.0, 1.02
# Largest limit of a schedule's mean for which a baseline is kept: it must find a slowdown by a tenth.
MOST_LIMIT = 1.1
# Seconds of a launch on two idle cores.
LAUNCH_SECONDS = 30.0
# Slowdown of the matmul alone from which a busy machine is mentioned beside a regression.
BUSY = 1.5
BENCHMARKS = f"{__package__}.ratios"
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


# Case, schedule and reference of every ratio, by "id / reference".
Keys: TypeAlias = Mapping[str, tuple[Tracked, str, str]]


def num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cases(gpus: int) -> tuple[Tracked, ...]:
    """Return the cases tracked on a machine with `gpus` GPUs: every op, one size forward, one with gradients.

    On 2, 4 and 8 GPUs, as far as there are.
    """
    found = []
    counts = tuple(size for size in (2, 4, 8) if size <= gpus) or ((1,) if gpus else (2,))
    for world_size, op in product(counts, OPS):
        if gpus:
            sizes = (SHAPES["large"][op][0], "forward"), (SHAPES["square"][op][0], "both")
            dtype = "bfloat16"
        else:
            # Long enough for the matmul to count, short enough for many rounds.
            dtype = "float32"
            sizes = (SHAPES["medium"][op][0], "forward"), ((512, 512, 512), "both")
        found += [Tracked(Case(op, *shape, dtype, world_size), direction) for shape, direction in sizes]
    return tuple(found)


def keys_of(tracked: Iterable[Tracked], names: Sequence[str]) -> dict[str, tuple[Tracked, str, str]]:
    """Return the case, schedule and reference of every ratio, by "id / reference"."""
    return {
        f"{each.id(schedule)} / {reference}": (each, schedule, reference)
        for each in tracked for schedule in names for reference in REFERENCES if schedule != reference
    }  # fmt: skip


class NotComparable(ValueError):
    """A baseline that does not apply to this run: malformed, another machine's, or of other cases."""


@dataclass(frozen=True)
class Measured:
    """Ratios of each launch by "id / reference", and the ms of the matmul alone, over all cases.

    about: commit and time.
    """

    ratios: Mapping[str, Sequence[float]]
    matmul_ms: float
    about: str = ""

    @property
    def num_launches(self) -> int:
        return min(map(len, self.ratios.values()))

    def and_then(self, more: Measured) -> Measured:
        """Return the launches of both."""
        ratios = {key: (*launches, *more.ratios[key]) for key, launches in self.ratios.items()}
        return replace(self, ratios=ratios, matmul_ms=geometric_mean((self.matmul_ms, more.matmul_ms)))


@dataclass(frozen=True)
class Slowdown:
    """Time over the baseline's, 1 if equal, and the limit above which it is a regression."""

    by: float
    limit: float

    @property
    def is_over(self) -> bool:
        return self.by > self.limit


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
    ratios: dict[str, tuple[float, ...]] = {}
    matmuls = []
    for benchmark in content.entries("benchmarks"):
        key = benchmark.text("param")
        if key in ratios:
            raise ValueError(f"{benchmark.where('param')} is already another benchmark's: {key}")
        stats = benchmark.entry("stats")
        data = stats.value("data")
        named = {str(at): each for at, each in enumerate(data)} if isinstance(data, list) else data
        launches = Entry(named, stats.where("data"))
        ratios[key] = tuple(launches.number(at, *_LIMITS) for at in launches.values)
        matmuls.append(benchmark.entry("extra_info").number("matmul_ms", *_LIMITS))
    if len(set(map(len, ratios.values()))) != 1 or not all(ratios.values()):
        raise ValueError("benchmarks have different numbers of launches, or none")
    return theirs.values, Measured(ratios, geometric_mean(matmuls), f"commit {commit}, {content.text('datetime')}")


def history(folder: Path) -> list[Path]:
    """Return the files that pytest-benchmark saved in `folder`, in the order of their numbers."""
    return sorted(folder.rglob("[0-9][0-9][0-9][0-9]_*.json"), key=lambda path: path.name)


def run(folder: Path, name: str, launches: int, plant: str, against: Path | None = None) -> Path:
    """Run the benchmarks on `launches` fresh sets of ranks; return the file that pytest-benchmark saves in `folder`.

    pytest-benchmark shows the results beside those of the file `against`. Exit with 1 if a benchmark fails, for example
    with a wrong result.
    """
    if find_spec("pytest_benchmark") is None:
        raise ValueError("pytest-benchmark is not installed: python -m pip install pytest-benchmark")
    options = [f"--benchmark-storage={folder}", f"--benchmark-save={name}", "--benchmark-save-data", "-q"]
    options += [f"--benchmark-compare={against}", "--benchmark-sort=name"] if against else ["--benchmark-quiet"]
    env = {**os.environ, "FUSEDTP_LAUNCHES": str(launches), "FUSEDTP_PLANT": plant}
    # -P, as this folder's fusedtp/ is not the installed package.
    if subprocess.run([sys.executable, "-P", "-m", BENCHMARKS, *options], env=env).returncode:
        raise typer.Exit(1)
    return history(folder)[-1]


def check_cases(baseline: Measured, keys: Iterable[str]) -> None:
    """Raise NotComparable unless the baseline has exactly these ratios, of several launches."""
    new, gone = sorted(set(keys) - set(baseline.ratios)), sorted(set(baseline.ratios) - set(keys))
    if new or gone:
        lacks = (
            f"it lacks {len(new)}, such as {new[0]}" if new else f"{len(gone)} are not measured now, such as {gone[0]}"
        )
        raise NotComparable(f"the baseline is of other cases ({lacks}): --save a new one")
    if baseline.num_launches < LAUNCHES:
        raise NotComparable(f"the baseline has {baseline.num_launches} launches, not {LAUNCHES} or more: --save one")


def _grouped(ratios: Mapping[str, Sequence[float]], keys: Keys) -> dict[tuple[str, str], dict[str, Sequence[float]]]:
    # Return the launches of every case by (schedule on so many ranks, reference) and id.
    found: dict[tuple[str, str], dict[str, Sequence[float]]] = {}
    for key, (each, schedule, reference) in keys.items():
        group = found.setdefault((f"{schedule} on {ranks(each.case.world_size)}", reference), {})
        group[each.id(schedule)] = ratios[key]
    return found


def _means(group: Mapping[str, Sequence[float]]) -> list[float]:
    # Return the geometric mean over the cases in each launch.
    return [geometric_mean(launch) for launch in zip(*group.values(), strict=True)]


def limits(baseline: Measured, keys: Keys, num_launches: int) -> dict[tuple[str, str], float]:
    """Return the limit of every case and schedule, by name and reference, for the median of so many launches.

    The spread over the baseline's launches is uncertain, so it is taken as at least what the other cases of the
    schedule say: their root mean square for a case, and less by the square root of their number for their mean.
    """
    found: dict[tuple[str, str], float] = {}
    # The standard deviation of the difference of two medians, of normal numbers.
    scale = math.sqrt(math.pi / 2 * (1 / baseline.num_launches + 1 / num_launches))
    for (name, reference), group in _grouped(baseline.ratios, keys).items():
        spreads = {each: _spread(launches) for each, launches in group.items()}
        usual = math.sqrt(fmean(spread**2 for spread in spreads.values()))
        reach = {each: CASE_DEVIATIONS * max(spread, usual) for each, spread in spreads.items()}
        reach[name] = DEVIATIONS * max(_spread(_means(group)), usual / math.sqrt(len(group)))
        found |= {(each, reference): max(LEAST_LIMIT, math.exp(scale * spread)) for each, spread in reach.items()}
    return found


def _spread(launches: Sequence[float]) -> float:
    return stdev(map(math.log, launches))


def judge(now: Measured, baseline: Measured, keys: Keys) -> dict[str, Slowdown]:
    """Return the slowdown of each schedule on each number of ranks, then that of each id.

    It is that to the reference by which it is the least, in parts of its limit.
    """
    allowed = limits(baseline, keys, now.num_launches)
    found: dict[str, Slowdown] = {}
    before = _grouped(baseline.ratios, keys)
    for (name, reference), group in _grouped(now.ratios, keys).items():
        theirs = before[name, reference]
        pairs = {name: (_means(group), _means(theirs))} | {each: (group[each], theirs[each]) for each in group}
        for each, (after, earlier) in pairs.items():
            slower = Slowdown(median(after) / median(earlier), allowed[each, reference])
            other = found.setdefault(each, slower)
            if slower.by / slower.limit < other.by / other.limit:
                found[each] = slower
    return dict(sorted(found.items(), key=lambda pair: "-" in pair[0]))


def excess(slowdowns: Mapping[str, Slowdown]) -> dict[str, Slowdown]:
    """Return the slowdowns above their limits."""
    return {name: slowdown for name, slowdown in slowdowns.items() if slowdown.is_over}


def compare(
    path: Path, machine: Machine, keys: Keys, plant: str, say: Callable[[str], None]
) -> tuple[dict[str, Slowdown], float]:
    """Launch LAUNCHES times, and as often again if something is over its limit; return what all launches say.

    Also return the matmul's time, alone, over the baseline's.
    """
    baseline = read(path, machine)

    def launched(against: Path | None) -> Measured:
        with TemporaryDirectory() as folder:
            return read(run(Path(folder), "check", LAUNCHES, plant, against), machine)

    now = launched(None)
    slowdowns = judge(now, baseline, keys)
    if excess(slowdowns):
        over = ", ".join(f"{name} {each.by:.2f}" for name, each in excess(slowdowns).items())
        seconds = arguments.expected(LAUNCHES * LAUNCH_SECONDS)
        say(f"over the limit in {LAUNCHES} launches: {over}; {LAUNCHES} more, {seconds}")
        # pytest-benchmark shows these results beside the baseline.
        now = now.and_then(launched(path))
        slowdowns = judge(now, baseline, keys)
    return slowdowns, now.matmul_ms / baseline.matmul_ms


def save(folder: Path, machine: Machine, keys: Keys, say: Callable[[str], None]) -> None:
    """Measure a baseline and add it to the history. NotComparable if its launches do not agree with each other."""
    path = run(folder, "baseline", BASELINE_LAUNCHES, "")
    found = {key: limit for key, limit in limits(read(path, machine), keys, 2 * LAUNCHES).items() if "-" not in key[0]}
    # Slower is what exceeds the limits of both references.
    names = {name: max(limit for (each, _), limit in found.items() if each == name) for name, _ in found}
    for name, limit in names.items():
        if limit > MOST_LIMIT:
            path.unlink()
            raise NotComparable(
                f"no baseline: {name} varied over {BASELINE_LAUNCHES} launches so that only a slowdown by {limit:.2f} "
                f"would be found, not {MOST_LIMIT:g}; try again when less else runs"
            )
        say(f"{name}: a slowdown by more than {limit:.3f} will be found")
    say(f"saved: {path}")


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
    save_baseline: Annotated[bool, typer.Option("--save", help="Add a baseline to this machine's history.")] = False,
    plant: Annotated[
        str, typer.Option(help="Make a schedule's recorded rounds slower, for example decomposed=1.1.")
    ] = "",
    repeat: Annotated[int, typer.Option(min=1, help="Judge so many times, and count.")] = 1,
    baseline: Annotated[Path | None, typer.Option(help="The baseline's file; default this machine's newest.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of results, one folder a machine.")] = Path("results"),
) -> None:
    """Hold every schedule's time, in multiples of others of the same run, against a stored baseline of this machine.

    Exits with 1 for a regression, 2 for a baseline that cannot be compared with. Without a baseline one is measured.
    """
    gpus, machine = num_gpus(), describe()
    keys = keys_of(cases(gpus), schedules(gpus))
    folder = out / machine.name / "benchmarks"
    failures = 0
    try:
        path = baseline or next(reversed(history(folder)), None)
        factors = planted(plant, schedules(gpus))
        if factors and save_baseline:
            raise ValueError("--plant makes the code slower on purpose, which is nothing to --save")
        if factors and path is None:
            raise ValueError(f"--plant needs a baseline, and there is none in {folder}: run without it first")
        if baseline is not None and save_baseline:
            raise ValueError(f"--save adds to {folder}: leave --baseline out")
        if baseline is not None and not baseline.exists():
            raise ValueError(f"there is no {baseline}")
        if path is None or save_baseline:
            typer.echo(f"{'new' if path else 'no'} baseline for {machine.name}: measuring one, to {folder}")
            typer.echo(arguments.expected(BASELINE_LAUNCHES * LAUNCH_SECONDS))
            save(folder, machine, keys, typer.echo)
            return
        stored = read(path, machine)
        typer.echo(f"baseline: {path}, {stored.about}")
        check_cases(stored, keys)
        each = arguments.expected(LAUNCHES * LAUNCH_SECONDS)
        typer.echo(f"{LAUNCHES} launches, {each}; as many again if something is slower")
        for number in range(1, repeat + 1):
            found, busier = compare(path, machine, keys, plant, typer.echo)
            for name, slowdown in found.items():
                told = "SLOWER" if slowdown.is_over else "      "
                typer.echo(f"{slowdown.by:6.3f} of {slowdown.limit:.3f} {told} {name}")
            typer.echo(f"{busier:6.3f}                 the matmul alone, which says what else the machine does")
            failures += bool(excess(found))
            if repeat > 1:
                typer.echo(f"{number - failures} of {number} passed")
    except ValueError as error:
        typer.echo(f"{error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo(f"Stopped: {folder} is as it was")
        raise typer.Exit(130) from None
    if failures:
        typer.echo(f"slower than the baseline in {failures} of {repeat}")
        if busier > BUSY:
            typer.echo(
                f"The matmul alone takes {busier:.1f} times as long as for the baseline: this machine does more now, "
                "which costs ranks that wait for each other more. Try again when it is quiet"
            )
        raise typer.Exit(1)


if __name__ == "__main__":
    arguments.run(regress)
