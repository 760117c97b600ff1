"""sharded_matmul on rank processes: every sharding over one axis and over two, forward and both gradients.

Operands are small whole numbers, so every sum of products is exact in float32 in any order and grouping. Results are
compared with the dense ones bit by bit; a missing or duplicated shard always shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.schedules import decomposed
from fusedtp.sharding import notation
from fusedtp.sharding.notation import Spec, parse

from .harness import LARGE
from .test_plan_simulated import ONE, TWO, is_valid, specs, texts

SCHEDULES = {"unfused": torch.float64, "decomposed": torch.float64, "fused": torch.float32}
# Sums of products over the longest contraction stay below 2**24.
LARGEST, LONGEST = 999, 16
# Number of random specs in one example.
CASES = 20 if LARGE else 4

Splits = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A spec, the lengths of its dims, and the ranks' lengths of dims with another split than the default."""

    spec: str
    lengths: Mapping[str, int]
    splits: Splits = field(default_factory=dict)


@cache
def mesh_of(shape: tuple[int, ...], group: ProcessGroup | None = None) -> DeviceMesh:
    """Return axes X and Y over all ranks, or X over the ranks of `group`."""
    if group is not None:
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))
    return init_device_mesh("cpu", shape, mesh_dim_names=("X", "Y"))


@cache
def operands(lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [batch..., M, K], w [K, N] and dy [batch..., M, N]."""
    assert max(lengths) <= LONGEST
    random = torch.Generator().manual_seed(1)
    *rows, k, n = lengths
    shapes = ((*rows, k), (k, n), (*rows, n))
    x, w, dy = (torch.randint(-LARGEST, LARGEST + 1, shape, generator=random).to(dtype) for shape in shapes)
    return x, w, dy


def first_axes(spec: Spec, name: str) -> set[str]:
    """Return the axes that split a dim first, over all tensors of the spec."""
    dims = [dim for tensor in (spec.a, spec.b, spec.c) for dim in tensor.dims if dim.name == name]
    return {dim.axes[0] for dim in dims if dim.axes}


def cut(whole: Tensor, dims: Sequence[notation.Dim], splits: Splits, mesh: DeviceMesh) -> Tensor:
    """Return this rank's shard by the definition of the notation."""
    assert mesh.mesh_dim_names is not None
    for i, dim in enumerate(dims):
        for axis in dim.axes:
            sizes = splits.get(dim.name, ()) if axis == dim.axes[0] else ()
            num_ranks, place = mesh.size(mesh.mesh_dim_names.index(axis)), mesh.get_local_rank(axis)
            whole = whole.split(sizes, i)[place] if sizes else whole.tensor_split(num_ranks, i)[place]
    return whole


def check_case(case: Case, mesh: DeviceMesh, schedule: str, dtype: torch.dtype) -> None:
    spec = parse(case.spec)
    x, w, dy = operands(tuple(case.lengths[name] for name in spec.dim_names), dtype)
    # The ranks' lengths can be given only if the same axis splits the dim first in all tensors.
    splits = {name: sizes for name, sizes in case.splits.items() if len(first_axes(spec, name)) == 1}
    x_shard, w_shard = (
        cut(whole, tensor.dims, splits, mesh).clone().requires_grad_() for whole, tensor in ((x, spec.a), (w, spec.b))
    )
    sizes = {**case.lengths, **splits}
    y = fusedtp.sharded_matmul(x_shard, w_shard, case.spec, mesh, sizes=sizes, schedule=schedule)
    total = y.detach().clone()
    for axis in spec.c.partial:
        dist.all_reduce(total, group=mesh.get_group(axis))
    y.backward(cut(dy, spec.c.dims, splits, mesh))
    rows = list(range(x.ndim - 1))
    for name, found, dense, dims in (
        ("y", total, x @ w, spec.c.dims),
        ("dx", x_shard.grad, dy @ w.t(), spec.a.dims),
        ("dw", w_shard.grad, torch.tensordot(x, dy, (rows, rows)), spec.b.dims),
    ):
        wanted = cut(dense, dims, splits, mesh)
        assert found is not None
        assert found.dtype == dtype
        assert torch.equal(found, wanted), f"{case}, {schedule}: {name} is {found}, expected {wanted}"


def run_cases(
    group: ProcessGroup, cases: Sequence[Case], schedules: Mapping[str, torch.dtype], shape: tuple[int, ...] = ()
) -> None:
    mesh = mesh_of(shape) if shape else mesh_of((), group)
    for case in cases:
        # Half of the specs run chunk by chunk, half with few rows at once.
        few_rows = decomposed.AT_ONCE_ROWS * (sum(map(ord, case.spec)) % 2)
        with mock.patch.object(decomposed, "AT_ONCE_ROWS", few_rows):
            for schedule, dtype in schedules.items():
                check_case(case, mesh, schedule, dtype)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_sharding_over_one_axis(pool: RankPool, world_size: int) -> None:
    valid = [text for text in texts(ONE, ("", "{U_X}")) if is_valid(text)]
    assert len(valid) == 32
    splits = {
        2: {"M": (0, 5), "K": (6, 1), "N": (3, 1)},
        3: {"M": (2, 0, 3), "K": (1, 6, 0), "N": (0, 0, 4)},
    }[world_size]
    cases = [Case(text, {"M": 5, "K": 7, "N": 4}, each) for text in valid for each in ({}, splits)]
    if LARGE:
        pool.run(run_cases, cases, SCHEDULES, world_size=world_size)
        return
    # A default run is even on two ranks and uneven on three, and kernels have every fourth spec.
    some, library = cases[world_size - 2 :: 2], {name: SCHEDULES[name] for name in ("unfused", "decomposed")}
    pool.run(run_cases, some, library, world_size=world_size)
    pool.run(run_cases, some[world_size::4], {"fused": SCHEDULES["fused"]}, world_size=world_size)


def test_every_sharding_over_two_axes(pool: RankPool) -> None:
    """On a 2 x 2 mesh exchanging X and Y gives the same problem, so each schedule runs one spec of the pair."""
    valid = [text for text in texts(TWO, ("", "{U_X}", "{U_Y}", "{U_XY}")) if is_valid(text)]
    assert len(valid) == 1811
    splits = {"M": (1, 4), "K": (7, 0), "N": (1, 2)}
    cases: dict[str, list[Case]] = {"decomposed": [], "unfused": []}
    for i, text in enumerate(valid):
        schedule = "decomposed" if text <= text.translate(str.maketrans("XY", "YX")) else "unfused"
        # Neighbours in the list differ in one sharding only, so even and uneven splits alternate.
        cases[schedule].append(Case(text, {"M": 5, "K": 7, "N": 3}, splits if i % 2 else {}))
    assert [len(each) for each in cases.values()] == [906, 905]
    # One in 41 here, all in nox -s soak; test_plan_simulated simulates each.
    for schedule, each in cases.items():
        some = each if LARGE else each[1::41]
        pool.run(run_cases, some, {schedule: SCHEDULES[schedule]}, (2, 2), timeout=900.0)


def bounded(max_examples: int) -> settings:
    """Return settings with the same examples on every run. Failures name their rank; shrinking could time out often."""
    return settings(
        max_examples=max_examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip


@st.composite
def random_cases(draw: st.DrawFn, shape: tuple[int, int]) -> Case:
    """Draw a spec over two axes with up to two batch dims, lengths down to 0, and splits with empty shards."""
    text, names = draw(specs())
    lengths, splits = {}, {}
    for name in names:
        lengths[name] = draw(st.integers(0, 6))
        axes = first_axes(parse(text), name)
        if len(axes) == 1 and draw(st.booleans()):
            num_ranks = shape["XY".index(axes.pop())]
            ends = sorted(draw(st.lists(st.integers(0, lengths[name]), min_size=num_ranks - 1, max_size=num_ranks - 1)))
            splits[name] = tuple(b - a for a, b in zip([0, *ends], [*ends, lengths[name]], strict=True))
    return Case(text, lengths, splits)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
@bounded(2)
@given(data=st.data())
def test_random_specs_with_batch_dims_and_sizes(pool: RankPool, shape: tuple[int, int], data: st.DataObject) -> None:
    drawn = data.draw(st.lists(random_cases(shape), min_size=CASES, max_size=CASES + 3))
    # The simplest draw is one case many times.
    cases = list({str(case): case for case in drawn}.values())
    library = {schedule: SCHEDULES[schedule] for schedule in ("unfused", "decomposed")}
    pool.run(run_cases, cases, library, shape, timeout=400.0)
    pool.run(run_cases, cases[:4], {"fused": SCHEDULES["fused"]}, shape, timeout=400.0)
