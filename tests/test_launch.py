"""Launchers fit the tile, the ways of reading and the compiler's options to lengths, strides and addresses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from fusedtp.kernels.configs import INTERPRETER, SHAPES, TABLE, compiled_config
from fusedtp.kernels.epilogue import epilogue_of
from fusedtp.kernels.launch import moving_options, options
from fusedtp.kernels.layout import Layout
from fusedtp.kernels.matmul import matmul
from fusedtp.kernels.signal import FIRST_SLOT

from .compiled.cases import TARGETS, Case
from .compiled.launched import launched, recorded
from .test_ops import bounded


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", TABLE)
def test_lengths_that_are_no_multiples_of_16_have_smaller_tiles(target: str, shape: str) -> None:
    """The tiles of a scatter stay: their owners count them."""
    by = ("rows", "columns") if TARGETS[target].described else ("pointers", "pointers")
    for name in ("matmul", "matmul transposed", "gather rows", "gather rows transposed", "scatter"):
        whole = launched(Case(name, target, shape=shape, a_by=by[0], b_by=by[1])).constants
        loose = launched(Case(name, target, shape=shape, loose=True))
        config, found = compiled_config(target, 2, shape), loose.constants
        assert [whole[f"BLOCK_{x}"] for x in "MNK"] == [config.block_m, config.block_n, config.block_k]
        assert found["BLOCK_N"] == (config.block_n if name == "scatter" else min(128, config.block_n))
        assert (found["BLOCK_M"], found["BLOCK_K"], found["FLATTEN"]) == (config.block_m, 32, False)
        assert loose.options["num_warps"] >= 8


@pytest.mark.parametrize(
    ("columns", "offset", "stored"), [(96, 0, True), (96, 16, True), (96, 1, False), (88, 0, False)]
)  # fmt: skip
def test_a_result_is_stored_16_bytes_at_a_time_or_not(columns: int, offset: int, stored: bool) -> None:
    config = replace(compiled_config("sm_90", 2, "many"), programs=4)
    whole = torch.zeros(64 * 96 + 16, dtype=torch.bfloat16)
    out = whole[offset : offset + 64 * columns].view(64, columns)
    a, b = torch.zeros(64, 128, dtype=torch.bfloat16), torch.zeros(columns, 128, dtype=torch.bfloat16).t()
    found = recorded(lambda: matmul(a, b, out, epilogue_of(()), config=config)).constants
    assert found["BLOCK_N"] == (config.block_n if stored else 128)
    assert (found["A_BY"], found["B_BY"], found["BLOCK_K"]) == ("rows", "columns", config.block_k)


@pytest.mark.parametrize("by", ["rows", "pointers"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_a_multiprocessor_has_the_registers_of_a_program(target: str, shape: str, by: str) -> None:
    """Or the launch fails: 64 Ki of them, given to a warp in units of 256."""
    config = compiled_config(target, 2, shape)
    for given in (options(config, by, by), moving_options(config)):
        assert -(-32 * given.get("maxnreg", 0) // 256) * 256 * given["num_warps"] <= 64 << 10


def test_what_has_no_limit_of_registers() -> None:
    """Interpreted kernels and AMD's, whose compiler has no such option, have no limit; float32 has the largest."""
    for target in TABLE:
        most = 0 if target == "gfx942" else 255
        assert all(compiled_config(target, 4, shape).registers == most for shape in SHAPES)
    kinds: tuple[dict[str, Any], ...] = (
        {"itemsize": 1}, {"itemsize": 2}, {"itemsize": 4}, {"itemsize": 1, "blocks": True},
        {"itemsize": 2, "tree": True},
    )  # fmt: skip
    amd = [compiled_config("gfx942", shape=shape, **kind) for shape in SHAPES for kind in kinds]
    for config in (INTERPRETER, *amd):
        assert "maxnreg" not in options(config, "pointers", "pointers") | moving_options(config)


DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
REGION = st.tuples(st.integers(0, 9), st.integers(0, 70), st.sampled_from(DTYPES), st.integers(1, 5))


@bounded(200)
@hypothesis.given(st.lists(REGION, min_size=2, max_size=5))
def test_regions_of_a_layout_are_apart(asked: list[tuple[int, int, torch.dtype, int]]) -> None:
    """Neither bytes nor signals of two regions are the same, and a row begins at a multiple of 16 bytes."""
    layout, bytes_end, slots_end = Layout(), 0, FIRST_SLOT.value
    for rows, cols, dtype, slots in asked:
        region = layout.region(rows, cols, dtype, slots=slots)
        row_bytes = region.pitch * dtype.itemsize
        assert region.pitch >= cols
        assert row_bytes % 16 == 0
        assert region.row * row_bytes >= bytes_end or not row_bytes
        assert region.slot >= slots_end
        bytes_end, slots_end = (region.row + rows) * row_bytes, region.slot + slots
        assert (layout.half_bytes, layout.slots) >= (bytes_end, slots_end)
