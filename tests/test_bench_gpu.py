"""`python -m fusedtp.bench.gpu` without a GPU: its plan and rows, failing, dying and late cases, and every kernel
interpreted at small sizes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp.bench import checks, gpu, gpu_kernels, store, sweep
from fusedtp.bench.gpu import Item, kernel, load, named, plan, run_all, run_item
from fusedtp.bench.gpu_kernels import KERNELS, Kernel, Launch
from fusedtp.bench.intervals import Timing
from fusedtp.bench.providers import Missing
from fusedtp.bench.ranks import PRELOAD, RankError, RankPool
from fusedtp.bench.store import Measurement, Outcome
from fusedtp.bench.sweep import NOT_REACHED, Budget, run_job
from fusedtp.bench.timing import Verdict
from fusedtp.kernels import latency
from fusedtp.kernels.cores import WARP_SPECIALISED
from fusedtp.kernels.loading import is_only_loading
from fusedtp.machine import describe
from fusedtp.reference import ExactProduct

from .harness import wrong

ROOT = Path(__file__).parent.parent


def test_the_plan_is_listed_and_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list"]) == 0
    documented = re.findall(r"^\| (\d+) s \| `(\w+)` \|", (ROOT / "docs" / "gpu.md").read_text(), re.MULTILINE)
    listed = re.findall(r"^ *(\d+)  (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert listed == documented == [(f"{item.seconds:.0f}", name) for name, item in plan().items()]
    # Every check is in the plan, and a dry run has small sizes.
    layers = {job.case.layer for item in plan().values() for job in item.jobs if job.case.op == "check"}
    assert layers == set(checks.CHECKS)
    for item in plan(dry_run=True).values():
        assert all(
            max(job.case.M, job.case.N, job.case.K) <= gpu.DRY_SIZE or job.case.op == "check" for job in item.jobs
        )
        assert all(job.rounds == (2 if job.timed else None) for job in item.jobs)


@pytest.mark.parametrize(
    ("given", "said"), [((), "--dry-run needs none"), (("--dry-run", "--out", __file__), "--out must be a folder")]
)
def test_what_cannot_begin_says_why(given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(given)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


ALONE = """
import runpy, sys
class Refused:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("typer", "click", "rich", "pandas", "scipy", "matplotlib", "jinja2", "pynvml"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Refused())
sys.argv[1:] = ["--dry-run", "--item", "latency", "--out", sys.argv[1]]
runpy.run_module("fusedtp.bench.gpu", run_name="__main__", alter_sys=True)
"""


def test_it_needs_torch_triton_and_numpy_alone(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", ALONE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row.variant: row for row in store.read(tmp_path / "gpu-latency.csv")}
    assert {row.gate for row in rows.values()} <= {"passed", f"not run: {NOT_REACHED}"}
    assert "flags" in rows


def test_a_sanitizer_that_is_refused_is_not_run_and_one_that_finds_something_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    for code, raised_ in ((255, Missing), (checks.FOUND, AssertionError)):
        tool.write_text(f"#!/bin/sh\necho '========= Error: no device may be attached to'; exit {code}\n")
        tool.chmod(0o755)
        with pytest.raises(raised_, match="may be attached to"):
            checks.sanitized(str(tool))


def raised(error: Exception) -> Callable[..., Any]:
    def fails(*_: object) -> Any:
        raise error

    return fails


def planted_launches(dtype: str, M: int, N: int, K: int, seed: int) -> dict[str, Launch]:
    """Return a right launch, a wrong one, one that raises, one whose process dies, and one that never ends."""
    return {
        "base": Launch(lambda: time.sleep(1e-4), lambda: (0.5, 0.25)),
        "wrong": Launch(lambda: None, raised(AssertionError("off by 3, allowed 1"))),
        "raises": Launch(raised(ValueError("no such tile"))),
        "dies": Launch(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        "hangs": Launch(lambda: time.sleep(600)),
        "right": Launch(lambda: time.sleep(2e-4), lambda: (0.1, 0.2)),
    }


def planted_job(group: ProcessGroup, job: gpu.Job) -> list[Outcome]:
    gpu_kernels.KERNELS = {"planted": Kernel(planted_launches, ())}
    return run_job(group, job)


def planted(*variants: str, **options: Any) -> gpu.Job:
    job = replace(kernel("matmul", (8, 16, 32), "float32"), variants=variants, rounds=3, **options)
    return replace(job, case=replace(job.case, layer="planted"))


@pytest.fixture
def by_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedtp.bench.sweep.run_job", planted_job)
    # The ranks' fork server is for these tests alone.
    monkeypatch.setenv(PRELOAD, "")


def rows_of(job: gpu.Job, path: Path, seconds: float = 60.0) -> dict[str, Measurement]:
    run_item(Item(seconds, [job], ""), path, describe(), time.monotonic() + seconds)
    return {row.variant: row for row in store.read(path)}


def test_a_failed_check_an_exception_and_a_death_cost_the_others_no_time(by_planted: None, tmp_path: Path) -> None:
    rows = rows_of(planted("base", "wrong", "raises", "dies", "right"), tmp_path / "rows.csv")
    assert rows["wrong"].gate == "off by 3, allowed 1"
    assert rows["raises"].gate == "ValueError: no such tile"
    assert "killed by SIGKILL" in rows["dies"].gate
    for name, share in (("base", 0.25), ("right", 0.2)):
        row = rows[name]
        assert (row.passed, row.error_ratio, row.rounds) == (True, share, 3)
        assert row.tflops == pytest.approx(2e-9 * 8 * 16 * 32 / (row.median_ms or 0.0), rel=1e-3)
    assert all(rows[name].median_ms is None for name in ("wrong", "raises", "dies"))


def test_what_hangs_is_ended_and_the_rest_is_not_reached(by_planted: None, tmp_path: Path) -> None:
    begin = time.monotonic()
    rows = rows_of(planted("base", "hangs"), tmp_path / "rows.csv", 12.0)
    assert time.monotonic() - begin < 60.0
    assert "gave no answer within" in rows["hangs"].gate
    end = time.monotonic() + Budget(0.0).least - 1.0
    counts = run_item(Item(60, [planted("base")], ""), tmp_path / "late.csv", describe(), end)
    (row,) = store.read(tmp_path / "late.csv")
    assert row.gate == f"not run: {NOT_REACHED}"
    assert counts == {"not run": 1}


def test_variants_that_hang_spend_the_items_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def hangs(fn: object, job: gpu.Job, world_size: int, timeout: float) -> None:
        now[0] += timeout
        raise RankError({0: f"late by {timeout:g} s"}, {0: f"1 forward {job.variants[-1]}"})

    monkeypatch.setattr(sweep, "time", mock.Mock(monotonic=lambda: now[0]))
    job, budget = planted("base", "one", "two", "three"), Budget(now[0] + 100.0, job_seconds=60.0)
    found = {each.variant: each.gate for each in sweep.run_on(mock.Mock(run=hangs), job, {}, budget)}
    assert now[0] == 200.0
    assert "late by 60 s" in found.pop("three")
    assert "late by 40 s" in found.pop("two")
    assert found == dict.fromkeys(("base", "one"), f"not run: {NOT_REACHED}")


def test_a_run_keeps_what_it_does_not_reach_and_what_other_machines_measured(tmp_path: Path) -> None:
    path, job, here = tmp_path / "rows.csv", planted("base"), describe()
    timed = [Outcome("base", "forward", Verdict(), Timing.of([1.0] * 3))]
    absent = [Outcome("base", "forward", not_run=NOT_REACHED)]
    for name, outcomes in (("h100", timed), ("b200", absent), ("b200", timed), ("h100", absent), ("b200", absent)):
        gpu.add(path, store.rows_of(job.case, outcomes, replace(here, name=name)))
    assert [(row.machine, row.median_ms) for row in store.read(path)] == [("h100", 1.0), ("b200", 1.0)]
    # What runs again is replaced, also by a failure.
    gpu.add(path, store.rows_of(job.case, [*absent, Outcome("raises", "forward", Verdict(error="no"))], here))
    gpu.add(path, store.rows_of(job.case, [Outcome("base", "forward", Verdict(error="no"))], here))
    assert [row.gate for row in store.read(path)] == ["passed", "passed", "no"]


def test_three_failures_alike_end_an_item(by_planted: None, tmp_path: Path) -> None:
    jobs = [replace(planted("base", "raises"), case=replace(planted().case, M=M)) for M in (1, 2, 3, 4)]
    counts = run_item(Item(100, jobs, ""), tmp_path / "rows.csv", describe(), time.monotonic() + 100)
    rows = store.read(tmp_path / "rows.csv")
    assert [row.gate.partition(":")[0] for row in rows] == ["passed", "ValueError"] * 3 + ["not run"] * 2
    assert "3 failures alike: ValueError" in rows[-1].gate
    assert counts == {"passed": 3, "failed": 3, "not run": 2}


def test_the_run_itself_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "age", lambda: 3.5)
    given = ("--dry-run", "--item", "versions", "--item", "matmul", "--seconds", "4", "--out", str(tmp_path))
    assert gpu.main(given) == 0
    for item in ("versions", "matmul"):
        rows = store.read(tmp_path / f"gpu-{item}.csv")
        assert {row.gate for row in rows} == {f"not run: {NOT_REACHED}"}


def compiled(group: ProcessGroup, share: int) -> list[tuple[int, bool]]:
    launched: list[tuple[int, bool]] = []

    def make(dtype: str, M: int, N: int, K: int, seed: int) -> dict[str, Launch]:
        return {"it": Launch(lambda: launched.append((M, is_only_loading())), raised(AssertionError("checked")))}

    gpu_kernels.KERNELS = {"planted": Kernel(make, ("it",))}
    gpu.torch.cuda.current_device = lambda: 0  # type: ignore[method-assign]
    gpu.torch.cuda.empty_cache = lambda: None  # type: ignore[method-assign]
    jobs = [replace(planted("it"), case=replace(planted().case, M=M)) for M in (1, 2, 3, 4)]
    load(group, jobs)
    return launched


def test_processes_that_compile_share_the_cases_and_start_nothing() -> None:
    with RankPool(2, timeout=60) as pool:
        assert pool.run(compiled, 0) == [[(1, True), (3, True)], [(2, True), (4, True)]]


def checked(group: ProcessGroup, name: str, without_a_row: bool) -> list[str]:
    check, dtypes = ExactProduct.check, {"float8": "float8_e4m3fn", "few-row": "bfloat16"}

    def missing_a_row(self: ExactProduct, out: Tensor, *rest: Any) -> Any:
        return check(self, torch.cat([out[1:], out[:1] * torch.nan]), *rest)

    M = 3 if name == "launches" else 60 if "few" in name else 96
    job = kernel(name, (M, 96, 96), dtypes.get(name.split()[0], "float32"), timed=False)
    ExactProduct.check = missing_a_row if without_a_row else check  # type: ignore[method-assign, assignment]
    try:
        return [outcome.gate for outcome in run_job(group, job) if WARP_SPECIALISED not in outcome.variant]
    finally:
        ExactProduct.check = check  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with RankPool(2, env={"TRITON_INTERPRET": "1", "FUSEDTP_TUNING": "off"}, timeout=120) as pool:
        yield pool


# Kernels on 2 ranks stand for those on 4 and 8.
@pytest.mark.parametrize(
    "name", [name for name in KERNELS if not re.search("[48] ranks|link|latency", name) or "own" in name]
)
def test_every_kernel_is_checked(name: str, two: RankPool) -> None:
    (right,) = two.run(checked, name, False, world_size=1)
    assert set(right) == {"passed"}
    # Interpreted kernels have one core.
    assert len(right) == sum(WARP_SPECIALISED not in variant for variant in KERNELS[name].variants)
    (said,) = two.run(checked, name, True, world_size=1)
    assert all("elements are wrong" in each for each in said)


def latencies(group: ProcessGroup, planted: bool) -> dict[str, str]:
    flags, signals = latency.flags, latency.signals
    if planted:
        # One turn less, and another slot.
        latency.flags = lambda channel, op, slot, turns, seen: flags(channel, op, slot, turns - 1, seen)
        latency.signals = lambda channel, op, slot, turns, at_once: signals(channel, op, slot + 1, turns, at_once)
    try:
        return {each.variant: each.gate for each in run_job(group, kernel("latency", (3, 1, 1), timed=False))}
    finally:
        latency.flags, latency.signals = flags, signals


def test_flags_are_answered_and_signals_reach_every_peer(two: RankPool) -> None:
    (right,) = two.run(latencies, False, world_size=1)
    assert right == dict.fromkeys(KERNELS["latency"].variants, "passed")
    (said,) = two.run(latencies, True, world_size=1)
    assert said["flags"].startswith("2 of 3 flags")
    assert all("signals of epoch" in gate for name, gate in said.items() if "signals" in name)


def planted_check(group: ProcessGroup, check: str, *arguments: object) -> str:
    """Return the message of a check when fused results are off by one percent on every rank."""
    with wrong("fused", lambda out: out * 1.01), pytest.raises(AssertionError) as caught:
        getattr(checks, check)(group, *arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        *(("layer", (op, "fused", "bfloat16", checks.TINY)) for op in checks.LAYERS),
        ("collectives", ("bfloat16", (7, 5))),
        ("trees", ("bfloat16", checks.TINY)),
    ],
)
def test_a_check_of_ranks_finds_what_is_wrong(two: RankPool, check: str, arguments: tuple[object, ...]) -> None:
    two.run(getattr(checks, check), *arguments)
    said = "other bits of " if check == "trees" else "elements are wrong"
    assert all(said in each for each in two.run(planted_check, check, *arguments))


def test_a_check_is_a_case_whose_answer_is_in_its_row(two: RankPool, tmp_path: Path) -> None:
    assert checks.MISSING_SECONDS < checks.WAIT_SECONDS < Budget(0.0).job_seconds
    (job,) = (job for job in named("ranks") if job.case.layer == "a missing peer")
    counts = run_all({"ranks": Item(60, [job], "")}, tmp_path, time.monotonic() + 60, describe())
    (row,) = store.read(tmp_path / "gpu-ranks.csv")
    assert (row.op, row.layer, row.gate, row.median_ms) == ("check", "a missing peer", "passed", None)
    assert "rank 1" in row.path
    assert counts == {"passed": 1}


def flags(group: ProcessGroup) -> tuple[bool, ...]:
    matmuls = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_tf32")
    before = tuple(getattr(matmuls, name) for name in names)
    device = checks.prepare()
    # Twice: the second tensor reuses the memory of the first.
    fresh = [bool(torch.empty(1 << 12, device=device).isnan().all()) for _ in range(2)]
    return (*before, *(getattr(matmuls, name) for name in names), *fresh)


def test_ranks_reduce_in_full_precision_into_poisoned_memory() -> None:
    with RankPool(1, timeout=60) as fresh:
        (found,) = fresh.run(flags)
    assert found[:2] == (True, True), "what torch does by itself"
    assert found[3:] == (False, False, False, True, True)
