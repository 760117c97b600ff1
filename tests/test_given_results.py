"""Results in tensors that the caller gives: several of a task, with epilogues. `test_ops` does that with every op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp.bench.ranks import RankPool
from fusedtp.calls.bound import BoundTask
from fusedtp.epilogue import Epilogue
from fusedtp.op import OPS, Task
from fusedtp.schedules import NAMES
from fusedtp.shards import even_sizes

from . import direct
from .beside import CPU
from .harness import spread
from .soak.layouts import laid_out
from .test_ops import running_as


def several_results(group: ProcessGroup, schedule: str, chunks: bool) -> None:
    """Give tensors for several results, with epilogues: they are those of new tensors."""
    rank, n, random = group.rank(), group.size(), torch.Generator().manual_seed(group.rank())
    m_sizes, k_sizes = even_sizes(37, n), even_sizes(32, n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    def check(op: str, operands: dict[str, Tensor], give: Sequence[str | None], **options: Any) -> None:
        asked = {name: options.pop(name) for name in Epilogue._fields if name in options}
        epilogue = Epilogue(**asked).named(operands, sum(name in ("b", "b1") for name in operands))
        shapes = {name: shape_of(each) for name, each in operands.items()}
        task = Task(OPS[op], shapes, torch.float32, epilogue=epilogue, **direct.further_of(operands), **options)
        ready = BoundTask(task, schedule, group, CPU)
        expected = ready.run(operands)
        outs = [
            None if layout is None else laid_out(torch.full_like(each, torch.nan), layout)
            for layout, each in zip(give, expected, strict=False)
        ]
        found = ready.run(operands, outs)
        assert len(found) == len(expected) >= len(outs)
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            said = f"{op}, {options}, {give}: result {i}"
            # A library may add in another order for other strides.
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4, msg=lambda text, said=said: f"{said}: {text}")
        for out, one in zip(outs, found, strict=False):
            assert out is None or out is one

    a, b, b1 = normal(m_sizes[rank], 24), normal(24, 16), normal(24, 16)
    rows = {"a": a, "b": b, "bias": normal(16), "b1": b1, "bias1": normal(16)}
    right = normal(sum(m_sizes), 8)
    with running_as(group, "by chunk" if chunks else "plain"):
        check("all_gather_matmul", rows | {"c": right}, ["sliced", "transposed", "stepped"], sizes=m_sizes)
        check("all_gather_matmul", rows, [None, "stepped", "sliced"], sizes=m_sizes, whole=True)
        check("all_gather_matmul", {"a": a, "b": b}, ["sliced"], sizes=m_sizes, transposed=True)
        for keeps in (False, True):
            check("all_gather_matmul", rows, ["stepped", "sliced"], sizes=m_sizes, activation="gelu", keeps=keeps)
            check("all_gather_matmul", rows, ["sliced"], sizes=m_sizes, activation="swiglu", keeps=keeps)
        columns = {"a": normal(20, k_sizes[rank]), "b": normal(32, 16)}
        check("all_gather_matmul", columns, ["transposed", "diagonal"], sizes=k_sizes, dim=1, whole=True)
        terms = {"a": normal(37, 12), "b": normal(12, 16)}
        gathers = {"c": normal(37, 9), "g": normal(m_sizes[rank], 10)}
        check("matmul_reduce_scatter", terms | gathers, ["stepped", "sliced"], sizes=m_sizes)
        check("matmul_reduce_scatter", terms, ["stepped"], sizes=even_sizes(16, n), dim=1)
        normed = terms | {"norm_weight": normal(16), "residual": normal(m_sizes[rank], 16), "bias": normal(16)}
        check("matmul_reduce_scatter", normed, ["sliced"], sizes=m_sizes, norm="rms_norm", eps=1e-5)
        for algorithm in ("auto",) if schedule == "unfused" else ("one_shot", "two_shot"):
            check("matmul_all_reduce", terms | {"residual": normal(37, 16)}, ["stepped"], algorithm=algorithm)
    whole = {"a": normal(37, 16), "b": normal(16, 16)}
    if schedule == "fused":
        check("matmul_all_reduce", whole, ["sliced"], leaves=8)
        check("all_gather_matmul", {"a": a, "b": b}, ["sliced"], sizes=m_sizes, leaves=8)


def shape_of(x: Tensor) -> tuple[int, int]:
    return (x.shape[0], x.shape[1]) if x.ndim == 2 else (1, x.shape[0])


@pytest.mark.parametrize(("schedule", "world_size"), [*spread(list(NAMES), [2, 1]), ("decomposed", 3)])
def test_results_go_into_given_tensors(pool: RankPool, schedule: str, world_size: int) -> None:
    for chunks in (False, True) if schedule == "decomposed" else (False,):
        pool.run(several_results, schedule, chunks, world_size=world_size)


def unfit(group: ProcessGroup) -> None:
    x = torch.ones(4, 3)
    rows = {"a": x, "b": torch.ones(3, 5)}
    kept = Epilogue(activation="gelu", keeps=True)
    task = Task(OPS["all_gather_matmul"], {"a": (4, 3), "b": (3, 5)}, x.dtype, (4, 4), epilogue=kept)
    ready = BoundTask(task, "decomposed", group, CPU)
    for outs, why in (
        ([torch.empty(8, 4)], r"result 0 must be \(\(8, 5\), torch.float32, device\(type='cpu'\)\), got \(\(8, 4\), "),
        ([torch.empty(8, 5, dtype=torch.float64)], "got .*float64"),
        ([torch.empty(8, 5, device="meta")], "got .*meta"),
        ([torch.empty(8, 1).expand(8, 5)], r"one place for several elements: \(1, 0\)"),
        ([None, torch.empty(8, 5)], "result 1 must be a new tensor"),
        ([None, None, None], "3 tensors are given for 2 results"),
    ):
        with pytest.raises(ValueError, match=f"all_gather_matmul: .*{why}"):
            ready.run(rows, outs)
    # Nothing was sent.
    assert len(ready.run(rows)) == 2


def test_tensors_that_do_not_fit_are_refused(pool: RankPool) -> None:
    pool.run(unfit, world_size=2)
