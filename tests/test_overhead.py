"""Rows of the host's time beside a call, as `fusedtp.bench.overhead` appends them: each size, each direction."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

from fusedtp.bench import overhead


def test_rows_of_every_size_and_direction_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "overhead.csv"
    columns = "commit,dirty,machine,torch,world_size,direction,rows,features,beside_us,q1_us,q3_us,linear_us"
    out.write_text(f"{columns}\nbefore,False,another,2.11.0,1,forward,8,64,200.0,190.0,210.0,5.0\n")
    monkeypatch.setattr(sys, "argv", ["overhead", "--out", str(out), "--rounds", "3"])
    overhead.main()
    rows = pd.read_csv(out)
    assert ",".join(rows.columns) == columns
    assert rows.commit[0] == "before"
    assert list(zip(rows.world_size, rows.direction, strict=True)) == [
        (1, "forward"), (1, "forward"), (1, "both"), (2, "forward"), (2, "both")
    ]  # fmt: skip
    # A call costs its host something, and less than 10 ms even on a busy machine; with peers rounds may differ by more
    # than that.
    assert rows.beside_us.abs().lt(10_000).all(), rows
    assert rows.beside_us[rows.world_size == 1].gt(1).all(), rows
    assert rows.linear_us.between(1, 10_000).all(), rows
    assert (rows.q1_us <= rows.beside_us).all()
    assert (rows.beside_us <= rows.q3_us).all()
