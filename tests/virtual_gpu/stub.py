"""The stub of libcuda in this process: Triton's own CudaDriver and CudaLauncher run over it. Every kernel launch
arrives at a function of ours with the bytes that a GPU would get.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

# Imported before the stub: torch's libraries look for libcuda by name, and must not find the stub.
import torch
from triton.backends.nvidia.driver import CudaDriver

from . import build, compiler
from .lower import MAP_BYTES
from .ptx import Source, parse

# The number of the stub's device (device.h), by compute capability.
DEVICES = {90: 0, 80: 1}
_MAP_MAGIC = 0x70616D73
# A tensor map as the stub encodes it (StubMap in libcuda.c), and as the machine reads it: innermost dimension first,
# strides in bytes.
_ENCODED = np.dtype([("base", "u8"), ("ndim", "u4"), ("magic", "u4"), ("swizzle", "u4"), ("size", "u4"),
                     ("dim", "u4", 5), ("box", "u4", 5), ("stride", "u8", 4)])  # fmt: skip
MAP = np.dtype([("ndim", "i8"), ("swizzle", "i8"), ("base", "i8"), ("size", "i8"), ("dim", "i8", 5),
                ("stride", "i8", 5), ("box", "i8", 5)])  # fmt: skip


class _Launch(ctypes.Structure):
    # StubLaunch in libcuda.c.
    _fields_ = [
        ("name", ctypes.c_char_p), ("image", ctypes.c_char_p), ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_ulonglong),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
    ]  # fmt: skip


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Launch))


@dataclass(frozen=True)
class Launch:
    """A call of cuLaunchKernelEx: the module's PTX, and each parameter's bytes, with the sizes declared in the PTX."""

    name: str
    ptx: str
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    stream: int
    parameters: list[bytes]


@functools.cache
def _source(ptx: str) -> Source:
    return parse(ptx)


def tensor_map(parameter: bytes) -> Any:
    """Return a parameter as the machine's tensor map, or None for a number."""
    if len(parameter) != MAP_BYTES:
        return None
    (encoded,) = np.frombuffer(parameter[: _ENCODED.itemsize], _ENCODED)
    assert encoded["magic"] == _MAP_MAGIC, f"{MAP_BYTES} bytes that are no tensor map: {parameter.hex()}"
    made = np.zeros((), MAP)
    for name in ("ndim", "swizzle", "base", "size", "dim", "box"):
        made[name] = encoded[name]
    made["stride"][0], made["stride"][1:] = encoded["size"], encoded["stride"]
    return made


def ptx_is_the_image(*given: Any) -> tuple[str, str] | None:
    """End compilation at PTX, which the stub loads like a cubin: ptxas would take most of a test's time."""
    if not given:
        return "executed", "executed"
    _, stages, *_ = given
    stages["cubin"] = lambda source, metadata: source.encode() + b"\0"
    return None


@functools.cache
def libcuda() -> ctypes.CDLL:
    """Load the stub for every library that opens libcuda.so.1."""
    path = build.libcuda()
    # Triton links its launchers to the libcuda of this folder.
    os.environ["TRITON_LIBCUDA_PATH"] = str(path.parent)
    if not any(map(shutil.which, ("gcc", "clang"))) and "CC" not in os.environ:
        wrapper = path.parent / "cc"
        wrapper.write_text('#!/bin/sh\nexec {} "$@"\n'.format(" ".join(compiler.command())))
        wrapper.chmod(0o700)
        os.environ["CC"] = str(wrapper)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


class Stub:
    """The stub with one listener for launches; an exception of the listener fails the launch and is kept."""

    def __init__(self, listener: Callable[[Launch], object]) -> None:
        self.failure: BaseException | None = None
        self._listener = listener
        # ctypes keeps no reference to the callback.
        self._callback = _Callback(self._launched)
        libcuda().stub_on_launch(self._callback)

    def _launched(self, pointer: Any) -> int:
        try:
            launch = pointer.contents
            ptx = launch.image.decode()
            sizes = [size for _, size in _source(ptx).params]
            parameters = [ctypes.string_at(launch.parameters[i], size) for i, size in enumerate(sizes)]
            self._listener(
                Launch(
                    launch.name.decode(), ptx, tuple(launch.grid), launch.block[0], launch.shared_bytes, launch.stream,
                    parameters,
                )
            )  # fmt: skip
        except BaseException as error:
            traceback.print_exc()
            self.failure = error
            return 1
        return 0


def cuda_driver(capability: int, current_stream: Callable[[int], int]) -> CudaDriver:
    """Return Triton's own driver over the stub, with answers for its calls of torch.cuda, as torch is a CPU build."""
    libcuda()
    made = CudaDriver()
    made.get_current_device = lambda: DEVICES[capability]
    made.set_current_device = lambda device: None
    made.get_current_stream = current_stream
    made.get_device_capability = lambda device=0: divmod(capability, 10)
    made.get_active_torch_device = lambda: torch.device("cpu")
    return made
