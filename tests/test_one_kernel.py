"""A matmul and all-reduce of few rows is one kernel, whose programs may begin in any order."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import reference
from fusedtp.bench.ranks import RankPool

from .oracle import whole


def launched(group: ProcessGroup, M: int, N: int, K: int, algorithm: str, dtype: torch.dtype) -> list[str]:
    """The kernels of one op on this rank, whose result is within its bound, the same in every run and on every rank."""
    from fusedtp.kernels import loading

    xs, ws = (
        [whole((*size, K), dtype, 10 * i + r) for r in range(group.size())] for i, size in enumerate(((M,), (N,)))
    )
    bias, residual = whole((N,), dtype, 5), whole((M, N), dtype, 6)
    names: list[str] = []

    def start(kernel: Any, grid: tuple[int, ...]) -> Any:
        names.append(f"{kernel.__name__} of {grid[0]}")
        return kernel[grid]

    def run() -> Tensor:
        return fusedtp.linear_all_reduce(
            xs[group.rank()], ws[group.rank()], bias, group=group, schedule="fused", algorithm=algorithm,
            residual=residual,
        )  # fmt: skip

    with mock.patch.object(loading, "_starter", start):
        y = run()
    left, right = torch.cat(xs, -1), torch.cat(ws, -1).t()
    expected = reference.matmul(left, right, bias) + residual.double()
    allowed = reference.bound(left, right, dtype, group.size(), bias=bias, sum_dtype=dtype)
    reference.check(y, expected, allowed + 2 * torch.finfo(dtype).eps * residual.double().abs(), "y")
    assert torch.equal(run(), y)
    first = [torch.empty_like(y) for _ in range(group.size())]
    torch.distributed.all_gather(first, y, group=group)
    assert all(torch.equal(each, y) for each in first)
    return names


# The contraction in one part and in more; tiles of one rank, and of all; a rank without any.
@pytest.mark.parametrize(
    ("M", "N", "K", "world_size"),
    [(1, 40, 30, 2), (1, 40, 256, 2), (5, 40, 600, 3), (70, 130, 30, 4), (3, 130, 320, 4), (256, 30, 10, 2)],
)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_one_launch(pool: RankPool, algorithm: str, M: int, N: int, K: int, world_size: int) -> None:
    dtype = torch.bfloat16 if algorithm == "one_shot" else torch.float32
    for names in pool.run(launched, M, N, K, algorithm, dtype, world_size=world_size):
        assert len(names) == 1
        assert names[0].startswith("_matmul_all_reduce_kernel")


def test_more_rows_are_more_launches(pool: RankPool) -> None:
    (names, _) = pool.run(launched, 257, 20, 10, "two_shot", torch.float32, world_size=2)
    assert [name.split()[0] for name in names] == ["_matmul_scatter_kernel", "_reduce_kernel", "_collect_kernel"]


def roles(group: ProcessGroup) -> None:
    from fusedtp.kernels.matmul_all_reduce import LEAST_BLOCKS, roles_of, splits_of

    for tiles in (1, 2, 7, 64, 66, 67, 132, 500):
        for blocks in range(1, 70):
            splits = splits_of(tiles, blocks, 132)
            length = -(-blocks // splits)
            assert splits == 1 or splits * tiles <= 132
            assert splits == 1 or length >= LEAST_BLOCKS
            # None of the parts is empty.
            assert (splits - 1) * length < blocks
    assert splits_of(64, 56, 132) == 2
    assert splits_of(8, 56, 132) == 8
    assert splits_of(67, 56, 132) == 1
    # The first program enters the epoch, though there is nothing to multiply.
    assert roles_of(0, 0, 0, 132) == (1, 0, 0)
    assert roles_of(128, 8, 56, 132) == (128, 8, 56)
    assert roles_of(900, 500, 400, 132) == (132, 132, 132)


def test_roles_and_parts(pool: RankPool) -> None:
    pool.run(roles, world_size=1)
