"""The trainer of docs/examples: the same losses on every mesh, and after going on from a checkpoint on another one."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed import ProcessGroup

from fusedtp.bench.ranks import RankPool

from .command import module

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
TRAINER = str(EXAMPLES / "train.py")
# Small, for speed.
SIZES = (
    "--hidden", "32", "--layers", "1", "--batch", "4", "--length", "16", "--evaluate-every", "3", "--peak-tflops", "1",
)  # fmt: skip


def trains(group: ProcessGroup, *options: str) -> str:
    """Run the trainer in a rank's process, which is forked and need not import torch, and return what it prints."""
    sys.argv = [TRAINER, *options]
    sys.path.insert(0, str(EXAMPLES))
    with mock.patch.dict(os.environ, WORLD_SIZE=str(group.size())), contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(TRAINER, run_name="__main__")
    return said.getvalue()


def losses(num_ranks: int, *options: str) -> dict[str, float]:
    """Run the trainer, and return its losses by what it calls them."""
    with RankPool(num_ranks, timeout=100) as ranks:
        return read(ranks.run(trains, *SIZES, *options)[0])


def read(said: str) -> dict[str, float]:
    found = re.findall(r"^step +(\d+)  (loss|held out) ([\d.]+)", said, re.MULTILINE)
    assert len(re.findall(r" tokens/s  MFU [\d.]+%$", said, re.MULTILINE)) == sum(k == "loss" for _, k, _ in found)
    return {f"{what} {step}": float(value) for step, what, value in found}


@pytest.fixture(scope="module")
def of_one_process() -> dict[str, float]:
    """Run the trainer by its command line."""
    options = ("--standalone", TRAINER, *SIZES, "--steps", "6")
    code, said = module("torch.distributed.run", *options, folder=EXAMPLES, env={"OMP_NUM_THREADS": "1"})
    assert code == 0, said
    return read(said)


def test_one_process_learns(of_one_process: dict[str, float]) -> None:
    assert list(of_one_process) == [
        "loss 1", "loss 2", "loss 3", "held out 3", "loss 4", "loss 5", "loss 6", "held out 6"
    ]  # fmt: skip
    assert of_one_process["held out 6"] < of_one_process["held out 3"] < 5.6


def test_four_ranks_and_their_checkpoint_on_two_and_on_one(of_one_process: dict[str, float], tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    found = losses(4, "--dp", "2", "--tp", "2", "--steps", "3", "--out", out)
    assert found == pytest.approx({name: of_one_process[name] for name in found}, abs=5e-6)
    later = {name: value for name, value in of_one_process.items() if name not in found}
    two = losses(2, "--tp", "2", "--steps", "6", "--out", out, "--resume")
    assert two == pytest.approx(later, abs=5e-6)
    # The run on two ranks has saved step 6, from which one process goes on.
    assert list(losses(1, "--steps", "7", "--out", out, "--resume")) == ["loss 7", "held out 7"]


def test_in_bfloat16(of_one_process: dict[str, float]) -> None:
    found = losses(2, "--tp", "2", "--bf16", "--steps", "3")
    assert found == pytest.approx({name: of_one_process[name] for name in found}, abs=5e-3)
    assert found != {name: of_one_process[name] for name in found}, "the option has no effect"
