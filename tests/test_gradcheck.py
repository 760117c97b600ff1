"""Gradients of every named sharding and every linear: against finite differences, and on `fused` within derived bounds.

A sharded op is made a function of whole tensors: each rank takes its shard, runs the op and joins the results. Both
ends follow the one backward rule, that a gradient has its tensor's sharding: what is split is joined from the ranks,
what is whole is whole on every rank already. So gradcheck, run in step on all ranks, compares the op's own gradients,
sums over ranks included, with finite differences of the joined result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import fusedtp
from fusedtp import reference
from fusedtp.bench.ranks import RankPool
from fusedtp.explain import NAMED
from fusedtp.schedules import decomposed
from fusedtp.sharding.notation import parse

from .harness import LARGE, spread

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """The dims of x, w, bias and y as they are stored, `_X` where ranks split them; bias is "" for none.

    function: its name in fusedtp, or a spec for sharded_matmul. sized: the dim whose lengths on every rank it is told.
    """

    function: str
    x: str
    w: str
    bias: str
    y: str
    sized: str = ""
    options: Mapping[str, int] = field(default_factory=dict)

    def call(
        self, x: Tensor, w: Tensor, bias: Tensor | None, splits: Mapping[str, Sizes], group: ProcessGroup, schedule: str
    ) -> Tensor:
        if "@" in self.function:
            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))
            sizes = {name: splits[name] for dims in (self.x, self.w, self.y) for name in split_names(dims)}
            return fusedtp.sharded_matmul(x, w, self.function, mesh, sizes=sizes, schedule=schedule)
        sizes = {"sizes": splits[self.sized]} if self.sized else {}
        out: Tensor = getattr(fusedtp, self.function)(
            x, w, bias, group=group, schedule=schedule, **self.options, **sizes
        )
        return out


def split_names(dims: str) -> list[str]:
    return [name.removesuffix("_X") for name in dims.split() if name.endswith("_X")]


def named(text: str) -> Layer:
    spec = parse(text)
    return Layer(
        text, *(" ".join(map(str, tensor.dims)) for tensor in (spec.a, spec.b)), "", " ".join(map(str, spec.c.dims))
    )


LAYERS = {
    "all_gather_linear": Layer("all_gather_linear", "S_X B K", "N_X K", "N_X", "S B N_X", "S"),
    "all_gather_linear, middle": Layer(
        "all_gather_linear", "B S_X K", "N_X K", "N_X", "B S N_X", "S", {"gather_dim": 1}
    ),
    "all_gather_linear, features": Layer(
        "all_gather_linear", "B S K_X", "N_X K", "N_X", "B S N_X", "K", {"gather_dim": -1}
    ),
    "linear_reduce_scatter": Layer("linear_reduce_scatter", "S B K_X", "N K_X", "N", "S_X B N", "S"),
    "linear_reduce_scatter, middle": Layer(
        "linear_reduce_scatter", "B S K_X", "N K_X", "N", "B S_X N", "S", {"scatter_dim": 1}
    ),
    "linear_reduce_scatter, features": Layer(
        "linear_reduce_scatter", "B S K_X", "N K_X", "N", "B S N_X", "N", {"scatter_dim": -1}
    ),
    "linear_all_reduce": Layer("linear_all_reduce", "B S K_X", "N K_X", "N", "B S N"),
    "fsdp_linear": Layer("fsdp_linear", "S_X B K", "N_X K", "N", "S_X B N", "N"),
    **{name: named(text) for name, text in NAMED.items()},
}


def roles(layer: Layer) -> tuple[list[str], str, str]:
    """The names of the rows, of the contraction and of the columns."""
    *rows, k = (name.removesuffix("_X") for name in layer.x.split())
    return rows, k, layer.y.split()[-1].removesuffix("_X")


def lopsided(lengths: Mapping[str, int], world_size: int) -> dict[str, Sizes]:
    """Every dim on the ranks: rank 0 has half of it, each further one half of the rest, the last nothing if it can."""
    splits = {}
    for name, length in lengths.items():
        sizes, rest = [], length
        for _ in range(world_size - 1):
            sizes.append(-(-rest // 2))
            rest -= sizes[-1]
        splits[name] = (*sizes, rest)
    return splits


def all_on_the_last(lengths: Mapping[str, int], world_size: int) -> dict[str, Sizes]:
    """The other ranks have nothing."""
    return {name: (*([0] * (world_size - 1)), length) for name, length in lengths.items()}


SPLITS = {"lopsided": lopsided, "all on the last": all_on_the_last}


def whole_operands(layer: Layer, lengths: Mapping[str, int]) -> list[Tensor]:
    """x, w, bias and dy in float64, the same on every rank; bias is there even where the layer has none."""
    random = torch.Generator().manual_seed(2)
    n = roles(layer)[2]
    texts = (layer.x, layer.w, layer.bias or n, layer.y)
    shapes = [[lengths[name.removesuffix("_X")] for name in text.split()] for text in texts]
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def shard(whole: Tensor, dims: str, splits: Mapping[str, Sizes], rank: int) -> Tensor:
    for i, name in enumerate(dims.split()):
        if name.endswith("_X"):
            whole = reference.chunk(whole, i, rank, splits[name.removesuffix("_X")])
    return whole


def joined(part: Tensor, dims: str, splits: Mapping[str, Sizes], group: ProcessGroup) -> Tensor:
    """The whole of what ranks have split, summed from shards among zeros; what is whole as it is."""
    for i, name in enumerate(dims.split()):
        if name.endswith("_X"):
            sizes = splits[name.removesuffix("_X")]
            whole = part.new_zeros([*part.shape[:i], sum(sizes), *part.shape[i + 1 :]])
            reference.chunk(whole, i, group.rank(), sizes).copy_(part)
            dist.all_reduce(whole, group=group)
            return whole
    return part.clone()


class Take(torch.autograd.Function):
    """The own shard of a tensor that every rank has whole."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, *layout: Any) -> Tensor:
        ctx.layout = layout
        dims, splits, group = layout
        return shard(whole, dims, splits, group.rank()).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return joined(grad, *ctx.layout), None, None, None


class Join(torch.autograd.Function):
    """The whole tensor, on every rank, of the ranks' shards."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, *layout: Any) -> Tensor:
        ctx.layout = layout
        return joined(part, *layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dims, splits, group = ctx.layout
        return shard(grad, dims, splits, group.rank()).clone(), None, None, None


def _finite_differences(group: ProcessGroup, names: Sequence[str], schedules: Sequence[str]) -> None:
    for i, name in enumerate(names):
        layer = LAYERS[name]
        rows, k, n = roles(layer)
        lengths = dict(zip(rows, (3, 2) if len(rows) == 2 else (3,), strict=True)) | {k: 2, n: 3}
        splits = lopsided(lengths, group.size())
        x, w, bias, _ = whole_operands(layer, lengths)
        inputs = [each.requires_grad_() for each in ((x, w, bias) if layer.bias else (x, w))]
        # One program makes the gradients of all schedules, which take turns.
        for schedule in schedules if LARGE else [schedules[i % len(schedules)]]:

            def run(*whole: Tensor, layer: Layer = layer, splits: Any = splits, schedule: str = schedule) -> Tensor:
                texts = (layer.x, layer.w, layer.bias)
                x, w, *bias = (
                    Take.apply(each, dims, splits, group) for each, dims in zip(whole, texts, strict=False)
                )  # fmt: skip
                y = layer.call(x, w, bias[0] if bias else None, splits, group, schedule)
                return Join.apply(y, layer.y, splits, group)

            # With its default of no tolerance for results that differ, it also runs every backward twice for its bits.
            assert torch.autograd.gradcheck(run, inputs), f"{name}, {schedule}"


def finite_differences(group: ProcessGroup, names: Sequence[str], schedules: Sequence[str]) -> None:
    # Chunk by chunk: few rows would be multiplied at once.
    with mock.patch.object(decomposed, "FEW_ROWS", 0):
        _finite_differences(group, names, schedules)


@pytest.mark.parametrize(("kind", "world_size"), spread(["named shardings", "linears"], [3, 2]))
def test_finite_differences(pool: RankPool, kind: str, world_size: int) -> None:
    names = [name for name in LAYERS if (name in NAMED) == (kind == "named shardings")]
    pool.run(finite_differences, names, ["unfused", "decomposed"], world_size=world_size, timeout=400.0)


def flattened(tensor: Tensor, dims: str, rows: Sequence[str], cols: Sequence[str]) -> Tensor:
    names = [name.removesuffix("_X") for name in dims.split()]
    ordered = tensor.permute([names.index(name) for name in (*rows, *cols)])
    return ordered.reshape(math.prod(ordered.shape[: len(rows)]), math.prod(ordered.shape[len(rows) :]))


def references(
    layer: Layer, operands: Sequence[Tensor], splits: Mapping[str, Sizes], dtype: torch.dtype, sum_dtype: torch.dtype
) -> dict[str, tuple[Tensor, Tensor, str]]:
    """y, dx, dw and db: the whole float64 result, the error allowed, and how ranks split it.

    A sum over ranks cuts the contraction where both operands are split along it; else one operand is gathered.
    """
    x, w, bias, dy = operands
    rows, k, n = roles(layer)
    # The rows' split dim in front: the ranks' parts of the rows follow each other.
    rows.sort(key=lambda name: f"{name}_X" not in (layer.x + " " + layer.y).split())
    x2, w2 = flattened(x, layer.x, rows, [k]), flattened(w, layer.w, [k], [n])
    dy2 = flattened(dy, layer.y, rows, [n])
    ones = torch.ones(1, len(x2), dtype=torch.float64)
    per_row = len(x2) // sum(splits[rows[0]])
    row_sizes = tuple(size * per_row for size in splits[rows[0]])

    def cut(name: str, *both: str) -> Sizes | None:
        sizes = row_sizes if name == rows[0] else splits[name]
        return sizes if all(f"{name}_X" in dims.split() for dims in both) else None

    def whole(
        a: Tensor, b: Tensor, k_sizes: Sizes | None, bias: Tensor | None, names: list[str], dims: str
    ) -> tuple[Tensor, Tensor, str]:
        allowed = reference.bound(a, b, dtype, k_sizes=k_sizes, bias=bias, sum_dtype=sum_dtype)
        order = [names.index(name.removesuffix("_X")) for name in dims.split()]
        lengths = [sum(splits[name]) for name in names]
        ref, allowed = (each.view(lengths).permute(order) for each in (reference.matmul(a, b, bias), allowed))
        return ref, allowed, dims

    found = {
        "y": whole(x2, w2, cut(k, layer.x, layer.w), bias if layer.bias else None, [*rows, n], layer.y),
        "dx": whole(dy2, w2.t(), cut(n, layer.y, layer.w), None, [*rows, k], layer.x),
        "dw": whole(x2.t(), dy2, cut(rows[0], layer.x, layer.y), None, [k, n], layer.w),
    }
    if layer.bias:
        found["db"] = whole(ones, dy2, cut(rows[0], layer.y), None, [n], layer.bias)
    return found


def _within_bounds(group: ProcessGroup, split: str, schedule: str, dtype: torch.dtype) -> None:
    """Also with dy as autograd hands it down: transposed, or one number expanded."""
    layers = list(LAYERS.items())
    if schedule == "fused" and split == "lopsided" and not LARGE:
        # Interpreted kernels are slow: two ranks run one half of the layers, three ranks the other.
        layers = layers[group.size() % 2 :: 2]
    for i, (name, layer) in enumerate(layers):
        rank = group.rank()
        rows, k, n = roles(layer)
        lengths = dict(zip(rows, (21, 4) if len(rows) == 2 else (67,), strict=True)) | {k: 70, n: 69}
        splits = SPLITS[split](lengths, group.size())
        x, w, bias, dy = (each.to(dtype) for each in whole_operands(layer, lengths))
        kinds = ("transposed", "expanded")
        for kind in kinds if schedule != "fused" else kinds[i % 2 :][:1]:
            dy = dy if kind == "transposed" else dy[(0,) * dy.ndim].expand_as(dy)
            texts = (layer.x, layer.w, layer.bias or n)
            shards = [shard(each, dims, splits, rank).clone() for each, dims in zip((x, w, bias), texts, strict=True)]
            x_shard, w_shard, bias_shard = (each.requires_grad_() for each in shards)
            y = layer.call(x_shard, w_shard, bias_shard if layer.bias else None, splits, group, schedule)
            part = shard(dy, layer.y, splits, rank)
            y.backward(part.mT.contiguous().mT if kind == "transposed" else part)
            found = {"y": y, "dx": x_shard.grad, "dw": w_shard.grad, "db": bias_shard.grad}
            sum_dtype = dtype if schedule == "unfused" else torch.float32
            for each, (ref, allowed, dims) in references(layer, (x, w, bias, dy), splits, dtype, sum_dtype).items():
                out, of = found[each], f"{each} of {name}, dy {kind}"
                assert out is not None, of
                assert out.dtype == dtype, of
                reference.check(out, shard(ref, dims, splits, rank), shard(allowed, dims, splits, rank), of)


def within_bounds(group: ProcessGroup, split: str, schedule: str, dtype: torch.dtype) -> None:
    """Two ranks as few rows are, at once; three chunk by chunk."""
    with mock.patch.object(decomposed, "FEW_ROWS", decomposed.FEW_ROWS if group.size() == 2 else 0):
        _within_bounds(group, split, schedule, dtype)


@pytest.mark.parametrize(("dtype", "world_size"), spread([torch.float32, torch.bfloat16], [2, 3]), ids=str)
@pytest.mark.parametrize("schedule", ["fused", "decomposed", "unfused"])
def test_gradients_within_bounds(pool: RankPool, world_size: int, schedule: str, dtype: torch.dtype) -> None:
    pool.run(within_bounds, "lopsided", schedule, dtype, world_size=world_size, timeout=400.0)


@pytest.mark.parametrize("schedule", ["fused", "decomposed", "unfused"])
def test_gradients_where_one_rank_has_all(pool: RankPool, schedule: str) -> None:
    """Also of a whole bias whose columns are all on one rank: the others must not gather alone."""
    pool.run(within_bounds, "all on the last", schedule, torch.float32, world_size=2, timeout=300.0)
