"""A matmul and all-reduce of few rows: one kernel, whose programs may start in any order. The switch's multicast: sums
of an all-reduce with order="any", and rows that are stored once; interpreted kernels visit all ranks' arenas.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import reference
from fusedtp.bench.ranks import RankPool
from fusedtp.memory import Unreachable
from fusedtp.workspaces.workspace import Workspace

from .harness import last_path, spread
from .oracle import Case, Operands, whole
from .virtual_ranks import LocalMemory, _Shared


def summed(group: ProcessGroup, case: Case, schedule: str) -> str:
    """Check a product's sum with its bias and residual on every rank, and return how the sum was made."""
    operands, eps = Operands(case, group), torch.finfo(case.dtype).eps
    ((value, off),) = operands.expected
    # When the switch adds, the sum is rounded before bias and residual are added.
    operands.expected = [(value, off + eps * (3 * value.abs() + operands.given["residual"].double().abs()))]
    operands.call(schedule, operands.given, order="rank")
    assert last_path().sums == ""
    operands.check(schedule, str(case), order="any")
    return last_path().sums


# One tile and several, ranks without a tile, and row counts below and above the limit of the kernel for few rows.
@pytest.mark.parametrize(
    ("M", "N", "K", "world_size", "dtype"),
    [
        (1, 40, 60, 2, torch.float16), (5, 40, 900, 3, torch.bfloat16), (70, 130, 120, 4, torch.float32),
        (261, 72, 72, 3, torch.bfloat16),
    ],
)  # fmt: skip
def test_the_switch_makes_the_sums(pool: RankPool, M: int, N: int, K: int, world_size: int, dtype: torch.dtype) -> None:
    case = Case("all_reduce", dtype, (M,), widths=(N,), features=K, residual=True, algorithm="two_shot")
    assert pool.run(summed, case, "fused", world_size=world_size) == ["in the switch"] * world_size


@pytest.mark.parametrize(
    ("schedule", "algorithm", "world_size", "how"),
    [
        ("fused", "one_shot", 2, "in the order of ranks: one shot"),
        ("decomposed", "auto", 2, "in the order of ranks: not by fused"),
        ("unfused", "auto", 2, "as the process group adds"), ("auto", "auto", 1, "of one rank"),
    ],
)  # fmt: skip
def test_where_it_does_not(pool: RankPool, schedule: str, algorithm: str, world_size: int, how: str) -> None:
    case = Case("all_reduce", torch.float32, (5,), widths=(40,), residual=True, algorithm=algorithm)
    assert pool.run(summed, case, schedule, world_size=world_size) == [how] * world_size


def other_calls(group: ProcessGroup) -> None:
    """Check the calls that take an order, and the reported way of their sums."""
    n, options = group.size(), {"group": group, "schedule": "fused"}
    parts = [whole((6, 8), torch.float32, rank) for rank in range(n)]
    x, w = parts[group.rank()], whole((4, 8), torch.float32, 10 + group.rank())
    allowed = reference.total_bound(parts, x.dtype, sum_dtype=x.dtype)
    for schedule in ("decomposed", "unfused", "fused"):
        own, usual = (
            fusedtp.linear_reduce_scatter(x, w, group=group, schedule=schedule, order=order)
            for order in ("any", "rank")
        )
        assert torch.equal(own, usual)
        both = fusedtp.all_reduce(x, group=group, schedule=schedule, order="any")
        reference.check(both, reference.total(parts), allowed, f"all_reduce {schedule}")
    fusedtp.linear_reduce_scatter(x, w, **options, order="any")
    assert last_path().sums == "in the order of ranks: a scatter sends no less through the switch"
    fusedtp.all_reduce(x, **options, algorithm="ring", order="any")
    assert last_path().sums == "along the ring"
    # The sum of the gradients of several weights is a separate op.
    found, state = [], None
    for order in ("any", "rank"):
        layer = fusedtp.ParallelMLP(8, 4 * n, **options, order=order)
        state = layer.state_dict() if state is None else state
        layer.load_state_dict(state)
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.square().sum().backward()
        found.append([y.detach(), leaf.grad, *(p.grad for p in layer.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    summed = partial(fusedtp.linear_all_reduce, **options, algorithm="two_shot")
    scaled = summed(fusedtp.scaled(x), fusedtp.scaled(w), order="any")
    assert last_path().sums == "in the switch"
    assert scaled.dtype == torch.bfloat16
    normed, y = fusedtp.linear_reduce_scatter(x, w, group=group, order="any", norm_weight=torch.ones(4))
    assert normed.shape == y.shape
    # Memory without multicast: the sum keeps the usual order and says so.
    with mock.patch.object(Workspace, "has_multicast", False):
        fusedtp.destroy(group)
        own = summed(x, w, order="any")
        assert last_path().sums == "in the order of ranks: no multicast here"
        assert torch.equal(own, summed(x, w))
        fusedtp.all_gather(x, **options, producer="multicast")
        path = last_path()
        assert path.producer == "push"
        assert path.reason == "asked for; not multicast: the memory has no address of all ranks"
        fusedtp.destroy(group)


def test_what_takes_an_order_and_what_is_said(pool: RankPool) -> None:
    pool.run(other_calls, world_size=2)


def test_memory_that_grows_keeps_its_address_of_all_ranks() -> None:
    class Losing(LocalMemory):
        address = 64

        def allocate(self, *given: Any) -> Any:
            arena = super().allocate(*given)
            arena.multicast = self.address
            return arena

    ws = Workspace(Losing(0, _Shared(1, torch.device("cpu"))), torch.device("cpu"))
    try:
        assert int(ws.peers[-1]) == 64
        Losing.address = 0
        before = ws.half_bytes
        with pytest.raises(Unreachable, match="no address of all ranks"):
            ws.require(2 * before, 1)
        assert (ws.half_bytes, int(ws.peers[-1])) == (before, 64)
    finally:
        ws.close()


def gathered(group: ProcessGroup, M: int, N: int, K: int, dim: int) -> str:
    """Check a gather that stores each row once, to all ranks: the same bits as by pushing, in gradients too."""
    shape = (M, K) if dim == 0 else (M, K * group.size())
    case = Case("gather", torch.bfloat16, shape[:1], dim, "lopsided", widths=(N,), features=shape[1])
    operands, made = Operands(case, group), []
    for producer in ("push", "multicast"):
        leaves = operands.leaves()
        (y,) = operands.call("fused", leaves, producer=producer)
        path = last_path()
        y.backward(torch.ones_like(y))
        made.append((y.detach(), *(each.grad for each in leaves.values())))
    assert all(map(torch.equal, *made))
    x, how = operands.given["x"], {"gather_dim": dim, "sizes": operands.sizes, "group": group, "schedule": "fused"}
    one, other = (fusedtp.all_gather(x, **how, producer=producer) for producer in ("push", "multicast"))  # type: ignore
    assert torch.equal(one, other)
    assert torch.equal(one.split(operands.sizes, dim)[group.rank()], x)
    return path.producer


@pytest.mark.parametrize(
    ("M", "N", "K", "world_size", "dim"),
    [(7, 40, 30, 2, 0), (3, 40, 30, 2, 1), (70, 36, 24, 3, 1), (5, 8, 300, 4, 0)],
)
def test_each_row_is_stored_once(pool: RankPool, M: int, N: int, K: int, world_size: int, dim: int) -> None:
    said = pool.run(gathered, M, N, K, dim, world_size=world_size)
    assert said == ["multicast"] * world_size


def launched(group: ProcessGroup, case: Case) -> list[str]:
    """Return the kernels of two calls of an op on this rank, and check their results."""
    from fusedtp.kernels import loading

    operands, names = Operands(case, group), []

    def start(kernel: Any, grid: tuple[int, ...]) -> Any:
        names.append(kernel.__name__)
        return kernel[grid]

    with mock.patch.object(loading, "_starter", start):
        operands.check("fused", str(case))
    return names


# The contraction in one and several parts; tiles of one and of all ranks; ranks without a tile.
@pytest.mark.parametrize(
    ("sizes", "algorithm"),
    spread(
        [(1, 40, 60, 2), (1, 40, 512, 2), (5, 40, 1800, 3), (70, 130, 120, 4), (3, 130, 1280, 4), (256, 30, 20, 2)],
        ["one_shot", "two_shot"],
    ),
)
def test_one_launch(pool: RankPool, sizes: tuple[int, int, int, int], algorithm: str) -> None:
    M, N, K, world_size = sizes
    dtype = torch.bfloat16 if algorithm == "one_shot" else torch.float32
    case = Case("all_reduce", dtype, (M,), widths=(N,), features=K, residual=True, algorithm=algorithm)
    for names in pool.run(launched, case, world_size=world_size):
        assert names == 2 * ["_matmul_all_reduce_kernel"]


def test_more_rows_are_more_launches(pool: RankPool) -> None:
    case = Case("all_reduce", torch.float32, (257,), widths=(20,), features=20, algorithm="two_shot")
    for names in pool.run(launched, case, world_size=2):
        assert names == 2 * ["_matmul_scatter_kernel", "_reduce_kernel", "_collect_kernel"]


def test_roles_and_parts() -> None:
    # Not at the top: the import decides how kernels run.
    from fusedtp.kernels.matmul_all_reduce import LEAST_BLOCKS, roles_of, splits_of

    for tiles in (1, 2, 7, 64, 66, 67, 132, 500):
        for blocks in range(1, 70):
            splits = splits_of(tiles, blocks, 132)
            length = -(-blocks // splits)
            assert splits == 1 or splits * tiles <= 132
            assert splits == 1 or length >= LEAST_BLOCKS
            # No part is empty.
            assert (splits - 1) * length < blocks
    assert splits_of(64, 56, 132) == 2
    assert splits_of(8, 56, 132) == 8
    assert splits_of(67, 56, 132) == 1
    # One program enters the epoch even without tiles.
    assert roles_of(0, 0, 0, 132) == (1, 0, 0)
    assert roles_of(128, 8, 56, 132) == (128, 8, 56)
    assert roles_of(900, 500, 400, 132) == (132, 132, 132)
