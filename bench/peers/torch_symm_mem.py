"""torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter, which have no gradient.

float8 uses the ops with scaled_matmul in their names. Declared in torch/distributed/_symmetric_memory/__init__.py of
torch 2.11 to 2.13.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp.scaled import Scaled

from ..cases import DTYPES, FLOAT8, FNUZ, Case
from ..operands import Operands, Runner, passes
from ..providers import Provider
from .limits import limits


def missing(case: Case, direction: str, num_gpus: int) -> str:
    """See `Provider.missing`."""
    if reason := limits(case, direction, num_gpus, dtypes=(*DTYPES, FLOAT8, FNUZ)):
        return reason
    if case.is_float8 and not _scaled_mm_takes(case):
        return "torch's scaled matmul wants multiples of 16"
    return ""


def _scaled_mm_takes(case: Case) -> bool:
    # Check the lengths that a rank multiplies.
    n = case.world_size
    K, N = (case.K, case.N // n) if case.kind == "gather" else (case.K // n, case.N)
    return K % 16 == N % 16 == 0


def enable(group: ProcessGroup) -> None:
    """Let the compiler and these ops use symmetric memory in this group."""
    from torch.distributed import _symmetric_memory

    # Deprecated, but still required for the compiler to fuse on torch 2.11 to 2.13.
    enable = getattr(_symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable(group.group_name)


def runner(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """See `Provider.runner`."""
    enable(group)
    name = group.group_name
    if operands.case.is_float8:
        return _scaled(operands, name)

    def gather(x: Tensor, w: Tensor) -> Tensor:
        _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t()], 0, name, return_A=False)
        return y  # type: ignore[no-any-return]

    def scatter(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, name)  # type: ignore[no-any-return]

    call = gather if operands.gathers else scatter
    return passes(call, operands.x, operands.w, operands, direction)


def _scaled(operands: Operands, name: str) -> Runner:
    # Forward only. w's row scales are the scales of the columns of w.t().
    M, N, out = operands.case.M, operands.case.N, operands.dtype

    def gather(x: Scaled, w: Scaled) -> Tensor:
        _, (y,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
            x.data, [w.data.t()], x.scale, [w.scale.t()], 0, name, [None], [None], [out], [False]
        )
        return y  # type: ignore[no-any-return]

    def scatter(x: Scaled, w: Scaled) -> Tensor:
        return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(  # type: ignore[no-any-return]
            x.data, w.data.t(), x.scale, w.scale.t(), "sum", 0, 0, name, [M, N], out_dtype=out
        )

    return passes(gather if operands.gathers else scatter, operands.x, operands.w, operands, "forward")


PROVIDER = Provider("torch_symm_mem", runner, missing, about="torch's fused ops over its symmetric memory")
