"""The compiled kernels on a CUDA device: every op and gradient against float64, several ranks sharing the GPU.

`nox -s gpu` runs these with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 and a gloo group; the ranks are time-sliced, so
nothing is timed.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fusedtp.bench.ranks import RankPool
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import reference, workspaces
from fusedtp.schedules import fused

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# M, N, K: one tile and less; tiles that do not divide; several waves of tiles.
SIZES = ((64, 48, 40), (300, 264, 200), (1024, 1536, 512))


@pytest.fixture(scope="module")
def gpu_pool() -> Any:
    with RankPool(4, env={"TRITON_INTERPRET": "0"}, timeout=300) as pool:
        yield pool


def _cut(length: int, world_size: int) -> tuple[int, ...]:
    # Uneven on purpose, rank 1 empty where there are more than two.
    sizes = [length // world_size] * world_size
    sizes[0] += length - sum(sizes)
    if world_size > 2:
        sizes[0] += sizes[1]
        sizes[1] = 0
    return tuple(sizes)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().cuda().requires_grad_()


def _layers(group: ProcessGroup, M: int, N: int, K: int, dtype: torch.dtype, schedule: str, seed: int) -> None:
    # Column- and row-parallel with split rows, forward and all gradients, twice in a row on one workspace.
    rank, world_size = group.rank(), group.size()
    random = torch.Generator().manual_seed(seed)
    rows, cols = _cut(M, world_size), _cut(K, world_size)
    x, up, down = (torch.randn(*shape, generator=random).to(dtype) for shape in ((M, K), (N, K), (K, N)))
    features = _cut(N, world_size)
    chunk = reference.chunk
    name = f"{schedule} {M}x{N}x{K} {dtype} rank {rank} of {world_size}"

    mine, weight = _leaf(chunk(x, 0, rank, rows)), _leaf(chunk(up, 0, rank, features))
    y = fusedtp.all_gather_linear(mine, weight, group=group, sizes=rows, schedule=schedule)
    w = chunk(up, 0, rank, features)
    reference.check(y.cpu(), reference.matmul(x, w.t()), reference.bound(x, w.t(), dtype), f"{name} gather: y")
    grad = torch.randn(M, N, generator=random).to(dtype)
    y.backward(chunk(grad, 1, rank, features).cuda())
    dx, allowed = reference.matmul(grad, up), reference.bound(grad, up, dtype, k_sizes=features)
    for got, ref, bound, what in (
        (mine.grad, chunk(dx, 0, rank, rows), chunk(allowed, 0, rank, rows), "dx"),
        (weight.grad, *_dw(chunk(grad, 1, rank, features), x, dtype), "dw"),
    ):
        assert got is not None
        reference.check(got.cpu(), ref, bound, f"{name} gather: {what}")

    part, weight = _leaf(chunk(x, 1, rank, cols)), _leaf(chunk(down.t(), 1, rank, cols))
    y = fusedtp.linear_reduce_scatter(part, weight, group=group, sizes=rows, schedule=schedule)
    ref, bound = reference.matmul(x, down), reference.bound(x, down, dtype, k_sizes=cols)
    reference.check(y.cpu(), chunk(ref, 0, rank, rows), chunk(bound, 0, rank, rows), f"{name} scatter: y")
    y.backward(chunk(grad, 0, rank, rows).cuda())
    own = chunk(down, 0, rank, cols)
    for got, want, what in (
        (part.grad, (reference.matmul(grad, own.t()), reference.bound(grad, own.t(), dtype)), "dx"),
        (weight.grad, _dw(grad, chunk(x, 1, rank, cols), dtype), "dw"),
    ):
        assert got is not None
        reference.check(got.cpu(), *want, f"{name} scatter: {what}")

    for algorithm in ("one_shot", "two_shot"):
        y = fusedtp.linear_all_reduce(
            part.detach(),
            weight.detach(),
            group=group,
            schedule=schedule,
            algorithm=algorithm if schedule != "unfused" else "auto",
        )
        reference.check(y.cpu(), ref, bound, f"{name} {algorithm}: y")


def _dw(dy: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return reference.matmul(dy.t(), x), reference.bound(dy.t(), x, dtype)


def layers(group: ProcessGroup, schedule: str) -> int:
    workspaces.set_timeout(120)
    count = 0
    for (M, N, K), dtype, again in itertools.product(SIZES, DTYPES, range(2)):
        _layers(group, M, N, K, dtype, schedule, seed=count + again)
        count += 1
    workspaces.get(group, torch.device("cuda", torch.cuda.current_device())).check()
    fusedtp.destroy()
    return count


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("schedule", ["fused", "decomposed"])
def test_layers(gpu_pool: RankPool, schedule: str, world_size: int) -> None:
    # Most of it is compiling: a hundred variants of the kernels on each rank.
    counts = gpu_pool.run(layers, schedule, world_size=world_size, timeout=900)
    assert counts == [len(SIZES) * len(DTYPES) * 2] * world_size


def collectives(group: ProcessGroup) -> None:
    workspaces.set_timeout(120)
    rank, world_size = group.rank(), group.size()
    for dtype, (R, C) in itertools.product(DTYPES, ((7, 5), (260, 300))):
        random = torch.Generator().manual_seed(R)
        parts = [torch.randn(R, C, generator=random).to(dtype) for _ in range(world_size)]
        sizes = _cut(R, world_size)
        x = parts[rank].cuda()
        for algorithm in ("direct", "ring"):
            out = fused.all_gather(
                reference.chunk(parts[0], 0, rank, sizes).cuda(), sizes=sizes, group=group, algorithm=algorithm
            )
            assert torch.equal(out.cpu(), parts[0]), f"all_gather {algorithm}"
        for algorithm in ("one_shot", "two_shot", "ring"):
            first, again = (fused.all_reduce(x, group=group, algorithm=algorithm).cpu() for _ in range(2))
            assert torch.equal(first, again), f"all_reduce {algorithm}: other bits in a second run"
            bound = reference.total_bound(parts, dtype, sum_dtype=dtype)
            reference.check(first, reference.total(parts), bound, f"all_reduce {algorithm}")
    fusedtp.destroy()


@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives(gpu_pool: RankPool, world_size: int) -> None:
    gpu_pool.run(collectives, world_size=world_size, timeout=900)


def replay(group: ProcessGroup, times: int) -> None:
    # One captured op advances the device's epoch at every replay, so the halves alternate though the addresses do not.
    workspaces.set_timeout(120)
    x, weight = torch.randn(96, 64, device="cuda").bfloat16(), torch.randn(80, 64, device="cuda").bfloat16()
    with torch.no_grad():
        fusedtp.linear_all_reduce(x, weight, group=group, schedule="fused")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fusedtp.linear_all_reduce(x, weight, group=group, schedule="fused")
        for i in range(times):
            x.copy_(torch.randn(96, 64, generator=torch.Generator().manual_seed(i * 100 + group.rank())))
            graph.replay()
            expected = fusedtp.linear_all_reduce(x, weight, group=group, schedule="unfused")
            torch.cuda.synchronize()
            torch.testing.assert_close(y, expected, rtol=0.05, atol=0.5)
            # An op that the host drives must know how far the replays have come.
            driven = fusedtp.linear_all_reduce(x, weight, group=group, schedule="decomposed")
            torch.testing.assert_close(driven, expected, rtol=0.05, atol=0.5)
    fusedtp.destroy()


def test_graph_replays_with_changing_inputs(gpu_pool: RankPool) -> None:
    gpu_pool.run(replay, 50, world_size=2, timeout=900)


def replay_a_layer(group: ProcessGroup, times: int) -> None:
    # An MLP's forward and backward in one graph: both gathers and both scatters, with new inputs at every replay.
    workspaces.set_timeout(120)
    rank, world_size = group.rank(), group.size()
    random = torch.Generator().manual_seed(rank)
    rows, features, hidden = 64, 48, 40
    up, down = (
        _leaf(torch.randn(shape, generator=random).bfloat16()) for shape in ((hidden, features), (features, hidden))
    )
    x = _leaf(torch.randn(rows, features, generator=random).bfloat16())
    dy = torch.empty(rows, features, dtype=torch.bfloat16, device="cuda")

    def step(schedule: str) -> list[Tensor]:
        h = fusedtp.all_gather_linear(x, up, group=group, schedule=schedule)
        y = fusedtp.linear_reduce_scatter(torch.relu(h), down, group=group, schedule=schedule)
        return [y, *torch.autograd.grad(y, (x, up, down), dy)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step("fused")
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    # Twice, on one stream: the second begins with an op that leaves alone the side stream that the first has used.
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step("fused")
    for i in range(times):
        random.manual_seed(i * world_size + rank)
        with torch.no_grad():
            x.copy_(torch.randn(rows, features, generator=random))
            dy.copy_(torch.randn(rows, features, generator=random))
        graph.replay()
        for got, want, what in zip(found, step("unfused"), ("y", "dx", "dup", "ddown"), strict=True):
            torch.testing.assert_close(got, want, rtol=0.05, atol=1.0, msg=lambda text, what=what: f"{what}: {text}")
    fusedtp.destroy()


def test_a_graph_of_forward_and_backward_replays(gpu_pool: RankPool) -> None:
    gpu_pool.run(replay_a_layer, 20, world_size=2, timeout=900)


def copied(group: ProcessGroup) -> list[str]:
    """Layers whose gathers are copied, on rank 0 only and on all; in a graph copies are refused."""
    seen = []
    workspaces.set_timeout(120)
    ws = workspaces.get(group, torch.device("cuda", torch.cuda.current_device()))
    for everybody in (False, True):
        ws.producer = "copy" if everybody or group.rank() == 0 else "push"
        for seed, (M, N, K) in enumerate(SIZES):
            _layers(group, M, N, K, torch.bfloat16, "fused", seed)
        fusedtp.all_gather(torch.ones(4, 8, device="cuda"), group=group, schedule="fused")
        path = fusedtp.last_path()
        assert path is not None
        seen.append(path.producer)
    ws.check()
    fusedtp.destroy()
    return seen


# Several ranks share one GPU here: its copy engines and stream writes are real, its links are not.
def test_layers_whose_gathers_are_copied(gpu_pool: RankPool) -> None:
    assert gpu_pool.run(copied, world_size=2, timeout=900) == [["copy", "copy"], ["push", "copy"]]


@pytest.mark.parametrize("world_size", [2, 4])
def test_virtual_ranks_at_once(world_size: int) -> None:
    """One GPU with 8 SMs a rank or more, one process: consumers wait for copies behind an emulated link, which is so
    slow that issuing the work is not what is timed.
    """
    from fusedtp.bench import virtual
    from fusedtp.bench.cases import Case
    from fusedtp.bench.machine import describe

    if torch.cuda.get_device_properties(0).multi_processor_count < 8 * world_size:
        pytest.skip("needs 8 SMs a virtual rank")
    M, N, K, gbps = 4096, 1024, 2048, 2
    rows = virtual.measure(Case("all_gather_matmul", M, N, K, "bfloat16", world_size), [gbps], 3, describe())
    assert all(row.passed and virtual.LABEL in row.links for row in rows)
    times = {row.variant: row.median_ms for row in rows}
    # All of x but the own shard, 2 bytes an element.
    assert times["comm"] > (world_size - 1) / world_size * M * K * 2 / (gbps * 1e6)
    assert times["concurrent"] < 1.2 * times["phased"]
