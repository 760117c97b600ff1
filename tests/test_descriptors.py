"""Operands loaded by tensor descriptors and by pointers give the same bits, also if chunks end inside a tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from fusedtp import reference
from fusedtp.epilogue import Epilogue
from fusedtp.kernels.configs import Config
from fusedtp.kernels.descriptors import read_by
from fusedtp.kernels.epilogue import epilogue_of
from fusedtp.kernels.matmul import matmul
from fusedtp.schedules import fused
from fusedtp.workspaces.workspace import Workspace

from . import direct
from .bounds import Bounds
from .virtual_ranks import local_memories, run_together

CPU = torch.device("cpu")
POINTERS = Config(block_m=32, block_n=32, block_k=32, group_m=2, programs=2, pushers=2, copy_rows=32, copy_cols=64)
DESCRIPTORS = replace(POINTERS, descriptors=True)
M, N, K = 43, 37, 45


@pytest.fixture
def loads() -> Iterator[list[int]]:
    """Count the tiles loaded by a descriptor, one entry each, and check every address."""
    seen: list[int] = []
    load = InterpreterBuilder.create_descriptor_load

    def counted(*args: object) -> object:
        seen.append(1)
        return load(*args)

    with mock.patch.object(InterpreterBuilder, "create_descriptor_load", counted), Bounds():
        yield seen


def stored(x: Tensor, by: str) -> Tensor:
    """Return the same matrix with rows ("rows") or columns at strides of multiples of 16 bytes; padding is NaN."""
    if by == "columns":
        return stored(x.t(), "rows").t()
    rows, cols = x.shape
    out = x.new_full((rows, -(-cols // 8) * 8 + 8), torch.nan)[:, :cols]
    return out.copy_(x)


def operands(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    # Whole numbers: sums are exact, as in the reference.
    random = torch.Generator().manual_seed(seed)
    a, b, bias = (torch.randint(-3, 4, shape, generator=random) for shape in ((M, K), (K, N), (N,)))
    return a.to(dtype), b.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("b_by", ["rows", "columns", "pointers"])
@pytest.mark.parametrize("a_by", ["rows", "columns", "pointers"])
def test_a_matmul_reads_alike(loads: list[int], a_by: str, b_by: str) -> None:
    dtype = torch.bfloat16 if a_by == b_by else torch.float16
    a, b, bias = operands(dtype)
    by_pointers = matmul_of(a, b, bias, POINTERS)
    assert not loads
    a, b = (x if by == "pointers" else stored(x, by) for x, by in ((a, a_by), (b, b_by)))
    assert (read_by(a, DESCRIPTORS), read_by(b, DESCRIPTORS)) == (a_by, b_by)
    assert torch.equal(matmul_of(a, b, bias, DESCRIPTORS), by_pointers)
    # Four tiles with two blocks of K.
    assert len(loads) == 8 * ((a_by != "pointers") + (b_by != "pointers"))
    reference.check(by_pointers, reference.matmul(a, b, bias), reference.bound(a, b, dtype, bias=bias), "matmul")


def matmul_of(a: Tensor, b: Tensor, bias: Tensor, config: Config) -> Tensor:
    out = a.new_empty(M, N)
    matmul(a, b, out, epilogue_of([Epilogue(bias)]), config=config)
    return out


def test_what_no_descriptor_can_read() -> None:
    whole = torch.zeros(64, 64, dtype=torch.bfloat16)
    assert read_by(whole, DESCRIPTORS) == "rows"
    assert read_by(whole.t(), DESCRIPTORS) == "columns"
    refused = {
        "odd pitch": whole.view(-1)[: 63 * 65].view(63, 65),
        "unaligned base": whole[:, 1:],
        "no adjacent elements": whole[:, ::2],
        "rows on top of each other": whole[:1].expand(8, 64),
        "no rows": whole[:0],
        "float32": whole.float(),
    }
    assert {name: read_by(x, DESCRIPTORS) for name, x in refused.items()} == dict.fromkeys(refused, "pointers")
    assert read_by(whole, POINTERS) == "pointers"


@pytest.mark.parametrize(
    ("op", "dim", "sizes", "strided", "described"),
    [
        ("all_gather_matmul", 0, (40, 0, 3), False, True),
        ("all_gather_matmul", 0, (0, 33, 10), False, True),
        # This rank's shard goes through the arena.
        ("all_gather_matmul", 0, (40, 0, 3), True, True),
        ("all_gather_matmul", 1, (32, 0, 64), False, True),
        # Chunks of K that end inside a block.
        ("all_gather_matmul", 1, (33, 1, 62), False, False),
        ("matmul_reduce_scatter", 0, (40, 0, 3), False, True),
    ],
)
def test_an_op_reads_alike(
    loads: list[int], op: str, dim: int, sizes: tuple[int, ...], strided: bool, described: bool
) -> None:
    """Runs twice on virtual ranks, once on each half, with the halves full of NaN."""
    dtype, gathers = torch.bfloat16 if dim == 0 else torch.float16, op == "all_gather_matmul"
    a, b, bias = operands(dtype)
    if dim == 1:
        a, b = a.repeat(1, 3)[:, : sum(sizes)], b.repeat(3, 1)[: sum(sizes)]
    k_sizes = None if gathers else (24, 16, 5)
    if k_sizes is None:
        mine = [(stored(x, "columns" if strided else "rows"), stored(b, "columns")) for x in a.split(sizes, dim)]
    else:
        parts = zip(a.split(k_sizes, 1), b.split(k_sizes), strict=True)
        mine = [(stored(x, "rows"), stored(y, "rows")) for x, y in parts]

    def products(config: Config) -> list[Tensor]:
        ranks, found = [Workspace(memory, CPU) for memory in local_memories(3, CPU)], []
        with mock.patch.object(fused, "config_for", return_value=config):
            for _ in range(2):
                started = [
                    direct.phases(op, ws, *mine[ws.rank], bias, dim=dim, sizes=sizes, split=gathers) for ws in ranks
                ]
                for each in started:
                    next(each)
                for ws in ranks:
                    ws.set_timeout(2.0)
                    ws.view(ws.rank, 0, 0, (2, ws.half_bytes), torch.uint8).fill_(0xFF)
                outs = run_together(started)
                found += outs if gathers else [torch.cat(outs)]
        for ws in ranks:
            ws.check()
            ws.close()
        return found

    by_pointers = products(POINTERS)
    assert not loads
    by_descriptors = products(DESCRIPTORS)
    assert bool(loads) == described
    allowed = reference.bound(a, b, dtype, k_sizes=k_sizes, bias=bias)
    for one, other in zip(by_pointers, by_descriptors, strict=True):
        reference.check(one, reference.matmul(a, b, bias), allowed, op)
        assert torch.equal(one, other)
