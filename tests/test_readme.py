"""README's example runs as printed, and its numbers are those of results/."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import pandas as pd
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fusedtp.bench import generated, store
from fusedtp.bench.layers import SUITES, decode_table
from fusedtp.bench.ranks import RankPool

from . import published
from .published import README

RESULTS = Path(__file__).parent.parent / "results"


def run_block(group: ProcessGroup, block: str, port: int) -> str:
    """What a process says that torchrun, whose agent has the store at `port`, has started on a file."""
    started = {"RANK": group.rank(), "WORLD_SIZE": group.size(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.destroy_process_group()
    os.environ.update({name: str(value) for name, value in started.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(block, "example.py", "exec"), {"__name__": "__main__"})
    assert not dist.is_initialized()
    return said.getvalue()


def test_example_runs_on_three_ranks() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # torchrun itself has `test_under_torchrun`.
    with RankPool(3, timeout=100) as ranks:
        said = ranks.run(run_block, block, agent.port)
    for rank, (line, rows) in enumerate(zip(said, (171, 171, 170), strict=True)):
        assert line.startswith(f"{rank} ({rows}, 256) ")
        assert line.count("op='matmul_reduce_scatter'") == line.count("schedule='decomposed'") == 1
        assert line.count("\n") == 1


def test_measured_table_and_picture_come_from_results(tmp_path: Path) -> None:
    assert (published.folder() / "sweep.png").read_bytes().startswith(b"\x89PNG")
    rows = store.read(published.rows(tmp_path))
    assert not any(row.failed for row in rows)
    assert generated.replaced(README, "measured", generated.measured_table(rows)) == README


def test_table_of_few_tokens_comes_from_results() -> None:
    (path,) = RESULTS.glob("*/decode.csv")
    frame = pd.read_csv(path)
    assert set(frame.gate) == {"passed"}
    assert {(ranks, tokens) for ranks, tokens in zip(frame.world_size, frame.M, strict=True)} == {
        (ranks, tokens) for ranks in SUITES["decode"].world_sizes for tokens, *_ in SUITES["decode"].sizes
    }
    assert generated.replaced(README, "decode", decode_table(frame)) == README
