"""Functional collectives and matmuls through torch.compile with _micro_pipeline_tp, torch's async tensor parallelism.

Refused unless the compiled code calls torch's fused ops: torch/_inductor/fx_passes/micro_pipeline_tp.py of torch 2.11
to 2.13 inserts them if its patterns match.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..operands import Operands, Runner, passes
from ..providers import Provider
from .limits import limits
from .torch_symm_mem import enable

# torch's fused ops that the compiler must have inserted: kind and direction -> names in the code.
_FUSED = {
    ("gather", "forward"): ("fused_all_gather_matmul",),
    ("gather", "both"): ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"),
    ("scatter", "forward"): ("fused_matmul_reduce_scatter",),
    ("scatter", "both"): ("fused_matmul_reduce_scatter", "fused_all_gather_matmul"),
}


def runner(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """See `Provider.runner`."""
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


PROVIDER = Provider(
    "async_tp", runner, partial(limits, has_gradient=True), about="torch.compile with _micro_pipeline_tp, async TP"
)
