"""Every op, schedule, dtype and world size against the unsharded op in float64; hypothesis draws sizes and strides.

The parent draws a list of calls. Each rank makes its operands from the calls' seeds, issues all calls in a row, so that
fast ranks run ahead of slow ones, and then checks its own part of every result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp import reference
from fusedtp.bench.ranks import RankPool
from fusedtp.kernels.launch import Config
from fusedtp.schedules import NAMES, decomposed, fused, transport
from fusedtp.shards import even_sizes
from fusedtp.workspaces import registry
from fusedtp.workspaces.steps import DeviceSteps, HostSteps
from fusedtp.workspaces.workspace import Workspace

from . import direct
from .harness import LARGE, spread
from .soak.layouts import OF_ANY, laid_out

pytestmark = pytest.mark.usefixtures("within_bounds")

CPU = torch.device("cpu")
Option = int | str

# The gathered or scattered dim (0 rows, 1 the other dim), or the algorithm.
_ALGORITHMS: dict[str, tuple[str, ...]] = {
    "matmul_all_reduce": ("one_shot", "two_shot", "auto"),
    "all_gather": ("direct", "ring", "auto"),
    "reduce_scatter": ("direct", "ring", "auto"),
    "all_reduce": ("one_shot", "two_shot", "ring", "auto"),
}
_DIMS = [(op, dim) for op in ("all_gather_matmul", "matmul_reduce_scatter") for dim in (0, 1)]
VARIANTS: dict[str, list[tuple[str, Option]]] = {
    # `auto` equals one of the other two; only mixed ops draw it.
    "fused": [*_DIMS, *((op, each) for op, all_of in _ALGORITHMS.items() for each in all_of if each != "auto")],
    "decomposed": [*_DIMS, *((op, each) for op, all_of in _ALGORITHMS.items() for each in all_of if each != "ring")],
    "unfused": [*_DIMS, *((op, "auto") for op in _ALGORITHMS)],
}
DTYPES = {
    "fused": ["float32", "bfloat16", "float16"],
    "decomposed": ["float32", "bfloat16", "float16", "float64"],
    "unfused": ["float32", "bfloat16", "float16", "float64"],
}
# Around the interpreter's tiles of 64, and beyond two tiles.
LENGTHS = (65, 0, 33, 7, 90, 64, 131, 1)
SMALL_LENGTHS = (17, 50, 0, 33, 3)
# Many tiles, pieces and swizzle groups for each program, at sizes that the interpreter can run.
SMALL_TILES = Config(
    block_m=16, block_n=16, block_k=16, group_m=2, programs=3, pushers=2, copy_rows=8, copy_cols=16,
    strip_rows=8,
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One op on a[M, K] @ b[K, N] (collectives: on [M, N]), with each length split over the ranks.

    layouts: each rank's, of a, b and bias. outs: each rank's, of the tensor that it gives for the result; "" for none.
    """

    schedule: str
    op: str
    option: Option
    dtype: str
    m_sizes: tuple[int, ...]
    n_sizes: tuple[int, ...]
    k_sizes: tuple[int, ...]
    layouts: tuple[tuple[str, str, str], ...]
    bias: bool
    seed: int
    outs: tuple[str, ...] = ()


class Operands:
    """A call's operands on one rank, and its expected result there."""

    def __init__(self, call: Call, rank: int) -> None:
        self.call = call
        dtype: torch.dtype = getattr(torch, call.dtype)
        M, N, K = sum(call.m_sizes), sum(call.n_sizes), sum(call.k_sizes)
        random = torch.Generator().manual_seed(call.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(dtype)

        # A backend sums in the operands' dtype, and a ring sends running sums in that dtype; all else sums in float32.
        sum_dtype = dtype if call.schedule == "unfused" or call.option == "ring" else torch.float32
        chunk = reference.chunk
        self.b = self.bias = None
        if call.op == "all_gather":
            whole = normal(M, N)
            self.a = chunk(whole, 0, rank, call.m_sizes)
            self.expected, self.allowed = whole.double(), torch.zeros(M, N, dtype=torch.float64)
        elif call.op in ("reduce_scatter", "all_reduce"):
            parts = [normal(M, N) for _ in call.m_sizes]
            self.a = parts[rank]
            self.expected = reference.total(parts)
            self.allowed = reference.total_bound(parts, dtype, sum_dtype=sum_dtype)
        else:
            a, b, bias = normal(M, K), normal(K, N), normal(N) if call.bias else None
            k_sizes = call.k_sizes
            if call.op == "all_gather_matmul":
                # b is this rank's own, with any number of columns; the contraction is not split by a rounding.
                b = chunk(b, 1, rank, call.n_sizes)
                bias = None if bias is None else chunk(bias, 0, rank, call.n_sizes)
                self.a = chunk(a, call.option, rank, call.m_sizes if call.option == 0 else k_sizes)
                self.b, k_sizes = b, (K,)
            else:
                self.a, self.b = chunk(a, 1, rank, k_sizes), chunk(b, 0, rank, k_sizes)
            self.bias = bias
            self.expected = reference.matmul(a, b, bias)
            self.allowed = reference.bound(a, b, dtype, k_sizes=k_sizes, bias=bias, sum_dtype=sum_dtype)
        if call.op.endswith("reduce_scatter"):
            dim, sizes = (1, call.n_sizes) if call.option == 1 else (0, call.m_sizes)
            self.expected, self.allowed = (chunk(each, dim, rank, sizes) for each in (self.expected, self.allowed))
        layout_a, layout_b, layout_bias = call.layouts[rank]
        self.originals = [each.clone() for each in (self.a, self.b, self.bias) if each is not None]
        self.a = laid_out(self.a, layout_a)
        self.b = self.b if self.b is None else laid_out(self.b, layout_b)
        self.bias = self.bias if self.bias is None else laid_out(self.bias, layout_bias)
        self.given = (self.a,) if self.b is None else (self.a, self.b, self.bias)
        self.options: dict[str, Any] = {"algorithm": call.option} if isinstance(call.option, str) else {}
        if call.option == 1:
            self.options["dim"] = 1
        if not call.op.endswith("all_reduce"):
            others = call.k_sizes if call.op.startswith("all_gather") else call.n_sizes
            self.options["sizes"] = others if call.option == 1 else call.m_sizes
        self.out = None
        if layout := call.outs[rank] if call.outs else "":
            self.out = laid_out(torch.full_like(self.expected, torch.nan, dtype=dtype), layout)
            self.options["outs"] = (self.out,)

    def issue(self, group: ProcessGroup) -> Tensor:
        """Run the task on these operands."""
        return direct.one(self.call.op, self.call.schedule, group, *self.given, **self.options)

    def check(self, out: Tensor, name: str) -> None:
        reference.check(out, self.expected, self.allowed, name)
        assert str(out.dtype) == f"torch.{self.call.dtype}", f"{name}: {out.dtype}"
        if self.out is None:
            assert out.is_contiguous(), f"{name}: strides {out.stride()}"
        else:
            assert out is self.out, f"{name}: a new tensor"
            every = out.new_empty(0).set_(out.untyped_storage())
            assert int(every.isnan().sum()) == every.numel() - out.numel(), f"{name}: wrote beside {self.call.outs}"
        for after, before in zip((self.a, self.b, self.bias), self.originals, strict=False):
            assert after is None or torch.equal(after, before), f"{name}: wrote to an operand"


def _small_enough(rows: int, cols: int, *_: object, **__: object) -> str:
    return "one_shot" if rows * cols <= 128 else "two_shot"


@contextlib.contextmanager
def running_as(group: ProcessGroup, flavour: str) -> Iterator[None]:
    """Run the same schedules in another way: small tiles, chunk by chunk, or pushed as on a GPU, by host or kernels."""
    with contextlib.ExitStack() as stack:
        if flavour == "small tiles":
            stack.enter_context(mock.patch.object(fused, "config_for", return_value=SMALL_TILES))
            # `auto` takes both algorithms at the sizes drawn here.
            stack.enter_context(mock.patch.object(transport, "way_of", _small_enough))
        elif flavour != "plain":
            # Few rows would be multiplied at once.
            stack.enter_context(mock.patch.object(decomposed, "AT_ONCE_ROWS", 0))
        if flavour.startswith("pushed"):
            ws = registry.get(group, CPU)
            stack.enter_context(mock.patch.object(ws, "reads_peers", False))
            if flavour == "pushed by kernels":
                stack.enter_context(by_kernels(ws))
        yield


@contextlib.contextmanager
def by_kernels(ws: Workspace) -> Iterator[None]:
    """Replace the host's steps by those of a GPU."""
    steps = ws.steps
    assert isinstance(steps, HostSteps)
    ws.steps = DeviceSteps(ws)
    try:
        yield
    finally:
        # The workspace may have grown.
        steps.reach(ws.addresses)
        ws.steps = steps


def run_calls(group: ProcessGroup, calls: Sequence[Call], flavour: str, fresh: bool) -> None:
    """Make all calls in a row on one workspace, then check all. A `fresh` one must grow, and its epoch soon wraps."""
    if fresh:
        registry.destroy(group)
        registry.get(group, CPU, epoch=2**31 - 3)
    operands = [Operands(call, group.rank()) for call in calls]
    with running_as(group, flavour):
        outs = [each.issue(group) for each in operands]
    for index, (each, out) in enumerate(zip(operands, outs, strict=True)):
        each.check(out, f"call {index}, rank {group.rank()}, {flavour}, {each.call}")


@st.composite
def splits(draw: st.DrawFn, world_size: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Draw a length and its split: even, random, or all on one rank."""
    length = draw(st.sampled_from(lengths))
    cuts = draw(
        st.one_of(st.none(), st.lists(st.integers(0, length), min_size=world_size - 1, max_size=world_size - 1))
    )
    if cuts is None:
        return even_sizes(length, world_size)
    ends = [0, *sorted(cuts), length]
    return tuple(end - begin for begin, end in pairwise(ends))


@st.composite
def calls(
    draw: st.DrawFn, world_size: int, schedule: str, dtype: str, variant: tuple[str, Option], lengths: Sequence[int]
) -> Call:
    """Draw a call of one variant. The simplest draw has every layout too."""
    m_sizes, n_sizes, k_sizes = (draw(splits(world_size, lengths)) for _ in range(3))
    turn = draw(st.integers(0, 5)) + [*VARIANTS[schedule], variant].index(variant)
    layouts = tuple(
        (OF_ANY[(turn + rank) % 6], OF_ANY[(turn + 2 * rank + 1) % 6], OF_ANY[(turn + rank + 2) % 6])
        for rank in range(world_size)
    )
    outs = tuple(("", *OF_ANY)[(turn + 3 * rank) % 7] for rank in range(world_size))
    return Call(
        schedule, *variant, dtype, m_sizes, n_sizes, k_sizes, layouts=layouts, outs=outs, bias=not draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )  # fmt: skip


@st.composite
def any_calls(draw: st.DrawFn, world_size: int, schedules: Sequence[str], lengths: Sequence[int]) -> Call:
    """Draw a call of any op on one of `schedules`."""
    schedule = draw(st.sampled_from(schedules))
    variants = VARIANTS[schedule] + [(op, "auto") for op in _ALGORITHMS]
    return draw(
        calls(world_size, schedule, draw(st.sampled_from(DTYPES[schedule])), draw(st.sampled_from(variants)), lengths)
    )


def bounded(max_examples: int) -> settings:
    """Return settings with the same examples on every run. Failures name their rank; shrinking could time out often."""
    return settings(
        max_examples=max_examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        verbosity=Verbosity.quiet, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip


def lengths_for(dtype: str) -> tuple[int, ...]:
    """Return LENGTHS rotated by dtype, so that the first example, with all lengths equal to the first, differs."""
    start = 2 * DTYPES["unfused"].index(dtype)
    return LENGTHS[start:] + LENGTHS[:start]


def run_every_variant(pool: RankPool, schedule: str, dtype: str, world_size: int, data: st.DataObject) -> None:
    variants = data.draw(st.permutations(VARIANTS[schedule]))
    drawn = [data.draw(calls(world_size, schedule, dtype, each, lengths_for(dtype))) for each in variants]
    # A repeated call is a prepared call. Interpreted kernels are slow: consecutive calls are of different ops.
    turns = 1 if schedule == "fused" and not LARGE else 2
    twice = [replace(each, seed=each.seed + turn) for each in drawn for turn in range(turns)]
    for flavour in ("plain", "by chunk") if schedule == "decomposed" else ("plain",):
        pool.run(run_calls, twice, flavour, data.draw(st.booleans()), world_size=world_size, timeout=400.0)


@pytest.mark.parametrize(("dtype", "world_size"), spread(DTYPES["fused"], [3, 2, 1, *([4] if LARGE else [])]))
@bounded(1)
@given(data=st.data())
def test_fused_ops(pool: RankPool, dtype: str, world_size: int, data: st.DataObject) -> None:
    run_every_variant(pool, "fused", dtype, world_size, data)


@pytest.mark.parametrize(("dtype", "world_size"), spread(DTYPES["unfused"], [2, 4, 1, 3]))
@pytest.mark.parametrize("schedule", [name for name in NAMES if name != "fused"])
@bounded(3 if LARGE else 2)
@given(data=st.data())
def test_library_ops(pool: RankPool, schedule: str, dtype: str, world_size: int, data: st.DataObject) -> None:
    run_every_variant(pool, schedule, dtype, world_size, data)


@pytest.mark.parametrize(("flavour", "world_size"), spread(["plain", "small tiles"], [2, 3, 4]))
@bounded(1)
@given(data=st.data())
def test_ops_interleaved(pool: RankPool, flavour: str, world_size: int, data: st.DataObject) -> None:
    schedules, lengths = (
        (["decomposed", "fused", "unfused"], LENGTHS) if flavour == "plain" else (["fused"], SMALL_LENGTHS)
    )
    drawn = data.draw(st.lists(any_calls(world_size, schedules, lengths), min_size=4, max_size=8))
    pool.run(run_calls, drawn, flavour, data.draw(st.booleans()), world_size=world_size, timeout=400.0)


@pytest.mark.parametrize(("flavour", "world_size"), spread(["pushed", "pushed by kernels"], [2, 3, 4]))
@bounded(1)
@given(data=st.data())
def test_decomposed_as_on_a_gpu(pool: RankPool, flavour: str, world_size: int, data: st.DataObject) -> None:
    # Kernels and host steps share one workspace, and so the epoch.
    schedules = ["decomposed"] if flavour == "pushed" else ["decomposed", "decomposed", "decomposed", "fused"]
    drawn = data.draw(st.lists(any_calls(world_size, schedules, SMALL_LENGTHS), min_size=5, max_size=10))
    pool.run(run_calls, drawn, flavour, data.draw(st.booleans()), world_size=world_size, timeout=400.0)


def collectives(group: ProcessGroup) -> set[str]:
    """Return the c10d operators that `unfused` calls."""
    x, sizes = torch.ones(4 * group.size(), 3), (4,) * group.size()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        direct.one("all_gather", "unfused", group, x[:4], sizes=sizes)
        direct.one("reduce_scatter", "unfused", group, x, sizes=sizes)
        direct.one("all_reduce", "unfused", group, x)
    return {event.name for event in profiled.events() if event.name.startswith("c10d::")}


def test_unfused_ends_nothing_under_a_long_name(pool: RankPool) -> None:
    """See `unfused.UnfusedGather.start`. gloo scatters by an all-reduce."""
    for names in pool.run(collectives, world_size=2):
        assert {"c10d::_allgather_base_", "c10d::allreduce_"} <= names
        assert not {"c10d::allgather_into_tensor_coalesced_", "c10d::allreduce_coalesced_"} & names
