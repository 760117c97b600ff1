"""The planner: rows of the communication table, rules, the effect of sizes, and what backward shares and keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedtp import float8
from fusedtp.calls.problems import Settings
from fusedtp.calls.program import Named, Program
from fusedtp.sharding.notation import Tensor, parse
from fusedtp.sharding.plan import MatmulPlan, Partition, plan
from fusedtp.sharding.routes import Step, moved

# For forward, dx and dw: the tensor sent (* if the dim is contracted), and the op with its dim (t if transposed).
ROWS = {
    "[M_X, K] @ [K, N_X] -> [M, N_X]": (("gather x M", "scatter dx M", "gather x M*"), ("ag 0", "rs 0", "ag 1")),
    "[M, K] @ [K, N_X] -> [M, N_X]": (("", "reduce dx", ""), ("", "ar", "")),
    "[M, K_X] @ [K_X, N] -> [M_X, N]": (("scatter y M", "gather dy M", "gather dy M*"), ("rs 0", "ag 0", "ag 1 t")),
    "[M, K_X] @ [K_X, N] -> [M, N]": (("reduce y", "", ""), ("ar", "", "")),
    "[B, D_X] @ [D, F_X] -> [B, F_X]": (("gather x D*", "scatter dx D", "gather x D"), ("ag 1", "rs 1", "ag 0")),
    "[B, F_X] @ [F_X, D] -> [B, D_X]": (("scatter y D", "gather dy D*", "gather dy D"), ("rs 1", "ag 1", "ag 0 t")),
    "[M_X, K] @ [K_X, N] -> [M_X, N]": (("gather w K*", "gather w K", "scatter dw K"), ("ag 1 t", "ag 0 t", "rs 0")),
    "[M_X, K] @ [K, N] -> [M_X, N]": (("", "", "reduce dw"), ("", "", "ar")),
}


def collectives(matmul: MatmulPlan) -> str:
    """Describe the collectives: `gather x M*` gathers x along M, which is contracted."""
    short = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduce"}
    texts = []
    for step in matmul.collectives:
        star = "*" * (step.tensor in matmul.names[:2] and step.dim in matmul.contraction)
        texts.append(f"{short[step.kind]} {step.tensor} {step.dim}{star}".strip())
    return ", ".join(texts)


def task(text: str, matmul: MatmulPlan) -> str:
    """Describe the task that runs a plan's matmul on rank 0 of two: op, dim, and t for a transposed result."""
    short = {"all_gather_matmul": "ag", "matmul_reduce_scatter": "rs", "matmul_all_reduce": "ar"}
    partition = Partition({name: 8 for name in parse(text).dim_names}, {"X": (0, 2)}, {})
    program = Program(partition, torch.float32, Settings(text, (), ()), float8.OCP)

    def named(name: str, sharding: Tensor) -> Named:
        return Named(name, sharding.names, tuple(partition.length(dim, sharding.axes(dim)) for dim in sharding.names))

    (out,) = program.matmul(matmul, [named(matmul.names[0], matmul.a)], [named(matmul.names[1], matmul.b)])
    steps = program.finish([(out, matmul.c.names)]).steps
    if len(steps) != 1 or (task := steps[0].task) is None:
        return ""
    dim = "" if task.op.kind == "all_reduce" else str(task.dim)
    return f"{short[task.op.name]} {dim} {'t' * task.transposed}".strip()


@pytest.mark.parametrize("text", ROWS)
def test_named_rows(text: str) -> None:
    plans, (sent, ops) = plan(text), ROWS[text]
    assert tuple(map(collectives, plans.matmuls)) == sent
    assert not [step for matmul in plans.matmuls for step in matmul.steps if step.kind == "slice"]
    assert tuple(task(text, matmul) for matmul in plans.matmuls) == ops
    # The usual steps, if none are cheaper.
    one_rank = plan(text, sizes=dict.fromkeys(plans.spec.dim_names, 64), mesh={"X": 1}, start_bytes=0)
    assert [matmul.steps for matmul in one_rank.matmuls] == [matmul.steps for matmul in plans.matmuls]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[M, K] @ [K, N] -> [M, N]", ""),
        ("[M, K_X] @ [K, N] -> [M, N]", "gather x K*"),
        ("[M, K] @ [K_X, N] -> [M, N]", "gather w K*"),
        ("[M, K_X] @ [K, N] -> [M_X, N]", "gather x K*"),
        ("[M, K_X] @ [K_X, N] -> [M, N]{U_X}", ""),
        ("[M, K_X] @ [K, N] -> [M, N]{U_X}", ""),  # w is sliced
        ("[M_X, K] @ [K, N_X] -> [M_X, N]", "gather w N"),
        ("[M_X, K] @ [K, N_X] -> [M, N]", "gather w N, gather y M"),
        ("[M_X, K] @ [K, N] -> [M, N]", "gather y M"),
        ("[M_X, K] @ [K, N] -> [M, N_X]", "gather x M"),  # the same bytes as gathering y, but fused
        ("[M, K] @ [K, N] -> [M_X, N]", ""),
        ("[M, K] @ [K, N] -> [M, N_X]", ""),
        ("[M, K_XY] @ [K_XY, N] -> [M, N]", "reduce y, reduce y"),
        ("[M, K_XY] @ [K_XY, N] -> [M_X, N_Y]", "scatter y M, scatter y N"),
        ("[M_X, K_Y] @ [K_Y, N] -> [M_X, N]", "reduce y"),
        ("[M_X, K] @ [K_X, N_Y] -> [M_X, N_Y]", "gather w K*"),
    ],
)
def test_rules(text: str, wanted: str) -> None:
    assert collectives(plan(text).forward) == wanted


def test_slices_take_work_away() -> None:
    """A split result of whole operands is computed split, not computed whole and then cut."""
    steps = plan("[M, K] @ [K, N] -> [M_X, N]").forward.steps
    assert [str(step) for step in steps] == ["slice x over X along M", "matmul y"]


def test_sizes_decide() -> None:
    fsdp, mesh = "[M_X, K] @ [K_X, N] -> [M_X, N]", {"X": 8}
    many = plan(fsdp, sizes={"M": 16384, "K": 4096, "N": 4096}, mesh=mesh)
    assert [matmul.steps for matmul in many.matmuls] == [matmul.steps for matmul in plan(fsdp).matmuls]
    assert many.forward.reason.startswith("the usual way: 29.36 MB in 1 collective and 68.72 GFLOP against 234.9 MB")
    # With few rows, activations travel instead of the weight.
    few = plan(fsdp, sizes={"M": 16, "K": 4096, "N": 4096}, mesh=mesh).forward
    assert collectives(few) == "gather x M, scatter y M"
    assert few.rejected == (Step("all_gather", "w", "X", "K"),)
    assert few.reason.endswith("for all-gather w over X along K")
    # Gathering x sends K columns and computes everything on every rank; reducing y sends N twice and computes an
    # eighth.
    split_x, sizes = "[M, K_X] @ [K, N] -> [M, N]", {"M": 4096, "K": 4096, "N": 4096}
    assert collectives(plan(split_x, sizes=sizes, mesh=mesh, flops_per_byte=1e9).forward) == "gather x K*"
    assert collectives(plan(split_x, sizes=sizes, mesh=mesh, flops_per_byte=10).forward) == "reduce y"


def test_the_fused_step_sends_the_most() -> None:
    text = "[M_XY, K] @ [K_X, N_Y] -> [M_X, N_Y]"  # gathers x over Y and w over X
    mesh = {"X": 2, "Y": 2}
    for m, wanted in ((65536, "x"), (512, "w")):
        plans = plan(text, sizes={"M": m, "K": 4096, "N": 4096}, mesh=mesh, start_bytes=10**9)
        assert collectives(plans.forward).count("gather") == 2
        assert plans.forward.fused.tensor == wanted


def test_what_backward_shares_and_keeps() -> None:
    row_parallel = plan("[M, K_X] @ [K_X, N] -> [M_X, N]")
    assert [str(step) for step in row_parallel.shared] == ["all-gather dy over X along M"]
    assert row_parallel.gathered_again == ()
    fsdp = plan("[M_X, K] @ [K_X, N] -> [M_X, N]")
    assert fsdp.shared == ()
    assert [str(step) for step in fsdp.gathered_again] == ["all-gather w over X along K"]
    column_parallel = plan("[M_X, K] @ [K, N_X] -> [M, N_X]")
    assert [str(step) for step in column_parallel.gathered_again] == ["all-gather x over X along M"]


def test_partial_results_have_whole_gradients() -> None:
    plans = plan("[M, K_X] @ [K_X, N] -> [M, N]{U_X}")
    assert str(plans.dx.a) == str(plans.dw.b) == "[M, N]"
    assert [collectives(matmul) for matmul in plans.matmuls] == ["", "", ""]


def test_a_plan_depends_on_its_arguments_only() -> None:
    text = "[M_X, K] @ [K_X, N_Y] -> [M_X, N_Y]"
    sizes = {"M": 4096, "K": 1024, "N": 2048}
    one = plan(text, sizes=sizes, mesh={"X": 2, "Y": 4})
    other = plan(parse(text), sizes=dict(reversed(sizes.items())), mesh={"Z": 3, "Y": 4, "X": 2})
    assert one == other
    fused = plan(text, sizes=sizes, mesh={"X": 1, "Y": 1}).forward.fused
    assert (fused.kind, fused.tensor, fused.dim) == ("all_gather", "w", "K")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"sizes": {"M": 1, "K": 1, "N": 1}}, "go together"),
        ({"mesh": {"X": 2}}, "go together"),
        ({"sizes": {"M": 1, "K": 1}, "mesh": {"X": 2}}, "M, K, N"),
        ({"sizes": {"M": 1, "K": 1, "N": 1, "Q": 1}, "mesh": {"X": 2}}, "M, K, N"),
        ({"sizes": {"M": 1, "K": 1, "N": 1}, "mesh": {"Y": 2}}, "no axis X"),
        ({"sizes": {"M": -1, "K": 1, "N": 1}, "mesh": {"X": 2}}, "0 or more"),
        ({"sizes": {"M": 1, "K": 1, "N": 1}, "mesh": {"X": 0}}, "1 or more"),
        ({"sizes": {"M": 1, "K": 1, "N": 1}, "mesh": {"X": 2}, "dtype": "int8"}, "int8"),
    ],
)
def test_sizes_that_do_not_fit(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        plan("[M_X, K] @ [K, N] -> [M_X, N]", **arguments)


def test_steps_that_do_not_apply() -> None:
    x = parse("[M_XY, K] @ [K, N] -> [M_XY, N]").a
    assert str(moved(x, Step("all_gather", "x", "Y", "M"))) == "[M_X, K]"
    for step in (
        Step("all_gather", "x", "X", "M"),  # X is not the minor axis of M
        Step("slice", "x", "X", "K"),
        Step("all_reduce", "x", "X"),
    ):
        with pytest.raises(ValueError, match="does not apply"):
            moved(x, step)
