"""`Scaled` operands are right in every function and schedule, at the edges too. One process: test_scaled.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import fusedtp
from fusedtp import Scaled, reference, scaled
from fusedtp.bench.ranks import RankPool
from fusedtp.calls.bound import BoundTask
from fusedtp.float8 import BLOCK, E8M0
from fusedtp.scaled import Quantized
from fusedtp.schedules.local import mm

from .bounds import Bounds
from .harness import spread
from .oracle import cut, whole
from .soak.layouts import OF_ANY, laid_out

SCHEDULES = ("unfused", "decomposed", "fused")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
N, K = 37, 40
# For mxfp8: five blocks of the contraction, the last block shorter.
IN_BLOCKS = 150


def make(shape: Sequence[int], seed: int, recipe: str, dtype: torch.dtype = E4M3) -> Scaled:
    """Make rows of very different magnitudes, and blocks too, so that a wrong scale is visible, in any layout."""
    x = whole(shape, torch.float32, seed) * torch.logspace(-1.2, 1.2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    if recipe == "mxfp8":
        x = x * 2.0 ** (torch.arange(shape[-1]) // BLOCK % 3 - 1)
    made = scaled(x, recipe, dtype=dtype)  # type: ignore[arg-type]
    scale = laid_out(made.scale, OF_ANY[seed // 6 % 6]) if made.scale.ndim else made.scale
    return Scaled(laid_out(made.data, OF_ANY[seed % 6]), scale)


def allowed(a: Tensor, b: Tensor, out: torch.dtype, ranks: int = 1, bias: Tensor | None = None) -> Tensor:
    """Return the allowed error of exact values: products of data are exact in float32; scaling rounds twice more."""
    scaling = 4 * torch.finfo(torch.float32).eps * (a.abs() @ b.abs())
    return reference.bound(a, b, out, ranks, bias=bias, sum_dtype=out if ranks > 1 else torch.float32) + scaling


def values(x: Scaled) -> Tensor:
    """Return the values in float64."""
    scale = x.scale.float().double()
    if x.scale.dtype == E8M0:
        scale = torch.stack([scale[..., k // BLOCK] for k in range(x.data.shape[-1])], -1) if scale.numel() else 1.0
    return x.data.double() * scale


def of_features(recipe: str, size: int, how: str) -> tuple[int, tuple[int, ...]]:
    """Return the number of features and each rank's part for a gather; parts are whole blocks, except at the end."""
    if recipe != "mxfp8":
        return K, cut(K, size, how)
    sizes = [BLOCK * count for count in cut(-(-IN_BLOCKS // BLOCK), size, how)]
    last = max(rank for rank, length in enumerate(sizes) if length)
    sizes[last] -= sum(sizes) - IN_BLOCKS
    return IN_BLOCKS, tuple(sizes)


def right(y: Tensor, x: Tensor, w: Tensor, name: str, bias: Tensor | None = None) -> None:
    """Check y = x [.., K] @ w [K, N] + bias."""
    rows = x.flatten(0, -2)
    expected = rows @ w if bias is None else rows @ w + bias.double()
    assert y.shape == (*x.shape[:-1], w.shape[1])
    reference.check(y.flatten(0, -2), expected, allowed(rows, w, y.dtype, bias=bias), name)


def gathers(group: ProcessGroup, schedule: str, recipe: str, how: str, out: torch.dtype, dtypes: Any) -> None:
    """Check x gathered by rows and by features, with one weight, several, and an activation; and a fully sharded
    weight, whose rows travel with their scales.
    """
    rank, M, bias = group.rank(), 21, laid_out(whole((N,), out, 3), "stepped")
    given: dict[str, Any] = {"group": group, "schedule": schedule, "out_dtype": out}
    call = partial(fusedtp.all_gather_linear, **given)
    rows, (K, features) = cut(M, group.size(), how), of_features(recipe, group.size(), how)
    weights = [make((n, K), 50 + n + rank, recipe, dtypes[1]) for n in (N, 5)]
    ws = [values(w).t() for w in weights]
    for dim, sizes in ((0, rows), (-1, features)):
        parts = [make((size, K) if dim == 0 else (M, size), 7 + r, recipe, dtypes[0]) for r, size in enumerate(sizes)]
        x = torch.cat([values(part) for part in parts], dim)
        y = call(parts[rank], weights[0], bias, gather_dim=dim, sizes=sizes)
        assert y.dtype == out
        assert not y.requires_grad
        both: Any = call(parts[rank], weights, [bias, None], gather_dim=dim, sizes=sizes)  # type: ignore[call-overload]
        right(y, x, ws[0], f"gather {dim}", bias)
        right(both[0], x, ws[0], f"first of two {dim}", bias)
        right(both[1], x, ws[1], f"second of two {dim}")
        relu: Any = call(parts[rank], weights[0], bias, gather_dim=dim, sizes=sizes, activation="relu")
        assert torch.equal(relu, F.relu(y))
    # A batch of sequences, split along the sequence.
    parts = [make((3, size, K), 7 + r, recipe, dtypes[0]) for r, size in enumerate(rows)]
    x = torch.cat([values(part) for part in parts], 1)
    right(call(parts[rank], weights[0], gather_dim=1, sizes=rows), x, ws[0], "batch")
    sizes = cut(N, group.size(), how)
    shards = [make((size, K), 50 + r, recipe, dtypes[1]) for r, size in enumerate(sizes)]
    mine, w = make((2, 9, K), 7 + rank, recipe, dtypes[0]), torch.cat([values(each) for each in shards]).t()
    right(fusedtp.fsdp_linear(mine, shards[rank], bias, sizes=sizes, **given), values(mine), w, "fsdp", bias)


def sums(
    group: ProcessGroup, schedule: str, recipe: str, how: str, out: torch.dtype, dtypes: Any, M: int = 21
) -> None:  # fmt: skip
    """Check products with a split contraction; the sum is scattered by rows, by columns, or on all ranks.
    Of many rows, by rows alone: on a CPU a tile of up to 64 has rows of several ranks.
    """
    rank, size = group.rank(), group.size()
    features = cut(of_features(recipe, size, how)[0], size, how)
    xs = [make((M, part), 7 + r, recipe, dtypes[0]) for r, part in enumerate(features)]
    ws = [make((N, part), 70 + r, recipe, dtypes[1]) for r, part in enumerate(features)]
    a, b = torch.cat([values(x) for x in xs], 1), torch.cat([values(w) for w in ws], 1).t()
    bias, residual = laid_out(whole((N,), out, 3), "transposed"), laid_out(whole((M, N), out, 4), "diagonal")
    total, off = a @ b + bias.double(), allowed(a, b, out, size, bias)
    given: dict[str, Any] = {"group": group, "schedule": schedule, "out_dtype": out}
    for dim, sizes in ((0, cut(M, size, how)), (-1, cut(N, size, how))):
        y = fusedtp.linear_reduce_scatter(xs[rank], ws[rank], bias, scatter_dim=dim, sizes=sizes, **given)
        assert y.dtype == out
        expected, its = (reference.chunk(each, dim % 2, rank, sizes) for each in (total, off))
        reference.check(y, expected, its, f"scatter {dim}")
        if M > 64:
            return
    off = off + 2 * torch.finfo(out).eps * residual.double().abs()
    for algorithm in ("auto",) if schedule == "unfused" else ("one_shot", "two_shot"):
        y = fusedtp.linear_all_reduce(xs[rank], ws[rank], bias, residual=residual, algorithm=algorithm, **given)
        reference.check(y, total + residual.double(), off, algorithm)


def within_bounds(group: ProcessGroup, check: Callable[..., None], *args: Any) -> None:
    """Run a check while kernels' addresses are checked."""
    with Bounds():
        check(group, *args)


OUTS = (torch.bfloat16, torch.float32, torch.float16)
DTYPES = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
FNUZ_E4M3, FNUZ_E5M2 = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
FNUZ = ((FNUZ_E4M3, FNUZ_E4M3), (FNUZ_E5M2, FNUZ_E4M3), (FNUZ_E4M3, FNUZ_E5M2))


@pytest.mark.parametrize(
    ("schedule", "world_size", "recipe", "how", "out", "dtypes"),
    spread(
        [*SCHEDULES * 4], [1, 2, 3, 4, 4, 2, 3, 4, 2, 4, 2, 3], ["rowwise", "tensorwise", "mxfp8", "rowwise", "mxfp8"],
        ["even", "lopsided", "lopsided", "on the last", "lopsided"], OUTS * 2 + OUTS[:1], DTYPES * 3 + DTYPES[:1] * 2,
    )
    # AMD's own formats, multiplied wherever torch can cast to them.
    + spread(
        [*SCHEDULES[:2] * 3], [1, 2, 3, 4, 2, 4], ["rowwise", "tensorwise", "mxfp8"],
        ["even", "lopsided", "on the last"], OUTS[:2], FNUZ,
    ),
)  # fmt: skip
def test_functions_are_right(
    pool: RankPool, schedule: str, world_size: int, recipe: str, how: str, out: torch.dtype, dtypes: Any
) -> None:
    more = (partial(sums, M=69),) if schedule == "fused" and world_size > 1 else ()
    for check in (gathers, sums, *more):
        pool.run(within_bounds, check, schedule, recipe, how, out, dtypes, world_size=world_size)


def bytes_of_a_gather(group: ProcessGroup) -> None:
    """Check the bytes sent: float8 takes a byte for each element and 16 bytes a row, for its scale or up to 16 block
    scales; bfloat16 takes two bytes for each element.
    """
    x, weight, sizes = torch.randn(6, 64), torch.randn(9, 64), []
    run = BoundTask.run

    def counted(ready: BoundTask, operands: Any) -> Any:
        outs = run(ready, operands)
        sizes.append(ready.half_bytes)
        return outs

    with mock.patch.object(BoundTask, "run", counted):
        for schedule in ("decomposed", "fused"):
            call = partial(fusedtp.all_gather_linear, group=group, schedule=schedule)
            call(scaled(x), scaled(weight))
            call(scaled(x, "mxfp8"), scaled(weight, "mxfp8"))
            call(x.bfloat16(), weight.bfloat16())
    with torch.no_grad():
        # Under no_grad the bias's gradient is not asked for.
        assert call(scaled(x), scaled(weight), torch.ones(9).bfloat16().requires_grad_()).dtype == torch.bfloat16
    rows = 6 * group.size()
    # A CPU reads chunks of float8 where they are, but stacks few rows of bfloat16.
    for of_float8, (narrow, in_blocks, wide) in ((6, sizes[:3]), (rows, sizes[3:])):
        # Regions begin at multiples of 64 bytes.
        assert 0 <= narrow - of_float8 * (64 + 16) < 64 * group.size()
        assert in_blocks == narrow
        assert 0 <= wide - rows * 2 * 64 < 64 * group.size()


def test_half_the_bytes_travel(pool: RankPool) -> None:
    pool.run(bytes_of_a_gather, world_size=2)


def as_without_ranks(group: ProcessGroup, schedule: str) -> None:
    """Check that without a sum over ranks shards have the scales and data of the whole, and results have its values."""
    x, w = whole((12, 64), torch.float32, 0), whole((16, 64), torch.float32, 1)
    parts = x.split(cut(12, group.size(), "lopsided"))
    for recipe in ("rowwise", "tensorwise"):
        one = scaled(x, recipe)  # type: ignore[arg-type]
        options = {"group": group} if recipe == "tensorwise" else {}
        shard = scaled(parts[group.rank()].contiguous(), recipe, **options)  # type: ignore[arg-type]
        at = slice(*[sum(map(len, parts[: group.rank() + i])) for i in (0, 1)])
        assert torch.equal(shard.data.view(torch.uint8), one.data[at].view(torch.uint8))
        assert torch.equal(shard.scale, one.scale[at] if one.scale.ndim else one.scale)
        y = fusedtp.all_gather_linear(
            shard, scaled(w, recipe), group=group, schedule=schedule, sizes=tuple(map(len, parts))  # type: ignore
        )  # fmt: skip
        expected = mm(Quantized.of(one, torch.bfloat16), Quantized.of(scaled(w, recipe), torch.bfloat16).t())  # type: ignore
        assert torch.equal(y, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shards_have_the_scales_of_the_whole(pool: RankPool, schedule: str) -> None:
    pool.run(as_without_ranks, schedule, world_size=3)


def without_a_contraction(group: ProcessGroup, schedule: str) -> None:
    """Check that an empty contraction gives zeros and the bias, in results and gradients, not the poison in memory."""
    call = partial(fusedtp.all_gather_linear, group=group, schedule=schedule)
    y = call(scaled(torch.zeros(4, 0)), scaled(torch.zeros(8, 0)), torch.ones(8).bfloat16())
    assert torch.equal(y, torch.ones_like(y))
    assert y.shape == (4 * group.size(), 8)
    for recipe in ("rowwise", "tensorwise"):
        w = torch.randn(6, 8, requires_grad=True)
        x = torch.randn(0, 8, requires_grad=True)
        options: Any = {"group": group, "schedule": schedule, "float8": recipe}
        fusedtp.linear_reduce_scatter(x, w, scatter_dim=-1, **options).sum().backward()
        assert w.grad is not None
        assert w.grad.eq(0).all()
        w.grad = None
        call(x, torch.cat([w] * group.size(), 1), gather_dim=-1, float8=recipe).sum().backward()
        assert w.grad.eq(0).all()


def one_feature(group: ProcessGroup, schedule: str) -> None:
    """Check that each row has its own scale, also if a dim of one element has an arbitrary stride."""
    world_size, rank = group.size(), group.rank()
    generator = torch.Generator().manual_seed(3)
    call = partial(fusedtp.all_gather_linear, group=group, schedule=schedule, gather_dim=-1)
    for rows, features, recipe in itertools.product((1, 5), (1, 2), ("rowwise", "tensorwise")):
        x = torch.randn(rows, features * world_size, generator=generator) * 4.0 ** torch.arange(rows)[:, None]
        w = torch.randn(4, features * world_size, generator=generator)
        mine = x[:, rank * features : (rank + 1) * features]
        a, b = scaled(mine, recipe, power_of_two=True), scaled(w, recipe, power_of_two=True)  # type: ignore[arg-type]
        parts = [torch.empty(rows, features) for _ in range(world_size)]
        dist.all_gather(parts, a.values(), group=group)
        exact = torch.cat(parts, 1).double() @ b.values().double().t()
        y = call(a, b, out_dtype=torch.float32).double()
        torch.testing.assert_close(y, exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))
        z = call(mine, w, float8=recipe)
        # Two operands with three bits of mantissa.
        exact, most = x.double() @ w.double().t(), 0.15 * (x.abs() @ w.abs().t()).double()
        assert ((z.double() - exact).abs() <= most).all(), (rows, features, recipe)


def not_finite(group: ProcessGroup, schedule: str) -> None:
    """Check that NaN and infinities stay in their own rows and columns."""
    dtypes = (E4M3, E5M2, *((FNUZ_E4M3,) if schedule != "fused" else ()))
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


def nan_scale(group: ProcessGroup, schedule: str) -> None:
    """Check that a block with a NaN scale spoils its own row only; the last part ends inside a kernel's block of K."""
    rank, sizes = group.rank(), (480, 32)
    # Of positive numbers only, as infinities of both signs would make a NaN too.
    x, w = scaled(0.5 + torch.rand(5, 512), "mxfp8"), scaled(0.5 + torch.rand(6, 512), "mxfp8")
    w.scale.view(torch.uint8)[3, 0] = 255
    mine = x.split(sizes, 1)[rank]
    y = fusedtp.all_gather_linear(mine, w, group=group, gather_dim=-1, sizes=sizes, schedule=schedule)
    assert y[:, 3].isnan().all()
    assert y[:, [0, 1, 2, 4, 5]].isfinite().all()


def autocast(group: ProcessGroup, schedule: str) -> None:
    """Check that torch.autocast does not change the products of float8."""
    x, w = scaled(torch.randn(6, 64)), scaled(torch.randn(24, 64))
    half = [scaled(torch.randn(6, 32), "tensorwise"), scaled(torch.randn(24, 32), "tensorwise")]
    given: Any = {"group": group, "schedule": schedule, "out_dtype": torch.float32}
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: fusedtp.all_gather_linear(x, w, **given),
        lambda: fusedtp.all_gather_linear(half[0], w, gather_dim=-1, **given),
        lambda: fusedtp.linear_reduce_scatter(*half, **given),
        lambda: fusedtp.fsdp_linear(x, w, **given),
    )
    for call in calls if group.size() > 1 else calls[:1]:
        expected = call()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(call(), expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("check", [without_a_contraction, one_feature, not_finite, nan_scale, autocast])
def test_edges(pool: RankPool, check: Callable[..., None], schedule: str) -> None:
    for world_size in (1, 2) if schedule == "unfused" and check is not nan_scale else (2,):
        pool.run(within_bounds, check, schedule, world_size=world_size)


def transformed(group: ProcessGroup) -> None:
    """Check that torch.func's transforms are refused before anything is sent."""
    w = torch.randn(8, 32)

    def call(x: Tensor) -> Tensor:
        one = torch.ones(())
        return fusedtp.all_gather_linear(Scaled(x.to(E4M3), one), Scaled(w.to(E4M3), one), group=group)

    with (
        mock.patch.object(BoundTask, "run", side_effect=AssertionError("it is sent")),
        pytest.raises(NotImplementedError, match=r"not implemented in torch\.func's transforms"),
    ):
        torch.vmap(call)(torch.randn(2, 4, 32))


def test_transforms_are_refused(pool: RankPool) -> None:
    pool.run(transformed, world_size=2)
