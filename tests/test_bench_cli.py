"""The commands as a user runs them, on real ranks at tiny sizes."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from fusedtp.bench import arguments, cases, machine, store, sweep
from fusedtp.bench.cases import LAYERS, BlockSizes
from fusedtp.bench.cli import app
from fusedtp.bench.frames import blocks, frame_of
from fusedtp.bench.jobs import Job
from fusedtp.bench.store import Measurement, rows_of
from fusedtp.bench.tables import times

PNG = b"\x89PNG\r\n\x1a\n"
ONLY = ["--schedule", "decomposed", "--baseline", "none"]
TINY = ["--op", "all_gather_matmul", "--dtype", "float32", "--shape", "24,20,16", "--rounds", "3"]


def invoke(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


def stored(folder: Path) -> list[Measurement]:
    (path,) = folder.glob("*/sweep.csv")
    assert path.with_suffix(".png").read_bytes().startswith(PNG)
    return store.read(path)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("results")
    return out, invoke("sweep", "--world-size", "2", *TINY, "--out", out)


def test_sweep_prints_and_keeps_rows(swept: tuple[Path, Result]) -> None:
    out, result = swept
    assert result.exit_code == 0, result.output
    rows = stored(out)
    assert not any(row.failed for row in rows)
    timed = {row.variant: row for row in rows if (row.M, row.N, row.K) == (24, 20, 16) and row.passed}
    assert list(timed) == ["matmul", "comm", "unfused", "decomposed", "auto", "dtensor"]
    for row in timed.values():
        assert row.median_ms is not None
        assert row.bound_ms is not None
        assert (row.rounds, row.interpreted, row.threads, row.backend) == (3, False, 1, "gloo")
        assert sorted(row.rounds_ms)[1] == row.median_ms
        assert len(row.rounds_ms) == row.rounds
        assert (row.direction, row.model, row.links, row.driver) == ("forward", "", "shared memory", "")
    unfused, decomposed = timed["unfused"], timed["decomposed"]
    assert unfused.speedup_vs_unfused == 1.0
    assert unfused.median_ms is not None
    assert decomposed.median_ms is not None
    assert decomposed.speedup_vs_unfused == pytest.approx(unfused.median_ms / decomposed.median_ms, rel=1e-4)
    assert decomposed.path.startswith("decomposed: ")
    assert timed["auto"].path.partition(":")[0] in ("unfused", "decomposed")
    assert timed["comm"].busbw_gbps == pytest.approx(timed["comm"].algbw_gbps / 2, rel=1e-4)
    assert "speed-up" in result.output
    assert re.search(r"ain: decomposed is faster than unfused in [01] of 1 cases", result.output)
    assert re.search(r"auto takes (decomposed|unfused) in 1 of 1 cases: ", result.output)


def test_float8_is_swept_and_has_no_backward_pass(tmp_path: Path) -> None:
    tiny = ["--op", "matmul_reduce_scatter", "--dtype", "fp8,mxfp8", "--shape", "24,20,16", "--rounds", "2"]
    result = invoke("sweep", "--world-size", "2", *tiny, *ONLY, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    timed = [(row.dtype, row.variant) for row in stored(tmp_path) if row.median_ms is not None]
    assert timed == [
        (dtype, variant)
        for dtype in ("float8_e4m3fn", "mxfp8")
        for variant in ("matmul", "comm", "unfused", "decomposed")
    ]
    for name in ("fp8", "mxfp8"):
        assert f"20 x 16 {name}" in result.output
    refused = invoke("sweep", "--world-size", "2", *tiny, "--direction", "both", "--out", tmp_path)
    assert refused.exit_code == 2
    assert "no gradient" in refused.output


def test_what_cannot_run_is_a_row_and_a_note_not_a_failure(swept: tuple[Path, Result]) -> None:
    out, result = swept
    absent = [row for row in stored(out) if not row.passed]
    assert {(row.variant, row.gate) for row in absent} == {
        (name, "not run: its fused ops need CUDA") for name in ("torch_symm_mem", "async_tp", "nccl_windows")
    }
    assert len(absent) == 3
    assert {(row.median_ms, row.rounds) for row in absent} == {(None, 0)}
    assert "Not run here: torch_symm_mem, async_tp, nccl_windows (--verbose says why)." in result.output
    shown = invoke("report", "--verbose", "--out", out).output
    assert "not run: async_tp: its fused ops need CUDA (all_gather_matmul on 2)" in shown
    assert "Rates, forward" in shown


def test_interpreted_rows_have_no_time(swept: tuple[Path, Result]) -> None:
    out, result = swept
    kernels = [row for row in stored(out) if row.variant in ("fused", "own_matmul")]
    assert {(row.variant, row.M, row.N, row.K, row.direction) for row in kernels} == {
        (variant, *size)
        for variant in ("fused", "own_matmul")
        for size in ((96, 80, 64, "forward"), (97, 83, 61, "both"))
    }
    for row in kernels:
        assert row.interpreted
        assert (row.median_ms, row.speedup_vs_unfused, row.matmul_fraction, row.rounds) == (None, None, None, 0)
        assert row.error_ratio is not None
    assert "interpreted" in result.output


def test_sweeping_again_replaces_and_report_draws_again(swept: tuple[Path, Result]) -> None:
    out, _ = swept
    before = stored(out)
    result = invoke("sweep", "--world-size", "1,2", *TINY, *ONLY, "--out", out)
    assert result.exit_code == 0, result.output
    rows = stored(out)
    # on two ranks four variants take the place of nine, on one rank they are new
    assert len(rows) == len(before) - 9 + 4 + 4
    (picture,) = out.glob("*/sweep.png")
    picture.unlink()
    result = invoke("report", "--out", out)
    assert result.exit_code == 0, result.output
    assert "24 x 20 x 16 fp32" in result.output
    assert stored(out) == rows


def test_foreign_file_stops_the_sweep_before_it_starts(tmp_path: Path) -> None:
    path = tmp_path / machine.describe().name / "sweep.csv"
    path.parent.mkdir()
    path.write_text("name,price\napple,3\n")
    result = invoke("sweep", *TINY, "--out", tmp_path)
    assert result.exit_code == 2
    assert "is not a CSV file of results" in " ".join(result.output.split())
    assert path.read_text() == "name,price\napple,3\n"


def test_failed_check_is_a_row_without_a_number_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swept: tuple[Path, Result]
) -> None:
    # Of another number of ranks, whichever of these tests has run before.
    good = [replace(row, world_size=1) for row in stored(swept[0]) if row.median_ms is not None]

    def spawned(jobs: list[Job], about: machine.Machine, done: Any) -> list[Measurement]:
        return good[:1] + rows_of(jobs[0].case, sweep.failed(jobs[0], "[2] elements wrong"), about)

    monkeypatch.setattr(sweep, "run_spawned", spawned)
    result = invoke(
        "sweep", "--world-size", "2", *TINY, "--schedule", "unfused", "--baseline", "none", "--out", tmp_path
    )
    assert result.exit_code == 1
    assert "[2] elements wrong" in result.output
    assert "3 of 4 rows did not pass" in result.output
    (path,) = tmp_path.glob("*/sweep.csv")
    failed = [row for row in store.read(path) if not row.passed]
    assert [row.variant for row in failed] == ["matmul", "comm", "unfused"]
    assert {(row.median_ms, row.max_error, row.rounds) for row in failed} == {(None, None, 0)}


def test_ctrl_c_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swept: tuple[Path, Result]) -> None:
    measured = [row for row in stored(swept[0]) if row.median_ms is not None]

    def spawned(jobs: list[Job], about: machine.Machine, done: Any) -> list[Measurement]:
        done(jobs[0], measured)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "run_spawned", spawned)
    result = invoke("sweep", "--world-size", "2", *TINY, *ONLY, "--out", tmp_path)
    (path,) = tmp_path.glob("*/sweep.csv")
    assert result.exit_code == 130, result.output
    assert f"the rows of what had ended are in {path}" in result.output.replace("\n", "")
    assert store.read(path) == measured


def test_the_time_left_goes_by_the_steps_that_are_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the first one, in which ranks start."""
    clock = iter((0.0, 10.0, 12.0, 16.0))
    monkeypatch.setattr(arguments, "time", SimpleNamespace(monotonic=clock.__next__))
    with arguments.progress(Console(width=80), [("a", 1.0), ("b", 1.0), ("c", 2.0)], "nothing") as done:
        for _ in range(3):
            done()
    assert capsys.readouterr().out.splitlines() == [
        "3 steps, about 4 s; Ctrl-C ends it",
        "1/3, 10 s, 3 s left: a",
        "2/3, 12 s, 4 s left: b",
        "3/3, 16 s, 0 s left: c",
    ]


def test_under_torchrun(tmp_path: Path) -> None:
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "fusedtp.bench.cli", "sweep", *TINY, *ONLY, "--out", str(tmp_path)]
    # away from the checkout: -m puts the working directory first, where fusedtp is a folder without its other parts
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Times, forward") == 1
    assert [(row.variant, row.world_size) for row in stored(tmp_path)] == [
        (variant, 2) for variant in ("matmul", "comm", "unfused", "decomposed")
    ]


def test_a_models_block_gives_rows_and_totals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cases.MODELS, "llama3-8b", BlockSizes(32, 48, 4, 2, 8, 1, True, "made up"))
    block = ["--model", "llama3-8b", "--tokens", "24", "--world-size", "2", "--rounds", "2", *ONLY]
    result = invoke("sweep", *block, "--direction", "forward,backward,both", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    rows = [row for row in stored(tmp_path) if row.passed]
    assert {(row.layer, row.op, row.tokens, row.direction) for row in rows} == {
        (layer, op, 24, direction)
        for layer, op in zip(LAYERS, ("all_gather_matmul", "matmul_reduce_scatter") * 2, strict=True)
        for direction in ("forward", "backward", "both")
    }
    totals = blocks(frame_of(rows))
    assert len(totals) == 3
    for _, medians in totals:
        assert set(medians) == {"matmul", "comm", "unfused", "decomposed"}
    assert "The matmuls of one transformer block together" in result.output


def test_headings_differ_and_providers_are_listed_in_eighty_columns(make_row: Callable[..., Measurement]) -> None:
    names = {"matmul": 1.0, "unfused": 3.0, "decomposed": 2.0, "fused": 1.5, "auto": 1.5}
    ratios = {"speedup_vs_unfused": 1.5, "matmul_fraction": 0.5, "overlap_efficiency": 0.25}
    table = times(frame_of([make_row(variant=name, median_ms=ms, **ratios) for name, ms in names.items()]), "forward")
    console = Console(width=80, file=StringIO())
    table.print(console, "op")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    first, second = lines[2].split(), lines[3].split()
    assert first == ["unfused", "decomposed", "fused", "speed-up", "speed-up"]
    assert second[-2:] == ["decomposed", "fused"]
    assert lines[5].split()[-2:] == ["1.50x"] * 2
    assert "left out in 80 columns: hidden decomposed, " in " ".join(lines)
    help_ = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["sweep", "--help"]).output
    assert help_.index("--verbose") < help_.index("Providers, of --baseline") < help_.index("dtensor")


def test_doctor() -> None:
    result = invoke("doctor", "--providers")
    assert result.exit_code == 0, result.output
    for word in ("torch", "triton", "memfd_create", "unfused", "decomposed", "fused", "auto"):
        assert word in result.output
    assert result.output.splitlines()[-1].startswith(f"Verdict: CPU, {len(os.sched_getaffinity(0))} cores: ")
    assert "dtensor" in result.output


def test_a_processor_whose_name_says_little_is_told_by_its_family(tmp_path: Path) -> None:
    """Two generations of one maker must not pass for one machine."""
    info = tmp_path / "cpuinfo"

    def named(name: str, family: int) -> str:
        core = f"processor\t: 0\ncpu family\t: {family}\nmodel\t\t: 2\nmodel name\t: {name}\nstepping\t: 1\n"
        info.write_text(f"{core}\n{core.replace(': 2', ': 3')}")
        return machine.cpu_model(info)

    assert named("AMD EPYC", 26) == "AMD EPYC (family 26, model 2)"
    assert named("AMD EPYC", 25) != named("AMD EPYC", 26)
    assert machine.slug(f"cpu {named('AMD EPYC', 26)} 2c") == "cpu-amd-epyc-family-26-model-2-2c"
    assert named("Intel(R) Xeon(R) Platinum 8480C", 6) == "Intel(R) Xeon(R) Platinum 8480C"
    info.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert machine.cpu_model(info) == machine.cpu_model(tmp_path / "none") == platform.machine()


def test_explain_shows_steps_bytes_and_flops() -> None:
    spec = "[M_X, K] @ [K, N_X] -> [M, N_X]"
    done = invoke("explain", spec, "--sizes", "M=8,K=4,N=16", "--mesh", "X=2", "--dtype", "float32")
    assert done.exit_code == 0, done.output
    # 4 rows of 4 floats are sent to the one peer; 2 * 8 * 4 * 8 operations are done.
    assert "all-gather x over X along M, fused" in done.output
    assert "64 B" in done.output
    assert "512 FLOP" in done.output
    assert "FLOPs. Compared with all-gather " in " ".join(done.output.split())
    sizes = "M=8192,K=8192,N=28672"
    predicted = invoke("explain", spec, "--sizes", sizes, "--mesh", "X=8", "--hardware", "h100").output
    step, matmul, total = re.findall(r"(?m)^ +(?:all-gather x|matmul y|total).* ([\d.]+)$", predicted)[:3]
    assert float(step) + float(matmul) == pytest.approx(float(total), rel=1e-3)


def test_explain_points_at_a_mistake_and_needs_something_to_explain() -> None:
    done = invoke("explain", "[M_X, K] @ [K, N_X] -> [M_X, N_X]")
    assert done.exit_code == 2
    assert "axis X is used twice" in done.output
    assert invoke("explain").exit_code == 2
    assert invoke("explain", "FSDP", "--sizes", "M").exit_code == 2


@pytest.mark.parametrize("command", ["mlp", "timeline"])
def test_what_runs_on_cpus_is_refused_beside_a_gpu(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows would stand under the GPU's name."""
    here = replace(machine.describe(), gpu="Some", num_gpus=1)
    monkeypatch.setattr(machine, "describe", lambda: here)
    result = CliRunner().invoke(app, [command, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "GPU" in result.output
    assert not any(tmp_path.iterdir())
