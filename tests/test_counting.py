"""The collectives that four ranks send and the tensors that autograd saves, counted while layers run."""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.calls.bound import BoundTask
from fusedtp.explain import NAMED
from fusedtp.sharding.notation import parse
from fusedtp.sharding.plan import plan

from .harness import LARGE
from .test_plan_simulated import ONE, TWO, is_valid, texts

M, N, K = 24, 16, 8  # whole lengths; four ranks hold a quarter each
Call = tuple[str, tuple[int, ...]]


@dataclass
class Count:
    """Counters. calls: op and shape of its first operand, transposed or not, in order. groups: (op, name of its group).
    saved: tensors saved by autograd.
    """

    calls: list[Call] = field(default_factory=list)
    groups: list[tuple[str, str]] = field(default_factory=list)
    saved: list[Tensor] = field(default_factory=list)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return sorted(tuple(each.shape) for each in self.saved)


@contextlib.contextmanager
def counting() -> Iterator[Count]:
    """Count every task that runs over a group, and every tensor that autograd saves."""
    count, run = Count(), BoundTask.run

    def counted(ready: BoundTask, operands: Mapping[str, Any]) -> list[Tensor]:
        # The planner chooses whether a matmul is transposed.
        task = ready.task
        each = [(task.op.name, operands["a"])]
        if task.gathers:
            each = [("all_gather_matmul", operands[task.gathers]), ("matmul_reduce_scatter", operands["a"])]
        elif task.further:
            # Two products of the gathered tensor.
            each = [(f"{task.op.name} twice", operands["a"])]
        count.calls += [(name, tuple(sorted(operand.shape))) for name, operand in each]
        count.groups += [(name, ready.group.group_name) for name, _ in each]
        return run(ready, operands)

    def keep(tensor: Tensor) -> Tensor:
        # The whole storage is kept, not only the view.
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        count.saved.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with mock.patch.object(BoundTask, "run", counted), hooks:
        yield count


X_M, X_K, W_N, W_K = (M // 4, K), (M, K // 4), (N // 4, K), (N, K // 4)
DY_M, DY_N = (M // 4, N), (M, N // 4)


def calls(*of: tuple[str, tuple[int, ...]]) -> list[Call]:
    return [(op, tuple(sorted(shape))) for op, shape in of]


GATHER, GATHER_TWICE, SCATTER = "all_gather_matmul", "all_gather_matmul twice", "matmul_reduce_scatter"
# The shapes of x and weight; the calls of forward; the calls of backward by the operands that need a gradient.
LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[Call], dict[str, list[Call]]]] = {
    # w is gathered again, for dx. Without dx nothing is gathered: dw is dy.T @ x, scattered.
    "fsdp_linear": (
        X_M, W_N, calls((GATHER, W_N)),
        {"xw": calls((GATHER, W_N), (SCATTER, DY_M)), "x": calls((GATHER, W_N)), "w": calls((SCATTER, DY_M))},
    ),
    # x is gathered again, along dw's contraction: only the shard was saved.
    "all_gather_linear": (
        X_M, W_N, calls((GATHER, X_M)),
        {"xw": calls((GATHER, X_M), (SCATTER, DY_N)), "x": calls((SCATTER, DY_N)), "w": calls((GATHER, X_M))},
    ),
    # One gather of dy serves both gradients.
    "linear_reduce_scatter": (
        X_K, W_K, calls((SCATTER, X_K)),
        {"xw": calls((GATHER_TWICE, DY_M)), "x": calls((GATHER, DY_M)), "w": calls((GATHER, DY_M))},
    ),
    "linear_all_reduce": (X_K, W_K, calls(("matmul_all_reduce", X_K)), {"xw": [], "x": [], "w": []}),
}  # fmt: skip


def count_layer(group: ProcessGroup, name: str, needs: str, schedule: str) -> tuple[list[Call], Any, list[Call]]:
    """Return the calls of forward, the saved shapes, and the calls of backward."""
    x_shape, w_shape, *_ = LAYERS[name]
    x = torch.randn(x_shape).requires_grad_("x" in needs)
    weight = torch.randn(w_shape).requires_grad_("w" in needs)
    with counting() as forward:
        y = getattr(fusedtp, name)(x, weight, group=group, schedule=schedule)
    with counting() as backward:
        y.backward(torch.ones_like(y))
    assert (x.grad is None) == ("x" not in needs)
    assert (weight.grad is None) == ("w" not in needs)
    assert not backward.saved
    return forward.calls, forward.shapes, backward.calls


@pytest.mark.parametrize("needs", ["xw", "x", "w"])
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_layer_sends_and_keeps(pool: RankPool, name: str, needs: str) -> None:
    x_shape, w_shape, expected_forward, expected_backward = LAYERS[name]
    # x is saved for dw only, and weight for dx only.
    expected_saved = sorted([x_shape] * ("w" in needs) + [w_shape] * ("x" in needs))
    for schedule in ("unfused", "decomposed"):
        for forward, saved, backward in pool.run(count_layer, name, needs, schedule):
            assert forward == expected_forward
            assert saved == expected_saved
            assert backward == expected_backward[needs]


# The functions that start the gather and the first matmul, by schedule.
STARTS = {"unfused": ("unfused.UnfusedGather.start", "unfused.sum_into"),
          "decomposed": ("decomposed.DecomposedGather.start", "decomposed.DecomposedScatter.multiply"),
          "fused": ("producer.push", "fused.FusedScatter.multiply")}  # fmt: skip


def order_of_backward(group: ProcessGroup, name: str, schedule: str) -> list[str]:
    """Return the order in which backward starts the gather and the matmuls."""
    x_shape, w_shape, *_ = LAYERS[name]
    x, weight = torch.randn(x_shape, requires_grad=True), torch.randn(w_shape, requires_grad=True)
    y = getattr(fusedtp, name)(x, weight, group=group, schedule=schedule)
    order: list[str] = []
    with contextlib.ExitStack() as stack:
        for what, target in zip(("gather", "matmul"), STARTS[schedule], strict=True):
            full = f"fusedtp.schedules.{target}"
            real = pkgutil.resolve_name(full)

            def started(*args: Any, what: str = what, real: Any = real, **options: Any) -> Any:
                order.append(what)
                return real(*args, **options)

            stack.enter_context(mock.patch(full, started))
        y.backward(torch.ones_like(y))
    return order


@pytest.mark.parametrize("schedule", STARTS)
@pytest.mark.parametrize("name", ["all_gather_linear", "fsdp_linear"])
def test_the_gather_of_one_gradient_starts_before_the_matmul_of_the_other(
    pool: RankPool, name: str, schedule: str
) -> None:
    for order in pool.run(order_of_backward, name, schedule):
        assert order[0] == "gather"
        assert order.count("gather") == 1
        assert "matmul" in order


def frozen(group: ProcessGroup) -> None:
    """Check that without gradients, or with db alone, nothing is saved, and backward sends db's sum alone."""
    x, weight, bias = torch.randn(X_M), torch.randn(W_N), torch.randn(N)
    with counting() as count:
        fusedtp.fsdp_linear(x, weight, bias, group=group)
        y = fusedtp.fsdp_linear(x, weight, bias.requires_grad_(), group=group)
    assert not count.saved
    with counting() as count:
        y.sum().backward()
    assert count.calls == [("all_reduce", (1, N))]
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((N,), float(M)))


def test_frozen_layers(pool: RankPool) -> None:
    pool.run(frozen)


def count_specs(group: ProcessGroup, texts: list[str], on_mesh: bool) -> None:
    """Check that each matmul runs as many collectives as planned, and no all-reduce over an axis that splits its
    result: a reduce-scatter suffices there.
    """
    if on_mesh:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("X", "Y"))
    else:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))
    ranks = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    names = {axis: mesh.get_group(axis).group_name for axis in ranks}
    assert len(set(names.values())) == len(names)
    lengths = {"M": M, "K": K, "N": N}
    for text in texts:
        spec = parse(text)
        plans = plan(text, sizes=lengths, mesh=ranks, dtype="float64")
        x, w = (
            torch.randn([lengths[dim.name] // prod(ranks[axis] for axis in dim.axes) for dim in tensor.dims]).double()
            for tensor in (spec.a, spec.b)
        )
        for needs, matmul in zip(("", "x", "w"), plans.matmuls, strict=True):
            operands = x.clone().requires_grad_(needs == "x"), w.clone().requires_grad_(needs == "w")
            with counting() as count:
                y = fusedtp.sharded_matmul(*operands, text, mesh, schedule="decomposed")
            if needs:
                with counting() as count:
                    y.backward(torch.ones_like(y))
            assert len(count.calls) == len(matmul.collectives), f"{matmul.names[2]} of {text}: {count.calls}"
            reduced = {name for op, name in count.groups if op in ("all_reduce", "matmul_all_reduce")}
            assert not reduced & {names[axis] for axis in matmul.c.used}, f"{matmul.names[2]} of {text}: {count.groups}"


def test_no_all_reduce_where_a_reduce_scatter_does(pool: RankPool) -> None:
    # Specs without a partial result.
    one, two = (list(filter(is_valid, texts(options, ("",)))) for options in (ONE, TWO))
    assert (len(one), len(two)) == (27, 11**3)
    pool.run(count_specs, one, False)
    # The planner's test has all specs; these are a sample of every kind.
    pool.run(count_specs, two[::11] if LARGE else two[::131], True, timeout=120.0)


def same_bits(group: ProcessGroup, schedule: str) -> None:
    """Check that repeated forward and backward, and a second backward of one graph, have the same bits."""
    # Interpreted kernels are slow, and these two layers contain the other two's.
    names = ("all_gather_linear", "linear_reduce_scatter") if schedule == "fused" and not LARGE else tuple(LAYERS)
    for name in names:
        x_shape, w_shape, *_ = LAYERS[name]
        random = torch.Generator().manual_seed(group.rank())
        shapes = x_shape, w_shape, (N // 4 if name == "all_gather_linear" else N,)
        operands = [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]
        y, other = (getattr(fusedtp, name)(*operands, group=group, schedule=schedule) for _ in range(2))
        assert torch.equal(y, other), name
        dy = torch.randn(y.shape, generator=random)
        first = torch.autograd.grad(y, operands, dy, retain_graph=True)
        for each in (torch.autograd.grad(y, operands, dy), torch.autograd.grad(other, operands, dy)):
            assert all(map(torch.equal, first, each)), name


@pytest.mark.parametrize("schedule", ["fused", "decomposed", "unfused"])
def test_same_bits_every_time(pool: RankPool, schedule: str) -> None:
    # Two terms have one sum in any order.
    pool.run(same_bits, schedule, world_size=3 if schedule == "fused" and not LARGE else 4)


def keeps_shards(group: ProcessGroup) -> None:
    """Check that every named sharding saves exactly its input shards."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))
    for text in NAMED.values():
        spec = parse(text)
        lengths = dict(zip(spec.dim_names, (M, K, N), strict=True))
        x, w = (
            torch.randn([lengths[dim.name] // 4 ** len(dim.axes) for dim in tensor.dims]).requires_grad_()
            for tensor in (spec.a, spec.b)
        )
        with counting() as count:
            fusedtp.sharded_matmul(x, w, text, mesh)
        assert [each.data_ptr() for each in count.saved] == [x.data_ptr(), w.data_ptr()], text


def test_named_shardings_keep_shards(pool: RankPool) -> None:
    pool.run(keeps_shards)
