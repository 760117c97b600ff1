"""Evaluation between training steps: train and eval by turns, at growing and shrinking sizes, in any order.

State that an op keeps for later calls (memory of the group, views, tables) must not depend on the mode of the first
call: a tensor made under torch.inference_mode may neither be written nor saved for backward later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

import fusedtp
from fusedtp import reference

from .harness import on_ranks, spread

HIDDEN, INNER = 12, 20
# Rows on every rank and the mode. An arena begins with halves of 64 KiB, too small for a call on 900 rows.
TURNS = [
    (4, "inference"), (4, "train"), (900, "inference"), (2, "train"), (900, "train"), (1200, "no_grad"), (3, "eval"),
    (1200, "train"), (1500, "inference"), (1500, "no_grad"), (1500, "train"), (4, "train"),
]  # fmt: skip
MODES: dict[str, Callable[[], Any]] = {
    "train": contextlib.nullcontext,
    "eval": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}

# The split dim of each weight, up [INNER, HIDDEN] and down [HIDDEN, INNER].
DIMS = {
    "functions": (0, 1),
    "all-reduce and collectives": (0, 1),
    "sharded_matmul": (1, 0),
    "FSDPLinear": (0, 0),
    "layers": (0, 1),
    "styles": (0, 1),
}
pytestmark = pytest.mark.usefixtures("destroyed_on_all_ranks")


def part(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].to(torch.float32, copy=True)


class By(nn.Module):
    """A module of two weights and the function that multiplies by them."""

    def __init__(self, run: Callable[[Tensor, Tensor, Tensor], Tensor], *shapes: tuple[int, int]) -> None:
        super().__init__()
        self.run, self.weights = run, nn.ParameterList(torch.empty(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, *self.weights)


def made(kind: str, group: ProcessGroup, schedule: str) -> nn.Module:
    """Make a module of both matmuls of this rank's rows, with weights split along DIMS."""
    n, options = group.size(), {"group": group, "schedule": schedule}
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))

    def functions(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return fusedtp.linear_reduce_scatter(fusedtp.all_gather_linear(x, up, **options), down, **options)

    def reduced(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        whole = fusedtp.linear_all_reduce(fusedtp.all_gather(x, **options) @ up.t(), down, **options)
        # The value is an n-th of the whole and the gradient that of the whole, as every rank has the same whole tensor.
        return fusedtp.reduce_scatter(whole - whole.detach() * (1 - 1 / n), **options)

    def sharded(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        h = fusedtp.sharded_matmul(x, up.t(), "[M_X, K] @ [K_X, N] -> [M_X, N]", mesh, schedule=schedule)
        return fusedtp.sharded_matmul(h, down.t(), "[M_X, K] @ [K, N_X] -> [M_X, N]", mesh, schedule=schedule)

    if kind == "sharded_matmul":
        return By(sharded, (INNER, HIDDEN // n), (HIDDEN // n, INNER))
    if kind in ("functions", "all-reduce and collectives"):
        return By(functions if kind == "functions" else reduced, (INNER // n, HIDDEN), (HIDDEN, INNER // n))
    if kind == "styles":
        model = nn.Sequential(nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(INNER, HIDDEN, bias=False))
        into = fusedtp.FusedColwiseParallel(input_layouts=Shard(0), schedule=schedule)
        out = fusedtp.FusedRowwiseParallel(output_layouts=Shard(0), schedule=schedule)
        return parallelize_module(model, mesh, {"0": into, "1": out})
    first, second = (
        (fusedtp.FSDPLinear, fusedtp.FSDPLinear)
        if kind == "FSDPLinear"
        else (fusedtp.ColumnParallelLinear, fusedtp.RowParallelLinear)
    )
    return nn.Sequential(first(HIDDEN, INNER, False, **options), second(INNER, HIDDEN, False, **options))


def local(value: Any) -> Tensor:
    out: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return out


def check(out: Tensor, ref: Tensor, name: str) -> None:
    """Compare with the error of two matmuls in a row in each direction, as in test_layers."""
    ref = ref.detach()
    allowed = 4 * 3000**1.5 * torch.finfo(out.dtype).eps * float(ref.abs().max())
    reference.check(out.detach(), ref, torch.full_like(ref, allowed), name)


def alternate(group: ProcessGroup, kind: str, schedule: str) -> None:
    fusedtp.destroy(group)
    torch.manual_seed(3)
    weights = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((INNER, HIDDEN), (HIDDEN, INNER))]
    model, dims = made(kind, group, schedule), DIMS[kind]
    with torch.no_grad():
        for parameter, weight, dim in zip(model.parameters(), weights, dims, strict=True):
            local(parameter).copy_(part(weight, dim, group))
    for turn, (rows, mode) in enumerate(TURNS):
        name = f"{kind}, {schedule}, turn {turn}: {mode}, {rows} rows"
        x, dy = torch.randn(2, rows * group.size(), HIDDEN, dtype=torch.float64)
        x.requires_grad_()
        y_ref = F.linear(F.linear(x, weights[0]), weights[1])
        x_part = part(x.detach(), 0, group).requires_grad_(mode == "train")
        with MODES[mode]():
            y = model.train(mode == "train")(x_part)
        check(y, y_ref.chunk(group.size())[group.rank()], f"y of {name}")
        if mode != "train":
            continue
        grads = torch.autograd.grad(y_ref, (x, *weights), dy)
        got = torch.autograd.grad(y, (x_part, *model.parameters()), part(dy, 0, group))
        for grad, ref, dim in zip(got, grads, (0, *dims), strict=True):
            check(local(grad), ref.chunk(group.size(), dim)[group.rank()], f"gradient of {name}")


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_train_and_eval_by_turns(group: ProcessGroup, world_size: int) -> None:
    # With one rank all schedules are the same.
    schedules = ("unfused", "decomposed", "auto") if world_size > 1 else ("auto",)
    for kind, schedule in spread(list(DIMS), schedules):
        alternate(group, kind, schedule)
