"""float8 where nothing is summed, where values are not finite, and under what torch puts around a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import Scaled, scaled
from fusedtp.bench.ranks import RankPool
from fusedtp.calls.dispatch import Ready

from .test_float8 import E4M3, E5M2, SCHEDULES


def without_a_contraction(group: ProcessGroup, schedule: str) -> None:
    """Nothing is summed: zeros and the bias, in results and in gradients, not what was in memory, which is poisoned."""
    call = partial(fusedtp.all_gather_linear, group=group, schedule=schedule)
    y = call(scaled(torch.zeros(4, 0)), scaled(torch.zeros(8, 0)), torch.ones(8).bfloat16())
    assert y.eq(1).all()
    assert y.shape == (4 * group.size(), 8)
    for recipe in ("rowwise", "tensorwise"):
        w = torch.randn(6, 8, requires_grad=True)
        x = torch.randn(0, 8, requires_grad=True)
        fusedtp.linear_reduce_scatter(
            x, w, group=group, schedule=schedule, scatter_dim=-1, float8=recipe
        ).sum().backward()  # type: ignore
        assert w.grad is not None
        assert w.grad.eq(0).all()
        w.grad = None
        call(x, torch.cat([w] * group.size(), 1), gather_dim=-1, float8=recipe).sum().backward()
        assert w.grad.eq(0).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_empty_contraction_makes_zeros(pool: RankPool, schedule: str, world_size: int) -> None:
    pool.run(without_a_contraction, schedule, world_size=world_size)


def one_feature(group: ProcessGroup, schedule: str) -> None:
    """Each row has its own scale, also where a dim of one element has whatever stride."""
    world_size, rank = group.size(), group.rank()
    generator = torch.Generator().manual_seed(3)
    for rows, features, recipe in itertools.product((1, 5), (1, 2), ("rowwise", "tensorwise")):
        x = torch.randn(rows, features * world_size, generator=generator) * 4.0 ** torch.arange(rows)[:, None]
        w = torch.randn(4, features * world_size, generator=generator)
        mine = x[:, rank * features : (rank + 1) * features]
        a, b = scaled(mine, recipe, power_of_two=True), scaled(w, recipe, power_of_two=True)  # type: ignore[arg-type]
        y = fusedtp.all_gather_linear(
            a, b, group=group, schedule=schedule, gather_dim=-1, out_dtype=torch.float32
        )  # fmt: skip
        parts = [torch.empty(rows, features) for _ in range(world_size)]
        dist.all_gather(parts, a.values(), group=group)
        exact = torch.cat(parts, 1).double() @ b.values().double().t()
        torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))
        z = fusedtp.all_gather_linear(mine, w, group=group, schedule=schedule, gather_dim=-1, float8=recipe)  # type: ignore[arg-type]
        # Two operands of three bits behind the first.
        exact, allowed = x.double() @ w.double().t(), 0.15 * (x.abs() @ w.abs().t()).double()
        assert ((z.double() - exact).abs() <= allowed).all(), (rows, features, recipe)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_feature_has_the_scale_of_its_row(pool: RankPool, schedule: str, world_size: int) -> None:
    pool.run(one_feature, schedule, world_size=world_size)


def not_finite(group: ProcessGroup, schedule: str) -> None:
    """NaN and infinities come out where they went in, and nowhere else."""
    dtypes = (E4M3, E5M2, *((torch.float8_e4m3fnuz,) if schedule != "fused" else ()))
    for dtype, recipe in itertools.product(dtypes, ("rowwise", "mxfp8")):
        x, w = torch.ones(4, 32), torch.ones(5, 32)
        x[1, 3], x[2, 4], w[3, 5] = float("nan"), float("inf"), float("nan")
        a, b = (scaled(each, recipe, dtype=dtype) for each in (x, w))  # type: ignore[arg-type]
        y = fusedtp.all_gather_linear(a, b, group=group, schedule=schedule, out_dtype=torch.float32)
        for rows in y.split(4):
            assert rows[1].isnan().all()
            assert not rows[2].isfinite().any()
            assert rows[:, 3].isnan().all()
            assert torch.allclose(rows[[0, 3]][:, [0, 1, 2, 4]], torch.tensor(32.0))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_not_finite_comes_out(pool: RankPool, schedule: str) -> None:
    pool.run(not_finite, schedule, world_size=2)


def autocast(group: ProcessGroup, schedule: str) -> None:
    """Under torch.autocast the products of float8 stay as exact as they are."""
    x, w = scaled(torch.randn(6, 64)), scaled(torch.randn(24, 64))
    half = [scaled(torch.randn(6, 32), "tensorwise"), scaled(torch.randn(24, 32), "tensorwise")]
    given: Any = {"group": group, "schedule": schedule, "out_dtype": torch.float32}
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: fusedtp.all_gather_linear(x, w, **given),
        lambda: fusedtp.all_gather_linear(half[0], w, gather_dim=-1, **given),
        lambda: fusedtp.linear_reduce_scatter(*half, **given), lambda: fusedtp.linear_all_reduce(*half, **given),
        lambda: fusedtp.fsdp_linear(x, w, **given),
    )  # fmt: skip
    for call in calls if group.size() > 1 else calls[:1]:
        expected = call()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(call(), expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_autocast_changes_no_product(pool: RankPool, schedule: str, world_size: int) -> None:
    pool.run(autocast, schedule, world_size=world_size)


def transformed(group: ProcessGroup) -> None:
    """torch.func's transforms are refused before anything is sent."""
    w = torch.randn(8, 32)

    def call(x: Tensor) -> Tensor:
        one = torch.ones(())
        return fusedtp.all_gather_linear(Scaled(x.to(E4M3), one), Scaled(w.to(E4M3), one), group=group)

    with (
        mock.patch.object(Ready, "run", side_effect=AssertionError("it is sent")),
        pytest.raises(NotImplementedError, match=r"not implemented in torch\.func's transforms"),
    ):
        torch.vmap(call)(torch.randn(2, 4, 32))


def test_transforms_are_refused(pool: RankPool) -> None:
    pool.run(transformed, world_size=2)
