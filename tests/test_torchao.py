"""float8 recipes against torchao's Float8Linear, which has recipes of the same names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.scaled import RECIPES

from .harness import by_torchao

M, N, K = 32, 48, 64


def off(x: Tensor, reference: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return float((x - reference).abs().max() / reference.abs().max())


def as_torchao(group: ProcessGroup, recipe: Any, dtype: torch.dtype, schedule: str) -> None:
    """Compare a linear whose tokens are gathered with torchao's: y, dx and dw."""
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(K, N, bias=False, dtype=dtype))
    whole, dy = torch.randn(M, K, dtype=dtype), torch.randn(M, N, dtype=dtype)
    w, rows = linear[0].weight.detach().clone().requires_grad_(), M // group.size()
    theirs = whole.clone().requires_grad_()
    expected = by_torchao(linear, recipe)(theirs)
    expected.backward(dy)
    mine = slice(group.rank() * rows, (group.rank() + 1) * rows)
    x = whole[mine].clone().requires_grad_()
    # Every rank has the same weight and the whole dy, so each has a share of the sums.
    y = fusedtp.all_gather_linear(x, w, group=group, float8=recipe, schedule=schedule)
    y.backward(dy / group.size())
    one = group.size() == 1
    assert x.grad is not None
    assert w.grad is not None
    assert theirs.grad is not None
    found = {
        "y": (y, expected),
        "dx": (x.grad, theirs.grad[mine]),
        "dw": (w.grad * group.size(), linear[0].weight.grad),
    }
    for name, (ours, its) in found.items():
        if recipe != "tensorwise" and (one or name == "y"):
            # Scales are powers of two, so no value is rounded in another order.
            assert torch.equal(ours, its), name
        else:
            # For dw, x was sent with scales of rows and is cast again with scales of columns.
            assert off(ours, its) < (1e-4 if name != "dw" or one else 0.03) + 2 * torch.finfo(dtype).eps, name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world_size", "schedule"), [(1, "auto"), (2, "decomposed"), (2, "fused")])
def test_a_linear(pool: RankPool, recipe: str, dtype: torch.dtype, world_size: int, schedule: str) -> None:
    pool.run(as_torchao, recipe, dtype, schedule, world_size=world_size)
