"""Execute this process's launches on the stub of a GPU: each kernel runs to its end in its launch.

For processes in build.py's environment, with a CUDA build of torch: `site/sitecustomize.py` calls `listen`. Other
processes share the memory, so the machine reads current values and its atomics are the host's.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import triton

from .lower import MAP_BYTES, Program
from .machine import Machine, Memory, Schedule, Waiting, op_of
from .stub import MAP, Launch, Stub, libcuda, ptx_is_the_image, tensor_map

# More pieces than a process of the tests has at a time.
_MOST_PIECES = 1 << 14
_lock = threading.Lock()
_seeds = itertools.count()


@functools.cache
def _program(name: str, ptx: str) -> Program:
    return Program(name, ptx, op_of)


def _memory() -> list[Memory]:
    """Return all memory that the device and the host have allocated: parameters are addresses, and tables hold more."""
    pieces = np.zeros((_MOST_PIECES, 2), np.uint64)
    count = libcuda().stub_memory(pieces.ctypes.data_as(ctypes.c_void_p), _MOST_PIECES)
    return [Memory(int(begin), int(begin + size), 0) for begin, size in pieces[:count]]


def execute(launch: Launch) -> None:
    """Run a kernel on the machine. Raises `Failed` and `CannotExecute`."""
    program = _program(launch.name, launch.ptx)
    maps = [made for each in launch.parameters if (made := tensor_map(each)) is not None]
    places = itertools.count(0, MAP.itemsize)
    values = {
        name: next(places) if len(each) == MAP_BYTES else int.from_bytes(each, "little")
        for (name, _), each in zip(program.source.params, launch.parameters, strict=True)
    }
    with _lock:
        machine = Machine()
        machine.arenas = _memory()
        machine.launch(
            Waiting(
                launch.name, program, values, [], 0, launch.grid[0], launch.threads // 32, launch.shared_bytes,
                np.array(maps, MAP) if maps else None,
            )
        )  # fmt: skip
        machine.run(Schedule(next(_seeds), residents=8, shared=True, limit=1 << 62))


# The stub of the runtime, which is preloaded, keeps the device's time.
_runtime: Any = ctypes.CDLL(None)


def counted(run: Callable[[], Any]) -> Any:
    """Run what stands for a kernel, and add the time that it takes to the device's."""
    begin = time.monotonic()
    try:
        return run()
    finally:
        length = time.monotonic() - begin
        _runtime.stub_work(ctypes.c_double(1e3 * begin), ctypes.c_double(1e3 * length))


def spin(ms: float) -> None:
    """Let the device's time run ahead of the host's."""
    _runtime.stub_spin(ctypes.c_double(ms))


# The nodes of this process's graphs, by number.
_nodes: list[Callable[[], object]] = []
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)


def is_capturing(stream: int) -> bool:
    """Return whether a stream is captured. If it is not, what is late on the stream runs now."""
    handle = ctypes.c_void_p(stream)
    if libcuda().stub_capture(handle):
        return True
    if libcuda().stub_synchronize(handle):
        raise RuntimeError("a replay has failed: see above")
    return False


def put(node: Callable[[], object], stream: int) -> bool:
    """Add a node to the graph that captures a stream; return False without a capture."""
    if not is_capturing(stream):
        return False
    _nodes.append(node)
    libcuda().stub_add_node(len(_nodes) - 1, ctypes.c_void_p(stream))
    return True


@_Callback
def _run_node(number: int) -> int:
    try:
        _nodes[number]()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def listen() -> Stub:
    """Execute every kernel of this process in its launch, or at each replay of the graph that captures it."""
    triton.knobs.runtime.add_stages_inspection_hook = ptx_is_the_image
    libcuda().stub_on_node(_run_node)
    return Stub(lambda launch: put(lambda: execute(launch), launch.stream) or counted(lambda: execute(launch)))
