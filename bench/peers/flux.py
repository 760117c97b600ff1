"""flux.AGKernel and flux.GemmRS, in CUTLASS.

As in bytedance/flux 1.1.2, python/flux/cpp_mod.pyi at 19831ca, called as its test/python/{ag_gemm,gemm_rs} do:
AGKernel(tp_group, nnodes, full_m, n_dim, k_dim, input_dtype, output_dtype).forward(input, weight), n_dim being this
rank's columns; GemmRS(tp_group, nnodes, max_m, n_dim, input_dtype, output_dtype).forward(input, weight). Weights are
[N, K]. init_flux_shm(group) comes first, once a group.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

from torch import Tensor
from torch.distributed import ProcessGroup

from ..operands import Operands, Runner, passes
from ..providers import Provider
from .limits import limits

_started: set[str] = set()


def runner(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """See `Provider.runner`."""
    flux = import_module("flux")
    if group.group_name not in _started:
        flux.init_flux_shm(group)
        _started.add(group.group_name)
    case, dtype = operands.case, operands.dtype
    if operands.gathers:
        kernel = flux.AGKernel(group, 1, case.M, case.N // case.world_size, case.K, dtype, output_dtype=dtype)
    else:
        # In thousands of rows, as its test has it.
        most = -(-case.M // 1024) * 1024
        kernel = flux.GemmRS(group, 1, most, case.N, dtype, dtype, transpose_weight=False, fuse_reduction=False)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return kernel.forward(x, w)  # type: ignore[no-any-return]

    return passes(call, operands.x, operands.w, operands, direction)


PROVIDER = Provider(
    "flux", runner, partial(limits, dtypes=("bfloat16", "float16")), "flux.cpp_mod", "bytedance/flux's CUTLASS kernels"
)
