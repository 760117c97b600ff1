"""What lies beside an operand's rows reaches no result, even where a library's matmul multiplies it: in an arena, or
in the tensor that a caller's operand is a view of.

On processors with AMX, oneDNN multiplies bfloat16 and float16 in steps of 32 along K and, in the versions that torch
2.11 to 2.13 bring, lets zeros on the other side cancel what it reads beside a row; NaN times 0 is NaN
(github.com/uxlfoundation/oneDNN issue 5717, pull requests 5603 and 5723). Here every matmul of the library does so, on
any processor, while arenas and fresh memory hold nothing but NaN.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp.bench.ranks import RankPool
from fusedtp.schedules import decomposed
from fusedtp.schedules import local as padding
from fusedtp.schedules.verbs import Product
from fusedtp.workspaces import generation, registry

from .soak.mixed import OPS, Call, Operands, draw

STEP = 32
CPU = torch.device("cpu")


def beside(x: Tensor) -> Tensor | None:
    """What is read beside the rows of x [rows, K] up to a whole step of K; None for rows that are read as they are.

    The library itself copies the last rows, as it may not read past the end.
    """
    rows, K = x.shape
    if x.stride(1) != 1 or K % STEP == 0 or rows < 2 or x.stride(0) <= K:
        return None
    read = min(-(-K // STEP) * STEP, x.stride(0)) - K
    return x.as_strided((rows - 1, read), x.stride(), x.storage_offset() + K)


def leak(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Add to out = a @ b what is beside the rows of a, and of b as the library sees it transposed, times 0."""
    for operand, result in ((a, out), (b.t(), out.t())):
        if operand.dtype in (torch.bfloat16, torch.float16) and (read := beside(operand)) is not None:
            result[:-1] += (read * 0).sum(1, keepdim=True)


@contextmanager
def leaking() -> Iterator[list[int]]:
    """Every matmul of torch multiplies padding too. Counted are the narrow ones, and those of them out of an arena."""
    counts = [0, 0]
    right_mm, right_addmm, right_addmm_ = torch.mm, torch.addmm, Tensor.addmm_

    def watched(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        counts[0] += a.dtype != torch.float32
        counts[1] += a.dtype != torch.float32 and any(in_an_arena(each) for each in (a, b))
        leak(a, b, out)
        return out

    def mm(a: Tensor, b: Tensor, **out: Tensor) -> Tensor:
        return watched(a, b, right_mm(a, b, **out))

    def addmm(bias: Tensor, a: Tensor, b: Tensor, **out: Tensor) -> Tensor:
        return watched(a, b, right_addmm(bias, a, b, **out))

    def addmm_(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return watched(a, b, right_addmm_(out, a, b))

    with mock.patch.multiple(torch, mm=mm, addmm=addmm), mock.patch.object(Tensor, "addmm_", addmm_):
        yield counts


def in_an_arena(x: Tensor) -> bool:
    return any(
        arena.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        for ws in registry._workspaces.values()
        for arena in ws._arena.tensors
    )


def poison(group: ProcessGroup) -> None:
    """NaN, in any dtype, all over this rank's arena but for its signals, while no rank is in an op."""
    dist.barrier(group=group)
    ws = registry.get(group, CPU)
    ws._arena.tensors[ws.rank][ws.data_offset :].fill_(0xFF)
    dist.barrier(group=group)


def calls(seed: int, number: int, world_size: int, schedules: tuple[str, ...]) -> list[Call]:
    """Every op by every schedule, at random sizes of which few are whole steps."""
    found = []
    for at in range(number):
        rng = random.Random(f"{seed}/{at}")
        call = draw(rng, world_size)
        while call.op != OPS[at % len(OPS)]:
            call = draw(rng, world_size)
        schedule, dtype = schedules[at // len(OPS) % len(schedules)], ("bfloat16", "float16")[at // 3 % 2]
        found.append(replace(call, schedule=schedule, dtype=dtype, algorithm="auto", backward=True))
    return found


def is_wrong(operands: Operands, group: ProcessGroup, few_rows: int, *, raises: bool) -> bool:
    """Whether the call's results are wrong, or AssertionError. few_rows: up to so many are multiplied together."""
    with mock.patch.object(decomposed, "FEW_ROWS", few_rows):
        # What has been prepared for another one is prepared anew.
        generation.changed()
        results = operands.run(group)
    try:
        operands.check(results)
    except AssertionError:
        if raises:
            raise
        return True
    return False


def run(group: ProcessGroup, number: int, schedules: tuple[str, ...], padded: bool) -> list[int]:
    """`leaking`'s counts, and wrong results, of every call three times over poison.

    With `padded` what is taken out of an arena has poison beside its rows, and results may be wrong.
    """
    add, wrong = decomposed.DecomposedGather._add, 0

    def beside_poison(product: Product, rows: Tensor, *more: Any) -> None:
        if in_an_arena(rows):
            # As it lies there.
            chunk = rows if rows.stride(1) == 1 else rows.t()
            wide = chunk.new_full((chunk.shape[0], chunk.shape[1] + 3), float("nan"))
            wide[:, :-3] = chunk
            rows = wide[:, :-3] if chunk is rows else wide[:, :-3].t()
        add(product, rows, *more)

    patched = mock.patch.object(decomposed.DecomposedGather, "_add", staticmethod(beside_poison if padded else add))
    # Arenas need no copies of what lies in them.
    with leaking() as counts, patched, on_a_machine(False):
        for call in calls(7, number, group.size(), schedules):
            operands = Operands(call, group.rank())
            # The first makes room: fresh room is zeros. Few rows are multiplied together, more by chunk.
            for few_rows in (decomposed.FEW_ROWS, decomposed.FEW_ROWS, 2):
                poison(group)
                wrong += is_wrong(operands, group, few_rows, raises=not padded)
    generation.changed()
    dist.barrier(group=group)
    return [*counts, wrong]


@contextmanager
def on_a_machine(with_amx: bool) -> Iterator[None]:
    with mock.patch.object(padding, "_has_amx", return_value=with_amx):
        yield


def with_poison_beside(x: Tensor) -> Tensor:
    if x.ndim != 2:
        return x
    wide = x.new_full((x.shape[0] + 1, x.shape[1] + 5), float("nan"))
    return wide[:-1, 2:-3].copy_(x.detach()).requires_grad_(x.requires_grad)


def run_views(group: ProcessGroup, number: int, with_amx: bool) -> int:
    """How many of so many calls, of views that have NaN beside them, had wrong results."""
    wrong = 0
    with leaking(), on_a_machine(with_amx):
        for call in calls(11, number, group.size(), ("decomposed", "unfused")):
            operands = Operands(call, group.rank())
            operands.leaves = [with_poison_beside(each.detach()).requires_grad_() for each in operands.leaves]
            operands.dy = with_poison_beside(operands.dy)
            for few_rows in (decomposed.FEW_ROWS, 2):
                wrong += is_wrong(operands, group, few_rows, raises=False)
    generation.changed()
    dist.barrier(group=group)
    return wrong


def test_the_model_of_the_library_leaks() -> None:
    wide = torch.ones(4, 9, dtype=torch.bfloat16)
    wide[:, 5:] = float("nan")
    w = torch.ones(5, 3, dtype=torch.bfloat16)
    with leaking():
        assert torch.mm(wide[:, :5], w).isnan().sum(1).tolist() == [3, 3, 3, 0]
        assert torch.mm(wide[:, :5].contiguous(), w).tolist() == [[5.0] * 3] * 4
        assert torch.mm(w.t(), wide[:, :5].t()).isnan().sum(0).tolist() == [3, 3, 3, 0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_poison_beside_rows_reaches_no_result(world_size: int, pool: RankPool) -> None:
    everywhere = 4 * len(OPS)
    for counts in pool.run(run, everywhere, ("decomposed", "unfused"), False, world_size=world_size):
        assert counts[0] > everywhere
        assert counts[1] > len(OPS), "matmuls out of an arena"
    pool.run(run, len(OPS), ("fused",), False, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_a_view_has_beside_it_reaches_no_result(world_size: int, pool: RankPool) -> None:
    """By copies of such views on machines with AMX, which are found missing."""
    number = 4 * len(OPS)
    assert pool.run(run_views, number, True, world_size=world_size) == [0] * world_size
    # One rank's is F.linear without AMX, which `leaking` leaves as it is.
    assert world_size == 1 or max(pool.run(run_views, number, False, world_size=world_size)) > 0


def test_rows_of_an_arena_with_poison_beside_them_are_found(pool: RankPool) -> None:
    wrong = [counts[2] for counts in pool.run(run, 2 * len(OPS), ("decomposed",), True, world_size=2)]
    assert min(wrong) > 0
