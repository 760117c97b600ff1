"""Checks of the GPUs of a group before its ranks enter torch's rendezvous, and the driver's view of peer access.

The rendezvous waits forever for a rank that has failed, so ranks exchange `Place`s first and judge them alike. Only
`Gpu` and `Driver` need a GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..torch_private import symmetric_empty, symmetric_rendezvous

# torch's own switch.
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
    # torch chooses it in the same way: IpcChannel::get_socket_name in torch/csrc/distributed/c10d/symm_mem/
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
        """Return memory of its own for `num_bytes`; RuntimeError if the device has none left.

        `symm_mem.empty` would cut several tensors from one block of a pool. The rendezvous assumes that a tensor lies
        at the same place in the peers' blocks, which is wrong if ranks have different histories.
        """
        try:
            return symmetric_empty(num_bytes, self.device)
        except torch.AcceleratorError:
            raise
        except RuntimeError:
            # This asks the driver directly, so give back first the memory that torch keeps for later tensors.
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
