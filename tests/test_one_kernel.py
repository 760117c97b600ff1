"""A matmul and all-reduce of few rows is one kernel, whose programs may begin in any order."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import ProcessGroup

from fusedtp.bench.ranks import RankPool

from .oracle import Case, Operands


def launched(group: ProcessGroup, case: Case) -> list[str]:
    """The kernels of one op on this rank, whose result is right."""
    from fusedtp.kernels import loading

    operands, names = Operands(case, group), []

    def start(kernel: Any, grid: tuple[int, ...]) -> Any:
        names.append(kernel.__name__)
        return kernel[grid]

    with mock.patch.object(loading, "_starter", start):
        operands.call("fused", operands.given)
    operands.check("fused", str(case))
    return names


# The contraction in one part and in more; tiles of one rank, and of all; a rank without any.
@pytest.mark.parametrize(
    ("M", "N", "K", "world_size"),
    [(1, 40, 60, 2), (1, 40, 512, 2), (5, 40, 1800, 3), (70, 130, 120, 4), (3, 130, 1280, 4), (256, 30, 20, 2)],
)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_one_launch(pool: RankPool, algorithm: str, M: int, N: int, K: int, world_size: int) -> None:
    dtype = torch.bfloat16 if algorithm == "one_shot" else torch.float32
    case = Case("all_reduce", dtype, (M,), widths=(N,), features=K, residual=True, algorithm=algorithm)
    for names in pool.run(launched, case, world_size=world_size):
        assert names == ["_matmul_all_reduce_kernel"]


def test_more_rows_are_more_launches(pool: RankPool) -> None:
    case = Case("all_reduce", torch.float32, (257,), widths=(20,), features=20, algorithm="two_shot")
    for names in pool.run(launched, case, world_size=2):
        assert names == ["_matmul_scatter_kernel", "_reduce_kernel", "_collect_kernel"]


def test_roles_and_parts() -> None:
    # Not at the top: it decides how kernels run.
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
