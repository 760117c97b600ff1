"""The eager call before a graph capture loads all kernels that the capture will start, and kernel launches refuse wrong
devices. Kernels are interpreted; these tests record which kernels start, with which arguments. Through Triton's own
launcher: `test_emulated_launch.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from triton.language import constexpr

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.calls.bound import BoundTask
from fusedtp.epilogue import NO_EPILOGUE
from fusedtp.kernels import loading
from fusedtp.kernels.launch import config_for
from fusedtp.kernels.layout import Region
from fusedtp.op import ALL_GATHER
from fusedtp.schedules import decomposed, producer
from fusedtp.schedules.forms import Prepared
from fusedtp.workspaces import registry
from fusedtp.workspaces.workspace import Workspace

from . import direct
from .harness import on_ranks
from .virtual_ranks import local_memories

CPU = torch.device("cpu")
SIZES = (9, 5)

Starts = list[tuple[Any, ...]]


def described(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    # More than the compile key: numbers with their values, tensors by what the compiler knows of them.
    return kernel.fn.__name__, grid, tuple(map(known, args)), tuple(sorted(options.items()))


def known(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16
    if isinstance(x, tuple):
        return tuple(map(known, x))
    if isinstance(x, constexpr):
        return "constant", x.value
    # Each call has its own fingerprint.
    return "fingerprint" if isinstance(x, int) and abs(x) >= 2**31 else x


@contextlib.contextmanager
def watched() -> Iterator[tuple[Starts, Starts]]:
    """Record the kernels that are started and loaded inside."""
    started: Starts = []
    loaded: Starts = []
    start = loading._starter

    def starter(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            started.append(described(kernel, grid, args, options))
            return start(kernel, grid)(*args, **options)

        return call

    def load(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        loaded.append(described(kernel, grid, args, options))

    with mock.patch.object(loading, "_starter", starter), mock.patch.object(loading, "_load", load):
        yield started, loaded


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Pretend that calls run on a GPU and load kernels for captures, while none is running."""
    on_gpu = property(lambda ready: True, lambda ready, value: None)
    with (
        mock.patch.object(Workspace, "loads_for_capture", True),
        mock.patch.object(BoundTask, "on_gpu", on_gpu, create=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
    ):
        yield


CALLS: dict[str, Callable[..., Tensor]] = {
    "gather rows": lambda x, w, **given: fusedtp.all_gather_linear(x, w, w[:, 0], sizes=SIZES, **given),
    "gather features": lambda x, w, **given: fusedtp.all_gather_linear(
        x.t(), w.new_ones(6, sum(SIZES)), gather_dim=-1, sizes=SIZES, **given
    ),
    "scatter": lambda x, w, **given: fusedtp.linear_reduce_scatter(w, w.new_ones(5, w.shape[1]), **given),
    "all-reduce": lambda x, w, **given: fusedtp.linear_all_reduce(w, w.new_ones(5, w.shape[1]), **given),
    "gather alone": lambda x, w, **given: fusedtp.all_gather(x, sizes=SIZES, **given),
    "fully sharded": lambda x, w, **given: fusedtp.fsdp_linear(w, x, sizes=SIZES, **given),
}


def train(name: str, x: Tensor, w: Tensor, **given: Any) -> list[Tensor]:
    """Return the call's result and gradients."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = CALLS[name](x, w, **given)
    y.backward(torch.ones_like(y))
    return [y.detach(), *(each.grad for each in (x, w) if each.grad is not None)]


def loads(group: ProcessGroup, by: str, name: str) -> list[str]:
    """Return the kernels that a capture of this call starts but that the eager call neither started nor loaded."""
    ws = registry.get(group, CPU)
    random = torch.Generator().manual_seed(group.rank())
    x, w = torch.randn(SIZES[group.rank()], 8, generator=random), torch.randn(6, 8, generator=random)
    eager = {"schedule": "auto"} if by == "auto" else {"schedule": "fused", "producer": "copy"}
    if name in ("scatter", "all-reduce") and by != "auto":
        eager = {"schedule": "fused"}
    with as_on_a_gpu():
        with watched() as (started, loaded):
            train(name, x, w, group=group, **eager)
            size, again = ws.half_bytes, len(loaded)
            train(name, x, w, group=group, **eager)
        assert len(loaded) == again, "loaded once more by a call like the one before"
        assert loaded or by != "auto", "nothing was loaded"
        if by == "auto":
            assert not started
        with watched() as (captured, _):
            train(name, x, w, group=group, schedule="fused")
        assert ws.half_bytes == size, "no room had been made"
    there = {*started, *loaded}
    return [start[0] for start in captured if start not in there]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("by", ["auto", "copy"])
def test_what_a_capture_starts_is_loaded_before(pool: RankPool, by: str, name: str) -> None:
    """Forward and backward, with an eager `auto` that is decomposed, and with gathers that are copied."""
    pool.run(forget)
    assert pool.run(loads, by, name, world_size=2) == [[], []]


def makes_room(group: ProcessGroup) -> None:
    ws, sizes = registry.get(group, CPU), (20000, 20100)
    a, b = torch.randn(sizes[group.rank()], 3), torch.randn(3, 4)
    task = direct.task_of("all_gather_matmul", a, b, sizes=sizes)
    captured = Prepared("fused", task, group, ws)
    assert captured.slots > ws.slots, (captured.slots, ws.slots)
    with as_on_a_gpu():
        direct.run("all_gather_matmul", "auto", group, a, b, sizes=sizes)
    assert captured.slots <= ws.slots
    assert captured.half_bytes <= ws.half_bytes


def test_room_for_a_capture_is_made_before(pool: RankPool) -> None:
    """A capture cannot grow memory, and kernels need one signal for each piece, library matmuls one for each part."""
    pool.run(forget)
    pool.run(makes_room, world_size=2)
    pool.run(forget)


def forget(group: ProcessGroup) -> None:
    fusedtp.destroy()


@pytest.fixture
def rank() -> Iterator[Workspace]:
    ranks = [Workspace(memory, CPU) for memory in local_memories(2, CPU)]
    yield ranks[0]
    for ws in ranks:
        ws.close()


def test_tensors_of_another_device_are_refused(rank: Workspace) -> None:
    """The launch of a kernel refuses them, and so does an op before it begins."""
    x, kernel = SimpleNamespace(is_cuda=True, device=torch.device("cuda:1")), mock.MagicMock()
    current, refusal = mock.patch.object(torch.cuda, "current_device", return_value=0), r"on cuda:1 .*set_device\(1\)"
    with mock.patch.object(loading, "INTERPRETED", False), current, pytest.raises(ValueError, match=refusal):
        loading.launch(kernel, (1,))((x,))
    kernel.__getitem__.assert_not_called()
    on_gpu, data = mock.patch.object(rank, "_on_host", False), mock.patch.object(rank, "data", x)
    with on_gpu, data, current, pytest.raises(ValueError, match=refusal):
        rank.begin("all_gather", rank.meanings.now)
    with mock.patch.object(torch.cuda, "current_device", return_value=1):
        loading.check_device(x)


@on_ranks(1)
def test_one_rank_starts_no_kernel(group: ProcessGroup) -> None:
    a, b, left, x = torch.randn(3, 4), torch.randn(4, 5), torch.randn(2, 3), torch.randn(3, 6)
    with watched() as (started, _):
        out = direct.one("all_gather_matmul", "fused", group, a, b, sizes=(3,))
        both = direct.run("matmul_reduce_scatter", "fused", group, a, b, None, left, x, sizes=(3,))
    assert torch.equal(out, a @ b)
    assert torch.equal(both[0], a @ b)
    assert torch.equal(both[1], left @ x)
    assert not started


@on_ranks(2)
def test_a_product_that_sends_nothing_is_the_librarys(group: ProcessGroup) -> None:
    x, w = (torch.randn(*shape, requires_grad=True) for shape in ((4, 6), (5, 6)))
    with watched() as (started, _):
        fusedtp.all_gather_linear(x, w, group=group, schedule="fused").sum().backward()
        fusedtp.linear_reduce_scatter(x, w, group=group, schedule="fused").sum().backward()
    assert "_matmul_kernel" not in [start[0] for start in started]


class Count(TorchDispatchMode):
    """Count the operators that run inside."""

    num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += "aten.slice" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_sum_on_a_gpu_is_one_launch_a_term(num_ranks: int) -> None:
    """For a rank's part of 8192 x 8192 in bfloat16, on meta: tensors that are not on a CPU take the GPU's path."""
    parts = [torch.empty(8192 // num_ranks, 8192, dtype=torch.bfloat16, device="meta") for _ in range(num_ranks)]
    out = torch.empty_like(parts[0])
    with Count() as count:
        decomposed._sum_into(parts, NO_EPILOGUE, out)
    # Widened, added, and rounded into the result.
    assert count.num_ops <= num_ranks + 2


def test_what_a_side_stream_reads_is_not_reused_before() -> None:
    """Copies still read a shard's contiguous copy after the op has released it."""
    recorded, x = [], torch.empty(4, 3, dtype=torch.bfloat16)
    ws = mock.MagicMock(rank=0, world_size=2, device=torch.device("cuda:0"))
    ws.view.return_value = torch.empty(4, 8, dtype=torch.bfloat16)
    with (
        mock.patch.object(producer, "travelling", return_value=contextlib.nullcontext()),
        mock.patch.object(producer, "side_stream", return_value="beside"),
        mock.patch.object(Tensor, "record_stream", lambda x, stream: recorded.append((x.shape, stream))),
    ):
        producer._copy(ws, "all_gather", x, (4, 4), 0, Region(0, 8, 1, 4), False, False)
    assert recorded == [((4, 8), "beside")]


def test_a_table_is_made_on_the_main_stream(rank: Workspace) -> None:
    beside = False

    @contextlib.contextmanager
    def travelling(ws: Workspace) -> Iterator[None]:
        nonlocal beside
        beside = True
        yield

    def table(sizes: tuple[int, ...]) -> Tensor:
        assert not beside
        return torch.tensor([0, 4, 8], dtype=torch.int32)

    config = config_for(CPU, torch.float32)
    with (
        mock.patch.object(producer, "travelling", travelling),
        mock.patch.object(rank, "table", table),
        mock.patch.object(producer, "push") as pushed,
        mock.patch.object(producer, "with_pushers", return_value=config),
        mock.patch.object(rank, "device", torch.device("cuda:0")),
    ):
        x = torch.zeros(4, 4)
        producer.produce(
            rank, ALL_GATHER, x, (4, 4), Region(0, 4, 1, 4), producer="push", dst_row=0, config=config, beside=True
        )
    pushed.assert_called_once()
    assert beside
