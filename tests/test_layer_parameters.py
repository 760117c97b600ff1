"""A layer's parameters and its input met from outside: padded ones by a checkpoint, shards by a function, a whole input
by what made it whole.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fusedtp.bench.ranks import RankPool
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import fusedtp

from .test_checkpoint import whole
from .test_layer_state import HIDDEN, INNER, close


def own_sizes(group: ProcessGroup, path: str) -> None:
    """Into a layer with as long a shard on the longest rank, so that the shapes would fit."""
    torch.manual_seed(8)
    layer, same, other = (
        fusedtp.ColumnParallelLinear(HIDDEN, INNER, group=group, feature_sizes=sizes)
        for sizes in ((7, 2), (7, 2), (2, 7))
    )
    state = layer.state_dict()
    dcp.save({"model": state}, checkpoint_id=path, process_group=group)
    read = {"model": same.state_dict()}
    dcp.load(read, checkpoint_id=path, process_group=group)
    same.load_state_dict(read["model"])
    assert torch.equal(same.weight.to_local(), layer.weight.to_local())
    before = {name: whole(value).clone() for name, value in other.state_dict().items()}
    # DCP's error is no Exception.
    with pytest.raises(BaseException, match=r"Missing key in checkpoint state_dict: model\.padded_sizes_2_7"):
        dcp.load({"model": other.state_dict()}, checkpoint_id=path, process_group=group)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"padded for shards of \(7, 2\), this layer's are \(2, 7\)"):
            other.load_state_dict(state, strict=strict)
    for name, value in other.state_dict().items():
        assert torch.equal(whole(value), before[name]), f"{name} was overwritten"


def test_own_sizes_are_not_loaded_into_others(pool: RankPool, tmp_path: Path) -> None:
    pool.run(own_sizes, str(tmp_path), world_size=2)


def in_functions(group: ProcessGroup) -> None:
    torch.manual_seed(9)
    layer = fusedtp.ColumnParallelLinear(HIDDEN, INNER, group=group)
    x = torch.randn(2, HIDDEN)
    layer(x).square().sum().backward()
    expected = {name: each.grad.to_local().clone() for name, each in layer.named_parameters()}
    layer.zero_grad()
    assert layer.bias is not None
    y = fusedtp.all_gather_linear(x, layer.weight.to_local(), layer.bias.to_local(), group=group)
    y.square().sum().backward()
    for name, each in layer.named_parameters():
        assert isinstance(each.grad, DTensor), name
        close(each.grad.to_local(), expected[name], name)
    with pytest.raises(TypeError, match=r"got a DTensor .*weight\.to_local\(\)"):
        fusedtp.all_gather_linear(x, layer.weight, group=group)


def test_functions_take_a_ranks_own_part_of_a_layer(pool: RankPool) -> None:
    pool.run(in_functions, world_size=2)


def whole_in_each_way(group: ProcessGroup) -> dict[str, Tensor]:
    """The gradient of a part of x, all of which a layer takes: by each way to have it whole."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))
    torch.manual_seed(9)
    layers = {
        whole: fusedtp.ColumnParallelLinear(HIDDEN, INNER, group=group, sequence_parallel=not whole)
        for whole in (True, False)
    }
    layers[True].load_state_dict(layers[False].state_dict())
    full = torch.randn(2 * group.size(), HIDDEN)
    found = {}
    for name, of in {
        "gathered": lambda x: layers[True](fusedtp.all_gather(x, group=group)),
        "by the layer": layers[False],
        "as a DTensor": lambda x: layers[True](DTensor.from_local(x, mesh, [Shard(0)]).full_tensor()),
        "by notation": lambda x: layers[True](
            fusedtp.sharded_matmul(x, torch.eye(HIDDEN), "[M_X, K] @ [K, N] -> [M, N]", mesh)
        ),
    }.items():
        x = full[2 * group.rank() :][:2].clone().requires_grad_()
        of(x).square().sum().backward()
        assert x.grad is not None
        found[name] = x.grad
    return found


def test_copies_that_are_gathered_have_a_gradient_each(pool: RankPool) -> None:
    """docs/sharding.md: before a layer that takes a whole tensor as one, `all_gather` counts a gradient once a rank."""
    for found in pool.run(whole_in_each_way, world_size=3):
        once = found.pop("by the layer")
        close(found.pop("gathered"), 3 * once, "gathered")
        for name, each in found.items():
            close(each, once, name)
