"""Gradients of every named sharding and every linear against finite differences.

A sharded op is made a function of whole tensors: each rank takes its shard, runs the op and joins the results. Both
ends follow the one backward rule, that a gradient has its tensor's sharding: what is split is joined from the ranks,
what is whole is whole on every rank already. So gradcheck, run in step on all ranks, compares the op's own gradients,
sums over ranks included, with finite differences of the joined result.
"""

from __future__ import annotations

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
