"""`fusedtp.bench.decode`: its results are checked before they are timed, and its rows say what is over what."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pandas as pd
import pytest
from torch.distributed import ProcessGroup

from fusedtp.bench import decode, machine
from fusedtp.bench.ranks import RankPool


def test_rows_from_the_command_line(pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @contextmanager
    def here(ranks: int, timeout: int) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(run_again=partial(pool.run, world_size=ranks))

    command = [
        "decode",
        "--out",
        str(tmp_path),
        "--seconds",
        "0",
        "--size",
        "1,8,16",
        "--size",
        "5,12,8",
        "--ranks",
        "2",
        "--readme",
        str(tmp_path / "page.md"),
    ]
    (tmp_path / "page.md").write_text("<!-- decode:begin -->\n<!-- decode:end -->\n")
    with mock.patch.object(decode, "RankPool", here), mock.patch.object(sys, "argv", command):
        decode.main()
    rows = pd.read_csv(tmp_path / machine.describe().name / "decode.csv")
    assert list(rows["variant"]) == ["torch", "dtensor", "fusedtp", "local"] * 2
    assert list(rows["M"]) == [1] * 4 + [5] * 4
    medians = rows.set_index(["M", "variant"])["median_ms"]
    ours = rows[rows["variant"] == "fusedtp"].set_index("M")
    for M in (1, 5):
        for other in ("torch", "dtensor"):
            assert ours[f"speedup_vs_{other}"][M] == pytest.approx(medians[M, other] / medians[M, "fusedtp"])
        assert ours["speedup_low"][M] <= ours["speedup_vs_dtensor"][M] <= ours["speedup_high"][M]
    assert "geometric means of 2 sizes" in capsys.readouterr().out
    text = (tmp_path / "page.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("| 2 | 5 |")]
    shown = [float(cell) for cell in line.split("|")[3:6]]
    expected = [ours["speedup_vs_torch"][5], ours["speedup_vs_dtensor"][5], medians[5, "torch"] / medians[5, "local"]]
    assert shown == pytest.approx(expected, abs=0.006)
    assert text.count("|\n") == 2 + 3
    assert "of 8 x 16, 12 x 8; float32, " in text
    with pytest.raises(ValueError, match="1,8,6"):
        decode.size("1,8,6")


def off_by(group: ProcessGroup) -> str:
    with mock.patch.object(decode, "TOLERANCE", 0.0), pytest.raises(AssertionError) as caught:
        decode.compare(group, 3, 8, 12, 0.0)
    return str(caught.value)


def test_what_is_off_is_refused(pool: RankPool) -> None:
    told = pool.run(off_by, world_size=2)
    assert all(" is off by " in each and "at 3, 8, 12" in each for each in told), told
