"""kraken.fused.all_gather_matmul, gemm_reduce_scatter and gemm_one_shot_all_reduce_fused, in Triton.

As in meta-pytorch/kraken, kraken/fused/ at 90a24c2, which has no version: all_gather_matmul(a_shared, b, **tiles) ->
(gathered, product) of a symmetric a_shared in bfloat16, over the world only; gemm_reduce_scatter(a, b, group=) -> this
rank's rows; gemm_one_shot_all_reduce_fused(a, b, group=) -> the sum in float32, whose rounding is part of the op here.
"""

from __future__ import annotations

from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..cases import Case
from ..operands import Operands, Runner, passes
from ..providers import Missing, Provider
from .limits import limits

# The rows of a tile of its gather, and how many tiles it takes together by default.
BLOCK_M, GROUP_M = 128, 4


def missing(case: Case, direction: str, num_gpus: int) -> str:
    """See `Provider.missing`."""
    if reason := limits(case, direction, num_gpus, kinds=("gather", "scatter", "all_reduce")):
        return reason
    if case.kind == "gather" and case.dtype != "bfloat16":
        return f"its all-gather + matmul takes bfloat16, not {case.dtype}"
    if case.kind == "gather" and (case.M // case.world_size) % BLOCK_M:
        return f"its all-gather + matmul wants multiples of {BLOCK_M} rows a rank"
    return ""


def runner(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """See `Provider.runner`."""
    fused = import_module("kraken.fused")
    x = operands.x
    if operands.gathers:
        if group is not dist.group.WORLD:
            raise Missing("its all-gather + matmul runs over the world only, and this group is a part of it")
        from torch.distributed import _symmetric_memory as symm_mem

        x = symm_mem.empty(*operands.x.shape, dtype=operands.dtype, device=operands.device).copy_(operands.x)
        # Rows that are no multiple of a group of tiles: a tile a group.
        group_size_m = GROUP_M if x.shape[0] % (BLOCK_M * GROUP_M) == 0 else 1

    def gather(x: Tensor, w: Tensor) -> Tensor:
        return fused.all_gather_matmul(x, w.t(), group_size_m=group_size_m)[1]  # type: ignore[no-any-return]

    def scatter(x: Tensor, w: Tensor) -> Tensor:
        return fused.gemm_reduce_scatter(x, w.t(), group=group)  # type: ignore[no-any-return]

    def all_reduce(x: Tensor, w: Tensor) -> Tensor:
        return fused.gemm_one_shot_all_reduce_fused(x, w.t(), group=group).to(dtype)  # type: ignore[no-any-return]

    dtype: torch.dtype = operands.dtype
    call = {"gather": gather, "scatter": scatter, "all_reduce": all_reduce}[operands.case.kind]
    return passes(call, x, operands.w, operands, direction)


PROVIDER = Provider("kraken", runner, missing, "kraken.fused", "meta-pytorch/kraken's Triton kernels")
