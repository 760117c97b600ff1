"""FSDP2 with `fusedtp.fsdp.use`: results, gradients and states are those with the process group's collectives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import fusedtp
import fusedtp.fsdp
from fusedtp import FusedColwiseParallel, FusedRowwiseParallel, lanes
from fusedtp.bench.ranks import RankPool

from .beside import Flags
from .harness import last_path, mesh_of, spread

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Block(nn.Module):
    """Odd sizes, which no number of ranks divides, a parameter of one element and one that is frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)
        self.norm, self.scale = nn.LayerNorm(width), nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.scale * self.down(torch.relu(self.up(self.norm(x)))) + self.frozen.sum()
        return y


def dense(width: int = 7) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(width), Block(width))


def sharded(mesh: DeviceMesh, model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = dense() if model is None else model
    for block in model:  # type: ignore[attr-defined]
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def pair(mesh: DeviceMesh, make: Callable[[], nn.Module] = dense, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return FSDP2's model, and the same with `use`."""
    return sharded(mesh, make(), **options), fusedtp.fsdp.use(sharded(mesh, make(), **options))


def step(model: nn.Module, seed: int = 0, width: int = 7) -> list[Tensor]:
    """Run forward and backward, and return the output and the local gradients so far."""
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(seed + 17 * dist.get_rank()))
    y = model(x)
    y.float().square().mean().backward()
    found = [y.detach()]
    for each in model.parameters():
        if each.requires_grad:
            assert isinstance(each.grad, DTensor)
            found.append(each.grad.to_local().clone())
    return found


def compare(ours: list[Tensor], theirs: list[Tensor], exact: bool, unit: float = 2.0**-23) -> None:
    """Compare outputs, and gradients whose sums are rounded to `unit`: gloo rounds after each term."""
    assert len(ours) == len(theirs) > 2
    assert torch.equal(ours[0], theirs[0])
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        if exact:
            assert torch.equal(one, other)
        else:
            allowed = 8 * unit * max(other.abs().flatten().tolist(), default=0.0)
            torch.testing.assert_close(one, other, rtol=0, atol=allowed)


def mixed(param: torch.dtype, reduce: torch.dtype) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=FP32)}


OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "kept whole": {"reshard_after_forward": False},
    "bfloat16, summed in float32": mixed(BF16, FP32),
    "bfloat16": mixed(BF16, BF16),
    # FSDP2 divides before and after the sum.
    "float16": mixed(FP16, FP16),
}


def steps(group: ProcessGroup, name: str, schedule: str) -> None:
    """Compare two steps, the second accumulated, and a third after the gradients are gone."""
    mesh = mesh_of(group)
    theirs, ours = pair(mesh, **OPTIONS[name])
    fusedtp.fsdp.use(ours, schedule=schedule)
    exact = group.size() == 2
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(name, 2.0**-23)
    for seed in (0, 1):
        compare(step(ours, seed), step(theirs, seed), exact, unit)
        path = last_path()
        assert (path.op, path.schedule) == ("reduce_scatter", "decomposed" if schedule == "auto" else schedule)
    for model in (theirs, ours):
        model.zero_grad()
    first = step(ours, 2)
    compare(first, step(theirs, 2), exact, unit)
    ours.zero_grad()
    # The same inputs give the same bits.
    compare(step(ours, 2), first, True)


@pytest.mark.parametrize(
    ("name", "schedule", "world_size"), [(*each, n) for each in spread(list(OPTIONS), ["auto"]) for n in (2, 3)]
    + [("float32", "unfused", 2), ("float32", "decomposed", 2)],
)  # fmt: skip
def test_steps_are_those_of_the_process_group(pool: RankPool, name: str, schedule: str, world_size: int) -> None:
    pool.run(steps, name, schedule, world_size=world_size)


def prefetched(group: ProcessGroup) -> None:
    """Hold rank 1 before a gather, until rank 0 has computed beside that gather, in forward and in backward."""
    flags, mesh = Flags("prefetched"), mesh_of(group)
    theirs, ours = (sharded(mesh, nn.Sequential(*dense(), *dense())) for _ in range(2))
    fusedtp.fsdp.use(ours)
    blocks: list[Any] = list(ours.children())
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
    compare(step(ours), step(theirs), exact=True)
    for model in (ours, theirs):
        model.zero_grad()
    computed: list[str] = []

    def computes(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if group.rank() == 0 and name not in computed:
                (lane,) = (each for key, each in lanes._lanes.items() if repr(group.group_name) in key[1])
                assert [each.is_completed() for each in lane.ops] == [False]
                computed.append(name)
                flags.raise_(name)

        return hook

    # Of the four gathers of each pass, that of block 2, and that of block 1.
    held, gather, numbers = {2: "forward", 6: "backward"}, fusedtp.fsdp._AllGather.__call__, itertools.count()

    def late(*args: Any, **kwargs: Any) -> Any:
        if (number := next(numbers)) in held and group.rank() == 1:
            flags.wait(held[number])
        return gather(*args, **kwargs)

    blocks[1].up.register_forward_hook(computes("forward"))
    blocks[2].up.register_full_backward_hook(computes("backward"))
    with mock.patch.object(fusedtp.fsdp._AllGather, "__call__", late):
        found = step(ours)
    compare(found, step(theirs), exact=True)
    assert next(numbers) == 8
    assert computed == (["forward", "backward"] if group.rank() == 0 else [])


def accumulated(group: ProcessGroup) -> None:
    """Compare gradients of two batches, of which only the second is reduced."""
    theirs, ours = pair(mesh_of(group))
    found = []
    for model in (ours, theirs):
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(group.rank()))
        model(x).square().mean().backward()
        model.set_requires_gradient_sync(True)
        found.append(step(model, 1))
    compare(*found, exact=True)


def scaled(group: ProcessGroup) -> None:
    """Compare gradients with a divisor of their own: gloo has no such reduction."""
    theirs, ours = pair(mesh_of(group))
    for each in ours.modules():
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(8.0)
    mine, other = step(ours), step(theirs)
    compare(mine, [other[0], *(grad * group.size() / 8 for grad in other[1:])], exact=True)


def several_dtypes(group: ProcessGroup) -> None:
    """Compare outputs where FSDP2 gathers bytes, as parameters have two dtypes."""

    def make() -> nn.Sequential:
        model = dense()
        for block in model:
            block.frozen.data = block.frozen.data.to(BF16)
        return model

    theirs, ours = pair(mesh_of(group), make)
    compare(step(ours), step(theirs), exact=True)


def one_byte(group: ProcessGroup) -> None:
    """Gather float8: its bytes move in pairs, as kernels take no float8 here."""
    own = torch.full((16,), float(group.rank() + 1)).to(torch.float8_e4m3fn)
    out = own.new_empty(16 * group.size())
    work = fusedtp.fsdp._AllGather("auto")(out, own, group)
    assert work is not None
    work.wait()
    assert out.float().view(group.size(), 16)[:, 0].tolist() == [1.0, 2.0]
    assert "bfloat16" in last_path().shapes


def by_columns(group: ProcessGroup) -> None:
    """Compare gradients of weights that are sharded along their second dim."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))

    theirs, ours = pair(mesh_of(group), make, shard_placement_fn=lambda parameter: Shard(1))
    compare(step(ours, width=8), step(theirs, width=8), exact=True)


def saved(group: ProcessGroup) -> None:
    """Compare states after an optimizer's step."""
    found = []
    for model in pair(mesh_of(group)):
        step(model)
        torch.optim.AdamW(model.parameters(), 0.1).step()
        found.append({name: each.full_tensor() for name, each in model.state_dict().items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("check", [prefetched, accumulated, scaled, several_dtypes, one_byte, by_columns, saved])
def test_on_two_ranks(pool: RankPool, check: Callable[[ProcessGroup], None]) -> None:
    pool.run(check, world_size=2)


def replicated(group: ProcessGroup) -> None:
    """Compare HSDP: two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    theirs, ours = pair(mesh)
    compare(step(ours), step(theirs), exact=True)
    fusedtp.destroy()


def with_tensor_parallel(group: ProcessGroup) -> None:
    """Compare FSDP2 over one axis of a mesh, with matmuls split over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(2)))
        for block in model:
            parallelize_module(block, mesh["tp"], {"0": FusedColwiseParallel(), "2": FusedRowwiseParallel()})
        return model

    theirs, ours = pair(mesh["data"], make)
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(mesh.get_local_rank("data")))
    found = []
    for model in (ours, theirs):
        y = model(rows)
        y.square().mean().backward()
        found.append([y.detach(), *(each.grad.to_local() for each in model.parameters())])
    compare(*found, exact=True)
    fusedtp.destroy()


@pytest.mark.parametrize("check", [replicated, with_tensor_parallel])
def test_on_a_mesh(pool: RankPool, check: Callable[[ProcessGroup], None]) -> None:
    pool.run(check, world_size=4)


def refused(group: ProcessGroup) -> None:
    with pytest.raises(ValueError, match="no module of Sequential is an FSDPModule"):
        fusedtp.fsdp.use(dense())
    model = sharded(mesh_of(group))
    with pytest.raises(ValueError, match="schedule must be one of"):
        fusedtp.fsdp.use(model, schedule="fast")
    with pytest.raises(ValueError, match="'fused' waits for peers inside kernels"):
        fusedtp.fsdp.use(model, schedule="fused")
    comm = fusedtp.fsdp._ReduceScatter("auto")
    with pytest.raises(NotImplementedError, match="must be SUM, AVG or PREMUL_SUM"):
        comm(torch.zeros(1), torch.zeros(group.size()), group, dist.ReduceOp.MAX)
    # Nothing was sent: the next step is right.
    step(fusedtp.fsdp.use(model))


def test_what_cannot_be_done_is_refused(pool: RankPool) -> None:
    pool.run(refused, world_size=2)
