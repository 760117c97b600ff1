"""Decoders whose linears sum as a tree: log-probabilities have the same bits on any number of ranks, in any batch."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Replicate, Shard

import fusedtp
from fusedtp import FusedColwiseParallel, FusedRowwiseParallel, RanksDisagree
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.train import Training, compare_bits
from fusedtp.hf.decoders import decoder_plan

from .harness import LARGE
from .test_decoders import decoder, mesh_of

SMALL = Training(vocabulary=16, hidden=16, intermediate=32, blocks=1, sequence=4, batch=8 if LARGE else 4)
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


@pytest.mark.parametrize("order", ["tree", "rank"] if LARGE else ["tree"])
def test_log_probabilities_on_any_number_of_ranks_and_in_a_batch(order: str) -> None:
    """As shown by `fusedtp train`; in the usual order some bits differ."""
    world_sizes = (1, 4) if LARGE and order == "tree" else (1, 2)
    settings = Training(**(vars(SMALL) | {"order": order}))
    found = compare_bits(settings, world_sizes)
    assert [(ranks, batch) for ranks, batch, *_ in found] == [
        (n, batch) for n in world_sizes for batch in (1, SMALL.batch)
    ]
    assert all(same == (far == 0) for *_, same, far in found)
    assert all(same for _, _, same, _ in found) == (order == "tree")


def logits(group: ProcessGroup, order: str, sequence_parallel: bool) -> Tensor:
    """Return a Llama's logits for two texts in float32, as kernels multiply no float64. Attention runs head by head and
    text by text: a batched matmul of the library depends on their number.
    """
    options = {"vocab_size": 48, "intermediate_size": 48, "attn_implementation": "sdpa", "num_hidden_layers": 1}
    model = decoder("Llama", **options).float()
    fusedtp.parallelize(model, mesh_of(group), order=order, sequence_parallel=sequence_parallel)
    ids = torch.arange(2 * 5).view(2, 5) * 7 % 48
    with torch.no_grad():
        both: Tensor = model(ids).logits
        if order == "tree":
            assert torch.equal(model(ids[1:]).logits[0], both[1])
    return both


@needs_transformers
def test_a_decoder_of_hugging_face(pool: RankPool) -> None:
    one = pool.run(logits, "tree", True, world_size=1)[0]
    for sequence_parallel in (True, False):
        for found in pool.run(logits, "tree", sequence_parallel, world_size=2):
            assert torch.equal(found, one), f"sequence_parallel={sequence_parallel}"
    usual = pool.run(logits, "rank", True, world_size=2)[0]
    torch.testing.assert_close(usual, one)
    assert not torch.equal(usual, one)


def refused(group: ProcessGroup) -> None:
    mesh = mesh_of(group)
    for style, linear, message in (
        (FusedColwiseParallel, nn.Linear(8, 9), "needs parts of out_features that are as long on every rank"),
        (FusedRowwiseParallel, nn.Linear(9, 8), "needs parts of in_features that are as long on every rank"),
    ):
        with pytest.raises(ValueError, match=message):
            style(order="tree")._apply(linear, mesh)
    with pytest.raises(ValueError, match="divide its 1 leaves, got 2 ranks"):
        FusedColwiseParallel(order="tree-1")._apply(nn.Linear(8, 8), mesh)
    for options, message in (
        ({"order": "forest"}, "order must be 'rank', 'any', 'tree'"),
        ({"schedule": "unfused"}, "by schedule 'fused' alone"),
        ({"float8": "rowwise"}, "operands that are not cast"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            FusedRowwiseParallel(**({"order": "tree"} | options))  # type: ignore[arg-type]
    assert "order='tree'" in repr(FusedColwiseParallel(order="tree"))
    model = decoder("Llama", vocab_size=48, intermediate_size=48)
    with pytest.raises(RanksDisagree, match="order"):
        fusedtp.parallelize(model, mesh, order="tree-16" if group.rank() else "tree")

    # The sums of OLMo2's norms of queries and keys are added in rank order.
    with pytest.raises(NotImplementedError, match=r"order 'tree' is not kept by .*_norm, a norm over features"):
        decoder_plan(decoder("OLMo2").float(), 2, order="tree")
    decoder_plan(decoder("OLMo2"), 2, order="rank")


@needs_transformers
def test_styles_that_cannot_are_refused(pool: RankPool) -> None:
    pool.run(refused, world_size=2)


def gradients(group: ProcessGroup) -> list[Tensor]:
    """Return the parameters of a block of two linears after two training steps."""
    torch.manual_seed(0)
    block, mesh = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 24)), mesh_of(group)
    x, dy = torch.randn(3, 8, 24), torch.randn(3, 8, 24)
    FusedColwiseParallel(input_layouts=Shard(1), order="tree")._apply(block[0], mesh)
    FusedRowwiseParallel(output_layouts=Shard(1), order="tree")._apply(block[2], mesh)
    parts = [each.tensor_split(group.size(), 1)[group.rank()] for each in (x, dy)]
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (block(parts[0]) * parts[1]).sum().backward()
        optimizer.step()
    whole = [parameter.redistribute(placements=[Replicate()]).to_local() for parameter in block.parameters()]
    return [each.detach() for each in whole]


def test_two_steps_of_training_through_styles(pool: RankPool) -> None:
    one = pool.run(gradients, world_size=1)[0]
    for world_size in (2, 4) if LARGE else (4,):
        for found in pool.run(gradients, world_size=world_size):
            for got, expected in zip(found, one, strict=True):
                assert torch.equal(got, expected)
