"""TransformerEngine's Linear with userbuffers: column-parallel with ub_overlap_ag, row-parallel with ub_overlap_rs.

As in TransformerEngine 2.20.0.dev0 at d0067d0, transformer_engine/pytorch/module/{base,linear}.py: initialize_ub(shape,
tp_size, quantization_modes=, dtype=, bootstrap_backend=) makes the buffers of all layers' names in one shape, over the
whole world; Linear(in_features, out_features, parallel_mode=, sequence_parallel=, tp_group=, ub_name=, ...) uses those
of "fc1" and "fc2". A wait that times out there prints, and goes on with wrong data: the check sees it. Forward alone is
asked of it here. Where a GPU has no multicast it wants UB_SKIPMC=1.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..operands import Operands, Runner, passes
from ..providers import Missing, Provider
from .limits import Closing, limits


def runner(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """See `Provider.runner`."""
    if group.size() != dist.get_world_size():
        raise Missing("its buffers are made over the whole world, and this group is a part of it")
    te = import_module("transformer_engine.pytorch")
    case, gathers, dtype = operands.case, operands.gathers, operands.dtype
    te.initialize_ub(
        [case.M, case.K if gathers else case.N], group.size(),
        quantization_modes=[te.UserBufferQuantizationMode.NONE], dtype=dtype, bootstrap_backend="gloo",
    )  # fmt: skip
    layer = te.Linear(
        case.K, case.N, bias=False, params_dtype=dtype, device=operands.device, tp_group=group, sequence_parallel=True,
        parallel_mode="column" if gathers else "row", ub_name="fc1" if gathers else "fc2", ub_overlap_ag=gathers,
        ub_overlap_rs=not gathers,
    )  # fmt: skip
    with torch.no_grad():
        layer.weight.copy_(operands.w)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return layer(x)  # type: ignore[no-any-return]

    return Closing(passes(call, operands.x, operands.w, operands, direction), te.destroy_ub)


PROVIDER = Provider(
    "te_userbuffers", runner, partial(limits, dtypes=("bfloat16", "float16")), "transformer_engine.pytorch",
    "TransformerEngine's Linear over userbuffers",
)  # fmt: skip
