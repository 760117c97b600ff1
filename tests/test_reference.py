"""The oracle accepts correct arithmetic and rejects the errors of a wrong schedule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedtp import reference
from fusedtp.shards import even_sizes

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(64, 48, 512), (33, 65, 1023), (16, 16, 4096)]  # M, N, K


def inputs(M: int, N: int, K: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(M + N + K)
    return torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype), torch.randn(N).to(dtype)


def partials(a: Tensor, b: Tensor, world_size: int) -> list[Tensor]:
    """Return each rank's product, accumulated as in the op and rounded once to the operands' dtype."""
    sizes = even_sizes(a.shape[1], world_size)
    compute = torch.float64 if a.dtype == torch.float64 else torch.float32
    parts = zip(a.split(sizes, 1), b.split(sizes, 0), strict=True)
    return [(a_r.to(compute) @ b_r.to(compute)).to(a.dtype) for a_r, b_r in parts]


def summed(parts: list[Tensor], bias: Tensor | None = None) -> Tensor:
    compute = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    out = torch.zeros_like(parts[0], dtype=compute)
    for part in parts:
        out += part.to(compute)
    return (out if bias is None else out + bias.to(compute)).to(parts[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_correct_results_pass_and_mistakes_do_not(M: int, N: int, K: int, world_size: int, dtype: torch.dtype) -> None:
    a, b, bias = inputs(M, N, K, dtype)
    ref = reference.matmul(a, b, bias)
    allowed = reference.bound(a, b, dtype, world_size, bias=bias)
    parts = partials(a, b, world_size)
    reference.check(summed(parts, bias), ref, allowed, "correct")

    def rejected(what: str, out: Tensor) -> None:
        with pytest.raises(AssertionError, match=what):
            reference.check(out, ref, allowed, what)

    short = a.clone()
    short[:, -32:] = 0
    rejected("a missing chunk of 32 of K", summed(partials(short, b, world_size), bias))
    tile = a.clone()
    tile[:16, -32:] = 0
    rejected("the same in one tile of 16 rows", summed(partials(tile, b, world_size), bias))
    rejected("no bias", summed(parts))
    if world_size > 1:
        rejected("a missing rank", summed(parts[:-1], bias))
        rejected("a rank counted twice", summed([*parts, parts[0]], bias))
        rejected("a mean for a sum", summed(parts, bias) / world_size)
        rejected("bias on every rank", summed(parts, bias * world_size))
        rejected("another rank's chunk", summed([parts[1], *parts[1:]], bias))
    rejected("an unwritten element", summed(parts, bias).index_fill(0, torch.tensor([M - 1]), torch.nan))
    rejected("rows in another order", summed(parts, bias).roll(1, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_without_a_matmul_and_in_the_dtype(dtype: torch.dtype) -> None:
    a, b, _ = inputs(64, 48, 512, dtype)
    parts = partials(a, b, 4)
    in_dtype, ref = parts[3] + (parts[2] + (parts[1] + parts[0])), reference.matmul(a, b)
    allowed = reference.bound(a, b, dtype, 4, sum_dtype=dtype)
    reference.check(in_dtype, ref, allowed, "summed by a backend in its dtype")
    with pytest.raises(AssertionError, match="no rank 0"):
        reference.check(in_dtype - parts[0], ref, allowed, "no rank 0")
    reference.check(summed(parts), reference.total(parts), reference.total_bound(parts, dtype), "sum")
    with pytest.raises(AssertionError, match="a missing rank"):
        reference.check(
            summed(parts[1:]), reference.total(parts), reference.total_bound(parts, dtype), "a missing rank"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_sum_may_begin_with_the_bias(dtype: torch.dtype) -> None:
    """Torch's addmm of small matrices adds products to the bias one by one, each time rounding a sum as large."""
    a, b, bias = inputs(27, 29, 38, dtype)
    out = bias.expand(27, 29).clone()
    for k in range(38):
        out += a[:, k : k + 1] / 32 * (b[k] / 32)
    ref, allowed = reference.matmul(a / 32, b / 32, bias), reference.bound(a / 32, b / 32, dtype, bias=bias)
    reference.check(out, ref, allowed, "the bias first")
    out[:, 0] += bias[0] / 2 ** (15 if dtype == torch.float32 else 44)
    with pytest.raises(AssertionError, match="27 of 783 elements are wrong"):
        reference.check(out, ref, allowed, "a wrong column")


def test_uneven_and_empty_parts_of_k() -> None:
    a, b, _ = inputs(8, 8, 100, torch.bfloat16)
    one, same = (reference.bound(a, b, torch.bfloat16, **how) for how in ({"k_sizes": (100,)}, {"world_size": 1}))  # type: ignore
    assert torch.equal(one, same)
    assert bool(reference.bound(a, b, torch.bfloat16, k_sizes=(0, 99, 1)).isfinite().all())
    nothing = reference.bound(a[:, :0], b[:0], torch.bfloat16, world_size=3)
    assert nothing.shape == (8, 8)
    assert float(nothing.max()) < 1e-30


def test_check_names_the_worst_element() -> None:
    ref, allowed = torch.zeros(3, 4, dtype=torch.float64), torch.full((3, 4), 0.5, dtype=torch.float64)
    out = torch.zeros(3, 4)
    out[1, 2], out[2, 3] = 0.75, -2.0
    with pytest.raises(
        AssertionError, match=r"y: 2 of 12 .* worst at \(2, 3\): got -2, expected 0, off by 2, allowed 0\.5"
    ):
        reference.check(out, ref, allowed, "y")
    with pytest.raises(AssertionError, match=r"y: shape \(4, 3\), expected \(3, 4\)"):
        reference.check(out.t(), ref, allowed, "y")
    out[0, 0] = torch.inf
    with pytest.raises(AssertionError, match=r"worst at \(0, 0\): got inf"):
        reference.check(out, ref, allowed, "y")
    reference.check(torch.empty(0, 4), ref[:0], allowed[:0], "nothing")
