"""Record what a rank does to symmetric memory in the real code: interpreted kernels, host steps, torch ops.

`Recorder` watches one rank's workspace while an op runs on it and returns the op's `Kernel`s. They have, for each
program, the loads and stores in any arena, the barriers, the signals raised and waited for, and the end. Nothing is
written by hand, so the model that is built from recordings (`model`) cannot drift apart from the kernels.

A rank can be recorded alone. With `alone` a poll does not read memory but gets one epoch after another, from two before
the op's own on, until the wait ends; the last epoch is what the wait waits for. (The control flow of an op depends on
shapes only, never on data or on the arrival time of a signal.) Without `alone` polls are real and the recording is that
of one real run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton._C.libtriton import ir
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from fusedtp import kernels
from fusedtp.kernels import signal
from fusedtp.schedules import decomposed, fused, producer, transport
from fusedtp.workspaces import steps, words
from fusedtp.workspaces.workspace import Workspace

from .events import CELL_BYTES, Access, Advance, Arrive, Barrier, Event, Kernel, Raise, Wait


class TorchAccesses(TorchDispatchMode):
    """Record torch ops that read or write arenas as loads and stores of the host."""

    def __init__(self, touched: Callable[..., None], emit: Callable[[Any], None]) -> None:
        super().__init__()
        self._touched, self._emit = touched, emit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        values = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
        for argument in func._schema.arguments:
            value = values.get(argument.name)
            write = argument.alias_info is not None and argument.alias_info.is_write
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, Tensor) and each.numel():
                    self._touched(_addresses(each), write, self._emit)
        return result


def _addresses(x: Tensor) -> np.ndarray[Any, Any]:
    offsets = np.zeros((), dtype=np.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        offsets = np.add.outer(offsets, np.arange(size) * stride)
    return x.data_ptr() + x.element_size() * offsets.reshape(-1)


def _of_fingerprint(event: Event) -> bool:
    return isinstance(event, Access) and any(cell < 0 for cell in event.cells)


class Recorder:
    """Record the ops of the rank that owns this workspace. Use as a context manager, with one op for each `call`. With
    `side_stream` the schedules' side stream runs beside the main stream, as on a GPU.
    """

    def __init__(self, ws: Workspace, *, alone: bool = True, side_stream: bool = True) -> None:
        self.ws, self.rank, self.alone, self._side_stream = ws, ws.rank, alone, side_stream
        self._stack = contextlib.ExitStack()
        self._polled: int | None = None
        self._first_shown = 0
        self._acquires = True
        self._word: tuple[int, int] | None = None
        self._open = False

    def __enter__(self) -> Recorder:
        self._patch_interpreter()
        self._patch_host()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def call(self, op: Callable[[], object]) -> list[Kernel]:
        """Run one op and return its kernels."""
        self.kernels: list[Kernel] = []
        # For each stream: the kernels before its next kernel, and further kernels that the next one waits for.
        self._stream = 0
        self._last: list[tuple[int, ...]] = [(), ()]
        self._pending: list[tuple[int, ...]] = [(), ()]
        self.epoch = self.ws.epoch + 1
        self._program: list[Event] | None = None
        self._fingerprints: set[tuple[int, int]] = set()
        self._enters_twice = False
        self._open = True
        # With a planted bug a kernel may count differently from the host, which would report it before the checker.
        self.ws._host_epoch_is_exact = False
        with TorchAccesses(self.touched, self.host_event):
            op()
        self._open = False
        if self._enters_twice:
            # Each kernel that enters stores its fingerprint and then raises the entry. Cells cannot tell which kernel's
            # entry a peer has seen, so that order is checked only in ops that enter once.
            for kernel in self.kernels:
                for number, program in enumerate(kernel.programs):
                    kernel.programs[number] = [event for event in program if not _of_fingerprint(event)]
        return self.kernels

    # Kernels and programs.

    def begin_kernel(self, name: str, one_thread: bool) -> None:
        """Begin a new kernel on the current stream."""
        after = tuple(sorted({*self._last[self._stream], *self._pending[self._stream]}))
        self.kernels.append(Kernel(name, self._stream, after, one_thread))
        self._last[self._stream], self._pending[self._stream] = (len(self.kernels) - 1,), ()
        self._program = None

    def begin_program(self) -> None:
        """Begin the next program of the current kernel."""
        self._program = []
        self.kernels[-1].programs.append(self._program)

    def host_event(self, event: Event) -> None:
        """Add a host event to the open stretch of the current stream, or to a new stretch."""
        if self._program is None:
            self.begin_kernel("host", one_thread=True)
            self.begin_program()
        if isinstance(event, Raise):
            self.add(Barrier())
        self.add(event)

    def add(self, event: Event) -> None:
        """Append an event to the current program."""
        assert self._program is not None
        self._program.append(event)

    @contextlib.contextmanager
    def side(self, _: Workspace) -> Iterator[None]:
        """Replace `travelling` as on a GPU: the side stream follows all kernels of the main stream so far."""
        self._pending[1] = (*self._pending[1], *self._last[0])
        self._stream, self._program = 1, None
        try:
            yield
        finally:
            self._stream, self._program = 0, None

    def settle(self, _: Workspace) -> None:
        """Replace `settle` as on a GPU: the main stream waits for the side stream."""
        self._pending[0] = (*self._pending[0], *self._last[1])
        self._program = None

    # Addresses.

    def locate(self, address: int) -> tuple[int, int] | None:
        """Return (rank, byte offset in its arena), or None for memory that is not symmetric."""
        for owner, begin in enumerate(self.ws.addresses):
            if begin <= address < begin + self.ws.data_offset + 2 * self.ws.half_bytes:
                return owner, address - begin
        return None

    def touched(self, addresses: np.ndarray[Any, Any], write: bool, emit: Callable[[Event], None]) -> None:
        """Record a load or store of the elements at `addresses`, in one arena or several."""
        if not self._open:
            return
        length = self.ws.data_offset + 2 * self.ws.half_bytes
        if not addresses.size:
            return
        first, last = int(addresses.min()), int(addresses.max())
        for owner, begin in enumerate(self.ws.addresses):
            if last < begin or first >= begin + length:
                continue
            offsets = addresses.astype(np.int64) - begin
            offsets = offsets[(offsets >= 0) & (offsets < length)]
            if not offsets.size:
                continue
            if offsets[0] >= self.ws.data_offset:
                cells = (offsets - self.ws.data_offset) // CELL_BYTES
                emit(Access(write, owner, frozenset(cells.tolist())))
            elif write:
                self.header_stored(owner, int(offsets[0]) // 4, emit)

    def header_stored(self, owner: int, word: int, emit: Callable[[Event], None], release: bool = False) -> None:
        """Record a store to a header word: a signal, or this rank's epoch."""
        value = words.int32_at(self.ws.addresses[owner] + 4 * word).value
        if self.is_fingerprint(word):
            self.fingerprint_stored(owner, word, emit)
        elif word >= signal.SIGNALS.value:
            slot, source = divmod(word - signal.SIGNALS.value, self.ws.world_size)
            emit(Raise(owner, slot, source, value, release))
        elif word == signal.EPOCH.value:
            emit(Advance(value))

    def is_fingerprint(self, word: int) -> bool:
        """Return whether a fingerprint begins at a header's word; an entry's signal orders fingerprints like data."""
        slot = (word - signal.SIGNALS.value) // self.ws.world_size
        return signal.FINGERPRINT_SLOT.value <= slot < signal.ENTRY_SLOT.value

    def fingerprint_stored(self, owner: int, word: int, emit: Callable[[Event], None]) -> None:
        """Record the store of a fingerprint."""
        self._enters_twice |= (owner, word) in self._fingerprints
        self._fingerprints.add((owner, word))
        emit(Access(True, owner, frozenset([-1 - word])))

    def fingerprint_read(self, owner: int, word: int) -> None:
        """Record the load of a fingerprint. In a real run a long wait checks whether its peer has entered, and loads
        the peer's fingerprint; before the peer's entry the loaded value is ignored.
        """
        if not self.alone and self._word is not None and self._word[0] == signal.ENTRY_SLOT.value:
            assert self._polled is not None
            if words.wrapping_difference(self._polled, self.epoch) < 0:
                return
            self.add(Wait(*self._word, words.wrapping_difference(self.epoch, 0), self._acquires))
        self.add(Access(False, owner, frozenset([-1 - word])))

    # Polls.

    def shown(self, word: int) -> int | None:
        """Return what a poll of the header's `word` sees when the rank is recorded alone, or None to read memory."""
        self._word = divmod(word - signal.SIGNALS.value, self.ws.world_size)
        if not self.alone:
            return None
        self._polled = self._first_shown if self._polled is None else min(self._polled + 1, self.epoch + 2)
        return words.wrapping_difference(self._polled, 0)

    def whole_wait(self, wait: Callable[..., Any], emit: Callable[[Event], None]) -> Callable[..., Any]:
        """Wrap `wait` so that it is recorded once it has ended."""

        def recorded(*args: Any) -> Any:
            if not self._open:
                return wait(*args)
            begin = 0 if self._program is None else len(self._program)
            seen: list[int] = []
            # The first poll of a wait may be other code than later polls, so one run shows it the last epoch at once.
            for first in (self.epoch - 1, self.epoch - 2) if self.alone else (0,):
                if self._program is not None:
                    del self._program[begin:]
                self._word = self._polled = None
                self._acquires, self._first_shown = True, first
                result = wait(*args)
                polled: int | None = self._polled
                if polled is not None:
                    seen.append(polled)
            if self._word is not None:
                # In a real run the peer may have advanced beyond the epoch that was waited for.
                epoch = min(seen) if self.alone else self.epoch + min(0, words.wrapping_difference(seen[0], self.epoch))
                emit(Wait(*self._word, words.wrapping_difference(epoch, 0), self._acquires))
                # The wait goes before the events that followed the signal.
                self._program.insert(begin, self._program.pop())  # type: ignore[union-attr]
            return result

        return recorded

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def _patch_interpreter(self) -> None:
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        atomic_rmw, set_grid_idx = InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.set_grid_idx
        launch = GridExecutor.__call__
        recorder = self

        def create_masked_load(self: Any, ptrs: Any, mask: Any, *args: Any) -> Any:
            recorder.touched(np.broadcast_to(ptrs.data, mask.data.shape)[mask.data], False, recorder.add)
            return load(self, ptrs, mask, *args)

        def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
            result = store(self, ptrs, value, mask, *args)
            recorder.touched(np.broadcast_to(ptrs.data, mask.data.shape)[mask.data], True, recorder.add)
            return result

        def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
            places = [recorder.locate(int(each)) for each in ptr.data[mask.data]] if recorder._open else []
            if not places or places[0] is None:
                return atomic_rmw(self, op, ptr, val, mask, sem, scope)
            owner, word = places[0][0], places[0][1] // 4
            acquires = sem in (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
            releases = sem in (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
            system = scope == ir.MEM_SYNC_SCOPE.SYSTEM
            if recorder.is_fingerprint(word) and op == ir.ATOMIC_OP.XCHG:
                for owner, offset in places:
                    recorder.fingerprint_stored(owner, offset // 4, recorder.add)
                return atomic_rmw(self, op, ptr, val, mask, sem, scope)
            if recorder.is_fingerprint(word):
                recorder.fingerprint_read(owner, word)
                # A peer that agrees has written the same fingerprint as this rank.
                return TensorHandle(np.full_like(val.data, recorder.ws.meanings.now.fingerprint), val.dtype)
            if word >= signal.SIGNALS.value and op == ir.ATOMIC_OP.ADD and owner == recorder.rank:
                shown = recorder.shown(word)
                recorder._acquires = acquires and system
                if shown is not None:
                    return TensorHandle(np.full_like(val.data, shown), val.dtype)
                result = atomic_rmw(self, op, ptr, val, mask, sem, scope)
                recorder._polled = int(result.data.flat[0])
                return result
            result = atomic_rmw(self, op, ptr, val, mask, sem, scope)
            if word == signal.ARRIVED.value and owner == recorder.rank:
                recorder.add(Arrive(acquires and releases))
            elif op == ir.ATOMIC_OP.XCHG:
                # One lane for each rank, or one for all.
                for owner, offset in places:
                    recorder.header_stored(owner, offset // 4, recorder.add, releases and system)
            return result

        def create_barrier(self: Any) -> None:
            if recorder._open:
                recorder.add(Barrier())

        def next_program(self: Any, *index: int) -> None:
            set_grid_idx(self, *index)
            if recorder._open:
                recorder.begin_program()

        def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder._open:
                recorder.begin_kernel(self.fn.__name__.strip("_").removesuffix("_kernel"), one_thread=False)
            result = launch(self, *args, **kwargs)
            recorder._program = None
            return result

        for name, value in (
            ("create_masked_load", create_masked_load), ("create_masked_store", create_masked_store),
            ("create_atomic_rmw", create_atomic_rmw), ("create_barrier", create_barrier),
            ("set_grid_idx", next_program),
        ):  # fmt: skip
            self._replace(InterpreterBuilder, name, value)
        self._replace(GridExecutor, "__call__", launched)
        wait = signal.wait
        # Import all modules of kernels now: a module imported later would keep the patched `wait`.
        for module in [import_module(f"{kernels.__name__}.{each.name}") for each in iter_modules(kernels.__path__)]:
            if getattr(module, "wait", None) is wait:
                self._replace(module, "wait", self.whole_wait(wait, self.add))

    def _patch_host(self) -> None:
        load_acquire, store_release = steps.load_acquire, steps.store_release
        host_wait = steps.HostSteps.wait

        def load(address: int) -> int:
            place = self.locate(address) if self._open else None
            if place is not None and place[0] == self.rank and place[1] // 4 >= signal.SIGNALS.value:
                shown = self.shown(place[1] // 4)
                if shown is None:
                    shown = self._polled = load_acquire(address)
                return shown
            return load_acquire(address)

        def store(address: int, value: int) -> None:
            store_release(address, value)
            place = self.locate(address) if self._open else None
            if place is not None:
                self.header_stored(place[0], place[1] // 4, self.host_event, release=True)

        def load_fingerprint(address: int) -> int:
            owner, offset = self.locate(address) or (self.rank, 0)
            if self._open:
                self.host_event(Access(False, owner, frozenset([-1 - offset // 4])))
            return self.ws.meanings.now.fingerprint

        def store_fingerprint(address: int, value: int) -> None:
            owner, offset = self.locate(address) or (self.rank, 0)
            words.int64_at(address).value = value
            if self._open:
                self.fingerprint_stored(owner, offset // 4, self.host_event)

        # Words must be read and written by functions, which can be patched.
        for module in (steps, words):
            self._replace(module, "PLAIN", False)
        self._replace(steps, "load_fingerprint", load_fingerprint)
        self._replace(steps, "store_fingerprint", store_fingerprint)
        self._replace(steps, "load_acquire", load)
        self._replace(steps, "store_release", store)
        self._replace(steps.HostSteps, "wait", self.whole_wait(host_wait, self.host_event))
        if self._side_stream:
            for module in (fused, decomposed, producer, transport):
                for name, value in (("travelling", self.side), ("settle", self.settle)):
                    if hasattr(module, name):
                        self._replace(module, name, value)
