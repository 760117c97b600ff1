"""xformers.ops.fused_allgather_and_linear and fused_linear_and_reducescatter.

As in xformers 0.0.35, xformers/ops/sequence_parallel_fused_ops.py at ca6d2aa: (scattered_input, weight, *, group, out,
timeout_s, ...) -> the product, of inputs whose first dim is split. They have no gradient, and take scales of whole
tensors only. Above 8 ranks, or with DISABLE_FUSED_SEQUENCE_PARALLEL, they fall back to NCCL without a word.
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

# Its own default is an hour.
TIMEOUT_SECONDS = 60


def missing(case: Case, direction: str, num_gpus: int) -> str:
    """See `Provider.missing`."""
    if reason := limits(case, direction, num_gpus):
        return reason
    if case.world_size > 8:
        return "above 8 ranks it is NCCL and a matmul"
    if os.environ.get("DISABLE_FUSED_SEQUENCE_PARALLEL", "0") != "0":
        return "with DISABLE_FUSED_SEQUENCE_PARALLEL it is NCCL and a matmul"
    return ""


def runner(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """See `Provider.runner`."""
    ops = import_module("xformers.ops")
    fused = ops.fused_allgather_and_linear if operands.gathers else ops.fused_linear_and_reducescatter

    def call(x: Tensor, w: Tensor) -> Tensor:
        return fused(x, w, group=group, timeout_s=TIMEOUT_SECONDS)  # type: ignore[no-any-return]

    return passes(call, operands.x, operands.w, operands, direction)


PROVIDER = Provider("xformers", runner, missing, "xformers.ops", "xformers' fused sequence parallelism")
