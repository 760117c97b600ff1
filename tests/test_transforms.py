"""torch.func and the other ways to differentiate: right, or refused with a reason; never a number that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fusedtp
from fusedtp.bench.ranks import RankPool

FORWARD_MODE, SECOND, DTENSORS = "forward-mode differentiation", "second derivatives of", "that are DTensors"
SCHEDULES = ("unfused", "decomposed")
# As many rows of y on every rank: jacrev makes a call for each of its elements.
IN, OUT, ROWS = 6, 4, 4


def functions(group: ProcessGroup, schedule: str) -> dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]]:
    """Each of x and a weight, with the columns of x; collectives take no weight."""
    options: dict[str, Any] = {"group": group, "schedule": schedule}
    rows = (ROWS,) * group.size()
    return {
        "all_gather_linear": (lambda x, w: fusedtp.all_gather_linear(x, w, **options), IN),
        "linear_reduce_scatter": (lambda x, w: fusedtp.linear_reduce_scatter(x, w, **options), IN),
        "linear_all_reduce": (lambda x, w: fusedtp.linear_all_reduce(x, w, **options), IN),
        "fsdp_linear": (lambda x, w: fusedtp.fsdp_linear(x, w, **options), IN),
        "all_gather": (lambda x, w: fusedtp.all_gather(x, sizes=rows, **options), OUT),
        "reduce_scatter": (lambda x, w: fusedtp.reduce_scatter(x, **options), OUT),
        "all_reduce": (lambda x, w: fusedtp.all_reduce(x, **options), OUT),
    }


def operands(group: ProcessGroup, columns: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 + group.rank())
    return torch.randn(ROWS, columns, dtype=torch.float64), torch.randn(OUT, IN, dtype=torch.float64)


def refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        call()


def same(got: Tensor, expected: Tensor, name: str) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{name}: {text}")


def transformed(group: ProcessGroup, schedule: str) -> None:
    for name, (function, columns) in functions(group, schedule).items():
        x, w = operands(group, columns)
        takes_w = columns == IN

        def loss(x: Tensor, w: Tensor, function: Any = function) -> Tensor:
            return function(x, w).square().sum()  # type: ignore[no-any-return]

        leaves = (x.clone().requires_grad_(), w.clone().requires_grad_())
        expected = torch.autograd.grad(loss(*leaves), leaves[: 1 + takes_w])
        for got, ref in zip(grad(loss, tuple(range(1 + takes_w)))(x, w), expected, strict=True):
            same(got, ref, f"grad of {name}")
        y, pull = vjp(lambda x: function(x, w), x)  # noqa: B023
        same(pull(2 * y)[0], expected[0], f"vjp of {name}")
        batch = torch.stack((x, -2 * x, 0 * x))
        same(vmap(function, (0, None))(batch, w), torch.stack((y, -2 * y, 0 * y)), f"vmap of {name}")
        # Linear: its Jacobian times x is y.
        jacobian = jacrev(function)(x, w)
        same(jacobian.flatten(-2) @ x.flatten(), _pulled(y, pull, x), f"jacrev of {name}")


def _pulled(y: Tensor, pull: Callable[[Tensor], tuple[Tensor]], x: Tensor) -> Tensor:
    # The same one row at a time.
    rows = torch.eye(y.numel(), dtype=y.dtype).view(-1, *y.shape)
    return torch.stack([(pull(row)[0] * x).sum() for row in rows]).view(y.shape)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_reverse_mode_of_torch_func(pool: RankPool, world_size: int, schedule: str) -> None:
    pool.run(transformed, schedule, world_size=world_size)


def forward_mode(group: ProcessGroup, schedule: str) -> None:
    for function, columns in functions(group, schedule).values():
        x, w = operands(group, columns)
        refused(lambda: jvp(lambda x: function(x, w), (x,), (x,)), FORWARD_MODE)  # noqa: B023
        refused(lambda: jacfwd(function)(x, w), FORWARD_MODE)  # noqa: B023
        refused(lambda: hessian(lambda x: function(x, w).square().sum())(x), FORWARD_MODE)  # noqa: B023
        for leaf in (x, x.clone().requires_grad_()):
            with forward_ad.dual_level():
                refused(lambda: function(forward_ad.make_dual(leaf, x), w), FORWARD_MODE)  # noqa: B023
                # A level without a tangent is nobody's business.
                same(function(leaf, w).detach(), function(x, w), "in a dual level")
        if columns == IN:
            refused(lambda: jvp(lambda w: function(x, w), (w,), (w,)), FORWARD_MODE)  # noqa: B023


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_mode_is_refused(pool: RankPool, schedule: str) -> None:
    """It was a tangent of zeros."""
    pool.run(forward_mode, schedule, world_size=2)


def second_derivatives(group: ProcessGroup, schedule: str) -> None:
    for name, (function, columns) in functions(group, schedule).items():
        x, w = (each.requires_grad_() for each in operands(group, columns))
        (dx,) = torch.autograd.grad(function(x, w).square().sum(), x, create_graph=True)
        assert torch.isfinite(dx).all()
        if columns == IN:
            # x is in the sum on its own too: without a path to it the first term would be lost in silence.
            for leaf in (x, w):
                refused(lambda: torch.autograd.grad(dx.sum() + leaf.sum(), leaf), SECOND)  # noqa: B023
            twice = grad(lambda x: grad(lambda x: function(x, w.detach()).square().sum())(x).sum())  # noqa: B023
            refused(lambda: twice(x), SECOND)  # noqa: B023
            continue
        # A collective is linear, and so is its gradient: the second one is that of x @ A.T @ A @ x.
        (second,) = torch.autograd.grad(dx.sum(), x)
        ones = torch.ones_like(x).requires_grad_()
        (expected,) = torch.autograd.grad(function(ones, w).square().sum(), ones)
        same(second, expected, f"second derivative of {name}")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_second_derivatives(pool: RankPool, schedule: str) -> None:
    pool.run(second_derivatives, schedule, world_size=2)


def batched_gradients(group: ProcessGroup, schedule: str) -> None:
    for name, (function, columns) in functions(group, schedule).items():
        x, w = (each.requires_grad_() for each in operands(group, columns))
        inputs = (x, w) if columns == IN else (x,)
        y = function(x, w)
        dy = torch.randn(3, *y.shape, dtype=y.dtype)
        got = torch.autograd.grad(y, inputs, dy, is_grads_batched=True, retain_graph=True)
        rows = [torch.autograd.grad(y, inputs, each, retain_graph=True) for each in dy]
        for out, refs in zip(got, zip(*rows, strict=True), strict=True):
            same(out, torch.stack(refs), f"batched gradients of {name}")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batched_gradients(pool: RankPool, schedule: str) -> None:
    """They were numbers out of memory that was another's."""
    pool.run(batched_gradients, schedule, world_size=2)


def of_layers(group: ProcessGroup, schedule: str) -> None:
    torch.manual_seed(1)
    layer = fusedtp.ParallelMLP(IN, 8, dtype=torch.float64, activation="swiglu", group=group, schedule=schedule)
    x = operands(group, IN)[0]
    whole, parts = (
        {name: kind(p.detach()) for name, p in layer.named_parameters()}
        for kind in (lambda p: p.clone(), lambda p: p.to_local().clone())
    )
    y = layer(x)
    y.square().sum().backward()
    for given in (whole, parts):
        same(functional_call(layer, given, (x,)), y, "functional_call")

    def loss(given: dict[str, Tensor]) -> Tensor:
        return functional_call(layer, given, (x,)).square().sum()  # type: ignore[no-any-return]

    grads = grad(loss)(parts)
    for name, p in layer.named_parameters():
        same(grads[name], p.grad.to_local(), f"gradient of {name}")  # type: ignore[union-attr]
    doubled = functional_call(layer, {name: 2 * each.requires_grad_() for name, each in whole.items()}, (x,))
    doubled.sum().backward()
    assert all(each.grad is not None for each in whole.values())
    refused(lambda: grad(loss)({name: each.detach() for name, each in whole.items()}), DTENSORS)
    refused(lambda: vmap(layer)(torch.stack((x, x))), DTENSORS)
    with torch.no_grad():
        same(vmap(layer)(torch.stack((x, 0 * x)))[0], y, "vmap of a layer")
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    refused(lambda: torch.autograd.grad(y, leaf, torch.stack((y, y)), is_grads_batched=True), DTENSORS)
    (dx,) = torch.autograd.grad(layer(leaf).sum(), leaf, create_graph=True)
    for each in (leaf, layer.down_proj.weight):
        refused(lambda: torch.autograd.grad(dx.sum() + each.sum(), each, retain_graph=True), SECOND)  # noqa: B023


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers(pool: RankPool, schedule: str) -> None:
    pool.run(of_layers, schedule, world_size=2)
