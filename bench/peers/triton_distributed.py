"""Triton-distributed's ag_gemm and gemm_rs, on one machine.

As in ByteDance-Seed/Triton-distributed, python/triton_dist/kernels/nvidia/ at 1512a81: create_ag_gemm_context(max_M, N,
K, dtype, rank, num_ranks, num_local_ranks) and ag_gemm(A, B, ctx=); create_gemm_rs_context(max_M, N, rank, world_size,
local_world_size, output_dtype, rs_stream) and gemm_rs(A, B, ctx); B is [K, N]. Their first call tunes tiles and keeps
what it found under ~/.triton_dist. No `tp_group` is given to the second: with one, small problems become cuBLAS and
NCCL. NVSHMEM is started once a process, by triton_dist.utils, for one group.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..operands import Operands, Runner, passes
from ..providers import Missing, Provider
from .limits import Closing, limits


def runner(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """See `Provider.runner`."""
    utils, kernels = import_module("triton_dist.utils"), import_module("triton_dist.kernels.nvidia")
    if not utils.is_shmem_initialized():
        utils.init_nvshmem_by_torch_process_group(group)
    elif utils.get_triton_dist_world() is not group:
        raise Missing("NVSHMEM was started for another group of ranks in this process")
    case, rank, n = operands.case, group.rank(), group.size()
    if operands.gathers:
        context = kernels.create_ag_gemm_context(
            case.M, case.N, case.K, operands.dtype, rank, n, num_local_ranks=n
        )  # fmt: skip
    else:
        stream = torch.cuda.Stream(priority=-1)
        context = kernels.create_gemm_rs_context(case.M, case.N, rank, n, n, operands.dtype, stream)

    def call(x: Tensor, w: Tensor) -> Tensor:
        fused = kernels.ag_gemm if operands.gathers else kernels.gemm_rs
        return fused(x, w.t(), ctx=context)  # type: ignore[no-any-return]

    return Closing(passes(call, operands.x, operands.w, operands, direction), context.finalize)


PROVIDER = Provider(
    "triton_distributed", runner, partial(limits, dtypes=("bfloat16", "float16")), "triton_dist.kernels.nvidia",
    "Triton-distributed's kernels over NVSHMEM",
)  # fmt: skip
