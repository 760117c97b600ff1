"""A virtual GPU: launchers specialize, compile and launch through Triton's own driver and launcher. Launches that
arrive at the stub of libcuda wait on the machine's stream of the current rank.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor
from triton import JITFunction

from fusedtp import kernels
from fusedtp.choose import dispatch
from fusedtp.kernels import launch, loading, prepared, signal
from fusedtp.kernels.blocks import Blocks, Column
from fusedtp.workspaces.workspace import Workspace

from .lower import Program
from .machine import Machine, Memory, Ran, Schedule, Waiting, op_of
from .stub import MAP, Launch, Stub, cuda_driver, ptx_is_the_image, tensor_map

# Rule 7 of the kernels: they store only to arenas and to operands of these names. z is an epilogue's kept product.
_STORED = ("c", "out", "outs", "more", "z", "sums", "arrivals")
# The multicast address of all arenas.
WINDOW = 1 << 56


def _extent(x: Tensor) -> int:
    return (
        (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.element_size() if x.numel() else 0
    )


class EmulatedDriver:
    """A device of one compute capability: Triton's own driver and launcher, a stub of libcuda, and the machine.

    Every launch, prepared or not, is compared with its launcher's arguments, and then waits on its rank's stream.
    """

    def __init__(self, capability: int) -> None:
        self.capability, self.machine, self.rank = capability, Machine(), 0
        self.programs: dict[str, Program] = {}
        # Changes kernels before they are launched: (name, PTX) -> PTX.
        self.rewrite: Callable[[str, str], str] | None = None
        # (rank, name) -> bool: decides if a rank launches a kernel of that name.
        self.launches: Callable[[int, str], bool] | None = None
        # Called after each launch, if the host needs the kernel's results at once.
        self.launched: Callable[[], object] | None = None
        self.triton = cuda_driver(capability, lambda device: self.rank)
        self.stub = Stub(self._take)
        # By launch to come: (name, type, value) of each parameter, and (name, tensor) of each address in its table.
        self.announced: list[tuple[list[tuple[str, str, Any]], list[tuple[str, Tensor]]]] = []
        # The words of the last table that was written.
        self.words: list[int | Tensor] = []
        self.num_prepared = 0

    def announce(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note the arguments of a launch to come."""
        *_, bind = kernel.device_caches[self.triton.get_current_device()]
        _, specialization, _ = bind(*args, **options)
        kinds = [kind for kind, _ in specialization[: len(args)]]
        columns = sorted((each.AT.value, name) for name, each in _columns(kernel.arg_names, args))
        given = list(_leaves(kernel.arg_names, kinds, args))
        of_table = [(at, x) for at, x in enumerate(self.words) if columns and isinstance(x, Tensor)]
        self.announced.append((given, [(max(each for each in columns if each[0] <= at)[1], x) for at, x in of_table]))

    def _take(self, launch: Launch) -> None:
        program = self.program(launch.name, launch.ptx)
        given, of_table = self.announced.pop(0)
        if self.launches and not self.launches(launch.stream, launch.name):
            return
        values: list[int] = []
        touches: list[Memory] = []
        maps = np.zeros(sum(kind.startswith("tensordesc") for _, kind, _ in given), MAP)
        num_maps = 0
        parameters = iter(launch.parameters)

        def number() -> int:
            values.append(int.from_bytes(next(parameters), "little"))
            return values[-1]

        def same(name: str, found: int, expected: int, bits: int = 64) -> None:
            assert found == expected % (1 << bits), f"{launch.name}: {name} is launched with {found}, not {expected}"

        def touch(tensor: Tensor, size: int, writable: bool) -> None:
            if size:
                begin = tensor.data_ptr()
                touches.append(Memory(begin, begin + size, launch.stream, writable))

        tensors: list[int] = []
        for name, kind, value in given:
            if kind.startswith("tensordesc"):
                made = maps[num_maps] = tensor_map(next(parameters))
                check_map(name, made, value)
                values.append(num_maps * MAP.itemsize)
                num_maps += 1
                for length in value.shape:
                    same(f"a length of {name}", number(), length, 32)
                for stride in value.strides:
                    same(f"a stride of {name}", number(), stride)
                touch(value.base, _described(made), name in _STORED)
            elif kind.startswith("*"):
                same(name, number(), value.data_ptr())
                tensors.append(value.numel())
                writes_table = name == "blocks" and launch.name == "_write_blocks_kernel"
                touch(value, _extent(value), name in _STORED or writes_table)
            else:
                same(name, number(), int(value), int(kind[1:]))
        for name, tensor in of_table:
            touch(tensor, _extent(tensor), name in _STORED)
        program.whole = program.whole or all(tensors)
        # Scratch memory, which these kernels do not use.
        assert [number(), number()] == [0, 0]
        assert next(parameters, None) is None, (launch.name, given, program.source.params)
        assert launch.grid[1:] == (1, 1)
        names = [name for name, _ in program.source.params]
        self.machine.launch(
            Waiting(
                launch.name, program, dict(zip(names, values, strict=True)), touches, launch.stream, launch.grid[0],
                launch.threads // 32, launch.shared_bytes, maps, [given, of_table],
            )
        )  # fmt: skip
        if self.launched is not None:
            self.launched()

    def program(self, name: str, text: str) -> Program:
        """Parse a kernel's PTX, once for each text."""
        if self.rewrite:
            text = self.rewrite(name, text)
        if text not in self.programs:
            self.programs[text] = Program(name, text, op_of)
        return self.programs[text]

    @contextlib.contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """Launch onto that rank's stream inside."""
        before, self.rank = self.rank, rank
        try:
            yield
        finally:
            self.rank = before

    def run(self, ranks: Sequence[Workspace], schedule: Schedule) -> Ran:
        """Execute all launches of virtual ranks, with their arenas and clocks."""
        machine = self.machine
        arenas = {ws.rank: ws._arena.tensors[ws.rank] for ws in ranks if ws._arena is not None}
        machine.arenas = [Memory(x.data_ptr(), x.data_ptr() + x.numel(), rank) for rank, x in arenas.items()]
        machine.window = WINDOW
        blocks = {ws.rank: ws.host_block for ws in ranks}
        machine.blocks = [Memory(x.data_ptr(), x.data_ptr() + 4 * x.numel(), rank) for rank, x in blocks.items()]
        machine.clocks = [x.data_ptr() + 4 * signal.CLOCK_MS.value for x in blocks.values()]
        return machine.run(schedule)


def _leaves(names: Sequence[str], kinds: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[str, str, Any]]:
    # A field z is stored to in any argument, and a table has a name; other fields have that of the kernel's argument.
    for name, kind, value in zip(names, kinds, values, strict=True):
        if isinstance(kind, tuple):
            fields = getattr(value, "_fields", ())
            named = [*fields, *[""] * len(kind)]
            inner = [named[i] if named[i] in ("z", "blocks") else name for i in range(len(kind))]
            yield from _leaves(inner, kind, value)
        elif kind != "constexpr":
            yield name, kind, value


def _columns(names: Sequence[str], values: Sequence[Any]) -> Iterator[tuple[str, Column]]:
    # The columns of a launch's table, with the name of the kernel's argument, or z.
    for name, value in zip(names, values, strict=True):
        if isinstance(value, Column):
            yield name, value
        elif isinstance(value, tuple):
            fields = getattr(value, "_fields", ("",) * len(value))
            yield from _columns(["z" if field == "z" else name for field in fields], value)


def check_map(name: str, made: Any, described: Any) -> None:
    """Assert that a tensor map equals its descriptor."""
    n, size = int(made["ndim"]), described.base.element_size()
    expected = (
        described.base.data_ptr(),
        size,
        described.shape[::-1],
        [1 * size, *(s * size for s in described.strides[-2::-1])],
    )
    found = int(made["base"]), int(made["size"]), made["dim"][:n].tolist(), made["stride"][:n].tolist()
    assert found == expected, f"the tensor map of {name} has base, size, dims, strides {found}, not {expected}"


def _described(made: Any) -> int:
    n = int(made["ndim"])
    return int(sum((made["dim"][i] - 1) * made["stride"][i] for i in range(n)) + made["size"])


KERNELS = [
    found for module in pkgutil.iter_modules(kernels.__path__)
    for name, found in vars(importlib.import_module(f"{kernels.__name__}.{module.name}")).items()
    if isinstance(found, JITFunction) and name.endswith("_kernel")
]  # fmt: skip


@contextlib.contextmanager
def device(capability: int, programs: int = 3) -> Iterator[EmulatedDriver]:
    """Let Triton compile for sm_80 or sm_90 and launch on a new machine, with torch reporting such a device."""
    assert not kernels.INTERPRETED, "Triton's interpreter was chosen for this process"
    properties = SimpleNamespace(multi_processor_count=programs)
    made = EmulatedDriver(capability)
    config, runtime = triton.runtime.driver, triton.knobs.runtime
    known, stages = config._active, runtime.add_stages_inspection_hook
    with (
        announced(made),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(capability, 10)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        # A torch without CUDA cannot answer.
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        # The tensors are on a CPU, where fused otherwise needs the interpreter.
        mock.patch.object(dispatch, "check_interpreted"),
    ):
        try:
            config.set_active(made.triton)
            runtime.add_stages_inspection_hook = ptx_is_the_image
            launch._target.cache_clear()
            launch._num_multiprocessors.cache_clear()
            yield made
        except BaseException as error:
            # Triton only reports that a launch has failed.
            if made.stub.failure is not None and made.stub.failure is not error:
                raise made.stub.failure from error
            raise
        finally:
            runtime.add_stages_inspection_hook = stages
            # Triton 3.8 and later call the driver when kernels are unloaded, also at the end of the process.
            config._active = known or made.triton
            launch._target.cache_clear()
            launch._num_multiprocessors.cache_clear()


@contextlib.contextmanager
def announced(made: EmulatedDriver) -> Iterator[None]:
    """Announce every launch; for a prepared launch call its launcher again, and announce the launcher's arguments."""
    described, params_of, start = prepared._described, prepared.PreparedLaunch.params, loading._start
    room, write = prepared.room, Blocks.write
    calls: list[Callable[[], object]] = []

    def remember(launcher: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        calls[:] = [lambda: launcher(*args, **kwargs)]
        return described(launcher, args, kwargs)

    def looked_up(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        made.announced.clear()
        made.announce(kernel, args, options)
        return start(kernel, grid, *args, **options)

    def params(known: Any, operands: list[Tensor], fingerprint: int) -> list[Any]:
        def compare(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            made.announce(kernel, args, options)
            compiled = loading._compiled_with_room(kernel, grid, args, options, lambda compiled, grid: compiled)
            writes = kernel.__name__ == "_write_blocks_kernel"
            run = known._table._writes[0][0] if writes and known._table is not None else known._run
            prepared_for = inspect.getclosurevars(run).nonlocals
            assert prepared_for["self"] is compiled, f"{kernel.__name__} is prepared for other arguments"
            assert prepared_for["grid"] == (*grid, 1, 1), f"{kernel.__name__} is prepared for another grid"

        made.announced.clear()
        with mock.patch.object(loading, "_start", compare):
            calls[0]()
        made.num_prepared += len(made.announced)

        def fresh(num_words: int, device: torch.device) -> Tensor:
            table = room(num_words, device)
            made.announced[:] = [(_with(table, given), of_table) for given, of_table in made.announced]
            return table

        with mock.patch.object(prepared, "room", fresh):
            found = params_of(known, operands, fingerprint)
        # Each call has its own scratch memory, and its own table.
        ((given, of_table),) = made.announced
        scratch = [(name, kind, new if name == "sums" else old)
                   for (name, kind, old), new in zip(given, found, strict=True)]  # fmt: skip
        made.announced[:] = [(scratch, of_table)]
        return found

    def written(blocks: Blocks) -> Any:
        made.words = blocks.words
        return write(blocks)

    with (
        mock.patch.object(prepared, "_known", launch.Memo()),
        mock.patch.object(prepared, "_described", remember),
        mock.patch.object(prepared.PreparedLaunch, "params", params),
        mock.patch.object(loading, "_start", looked_up),
        mock.patch.object(Blocks, "write", written),
    ):
        yield


def _with(table: Tensor, given: list[tuple[str, str, Any]]) -> list[tuple[str, str, Any]]:
    return [(name, kind, table if name == "blocks" and kind[0] == "*" else value) for name, kind, value in given]
