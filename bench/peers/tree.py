"""This package's own `fused` with order="tree": what the same bits on any number of ranks cost."""

from __future__ import annotations

from functools import partial

from torch.distributed import ProcessGroup

from ..cases import Case
from ..operands import Operands, Runner, passes
from ..providers import Provider

LEAVES = 8


def missing(case: Case, direction: str, num_gpus: int) -> str:
    """See `Provider.missing`."""
    if LEAVES % case.world_size:
        return f"its {LEAVES} leaves are for 1, 2, 4 or 8 ranks"
    contraction = case.N if case.kind == "gather" else case.K
    if contraction % case.world_size:
        return "its leaves end where ranks' parts do if these are as long"
    if case.is_float8:
        return "it takes no float8 operands with scales"
    return "" if num_gpus else "its kernels are interpreted on a CPU, which is never timed"


def runner(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """See `Provider.runner`."""
    import fusedtp

    options = {"group": group, "order": "tree"}
    if operands.case.kind == "all_reduce":
        call = partial(fusedtp.linear_all_reduce, **options)
    else:
        function = fusedtp.all_gather_linear if operands.gathers else fusedtp.linear_reduce_scatter
        call = partial(function, sizes=operands.m_sizes, **options)
    return passes(call, operands.x, operands.w, operands, direction)


PROVIDER = Provider(
    "tree", runner, missing, about='`fused` with `order="tree"`, where it is asked for', usual=False
)  # fmt: skip
