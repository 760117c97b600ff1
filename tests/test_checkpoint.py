"""torch.distributed.checkpoint: saved by one number of tensor-parallel ranks, loaded by another, or by none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import fusedtp
from fusedtp.bench.ranks import RankPool


def dense(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    # 10 and 14 are cut unevenly over 4 ranks.
    return nn.Sequential(nn.Linear(10, 14), nn.GELU(), nn.Linear(14, 10))


def parallel(group: ProcessGroup, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    plan: dict[str, Any] = {"0": fusedtp.FusedColwiseParallel(), "2": fusedtp.FusedRowwiseParallel()}
    model = parallelize_module(dense(seed), mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(3, 10)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def whole(value: Any) -> Any:
    """A state with every DTensor gathered."""
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def save(group: ProcessGroup, path: str) -> dict[str, Any]:
    saved = state(*parallel(group, 0))
    dcp.save(saved, checkpoint_id=path, process_group=group)
    whole_state: dict[str, Any] = whole(saved)
    return whole_state


def load(group: ProcessGroup, path: str) -> dict[str, Any]:
    model, optimizer = parallel(group, 1)
    loaded = state(model, optimizer)
    dcp.load(loaded, checkpoint_id=path, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    out: dict[str, Any] = whole(state(model, optimizer))
    return out


def load_plain(group: ProcessGroup, path: str) -> dict[str, Tensor]:
    """Into a model that knows nothing of ranks."""
    loaded = {"model": dense(1).state_dict()}
    dcp.load(loaded, checkpoint_id=path, process_group=group)
    return loaded["model"]


def assert_same(got: Any, expected: Any, name: str) -> None:
    if isinstance(expected, dict):
        assert list(got) == list(expected), name
        for key, value in expected.items():
            assert_same(got[key], value, f"{name} {key}")
    elif isinstance(expected, Tensor):
        assert torch.equal(got, expected), name
    else:
        assert got == expected, name


@pytest.mark.parametrize("world_size", [4, 1])
def test_saved_by_two_ranks(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    """Parameters and AdamW's moments arrive bit by bit."""
    saved = pool.run(save, str(tmp_path), world_size=2)[0]
    assert list(saved["model"]) == list(dense(0).state_dict())
    for loaded in pool.run(load, str(tmp_path), world_size=world_size):
        assert_same(loaded, saved, "")
    plain = pool.run(load_plain, str(tmp_path), world_size=1)[0]
    assert_same(plain, saved["model"], "plain")
