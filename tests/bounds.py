"""Checks every address that an interpreted kernel touches: it must lie in an operand of the launch, or in an arena.
Alignment hints are checked too: the interpreter ignores them, but a compiled kernel with a wrong hint stores to wrong
addresses.

    with Bounds() as bounds: ...            # or, in a rank process, watch() and later unwatch()

An operand covers its elements only, so gaps between the rows of a slice are out of bounds. A kernel may store only to
operands named `c` or `out`. A kernel may touch the arenas and the host block only of the workspace whose table of peers
it was given. Masked-off lanes touch nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed import ProcessGroup
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from fusedtp.kernels import signal
from fusedtp.workspaces.workspace import Workspace

OUTPUTS = ("c", "out")

Addresses = np.ndarray[Any, np.dtype[np.int64]]


class OutOfBounds(AssertionError):
    """A kernel touched memory that it was not given."""


class _Operand:
    # The elements of a tensor with any strides.
    def __init__(self, name: str, x: Tensor) -> None:
        self.name, self.begin, self.itemsize, self.empty = name, x.data_ptr(), x.element_size(), x.numel() == 0
        # Outermost dim first. Elements have distinct addresses only if no dim reaches into the next outer dim.
        self._dims = sorted(
            ((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1 and stride),
            reverse=True,
        )
        reach = 0
        for stride, size in reversed(self._dims):
            assert stride > reach, f"{name}: strides {x.stride()} of {tuple(x.shape)} overlap"
            reach += stride * (size - 1)

    def holds(self, at: Addresses, itemsize: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return which addresses of `at` are elements."""
        if self.empty or itemsize != self.itemsize:
            return np.zeros(at.shape, dtype=bool)
        place, odd = np.divmod(at - self.begin, itemsize)
        inside = (odd == 0) & (place >= 0)
        for stride, size in self._dims:
            index, place = np.divmod(place, stride)
            inside &= index < size
        return inside & (place == 0)


class UntrueHint(AssertionError):
    """A kernel gave the compiler an alignment hint that is false."""


class Bounds:
    """Watch every launch while entered; `accesses` and `hints` count checks. Raises `OutOfBounds` and `UntrueHint`."""

    def __init__(self) -> None:
        self.accesses = self.hints = 0
        self._stack = contextlib.ExitStack()
        # Key: the address of the workspace's table of peers.
        self._workspaces: weakref.WeakValueDictionary[int, Workspace] = weakref.WeakValueDictionary()
        self._kernel = ""
        self._loaded: list[_Operand] = []
        self._stored: list[_Operand] = []
        self._regions: list[tuple[int, int]] = []

    def __enter__(self) -> Bounds:
        bounds = self
        channel, launch = Workspace.channel, GridExecutor.__call__
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        rmw, cas = InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_atomic_cas
        set_attr = TensorHandle.set_attr

        def known(self: Workspace) -> Any:
            bounds._workspaces[self.peers.data_ptr()] = self
            return channel(self)

        def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
            bounds._begin(self.fn, args, kwargs)
            # Triton's default must not decide FP fusion, as the bits depend on it.
            assert kwargs.get("enable_fp_fusion") is True or not self.fn.__module__.startswith("fusedtp.kernels")
            return launch(self, *args, **kwargs)

        # Descriptor loads are checked here too, masked to the descriptor's shape.
        def create_masked_load(self: Any, ptrs: Any, mask: Any, *args: Any, **options: Any) -> Any:
            bounds._check("loads", ptrs, mask, bounds._loaded)
            return load(self, ptrs, mask, *args, **options)

        def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
            assert value.data.dtype.itemsize == _itemsize(ptrs), f"{bounds._kernel} stores {value.data.dtype}"
            bounds._check("stores", ptrs, mask, bounds._stored)
            return store(self, ptrs, value, mask, *args)

        def create_atomic_rmw(self: Any, op: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
            bounds._check("atomically changes", ptrs, mask, ())
            return rmw(self, op, ptrs, value, mask, *args)

        def create_atomic_cas(self: Any, ptrs: Any, *args: Any) -> Any:
            bounds._check("atomically changes", ptrs, None, ())
            return cas(self, ptrs, *args)

        def hinted(self: Any, key: str, values: list[int]) -> None:
            if key == "tt.divisibility":
                bounds.hints += 1
                odd = self.data[self.data % values[-1] != 0]
                if odd.size:
                    raise UntrueHint(f"{bounds._kernel} takes {odd[0]} for a multiple of {values[-1]}")
            set_attr(self, key, values)

        for owner, name, value in (
            (Workspace, "channel", known), (GridExecutor, "__call__", launched),
            (InterpreterBuilder, "create_masked_load", create_masked_load),
            (InterpreterBuilder, "create_masked_store", create_masked_store),
            (InterpreterBuilder, "create_atomic_rmw", create_atomic_rmw),
            (InterpreterBuilder, "create_atomic_cas", create_atomic_cas),
            (TensorHandle, "set_attr", hinted),
        ):  # fmt: skip
            self._stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _begin(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Collect the memory that this launch may touch.
        names = inspect.getfullargspec(kernel).args
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self._kernel = kernel.__name__
        self._loaded = [_Operand(name, x) for name, x in _tensors(given)]
        self._stored = [each for each in self._loaded if each.name in OUTPUTS]
        self._regions = []
        if "group" in given:
            ws = self._workspaces[given["group"].peers.data_ptr()]
            size = ws.data_offset + 2 * ws.half_bytes
            self._regions = [(begin, begin + size) for begin in ws.addresses]
            self._regions.append((ws.host_block.data_ptr(), ws.host_block.data_ptr() + 4 * signal.HOST_WORDS))

    def _check(self, does: str, ptrs: Any, mask: Any, operands: Iterable[_Operand]) -> None:
        if mask is None:
            at = ptrs.data.reshape(-1)
        else:
            # `mask` is a tensor of the interpreter, or an array.
            wanted = np.asarray(mask.data)
            at = np.broadcast_to(ptrs.data, wanted.shape)[wanted]
        left, itemsize = at.astype(np.int64), _itemsize(ptrs)
        self.accesses += left.size
        for begin, end in self._regions:
            if left.size:
                left = left[(left < begin) | (left > end - itemsize) | (left % itemsize != 0)]
        for operand in operands:
            if left.size:
                left = left[~operand.holds(left, itemsize)]
        if left.size:
            raise OutOfBounds(
                f"{self._kernel} {does} {itemsize} bytes at {left[0]:#x}, one of {left.size} places of {at.size} "
                f"outside its operands ({', '.join(each.name for each in operands)}) and the arenas"
            )


def _tensors(given: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    # Yield a kernel's tensor arguments, also those in tuples. The `ptr` of a matrix has the name of the matrix.
    for name, value in given.items():
        if isinstance(value, Tensor):
            yield name, value
        elif hasattr(value, "_asdict"):
            fields = value._asdict().items()
            yield from _tensors({name if field == "ptr" else f"{name}.{field}": each for field, each in fields})
        elif isinstance(value, tuple):
            for each in value:
                yield from _tensors({name: each})


def _itemsize(ptrs: Any) -> int:
    return int(ptrs.get_element_ty().primitive_bitwidth) // 8


_watching: Bounds | None = None


def watch(group: ProcessGroup) -> None:
    """Check every kernel of this rank from now on."""
    global _watching
    assert _watching is None, "the rank is checked already"
    _watching = Bounds().__enter__()


def checked(group: ProcessGroup) -> int:
    """Return the number of accesses of this rank checked so far."""
    assert _watching is not None, "the rank was started anew and is no longer checked"
    return _watching.accesses


def unwatch(group: ProcessGroup) -> None:
    """Stop checking."""
    global _watching
    assert _watching is not None, "the rank was started anew and is no longer checked"
    _watching.__exit__()
    _watching = None
