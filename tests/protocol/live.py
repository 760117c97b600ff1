"""Record real ranks, each its own part of the same calls."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.workspaces import registry

from .. import direct
from .events import Kernel
from .record import Recorder


def live(group: ProcessGroup, name: str, calls: int, late: float = 0.0) -> list[list[Kernel]]:
    """Record this rank in `calls` calls of the op `name`, run for real on every rank of `group`. The last rank comes
    `late` seconds after the others to each call.
    """
    rank, world_size = group.rank(), group.size()
    rows = tuple(70 if peer == 0 else 3 * peer for peer in range(world_size))
    x, weight = torch.randn(rows[rank], 8), torch.randn(6, 8)
    whole = torch.randn(sum(rows), 8)
    gather = fusedtp.all_gather_linear
    ops: dict[str, Callable[[], object]] = {
        "all_gather_matmul": lambda: gather(x, weight, group=group, sizes=rows, schedule="fused"),
        "matmul_reduce_scatter": lambda: fusedtp.linear_reduce_scatter(
            whole, weight, group=group, sizes=rows, schedule="fused"
        ),
        "ring": lambda: fusedtp.all_reduce(whole, group=group, schedule="fused", algorithm="ring"),
        "two_shot": lambda: fusedtp.all_reduce(whole, group=group, schedule="fused", algorithm="two_shot"),
        # Called directly: torch ops inside of the registered operator cannot be watched.
        "decomposed": lambda: direct.one("all_gather", "decomposed", group, x, sizes=rows),
    }
    ws = registry.get(group, torch.device("cpu"))
    ops[name]()  # makes room
    made = []
    with Recorder(ws, alone=False, side_stream=False) as recorder:
        for _ in range(calls):
            if rank == world_size - 1:
                time.sleep(late)
            made.append(recorder.call(ops[name]))
    return made
