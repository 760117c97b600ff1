"""The verdict on ratios: what is a regression, what is noise, and what cannot be compared at all."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from fusedtp.bench import regress, tracked
from fusedtp.bench.machine import Machine
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.regress import CASE_LIMIT, LAUNCHES, SCHEDULE_LIMIT, Baseline, Launch, NotComparable, judge
from fusedtp.bench.tracked import Tracked

HERE = Machine("cpu-some-2c", "Some", 2, "", 0, "shared memory", "", "3.11", "2.13", "3.7", "0123", False)
CASES = tracked.cases(0)
IDS = [each.id(schedule) for each in CASES for schedule in tracked.schedules(0)]
TRUE = {key: 1.5 + 0.1 * number for number, key in enumerate(IDS)}
RATIOS = {f"{key} / matmul": ratio for key, ratio in TRUE.items()} | {
    f"{each.id('decomposed')} / unfused": TRUE[each.id("decomposed")] / TRUE[each.id("unfused")] for each in CASES
}


def noisy(slower: Mapping[str, float], seed: int, num_rounds: int = 32, noise: float = 0.2) -> Launch:
    """Rounds as a busy machine gives them, some struck by something else; `slower` by schedule or id."""
    generator = random.Random(seed)

    def times_of(each: Tracked) -> dict[str, float]:
        matmul_ms = generator.uniform(2, 4)
        times = {"matmul": matmul_ms}
        for name in tracked.schedules(0):
            key = each.id(name)
            factor = slower.get(key, slower.get(name, 1.0)) * (3 if generator.random() < 0.06 else 1)
            times[name] = matmul_ms * TRUE[key] * factor * generator.lognormvariate(0, noise)
        return times

    return {each: [times_of(each) for _ in range(num_rounds)] for each in CASES}


def baseline() -> Baseline:
    return Baseline(asdict(HERE), "", 3.0, 32, RATIOS, {})


def test_ids_are_those_that_are_stored() -> None:
    # a change of these names orphans every baseline and every saved timing
    assert [
        f"{op}-{rest}-{schedule}"
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
        for rest in ("1024x1024x1024-float32-2-forward", "512x512x512-float32-2-both")
        for schedule in ("unfused", "decomposed")
    ] == IDS
    for gpus in (0, 1, 2, 3, 8):
        ids = [each.id(schedule) for each in tracked.cases(gpus) for schedule in tracked.schedules(gpus)]
        assert len(set(ids)) == len(ids)
        assert any(key.endswith("-fused") for key in ids) is (gpus > 0)
        assert max(each.case.world_size for each in tracked.cases(gpus)) == (2 if gpus in (0, 2, 3) else gpus)


@pytest.mark.parametrize("seed", range(10))
def test_noise_passes_and_one_slower_schedule_fails(seed: int) -> None:
    unchanged = judge(noisy({}, seed), baseline())
    assert not unchanged.excess
    assert unchanged.matmul == pytest.approx(1, rel=0.2)
    assert unchanged.schedules == pytest.approx({"unfused": 1, "decomposed": 1}, rel=0.08)
    slower = judge(noisy({"decomposed": 1.3}, seed), baseline())
    assert "decomposed" in slower.excess
    assert "unfused" not in slower.excess
    assert slower.schedules["decomposed"] == pytest.approx(1.3, rel=0.08)


def test_one_slower_case_fails_by_its_own_name() -> None:
    key = IDS[3]
    verdict = judge(noisy({key: 1.6}, 0, num_rounds=128), baseline())
    assert list(verdict.excess) == [key]
    assert verdict.cases[key] > CASE_LIMIT
    # the mean over cases alone would let it pass
    assert verdict.schedules["decomposed"] < SCHEDULE_LIMIT


def test_what_slows_all_schedules_is_said_of_the_unfused_one() -> None:
    # beside a matmul that it does not slow: other work on the machine, or code that they share
    verdict = judge(noisy({"unfused": 1.4, "decomposed": 1.4}, 0), baseline())
    assert [name for name in verdict.excess if name in verdict.schedules] == ["unfused"]
    assert verdict.schedules == pytest.approx({"unfused": 1.4, "decomposed": 1}, rel=0.1)


def test_faster_is_no_regression() -> None:
    assert not judge(noisy({"decomposed": 0.5, "unfused": 0.5}, 0), baseline()).excess


class Launches:
    """A `launch` that gives these in turn, the last one again and again, in place of ranks; counts its calls."""

    def __init__(self, *slower: Mapping[str, float]) -> None:
        self.slower, self.num_calls = slower, 0

    def __call__(self, cases: Any, gpus: int, *, plant: Mapping[str, float] | None = None) -> Launch:
        slower = self.slower[min(self.num_calls, len(self.slower) - 1)]
        self.num_calls += 1
        return noisy({**slower, **(plant or {})}, self.num_calls)


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
    ratios: dict[str, float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launches({})
    monkeypatch.setattr(tracked, "launch", launch)
    monkeypatch.setattr(tracked, "num_gpus", lambda: 0)
    with pytest.raises(NotComparable, match=message):
        regress.compare(replace(baseline(), ratios=ratios), {}, print)
    assert launch.num_calls == 0


@pytest.mark.parametrize(
    ("slower", "num_launches", "excess"),
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
    slower: list[dict[str, float]], num_launches: int, excess: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launches(*slower)
    monkeypatch.setattr(tracked, "launch", launch)
    monkeypatch.setattr(tracked, "num_gpus", lambda: 0)
    said: list[str] = []
    verdict = regress.compare(baseline(), {}, said.append)
    assert launch.num_calls == num_launches
    assert [name for name in verdict.excess if name in verdict.schedules] == excess
    # every suspicion is said
    assert len(said) == (num_launches if excess else num_launches - 1)
    assert all("decomposed" in line for line in said)


def stored(path: Path, machine: Machine = HERE) -> bytes:
    launches = [noisy({}, seed) for seed in range(4)]
    regress.write(path, regress.baseline_of(launches, machine))
    return path.read_bytes()


def test_baseline_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "machine" / "regress.json"
    assert len(stored(path)) < 4096
    read = regress.read(path, HERE)
    assert read.ratios == pytest.approx(RATIOS, rel=0.2)
    assert read.rounds == 4 * 32
    assert read.machine["commit"] == HERE.commit
    assert all(low < high for low, high in read.spread.values())
    # newer versions are what is to be judged, not another machine
    newer = replace(HERE, torch="2.14", driver="600", commit="4567")
    assert regress.read(path, newer) == read


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


BROKEN = {
    "empty": lambda good: b"",
    "cut": lambda good: good[:-40],
    "binary": lambda good: b"\xff\xfe\x00",
    "list": lambda good: b"[]",
    "foreign": lambda good: b'{"name": "apple"}',
    "newer": lambda good: good.replace(b'"format": 1', b'"format": 2'),
    "zero": lambda good: json.dumps(json.loads(good) | {"ratios": dict.fromkeys(IDS, 0)}).encode(),
    "text": lambda good: json.dumps(json.loads(good) | {"ratios": dict.fromkeys(IDS, "1")}).encode(),
    "none": lambda good: json.dumps(json.loads(good) | {"ratios": {}}).encode(),
    "machine": lambda good: json.dumps(json.loads(good) | {"machine": "mine"}).encode(),
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
    monkeypatch.delattr(tracked, "launch")
    with pytest.raises(typer.Exit) as left:
        regress.regress(save_baseline=save, plant="", repeat=1, baseline=None, out=tmp_path)
    assert left.value.exit_code == 2
    assert "is not a baseline" in capsys.readouterr().err
    assert path.read_bytes() == content


def test_launches_that_disagree_are_no_baseline() -> None:
    with pytest.raises(NotComparable, match=r"decomposed / matmul was .* too far apart"):
        regress.baseline_of([noisy({}, 0), noisy({"decomposed": 1.2}, 1)], HERE)


def test_session_stores_then_passes_then_finds_what_is_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(regress, "describe", lambda: HERE)
    monkeypatch.setattr(tracked, "num_gpus", lambda: 0)
    monkeypatch.setattr(tracked, "launch", Launches({}))
    options: dict[str, Any] = {"baseline": None, "out": tmp_path, "save_baseline": False, "plant": "", "repeat": 1}
    with pytest.raises(typer.Exit) as left:
        regress.regress(**options | {"plant": "decomposed=1.3"})
    assert left.value.exit_code == 2
    assert not any(tmp_path.iterdir())
    regress.regress(**options)
    assert f"no baseline for {HERE.name}" in capsys.readouterr().out
    path = tmp_path / HERE.name / "regress.json"
    before = path.read_bytes()
    regress.regress(**options | {"repeat": 3})
    assert "3 of 3 passed" in capsys.readouterr().out
    with pytest.raises(typer.Exit) as left:
        regress.regress(**options | {"repeat": 2, "plant": "decomposed=1.3"})
    assert left.value.exit_code == 1
    assert "slower than the baseline in 2 of 2" in capsys.readouterr().out
    assert path.read_bytes() == before
    regress.regress(**options | {"save_baseline": True})
    assert path.read_bytes() != before


@pytest.mark.parametrize(
    "text", ["decomposed", "decomposed=", "decomposed=fast", "decomposed=1", "fused=1.3", "unfused=inf"]
)
def test_what_cannot_be_planted(text: str) -> None:
    with pytest.raises(ValueError, match="--plant takes SCHEDULE=FACTOR"):
        regress.planted(text, tracked.schedules(0))


def test_planted_factors() -> None:
    assert regress.planted("", tracked.schedules(0)) == {}
    assert regress.planted("unfused=1.5,decomposed=1.3", tracked.schedules(0)) == {"unfused": 1.5, "decomposed": 1.3}


def test_what_is_planted_takes_that_much_longer() -> None:
    def run() -> str:
        time.sleep(0.02)
        return "result"

    assert tracked.slowed(run, 1.0, torch.device("cpu")) is run
    slow = tracked.slowed(run, 2.0, torch.device("cpu"))
    start = time.perf_counter()
    assert slow() == "result"
    # at least: sleep and the wait never end early
    assert time.perf_counter() - start >= 0.04


def test_rounds_on_ranks(pool: RankPool) -> None:
    variants = ("matmul", "unfused", "decomposed")
    small = Tracked(tracked.Case("matmul_reduce_scatter", 64, 64, 64, "float32", 2), "both")
    first, second = pool.run(tracked.rounds_of, small, variants, 5, {"decomposed": 40.0}, True, world_size=2)
    assert first == second
    assert len(first) == 5
    assert all(tuple(times) == variants and min(times.values()) > 0 for times in first)
    samples = regress.ratios_of({small: first})
    assert samples[f"{small.id('unfused')} / matmul"] == [times["unfused"] / times["matmul"] for times in first]
    pairs = [("unfused", "matmul"), ("decomposed", "matmul"), ("decomposed", "unfused")]
    assert list(samples) == [f"{small.id(schedule)} / {reference}" for schedule, reference in pairs]
    # what is planted on every rank is in the slowest rank's time
    assert min(times["decomposed"] / times["unfused"] for times in first) > 2


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
