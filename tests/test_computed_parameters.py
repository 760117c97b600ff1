"""Parameters that are computed before each call, by a parametrization, a hook or a property, are computed once a call.

A computation may draw random numbers or keep a state: with a second one a result would not be nn.Linear's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.nn.utils import parametrize, weight_norm

import fusedtp

from .harness import on_ranks
from .test_layer_parameters import holders_of_weights
from .test_layer_state import HIDDEN, close, whole


class Counted(nn.Module):
    """A parametrization that counts its evaluations."""

    calls = 0

    def forward(self, w: Tensor) -> Tensor:
        self.calls += 1
        return w * 2


class Dropped(Counted):
    """Weight dropout with one random number a call, equal on ranks with equal seeds."""

    def forward(self, w: Tensor) -> Tensor:
        return super().forward(w) * float(torch.rand(()) > 0.5)


class Spectral(Counted):
    """Division by the largest singular value, by one step of power iteration at each evaluation."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("u", F.normalize(torch.ones(rows), dim=0))

    def forward(self, w: Tensor) -> Tensor:
        with torch.no_grad():
            full = whole(w)
            v = F.normalize(full.t() @ self.u, dim=0)
            self.u = F.normalize(full @ v, dim=0)
            sigma = float(self.u @ full @ v)
        return super().forward(w) / sigma


class Three(nn.Module):
    """Linears with one input, and a random number between their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(HIDDEN, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x) * torch.rand(())
        return torch.cat([each.flatten() for each in (a, self.b(x), self.c(x))])


def owners(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the modules' own parameters: by name, the module and its name of the parameter."""
    return {
        f"{path}.{name}": (each, name)
        for path, each in module.named_modules() for name, _ in each.named_parameters(recurse=False)
    }  # fmt: skip


def parametrized(module: nn.Module) -> Callable[[], dict[str, int]]:
    """Parametrize every parameter, and return a function that returns how often each was computed."""
    counts = {}
    for name, (owner, own) in owners(module).items():
        counts[name] = Counted()
        parametrize.register_parametrization(owner, own, counts[name], unsafe=True)
        counts[name].calls = 0
    return lambda: {name: each.calls for name, each in counts.items()}


def as_properties(module: nn.Module) -> Callable[[], dict[str, int]]:
    """Make every parameter a property of its module's class, and return a function that counts its reads."""
    counts: dict[str, int] = {}
    for name, (owner, own) in owners(module).items():

        def read(self: Any, own: str = own, name: str = name) -> Any:
            counts[name] += 1
            return self._parameters[own] * 2

        owner.__class__ = type(type(owner).__name__, (type(owner),), {own: property(read)})
        counts[name] = 0
    return lambda: dict(counts)


def modules_of(mesh: DeviceMesh) -> dict[str, nn.Module]:
    """Return layers and styles of all kinds whose modules read their own parameters."""
    made = {name: each for name, each in holders_of_weights(mesh).items() if "forward" not in vars(each)}
    group = fusedtp.FusedGroup("a", "b", "c", input_layouts=Replicate(), pieces={"c": 1})
    made["group, x whole"] = parallelize_module(Three(), mesh, {"": group})
    made["embedding"] = parallelize_module(nn.Embedding(9, 4), mesh, fusedtp.FusedEmbeddingParallel())
    return made


@pytest.mark.parametrize("compute", [parametrized, as_properties])
@on_ranks(2, timeout=120)
def test_one_evaluation_a_call(group: ProcessGroup, compute: Callable[[nn.Module], Callable[[], Any]]) -> None:
    """In every layer and style, with and without gradients; backward computes nothing."""
    for name, module in modules_of(DeviceMesh.from_group(group, "cpu")).items():
        counts = compute(module)
        assert counts(), name
        x = torch.arange(4) if name == "embedding" else torch.randn(4, HIDDEN)
        for call in (1, 2):
            with torch.set_grad_enabled(call == 2):
                out = module(x)
            assert set(counts().values()) == {call}, f"{name}: {counts()} in {call} calls"
        y = out[0] if isinstance(out, tuple) else out
        y.square().sum().backward()
        assert set(counts().values()) == {2}, f"{name}: {counts()} in backward"
        for key, parameter in module.named_parameters():
            assert parameter.grad is not None or key.startswith("norm"), f"{name}: {key}"


def results(modules: Sequence[nn.Module], x: Tensor, seed: int) -> list[Tensor]:
    """Return each module's result for x, from the same random state."""
    outs = []
    for each in modules:
        torch.manual_seed(seed)
        outs.append(each(x))
    return outs


STYLES: dict[str, Callable[[], Any]] = {
    "columns": lambda: fusedtp.FusedColwiseParallel(output_layouts=Replicate()),
    "rows": lambda: fusedtp.FusedRowwiseParallel(input_layouts=Replicate()),
}


@pytest.mark.parametrize("kind", [Dropped, Spectral])
@on_ranks(2)
def test_the_numbers_are_nn_linears(group: ProcessGroup, kind: type[Counted]) -> None:
    """Random numbers that are drawn, and states that are kept, by the computation of a weight."""
    torch.manual_seed(2)
    mesh, x = DeviceMesh.from_group(group, "cpu"), torch.randn(4, HIDDEN)
    for name, style in STYLES.items():
        dense = nn.Linear(HIDDEN, 9)
        ours = parallelize_module(copy.deepcopy(dense), mesh, style())
        for each in (dense, ours):
            parametrize.register_parametrization(each, "weight", kind() if kind is Dropped else Spectral(9))
        for seed in range(6):
            expected, y = results([dense, ours], x, seed)
            close(y, expected, f"{name}, seed {seed}")
            for out in (expected, y):
                out.square().sum().backward()
        for (key, mine), theirs in zip(ours.named_parameters(), dense.parameters(), strict=True):
            close(whole(mine.grad), theirs.grad, f"{name}: {key}")


@on_ranks(2)
def test_a_group_with_computed_weights(group: ProcessGroup) -> None:
    """Each linear computes its weight when it is called. Parts that are given by functional_call are used."""
    torch.manual_seed(2)
    mesh, x = DeviceMesh.from_group(group, "cpu"), torch.randn(4, HIDDEN)
    style = fusedtp.FusedGroup("a", "b", "c", input_layouts=Replicate(), output_layouts=Replicate())
    for names in ("a", "bc", "abc"):
        both = [dense, ours] = Three(), Three()
        ours.load_state_dict(dense.state_dict())
        parallelize_module(ours, mesh, {"": style})
        doubled = {name: 2 * each.detach() for name, each in dense.named_parameters()}
        parts = {name: 2 * each.detach().to_local() for name, each in ours.named_parameters()}
        torch.manual_seed(1)
        expected = torch.func.functional_call(dense, doubled, (x,))
        torch.manual_seed(1)
        close(torch.func.functional_call(ours, parts, (x,)), expected, "functional_call")
        for name in names:
            for each in both:
                parametrize.register_parametrization(getattr(each, name), "weight", Dropped())
        for seed in range(6):
            expected, y = results(both, x, seed)
            close(y, expected, f"{names}, seed {seed}")
            for out in (expected, y):
                out.square().sum().backward()
        for (key, mine), theirs in zip(ours.named_parameters(), dense.parameters(), strict=True):
            close(whole(mine.grad), theirs.grad, f"{names}: {key}")


@on_ranks(2)
def test_a_weight_that_a_hook_computes(group: ProcessGroup) -> None:
    """The older weight_norm sets a linear's weight before its call, after the first linear of a group was called."""
    torch.manual_seed(2)
    x = torch.randn(4, HIDDEN)
    style = fusedtp.FusedGroup("a", "b", "c", input_layouts=Replicate(), output_layouts=Replicate())
    both = [dense, ours] = Three(), Three()
    ours.load_state_dict(dense.state_dict())
    parallelize_module(ours, DeviceMesh.from_group(group, "cpu"), {"": style})
    for each in both:
        with pytest.warns(FutureWarning, match="weight_norm"):
            weight_norm(each.b)
    with torch.no_grad():
        for factor in (1.0, 2.0):
            for each in both:
                each.b.weight_g.mul_(factor)
            expected, y = results(both, x, 1)
            close(y, expected, f"{factor}")
