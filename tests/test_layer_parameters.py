"""A layer's parameters and input, used from outside: padded parameters in a checkpoint, shards in functions, and ways
to gather an input.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim.adamw import adamw
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fusedtp
from fusedtp.bench.ranks import RankPool

from .harness import LARGE, on_ranks
from .test_layer_state import HIDDEN, INNER, close, whole


@on_ranks(2)
def test_own_sizes_are_not_loaded_into_others(group: ProcessGroup, tmp_path: Path) -> None:
    """The other layer's longest shard has the same length, so the shapes would fit."""
    torch.manual_seed(8)
    layer, same, other = (
        fusedtp.ColumnParallelLinear(HIDDEN, INNER, group=group, feature_sizes=sizes)
        for sizes in ((7, 2), (7, 2), (2, 7))
    )
    state = layer.state_dict()
    dcp.save({"model": state}, checkpoint_id=tmp_path, process_group=group)
    read = {"model": same.state_dict()}
    dcp.load(read, checkpoint_id=tmp_path, process_group=group)
    same.load_state_dict(read["model"])
    assert torch.equal(same.weight.to_local(), layer.weight.to_local())
    before = {name: whole(value).clone() for name, value in other.state_dict().items()}
    # DCP's error is not an Exception.
    with pytest.raises(BaseException, match=r"Missing key in checkpoint state_dict: model\.padded_sizes_2_7"):
        dcp.load({"model": other.state_dict()}, checkpoint_id=tmp_path, process_group=group)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"padded for shards of \(7, 2\), this layer's are \(2, 7\)"):
            other.load_state_dict(state, strict=strict)
    for name, value in other.state_dict().items():
        assert torch.equal(whole(value), before[name]), f"{name} was overwritten"


@on_ranks(2)
def test_functions_take_a_ranks_own_part_of_a_layer(group: ProcessGroup) -> None:
    torch.manual_seed(9)
    layer = fusedtp.ColumnParallelLinear(HIDDEN, INNER, group=group)
    x = torch.randn(2, HIDDEN)
    layer(x).square().sum().backward()
    expected = {name: each.grad.to_local().clone() for name, each in layer.named_parameters()}
    layer.zero_grad()
    assert layer.bias is not None
    y = fusedtp.all_gather_linear(x, layer.weight.to_local(), layer.bias.to_local(), group=group)
    y.square().sum().backward()
    for name, each in layer.named_parameters():
        assert isinstance(each.grad, DTensor), name
        close(each.grad.to_local(), expected[name], name)
    with pytest.raises(TypeError, match=r"got a DTensor .*weight\.to_local\(\)"):
        fusedtp.all_gather_linear(x, layer.weight, group=group)


def whole_in_each_way(group: ProcessGroup) -> dict[str, Tensor]:
    """Return the gradient of this rank's part of x, for each way to gather x before a layer."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))
    torch.manual_seed(9)
    layers = {
        whole: fusedtp.ColumnParallelLinear(HIDDEN, INNER, group=group, sequence_parallel=not whole)
        for whole in (True, False)
    }
    layers[True].load_state_dict(layers[False].state_dict())
    full = torch.randn(2 * group.size(), HIDDEN)
    found = {}
    for name, of in {
        "gathered": lambda x: layers[True](fusedtp.all_gather(x, group=group)),
        "by the layer": layers[False],
        "as a DTensor": lambda x: layers[True](DTensor.from_local(x, mesh, [Shard(0)]).full_tensor()),
        "by notation": lambda x: layers[True](
            fusedtp.sharded_matmul(x, torch.eye(HIDDEN), "[M_X, K] @ [K, N] -> [M, N]", mesh)
        ),
    }.items():
        x = full[2 * group.rank() :][:2].clone().requires_grad_()
        of(x).square().sum().backward()
        assert x.grad is not None
        found[name] = x.grad
    return found


def test_copies_that_are_gathered_have_a_gradient_each(pool: RankPool) -> None:
    """docs/sharding.md: before a layer that takes a whole tensor, `all_gather` counts the gradient once a rank."""
    for found in pool.run(whole_in_each_way, world_size=3):
        once = found.pop("by the layer")
        close(found.pop("gathered"), 3 * once, "gathered")
        for name, each in found.items():
            close(each, once, name)


class Pair(nn.Module):
    """Two linears with one input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x)], -1)


def by_function(mesh: DeviceMesh, weight: nn.Parameter, rows: slice) -> nn.Module:
    """Return a module that multiplies by this rank's part of a weight."""
    module = nn.Module()
    module.weight = weight
    module.forward = lambda x: fusedtp.all_gather_linear(x, module.weight.to_local()[rows], group=mesh)  # type: ignore[method-assign, operator]
    return module


def holders_of_weights(mesh: DeviceMesh, schedule: str = "auto") -> dict[str, nn.Module]:
    """Return modules of HIDDEN features whose weights are DTensors."""
    options: dict[str, Any] = {"group": mesh, "schedule": schedule}
    uneven = [INNER] + [0] * (mesh.size() - 1)
    layer, frozen = (fusedtp.ColumnParallelLinear(HIDDEN, INNER, **options) for _ in range(2))
    alone = nn.Parameter(distribute_tensor(torch.randn(4, HIDDEN), mesh, [Shard(0)]))
    wide = mesh.size() * HIDDEN
    group = fusedtp.FusedGroup("a", "b", input_layouts=Shard(0), pieces={"b": 1})
    return {
        "column": fusedtp.ColumnParallelLinear(HIDDEN, INNER, **options, activation="relu"),
        "float8": fusedtp.ColumnParallelLinear(HIDDEN, INNER, float8="rowwise", **options),
        "uneven": fusedtp.ColumnParallelLinear(HIDDEN, INNER, feature_sizes=uneven, **options),
        "row": fusedtp.RowParallelLinear(wide, HIDDEN, norm="rms_norm", **options),
        "row, y whole": fusedtp.RowParallelLinear(wide, HIDDEN, norm="layer_norm", sequence_parallel=False, **options),
        "fsdp": fusedtp.FSDPLinear(HIDDEN, INNER, **options),
        "gelu": fusedtp.ParallelMLP(HIDDEN, INNER, **options),
        "swiglu": fusedtp.ParallelMLP(HIDDEN, INNER, activation="swiglu", **options),
        "colwise": parallelize_module(nn.Linear(HIDDEN, INNER), mesh, fusedtp.FusedColwiseParallel()),
        "rowwise": parallelize_module(nn.Linear(wide, INNER), mesh, fusedtp.FusedRowwiseParallel()),
        "group": parallelize_module(Pair(), mesh, {"": group}),
        "function": by_function(mesh, layer.weight, slice(None)),
        "slice": by_function(mesh, layer.weight, slice(1, 2)),
        "frozen": by_function(mesh, frozen.weight.requires_grad_(False), slice(None)),
        "alone": by_function(mesh, alone, slice(None)),
    }


@torch.no_grad()
def in_place(module: nn.Module) -> None:
    for each in module.parameters():
        each.mul_(2)


@torch.no_grad()
def of_parts(module: nn.Module) -> None:
    for each in module.parameters():
        each.to_local().mul_(2)  # type: ignore[operator]


def stepped(module: nn.Module, kind: Any = torch.optim.SGD, **options: Any) -> None:
    for each in module.parameters():
        each.grad = torch.ones_like(each) if each.requires_grad else None
    kind(module.parameters(), lr=0.5, **options).step()


@torch.no_grad()
def by_foreach(module: nn.Module) -> None:
    torch._foreach_mul_([each.detach() for each in module.parameters()], 2.0)


def averaged(module: nn.Module) -> None:
    """Move the parameters by the function of torch's averaged models."""
    own = list(module.parameters())
    get_ema_multi_avg_fn(0.5)(own, [2 * each.detach() for each in own], 1)  # type: ignore[no-untyped-call]


@torch.no_grad()
def by_adamw(module: nn.Module, *, fused: bool) -> None:
    """Step by the function of torch's optimizer, as functional optimizers do."""
    own = list(module.parameters())
    grads, *averages = ([torch.full_like(each, value) for each in own] for value in (1.0, 0.0, 0.0))
    steps = [torch.tensor(1.0) for _ in own]
    adamw(
        own, grads, *averages, [], steps, foreach=not fused, fused=fused, amsgrad=False, beta1=0.9, beta2=0.9, lr=0.1,
        weight_decay=0.0, eps=1e-8, maximize=False,
    )  # fmt: skip


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda module: None,
    "in place": in_place,
    "of parts": of_parts,
    "step": stepped,
    "foreach step": lambda module: stepped(module, foreach=True),
    "fused step": lambda module: stepped(module, torch.optim.AdamW, fused=True),
    "foreach": by_foreach,
    "average": averaged,
    "adamw": partial(by_adamw, fused=False),
    "fused adamw": partial(by_adamw, fused=True),
    "load": lambda module: module.load_state_dict(
        {name: each.clone() for name, each in module.state_dict().items()}
    ),
    "in place, then used": lambda module: (in_place(module), module(torch.randn(4, HIDDEN))),
}  # fmt: skip


@pytest.mark.parametrize(("world_size", "is_compiled"), [(2, False), (1, False), (2, True)])
@on_ranks(timeout=200)
def test_a_weight_that_is_changed_before_backward_is_refused(
    group: ProcessGroup, world_size: int, is_compiled: bool
) -> None:
    """An unchanged weight is accepted."""
    mesh, wrong = DeviceMesh.from_group(group, "cpu"), []
    for name, module in holders_of_weights(mesh).items():
        # Compiling each takes a second; these three have different graphs.
        if is_compiled and name not in ("column", "group", "function"):
            continue
        if is_compiled and isinstance(module, Pair):
            # Converted, as models are moved.
            module.double().float()
        call = torch.compile(module, backend="aot_eager") if is_compiled else module
        for what, change in CHANGES.items():
            if what.endswith("step") and name == "frozen":
                continue
            # A compiled call has the same check, and so have a call on one rank and the other holders.
            is_one_of_few = LARGE or (world_size > 1 and name in ("column", "group", "function"))
            if (is_compiled or not is_one_of_few) and what not in ("nothing", "in place", "foreach"):
                continue
            x = torch.randn(4, HIDDEN, requires_grad=True)
            y = call(x)
            loss = y[0].square().sum() if isinstance(y, tuple) else y.square().sum()
            change(module)
            said = ""
            try:
                torch.autograd.grad(loss, x)
            except RuntimeError as error:
                said = str(error)
            expected = "" if what == "nothing" else "inplace" if what == "of parts" else "modified by an inplace"
            if expected not in said or (said and not expected):
                wrong.append(f"{name}, {what}: {said}")
    assert not wrong, wrong


@on_ranks(2)
def test_the_first_call_of_an_operator_before_backward_is_no_change(group: ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    for name, module in holders_of_weights(mesh).items():
        x = torch.randn(4, HIDDEN, requires_grad=True)
        y = module(x)
        with FlopCounterMode(display=False):
            module(x)
        (y[0] if isinstance(y, tuple) else y).square().sum().backward()
        assert x.grad is not None, name


@on_ranks(1)
def test_a_change_of_a_weight_in_place_of_an_earlier_one_is_refused(group: ProcessGroup) -> None:
    """All share one memory, and most of the second ones have the id of the first, which is gone."""
    x, num_reused = torch.randn(4, HIDDEN, requires_grad=True), 0
    for _ in range(20):
        layer = fusedtp.ColumnParallelLinear(HIDDEN, INNER, group=group)
        first = id(layer.weight)
        for _ in range(2):
            layer.weight = nn.Parameter(layer.weight.data)
        num_reused += id(layer.weight) == first
        y = layer(x)
        in_place(layer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), x)
    assert num_reused


@on_ranks(2)
def test_a_changed_input_is_refused_and_a_copy_is_not(group: ProcessGroup) -> None:
    """An input DTensor changed in place is refused, and so is a checkpoint; copies that hooks save are right."""
    mesh = DeviceMesh.from_group(group, "cpu")
    linear = parallelize_module(nn.Linear(HIDDEN, INNER), mesh, fusedtp.FusedColwiseParallel())
    norm = parallelize_module(nn.LayerNorm(HIDDEN), mesh, fusedtp.FusedNormParallel(sequence_dim=0))
    x = distribute_tensor(torch.randn(4, HIDDEN), mesh, [Replicate()])
    y = linear(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    given = torch.randn(4, HIDDEN, requires_grad=True)
    (expected,) = torch.autograd.grad(linear(given).square().sum(), given)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
        loss = linear(given).square().sum()
    again = checkpoint(linear, given, use_reentrant=False).square().sum()
    whole = distribute_tensor(torch.randn(4, HIDDEN), mesh, [Replicate()]).requires_grad_()
    normed = norm(whole).to_local()[:, 0].square().sum()
    (dx,) = torch.autograd.grad(normed, whole, retain_graph=True)
    in_place(linear)
    in_place(norm)
    close(torch.autograd.grad(loss, given)[0], expected, "saved as a copy")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(again, given)
    close(torch.autograd.grad(normed, whole)[0].to_local(), dx.to_local(), "a norm's weight is kept as a copy")


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a module's parameters, which are also their `grad`, and of its input."""
    x = x.clone().requires_grad_(x.is_floating_point())
    out = module(x)
    sum(each.square().sum() for each in (out if isinstance(out, tuple) else (out,))).backward()  # type: ignore[union-attr]
    return {name: each.grad for name, each in (*module.named_parameters(), ("x", x)) if each.grad is not None}


def of_functions(group: ProcessGroup) -> dict[str, dict[str, Tensor]]:
    """Return the gradients of plain tensors, and of a layer's parts, through functions."""
    found = {}
    layer = fusedtp.RowParallelLinear(HIDDEN * group.size(), INNER, norm="layer_norm", group=group)
    parts = {name: each.to_local() for name, each in layer.named_parameters()}
    for name, call, shapes in (
        ("several weights", lambda x, w, b, w1, b1: fusedtp.all_gather_linear(x, (w, w1), (b, b1), group=group),
         ((4, HIDDEN), (INNER, HIDDEN), (INNER,), (3, HIDDEN), (3,))),
        ("gate and up", lambda x, w, b, w1, b1: fusedtp.all_gather_linear(
            x, (w, w1), (b, b1), activation="swiglu", group=group), ((4, HIDDEN), *((INNER, HIDDEN), (INNER,)) * 2)),
        ("norm", lambda x, w, b, residual, g, c: fusedtp.linear_reduce_scatter(
            x, w, b, residual=residual, norm="layer_norm", norm_weight=g, norm_bias=c, group=group),
         ((4 * group.size(), HIDDEN), (INNER, HIDDEN), (INNER,), (4, INNER), (INNER,), (INNER,))),
        ("fully sharded", lambda x, w, b: fusedtp.fsdp_linear(x, w, b, group=group),
         ((4, HIDDEN), (3, HIDDEN), (3 * group.size(),))),
    ):  # fmt: skip
        given = [torch.randn(shape, requires_grad=True) for shape in shapes]
        out: Any = call(*given)
        loss = sum(each.square().sum() for each in (out if isinstance(out, tuple) else (out,)))
        found[name] = {str(i): each for i, each in enumerate(torch.autograd.grad(loss, given))}
    y = fusedtp.linear_reduce_scatter(
        torch.randn(4, HIDDEN), parts["weight"], parts["bias"], norm="layer_norm", norm_weight=parts["norm_weight"],
        norm_bias=parts["norm_bias"], group=group,
    )  # fmt: skip
    (y[0].square().sum() + y[1].sum()).backward()
    found["parts"] = {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}
    assert len(found["parts"]) == 4
    return found


@pytest.mark.parametrize(("world_size", "schedule"), [(2, "decomposed"), (2, "fused"), (1, "unfused")])
@on_ranks(timeout=120)
def test_every_gradient_has_memory_of_its_own(group: ProcessGroup, world_size: int, schedule: str) -> None:
    """A DTensor around a view at an offset cannot be copied, and two gradients in one allocation are saved twice."""
    mesh, options = DeviceMesh.from_group(group, "cpu"), {"schedule": schedule}
    modules = holders_of_weights(mesh, **options) | {
        "row norm": fusedtp.RowParallelLinear(HIDDEN * world_size, INNER, norm="layer_norm", group=mesh, **options),
        "embedding": parallelize_module(nn.Embedding(9, 4), mesh, fusedtp.FusedEmbeddingParallel(**options)),
        "layer norm": parallelize_module(
            nn.LayerNorm(HIDDEN), mesh, fusedtp.FusedNormParallel(sequence_dim=0, use_local_output=True, **options)
        ),
    }  # fmt: skip
    found = of_functions(group) if schedule == "decomposed" else {}
    for name, module in modules.items():
        x = torch.arange(4) if name == "embedding" else torch.randn(4, HIDDEN)
        found[name] = gradients(module, x)
    wrong = []
    for name, grads in found.items():
        seen: dict[int, str] = {}
        for key, each in grads.items():
            mine = each.to_local() if isinstance(each, DTensor) else each
            at = mine.untyped_storage().data_ptr()
            if mine.storage_offset() or (mine.numel() and seen.setdefault(at, key) != key):
                wrong.append(f"{name}: {key} at {mine.storage_offset()} of {seen.get(at, key)}'s memory")
    assert not wrong, wrong
    for name, module in modules.items():
        if "forward" not in vars(module):
            twin = copy.deepcopy(module)
            for (key, each), other in zip(module.named_parameters(), twin.parameters(), strict=True):
                assert torch.equal(whole(each.grad), whole(other.grad)), f"{name}: {key}"


@on_ranks(2, timeout=120)
def test_parameters_that_lie_otherwise_are_refused(group: ProcessGroup) -> None:
    """assign=True has put another placement in place. A whole plain state is taken apart, and is right."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for name, module in holders_of_weights(mesh).items():
        if not isinstance(module, fusedtp.ParallelMLP | fusedtp.FSDPLinear | nn.Linear | Pair) and name != "column":
            continue
        state = module.state_dict()
        x = torch.randn(4, HIDDEN)
        expected = module(x)
        module.load_state_dict({key: each.full_tensor() for key, each in state.items()}, assign=True)
        assert torch.equal(module(x), expected)
        for others in (
            {key: distribute_tensor(each.full_tensor(), mesh, [Replicate()]) for key, each in state.items()},
            {key: distribute_tensor(each.full_tensor(), mesh, [Shard(each.ndim - 1)]) for key, each in state.items()},
        ):  # fmt: skip
            module.load_state_dict(others, assign=True)
            for call in (module, torch.compile(module, backend="aot_eager")) if name == "column" else (module,):
                with pytest.raises(ValueError, match=r"must be a DTensor of .* got (a plain tensor|one) of"):
                    call(x)
        module.load_state_dict({key: each.clone() for key, each in state.items()}, assign=True)
        assert torch.equal(module(x), expected)
    embedding = parallelize_module(nn.Embedding(8, 4), mesh, fusedtp.FusedEmbeddingParallel())
    embedding.load_state_dict({"weight": distribute_tensor(torch.randn(8, 4), mesh, [Replicate()])}, assign=True)
    with pytest.raises(ValueError, match="must be a DTensor"):
        embedding(torch.zeros(2, dtype=torch.long))


def seeded_unlike(group: ProcessGroup) -> list[Tensor]:
    """Return the parameters that every rank has whole, with a different seed on each rank."""
    torch.manual_seed(group.rank())
    layers = [kind(HIDDEN, INNER, group=group) for kind in (fusedtp.RowParallelLinear, fusedtp.FSDPLinear)]
    mlp = fusedtp.ParallelMLP(HIDDEN, INNER, group=group, device="meta").to_empty(device="cpu")
    mlp.down_proj.reset_parameters()
    return [each.bias.to_local().detach() for each in (*layers, mlp.down_proj)]


def test_what_ranks_have_whole_is_the_first_ranks(pool: RankPool) -> None:
    first, *others = pool.run(seeded_unlike, world_size=3)
    for each in others:
        assert all(map(torch.equal, each, first))


@on_ranks()
def test_layers_meet_the_group_that_they_were_made_for(group: ProcessGroup) -> None:
    """A descending mesh, whose group has ascending ranks; a pickled layer whose group's name is now another group's."""
    reversed_mesh = DeviceMesh("cpu", torch.arange(group.size()).flip(0), mesh_dim_names=("tp",))
    for make in (
        lambda: fusedtp.ColumnParallelLinear(HIDDEN, INNER, group=reversed_mesh),
        lambda: fusedtp.all_gather(torch.randn(2, 2), group=reversed_mesh),
        lambda: parallelize_module(nn.Linear(4, 4), reversed_mesh, fusedtp.FusedColwiseParallel()),
    ):
        with pytest.raises(ValueError, match=r"must have ranks that ascend along every dimension, got \[3, 2, 1, 0\]"):
            make()
    layer = fusedtp.ColumnParallelLinear(HIDDEN, INNER, group=group)
    state = layer.__getstate__()
    name, ranks, _ = state["group"]
    with pytest.raises(ValueError, match=r"was made by rank 7 of group .*, and here it meets rank"):
        layer.__setstate__({**state, "group": (name, ranks, 7)})
