"""The verdict on ratios: regressions, noise, and files that cannot be compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pytest
import typer

from fusedtp.bench import regress
from fusedtp.bench.machine import Machine
from fusedtp.bench.regress import CASE_LIMIT, LAUNCHES, SCHEDULE_LIMIT, Measured, NotComparable, excess, judge

pytest.importorskip("pytest_benchmark")
from .launches import HERE, IDS, RATIOS, noisy, samples
from .saved import saved

ROOT = Path(__file__).parent.parent
BASELINE = Measured(RATIOS, 3e-3)


def judged(slower: Mapping[str, float], seed: int, num_rounds: int = 32) -> dict[str, float]:
    found = {key: median(values) for key, values in samples([noisy(slower, seed, num_rounds)]).items()}
    return judge(Measured({key: found[key] for key in RATIOS}, found["matmul"]), BASELINE)


def schedules_of(slowdowns: Mapping[str, float]) -> dict[str, float]:
    return {name: by for name, by in slowdowns.items() if name in regress.schedules(0)}


def test_ids_are_those_that_are_stored() -> None:
    # a change of these names invalidates every baseline and saved timing
    assert [
        f"{op}-{rest}-{schedule}"
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
        for rest in ("1024x1024x1024-float32-2-forward", "512x512x512-float32-2-both")
        for schedule in ("unfused", "decomposed")
    ] == IDS
    for gpus, most in ((0, 2), (1, 1), (2, 2), (3, 2), (8, 8)):
        ids = [each.id(schedule) for each in regress.cases(gpus) for schedule in regress.schedules(gpus)]
        assert len(set(ids)) == len(ids)
        assert any(key.endswith("-fused") for key in ids) is (gpus > 0)
        assert max(each.case.world_size for each in regress.cases(gpus)) == most


@pytest.mark.parametrize("seed", range(10))
def test_noise_passes_and_one_slower_schedule_fails(seed: int) -> None:
    unchanged = judged({}, seed)
    assert not excess(unchanged)
    assert unchanged["matmul"] == pytest.approx(1, rel=0.2)
    assert schedules_of(unchanged) == pytest.approx({"unfused": 1, "decomposed": 1}, rel=0.08)
    slower = judged({"decomposed": 1.3}, seed)
    assert "decomposed" in excess(slower)
    assert "unfused" not in excess(slower)
    assert slower["decomposed"] == pytest.approx(1.3, rel=0.08)


def test_one_slower_case_fails_by_its_own_name() -> None:
    key = IDS[3]
    slowdowns = judged({key: 1.6}, 0, num_rounds=128)
    assert list(excess(slowdowns)) == [key]
    assert slowdowns[key] > CASE_LIMIT
    # the mean over cases alone would miss it
    assert slowdowns["decomposed"] < SCHEDULE_LIMIT


def test_what_slows_all_schedules_is_said_of_the_unfused_one() -> None:
    # the matmul is not slower: other work on the machine, or shared code
    slowdowns = judged({"unfused": 1.4, "decomposed": 1.4}, 0)
    assert list(schedules_of(excess(slowdowns))) == ["unfused"]
    assert schedules_of(slowdowns) == pytest.approx({"unfused": 1.4, "decomposed": 1}, rel=0.1)


def test_faster_is_no_regression_and_a_slower_matmul_is_told_without_a_limit() -> None:
    assert not excess(judged({"decomposed": 0.5, "unfused": 0.5}, 0))
    slowdowns = judge(replace(BASELINE, matmul=3e-2), BASELINE)
    assert slowdowns["matmul"] == pytest.approx(10)
    assert not excess(slowdowns)


class Launches:
    """A `run` in place of pytest that returns these launches in turn, the last one repeatedly, and counts its calls."""

    def __init__(self, *slower: Mapping[str, float]) -> None:
        self.slower, self.num_calls, self.num_launches, self.shown = slower, 0, 0, 0

    def __call__(self, folder: Path, launches: int, plant: str, against: Path | None = None) -> Path:
        slower = {**self.slower[min(self.num_calls, len(self.slower) - 1)]}
        slower |= regress.planted(plant, regress.schedules(0))
        self.num_calls += 1
        self.shown += against is not None
        found = [noisy(slower, 10 * self.num_calls + each) for each in range(launches)]
        path = folder / "0001_run.json"
        path.write_bytes(saved(samples(found), HERE))
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
    ("slower", "num_launches", "expected"),
    [
        ([{}], 1, []),
        ([{"decomposed": 1.3}, {}], 2, []),
        ([{"decomposed": 1.3}] * (LAUNCHES - 1) + [{}], LAUNCHES, []),
        # each launch has another excess
        ([{"decomposed": 1.3}, {"unfused": 1.3}], 2, []),
        ([{"decomposed": 1.3}], LAUNCHES, ["decomposed"]),
    ],
)
def test_only_an_excess_that_stays_is_a_regression(
    slower: list[dict[str, float]], num_launches: int, expected: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    launch = Launches(*slower)
    monkeypatch.setattr(regress, "run", launch)
    said: list[str] = []
    stored(tmp_path / "regress.json")
    slowdowns = regress.compare(tmp_path / "regress.json", HERE, "", said.append)
    assert launch.num_calls == num_launches
    # repeated measurements are shown beside the baseline
    assert launch.shown == num_launches - 1
    assert list(schedules_of(excess(slowdowns))) == expected
    # every suspicion is printed
    assert len(said) == (num_launches if expected else num_launches - 1)
    assert all("decomposed" in line for line in said)


def stored(path: Path, machine: Machine = HERE) -> bytes:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(saved(samples([noisy({}, seed) for seed in range(4)]), machine))
    return path.read_bytes()


def test_baseline_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "machine" / "regress.json"
    # the file is committed, so it must be small
    assert len(stored(path)) < 32 << 10
    read = regress.read(path, HERE)
    assert read.ratios == pytest.approx(RATIOS, rel=0.2)
    assert read.matmul == pytest.approx(3e-3, rel=0.1)
    assert {each["stats"]["rounds"] for each in json.loads(path.read_text())["benchmarks"]} == {4, 4 * 32}
    assert read.about == f"commit {HERE.commit}, 2026-01-02T03:04:05+00:00"
    assert list(read.spread) == ["unfused / matmul", "decomposed / matmul", "decomposed / unfused"]
    assert all(low < high for low, high in read.spread.values())
    # newer versions may be the change under test, not another machine
    newer = replace(HERE, torch="2.14", driver="600", commit="4567")
    assert regress.read(path, newer) == read


def test_every_committed_baseline_is_one_of_its_machine() -> None:
    for path in (ROOT / "results").glob("*/regress.json"):
        content = json.loads(path.read_text())
        about = {name: value for name, value in content["machine_info"].items() if name in Machine.__dataclass_fields__}
        machine = Machine(**{"commit": "", "dirty": False} | about)
        assert path.parent.name == machine.name
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
    made = saved(samples([noisy({}, 0)]), replace(HERE, **other))
    return lambda good: made, rf"another machine's: .*{re.escape(repr(next(iter(other.values()))))} there"


def of_cases(ratios: Mapping[str, float]) -> Callable[[bytes], bytes]:
    return lambda good: saved({"matmul": [3e-3]} | {key: [ratio] for key, ratio in ratios.items()}, HERE)


NONE = "is not a baseline"
LACKS = {key: ratio for key, ratio in RATIOS.items() if not key.startswith(IDS[1])}
# A change of a valid file, and the message.
BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda good: b"", NONE),
    "cut": (lambda good: good[:-40], NONE),
    "binary": (lambda good: b"\xff\xfe\x00", NONE),
    "list": (lambda good: b"[]", NONE),
    "foreign": (lambda good: b'{"name": "apple"}', NONE),
    "zero": (lambda good: statistics(good, median=0), NONE),
    "text": (lambda good: statistics(good, median="1"), NONE),
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
    "has": (of_cases(RATIOS | {"other-fused / matmul": 1.0}), "1 are not measured now, such as other-fused"),
}


@pytest.mark.parametrize("how", [*BROKEN, *OTHER_CASES])
def test_what_is_no_baseline_here_is_refused_and_untouched(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / HERE.name / "regress.json"
    make, said = {**BROKEN, **OTHER_CASES}[how]
    content = make(stored(path))
    path.write_bytes(content)
    # nothing may be measured before the refusal
    monkeypatch.delattr(regress, "run")
    # A baseline of other cases may be replaced.
    for save in (False, True) if how in BROKEN else (False,):
        assert command(tmp_path, save_baseline=save) == 2
        assert re.search(said, capsys.readouterr().err)
        assert path.read_bytes() == content


def test_launches_that_disagree_are_no_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(folder: Path, launches: int, plant: str) -> Path:
        path = folder / "0001_run.json"
        path.write_bytes(saved(samples([noisy({}, 0), noisy({"decomposed": 1.2}, 1)]), HERE))
        return path

    monkeypatch.setattr(regress, "run", run)
    with pytest.raises(NotComparable, match=r"decomposed / matmul was .* too far apart"):
        regress.save(tmp_path / "regress.json", HERE, print)
    assert not any(tmp_path.iterdir())


def test_session_stores_then_passes_then_finds_what_is_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(regress, "run", Launches({}))
    assert command(tmp_path, plant="decomposed=1.3") == 2
    assert not any(tmp_path.iterdir())
    assert command(tmp_path) == 0
    said = capsys.readouterr().out
    assert f"no baseline for {HERE.name}" in said
    assert re.search(r"decomposed / matmul: \S+ to \S+ in 4 launches", said)
    path = tmp_path / HERE.name / "regress.json"
    before = path.read_bytes()
    assert command(tmp_path, repeat=3) == 0
    assert "3 of 3 passed" in capsys.readouterr().out
    assert command(tmp_path, repeat=2, plant="decomposed=1.3") == 1
    said = capsys.readouterr().out
    assert "slower than the baseline in 2 of 2" in said
    assert re.search(r"1\.\d+ of 1\.12 SLOWER decomposed\n", said)
    assert path.read_bytes() == before
    assert command(tmp_path, save_baseline=True) == 0
    assert path.read_bytes() != before


def test_what_can_be_planted() -> None:
    schedules = regress.schedules(0)
    assert regress.planted("", schedules) == {}
    assert regress.planted("unfused=1.5,decomposed=1.3", schedules) == {"unfused": 1.5, "decomposed": 1.3}
    for text in ("decomposed", "decomposed=", "decomposed=fast", "decomposed=1", "fused=1.3", "unfused=inf"):
        with pytest.raises(ValueError, match="--plant takes SCHEDULE=FACTOR"):
            regress.planted(text, schedules)


# The samples of timings that pytest-benchmark saves, which it also reads and compares.
STUB = """
import json, os, pytest
NOW = [0.0]
def clock():
    return NOW[0]
SAMPLES = json.loads(os.environ["SAMPLES"])
@pytest.mark.benchmark(timer=clock)
@pytest.mark.parametrize("key", SAMPLES)
def test_ratio(benchmark, key):
    left = iter(SAMPLES[key])
    def one_round():
        NOW[0] += next(left)
    benchmark.pedantic(one_round, rounds=len(SAMPLES[key]), iterations=1)
"""


def test_what_pytest_benchmark_saves_is_read_and_compared_by_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Runs as `run` starts it, with these tests' conftest and made-up samples."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_bench.py").write_text(STUB)
    (tmp_path / "tests" / "conftest.py").write_text(
        "from pathlib import Path\nimport importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('shared', {str(Path(__file__).parent / 'conftest.py')!r})\n"
        "shared = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(shared)\n"
        "globals().update({name: each for name, each in vars(shared).items() if name.startswith('pytest_benchmark')})\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    here = regress.describe()
    for folder, factor in (("before", 1.0), ("after", 1.5)):
        launches = [noisy({"decomposed": factor}, seed) for seed in range(2)]
        monkeypatch.setenv("SAMPLES", json.dumps(samples(launches)))
        against = next((tmp_path / "before").rglob("*.json"), None)
        found = regress.read(regress.run(tmp_path / folder, 1, "", against), here)
        expected = {key: median(values) for key, values in samples(launches).items()}
        assert found.ratios == pytest.approx({key: expected[key] for key in RATIOS})
        assert found.matmul == pytest.approx(expected["matmul"])
    assert f"test_ratio[{IDS[1]} / matmul] (NOW)" in capfd.readouterr().out


def test_benchmarks_that_fail_end_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no tests/test_bench.py: run it in the folder of a checkout"):
        regress.run(tmp_path, 1, "")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_bench.py").write_text("def test_ratio():\n    assert False, 'a wrong result'\n")
    with pytest.raises(typer.Exit) as left:
        regress.run(tmp_path, 1, "")
    assert left.value.exit_code == 1


def test_saved_timings_are_not_compared_across_machines(pytestconfig: pytest.Config) -> None:
    hook = pytestconfig.hook
    pytest.importorskip("pytest_benchmark")
    ours = hook.pytest_benchmark_generate_machine_info(config=pytestconfig)
    assert {"name", "gpu", "num_gpus", "links", "driver", "torch"} <= set(ours)
    assert not {"commit", "node"} & set(ours)

    def compare(theirs: dict[str, Any]) -> None:
        hook.pytest_benchmark_compare_machine_info(
            config=pytestconfig, benchmarksession=None, machine_info=ours, compared_benchmark={"machine_info": theirs}
        )

    compare(ours)
    with pytest.raises(pytest.UsageError, match="saved on another machine: cores"):
        compare(ours | {"cores": ours["cores"] + 1})
    with pytest.raises(pytest.UsageError, match="saved on another machine: name"):
        compare({"node": "somewhere", "cpu": {"brand_raw": "Some"}})
