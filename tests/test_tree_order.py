"""order="tree": the same bits on any number of ranks, in results and gradients, and of a row in any batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedtp
from fusedtp import activations, reference
from fusedtp.activations import ACTIVATIONS, GATED, OF_RESULT
from fusedtp.bench.ranks import PRELOAD, RankPool
from fusedtp.shards import even_sizes

from .fixtures import PoisonedPool
from .harness import LARGE, last_path, spread, told
from .soak.layouts import OF_ANY, laid_out

# Leaves differ in length, and every number of ranks cuts at leaves.
M, K, N = 22, 44, 36
DTYPES = torch.float32, torch.bfloat16, torch.float16


def whole(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Join all ranks' parts, of any length."""
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, x.detach(), group=group)
    return torch.cat(parts, dim)


def rows(length: int, group: ProcessGroup) -> tuple[int, ...]:
    """Return an uneven cut: rank 1 has three rows, and rank 0 the rest of both shares."""
    sizes = list(even_sizes(length, group.size()))
    if len(sizes) > 1:
        sizes[0], sizes[1] = sizes[0] + sizes[1] - 3, 3
    return tuple(sizes)


def drawn(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Case:
    """Whole operands, this rank's parts of them, and methods that join results."""

    def __init__(self, group: ProcessGroup, dtype: torch.dtype, order: str) -> None:
        self.group, self.rank, self.size, self.dtype = group, group.rank(), group.size(), dtype
        self.options: dict[str, Any] = {"group": group, "order": order}
        self.x, self.w, self.b = drawn(M, K, dtype=dtype), drawn(N, K, dtype=dtype, seed=1), drawn(N, dtype=dtype)
        self.dy, self.residual = drawn(M, N, dtype=dtype, seed=2), drawn(M, N, dtype=dtype, seed=3)
        self.sizes = rows(M, group)
        self._turn = self.rank + self.size

    def leaf(self, x: Tensor) -> Tensor:
        """Return x as a leaf that needs a gradient, in another layout each time."""
        self._turn += 1
        return laid_out(x.detach(), OF_ANY[self._turn % len(OF_ANY)]).requires_grad_()

    def part(self, x: Tensor, dim: int, sizes: tuple[int, ...] | None = None) -> Tensor:
        """Return this rank's part as a leaf that needs a gradient."""
        cut = x.split(sizes or even_sizes(x.shape[dim], self.size), dim)
        return self.leaf(cut[self.rank])

    def whole(self, x: Tensor | None, dim: int | None) -> Tensor:
        """Join along `dim`; with None the tensor is the same on all ranks."""
        assert x is not None
        return x.detach() if dim is None else whole(x, dim, self.group)

    def joined(
        self, y: Tensor, dim: int, leaves: dict[Tensor, int | None], dy: Tensor | None = None,
        sizes: tuple[int, ...] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Run backward, and join y along `dim` and the leaves' gradients along their dims."""
        y.backward(self.part(self.dy if dy is None else dy, dim, sizes).detach())
        return [self.whole(y, dim), *(self.whole(leaf.grad, its) for leaf, its in leaves.items())]


def gathered(case: Case) -> list[Tensor]:
    x, w, b = case.part(case.x, 0, case.sizes), case.part(case.w, 0), case.part(case.b, 0)
    y = fusedtp.all_gather_linear(x, w, b, sizes=case.sizes, **case.options)
    return case.joined(y, 1, {x: 0, w: 0, b: 0})


def gathered_features(case: Case) -> list[Tensor]:
    x, w = case.part(case.x, 1), case.part(case.w, 0)
    return case.joined(fusedtp.all_gather_linear(x, w, gather_dim=-1, **case.options), 1, {x: 1, w: 0})


def several(case: Case) -> list[Tensor]:
    x, gate, up = case.part(case.x, 0), case.part(case.w, 0), case.part(case.w.flip(0), 0)
    sizes = even_sizes(M, case.size)
    y = fusedtp.all_gather_linear(x, (gate, up), (None, None), activation="swiglu", sizes=sizes, **case.options)
    return case.joined(y, 1, {x: 0, gate: 0, up: 0})


def scattered(case: Case) -> list[Tensor]:
    x, w, b, residual = case.part(case.x, 1), case.part(case.w, 1), case.leaf(case.b), case.residual
    own = case.part(residual, 0, case.sizes)
    y = fusedtp.linear_reduce_scatter(x, w, b, residual=own, sizes=case.sizes, **case.options)
    return case.joined(y, 0, {x: 1, w: 1, own: 0, b: None}, sizes=case.sizes)


def reduced(case: Case, algorithm: str = "one_shot") -> list[Tensor]:
    x, w, b = case.part(case.x, 1), case.part(case.w, 1), case.leaf(case.b)
    scale = case.leaf(drawn(N, dtype=case.dtype, seed=4))
    normed, y = fusedtp.linear_all_reduce(
        x, w, b, residual=case.residual, norm_weight=scale, algorithm=algorithm, **case.options
    )
    (normed * case.dy + y).sum().backward()
    grads = {x: 1, w: 1, b: None, scale: None}
    return [normed.detach(), y.detach(), *(case.whole(leaf.grad, dim) for leaf, dim in grads.items())]


def two_shot(case: Case) -> list[Tensor]:
    return reduced(case, "two_shot")


def fully_sharded(case: Case) -> list[Tensor]:
    # All ranks have the same number of rows of M: leaves of dw end at the ranks' ends.
    x, dy = case.x.repeat(8, 1)[: 8 * (M // 8)], case.dy.repeat(8, 1)[: 8 * (M // 8)]
    mine, w, b = case.part(x, 0), case.part(case.w, 0, rows(N, case.group)), case.leaf(case.b)
    y = checkpoint(
        lambda: fusedtp.fsdp_linear(
            mine, w, b, sizes=rows(N, case.group), activation="gelu_tanh", **case.options
        ),
        use_reentrant=False,
    )  # fmt: skip
    return case.joined(y, 0, {mine: 0, w: 0, b: None}, dy)


def batch_first(case: Case) -> list[Tensor]:
    """[batch, sequence, features] with the sequence split: it is the outer dim of the rows in dw's sum."""
    x, dy = drawn(3, 16, K, dtype=case.dtype), drawn(3, 16, N, dtype=case.dtype)
    column = fusedtp.ColumnParallelLinear(K, N, dtype=case.dtype, gather_dim=1, **case.options)
    row = fusedtp.RowParallelLinear(N, K, dtype=case.dtype, scatter_dim=1, **case.options)
    torch.manual_seed(0)
    for layer in (column, row):
        layer.reset_parameters()
    mine = case.part(x, 1)
    found = case.joined(row(F.relu(column(mine))), 1, {mine: 1}, dy @ case.w)
    return found + [each.grad.full_tensor() for each in (*column.parameters(), *row.parameters())]


FORMS = (gathered, gathered_features, several, scattered, reduced, two_shot, fully_sharded, batch_first)


def results(group: ProcessGroup, form: Callable[[Case], list[Tensor]], dtype: torch.dtype, order: str) -> list[Tensor]:
    return form(Case(group, dtype, order))


@pytest.mark.parametrize(("form", "dtype", "world_size"), spread(FORMS, DTYPES, [2, 4, 2]))
def test_the_same_bits_on_any_number_of_ranks(
    pool: RankPool, form: Callable[[Case], list[Tensor]], dtype: torch.dtype, world_size: int
) -> None:  # fmt: skip
    one = pool.run(results, form, dtype, "tree", world_size=1)[0]
    for found in pool.run(results, form, dtype, "tree", world_size=world_size):
        for i, (got, expected) in enumerate(zip(found, one, strict=True)):
            assert torch.equal(got, expected), f"result {i} of {form.__name__}"


def test_the_usual_order_has_others(pool: RankPool) -> None:
    one, two = (pool.run(results, scattered, torch.float32, "rank", world_size=n)[0] for n in (1, 2))
    assert not torch.equal(one[0], two[0])


def near(group: ProcessGroup, dtype: torch.dtype) -> None:
    case = Case(group, dtype, "tree-16")
    sums = fusedtp.linear_all_reduce(case.part(case.x, 1), case.part(case.w, 1), **case.options)
    path = last_path()
    assert path.schedule == "fused"
    assert "a tree of 16 leaves" in path.reason
    expected, allowed = reference.matmul(case.x, case.w.t()), reference.bound(case.x, case.w.t(), dtype)
    reference.check(sums.detach(), expected, allowed, "a sum")
    # A row alone, among others, and at another position: the rounded sum is the same.
    for part in (slice(3, 4), slice(5, 20)):
        x = case.part(case.x, 1)[part].detach()
        with torch.no_grad():
            alone = fusedtp.linear_all_reduce(x, case.part(case.w, 1), **case.options)
        assert torch.equal(alone, sums[part])


@pytest.mark.parametrize(("dtype", "world_size"), spread(DTYPES, [2, 1]))
def test_a_tree_is_right_and_a_row_the_same_in_any_batch(pool: RankPool, dtype: torch.dtype, world_size: int) -> None:
    pool.run(near, dtype, world_size=world_size)


def moved(group: ProcessGroup, order: str) -> None:
    """Check that rows and columns have their bits wherever they begin in a tile."""
    x, w, rank = drawn(35, 40, dtype=torch.float32), drawn(37, 40, dtype=torch.float32, seed=1), group.rank()
    options: dict[str, Any] = {"group": group, "schedule": "fused", "order": order}
    first: list[Tensor] = []
    # Each remainder of a division by 4, which the rows of a library's tile are; `nox -s soak` takes all places.
    for by in range(16) if LARGE else (0, 1, 6, 11):
        cuts = [(by + 1, len(each) - by - 1) for each in (x, w)]
        own, cols = (each.split(cut)[rank] for each, cut in zip((x, w), cuts, strict=True))
        gathered = whole(fusedtp.all_gather_linear(own, cols, sizes=cuts[0], **options), 1, group)
        a, b = (each.chunk(2, 1)[rank] for each in (x, w))
        scattered = whole(fusedtp.linear_reduce_scatter(a, b, sizes=cuts[0], **options), 0, group)
        a, b = (each.roll(by, 0) for each in (a, b))
        reduced = (
            fusedtp.linear_all_reduce(a, b, algorithm=algorithm, **options).roll((-by, -by), (0, 1))
            for algorithm in ("one_shot", "two_shot")
        )
        first = first or [gathered, scattered]
        assert torch.equal(gathered, first[0]), f"gathered rows moved by {by}"
        for name, found in zip(("scattered", "one shot", "two shot"), (scattered, *reduced), strict=True):
            assert torch.equal(found, first[1]), f"{name}, rows moved by {by}"
    if order == "tree":
        assert torch.equal(*first)


def cores() -> list[str]:
    """Return processors that OpenBLAS can take this one for. At another position of a tile Haswell's kernels, unlike
    Sandybridge's and SkylakeX's, add a row in another order.
    """
    flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text()))
    needed = {"Haswell": {"avx2", "fma"}, "Sandybridge": {"avx"}, "Prescott": set()}
    return [core for core, its in needed.items() if its <= flags][:1]


@pytest.mark.parametrize("core", cores())
def test_rows_have_their_bits_wherever_they_begin_on_any_processor(core: str) -> None:
    with PoisonedPool(2, env={"OPENBLAS_CORETYPE": core, PRELOAD: ""}, timeout=300) as ranks:
        for order in ("rank", "tree"):
            ranks.run(moved, order)


def compiled(group: ProcessGroup) -> None:
    case = Case(group, torch.float32, "tree")
    x, w = case.part(case.x, 1), case.part(case.w, 1)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return fusedtp.linear_reduce_scatter(x, w, sizes=case.sizes, **case.options) * 2

    eager = torch.autograd.grad(call(x, w).square().sum(), (x, w))
    graph = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, expected in zip(torch.autograd.grad(graph(x, w).square().sum(), (x, w)), eager, strict=True):
        assert torch.equal(got, expected)


def test_a_compiler_takes_it(pool: RankPool) -> None:
    pool.run(compiled, world_size=2)


def subtrees(group: ProcessGroup, algorithm: str) -> None:
    """Check plain collectives, whose leaves are the ranks' tensors."""
    parts = [drawn(13, 11, dtype=torch.float32, seed=seed) for seed in range(group.size())]
    x = parts[group.rank()].clone().requires_grad_()
    while len(parts) > 1:
        parts = [first + second for first, second in zip(parts[::2], parts[1::2], strict=True)]
    y = fusedtp.all_reduce(x, group=group, order="tree", algorithm=algorithm)
    assert torch.equal(y, parts[0])
    sizes = rows(13, group)
    own = fusedtp.reduce_scatter(x, group=group, order="tree", sizes=sizes)
    assert torch.equal(own, parts[0].split(sizes)[group.rank()])
    (own.sum() + y.sum()).backward()
    assert x.grad is not None
    assert (x.grad == 2).all()


@pytest.mark.parametrize(("world_size", "algorithm"), [(4, "one_shot"), (4, "two_shot"), (2, "auto"), (1, "auto")])
def test_collectives_of_subtrees(pool: RankPool, world_size: int, algorithm: str) -> None:
    pool.run(subtrees, algorithm, world_size=world_size)


def apart(group: ProcessGroup, what: str) -> None:
    """Check the error for ranks with different lengths or orders."""
    case = Case(group, torch.float32, "tree")
    x, w = case.part(case.x, 1).detach(), case.part(case.w, 1).detach()
    one = "tree" if what == "length" else "rank" if what == "order" else "tree-16"
    length, order = 8 + group.rank() * (what == "length"), "tree" if group.rank() else one
    said = {
        "length": "contraction of a rank: [8] on rank 0, [9] on rank 1",
        "leaves": "order: a tree of 16 leaves on rank 0, a tree of 8 leaves on rank 1",
        "order": "order: that of ranks on rank 0, a tree of 8 leaves on rank 1",
    }[what]
    call = partial(fusedtp.linear_all_reduce, x[:, :length], w[:, :length], group=group, order=order)
    assert said in told(group, call)


@pytest.mark.parametrize("what", ["length", "leaves", "order"])
def test_ranks_that_mean_other_trees_are_told(pool: RankPool, what: str) -> None:
    pool.run(apart, what, world_size=2)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_element_is_activated_alike_in_a_tensor_of_any_size(name: str) -> None:
    z, up, dy = (drawn(9, 67, dtype=torch.float32, seed=seed) for seed in range(3))
    zs = [z, up][: 2 if name in GATED else 1]
    whole_y = activations.apply(name, zs, torch.empty_like(z))
    kept = [whole_y] if name in OF_RESULT else zs
    whole_dz = activations.gradients(name, [dy], kept)
    for part in (slice(0, 1), slice(2, 7)):
        for parts in ([each[part] for each in zs], [each[part].clone() for each in zs]):
            assert torch.equal(activations.apply(name, parts, torch.empty_like(parts[0])), whole_y[part])
        found = activations.gradients(name, [dy[part].clone()], [each[part].clone() for each in kept])
        assert all(torch.equal(got, expected[part]) for got, expected in zip(found, whole_dz, strict=True))
