"""Scaled float8 operands: right by every function and schedule, and refused where they are not whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import fusedtp
from fusedtp import Scaled, reference, scaled
from fusedtp.bench.ranks import RankPool
from fusedtp.calls.dispatch import Ready
from fusedtp.float8 import BLOCK, E8M0
from fusedtp.scaled import Quantized
from fusedtp.schedules.local import by_library, mm, of_data

from .bounds import Bounds
from .harness import spread
from .oracle import cut, whole

SCHEDULES = ("unfused", "decomposed", "fused")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
N, K = 37, 40
# Of mxfp8: five blocks of the contraction, the last of which is no whole one.
IN_BLOCKS = 150


def make(shape: Sequence[int], seed: int, recipe: str, dtype: torch.dtype = E4M3) -> Scaled:
    """Rows of very different magnitudes, and blocks of them, so that a scale of another one is seen."""
    x = whole(shape, torch.float32, seed) * torch.logspace(-1.2, 1.2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    if recipe == "mxfp8":
        x = x * 2.0 ** (torch.arange(shape[-1]) // BLOCK % 3 - 1)
    return scaled(x, recipe, dtype=dtype)  # type: ignore[arg-type]


def allowed(a: Tensor, b: Tensor, out: torch.dtype, ranks: int = 1, bias: Tensor | None = None) -> Tensor:
    """Of values as they are: the data's products are exact in float32, and scaled by two roundings more."""
    scaling = 4 * torch.finfo(torch.float32).eps * (a.abs() @ b.abs())
    return reference.bound(a, b, out, ranks, bias=bias, sum_dtype=out if ranks > 1 else torch.float32) + scaling


def values(x: Scaled) -> Tensor:
    """In float64."""
    scale = x.scale.float().double()
    if x.scale.dtype == E8M0:
        scale = torch.stack([scale[..., k // BLOCK] for k in range(x.data.shape[-1])], -1) if scale.numel() else 1.0
    return x.data.double() * scale


def of_features(recipe: str, size: int, how: str) -> tuple[int, tuple[int, ...]]:
    """How many features there are, and every rank's, if they are gathered: in blocks whole ones, but for the end."""
    if recipe != "mxfp8":
        return K, cut(K, size, how)
    sizes = [BLOCK * count for count in cut(-(-IN_BLOCKS // BLOCK), size, how)]
    last = max(rank for rank, length in enumerate(sizes) if length)
    sizes[last] -= sum(sizes) - IN_BLOCKS
    return IN_BLOCKS, tuple(sizes)


def gathers(group: ProcessGroup, schedule: str, recipe: str, how: str, out: torch.dtype, dtypes: Any) -> None:
    """x gathered by rows and by features; one weight and several, with an activation too."""
    rank, ranks, M = group.rank(), range(group.size()), 21
    call = partial(fusedtp.all_gather_linear, group=group, schedule=schedule, out_dtype=out)
    rows, (K, features) = cut(M, group.size(), how), of_features(recipe, group.size(), how)
    weights = [make((n, K), 50 + n + rank, recipe, dtypes[1]) for n in (N, 5)]
    bias = whole((N,), out, 3)
    for dim, sizes, shape in ((0, rows, (M, K)), (-1, features, (M, K))):
        parts = [make((size, K) if dim == 0 else (M, size), 7 + r, recipe, dtypes[0]) for r, size in enumerate(sizes)]
        x = torch.cat([values(part) for part in parts], dim)
        assert x.shape == shape
        ws = [values(w).t() for w in weights]
        y = call(parts[rank], weights[0], bias, gather_dim=dim, sizes=sizes)
        assert y.dtype == out
        assert not y.requires_grad
        reference.check(y, x @ ws[0] + bias.double(), allowed(x, ws[0], out, bias=bias), f"gather {dim}")
        both: Any = call(parts[rank], weights, [bias, None], gather_dim=dim, sizes=sizes)  # type: ignore[call-overload]
        reference.check(both[0], x @ ws[0] + bias.double(), allowed(x, ws[0], out, bias=bias), f"first of two {dim}")
        reference.check(both[1], x @ ws[1], allowed(x, ws[1], out), f"second of two {dim}")
        relu: Any = call(parts[rank], weights[0], bias, gather_dim=dim, sizes=sizes, activation="relu")
        assert torch.equal(relu, F.relu(y))
    # A batch of sequences, split along the middle.
    parts = [make((3, size, K), 7 + r, recipe, dtypes[0]) for r, size in enumerate(rows)]
    x = torch.cat([values(part) for part in parts], 1)
    y = call(parts[rank], weights[0], gather_dim=1, sizes=rows)
    off = allowed(x.flatten(0, 1), values(weights[0]).t(), out).view(3, M, N)
    reference.check(y, x @ values(weights[0]).t(), off, "batch")
    assert len(ranks) == group.size()


def sums(group: ProcessGroup, schedule: str, recipe: str, how: str, out: torch.dtype, dtypes: Any) -> None:
    """Each rank has a part of the contraction; the sum is scattered by rows, by columns, or on all ranks."""
    rank, size, M = group.rank(), group.size(), 21
    features = cut(of_features(recipe, size, how)[0], size, how)
    xs = [make((M, part), 7 + r, recipe, dtypes[0]) for r, part in enumerate(features)]
    ws = [make((N, part), 70 + r, recipe, dtypes[1]) for r, part in enumerate(features)]
    a, b = torch.cat([values(x) for x in xs], 1), torch.cat([values(w) for w in ws], 1).t()
    bias, residual = whole((N,), out, 3), whole((M, N), out, 4)
    total, off = a @ b + bias.double(), allowed(a, b, out, size, bias)
    given: dict[str, Any] = {"group": group, "schedule": schedule, "out_dtype": out}
    for dim, sizes in ((0, cut(M, size, how)), (-1, cut(N, size, how))):
        y = fusedtp.linear_reduce_scatter(xs[rank], ws[rank], bias, scatter_dim=dim, sizes=sizes, **given)
        assert y.dtype == out
        expected, its = (reference.chunk(each, dim % 2, rank, sizes) for each in (total, off))
        reference.check(y, expected, its, f"scatter {dim}")
    off = off + 2 * torch.finfo(out).eps * residual.double().abs()
    for algorithm in ("auto",) if schedule == "unfused" else ("one_shot", "two_shot"):
        y = fusedtp.linear_all_reduce(xs[rank], ws[rank], bias, residual=residual, algorithm=algorithm, **given)
        reference.check(y, total + residual.double(), off, algorithm)


def sharded(group: ProcessGroup, schedule: str, recipe: str, how: str, out: torch.dtype, dtypes: Any) -> None:
    """A fully sharded weight, whose rows travel with their scales."""
    rank, sizes, bias = group.rank(), cut(N, group.size(), how), whole((N,), out, 3)
    K, _ = of_features(recipe, group.size(), how)
    shards = [make((size, K), 50 + r, recipe, dtypes[1]) for r, size in enumerate(sizes)]
    x, w = make((2, 9, K), 7 + rank, recipe, dtypes[0]), torch.cat([values(each) for each in shards]).t()
    y = fusedtp.fsdp_linear(x, shards[rank], bias, group=group, sizes=sizes, schedule=schedule, out_dtype=out)
    rows = values(x).flatten(0, 1)
    reference.check(y.flatten(0, 1), rows @ w + bias.double(), allowed(rows, w, out, bias=bias), "fsdp")


def within_bounds(group: ProcessGroup, check: Callable[..., None], *args: Any) -> None:
    """No kernel touches what it was not given."""
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
    # AMD's own, which is multiplied wherever torch can cast to it.
    + spread(
        [*SCHEDULES[:2] * 3], [1, 2, 3, 4, 2, 4], ["rowwise", "tensorwise", "mxfp8"],
        ["even", "lopsided", "on the last"], OUTS[:2], FNUZ,
    ),
)  # fmt: skip
def test_functions_are_right(
    pool: RankPool, schedule: str, world_size: int, recipe: str, how: str, out: torch.dtype, dtypes: Any
) -> None:
    for check in (gathers, sums, sharded):
        pool.run(within_bounds, check, schedule, recipe, how, out, dtypes, world_size=world_size)


def bytes_of_a_gather(group: ProcessGroup) -> None:
    """What is sent of float8: a byte an element, and 16 bytes a row for its scale, or for up to 16 blocks' scales; of
    bfloat16 two bytes an element.
    """
    x, weight, sizes = torch.randn(6, 64), torch.randn(9, 64), []
    run = Ready.run

    def counted(ready: Ready, operands: Any) -> Any:
        outs = run(ready, operands)
        sizes.append(ready.half_bytes)
        return outs

    with mock.patch.object(Ready, "run", counted):
        for schedule in ("decomposed", "fused"):
            call = partial(fusedtp.all_gather_linear, group=group, schedule=schedule)
            call(scaled(x), scaled(weight))
            call(scaled(x, "mxfp8"), scaled(weight, "mxfp8"))
            call(x.bfloat16(), weight.bfloat16())
    with torch.no_grad():
        # Nothing asks for the gradient that a bias could have.
        assert call(scaled(x), scaled(weight), torch.ones(9).bfloat16().requires_grad_()).dtype == torch.bfloat16
    rows = 6 * group.size()
    for narrow, in_blocks, wide in (sizes[:3], sizes[3:]):
        # Regions begin at multiples of 64 bytes.
        assert 0 <= narrow - rows * (64 + 16) < 64 * group.size()
        assert in_blocks == narrow
        assert 0 <= wide - rows * 2 * 64 < 64 * group.size()


def test_half_the_bytes_travel(pool: RankPool) -> None:
    pool.run(bytes_of_a_gather, world_size=2)


def as_without_ranks(group: ProcessGroup, schedule: str) -> None:
    """Where nothing is summed between ranks, shards have the scales and data of the whole, and results its values."""
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


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales(dtype: torch.dtype, power_of_two: bool) -> None:
    """The largest magnitude is kept, to half a step of float8, and no value is farther off than that."""
    x = torch.randn(50, 33) * torch.logspace(-30, 30, 50)[:, None]
    largest, eps = torch.finfo(dtype).max, torch.finfo(dtype).eps
    for recipe in ("rowwise", "tensorwise"):
        made = scaled(x, recipe, dtype=dtype, power_of_two=power_of_two)  # type: ignore[arg-type]
        back, most = made.values(), made.data.float().abs().amax(-1)
        assert bool((most <= largest).all())
        step = torch.finfo(dtype).smallest_normal * eps * made.scale
        assert bool(((back - x).abs() <= eps / 2 * 1.001 * x.abs() + step).all())
        if recipe == "rowwise":
            assert bool((most > largest / 2 * (1 - eps)).all())
        if power_of_two:
            assert torch.equal(made.scale, 2.0 ** made.scale.log2().round())


def test_what_no_scale_can_hold() -> None:
    """Zeros, subnormal numbers, infinities and NaN spoil nothing but their own row."""
    rows = torch.ones(7, 4)
    rows[1] = 0
    rows[2] = 1e-45
    rows[3, 0] = float("inf")
    rows[4, 1] = float("nan")
    rows[5] = torch.finfo(torch.float32).max
    rows[6] = torch.tensor([1e-38, 0, 0, 1e-40])
    for dtype in (E4M3, E5M2):
        made = scaled(rows, dtype=dtype)
        assert bool(made.scale.isfinite().all())
        assert bool((made.scale >= torch.finfo(torch.float32).tiny).all())
        back = made.values()
        assert back[0].eq(1).all()
        assert back[1].eq(0).all()
        assert made.scale[1] == 1
        assert back[2].eq(0).all()
        assert back[3, 0].isinf() if dtype == E5M2 else back[3, 0].isnan()
        assert back[3, 1:].eq(1).all()
        assert back[4, [0, 2, 3]].eq(1).all()
        assert back[4, 1].isnan()
        assert torch.allclose(back[5], rows[5])
        assert bool(back[6].isfinite().all())
        whole_one = scaled(rows[[0, 3, 4]], "tensorwise", dtype=dtype)
        assert whole_one.scale == scaled(torch.ones(1), "tensorwise", dtype=dtype).scale
    for empty in (torch.ones(0, 3), torch.ones(3, 0)):
        for recipe in ("rowwise", "tensorwise"):
            made = scaled(empty, recipe)  # type: ignore[arg-type]
            assert made.data.shape == empty.shape
            assert bool(made.scale.eq(1).all())


@pytest.mark.parametrize("turned", [False, True])
def test_the_librarys_scaled_matmul_is_ours(turned: bool) -> None:
    """What a GPU uses, as far as the library has it on a CPU; in gradients operands lie the other way round."""
    a, b = scaled(torch.randn(32, 64)), scaled(torch.randn(48, 64))
    if turned:
        a, b = (Scaled(each.data.t().contiguous().t(), each.scale) for each in (a, b))
    left, right = Quantized.of(a, torch.bfloat16), Quantized.of(b, torch.bfloat16).t()
    bias = torch.randn(48).bfloat16()
    data = a.data.double() @ b.data.double().t()
    reference.check(of_data(left, right), data, 64 * torch.finfo(torch.float32).eps * data.abs().max(), "data")
    for added in (None, bias):
        x, w = values(a), values(b).t()
        expected = x @ w if added is None else x @ w + bias.double()
        off = allowed(x, w, torch.bfloat16, bias=added)
        reference.check(mm(left, right, added), expected, off, "ours")
        reference.check(by_library(left, right, added), expected, 2 * off, "the library's")


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"x": torch.ones(2).double()}, TypeError, "x must be a tensor of float32"),
        ({"x": torch.ones(())}, ValueError, "at least 1 dimension"),
        ({"x": torch.eye(2).to_sparse()}, TypeError, "x must be a dense tensor, got one of layout torch.sparse"),
        ({"recipe": "blockwise"}, ValueError, "recipe must be one of tensorwise, rowwise, mxfp8"),
        ({"dtype": torch.bfloat16}, ValueError, "dtype must be None or one of"),
        ({"group": "tp"}, ValueError, "group is for recipe 'tensorwise'"),
        ({"power_of_two": 1}, TypeError, "power_of_two must be True or False"),
    ],
)
def test_what_cannot_be_scaled(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        scaled(**{"x": torch.ones(2, 3), **given})
