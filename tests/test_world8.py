"""Eight ranks on however few cores there are: every fused op ends and is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fusedtp.bench.ranks import RankPool
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import reference
from fusedtp.shards import even_sizes

WORLD_SIZE = 8


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    with RankPool(WORLD_SIZE, timeout=120.0) as ranks:
        yield ranks


def every_fused_op(group: ProcessGroup, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """One after another, `sizes` rows a rank, nothing longer than a tile, in fresh memory that is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    rank, rows = group.rank(), sum(sizes)
    random = torch.Generator().manual_seed(2)
    x, weight, bias = (torch.randn(shape, generator=random).to(dtype) for shape in ((rows, 21), (10, 21), (10,)))
    parts = [torch.randn(rows, 5, generator=random).to(dtype) for _ in range(WORLD_SIZE)]
    k_sizes = even_sizes(21, WORLD_SIZE)
    x_shard_m, x_shard_k = reference.chunk(x, 0, rank, sizes), reference.chunk(x, 1, rank, k_sizes)
    weight_shard_k = reference.chunk(weight, 1, rank, k_sizes)
    y = reference.matmul(x, weight.t(), bias)
    uncut = reference.bound(x, weight.t(), dtype, bias=bias)
    cut = reference.bound(x, weight.t(), dtype, k_sizes=k_sizes, bias=bias)
    total = reference.total(parts)
    # Of the two, a ring needs the wider one: it rounds its running sum at every hop.
    total_allowed = reference.total_bound(parts, dtype, sum_dtype=dtype)
    options = {"group": group, "schedule": "fused"}

    def check(out: torch.Tensor, ref: torch.Tensor, allowed: torch.Tensor, name: str) -> None:
        reference.check(out, ref, allowed, f"{name}, rank {rank}")

    out = fusedtp.all_gather_linear(x_shard_m, weight, bias, sizes=sizes, **options)
    check(out, y, uncut, "all_gather_linear, rows")
    out = fusedtp.all_gather_linear(x_shard_k, weight, bias, gather_dim=1, sizes=k_sizes, **options)
    check(out, y, uncut, "all_gather_linear, features")
    for dim, of_dim in ((0, sizes), (1, even_sizes(10, WORLD_SIZE))):
        out = fusedtp.linear_reduce_scatter(x_shard_k, weight_shard_k, bias, scatter_dim=dim, sizes=of_dim, **options)
        want, allowed = (reference.chunk(each, dim, rank, of_dim) for each in (y, cut))
        check(out, want, allowed, f"linear_reduce_scatter, dim {dim}")
    for algorithm in ("one_shot", "two_shot"):
        out = fusedtp.linear_all_reduce(x_shard_k, weight_shard_k, bias, algorithm=algorithm, **options)
        check(out, y, cut, f"linear_all_reduce, {algorithm}")
    for algorithm in ("direct", "ring"):
        out = fusedtp.all_gather(x_shard_m, sizes=sizes, algorithm=algorithm, **options)
        check(out, x.double(), torch.zeros(x.shape), f"all_gather, {algorithm}")
        out = fusedtp.reduce_scatter(parts[rank], sizes=sizes, algorithm=algorithm, **options)
        want, allowed = (reference.chunk(each, 0, rank, sizes) for each in (total, total_allowed))
        check(out, want, allowed, f"reduce_scatter, {algorithm}")
    for algorithm in ("one_shot", "two_shot", "ring"):
        out = fusedtp.all_reduce(parts[rank], algorithm=algorithm, **options)
        check(out, total, total_allowed, f"all_reduce, {algorithm}")


@pytest.mark.parametrize("sizes", [(2,) * WORLD_SIZE, (3, 0, 1, 9, 0, 0, 4, 2)], ids=["even", "uneven"])
def test_every_fused_op_with_eight_ranks(eight: RankPool, sizes: tuple[int, ...]) -> None:
    eight.run(every_fused_op, torch.bfloat16, sizes)
