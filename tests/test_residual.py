"""A residual added where a sum is rounded: right by every schedule, once, and at no further cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import reference
from fusedtp.bench.ranks import RankPool
from fusedtp.shards import even_sizes

from .spread import spread
from .test_counting import counting
from .test_several import cut, whole

SCHEDULES = ("unfused", "decomposed", "fused")
N, K = 24, 10


class Problem:
    """All ranks' x and weights, of which this rank has its own; bias and residual, the same on all of them."""

    def __init__(self, group: ProcessGroup, shape: Sequence[int], dtype: torch.dtype, biased: bool) -> None:
        rank, ranks = group.rank(), range(group.size())
        xs = [whole((*shape, K), dtype, 10 + r) for r in ranks]
        ws = [whole((N, K), dtype, 20 + r) for r in ranks]
        self.x, self.w, self.alone = xs[rank], ws[rank], len(ranks) == 1
        self.bias = whole((N,), dtype, 1) if biased else None
        self.residual, self.dy = whole((*shape, N), dtype, 2), whole((*shape, N), dtype, 3)
        left, right = torch.cat(xs, -1).flatten(0, -2), torch.cat(ws, -1).t()
        total = reference.matmul(left, right, self.bias)
        self.y = (total + self.residual.flatten(0, -2).double()).view(*shape, N)
        allowed = reference.bound(left, right, dtype, group.size(), bias=self.bias, sum_dtype=dtype)
        # It is one more term of the sum, and of what is rounded.
        self.allowed = allowed.view(*shape, N) + 2 * torch.finfo(dtype).eps * self.residual.double().abs()

    def leaves(self) -> list[Tensor | None]:
        """x, weight and bias to call with."""
        return [None if each is None else each.clone().requires_grad_() for each in (self.x, self.w, self.bias)]


def check(problem: Problem, call: Callable[..., Tensor], cut: Callable[[Tensor], Tensor]) -> None:
    """y against float64; the residual's gradient is dy, and the others are what they are without one, to the bit."""
    residual, dy = cut(problem.residual).clone().requires_grad_(), cut(problem.dy)
    leaves, without = problem.leaves(), problem.leaves()
    with counting() as found:
        y = call(*leaves, residual=residual)
    reference.check(y, cut(problem.y), cut(problem.allowed), "y")
    y.backward(dy)
    with counting() as expected:
        other = call(*without)
    # One rank's without it is torch's own linear.
    assert found.calls == expected.calls or problem.alone
    assert found.shapes == expected.shapes or problem.alone, "more is kept than without a residual"
    other.backward(dy)
    assert residual.grad is not None
    assert torch.equal(residual.grad, dy)
    for each, same in zip(leaves, without, strict=True):
        assert each is None or torch.equal(each.grad, same.grad)  # type: ignore[arg-type, union-attr]
    with torch.no_grad():
        assert torch.equal(call(*leaves, residual=residual), y)


def scattered(group: ProcessGroup, schedule: str, dtype: torch.dtype, dim: int, how: str, biased: bool) -> None:
    """By a reduce-scatter, along every dim; what is scattered that is not the first lies as a view."""
    shape = (7, 5)
    problem, sizes = Problem(group, shape, dtype, biased), cut((*shape, N)[dim], group.size(), how)
    call = partial(fusedtp.linear_reduce_scatter, group=group, schedule=schedule, scatter_dim=dim, sizes=sizes)
    check(problem, call, lambda each: each.split(sizes, dim)[group.rank()])


@pytest.mark.parametrize(("schedule", "world_size"), spread(SCHEDULES, [1, 4, 2]))
def test_added_by_a_reduce_scatter(pool: RankPool, schedule: str, world_size: int) -> None:
    dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float16))
    for dim, how, biased in ((0, "even", True), (1, "lopsided", False), (-1, "on the last", True)):
        pool.run(scattered, schedule, next(dtypes), dim, how, biased, world_size=world_size)
    if schedule != "fused":
        pool.run(scattered, schedule, torch.float64, 0, "lopsided", False, world_size=world_size)


def reduced(group: ProcessGroup, schedule: str, algorithm: str, dtype: torch.dtype, biased: bool) -> None:
    """By an all-reduce, of whole residuals."""
    call = partial(fusedtp.linear_all_reduce, group=group, schedule=schedule, algorithm=algorithm)
    check(Problem(group, (9, 3), dtype, biased), call, lambda each: each)


@pytest.mark.parametrize(("schedule", "world_size"), spread(SCHEDULES, [2, 1, 4]))
def test_added_by_an_all_reduce(pool: RankPool, schedule: str, world_size: int) -> None:
    algorithms = ("auto",) if schedule == "unfused" else ("one_shot", "two_shot")
    for algorithm, (dtype, biased) in itertools.product(
        algorithms, ((torch.bfloat16, False), (torch.float32, True))
    ):  # fmt: skip
        pool.run(reduced, schedule, algorithm, dtype, biased, world_size=world_size)


def rounded_once(group: ProcessGroup, schedule: str) -> None:
    """1 + 2**-8 and -1 in bfloat16: rounded before the residual is added, nothing would be left."""
    x = torch.tensor([[1.0 if group.rank() == 0 else 2.0**-8]], dtype=torch.bfloat16)
    one, residual = torch.ones(1, 1, dtype=torch.bfloat16), -torch.ones(1, 1, dtype=torch.bfloat16)
    y = fusedtp.linear_all_reduce(x, one, group=group, schedule=schedule, residual=residual)
    assert y.item() == 2.0**-8


@pytest.mark.parametrize("schedule", ["decomposed", "fused"])
def test_rounded_once(pool: RankPool, schedule: str) -> None:
    pool.run(rounded_once, schedule, world_size=2)


def elsewhere(group: ProcessGroup) -> None:
    """Compiled, of a layer, under autocast, torch.func and inference; only the residual has a gradient."""
    sizes = even_sizes(8, group.size())
    problem = Problem(group, (8,), torch.float64, True)
    mine = partial(torch.split, split_size_or_sections=sizes)
    residual, dy = (mine(each)[group.rank()].clone() for each in (problem.residual, problem.dy))

    def call(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        return fusedtp.linear_reduce_scatter(x, w, bias, group=group, residual=residual)

    x, w, bias = problem.leaves()
    assert x is not None
    assert w is not None
    expected = call(x, w, bias, residual)
    grads = torch.autograd.grad(expected, (x, w), dy)
    leaf = residual.clone().requires_grad_()
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(x, w, bias, leaf)
    assert torch.equal(found, expected)
    for one, other in zip(torch.autograd.grad(found, (x, w, leaf), dy), (*grads, dy), strict=True):
        assert torch.equal(one, other)
    alone = call(x.detach(), w.detach(), None, leaf)
    assert torch.equal(torch.autograd.grad(alone, leaf, dy)[0], dy)
    of_func = torch.func.grad(lambda r, x: (call(x, w.detach(), None, r) * dy).sum(), argnums=(0, 1))(residual, x)
    assert torch.equal(of_func[0], dy)
    assert torch.equal(of_func[1], grads[0])
    again = torch.autograd.grad(call(x, w, bias, leaf).square().sum(), (x, leaf), create_graph=True)
    torch.testing.assert_close(again[1], 2 * expected)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        again[0].sum().backward()
    with torch.inference_mode():
        assert torch.equal(call(x, w, bias, residual.clone()), expected)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(x.float(), w.float(), None, leaf.float())
        assert y.dtype == torch.bfloat16
        (grad,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        assert grad.dtype == leaf.dtype
    layer = fusedtp.RowParallelLinear(N, N, group=group)
    for sequence_parallel in (True, False):
        layer.sequence_parallel = sequence_parallel
        x = torch.randn(8, N // group.size())
        added = torch.randn(sizes[group.rank()] if sequence_parallel else 8, N)
        if not sequence_parallel:
            added = whole((8, N), torch.float32, 4)
        y = layer(x, added)
        torch.testing.assert_close(y, layer(x) + added)
        layer.zero_grad()
        y.sum().backward()
        assert layer.weight.grad is not None


def test_elsewhere(pool: RankPool) -> None:
    pool.run(elsewhere, world_size=2)


ONES = torch.ones(4, 3), torch.ones(6, 3)
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": (1.0, TypeError, "residual must be a tensor, got float"),
    "the shape": (torch.ones(4, 6), ValueError, r"residual must have the result's shape, \(2, 6\), got \(4, 6\)"),
    "a bias": (torch.ones(6), ValueError, r"residual must have the result's shape, \(2, 6\), got \(6,\)"),
    "the dtype": (torch.ones(2, 6).half(), ValueError, "residual must have x's dtype"),
    "the device": (torch.ones(2, 6, device="meta"), ValueError, "residual must be on x's device"),
    "sparse": (torch.ones(2, 6).to_sparse(), TypeError, "residual must be a dense tensor"),
}


def refused(group: ProcessGroup) -> None:
    for residual, kind, message in BAD.values():
        with pytest.raises(kind, match=message):
            fusedtp.linear_reduce_scatter(*ONES, group=group, residual=residual)
    with pytest.raises(ValueError, match=r"the result's shape, \(4, 6\), got \(2, 6\)"):
        fusedtp.linear_all_reduce(*ONES, group=group, residual=torch.ones(2, 6))


def test_bad_input(pool: RankPool) -> None:
    pool.run(refused, world_size=2)


def disagreed(group: ProcessGroup, schedule: str) -> None:
    residual = torch.ones(4, 6) if group.rank() == 0 else None
    with pytest.raises(fusedtp.RanksDisagree, match="residual: given on rank 0, none on rank 1"):
        fusedtp.linear_all_reduce(*ONES, group=group, schedule=schedule, residual=residual)
    fusedtp.destroy(group)


def test_ranks_that_disagree(pool: RankPool) -> None:
    for schedule in ("decomposed", "fused"):
        pool.run(disagreed, schedule, world_size=2)
