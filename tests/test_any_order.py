"""What goes through the switch: sums of an all-reduce with order="any", and rows that are stored once. Interpreted, all
ranks' arenas are visited one by one.
"""

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
from fusedtp.memory import Unreachable
from fusedtp.workspaces.workspace import Workspace

from .harness import last_path
from .oracle import Case, Operands, whole
from .virtual_ranks import LocalMemory, _Shared


def summed(group: ProcessGroup, case: Case, schedule: str) -> str:
    """A product's sum on every rank, with what a kernel adds to it, is right; how it was made."""
    operands, eps = Operands(case, group), torch.finfo(case.dtype).eps
    ((value, off),) = operands.expected
    # Where the switch adds, the sum is rounded before bias and residual are added.
    operands.expected = [(value, off + eps * (3 * value.abs() + operands.given["residual"].double().abs()))]
    operands.check(schedule, str(case), order="any")
    operands.call(schedule, operands.given, order="rank")
    assert last_path().sums == ""
    operands.call(schedule, operands.given, order="any")
    return last_path().sums


# One tile and several, with ranks that own none; fewer and more rows than the kernel of few has.
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
    """What an order may be given to, and what is said of it."""
    rank, n = group.rank(), group.size()
    x, w = whole((6, 8), torch.float32, rank), whole((4, 8), torch.float32, 10 + rank)

    for schedule in ("fused", "decomposed", "unfused"):
        own, usual = (
            fusedtp.linear_reduce_scatter(x, w, group=group, schedule=schedule, order=order)
            for order in ("any", "rank")
        )
        assert torch.equal(own, usual)
        both = fusedtp.all_reduce(x, group=group, schedule=schedule, order="any")
        reference.check(both, reference.total(_everyones(x, group)), _of_sums(x, group), f"all_reduce {schedule}")
    fusedtp.linear_reduce_scatter(x, w, group=group, schedule="fused", order="any")
    assert last_path().sums == "in the order of ranks: a scatter sends no less through the switch"
    fusedtp.all_reduce(x, group=group, schedule="fused", algorithm="ring", order="any")
    assert last_path().sums == "along the ring"
    # The sum of the gradients of several weights is an op of its own.
    layer = fusedtp.ParallelMLP(8, 4 * n, group=group, schedule="fused", order="any")
    usual_layer = fusedtp.ParallelMLP(8, 4 * n, group=group, schedule="fused")
    usual_layer.load_state_dict(layer.state_dict())
    found = []
    for each in (layer, usual_layer):
        leaf = x.detach().clone().requires_grad_()
        y = each(leaf)
        y.square().sum().backward()
        assert leaf.grad is not None
        found.append([y.detach(), leaf.grad, *(p.grad for p in each.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    scaled = fusedtp.linear_all_reduce(
        fusedtp.scaled(x), fusedtp.scaled(w), group=group, schedule="fused", algorithm="two_shot", order="any"
    )
    assert last_path().sums == "in the switch"
    assert scaled.dtype == torch.bfloat16
    normed, y = fusedtp.linear_reduce_scatter(x, w, group=group, order="any", norm_weight=torch.ones(4))
    assert normed.shape == y.shape
    # A memory without it: the usual order, said so.
    with mock.patch.object(Workspace, "has_multicast", False):
        fusedtp.destroy(group)
        own = fusedtp.linear_all_reduce(x, w, group=group, schedule="fused", algorithm="two_shot", order="any")
        assert last_path().sums == "in the order of ranks: no multicast here"
        usual = fusedtp.linear_all_reduce(x, w, group=group, schedule="fused", algorithm="two_shot")
        assert torch.equal(own, usual)
        fusedtp.all_gather(x, group=group, schedule="fused", producer="multicast")
        path = last_path()
        assert path.producer == "push"
        assert path.reason == "asked for; not multicast: the memory has no address of all ranks"
        fusedtp.destroy(group)


def _everyones(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(parts, x, group=group)
    return parts


def _of_sums(x: Tensor, group: ProcessGroup) -> Tensor:
    return reference.total_bound(_everyones(x, group), x.dtype, sum_dtype=x.dtype)


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
    """A gather that stores each row once, to all ranks, and its gradients: the bits of pushing."""
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
