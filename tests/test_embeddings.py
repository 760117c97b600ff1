"""FusedEmbeddingParallel: split by vocabulary, the result and every row's gradient are those of the whole embedding."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import fusedtp
from fusedtp import FusedColwiseParallel, FusedEmbeddingParallel
from fusedtp.bench.ranks import RankPool

FEATURES = 6


class Scaled(nn.Embedding):
    """As Gemma's: what nn.Embedding gives, times a number."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


def mesh_of(group: ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def own(whole: Tensor, placement: Placement, group: ProcessGroup) -> Tensor:
    if not isinstance(placement, Shard):
        return whole
    parts = whole.chunk(group.size(), placement.dim)
    rank = group.rank()
    return parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)


def looked_up(
    group: ProcessGroup, kind: type[nn.Embedding], length: int, padding: int | None, output: Placement, schedule: str
) -> None:
    torch.manual_seed(5)
    dense = kind(length, FEATURES, padding_idx=padding, dtype=torch.float64)
    style = FusedEmbeddingParallel(output_layouts=output, schedule=schedule)
    split = parallelize_module(copy.deepcopy(dense), mesh_of(group), style)
    assert isinstance(split, kind)
    assert isinstance(split.weight, DTensor)
    assert split.weight.placements == (Shard(0),)
    # Every row twice, so that rows' gradients are sums.
    indices = torch.cat([torch.randperm(length), torch.randperm(length)]).view(2, length)
    for module in (split, copy.deepcopy(split), pickle.loads(pickle.dumps(split))):
        expected, out = dense(indices), module(indices)
        # Nothing is rounded: of each row there is one.
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
    pool.run(looked_up, nn.Embedding, length, 1, output, schedule, world_size=world_size)


def test_a_subclass_keeps_its_own_part(pool: RankPool) -> None:
    pool.run(looked_up, Scaled, 9, None, Replicate(), "auto", world_size=2)


def tied(group: ProcessGroup) -> None:
    """A head with the embedding's weight: tied again once both have their styles, one weight with one gradient."""
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


def test_a_tied_head_has_the_same_weight(pool: RankPool) -> None:
    pool.run(tied, world_size=2)


def uneven(group: ProcessGroup, output: Placement) -> None:
    """Tokens that do not divide by the ranks, into a style that gathers them: as a DTensor they know their length."""
    torch.manual_seed(6)
    dense = nn.Sequential(Scaled(11, FEATURES), nn.Linear(FEATURES, 8)).double()
    plan = {
        "0": FusedEmbeddingParallel(output_layouts=output, use_local_output=False),
        "1": FusedColwiseParallel(input_layouts=output, output_layouts=Replicate()),
    }
    split = parallelize_module(copy.deepcopy(dense), mesh_of(group), plan)
    indices = torch.arange(7)[None]
    found = split[0](indices)
    assert isinstance(found, DTensor)
    assert (found.placements, found.shape) == ((output,), (1, 7, FEATURES))
    torch.testing.assert_close(found.full_tensor(), dense[0](indices))
    for model in (dense, split):
        out = model(indices)
        out.square().sum().backward()
        torch.testing.assert_close(out, dense(indices))
    for (name, ours), theirs in zip(split.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("output", [Shard(1), Replicate()], ids=repr)
def test_tokens_that_do_not_divide_go_on_as_a_dtensor(pool: RankPool, output: Placement) -> None:
    pool.run(uneven, output, world_size=2)
    assert "use_local_output=False" in repr(FusedEmbeddingParallel(use_local_output=False))
    with pytest.raises(TypeError, match="use_local_output must be True or False, got 'no'"):
        FusedEmbeddingParallel(use_local_output="no")  # type: ignore[arg-type]


def refused(group: ProcessGroup) -> None:
    mesh = mesh_of(group)
    split = parallelize_module(nn.Embedding(9, FEATURES), mesh, FusedEmbeddingParallel())
    for wrong, said in ((9, "got 0 to 9"), (-1, "got -1 to 0")):
        # On the rank without that row as well, which would else look up nothing and wait.
        with pytest.raises(IndexError, match=rf"from 0 to 8, {said}"):
            split(torch.tensor([0, wrong]))
    assert split(torch.empty(0, dtype=torch.long)).shape == (0, FEATURES)
    with pytest.raises(NotImplementedError, match="has a style already"):
        parallelize_module(split, mesh, FusedEmbeddingParallel())
    with pytest.raises(NotImplementedError, match=r"is for nn\.Embedding with a weight of its own, got Linear"):
        parallelize_module(nn.Linear(2, 2), mesh, FusedEmbeddingParallel())
    for option in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        with pytest.raises(NotImplementedError, match=f"nn.Embedding's {next(iter(option))}"):
            parallelize_module(nn.Embedding(9, FEATURES, **option), mesh, FusedEmbeddingParallel())
    with pytest.raises(ValueError, match="output_layouts must shard one of 2 dimensions"):
        parallelize_module(nn.Embedding(9, 2), mesh, FusedEmbeddingParallel(output_layouts=Shard(2)))(torch.tensor([1]))


def test_what_it_cannot_do_is_refused(pool: RankPool) -> None:
    pool.run(refused, world_size=2)
    with pytest.raises(ValueError, match=r"must be Shard\(dim\) or Replicate\(\), got 'whole'"):
        FusedEmbeddingParallel(output_layouts="whole")  # type: ignore[arg-type]
    assert "FusedEmbeddingParallel" in fusedtp.__all__
