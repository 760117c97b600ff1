"""README's example runs as printed, and its numbers are those of results/."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from fusedtp.bench import generated, store

from . import published
from .published import README


def test_example_runs_on_three_ranks(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    script = tmp_path / "example.py"
    script.write_text(block)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    # gloo would look for its interface by the host's name, which need not resolve.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(torchrun, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # Processes share the stream: their lines may run into each other. No token is left out.
    expected = {"(171, 256)": 2, "(170, 256)": 1, "op='matmul_reduce_scatter'": 3, "schedule='decomposed'": 3}
    assert {text: done.stdout.count(text) for text in expected} == expected


def test_measured_table_and_picture_come_from_results(tmp_path: Path) -> None:
    assert (published.folder() / "sweep.png").read_bytes().startswith(b"\x89PNG")
    rows = store.read(published.rows(tmp_path))
    assert not any(row.failed for row in rows)
    assert generated.replaced(README, "measured", generated.measured_table(rows)) == README


def test_what_gains_nothing_is_not_left_out(tmp_path: Path) -> None:
    rows = [row for row in store.read(published.rows(tmp_path)) if row.variant == "decomposed" and row.world_size == 2]
    plain = [row for row in rows if row.direction == "forward" and not row.model and row.dtype == "float32"]
    assert (
        README.count(" x ", README.index("measured:begin"), README.index("measured:end"))
        == 2 * sum(1 for row in plain if row.median_ms is not None)
        + README[README.index("measured:begin") : README.index("measured:end")].count("| op | M x N x K |") * 2
    )
    # README says so.
    ratios = [row.speedup_vs_unfused for row in rows if row.model == "llama3-8b" and row.speedup_vs_unfused is not None]
    assert min(ratios) < 1
