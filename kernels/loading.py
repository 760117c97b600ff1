"""Start a kernel, or only compile and load it for a later graph capture.

Nothing can be loaded while a stream captures. On Triton 3.6 a kernel whose load failed there stays broken in its
process. So an op that runs other kernels than a capture would also loads the capture's kernels, in advance. A capture
that meets a kernel that is not loaded raises before it touches that kernel.

Pipeline stages take shared memory. A kernel that asks for more than there is runs with fewer stages, as nothing that
ranks agree on depends on stages. The fixed table never asks for too much (`nox -s kernels`). A choice that was measured
for one layout of the operands may do so for another layout.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from triton.runtime.errors import OutOfResources

from . import INTERPRETED

R = TypeVar("R")
_SHARED_MEMORY = "shared memory"


class _Mode(threading.local):
    # Another thread may be launching for its own group.
    only_loading = False


_mode = _Mode()


@contextlib.contextmanager
def only_loading() -> Iterator[None]:
    """Compile and load the kernels that are launched inside, without starting them."""
    before, _mode.only_loading = _mode.only_loading, True
    try:
        yield
    finally:
        _mode.only_loading = before


def is_only_loading() -> bool:
    """Return whether the caller is inside `only_loading`."""
    return _mode.only_loading


class Started(NamedTuple):
    """A kernel that has been started.

    - `run`: starts the kernel again, on the same grid and the current stream, with flat parameters.
    - `params`, `names`: the flat parameters, and the names of the arguments that they are from.
    - `hooks`: functions that are to see the kernel's arguments before every start.
    - `scratch`: float32 parameter that is undefined when the kernel starts.
    - `written`: the table of blocks (`blocks.Written`) that was written before, if the kernel has one.
    """

    run: Callable[..., Any]
    params: list[Any]
    names: list[str]
    hooks: list[Any]
    scratch: torch.Tensor | None = None
    written: Any = None


def launch(kernel: Any, grid: tuple[int, ...], blocks: Any = None) -> Callable[..., Any]:
    """Return a function that starts `kernel` on `grid` with the arguments of its call, after writing `blocks`, if any.

    The function returns `Started`, or None if the kernel is interpreted or only loaded.

    The function raises ValueError for tensors that are not on the current device, on whose stream Triton starts
    kernels. It raises RuntimeError in a graph capture for a kernel that is not loaded.
    """
    start = partial(_load, kernel, grid) if _mode.only_loading else _starter(kernel, grid)
    return start if blocks is None else partial(_after_writing, blocks, start)


def _after_writing(blocks: Any, start: Callable[..., Any], *args: Any, **options: Any) -> Any:
    written = blocks.write()
    started = start(*args, **options)
    return started._replace(written=written) if isinstance(started, Started) else started


def _starter(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    return kernel[grid] if INTERPRETED else partial(_start, kernel, grid)


def _load(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    if not INTERPRETED:
        _compiled_with_room(kernel, grid, args, options, load)


def _start(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Started:
    # The first argument of every kernel is a tuple that begins with a tensor, or with a column of blocks.
    first = args[0][0]
    first = first[0] if isinstance(first, tuple) else first
    check_device(first)
    capturing = _is_capturing(first)

    def start(compiled: Any, grid: tuple[int, ...]) -> Started:
        if capturing and compiled.module is None:
            raise RuntimeError(
                f"{kernel.__name__} is not loaded, and a graph capture cannot load it: run the same call, with tensors "
                "of these shapes, strides and alignment, once before capturing"
            )
        paths = load(compiled, grid)
        # `__getitem__`, `arg_names` and `pre_run_hooks` are those of Triton 3.6 to 3.9.
        params, run = _leaves(paths, args), compiled[grid]
        run(*params)
        return Started(run, params, [kernel.arg_names[first] for first, *_ in paths], kernel.pre_run_hooks)

    return _compiled_with_room(kernel, grid, args, options, start)


def _is_capturing(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _compiled_with_room(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any],
    use: Callable[[Any, tuple[int, ...]], R],
) -> R:  # fmt: skip
    """Compile a kernel and return `use` of it; compile with fewer stages if a program has too little shared memory."""
    given = options = _fitting(kernel, args, options)
    whole_grid = (*grid, 1, 1)[:3]
    while True:
        compiled = compiled_for(kernel, args, options)
        try:
            return use(compiled, whole_grid)
        except OutOfResources as error:
            options = _with_less(error, kernel, args, given, options)


# By compiled kernel: the paths of a launch's flat parameters in nested arguments.
_loaded: dict[Any, list[tuple[int, ...]]] = {}
_loading = threading.RLock()


def load(compiled: Any, grid: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Load a compiled kernel onto the device, and return the paths of its parameters in its arguments.

    Launchers of Triton 3.6 and 3.7 expand tensor descriptors only as arguments of their own: for fields of tuples
    `CudaLauncher` raises AssertionError. A compiled kernel has one flat list of parameters. So its launcher is made for
    that list, with every Triton, and `_start` passes the leaves of the arguments.
    """
    if (known := _loaded.get(compiled)) is not None:
        return known
    # Threads of other groups may launch the same kernel.
    with _loading:
        if (known := _loaded.get(compiled)) is not None:
            return known
        source, paths = compiled.src, list(_paths(tuple(compiled.src.signature.values())))
        signature = {i: kind for i, (_, kind) in enumerate(paths)}
        compiled.src = SimpleNamespace(fn=source.fn, signature=signature, constants={})
        try:
            # Indexing a compiled kernel with a grid loads it and makes its launcher.
            compiled[grid]
        except BaseException:
            compiled.src = source
            raise
        _loaded[compiled] = found = [path for path, _ in paths]
        return found


def compiled_for(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the compiled kernel for these arguments.

    Triton for AMD accesses tensors of up to 2 GiB by buffer operations. With them it cannot compile kernels that read
    either a tensor or an arena, as it would have to join the two pointers. So buffer operations are off.
    """
    # The knob is one for all threads.
    with _loading, triton.knobs.amd.scope():
        triton.knobs.amd.use_buffer_ops = False
        return kernel.warmup(*args, grid=(1,), **options)


def _leaves(paths: list[tuple[int, ...]], args: tuple[Any, ...]) -> list[Any]:
    found = []
    for path in paths:
        x: Any = args
        for i in path:
            x = x[i]
        found.append(x)
    return found


def _paths(signature: tuple[Any, ...], *path: int) -> Iterator[tuple[tuple[int, ...], str]]:
    # Yield paths to the parameters of a compiled kernel, which do not include constants.
    for i, kind in enumerate(signature):
        if isinstance(kind, tuple):
            yield from _paths(kind, *path, i)
        elif kind != "constexpr":
            yield (*path, i), kind


# Reduced stage counts for kernels that exceeded shared memory, by compile key.
_stages: dict[object, int] = {}


def _fitting(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    # Return `options` with the number of stages that is known to fit, or unchanged.
    if not _stages:
        return options
    stages = _stages.get(_compiled_for(kernel, args, options))
    return options if stages is None else options | {"num_stages": stages}


def _with_less(
    error: OutOfResources, kernel: Any, args: tuple[Any, ...], given: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    # Return options with one stage less, and cache the number.
    if error.name != _SHARED_MEMORY or options.get("num_stages", 1) <= 1:
        raise error
    stages = options["num_stages"] - 1
    _stages[_compiled_for(kernel, args, given)] = stages
    return options | {"num_stages": stages}


def _compiled_for(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> object:
    return kernel, tuple(map(_compiled_as, args)), tuple(sorted(options.items()))


def _compiled_as(x: Any) -> object:
    if isinstance(x, tuple):
        return tuple(map(_compiled_as, x))
    # Coarser than the compiler's key: kernels with the same key get the stages of the one that needs most memory.
    return x.dtype if isinstance(x, torch.Tensor) else getattr(x, "value", type(x))


def check_device(x: torch.Tensor) -> None:
    """Raise ValueError for a tensor on another GPU than the current one; an op's operands are on one device."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        raise ValueError(
            f"tensors are on {x.device} and the current device is cuda:{torch.cuda.current_device()}, on which kernels "
            f"would start: call torch.cuda.set_device({x.device.index}) first"
        )
