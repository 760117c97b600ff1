"""What explain prints and the communication table says, against numbers worked out by hand."""

from __future__ import annotations

import re

import pytest
import torch

from fusedtp import cost
from fusedtp.cost.hardware import HARDWARE
from fusedtp.errors import NotationError
from fusedtp.explain import NAMED, CommunicationRow, explain, table, table_markdown
from fusedtp.sharding.notation import parse


def test_bytes_and_flops() -> None:
    sizes = {"M": 8192, "K": 4096, "N": 28672}
    found = explain("[M_X, K] @ [K, N_X] -> [M, N_X]", sizes=sizes, mesh={"X": 8}, dtype="bfloat16")
    x_bytes, num_flops = 7 * (8192 // 8) * 4096 * 2, 2 * 8192 * 4096 * (28672 // 8)
    for phase in found.phases:
        assert (phase.sent, phase.flops) == (x_bytes, num_flops)
    assert found.given == "M=8192 K=4096 N=28672, mesh X=8, bfloat16"
    forward = str(found).split("\n\n")[1]
    assert re.search(r"all-gather x over X along M, fused +58\.72 MB\n +matmul y, fused +240\.5 GFLOP", forward)
    assert re.search(r"\n +total +58\.72 MB +240\.5 GFLOP\n", forward)
    assert str(found).endswith(": all-gather x over X along M")
    assert max(map(len, str(found).split("\n"))) < 80


def test_all_reduce_sends_two_shares() -> None:
    sizes = {"M": 64, "K": 32, "N": 16}
    found = explain("row-parallel, y whole", sizes=sizes, mesh={"X": 4}, dtype="float32")
    assert found.phases[0].sent == 2 * 3 * (64 * 16 // 4) * 4
    assert found.phases[1].sent == found.phases[2].sent == 0


def test_uneven_shards_count_at_the_largest() -> None:
    found = explain("FSDP", sizes={"M": 9, "K": 10, "N": 3}, mesh={"X": 4}, dtype="float64", start_bytes=10**6)
    assert found.phases[0].sent == 3 * 3 * 3 * 8
    assert found.phases[0].flops == 2 * 3 * 10 * 3


def test_formulas_without_sizes() -> None:
    found = explain("[B, S_{dp,tp}, K] @ [K_{dp}, N_{tp}] -> [B, S_{dp}, N_{tp}]")
    assert [line.amount for line in found.phases[0].lines] == [
        "(dp-1) * K/dp * N/tp elements",
        "(tp-1) * B * S/dp/tp * K elements",
        "2 * B * S/dp * K * N/tp FLOP",
    ]
    assert found.phases[0].sent is None
    assert found.phases[0].flops is None
    assert "all-gather w over dp along K         (dp-1) * K/dp * N/tp elements" in str(found)
    amounts = [line.amount for line in explain("row-parallel, y whole").phases[0].lines]
    assert amounts == ["2 * M * K/X * N FLOP", "2 (X-1)/X * M * N elements"]


def test_names_are_notations_and_others_are_refused() -> None:
    assert explain("FSDP") == explain(NAMED["FSDP"])
    with pytest.raises(NotationError):
        explain("FSDP2")


def test_table() -> None:
    assert table() == [
        CommunicationRow(name, str(parse(NAMED[name])), forward, dx, dw)
        for name, forward, dx, dw in [
            (
                "column-parallel, x split by rows",
                "all-gather x",
                "reduce-scatter",
                "all-gather x again along the contraction",
            ),
            ("column-parallel, x whole", "none", "all-reduce", "none"),
            (
                "row-parallel, y split by rows",
                "reduce-scatter",
                "all-gather dy",
                "all-gather dy along the contraction",
            ),
            ("row-parallel, y whole", "all-reduce", "none", "none"),
            (
                "features split",
                "all-gather x along the contraction",
                "reduce-scatter, last dim",
                "all-gather x again",
            ),
            (
                "features split, out",
                "reduce-scatter, last dim",
                "all-gather dy along the contraction",
                "all-gather dy",
            ),
            ("FSDP", "all-gather w along the contraction", "all-gather w again", "reduce-scatter"),
            ("data-parallel", "none", "none", "all-reduce"),
        ]
    ]


def test_table_over_two_axes() -> None:
    text = table_markdown({"FSDP, column-parallel": "[M_X, K] @ [K_X, N_Y] -> [M_X, N_Y]"})
    assert text.split("\n")[2] == (
        "| FSDP, column-parallel `[M_X, K] @ [K_X, N_Y] -> [M_X, N_Y]` | all-gather w along the contraction over X"
        " | all-gather w again over X; all-reduce over Y | reduce-scatter over X |"
    )


def test_predicted_times() -> None:
    sizes = {"M": 8192, "K": 8192, "N": 28672}
    found = explain("[M_X, K] @ [K, N_X] -> [M, N_X]", sizes=sizes, mesh={"X": 8}, hardware="h100")
    gather, scatter = (
        cost.predict(op, M=8192, N=N, K=K, world_size=8, hardware="h100")
        for op, N, K in (("all_gather_matmul", 28672, 8192), ("matmul_reduce_scatter", 8192, 28672))
    )
    forward, dx, dw = ([line.predicted for line in phase.lines] for phase in found.phases)
    for (alone, both), expected in ((forward, gather), (dx[::-1], scatter)):
        assert alone is not None
        assert both is not None
        assert (alone.comm_us, both.times) == (expected.comm_us, expected.times)
    # x.T @ dy gathers x along the contraction.
    expected = cost.predict(
        "all_gather_matmul", M=8192, N=3584 * 8, K=8192, world_size=8, hardware="h100", gather_dim=1
    )
    assert dw[1] is not None
    assert dw[1].work == expected.work
    assert "times predicted for NVIDIA H100 SXM, not measured" in found.given
    times = f"fused {gather.fused_us:.1f}, decomposed {gather.decomposed_us:.1f}, unfused {gather.unfused_us:.1f}"
    assert times in str(found)
    without = explain("[M_X, K] @ [K, N_X] -> [M, N_X]", sizes=sizes, mesh={"X": 8})
    assert "predicted" not in str(without)


def test_every_step_has_a_predicted_time() -> None:
    for spec in ("[M_X, K] @ [K_X, N_Y] -> [M_X, N_Y]", "[M, K_X] @ [K_X, N_Y] -> [M, N]", *NAMED.values()):
        sizes = dict.fromkeys(parse(spec).dim_names, 4096)
        found = explain(spec, sizes=sizes, mesh={"X": 4, "Y": 2}, hardware="a100")
        for phase in found.phases:
            for line in phase.lines:
                assert (line.predicted is None) == (line.step.kind == "slice")
                if line.step.is_collective:
                    assert line.predicted is not None
                    assert line.predicted.sent_bytes == line.sent
                elif line.predicted is not None:
                    assert line.predicted.flops == line.flops


def test_float8_is_gathered_in_bytes_and_summed_in_bfloat16() -> None:
    sizes = {"M": 8192, "K": 8192, "N": 28672}
    given = {"sizes": sizes, "mesh": {"X": 8}, "hardware": "h100"}
    narrow, wide = (explain("[M_X, K] @ [K, N_X] -> [M, N_X]", dtype=dtype, **given)  # type: ignore[arg-type]
                    for dtype in (torch.float8_e4m3fn, "bfloat16"))  # fmt: skip
    assert "float8_e4m3fn, sums in bfloat16, scales not counted" in narrow.given
    # x is gathered, dx reduced.
    assert 2 * (narrow.phases[0].sent or 0) == wide.phases[0].sent
    assert narrow.phases[1].sent == wide.phases[1].sent
    expected = cost.predict(
        "all_gather_matmul", M=8192, N=28672, K=8192, world_size=8, hardware="h100", dtype="float8_e4m3fn", casts=False
    )  # fmt: skip
    times = [line.predicted.times for line in narrow.phases[0].lines if line.predicted and line.step.kind == "matmul"]
    assert times == [expected.times]


def test_an_unknown_dtype_is_refused_without_sizes_too() -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got fp9"):
        explain("[M_X, K] @ [K, N] -> [M, N]", dtype="fp9")


def test_hardware_changes_what_a_byte_is_worth() -> None:
    # Cutting w as well saves 2 M K N * 7/8 FLOPs and sends M N * 7/8 elements of y: it pays above K FLOPs a byte.
    assert HARDWARE["h100"].flops_per_byte < 4096 < HARDWARE["h100-pcie"].flops_per_byte
    spec, sizes = "[M, K_X] @ [K, N] -> [M, N]", {"M": 4096, "K": 4096, "N": 16384}
    fast, slow = (explain(spec, sizes=sizes, mesh={"X": 8}, hardware=name) for name in ("h100", "h100-pcie"))
    assert fast.phases[0].sent == slow.phases[0].sent + 7 * 4096 * 16384 // 8 * 2  # type: ignore[operator]
    assert slow.phases[0].flops == 8 * fast.phases[0].flops  # type: ignore[operator]
    told = explain(spec, sizes=sizes, mesh={"X": 8}, hardware="h100-pcie", flops_per_byte=100.0)
    assert told.phases[0].flops == fast.phases[0].flops


def test_hardware_needs_sizes_and_a_known_name() -> None:
    with pytest.raises(ValueError, match="need sizes and mesh"):
        explain("FSDP", hardware="h100")
    with pytest.raises(ValueError, match="hardware must be one of"):
        explain("FSDP", sizes={"M": 8, "K": 8, "N": 8}, mesh={"X": 2}, hardware="abacus")
