"""Rows of the host's time beside a call, as `fusedtp.bench.overhead` appends them: each size, each direction."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd


def test_rows_of_every_size_and_direction_are_appended(tmp_path: Path) -> None:
    out = tmp_path / "overhead.csv"
    command = [sys.executable, "-P", "-m", "fusedtp.bench.overhead", "--out", str(out), "--rounds", "3"]
    for count in (1, 2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        rows = pd.read_csv(out)
        assert list(zip(rows.world_size, rows.direction, strict=True)) == count * [
            (1, "forward"), (1, "both"), (2, "forward"), (2, "both")
        ]  # fmt: skip
        # A call costs its host something, and less than 10 ms even on a busy machine.
        assert rows.beside_us.between(1, 10_000).all(), rows
        assert (rows.q1_us <= rows.beside_us).all()
        assert (rows.beside_us <= rows.q3_us).all()
