"""FusedNormParallel: what a norm of each rank's tokens, or heads, makes is that of the whole; so are its gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusedtp.bench.ranks import RankPool
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

import fusedtp
from fusedtp import FusedNormParallel

FEATURES = 6


class OwnNorm(nn.Module):
    """As models write them: its scale is 1 + weight."""

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
}


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    norm = NORMS[name]()
    for each in norm.parameters():
        nn.init.normal_(each)
    return norm.double()


def mesh_of(group: ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


def as_in_one_process(group: ProcessGroup, name: str, schedule: str) -> None:
    """Tokens split unevenly: rank 0 has one more."""
    dense, norm = made(name), parallelize_module(made(name), mesh_of(group), FusedNormParallel(schedule=schedule))
    x = torch.randn(2 * group.size() + 1, 2, FEATURES, generator=torch.Generator().manual_seed(4)).double()
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).double()
    mine = slice(0, 3) if group.rank() == 0 else slice(2 * group.rank() + 1, 2 * group.rank() + 3)
    whole, part = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
    for _ in range(2):
        expected, y = dense(whole), norm(part)
        assert type(y) is Tensor
        torch.testing.assert_close(y, expected[mine])
        expected.backward(dy)
        y.backward(dy[mine])
        torch.testing.assert_close(part.grad, whole.grad[mine])
        for (key, parameter), reference in zip(norm.named_parameters(), dense.parameters(), strict=True):
            assert isinstance(parameter, DTensor)
            assert isinstance(parameter.grad, DTensor), key
            assert parameter.grad.placements == (Replicate(),)
            torch.testing.assert_close(parameter.grad.to_local(), reference.grad)
        # Evaluation in between.
        with torch.inference_mode():
            torch.testing.assert_close(norm(part.detach()), dense(x)[mine])


@pytest.mark.parametrize("schedule", ["auto", "unfused"])
@pytest.mark.parametrize("name", NORMS)
def test_as_in_one_process(pool: RankPool, name: str, schedule: str) -> None:
    pool.run(as_in_one_process, name, schedule, world_size=3)


def kept(group: ProcessGroup) -> None:
    """Its states, copies, classes; a compiled one, a frozen one."""
    for name in NORMS:
        norm = parallelize_module(made(name), mesh_of(group), FusedNormParallel())
        x = torch.randn(3, 2, FEATURES).double()
        assert isinstance(norm, type(made(name)))
        assert list(norm.state_dict()) == list(made(name).state_dict())
        for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
            assert type(other) is type(norm)
            assert torch.equal(other(x), norm(x))
            assert all(isinstance(each, DTensor) for each in other.parameters())
        compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), norm(x))
        compiled(x).sum().backward()
        grads = [each.grad.to_local() for each in norm.parameters()]
        norm.zero_grad()
        norm(x).sum().backward()
        torch.testing.assert_close(grads, [each.grad.to_local() for each in norm.parameters()])
        assert all(getattr(norm, key) is each for key, each in norm.named_parameters())
        norm.requires_grad_(False)
        assert not norm(x).requires_grad
        torch._dynamo.reset()


def test_copies_and_a_compiled_one(pool: RankPool) -> None:
    pool.run(kept, world_size=2)


BAD: dict[str, tuple[Callable[[DeviceMesh], Any], type[Exception], str]] = {
    "no parameters": (
        lambda mesh: parallelize_module(nn.LayerNorm(4, elementwise_affine=False), mesh, FusedNormParallel()),
        NotImplementedError, "FusedNormParallel is for a norm with parameters of its own",
    ),
    "modules": (
        lambda mesh: parallelize_module(nn.Sequential(nn.LayerNorm(4)), mesh, FusedNormParallel()),
        NotImplementedError, "got Sequential",
    ),
    "twice": (
        lambda mesh: parallelize_module(
            parallelize_module(nn.LayerNorm(4), mesh, FusedNormParallel()), mesh, FusedNormParallel()
        ),
        NotImplementedError, "this FusedLayerNorm has a style already",
    ),
    "schedule": (lambda mesh: FusedNormParallel(schedule="fast"), ValueError, "schedule must be one of"),
    "mesh": (lambda mesh: FusedNormParallel()._apply(nn.LayerNorm(4), None), TypeError, "device_mesh must be a Dev"),
}  # fmt: skip


def refused(group: ProcessGroup) -> None:
    for call, kind, text in BAD.values():
        with pytest.raises(kind, match=text):
            call(mesh_of(group))


def test_bad_input(pool: RankPool) -> None:
    pool.run(refused, world_size=2)


def test_it_says_what_it_is() -> None:
    assert repr(fusedtp.FusedNormParallel()) == "FusedNormParallel(schedule='auto')"
