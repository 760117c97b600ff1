"""Activations that an op ends with: right by every schedule, forward and backward; nothing more is sent, and nothing
kept that no gradient needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import fusedtp
from fusedtp import activations, reference
from fusedtp.bench.ranks import RankPool
from fusedtp.kernels import gather_matmul
from fusedtp.op import ACTIVATIONS, GATED, OF_RESULT
from fusedtp.schedules import decomposed

from .activated import Near, contracted, gradients, product, results
from .spread import LARGE, spread
from .test_counting import counting
from .test_several import cut, whole

SCHEDULES = ("unfused", "decomposed", "fused")


class Gathered:
    """x as all ranks have it together; every rank has weights of its own."""

    def __init__(
        self, group: ProcessGroup, name: str, dtype: torch.dtype, dim: int, how: str, widths: Sequence[int],
        biased: bool,
    ) -> None:  # fmt: skip
        self.group, self.name, self.dim, shape = group, name, dim, (9, 4, 24)
        self.x, self.sizes = whole(shape, dtype, 0), cut(shape[dim], group.size(), how)
        rows, ranks, rank = self.x.flatten(0, -2), range(group.size()), group.rank()
        # Products near 1, where an activation is curved.
        every = [[whole((width, 24), dtype, 100 * r + i) / 4 for i, width in enumerate(widths)] for r in ranks]
        self.weights = every[rank]
        self.biases = [whole((width,), dtype, i) if biased else None for i, width in enumerate(widths)]
        outs = widths[:1] if name in GATED else widths
        dys = [[whole((*shape[:-1], width), dtype, 1000 + 100 * r + i) for i, width in enumerate(outs)] for r in ranks]
        self.dys = dys[rank]
        dzs, ws = [], []
        for r in ranks:
            zs = [product(rows, w, b, dtype) for w, b in zip(every[r], self.biases, strict=True)]
            dz = gradients(name, [dy.flatten(0, -2) for dy in dys[r]], zs)
            dzs, ws = [*dzs, *dz], [*ws, *every[r]]
            if r == rank:
                self.ys, self.dzs = results(name, zs), dz
        self.dx = [each.view(shape).split(self.sizes, dim)[rank] for each in contracted(dzs, ws)]

    def leaves(self) -> tuple[Tensor, list[Tensor], list[Any]]:
        """x, weights and biases to call with."""
        x = self.x.split(self.sizes, self.dim)[self.group.rank()].clone().requires_grad_()
        weights, biases = [
            [None if each is None else each.clone().requires_grad_() for each in given]
            for given in (self.weights, self.biases)
        ]
        return x, weights, biases  # type: ignore[return-value]

    def call(self, schedule: str, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Any]) -> list[Tensor]:
        """The results, one or several."""
        given: Any = (weights, biases) if len(weights) > 1 else (weights[0], biases[0])
        out = fusedtp.all_gather_linear(
            x, *given, group=self.group, gather_dim=self.dim, sizes=self.sizes, schedule=schedule,
            activation=self.name,
        )  # type: ignore[call-overload]  # fmt: skip
        return [out] if isinstance(out, Tensor) else list(out)

    def check(self, outs: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], biases: Sequence[Any]) -> None:
        """The results, and the gradients that `dys` give."""
        assert len(outs) == len(self.ys)
        for i, (out, y) in enumerate(zip(outs, self.ys, strict=True)):
            reference.check(out.flatten(0, -2), y.value, y.off, f"{self.name}: y{i}")
        torch.autograd.backward(list(outs), self.dys)
        rows = self.x.flatten(0, -2)
        for i, (dz, w, b) in enumerate(zip(self.dzs, weights, biases, strict=True)):
            turned = [Near(dz.value.t(), dz.off.t(), dz.dtype)]
            reference.check(w.grad, *contracted(turned, [rows]), f"{self.name}: dw{i}")  # type: ignore[arg-type]
            if b is not None:
                ones = torch.ones(len(rows), 1, dtype=rows.dtype)
                reference.check(b.grad[:, None], *contracted(turned, [ones]), f"{self.name}: db{i}")
        reference.check(x.grad, *self.dx, f"{self.name}: dx")  # type: ignore[arg-type]


def gathered(group: ProcessGroup, schedule: str, *of: Any) -> None:
    """Few rows are multiplied at once by `decomposed`; with none called few, chunk by chunk."""
    _gathered(group, schedule, *of)
    if schedule == "decomposed" and group.size() > 1:
        with mock.patch.object(decomposed, "FEW_ROWS", 0):
            # What is known of these calls goes with the memory.
            fusedtp.destroy()
            _gathered(group, schedule, *of)
        fusedtp.destroy()


def _gathered(group: ProcessGroup, schedule: str, *of: Any) -> None:
    problem = Gathered(group, *of)
    leaves = problem.leaves()
    outs = problem.call(schedule, *leaves)
    problem.check(outs, *leaves)
    with torch.no_grad():
        for out, same in zip(outs, problem.call(schedule, *leaves), strict=True):
            assert torch.equal(out, same), "other bits without a gradient"


def drawn(schedule: str) -> Iterator[tuple[Any, ...]]:
    """Every activation with one dtype, dim, cut and bias; all of them in the soak."""
    dtypes = [torch.bfloat16, torch.float32, torch.float16, *([torch.float64] if schedule != "fused" else [])]
    dims = ((0, "lopsided"), (1, "even"), (-1, "on the last"))
    if LARGE:
        for name, dtype, (dim, how), biased in itertools.product(ACTIVATIONS, dtypes, dims, (True, False)):
            yield name, dtype, dim, how, (70, 70) if name in GATED else (70, 5), biased
        return
    for i, name in enumerate(ACTIVATIONS):
        # Two tiles of columns: several pairs for one program.
        widths = (70, 70) if name in GATED else ((5, 70), (70,))[i % 2]
        yield name, dtypes[(i + 2 * (i // 3)) % len(dtypes)], *dims[i % 3], widths, i % 3 != 0


@pytest.mark.parametrize(("schedule", "world_size"), spread(SCHEDULES, [4, 1, 2]) + spread(SCHEDULES, [1, 4, 3]))
def test_results_and_gradients_are_right(pool: RankPool, schedule: str, world_size: int) -> None:
    for each in drawn(schedule):
        pool.run(gathered, schedule, *each, world_size=world_size)


def sharded(group: ProcessGroup, schedule: str, name: str, dtype: torch.dtype, how: str) -> None:
    """A fully sharded weight: the kernel's result is transposed."""
    rank, ranks, shape, N = group.rank(), range(group.size()), (3, 5, 24), 37
    sizes = cut(N, group.size(), how)
    xs, dys = [whole(shape, dtype, r) for r in ranks], [whole((3, 5, N), dtype, 50 + r) for r in ranks]
    weight, bias = whole((N, 24), dtype, 90) / 4, whole((N,), dtype, 91)
    rows = [x.flatten(0, -2) for x in xs]
    zs = [product(each, weight, bias, dtype) for each in rows]
    dzs = [gradients(name, [dy.flatten(0, -2)], [z])[0] for dy, z in zip(dys, zs, strict=True)]
    x, b, w = (each.clone().requires_grad_() for each in (xs[rank], bias, weight.split(sizes)[rank]))
    y = fusedtp.fsdp_linear(x, w, b, group=group, sizes=sizes, schedule=schedule, activation=name)  # type: ignore[arg-type]
    (expected,) = results(name, [zs[rank]])
    reference.check(y.flatten(0, -2), expected.value, expected.off, f"{name}: y")
    y.backward(dys[rank])
    turned = [Near(dz.value.t(), dz.off.t(), dtype) for dz in dzs]
    dw, allowed = contracted(turned, rows)
    reference.check(w.grad, dw.split(sizes)[rank], allowed.split(sizes)[rank], f"{name}: dw")  # type: ignore[arg-type]
    reference.check(x.grad.flatten(0, -2), *contracted(dzs[rank : rank + 1], [weight]), f"{name}: dx")  # type: ignore[union-attr]


@pytest.mark.parametrize(("schedule", "world_size"), spread(SCHEDULES, [1, 4, 2]))
def test_of_a_fully_sharded_weight(pool: RankPool, schedule: str, world_size: int) -> None:
    for name, dtype, how in (("gelu", torch.float32, "lopsided"), ("silu", torch.bfloat16, "even")):
        pool.run(sharded, schedule, name, dtype, how, world_size=world_size)


def sent_and_kept(group: ProcessGroup, schedule: str, name: str) -> None:
    """As many calls as without; products are kept where a gradient is made of them, and only there."""
    count = 2 if name in GATED else 1
    x, dy = torch.randn(4, 24), torch.randn(8, 16)
    weights = [torch.randn(16, 24, requires_grad=True) for _ in range(count)]
    given: Any = weights if count > 1 else weights[0]
    call = partial(fusedtp.all_gather_linear, group=group, schedule=schedule)
    with counting() as found:
        y = call(x, given, activation=name)  # type: ignore[call-overload]
    with counting() as expected:
        call(x, given)
    assert found.calls == expected.calls
    assert found.shapes == [(4, 24), *[(8, 16)] * count]
    kept = [each for each in found.saved if each.shape == (8, 16)]
    assert all((each.data_ptr() == y.data_ptr()) == (name in OF_RESULT) for each in kept)
    with counting() as back:
        y.backward(dy)
    assert not back.saved
    with counting() as frozen, torch.no_grad():
        call(x, given, activation=name)  # type: ignore[call-overload]
    assert not frozen.saved


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_as_many_collectives_and_no_more_kept(pool: RankPool, schedule: str) -> None:
    for name in ACTIVATIONS:
        pool.run(sent_and_kept, schedule, name, world_size=2)


def allocated(group: ProcessGroup, schedule: str) -> None:
    """A task that keeps nothing makes no tensor of the products' shape but its results and what two weights have."""
    from fusedtp.schedules import local

    x, weights = torch.randn(4, 24), [torch.randn(16, 24) for _ in range(2)]
    with mock.patch.object(local.torch, "empty_like", side_effect=AssertionError("a product is kept")), torch.no_grad():
        fusedtp.all_gather_linear(x, weights, group=group, schedule=schedule, activation="swiglu")
        fusedtp.all_gather_linear(x, weights[0], group=group, schedule=schedule, activation="gelu")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_more_is_allocated_without_a_gradient(pool: RankPool, schedule: str) -> None:
    pool.run(allocated, schedule, world_size=2)


def told(group: ProcessGroup, schedule: str) -> tuple[str, str, str]:
    """What `last_path` says, of an activation, a residual and neither."""
    x, w, said = torch.randn(4, 24), torch.randn(16, 24), []
    fusedtp.all_gather_linear(x, (w, w), group=group, schedule=schedule, activation="geglu")
    said.append(fusedtp.last_path())
    fusedtp.linear_all_reduce(x, w, group=group, schedule=schedule, residual=torch.ones(4, 16))
    said.append(fusedtp.last_path())
    fusedtp.linear_all_reduce(x, w, group=group, schedule=schedule)
    said.append(fusedtp.last_path())
    first, second, third = (each.epilogue for each in said if each is not None)
    return first, second, third


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_path_tells_where(pool: RankPool, schedule: str) -> None:
    where = {"fused": "in the kernel", "decomposed": "by chunk", "unfused": "after it"}
    for world_size in (1, 2):
        expected = where[schedule if world_size > 1 else "unfused"]
        for found in pool.run(told, schedule, world_size=world_size):
            assert found == (f"geglu {expected}", f"residual {expected}", "")


def elsewhere(group: ProcessGroup) -> None:
    """Compiled, under torch.func, autocast, checkpointing and inference, on meta, with create_graph."""
    for name in ("relu", "swiglu"):
        problem = Gathered(group, name, torch.float64, 0, "even", (16, 16) if name in GATED else (16,), True)
        x, weights, biases = problem.leaves()
        leaves = (x, *weights, *biases)

        def call(*leaves: Tensor, problem: Gathered = problem) -> Tensor:
            x, *others = leaves
            (y,) = problem.call("decomposed", x, others[: len(others) // 2], others[len(others) // 2 :])
            return y

        expected = call(*leaves)
        grads = torch.autograd.grad(expected, leaves, problem.dys[0])
        found = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
        assert torch.equal(found, expected)
        for one, other in zip(torch.autograd.grad(found, leaves, problem.dys[0]), grads, strict=True):
            torch.testing.assert_close(one, other)
        again = torch.utils.checkpoint.checkpoint(call, *leaves, use_reentrant=False)
        for one, other in zip(torch.autograd.grad(again, leaves, problem.dys[0]), grads, strict=True):
            assert torch.equal(one, other)
        of_func = torch.func.grad(lambda *given, p=problem, call=call: (call(*given) * p.dys[0]).sum(), argnums=(0, 1))
        for one, other in zip(of_func(*(each.detach() for each in leaves)), grads[:2], strict=True):
            torch.testing.assert_close(one, other)
        (dx,) = torch.autograd.grad(call(*leaves), x, problem.dys[0], create_graph=True)
        torch.testing.assert_close(dx, grads[0])
        with pytest.raises(NotImplementedError, match="second derivatives"):
            dx.sum().backward()
        with pytest.raises(NotImplementedError, match="nor with an activation"):
            torch.autograd.grad(call(*leaves), x, problem.dys[0][None], is_grads_batched=True)
        with torch.inference_mode():
            assert torch.equal(call(*(each.clone() for each in leaves)), expected)
        assert call(*(each.to("meta") for each in leaves)).shape == expected.shape
        with torch.autocast("cpu", torch.bfloat16):
            assert call(*(each.detach().float() for each in leaves)).dtype == torch.bfloat16


def test_elsewhere(pool: RankPool) -> None:
    pool.run(elsewhere, world_size=2)


def layers(group: ProcessGroup) -> None:
    """Of this rank's features, gathered or whole, padded or not, and fully sharded."""
    for sequence_parallel, sizes in itertools.product((True, False), (None, (5, 3))):
        options: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel, "feature_sizes": sizes}
        torch.manual_seed(3)
        layer = fusedtp.ColumnParallelLinear(6, 8, activation="silu", **options)
        torch.manual_seed(3)
        plain = fusedtp.ColumnParallelLinear(6, 8, **options)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(int(sequence_parallel) and group.rank()))
        torch.testing.assert_close(layer(x), F.silu(plain(x)))
        layer(x).sum().backward()
        F.silu(plain(x)).sum().backward()
        torch.testing.assert_close(layer.weight.grad.to_local(), plain.weight.grad.to_local())  # type: ignore[union-attr]
        assert "activation='silu'" in repr(layer)
    torch.manual_seed(4)
    layer = fusedtp.FSDPLinear(6, 8, group=group, activation="relu")
    torch.manual_seed(4)
    torch.testing.assert_close(layer(x), F.relu(fusedtp.FSDPLinear(6, 8, group=group)(x)))
    for wrong in (fusedtp.ColumnParallelLinear, fusedtp.FSDPLinear):
        with pytest.raises(ValueError, match="'swiglu' is of two weights, gate and up, got 1"):
            wrong(6, 8, group=group, activation="swiglu")


def test_layers(pool: RankPool) -> None:
    pool.run(layers, world_size=2)


W = torch.ones(3, 4)
KNOWN = f"activation must be None or one of {', '.join(ACTIVATIONS)}, got "
BAD: dict[str, tuple[Any, Any, str]] = {
    "unknown": (W, "no_such", f"{KNOWN}'no_such'"),
    "no name": (W, F.relu, KNOWN),
    "a number": (W, 1, f"{KNOWN}1"),
    "nothing": (W, "", f"{KNOWN}''"),
    "a list": (W, ["relu"], KNOWN),
    "one": (W, "swiglu", "activation 'swiglu' is of two weights, gate and up, got 1"),
    "one in a list": ([W], "geglu", "activation 'geglu' is of two weights, gate and up, got 1"),
    "three": ((W, W, W), "geglu", "activation 'geglu' is of two weights, gate and up, got 3"),
    "rows": ((W, torch.ones(2, 4)), "swiglu", "'swiglu' is of two weights with as many rows, got 3 and 2"),
}


def refused(group: ProcessGroup) -> None:
    x = torch.ones(2, 4)
    fusedtp.all_gather_linear(x, W, group=group)
    for weights, activation, message in BAD.values():
        with pytest.raises(ValueError, match=message):
            fusedtp.all_gather_linear(x, weights, group=group, activation=activation)
    with pytest.raises(ValueError, match="'geglu' is of two weights"):
        fusedtp.fsdp_linear(x, W, group=group, activation="geglu")  # type: ignore[arg-type]


def test_bad_input(pool: RankPool) -> None:
    pool.run(refused, world_size=2)


def disagreed(group: ProcessGroup, schedule: str) -> None:
    x, activation = torch.ones(2, 4), ("relu", None)[group.rank()]
    with pytest.raises(fusedtp.RanksDisagree, match="activation: relu on rank 0, none on rank 1"):
        fusedtp.all_gather_linear(x, W, group=group, schedule=schedule, activation=activation)  # type: ignore
    fusedtp.destroy(group)


def test_ranks_that_disagree(pool: RankPool) -> None:
    for schedule in ("decomposed", "fused"):
        pool.run(disagreed, schedule, world_size=2)


def test_a_name_without_a_formula_is_an_error() -> None:
    z = torch.ones(2, 64)
    for some in (z, z[:, :3]):
        for call in (
            lambda some=some: activations.apply("no_such", [some], torch.empty_like(some)),
            lambda some=some: activations.of("no_such", [some]),
            lambda some=some: activations.gradients("no_such", [some], [some]),
        ):
            with pytest.raises(NotImplementedError, match="no formula of no_such"):
                call()


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name not in GATED])
def test_a_gradient_is_made_of_the_result_where_that_shows_it(name: str) -> None:
    z = torch.linspace(-4, 4, 64, requires_grad=True)
    (y,) = activations.of(name, [z])
    (expected,) = torch.autograd.grad(y.sum(), z)
    (found,) = activations.gradients(name, [torch.ones_like(z)], [y.detach()])
    assert torch.allclose(found, expected) == (name in OF_RESULT)


def test_a_program_makes_up_behind_its_gate() -> None:
    """Every pair of tiles by one program, the gate's first; interpreted programs run one after the other, and would not
    show another order.
    """
    for num_pairs, num_programs in itertools.product((0, 1, 2, 5, 8), (1, 2, 3, 8)):
        made = []
        for pid in range(num_programs):
            end = pid + 2 * -(-max(num_pairs - pid, 0) // num_programs) * num_programs
            assert gather_matmul.end_of_pairs.fn(pid, num_pairs, num_programs) == end
            tiles = [gather_matmul.first_of.fn(index, num_programs) for index in range(pid, end, num_programs)]
            assert tiles[1::2] == [(place, 1) for place, _ in tiles[::2]]
            assert all(turn == 0 for _, turn in tiles[::2])
            made += [place for place, _ in tiles[::2]]
        assert sorted(made) == list(range(num_pairs))
