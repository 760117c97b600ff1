"""Bytes that kernels store into peers' arenas, counted at the stores, equal the closed forms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from triton.runtime.interpreter import InterpreterBuilder

from fusedtp.bench.ranks import RankPool
from fusedtp.workspaces import registry
from fusedtp.workspaces.workspace import Workspace

from . import direct
from .harness import LARGE

ROWS, COLS, ITEMSIZE = 24, 40, 4  # 24 rows split evenly over 2, 3 and 4 ranks
BUFFER = ROWS * COLS * ITEMSIZE

# Bytes sent by one of n ranks, in units of the whole buffer.
FORMS = {
    ("all_gather", "direct"): lambda n: (n - 1) / n,
    ("all_gather", "ring"): lambda n: (n - 1) / n,
    ("reduce_scatter", "direct"): lambda n: (n - 1) / n,
    ("reduce_scatter", "ring"): lambda n: (n - 1) / n,
    ("all_reduce", "ring"): lambda n: 2 * (n - 1) / n,
    ("all_reduce", "two_shot"): lambda n: 2 * (n - 1) / n,
    ("all_reduce", "one_shot"): lambda n: n - 1,
    ("all_gather_matmul", "rows"): lambda n: (n - 1) / n,
    ("all_gather_matmul", "contraction"): lambda n: (n - 1) / n,
    ("matmul_reduce_scatter", "rows"): lambda n: (n - 1) / n,
    ("matmul_reduce_scatter", "columns"): lambda n: (n - 1) / n,
    ("matmul_all_reduce", "one_shot"): lambda n: n - 1,
    ("matmul_all_reduce", "two_shot"): lambda n: 2 * (n - 1) / n,
}


@contextlib.contextmanager
def counting(ws: Workspace) -> Iterator[list[int]]:
    """Count the bytes that kernels store into the halves of the peers' arenas, in a list of one number."""
    count, store = [0], InterpreterBuilder.create_masked_store
    num_bytes = 2 * ws.half_bytes
    peers = [ws.addresses[rank] + ws.data_offset for rank in range(ws.world_size) if rank != ws.rank]

    def counted(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
        at = ptrs.data[np.broadcast_to(np.asarray(mask.data), ptrs.data.shape)].astype(np.int64)
        there = sum(int(((at >= begin) & (at < begin + num_bytes)).sum()) for begin in peers)
        count[0] += there * value.data.dtype.itemsize
        return store(self, ptrs, value, mask, *args)

    with mock.patch.object(InterpreterBuilder, "create_masked_store", counted):
        yield count


def sent(group: ProcessGroup) -> dict[tuple[str, str], int]:
    n = group.size()
    rows, cols = (ROWS // n,) * n, (COLS // n + 1,) * (COLS % n) + (COLS // n,) * (n - COLS % n)
    whole, shard = torch.randn(ROWS, COLS), torch.randn(ROWS // n, COLS)
    narrow = torch.randn(ROWS, cols[group.rank()])
    left, right = torch.randn(ROWS, 16), torch.randn(16, COLS)
    given: dict[tuple[str, str], tuple[tuple[Tensor, ...], dict[str, Any]]] = {
        ("all_gather_matmul", "rows"): ((shard, torch.randn(COLS, 8)), {"sizes": rows}),
        ("all_gather_matmul", "contraction"): ((narrow, torch.randn(COLS, 8)), {"sizes": cols, "dim": 1}),
        ("matmul_reduce_scatter", "rows"): ((left, right), {"sizes": rows}),
        ("matmul_reduce_scatter", "columns"): ((right.t(), left.t()), {"sizes": rows, "dim": 1}),
    }
    operands = {"all_gather": (shard,), "matmul_all_reduce": (left, right)}
    counts = {}
    for op, form in FORMS:
        options: dict[str, Any] = {"algorithm": form} | ({} if op.endswith("all_reduce") else {"sizes": rows})
        tensors, options = given.get((op, form), (operands.get(op, (whole,)), options))
        # The first run makes room in the arenas.
        for _ in range(2):
            with counting(registry.get(group, torch.device("cpu"))) as count:
                direct.run(op, "fused", group, *tensors, **options)
        counts[op, form] = count[0]
    return counts


@pytest.mark.parametrize("world_size", [2, 3, 4] if LARGE else [2, 3])
def test_bytes_sent(pool: RankPool, world_size: int) -> None:
    replies = pool.run(sent, world_size=world_size)
    assert set(replies[0]) == set(FORMS)
    for key, form in FORMS.items():
        if key in (("all_gather_matmul", "contraction"), ("matmul_all_reduce", "two_shot")):
            # Shard widths differ if the columns, or columns of tiles, do not divide by the ranks; the total does not.
            assert sum(counts[key] for counts in replies) == round(form(world_size) * world_size) * BUFFER, key
        else:
            assert [counts[key] for counts in replies] == [form(world_size) * BUFFER] * world_size, key
