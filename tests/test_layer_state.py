"""torch's operations on a model's parameters give the same result for layers and for the dense layer.

Checkpoints between numbers of ranks, dense states in and out, clip_grad_norm_, optimizers, FSDP2 on the other axis,
copies, dtypes, layers made on meta.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.hf.trainer import _split
from fusedtp.styles.grouped import Unpack

from .harness import LARGE, on_ranks

# Feature counts that split unevenly over 2 and 4 ranks; with 4 ranks the last has none of INNER's 9.
HIDDEN, INNER, ROWS = 6, 9, 8
OPTIONS = {"foreach": False, "lr": 0.02, "weight_decay": 0.1}


class Dense(nn.Module):
    """The model in one process; parameter names and order are those of the parallel model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.gate_up = nn.ModuleList([nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, INNER)])
        self.out = nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        x = self.mix(x)
        gate, up = (each(x) for each in self.gate_up)
        y: Tensor = x + self.out(F.silu(gate) * up)
        return y

    def state(self) -> dict[str, Tensor]:
        """Return the state in the form of the parallel model's whole state."""
        gate, up = self.gate_up
        stacked = {f"mlp.gate_up_proj.{key}": torch.stack([getattr(each, key).data for each in (gate, up)])  # type: ignore[list-item]
                   for key in ("weight", "bias")}  # fmt: skip
        linears = {"up": self.up, "down": self.down, "mix": self.mix, "mlp.down_proj": self.out}
        whole = {f"{name}.{key}": p.data for name, each in linears.items() for key, p in each.named_parameters()}
        return stacked | whole


class Parallel(nn.Module):
    """One layer of each kind, with tokens split over the ranks."""

    def __init__(self, group: ProcessGroup | DeviceMesh, device: str = "cpu") -> None:
        super().__init__()
        options: dict[str, Any] = {"group": group, "device": device}
        self.up = fusedtp.ColumnParallelLinear(HIDDEN, INNER, **options)
        self.down = fusedtp.RowParallelLinear(INNER, HIDDEN, **options)
        self.mix = fusedtp.FSDPLinear(HIDDEN, HIDDEN, **options)
        self.mlp = fusedtp.ParallelMLP(HIDDEN, INNER, activation="swiglu", **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        x = self.mix(x)
        return x + self.mlp(x)  # type: ignore[no-any-return]


def model(group: ProcessGroup | DeviceMesh, seed: int, device: str = "cpu") -> Parallel:
    torch.manual_seed(seed)
    return Parallel(group, device)


def dense(seed: int) -> Dense:
    torch.manual_seed(seed)
    return Dense()


def inputs(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, HIDDEN, generator=random), torch.randn(ROWS, HIDDEN, generator=random)


def mine(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size())[group.rank()].clone()


def close(got: Tensor, expected: Tensor, name: str) -> None:
    """Compare float32 results of a few steps of a few matmuls with less than ten terms."""
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5, msg=lambda text: f"{name}: {text}")


def trained(
    model: nn.Module, group: ProcessGroup | None, optimizer: torch.optim.Optimizer, steps: int, clip: float | None,
    share: float = 1,
) -> list[float]:  # fmt: skip
    """Train and return the gradient's norm at every step. The loss is `share` times the sum over this rank's rows."""
    norms = []
    for step in range(steps):
        x, target = inputs(step)
        if group is not None:
            x, target = mine(x, group), mine(target, group)
        optimizer.zero_grad()
        (share * (model(x) - target).square().sum()).backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
    return norms


def styled(group: ProcessGroup, seed: int) -> nn.Module:
    """Return plain linears under styles, with tokens split over the ranks."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    into, out = {"input_layouts": Shard(0)}, {"output_layouts": Shard(0)}
    plan: dict[str, Any] = {"0": fusedtp.FusedColwiseParallel(**into), "2": fusedtp.FusedRowwiseParallel(**out)}
    return parallelize_module(plain(seed), mesh, plan)


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN))


def made(group: ProcessGroup, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    ours = model(group, seed) if kind == "layers" else styled(group, seed)
    optimizer = torch.optim.AdamW(ours.parameters(), **OPTIONS)  # type: ignore[arg-type]
    trained(ours, group, optimizer, 2, None)
    return ours, optimizer


def whole(value: Any) -> Any:
    """Return a state with every DTensor gathered."""
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


def assert_same(got: Any, expected: Any, name: str) -> None:
    if isinstance(expected, dict):
        assert list(got) == list(expected), name
        for key, value in expected.items():
            assert_same(got[key], value, f"{name} {key}")
    elif isinstance(expected, Tensor):
        assert torch.equal(got, expected), name
    else:
        assert got == expected, name


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def after(group: ProcessGroup, ours: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], Tensor]:
    """Return the whole state, and this rank's y after one more step."""
    now = copy.deepcopy(whole(state(ours, optimizer)))
    trained(ours, group, optimizer, 1, 1.0)
    with torch.inference_mode():
        return now, ours(mine(inputs(9)[0], group))


def save(group: ProcessGroup, kind: str, path: str) -> tuple[dict[str, Any], Tensor]:
    ours, optimizer = made(group, kind, 0)
    dcp.save(state(ours, optimizer), checkpoint_id=path, process_group=group)
    return after(group, ours, optimizer)


def load(group: ProcessGroup, kind: str, path: str) -> tuple[dict[str, Any], Tensor]:
    ours, optimizer = made(group, kind, 1)
    loaded = state(ours, optimizer)
    dcp.load(loaded, checkpoint_id=path, process_group=group)
    set_state_dict(ours, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    return after(group, ours, optimizer)


def load_plain(group: ProcessGroup, kind: str, path: str) -> dict[str, Tensor]:
    """Load into a model without ranks."""
    loaded = {"model": dense(1).state() if kind == "layers" else plain(1).state_dict()}
    dcp.load(loaded, checkpoint_id=path, process_group=group)
    return loaded["model"]


@pytest.mark.parametrize("kind", ["layers", "styles"])
def test_saved_by_two_ranks(pool: RankPool, tmp_path: Path, kind: str) -> None:
    """Parameters and AdamW's moments are equal bit by bit; so are, within rounding, outputs after one more step."""
    replies = pool.run(save, kind, str(tmp_path), world_size=2)
    saved, y = replies[0][0], torch.cat([reply[1] for reply in replies])
    for world_size in (4, 1):
        replies = pool.run(load, kind, str(tmp_path), world_size=world_size)
        for loaded, _ in replies:
            assert_same(loaded, saved, "")
        close(torch.cat([reply[1] for reply in replies]), y, "y after one more step")
    found = pool.run(load_plain, kind, str(tmp_path), world_size=1)[0]
    assert found.keys() == saved["model"].keys()
    assert all(torch.equal(found[key], value) for key, value in saved["model"].items())


def on_two_axes(group: ProcessGroup, data_ranks: int, seed: int) -> nn.Module:
    """Return two linears over the last axis of a mesh, with FSDP2 over the first one if that has several ranks."""
    ranks = torch.arange(group.size()).view(data_ranks, -1)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(seed)
    options: dict[str, Any] = {"group": mesh["tp"]}
    ours = nn.Sequential(
        fusedtp.ColumnParallelLinear(HIDDEN, INNER, **options), fusedtp.RowParallelLinear(INNER, 7, **options)
    )
    return fully_shard(ours, mesh=mesh["dp"]) if data_ranks > 1 else ours


def save_on_two_axes(group: ProcessGroup, path: str) -> dict[str, Tensor]:
    ours = on_two_axes(group, 2, 0)
    dcp.save(ours.state_dict(), checkpoint_id=path, process_group=group)
    saved: dict[str, Tensor] = whole(ours.state_dict())
    # torch's own way without a broadcast is an error here, with torch's styles too.
    other, options = on_two_axes(group, 2, 1), StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, copy.deepcopy(saved) if group.rank() == 0 else {}, options=options)
    assert_same(whole(other.state_dict()), saved, "broadcast")
    return saved


def load_on_one_axis(group: ProcessGroup, path: str) -> dict[str, Tensor]:
    ours = on_two_axes(group, 1, 1)
    loaded = ours.state_dict()
    dcp.load(loaded, checkpoint_id=path, process_group=group)
    ours.load_state_dict(loaded)
    return whole(ours.state_dict())  # type: ignore[no-any-return]


def test_saved_on_two_axes_whose_lengths_do_not_divide(tmp_path: Path) -> None:
    """9 rows over 2 x 2 ranks, and 7 rows and 9 columns; loaded on 2 ranks and on one."""
    for world_size in (4, 2, 1):
        with RankPool(world_size, timeout=100) as ranks:
            if world_size == 4:
                saved, *_ = ranks.run(save_on_two_axes, str(tmp_path))
                continue
            for loaded in ranks.run(load_on_one_axis, str(tmp_path)):
                assert_same(loaded, saved, f"{world_size} ranks")


@pytest.mark.parametrize("world_size", [4, 1])
@on_ranks()
def test_dense_states(group: ProcessGroup, world_size: int) -> None:
    """Export a whole state, import it into a model with another seed; load_state_dict takes both kinds of tensors."""
    options = StateDictOptions(full_state_dict=True)
    ours, expected = model(group, 3), dense(3).state()
    out = get_model_state_dict(ours, options=options)
    assert set(out) == set(expected)
    for key, value in expected.items():
        assert torch.equal(out[key], value), key
    # Broadcasting from rank 0 needs all ranks of the world.
    for broadcast in (False, True) if world_size == dist.get_world_size() else (False,):
        other = model(group, 4)
        given = copy.deepcopy(expected) if not broadcast or group.rank() == 0 else {}
        set_model_state_dict(
            other, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        )
        assert_same(whole(other.state_dict()), out, f"broadcast {broadcast}")
    for state, assign in ((ours.state_dict(), False), (expected, False), (expected, True)):
        other = model(group, 4)
        other.load_state_dict(state, assign=assign)
        assert_same(whole(other.state_dict()), out, f"load_state_dict, assign {assign}")
    assert all(torch.equal(value, out[key]) for key, value in expected.items())


def with_fsdp(on_meta: bool) -> nn.Module:
    """Return our layers over one axis, with FSDP2 over the other."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    ours = model(mesh["tp"], 5, "meta" if on_meta else "cpu")
    layers = (ours.up, ours.down, ours.mix, ours.mlp.gate_up_proj, ours.mlp.down_proj)
    for each in layers:
        fully_shard(each, mesh=mesh["dp"])
    fully_shard(ours, mesh=mesh["dp"])
    if on_meta:
        ours.to_empty(device="cpu")
        torch.manual_seed(5)
        for each in layers:
            each.reset_parameters()
    return ours


@pytest.mark.parametrize(
    ("name", "options", "how"),
    [
        ("AdamW", {"lr": 0.01, "foreach": True}, ""),
        ("AdamW", {"lr": 0.01, "foreach": False}, "FSDP2 of layers on meta"),
        ("SGD", {"lr": 0.01, "momentum": 0.9, "foreach": True}, ""),
        ("AdamW", {"lr": 0.01, "foreach": False}, "FSDP2"),
    ][: 4 if LARGE else 2],
)
@on_ranks(4)
def test_trained_with_clipping_as_in_one_process(
    group: ProcessGroup, name: str, options: dict[str, Any], how: str
) -> None:
    kind, theirs = getattr(torch.optim, name), dense(5)
    ours = with_fsdp(how.endswith("meta")) if how else model(group, 5)
    steps = 4 if LARGE else 2
    norms = trained(ours, group, kind(ours.parameters(), **options), steps, 0.5)
    # FSDP averages over its axis.
    expected = trained(theirs, None, kind(theirs.parameters(), **options), steps, 0.5, share=1 / 2 if how else 1)
    torch.testing.assert_close(norms, expected, rtol=1e-4, atol=0)
    got = whole(ours.state_dict())
    for key, value in theirs.state().items():
        close(got[key], value, f"{key} by {name} {options}")


@on_ranks(2)
def test_copies_dtypes_and_meta(group: ProcessGroup) -> None:
    ours, x = model(group, 6), mine(inputs(0)[0], group)
    y = ours(x)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(x), y)
        assert_same(whole(other.state_dict()), whole(ours.state_dict()), "copy")
        other(x).sum().backward()
        trained(other, group, torch.optim.AdamW(other.parameters()), 1, 1.0)
        assert not torch.equal(other(x), y)
        assert torch.equal(ours(x), y), "a copy shares memory with what it was made of"
        assert all(p.grad is None for p in ours.parameters())
    double = copy.deepcopy(ours).to(torch.float64)
    for key, p in double.named_parameters():
        assert isinstance(p, DTensor), key
        assert p.dtype == p.to_local().dtype == torch.float64, key
    y_double = double(x.double())
    close(y_double.float(), y, "y in float64")
    y_double.sum().backward()
    assert {p.grad.dtype for p in double.parameters() if p.grad is not None} == {torch.float64}
    # A model on meta draws no random values; reset_parameters draws those of the seed.
    empty, drawn = model(group, 6, "meta").to_empty(device="cpu"), torch.rand(1)
    torch.manual_seed(6)
    assert torch.equal(drawn, torch.rand(1))
    torch.manual_seed(6)
    for each in (empty.up, empty.down, empty.mix, empty.mlp.gate_up_proj, empty.mlp.down_proj):
        each.reset_parameters()
    assert torch.equal(empty(x), y)


def as_the_last_rank(group: ProcessGroup) -> None:
    """Act as the last of 4 x 2 ranks, with torch's backend "fake", in a process that is no rank any more."""
    dist.destroy_process_group()
    torch.manual_seed(0)
    # Rows 9 to 16 are those of the last tensor rank, and 15 and 16 those of its last data rank.
    first, second = nn.Linear(2, 17, bias=False).weight.detach(), torch.randn(17, 2)
    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=8)
    mesh = DeviceMesh("cpu", torch.arange(8).view(4, 2), mesh_dim_names=("dp", "tp"))
    layer = fusedtp.ColumnParallelLinear(2, 17, bias=False, group=mesh["tp"])
    packed = nn.Linear(2, 34, bias=False)
    plan: dict[str, Any] = {f"parts.{i}": fusedtp.FusedColwiseParallel() for i in range(2)}
    parallelize_module(parallelize_module(packed, mesh["tp"], Unpack([17, 17])), mesh["tp"], plan)
    for module in (layer, packed):
        fully_shard(module, mesh=mesh["dp"])
    layer.load_state_dict({"weight": first})
    packed.load_state_dict({"weight": torch.cat([first, second])})
    for got, whole in zip((*layer.parameters(), *packed.parameters()), (first, first, second), strict=True):
        assert isinstance(got, DTensor)
        assert torch.equal(got.to_local(), whole[15:])
    with torch.no_grad():
        layer.weight.zero_()
    torch.manual_seed(0)
    layer.reset_parameters()
    assert torch.equal(layer.weight.to_local(), first[15:])  # type: ignore[operator]
    optimizer = torch.optim.AdamW(layer.parameters())
    saved = {**optimizer.state_dict(), "state": {0: {"exp_avg": second}}}
    average = _split(saved, optimizer.param_groups)["state"][0]["exp_avg"]
    assert torch.equal(average.to_local(), second[15:])


def test_whole_states_on_two_axes_whose_lengths_do_not_divide() -> None:
    """Rows are those of torch's fully_shard, which cuts them over the mesh's first axis last."""
    with RankPool(1, timeout=100) as ranks:
        ranks.run(as_the_last_rank)


@on_ranks()
def test_gate_and_up_are_cut_along_their_rows(group: ProcessGroup) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(4, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(2)
    plain = fusedtp.ParallelMLP(HIDDEN, 12, activation="swiglu", group=mesh["tp"])
    ours = copy.deepcopy(plain)
    fully_shard(ours, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(1 if p.ndim == 3 else 0))
    assert ours.gate_up_proj.weight.to_local().shape == (2, 3, HIDDEN)
    x = inputs(0)[0]
    y, expected = ours(x), plain(x)
    assert torch.equal(y, expected)
    # Gradients are equal on all ranks, and averaged.
    for each in (y, expected):
        each.sum().backward()
    for (name, p), ref in zip(ours.named_parameters(), plain.parameters(), strict=True):
        close(whole(p.grad), whole(ref.grad), f"gradient of {name}")
