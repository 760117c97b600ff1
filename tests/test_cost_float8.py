"""The cost model of float8 operands with scales: published times, arithmetic by hand, machines without units for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedtp import cost
from fusedtp.choose import tuning
from fusedtp.cost import hardware, work
from fusedtp.cost.hardware import HARDWARE
from fusedtp.float8 import BLOCK
from fusedtp.scaled import SCALE_BYTES, packed_bytes

from .published_times import of
from .test_cost import invoke, plain

# Matmul of e4m3 operands + reduce-scatter on 8 B300: the scaled matmul, then NCCL. N 16384 and K 7168 for each rank, as
# we read the command. github.com/pytorch/pytorch issue 179770.
UNFUSED = of("issue 179770", way="unfused")


def test_few_rows_of_float8_are_not_worth_chunks_from_the_host() -> None:
    """Issuing them takes longer than both ops in sequence, in the published times and in the model."""
    op, dtype, allowed = "matmul_reduce_scatter", "float8_e4m3fn", ("fused", "decomposed", "unfused")
    for row in UNFUSED:
        (chunked,) = of("issue 179770", way="decomposed", M=row.M)
        sizes: dict[str, Any] = {"M": row.M, "N": row.N, "K": row.K, "world_size": 8, "dtype": row.dtype}
        found = cost.predict(op, hardware="b300", casts=False, **sizes)
        assert found.unfused_us / found.decomposed_us < 0.45
        assert row.us / chunked.us < 0.4
        # Our kernel reads the weight once for all ranks' rows.
        assert found.winner == "fused"
        assert found.fused_us < 0.6 * found.unfused_us
        assert tuning.decide(None, HARDWARE["b300"], op, dtype, 8, row.M, 16384, allowed)[0] == "fused"
    assert len(UNFUSED) > 1
    assert tuning.decide(None, HARDWARE["b300"], op, dtype, 8, 8192, 16384, allowed)[0] == "fused"


def test_float8_by_hand() -> None:
    machine = plain(matrix_tflops={"float32": 1000, "bfloat16": 1000, "float8_e4m3fn": 2000})
    sizes: dict[str, Any] = {"M": 4096, "N": 4096, "K": 1024, "world_size": 4, "dtype": torch.float8_e4m3fn}
    gather = cost.predict("all_gather_matmul", hardware=machine, **sizes)
    # One byte for each element, and a scale in 16 bytes behind each row.
    assert gather.work.moved_bytes == 4096 * (1024 + 16)
    assert gather.comm_us == pytest.approx(3 / 4 * 4096 * 1040 / 1e5)
    assert gather.sent_bytes == 3 * 1024 * 1040
    assert gather.matmul_us == pytest.approx(2 * 4096 * 1024 * 1024 / 2e9)
    # Sums travel in their own dtype.
    scatter = cost.predict("matmul_reduce_scatter", hardware=machine, **sizes)
    wide = cost.predict("matmul_reduce_scatter", hardware=machine, **(sizes | {"dtype": "bfloat16"}))
    assert (scatter.comm_us, scatter.sent_bytes) == (wide.comm_us, wide.sent_bytes)
    assert scatter.matmul_us == pytest.approx(wide.matmul_us / 2)
    # With columns, each rank's part of a row has a scale.
    columns = cost.predict("all_gather_matmul", hardware=machine, gather_dim=1, **sizes)
    assert columns.work.moved_bytes == 4096 * (1024 + 4 * 16)


def test_blocks_have_a_scale_for_each_32() -> None:
    sizes: dict[str, Any] = {"M": 4096, "N": 4096, "K": 8192, "world_size": 4, "dtype": "mxfp8"}
    on = {name: cost.predict("all_gather_matmul", hardware=name, **sizes) for name in ("b200", "h100")}
    assert on["b200"].work.moved_bytes == 4096 * (8192 + 256)
    columns = cost.predict("all_gather_matmul", hardware="b200", gather_dim=1, **sizes)
    assert columns.work.moved_bytes == 4096 * (8192 + 4 * 64)
    narrow = cost.predict("all_gather_matmul", hardware="b200", **(sizes | {"dtype": "float8_e4m3fn"}))
    assert on["b200"].matmul_us == narrow.matmul_us
    # Without a unit for block scales, torch widens both operands to bfloat16; our kernel's rate there is unmeasured.
    wide = cost.predict("all_gather_matmul", hardware="h100", **(sizes | {"dtype": "bfloat16"}))
    widening = (4096 * 8192 + 8192 * 1024) * 7 / hardware.HARDWARE["h100"].memory + 6 * hardware.HARDWARE[
        "h100"
    ].launch_us
    assert on["h100"].matmul_us == pytest.approx(wide.matmul_us + widening)
    assert "torch multiplies mxfp8 as bfloat16 here" in on["h100"].assumptions
    assert any("makes mxfp8 bfloat16, at a rate that nobody" in said for said in on["h100"].assumptions)
    assert ("fused" in on["b200"].times, "fused" in on["h100"].times) == (True, False)
    assert work.BLOCK == BLOCK
    for cols in (1, 31, 512, 513, 8192):
        assert packed_bytes(cols, blocks=True) == -(-cols // 16) * 16 + 16 * -(-cols // 512)


def test_every_schedule_of_float8_begins_with_a_cast() -> None:
    sizes: dict[str, Any] = {"M": 4096, "N": 4096, "K": 1024, "world_size": 4, "dtype": "float8_e4m3fn"}
    machine = plain(matrix_tflops={"float8_e4m3fn": 2000}, memory_gbps=1e3, launch_us=2.0)
    given = cost.predict("all_gather_matmul", hardware=machine, casts=False, **sizes)
    cast = cost.predict("all_gather_matmul", hardware=machine, **sizes)
    # This rank's rows are read twice in bfloat16 and written once.
    assert cast.cast_us == pytest.approx(2 * 2 + 1024 * 1024 * 5 / 1e6)
    assert given.cast_us == 0
    assert cast.times == pytest.approx({name: time + cast.cast_us for name, time in given.times.items()})
    assert cast.bound_us == pytest.approx(given.bound_us + cast.cast_us)
    assert cast.efficiency("fused") == pytest.approx(given.efficiency("fused"))
    assert any("by two kernels" in text for text in cast.assumptions)
    assert cost.predict("all_gather_matmul", hardware="h100", **(sizes | {"dtype": "bfloat16"})).cast_us == 0


def test_without_units_for_float8_it_is_widened_and_not_fused() -> None:
    sizes: dict[str, Any] = {"M": 8192, "N": 8192, "K": 8192, "world_size": 8}
    for name, dtype, has_units in (
        ("h100", "float8_e4m3fn", True), ("h100", "float8_e5m2", True), ("h100", "float8_e4m3fnuz", False),
        ("a100", "float8_e4m3fn", False), ("mi300x", "float8_e4m3fn", False), ("mi300x", "float8_e4m3fnuz", True),
        ("mi300x", "float8_e5m2", False), ("mi300x", "float8_e5m2fnuz", True),
    ):  # fmt: skip
        found = cost.predict("all_gather_matmul", hardware=name, dtype=dtype, **sizes)
        wide = cost.predict("all_gather_matmul", hardware=name, dtype="float32", **sizes)
        narrow = cost.predict("all_gather_matmul", hardware=name, dtype="bfloat16", **sizes)
        assert ("fused" in found.times) == has_units, (name, dtype)
        # On AMD's GPUs torch's scaled matmul is not used: only our kernel uses the units.
        by_library = has_units and name != "mi300x"
        assert (found.matmul_us < 0.6 * narrow.matmul_us) == by_library
        assert (found.matmul_us > wide.matmul_us) != by_library
        assert any("as float32 here" in text for text in found.assumptions) != by_library
        if name == "mi300x" and has_units:
            assert found.winner == "fused"
            assert found.fused_us < narrow.fused_us
    assert work.SCALE_BYTES == SCALE_BYTES
    # A gather along the contraction is multiplied in parts: torch's parts are written, scaled and added.
    columns = cost.predict("all_gather_matmul", hardware="h100", dtype="float8_e4m3fn", gather_dim=1, **sizes)
    assert columns.winner == "fused"
    rows = cost.predict("all_gather_matmul", hardware="h100", dtype="float8_e4m3fn", **sizes)
    assert columns.matmul_us == rows.matmul_us
    added = columns.unfused_us - rows.unfused_us - (columns.comm_us - rows.comm_us)
    assert added == pytest.approx(8 * (2 * 3 + 8192 * 1024 * 24 / hardware.HARDWARE["h100"].memory))
    assert columns.fused_us > 0.9 * columns.bound_us


def test_command_knows_fp8() -> None:
    size = ("all_gather_matmul", "--m", "4096")
    found = cost.predict("all_gather_matmul", M=4096, N=28672, K=8192, world_size=8, dtype="float8_e4m3fn")
    without = f" {found.unfused_us - found.cast_us:.1f}".removesuffix(".0")
    for options, said in (
        (("--dtype", "fp8"), "all_gather_matmul, float8_e4m3fn, h100"),
        (("--dtype", "fp8"), "by two kernels"),
        (("--dtype", "float8_e4m3fn", "--no-casts"), without),
        (("--dtype", "fp8", "--hardware", "mi300x"), "all_gather_matmul, float8_e4m3fnuz, mi300x"),
        (("--dtype", "fp8", "--hardware", "a100"), "not multiply float8_e4m3fn on NVIDIA A100 SXM 80 GB: no fused"),
    ):
        assert said in invoke(*size, *options).output
