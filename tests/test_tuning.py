"""The table of measurements: written tables are read, others are refused, and the table decides `auto`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from rich.console import Console
from torch import Tensor
from torch.distributed import ProcessGroup
from typer.testing import CliRunner

from fusedtp import cost
from fusedtp.bench import tune
from fusedtp.bench.cases import FLOAT8, OPS, Case
from fusedtp.bench.cli import app
from fusedtp.bench.cli_tune import show_table
from fusedtp.bench.intervals import Timing, noisy
from fusedtp.bench.jobs import Job
from fusedtp.bench.ranks import PRELOAD, RankError, RankPool
from fusedtp.bench.store import Outcome
from fusedtp.bench.sweep import run_job
from fusedtp.bench.timing import Verdict
from fusedtp.choose import tuning
from fusedtp.choose.tuning import Sample, Table
from fusedtp.cost.hardware import HARDWARE, cpu_rates

from .harness import wrong

RATES: dict[str, Any] = {
    "matrix_tflops": {"float32": 0.1}, "memory_gbps": 10.0, "host_us": 100.0, "flag_us": 200.0,
    "collective_start_us": 1000.0, "collective_gbps": 1.0,
}  # fmt: skip
BOTH = ("decomposed", "unfused")


def sample(rows: int = 256, cols: int = 512, third: int = 256, n: int = 2, **ms: float) -> Sample:
    return Sample("all_gather_matmul", n, "float32", rows, cols, third, ms or {"unfused": 2.0, "decomposed": 1.0})


def text(*samples: Sample, **changes: Any) -> str:
    content = json.loads(tuning.dump(Table(tuning.identity(), samples or (sample(),), {2: RATES})))
    return json.dumps(content | changes)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    samples = (sample(), replace(sample(), op="all_reduce", third=0, dtype="bfloat16"))
    target = tmp_path / "folder" / "tuning.json"
    tuning.write(target, tuning.dump(Table(tuning.identity(), samples, {2: RATES})))
    assert [path.name for path in target.parent.iterdir()] == ["tuning.json"]
    table, content, ignored = tuning.load(target)
    assert (table.samples, ignored) == (samples, "")
    assert table == tuning.parse(content)
    machine = table.hardware(3)
    assert (machine.launch_us, machine.memory_gbps, machine.link_gbps) == (100.0, 10.0, 1.0)


def test_measuring_again_keeps_the_rest() -> None:
    old = Table({"cpu": "x"}, (sample(n=2), sample(n=4), replace(sample(n=4), dtype="bfloat16")), {2: RATES, 4: RATES})
    new = Table({"cpu": "x"}, (sample(n=4, unfused=5.0, decomposed=6.0),), {4: RATES | {"host_us": 1.0}})
    both = old.updated(new)
    assert both.samples == (old.samples[0], old.samples[2], new.samples[0])
    assert both.rates == {2: RATES, 4: RATES | {"host_us": 1.0}}


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "tuning.json"
    tuning.write(target, "old")

    def broken(*_: Any) -> None:
        raise OSError("full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="full"):
        tuning.write(target, "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


MALFORMED = [
    "\0", text(samples=[{}]), text(samples=3), text(machine=None), text(rates={"2": {}}), text(rates={"two": RATES}),
    text(rates={"2": RATES | {"memory_gbps": -1}}), text(rates={"2": RATES | {"flag_us": float("nan")}}),
    text(replace(sample(), op="mine")), text(replace(sample(), dtype="int8")), text(sample(unfused=-1.0)),
    text(sample(unfused=float("inf"))), text(sample(rows=0)), text(sample(rows=True)), text(replace(sample(), ms={})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "told"),
    [
        *((content, "fusedtp tune") for content in MALFORMED),
        *((text(machine=tuning.identity() | {name: "other"}), f"measured with {name} other, here ")
          for name in ("cpu", "cores", "gpu", "num_gpus", "torch", "triton")),
    ],
)  # fmt: skip
def test_a_malformed_or_foreign_file_is_ignored_and_left(tmp_path: Path, content: str, told: str) -> None:
    target = tmp_path / "tuning.json"
    target.write_text(content)
    table, shared, ignored = tuning.load(target)
    assert (table, shared) == (None, "")
    assert str(target) in ignored
    assert told in ignored
    assert target.read_text() == content


def test_files_that_are_not_there_or_not_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuning.load(tmp_path / "none.json") == (None, "", "")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "is ignored" in tuning.load(tmp_path / "bytes")[2]
    assert "is ignored" in tuning.load(tmp_path)[2]
    monkeypatch.setenv("FUSEDTP_TUNING", "off")
    assert tuning.path() is None
    monkeypatch.delenv("FUSEDTP_TUNING")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.path() == tmp_path / "fusedtp" / "tuning.json"


def table(*samples: Sample) -> Table:
    return tuning.parse(text(*samples))


def decide(
    known: Table | None, rows: int, cols: int, n: int = 2, dtype: str = "float32", gpu: Any = None
) -> tuple[str, str] | None:
    allowed = ("fused", *BOTH) if gpu else BOTH
    return tuning.decide(known, gpu, "all_gather_matmul", dtype, n, rows, cols, allowed)


def test_the_nearest_measurement_decides() -> None:
    known = table(
        sample(256, 512, unfused=2.0, decomposed=3.0),
        sample(4096, 4096, unfused=300.0, decomposed=150.0),
        sample(256, 512, n=4, unfused=3.0, decomposed=2.0),
    )
    at = "the nearest size measured here"
    small = "measured: unfused 1.50x as fast as decomposed at 256x512 on 2 ranks"
    assert decide(known, 256, 512) == ("unfused", f"{small}, {at}")
    large = "measured: decomposed 2.00x as fast as unfused at 4096x4096 on 2 ranks"
    assert decide(known, 4000, 4100) == ("decomposed", f"{large}, {at}")
    other = decide(known, 256, 512, n=5)
    assert other[0] == "decomposed"
    assert "on 4 ranks" in other[1]
    assert decide(known, 256, 512, dtype="bfloat16") is decide(None, 256, 512) is None
    # Empty tensors, and tables of one schedule.
    assert decide(table(sample()), 0, 512) is not None
    assert decide(table(sample(unfused=1.0)), 256, 512) is None


def test_the_model_corrects_what_is_far_from_the_measurement() -> None:
    # Measured at a size where only waits matter; with a thousand times the bytes the slow backend loses.
    known = table(sample(64, 64, 64, unfused=1.0, decomposed=1.1))
    near, far = decide(known, 64, 64), decide(known, 4096, 4096)
    assert (near[0], far[0]) == ("unfused", "decomposed")
    assert far[1].startswith("predicted: decomposed ")
    assert "though unfused is the fastest at 64x64" in far[1]
    # The correction itself: the measured less the predicted time there, plus the prediction here.
    there, here = (
        cost.estimate("", tuning.share("all_gather_matmul", "float32", 2, size, size, 64), known.hardware(2)).times
        for size in (64, 4096)
    )
    times = {name: here[name] + 1e3 * ms - there[name] for name, ms in (("unfused", 1.0), ("decomposed", 1.1))}
    assert f"decomposed {times['unfused'] / times['decomposed']:.2f}x as fast as unfused" in far[1]
    # At a smaller size the correction is smaller in proportion: no time becomes negative, and the order stays.
    assert decide(table(sample(4096, 4096, 64, unfused=50.0, decomposed=9.0)), 1, 1)[0] == "decomposed"


SPREAD = np.array([0.9, 0.97, 1.0, 1.03, 1.1])


def timed(**medians: float) -> Sample:
    """Return a sample of five rounds around each median, within a tenth."""
    kept = tune.kept({name: Timing.of((ms * SPREAD).tolist()) for name, ms in medians.items()})
    return Sample("all_gather_matmul", 2, "float32", 256, 512, 256, **kept)


def test_quartiles_and_what_is_more_than_noise_are_kept(tmp_path: Path) -> None:
    clear, noise = timed(unfused=2.0, decomposed=1.0), timed(unfused=1.0, decomposed=1.02)
    assert clear.ms == {"unfused": 2.0, "decomposed": 1.0}
    assert (clear.p25["unfused"], clear.p75["unfused"]) == pytest.approx((1.94, 2.06))
    assert 1.5 < clear.slower["unfused"] < 2.0
    assert clear.alike() == {"decomposed"}
    assert noise.slower["decomposed"] < 1.0
    assert noise.alike() == {"unfused", "decomposed"}
    target = tmp_path / "tuning.json"
    tuning.write(target, text(clear, noise, sample()))
    known, _, ignored = tuning.load(target)
    assert known is not None, ignored
    # among them an old sample without quartiles, whose differences never count as noise
    assert known.samples == (clear, noise, sample())
    assert sample().alike() == set()


def test_a_difference_that_is_noise_decides_nothing() -> None:
    noise = timed(unfused=1.0, decomposed=1.02)
    where = "256x512 on 2 ranks, the nearest size measured here"
    said = f"as without a measurement: unfused 1.02x as fast as decomposed, which is noise, at {where}"
    assert decide(table(noise), 256, 512) == ("decomposed", said)
    # the same as for a sample without quartiles, or with a larger difference
    for told in (replace(noise, slower={}), timed(unfused=1.0, decomposed=1.5)):
        assert decide(table(told), 256, 512)[0] == "unfused"
    # the default schedule may also be the fastest by noise
    made = decide(table(timed(unfused=1.02, decomposed=1.0)), 256, 512)
    assert made == ("decomposed", f"measured: decomposed 1.02x as fast as unfused, which is noise, at {where}")


def test_on_a_gpu_noise_leaves_it_to_the_prediction() -> None:
    query: dict[str, Any] = {"rows": 8192, "cols": 8192, "n": 8, "dtype": "bfloat16", "gpu": HARDWARE["h100"]}
    at = {"world_size": 8, "dtype": "bfloat16", "rows": 8192, "cols": 8192, "third": 1024}
    noise = replace(timed(fused=1.02, decomposed=1.0, unfused=3.0), **at)
    slow = replace(timed(fused=3.0, decomposed=1.0, unfused=1.0), **at)
    predicted, made, other = (
        decide(known, **query) for known in (None, *(Table({"cpu": "any"}, (each,), {}) for each in (noise, slow)))
    )
    assert (predicted[0], made[0]) == ("fused", "fused")
    assert predicted[1].startswith("predicted for NVIDIA H100 SXM: fused 1.")
    assert "which is noise" in made[1]
    assert other[0] != "fused"
    alone = tuning.decide(None, HARDWARE["h100"], "all_gather", "bfloat16", 8, 8192, 8192, ("unfused",))
    assert alone == ("unfused", "predicted for NVIDIA H100 SXM: unfused alone can run")


def test_noise_is_shown_and_a_busy_machine_warned_of() -> None:
    out = Console(file=StringIO(), width=200)
    busy = Sample("all_reduce", 2, "float32", 64, 64, 0, **tune.kept({"unfused": Timing.of([1.0, 1.5, 2.0])}))
    show_table(Table({"cpu": "x"}, (timed(unfused=2.0, decomposed=1.0), timed(unfused=1.0, decomposed=1.02)), {}), out)
    said = out.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"2 +1.94 to 2.06 .* 1 +0.97 to 1.03 .* decomposed +1\.\d\dx", said)
    assert re.search(r"unfused +noise", said)
    assert "In 1 of 2 lines the difference is noise: auto takes" in said
    assert "Careful" not in said
    show_table(Table({"cpu": "x"}, (busy,), {}), out)
    assert "half of the times vary by 33% or more" in out.file.getvalue()  # type: ignore[attr-defined]
    assert noisy([]) == noisy([0.1, 0.2, 0.9]) == ""
    shown = CliRunner().invoke(app, ["tune", "--help"]).output
    for column in ("travels", "other length", "quartiles", "fastest", "by how many times"):
        assert column in " ".join(shown.split())


def test_shares_are_those_of_the_cost_model() -> None:
    sizes = {"M": 4096, "N": 3072, "K": 1024, "world_size": 4, "dtype": "float32"}
    for op, rows, cols, third in (
        ("all_gather_matmul", 4096, 1024, 768),
        ("matmul_reduce_scatter", 4096, 3072, 256),
        ("matmul_all_reduce", 4096, 3072, 256),
        ("all_reduce", 4096, 3072, None),
    ):
        assert tuning.share(op, "float32", 4, rows, cols, third) == cost.work_of(op, **sizes)  # type: ignore[arg-type]
        if third is not None:
            case = Case(op, 4096, 3072, 1024, "float32", 4)
            kept = tune.sample_of(case, {"matmul": Timing.of([1.0]), "unfused": Timing.of([2.0])})
            assert (kept.rows, kept.cols, kept.third, kept.ms) == (rows, cols, third, {"unfused": 2.0})


def test_rates_from_times() -> None:
    # 2 ranks: half of a tensor is sent to the peer, and 1.5 of it copied, read and written.
    sizes, mb = (4, 4 * 1001 * 1000), 4 * (1001 * 1000 - 1) / 1e6
    small, large = {"unfused": 1.0, "decomposed": 0.5}, {"unfused": 3.0, "decomposed": 1.5}
    rates = cpu_rates(2, 0.2, small, large, sizes, {"float32": 0.1})
    assert rates["collective_start_us"] == 1000
    assert (rates["host_us"], rates["flag_us"]) == pytest.approx((200, 300))
    assert rates["collective_gbps"] == pytest.approx(mb / 2 / 2)
    assert rates["memory_gbps"] == pytest.approx(2 * 1.5 * mb)


def with_a_wrong_schedule(group: ProcessGroup, job: Job) -> list[Outcome]:
    def last_row_wrong(out: Tensor) -> Tensor:
        out[-1] += group.rank()
        return out

    with wrong("decomposed", last_row_wrong):
        return run_job(group, job)


def test_a_wrong_schedule_is_not_timed(pool: RankPool) -> None:
    def run(_: Callable[..., object], job: Job, **options: Any) -> Any:
        return pool.run(with_a_wrong_schedule, job, **options)

    said: list[str] = []
    case = Case("all_gather_matmul", 33, 24, 16, "float32", 2)
    job = tune.job_of(case, 0.0, 0)
    ranks: Any = SimpleNamespace(run=run, close=lambda: None)
    assert set(tune.time_case(ranks, job, said.append)) == {"matmul", "unfused"}
    (refused,) = said
    assert refused.startswith(f"refused: decomposed: {case}, forward, decomposed, rank 1: y: ")
    assert "elements are wrong" in refused


def test_ranks_that_fail_cost_their_variant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the command, and not the library's matmul where it is this that fails."""
    timing = Timing.of([1.0, 2.0])

    def run(_: Callable[..., object], job: Job, **options: Any) -> Any:
        for name in ("decomposed", "matmul"):
            if name in job.variants:
                raise RankError({1: "died"}, {1: f"3 forward {name}"})
        return [[*job.absent, *(Outcome(name, "forward", Verdict(), timing) for name in job.variants)]]

    said, closed, samples = list[str](), list[int](), list[list[Sample]]()
    ranks: Any = SimpleNamespace(run=run, close=lambda: closed.append(1))
    case = Case("all_gather_matmul", 33, 24, 16, "float32", 2)
    job = replace(tune.job_of(case, 0.0, 0), variants=("unfused", "decomposed"))
    assert set(tune.time_case(ranks, job, said.append)) == {"unfused"}
    assert [each.partition(" failed at ")[0] for each in said] == ["refused: decomposed: decomposed"]
    assert closed == [1]
    assert tune.time_case(ranks, replace(job, variants=("matmul", "unfused")), said.append) == {}
    monkeypatch.setattr(tune, "RankPool", mock.MagicMock())
    monkeypatch.setattr(tune, "time_case", lambda *_: {"unfused": timing, "decomposed": timing})
    assert tune.tune([case], seconds=0.0, num_gpus=0, said=said.append, done=samples.append) == {}
    assert [each.rows for (each,) in samples] == [33]


def test_ctrl_c_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(planned: list[Case], *, done: Callable[[list[Sample]], None], **_: Any) -> None:
        done([sample(unfused=5.0)])
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tune", measure)
    target, other = tmp_path / "tuning.json", replace(sample(), rows=7)
    tuning.write(target, tuning.dump(Table(tuning.identity(), (sample(), other), {})))
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["tune", "--out", str(target), "--world-size", "2"])
    assert result.exit_code == 130, result.output
    assert re.search(r"1/24, after \d+ s, about \d+ s left: all_gather 64 x 64, fp32 on 2", result.output)
    assert f"the sizes measured so far are in\n{target}\n" in result.output
    table, _, _ = tuning.load(target)
    assert table.samples == (other, sample(unfused=5.0))


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "tuning.json"
    monkeypatch.setattr(tune, "CPU_SHAPES", dict.fromkeys(OPS, ((32, 24, 16), (64, 64, 64))))
    monkeypatch.setattr(tune, "COLLECTIVE_SHAPES", ((16, 16), (512, 512)))
    monkeypatch.setenv("FUSEDTP_TUNING", str(target))
    # The ranks' fork server is for this test alone.
    monkeypatch.setenv(PRELOAD, "")
    run = CliRunner().invoke
    assert "there is no" in run(app, ["tune", "--show"]).output.replace("\n", " ")
    assert run(app, ["predict", "all_reduce", "--hardware", "here"]).exit_code == 2
    result = run(app, ["tune", "--world-size", "2", "--seconds", "0", "--dtype", "fp32"])
    assert result.exit_code == 0, result.output
    known, _, ignored = tuning.load(target)
    assert known is not None, ignored
    assert {(each.op, each.rows) for each in known.samples} == {
        *((op, size) for op in OPS for size in (32, 64)),
        *((op, size) for op in tune.COLLECTIVES for size in (16, 512)),
    }
    for each in known.samples:
        assert set(each.ms) == set(each.p25) == set(each.p75) == set(each.slower) == {"unfused", "decomposed"}
        assert all(each.p25[name] <= ms <= each.p75[name] for name, ms in each.ms.items())
        assert min(each.ms, key=lambda name: each.ms[name]) in each.alike()
    assert list(known.rates) == [2]
    shown = run(app, ["tune", "--show"])
    assert "matmul_all_reduce" in shown.output
    assert "decomposed" in shown.output
    assert "GFLOP/s each" in shown.output
    here = ["predict", "all_reduce", "--m", "512", "--dtype", "float32", "--hardware", "here"]
    assert "this machine was measured on 2 ranks" in " ".join(run(app, here).output.split())
    predicted = run(app, [*here, "--world-size", "2"])
    assert predicted.exit_code == 0, predicted.output
    assert f"{tuning.identity()['cpu']}, 2 ranks" in " ".join(predicted.output.split())
    monkeypatch.setattr(tune, "CPU_SHAPES", dict.fromkeys(OPS, ((32, 24, 16),)))
    again = run(app, ["tune", "--world-size", "2", "--seconds", "0", "--dtype", "fp8"])
    assert again.exit_code == 0, again.output
    both, _, _ = tuning.load(target)
    # float8 has rows for matmuls only, and rows of other dtypes stay.
    float8 = [each for each in both.samples if each.dtype == FLOAT8]
    assert {(each.op, each.rows) for each in float8} == {(op, 32) for op in OPS}
    assert [each for each in both.samples if each.dtype != FLOAT8] == list(known.samples)
    assert both.rates == known.rates


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dtype", "int8"), "must be among float32"),
        (("--world-size", "1"), "--world-size needs 2 or more"),
        (("--world-size", "x"), "must be integers"),
    ],
)
def test_command_refuses(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tune", "--out", str(tmp_path / "x.json"), *arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())
