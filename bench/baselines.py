"""What a user could take instead of this package, through the same gate and in the same rounds.

    dtensor         torch's tensor-parallel styles, ColwiseParallel(input_layouts=Shard(0)) and
                    RowwiseParallel(output_layouts=Shard(0)), on one nn.Linear; its forward keeps the gathered x
    torch_symm_mem  torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter, of float8 those with
                    scaled_matmul in their names; they have no gradient
    async_tp        functional collectives and matmuls through torch.compile with _micro_pipeline_tp; refused unless the
                    compiled code really calls torch's fused ops

`missing` says why one cannot run, from what the command line knows; such a variant is a row with that reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fusedtp.scaled import Scaled

from .cases import BASELINES, Case
from .operands import Operands, Runner, passes

# torch's fused ops, which compiled async TP must have put there: kind and direction -> what has to be in the code.
_FUSED = {
    ("gather", "forward"): ("fused_all_gather_matmul",),
    ("gather", "both"): ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"),
    ("scatter", "forward"): ("fused_matmul_reduce_scatter",),
    ("scatter", "both"): ("fused_matmul_reduce_scatter", "fused_all_gather_matmul"),
}


def missing(variant: str, case: Case, direction: str, num_gpus: int) -> str:
    """Why `variant` cannot run this case here, or "" if it can."""
    assert variant in BASELINES, variant
    if case.kind == "all_reduce":
        return "it has no matmul + all-reduce of its own kind"
    if case.world_size == 1:
        return "one rank has nothing to send"
    if variant != "dtensor" and not num_gpus:
        return "its fused ops need CUDA"
    if variant == "torch_symm_mem" and direction != "forward":
        return "its fused ops have no gradient"
    if not case.even:
        return "it splits uneven lengths otherwise than torch.tensor_split"
    if case.is_float8 and variant != "torch_symm_mem":
        return "it takes no float8 operands with scales"
    if case.is_float8 and not _scaled_mm_takes(case):
        return "torch's scaled matmul wants multiples of 16"
    return ""


def _scaled_mm_takes(case: Case) -> bool:
    # Of the lengths that a rank multiplies.
    n = case.world_size
    K, N = (case.K, case.N // n) if case.kind == "gather" else (case.K // n, case.N)
    return K % 16 == N % 16 == 0


def runner(operands: Operands, group: ProcessGroup, variant: str, direction: str) -> Runner:
    """The closure of a baseline that is not `missing`. Collective."""
    make = {"dtensor": _dtensor, "torch_symm_mem": _symm_mem, "async_tp": _async_tp}[variant]
    return make(operands, group, direction)


def _dtensor(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = DeviceMesh.from_group(group, operands.device.type, mesh_dim_names=("tp",))
    gathers = operands.gathers
    layer = nn.Linear(operands.case.K, operands.case.N, bias=False, device="meta")
    # The shard is here already: the style would scatter a whole weight from rank 0.
    weight = DTensor.from_local(operands.w, mesh, [Shard(0 if gathers else 1)], run_check=False)
    layer.weight = nn.Parameter(weight)
    style = ColwiseParallel(input_layouts=Shard(0)) if gathers else RowwiseParallel(output_layouts=Shard(0))
    parallel = parallelize_module(layer, mesh, style)

    def local(x: Tensor) -> Tensor:
        return x.to_local() if isinstance(x, DTensor) else x

    return passes(lambda x, w: parallel(x), operands.x, layer.weight, operands, direction, local)


def _enable_symm_mem(group: ProcessGroup) -> None:
    from torch.distributed import _symmetric_memory

    # Deprecated, and still what makes the compiler fuse on torch 2.11 to 2.13.
    enable = getattr(_symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable(group.group_name)


def _symm_mem(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    _enable_symm_mem(group)
    name = group.group_name
    if operands.case.is_float8:
        return _scaled_symm_mem(operands, name)

    def gather(x: Tensor, w: Tensor) -> Tensor:
        _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t()], 0, name, return_A=False)
        return y  # type: ignore[no-any-return]

    def scatter(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, name)  # type: ignore[no-any-return]

    call = gather if operands.gathers else scatter
    return passes(call, operands.x, operands.w, operands, direction)


def _scaled_symm_mem(operands: Operands, name: str) -> Runner:
    # Forward alone. w's scales, one a row, are those of the columns of w.t().
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


def _async_tp(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    from torch._inductor import config
    from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd

    _enable_symm_mem(group)

    def gather(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(all_gather_tensor_autograd(x, 0, group), w.t())

    def scatter(x: Tensor, w: Tensor) -> Tensor:
        return reduce_scatter_tensor_autograd(torch.mm(x, w.t()), "sum", 0, group)  # type: ignore[no-any-return]

    call = torch.compile(gather if operands.gathers else scatter, fullgraph=True, dynamic=False)
    # One whole pass compiles what the timed one needs: the gradients' graph is compiled with the forward one's.
    whole = "forward" if direction == "forward" else "both"
    with config.patch(_micro_pipeline_tp=True):
        compiles(passes(call, operands.x, operands.w, operands, whole), _FUSED[operands.case.kind, whole])
    return passes(call, operands.x, operands.w, operands, direction)


def compiles(run: Callable[[], object], wanted: tuple[str, ...]) -> None:
    """Run what a first call compiles; RuntimeError unless the generated code calls each of the `wanted` ops."""
    from torch._inductor.utils import run_and_get_code

    _, codes = run_and_get_code(run)
    absent = [name for name in wanted if not any(name in code for code in codes)]
    if absent:
        raise RuntimeError(f"the compiled graph has no {', '.join(absent)}: this would time the unfused ops")
