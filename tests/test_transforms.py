"""torch.func, results changed in place, and other ways to differentiate: right, or refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

import fusedtp
from fusedtp import FusedColwiseParallel, FusedRowwiseParallel
from fusedtp.bench.ranks import RankPool

FORWARD_MODE, SECOND, DTENSORS = "forward-mode differentiation", "second derivatives of", "that are DTensors"
SCHEDULES = ("unfused", "decomposed")
Function = Callable[[Tensor, Tensor], Tensor]
# The same number of rows of y on every rank, as jacrev makes a call for each element.
IN, OUT, ROWS = 6, 4, 4


def functions(group: ProcessGroup, schedule: str) -> dict[str, tuple[Function, int]]:
    """Return functions of x and a weight, with the number of columns of x; collectives ignore the weight."""
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


def reverse_mode(name: str, function: Function, x: Tensor, w: Tensor, takes_w: bool) -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return function(x, w).square().sum()

    leaves = (x.clone().requires_grad_(), w.clone().requires_grad_())
    expected = torch.autograd.grad(loss(*leaves), leaves[: 1 + takes_w])
    for got, ref in zip(grad(loss, tuple(range(1 + takes_w)))(x, w), expected, strict=True):
        same(got, ref, f"grad of {name}")
    y, pull = vjp(lambda x: function(x, w), x)
    same(pull(2 * y)[0], expected[0], f"vjp of {name}")
    batch = torch.stack((x, -2 * x, 0 * x))
    same(vmap(function, (0, None))(batch, w), torch.stack((y, -2 * y, 0 * y)), f"vmap of {name}")
    # A linear function: its Jacobian times x is y. The rows are checked one at a time too.
    rows = torch.eye(y.numel(), dtype=y.dtype).view(-1, *y.shape)
    pulled = torch.stack([(pull(row)[0] * x).sum() for row in rows]).view(y.shape)
    same(jacrev(function)(x, w).flatten(-2) @ x.flatten(), pulled, f"jacrev of {name}")


def forward_mode(name: str, function: Function, x: Tensor, w: Tensor, takes_w: bool) -> None:
    """Check that forward mode is refused; the tangent once was zeros."""
    refused(lambda: jvp(lambda x: function(x, w), (x,), (x,)), FORWARD_MODE)
    refused(lambda: hessian(lambda x: function(x, w).square().sum())(x), FORWARD_MODE)
    for leaf in (x, x.clone().requires_grad_()):
        with forward_ad.dual_level():
            refused(lambda: function(forward_ad.make_dual(leaf, x), w), FORWARD_MODE)  # noqa: B023
            # A dual level without a tangent is allowed.
            same(function(leaf, w).detach(), function(x, w), f"{name} in a dual level")
    if takes_w:
        refused(lambda: jvp(lambda w: function(x, w), (w,), (w,)), FORWARD_MODE)


def second_derivatives(name: str, function: Function, x: Tensor, w: Tensor, takes_w: bool) -> None:
    x, w = x.requires_grad_(), w.requires_grad_()
    (dx,) = torch.autograd.grad(function(x, w).square().sum(), x, create_graph=True)
    assert torch.isfinite(dx).all()
    if takes_w:
        # x is also a term of the sum itself: without the refusal the first term would silently be lost.
        for leaf in (x, w):
            refused(lambda: torch.autograd.grad(dx.sum() + leaf.sum(), leaf), SECOND)  # noqa: B023
        twice = grad(lambda x: grad(lambda x: function(x, w.detach()).square().sum())(x).sum())
        refused(lambda: twice(x), SECOND)
        return
    # A collective is linear, and so is its gradient; the second derivative is that of x @ A.T @ A @ x.
    (second,) = torch.autograd.grad(dx.sum(), x)
    ones = torch.ones_like(x).requires_grad_()
    (expected,) = torch.autograd.grad(function(ones, w).square().sum(), ones)
    same(second, expected, f"second derivative of {name}")


def batched_gradients(name: str, function: Function, x: Tensor, w: Tensor, takes_w: bool) -> None:
    """Check batched gradients, which once were read from foreign memory."""
    inputs = (x.requires_grad_(), w.requires_grad_())[: 1 + takes_w]
    y = function(x, w)
    dy = torch.randn(3, *y.shape, dtype=y.dtype)
    got = torch.autograd.grad(y, inputs, dy, is_grads_batched=True, retain_graph=True)
    rows = [torch.autograd.grad(y, inputs, each, retain_graph=True) for each in dy]
    for out, refs in zip(got, zip(*rows, strict=True), strict=True):
        same(out, torch.stack(refs), f"batched gradients of {name}")


def of_every_function(group: ProcessGroup, schedule: str, check: Callable[..., None]) -> None:
    for name, (function, columns) in functions(group, schedule).items():
        check(name, function, *operands(group, columns), columns == IN)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("check", [reverse_mode, forward_mode, second_derivatives, batched_gradients])
def test_every_function(pool: RankPool, check: Callable[..., None], schedule: str) -> None:
    for world_size in (1, 2) if check is reverse_mode else (2,):
        pool.run(of_every_function, schedule, check, world_size=world_size)


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
    of_norms(group, schedule)


def of_norms(group: ProcessGroup, schedule: str) -> None:
    """Compare second derivatives through the norm of a layer, which no matmul's gradient is part of, with torch's."""
    rank, n = group.rank(), group.size()
    torch.manual_seed(2)
    for sequence_parallel in (True, False):
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "schedule": schedule}
        layer = fusedtp.RowParallelLinear(
            n * IN, OUT, bias=False, dtype=torch.float64, norm="layer_norm", group=group, **options
        )
        whole = [p.full_tensor().detach().requires_grad_() for p in layer.parameters()]  # type: ignore[operator]
        x = torch.randn(ROWS, n * IN, dtype=torch.float64)

        def twice(y: Tensor, normed: Tensor, parameters: list[Any]) -> tuple[Tensor, ...]:
            loss = normed.pow(3).sum() + y.sum()
            grads = torch.autograd.grad(loss, parameters[1:], create_graph=True)
            parts = [each.to_local() if isinstance(each, DTensor) else each for each in grads]
            return torch.autograd.grad(sum(part.square().sum() for part in parts), parameters)

        y = nn.functional.linear(x, whole[0])
        expected = twice(y, nn.functional.layer_norm(y, (OUT,), *whole[1:], 1e-6), whole)
        normed, y = layer(x[:, rank * IN :][:, :IN])
        for got, ref in zip(twice(y, normed, list(layer.parameters())), expected, strict=True):
            torch.testing.assert_close(got.full_tensor(), ref, rtol=1e-9, atol=1e-9)  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers(pool: RankPool, schedule: str) -> None:
    pool.run(of_layers, schedule, world_size=2)


def changed_in_place(group: ProcessGroup, schedule: str) -> None:
    """Compare in-place changes of results with out-of-place ones."""
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
            # relu's gradient needs the result, so torch must report the change.
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients(call, Tensor.clamp_)
            continue
        for expected, found in zip(gradients(call, Tensor.clamp), gradients(call, Tensor.clamp_), strict=True):
            assert (expected is None) == (found is None)
            assert expected is None or (found is not None and torch.equal(found, expected)), name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_results_changed_in_place(pool: RankPool, schedule: str) -> None:
    pool.run(changed_in_place, schedule, world_size=2)


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
