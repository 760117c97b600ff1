"""Embeddings split by vocabulary: each rank looks up indices in its own rows, and the ranks' results are added up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from .. import collectives
from ..calls import arguments
from ..calls.parameters import PLAIN, TrackedModule, as_dtensor, local
from ..choose import dispatch
from ..scaled import check_dense
from ..shards import chunk_sizes, offsets
from .linears import Derived, check_mesh, convert, derived, distribute, met_before, positive


class FusedEmbeddingParallel(ParallelStyle):
    """Style for an nn.Embedding: split it by rows over a 1-D mesh, as a head by columns; one weight can serve both.

    - `output_layouts`: of the result [.., features]: Replicate(), whole on every rank, or Shard(d), this rank's part.
    - `use_local_output`: return this rank's tensor rather than a DTensor. A DTensor knows its global length if tokens
      do not divide evenly.
    - `schedule`: of the all-reduce or reduce-scatter of the results: auto, fused, decomposed or unfused.

    Every rank is given the same indices. Exactly one rank has the row of an index, so the sum is exact. The weight
    becomes a DTensor, Shard(0), and its gradient is that of this rank's rows. A subclass's own code still runs on
    nn.Embedding's result. On CPUs an index out of range raises IndexError on every rank that is given it.
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        schedule: str = "auto",
    ) -> None:
        super().__init__()
        self.output_layouts = Replicate() if output_layouts is None else output_layouts
        if not (type(self.output_layouts) is Shard or isinstance(self.output_layouts, Replicate)):
            raise ValueError(f"output_layouts must be Shard(dim) or Replicate(), got {output_layouts!r}")
        self.use_local_output = arguments.flag("use_local_output", use_local_output)
        dispatch.check_schedule(schedule)
        self.schedule = schedule

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh(device_mesh)
        name, kind = type(self).__name__, type(module).__name__
        if isinstance(module, FusedEmbedding):
            raise NotImplementedError(f"{name}: this {kind} has a style already")
        if not isinstance(module, nn.Embedding) or "weight" not in module._parameters:
            raise NotImplementedError(f"{name} is for nn.Embedding with a weight of its own, got {kind}")
        if reason := met_before(module):
            raise NotImplementedError(f"{name} is for nn.Embedding, got {reason}")
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise NotImplementedError(f"{name} does not do nn.Embedding's {option}")
        distribute(module, device_mesh, self.src_data_rank, weight=Shard(0))
        own = type(module)
        return convert(
            module,
            FusedEmbedding if own is nn.Embedding else derived((own, FusedEmbedding, Derived)),
            mesh=device_mesh,
            style=self,
        )

    def __repr__(self) -> str:
        layouts = f"output_layouts={self.output_layouts!r}, use_local_output={self.use_local_output}"
        return f"{type(self).__name__}({layouts}, schedule={self.schedule!r})"


class FusedEmbedding(TrackedModule, nn.Embedding):
    """The class that FusedEmbeddingParallel gives an nn.Embedding; a subclass's own code runs before this one's."""

    mesh: DeviceMesh
    style: FusedEmbeddingParallel

    def forward(self, input: Tensor) -> Tensor:
        """Look up indices [..], the same on every rank; return [.., features], or this rank's part of it."""
        (parameter,) = self.read("weight")
        style = self.style
        y, shape = look_up(self, parameter, input, self.mesh, style.output_layouts, style.schedule)
        output = positive(style.output_layouts, y.ndim, "output_layouts")
        return y if style.use_local_output else as_dtensor(y, self.mesh, output, shape)


def look_up(
    embedding: nn.Embedding, parameter: Any, input: Tensor, mesh: DeviceMesh, output_layouts: Placement, schedule: str
) -> tuple[Tensor, tuple[int, ...]]:
    """Look up indices [..] in the ranks' rows, and return the result in its layout, and the whole result's shape.

    `parameter`: the embedding's weight, split by rows as DTensor does.
    """
    check_dense("input", input)
    # torch would check this too, but a rank without rows looks nothing up.
    if input.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"input must be indices in torch.int64 or torch.int32, got {input.dtype}")
    if isinstance(input, DTensor):
        input = input.redistribute(placements=[Replicate()]).to_local()
    output = positive(output_layouts, input.ndim + 1, "output_layouts")
    sizes, rank = chunk_sizes(embedding.num_embeddings, mesh.size()), mesh.get_local_rank()
    begin, size = offsets(sizes)[rank], sizes[rank]
    # A fake tensor has no values to look at.
    has_values = type(input) in PLAIN and input.device.type == "cpu" and not torch.compiler.is_compiling()
    if has_values and input.numel():
        low, high = torch.aminmax(input)
        if low < 0 or high >= embedding.num_embeddings:
            raise IndexError(f"indices must be from 0 to {embedding.num_embeddings - 1}, got {int(low)} to {int(high)}")
    weight = local(parameter, 2)
    rows = input - begin
    # On other devices the lookup itself finds indices out of range: the first and the last rank mask none of them.
    outside = (rows < 0) if begin else torch.zeros_like(rows, dtype=torch.bool)
    if begin + size < embedding.num_embeddings:
        outside = outside | (rows >= size)
    if size:
        padding = embedding.padding_idx
        own = None if padding is None or not begin <= padding < begin + size else padding - begin
        terms = F.embedding(rows.masked_fill(outside, 0), weight, own).masked_fill(outside.unsqueeze(-1), 0)
    else:
        # The weight takes part in the graph, so this rank joins the collectives of backward.
        terms = weight.new_zeros(*input.shape, embedding.embedding_dim) + weight.sum()
    options: dict[str, Any] = {"group": mesh.get_group(), "schedule": schedule}
    if isinstance(output, Shard):
        lengths = chunk_sizes(terms.shape[output.dim], mesh.size())
        return collectives.reduce_scatter(terms, scatter_dim=output.dim, sizes=lengths, **options), tuple(terms.shape)
    return collectives.all_reduce(terms, **options), tuple(terms.shape)
