"""The compiled kernels on a CUDA device: every op and gradient against float64, several ranks sharing the GPU.

`nox -s gpu -- --tests` runs these with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 and a gloo group; the ranks are
time-sliced, so nothing is timed. What the ranks run is `fusedtp.bench.gpu_ranks`, which tests/test_bench_gpu.py runs
without a GPU. Two ranks and four have no process in common, and nothing is waited for longer than LIMIT seconds: then
the pool shows where each rank is.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fusedtp.bench import gpu_links, gpu_ranks, virtual
from fusedtp.bench.cases import Case
from fusedtp.bench.machine import describe
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.store import Row
from torch.distributed import ProcessGroup

pytestmark = pytest.mark.gpu

LIMIT = 380.0
REPLAYS = 50


def pool_of(world_size: int) -> RankPool:
    """Ranks that compile their kernels and share the GPU."""
    return RankPool(world_size, env={"TRITON_INTERPRET": "0", "FUSEDTP_TUNING": "off"}, timeout=LIMIT)


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with pool_of(request.param) as pool:
        assert pool.run(gpu_ranks.poisoned) == [True] * request.param
        yield pool


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    with pool_of(2) as pool:
        yield pool


@pytest.mark.parametrize("dtype", gpu_ranks.DTYPES)
@pytest.mark.parametrize("schedule", ["fused", "decomposed"])
def test_layers(ranks: RankPool, schedule: str, dtype: str) -> None:
    # Most of it is compiling: dozens of variants of the kernels on each rank.
    counts = ranks.run(gpu_ranks.layers, schedule, dtype)
    assert counts == [2 * len(gpu_ranks.SIZES)] * ranks.world_size


@pytest.mark.parametrize("dtype", gpu_ranks.DTYPES)
def test_collectives(ranks: RankPool, dtype: str) -> None:
    ranks.run(gpu_ranks.collectives, dtype)


@pytest.mark.parametrize("dtype", gpu_ranks.DTYPES)
def test_sums_in_the_order_of_a_tree(ranks: RankPool, dtype: str) -> None:
    assert ranks.run(gpu_ranks.trees, dtype) == [48] * ranks.world_size


@pytest.mark.parametrize("dtype", gpu_ranks.DTYPES)
def test_sums_in_any_order(ranks: RankPool, dtype: str) -> None:
    # Of one GPU no memory has an address of all ranks.
    (said,) = set(ranks.run(gpu_ranks.switch, dtype))
    assert said


def test_graph_replays_with_changing_inputs(two_ranks: RankPool) -> None:
    two_ranks.run(gpu_ranks.replays, REPLAYS)


def test_a_graph_of_forward_and_backward_replays(two_ranks: RankPool) -> None:
    two_ranks.run(gpu_ranks.replays_of_a_layer, REPLAYS)


# Several ranks share one GPU here: its copy engines and stream writes are real, its links are not.
def test_layers_whose_gathers_are_copied(two_ranks: RankPool) -> None:
    assert two_ranks.run(gpu_ranks.copies) == [["copy", "copy"], ["push", "copy"]]


def emulated(group: ProcessGroup, case: Case, gbps: int) -> list[Row]:
    """In a process of its own, which can be shown and ended where it hangs."""
    return virtual.measure(case, [gbps], 5, describe())


@pytest.mark.parametrize("world_size", [2, 4])
def test_virtual_ranks_at_once(world_size: int) -> None:
    """One GPU with 8 SMs a rank or more, one process: consumers wait for copies behind an emulated link, which is so
    slow that issuing the work is not what is timed.
    """
    if torch.cuda.get_device_properties(0).multi_processor_count < 8 * world_size:
        pytest.skip("needs 8 SMs a virtual rank")
    case, gbps = Case("all_gather_matmul", 4096, 1024, 2048, "bfloat16", world_size), 2
    with pool_of(1) as pool:
        (rows,) = pool.run(emulated, case, gbps)
    assert all(row.passed and virtual.LABEL in row.links for row in rows)
    gpu_links.check({row.variant: row.median_ms or 0.0 for row in rows}, case, gbps)
