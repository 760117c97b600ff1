"""Bundled providers: what others offer for the ops, and this package's other reduction orders.

A provider imports its dependencies only when it runs. Its function names the versions of what it calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fusedtp.machine import nccl_version
from fusedtp.scaled import Scaled

from .cases import DTYPES, FLOAT8, FNUZ, Case
from .operands import Operands, Results, Runner, passes
from .providers import Missing, Provider


def limits(
    case: Case,
    direction: str,
    num_gpus: int,
    *,
    kinds: tuple[str, ...] = ("gather", "scatter"),
    dtypes: tuple[str, ...] = DTYPES,
    has_gradient: bool = False,
    needs_cuda: bool = True,
) -> str:
    """Return the first of the common reasons that applies, or ""."""
    if case.kind not in kinds:
        return {
            "gather": "it has no all-gather + matmul",
            "scatter": "it has no matmul + reduce-scatter",
            "all_reduce": "it has no matmul + all-reduce of its own kind",
        }[case.kind]
    if case.world_size == 1:
        return "one rank has nothing to send"
    if needs_cuda and not num_gpus:
        return "its fused ops need CUDA"
    if direction != "forward" and not has_gradient:
        return "its fused ops have no gradient"
    if not case.even:
        return "it splits uneven lengths otherwise than torch.tensor_split"
    if case.dtype not in dtypes:
        if case.is_float8 and FLOAT8 not in dtypes:
            return "it takes no float8 operands with scales"
        return f"it takes no {case.dtype}"
    return ""


@dataclass
class Closing:
    """A runner that releases resources after its last call."""

    run: Runner
    close: Callable[[], object]

    def __call__(self) -> Results:
        return self.run()


def dtensor(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """torch's tensor-parallel styles on one nn.Linear; their forward keeps the gathered x.

    ColwiseParallel(input_layouts=Shard(0)) and RowwiseParallel(output_layouts=Shard(0)):

    https://docs.pytorch.org/docs/2.11/distributed.tensor.parallel.html
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = DeviceMesh.from_group(group, operands.device.type, mesh_dim_names=("tp",))
    gathers = operands.gathers
    layer = nn.Linear(operands.case.K, operands.case.N, bias=False, device="meta")
    # Wrap the shard, which is here already: the style would scatter a whole weight from rank 0.
    weight = DTensor.from_local(operands.w, mesh, [Shard(0 if gathers else 1)], run_check=False)
    layer.weight = nn.Parameter(weight)
    style = ColwiseParallel(input_layouts=Shard(0)) if gathers else RowwiseParallel(output_layouts=Shard(0))
    parallel = parallelize_module(layer, mesh, style)

    def local(x: Tensor) -> Tensor:
        return x.to_local() if isinstance(x, DTensor) else x

    return passes(lambda x, w: parallel(x), operands.x, layer.weight, operands, direction, local)


DTENSOR = Provider(
    "dtensor", dtensor, partial(limits, has_gradient=True, needs_cuda=False),
    about="torch's DTensor styles, Colwise- and RowwiseParallel",
)  # fmt: skip


def missing_symm_mem(case: Case, direction: str, num_gpus: int) -> str:
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


def torch_symm_mem(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter, which have no gradient.

    float8 uses the ops with scaled_matmul in their names. Declared in torch/distributed/_symmetric_memory/__init__.py
    of torch 2.11 to 2.13.
    """
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


SYMM_MEM = Provider(
    "torch_symm_mem", torch_symm_mem, missing_symm_mem, about="torch's fused ops over its symmetric memory"
)


# torch's fused ops that the compiler must have inserted: kind and direction -> names in the code.
_FUSED = {
    ("gather", "forward"): ("fused_all_gather_matmul",),
    ("gather", "both"): ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"),
    ("scatter", "forward"): ("fused_matmul_reduce_scatter",),
    ("scatter", "both"): ("fused_matmul_reduce_scatter", "fused_all_gather_matmul"),
}


def async_tp(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """torch's async tensor parallelism: functional collectives and matmuls compiled with _micro_pipeline_tp.

    Refused unless the compiled code calls torch's fused ops: torch/_inductor/fx_passes/micro_pipeline_tp.py of torch
    2.11 to 2.13 inserts them if its patterns match.
    """
    from torch._inductor import config
    from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd

    enable(group)

    def gather(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(all_gather_tensor_autograd(x, 0, group), w.t())

    def scatter(x: Tensor, w: Tensor) -> Tensor:
        return reduce_scatter_tensor_autograd(torch.mm(x, w.t()), "sum", 0, group)  # type: ignore[no-any-return]

    call = torch.compile(gather if operands.gathers else scatter, fullgraph=True, dynamic=False)
    # One whole pass compiles all that the timed pass needs: both graphs are compiled together.
    whole = "forward" if direction == "forward" else "both"
    with config.patch(_micro_pipeline_tp=True):
        compiles(passes(call, operands.x, operands.w, operands, whole), _FUSED[operands.case.kind, whole])
    return passes(call, operands.x, operands.w, operands, direction)


def compiles(run: Callable[[], object], wanted: tuple[str, ...]) -> None:
    """Run a first call, which compiles; RuntimeError unless the generated code calls each of the `wanted` ops."""
    from torch._inductor.utils import run_and_get_code

    _, codes = run_and_get_code(run)
    absent = [name for name in wanted if not any(name in code for code in codes)]
    if absent:
        raise RuntimeError(f"the compiled graph has no {', '.join(absent)}: this would time the unfused ops")


ASYNC_TP = Provider(
    "async_tp", async_tp, partial(limits, has_gradient=True), about="torch.compile with _micro_pipeline_tp, async TP"
)


NEEDS = (2, 27)


def missing_windows(case: Case, direction: str, num_gpus: int) -> str:
    """See `Provider.missing`."""
    if reason := limits(case, direction, num_gpus, kinds=("gather", "scatter", "all_reduce")):
        return reason
    version = nccl_version()
    if version < NEEDS:
        here = ".".join(map(str, version)) or "none"
        return f"windows need NCCL {'.'.join(map(str, NEEDS))}, this torch has {here}"
    return ""


def nccl_windows(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """NCCL's collectives on buffers that are registered as symmetric windows, before or after the library's matmul.

    ProcessGroupNCCL.mem_allocator and register_mem_pool(pool, symm=True), in torch since 2.9, are called as in torch's
    test_register_mem_pool_symmetric. They make ncclMemAlloc's memory a window by ncclCommWindowRegister (NCCL 2.27 and
    later). Buffers are made before the pool is registered: later segments are no windows (pytorch 192112). NCCL decides
    whether its symmetric kernels run; NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=TUNING tells. Every call returns the same
    buffers.
    """
    case, device, dtype = operands.case, operands.device, operands.dtype
    # Call the group's methods, as the functions of torch.distributed have other names in torch 2.11 than in 2.13.
    ranks: Any = group
    # The communicator must exist before memory is registered with it.
    ranks.allreduce([torch.zeros(1, device=device)]).wait()
    backend = ranks._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    n, w_t = case.world_size, operands.w.t()
    sent, received = {
        "gather": ((case.M // n, case.K), (case.M, case.K)),
        "scatter": ((case.M, case.N), (case.M // n, case.N)),
        "all_reduce": ((case.M, case.N), (0, case.N)),
    }[case.kind]
    with torch.cuda.use_mem_pool(pool):
        send, receive = (torch.empty(shape, dtype=dtype, device=device) for shape in (sent, received))
    backend.register_mem_pool(pool, symm=True)

    def gather() -> Results:
        # x lies outside of the window, as the result of an earlier op would.
        send.copy_(operands.x)
        ranks._allgather_base(receive, send).wait()
        return (torch.mm(receive, w_t),)

    def scatter() -> Results:
        torch.mm(operands.x, w_t, out=send)
        ranks._reduce_scatter_base(receive, send).wait()
        return (receive,)

    def all_reduce() -> Results:
        torch.mm(operands.x, w_t, out=send)
        ranks.allreduce([send]).wait()
        return (send,)

    run = {"gather": gather, "scatter": scatter, "all_reduce": all_reduce}[case.kind]
    return Closing(run, lambda: backend.deregister_mem_pool(pool))


WINDOWS = Provider(
    "nccl_windows", nccl_windows, missing_windows, about="NCCL on registered symmetric windows, and torch's matmul"
)


LEAVES = 8


def missing_order(case: Case, direction: str, num_gpus: int) -> str:
    """See `Provider.missing`."""
    if case.is_float8:
        return "it takes no float8 operands with scales"
    return "" if num_gpus else "its kernels are interpreted on a CPU, which is never timed"


def missing_tree(case: Case, direction: str, num_gpus: int) -> str:
    """See `Provider.missing`."""
    if LEAVES % case.world_size:
        return f"its {LEAVES} leaves are for 1, 2, 4 or 8 ranks"
    contraction = case.N if case.kind == "gather" else case.K
    if contraction % case.world_size:
        return "its leaves end where ranks' parts do if these are as long"
    return missing_order(case, direction, num_gpus)


def missing_switch(case: Case, direction: str, num_gpus: int) -> str:
    """See `Provider.missing`."""
    if num_gpus and case.kind != "all_reduce":
        return "the switch makes sums of all-reduces alone"
    return missing_order(case, direction, num_gpus)


def tree(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """`fused` with order="tree": shows the cost of the same bits on any number of ranks."""
    return passes(operands.linear(group, order="tree"), operands.x, operands.w, operands, direction)


def switch(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """`fused` with order="any": shows the gain if NVLink's switch adds the parts of an all-reduce."""
    from fusedtp.workspaces import registry

    if not registry.get(group, operands.x.device).has_multicast:
        raise Missing("this memory has no address of all ranks (NVLS)")
    call = operands.linear(group, schedule="fused", order="any")
    return passes(call, operands.x, operands.w, operands, direction)


_ABOUT = '`fused` with `order="{}"`, where it is asked for'
TREE = Provider("tree", tree, missing_tree, about=_ABOUT.format("tree"), usual=False)
SWITCH = Provider("switch", switch, missing_switch, about=_ABOUT.format("any"), usual=False)
