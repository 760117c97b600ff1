"""The public functions: collectives on the baseline schedule, defaults, and unusual operands. Linears and their
options: test_options.py. Refused calls: test_bad_input.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import fusedtp
from fusedtp import reference
from fusedtp.bench.ranks import RankPool

from .harness import last_path, spread
from .oracle import cut

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FUNCTIONS: tuple[Callable[..., Tensor], ...] = (
    fusedtp.all_gather_linear, fusedtp.linear_reduce_scatter, fusedtp.linear_all_reduce, fusedtp.fsdp_linear,
)  # fmt: skip


def fresh_memory(group: ProcessGroup) -> bool:
    return all(bool(torch.empty(64, dtype=dtype).isnan().all()) for dtype in DTYPES)


def test_unwritten_results_would_show(pool: RankPool) -> None:
    assert all(pool.run(fresh_memory))


def good_collectives(group: ProcessGroup, dtype: torch.dtype) -> None:
    rank, options = group.rank(), {"group": group, "schedule": "unfused"}
    for shape in ((13,), (13, 5), (3, 7, 4), (0, 3)):
        torch.manual_seed(7)
        parts = [torch.randn(shape).to(dtype) for _ in range(group.size())]
        ref, allowed = reference.total(parts), reference.total_bound(parts, dtype, sum_dtype=dtype)
        reduced: Any = fusedtp.all_reduce(parts[rank], **options)  # type: ignore[arg-type]
        assert reduced.dtype == dtype
        reference.check(reduced, ref, allowed, "all-reduce")
        for dim, how in itertools.product(range(-len(shape), len(shape)), ("even", "lopsided", "on the last")):
            if how == "lopsided" and shape[dim] < group.size():
                continue
            sizes = cut(shape[dim], group.size(), how)
            mine = reference.chunk(parts[0], dim, rank, sizes)
            gathered: Any = fusedtp.all_gather(mine, gather_dim=dim, sizes=sizes, **options)  # type: ignore[arg-type]
            assert torch.equal(gathered, parts[0]), f"gather dim {dim} {sizes}"
            kept: Any = fusedtp.reduce_scatter(parts[rank], scatter_dim=dim, sizes=sizes, **options)  # type: ignore[arg-type]
            assert kept.dtype == dtype
            want = [reference.chunk(each, dim, rank, sizes) for each in (ref, allowed)]
            reference.check(kept, want[0], want[1], f"scatter dim {dim} {sizes}")


@pytest.mark.parametrize(("world_size", "dtype"), spread([1, 2, 3, 4], DTYPES[1:]), ids=str)
def test_collectives(pool: RankPool, world_size: int, dtype: torch.dtype) -> None:
    pool.run(good_collectives, dtype, world_size=world_size)


def zeros_and_subnormals(group: ProcessGroup, dtype: torch.dtype) -> None:
    """Check that sums of -0.0 are -0.0 and that subnormal numbers are kept, with every schedule."""
    tiny = torch.finfo(dtype).tiny
    x = torch.tensor([[-0.0, 0.0, tiny / 4, -tiny / 2]] * (2 * group.size())).to(dtype)
    if group.rank() > 0:
        x[:, 2:] = -0.0
    for schedule in ("unfused", "decomposed", "fused"):
        options: dict[str, Any] = {"group": group, "schedule": schedule}
        for out in (
            fusedtp.all_gather(x, **options)[: len(x)], fusedtp.all_reduce(x, **options),
            fusedtp.reduce_scatter(x, **options),
        ):  # fmt: skip
            want = torch.tensor([-0.0, 0.0, tiny / 4, -tiny / 2]).to(dtype).expand_as(out)
            assert torch.equal(out.view(torch.uint8), want.contiguous().view(torch.uint8)), (schedule, out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_collectives_of_zeros_and_subnormals(pool: RankPool, dtype: str) -> None:
    for world_size in (2, 3):
        pool.run(zeros_and_subnormals, getattr(torch, dtype), world_size=world_size)


def defaults(group: ProcessGroup) -> fusedtp.Path | None:
    """Check the default `sizes`: equal for gathers, as even as possible for scatters; and groups by name and mesh."""
    rank, world_size = group.rank(), group.size()
    mesh = torch.distributed.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    for each in (group, group.group_name, mesh):
        rows = fusedtp.all_gather(torch.full((2, 1), float(rank)), group=each, schedule="unfused")
        assert rows.flatten().tolist() == [peer for peer in range(world_size) for _ in range(2)]
    kept = fusedtp.reduce_scatter(torch.arange(7.0), group=group, schedule="unfused")
    assert torch.equal(kept, torch.arange(7.0).tensor_split(world_size)[rank] * world_size)
    with torch.no_grad():
        fusedtp.all_reduce(torch.ones(2, 2, requires_grad=True), group=group, schedule="unfused")
    return fusedtp.last_path()


def test_defaults_and_last_path(pool: RankPool) -> None:
    path = fusedtp.Path("all_reduce", "unfused", "asked for", shapes="a [2, 2], float32, 3 ranks")
    assert pool.run(defaults, world_size=3) == [path] * 3


def inputs_unchanged(group: ProcessGroup) -> None:
    """Check that results share no memory with operands, also in a world of one."""
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    before = x.clone(), weight.clone()
    for function in FUNCTIONS:
        function(x, weight, group=group, schedule="unfused").fill_(torch.nan)
    for collective in (fusedtp.all_gather, fusedtp.reduce_scatter, fusedtp.all_reduce):
        collective(x, group=group, schedule="unfused").fill_(torch.nan)
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.parametrize("world_size", [1, 2])
def test_results_are_fresh(pool: RankPool, world_size: int) -> None:
    pool.run(inputs_unchanged, world_size=world_size)


def test_without_a_process_group_the_remedy_is_named() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        fusedtp.all_reduce(torch.ones(2, 2))


def empty_everything(group: ProcessGroup) -> None:
    """Check that operands without elements work, whichever length is 0."""
    lengths = ((0, 5, 6), (4, 0, 6), (4, 5, 0), (0, 0, 0))
    for schedule, (rows, n, k) in itertools.product(("decomposed", "unfused", "fused"), lengths):
        options: dict[str, Any] = {"group": group, "schedule": schedule}
        x, weight = torch.ones(rows, k), torch.ones(n, k)
        total = torch.full((2 * rows, n), float(k))
        assert torch.equal(fusedtp.all_gather_linear(x, weight, **options), total)
        assert torch.equal(fusedtp.linear_all_reduce(x, weight, **options), 2 * total[:rows])
        assert torch.equal(fusedtp.linear_reduce_scatter(x, weight, **options), 2 * total[: rows // 2])
        assert fusedtp.all_reduce(x, **options).shape == x.shape


def test_nothing_is_no_mistake(pool: RankPool) -> None:
    pool.run(empty_everything, world_size=2)


def negated(group: ProcessGroup) -> None:
    """Check torch's lazily negated views: kernels read memory, which ignores the negative bit."""
    torch.manual_seed(5)
    x, dy = (torch.randn(rows, 6, dtype=torch.complex64).conj().imag for rows in (4, 8))
    assert x.is_neg()
    assert dy.is_neg()
    found = []
    for x_here, dy_here in ((x, dy), (x.clone(), dy.clone())):
        x_here, weight = x_here.detach().requires_grad_(), torch.eye(6, requires_grad=True)
        y = fusedtp.all_gather_linear(x_here, weight, group=group, schedule="fused")
        y.backward(dy_here)
        found.append((y, x_here.grad, weight.grad))
    for lazy, plain in zip(*found, strict=True):
        assert torch.equal(lazy, plain)
    # Beside float8 operands, which cannot be negated views.
    w, bias = fusedtp.scaled(torch.eye(6)), torch._neg_view(torch.arange(6.0))
    sums = [
        fusedtp.linear_all_reduce(
            fusedtp.scaled(torch.ones(8, 6)), w, b, residual=residual, group=group, schedule="fused",
            out_dtype=torch.float32,
        )
        for b, residual in ((bias, dy), (bias.clone(), dy.clone()))
    ]  # fmt: skip
    assert torch.equal(*sums)


def test_negated_views_are_what_they_stand_for(pool: RankPool) -> None:
    pool.run(negated, world_size=2)


def on_one_rank(group: ProcessGroup) -> None:
    """Check autograd on one rank: a plain linear, unless an option needs more."""
    x = torch.randn(2, 5, 8, requires_grad=True)
    w, bias = torch.randn(6, 8, requires_grad=True), torch.randn(6, requires_grad=True)
    expected = F.linear(x, w, bias)
    for function in FUNCTIONS:
        y = function(x, w, bias, group=group)
        assert torch.equal(y, expected)
        assert y.grad_fn is not None
        assert expected.grad_fn is not None
        assert y.grad_fn.name() == expected.grad_fn.name()
        path = last_path()
        assert (path.schedule, path.reason) == ("unfused", "one rank has nothing to send")
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (ddw,) = torch.autograd.grad(dx.sum(), w)
        (again,) = torch.autograd.grad(F.linear(x, w, bias).square().sum(), x, create_graph=True)
        assert torch.equal(ddw, torch.autograd.grad(again.sum(), w)[0])
    with pytest.raises(ValueError, match="schedule 'fused' multiplies"):
        fusedtp.all_gather_linear(x.double(), w.double(), group=group, schedule="fused")
    with torch.inference_mode():
        made = torch.randn(5, 8)
    with pytest.raises(ValueError, match="inference_mode"):
        fusedtp.all_gather_linear(made, w, group=group)
    own = fusedtp.all_gather_linear(x, w, bias, group=group, activation="relu")
    assert own.grad_fn is not None
    assert own.grad_fn.name() == "_EagerBackward"


def test_one_ranks_graph_is_the_librarys(pool: RankPool) -> None:
    pool.run(on_one_rank, world_size=1)
