"""torch's tensor-parallel styles on one nn.Linear; their forward keeps the gathered x.

ColwiseParallel(input_layouts=Shard(0)) and RowwiseParallel(output_layouts=Shard(0)):

https://docs.pytorch.org/docs/2.11/distributed.tensor.parallel.html
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..operands import Operands, Runner, passes
from ..providers import Provider
from .limits import limits


def runner(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
    """See `Provider.runner`."""
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


PROVIDER = Provider(
    "dtensor", runner, partial(limits, has_gradient=True, needs_cuda=False),
    about="torch's DTensor styles, Colwise- and RowwiseParallel",
)  # fmt: skip
