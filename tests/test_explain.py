"""The output of explain and the communication table, against numbers worked out by hand."""

from __future__ import annotations

import re

import pytest
import torch
from typer.testing import CliRunner

from fusedtp import cost
from fusedtp.bench.cli import app
from fusedtp.cost.hardware import HARDWARE
from fusedtp.explain import NAMED, explain, table_markdown
from fusedtp.sharding.notation import parse


def test_bytes_and_flops() -> None:
    sizes = {"M": 8192, "K": 4096, "N": 28672}
    found = explain("[M_X, K] @ [K, N_X] -> [M, N_X]", sizes=sizes, mesh={"X": 8}, dtype="bfloat16")
    x_bytes, num_flops = 7 * (8192 // 8) * 4096 * 2, 2 * 8192 * 4096 * (28672 // 8)
    for phase in found.phases:
        assert (phase.sent, phase.flops) == (x_bytes, num_flops)
    assert found.given == "M=8192 K=4096 N=28672, mesh X=8, bfloat16"
    forward = str(found).split("\n\n")[1]
    assert re.search(r"all-gather x over X along M, one op +58\.72 MB\n +matmul y, one op +240\.5 GFLOP", forward)
    assert re.search(r"\n +total +58\.72 MB +240\.5 GFLOP\n", forward)
    assert str(found).endswith(": all-gather x over X along M")
    assert max(map(len, str(found).split("\n"))) < 80


def test_all_reduce_sends_two_shares_and_uneven_shards_count_at_the_largest() -> None:
    sizes = {"M": 64, "K": 32, "N": 16}
    found = explain("row-parallel, y whole", sizes=sizes, mesh={"X": 4}, dtype="float32")
    assert [phase.sent for phase in found.phases] == [2 * 3 * (64 * 16 // 4) * 4, 0, 0]
    found = explain("FSDP", sizes={"M": 9, "K": 10, "N": 3}, mesh={"X": 4}, dtype="float64", start_bytes=10**6)
    assert (found.phases[0].sent, found.phases[0].flops) == (3 * 3 * 3 * 8, 2 * 3 * 10 * 3)


def test_a_gather_that_both_gradients_share_counts_once() -> None:
    found = explain("row-parallel, y split by rows", sizes={"M": 64, "K": 32, "N": 16}, mesh={"X": 4}, dtype="float32")
    shard = 3 * 16 * 16 * 4
    assert [phase.sent for phase in found.phases] == [shard, shard, 0]
    *_, dw = found.phases
    assert [str(line) for line in dw.lines] == ["all-gather dy over X along M, done for dx", "matmul dw"]
    assert "In all, each rank sends 6.144 kB and" in str(found)


def test_formulas_without_sizes() -> None:
    found = explain("[B, S_{dp,tp}, K] @ [K_{dp}, N_{tp}] -> [B, S_{dp}, N_{tp}]")
    assert [line.amount for line in found.phases[0].lines] == [
        "(dp-1) * K/dp * N/tp elements",
        "(tp-1) * B * S/dp/tp * K elements",
        "2 * B * S/dp * K * N/tp FLOP",
    ]
    assert found.phases[0].sent is None
    assert found.phases[0].flops is None
    assert "all-gather w over dp along K          (dp-1) * K/dp * N/tp elements" in str(found)
    amounts = [line.amount for line in explain("row-parallel, y whole").phases[0].lines]
    assert amounts == ["2 * M * K/X * N FLOP", "2 (X-1)/X * M * N elements"]


def test_names_are_notations_and_others_are_refused() -> None:
    assert explain("FSDP") == explain(NAMED["FSDP"])
    for spec, given, text in (
        ("FSDP2", {}, "expected"),
        ("FSDP", {"dtype": "fp9"}, "dtype must be one of .*, got fp9"),
        ("FSDP", {"hardware": "h100"}, "need sizes and mesh"),
        ("FSDP", {"hardware": "abacus", "sizes": {"M": 8, "K": 8, "N": 8}, "mesh": {"X": 2}}, "one of .* got 'abacus'"),
    ):
        with pytest.raises(ValueError, match=text):
            explain(spec, **given)  # type: ignore[arg-type]


def test_table_over_two_axes() -> None:
    text = table_markdown({"FSDP, column-parallel": "[M_X, K] @ [K_X, N_Y] -> [M_X, N_Y]"})
    assert text.split("\n")[2] == (
        "| FSDP, column-parallel `[M_X, K] @ [K_X, N_Y] -> [M_X, N_Y]` | all-gather w along the contraction over X"
        " | all-gather w again over X; all-reduce over Y | reduce-scatter over X |"
    )


def test_command_prints_the_table_within_80_columns() -> None:
    lines = CliRunner().invoke(app, ["explain", "--table"]).output.splitlines()
    assert max(map(len, lines)) <= 80
    at = lines.index("FSDP: [M_X, K] @ [K_X, N] -> [M_X, N]")
    assert lines[at + 1 : at + 4] == [
        "  forward: all-gather w along the contraction", "  dx: all-gather w again", "  dw: reduce-scatter"
    ]  # fmt: skip


def test_predicted_times() -> None:
    spec, sizes = "[M_X, K] @ [K, N_X] -> [M, N_X]", {"M": 8192, "K": 8192, "N": 28672}
    found = explain(spec, sizes=sizes, mesh={"X": 8}, hardware="h100")
    at = {"M": 8192, "world_size": 8, "hardware": "h100"}
    gather = cost.predict("all_gather_matmul", N=28672, K=8192, **at)
    scatter = cost.predict("matmul_reduce_scatter", N=8192, K=28672, **at)
    # x.T @ dy gathers x along the contraction.
    inner = cost.predict("all_gather_matmul", N=3584 * 8, K=8192, gather_dim=1, **at)
    forward, dx, dw = ([line.predicted for line in phase.lines] for phase in found.phases)
    for (alone, both), expected in ((forward, gather), (dx[::-1], scatter)):
        assert (alone.comm_us, both.times) == (expected.comm_us, expected.times)
    assert dw[1].work == inner.work
    assert "times predicted for NVIDIA H100 SXM, not measured" in found.given
    times = ", ".join(f"{us:.1f} us {schedule}" for schedule, us in gather.times.items())
    assert times in str(found)
    assert "predicted" not in str(explain(spec, sizes=sizes, mesh={"X": 8}))
    for spec in ("[M_X, K] @ [K_X, N_Y] -> [M_X, N_Y]", "[M, K_X] @ [K_X, N_Y] -> [M, N]", *NAMED.values()):
        sizes = dict.fromkeys(parse(spec).dim_names, 4096)
        found = explain(spec, sizes=sizes, mesh={"X": 4, "Y": 2}, hardware="a100")
        for line in (line for phase in found.phases for line in phase.lines):
            assert (line.predicted is None) == (line.step.kind == "slice" or line.done)
            if line.step.is_collective and not line.done:
                assert line.predicted.sent_bytes == line.sent
            elif line.predicted is not None:
                assert line.predicted.flops == line.flops


def test_float8_is_gathered_in_bytes_and_summed_in_bfloat16() -> None:
    sizes = {"M": 8192, "K": 8192, "N": 28672}
    given = {"sizes": sizes, "mesh": {"X": 8}, "hardware": "h100"}
    narrow, wide = (explain("[M_X, K] @ [K, N_X] -> [M, N_X]", dtype=dtype, **given)  # type: ignore[arg-type]
                    for dtype in (torch.float8_e4m3fn, "bfloat16"))  # fmt: skip
    assert "float8_e4m3fn, sums in bfloat16, scales not counted" in narrow.given
    # x is gathered, dx is reduced.
    assert 2 * (narrow.phases[0].sent or 0) == wide.phases[0].sent
    assert narrow.phases[1].sent == wide.phases[1].sent
    expected = cost.predict(
        "all_gather_matmul", M=8192, N=28672, K=8192, world_size=8, hardware="h100", dtype="float8_e4m3fn", casts=False
    )  # fmt: skip
    times = [line.predicted.times for line in narrow.phases[0].lines if line.predicted and line.step.kind == "matmul"]
    assert times == [expected.times]


def test_hardware_changes_what_a_byte_is_worth() -> None:
    # Slicing w too saves 2 M K N * 7/8 FLOPs and sends M N * 7/8 elements of y: it pays above K FLOPs a byte.
    assert HARDWARE["h100"].flops_per_byte < 4096 < HARDWARE["h100-pcie"].flops_per_byte
    spec, sizes = "[M, K_X] @ [K, N] -> [M, N]", {"M": 4096, "K": 4096, "N": 16384}
    fast, slow = (explain(spec, sizes=sizes, mesh={"X": 8}, hardware=name) for name in ("h100", "h100-pcie"))
    assert fast.phases[0].sent == slow.phases[0].sent + 7 * 4096 * 16384 // 8 * 2  # type: ignore[operator]
    assert slow.phases[0].flops == 8 * fast.phases[0].flops  # type: ignore[operator]
    told = explain(spec, sizes=sizes, mesh={"X": 8}, hardware="h100-pcie", flops_per_byte=100.0)
    assert told.phases[0].flops == fast.phases[0].flops
