"""`python -m fusedtp.bench.gpu` without a GPU: its plan and rows, failing, dying and late items, and every item's
kernels interpreted at small sizes.
"""

from __future__ import annotations

import csv
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from torch.distributed import ProcessGroup
from typer.testing import CliRunner, Result

from fusedtp.bench import gpu, gpu_cases, gpu_ranks
from fusedtp.bench.gpu import FUSED, PLAN
from fusedtp.bench.gpu_cases import COLUMNS, CUT, ERROR, NOT_REACHED, PASSED, WRONG, ItemEnded, RowsFile, Run, Variant
from fusedtp.bench.oracle import ExactProduct
from fusedtp.bench.ranks import RankError, RankPool
from fusedtp.kernels.loading import is_only_loading

from .harness import wrong

ROOT = Path(__file__).parent.parent


def rows_in(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def rows(tmp_path: Path) -> RowsFile:
    return RowsFile(tmp_path / "rows.csv", {"machine": "here", "commit": "c0ffee"})


def command(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(gpu.gpu)
    return CliRunner().invoke(app, arguments)


def test_the_plan_is_listed_and_documented() -> None:
    done = command("--list")
    assert done.exit_code == 0, done.output
    documented = re.findall(r"^\| (\d+) s \| `(\w+)` \|", (ROOT / "docs" / "gpu.md").read_text(), re.MULTILINE)
    listed = re.findall(r"^ *(\d+)  (\w+) ", done.stdout, re.MULTILINE)
    assert listed == documented == [(f"{item.seconds:.0f}", name) for name, item in PLAN.items()]


def test_without_a_gpu_only_a_dry_run_begins() -> None:
    done = command()
    assert done.exit_code == 2
    assert "--dry-run" in done.output


def test_rows_are_appended_with_what_all_share(tmp_path: Path) -> None:
    """An existing file with other columns is renamed."""
    path = tmp_path / "rows.csv"
    path.write_text("other\n1\n")
    rows = RowsFile(path, {"machine": "here", "commit": "c0ffee"})
    rows.add(op="a", detail="=1+1", median_ms=0.25)
    RowsFile(path, {"machine": "there"}).add(WRONG, op="b")
    assert [each.read_text() for each in tmp_path.iterdir() if each != path] == ["other\n1\n"]
    first, second = rows_in(path)
    assert tuple(first) == COLUMNS
    assert (first["status"], first["op"], first["median_ms"], first["commit"]) == (PASSED, "a", "0.25", "c0ffee")
    assert first["detail"] == "'=1+1", "what a spreadsheet would evaluate"
    assert (second["status"], second["machine"], second["median_ms"]) == (WRONG, "there", "")
    with pytest.raises(AssertionError):
        rows.add(colour="red")


def raised(error: Exception) -> Callable[..., Any]:
    def fails(*_: object) -> Any:
        raise error

    return fails


def test_a_failed_check_and_an_exception_differ_and_cost_no_baseline(
    rows: RowsFile, capfd: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    def make(M: int, N: int, K: int, seed: int) -> dict[str, Variant]:
        def launched(name: str) -> Callable[[], object]:
            return lambda: (order.append(name), time.sleep(1e-4))

        return {
            "base": Variant(launched("base"), lambda: (0.5, 0.25)),
            "wrong": Variant(launched("wrong"), raised(AssertionError("off by 3, allowed 1"))),
            "raises": Variant(raised(ValueError("no such tile"))),
            "right": Variant(launched("right"), lambda: (0.1, 0.2)),
        }

    Run(rows, "it").case("op", (8, 16, 32), "float32", make, seconds=0.01)
    base, wrong, raises, right = found = rows_in(rows.path)
    assert [(row["variant"], row["status"]) for row in found] == [
        ("base", PASSED), ("wrong", WRONG), ("raises", ERROR), ("right", PASSED)
    ]  # fmt: skip
    assert (wrong["detail"], raises["detail"]) == ("off by 3, allowed 1", "ValueError: no such tile")
    assert wrong["median_ms"] == raises["median_ms"] == ""
    assert (base["error"], base["error_ratio"], base["baseline_ms"]) == ("0.5", "0.25", "")
    for row in (base, right):
        assert float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"])
        assert float(row["tflops"]) == pytest.approx(2e-9 * 8 * 16 * 32 / float(row["median_ms"]), rel=1e-4)
    assert float(right["baseline_ms"]) > 0
    assert order.index("wrong") > 5, "the baseline was timed first"
    assert order[-6:] not in (["base"] * 6, ["right"] * 6), "variants take turns"
    said = capfd.readouterr().err
    assert "Traceback" in said
    assert "no such tile" in said


def test_three_failures_alike_end_an_item(rows: RowsFile) -> None:
    run = Run(rows, "it")
    for i in range(2):
        run.ask(f"case {i}", raised(ValueError(f"{i} of 1e-3 is wrong")))
    run.ask("other", raised(TypeError("7 of 1e-3 is wrong")))
    run.ask("fine", lambda: "said")
    with pytest.raises(ItemEnded, match="2 of 1e-3"):
        run.ask("case 2", raised(ValueError("2 of 1e-3 is wrong")))
    assert [row["status"] for row in rows_in(rows.path)] == [ERROR, ERROR, ERROR, PASSED, ERROR]


def test_a_process_whose_device_is_lost_ends_behind_its_row(rows: RowsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(rows, "it")
    run.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", raised(RuntimeError("an illegal memory access was encountered")))
    with pytest.raises(SystemExit, match="takes no more work"):
        run.ask("case", raised(RuntimeError("an illegal memory access was encountered")))
    (row,) = rows_in(rows.path)
    assert (row["status"], row["detail"]) == (ERROR, "RuntimeError: an illegal memory access was encountered")


def test_of_ranks_the_cause_is_told(rows: RowsFile) -> None:
    error = RankError({0: "raised"})
    error.__cause__ = AssertionError("y is wrong")
    Run(rows, "it").ask("check", raised(error))
    Run(rows, "it").ask("check", raised(RankError({1: "died: killed by SIGSEGV"})))
    found = [(row["status"], row["detail"]) for row in rows_in(rows.path)]
    assert found == [(WRONG, "y is wrong"), (ERROR, "RankError: rank 1 died: killed by SIGSEGV")]


def test_processes_that_compile_share_the_cases_and_start_nothing(rows: RowsFile) -> None:
    launched: list[tuple[int, bool]] = []

    def make(M: int, N: int, K: int, seed: int) -> dict[str, Variant]:
        return {"it": Variant(lambda: launched.append((M, is_only_loading())), raised(AssertionError("checked")))}

    for i in range(2):
        run = Run(rows, "it", share=(i, 2))
        for M in (1, 2, 2, 3, 4):
            run.case("op", (M, 1, 1), "float32", make)
        run.ask("op", raised(AssertionError("asked")))
    assert launched == [(1, True), (3, True), (2, True), (4, True)]
    assert rows_in(rows.path) == []


def dies(run: Run) -> None:
    for i in range(3):
        run.ask(f"case {i}", lambda i=i: os.kill(os.getpid(), signal.SIGKILL) if i == 1 else i)


def hangs(run: Run) -> None:
    run.ask("before", lambda: "here")
    run.ask("stuck", lambda: time.sleep(600))


ITEMS = {"dies": gpu.Item(60, dies, ""), "hangs": gpu.Item(9, hangs, ""), "last": gpu.Item(60, hangs, "")}


def work_here(*given: Any) -> None:
    """Do in an item's process what the command does, with the items of this file."""
    gpu.PLAN = ITEMS
    gpu.work(*given)


def test_a_run_ends_in_time_with_rows_of_what_died_was_late_or_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "PLAN", ITEMS)
    monkeypatch.setattr(gpu, "work", work_here)
    begin, end = time.monotonic(), time.monotonic() + 120.0
    counts = gpu.run_all(("dies", "hangs"), tmp_path, end, dry_run=True, commit="c0ffee")
    assert time.monotonic() - begin < 60.0
    counts += gpu.run_all(("last",), tmp_path, time.monotonic() + gpu.LEAST_SECONDS - 1.0, dry_run=True, commit="")
    died, hung, last = (rows_in(tmp_path / f"gpu-{item}.csv") for item in ITEMS)
    assert [(row["case"], row["status"]) for row in died] == [("0", PASSED), ("1", ERROR), ("2", PASSED), ("", PASSED)]
    assert died[1]["detail"] == "its process died: killed by SIGKILL"
    assert (died[0]["commit"], died[1]["commit"], died[1]["dry_run"]) == ("c0ffee", "c0ffee", "True")
    assert [(row["op"], row["status"]) for row in hung] == [("before", PASSED), ("stuck", CUT)]
    assert "test_bench_gpu.py" in (tmp_path / "gpu-hangs.txt").read_text(), "the stacks of what hung"
    assert [row["status"] for row in last] == [NOT_REACHED]
    assert counts[CUT] == counts[NOT_REACHED] == counts[ERROR] == 1


def test_the_run_itself_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "age", lambda: 3.5)
    done = command("--dry-run", "--item", "versions", "--item", "matmul", "--seconds", "4", "--out", str(tmp_path))
    assert done.exit_code == 1, done.output
    assert {rows_in(tmp_path / f"gpu-{item}.csv")[-1]["status"] for item in ("versions", "matmul")} == {NOT_REACHED}


@pytest.mark.parametrize("name", [*FUSED, "float8 gather rows", "float8 scatter"])
def test_every_fused_kernel_is_checked(name: str, rows: RowsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_cases, "DRY_SIZE", 96)
    is_plain, check = name in FUSED, ExactProduct.check
    dtype = "float32" if is_plain else "float8_e4m3fn"
    make = partial(FUSED[name][0], dtype) if is_plain else partial(gpu.float8, name.endswith("scatter"))

    def without_a_row(self: ExactProduct, out: Tensor, *rest: Any) -> Any:
        return check(self, torch.cat([out[1:], out[:1] * torch.nan]), *rest)

    for does, status in ((check, PASSED), (without_a_row, WRONG)):
        monkeypatch.setattr(ExactProduct, "check", does)
        run = Run(rows, "hooks", dry_run=True)
        run.case(name, (60 if "few" in name else 200, 200, 200), dtype, partial(make, 2), world_size=2, timed=False)
        assert [row["status"] for row in rows_in(rows.path)[-2:]] == [status] * 2
    assert len(rows_in(rows.path)) == 4


def test_tiles_and_pushers_are_right_where_they_are_interpreted(
    rows: RowsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_cases, "DRY_SIZE", 96)
    for item in ("tiles", "pushers"):
        PLAN[item].work(Run(rows, item, dry_run=True))
    found = rows_in(rows.path)
    assert {row["status"] for row in found} == {PASSED}
    assert len([row for row in found if row["baseline_ms"]]) == len(gpu.TILES) + 4


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with RankPool(2, env={"TRITON_INTERPRET": "1", "FUSEDTP_TUNING": "off"}, timeout=120) as pool:
        yield pool


def planted(group: ProcessGroup, check: str, *arguments: object) -> str:
    """Return the message of a check when fused results are off by one percent on every rank."""
    with wrong("fused", lambda out: out * 1.01), pytest.raises(AssertionError) as caught:
        getattr(gpu_ranks, check)(group, *arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        *(("layer", (op, "fused", "bfloat16", gpu_ranks.TINY)) for op in gpu_ranks.LAYERS),
        ("collectives", ("bfloat16", (7, 5))),
    ],
)
def test_a_check_of_ranks_finds_what_is_wrong(two: RankPool, check: str, arguments: tuple[object, ...]) -> None:
    two.run(getattr(gpu_ranks, check), *arguments)
    assert all("elements are wrong" in said for said in two.run(planted, check, *arguments))


def test_a_missing_peer_is_named(two: RankPool) -> None:
    # No wait of a rank may be longer than the limit of a check.
    assert gpu_ranks.MISSING_SECONDS < gpu_ranks.WAIT_SECONDS < gpu.RANKS_SECONDS
    said, nothing = two.run(gpu_ranks.missing)
    assert "rank 1" in said
    assert nothing == ""


def flags(group: ProcessGroup) -> tuple[bool, ...]:
    matmuls = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_tf32")
    before = tuple(getattr(matmuls, name) for name in names)
    device = gpu_ranks.prepare()
    # Twice: the second tensor reuses the memory of the first.
    fresh = [bool(torch.empty(1 << 12, device=device).isnan().all()) for _ in range(2)]
    return (*before, *(getattr(matmuls, name) for name in names), *fresh)


def test_ranks_reduce_in_full_precision_into_poisoned_memory() -> None:
    with RankPool(1, timeout=60) as fresh:
        (found,) = fresh.run(flags)
    assert found[:2] == (True, True), "what torch does by itself"
    assert found[3:] == (False, False, False, True, True)
