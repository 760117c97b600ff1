"""The verdict on ratios: what is a regression, what is noise, and what cannot be compared at all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

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
    # a change of these names orphans every baseline and every saved timing
    assert [
        f"{op}-{rest}-{schedule}"
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
        for rest in ("1024x1024x1024-float32-2-forward", "512x512x512-float32-2-both")
        for schedule in ("unfused", "decomposed")
    ] == IDS
    for gpus in (0, 1, 2, 3, 8):
        ids = [each.id(schedule) for each in regress.cases(gpus) for schedule in regress.schedules(gpus)]
        assert len(set(ids)) == len(ids)
        assert any(key.endswith("-fused") for key in ids) is (gpus > 0)
        assert max(each.case.world_size for each in regress.cases(gpus)) == (2 if gpus in (0, 2, 3) else gpus)


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
    # the mean over cases alone would let it pass
    assert slowdowns["decomposed"] < SCHEDULE_LIMIT


def test_what_slows_all_schedules_is_said_of_the_unfused_one() -> None:
    # beside a matmul that it does not slow: other work on the machine, or code that they share
    slowdowns = judged({"unfused": 1.4, "decomposed": 1.4}, 0)
    assert list(schedules_of(excess(slowdowns))) == ["unfused"]
    assert schedules_of(slowdowns) == pytest.approx({"unfused": 1.4, "decomposed": 1}, rel=0.1)


def test_faster_is_no_regression() -> None:
    assert not excess(judged({"decomposed": 0.5, "unfused": 0.5}, 0))


def test_a_slower_matmul_is_told_and_has_no_limit() -> None:
    slowdowns = judge(replace(BASELINE, matmul=3e-2), BASELINE)
    assert slowdowns["matmul"] == pytest.approx(10)
    assert not excess(slowdowns)


class Launches:
    """A `run` that gives these in turn, the last one again and again, in place of pytest; counts its calls."""

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


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> None:
    """On HERE, without GPUs."""
    monkeypatch.setattr(regress, "describe", lambda: HERE)
    monkeypatch.setattr(regress, "num_gpus", lambda: 0)


OPTIONS: dict[str, Any] = {"baseline": None, "save_baseline": False, "plant": "", "repeat": 1}


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        (
            {key: ratio for key, ratio in RATIOS.items() if not key.startswith(IDS[1])},
            f"it lacks 2, such as {IDS[1]} / m",
        ),
        (RATIOS | {"other-fused / matmul": 1.0}, "1 are not measured now, such as other-fused"),
    ],
    ids=["lacks", "has"],
)
def test_other_cases_cannot_be_compared(
    ratios: dict[str, float],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launch = Launches({})
    monkeypatch.setattr(regress, "run", launch)
    path = tmp_path / "regress.json"
    path.write_bytes(saved({"matmul": [3e-3]} | {key: [ratio] for key, ratio in ratios.items()}, HERE))
    with pytest.raises(typer.Exit) as left:
        regress.regress(**OPTIONS | {"baseline": path, "out": tmp_path})
    assert left.value.exit_code == 2
    assert message in capsys.readouterr().err
    assert launch.num_calls == 0


@pytest.mark.parametrize(
    ("slower", "num_launches", "expected"),
    [
        ([{}], 1, []),
        ([{"decomposed": 1.3}, {}], 2, []),
        ([{"decomposed": 1.3}] * (LAUNCHES - 1) + [{}], LAUNCHES, []),
        # never the same one twice
        ([{"decomposed": 1.3}, {"unfused": 1.3}], 2, []),
        ([{"decomposed": 1.3}], LAUNCHES, ["decomposed"]),
    ],
)
def test_only_an_excess_that_stays_is_a_regression(
    slower: list[dict[str, float]],
    num_launches: int,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch = Launches(*slower)
    monkeypatch.setattr(regress, "run", launch)
    said: list[str] = []
    stored(tmp_path / "regress.json")
    slowdowns = regress.compare(tmp_path / "regress.json", HERE, "", said.append)
    assert launch.num_calls == num_launches
    # what is measured again is shown beside the baseline
    assert launch.shown == num_launches - 1
    assert list(schedules_of(excess(slowdowns))) == expected
    # every suspicion is said
    assert len(said) == (num_launches if expected else num_launches - 1)
    assert all("decomposed" in line for line in said)


def stored(path: Path, machine: Machine = HERE) -> bytes:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(saved(samples([noisy({}, seed) for seed in range(4)]), machine))
    return path.read_bytes()


def test_baseline_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "machine" / "regress.json"
    # it is committed
    assert len(stored(path)) < 32 << 10
    read = regress.read(path, HERE)
    assert read.ratios == pytest.approx(RATIOS, rel=0.2)
    assert read.matmul == pytest.approx(3e-3, rel=0.1)
    assert {each["stats"]["rounds"] for each in json.loads(path.read_text())["benchmarks"]} == {4, 4 * 32}
    assert read.about == f"commit {HERE.commit}, 2026-01-02T03:04:05+00:00"
    assert list(read.spread) == ["unfused / matmul", "decomposed / matmul", "decomposed / unfused"]
    assert all(low < high for low, high in read.spread.values())
    # newer versions are what is to be judged, not another machine
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


@pytest.mark.parametrize(
    "other",
    [
        {"name": "cpu-some-4c", "cores": 4},
        {"cpu": "Other"},
        {"gpu": "H100", "num_gpus": 8, "links": "18 NVLinks"},
        {"links": "PCIe (PHB)"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_machines_baseline_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    path = tmp_path / "regress.json"
    before = stored(path, replace(HERE, **other))
    there = re.escape(repr(next(iter(other.values()))))
    with pytest.raises(NotComparable, match=rf"another machine's: .*{there} there"):
        regress.read(path, HERE)
    assert path.read_bytes() == before


def test_baseline_of_another_version_of_pytest_benchmark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "regress.json"
    good = stored(path)
    before = regress.read(path, HERE)
    path.write_bytes(changed(changed(good, **benchmark(good, mode=1.0)), more={}, version="6.0"))
    assert regress.read(path, HERE) == before


def changed(good: bytes, **values: Any) -> bytes:
    return json.dumps(json.loads(good) | values).encode()


def benchmark(good: bytes, **values: Any) -> dict[str, Any]:
    """The first benchmark with some of its statistics changed."""
    first, *others = json.loads(good)["benchmarks"]
    return {"benchmarks": [first | {"stats": first["stats"] | values}, *others]}


BROKEN = {
    "empty": lambda good: b"",
    "cut": lambda good: good[:-40],
    "binary": lambda good: b"\xff\xfe\x00",
    "list": lambda good: b"[]",
    "foreign": lambda good: b'{"name": "apple"}',
    "zero": lambda good: changed(good, **benchmark(good, median=0)),
    "text": lambda good: changed(good, **benchmark(good, median="1")),
    "none": lambda good: changed(good, benchmarks=[]),
    "twice": lambda good: changed(good, benchmarks=json.loads(good)["benchmarks"] * 2),
    "machine": lambda good: changed(good, machine_info="mine"),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("save", [False, True], ids=["compare", "save"])
def test_malformed_baseline_is_refused_and_untouched(
    tmp_path: Path, how: str, save: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / HERE.name / "regress.json"
    content = BROKEN[how](stored(path))
    path.write_bytes(content)
    monkeypatch.setattr(regress, "describe", lambda: HERE)
    # nothing may be measured before it is refused
    monkeypatch.delattr(regress, "run")
    with pytest.raises(typer.Exit) as left:
        regress.regress(**OPTIONS | {"save_baseline": save, "out": tmp_path})
    assert left.value.exit_code == 2
    assert "is not a baseline" in capsys.readouterr().err
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


@pytest.mark.usefixtures("session")
def test_session_stores_then_passes_then_finds_what_is_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(regress, "run", Launches({}))
    options = OPTIONS | {"out": tmp_path}
    with pytest.raises(typer.Exit) as left:
        regress.regress(**options | {"plant": "decomposed=1.3"})
    assert left.value.exit_code == 2
    assert not any(tmp_path.iterdir())
    regress.regress(**options)
    said = capsys.readouterr().out
    assert f"no baseline for {HERE.name}" in said
    assert re.search(r"decomposed / matmul: \S+ to \S+ in 4 launches", said)
    path = tmp_path / HERE.name / "regress.json"
    before = path.read_bytes()
    regress.regress(**options | {"repeat": 3})
    assert "3 of 3 passed" in capsys.readouterr().out
    with pytest.raises(typer.Exit) as left:
        regress.regress(**options | {"repeat": 2, "plant": "decomposed=1.3"})
    assert left.value.exit_code == 1
    said = capsys.readouterr().out
    assert "slower than the baseline in 2 of 2" in said
    assert re.search(r"1\.\d+ of 1\.12 SLOWER decomposed\n", said)
    assert path.read_bytes() == before
    regress.regress(**options | {"save_baseline": True})
    assert path.read_bytes() != before


@pytest.mark.parametrize(
    "text", ["decomposed", "decomposed=", "decomposed=fast", "decomposed=1", "fused=1.3", "unfused=inf"]
)
def test_what_cannot_be_planted(text: str) -> None:
    with pytest.raises(ValueError, match="--plant takes SCHEDULE=FACTOR"):
        regress.planted(text, regress.schedules(0))


def test_planted_factors() -> None:
    assert regress.planted("", regress.schedules(0)) == {}
    assert regress.planted("unfused=1.5,decomposed=1.3", regress.schedules(0)) == {"unfused": 1.5, "decomposed": 1.3}
