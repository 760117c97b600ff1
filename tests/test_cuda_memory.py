"""GPU memory on machines without a GPU: ranks agree before and after torch's rendezvous, even if one rank fails."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp.bench.ranks import RankPool
from fusedtp.memory import cuda
from fusedtp.memory.cuda import SHARE_GPU, CudaMemory, Driver, Gpu, Place
from fusedtp.torch_private import symmetric_empty
from fusedtp.workspaces import registry

from .exchange import Exchange

NUM_BYTES = 4096


@dataclass
class Handle:
    """Every rank's memory at the time of the rendezvous."""

    buffers: list[bytes]
    multicast_ptr: int = 0

    def get_buffer(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert dtype == torch.uint8
        return torch.frombuffer(bytearray(self.buffers[peer]), dtype=torch.uint8).view(shape)


@dataclass
class FakeGpu(Gpu):
    """GPU number `rank` of a host without faults, except those in `changes`, `fails` and `links`."""

    rank: int
    changes: dict[str, Any] = field(default_factory=dict)
    fails: dict[str, BaseException] = field(default_factory=dict)
    links: tuple[bool, bool] | RuntimeError = (True, True)
    sees_peers: bool = True
    address_of_all: int = 0
    entered: int = 0

    def place(self) -> Place:
        return replace(Place.here(self.rank, "Some GPU", f"GPU-{self.rank}"), **self.changes)

    def current(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def _do(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]

    def empty(self, num_bytes: int) -> Tensor:
        self._do("empty")
        return torch.full((num_bytes,), 0x5A, dtype=torch.uint8)

    def synchronize(self) -> None:
        self._do("synchronize")

    def rendezvous(self, own: Tensor, name: str) -> Handle:
        self.entered += 1
        self._do("rendezvous")
        met = Exchange("2.13", 300.0).rendezvous(name, bytes(own.tolist()).hex().encode())
        return Handle([bytes.fromhex(each.decode()) for each in met], self.address_of_all)

    def index_of(self, uuid: str) -> int | None:
        return int(uuid.removeprefix("GPU-")) if self.sees_peers else None

    def reaches(self, index: int, peer: int) -> tuple[bool, bool]:
        if isinstance(self.links, RuntimeError):
            raise self.links
        return self.links


def allocate(group: ProcessGroup, memory: CudaMemory, num_bytes: int = NUM_BYTES) -> tuple[str, str]:
    """Allocate and return the kind and text of the error, if any; on success check every rank's header."""
    header = torch.zeros(64, dtype=torch.int32)
    header[0], header[5] = 3, 100 + group.rank()
    try:
        arena = memory.allocate(num_bytes, header)
    except Exception as error:
        return type(error).__name__, str(error)
    for rank, each in enumerate(arena.tensors):
        words = each[:256].view(torch.int32).tolist()
        assert (words[0], words[5], sum(words)) == (3, 100 + rank, 103 + rank)
        assert not each[256:].any()
    arena.release()
    assert arena.tensors == []
    return "", ""


def attempt(group: ProcessGroup, unusual: dict[int, dict[str, Any]]) -> tuple[str, str, int]:
    """Return the error of an allocation on this rank, and how often it entered torch's rendezvous."""
    settings = dict(unusual.get(group.rank(), {}))
    num_bytes = settings.pop("num_bytes", NUM_BYTES)
    gpu = FakeGpu(group.rank(), **settings)
    kind, said = allocate(group, CudaMemory(group, torch.device("cpu"), gpu, seconds=1.0), num_bytes)
    # The group still works: all ranks have left the allocation alike.
    memory = CudaMemory(group, torch.device("cpu"), FakeGpu(group.rank()), seconds=60.0)
    assert [allocate(group, memory, size) for size in (NUM_BYTES, 2 * NUM_BYTES)] == [("", "")] * 2
    return kind, said, gpu.entered


OUT_OF_MEMORY = RuntimeError("CUDA driver error: out of memory\nadvice that nobody needs")
SAME = {"index": 0, "uuid": "GPU-0"}
WAY = "the way from its GPU 1 (Some GPU) to GPU 0 (Some GPU) of rank 0"

# For each case: the fault by rank, and the message of every rank. No rank enters the rendezvous.
REFUSED: dict[str, tuple[dict[int, dict[str, Any]], str]] = {
    "host": ({2: {"changes": {"host": "another"}}}, "ranks 0 and 2 are on different hosts"),
    "container": (
        {1: {"changes": {"namespace": "pid:[1]"}}},
        "ranks 0 and 1 are in different pid namespaces of one host, as containers are",
    ),
    "directory": (
        {2: {"changes": {"directory": "/there", "directory_id": (1, 2)}}},
        "ranks 0 and 2 do not see one directory of temporary files",
    ),
    "no memory": (
        {1: {"fails": {"empty": OUT_OF_MEMORY}}},
        f"rank 1: it cannot make an arena of {NUM_BYTES} bytes on its GPU: CUDA driver error: out of memory",
    ),
    "no memory by the allocator": (
        {2: {"fails": {"empty": torch.OutOfMemoryError("CUDA out of memory")}}},
        f"rank 2: it cannot make an arena of {NUM_BYTES} bytes on its GPU: CUDA out of memory",
    ),
    "one GPU": ({1: {"changes": SAME}}, f"ranks 0 and 1 share one GPU: set {SHARE_GPU}=1 on all ranks"),
    "one GPU, switched on some ranks": (
        {1: {"changes": {**SAME, "may_share": True}}},
        f"ranks 0 and 1 share one GPU: set {SHARE_GPU}=1 on all ranks",
    ),
    "one number": ({1: {"changes": {"index": 0}}}, "ranks 0 and 1 call two GPUs cuda:0, and torch takes them for one"),
    "unseen": ({1: {"sees_peers": False}}, "rank 1: it does not see the GPU of rank 0"),
    "no access": ({1: {"links": (False, False)}}, f"rank 1: {WAY} has no peer access"),
    "no atomics": ({1: {"links": (True, False)}}, f"rank 1: {WAY} has no native atomics, which signals need"),
    "no answer": ({1: {"links": RuntimeError("the driver's cuInit failed")}}, "rank 1: the driver's cuInit failed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_is_told_before_any_enters_the_rendezvous(pool: RankPool, case: str) -> None:
    unusual, expected = REFUSED[case]
    (first, *others) = pool.run(attempt, unusual, world_size=3)
    kind, said, entered = first
    assert (kind, entered) == ("Unreachable", 0)
    assert expected in said
    assert "\n" not in said
    assert others == [first] * 2


@pytest.mark.parametrize(
    ("error", "own_kind", "prefix"),
    [
        (RuntimeError("CUDA driver error: invalid device"), "Unreachable", "rank 1: torch's rendezvous failed: "),
        # A device error is raised on its own rank.
        (torch.AcceleratorError("CUDA error: an illegal memory access"), "AcceleratorError", ""),
    ],
)
def test_every_rank_is_told_when_one_fails_in_the_rendezvous(
    pool: RankPool, error: Exception, own_kind: str, prefix: str
) -> None:
    first, second, third = pool.run(attempt, {1: {"fails": {"rendezvous": error}}}, world_size=3)
    # The message is not that of the other ranks' timeout.
    assert first == third == ("Unreachable", f"rank 1: torch's rendezvous failed: {error}", 1)
    assert second == (own_kind, f"{prefix}{error}", 1)


@pytest.mark.parametrize(
    ("what", "error"),
    [("empty", TypeError("a mistake")), ("empty", torch.AcceleratorError("broken")), ("synchronize", OUT_OF_MEMORY)],
)
def test_what_is_no_lack_of_memory_is_not_taken_for_one(pool: RankPool, what: str, error: Exception) -> None:
    everywhere = {rank: {"fails": {what: error}} for rank in range(2)}
    assert pool.run(attempt, everywhere, world_size=2) == [(type(error).__name__, str(error), 0)] * 2


def of_all(group: ProcessGroup, addresses: dict[int, int]) -> int:
    gpu = FakeGpu(group.rank(), address_of_all=addresses[group.rank()])
    arena = CudaMemory(group, torch.device("cpu"), gpu, seconds=60.0).allocate(NUM_BYTES, torch.zeros(64).int())
    return arena.multicast


def test_an_address_of_all_ranks_is_all_ranks_or_none(pool: RankPool) -> None:
    assert pool.run(of_all, {0: 64, 1: 96, 2: 128}, world_size=3) == [64, 96, 128]
    # A rank on another switch, or a rank that must not use multicast.
    assert pool.run(of_all, {0: 64, 1: 0, 2: 128}, world_size=3) == [0, 0, 0]


def gone(group: ProcessGroup) -> tuple[bool, bool]:
    """Return whether a group that torch has destroyed, and its workspace in such memory, are still there."""
    other = dist.new_group(dist.get_process_group_ranks(group))
    memory = [CudaMemory(other, torch.device("cpu"), FakeGpu(group.rank()), seconds=60.0)]
    made = {"PosixMemory": lambda *_: memory.pop(), "StoreExchange": lambda *_: None}
    with mock.patch.multiple(registry, **made):
        registry.get(other, torch.device("cpu"))
    alive, name = weakref.ref(other), other.group_name
    dist.barrier(other)
    dist.destroy_process_group(other)
    del other
    gc.collect()
    return alive() is not None, any(key[0] == name for key in registry._workspaces)


def test_memory_goes_with_a_group_that_torch_destroys(pool: RankPool) -> None:
    assert pool.run(gone) == [(False, False)] * 4


def test_memory_of_another_backend_is_refused(pool: RankPool) -> None:
    """NVSHMEM's allocations are collective over the job."""
    memory = torch._C._distributed_c10d._SymmetricMemory
    with (
        mock.patch.object(memory, "get_backend", return_value="NVSHMEM"),
        pytest.raises(RuntimeError, match="is NVSHMEM's here, by TORCH_SYMMMEM or set_backend"),
    ):
        symmetric_empty(64, torch.device("cpu"))


def test_ranks_that_do_not_ask_alike_are_told(pool: RankPool) -> None:
    first, second = pool.run(attempt, {1: {"num_bytes": 8192}}, world_size=2)
    assert first == second
    assert first[0] == "ValueError"
    assert "4096 from epoch 3 on rank 0, 8192 from epoch 3 on rank 1" in first[1]


def test_ranks_may_share_a_gpu_where_torch_is_told_so(pool: RankPool) -> None:
    # A GPU needs no link to itself.
    shared = {"changes": {**SAME, "may_share": True}, "links": (False, False)}
    assert pool.run(attempt, {rank: shared for rank in range(3)}, world_size=3) == [("", "", 1)] * 3


@pytest.fixture
def short() -> Iterator[Path]:
    """Make a folder with a path short enough for a socket's, however long pytest's own paths are."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_torchs_socket_is_looked_at_before(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        monkeypatch.delenv(name, raising=False)
    assert Place.here(0, "", "").directory == "/tmp"
    monkeypatch.setenv("TEMP", str(short))
    assert Place.here(0, "", "").directory == str(short)
    assert cuda.socket_refusal() == ""
    (short / f"symm_mem-{os.getpid()}").touch()
    assert "is there already" in cuda.socket_refusal()
    deep = short / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    assert "longer than 107 bytes" in cuda.socket_refusal()
    monkeypatch.setenv("TMPDIR", str(short / "nowhere"))
    assert "cannot make its socket" in cuda.socket_refusal()


def left_over(group: ProcessGroup, folder: str) -> tuple[str, str, int]:
    """Allocate where a killed process with rank 1's process id has left its socket."""
    before, os.environ["TMPDIR"] = os.environ.get("TMPDIR"), folder
    socket = Path(folder) / f"symm_mem-{os.getpid()}"
    gpu = FakeGpu(group.rank())
    try:
        if group.rank() == 1:
            socket.touch()
        return *allocate(group, CudaMemory(group, torch.device("cpu"), gpu, seconds=1.0)), gpu.entered
    finally:
        socket.unlink(missing_ok=True)
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def test_every_rank_is_told_of_a_socket_that_is_in_the_way(pool: RankPool, short: Path) -> None:
    for kind, said, entered in pool.run(left_over, str(short), world_size=3):
        assert (kind, entered) == ("Unreachable", 0)
        assert said.startswith(f"rank 1: torch's socket {short}/symm_mem-")


def answering(p2p: dict[tuple[int, int, int], int], modes: dict[int, int], error: int = 0) -> Any:
    """Return a driver library whose handle for device n is 10 + n."""

    def put(pointer: Any, value: int) -> int:
        pointer._obj.value = value
        return error

    assert isinstance(ctypes.byref(ctypes.c_int())._obj, ctypes.c_int)
    return SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGet=lambda out, index: put(out, 10 + index),
        cuDeviceGetP2PAttribute=lambda out, kind, a, b: put(out, p2p[kind, a, b]),
        cuDeviceGetAttribute=lambda out, kind, a: put(out, modes[a]) if kind == 20 else 1,
    )


def test_the_driver_is_asked_for_access_atomics_and_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(answering({(2, 10, 13): 1, (3, 10, 13): 0, (2, 13, 10): 1, (3, 13, 10): 1}, {10: 0, 13: 3}))
    assert driver.peers(0, 3) == (True, False)
    assert driver.peers(3, 0) == (True, True)
    assert [driver.compute_mode(index) for index in (0, 3)] == ["default", "exclusive process"]
    with pytest.raises(RuntimeError, match="cuDeviceGet failed with error 101"):
        Driver(answering({}, {}, error=101)).peers(0, 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError("not there")))
    with pytest.raises(RuntimeError, match=r"libcuda.so.1 cannot be loaded: not there"):
        Driver()
