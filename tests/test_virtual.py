"""The benchmark of one GPU with virtual ranks, as far as it can be checked without one: arithmetic, labels, arguments.

What needs the device is in tests/test_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import typer
from fusedtp.bench import store, virtual
from fusedtp.bench.cases import Case
from fusedtp.bench.machine import describe
from fusedtp.bench.timing import Verdict
from typer.testing import CliRunner

from fusedtp.memory.local import local_memories
from fusedtp.schedules.phases import run_together
from fusedtp.workspaces.workspace import Workspace

CASE = Case("all_gather_matmul", 46, 36, 24, "float32", 3)
PASSED = Verdict(0.0, 0.0)
TIMES = {"comm": [4.0, 4.0, 5.0], "matmul": [6.0] * 3, "phased": [10.0, 10.0, 11.0], "concurrent": [7.0, 7.0, 9.0]}


def test_a_pause_and_the_copy_before_it_take_as_long_as_the_link() -> None:
    for num_bytes, link, copy in ((1_000_000, 50, 2000), (1 << 24, 400, 2100), (0, 10, 100)):
        copied_us = num_bytes / copy / 1e3
        assert virtual.pause_us(num_bytes, link, copy) + copied_us == pytest.approx(num_bytes / link / 1e3)
    # Nothing is slower than the memory itself.
    assert virtual.pause_us(1 << 20, 3000, 2000) == 0


def test_every_rank_has_its_part_of_the_device_and_leaves_room_for_its_link() -> None:
    for world_size in range(2, 9):
        for num_sms in (16, 78, 108, 132, 148):
            programs = virtual.programs_of(num_sms, world_size)
            assert programs >= 1
            assert world_size * (programs + 1) <= num_sms < world_size * (programs + 2)
    with pytest.raises(ValueError, match="8 virtual ranks need two SMs each, and there are 15"):
        virtual.programs_of(15, 8)


def test_the_links_time_is_that_of_the_bytes_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op that is timed, phased on this CPU: right on every rank, and paced by what each of them sends."""
    device = torch.device("cpu")
    given = virtual.operands_of(CASE, device)
    ranks = [Workspace(memory, device) for memory in local_memories(CASE.world_size, device)]
    paced: list[list[int]] = [[] for _ in ranks]
    try:
        paces = [each.append for each in paced]
        verdict = virtual.check(given, run_together(virtual.phases_of(ranks, given, paces=paces)), "phased")
        assert 0 < verdict.error_ratio <= 1
        assert [sum(each) for each in paced] == [2 * rows * 24 * 4 for rows in given[0].m_sizes]
        with pytest.raises(AssertionError, match="planted, rank 0"):
            virtual.check(given, [[torch.zeros(46, 12)]] * 3, "planted")
    finally:
        for ws in ranks:
            ws.close()
    spun: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", spun.append)
    virtual.pacing(100, 2000, clock_mhz=1500)(1_000_000)
    assert spun == [int((10 - 0.5) * 1500)]


def test_every_row_and_every_line_says_what_it_is(tmp_path: pytest.TempPathFactory) -> None:
    rows = virtual.rows_for(CASE, 100, TIMES, PASSED, describe())
    assert [row.variant for row in rows] == list(virtual.VARIANTS)
    for row in rows:
        assert row.links == "emulated link of 100 GB/s; one GPU, virtual ranks"
        assert row.path.endswith("; one GPU, virtual ranks")
        assert row.layer == virtual.LABEL
        assert row.passed
    assert [row.median_ms for row in rows] == [4.0, 6.0, 10.0, 7.0]
    assert [row.overlap_efficiency for row in rows] == [None, None, None, 0.75]
    lines = virtual.shown(rows)
    assert lines[0].startswith("one GPU, virtual ranks")
    assert lines[-1].endswith("75% of comm hidden")
    # Links stand beside each other in a file, and the same link measured again takes its place.
    path = tmp_path / "virtual.csv"
    other = virtual.rows_for(CASE, 50, TIMES, PASSED, describe())
    for each in (rows, other, rows):
        together = store.update(path, each)
    assert len(together) == 2 * len(virtual.VARIANTS)
    assert {row.links for row in store.read(path)} == {rows[0].links, other[0].links}


def test_what_is_wrong_has_no_times() -> None:
    wrong = replace(PASSED, error="concurrent, rank 1: far off")
    rows = virtual.rows_for(CASE, 100, {name: [] for name in virtual.VARIANTS}, wrong, describe())
    assert all(row.failed and row.median_ms is None and row.overlap_efficiency is None for row in rows)
    assert "far off" in virtual.shown(rows)[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--world-size", "1"), "--world-size must be from 2 to 8"),
        (("--world-size", "9"), "--world-size must be from 2 to 8"),
        (("--rounds", "0"), "--rounds must be"),
        (("--dtype", "int8"), "--dtype must be among bfloat16, float16, float32"),
        (("--link-gbps", "fast"), "--link-gbps must be integers"),
        (("--shape", "64,64"), "--shape must be M,N,K"),
        ((), "this needs a CUDA device"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a CUDA device")
def test_refusals(arguments: tuple[str, ...], said: str) -> None:
    app = typer.Typer()
    app.command()(virtual.virtual)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("\u2502", " ").split())
