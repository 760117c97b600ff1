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

from fusedtp import cost
from fusedtp.bench import store, tables, timeline
from fusedtp.bench.cases import OWN, SEQUENTIAL
from fusedtp.bench.frames import frame_of
from fusedtp.bench.jobs import Request, plan
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.store import origin
from fusedtp.bench.suites import SUITES
from fusedtp.choose.tuning import MODEL_ERROR
from fusedtp.cost.model import verdict
from fusedtp.machine import describe

from . import generated, published
from .published import README

RESULTS = Path(__file__).parent.parent / "results"


def run_block(group: ProcessGroup, block: str, port: int) -> str:
    """Run a block as if torchrun had started this process, with its agent's store at `port`, and return the output."""
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
    # `test_under_torchrun` tests torchrun itself.
    with RankPool(3, timeout=100) as ranks:
        said = ranks.run(run_block, block, agent.port)
    for rank, line in enumerate(said):
        assert line.startswith(f"{rank} (170, 256) ")
        assert line.count("op='matmul_reduce_scatter'") == line.count("schedule='decomposed'") == 1
        assert line.count("\n") == 1


def as_written(document: str, name: str, content: str) -> None:
    generated.as_written(published.ROOT / document, name, content, "FUSEDTP_README")


def test_measured_table_and_picture_come_from_results(tmp_path: Path) -> None:
    assert (published.folder() / "sweep.png").read_bytes().startswith(b"\x89PNG")
    rows = store.read(published.rows(tmp_path))
    assert not any(row.failed for row in rows)
    as_written("README.md", "summary", generated.measured_line(rows))
    as_written("docs/measured.md", "measured", generated.measured_table(rows))
    of_models = [row for row in rows if row.model]
    assert f'"{tables.verdict(frame_of(of_models))[0].partition(", no difference")[0]}"' in README
    # The command beside the line gives these rows.
    said = re.search(r"`fusedtp sweep --model (\S+) --tokens (\S+) --world-size (\d+) --direction (\w+)`", README)
    assert said is not None
    tokens = tuple(map(int, said[2].split(",")))
    request = Request(world_sizes=(int(said[3]),), models=(said[1],), tokens=tokens, directions=(said[4],))
    jobs = plan(request, 0)
    assert {(row.model, row.tokens, row.layer, row.world_size, row.direction) for row in of_models} == {
        (job.case.model, job.case.tokens, job.case.layer, job.case.world_size, direction)
        for job in jobs for direction in job.directions
    }  # fmt: skip


def test_the_first_picture_shows_sequential_between_the_two() -> None:
    found = timeline.read((published.ROOT / "docs" / "pictures" / "timeline.png").resolve().with_suffix(".json"))
    assert sorted(found.schedules, key=OWN.index) == ["unfused", SEQUENTIAL, "decomposed"]


def test_the_prediction_is_what_the_command_says() -> None:
    said = re.search(r"8 H100s gains ([\d.]+)x at 512\s+tokens, ([\d.]+)x at 2048 and ([\d.]+)x at 8192", README)
    assert said is not None
    for tokens, expected in zip((512, 2048, 8192), said.groups(), strict=True):
        found = cost.predict("all_gather_matmul", M=tokens, N=57344, K=8192, world_size=8)
        assert f"{found.speedup:.2f}" == expected
    sizes = [(tokens, 57344, 8192) for tokens in (512, 1024, 2048, 4096, 8192)]
    ranges = [cost.predict("all_gather_matmul", M=M, N=N, K=K, world_size=8) for M, N, K in sizes]
    assert f'"{verdict(ranges, sizes, MODEL_ERROR).partition(" (")[0]}"' in README


def test_the_losses_are_those_of_one_process() -> None:
    (path,) = RESULTS.glob("*/train.csv")
    losses = pd.read_csv(path).pivot(index="step", columns="run", values="loss")
    assert len(losses.columns) == 4
    assert losses.sub(losses["one process"], axis=0).abs().max().max() < 5e-7


def test_table_of_few_tokens_comes_from_results() -> None:
    (path,) = RESULTS.glob("*/decode.csv")
    frame = pd.read_csv(path)
    # On one rank nothing is sent, so what sends is not run.
    alone = set(frame.gate[frame.world_size == 1])
    assert alone <= {"passed", "not run: one rank has nothing to send"}
    frame = frame[frame.world_size > 1]
    assert set(frame.gate) == {"passed"}
    assert {(ranks, tokens) for ranks, tokens in zip(frame.world_size, frame.M, strict=True)} == {
        (ranks, tokens) for ranks in (2, 4) for tokens, *_ in SUITES["decode"].on_cpu
    }
    as_written("docs/measured.md", "decode", generated.decode_table(frame))


def test_every_column_of_results_is_explained() -> None:
    said = (RESULTS / "README.md").read_text()
    explained, about = set(re.findall(r"`(\w+)`", said)), set(origin(describe()))
    assert set(store.COLUMNS) - explained == set()
    files = [path for path in RESULTS.glob("*/*.csv") if path.parent.name not in ("kernels", "published")]
    for path in files:
        assert f"`{path.name}`" in said
        columns = set(pd.read_csv(path, nrows=1).columns)
        # Files from before there was a digest have columns of their own.
        if "digest" in columns:
            assert columns <= explained, path
            assert about <= columns, (path, about - columns)
