"""The commands as a user runs them, on real ranks at tiny sizes."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fusedtp import machine
from fusedtp.bench import arguments, cases, store, sweep
from fusedtp.bench.cases import DIRECTIONS, LAYERS, BlockSizes
from fusedtp.bench.frames import blocks, frame_of
from fusedtp.bench.jobs import Job
from fusedtp.bench.store import Measurement, rows_of
from fusedtp.bench.tables import times

from .command import command, folded, module

MakeRow = Callable[..., Measurement]
ONLY = ("--schedule", "decomposed", "--baseline", "none")
BASIC = ("matmul", "comm", "unfused", "sequential", "decomposed")
TINY = ("--op", "all_gather_matmul", "--dtype", "float32", "--shape", "24,20,16", "--rounds", 3)


def stored(folder: Path) -> list[Measurement]:
    (path,) = folder.glob("*/sweep.csv")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    return store.read(path)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("results")
    return out, command("sweep", "--world-size", 2, *TINY, "--out", out)


def test_sweep_prints_and_keeps_rows(swept: tuple[Path, str]) -> None:
    out, said = swept
    rows = stored(out)
    assert not any(row.failed for row in rows)
    timed: dict[str, Any] = {row.variant: row for row in rows if row.median_ms is not None}
    assert list(timed) == [*BASIC, "auto", "dtensor"]
    for row in timed.values():
        assert row.bound_ms is not None
        assert (row.rounds, row.interpreted, row.threads, row.backend) == (3, False, 1, "gloo")
        assert (sorted(row.rounds_ms)[1], len(row.rounds_ms)) == (row.median_ms, row.rounds)
        assert (row.direction, row.model, row.links, row.driver) == ("forward", "", "shared memory", "")
    unfused, decomposed = timed["unfused"], timed["decomposed"]
    assert unfused.speedup_vs_unfused == 1.0
    assert decomposed.speedup_vs_unfused == pytest.approx(unfused.median_ms / decomposed.median_ms, rel=1e-4)
    assert decomposed.path.startswith("decomposed: ")
    assert timed["auto"].path.partition(":")[0] in ("unfused", "decomposed")
    assert timed["comm"].busbw_gbps == pytest.approx(timed["comm"].algbw_gbps / 2, rel=1e-4)
    assert "speed-up" in said
    assert re.search(r"ain: decomposed is faster than unfused in [01] of 1 cases", said)
    assert re.search(r"auto takes (decomposed|unfused) in 1 of 1 cases: ", said)


def test_what_is_interpreted_or_cannot_run_is_a_row_without_a_time_and_no_failure(swept: tuple[Path, str]) -> None:
    out, said = swept
    untimed = [row for row in stored(out) if row.median_ms is None]
    assert {(row.speedup_vs_unfused, row.matmul_fraction, row.rounds) for row in untimed} == {(None, None, 0)}
    absent, kernels = ([row for row in untimed if row.passed is passed] for passed in (False, True))
    names = ("torch_symm_mem", "async_tp", "nccl_windows")
    assert [(row.variant, row.gate) for row in absent] == [(name, "not run: its fused ops need CUDA") for name in names]
    sizes = ((96, 80, 64, "forward"), (97, 83, 61, "both"))
    assert {(row.variant, row.M, row.N, row.K, row.direction) for row in kernels} == {
        (variant, *size) for variant in ("fused", "own_matmul") for size in sizes
    }
    assert all(row.interpreted and row.error_ratio is not None for row in kernels)
    assert "interpreted" in said
    assert f"Not run here: {', '.join(names)} (--verbose says why)." in said
    shown = command("report", "--verbose", "--out", out)
    assert "not run: async_tp: its fused ops need CUDA (all_gather_matmul on 2)" in shown
    assert "Rates, forward" in shown


def test_float8_is_swept(tmp_path: Path) -> None:
    tiny = ("--op", "matmul_reduce_scatter", "--dtype", "fp8,mxfp8", "--shape", "24,20,16", "--rounds", 2)
    said = command("sweep", "--world-size", 2, *tiny, *ONLY, "--out", tmp_path)
    timed = [(row.dtype, row.variant) for row in stored(tmp_path) if row.median_ms is not None]
    assert timed == [(dtype, variant) for dtype in ("float8_e4m3fn", "mxfp8") for variant in BASIC]
    assert all(f"20 x 16 {name}" in said for name in ("fp8", "mxfp8"))


def test_sweeping_again_replaces_and_report_draws_again(swept: tuple[Path, str]) -> None:
    out, _ = swept
    before = stored(out)
    command("sweep", "--world-size", "1,2", *TINY, *ONLY, "--out", out)
    rows = stored(out)
    # on two ranks five variants replace ten; on one rank all five are new, three of them not run
    assert len(rows) == len(before) - 10 + 5 + 5
    (picture,) = out.glob("*/sweep.png")
    picture.unlink()
    assert "24 x 20 x 16 fp32" in command("report", "--out", out)
    assert stored(out) == rows


def test_every_launch_adds_its_rounds_to_the_timed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = (*TINY, *ONLY, "--world-size", 2, "--out", tmp_path)
    said = command("sweep", *given, "--launches", 3)
    rows = [row for row in stored(tmp_path) if row.median_ms]
    (rounds,) = {row.launches for row in rows}
    assert len(rounds) == 3
    assert all(len(row.rounds_ms) == row.rounds == sum(rounds) for row in rows)
    assert re.search(r"^3 steps", said, re.MULTILINE)
    assert "intervals over launches" in said
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    refused = folded(command("sweep", *given, "--launches", 2, code=2))
    assert "--launches starts fresh ranks" in refused


def test_foreign_file_stops_the_sweep_before_it_starts(tmp_path: Path) -> None:
    path = tmp_path / machine.describe().name / "sweep.csv"
    path.parent.mkdir()
    path.write_text("name,price\napple,3\n")
    assert "is not a CSV file of results" in folded(command("sweep", *TINY, "--out", tmp_path, code=2))
    assert path.read_text() == "name,price\napple,3\n"


def test_failed_check_is_a_row_without_a_number_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_row: MakeRow
) -> None:
    def spawned(jobs: list[Job], about: machine.Machine, done: Any, launches: int) -> list[Measurement]:
        failed = rows_of(jobs[0].case, sweep.failed(jobs[0], "[2] elements wrong"), about)
        return [make_row(median_ms=1.0, world_size=1), *failed]

    monkeypatch.setattr(sweep, "run_spawned", spawned)
    only = ("--schedule", "unfused", "--baseline", "none")
    said = command("sweep", "--world-size", 2, *TINY, *only, "--out", tmp_path, code=1)
    assert "[2] elements wrong" in said
    assert "4 of 5 rows did not pass" in said
    (path,) = tmp_path.glob("*/sweep.csv")
    failed = [row for row in store.read(path) if not row.passed]
    assert [row.variant for row in failed] == ["matmul", "comm", "unfused", "sequential"]
    assert {(row.median_ms, row.max_error, row.rounds) for row in failed} == {(None, None, 0)}


def test_ctrl_c_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_row: MakeRow) -> None:
    measured = [make_row(median_ms=1.0)]

    def spawned(jobs: list[Job], about: machine.Machine, done: Any, launches: int) -> list[Measurement]:
        done(jobs[0], measured)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "run_spawned", spawned)
    said = command("sweep", "--world-size", 2, *TINY, *ONLY, "--out", tmp_path, code=130)
    (path,) = tmp_path.glob("*/sweep.csv")
    assert f"the rows of what had ended are in\n{path}\n" in said
    assert store.read(path) == measured

    def at_once(*_: Any, launches: int) -> list[Measurement]:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "run_spawned", at_once)
    said = command("sweep", "--world-size", 2, *TINY, *ONLY, "--out", tmp_path / "new", code=130)
    assert "no step had ended, and no file was changed" in said


def test_the_time_left_goes_by_the_steps_that_are_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first step does not count, as ranks start in it."""
    clock = iter((0.0, 10.0, 12.0, 16.0))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(arguments, "time", SimpleNamespace(monotonic=clock.__next__))
    with arguments.progress(Console(width=80), [("a", 1.0), ("b", 1.0), ("c", 2.0)], "nothing") as done:
        for _ in range(3):
            done()
    assert capsys.readouterr().out.splitlines() == [
        "3 steps, about 4 s; Ctrl-C ends it",
        "1/3, after 10 s, about 3 s left: a",
        "2/3, after 12 s, about 3 s left: b",
        "3/3, after 16 s, about 0 s left: c",
    ]


@pytest.mark.parametrize(("load", "told"), [(0.4, "about 60 s"), (1.0, "60 s to 3 min"), (6.0, "60 s to 8 min")])
def test_an_estimate_is_a_range_where_something_else_runs(
    load: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert arguments.expected(60.0).startswith(told)


def test_under_torchrun(tmp_path: Path) -> None:
    # First a shape beyond any processor's addresses: its operands cannot be made.
    shapes = ["--patience", "60", "--shape", f"{2**30},16,{2**30}", *map(str, TINY)]
    sweep = ["-m", "fusedtp.bench.cli", "sweep", *shapes, *ONLY, "--out", str(tmp_path)]
    # away from the checkout: -m puts the working directory first, whose fusedtp lacks kernels and bench
    env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    code, said = module(*launcher, *sweep, folder=tmp_path, env=env)
    assert (code, said.count("Times, forward")) == (1, 1), said
    assert all(text in folded(said) for text in ("7 of 17 results", "can't allocate memory")), said
    # One rank is the reference of scaling.
    found = [(row.variant, row.world_size) for row in stored(tmp_path) if row.median_ms]
    assert found == [("matmul", 1), ("unfused", 1), *((variant, 2) for variant in BASIC)]


def test_a_models_block_gives_rows_and_totals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cases.MODELS, "llama3-8b", BlockSizes(32, 48, 4, 2, 8, 1, True, "made up"))
    block = ("--model", "llama3-8b", "--tokens", 24, "--world-size", 2, "--rounds", 2)
    said = command("sweep", *block, *ONLY, "--direction", ",".join(DIRECTIONS), "--out", tmp_path)
    rows = [row for row in stored(tmp_path) if row.passed]
    ops = zip(LAYERS, ("all_gather_matmul", "matmul_reduce_scatter") * 2, strict=True)
    assert {(row.layer, row.op, row.tokens, row.direction) for row in rows} == {
        (layer, op, 24, direction) for layer, op in ops for direction in DIRECTIONS
    }
    assert [set(medians) for _, medians in blocks(frame_of(rows))] == [set(BASIC)] * 3
    assert "The matmuls of one transformer block together" in said


def test_headings_differ_in_eighty_columns(make_row: MakeRow) -> None:
    names = {"matmul": 1.0, "unfused": 3.0, "decomposed": 2.0, "fused": 1.5, "auto": 1.5}
    ratios = {"speedup_vs_unfused": 1.5, "matmul_fraction": 0.5, "hidden": 0.25}
    table = times(frame_of([make_row(variant=name, median_ms=ms, **ratios) for name, ms in names.items()]), "forward")
    written = StringIO()
    table.print(Console(width=80, file=written), "op")
    lines = [line.split() for line in written.getvalue().splitlines()]
    assert lines[2] == ["unfused", "decomposed", "fused", "speed-up", "speed-up"]
    assert (lines[3][-2:], lines[5][-2:]) == (["decomposed", "fused"], ["1.50x", "2.00x"])
    assert "left out in 80 columns: hidden decomposed, " in folded(written.getvalue())


def test_doctor() -> None:
    said = command("doctor", "--providers")
    assert not re.search(r" $", said, re.MULTILINE)
    for word in ("torch", "triton", "memfd_create", "unfused", "decomposed", "fused", "auto", "dtensor"):
        assert word in said
    assert said.splitlines()[-1].startswith(f"Verdict: CPU, {len(os.sched_getaffinity(0))} cores: ")


def test_a_processor_whose_name_says_little_is_told_by_its_family(tmp_path: Path) -> None:
    """Two generations of one vendor must not count as one machine."""
    info = tmp_path / "cpuinfo"

    def named(name: str, family: int) -> str:
        core = f"processor\t: 0\ncpu family\t: {family}\nmodel\t\t: 2\nmodel name\t: {name}\nstepping\t: 1\n"
        info.write_text(f"{core}\n{core.replace(': 2', ': 3')}")
        return machine.cpu_model(info)

    assert named("AMD EPYC", 26) == "AMD EPYC (family 26, model 2)"
    assert machine.slug(f"cpu {named('AMD EPYC', 26)} 2c") == "cpu-amd-epyc-family-26-model-2-2c"
    assert named("Intel(R) Xeon(R) Platinum 8480C", 6) == "Intel(R) Xeon(R) Platinum 8480C"
    info.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert machine.cpu_model(info) == machine.cpu_model(tmp_path / "none") == platform.machine()


def test_explain_shows_steps_bytes_and_flops() -> None:
    spec = "[M_X, K] @ [K, N_X] -> [M, N_X]"
    said = folded(command("explain", spec, "--sizes", "M=8,K=4,N=16", "--mesh", "X=2", "--dtype", "float32"))
    # 4 rows of 4 floats go to the one peer; 2 * 8 * 4 * 8 FLOPs
    assert "all-gather x over X along M, one op" in said
    assert "64 B" in said
    assert "512 FLOP" in said
    assert "FLOPs. Compared with all-gather " in said
    predicted = command("explain", spec, "--sizes", "M=8192,K=8192,N=28672", "--mesh", "X=8", "--hardware", "h100")
    step, matmul, total = re.findall(r"(?m)^ +(?:all-gather x|matmul y|total).* ([\d.]+)$", predicted)[:3]
    assert float(step) + float(matmul) == pytest.approx(float(total), rel=1e-3)
