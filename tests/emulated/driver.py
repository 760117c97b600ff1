"""A driver for Triton whose device is the machine: launchers specialize, compile and make descriptors as on a GPU, and
the launch waits on the machine's stream of the rank that is current.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from fusedtp.kernels import INTERPRETED, launch, signal
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver

from fusedtp.calls import dispatch
from fusedtp.workspaces import missing
from fusedtp.workspaces.workspace import Workspace

from .lower import Program
from .machine import Machine, Memory, Ran, Schedule, Waiting, op_of

# Shared memory of a program: CUDA C++ programming guide, technical specifications.
_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
# Rule 7 of the kernels: they store to operands of these names only, and to arenas. z is an epilogue's, of products that
# are kept.
_STORED = ("c", "out", "more", "z", "sums", "arrivals")
# Where all arenas are reached at once.
WINDOW = 1 << 56
MAP = np.dtype([("ndim", "i8"), ("swizzle", "i8"), ("base", "i8"), ("size", "i8"), ("dim", "i8", 5),
                ("stride", "i8", 5), ("box", "i8", 5)])  # fmt: skip


def _without_assembly(*given: Any) -> tuple[str, str] | None:
    """Compilation ends at PTX."""
    if not given:
        return "executed", "executed"
    _, stages, *_ = given
    stages["cubin"] = lambda source, metadata: source.encode()
    return None


def _extent(x: Tensor) -> int:
    return (
        (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.element_size() if x.numel() else 0
    )


class _Launcher:
    """What Triton calls to launch a compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.signature = dict(source.signature)
        self.names = list(source.fn.arg_names)
        self.metadata = metadata
        self.maps = list(getattr(metadata, "tensordesc_meta", None) or [])

    def __call__(self, x: int, y: int, z: int, stream: int, function: tuple[str, str], *rest: Any) -> None:
        assert (y, z) == (1, 1)
        program = active().program(*function)
        if (launches := active().launches) and not launches(stream, function[0]):
            return
        # Packed metadata, launch metadata, two hooks.
        args, maps = rest[4:], iter(self.maps)
        values: list[int] = []
        touches: list[Memory] = []
        keep: list[Any] = [args]
        # How many elements each tensor has.
        tensors: list[int] = []

        def touch(tensor: Tensor, begin: int, size: int, writable: bool) -> None:
            if size:
                touches.append(Memory(begin, begin + size, stream, writable))

        def take(name: str, kind: Any, value: Any) -> None:
            if isinstance(kind, tuple):
                fields = getattr(value, "_fields", ())
                for i, (each, part) in enumerate(zip(kind, value, strict=True)):
                    take("z" if i < len(fields) and fields[i] == "z" else name, each, part)
            elif kind == "constexpr":
                return
            elif kind.startswith("tensordesc"):
                made = tensor_map(value, next(maps))
                keep.append(made)
                values.extend((made.ctypes.data, *value.shape, *value.strides))
                touch(value.base, value.base.data_ptr(), _described(made), False)
            elif kind.startswith("*"):
                values.append(value.data_ptr())
                tensors.append(value.numel())
                touch(value, value.data_ptr(), _extent(value), name in _STORED)
            else:
                assert kind[0] in "iu", kind
                values.append(int(value))

        for name, kind, value in zip(self.names, self.signature.values(), args, strict=True):
            take(name, kind, value)
        program.whole = program.whole or all(tensors)
        # Scratch memory, which these kernels have none of.
        assert not self.metadata.global_scratch_size
        values += [0, 0]
        names = [name for name, _ in program.source.params]
        assert len(names) == len(values), (names, values)
        active().machine.launch(
            Waiting(
                self.metadata.name, program, dict(zip(names, values, strict=True)), touches, stream, x,
                self.metadata.num_warps, self.metadata.shared, keep,
            )
        )  # fmt: skip
        if (launched := active().launched) is not None:
            launched()


def tensor_map(described: Any, meta: dict[str, Any]) -> Any:
    """What cuTensorMapEncodeTiled would make of a descriptor: innermost dimension first, strides in bytes."""
    made, size = np.zeros((), MAP), described.base.element_size()
    assert described.base.data_ptr() % 16 == 0
    made["ndim"], made["swizzle"], made["size"] = len(described.shape), meta["swizzle"], size
    made["base"] = described.base.data_ptr()
    dims = zip(reversed(described.shape), reversed(described.strides), reversed(meta["block_size"]), strict=True)
    for i, (length, stride, box) in enumerate(dims):
        made["dim"][i], made["stride"][i], made["box"][i] = length, stride * size, box
        assert stride * size % 16 == 0 if i else stride == 1
        assert 0 < box <= 256
    return made


def _described(made: Any) -> int:
    n = int(made["ndim"])
    return int(sum((made["dim"][i] - 1) * made["stride"][i] for i in range(n)) + made["size"])


class EmulatedDriver(GPUDriver):  # type: ignore[misc]
    """One device, of one compute capability."""

    def __init__(self, capability: int) -> None:
        self.capability, self.machine, self.rank = capability, Machine(), 0
        self.programs: dict[str, Program] = {}
        # Kernels are changed by it before they are launched: (name, PTX) -> PTX.
        self.rewrite: Callable[[str, str], str] | None = None
        # Whether a rank launches a kernel of that name: (rank, name) -> bool.
        self.launches: Callable[[int, str], bool] | None = None
        # Called behind each launch: where the host goes on with what a kernel has done, it must have run.
        self.launched: Callable[[], object] | None = None
        self.launcher_cls = _Launcher
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda device: {"max_shared_mem": _SHARED_BYTES[capability]}
        )
        # Kernels are kept by device.
        self.get_current_device = lambda: capability
        self.get_current_stream = lambda device: self.rank
        self.get_device_capability = lambda device=None: divmod(capability, 10)
        self.set_current_device = lambda device: None

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, (name, binary.decode()), 0, 0, 1024

    def program(self, name: str, text: str) -> Program:
        """A kernel's PTX, read once."""
        if self.rewrite:
            text = self.rewrite(name, text)
        if text not in self.programs:
            self.programs[text] = Program(name, text, op_of)
        return self.programs[text]

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    @contextlib.contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """What is launched inside waits on that rank's stream."""
        before, self.rank = self.rank, rank
        try:
            yield
        finally:
            self.rank = before

    def run(self, ranks: Sequence[Workspace], schedule: Schedule) -> Ran:
        """Execute all that has been launched on virtual ranks, with their arenas and clocks."""
        machine = self.machine
        arenas = {ws.rank: ws._arena.tensors[ws.rank] for ws in ranks if ws._arena is not None}
        machine.arenas = [Memory(x.data_ptr(), x.data_ptr() + x.numel(), rank) for rank, x in arenas.items()]
        machine.window = WINDOW
        blocks = {ws.rank: ws.host_block for ws in ranks}
        machine.blocks = [Memory(x.data_ptr(), x.data_ptr() + 4 * x.numel(), rank) for rank, x in blocks.items()]
        machine.clocks = [x.data_ptr() + 4 * signal.CLOCK_MS.value for x in blocks.values()]
        return machine.run(schedule)


_active: EmulatedDriver | None = None


def active() -> EmulatedDriver:
    assert _active is not None
    return _active


@contextlib.contextmanager
def device(capability: int, programs: int = 3) -> Iterator[EmulatedDriver]:
    """Triton compiles for sm_80 or sm_90 and launches on a machine of its own; torch says that the device is one."""
    global _active
    assert not INTERPRETED, "Triton's interpreter was chosen for this process"
    properties = SimpleNamespace(multi_processor_count=programs)
    before, hook = _active, triton.knobs.runtime.add_stages_inspection_hook
    _active = EmulatedDriver(capability)
    config = triton.runtime.driver
    known = config._active
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(capability, 10)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        # A torch without CUDA cannot say.
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        # The tensors are a CPU's, which otherwise runs fused in the interpreter alone.
        mock.patch.object(dispatch, "_is_interpreted", return_value=True),
        # Nobody does anything while one looks who is missing.
        mock.patch.object(missing, "GRACE_SECONDS", 0.0),
    ):
        try:
            config.set_active(_active)
            triton.knobs.runtime.add_stages_inspection_hook = _without_assembly
            launch._target.cache_clear()
            launch._num_multiprocessors.cache_clear()
            yield _active
        finally:
            triton.knobs.runtime.add_stages_inspection_hook = hook
            config._active, _active = known, before
            launch._target.cache_clear()
            launch._num_multiprocessors.cache_clear()
