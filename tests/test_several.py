"""Several weights at one gather: right by every schedule, with what one weight sends, and no copy of any of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import fusedtp
from fusedtp import reference
from fusedtp.bench.ranks import RankPool
from fusedtp.kernels import gather_matmul
from fusedtp.shards import even_sizes

from .spread import spread
from .test_counting import Call, calls, counting

SCHEDULES = ("unfused", "decomposed", "fused")


def whole(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """The same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Problem:
    """x as all ranks have it together, and this rank's weights and biases; each rank's weights are its own."""

    def __init__(
        self, group: ProcessGroup, shape: Sequence[int], widths: Sequence[int], biased: Sequence[bool],
        dtype: torch.dtype, dim: int, sizes: Sequence[int],
    ) -> None:  # fmt: skip
        self.group, self.dim, self.sizes, self.dtype = group, dim, tuple(sizes), dtype
        self.x, self.rows = whole(shape, dtype, 0), math.prod(shape[:-1])
        ranks, rank = range(group.size()), group.rank()
        every = [[whole((width, shape[-1]), dtype, 100 * r + i) for i, width in enumerate(widths)] for r in ranks]
        dys = [
            [whole((*shape[:-1], width), dtype, 1000 + 100 * r + i) for i, width in enumerate(widths)] for r in ranks
        ]
        self.weights, self.dys = every[rank], dys[rank]
        self.biases = [
            whole((width,), dtype, i) if has else None
            for i, (width, has) in enumerate(zip(widths, biased, strict=True))
        ]
        # dx is the sum over all ranks and all their weights.
        dy = torch.cat([each for of_rank in dys for each in of_rank], -1).flatten(0, -2)
        w = torch.cat([each for of_rank in every for each in of_rank])
        allowed = reference.bound(dy, w, dtype, k_sizes=list(widths) * group.size(), sum_dtype=dtype)
        self.dx = [self.part(each.view(*shape)) for each in (reference.matmul(dy, w), allowed)]

    def part(self, x: Tensor) -> Tensor:
        """This rank's part of a tensor that is split as x is."""
        return x.split(self.sizes, self.dim)[self.group.rank()]

    def leaves(
        self, needs_x: bool = True, frozen: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        """x, weights and biases to call with."""
        weights = [w.clone().requires_grad_(i not in frozen) for i, w in enumerate(self.weights)]
        biases = [None if b is None else b.clone().requires_grad_() for b in self.biases]
        return self.part(self.x).clone().requires_grad_(needs_x), weights, biases

    def check(self, outs: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], biases: Sequence[Any]) -> None:
        """The results, and the gradients that `dys` give."""
        rows, dtype = self.x.flatten(0, -2), self.dtype
        assert len(outs) == len(weights)
        for i, (y, weight, bias) in enumerate(zip(outs, self.weights, self.biases, strict=True)):
            allowed = reference.bound(rows, weight.t(), dtype, self.group.size(), bias=bias, sum_dtype=dtype)
            reference.check(y.flatten(0, -2), reference.matmul(rows, weight.t(), bias), allowed, f"y{i}")
        torch.autograd.backward(outs, self.dys)
        for i, (dy, weight, bias) in enumerate(zip(self.dys, weights, biases, strict=True)):
            columns, one = dy.flatten(0, -2).t(), torch.ones(self.rows, 1, dtype=dtype)
            for name, parameter, other in (("dw", weight, rows), ("db", bias, one)):
                if parameter is None or not parameter.requires_grad:
                    assert parameter is None or parameter.grad is None
                    continue
                grad = parameter.grad if name == "dw" else parameter.grad[:, None]
                allowed = reference.bound(columns, other, dtype, self.group.size(), sum_dtype=dtype)
                reference.check(grad, reference.matmul(columns, other), allowed, f"{name}{i}")
        if x.requires_grad:
            reference.check(x.grad, *self.dx, "dx")
        else:
            assert x.grad is None


def right(
    group: ProcessGroup, schedule: str, dtype: torch.dtype, shape: Sequence[int], widths: Sequence[int],
    biased: Sequence[bool], dim: int, sizes: Sequence[int], compiled: bool = False,
) -> None:  # fmt: skip
    problem = Problem(group, shape, widths, biased, dtype, dim, sizes)

    def run(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        return fusedtp.all_gather_linear(
            x, weights, biases, group=group, gather_dim=dim, sizes=problem.sizes, schedule=schedule
        )

    function: Callable[..., tuple[Tensor, ...]] = torch.compile(run, fullgraph=True) if compiled else run
    x, weights, biases = problem.leaves()
    problem.check(function(x, weights, biases), x, weights, biases)


def cut(length: int, world_size: int, how: str) -> tuple[int, ...]:
    """The ranks' lengths: even, one rank with most, or nothing but on the last."""
    if how == "even":
        return even_sizes(length, world_size)
    most = length - (world_size - 1) * (how == "lopsided")
    others = [int(how == "lopsided")] * (world_size - 1)
    return (most, *others) if how == "lopsided" else (*others, most)


@pytest.mark.parametrize(
    ("schedule", "world_size"), dict.fromkeys(spread(SCHEDULES, [2, 4, 3]) + spread(SCHEDULES, [3, 1, 2, 4]))
)
def test_results_and_gradients_are_right(pool: RankPool, schedule: str, world_size: int) -> None:
    dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float16))
    for dim, how in ((0, "even"), (1, "lopsided"), (-1, "on the last")):
        shape = (7, 4, 24)
        sizes = cut(shape[dim], world_size, how)
        for widths, biased in (((16, 7, 1), (True, False, True)), ((5, 40), (False, False))):
            pool.run(right, schedule, next(dtypes), shape, widths, biased, dim, sizes, world_size=world_size)


def at_the_sizes_of_xformers(
    group: ProcessGroup, dtype: torch.dtype, shape: Sequence[int], N: int, compiled: bool
) -> None:
    """As its test has it: by a tolerance, against the dense layers in float32."""
    rank, x = group.rank(), whole(shape, dtype, 0)
    weights = [whole((width, shape[-1]), dtype, i) * shape[-1] ** -0.5 for i, width in enumerate((N, N // 2 - 3))]
    mine, ours = x.chunk(2)[rank].clone().requires_grad_(), [w.clone().requires_grad_() for w in weights]
    dense, theirs = x.float().requires_grad_(), [w.float().requires_grad_() for w in weights]

    def run(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return fusedtp.all_gather_linear(x, weights, group=group)

    outs = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(mine, ours)
    refs = [F.linear(dense, w) for w in theirs]
    dys = [whole(ref.shape, dtype, 9 + i) for i, ref in enumerate(refs)]
    torch.autograd.backward(outs, dys)
    torch.autograd.backward(refs, [dy.float() for dy in dys])
    # Every rank has the same weights and gradients here, so that dx is theirs twice.
    pairs = [*zip(outs, refs, strict=True), (mine.grad, 2 * dense.grad.chunk(2)[rank])]
    pairs += [(w.grad, other.grad) for w, other in zip(ours, theirs, strict=True)]
    for out, ref in pairs:
        error = (out.float() - ref).abs().max() / ref.abs().max()
        assert error < {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype], error


# Those of the test of sequence-parallel matmuls in xformers, tests/test_sequence_parallel_fused_ops.py.
@pytest.mark.parametrize("dims", [(2, 2, 512, 512, 256), (2, 1023, 511, 257)], ids=str)
def test_the_sizes_of_xformers(pool: RankPool, dims: tuple[int, ...]) -> None:
    *shape, N = dims
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pool.run(at_the_sizes_of_xformers, dtype, shape, N, dtype == torch.float32, world_size=2)


def sent(group: ProcessGroup, schedule: str, needs: str) -> tuple[list[Call], Any, list[Call]]:
    """What forward and backward of three weights run, by op and shape of what travels; what forward saves."""
    problem = Problem(group, (8, 24), (16, 7, 1), (True, False, True), torch.float32, 0, even_sizes(8, group.size()))
    x, weights, biases = problem.leaves("x" in needs, () if "w" in needs else (0, 1, 2))
    with counting() as forward:
        outs = fusedtp.all_gather_linear(x, weights, biases, group=group, schedule=schedule)
    with counting() as backward:
        torch.autograd.backward(outs, problem.dys)
    own = {each.data_ptr() for each in (x, *weights)}
    assert {each.data_ptr() for each in forward.saved} <= own, "a copy is kept"
    assert not backward.saved
    return forward.calls, forward.shapes, backward.calls


@pytest.mark.parametrize("needs", ["xw", "x", "w"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_as_many_collectives_as_for_one_weight(pool: RankPool, schedule: str, needs: str) -> None:
    kept = [(16, 24), (7, 24), (1, 24)] * ("x" in needs) + [(4, 24)] * ("w" in needs)
    gather, scatter = calls(("all_gather_matmul", (4, 24))), calls(("matmul_reduce_scatter", (8, 16)))
    expected = {"xw": gather + scatter, "x": scatter, "w": gather}[needs]
    for forward, saved, backward in pool.run(sent, schedule, needs, world_size=2):
        assert (forward, saved, backward) == (gather, sorted(kept), expected)


def launched(group: ProcessGroup) -> int:
    """The kernels that multiply in a forward pass of three weights."""
    problem = Problem(group, (8, 24), (16, 7, 1), (True, False, True), torch.float32, 0, even_sizes(8, group.size()))
    count, launch = 0, gather_matmul.launch

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return launch(*args)

    with mock.patch.object(gather_matmul, "launch", counted), torch.no_grad():
        fusedtp.all_gather_linear(*problem.leaves(), group=group, schedule="fused")
    return count


def test_one_kernel_multiplies_all(pool: RankPool) -> None:
    assert pool.run(launched, world_size=2) == [1, 1]


def frozen(group: ProcessGroup, schedule: str) -> None:
    """Gradients of some weights, with some results unused."""
    for needs_x, fixed in ((True, (0,)), (True, (1, 2)), (False, (0, 2))):
        problem = Problem(
            group, (8, 24), (16, 7, 1), (True, False, True), torch.float64, 0, even_sizes(8, group.size())
        )
        x, weights, biases = problem.leaves(needs_x, fixed)
        problem.check(fusedtp.all_gather_linear(x, weights, biases, group=group, schedule=schedule), x, weights, biases)
        x, weights, biases = problem.leaves(needs_x)
        first, *_ = fusedtp.all_gather_linear(x, weights, biases, group=group, schedule=schedule)
        first.backward(problem.dys[0])
        rows, columns = problem.x.double(), problem.dys[0].double()
        torch.testing.assert_close(weights[0].grad, columns.t() @ rows)
        assert [each.grad is None for each in (*weights, *biases) if each is not None] == [
            False,
            True,
            True,
            False,
            True,
        ]


@pytest.mark.parametrize("schedule", ["unfused", "decomposed"])
def test_frozen_weights_and_unused_results(pool: RankPool, schedule: str) -> None:
    pool.run(frozen, schedule, world_size=2)


def elsewhere(group: ProcessGroup) -> None:
    """torch.func, evaluation, autocast, one weight in a sequence, and gradients of gradients."""
    sizes = even_sizes(8, group.size())
    problem = Problem(group, (8, 24), (16, 7), (True, False), torch.float64, 0, sizes)
    x, weights, biases = problem.leaves()
    expected = [F.linear(problem.x, w, b) for w, b in zip(problem.weights, problem.biases, strict=True)]

    def loss(x: Tensor, *weights: Tensor) -> Tensor:
        return sum(out.square().sum() for out in fusedtp.all_gather_linear(x, weights, biases, group=group))

    found = torch.func.grad(loss, argnums=(0, 1, 2))(x.detach(), *problem.weights)
    loss(x, *weights).backward()
    for grad, leaf in zip(found, (x, *weights), strict=True):
        torch.testing.assert_close(grad, leaf.grad)
    grads = torch.autograd.grad(loss(x, *weights), (x, *weights), create_graph=True)
    for grad, leaf in zip(grads, (x, *weights), strict=True):
        torch.testing.assert_close(grad, leaf.grad)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        grads[0].sum().backward()
    with torch.inference_mode():
        outs = fusedtp.all_gather_linear(x, list(weights), biases, group=group)
        torch.testing.assert_close(outs, tuple(expected))
        (one,) = fusedtp.all_gather_linear(x, [weights[1]], group=group)
        torch.testing.assert_close(one, expected[1])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        floats = [each.float() for each in weights]
        outs = fusedtp.all_gather_linear(x.float(), floats, group=group)
        assert {out.dtype for out in outs} == {torch.bfloat16}
    shapes = fusedtp.all_gather_linear(x.to("meta"), [w.to("meta") for w in weights], group=group)
    assert [tuple(out.shape) for out in shapes] == [(8, 16), (8, 7)]


def test_elsewhere(pool: RankPool) -> None:
    pool.run(elsewhere, world_size=2)


BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "none": ((), None, ValueError, "weight must be a tensor or some"),
    "no tensor": ((torch.ones(3, 4), 3.0), None, TypeError, r"weight\[1\] must be a tensor, got float"),
    "features": ((torch.ones(3, 4), torch.ones(3, 5)), None, ValueError, r"x has 4 features, and weight\[1\] of shape"),
    "dtype": ((torch.ones(3, 4), torch.ones(3, 4).half()), None, ValueError, r"weight\[1\] must have x's dtype"),
    "a vector": ((torch.ones(3, 4), torch.ones(4)), None, ValueError, r"weight\[1\] must have 2 dimensions"),
    "one bias": ((torch.ones(3, 4),) * 2, torch.ones(3), TypeError, "bias must be as many tensors as weight"),
    "few biases": ((torch.ones(3, 4),) * 2, (torch.ones(3),), ValueError, "bias must be as many tensors as weight, 2"),
    "a bias's length": (
        (torch.ones(3, 4),) * 2,
        (None, torch.ones(2)),
        ValueError,
        r"bias\[1\] must have shape \(3,\)",
    ),
    "biases of one": (torch.ones(3, 4), (torch.ones(3),), TypeError, "bias must be a tensor, got tuple"),
}


def refused(group: ProcessGroup) -> None:
    for weights, biases, kind, message in BAD.values():
        with pytest.raises(kind, match=message):
            fusedtp.all_gather_linear(torch.ones(2, 4), weights, biases, group=group)


def test_bad_input(pool: RankPool) -> None:
    pool.run(refused, world_size=2)
