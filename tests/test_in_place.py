"""A result may be changed in place, as nn.ReLU(inplace=True) and models that clamp do: gradients are right then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import fusedtp
from fusedtp import FusedColwiseParallel, FusedRowwiseParallel
from fusedtp.bench.ranks import RankPool


def changed(group: ProcessGroup, schedule: str) -> None:
    """What is changed in place, and the same out of place."""
    torch.manual_seed(16)
    x, w, v = (torch.randn(*shape).double().requires_grad_() for shape in ((2, 4, 8), (6, 8), (6, 8)))
    options: dict[str, Any] = {"group": group, "schedule": schedule}
    calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "one weight": lambda: (fusedtp.all_gather_linear(x, w, gather_dim=1, **options),),
        "two weights": lambda: fusedtp.all_gather_linear(x, (w, v), gather_dim=1, **options),
        "relu of two": lambda: fusedtp.all_gather_linear(x, (w, v), activation="relu", gather_dim=1, **options),
        "reduce-scatter": lambda: (fusedtp.linear_reduce_scatter(x, w, scatter_dim=1, **options),),
        "all-reduce": lambda: (fusedtp.linear_all_reduce(x, w, **options),),
    }

    def gradients(call: Callable[[], tuple[Tensor, ...]], change: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
        loss = torch.stack([change(y, -0.5, 0.5).square().sum() for y in call()]).sum()
        return torch.autograd.grad(loss, (x, w, v), allow_unused=True)

    for name, call in calls.items():
        if name == "relu of two":
            # What its gradient is made of must not be changed, of which torch tells.
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients(call, Tensor.clamp_)
            continue
        for expected, found in zip(gradients(call, Tensor.clamp), gradients(call, Tensor.clamp_), strict=True):
            assert (expected is None) == (found is None)
            assert expected is None or (found is not None and torch.equal(found, expected)), name


@pytest.mark.parametrize("schedule", ["unfused", "decomposed"])
def test_results_changed_in_place(pool: RankPool, schedule: str) -> None:
    pool.run(changed, schedule, world_size=2)


def between(group: ProcessGroup) -> None:
    torch.manual_seed(17)
    dense = nn.Sequential(nn.Linear(8, 12), nn.ReLU(inplace=True), nn.Linear(12, 8), nn.ReLU(inplace=True)).double()
    plan = {"0": FusedColwiseParallel(input_layouts=Shard(1)), "2": FusedRowwiseParallel(output_layouts=Shard(1))}
    x = torch.randn(2, 6, 8).double()
    dense(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in dense.named_parameters()}
    dense.zero_grad()
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = parallelize_module(dense, mesh, plan)  # type: ignore[arg-type]
    model(x.chunk(2, 1)[group.rank()]).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])


def test_an_activation_in_place_between_styles(pool: RankPool) -> None:
    pool.run(between, world_size=2)
