"""What a stage of `python -m fusedtp.bench.gpu` keeps of its items: each at once and once, also what is wrong, late or
lost; and how it takes times.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fusedtp.bench import gpu_rows, rows, store
from fusedtp.bench.cases import Item
from fusedtp.bench.gpu_rows import BEGUN, LEFT_OVER, WRONG, Run, found, time_alone
from fusedtp.bench.rows import Outcome
from fusedtp.bench.timing import MIN_ROUNDS, Timing, Verdict

CPU = torch.device("cpu")
RIGHT = found("own_matmul", Verdict(0.5, 0.1), Timing(1.0, 0.9, 1.1, 10.0, 10))
ITEM = Item("matmul", 70, 83, 61, "bfloat16", 4, model="llama3-8b", tokens=8192, layer="mlp up")


def new_run(tmp_path: Path, seconds: float = 100.0, **options: Any) -> Run:
    said: list[str] = options.pop("said", [])
    return Run(tmp_path / "rows.csv", CPU, gpu_rows.machine_here(emulate=True), seconds, say=said.append, **options)


def test_an_item_is_kept_at_once_and_done_once(tmp_path: Path) -> None:
    run, seen = new_run(tmp_path), []

    def work() -> list[Outcome]:
        seen.append([row.gate for row in run.rows()])
        return [RIGHT]

    run.do(ITEM, work)
    assert seen == [[BEGUN]], "a row says what is under way"
    (row,) = run.rows()
    assert (row.median_ms, row.p20_ms, row.p80_ms, row.rounds, row.error_ratio) == (1.0, 0.9, 1.1, 10, 0.1)
    new_run(tmp_path).do(ITEM, work)
    assert len(seen) == 1
    # Rows of another commit, another torch or another Triton say nothing about this one.
    for number, of in enumerate(({"commit": "another"}, {"torch": "2.0"}, {"triton": "2.0"})):
        other = new_run(tmp_path)
        other.machine = replace(other.machine, **of)
        assert not other.rows()
        other.do(ITEM, work)
        assert len(seen) == 2 + number


def test_what_fails_is_a_row_and_does_not_stop_the_next(tmp_path: Path) -> None:
    said: list[str] = []
    run, since = new_run(tmp_path, said=said), rows.now()

    def wrong() -> list[Outcome]:
        raise AssertionError("3 of 9 elements are wrong")

    def broken() -> list[Outcome]:
        raise KeyError("stride")

    run.do(ITEM, wrong)
    run.do(replace(ITEM, layer="mlp down"), broken)
    run.do(replace(ITEM, layer="attention out"), lambda: [RIGHT])
    assert [row.gate for row in run.rows()] == ["3 of 9 elements are wrong", "KeyError: 'stride'", "passed"]
    assert [row.median_ms for row in run.rows()] == [None, None, 1.0]
    assert run.outcome == WRONG
    assert any("in broken" in line for line in said)
    # The same command goes on behind it, the next one tries again.
    again = new_run(tmp_path, since=since)
    again.do(ITEM, lambda: [RIGHT])
    assert again.outcome == WRONG
    assert not again.rows()[0].passed
    next_command = new_run(tmp_path)
    next_command.do(ITEM, lambda: [RIGHT])
    assert next_command.outcome == 0


def test_what_there_is_no_time_for_is_left_over(tmp_path: Path) -> None:
    run = new_run(tmp_path, seconds=10.0)
    run.do(ITEM, lambda: [RIGHT], needs=20.0)
    assert run.outcome == LEFT_OVER
    assert not run.rows()


def test_a_lost_device_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path)
    run.device = torch.device("cuda")

    def lost(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def work() -> list[Outcome]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(gpu_rows.DeviceLost, match="illegal memory access"):
        run.do(ITEM, work)
    assert "illegal memory access" in run.rows()[0].gate


# A process of a stage whose item hangs: it shows its stacks and ends.
LATE = """
import sys, time, torch
from pathlib import Path
from fusedtp.bench import gpu_rows
run = gpu_rows.Run(Path(sys.argv[1]), torch.device("cpu"), gpu_rows.machine_here(emulate=True), 60, watched=True)
def stuck_here():
    time.sleep(50)
run.do(gpu_rows.Item("matmul", 1, 1, 1), stuck_here, most=1.0)
"""


def test_a_late_item_is_shown_and_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    done = subprocess.run([sys.executable, "-P", "-c", LATE, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "stuck_here" in done.stderr
    (row,) = store.read(path, of_ops=False)
    assert row.gate == BEGUN


def test_variants_take_turns_and_inputs_rotate(tmp_path: Path) -> None:
    seen: list[str] = []
    variants = {name: [functools.partial(seen.append, f"{name}{i}") for i in range(2)] for name in "ab"}
    run = new_run(tmp_path)
    assert {name: each.rounds for name, each in time_alone(variants, run, 0.0).items()} == {"a": 1, "b": 1}
    run.emulate = False
    seen.clear()
    assert time_alone(variants, run, 0.0)["a"].rounds == MIN_ROUNDS == 5
    # A first round is not counted.
    assert seen == ["a0", "b0", "a1", "b1", "b0", "a0", "a1", "b1", "b0", "a0", "a1", "b1"]


def test_times_are_given_to_the_variants_that_took_them(tmp_path: Path) -> None:
    times = time_alone({"slow": [lambda: time.sleep(0.02)], "fast": [lambda: None]}, new_run(tmp_path), 0.0)
    assert times["fast"].median_ms < 10 < 20 <= times["slow"].median_ms
