"""Do the ranks mean the same op? Asked before every op under TORCH_DISTRIBUTED_DEBUG=DETAIL, torch's own switch.

Each rank takes lengths from its own tensors. Ranks that take different ones would read and write at different places,
which shared memory cannot notice; comparing them costs a collective an op, so it is for finding such a mistake.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level


def wanted() -> bool:
    """Whether torch.distributed checks in detail."""
    return get_debug_level() == DebugLevel.DETAIL


def check(op: str, group: ProcessGroup, x: Tensor, *operands: Tensor | None, **options: Any) -> None:
    """Compare what the ranks of `group` must have in common in this call; collective.

    ValueError on every rank alike, naming what differs and each rank's value.
    """
    mine = {"op": op, "dtype": x.dtype, **options, **_lengths(op, x, *operands, **options)}
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, {name: str(value) for name, value in mine.items()}, group=group)
    for name in dict.fromkeys(name for each in everyone for name in each):
        values = [each.get(name, "not given") for each in everyone]
        if len(set(values)) > 1:
            each_rank = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(f"{op}: the ranks do not agree on {name}: {each_rank}")


def _lengths(op: str, x: Tensor, *operands: Tensor | None, **options: Any) -> dict[str, int]:
    # What is neither a rank's own nor one of `sizes`.
    if op in ("all_gather", "reduce_scatter", "all_gather_two_matmuls"):
        return {"columns": x.shape[1]}
    if op == "all_gather_matmul":
        return {"K": x.shape[1]} if options["gather_dim"] == 0 else {"M": x.shape[0]}
    if op == "all_reduce":
        return {"M": x.shape[0], "N": x.shape[1]}
    b, *rest = operands
    assert b is not None
    gathered = rest[1].shape[1] if op == "matmul_scatter_and_gather" and rest[1] is not None else 0
    return {"M": x.shape[0], "N": b.shape[1], "columns gathered": gathered}
