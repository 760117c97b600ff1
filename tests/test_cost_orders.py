"""What the cost model says of orders of sums: a tree's, and any, which NVLink's switch makes (docs/guide/switch.md)."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from fusedtp import cost
from fusedtp.bench.cli import app


def test_a_tree_sends_float32_and_is_for_fused_alone() -> None:
    sizes: dict[str, Any] = {"M": 4096, "N": 8192, "K": 28672, "world_size": 8}
    for op, bytes_of_a_share in (("matmul_reduce_scatter", 4), ("matmul_all_reduce", 4 + 2), ("all_gather_matmul", 2)):
        usual, tree = (cost.predict(op, order=order, **sizes) for order in ("rank", "tree"))
        moved = 4096 * (28672 if op == "all_gather_matmul" else 8192)
        assert tree.sent_bytes == 7 * moved // 8 * bytes_of_a_share
        assert (tree.unfused_us, tree.comm_us, tree.decomposed_us) == (usual.unfused_us, usual.comm_us, None)
        assert usual.fused_us < tree.fused_us < 2 * usual.fused_us
        assert any("of the library's matmul" in said and "73%" in said for said in tree.assumptions)
        assert ("subtrees travel in float32" in tree.assumptions) == (op != "all_gather_matmul")
    for wrong, message in (
        ({"order": "ranks"}, "order must be rank, any or tree"),
        ({"dtype": "mxfp8"}, "16 or 32 bits"),
    ):
        with pytest.raises(ValueError, match=message):
            cost.predict("matmul_all_reduce", **({"order": "tree"} | wrong | sizes))
    result = CliRunner().invoke(app, ["predict", "matmul_all_reduce", "--order", "tree"])
    assert "subtrees travel in float32" in result.output


def test_sums_in_the_switch_pay_from_a_few_hundred_rows_on() -> None:
    sizes: dict[str, Any] = {"N": 8192, "world_size": 8, "hardware": "h100"}
    for M in (1, 64, 256, 257, 512, 1024, 4096, 16384):
        usual, free = (
            cost.predict("matmul_all_reduce", M=M, K=8192, order=order, **sizes) for order in ("rank", "any")
        )
        assert (free.unfused_us, free.decomposed_us) == (usual.unfused_us, usual.decomposed_us)
        # What docs/guide/switch.md says; few rows are better off without.
        assert (free.algorithm == "switch") == (M > 256)
        assert ("the switch makes the sums of fused" in free.assumptions) == (M > 256)
        assert free.unfused_us / free.fused_us >= (1.65 if M >= 512 else 1.5)
        assert free.fused_us <= usual.fused_us
        assert M <= 256 or usual.unfused_us / usual.fused_us < 1.35
    # Of a long contraction, whose matmul takes longer than its sums.
    for M, least in ((257, 1.15), (1024, 1.3), (4096, 1.25), (16384, 1.2)):
        found = cost.predict("matmul_all_reduce", M=M, K=28672, order="any", **sizes)
        assert found.unfused_us / found.fused_us > least
    # Nothing else is otherwise, and no machine that is not known to have one.
    for op, hardware in (
        ("matmul_reduce_scatter", "h100"),
        ("all_gather_matmul", "h100"),
        ("matmul_all_reduce", "a100"),
    ):
        both = [
            cost.predict(op, M=4096, N=8192, K=8192, world_size=8, hardware=hardware, order=order)
            for order in ("rank", "any")
        ]
        assert both[0].times == both[1].times
    result = CliRunner().invoke(
        app, ["predict", "matmul_all_reduce", "--n", "8192", "--order", "any", "--world-size", "8"]
    )
    assert result.exit_code == 0
    assert "the switch makes the sums of fused" in result.output
