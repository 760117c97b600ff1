"""Starting a kernel; or only compiling and loading it, for a graph capture to come.

Nothing can be loaded while a stream captures, and on Triton 3.6 a kernel that was tried there stays broken in its
process. So an op that runs otherwise than a capture would also loads, in advance, the kernels that a capture would run.
A capture that meets a kernel that is not loaded refuses before it touches it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from . import INTERPRETED


class _Mode(threading.local):
    # Another thread may be launching for a group of its own.
    only_loading = False


_mode = _Mode()


@contextlib.contextmanager
def only_loading() -> Iterator[None]:
    """Kernels that are launched inside are compiled and loaded, and not started."""
    before, _mode.only_loading = _mode.only_loading, True
    try:
        yield
    finally:
        _mode.only_loading = before


def is_only_loading() -> bool:
    """Whether this is inside `only_loading`."""
    return _mode.only_loading


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """A function that starts `kernel` on `grid` with the arguments it is called with.

    It raises ValueError for a tensor that is not on the current device, on whose stream Triton starts kernels, and
    RuntimeError in a graph capture for a kernel that has not been loaded.
    """
    if _mode.only_loading:
        return partial(_load, kernel, grid)
    return _starter(kernel, grid)


def _starter(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    return kernel[grid] if INTERPRETED else partial(_start, kernel, grid)


def _load(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    if not INTERPRETED:
        # Indexing the compiled kernel with a grid loads it.
        kernel.warmup(*args, grid=grid, **options)[(*grid, 1, 1)[:3]]


def _start(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    # The first argument of every kernel of ours is a tuple that begins with a tensor.
    check_device(args[0][0])
    capturing = args[0][0].is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing and kernel.warmup(*args, grid=grid, **options).module is None:
        raise RuntimeError(
            f"{kernel.__name__} is not loaded, and a graph capture cannot load it: run the same call, with tensors of "
            "these shapes, strides and alignment, once before capturing"
        )
    kernel[grid](*args, **options)


def check_device(x: torch.Tensor) -> None:
    """ValueError for a tensor of a GPU that is not the current one. All operands of an op are on one device."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        raise ValueError(
            f"tensors are on {x.device} and the current device is cuda:{torch.cuda.current_device()}, on which kernels "
            f"would start: call torch.cuda.set_device({x.device.index}) first"
        )
