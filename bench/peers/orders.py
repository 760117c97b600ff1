"""This package's `fused` with other reduction orders.

- `tree`: shows the cost of the same bits on any number of ranks.
- `switch`: shows the gain if NVLink's switch adds the parts of an all-reduce.
"""

from __future__ import annotations

from torch.distributed import ProcessGroup

from ..cases import Case
from ..operands import Operands, Runner, passes
from ..providers import Missing, Provider

LEAVES = 8


def missing(case: Case, direction: str, num_gpus: int) -> str:
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
    return missing(case, direction, num_gpus)


def missing_switch(case: Case, direction: str, num_gpus: int) -> str:
    """See `Provider.missing`."""
    if num_gpus and case.kind != "all_reduce":
        return "the switch makes sums of all-reduces alone"
    return missing(case, direction, num_gpus)


def tree(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """See `Provider.runner`."""
    return passes(operands.linear(group, order="tree"), operands.x, operands.w, operands, direction)


def switch(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """See `Provider.runner`."""
    from fusedtp.workspaces import registry

    if not registry.get(group, operands.x.device).has_multicast:
        raise Missing("this memory has no address of all ranks (NVLS)")
    call = operands.linear(group, schedule="fused", order="any")
    return passes(call, operands.x, operands.w, operands, direction)


_ABOUT = '`fused` with `order="{}"`, where it is asked for'
TREE = Provider("tree", tree, missing_tree, about=_ABOUT.format("tree"), usual=False)
SWITCH = Provider("switch", switch, missing_switch, about=_ABOUT.format("any"), usual=False)
