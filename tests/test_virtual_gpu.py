"""torch's own CUDA code and the fused ops on a virtual GPU: two processes over torch's symmetric memory and NCCL's API.

`nox -s virtual_gpu` runs these with CUDA builds of torch, on a machine without a GPU (docs/virtual-gpu.md). Kernels are
executed from the PTX and the parameters that Triton's launcher passes to the driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch

if "GPU_STUB_DEVICES" not in os.environ:
    pytest.skip("runs over the stub of a GPU: nox -s virtual_gpu", allow_module_level=True)

from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import fsdp, reference, torch_private
from fusedtp.bench import checks, gpu, store
from fusedtp.bench.intervals import Timing
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.timing import measure
from fusedtp.workspaces import registry

pytestmark = pytest.mark.virtual_gpu

RANKS = 2
ENV = {"TRITON_INTERPRET": "0", "FUSEDTP_TUNING": "off"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(RANKS, env=ENV, timeout=500) as pool:
        yield pool


def where(group: ProcessGroup) -> tuple[str, str, bool]:
    """Return torch's device type and backend of the group, and whether fresh memory is NaN."""
    device = checks.prepare()
    fresh = torch.empty(1 << 12, device=device)
    return device.type, str(torch.distributed.get_backend_config(group)), bool(fresh.isnan().all())


def test_ranks_have_a_gpu_each(ranks: RankPool) -> None:
    assert ranks.run(where) == [("cuda", "cpu:gloo,cuda:nccl", True)] * RANKS


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("schedule", ["fused", "decomposed"])
@pytest.mark.parametrize("op", checks.LAYERS)
def test_layers(ranks: RankPool, op: str, schedule: str, dtype: str) -> None:
    """Forward and every gradient by every algorithm, with uneven shards, against float64."""
    ranks.run(checks.layer, op, schedule, dtype, checks.TINY)


def nothing_on_rank_1(group: ProcessGroup, dtype: str) -> None:
    """Check a gather of rows, forward and backward, in which rank 1 has none."""
    device, dtype = checks.prepare(), getattr(torch, dtype)
    x, w = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype) for shape in ((40, 48), (64, 48)))
    mine = x.split((40, 0))[group.rank()].to(device).requires_grad_()
    weight = w.chunk(2)[group.rank()].to(device).requires_grad_()
    y = fusedtp.all_gather_linear(mine, weight, group=group, sizes=(40, 0), schedule="fused")
    half = w.chunk(2)[group.rank()]
    y.backward(torch.ones_like(y))
    ones = torch.ones(40, 64, dtype=dtype)
    for found, a, b in ((y, x, half.t()), (mine.grad, ones, w), (weight.grad, ones[:, :32].t(), x)):
        exact, allowed = reference.matmul(a, b), reference.bound(a, b, dtype, k_sizes=(32, 32) if b is w else None)
        rows = slice(0, found.shape[0]) if b is w else slice(None)
        reference.check(found.detach().cpu(), exact[rows], allowed[rows], f"{tuple(found.shape)}")
    fusedtp.destroy()


def test_a_rank_without_rows(ranks: RankPool) -> None:
    ranks.run(nothing_on_rank_1, "bfloat16")


def test_collectives_and_trees(ranks: RankPool) -> None:
    ranks.run(checks.collectives, "bfloat16", (7, 5))
    ranks.run(checks.trees, "bfloat16", (19, 24, 40))


def test_gathers_that_are_copied(ranks: RankPool) -> None:
    """The copies and stream writes are torch's own."""
    ranks.run(checks.copies, checks.TINY)


def in_lanes(group: ProcessGroup) -> tuple[bool, str]:
    """Gather and reduce as FSDP2 does, in flight and in turn, beside a fused op; then let rank 1 miss a gather."""
    device, n, rank = checks.prepare(), group.size(), group.rank()
    # `auto` may take NCCL at this size.
    gather, reduce = fsdp._AllGather("decomposed"), fsdp._ReduceScatter("decomposed")
    terms, right = torch.arange(64.0 * n, device=device) * (1 + rank), []
    for async_op in (False, True, True, True):
        whole, part = torch.empty(96 * n, device=device), torch.empty(64, device=device)
        works = [
            gather(whole, torch.full((96,), 1.0 + rank, device=device), group, async_op=async_op),
            reduce(part, terms, group, torch.distributed.ReduceOp.SUM, async_op=async_op),
        ]
        fusedtp.all_gather(torch.ones(8, 16, device=device), group=group, schedule="fused")
        for work in works:
            if work is not None:
                work.wait()
        right.append(whole.view(n, -1).mean(1).tolist() == [1.0 + each for each in range(n)])
        sums = torch.arange(64.0 * n) * sum(range(1, n + 1))
        right.append(torch.equal(part.cpu(), sums.chunk(n)[rank]))
    path, said = fusedtp.last_path(), ""
    assert path is not None
    fusedtp.set_timeout(1.0)
    if rank == 0:
        try:
            # Here a stream's wait holds the host, so the call itself may raise.
            gather(torch.empty(96 * n, device=device), torch.ones(96, device=device), group, async_op=True)
            fusedtp.check(group)
        except fusedtp.PeerTimeout as error:
            said = str(error)
    torch.distributed.barrier(group)
    fusedtp.set_timeout(110.0)
    fusedtp.destroy()
    return all(right), said


def test_fsdp_gathers_and_reduces_in_lanes(ranks: RankPool) -> None:
    (right, said), (also, _) = ranks.run(in_lanes)
    assert right
    assert also
    assert "for rank 1" in said
    assert "in lane 1, FSDP2's gathers" in said


def by_torchs_ops(group: ProcessGroup) -> list[str]:
    """Call torch's fused ops on CUDA under `drop_in`, and return the schedules that ran."""
    device, rank, name = checks.prepare(), group.rank(), group.group_name
    random = torch.Generator().manual_seed(1)
    x, w = (torch.randn(shape, generator=random).bfloat16() for shape in ((64, 48), (48, 64)))
    ops, ran = torch.ops.symm_mem, []
    with fusedtp.drop_in("fused"), warnings.catch_warnings():
        # That torch's own code is replaced.
        warnings.simplefilter("ignore")
        mine = x.chunk(RANKS)[rank].to(device), w.chunk(RANKS, 1)[rank].contiguous().to(device)
        whole, (y,) = ops.fused_all_gather_matmul(mine[0], [mine[1]], 0, name)
        ran.append(fusedtp.last_path().schedule)  # type: ignore[union-attr]
        terms = x.chunk(RANKS, 1)[rank].contiguous().to(device), w.chunk(RANKS)[rank].to(device)
        z = ops.fused_matmul_reduce_scatter(*terms, "sum", 0, name)
        ran.append(fusedtp.last_path().schedule)  # type: ignore[union-attr]
    assert torch.equal(whole.cpu(), x)
    exact, allowed = reference.matmul(x, w), reference.bound(x, w, torch.bfloat16, k_sizes=(24, 24))
    for found, part in ((y, lambda each: each.chunk(RANKS, 1)[rank]), (z, lambda each: each.chunk(RANKS)[rank])):
        reference.check(found.cpu(), part(exact), part(allowed), f"{tuple(found.shape)}")
    assert torch_private.has_kernel("symm_mem::fused_all_gather_matmul", "CUDA")
    fusedtp.destroy()
    return ran


def test_torchs_own_ops_run_by_fusedtp(ranks: RankPool) -> None:
    """torch has CUDA code of its own for these, which `drop_in` replaces, and gives back."""
    assert ranks.run(by_torchs_ops) == [["fused", "fused"]] * RANKS


def test_captured_graphs_replay(ranks: RankPool) -> None:
    """torch.cuda.CUDAGraph with new inputs at every replay: one op, and a layer's forward and backward."""
    ranks.run(checks.replays, 3)
    ranks.run(checks.replays_of_a_layer, 3)


def replayed_without_a_table(group: ProcessGroup) -> None:
    """Capture an op whose table of rows the workspace has dropped meanwhile, for those of other ops."""
    device, sizes = checks.prepare(), (40, 56)
    x, weight = (torch.randn(shape, device=device).bfloat16() for shape in ((sizes[group.rank()], 64), (80, 64)))

    def once(schedule: str = "fused") -> torch.Tensor:
        return fusedtp.all_gather_linear(x, weight, group=group, sizes=sizes, schedule=schedule)

    with torch.no_grad():
        once()
        torch.cuda.synchronize()
        tables = registry.get(group, device)._tables
        assert sizes in tables
        tables.clear()
        replay, (y,) = checks.captured(lambda: [once()], device)
        # It has its numbers in replays only.
        assert not tables
        for op in (replay, once, replay):
            op()
        torch.testing.assert_close(y, once("unfused"), rtol=0.05, atol=0.5)
    fusedtp.destroy()


def test_a_graph_makes_its_tables(ranks: RankPool) -> None:
    ranks.run(replayed_without_a_table)


def test_graphs_replay_on_several_streams(ranks: RankPool) -> None:
    """Replays are late, and take their nodes in any order that the graph allows (stub/graph.h)."""
    ranks.run(checks.replays_on_streams, 5)


def test_a_timeout_names_the_peer(ranks: RankPool) -> None:
    first, second = ranks.run(checks.missing)
    assert "rank 1" in first
    assert not second


def grown(group: ProcessGroup) -> tuple[bool, bool]:
    """Return whether an arena grew, and whether ops are right in it and, after `destroy`, in a new one."""
    device = checks.prepare()
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


def test_the_sweep_takes_its_cuda_path(tmp_path: Path) -> None:
    """Events, the flush, the gate and NCCL's baselines: each variant has a row with a passed check."""
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


def hosts(group: ProcessGroup) -> dict[str, Timing]:
    """Time one addition, issued at once, by a host that sleeps, by one that is late after the first round."""
    device = checks.prepare()
    x, calls = torch.zeros(64, device=device), Counter[str]()

    def issued(name: str, first: float, later: float) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            calls[name] += 1
            time.sleep(first if calls[name] == 1 else later)
            return x + 1

        return run

    runners = {"at once": issued("at once", 0, 0), "sleeps": issued("sleeps", 0.02, 0.02)}
    runners |= {"late": issued("late", 0, 0.05)}
    return measure(runners, group, device, rounds=7)


def test_a_call_whose_host_sleeps_is_not_timed_longer(ranks: RankPool) -> None:
    """The spin ahead of a call is as long as its host needs; rounds in which it was too short are counted."""
    found = ranks.run(hosts)
    assert found[0] == found[1]
    at_once, sleeps, late = (found[0][name] for name in ("at once", "sleeps", "late"))
    assert sleeps.median_ms < at_once.median_ms + 5, found
    assert (sleeps.host_us or 0) > 20_000
    assert sleeps.late_rounds <= 2
    assert late.median_ms > 30
    assert late.late_rounds == 7


def test_layers_a_block_and_decoding_are_swept(tmp_path: Path) -> None:
    """From start to page, on two devices, and as graphs."""
    options = ("--suite", "block,decode", "--model", "small", "--tokens", "16", "--world-size", "2", "--rounds", "2")
    for more in ((), ("--graph",)):
        command = [sys.executable, "-P", "-m", "fusedtp.bench.cli", "sweep", *options, *more, "--out", str(tmp_path)]
        done = subprocess.run(command, env={**os.environ, **ENV}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = tmp_path.glob("*/sweep.csv")
    rows = store.read(path)
    assert {row.op for row in rows} == {"block", "decode"}
    timed = [row for row in rows if row.median_ms]
    assert {row.graph for row in timed} == {False, True}
    assert all(row.host_us and row.peak_bytes is not None and row.nccl for row in timed)
    ours = [row for row in timed if row.graph and row.variant in ("local", "fused", "auto")]
    assert all(row.path.endswith("captured") and "not captured" not in row.path for row in ours)
    assert {row.op for row in ours} == {"block", "decode"}
    # The stub of NCCL refuses, and copies of `decomposed` go to addresses that the host chooses.
    assert all("not captured: " in row.path for row in timed if row.graph and row not in ours)
    command = [sys.executable, "-P", "-m", "fusedtp.bench.cli", "report", str(path)]
    subprocess.run(command, env={**os.environ, **ENV}, check=True, capture_output=True)
    assert "tokens/s" in path.with_suffix(".html").read_text()


def test_the_gpu_command_ends_in_time_with_a_row_an_item(tmp_path: Path) -> None:
    """A dry run of every item, with two ranks on one GPU: all checks pass."""
    command = [sys.executable, "-P", "-m", "fusedtp.bench.gpu", "--dry-run", "--seconds", "540", "--out", str(tmp_path)]
    env = {**os.environ, **ENV, "GPU_STUB_DEVICES": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    begin = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert time.monotonic() - begin < 560, done.stdout[-2000:]
    rows = pd.concat(map(pd.read_csv, tmp_path.glob("gpu-*.csv")))
    assert {path.stem for path in tmp_path.glob("gpu-*.csv")} == {f"gpu-{name}" for name in gpu.plan()}
    failed = rows[(rows.gate != "passed") & ~rows.gate.str.startswith("not run: ")]
    assert failed.empty, failed[["layer", "variant", "gate"]].to_string()
    assert (rows.gate == "passed").sum() > 90
