"""The verdict on ratios: regressions, noise, and files that cannot be compared."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import typer

from fusedtp.bench import ratios, regress
from fusedtp.bench.regress import BASELINE_LAUNCHES, LAUNCHES, Measured, NotComparable, excess, judge
from fusedtp.machine import Machine

pytest.importorskip("pytest_benchmark")
from .command import module
from .launches import HERE, IDS, KEYS, noisy, recorded
from .saved import saved

ROOT = Path(__file__).parent.parent
OTHER = "decomposed on 2 ranks"


def of(ratios: Mapping[str, Sequence[float]]) -> Measured:
    return Measured(ratios, 3.0)


def over(draw: Callable[[int, Mapping[str, float], int], Mapping[str, Sequence[float]]], slower: Mapping[str, float],
         seed: int, keys: regress.Keys = KEYS) -> list[str]:  # fmt: skip
    """Return what is reported, as `compare` does, of launches that `draw` gives."""
    baseline = of(draw(BASELINE_LAUNCHES, {}, 3 * seed))
    now = of(draw(LAUNCHES, slower, 3 * seed + 1))
    found = excess(judge(now, baseline, keys))
    if found:
        found = excess(judge(now.and_then(of(draw(LAUNCHES, slower, 3 * seed + 2))), baseline, keys))
    return list(found)


def test_ids_are_those_that_are_stored() -> None:
    # a change of these names invalidates every baseline and saved timing
    assert [
        f"{op}-{rest}-{schedule}"
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
        for rest in ("1024x1024x1024-float32-2-forward", "512x512x512-float32-2-both")
        for schedule in ("unfused", "decomposed")
    ] == IDS
    for gpus, counts in ((0, {2}), (1, {1}), (2, {2}), (3, {2}), (4, {2, 4}), (8, {2, 4, 8}), (16, {2, 4, 8})):
        ids = [each.id(schedule) for each in regress.cases(gpus) for schedule in regress.schedules(gpus)]
        assert len(set(ids)) == len(ids)
        assert any(key.endswith("-fused") for key in ids) is (gpus > 0)
        assert {each.case.world_size for each in regress.cases(gpus)} == counts


def test_a_tenth_is_found_in_recorded_launches_and_nothing_else() -> None:
    """Draws from launches of unchanged code on a shared machine."""
    trials = 200
    assert [over(recorded, {}, seed) for seed in range(trials)] == [[]] * trials
    found = [over(recorded, {"decomposed": 1.1}, seed) for seed in range(trials)]
    assert sum(OTHER in each for each in found) >= 0.9 * trials
    assert not any(name.startswith("unfused") for each in found for name in each)


def test_limits_follow_the_spread_of_the_baseline() -> None:
    """On 8 GPUs whose launches differ by 2 %, a slowdown by 5 % on 4 of them alone is found, and a case by a fifth."""
    keys = regress.keys_of(regress.cases(8), regress.schedules(8))

    def draw(count: int, slower: Mapping[str, float], seed: int) -> dict[str, list[float]]:
        return noisy(slower, seed, count, 0.02, keys)

    on_four = {each.id("fused"): 1.05 for each in regress.cases(8) if each.case.world_size == 4}
    case = regress.cases(8)[0].id("fused")
    trials = 25
    assert [over(draw, {}, seed, keys) for seed in range(trials)] == [[]] * trials
    assert sum("fused on 4 ranks" in over(draw, on_four, seed, keys) for seed in range(trials)) >= 0.9 * trials
    assert sum(case in over(draw, {case: 1.2}, seed, keys) for seed in range(trials)) >= 0.9 * trials
    wide, close = (regress.limits(of(noisy({}, 0, 10, spread)), KEYS, LAUNCHES) for spread in (0.06, 0.02))
    assert all(wide[name] > close[name] > 1.02 for name in close)


def test_one_slower_case_fails_by_its_own_name() -> None:
    def draw(count: int, slower: Mapping[str, float], seed: int) -> dict[str, list[float]]:
        return noisy(slower, seed, count)

    key = IDS[3]
    assert over(draw, {key: 1.3}, 0)[-1] == key
    assert not [name for name in over(draw, {key: 1.3}, 0) if "-" in name and name != key]


def test_what_slows_all_schedules_is_said_of_the_unfused_one() -> None:
    # the matmul is not slower: other work on the machine, or shared code
    slowdowns = judge(of(noisy({"unfused": 1.4, "decomposed": 1.4}, 0, 6)), of(noisy({}, 1, 10)), KEYS)
    assert [name for name in excess(slowdowns) if "-" not in name] == ["unfused on 2 ranks"]
    assert slowdowns["unfused on 2 ranks"].by == pytest.approx(1.4, rel=0.05)
    assert slowdowns[OTHER].by == pytest.approx(1.0, rel=0.05)


def test_faster_is_no_regression_of_itself_or_of_others() -> None:
    for faster in ({"decomposed": 0.5, "unfused": 0.5}, {"unfused": 0.5}, {"matmul": 0.5}, {"decomposed": 0.5}):
        found = excess(judge(of(noisy(faster, 0, 6)), of(noisy({}, 1, 10)), KEYS))
        # A faster matmul makes every schedule slower beside it, but no schedule slower than unfused.
        assert all("unfused" in name for name in found) if "matmul" in faster else not found


class Launches:
    """A `run` in place of pytest that returns these launches in turn, the last one repeatedly, and counts its calls."""

    def __init__(self, *slower: Mapping[str, float], spread: float = 0.02) -> None:
        self.slower, self.spread, self.num_calls, self.shown = slower, spread, 0, 0

    def __call__(self, folder: Path, name: str, launches: int, plant: str, against: Path | None = None) -> Path:
        slower = {**self.slower[min(self.num_calls, len(self.slower) - 1)]}
        slower |= regress.planted(plant, regress.schedules(0))
        self.num_calls += 1
        self.shown += against is not None
        folder = folder / "Linux-CPython-3.11-64bit"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{len([*folder.iterdir()]) + 1:04}_{name}.json"
        path.write_bytes(saved(noisy(slower, self.num_calls, launches, self.spread), HERE))
        return path


def command(out: Path, **options: Any) -> int:
    """Return the exit code of the command on HERE, without GPUs."""
    given = {"baseline": None, "save_baseline": False, "plant": "", "repeat": 1, "out": out} | options
    with (
        mock.patch.object(regress, "describe", return_value=HERE),
        mock.patch.object(regress, "num_gpus", return_value=0),
    ):
        try:
            regress.regress(**given)
        except typer.Exit as left:
            return left.exit_code
    return 0


@pytest.mark.parametrize(
    ("slower", "num_calls", "expected"),
    [([{}], 1, []), ([{"decomposed": 1.12}, {"decomposed": 0.9}], 2, []), ([{"decomposed": 1.3}], 2, [OTHER])],
)
def test_only_an_excess_that_stays_is_a_regression(
    slower: list[dict[str, float]], num_calls: int, expected: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    launch = Launches(*slower)
    monkeypatch.setattr(regress, "run", launch)
    said: list[str] = []
    stored(tmp_path / "regress.json")
    slowdowns, busier = regress.compare(tmp_path / "regress.json", HERE, KEYS, "", said.append)
    assert launch.num_calls == num_calls
    # repeated measurements are shown beside the baseline
    assert launch.shown == num_calls - 1
    assert [name for name in excess(slowdowns) if "-" not in name] == expected
    assert busier == pytest.approx(1.0)
    # every suspicion is printed
    assert len(said) == num_calls - 1
    assert all(OTHER in line for line in said)


def stored(path: Path, machine: Machine = HERE) -> bytes:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(saved(noisy({}, 99, BASELINE_LAUNCHES, 0.02), machine))
    return path.read_bytes()


def test_baseline_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "machine" / "regress.json"
    # the file is committed, so it must be small
    assert len(stored(path)) < 48 << 10
    read = regress.read(path, HERE)
    assert read.ratios == {key: pytest.approx(values) for key, values in noisy({}, 99, BASELINE_LAUNCHES, 0.02).items()}
    assert read.num_launches == BASELINE_LAUNCHES
    assert read.matmul_ms == pytest.approx(3.0)
    assert read.about == f"commit {HERE.commit}, 2026-01-02T03:04:05+00:00"
    # newer versions may be the change under test, not another machine
    newer = replace(HERE, torch="2.14", driver="600", commit="4567")
    assert regress.read(path, newer) == read


def test_every_committed_baseline_is_one_of_its_machine() -> None:
    for path in (path for folder in (ROOT / "results").iterdir() for path in regress.history(folder)):
        content = json.loads(path.read_text())
        about = {name: value for name, value in content["machine_info"].items() if name in Machine.__dataclass_fields__}
        machine = Machine(**{"commit": "", "dirty": False} | about)
        assert path.relative_to(ROOT / "results").parts[:2] == (machine.name, "benchmarks")
        gpus = machine.num_gpus
        regress.check_cases(regress.read(path, machine), regress.keys_of(regress.cases(gpus), regress.schedules(gpus)))


def test_baseline_of_another_version_of_pytest_benchmark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "regress.json"
    good = stored(path)
    before = regress.read(path, HERE)
    path.write_bytes(changed(statistics(good, mode=1.0), more={}, version="6.0"))
    assert regress.read(path, HERE) == before


def changed(good: bytes, **values: Any) -> bytes:
    return json.dumps(json.loads(good) | values).encode()


def statistics(good: bytes, **values: Any) -> bytes:
    """Change some statistics of the first benchmark."""
    first, *others = json.loads(good)["benchmarks"]
    return changed(good, benchmarks=[first | {"stats": first["stats"] | values}, *others])


def elsewhere(**other: Any) -> tuple[Callable[[bytes], bytes], str]:
    """Return a baseline of another machine, and the message."""
    made = saved(noisy({}, 0, BASELINE_LAUNCHES), replace(HERE, **other))
    return lambda good: made, rf"another machine's: .*{re.escape(repr(next(iter(other.values()))))} there"


def of_cases(ratios: Mapping[str, Sequence[float]]) -> Callable[[bytes], bytes]:
    return lambda good: saved(ratios, HERE)


NONE = "is not a baseline"
RATIOS = noisy({}, 0, BASELINE_LAUNCHES)
LACKS = {key: ratio for key, ratio in RATIOS.items() if not key.startswith(IDS[1])}
# A change of a valid file, and the message.
BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda good: b"", NONE),
    "cut": (lambda good: good[:-40], NONE),
    "binary": (lambda good: b"\xff\xfe\x00", NONE),
    "list": (lambda good: b"[]", NONE),
    "foreign": (lambda good: b'{"name": "apple"}', NONE),
    "zero": (lambda good: statistics(good, data=[0] * BASELINE_LAUNCHES), NONE),
    "text": (lambda good: statistics(good, data=["1"] * BASELINE_LAUNCHES), NONE),
    "without launches": (lambda good: statistics(good, data=[]), NONE),
    "fewer launches": (lambda good: statistics(good, data=[1.0]), NONE),
    "none": (lambda good: changed(good, benchmarks=[]), NONE),
    "twice": (lambda good: changed(good, benchmarks=json.loads(good)["benchmarks"] * 2), NONE),
    "machine": (lambda good: changed(good, machine_info="mine"), NONE),
    "other name": elsewhere(name="cpu-some-4c", cores=4),
    "other cpu": elsewhere(cpu="Other"),
    "other gpu": elsewhere(gpu="H100", num_gpus=8, links="18 NVLinks"),
    "other links": elsewhere(links="PCIe (PHB)"),
}
OTHER_CASES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "lacks": (of_cases(LACKS), re.escape(f"it lacks 2, such as {IDS[1]} / m")),
    "has": (
        of_cases(RATIOS | {"other-fused / matmul": [1.0] * BASELINE_LAUNCHES}),
        "1 are not measured now, such as other-fused",
    ),
    "short": (of_cases(noisy({}, 0, 2)), f"the baseline has 2 launches, not {LAUNCHES} or more"),
}


@pytest.mark.parametrize("how", [*BROKEN, *OTHER_CASES])
def test_what_is_no_baseline_here_is_refused_and_untouched(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / HERE.name / "benchmarks" / "0001_baseline.json"
    path.parent.mkdir(parents=True)
    make, said = {**BROKEN, **OTHER_CASES}[how]
    content = make(stored(path))
    path.write_bytes(content)
    # nothing may be measured before the refusal
    monkeypatch.delattr(regress, "run")
    assert command(tmp_path) == 2
    assert re.search(said, capsys.readouterr().err)
    assert path.read_bytes() == content


def test_launches_that_disagree_are_no_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regress, "run", Launches({}, spread=0.15))
    with pytest.raises(NotComparable, match=r"no baseline: .* varied over 10 launches .* when less else runs"):
        regress.save(tmp_path, HERE, KEYS, print)
    assert not regress.history(tmp_path)


def test_the_slowdown_that_a_baseline_finds_is_that_of_the_reference_that_varies_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = random.Random(0)
    ratios = {
        key: [each * noise.lognormvariate(0, 0.06 if key.endswith("decomposed / unfused") else 0) for each in launches]
        for key, launches in noisy({}, 1, BASELINE_LAUNCHES, 0.005).items()
    }
    path, said = tmp_path / "0001_baseline.json", list[str]()
    path.write_bytes(saved(ratios, HERE))
    monkeypatch.setattr(regress, "run", lambda *_: path)
    regress.save(tmp_path, HERE, KEYS, said.append)
    (limit,) = (float(found[1]) for each in said if (found := re.match(f"{OTHER}: .* more than ([0-9.]+) will", each)))
    for power, is_over in ((1.2, True), (0.8, False)):
        slower = {key: [each * (limit**power if "-decomposed /" in key else 1.0) for each in launches]
                  for key, launches in ratios.items()}  # fmt: skip
        assert judge(of(slower), of(ratios), KEYS)[OTHER].is_over is is_over


def test_session_stores_then_passes_then_finds_what_is_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(regress, "run", Launches({}))
    assert command(tmp_path, plant="decomposed=1.1") == 2
    assert not any(tmp_path.iterdir())
    assert command(tmp_path) == 0
    said = capsys.readouterr().out
    assert f"no baseline for {HERE.name}" in said
    assert re.search(r"decomposed on 2 ranks: a slowdown by more than 1\.0\d+ will be found", said)
    folder = tmp_path / HERE.name / "benchmarks"
    (first,) = regress.history(folder)
    assert command(tmp_path, repeat=3) == 0
    assert "3 of 3 passed" in capsys.readouterr().out
    assert command(tmp_path, repeat=2, plant="decomposed=1.1") == 1
    said = capsys.readouterr().out
    assert "slower than the baseline in 2 of 2" in said
    assert re.search(r"1\.\d+ of 1\.0\d+ SLOWER decomposed on 2 ranks\n", said)
    assert regress.history(folder) == [first]
    # A new baseline is added, and the newest counts unless another is named.
    monkeypatch.setattr(regress, "run", Launches({"decomposed": 1.3}))
    assert command(tmp_path, save_baseline=True) == 0
    assert [path.name for path in regress.history(folder)] == ["0001_baseline.json", "0002_baseline.json"]
    assert command(tmp_path) == 0
    assert command(tmp_path, baseline=first) == 1
    assert command(tmp_path, baseline=first, save_baseline=True) == 2


def test_what_can_be_planted() -> None:
    schedules = regress.schedules(0)
    assert regress.planted("", schedules) == {}
    assert regress.planted("unfused=1.5,decomposed=1.3", schedules) == {"unfused": 1.5, "decomposed": 1.3}
    for text in ("decomposed", "decomposed=", "decomposed=fast", "decomposed=1", "fused=1.3", "unfused=inf"):
        with pytest.raises(ValueError, match="--plant takes SCHEDULE=FACTOR"):
            regress.planted(text, schedules)


# A plugin of pytest that gives the benchmarks made-up rounds: timer, stored numbers and selection are their own.
MADE_UP = """
import json, os, sys
from types import SimpleNamespace
from fusedtp.bench import ratios
SLOWER = json.loads(os.environ["SLOWER"])
WRONG = os.environ.get("FUSEDTP_WRONG", "")
number = [0]
def launch(tracked):
    number[0] += 1
    print("launch", *(str(each.case.op) for each in tracked), file=sys.stderr)
    noise = 1 + 0.01 * (number[0] % 3)
    plant = ratios.planted(os.environ.get("FUSEDTP_PLANT", ""), ratios.SCHEDULES).get("decomposed", 1.0)
    return {
        each: {
            name: SimpleNamespace(rounds_ms=(ms, 2 * ms, 3 * ms), median_ms=2 * ms, path="", error_ratio=0.5,
                                  variant=name, failed=bool(WRONG), gate=WRONG)
            for name, ms in (
                ("matmul", 1.0), ("unfused", 2.0), ("decomposed", 1.5 * noise * SLOWER[each.direction] * plant),
            )
        }
        for each in tracked
    }
ratios.launch = launch
"""


@pytest.fixture
def elsewhere_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder without a checkout, in which the benchmarks have made-up rounds. Its own files count nothing."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "made_up.py").write_text(MADE_UP)
    (tmp_path / "conftest.py").write_text("raise AssertionError('read')")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --unknown")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("FUSEDTP_LAUNCHES", "4")

    def run(command: Sequence[str], env: Mapping[str, str]) -> SimpleNamespace:
        python, safe_path, dash_m, *rest = command
        assert (python, safe_path, dash_m, *rest[:1]) == (sys.executable, "-P", "-m", regress.BENCHMARKS)
        code, said = pytest_in(tmp_path, *rest[1:], **env)
        print(said)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(regress, "subprocess", SimpleNamespace(run=run))
    return tmp_path


def pytest_in(folder: Path, *given: str, forward: float = 1.0, both: float = 1.0, **env: str) -> tuple[int, str]:
    """Return the exit code and output of the benchmarks, with `decomposed` slower by a direction's factor."""
    slower = json.dumps({"forward": forward, "both": both})
    own = {"PYTHONPATH": str(folder / "plugins"), "PYTEST_ADDOPTS": "-p made_up", "SLOWER": slower}
    return module(regress.BENCHMARKS, *given, folder=folder, env=env | own)


def test_options_of_pytest_benchmark_work_on_ratios(elsewhere_on_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Save, compare, fail by a tenth, and select, as users know it; `regress` reads and writes the same files."""
    here, folder = regress.describe(), elsewhere_on_disk / "saved"
    before = regress.run(folder, "before", BASELINE_LAUNCHES, "")
    baseline = regress.read(before, here)
    assert baseline.num_launches == BASELINE_LAUNCHES
    assert baseline.ratios[f"{IDS[1]} / matmul"][:3] == pytest.approx((1.515, 1.53, 1.5))
    assert baseline.matmul_ms == pytest.approx(2.0)

    fails = "--benchmark-compare-fail=median:10%"
    # Of one op, whose cases alone are launched, one is slower by more than a tenth and one by less.
    options = ("--benchmark-storage=saved", "--benchmark-save-data", "--benchmark-save=after")
    select = ("--benchmark-compare=0001", fails, "-s", "-k", "all_gather")
    # As `nox -s bench` runs it.
    code, said = pytest_in(elsewhere_on_disk, *options, *select, forward=1.15, both=1.05)
    assert code == 1
    slow = re.findall(r"test_ratio\[(\S+) / \w+\].* - Field 'median' has failed", said)
    assert slow == [IDS[1]] * 2
    assert f"test_ratio[{IDS[1]} / matmul] (NOW)" in said
    assert [each.name for each in regress.history(folder)] == ["0001_before.json", "0002_after.json"]
    assert said.count("launch all_gather_matmul all_gather_matmul\n") == said.count("launch ") == 4

    capfd.readouterr()
    now = regress.read(regress.run(elsewhere_on_disk / "now", "check", LAUNCHES, "decomposed=1.1", before), here)
    assert [name for name in excess(judge(now, baseline, KEYS)) if "-" not in name] == [OTHER]
    assert f"test_ratio[{IDS[1]} / matmul] (NOW)" in capfd.readouterr().out


def test_benchmarks_that_fail_end_the_command(
    elsewhere_on_disk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSEDTP_WRONG", "a wrong result")
    with pytest.raises(typer.Exit) as left:
        regress.run(elsewhere_on_disk, "check", 1, "")
    assert left.value.exit_code == 1
    assert "decomposed: a wrong result" in capfd.readouterr().out
    monkeypatch.setattr(regress, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="python -m pip install pytest-benchmark"):
        regress.run(elsewhere_on_disk, "check", 1, "")


def test_saved_timings_are_not_compared_across_machines() -> None:
    ours = ratios.pytest_benchmark_generate_machine_info()
    assert {"name", "gpu", "num_gpus", "links", "driver", "torch"} <= set(ours)
    assert not {"commit", "node"} & set(ours)
    ratios.pytest_benchmark_compare_machine_info(ours, {"machine_info": ours})
    for theirs, different in ((ours | {"cores": ours["cores"] + 1}, "cores"), ({"node": "somewhere"}, "name")):
        with pytest.raises(pytest.UsageError, match=f"saved on another machine: {different}"):
            ratios.pytest_benchmark_compare_machine_info(ours, {"machine_info": theirs})
