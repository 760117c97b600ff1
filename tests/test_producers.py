"""The producer of a fused gather: real ranks push, copy, or choose each for itself; and the model's choice."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import fusedtp
from fusedtp import reference
from fusedtp.bench.ranks import RankPool
from fusedtp.calls.bound import BoundTask
from fusedtp.cost import hardware, overlap
from fusedtp.cost.work import Work
from fusedtp.kernels.configs import Config, compiled_config
from fusedtp.kernels.layout import Layout
from fusedtp.kernels.signal import SIGNALS
from fusedtp.schedules import producer
from fusedtp.workspaces import steps
from fusedtp.workspaces.steps import DeviceSteps
from fusedtp.workspaces.workspace import Workspace

from . import direct
from .virtual_ranks import local_memories

CPU = torch.device("cpu")
SIZES = (70, 0, 3, 12)


def gathers(group: ProcessGroup, by: tuple[str, ...]) -> list[str]:
    """Run forward and backward of a gather by this rank's producer, twice, and return the producers used."""
    rank, sizes = group.rank(), SIZES[: group.size()]
    random = torch.Generator().manual_seed(5)
    x, grad = (torch.randn(sum(sizes), cols, generator=random) for cols in (9, 6 * group.size()))
    weight = torch.randn(6 * group.size(), 9, generator=random)
    seen = []
    producer = by[rank % len(by)]
    for _ in range(2):
        mine = reference.chunk(x, 0, rank, sizes).clone().requires_grad_()
        w = weight[6 * rank : 6 * (rank + 1)].clone().requires_grad_()
        y = fusedtp.all_gather_linear(mine, w, group=group, sizes=sizes, schedule="fused", producer=producer)
        seen.append(fusedtp.last_path().producer)
        reference.check(y, reference.matmul(x, w.t()), reference.bound(x, w.t(), x.dtype), f"y, rank {rank}")
        y.backward(grad[:, 6 * rank : 6 * (rank + 1)])
        seen.append(fusedtp.last_path().producer)
        dy = grad[:, 6 * rank : 6 * (rank + 1)]
        reference.check(w.grad, reference.matmul(dy.t(), x), reference.bound(dy.t(), x, x.dtype), f"dw, rank {rank}")
        dx, bound = (
            reference.matmul(grad, weight),
            reference.bound(grad, weight, x.dtype, k_sizes=(6,) * len(sizes)),
        )
        rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        reference.check(mine.grad, dx[rows], bound[rows], f"dx, rank {rank}")
    # Columns, which are the contraction: y = x.T @ dy, with x.T gathered.
    mesh, n = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",)), grad.shape[1]
    mine = reference.chunk(x, 0, rank, sizes).t().contiguous()
    spec, widths = "[M, K_X] @ [K, N_X] -> [M, N_X]", {"K": sizes, "N": n}
    dy = grad[:, 6 * rank : 6 * (rank + 1)].contiguous()
    y = fusedtp.sharded_matmul(mine, dy, spec, mesh, sizes=widths, schedule="fused", producer=producer)
    seen.append(fusedtp.last_path().producer)
    reference.check(y, reference.matmul(x.t(), dy), reference.bound(x.t(), dy, x.dtype), f"by columns, rank {rank}")
    # A sum of tensors that no matmul makes.
    terms = [torch.randn(sum(sizes), 5, generator=random) for _ in sizes]
    task = direct.task_of("reduce_scatter", terms[rank], sizes=sizes)
    (total,) = BoundTask(task, "fused", group, CPU, producer=producer).run({"a": terms[rank]})
    whole = torch.stack(terms).double().sum(0)
    assert torch.allclose(total.double(), reference.chunk(whole, 0, rank, sizes), atol=1e-5), f"sum, rank {rank}"
    return seen


@pytest.mark.parametrize("by", [("copy",), ("push", "copy"), ("auto",)], ids="-".join)
def test_a_layer_by_each_producer(pool: RankPool, by: tuple[str, ...]) -> None:
    for rank, seen in enumerate(pool.run(gathers, by, world_size=3)):
        wanted = by[rank % len(by)]
        # A CPU has neither links nor a copy engine: its kernels run as they would in a graph.
        assert set(seen) == {"push" if wanted == "auto" else wanted}, f"rank {rank}"


@pytest.fixture
def rank() -> Workspace:
    ranks = [Workspace(memory, CPU) for memory in local_memories(2, CPU)]
    yield ranks[1]
    for ws in ranks:
        ws.close()


def test_the_model_chooses_on_a_gpu(rank: Workspace) -> None:
    """Pretends to be on an H100: the workspace is on a GPU, and the stream is not captured."""
    rank.hardware = hardware.find("h100")
    small, large = (Work("gather", M, 3584, 8192, M * 8192, 8, "bfloat16") for M in (128, 16384))
    with (
        mock.patch.object(rank, "device", torch.device("cuda")),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(torch.version, "hip", None),
    ):
        assert [producer.choose(rank, work) for work in (small, large)] == ["push", "copy"]
        assert producer.choose(rank, small, asked_for="copy") == "copy"
        assert producer.choose(rank, large, asked_for="push") == "push"
        with mock.patch.object(torch.version, "hip", "6.4"):
            assert producer.choose(rank, large) == "push"
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            assert producer.choose(rank, large) == "push"
            with pytest.raises(RuntimeError, match="cannot be captured: use 'push'"):
                producer.choose(rank, large, asked_for="copy")
    assert producer.choose(rank, large) == "push"


def test_late_programs_are_those_that_find_no_room(rank: Workspace) -> None:
    """Pretends to be on an H100; includes ranks without rows, columns or contraction."""
    rank.hardware = hardware.find("h100")
    properties = mock.Mock(shared_memory_per_multiprocessor=228 << 10)
    wide, low = (compiled_config("sm_90", 2, shape) for shape in ("many", "few rows"))
    with (
        mock.patch.object(rank, "device", torch.device("cuda")),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
    ):
        whole = Work("gather", 8192, 3584, 8192, 8192 * 8192, 8, "bfloat16")
        config, late = producer.gather_config(rank, wide, whole, 0, "push")
        assert config.pushers == 12
        # Pushing takes 343 us of the matmul's 818 us.
        assert late == pytest.approx(0.42, abs=0.01)
        assert producer.gather_config(rank, wide, whole, 24, "push")[1] == 0
        assert producer.gather_config(rank, low, whole, 0, "push")[1] == 0
        for empty in ({"rows": 0}, {"cols": 0}, {"depth": 0}, {"rows": 128, "cols": 0}, {"rows": 128, "depth": 0}):
            work = replace(whole, **empty)
            assert producer.gather_config(rank, wide, work, 0, "push")[1] == 0
            assert producer.choose(rank, work) in ("push", "copy")


def test_what_a_stream_is_told_to_write(rank: Workspace) -> None:
    """The driver gets the addresses of this rank's words in the peer's header, and the epoch: all in one call."""
    written: list[tuple[int, list[int], int]] = []
    told = mock.Mock(write_all=lambda stream, addresses, value: written.append((stream, [*addresses], value)))
    rank._host_epoch = -5
    with (
        mock.patch.object(rank, "device", torch.device("cuda")),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(torch.cuda, "current_stream", return_value=mock.Mock(cuda_stream=9)),
        mock.patch.object(steps, "driver", return_value=told),
    ):
        device_steps = DeviceSteps(rank)
        with mock.patch.object(steps, "step"):
            device_steps.enter("all_gather")
        device_steps.write(0, 7, 3)
    first = rank.addresses[0] + 4 * (SIGNALS.value + 7 * 2 + 1)
    assert written == [(9, [first, first + 8, first + 16], -4)]


@pytest.mark.parametrize("cols", [16, 4096])
def test_a_copy_is_followed_by_one_call_for_its_signals(rank: Workspace, cols: int) -> None:
    """Two calls of the driver a part, however many pieces with a slot each it has."""
    x, piece = torch.zeros(3000, cols), 32
    region = Layout().region(3000, cols, x.dtype, slots=-(-3000 // piece), piece=piece)
    written: list[tuple[int, int]] = []
    told = mock.Mock(epoch=1, write=lambda dst, slot, count: written.append((slot, count)))
    with (
        mock.patch.multiple(producer, COPY_BYTES=1 << 20, travelling=mock.MagicMock()),
        mock.patch.object(rank, "steps", told),
        mock.patch.object(rank, "view", lambda dst, epoch, begin, shape, dtype: torch.empty(shape, dtype=dtype)),
    ):
        producer._copy(rank, "all_gather", x, (3000, 3000), 0, region, False, False)
        part = producer.part_rows(cols * 4, piece)
    assert len(written) == -(-3000 // part) < -(-3000 // piece)
    slots = [slot + i for slot, count in written for i in range(count)]
    assert slots == [region.slot + i for i in range(-(-3000 // piece))]


def test_pieces_and_parts() -> None:
    """A piece has a tile's rows, halved while they are long; a copy has whole pieces, of at least COPY_BYTES."""
    config = Config(block_m=128)
    assert [producer.piece_rows(row_bytes, config) for row_bytes in (16, 8192, 8208, 16384, 16400, 1 << 20)] == [
        128, 128, 64, 64, 32, 32,
    ]  # fmt: skip
    for row_bytes in (16, 4096, 16384, 1 << 20):
        piece = producer.piece_rows(row_bytes, config)
        part = producer.part_rows(row_bytes, piece)
        assert part % piece == 0
        assert overlap.COPY_BYTES <= part * row_bytes < overlap.COPY_BYTES + piece * row_bytes


def test_copies_travel_no_faster_than_the_host_issues_them() -> None:
    quick = replace(hardware.find("h100"), link_gbps=1e6, copy_start_us=0)
    work = Work("gather", 8192, 16, 8192, 8192 * 8192, 8, "bfloat16")
    # 16 MB to each of seven peers, in parts of 4 MB.
    issued = 7 * 4 * overlap.PART_OF_CHUNK * quick.chunk_us
    assert issued < overlap.Model(work, quick).copied < issued + 100
    assert overlap.Model(work, replace(quick, chunk_us=0)).copied < 100


def asked_for(group: ProcessGroup) -> list[str]:
    """Return the producer of each call's last op (backward's, if it gathers), and the reasons that `auto` gives."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))
    how = {"schedule": "fused", "producer": "copy"}
    x, w = torch.ones(4, 6), torch.ones(5, 6)
    style = fusedtp.FusedColwiseParallel(input_layouts=Shard(0), **how)
    y = fusedtp.RowParallelLinear(12, 4, group=group, **how)(x.clone().requires_grad_())
    seen = []
    for call in (
        lambda: fusedtp.all_gather_linear(x, w, group=group, **how),
        lambda: fusedtp.fsdp_linear(x, w, group=group, **how),
        lambda: fusedtp.all_gather(x, group=group, **how),
        lambda: fusedtp.sharded_matmul(x, w.t(), "[M_X, K] @ [K, N_X] -> [M, N_X]", mesh, **how),
        lambda: fusedtp.ColumnParallelLinear(6, 4, group=group, **how)(x),
        lambda: fusedtp.FSDPLinear(6, 4, group=group, **how)(x),
        lambda: style._apply(nn.Linear(6, 4), mesh)(x),
        lambda: y.sum().backward(),
        lambda: fusedtp.all_gather(x, group=group, schedule="fused", algorithm="direct"),
        lambda: fusedtp.all_gather(x, group=group, schedule="fused", algorithm="ring"),
        lambda: fusedtp.all_gather(x, group=group, schedule="decomposed", algorithm="direct"),
    ):
        call()
        seen.append(fusedtp.last_path().producer)
    # On a CPU `auto` takes no kernel.
    for options in ({}, {"producer": "push"}):
        fusedtp.all_gather_linear(x, w, group=group, **options)
        seen.append(fusedtp.last_path().reason)
    return seen


def test_a_caller_may_ask_for_a_producer(pool: RankPool) -> None:
    """Only gathers by kernels have a producer; elsewhere the path says that the choice has no effect."""
    for *seen, without, told in pool.run(asked_for, world_size=2):
        assert seen == ["copy"] * 8 + ["push", "", ""]
        assert told == f"{without}; producer='push' has no effect, only 'fused' has one to choose"
