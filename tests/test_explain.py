"""What explain prints and the communication table says, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from fusedtp.errors import NotationError
from fusedtp.explain import NAMED, Row, explain, table, table_markdown
from fusedtp.notation import parse


def test_bytes_and_flops() -> None:
    sizes = {"M": 8192, "K": 4096, "N": 28672}
    found = explain("[M_X, K] @ [K, N_X] -> [M, N_X]", sizes=sizes, mesh={"X": 8}, dtype="bfloat16")
    x_bytes, num_flops = 7 * (8192 // 8) * 4096 * 2, 2 * 8192 * 4096 * (28672 // 8)
    for phase in found.phases:
        assert (phase.sent, phase.flops) == (x_bytes, num_flops)
    assert found.given == "M=8192 K=4096 N=28672, mesh X=8, bfloat16"
    forward = str(found).split("\n\n")[1].split("\n")
    assert forward[:3] == [
        "y = x @ w       [M_X, K] @ [K, N_X] -> [M, N_X]",
        "    all-gather x over X along M, fused          58.72 MB",
        "    matmul y, fused                             240.5 GFLOP",
    ]
    assert str(found).endswith("again in backward, only shards being kept: all-gather x over X along M")


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
    assert "all-gather w over dp along K                (dp-1) * K/dp * N/tp elements" in str(found)
    amounts = [line.amount for line in explain("row-parallel, y whole").phases[0].lines]
    assert amounts == ["2 * M * K/X * N FLOP", "2 (X-1)/X * M * N elements"]


def test_names_are_notations_and_others_are_refused() -> None:
    assert explain("FSDP") == explain(NAMED["FSDP"])
    with pytest.raises(NotationError):
        explain("FSDP2")


def test_table() -> None:
    assert table() == [
        Row(name, str(parse(NAMED[name])), forward, dx, dw)
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
