"""Bytes that the kernels store into peers' arenas, counted by the kernels, against the closed forms."""

from __future__ import annotations

import pytest
import torch
from fusedtp.bench.ranks import RankPool
from torch.distributed import ProcessGroup

ROWS, COLS, ITEMSIZE = 24, 40, 4  # 24 rows split evenly over 2, 3 and 4 ranks
BUFFER = ROWS * COLS * ITEMSIZE

# What one rank sends, in units of the whole buffer, with n ranks.
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


def sent(group: ProcessGroup) -> dict[tuple[str, str], int]:
    from fusedtp.schedules import fused
    from fusedtp.workspaces import registry

    n = group.size()
    rows, cols = (ROWS // n,) * n, (COLS // n + 1,) * (COLS % n) + (COLS // n,) * (n - COLS % n)
    whole, shard = torch.randn(ROWS, COLS), torch.randn(ROWS // n, COLS)
    narrow = torch.randn(ROWS, cols[group.rank()])
    left, right = torch.randn(ROWS, 16), torch.randn(16, COLS)
    calls = {
        ("all_gather_matmul", "rows"): lambda: fused.all_gather_matmul(
            shard, torch.randn(COLS, 8), None, gather_dim=0, sizes=rows, group=group
        ),
        ("all_gather_matmul", "contraction"): lambda: fused.all_gather_matmul(
            narrow, torch.randn(COLS, 8), None, gather_dim=1, sizes=cols, group=group
        ),
        ("matmul_reduce_scatter", "rows"): lambda: fused.matmul_reduce_scatter(
            left, right, None, scatter_dim=0, sizes=rows, group=group
        ),
        ("matmul_reduce_scatter", "columns"): lambda: fused.matmul_reduce_scatter(
            right.t(), left.t(), None, scatter_dim=1, sizes=rows, group=group
        ),
    }
    for op, algorithm in FORMS:
        if op == "all_gather":
            calls[op, algorithm] = lambda a=algorithm: fused.all_gather(shard, sizes=rows, group=group, algorithm=a)
        elif op == "reduce_scatter":
            calls[op, algorithm] = lambda a=algorithm: fused.reduce_scatter(whole, sizes=rows, group=group, algorithm=a)
        elif op == "all_reduce":
            calls[op, algorithm] = lambda a=algorithm: fused.all_reduce(whole, group=group, algorithm=a)
        elif op == "matmul_all_reduce":
            calls[op, algorithm] = lambda a=algorithm: fused.matmul_all_reduce(
                left, right, None, group=group, algorithm=a
            )
    ws = registry.get(group, torch.device("cpu"))
    counts = {}
    ws.count_bytes = True
    for key, call in calls.items():
        ws.require(1 << 18, 256)
        ws.bytes_sent()
        call()
        counts[key] = ws.bytes_sent()
    ws.count_bytes = False
    return counts


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_sent(pool: RankPool, world_size: int) -> None:
    replies = pool.run(sent, world_size=world_size)
    assert set(replies[0]) == set(FORMS)
    for key, form in FORMS.items():
        if key == ("all_gather_matmul", "contraction"):
            # The shards' widths differ where the columns do not divide: the ranks send (n - 1) buffers between them.
            assert sum(counts[key] for counts in replies) == (world_size - 1) * BUFFER, key
        else:
            assert [counts[key] for counts in replies] == [form(world_size) * BUFFER] * world_size, key
