"""Evaluation in between: train and eval by turns, at sizes that grow and shrink, whatever comes first.

What an op keeps for later calls (memory of the group, views of it, tables) must not depend on the mode in which the
first of them was made: a tensor made under torch.inference_mode may neither be written nor saved for backward later.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
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
from fusedtp.bench.ranks import RankPool

HIDDEN, INNER = 12, 20
# Rows on every rank and the mode: an arena begins with halves of 64 KiB, which a call on 900 rows does not fit into.
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

# Of x [rows on all ranks, HIDDEN] and the weights up [INNER, HIDDEN] and down [HIDDEN, INNER], whole and in float64.
Make = Callable[[ProcessGroup, str, Tensor, Tensor], tuple[Callable[[Tensor], Tensor], Sequence[Tensor]]]


def part(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].to(torch.float32, copy=True)


def functions(group: ProcessGroup, schedule: str, up: Tensor, down: Tensor) -> Any:
    ours = part(up, 0, group).requires_grad_(), part(down, 1, group).requires_grad_()
    options: dict[str, Any] = {"group": group, "schedule": schedule}

    def call(x: Tensor) -> Tensor:
        h = fusedtp.all_gather_linear(x, ours[0], **options)
        return fusedtp.linear_reduce_scatter(h, ours[1], **options)

    return call, ours


class Own(torch.autograd.Function):
    """This rank's rows of what is whole."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: ProcessGroup, schedule: str) -> Tensor:
        ctx.given = group, schedule
        return fusedtp.reduce_scatter(whole, group=group, schedule=schedule) / group.size()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group, schedule = ctx.given
        return fusedtp.all_gather(grad, group=group, schedule=schedule), None, None


def reduced(group: ProcessGroup, schedule: str, up: Tensor, down: Tensor) -> Any:
    """The same by a matmul + all-reduce and by collectives alone."""
    ours = part(up, 0, group).requires_grad_(), part(down, 1, group).requires_grad_()
    options: dict[str, Any] = {"group": group, "schedule": schedule}

    def call(x: Tensor) -> Tensor:
        h = fusedtp.all_gather(x, **options) @ ours[0].t()
        whole = fusedtp.linear_all_reduce(h, ours[1], **options)
        # Its gradient must be whole on every rank: all gather the other ranks' rows of dy.
        return Own.apply(whole, group, schedule)  # type: ignore[no-any-return]

    return call, ours


def sharded(group: ProcessGroup, schedule: str, up: Tensor, down: Tensor) -> Any:
    """Both weights split along what they contract, gathered."""
    ours = part(up, 1, group).t().contiguous().requires_grad_(), part(down, 0, group).t().contiguous().requires_grad_()
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))

    def call(x: Tensor) -> Tensor:
        h = fusedtp.sharded_matmul(x, ours[0], "[M_X, K] @ [K_X, N] -> [M_X, N]", mesh, schedule=schedule)
        return fusedtp.sharded_matmul(h, ours[1], "[M_X, K] @ [K, N_X] -> [M_X, N]", mesh, schedule=schedule)

    return call, ours


def fully_sharded(group: ProcessGroup, schedule: str, up: Tensor, down: Tensor) -> Any:
    model = nn.Sequential(*(
        fusedtp.FSDPLinear(*reversed(w.shape), bias=False, group=group, schedule=schedule) for w in (up, down)
    ))  # fmt: skip
    return model, filled(model, (up, down), (0, 0), group)


def layers(group: ProcessGroup, schedule: str, up: Tensor, down: Tensor) -> Any:
    options: dict[str, Any] = {"bias": False, "group": group, "schedule": schedule}
    model = nn.Sequential(
        fusedtp.ColumnParallelLinear(HIDDEN, INNER, **options), fusedtp.RowParallelLinear(INNER, HIDDEN, **options)
    )
    return model, filled(model, (up, down), (0, 1), group)


def styles(group: ProcessGroup, schedule: str, up: Tensor, down: Tensor) -> Any:
    model = nn.Sequential(nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(INNER, HIDDEN, bias=False))
    into = {"input_layouts": Shard(0), "schedule": schedule}
    out = {"output_layouts": Shard(0), "schedule": schedule}
    plan: dict[str, Any] = {"0": fusedtp.FusedColwiseParallel(**into), "1": fusedtp.FusedRowwiseParallel(**out)}
    model = parallelize_module(model, DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)), plan)  # type: ignore[assignment]
    return model, filled(model, (up, down), (0, 1), group)


def local(value: Any) -> Tensor:
    out: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return out


@torch.no_grad()
def filled(
    model: nn.Module, weights: Sequence[Tensor], dims: Sequence[int], group: ProcessGroup
) -> Sequence[nn.Parameter]:
    parameters = list(model.parameters())
    for parameter, weight, dim in zip(parameters, weights, dims, strict=True):
        local(parameter).copy_(part(weight, dim, group))
    return parameters


MAKES: dict[str, tuple[Make, tuple[int, int], bool]] = {
    "functions": (functions, (0, 1), False),
    "all-reduce and collectives": (reduced, (0, 1), False),
    "sharded_matmul": (sharded, (1, 0), True),
    "FSDPLinear": (fully_sharded, (0, 0), False),
    "layers": (layers, (0, 1), False),
    "styles": (styles, (0, 1), False),
}


def check(out: Tensor, ref: Tensor, name: str) -> None:
    """Two matmuls in a row each way, as in test_layers."""
    ref = ref.detach()
    allowed = 4 * 3000**1.5 * torch.finfo(out.dtype).eps * float(ref.abs().max())
    reference.check(out.detach(), ref, torch.full_like(ref, allowed), name)


def alternate(group: ProcessGroup, kind: str, schedule: str, turns: list[tuple[int, str]]) -> None:
    make, dims, transposed = MAKES[kind]
    fusedtp.destroy(group)
    torch.manual_seed(3)
    weights = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((INNER, HIDDEN), (HIDDEN, INNER))]
    call, ours = make(group, schedule, *(w.detach() for w in weights))
    for turn, (rows, mode) in enumerate(turns):
        name = f"{kind}, {schedule}, turn {turn}: {mode}, {rows} rows"
        x, dy = torch.randn(2, rows * group.size(), HIDDEN, dtype=torch.float64)
        x.requires_grad_()
        y_ref = F.linear(F.linear(x, weights[0]), weights[1])
        x_part = part(x.detach(), 0, group).requires_grad_(mode == "train")
        if isinstance(call, nn.Module):
            call.train(mode == "train")
        with MODES[mode]():
            y = call(x_part)
        check(y, y_ref.chunk(group.size())[group.rank()], f"y of {name}")
        if mode != "train":
            continue
        grads = torch.autograd.grad(y_ref, (x, *weights), dy)
        got = torch.autograd.grad(y, (x_part, *ours), part(dy, 0, group))
        check(got[0], grads[0].chunk(group.size())[group.rank()], f"dx of {name}")
        for grad, ref, dim in zip(got[1:], grads[1:], dims, strict=True):
            ref = ref.chunk(group.size(), dim)[group.rank()]
            check(local(grad), ref.t() if transposed else ref, f"d weight of {name}")


def alternated(group: ProcessGroup, schedules: Sequence[str], turns: list[tuple[int, str]]) -> None:
    for kind, schedule in itertools.product(MAKES, schedules):
        alternate(group, kind, schedule, turns)


@pytest.fixture(autouse=True)
def _destroyed(pool: RankPool) -> Iterator[None]:
    yield
    pool.run(destroy)


def destroy(group: ProcessGroup) -> None:
    fusedtp.destroy()


@pytest.mark.parametrize("world_size", [1, 2])
def test_train_and_eval_by_turns(pool: RankPool, world_size: int) -> None:
    pool.run(alternated, ["unfused", "decomposed", "auto"], TURNS, world_size=world_size)
