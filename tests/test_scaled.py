"""`Scaled` in one process: values and scales, cuts, AMD's formats, and every way to multiply two of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fusedtp
from fusedtp import Scaled, float8, reference, scaled
from fusedtp.bench import arguments
from fusedtp.bench.cases import EVERY_DTYPE
from fusedtp.calls.arguments import float8_of
from fusedtp.float8 import BLOCK, E8M0, FNUZ, OCP
from fusedtp.scaled import Quantized
from fusedtp.schedules import local
from fusedtp.schedules.local import blocks_for_library, by_library, in_bfloat16, mm, of_data

from .harness import on_gfx942
from .test_float8 import E4M3, E5M2, IN_BLOCKS, allowed, make, values

RECIPES = ("rowwise", "tensorwise", "mxfp8")
# Each dtype's largest number, its step at 1 (torch.finfo is wrong for e5m2fnuz), and its smallest number.
FORMATS = {
    E4M3: (448.0, 2.0**-3, 2.0**-9), E5M2: (57344.0, 2.0**-2, 2.0**-16),
    FNUZ.e4m3: (240.0, 2.0**-3, 2.0**-10), FNUZ.e5m2: (57344.0, 2.0**-2, 2.0**-17),
}  # fmt: skip


def spread_out(recipe: Any) -> Scaled:
    """Return rows and blocks of different magnitudes, so that a wrong scale shows."""
    x = torch.randn(3, 6, 80, generator=torch.Generator().manual_seed(0))
    return scaled(x * torch.logspace(-6, 6, x.numel() // 16).repeat_interleave(16).view_as(x), recipe)


def same(cut: Scaled, expected: Tensor) -> None:
    assert cut.shape == expected.shape
    assert torch.equal(cut.values(), expected)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_are_kept_to_half_a_step(recipe: Any, power_of_two: bool, dtype: torch.dtype) -> None:
    """The largest magnitude is kept, and no value is off by more than half a step of float8."""
    largest, step, least = FORMATS[dtype]
    x = torch.randn(50, 70) * torch.logspace(-30, 30, 50)[:, None]
    made = scaled(x, recipe, dtype=dtype, power_of_two=power_of_two)
    scale, most = made.scale.float(), made.data.float().abs().amax(-1)
    each = torch.stack([scale[:, k // BLOCK] for k in range(70)], 1) if recipe == "mxfp8" else scale
    assert bool((most <= largest).all())
    assert bool(((made.values() - x).abs() <= 1.001 / 2 * (step * x.abs() + least * each)).all())
    assert torch.equal(values(made).float(), made.values())
    if recipe == "rowwise":
        assert bool((most > largest / 2 * (1 - step)).all())
    if power_of_two or recipe == "mxfp8":
        assert torch.equal(scale, 2.0 ** scale.log2().round())
    # Numbers near float32's largest must not be rounded to 2^128.
    highest = torch.finfo(torch.float32).max
    x = highest * torch.linspace(0.9, 1, 64).repeat(2, 1) * torch.tensor([[1.0], [-1.0]])
    if dtype in OCP or recipe != "mxfp8":
        back = scaled(x, recipe, dtype=dtype, power_of_two=True).values()
        assert bool(((back - x).abs() <= 0.125 * highest).all())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_no_scale_can_hold(recipe: Any, dtype: torch.dtype) -> None:
    """Zeros, infinities and NaN affect only themselves; subnormal numbers affect only their own row."""
    rows = torch.ones(6, 32)
    rows[0, :2] = torch.tensor([-0.0, -1e-30])
    rows[1, 3], rows[2, 4], rows[3, 5] = float("inf"), float("-inf"), float("nan")
    rows[4] = 0
    made, lost = scaled(rows, recipe, dtype=dtype), ~rows.isfinite()
    back = made.values()
    assert torch.equal(back[~lost], torch.where(rows == -1e-30, 0.0, rows)[~lost])
    kept = rows if dtype == E5M2 else torch.where(lost, float("nan"), rows)
    assert torch.allclose(back[lost], kept[lost], equal_nan=True)
    if dtype in FNUZ:
        # Only one code is NaN, and zero has no sign.
        assert torch.equal(made.data.view(torch.uint8) == 0x80, lost)
    assert recipe == "tensorwise" or made.scale[4].float() == 1
    tiny = torch.tensor([[1e-45] * 4, [1e-38, 0, 0, 1e-40], [1.0] * 4])
    made = scaled(tiny, recipe, dtype=dtype)
    assert bool((made.scale.float() >= torch.finfo(torch.float32).tiny).all())
    assert bool(made.values()[0].eq(0).all())
    assert bool(made.values()[1].isfinite().all())
    assert bool(made.values()[2].eq(1).all())
    for empty in (torch.ones(0, 3), torch.ones(3, 0)):
        made = scaled(empty, recipe, dtype=dtype)
        assert made.data.shape == empty.shape
        assert bool(made.scale.float().eq(1).all())


@pytest.mark.parametrize("dtype", OCP, ids=str)
def test_a_block_is_what_a_row_of_its_own_would_be(dtype: torch.dtype) -> None:
    """Also the last block, which may be shorter."""
    x = torch.randn(2, 5, 70) * torch.logspace(-20, 20, 70)
    x[0, 0, :32], x[0, 1, 33], x[0, 2, 69], x[1, 0, 0] = 0, float("nan"), float("inf"), 1e-45
    made = scaled(x, "mxfp8", dtype=dtype)
    assert (made.scale.shape, made.scale.dtype) == ((2, 5, 3), E8M0)
    rows = [scaled(part.contiguous(), dtype=dtype, power_of_two=True) for part in x.split(BLOCK, -1)]
    assert torch.equal(made.scale.float(), torch.cat([each.scale for each in rows], -1))
    expected = torch.cat([each.values() for each in rows], -1)
    assert torch.allclose(made.values(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", OCP, ids=str)
def test_blocks_are_widened_to_the_bits_of_their_values(dtype: torch.dtype) -> None:
    """bfloat16 values are rounded once, from exact values: also by columns, in parts of rows, and at the extremes."""
    # With a seed: in other draws one value in a thousand exceeds float32.
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-40, 38, 96)
    x[0, 3], x[1, 40], x[2, :32] = float("nan"), float("inf"), 0
    made = scaled(x, "mxfp8", dtype=dtype)
    made.scale.view(torch.uint8)[3] = torch.tensor([0, 254, 255], dtype=torch.uint8)
    whole, expected = Quantized.of(made, torch.bfloat16), made.values()
    # Values from 2^128 on, which scales allow but float32 does not, are infinite; `scaled` makes none of finite input.
    assert expected[3, 32:64].isinf().any()
    assert expected[4:].isfinite().all()
    for part, of_part in (
        (whole, expected),
        (whole[:4, 32:96], expected[:4, 32:]),
        (whole[:, 64:80], expected[:, 64:80]),
    ):
        for given, want in ((part, of_part), (part.t(), of_part.t())):
            for out in (torch.bfloat16, torch.float32):
                got = given.widened(out)
                assert got.dtype == out
                assert torch.allclose(got.float(), want.to(out).float(), rtol=0, atol=0, equal_nan=True)


# torch 2.11 multiplies float8 on a CPU with one scale alone.
ROWWISE_ON_CPUS = torch.__version__ >= "2.12"


@pytest.mark.parametrize(("recipe", "turned"), [("rowwise", False), ("rowwise", True), ("mxfp8", False)])
def test_every_way_to_multiply(recipe: str, turned: bool) -> None:
    """The functions of GPUs, as far as the library has them on a CPU; gradients have operands in the other layout."""
    if recipe == "mxfp8":
        a, b = make((33, IN_BLOCKS), 0, recipe), make((24, IN_BLOCKS), 1, recipe, E5M2)
    else:
        a, b = scaled(torch.randn(32, 64)), scaled(torch.randn(24, 64))
    if turned:
        a, b = (Scaled(each.data.t().contiguous().t(), each.scale) for each in (a, b))
    left, right = Quantized.of(a, torch.bfloat16), Quantized.of(b, torch.bfloat16).t()
    x, w, bias = values(a), values(b).t(), torch.randn(24).bfloat16()
    for added in (None, bias):
        expected = x @ w if added is None else x @ w + bias.double()
        off = allowed(x, w, torch.bfloat16, bias=added)
        reference.check(mm(left, right, added), expected, off, "ours")
        if recipe == "mxfp8":
            reference.check(in_bfloat16(left, right, added), expected, off, "in bfloat16")
        elif ROWWISE_ON_CPUS:
            reference.check(by_library(left, right, added), expected, 2 * off, "the library's")
    if recipe == "rowwise" and ROWWISE_ON_CPUS:
        data = a.data.double() @ b.data.double().t()
        reference.check(of_data(left, right), data, 64 * torch.finfo(torch.float32).eps * data.abs().max(), "data")


def test_the_librarys_order_of_block_scales() -> None:
    """By formula, as no CPU multiplies with these scales."""
    scales = torch.randint(0, 255, (150, 6), dtype=torch.uint8)
    laid = blocks_for_library(scales).view(torch.uint8)
    assert len(laid) == 256 * 8
    for row, col in ((0, 0), (31, 3), (32, 0), (127, 5), (149, 4)):
        tile, at = row // 128 * 2 + col // 4, 16 * (row % 32) + 4 * (row % 128 // 32) + col % 4
        assert laid[512 * tile + at] == scales[row, col]


@pytest.mark.parametrize("recipe", RECIPES)
def test_cuts_are_those_of_the_values(recipe: str) -> None:
    whole = spread_out(recipe)
    expected = whole.values()
    for dim, start, length in ((0, 1, 2), (1, 2, 3), (-2, -3, 2), (1, 0, 0), (2, 32, 32), (-1, 64, 16), (2, 0, 80)):
        same(whole.narrow(dim, start, length), expected.narrow(dim, start, length))
    assert whole.narrow(0, 1, 1).data.data_ptr() == whole.data[1].data_ptr()
    for sizes, dim in (((1, 0, 2), 0), (4, 1), ((32, 48), -1), (64, 2)):
        for cut, part in zip(whole.split(sizes, dim), expected.split(sizes, dim), strict=True):  # type: ignore[arg-type]
            same(cut, part)
    with pytest.raises(ValueError, match=r"sizes must add up to 6, .* got \(1, 2\)"):
        whole.split((1, 2), 1)
    with pytest.raises(ValueError, match="sizes must be 1 or more"):
        whole.split(0)
    for start, length in ((16, 16), (0, 16), (32, 40), (8, 72)):
        if recipe == "mxfp8":
            with pytest.raises(ValueError, match="a row is cut at multiples of 32"):
                whole.narrow(2, start, length)
        else:
            same(whole.narrow(2, start, length), expected.narrow(2, start, length))


def test_scales_that_are_not_of_the_data_are_not_cut() -> None:
    data = torch.zeros(4, 64).to(E4M3)
    padded = torch.full((128, 4), 127, dtype=torch.uint8).view(E8M0)
    for scale in (padded, torch.ones(64, 1), torch.ones(1, 64), torch.ones(4, 1, dtype=torch.float64)):
        wrong = Scaled(data, scale)
        for cut in (lambda: wrong.narrow(0, 0, 2), lambda: wrong.split(2), lambda: wrong.values()):  # noqa: B023
            with pytest.raises(ValueError, match=r"Scaled\.scale .*must be"):
                cut()
    with pytest.raises(ValueError, match=r"Scaled\.data must be one of"):
        Scaled(data.view(torch.int8), torch.ones(4, 1)).narrow(0, 0, 2)


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


def test_a_layers_recipe_is_not_that_of_blocks() -> None:
    with pytest.raises(ValueError, match=r"got 'mxfp8', which is for operands of functions: fusedtp.scaled\(x, 'mx"):
        float8_of("mxfp8")


@pytest.mark.parametrize(
    ("hip", "target", "kind", "expected"),
    [
        ("7.0", "gfx942:sramecc+:xnack-", "cuda", FNUZ), ("7.0", "gfx950:sramecc+:xnack-", "cuda", OCP),
        ("7.0", "gfx90a", "cuda", OCP), ("7.0", "gfx942", "cpu", OCP), (None, "", "cuda", OCP),
    ],
)  # fmt: skip
def test_what_a_device_multiplies(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, target: str, kind: str, expected: float8.Formats
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", mock.Mock(return_value=SimpleNamespace(gcnArchName=target))
    )
    float8._of_amds.cache_clear()
    assert float8.native(torch.device(kind)) == expected
    float8._of_amds.cache_clear()


def test_amds_formats_are_made_on_amds_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(32, 64)
    for recipe in RECIPES:
        assert scaled(x, recipe).data.dtype == E4M3  # type: ignore[arg-type]
        with on_gfx942():
            # Blocks use OCP formats, and no unit of gfx942 multiplies them.
            assert scaled(x, recipe).data.dtype == (E4M3 if recipe == "mxfp8" else FNUZ.e4m3)  # type: ignore[arg-type]
            assert scaled(x, recipe, dtype=E5M2).data.dtype == E5M2  # type: ignore[arg-type]
    assert arguments.dtypes_here("fp8,bf16", EVERY_DTYPE, "--dtype") == ("float8_e4m3fn", "bfloat16")
    with on_gfx942():
        assert arguments.dtypes_here("fp8,bf16", EVERY_DTYPE, "--dtype") == ("float8_e4m3fnuz", "bfloat16")
    sizes = {"M": 64, "K": 32, "N": 32}
    spec = "[M_X, K] @ [K, N_X] -> [M, N_X]"
    text = str(fusedtp.explain(spec, sizes=sizes, mesh={"X": 2}, hardware="mi300x", dtype=FNUZ.e5m2))
    assert "float8_e5m2fnuz, sums in bfloat16" in text
    # The library's matmul takes OCP formats only.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    for dtype in (E4M3, FNUZ.e4m3):
        for recipe in ("rowwise", "mxfp8"):
            made = Quantized.of(scaled(x, recipe, dtype=dtype), torch.bfloat16)  # type: ignore[arg-type]
            assert local._multiplied_by_library(made, made.t()) == (dtype == E4M3)
