"""mxfp8, float8 with a scale for each 32 elements of a row; what it has in common with other float8: test_float8."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp import Scaled, float8, reference, scaled
from fusedtp.bench.ranks import RankPool
from fusedtp.float8 import BLOCK, E8M0
from fusedtp.scaled import Quantized
from fusedtp.schedules.local import blocks_for_library, in_bfloat16, mm

from .bounds import Bounds
from .test_float8 import E4M3, E5M2, IN_BLOCKS, SCHEDULES, allowed, make, values


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_of_blocks(dtype: torch.dtype) -> None:
    """A power of two for each 32 of a row, the last of which may be fewer: each is what a row of its own would have."""
    x = torch.randn(2, 5, 70) * torch.logspace(-20, 20, 70)
    x[0, 0, :32], x[0, 1, 33], x[0, 2, 69], x[1, 0, 0] = 0, float("nan"), float("inf"), 1e-45
    made = scaled(x, "mxfp8", dtype=dtype)
    assert made.scale.shape == (2, 5, 3)
    assert made.scale.dtype == E8M0
    assert made.data.shape == x.shape
    blocks = [scaled(part.contiguous(), dtype=dtype, power_of_two=True) for part in x.split(BLOCK, -1)]
    assert torch.equal(made.scale.float(), torch.cat([each.scale for each in blocks], -1))
    as_rows = torch.cat([each.values() for each in blocks], -1)
    assert torch.allclose(made.values(), as_rows, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(values(made).float().nan_to_num(), made.values().nan_to_num())
    assert made.scale[0, 0, 0].float() == 1


def test_blocks_are_multiplied_with_their_scales() -> None:
    """By every way that there is to do so; on a CPU all but the library's own, whose order of scales is by formula."""
    a, b = make((33, IN_BLOCKS), 0, "mxfp8"), make((24, IN_BLOCKS), 1, "mxfp8", E5M2)
    x, w, bias = values(a), values(b).t(), torch.randn(24).bfloat16()
    left, right = Quantized.of(a, torch.bfloat16), Quantized.of(b, torch.bfloat16).t()
    for way in (mm, in_bfloat16):
        for added in (None, bias):
            expected = x @ w if added is None else x @ w + bias.double()
            reference.check(way(left, right, added), expected, allowed(x, w, torch.bfloat16, bias=added), way.__name__)
    scales = torch.randint(0, 255, (150, 6), dtype=torch.uint8)
    laid = blocks_for_library(scales).view(torch.uint8)
    assert len(laid) == 256 * 8
    for row, col in ((0, 0), (31, 3), (32, 0), (127, 5), (149, 4)):
        tile, at = row // 128 * 2 + col // 4, 16 * (row % 32) + 4 * (row % 128 // 32) + col % 4
        assert laid[512 * tile + at] == scales[row, col]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_blocks_are_widened_to_the_bits_of_their_values(dtype: torch.dtype) -> None:
    """In bfloat16 they are rounded once, from what is exact: also by columns, as a part of a row, and at the ends."""
    # Of another draw one in a thousand is beyond float32 itself.
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-40, 38, 96)
    x[0, 3], x[1, 40], x[2, :32] = float("nan"), float("inf"), 0
    made = scaled(x, "mxfp8", dtype=dtype)
    made.scale.view(torch.uint8)[3] = torch.tensor([0, 254, 255], dtype=torch.uint8)
    whole = Quantized.of(made, torch.bfloat16)
    values = made.values()
    # 2^128 and more, which scales can write and float32 cannot, are infinite; `scaled` makes none of what is finite.
    assert values[3, 32:64].isinf().any()
    assert values[4:].isfinite().all()
    for part, expected in ((whole, values), (whole[:4, 32:96], values[:4, 32:]), (whole[:, 64:80], values[:, 64:80])):
        for given, want in ((part, expected), (part.t(), expected.t())):
            for out in (torch.bfloat16, torch.float32):
                got = given.widened(out)
                assert got.dtype == out
                assert torch.allclose(got.float(), want.to(out).float(), rtol=0, atol=0, equal_nan=True)


def nan_scale(group: ProcessGroup, schedule: str) -> None:
    """A block whose scale is NaN spoils its own row; the last part ends in the middle of what a kernel multiplies."""
    rank, sizes = group.rank(), (480, 32)
    x, w = scaled(torch.randn(5, 512), "mxfp8"), scaled(torch.randn(6, 512), "mxfp8")
    w.scale.view(torch.uint8)[3, 0] = 255
    at = slice(480 * rank, 480 + 32 * rank)
    mine = Scaled(x.data[:, at], x.scale[:, at.start // BLOCK : at.stop // BLOCK])
    with Bounds():
        y = fusedtp.all_gather_linear(mine, w, group=group, gather_dim=-1, sizes=sizes, schedule=schedule)
    assert y[:, 3].isnan().all()
    assert y[:, [0, 1, 2, 4, 5]].isfinite().all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_scale_of_nan_spoils_its_own_row(pool: RankPool, schedule: str) -> None:
    pool.run(nan_scale, schedule, world_size=2)


@pytest.mark.parametrize("dtype", float8.FLOAT8)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_the_largest_numbers_stay_finite(dtype: torch.dtype, recipe: str) -> None:
    largest = torch.finfo(torch.float32).max
    x = largest * torch.linspace(0.9, 1, 64).repeat(2, 1) * torch.tensor([[1.0], [-1.0]])
    made = [scaled(x, recipe, dtype=dtype, power_of_two=True)]
    if dtype in float8.OCP:
        made.append(scaled(x, "mxfp8", dtype=dtype))
    for each in made:
        values = each.values()
        assert values.isfinite().all()
        # Half a step of the two or three bits behind the point, or all of the last one.
        assert ((values - x).abs() <= 0.125 * largest).all()
