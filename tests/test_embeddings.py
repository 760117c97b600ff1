"""FusedEmbeddingParallel: split by vocabulary, with the result and every row's gradient of the whole embedding."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from fusedtp import FusedColwiseParallel, FusedEmbeddingParallel
from fusedtp.bench.ranks import RankPool

from .harness import mesh_of, on_ranks

FEATURES = 6


class Scaled(nn.Embedding):
    """An embedding like Gemma's: nn.Embedding times a number."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


def own(whole: Tensor, placement: Placement, group: ProcessGroup) -> Tensor:
    if not isinstance(placement, Shard):
        return whole
    parts = whole.chunk(group.size(), placement.dim)
    rank = group.rank()
    return parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)


def looked_up(
    group: ProcessGroup, kind: type[nn.Embedding], length: int, padding: int | None, output: Placement, schedule: str,
    use_local_output: bool,
) -> None:  # fmt: skip
    torch.manual_seed(5)
    dense = kind(length, FEATURES, padding_idx=padding, dtype=torch.float64)
    style = FusedEmbeddingParallel(output_layouts=output, schedule=schedule, use_local_output=use_local_output)
    split = parallelize_module(copy.deepcopy(dense), mesh_of(group), style)
    assert isinstance(split, kind)
    assert isinstance(split.weight, DTensor)
    assert split.weight.placements == (Shard(0),)
    if output == Replicate():
        assert split(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0, FEATURES)
    # Every row is looked up twice, so rows' gradients are sums.
    indices = torch.cat([torch.randperm(length), torch.randperm(length)]).view(2, length)
    for module in (split, copy.deepcopy(split), pickle.loads(pickle.dumps(split))):
        expected, out = dense(indices), module(indices)
        if not use_local_output:
            assert isinstance(out, DTensor)
            assert (out.placements, out.shape) == ((output,), expected.shape)
            out = out.to_local()
        # No rounding: only one rank has each row.
        assert torch.equal(out, own(expected, output, group))
        weights = torch.randn_like(expected)
        (expected * weights).sum().backward()
        (out * own(weights, output, group)).sum().backward()
        torch.testing.assert_close(module.weight.grad.full_tensor(), dense.weight.grad)
        dense.weight.grad = module.weight.grad = None


@pytest.mark.parametrize("output", [Replicate(), Shard(0), Shard(1), Shard(-1)], ids=repr)
@pytest.mark.parametrize(("length", "world_size"), [(11, 2), (11, 4), (3, 4)])
def test_it_gives_what_the_whole_one_gives(pool: RankPool, output: Placement, length: int, world_size: int) -> None:
    schedule = "unfused" if world_size == 2 else "decomposed"
    is_local = world_size == 4 or output == Shard(-1)
    pool.run(looked_up, nn.Embedding, length, 1, output, schedule, is_local, world_size=world_size)


def test_a_subclass_keeps_its_own_part(pool: RankPool) -> None:
    pool.run(looked_up, Scaled, 9, None, Replicate(), "auto", True, world_size=2)


@on_ranks(2)
def test_a_tied_head_has_the_same_weight(group: ProcessGroup) -> None:
    """A head that shares the embedding's weight is tied again after both styles: one weight, one gradient."""
    torch.manual_seed(6)
    dense = nn.ModuleDict({"embed": nn.Embedding(9, FEATURES), "head": nn.Linear(FEATURES, 9, bias=False)}).double()
    dense["head"].weight = dense["embed"].weight
    split = copy.deepcopy(dense)
    parallelize_module(split["embed"], mesh_of(group), FusedEmbeddingParallel())
    split["head"].weight = split["embed"].weight
    parallelize_module(split["head"], mesh_of(group), FusedColwiseParallel(output_layouts=Replicate()))
    assert split["head"].weight is split["embed"].weight
    indices = torch.arange(9)
    for model in (dense, split):
        model["head"](model["embed"](indices)).square().sum().backward()
    torch.testing.assert_close(split["embed"].weight.grad.full_tensor(), dense["embed"].weight.grad)
