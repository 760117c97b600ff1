"""Recipes for float8: forward and every gradient of layers, functions and shardings, by every schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fusedtp
from fusedtp import float8
from fusedtp.bench.ranks import RankPool
from fusedtp.calls.bound import BoundTask
from fusedtp.scaled import RECIPES, Casts, Quantized, casts_of

from .harness import LARGE, on_gfx942, spread
from .oracle import Case, Operands, whole
from .test_counting import counting

SCHEDULES = ("unfused", "decomposed", "fused")
Grads = dict[str, Tensor]


def exact(shape: Sequence[int], seed: int, steps: int = 7) -> Tensor:
    """Return values that every recipe represents exactly: multiples of 0.5 up to 3.5, which fit e5m2. Every row and
    column of 8 has a 3.5, so each scale is a power of two. AMD's e4m3, up to 240, needs 15 steps, 7.5.
    """
    values = torch.randint(-steps, steps + 1, tuple(shape), generator=torch.Generator().manual_seed(seed)) / 2
    flat = values.reshape(-1, shape[-1]) if values.numel() else values
    for i in range(max(flat.shape) if values.numel() else 0):
        flat[i % flat.shape[0], i % flat.shape[1]] = steps / 2
    return values


def all_of(inputs: dict[str, Tensor], call: Callable[..., Any], dy: Callable[[int, Tensor], Tensor]) -> Grads:
    """Return the results, and the gradients of all inputs."""
    leaves = {name: each.clone().requires_grad_() for name, each in inputs.items()}
    outs = call(**leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.autograd.backward(outs, [dy(i, out) for i, out in enumerate(outs)])
    found = {f"y{i}": out.detach() for i, out in enumerate(outs)}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, f"{name} has no gradient"
        found[f"d{name}"] = leaf.grad
    return found


def cases(how: str, dtype: torch.dtype) -> list[Case]:
    """Return cases of every function."""
    given: dict[str, Any] = {"how": how, "k_how": how, "widths": (24,), "features": 32}
    return [
        Case("gather", dtype, (16,), **given), Case("gather", dtype, (16,), dim=-1, **given),
        Case("gather", dtype, (2, 16), dim=1, **given | {"biased": (False,)}),
        Case("gather", dtype, (16,), **given | {"widths": (24, 8), "biased": (False,) * 2}),
        Case("gather", dtype, (16,), **given | {"widths": (24, 8, 16, 8, 40), "biased": (True, False) * 2 + (True,)}),
        Case("scatter", dtype, (16,), **given), Case("scatter", dtype, (16,), dim=-1, **given | {"biased": (False,)}),
        Case("all_reduce", dtype, (16,), **given), Case("fsdp", dtype, (12,), **given | {"biased": (False,)}),
    ]  # fmt: skip


def recipes_of(i: int, schedule: str) -> Sequence[str]:
    """Return all recipes; for interpreted kernels one recipe, in turn."""
    return [RECIPES[i % len(RECIPES)]] if schedule == "fused" else RECIPES


def off(value: Tensor, ref: Tensor) -> float:
    """Return the relative error in the norm."""
    return float((value.double() - ref.double()).norm() / ref.double().norm())


# The relative error, in the norm, from rounding one operand to e4m3 or e5m2 in a product of random values: a uniform
# error of half a step, 2**-4 or 2**-3 for values of 1 to 2 times a power of two, is at most 2**-4 / sqrt(3) of each.
E4M3, E5M2 = 2**-4 / 3**0.5, 2**-3 / 3**0.5


def rounding(casts: Casts, made: str) -> float:
    """Return the relative error from rounding a product's operands. If both gradients cast dy, dy is rounded twice: for
    the gather, and along the other dim.
    """
    squares = 0.0
    for operand, cast in casts[made].items():
        twice = operand == "dy" and not cast.whole and all("dy" in casts[each] for each in ("dx", "dw"))
        squares += (1 + twice) * (E5M2 if cast.dtype == float8.OCP.e5m2 else E4M3) ** 2
    return squares**0.5


def against_plain(group: ProcessGroup, schedule: str, how: str, amd: bool, dtype: torch.dtype | None) -> None:
    """Compare results and gradients with those without float8. `dtype` None: values that no cast rounds, to the bit.
    Random values must have the error of two rounded operands, and no less.
    """

    def drawn(shape: Sequence[int], seed: int, steps: int = 7) -> Tensor:
        return exact(shape, seed, steps) if dtype is None else whole(shape, dtype, seed)

    for at, case in enumerate(cases(how, dtype or torch.float32)):
        operands, inputs = Operands(case, group), {}
        for i, (name, each) in enumerate(operands.given.items()):
            # A bias, and the gradient of an all-reduce, are the same on all ranks.
            inputs[name] = drawn(each.shape, 10 * i + group.rank() * (name[0] != "b"), 15 if amd else 7)
        seed = 91 + group.rank() * (case.kind != "all_reduce")
        dy = lambda i, out, seed=seed: drawn(out.shape, seed + i)  # noqa: E731

        def call(recipe: str | None, operands: Operands = operands, **leaves: Tensor) -> tuple[Tensor, ...]:
            return tuple(operands.call(schedule, leaves, float8=recipe))

        plain = all_of(inputs, partial(call, None), dy)
        # With random values kernels take another recipe than with exact values.
        for recipe in recipes_of(at + 2 * (dtype is not None), schedule):
            with on_gfx942() if amd else contextlib.nullcontext():
                made = all_of(inputs, partial(call, recipe), dy)
            for key, value in made.items():
                name = f"{case}, {recipe}: {key}"
                if dtype is None:
                    assert torch.equal(value, plain[key]), name
                elif value.numel():
                    check_rounding(value, plain[key], key.rstrip("0123456789"), casts_of(recipe, float8.OCP), name)


def check_rounding(value: Tensor, ref: Tensor, key: str, casts: Casts, name: str) -> None:
    """Check that a value has the error that the casts of its operands give."""
    assert value.dtype == ref.dtype
    most, found = rounding(casts, key) if key in casts else 0.0, off(value, ref)
    # The norm of a shard with few elements may exceed the mean.
    most_here = 1.5 * most * (1 + max(1, value.numel()) ** -0.5)
    assert found <= most_here + 4 * torch.finfo(ref.dtype).eps, f"{name} is off by {found:.4f}, not {most:.4f}"
    assert found > most / 8 or not most, f"{name} is not made in float8"


EXACT = [
    ("unfused", 3, "lopsided", False), ("decomposed", 2, "on the last", False), ("fused", 3, "lopsided", False),
    ("unfused", 1, "even", True), ("decomposed", 2, "lopsided", True),
    *([("unfused", 1, "even", False), ("unfused", 4, "lopsided", False), ("unfused", 3, "on the last", True)]
      if LARGE else []),
]  # fmt: skip
RANDOM = spread(SCHEDULES, [4, 3, 2], ["lopsided", "even"], [torch.bfloat16, torch.float32, torch.float16])


@pytest.mark.parametrize(
    ("schedule", "world_size", "how", "amd", "dtype"),
    [(*each, None) for each in EXACT] + [(*each[:3], False, each[3]) for each in (RANDOM if LARGE else RANDOM[::2])],
)
def test_values_are_off_by_their_rounding(
    pool: RankPool, schedule: str, world_size: int, how: str, amd: bool, dtype: torch.dtype | None
) -> None:
    pool.run(against_plain, schedule, how, amd, dtype, world_size=world_size, timeout=400)


def sharded(group: ProcessGroup, schedule: str) -> None:
    """Check shardings over one and two axes, planned by size: a tensor has one scale on all ranks of both axes."""
    shape = (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("X", "Y"))
    at, lengths = mesh.get_coordinate(), dict(zip("XY", shape, strict=True))
    assert at is not None
    place, given = dict(zip("XY", at, strict=True)), {"M": 16, "K": 32, "N": 24}

    def shard(dims: Sequence[str], seed: int) -> Tensor:
        x = exact([given[dim[0]] for dim in dims], seed)
        for i, dim in enumerate(dims):
            for axis in dim[2:]:
                x = x.chunk(lengths[axis], i)[place[axis]]
        return x.contiguous()

    for i, spec in enumerate((
        "[M_X, K] @ [K, N_Y] -> [M_X, N_Y]", "[M_X, K] @ [K_X, N_Y] -> [M_X, N_Y]", "[M_X, K_Y] @ [K_Y, N] -> [M_X, N]",
        "[M_X, K_Y] @ [K_Y, N_X] -> [M, N_X]", "[M, K_XY] @ [K_XY, N] -> [M, N]", "[M_Y, K] @ [K, N_Y] -> [M, N_Y]",
    )):  # fmt: skip
        a, b, c = (part.strip(" []").split(", ") for part in spec.replace("->", "@").split("@"))
        call = partial(fusedtp.sharded_matmul, spec=spec, mesh=mesh, schedule=schedule)
        inputs = {"a": shard(a, 1), "b": shard(b, 2)}
        plain = all_of(inputs, call, lambda i, out, c=c: shard(c, 3))  # type: ignore[misc]
        # Two recipes for each spec; over the schedules every spec has all recipes.
        for recipe in {RECIPES[i % 3], RECIPES[(i + 1 + SCHEDULES.index(schedule)) % 3]}:
            made = all_of(inputs, partial(call, float8=recipe), lambda i, out, c=c: shard(c, 3))  # type: ignore[misc]
            for key, value in made.items():
                assert torch.equal(value, plain[key]), f"{spec}, {recipe}: {key}"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shardings(pool: RankPool, schedule: str) -> None:
    # All ranks of the pool must make a mesh.
    pool.run(sharded, schedule, timeout=400)


def travels_once(group: ProcessGroup, recipe: Any) -> None:
    """Check that in a row-parallel layer dy is gathered once for both gradients, and in a column-parallel layer x once
    beside dx. For tensors with one scale, one exchange serves all tensors of a product.
    """
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(12, 16, requires_grad=True)
    casts = casts_of(recipe, float8.OCP)
    # If only one gradient casts its operands, dy travels uncast.
    together = bool(casts["dx"]) == bool(casts["dw"])
    rows, dy_rows, options = 8 // group.size(), (8 // group.size(), 12), {"group": group, "float8": recipe}

    def numbers(*made: str) -> list[tuple[str, tuple[int, ...]]]:
        wholes = {operand for each in made for operand, cast in casts[each].items() if cast.whole}
        return [("all_gather", (1, len(wholes)))] if wholes else []

    with counting() as forward:
        y = fusedtp.linear_reduce_scatter(x, w, **options)
    assert forward.calls == [*numbers("y"), ("matmul_reduce_scatter", (8, 16))]
    with counting() as backward:
        y.sum().backward()
    if together:
        assert backward.calls == [*numbers("dx", "dw"), ("all_gather_matmul twice", dy_rows)]
    else:
        assert [each for each in backward.calls if each[1] == dy_rows] == [("all_gather", dy_rows)]
    x = torch.randn(rows, 16, requires_grad=True)
    y = fusedtp.all_gather_linear(x, w, **options)
    with counting() as backward:
        y.sum().backward()
    assert backward.calls.count(("all_gather_matmul", (rows, 16))) == 1
    # One exchange for both gradients, or one for each.
    agreed = [numbers("dx", "dw")] if together else [numbers("dx"), numbers("dw")]
    assert len(backward.calls) == 2 + sum(map(len, agreed))


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_both_gradients_need_travels_once(pool: RankPool, recipe: str) -> None:
    pool.run(travels_once, recipe, world_size=2)


def trained(group: ProcessGroup, schedule: str, sequence_parallel: bool, recipe: Any) -> tuple[Tensor, Grads]:
    """Return this rank's part of a ParallelMLP's result, and the gradients of its whole parameters."""
    torch.manual_seed(5)
    mlp = fusedtp.ParallelMLP(
        32, 48, activation="swiglu", group=group, sequence_parallel=sequence_parallel, schedule=schedule, float8=recipe
    )
    assert ("float8" in repr(mlp)) == (recipe is not None)
    x = whole((16, 32), torch.float32, 1)
    y = mlp(x.tensor_split(group.size())[group.rank()] if sequence_parallel else x)
    y.square().sum().backward()
    grads = {name: parameter.grad for name, parameter in mlp.named_parameters()}
    return y.detach(), {name: grad.full_tensor() for name, grad in grads.items()}  # type: ignore[union-attr]


@pytest.mark.parametrize(("schedule", "sequence_parallel"), spread([*SCHEDULES, "fused"], [True, True, True, False]))
def test_layers(pool: RankPool, schedule: str, sequence_parallel: bool) -> None:
    """Two ranks equal one rank with the same recipe."""
    for recipe in (*RECIPES, None):
        ((expected, others),) = pool.run(trained, schedule, sequence_parallel, recipe, world_size=1)
        # In sums over ranks each part of the contraction has its own scales.
        most = 1e-5 if recipe is None else 0.08
        for rank, (y, grads) in enumerate(pool.run(trained, schedule, sequence_parallel, recipe, world_size=2)):
            own = expected.tensor_split(2)[rank] if sequence_parallel else expected
            assert off(y, own) <= most
            for name, grad in grads.items():
                assert off(grad, others[name]) <= most, name


def compiled_and_checkpointed(group: ProcessGroup) -> None:
    """Check that gradients are the same in a whole graph of torch.compile, and with activation checkpointing."""
    x, weights = torch.randn(6, 16), [torch.randn(12, 16), torch.randn(12, 16)]

    def loss(x: Tensor, w: Tensor, v: Tensor, recipe: str) -> Tensor:
        y = fusedtp.all_gather_linear(x, (w, v), group=group, activation="swiglu", float8=recipe)  # type: ignore
        return fusedtp.linear_reduce_scatter(y, w.t(), group=group, float8=recipe).square().sum()  # type: ignore

    def checkpointed(*given: Any) -> Tensor:
        return torch.utils.checkpoint.checkpoint(loss, *given, use_reentrant=False)  # type: ignore[no-any-return]

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for recipe in RECIPES:
        found = []
        # rowwise exchanges no number between ranks.
        calls = (loss, checkpointed) if recipe == "rowwise" and not LARGE else (loss, checkpointed, compiled)
        for call in calls:
            leaves = [each.clone().requires_grad_() for each in (x, *weights)]
            call(*leaves, recipe).backward()
            found.append([each.grad for each in leaves])
        for others in found[1:]:
            for ours, other in zip(found[0], others, strict=True):
                assert torch.equal(ours, other)  # type: ignore[arg-type]


def test_in_a_graph_and_made_again(pool: RankPool) -> None:
    pool.run(compiled_and_checkpointed, world_size=2)


def on_amds_machine(group: ProcessGroup) -> None:
    """Check that layers and `sharded_matmul` send fnuz formats, forward and backward, also in a compiled graph.
    Interpreted kernels refuse fnuz before anything is sent, even scales.
    """
    sent: list[torch.dtype] = []
    run, mesh = BoundTask.run, DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))

    def seen(ready: BoundTask, operands: Any) -> Any:
        sent.extend(each.data.dtype for each in operands.values() if type(each) is Quantized)
        return run(ready, operands)

    mlp = fusedtp.ParallelMLP(32, 48, activation="swiglu", group=group, schedule="decomposed", float8="tensorwise")
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    x, grads = torch.randn(8, 32), []
    with on_gfx942(), mock.patch.object(BoundTask, "run", seen):
        for called in (mlp, compiled):
            leaf = x.clone().requires_grad_()
            called(leaf).square().sum().backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads)
        assert set(sent) == set(float8.FNUZ)
        sent.clear()
        fusedtp.sharded_matmul(x, torch.randn(32, 6), "[M_X, K] @ [K, N_X] -> [M, N_X]", mesh=mesh, float8="rowwise")
        assert set(sent) == {float8.FNUZ.e4m3}
        sent.clear()
        with pytest.raises(RuntimeError, match=r"cannot multiply torch\.float8_e4m3fnuz here: Triton's interp"):
            fusedtp.all_gather_linear(x, x, group=group, schedule="fused", float8="tensorwise")
        assert not sent
    torch.compiler.reset()


def test_on_amds_machine(pool: RankPool) -> None:
    pool.run(on_amds_machine, world_size=2, timeout=400)
