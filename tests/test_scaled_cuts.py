"""A cut of a `Scaled` has the scales of what is left, or is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusedtp
from fusedtp.calls import arguments

RECIPES = ("tensorwise", "rowwise", "mxfp8")


def made(recipe: str) -> fusedtp.Scaled:
    # Rows and blocks of unlike magnitudes: another one's scale would not do.
    x = torch.randn(3, 6, 80, generator=torch.Generator().manual_seed(0))
    return fusedtp.scaled(x * torch.logspace(-6, 6, x.numel() // 16).repeat_interleave(16).view_as(x), recipe)  # type: ignore[arg-type]


def same(cut: fusedtp.Scaled, values: Tensor) -> None:
    assert cut.shape == values.shape
    assert torch.equal(cut.values(), values)


@pytest.mark.parametrize("recipe", RECIPES)
def test_cuts_are_those_of_the_values(recipe: str) -> None:
    whole = made(recipe)
    values = whole.values()
    for dim, start, length in ((0, 1, 2), (1, 2, 3), (-2, -3, 2), (1, 0, 0), (2, 32, 32), (-1, 64, 16), (2, 0, 80)):
        same(whole.narrow(dim, start, length), values.narrow(dim, start, length))
    assert whole.narrow(0, 1, 1).data.data_ptr() == whole.data[1].data_ptr()
    for sizes, dim in (((1, 0, 2), 0), (4, 1), ((32, 48), -1), (64, 2)):
        for cut, part in zip(whole.split(sizes, dim), values.split(sizes, dim), strict=True):  # type: ignore[arg-type]
            same(cut, part)
    with pytest.raises(ValueError, match=r"sizes must add up to 6, .* got \(1, 2\)"):
        whole.split((1, 2), 1)
    with pytest.raises((RuntimeError, IndexError)):
        whole.narrow(0, 2, 2)


def test_no_block_is_cut_in_two() -> None:
    whole = made("mxfp8")
    for start, length in ((16, 16), (0, 16), (32, 40), (8, 72)):
        with pytest.raises(ValueError, match="a row is cut at multiples of 32"):
            whole.narrow(2, start, length)
    for recipe in ("tensorwise", "rowwise"):
        one = made(recipe)
        same(one.narrow(2, 8, 3), one.values().narrow(2, 8, 3))


def test_scales_that_are_not_of_the_data_are_not_cut() -> None:
    data = torch.zeros(4, 64).to(torch.float8_e4m3fn)
    padded = torch.full((128, 4), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    for scale in (padded, torch.ones(64, 1), torch.ones(1, 64), torch.ones(4, 1, dtype=torch.float64)):
        wrong = fusedtp.Scaled(data, scale)
        for cut in (lambda: wrong.narrow(0, 0, 2), lambda: wrong.split(2), lambda: wrong.values()):  # noqa: B023
            with pytest.raises(ValueError, match=r"Scaled\.scale .*must be"):
                cut()
    with pytest.raises(ValueError, match=r"Scaled\.data must be one of"):
        fusedtp.Scaled(data.view(torch.int8), torch.ones(4, 1)).narrow(0, 0, 2)
    with pytest.raises(ValueError, match="sizes must be 1 or more"):
        made("rowwise").split(0)


def test_a_layers_recipe_is_not_that_of_blocks() -> None:
    with pytest.raises(ValueError, match=r"got 'mxfp8', which is for operands of functions: fusedtp.scaled\(x, 'mx"):
        arguments.float8_of("mxfp8")
