"""FusedNormParallel: a norm of each rank's tokens, or heads, equals the whole norm; so do its gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel, parallelize_module

from fusedtp import (
    FusedColwiseParallel,
    FusedEmbeddingParallel,
    FusedGroup,
    FusedNormParallel,
    FusedRowwiseParallel,
)  # fmt: skip

from .harness import LARGE, mesh_of, on_ranks, spread

FEATURES = 6


class OwnNorm(nn.Module):
    """A norm as models write it, with a scale of 1 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(FEATURES)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(FEATURES),
    "LayerNorm of two dims": lambda: nn.LayerNorm((2, FEATURES)),
    "without a bias": lambda: nn.LayerNorm(FEATURES, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(FEATURES),
    "own": OwnNorm,
    "without parameters": lambda: nn.LayerNorm(FEATURES, elementwise_affine=False),
    "RMSNorm without parameters": lambda: nn.RMSNorm(FEATURES, elementwise_affine=False),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    norm = NORMS[name]()
    for each in norm.parameters():
        nn.init.normal_(each)
    return norm.double()


@pytest.mark.parametrize(("name", "schedule"), spread(list(NORMS), ["auto", "unfused"]))
@on_ranks(3)
def test_as_in_one_process(group: ProcessGroup, name: str, schedule: str) -> None:
    """Tokens are split unevenly: rank 0 has one more."""
    style = FusedNormParallel(sequence_dim=0, use_local_output=True, schedule=schedule)
    dense, norm = made(name), parallelize_module(made(name), mesh_of(group), style)
    assert isinstance(norm, type(dense))
    assert list(norm.state_dict()) == list(dense.state_dict())
    x = torch.randn(2 * group.size() + 1, 2, FEATURES, generator=torch.Generator().manual_seed(4)).double()
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).double()
    mine = slice(0, 3) if group.rank() == 0 else slice(2 * group.rank() + 1, 2 * group.rank() + 3)
    whole, part = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
    # Compiling is the slowest part of this test.
    compiled = name in ("own", "without parameters") or (LARGE and name == "LayerNorm")
    for call in (norm, torch.compile(norm, fullgraph=True, backend="aot_eager") if compiled else norm):
        expected, y = dense(whole), call(part)
        assert type(y) is Tensor
        torch.testing.assert_close(y, expected[mine])
        expected.backward(dy)
        y.backward(dy[mine])
        torch.testing.assert_close(part.grad, whole.grad[mine])
        for (key, parameter), reference in zip(norm.named_parameters(), dense.parameters(), strict=True):
            assert getattr(norm, key) is parameter
            assert isinstance(parameter, DTensor)
            assert isinstance(parameter.grad, DTensor), key
            assert parameter.grad.placements == (Replicate(),)
            torch.testing.assert_close(parameter.grad.to_local(), reference.grad)
        # Evaluation between training steps.
        with torch.inference_mode():
            torch.testing.assert_close(norm(part.detach()), dense(x)[mine])
    torch._dynamo.reset()
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert type(other) is type(norm)
        assert torch.equal(other(x), norm(x))
        assert all(isinstance(each, DTensor) for each in other.parameters())
    norm.requires_grad_(False)
    assert not norm(x).requires_grad


class Dropout(nn.Module):
    """A module that has only its name in common with nn.Dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


@on_ranks(2)
def test_a_module_named_like_dropout(group: ProcessGroup) -> None:
    ours = parallelize_module(Dropout(), mesh_of(group), FusedNormParallel(use_local_output=True))
    assert torch.equal(ours(torch.ones(2, 3, FEATURES)), torch.full((2, 3, FEATURES), 3.0))


@on_ranks(2)
def test_as_torchs_style(group: ProcessGroup) -> None:
    """Equals torch's SequenceParallel for the same input, plain or in another layout, with the same defaults."""
    mesh = mesh_of(group)
    x = torch.randn(2, 2 * group.size(), FEATURES, generator=torch.Generator().manual_seed(6)).double()
    part = x.chunk(group.size(), 1)[group.rank()]
    given = [
        part,
        *(distribute_tensor(x, mesh, [each], src_data_rank=None) for each in (Shard(1), Shard(0), Replicate())),
    ]
    makes = [make for name, make in NORMS.items() if "two dims" not in name]
    for make in (*makes, lambda: nn.Dropout(0.5)):
        for options in ({}, {"use_local_output": True}, {"sequence_dim": -2}):
            ours, theirs = make().double().eval(), make().double().eval()
            for each in theirs.parameters():
                nn.init.normal_(each)
            ours.load_state_dict(theirs.state_dict())
            parallelize_module(ours, mesh, FusedNormParallel(**options))
            if "sequence_dim" in options:
                options = {"sequence_dim": 1}
            parallelize_module(theirs, mesh, SequenceParallel(**options))
            for each in given:
                y, expected = ours(each), theirs(each)
                assert type(y) is type(expected)
                if isinstance(y, DTensor):
                    assert y.placements == expected.placements
                    y, expected = y.to_local(), expected.to_local()
                torch.testing.assert_close(y, expected)


class Attention(nn.Module):
    """Attention as in torchtitan: it reads the length of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (each(x).view(batch, length, -1, 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o(heads.reshape(batch, length, -1))


class Block(nn.Module):
    """A decoder of an embedding, one layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.attention = nn.Embedding(10, 8), nn.LayerNorm(8), Attention()
        self.drop, self.ffn_norm = nn.Dropout(0.3), nn.RMSNorm(8)
        self.ffn = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.last, self.head = nn.LayerNorm(8), nn.Linear(8, 10)

    def forward(self, indices: Tensor) -> Tensor:
        x = self.tokens(indices)
        x = x + self.drop(self.attention(self.norm(x)))
        x = x + self.ffn(self.ffn_norm(x))
        return self.head(self.last(x))


@pytest.mark.parametrize(("changed", "length"), [("", 7), ("gather", 6), ("gather", 7), ("norms", 6)])
@on_ranks(2)
def test_a_plan_of_torchs_word_for_word(group: ProcessGroup, changed: str, length: int) -> None:
    """A plan as in torchtitan with our class names; also with a FusedGroup as the gather, and with torch's norms."""
    mesh = mesh_of(group)
    torch.manual_seed(8)
    dense = Block().double()
    rows: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    plan: dict[str, Any] = {
        "tokens": FusedEmbeddingParallel(**rows), "norm": FusedNormParallel(), "drop": FusedNormParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "attention.q": FusedColwiseParallel(), "attention.k": FusedColwiseParallel(),
        "attention.v": FusedColwiseParallel(), "attention.o": FusedRowwiseParallel(**rows),
        "ffn_norm": FusedNormParallel(), "ffn.0": FusedColwiseParallel(input_layouts=Shard(1)),
        "ffn.2": FusedRowwiseParallel(**rows), "last": FusedNormParallel(),
        "head": FusedColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }  # fmt: skip
    if changed == "norms":
        plan |= dict.fromkeys(("norm", "ffn_norm"), SequenceParallel(use_local_output=True))
    if changed == "gather":
        plan = {key: style for key, style in plan.items() if key[-2:] not in (".q", ".k", ".v")}
        plan["attention"] = FusedGroup("q", "k", "v", input_layouts=Shard(1))
    ours = parallelize_module(copy.deepcopy(dense), mesh, plan)
    indices = torch.randint(10, (2, length))
    results = []
    for model in (dense, ours):
        torch.manual_seed(9)
        results.append(model(indices))
        results[-1].square().sum().backward()
    torch.testing.assert_close(results[1], results[0])
    for (key, parameter), reference in zip(ours.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), reference.grad, msg=key)


@pytest.mark.parametrize("length", [7, 1])
@on_ranks(2)
def test_a_dropout(group: ProcessGroup, length: int) -> None:
    """Equals one process from the same random state, which stays equal on all ranks, even if tokens do not divide."""
    mesh = mesh_of(group)
    for options, training in (({}, True), ({"use_local_output": True}, True), ({}, False)):
        style = FusedNormParallel(**options)
        ours, dense = parallelize_module(nn.Dropout(0.4), mesh, style).train(training), nn.Dropout(0.4).train(training)
        x = torch.ones(2, length, 3, requires_grad=True)
        given = distribute_tensor(x.detach(), mesh, [Shard(1)], src_data_rank=None).requires_grad_()
        torch.manual_seed(7)
        y = ours(given)
        y.sum().backward()
        state = torch.get_rng_state()
        torch.manual_seed(7)
        expected = dense(x)
        expected.sum().backward()
        assert torch.equal(state, torch.get_rng_state())
        part = distribute_tensor(expected.detach(), mesh, [Shard(1)], src_data_rank=None)
        assert torch.equal(y if options else y.to_local(), part.to_local())
        assert torch.equal(given.grad.full_tensor(), x.grad)
