"""Is the present code as fast as the stored baseline of this machine? `nox -s regress`, exit status 1 if it is not.

Times on a shared machine differ by more from hour to hour than a regression does, so what is held against the baseline
are ratios, each the median over rounds of two times of one round (`tracked`): of every schedule to the matmul
alone, and to `unfused`. A busy machine moves either by itself: ranks that wait for each other lose more than a matmul
does; a schedule's slowdown is the lesser of both. What slows all schedules alike is therefore reported as `unfused`.

Two limits: for the geometric mean of a schedule's slowdowns over all cases, where the noise of the cases averages out,
and, further off, for one case. What is over its limit is measured again on fresh ranks, and is a regression when it was
over it in every one of LAUNCHES launches.

The baseline is results/<machine>/regress.json. There is no comparing with another machine's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from fusedtp.entries import Entry, brief, entry_of
from fusedtp.files import read_text, replace

from . import arguments, store
from .machine import Machine, describe

if TYPE_CHECKING:
    from .tracked import Tracked

# One launch is enough to pass and all of them are needed to fail: below the middle between 1 and 1.3.
SCHEDULE_LIMIT, CASE_LIMIT = 1.12, 1.25
LAUNCHES, BASELINE_LAUNCHES = 4, 4
REFERENCES = ("matmul", "unfused")
# A matmul that takes so many times as long as the baseline's is worth a remark where something is slower.
BUSY = 1.5
FORMAT = 1
# Of a file: ratios and times beyond these were not measured.
_LIMITS = (1e-9, 1e9)
# What makes two machines one: a driver or a version may be the very change that is to be judged.
IDENTITY = ("name", "cpu", "cores", "gpu", "num_gpus", "links")

# The rounds of a launch, and by "id / reference" one ratio a round.
Launch: TypeAlias = "Mapping[Tracked, Sequence[Mapping[str, float]]]"
Samples: TypeAlias = dict[str, list[float]]


class NotComparable(ValueError):
    """A baseline that this run cannot be held against: malformed, another machine's, or of other cases."""


@dataclass(frozen=True)
class Baseline:
    """Ratios by "id / reference", and what they were measured on.

    matmul_ms: the geometric mean over cases of the matmul alone. spread: the launches' lowest and highest geometric
    mean of each schedule's ratios.
    """

    machine: dict[str, Any]
    time_utc: str
    matmul_ms: float
    rounds: int
    ratios: dict[str, float]
    spread: dict[str, list[float]]


@dataclass(frozen=True)
class Verdict:
    """How much slower than the baseline, 1 being as fast: every id, and every schedule over all of its ids.

    `matmul` is that of the matmul alone, in ms and so of the machine as it is now: no limit is on it.
    """

    cases: dict[str, float]
    schedules: dict[str, float]
    matmul: float

    @property
    def excess(self) -> dict[str, float]:
        """What is over its limit."""
        over = {name: by for name, by in self.schedules.items() if by > SCHEDULE_LIMIT}
        return over | {name: by for name, by in self.cases.items() if by > CASE_LIMIT}

    def least(self, other: Verdict) -> Verdict:
        """The smaller slowdown of each: what is over its limit in both is over it here."""
        return Verdict(
            {name: min(by, other.cases[name]) for name, by in self.cases.items()},
            {name: min(by, other.schedules[name]) for name, by in self.schedules.items()},
            min(self.matmul, other.matmul),
        )


def schedule_of(key: str) -> str:
    return key.rpartition("-")[2]


def schedule_means(values: Mapping[str, float]) -> dict[str, float]:
    """From "id / reference" to "schedule / reference": geometric means over the cases."""
    names = dict.fromkeys(schedule_of(key) for key in values)
    return {name: geometric_mean(value for key, value in values.items() if schedule_of(key) == name) for name in names}


def lesser(values: Mapping[str, float]) -> dict[str, float]:
    """From "name / reference" to "name": the least over references."""
    names = dict.fromkeys(key.partition(" / ")[0] for key in values)
    return {name: min(value for key, value in values.items() if key.partition(" / ")[0] == name) for name in names}


def keys_of(cases: Iterable[Tracked], schedules: Sequence[str]) -> dict[str, tuple[Tracked, str, str]]:
    """By "id / reference": the case, the schedule and the reference of every ratio."""
    return {
        f"{each.id(schedule)} / {reference}": (each, schedule, reference)
        for each in cases
        for schedule in schedules
        for reference in REFERENCES
        if schedule != reference
    }


def ratios_of(launched: Launch) -> Samples:
    """Every schedule over the references of its round."""
    schedules = [name for rounds in launched.values() for name in rounds[0] if name != "matmul"]
    return {
        key: [times[schedule] / times[reference] for times in launched[each]]
        for key, (each, schedule, reference) in keys_of(launched, list(dict.fromkeys(schedules))).items()
    }


def check_cases(baseline: Baseline, keys: Iterable[str]) -> None:
    """NotComparable unless the baseline has these ratios and no others."""
    new, gone = sorted(set(keys) - set(baseline.ratios)), sorted(set(baseline.ratios) - set(keys))
    if new or gone:
        lacks = (
            f"it lacks {len(new)}, such as {new[0]}" if new else f"{len(gone)} are not measured now, such as {gone[0]}"
        )
        raise NotComparable(f"the baseline is of other cases ({lacks}): --save a new one")


def matmul_ms(launched: Launch) -> float:
    """The matmul alone, the geometric mean over cases of the medians over rounds."""
    return geometric_mean(median(times["matmul"] for times in rounds) for rounds in launched.values())


def judge(launched: Launch, baseline: Baseline) -> Verdict:
    """A launch's medians against the baseline's, which has the same ids."""
    slowdowns = {key: median(values) / baseline.ratios[key] for key, values in ratios_of(launched).items()}
    return Verdict(lesser(slowdowns), lesser(schedule_means(slowdowns)), matmul_ms(launched) / baseline.matmul_ms)


def baseline_of(launches: Sequence[Launch], machine: Machine) -> Baseline:
    """The baseline that these launches give. NotComparable where they do not agree with each other."""
    found = [ratios_of(launched) for launched in launches]
    pooled = {key: [value for samples in found for value in samples[key]] for key in found[0]}
    means = [schedule_means({key: median(values) for key, values in samples.items()}) for samples in found]
    spread = {name: [min(each[name] for each in means), max(each[name] for each in means)] for name in means[0]}
    for name, (low, high) in spread.items():
        if high > low * SCHEDULE_LIMIT:
            raise NotComparable(
                f"no baseline: {name} was {low:.2f} to {high:.2f} in {len(launches)} launches, "
                f"too far apart to find a regression by {SCHEDULE_LIMIT:g}; try again when less else runs"
            )
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ratios = {key: median(values) for key, values in pooled.items()}
    alone_ms = median(matmul_ms(launched) for launched in launches)
    return Baseline(asdict(machine), now, alone_ms, min(map(len, pooled.values())), ratios, spread)


def write(path: Path, baseline: Baseline) -> None:
    """Replace `path` by this baseline, atomically."""
    rounded = {
        "matmul_ms": round(baseline.matmul_ms, 4),
        "ratios": {key: round(value, 4) for key, value in baseline.ratios.items()},
        "spread": {name: [round(value, 4) for value in ends] for name, ends in baseline.spread.items()},
    }
    replace(path, (json.dumps({"format": FORMAT, **asdict(baseline), **rounded}, indent=1) + "\n").encode())


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """What tells two machines apart, in words; empty for one machine, whatever its versions are."""
    pairs = {name: (theirs.get(name), ours.get(name)) for name in IDENTITY}
    return ", ".join(f"{name} {their!r} there, {our!r} here" for name, (their, our) in pairs.items() if their != our)


def read(path: Path, machine: Machine) -> Baseline:
    """The baseline at `path`, which is not touched. NotComparable unless it is one, and this machine's."""
    try:
        content = entry_of(read_text(path, max_bytes=store.MAX_BYTES))
        content.only("format", "machine", "time_utc", "matmul_ms", "rounds", "ratios", "spread")
        content.integer("format", FORMAT, FORMAT)
        theirs = content.entry("machine").only(*asdict(machine))
        theirs.text("commit")
        spread = content.entry("spread")
        baseline = Baseline(
            theirs.values, content.text("time_utc"), content.number("matmul_ms", *_LIMITS),
            content.integer("rounds", 1, 2**31), content.numbers("ratios", *_LIMITS),
            {name: _ends(spread, name) for name in spread.values},
        )  # fmt: skip
        different = differences(baseline.machine, asdict(machine))
    except (OSError, ValueError) as error:
        raise NotComparable(f"{path} is not a baseline ({error}); move it away to write a new one") from error
    if different:
        raise NotComparable(f"{path} is another machine's: {different}. Ratios of two machines cannot be compared")
    return baseline


def _ends(spread: Entry, name: str) -> list[float]:
    ends = spread.value(name)
    if not isinstance(ends, list) or len(ends) != 2:
        raise ValueError(f"{spread.where(name)} must be a list of two numbers, got {brief(ends)}")
    pair = Entry({"[0]": ends[0], "[1]": ends[1]}, spread.where(name))
    low, high = (pair.number(end, *_LIMITS) for end in pair.values)
    if low > high:
        raise ValueError(f"{spread.where(name)} must be low and high, got {low} and {high}")
    return [low, high]


def compare(baseline: Baseline, plant: Mapping[str, float], say: Callable[[str], None]) -> Verdict:
    """Measure until nothing was over its limit in every launch, at most LAUNCHES launches.

    NotComparable, before anything is measured, for a baseline of other cases.
    """
    from . import tracked

    gpus = tracked.num_gpus()
    cases = tracked.cases(gpus)
    check_cases(baseline, keys_of(cases, tracked.schedules(gpus)))
    verdict: Verdict | None = None
    for number in range(1, LAUNCHES + 1):
        new = judge(tracked.launch(cases, gpus, plant=plant), baseline)
        verdict = verdict.least(new) if verdict else new
        if not verdict.excess:
            break
        over = ", ".join(f"{name} {by:.2f}" for name, by in verdict.excess.items())
        say(f"over the limit in {number} of {LAUNCHES} launches: {over}")
    assert verdict is not None
    return verdict


def show(verdict: Verdict, say: Callable[[str], None]) -> None:
    """The slowdowns, what is over a limit marked."""
    for name, by in (verdict.schedules | verdict.cases).items():
        limit = SCHEDULE_LIMIT if name in verdict.schedules else CASE_LIMIT
        say(f"{by:6.3f} of {limit:g} {'SLOWER' if by > limit else '      '} {name}")


def planted(text: str, known: Sequence[str]) -> dict[str, float]:
    """{"decomposed": 1.3} from "decomposed=1.3". ValueError for another schedule, or a factor that is not above 1."""
    plant = {}
    for part in filter(None, text.split(",")):
        name, _, factor = part.partition("=")
        try:
            plant[name] = float(factor)
        except ValueError:
            plant[name] = math.nan
        if name not in known or not 1 < plant[name] < math.inf:
            raise ValueError(f"--plant takes SCHEDULE=FACTOR, one of {', '.join(known)} and above 1, got {part!r}")
    return plant


def save(path: Path, machine: Machine) -> Baseline:
    """Measure a baseline and write it."""
    from . import tracked

    gpus = tracked.num_gpus()
    launches = [tracked.launch(tracked.cases(gpus), gpus) for _ in range(BASELINE_LAUNCHES)]
    baseline = baseline_of(launches, machine)
    write(path, baseline)
    return baseline


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
    from . import tracked

    machine = describe()
    path = baseline or out / machine.name / "regress.json"
    try:
        factors = planted(plant, tracked.schedules(tracked.num_gpus()))
        if factors and save_baseline:
            raise ValueError("--plant makes the code slower on purpose, which is nothing to --save")
        if factors and not path.exists():
            raise ValueError(f"--plant needs a baseline, and there is no {path}: run without it first")
        if baseline is not None and not baseline.exists() and not save_baseline:
            raise ValueError(f"there is no {baseline}")
        # also before it is replaced: what is not ours stays
        stored = read(path, machine) if path.exists() else None
        if stored is None or save_baseline:
            typer.echo(f"{'new' if stored else 'no'} baseline for {machine.name}: measuring one, then {path}")
            stored = save(path, machine)
            for name, (low, high) in stored.spread.items():
                typer.echo(f"{name}: {low:.3f} to {high:.3f} in {BASELINE_LAUNCHES} launches")
            return
        typer.echo(f"baseline: {path}, commit {stored.machine.get('commit')}, {stored.time_utc}")
        failures: list[Verdict] = []
        for number in range(1, repeat + 1):
            verdict = compare(stored, factors, typer.echo)
            show(verdict, typer.echo)
            failures += [verdict] if verdict.excess else []
            if repeat > 1:
                typer.echo(f"{number - len(failures)} of {number} passed")
    except ValueError as error:
        typer.echo(f"{error}", err=True)
        raise typer.Exit(2) from error
    if failures:
        typer.echo(f"slower than the baseline in {len(failures)} of {repeat}")
        if (busier := failures[-1].matmul) > BUSY:
            typer.echo(
                f"The matmul alone takes {busier:.1f} times as long as for the baseline: this machine does more now, "
                "which costs ranks that wait for each other more. Try again when it is quiet"
            )
        raise typer.Exit(1)


if __name__ == "__main__":
    arguments.run(regress)
