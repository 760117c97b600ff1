"""This package's own `fused` with order="any": what is gained where NVLink's switch makes the sums of an all-reduce."""

from __future__ import annotations

from functools import partial

from torch.distributed import ProcessGroup

from ..cases import Case
from ..operands import Operands, Runner, passes
from ..providers import Missing, Provider


def missing(case: Case, direction: str, num_gpus: int) -> str:
    """See `Provider.missing`."""
    if not num_gpus:
        return "its kernels are interpreted on a CPU, which is never timed"
    if case.kind != "all_reduce":
        return "the switch makes sums of all-reduces alone"
    return "it takes no float8 operands with scales" if case.is_float8 else ""


def runner(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """See `Provider.runner`."""
    import fusedtp
    from fusedtp.workspaces import registry

    if not registry.get(group, operands.x.device).has_multicast:
        raise Missing("this memory has no address of all ranks (NVLS)")
    call = partial(fusedtp.linear_all_reduce, group=group, schedule="fused", order="any")
    return passes(call, operands.x, operands.w, operands, direction)


PROVIDER = Provider(
    "switch", runner, missing, about='`fused` with `order="any"`, where it is asked for', usual=False
)  # fmt: skip
