"""The layers against nn.Linear and an unsharded MLP: initial values, outputs and every gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import fusedtp
from fusedtp import reference
from fusedtp.bench.ranks import RankPool
from fusedtp.calls.bound import BoundTask
from fusedtp.shards import chunk_sizes, even_sizes

from .harness import LARGE, on_ranks, spread

BATCH, IN, OUT = 3, 10, 9
KINDS = ("column", "column, x whole", "row", "row, y whole", "fsdp")


def lopsided(length: int, world_size: int) -> tuple[int, ...]:
    """Return shards of very different lengths, some of them empty."""
    sizes = [0] * world_size
    for i in range(length):
        sizes[i * i % world_size] += 1
    return tuple(sizes)


def check(out: Tensor | None, ref: Tensor | None, name: str, dtype: torch.dtype, longest: int, num_sums: int) -> None:
    """Check out against the float64 ref within the error of `num_sums` matmuls in a row.

    A sum of L terms errs by at most L eps times the sum of their magnitudes. For terms of random signs that is about
    sqrt(L) times the deviation of the result, estimated by the largest result. At these sizes the bound is 1e-4 of it
    in float32 and 1e-12 in float64; a missing or doubled term leaves tens of percent.
    """
    assert out is not None, f"{name} is missing"
    assert ref is not None, f"{name} has no reference"
    assert out.dtype == dtype, f"{name}: {out.dtype}, expected {dtype}"
    ref = ref.detach()
    scale = float(ref.abs().max()) if ref.numel() else 0.0
    reference.check(out, ref, torch.full_like(ref, num_sums * longest**1.5 * torch.finfo(dtype).eps * scale), name)


def part(whole: Tensor, dim: int | None, rank: int, sizes: Sequence[int]) -> Tensor:
    return whole if dim is None else reference.chunk(whole, dim, rank, sizes)


def local(p: Tensor, dim: int | None, size: int) -> Tensor:
    """Return this rank's part of a parameter or gradient, without the padding behind `size` along `dim`."""
    assert isinstance(p, DTensor)
    assert p.placements == ((Replicate() if dim is None else Shard(dim)),)
    value = p.to_local()
    if dim is None:
        return value
    assert not value.narrow(dim, size, value.shape[dim] - size).any()
    return value.narrow(dim, 0, size)


def against(
    group: ProcessGroup, name: str, layer: nn.Module, dense: nn.Module, pieces: Callable[[bool], dict[str, Tensor]],
    cuts: dict[str, int | None], sizes: dict[int | None, Sequence[int]], shapes: Sequence[Sequence[int]], num_sums: int,
) -> None:  # fmt: skip
    """Compare initial values, then in two turns y, dx and gradients; the second turn's gradients accumulate.

    - `pieces`: this rank's parts of the dense parameters, or of their gradients, by the layer's names.
    - `cuts`: the split dim of x, y and each parameter.
    - `sizes`: the ranks' lengths along a dim of x and y, or (key None) of parameters.
    - `shapes`: of x and y.
    """
    rank, features = group.rank(), sizes[None]

    def cut(whole: Tensor, of: str) -> Tensor:
        dim = cuts[of]
        return whole if dim is None else reference.chunk(whole, dim, rank, sizes[dim])

    parameters, starts = dict(layer.named_parameters()), pieces(False)
    assert set(parameters) == set(starts)
    for key, value in parameters.items():
        assert torch.equal(local(value, cuts[key], features[rank]), starts[key]), f"{name}: {key} starts otherwise"
    dtype, dense = parameters[next(iter(parameters))].dtype, dense.double()
    longest = max(*shapes[0], *shapes[1], shapes[0][0] * shapes[0][1], sum(features))
    for turn in (1, 2):
        x, dy = (torch.randn(*shape).to(dtype) for shape in shapes)
        x_ref = x.to(torch.float64, copy=True).requires_grad_()
        y_ref = dense(x_ref)
        y_ref.backward(dy.double())
        x_part = cut(x, "x").clone().requires_grad_()
        y = layer(x_part)
        y.backward(cut(dy, "y"))
        assert x_ref.grad is not None
        found = {"y": (y, cut(y_ref, "y")), "dx": (x_part.grad, cut(x_ref.grad, "x"))}
        for key, grad in pieces(True).items():
            found[f"d{key}"] = local(parameters[key].grad, cuts[key], features[rank]), grad
        for what, (out, ref) in found.items():
            check(out, ref, f"{what} of {name}, turn {turn}", dtype, longest, num_sums)


def linear(
    group: ProcessGroup, kind: str, dim: int, bias: bool, dtype: torch.dtype, uneven: bool, schedule: str
) -> None:
    rank, world_size = group.rank(), group.size()
    name = f"{kind}, dim {dim}, bias {bias}, uneven {uneven}"
    length = 7 if uneven else 12
    split = IN if kind.startswith("row") else OUT
    features = lopsided(split, world_size) if uneven else chunk_sizes(split, world_size)
    rows = lopsided(length, world_size) if uneven else even_sizes(length, world_size)
    options: dict[str, Any] = {"group": group, "schedule": schedule, "feature_sizes": features if uneven else None}
    whole = kind.endswith("whole")
    if kind != "fsdp":
        options |= {"sequence_parallel": not whole, "sequence_sizes": rows if uneven and not whole else None}
    torch.manual_seed(5)
    cuts: dict[str, int | None]
    if kind.startswith("column"):
        layer: nn.Module = fusedtp.ColumnParallelLinear(IN, OUT, bias, "cpu", dtype, gather_dim=dim, **options)
        cuts = {"x": None if whole else dim, "y": 2, "weight": 0, "bias": 0}
    elif kind.startswith("row"):
        layer = fusedtp.RowParallelLinear(IN, OUT, bias, "cpu", dtype, scatter_dim=dim, **options)
        cuts = {"x": 2, "y": None if whole else dim, "weight": 1, "bias": None}
    else:
        layer = fusedtp.FSDPLinear(IN, OUT, bias, "cpu", dtype, **options)
        cuts = {"x": dim, "y": dim, "weight": 0, "bias": None}
    after = torch.rand(1)
    torch.manual_seed(5)
    dense = nn.Linear(IN, OUT, bias, dtype=dtype)
    assert torch.equal(after, torch.rand(1)), f"{name}: drew another number of random values than nn.Linear"
    padded = ["_".join(map(str, ("padded_sizes", *features)))] * (features != chunk_sizes(split, world_size))
    assert list(layer.state_dict()) == [*dense.state_dict(), *padded]

    def pieces(of_grads: bool) -> dict[str, Tensor]:
        values = {key: p.grad if of_grads else p for key, p in dense.named_parameters()}
        return {key: part(value, cuts[key], rank, features) for key, value in values.items()}  # type: ignore[arg-type]

    shape = (length, BATCH) if dim == 0 else (BATCH, length)
    shapes = (*shape, IN), (*shape, OUT)
    against(group, name, layer, dense, pieces, cuts, {2: features, dim: rows, None: features}, shapes, 2)


@pytest.mark.parametrize(("dtype", "world_size"), spread([torch.float64, torch.float32], [1, 2, 3, 4]), ids=str)
@on_ranks()
def test_linears_against_nn_linear(group: ProcessGroup, world_size: int, dtype: torch.dtype) -> None:
    # Each number of ranks has a seventh of the cases.
    every = list(itertools.product(("unfused", "decomposed"), KINDS, (0, 1), (True, False), (False, True)))
    for schedule, kind, dim, bias, uneven in every if LARGE else every[world_size::7]:
        linear(group, kind, 0 if kind == "fsdp" else dim, bias, dtype, uneven, schedule)


@on_ranks(2)
def test_linears_in_one_kernel(group: ProcessGroup) -> None:
    for kind in KINDS:
        linear(group, kind, 0, True, torch.float32, True, "fused")


class DenseMLP(nn.Module):
    """The dense form of ParallelMLP, with linears in the order in which it draws them."""

    def __init__(self, hidden: int, intermediate: int, bias: bool, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias, dtype=dtype) if activation == "swiglu" else None
        self.up_proj = nn.Linear(hidden, intermediate, bias, dtype=dtype)
        self.down_proj = nn.Linear(intermediate, hidden, bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up_proj(x)) if self.gate_proj is None else F.silu(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(inner)
        return out


def shards(dense: DenseMLP, rank: int, sizes: Sequence[int], *, grad: bool) -> dict[str, Tensor]:
    """Return ParallelMLP's parameters (or their gradients) on one rank, by name."""
    out: dict[str, Tensor] = {}
    wide = [dense.up_proj] if dense.gate_proj is None else [dense.gate_proj, dense.up_proj]
    name = "up_proj" if dense.gate_proj is None else "gate_up_proj"
    for key, p in dense.down_proj.named_parameters():
        value = p.grad if grad else p
        assert value is not None
        out[f"down_proj.{key}"] = reference.chunk(value, 1, rank, sizes) if key == "weight" else value
        values = [getattr(each, key).grad if grad else getattr(each, key) for each in wide]
        parts = [reference.chunk(value, 0, rank, sizes) for value in values]
        out[f"{name}.{key}"] = parts[0] if len(parts) == 1 else torch.stack(parts)
    return out


def mlp(
    group: ProcessGroup, activation: Any, dim: int, bias: bool, dtype: torch.dtype, sequence_parallel: bool,
    uneven: bool,
) -> None:  # fmt: skip
    rank, world_size = group.rank(), group.size()
    name = f"{activation}, dim {dim}, bias {bias}, sequence parallel {sequence_parallel}, uneven {uneven}"
    hidden, intermediate, length = 6, 13, 7 if uneven else 12
    features = lopsided(intermediate, world_size) if uneven else chunk_sizes(intermediate, world_size)
    rows = lopsided(length, world_size) if uneven else even_sizes(length, world_size)
    torch.manual_seed(8)
    layer = fusedtp.ParallelMLP(
        hidden, intermediate, bias, dtype=dtype, activation=activation, group=group, sequence_dim=dim,
        sequence_parallel=sequence_parallel, feature_sizes=features if uneven else None,
        sequence_sizes=rows if uneven and sequence_parallel else None, schedule="decomposed",
    )  # fmt: skip
    torch.manual_seed(8)
    dense = DenseMLP(hidden, intermediate, bias, activation, dtype)
    along, shape = dim if sequence_parallel else None, (length, BATCH) if dim == 0 else (BATCH, length)
    cuts = {"x": along, "y": along, "down_proj.weight": 1, "down_proj.bias": None}
    cuts |= {f"{name}.{key}": dim for name, dim in (("up_proj", 0), ("gate_up_proj", 1)) for key in ("weight", "bias")}
    # Forward and backward have two matmuls each, and errors pass through the activation between them.
    against(
        group, name, layer, dense, lambda of_grads: shards(dense, rank, features, grad=of_grads), cuts,
        {dim: rows, None: features}, [(*shape, hidden)] * 2, 4,
    )  # fmt: skip


@pytest.mark.parametrize(("dtype", "world_size"), spread([torch.float64, torch.float32], [1, 2, 3, 4]), ids=str)
@on_ranks()
def test_mlp_against_the_unsharded_one(group: ProcessGroup, world_size: int, dtype: torch.dtype) -> None:
    flags = (True, False)
    every = list(itertools.product(("gelu", "swiglu"), (0, 1), flags, flags, flags))
    for activation, dim, bias, *rest in every if LARGE else every[world_size::5]:
        mlp(group, activation, dim, bias, dtype, *rest)


def counted(group: ProcessGroup) -> list[tuple[str, int]]:
    """Return the ops of one SwiGLU forward and backward in order, with the number of their products."""
    seen: list[tuple[str, int]] = []
    run = BoundTask.run

    def seen_running(self: BoundTask, operands: Any) -> list[Tensor]:
        seen.append((self.task.op.name, 1 if self.task.epilogue.keeps else len(self.task.results(group.rank()))))
        return run(self, operands)

    with mock.patch.object(BoundTask, "run", seen_running):
        layer = fusedtp.ParallelMLP(8, 12, False, activation="swiglu", group=group)
        layer(torch.randn(2, 3, 8, requires_grad=True)).sum().backward()
    return seen


def test_swiglu_gathers_its_input_once_each_way(pool: RankPool) -> None:
    """Backward gathers dy once, and x once for both dw, beside the scatter of the sum of both dx."""
    forward = [("all_gather_matmul", 1), ("matmul_reduce_scatter", 1)]
    backward = [("all_gather_matmul", 2), ("matmul_reduce_scatter", 3)]
    assert pool.run(counted, world_size=4) == [forward + backward] * 4


@on_ranks(2)
def test_sequence_sizes_may_change_between_calls(group: ProcessGroup) -> None:
    layer = fusedtp.ParallelMLP(8, 12, activation="swiglu", group=group)
    layer.sequence_sizes = (3, 1)
    assert layer.gate_up_proj.sequence_sizes == layer.down_proj.sequence_sizes == layer.sequence_sizes == (3, 1)
    with pytest.raises(ValueError, match="sequence_sizes"):
        layer.sequence_sizes = (3, 1, 4)
    assert layer(torch.randn((3, 1)[group.rank()], 8)).shape == ((3, 1)[group.rank()], 8)
