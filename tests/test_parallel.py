"""The styles on nn.Linear: every layout, every gradient and its placement."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import fusedtp
from fusedtp import reference
from fusedtp.bench.ranks import RankPool

from .harness import LARGE, mesh_of, on_ranks, spread

REPLICATE = Replicate()
# (input, output) of each style; None is the default.
COLWISE: list[tuple[Placement | None, Placement | None]] = [
    (None, None), (Shard(0), None), (Shard(1), None), (Shard(2), None), (Shard(1), REPLICATE), (None, Shard(1)),
]  # fmt: skip
ROWWISE: list[tuple[Placement | None, Placement | None]] = [
    (None, None), (None, Shard(0)), (None, Shard(1)), (None, Shard(2)), (REPLICATE, None), (REPLICATE, Shard(1)),
]  # fmt: skip
STYLES = {
    "colwise": (fusedtp.FusedColwiseParallel, COLWISE, REPLICATE, Shard(2), {"weight": Shard(0), "bias": Shard(0)}),
    "rowwise": (fusedtp.FusedRowwiseParallel, ROWWISE, Shard(2), REPLICATE, {"weight": Shard(1), "bias": REPLICATE}),
}


def check(out: Tensor, ref: Tensor, name: str) -> None:
    """Compare float64 with float64: sums of at most a few hundred terms of size 1 to 10."""
    reference.check(out, ref.detach(), torch.full_like(ref, 1e-11), name)


def styled(
    group: ProcessGroup, kind: str, layouts: int, uneven: bool, bias: bool, given_dtensor: bool, use_local_output: bool
) -> None:
    """Compare one linear under one plan, in float64, with the plain linear."""
    style, table, default_in, default_out, placements = STYLES[kind]
    input_layouts, output_layouts = table[layouts]
    into, out = input_layouts or default_in, output_layouts or default_out
    name = (
        f"{kind} {into} -> {out}, uneven {uneven}, bias {bias}, DTensor in {given_dtensor}, out {not use_local_output}"
    )
    mesh = mesh_of(group)
    # Uneven as DTensor splits: 5 over 4 ranks is 2, 2, 1, 0.
    shape, num_out = ((5, 7, 10), 9) if uneven else ((4, 12, 8), 12)
    torch.manual_seed(7)
    dense = nn.Linear(shape[-1], num_out, bias, dtype=torch.float64)
    x, dy = torch.randn(shape, dtype=torch.float64), torch.randn(*shape[:-1], num_out, dtype=torch.float64)
    x_ref = x.clone().requires_grad_()
    y_ref = dense(x_ref)
    module = parallelize_module(
        copy.deepcopy(dense), mesh,
        style(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output),
    )  # fmt: skip
    assert list(module.state_dict()) == list(dense.state_dict())
    y_ref.backward(dy)
    given: Tensor = distribute_tensor(x, mesh, [into])
    given = (given if given_dtensor else given.to_local()).detach().requires_grad_()  # type: ignore[attr-defined]
    y = module(given)
    dy_here, y_here = distribute_tensor(dy, mesh, [out]), distribute_tensor(y_ref.detach(), mesh, [out])
    assert isinstance(y, DTensor) is not use_local_output
    if isinstance(y, DTensor):
        assert y.placements == (out,), name
        check(y.full_tensor(), y_ref, f"whole y of {name}")
        y.backward(dy_here)
    else:
        check(y, y_here.to_local(), f"y of {name}")
        y.backward(dy_here.to_local())
    dx = given.grad
    assert dx is not None
    dx_ref = distribute_tensor(x_ref.grad, mesh, [into])
    if isinstance(dx, DTensor):
        check(dx.full_tensor(), dx_ref.full_tensor(), f"dx of {name}")
    else:
        check(dx, dx_ref.to_local(), f"dx of {name}")
    for key, p in module.named_parameters():
        assert isinstance(p, DTensor)
        assert p.placements == (placements[key],), f"{key} of {name}"
        assert isinstance(p.grad, DTensor)
        # A gradient that is a partial sum would be right after full_tensor(), but wrong in an optimizer.
        assert p.grad.placements == p.placements, f"d {key} of {name}"
        grad = dense.get_parameter(key).grad
        assert grad is not None
        check(p.grad.full_tensor(), grad, f"d {key} of {name}")
        check(p.grad.to_local(), distribute_tensor(grad, mesh, p.placements).to_local(), f"local d {key} of {name}")


@pytest.mark.parametrize(("uneven", "world_size"), spread([False, True], [1, 4, 2]))
@pytest.mark.parametrize("kind", STYLES)
@on_ranks()
def test_every_layout(group: ProcessGroup, kind: str, uneven: bool, world_size: int) -> None:
    flags = (False, True)
    every = list(itertools.product(range(6), flags, flags, flags))
    # Each number of ranks has a third of the cases.
    for layouts, bias, given_dtensor, use_local_output in every if LARGE else every[world_size // 2 :: 3]:
        into = STYLES[kind][1][layouts][0]
        # A plain sharded input is assumed to have the same length on every rank, as in torch.
        if not (uneven and not given_dtensor and isinstance(into, Shard)):
            styled(group, kind, layouts, uneven, bias, given_dtensor, use_local_output)


@on_ranks(2)
def test_modules_are_changed_in_place(group: ProcessGroup) -> None:
    """Hooks stay, a copy works, and torch.compile finds no graph break."""
    mesh, wide = mesh_of(group), fusedtp.FusedColwiseParallel(input_layouts=Shard(1))
    plan: dict[str, Any] = {"0": wide, "2": fusedtp.FusedRowwiseParallel(output_layouts=Shard(1))}
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)).double()
    calls: list[torch.Size] = []
    model[0].register_forward_hook(lambda module, args, out: calls.append(out.shape))
    first = model[0]
    assert parallelize_module(model, mesh, plan) is model
    assert model[0] is first
    assert isinstance(first, nn.Linear)
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    y = model(x)
    assert calls == [torch.Size((2, 4 * group.size(), 12 // group.size()))]
    assert torch.equal(copy.deepcopy(model)(x), y)
    model[0]._forward_hooks.clear()
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), y)
    torch._dynamo.reset()


@on_ranks(1)
def test_a_tied_weight_is_told(group: ProcessGroup) -> None:
    mesh = mesh_of(group)
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False), "up": nn.Linear(4, 8)})
    model["head"].weight = model["embed"].weight
    # A weight is not tied because a dictionary or an optimizer refers to it too.
    known, optimizer = dict(model["up"].named_parameters()), torch.optim.SGD(model.parameters())
    parallelize_module(model, mesh, {"up": fusedtp.FusedColwiseParallel()})
    with pytest.warns(UserWarning, match=r"FusedColwiseParallel: the weight of this nn.Linear is tied to another"):
        parallelize_module(model, mesh, {"head": fusedtp.FusedColwiseParallel()})
    assert model["embed"].weight is optimizer.param_groups[0]["params"][0]
    assert len(known) == 2


def documented(group: ProcessGroup, code: str) -> tuple[Tensor, Tensor]:
    """Return this rank's rows from the code, and those of the same model on one rank."""
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    first, after = 3 * group.rank(), 3 * group.rank() + 3
    scope: dict[str, Any] = {"mesh": {"tp": mesh_of(group)}, "x": rows[first:after]}
    exec(code, scope)
    dense: dict[str, Any] = {"x": rows}
    exec(re.sub(r"(?m)^parallelize_module\(.*\n", "", code), dense)
    return scope["y"].detach(), dense["y"][first:after].detach()


def test_the_plans_of_the_document_run(pool: RankPool) -> None:
    document = Path(__file__).parent.parent / "docs" / "layers.md"
    plans = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    assert len(plans) == 2
    for code in plans:
        for ours, expected in pool.run(documented, code, world_size=2):
            torch.testing.assert_close(ours, expected)
