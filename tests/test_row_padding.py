"""Memory beside an operand's rows, in an arena or in the tensor that a view shows, reaches no result, even if a
library's matmul multiplies that memory.

On processors with AMX, oneDNN multiplies bfloat16 and float16 in steps of 32 along K. In the versions of torch 2.11 to
2.13 it multiplies the memory beside a row by zeros, and NaN times 0 is NaN (github.com/uxlfoundation/oneDNN issue 5717,
pull requests 5603 and 5723). Here every matmul of the library does so on any processor, while arenas and fresh memory
are full of NaN.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp.bench.ranks import RankPool
from fusedtp.schedules import decomposed
from fusedtp.schedules import local as padding
from fusedtp.workspaces import generation, registry

from .harness import LARGE
from .soak.mixed import OPS, Call, Operands, draw

STEP = 32
CPU = torch.device("cpu")


def beside(x: Tensor) -> Tensor | None:
    """Return the memory beside the rows of x [rows, K], up to a whole step of K; None if rows are read exactly.

    The library itself copies the last row, as it must not read past the end.
    """
    rows, K = x.shape
    if x.stride(1) != 1 or K % STEP == 0 or rows < 2 or x.stride(0) <= K:
        return None
    read = min(-(-K // STEP) * STEP, x.stride(0)) - K
    return x.as_strided((rows - 1, read), x.stride(), x.storage_offset() + K)


def leak(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Add to out = a @ b the memory beside the rows of a, and of b as transposed by the library, times 0."""
    for operand, result in ((a, out), (b.t(), out.t())):
        if operand.dtype in (torch.bfloat16, torch.float16) and (read := beside(operand)) is not None:
            result[:-1] += (read * 0).sum(1, keepdim=True)


@contextmanager
def leaking() -> Iterator[list[int]]:
    """Make every matmul of torch multiply padding too; count narrow matmuls, and those with an operand in an arena."""
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
    """Fill this rank's arena, except its signals, with NaN in any dtype, while no rank is in an op."""
    dist.barrier(group=group)
    ws = registry.get(group, CPU)
    ws._arena.tensors[ws.rank][ws.data_offset :].fill_(0xFF)
    dist.barrier(group=group)


def calls(seed: int, number: int, world_size: int, schedules: tuple[str, ...]) -> list[Call]:
    """Draw every op with every schedule, at random sizes of which few are whole steps."""
    found = []
    for at in range(number):
        rng = random.Random(f"{seed}/{at}")
        call = draw(rng, world_size)
        while call.op != OPS[at % len(OPS)]:
            call = draw(rng, world_size)
        schedule, dtype = schedules[at // len(OPS) % len(schedules)], ("bfloat16", "float16")[at // 3 % 2]
        call = replace(call, schedule=schedule, dtype=dtype, algorithm="auto", backward=True)
        found.append(replace(call, layouts=Call.layouts))
    return found


def with_poison_beside(x: Tensor) -> Tensor:
    if x.ndim != 2:
        return x
    wide = x.new_full((x.shape[0] + 1, x.shape[1] + 5), float("nan"))
    return wide[:-1, 2:-3].copy_(x.detach()).requires_grad_(x.requires_grad)


def run(group: ProcessGroup, number: int, schedules: tuple[str, ...], views: bool, with_amx: bool) -> list[int]:
    """Make calls over poison, each several times; return `leaking`'s counts and the number of wrong results. `views`:
    operands have NaN beside their rows.
    """
    wrong = 0
    with leaking() as counts, mock.patch.object(padding, "_has_amx", return_value=with_amx):
        for call in calls(11 if views else 7, number, group.size(), schedules):
            operands = Operands(call, group.rank())
            if views:
                operands.leaves = [with_poison_beside(each.detach()).requires_grad_() for each in operands.leaves]
                operands.dy = with_poison_beside(operands.dy)
            # The first run makes room, and fresh room is zeros. Few rows are multiplied at once, more rows by chunk.
            last = 3 if call.schedule == "decomposed" else 2
            for few_rows in (decomposed.AT_ONCE_ROWS, decomposed.AT_ONCE_ROWS, 2)[views:last]:
                if not views:
                    poison(group)
                with mock.patch.object(decomposed, "AT_ONCE_ROWS", few_rows):
                    # Prepared calls of other settings must not be reused.
                    generation.changed()
                    results = operands.run(group)
                try:
                    operands.check(results)
                except AssertionError:
                    wrong += 1
    generation.changed()
    dist.barrier(group=group)
    return [*counts, wrong]


def test_the_model_of_the_library_leaks() -> None:
    wide = torch.ones(4, 9, dtype=torch.bfloat16)
    wide[:, 5:] = float("nan")
    w = torch.ones(5, 3, dtype=torch.bfloat16)
    with leaking():
        assert torch.mm(wide[:, :5], w).isnan().sum(1).tolist() == [3, 3, 3, 0]
        assert torch.mm(wide[:, :5].contiguous(), w).tolist() == [[5.0] * 3] * 4
        assert torch.mm(w.t(), wide[:, :5].t()).isnan().sum(0).tolist() == [3, 3, 3, 0]


@pytest.mark.parametrize("world_size", [2, 3] if LARGE else [3])
def test_poison_beside_rows_reaches_no_result(world_size: int, pool: RankPool) -> None:
    """Operands in arenas need no copies."""
    everywhere = 4 * len(OPS)
    for narrow, from_arena, wrong in pool.run(
        run, everywhere, ("decomposed", "unfused"), False, False, world_size=world_size
    ):
        assert narrow > everywhere
        assert from_arena > len(OPS), "matmuls out of an arena"
        assert not wrong
    assert not any(found[-1] for found in pool.run(run, len(OPS), ("fused",), False, False, world_size=world_size))


@pytest.mark.parametrize("world_size", [1, 2, 3] if LARGE else [1, 2])
def test_what_a_view_has_beside_it_reaches_no_result(world_size: int, pool: RankPool) -> None:
    """On machines with AMX such views are copied; without the copies results are wrong."""
    given = 4 * len(OPS), ("decomposed", "unfused"), True
    assert not any(found[-1] for found in pool.run(run, *given, True, world_size=world_size))
    # On one rank without AMX the call is F.linear, which `leaking` does not patch.
    assert world_size == 1 or max(found[-1] for found in pool.run(run, *given, False, world_size=world_size)) > 0
