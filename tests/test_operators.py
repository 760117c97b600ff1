"""What the public functions call: operators, their fakes and their refusals; tasks and the results that they tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, library
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.calls.problems import Settings
from fusedtp.op import Options

from . import direct


def opchecked(group: ProcessGroup) -> None:
    """Schemas hold, and fakes have the shape, dtype and strides of what the operators return."""
    rank, name, sizes = group.rank(), group.group_name, [3, 1]
    a = torch.randn(4, 6)
    tail = ("auto", "")
    tests = ("test_schema", "test_faketensor")
    for x, op, lengths, schedule, algorithm, leaves in (
        (a[: sizes[rank]], "all_gather", sizes, "unfused", "auto", 0),
        (a.t().contiguous().t(), "reduce_scatter", sizes, "unfused", "auto", 0),
        (a.t(), "all_reduce", [], "unfused", "auto", 0),
        (a, "reduce_scatter", sizes, "fused", "auto", 8),
        (a, "all_reduce", [], "fused", "two_shot", 8),
    ):
        arguments = (x, op, lengths, rank, name, schedule, algorithm, *tail, leaves)
        library.opcheck(torch.ops.fusedtp.collective, arguments, test_utils=tests)
    library.opcheck(torch.ops.fusedtp.as_it_is, (a.t(), name, "unfused"), test_utils=tests)
    weight, bias = torch.randn(5, 6), torch.randn(5)
    for x, w, with_bias, spec, numbers in (
        (a[: sizes[rank]], weight, bias, "[R0_X, K] @ [K, N_X] -> [R0, N_X]", (4, 6, 10, 2, *sizes, 0, 0)),
        (a[:, : sizes[rank]], weight[:, :4], None, "[R0, K_X] @ [K, N_X] -> [R0, N_X]", (4, 4, 10, 0, 2, *sizes, 0)),
        (a, weight, bias, "[R0, K_X] @ [K_X, N] -> [R0_X, N]", (4, 12, 5, 2, *sizes, 0, 0)),
        (a, weight, bias, "[R0, K_X] @ [K_X, N] -> [R0, N_X]", (4, 12, 5, 0, 0, 2, 0, 5)),
        (a, weight, bias, "[R0, K_X] @ [K_X, N] -> [R0, N]", (4, 12, 5, 0, 0, 0)),
    ):
        settings = Settings(spec, (name,), (rank,), Options("unfused")).text
        given = ([x, w], "x w") if with_bias is None else ([x, w, with_bias], "x w bias")
        library.opcheck(torch.ops.fusedtp.matmul, (*given, False, settings, numbers), test_utils=tests)


def test_ops_and_their_fakes(pool: RankPool) -> None:
    pool.run(opchecked, world_size=2)


def of_every_op(rank: int, sizes: tuple[int, ...]) -> list[tuple[str, list[Tensor | None], dict[str, Any]]]:
    """Each op, its operands on this rank, and options: rows or columns, split so, with whatever they may be with."""
    M, N, K, C, own = sum(sizes), 5, 6, 3, sizes[rank]
    a, b, bias, sums = torch.randn(M, K), torch.randn(K, N), torch.randn(N), torch.randn(M, M)
    right, left, x = torch.randn(M, C), torch.randn(C, M), torch.randn(own, N)
    rows: dict[str, Any] = {"sizes": sizes}
    return [
        ("all_gather_matmul", [a[:own], b, bias], rows),
        ("all_gather_matmul", [a[:own], b, None], rows | {"transposed": True}),
        ("all_gather_matmul", [a.t()[:, :own], a.new_ones(M, N), None], rows | {"dim": 1}),
        ("all_gather_matmul", [a[:own], b, None, right], rows),
        ("matmul_reduce_scatter", [a, b, bias], rows),
        ("matmul_reduce_scatter", [sums, sums.t(), None], rows | {"dim": 1}),
        ("matmul_reduce_scatter", [a, b, None, left, x], rows),
        *(("matmul_all_reduce", [a, b, bias], {"algorithm": each}) for each in ("auto", "one_shot", "two_shot")),
        ("all_gather", [a[:own]], rows),
        ("reduce_scatter", [a.t().contiguous().t()], rows),
        ("all_reduce", [a.t()], {}),
    ]


def as_told(group: ProcessGroup, schedule: str, sizes: tuple[int, ...]) -> None:
    """What a task gives has the shapes that it tells, one row behind the other."""
    for op, operands, options in of_every_op(group.rank(), sizes):
        if schedule == "unfused" and options.get("algorithm", "auto") != "auto":
            continue
        task = direct.task_of(op, *operands, **options)
        outs, shapes = direct.run(op, schedule, group, *operands, **options), task.results(group.rank())
        for out, shape in zip(outs, shapes, strict=True):
            assert (tuple(out.shape), out.dtype) == (shape, task.dtype), f"{op} {options}"
            assert out.is_contiguous(), f"{op} {options}"


@pytest.mark.parametrize("schedule", ["unfused", "decomposed", "fused"])
def test_results_of_tasks_are_what_they_tell(pool: RankPool, schedule: str) -> None:
    pool.run(as_told, schedule, (3, 1), world_size=2)
    pool.run(as_told, schedule, (4, 0, 1), world_size=3)
    pool.run(as_told, schedule, (4,), world_size=1)


def refuses_a_gradient(group: ProcessGroup) -> None:
    a, b = torch.randn(2, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    settings = Settings("[M, K_X] @ [K_X, N] -> [M, N]", (group.group_name,), (group.rank(),), Options("unfused"))
    given = (settings.text, (2, 2 * group.size(), 2, 0, 0, 0))
    (dx,) = torch.ops.fusedtp.matmul_backward([a, b], "dy w", [True, False, False], *given)
    with pytest.raises(NotImplementedError, match="second derivatives of fusedtp's matmuls"):
        dx.sum().backward()


def test_an_operator_without_a_gradient_says_so(pool: RankPool) -> None:
    pool.run(refuses_a_gradient, world_size=2)


def on_meta(group: ProcessGroup) -> list[tuple[int, ...]]:
    """Shapes without values or a message."""
    before = group._get_backend(torch.device("cpu"))._get_sequence_number_for_group()
    x, weight = torch.ones(8, 6, device="meta"), torch.ones(5, 6, device="meta")
    outs = [
        fusedtp.all_gather_linear(x, weight, group=group),
        fusedtp.linear_reduce_scatter(x, weight, group=group),
        fusedtp.all_gather(x, group=group),
    ]
    assert group._get_backend(torch.device("cpu"))._get_sequence_number_for_group() == before
    return [tuple(out.shape) for out in outs]


def test_meta_tensors_have_shapes(pool: RankPool) -> None:
    assert pool.run(on_meta, world_size=2) == [[(16, 5), (4, 5), (16, 6)]] * 2
