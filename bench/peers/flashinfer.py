"""flashinfer.comm.all_gather_matmul, in Triton, or in cuTile from sm_100 on.

As in flashinfer 0.6.18, flashinfer/comm/all_gather_matmul/ at fb28d72: (inp, w, group) -> [M, N] of a symmetric inp
[M / W, K] and w [K, N]. It needs torch's symmetric memory over NVSHMEM, TORCH_SYMMMEM=NVSHMEM, and multiples of its
tiles: 128, and on sm_100 256 columns of 16 bits, which is asked everywhere, as the GPU is not known beforehand.
"""

from __future__ import annotations

import os
from importlib import import_module

from torch import Tensor
from torch.distributed import ProcessGroup

from ..cases import Case
from ..operands import Operands, Runner, passes
from ..providers import Provider
from .limits import limits

TILE, TILE_N = 128, 256


def missing(case: Case, direction: str, num_gpus: int) -> str:
    """See `Provider.missing`."""
    if reason := limits(case, direction, num_gpus, kinds=("gather",)):
        return reason
    n = case.world_size
    if case.M // n % TILE or case.N // n % TILE_N or case.K % TILE:
        return f"it wants multiples of {TILE}, of {TILE_N} columns a rank"
    if os.environ.get("TORCH_SYMMMEM") != "NVSHMEM":
        return "it needs torch's symmetric memory over NVSHMEM: TORCH_SYMMMEM=NVSHMEM"
    return ""


def runner(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """See `Provider.runner`."""
    from torch.distributed import _symmetric_memory as symm_mem

    comm = import_module("flashinfer.comm")
    x = symm_mem.empty(*operands.x.shape, dtype=operands.dtype, device=operands.device).copy_(operands.x)
    # Read by descriptors, whose last stride is 1.
    w_t = operands.w.t().contiguous()

    def call(x: Tensor, w: Tensor) -> Tensor:
        return comm.all_gather_matmul(x, w, group)  # type: ignore[no-any-return]

    return passes(call, x, w_t, operands, direction)


PROVIDER = Provider(
    "flashinfer", runner, missing, "flashinfer.comm.all_gather_matmul", "flashinfer's push-wait all-gather matmul"
)
