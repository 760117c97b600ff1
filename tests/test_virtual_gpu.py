"""torch's own CUDA code and the fused ops on a virtual GPU: two processes over torch's symmetric memory and NCCL's API.

`nox -s virtual_gpu` runs these with CUDA builds of torch, on a machine without a GPU (docs/virtual-gpu.md). Kernels are
executed from the PTX and the parameters that Triton's launcher gives to the driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch

if "GPU_STUB_DEVICES" not in os.environ:
    pytest.skip("runs over the stub of a GPU: nox -s virtual_gpu", allow_module_level=True)

from fusedtp.bench import gpu_ranks
from fusedtp.bench.ranks import RankPool
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.workspaces import registry

pytestmark = pytest.mark.virtual_gpu

RANKS = 2
ENV = {"TRITON_INTERPRET": "0", "FUSEDTP_TUNING": "off"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(RANKS, env=ENV, timeout=500) as pool:
        yield pool


def where(group: ProcessGroup) -> tuple[str, str, bool]:
    """What torch says of a tensor's device and of the group, and whether fresh memory is NaN."""
    device = gpu_ranks.prepare()
    backend = torch.distributed.get_backend_config(group)
    return device.type, str(backend), gpu_ranks.poisoned(group)


def test_ranks_have_a_gpu_each(ranks: RankPool) -> None:
    assert ranks.run(where) == [("cuda", "cpu:gloo,cuda:nccl", True)] * RANKS


@pytest.mark.parametrize("dtype", gpu_ranks.DTYPES)
@pytest.mark.parametrize("schedule", ["fused", "decomposed"])
def test_layers(ranks: RankPool, schedule: str, dtype: str) -> None:
    """The three ops, forward and every gradient, against float64."""
    assert ranks.run(gpu_ranks.layers, schedule, dtype, True) == [2] * RANKS


@pytest.mark.parametrize("dtype", gpu_ranks.DTYPES[:1])
def test_collectives_and_trees(ranks: RankPool, dtype: str) -> None:
    ranks.run(gpu_ranks.collectives, dtype, True)
    assert min(ranks.run(gpu_ranks.trees, dtype, True)) > 0


def test_gathers_that_are_copied(ranks: RankPool) -> None:
    """Copies and stream writes of torch's own."""
    assert ranks.run(gpu_ranks.copies, True) == [["copy", "copy"], ["push", "copy"]]


def test_captured_graphs_replay(ranks: RankPool) -> None:
    """torch.cuda.CUDAGraph with new inputs at every replay: one op, and a layer's forward and backward."""
    ranks.run(gpu_ranks.replays, 3, True)
    ranks.run(gpu_ranks.replays_of_a_layer, 3, True)


def grown(group: ProcessGroup) -> tuple[bool, bool]:
    """Whether an arena grew, and whether an op is right in it, and after `destroy` in a new one."""
    device = gpu_ranks.prepare()
    ws = registry.get(group, device)
    before = ws.half_bytes
    ws.require(2 * before, 300)
    larger, right = ws.half_bytes >= 2 * before, []
    for _ in range(2):
        x = torch.full((8, 16), group.rank() + 1.0, device=device)
        whole = fusedtp.all_gather(x, group=group, schedule="fused")
        right.append(whole.sum(0).unique().tolist() == [8.0 * sum(range(1, group.size() + 1))])
        fusedtp.destroy()
    return larger, all(right)


def test_an_arena_grows_and_is_made_again(ranks: RankPool) -> None:
    assert ranks.run(grown) == [(True, True)] * RANKS


def alone(group: ProcessGroup) -> int | None:
    """The peer that a rank names which waits for one that never comes."""
    device = gpu_ranks.prepare()
    x = torch.ones(4, 16, device=device)
    fusedtp.all_gather(x, group=group, schedule="fused")
    fusedtp.set_timeout(1)
    named = None
    if group.rank() == 0:
        try:
            fusedtp.all_gather(x, group=group, schedule="fused")
            registry.get(group, device).check()
        except fusedtp.PeerTimeout as error:
            named = error.peer
    else:
        time.sleep(5)
    fusedtp.destroy()
    return named


def test_a_timeout_names_the_peer(ranks: RankPool) -> None:
    assert ranks.run(alone) == [1, None]


def test_the_sweep_takes_its_cuda_path(tmp_path: Path) -> None:
    """Events, the flush, the gate and NCCL's baselines: a row for each variant behind a passed check."""
    options = ("--shape", "64,96,80", "--world-size", str(RANKS), "--dtype", "bfloat16", "--rounds", "2")
    command = [sys.executable, "-P", "-m", "fusedtp.bench.cli", "sweep", *options, "--baseline", "none", "--out"]
    done = subprocess.run(
        [*command, str(tmp_path)], env={**os.environ, **ENV}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = pd.concat(map(pd.read_csv, tmp_path.glob("*/sweep.csv")))
    assert set(rows.gate) == {"passed"}
    assert {"unfused", "decomposed", "fused"} <= set(rows.variant)
    assert rows.op.nunique() == 3
