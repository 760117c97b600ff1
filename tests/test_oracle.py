"""Each activation has its own constants in the oracle, no larger than they must be; wrong activations are found."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusedtp import reference
from fusedtp.activations import ACTIVATIONS, GATED
from fusedtp.kernels import epilogue

from .oracle import FUNCTIONS, gradients, near, results

EPS = torch.finfo(torch.float32).eps
CURVED = [name for name in FUNCTIONS if name != "relu"]


def points() -> Tensor:
    spread, random = torch.linspace(-30, 30, 1_000_001), torch.Generator().manual_seed(0)
    return torch.cat([spread, spread / 10, spread / 1e4, torch.randn(500_000, generator=random)])


def slope(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    z = z.clone().requires_grad_()
    (found,) = torch.autograd.grad(f(z).sum(), z, create_graph=True)
    return found


def by_kernel(name: str, z: Tensor) -> Tensor:
    """Return the activation by the kernels' formula, in float32."""

    def exp(x: Tensor) -> Tensor:
        # As the interpreter does.
        with np.errstate(over="ignore"):
            return torch.from_numpy(np.exp(x.numpy()))

    language = SimpleNamespace(where=torch.where, exp=exp, abs=torch.abs, static_assert=lambda condition: None)
    formula = epilogue.activated.fn
    made: Tensor = FunctionType(formula.__code__, {**formula.__globals__, "tl": language})(z, name)
    return made


@pytest.mark.parametrize("name", FUNCTIONS)
def test_slopes_and_curvatures_are_the_largest(name: str) -> None:
    f, z = FUNCTIONS[name], torch.linspace(-12, 12, 1_000_001, dtype=torch.float64)
    most = slope(f.of, z).abs().max().item()
    assert 0.99 * f.slope <= most <= f.slope
    if name in CURVED:
        assert 0.99 * f.curvature <= slope(lambda z: slope(f.of, z), z).abs().max().item() <= f.curvature


@pytest.mark.parametrize("name", FUNCTIONS)
def test_roundings_are_at_most_four_times_those_of_torch_and_the_kernels(name: str) -> None:
    f, z = FUNCTIONS[name], points()

    def inside(got: Tensor, exact: Tensor) -> float:
        error = (got.double() - exact).abs() - EPS * exact.abs()
        return float((error / EPS / (1 + z.double().abs())).max())

    with torch.no_grad():
        exact = f.of(z.double())
        found = max(inside(f.of(z), exact), inside(by_kernel(name, z), exact))
    slopes = inside(slope(f.of, z).detach(), slope(f.of, z.double()).detach())
    assert max(found, 0) <= f.roundings <= 4 * max(found, 0)
    assert max(slopes, 0) <= f.slope_roundings <= 4 * max(slopes, 0)


# Wrong formulas of each activation, in float32.
WRONG: dict[str, list[Callable[..., Tensor]]] = {
    "relu": [lambda z: F.leaky_relu(z, 1e-6), F.relu6, torch.abs],
    "silu": [lambda z: z * torch.sigmoid(1.702 * z), F.hardswish, lambda z: F.silu(z) * (1 + 8 * EPS)],
    "gelu": [lambda z: F.gelu(z, approximate="tanh"), lambda z: F.gelu(z) * (1 + 16 * EPS)],
    "gelu_tanh": [F.gelu, lambda z: F.gelu(z * (1 + 16 * EPS), approximate="tanh")],
    "swiglu": [lambda gate, up: F.silu(up) * gate, lambda gate, up: F.silu(gate) * up * (1 + 8 * EPS)],
    "geglu": [lambda gate, up: F.gelu(up) * gate, lambda gate, up: F.gelu(gate, approximate="tanh") * up],
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_wrong_activation_is_found(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    zs = [4 * torch.randn(10_000, generator=random) for _ in range(1 + (name in GATED))]
    dy = torch.ones(10_000)

    def check(f: Callable[..., Tensor]) -> list[str]:
        leaves = [z.clone().requires_grad_() for z in zs]
        y = f(*leaves)
        y.backward(dy)
        pairs = {"y": (y, *results(name, list(map(near, zs))))}
        expected = gradients(name, [dy], list(map(near, zs)))
        pairs |= {f"dz{i}": (leaf.grad, wanted) for i, (leaf, wanted) in enumerate(zip(leaves, expected, strict=True))}
        wrong = []
        for what, (got, wanted) in pairs.items():
            try:
                reference.check(got, wanted.value, wanted.off, what)
            except AssertionError:
                wrong.append(what)
        return wrong

    of = FUNCTIONS[GATED.get(name, name)].of
    assert check(of if name not in GATED else lambda gate, up: of(gate) * up) == []
    for f in WRONG[name]:
        found = check(f)
        assert "y" in found, f
        assert len(found) > 1, f
