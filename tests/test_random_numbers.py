"""Random numbers that a layer's own code draws for split tokens are those of one process, and ranks stay in step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F

from fusedtp.hf.tokens import TOKENS, DrawWhole

from .harness import LARGE, mesh_of, on_ranks


class Draws(nn.Module):
    """A layer that draws, like the code of some decoders."""

    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Any:
        return self.draw(x * 2) + 1


def seeded(x: Tensor) -> Tensor:
    return x * torch.empty_like(x).uniform_(generator=torch.Generator().manual_seed(3))


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x, 0.4, True, True),
    "dropout in place, result unused": lambda x: (F.dropout(x, 0.4, inplace=True), x)[1],
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "dropout in evaluation": lambda x: F.dropout(x, 0.4, training=False),
    "nn.Dropout": lambda x: nn.Dropout(0.4)(x),
    "native dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "dropout of features": lambda x: F.dropout1d(x, 0.4),
    "a softmax with noise": F.gumbel_softmax,
    "random slopes": lambda x: F.rrelu(x, training=True),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "uniform": lambda x: x * torch.empty_like(x).uniform_(0.9, 1.1),
    "normal, in place": lambda x: x.detach().normal_(),
    "like x": lambda x: x + torch.rand_like(x) + torch.randn_like(x),
    "a generator": seeded,
    "twice": lambda x: F.dropout(F.dropout(x, 0.1) + torch.empty_like(x).exponential_(), 0.1),
}


# Ranks without a token, with fewer than others, and with as many.
@pytest.mark.parametrize(
    ("num_tokens", "is_training", "world_size"),
    list(product([1, 5, 8], [True, False], [2, 4]))
    if LARGE
    else [(1, True, 2), (5, True, 4), (8, True, 2), (5, False, 2)],
)
@on_ranks()
def test_as_in_one_process(group: ProcessGroup, num_tokens: int, is_training: bool, world_size: int) -> None:
    """A layer that is in evaluation may draw as well, such as for Monte Carlo dropout."""
    mesh = mesh_of(group)
    whole = torch.randn(2, num_tokens, 6, generator=torch.Generator().manual_seed(1))
    for name, draw in DRAWS.items():
        found = []
        for is_split in (False, True):
            x = whole.clone()
            module: Any = Draws(draw)
            if is_split:
                x = distribute_tensor(x, mesh, [TOKENS], src_data_rank=None)
                module = DrawWhole()._apply(module, mesh)
            module.train(is_training)
            x.requires_grad_()
            torch.manual_seed(2)
            y = module(x)
            if y.requires_grad:
                y.square().sum().backward()
            grad: Any = x.grad if x.grad is not None else torch.zeros_like(x)
            if is_split:
                assert y.placements == (TOKENS,), name
                y, grad = y.full_tensor(), grad.full_tensor()
            found.append((y.detach(), grad, torch.get_rng_state()))
        for one, split in zip(*found, strict=True):
            assert torch.equal(one, split), name


@on_ranks(2)
def test_compiled_and_in_evaluation(group: ProcessGroup) -> None:
    """A compiler leaves the layer out while it trains; in evaluation it compiles the layer's own code."""
    mesh, whole = mesh_of(group), torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(1))
    x = distribute_tensor(whole, mesh, [TOKENS], src_data_rank=None)
    module: Any = DrawWhole()._apply(Draws(DRAWS["dropout"]), mesh)
    torch.manual_seed(2)
    expected, state = Draws(DRAWS["dropout"])(whole), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(torch.compile(module, backend="eager")(x).full_tensor(), expected)
    assert torch.equal(torch.get_rng_state(), state)
    own: Any = Draws(lambda y: y.sin())
    compiled = torch.compile(DrawWhole()._apply(own, mesh).eval(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x).full_tensor(), (whole * 2).sin() + 1)
    with torch.inference_mode():
        quiet: Any = DrawWhole()._apply(Draws(DRAWS["dropout in evaluation"]), mesh)
        for each in (quiet, quiet.eval()):
            assert torch.equal(each(x).full_tensor(), whole * 2 + 1)


@on_ranks(2)
def test_an_exception_leaves_no_mode_behind(group: ProcessGroup) -> None:
    layer = Draws(lambda x: x.missing)
    module = DrawWhole()._apply(layer, mesh_of(group))
    with pytest.raises(AttributeError, match="missing"):
        module(torch.ones(2, 3, 4))
    assert torch.overrides._len_torch_function_stack() == 0
    assert isinstance(module, Draws)
    assert repr(copy.deepcopy(module)) == repr(module) == "Draws()"
