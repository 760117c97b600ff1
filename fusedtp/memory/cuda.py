"""Arenas on GPUs of one NVLink domain, in torch's symmetric memory.

torch's rendezvous (`torch.distributed._symmetric_memory`, docs of torch >= 2.11) waits forever for a rank that is on
another host or has failed. So the ranks exchange outcomes through their group: before, that all have memory and can
reach the others' memory, which every rank computes from all `Place`s; after, that all have succeeded. Only `Gpu` and
`Driver` need a GPU.

Signals live inside the arena. torch's own signal pad is shared by every group of a process, and two groups collide on
it. TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 allows several ranks on one GPU, for tests.
"""

from __future__ import annotations

import ctypes
import os
import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

# Public in torch.distributed, but untyped there.
from torch._C._distributed_c10d import PrefixStore, Store

from ..torch_private import register_group, store_of, symmetric_empty, symmetric_rendezvous, unregister_group
from . import Arena, Exchange, Unreachable, differing

# torch's environment variable.
SHARE_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"

# Length of sockaddr_un's sun_path without its final zero (man 7 unix); torch does not check it.
_MAX_SOCKET_NAME = 107


@dataclass(frozen=True)
class Place:
    """Place of a rank: host, pid namespace, directory of sockets, and its GPU as the process and the driver name it."""

    host: str
    namespace: str
    directory: str
    directory_id: tuple[int, int]
    index: int
    gpu: str
    uuid: str
    may_share: bool

    @classmethod
    def here(cls, index: int, gpu: str, uuid: str) -> Place:
        """Return this process's place, on the GPU that it knows by `index`."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        directory = _socket_directory()
        try:
            status = os.stat(directory)
            directory_id = (status.st_dev, status.st_ino)
        except OSError:
            directory_id = (0, 0)
        pids = os.readlink("/proc/self/ns/pid")
        return cls(boot, pids, directory, directory_id, index, gpu, uuid, os.environ.get(SHARE_GPU) == "1")


def _socket_directory() -> str:
    # Chosen like torch's directory: IpcChannel::get_socket_name in torch/csrc/distributed/c10d/symm_mem/
    # CUDASymmetricMemoryUtils.cpp, 2.11 to 2.13.
    return next((os.environ[name] for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if name in os.environ), "/tmp")


def socket_refusal() -> str:
    """Return why torch cannot open the socket that passes this process's descriptors; "" if it can."""
    name = f"{_socket_directory()}/symm_mem-{os.getpid()}"
    if not os.access(_socket_directory(), os.W_OK | os.X_OK):
        return f"torch cannot make its socket {name} there: set TMPDIR to a directory that can be written"
    if len(os.fsencode(name)) > _MAX_SOCKET_NAME:
        return f"the name of torch's socket, {name}, is longer than {_MAX_SOCKET_NAME} bytes: set TMPDIR to a short one"
    if os.path.lexists(name):
        return f"torch's socket {name} is there already, left by a process that was killed: remove it"
    return ""


def refusal(places: Sequence[Place]) -> str:
    """Return why ranks at these places cannot map each other's memory, alike on all ranks; "" if no reason is known."""
    for (a, first), (b, second) in combinations(enumerate(places), 2):
        both = f"ranks {a} and {b}"
        if first.host != second.host:
            return f"{both} are on different hosts"
        if first.namespace != second.namespace:
            return f"{both} are in different pid namespaces of one host, as containers are"
        if first.directory_id != second.directory_id:
            return (
                f"{both} do not see one directory of temporary files, through which torch passes descriptors "
                f"({first.directory} and {second.directory}): set TMPDIR alike"
            )
        if first.index == second.index and not (first.may_share and second.may_share):
            if first.uuid == second.uuid:
                return f"{both} share one GPU: set {SHARE_GPU}=1 on all ranks if they are meant to"
            return (
                f"{both} call two GPUs cuda:{first.index}, and torch takes them for one: let every rank see all GPUs, "
                "without a CUDA_VISIBLE_DEVICES of its own, and choose one with torch.cuda.set_device"
            )
    return ""


class Gpu:
    """Calls of `CudaMemory` to torch's symmetric memory and to the driver, for one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def place(self) -> Place:
        properties = torch.cuda.get_device_properties(self.device)
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        return Place.here(index, properties.name, str(properties.uuid))

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which objects are exchanged through this device."""
        return torch.cuda.device(self.device)

    def empty(self, num_bytes: int) -> Tensor:
        """Return a separate block of `num_bytes`; RuntimeError if the device has no memory left.

        `symm_mem.empty` would cut several tensors from one block of a pool. The rendezvous assumes that a tensor lies
        at the same place in the peers' blocks, which is wrong if ranks have different histories.
        """
        try:
            return symmetric_empty(num_bytes, self.device)
        except torch.AcceleratorError:
            raise
        except RuntimeError:
            # torch asks the driver directly here, so free torch's cached memory first.
            torch.cuda.empty_cache()
        return symmetric_empty(num_bytes, self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def rendezvous(self, own: Tensor, name: str) -> Any:
        """Run torch's rendezvous in the group of that name and return its handle, which has `get_buffer`."""
        return symmetric_rendezvous(own, name)

    def multicast(self, handle: Any) -> int:
        """Return the multicast address of the rendezvous's handle, or 0.

        It is 0 if the switch has none, or if TORCH_SYMM_MEM_DISABLE_MULTICAST tells torch not to use it.
        """
        return 0 if torch.version.hip else int(handle.multicast_ptr or 0)

    def index_of(self, uuid: str) -> int | None:
        """Return this process's index of the GPU with that id; None if the process does not see it."""
        count = torch.cuda.device_count()
        return next((i for i in range(count) if str(torch.cuda.get_device_properties(i).uuid) == uuid), None)

    def reaches(self, index: int, peer: int) -> tuple[bool, bool]:
        """Return whether GPU `index` can address the memory of GPU `peer`, and whether its atomics work there."""
        return Driver().peers(index, peer)


class Driver:
    """The driver's own answers, by ctypes, as torch passes on too few; RuntimeError if it gives none."""

    # CUdevice_P2PAttribute and CUdevice_attribute in cuda.h, hipDeviceP2PAttr in hip_runtime_api.h.
    _ACCESS, _NATIVE_ATOMICS, _COMPUTE_MODE = 2, 3, 20
    _HIP_ACCESS, _HIP_NATIVE_ATOMICS = 1, 2
    # CUstreamCaptureStatus and CUstreamUpdateCaptureDependencies_flags, the same in HIP.
    _CAPTURE_IS_ACTIVE, _SET_DEPENDENCIES = 1, 1
    # CUstreamBatchMemOpType, and the most operations of a call: less than 256 (cuda.h).
    _WRITE_VALUE_32, _MOST_IN_BATCH = 2, 255
    # CUcomputemode
    MODES = ("default", "exclusive thread", "prohibited", "exclusive process")

    def __init__(self, library: Any = None) -> None:
        self._hip = torch.version.hip is not None
        name = "libamdhip64.so" if self._hip else "libcuda.so.1"
        try:
            self._library = ctypes.CDLL(name) if library is None else library
        except OSError as error:
            raise RuntimeError(f"the driver's library {name} cannot be loaded: {error}") from error
        self._call("hipInit" if self._hip else "cuInit", 0)

    def _call(self, function: str, *arguments: Any) -> None:
        if code := getattr(self._library, function)(*arguments):
            raise RuntimeError(f"the driver's {function} failed with error {code}")

    def _call_either(self, function: str, *arguments: Any) -> None:
        # A function whose names and parameters differ by the prefix only.
        self._call(f"{'hip' if self._hip else 'cu'}{function}", *arguments)

    def _asked(self, function: str, *arguments: Any) -> int:
        value = ctypes.c_int(-1)
        self._call(function, ctypes.byref(value), *arguments)
        return value.value

    def peers(self, index: int, peer: int) -> tuple[bool, bool]:
        if self._hip:
            kinds = (self._HIP_ACCESS, self._HIP_NATIVE_ATOMICS)
            access, atomics = (self._asked("hipDeviceGetP2PAttribute", kind, index, peer) for kind in kinds)
        else:
            pair = [self._asked("cuDeviceGet", each) for each in (index, peer)]
            kinds = (self._ACCESS, self._NATIVE_ATOMICS)
            access, atomics = (self._asked("cuDeviceGetP2PAttribute", kind, *pair) for kind in kinds)
        return access == 1, atomics == 1

    def compute_mode(self, index: int) -> str:
        """Return which processes may use an NVIDIA GPU, one of `MODES`."""
        return self.MODES[self.attribute(self._COMPUTE_MODE, index)]

    def attribute(self, number: int, index: int) -> int:
        """Return the value of a CUdevice_attribute of an NVIDIA GPU."""
        return self._asked("cuDeviceGetAttribute", number, self._asked("cuDeviceGet", index))

    def capture(self, stream: int) -> tuple[int, int, tuple[int, ...]]:
        """Return the number and graph of a stream's capture, and the nodes that the stream's next node follows."""
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        nodes, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
        places = map(ctypes.byref, (status, number, graph, nodes, count))
        self._call_either("StreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *places)
        if status.value != self._CAPTURE_IS_ACTIVE:
            raise RuntimeError("the graph capture is no longer valid: an earlier call broke it")
        return number.value, graph.value or 0, tuple(nodes[i] or 0 for i in range(count.value))

    def write(self, stream: int, address: int, value: int) -> None:
        """Let a stream write an int32 after its earlier work, which is then visible to all devices and the host."""
        self._call("cuStreamWriteValue32_v2", *self._word(stream, address, value), 0)

    def write_all(self, stream: int, addresses: Sequence[int], value: int) -> None:
        """Let a stream write an int32 to each address, as `write` does: one call for up to `_MOST_IN_BATCH`."""
        for first in range(0, len(addresses), self._MOST_IN_BATCH):
            some = addresses[first : first + self._MOST_IN_BATCH]
            writes = (_Write * len(some))(*(_Write(self._WRITE_VALUE_32, each, value % 2**32) for each in some))
            self._call("cuStreamBatchMemOp_v2", ctypes.c_void_p(stream), ctypes.c_uint(len(some)), writes, 0)

    def wait(self, stream: int, address: int, value: int) -> None:
        """Hold a stream until the int32 at `address` is `value` or later, by the sign of their difference."""
        self._call("cuStreamWaitValue32_v2", *self._word(stream, address, value), 0)

    @staticmethod
    def _word(stream: int, address: int, value: int) -> tuple[Any, ...]:
        return ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value)

    def add_wait(self, stream: int, event: int) -> None:
        """Add a node to a stream's capture that waits, at each replay, for the last record of `event` before it."""
        _, graph, before = self.capture(stream)
        node = ctypes.c_void_p()
        where = ctypes.byref(node), ctypes.c_void_p(graph), *_nodes(before)
        self._call_either("GraphAddEventWaitNode", *where, ctypes.c_void_p(event))
        made = ctypes.byref(node), ctypes.c_size_t(1), self._SET_DEPENDENCIES
        self._call_either("StreamUpdateCaptureDependencies", ctypes.c_void_p(stream), *made)

    def add_record(self, graph: int, before: Sequence[int], event: int) -> int:
        """Add a node to a graph that records `event` after the nodes `before`, and return it."""
        node = ctypes.c_void_p()
        where = ctypes.byref(node), ctypes.c_void_p(graph), *_nodes(before)
        self._call_either("GraphAddEventRecordNode", *where, ctypes.c_void_p(event))
        return node.value or 0

    def add_edges(self, graph: int, before: Sequence[int], node: int) -> None:
        """Let a node of a graph follow the nodes `before` too."""
        (begins, count), (ends, _) = _nodes(before), _nodes([node] * len(before))
        self._call_either("GraphAddDependencies", ctypes.c_void_p(graph), begins, ends, count)


class _Write(ctypes.Structure):
    # CUstreamBatchMemOpParams of a write, without flags: a union of 48 bytes.
    _fields_: ClassVar = [
        ("operation", ctypes.c_int), ("address", ctypes.c_uint64), ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint), ("rest", ctypes.c_uint64 * 2),
    ]  # fmt: skip


def _nodes(nodes: Sequence[int]) -> tuple[Any, ctypes.c_size_t]:
    return (ctypes.c_void_p * len(nodes))(*nodes), ctypes.c_size_t(len(nodes))


def link_refusal(places: Sequence[Place], rank: int, gpu: Gpu) -> str:
    """Return why `rank`'s signals would not work in some peer's memory, as the driver says; "" if they would."""
    own = places[rank]
    for peer, place in enumerate(places):
        if place.uuid == own.uuid:
            continue
        index = gpu.index_of(place.uuid)
        if index is None:
            return f"it does not see the GPU of rank {peer}: let every rank see all GPUs (CUDA_VISIBLE_DEVICES)"
        try:
            access, atomics = gpu.reaches(own.index, index)
        except RuntimeError as error:
            return str(error)
        way = f"the way from its GPU {own.index} ({own.gpu}) to GPU {place.index} ({place.gpu}) of rank {peer}"
        if not access:
            return f"{way} has no peer access (nvidia-smi topo -p2p r)"
        if not atomics:
            return f"{way} has no native atomics, which signals need, as over PCIe (nvidia-smi topo -p2p a)"
    return ""


# torch numbers its exchanges by process, not by group. It leaves keys `CUDASymmetricMemory/<number>/<rank>` in a
# group's store, and each rank counts on from the exchanges it has had so far (`StoreExchange` in
# torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryUtils.hpp of 2.11 to 2.14; pytorch issue 196082). Ranks of
# different histories would wait for keys that nobody writes. So ranks meet in a group made for one rendezvous, whose
# store renumbers the keys: the n-th number that torch uses there is n on every rank. torch 2.15 counts by store, and
# there renumbering changes nothing. The group has a second use: torch caches the rendezvous of a piece of memory by the
# group's name.

# Between two exchanges a rank works for milliseconds; a rank that fails there never reaches the next exchange.
MEET_SECONDS = 60.0

# torch 2.11 uses <kind>/<number>/<rank>, 2.13 also <kind>/<number>/num_members and last_member (`Store::barrier`).
_NUMBERED = re.compile(r"(.*)/(\d+)/([^/]+)")

Handle = TypeVar("Handle")


class RenumberedStore(Store):
    """`store` for one rendezvous, with keys renumbered by the exchanges made there. No wait exceeds `seconds`.

    torch's C++ code calls these methods, and no others.
    """

    def __init__(self, store: Store, seconds: float = MEET_SECONDS) -> None:
        super().__init__()
        self._store, self._limit = store, timedelta(seconds=seconds)
        self._numbers: dict[str, dict[str, int]] = {}

    def _key(self, key: str) -> str:
        match = _NUMBERED.fullmatch(key)
        if match is None:
            return key
        kind, number, what = match.groups()
        # An exchange begins with this rank's own entry, so numbers are first seen in the order of the exchanges.
        seen = self._numbers.setdefault(kind, {})
        return f"{kind}/{seen.setdefault(number, len(seen))}/{what}"

    def set(self, key: str, value: str) -> None:
        self._store.set(self._key(key), value)

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._key(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return self._store.multi_get([self._key(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        # If torch gives a limit, it is five minutes.
        self._store.wait([self._key(key) for key in keys], min(timeout or self._limit, self._limit))


def meet(
    rendezvous: Callable[[str], Handle], group: dist.ProcessGroup, name: str, seconds: float = MEET_SECONDS
) -> Handle:
    """Return the result of `rendezvous`, called with the name of a group made for this call from the ranks of `group`.

    Collective. `name` is the same on all ranks, and never used before. Raises RuntimeError (torch's DistStoreError) if
    a peer does not come within `seconds`.
    """
    store = RenumberedStore(PrefixStore(name, store_of(group)), seconds)
    private = dist.ProcessGroup(store, group.rank(), group.size())
    # Keep both until the end: torch looks groups up by name and holds them weakly, and a store without its Python
    # object has no methods.
    register_group(name, private)
    try:
        return rendezvous(name)
    finally:
        unregister_group(name)
        del private, store


@dataclass(frozen=True)
class _Offer:
    # A rank's offer to the others before they meet. name: of the group in which they will meet; rank 0's is used.
    place: Place
    num_bytes: int
    epoch: int
    why_not: str
    name: str


class CudaMemory:
    """Arenas of the ranks of `group` on `device`."""

    exchanges = False

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, gpu: Gpu | None = None, seconds: float = MEET_SECONDS
    ) -> None:
        # Weak: the memory goes with the group's last reference (`registry`).
        self._group, self._gpu, self._seconds = ref(group), gpu or Gpu(device), seconds
        self.rank, self.world_size = group.rank(), group.size()

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the group, which the caller keeps alive."""
        group = self._group()
        assert group is not None
        return group

    def allocate(self, num_bytes: int, header: Tensor, exchange: Exchange | None = None) -> Arena:
        """Allocate as `Memory.allocate` does.

        Raises on every rank, with one reason: `Unreachable` if any rank has no memory left or cannot be mapped by
        another, ValueError if the ranks ask for different arenas. Raises torch.AcceleratorError, from the device
        itself, on the rank where it happens.
        """
        own, why_not = self._own(num_bytes, header)
        name = f"fusedtp/{uuid.uuid4().hex}"
        # After this exchange every rank's header is in place: peers must not signal before.
        offers = self._exchange(_Offer(self._gpu.place(), num_bytes, int(header[0]), why_not, name))
        asked = [(each.num_bytes, each.epoch) for each in offers]
        if len(set(asked)) > 1:
            raise ValueError(differing(asked))
        _raise_first([each.why_not for each in offers])
        places = [each.place for each in offers]
        if reason := refusal(places):
            raise Unreachable(reason)
        _raise_first(self._exchange(link_refusal(places, self.rank, self._gpu)))
        assert own is not None
        handle, multicast = self._meet(own, offers[0].name)
        tensors = [
            own if peer == self.rank else handle.get_buffer(peer, (num_bytes,), torch.uint8)
            for peer in range(self.world_size)
        ]
        kept = [handle]

        def release() -> None:
            # Drop the tensors of the peers, and the handle that keeps their memory mapped.
            tensors.clear()
            kept.clear()

        return Arena(tensors, release, multicast)

    def _own(self, num_bytes: int, header: Tensor) -> tuple[Tensor | None, str]:
        # Return this rank's memory with the header in place, or the reason why there is none.
        try:
            own = self._gpu.empty(num_bytes)
        except torch.AcceleratorError:
            # The device is broken, and so is the way to tell the peers.
            raise
        except RuntimeError as error:
            return None, f"it cannot make an arena of {num_bytes} bytes on its GPU: {_first_line(error)}"
        own.zero_()
        own[: header.numel() * 4].view(torch.int32).copy_(header)
        self._gpu.synchronize()
        return own, socket_refusal()

    def _meet(self, own: Tensor, name: str) -> tuple[Any, int]:
        # torch's handle, and the multicast address if all ranks have one.
        handle, failure, multicast = None, None, 0
        try:
            handle = meet(lambda group: self._gpu.rendezvous(own, group), self.group, name, self._seconds)
            multicast = self._gpu.multicast(handle)
        except RuntimeError as error:
            failure = error
        # A rank that waited in vain did not fail itself: report it only if no other rank gives a reason.
        outcome = "" if failure is None else f"torch's rendezvous failed: {_first_line(failure)}"
        waited = isinstance(failure, dist.DistStoreError)
        outcomes = self._exchange((outcome, waited, multicast != 0))
        try:
            _raise_first(["" if waited else reason for reason, waited, _ in outcomes])
            _raise_first([reason for reason, _, _ in outcomes])
        except Unreachable as agreed:
            # After an error of the device itself no other schedule would help.
            raise failure if isinstance(failure, torch.AcceleratorError) else agreed from failure
        return handle, multicast if all(has for _, _, has in outcomes) else 0

    def _exchange(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.world_size
        with self._gpu.current():
            dist.all_gather_object(everyone, mine, group=self.group)
        return everyone


def _first_line(error: RuntimeError) -> str:
    # torch appends advice and its C++ stack.
    return str(error).partition("\n")[0]


def _raise_first(reasons: list[str]) -> None:
    for rank, reason in enumerate(reasons):
        if reason:
            raise Unreachable(f"rank {rank}: {reason}")
