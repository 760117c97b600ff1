"""NCCL's collectives on buffers that are registered as symmetric windows, before or after the library's matmul.

ProcessGroupNCCL.mem_allocator and register_mem_pool(pool, symm=True), in torch since 2.9, are called as in torch's
test_register_mem_pool_symmetric. They make ncclMemAlloc's memory a window by ncclCommWindowRegister (NCCL 2.27 and
later). Buffers are made before the pool is registered: later segments are no windows (pytorch 192112). NCCL decides
whether its symmetric kernels run; NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=TUNING tells.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from ..cases import Case
from ..operands import Operands, Results, Runner
from ..providers import Provider
from .limits import Closing, limits

NEEDS = (2, 27)


def missing(case: Case, direction: str, num_gpus: int) -> str:
    """See `Provider.missing`."""
    if reason := limits(case, direction, num_gpus, kinds=("gather", "scatter", "all_reduce")):
        return reason
    version = nccl_version()
    if version < NEEDS:
        here = ".".join(map(str, version)) or "none"
        return f"windows need NCCL {'.'.join(map(str, NEEDS))}, this torch has {here}"
    return ""


def nccl_version() -> tuple[int, ...]:
    """Return the version of torch's NCCL, or ()."""
    try:
        return tuple(torch.cuda.nccl.version())
    except (AttributeError, RuntimeError):
        return ()


def runner(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """See `Provider.runner`. Every call returns the same buffers."""
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


PROVIDER = Provider("nccl_windows", runner, missing, about="NCCL on registered symmetric windows, and torch's matmul")
