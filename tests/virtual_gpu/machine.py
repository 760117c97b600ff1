"""The machine: watched memory, launches that wait on each rank's stream, and runs of all of them together."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .compiler import shared_object
from .lower import PARAMETERS, Program

Array = np.ndarray[Any, Any]
SPAN = np.dtype([("begin", "u8"), ("end", "u8"), ("region", "i4"), ("writable", "i4")])
MOST_REGIONS = 1024


class Failed(RuntimeError):
    """A run broke a rule of the model; the message has the PTX statement and its line in the kernels' source."""


class _Kernel(ctypes.Structure):
    _fields_ = [("ins", ctypes.c_void_p), ("pool", ctypes.c_void_p), ("n", ctypes.c_int), ("words", ctypes.c_int),
                ("doubles", ctypes.c_int), ("preds", ctypes.c_int), ("count", ctypes.c_void_p),
                ("registers", ctypes.c_int)]  # fmt: skip


class _Plan(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("seed", "limit", "idle_limit", "held_after")]
    _fields_ += [(name, ctypes.c_double) for name in ("stale", "drain", "tick")]
    _fields_ += [
        (name, ctypes.c_int)
        for name in ("quantum", "residents", "most_tick", "held", "held_until", "num_clocks", "shared")
    ]  # fmt: skip
    _fields_ += [("clocks", ctypes.c_void_p)]


@functools.cache
def core() -> ctypes.CDLL:
    """Return the compiled core."""
    lib = ctypes.CDLL(str(shared_object()))
    lib.reset.argtypes = [ctypes.c_int]
    lib.add_region.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
    lib.set_window.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int]
    lib.launch.argtypes = [*[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4, ctypes.c_uint32, *[ctypes.c_uint64] * 2]
    lib.run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p]
    return lib


def op_of(name: str) -> int:
    """Return the machine's number of an operation, or -1."""
    number: int = core().op_of(name.encode())
    return number


@dataclass(frozen=True)
class Schedule:
    """Parameters of a run; the seed decides the rest.

    stale, drain: probabilities that a racing load reads an old value, and that a store becomes visible. quantum: turns
    have up to 2 ** quantum instructions. residents: number of resident CTAs of a rank. tick, most_tick: clocks advance
    with probability `tick` a turn, by up to `most_tick`. Rank `held` waits until clocks reach `held_until`; with
    `held_after` it waits for `held_until` ticks once so many instructions have run.
    """

    seed: int = 0
    stale: float = 0.5
    drain: float = 0.05
    tick: float = 0.0
    most_tick: int = 1
    quantum: int = 11
    residents: int = 64
    held: int = -1
    held_until: int = 0
    held_after: int = 0
    # Other processes use the memory too: loads read current values, and only a kernel's own budget ends its waits.
    shared: bool = False
    limit: int = 400_000_000
    idle_limit: int = 20_000_000


@dataclass(frozen=True)
class Memory:
    """A piece of a rank's memory, by address."""

    begin: int
    end: int
    rank: int
    writable: bool = True


@dataclass
class Waiting:
    name: str
    program: Program
    values: dict[str, int]
    touches: list[Memory]
    rank: int
    grid: int
    warps: int
    shared_bytes: int
    # Tensor maps among the parameters; the parameters' values are offsets into `maps`.
    maps: Any = None
    keep: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Ran:
    """Counts of a run: warps' instructions, stale loads, and stores that a release had to make visible."""

    executed: int
    stale: int
    late: int


class Machine:
    """Launches wait, one stream for each rank, until `run` executes them all, interleaved by the schedule's seed."""

    def __init__(self) -> None:
        self.waiting: list[Waiting] = []
        # Memory watched in every launch: the ranks' arenas and host blocks, and clocks by address.
        self.arenas: list[Memory] = []
        self.blocks: list[Memory] = []
        self.clocks: list[int] = []
        # The address of all ranks' memory.
        self.window = 0

    def launch(self, waiting: Waiting) -> None:
        self.waiting.append(waiting)

    def _regions(self) -> list[Memory]:
        # Pieces may overlap, as views of one tensor do; each lies in one region.
        pieces = sorted([*self.arenas, *self.blocks], key=lambda piece: piece.begin)
        others = [piece for each in self.waiting for piece in each.touches]
        inside = [
            piece for piece in others if not any(own.begin <= piece.begin and piece.end <= own.end for own in pieces)
        ]
        merged: list[Memory] = []
        for piece in sorted(inside, key=lambda piece: piece.begin):
            if merged and piece.begin < merged[-1].end:
                merged[-1] = Memory(merged[-1].begin, max(merged[-1].end, piece.end), merged[-1].rank)
            else:
                merged.append(piece)
        return pieces + merged

    def run(self, schedule: Schedule) -> Ran:
        """Execute all waiting launches. Raises Failed if a rule is broken."""
        lib, regions = core(), self._regions()
        lib.reset(MOST_REGIONS)
        keep: list[Any] = []
        if self.window:
            begins = np.array([piece.begin for piece in sorted(self.arenas, key=lambda piece: piece.rank)], np.uint64)
            length = min(piece.end - piece.begin for piece in self.arenas)
            lib.set_window(self.window, length, begins.ctypes.data, len(begins))
        numbers = [lib.add_region(piece.begin, piece.end - piece.begin, piece.rank) for piece in regions]

        def spans(pieces: Sequence[Memory]) -> Array:
            found = np.zeros(len(pieces), SPAN)
            for i, piece in enumerate(pieces):
                (of,) = (
                    n for n, r in zip(numbers, regions, strict=True) if r.begin <= piece.begin and piece.end <= r.end
                )
                found[i] = (piece.begin, piece.end, of, piece.writable)
            return found

        waiting, self.waiting = self.waiting, []
        for each in waiting:
            program = each.program
            own = [block for block in self.blocks if block.rank == each.rank]
            may = spans([*each.touches, *self.arenas, *own])
            maps, bytes_of_maps = (0, 0) if each.maps is None else (each.maps.ctypes.data, each.maps.nbytes)
            constants = program.constants(each.values | {PARAMETERS: maps})
            kernel = _Kernel(
                program.instructions.ctypes.data, program.pool.ctypes.data, len(program.instructions), *program.sizes,
                program.count.ctypes.data, program.source.registers,
            )  # fmt: skip
            keep += [may, constants, kernel]
            lib.launch(
                ctypes.byref(kernel), *(each.ctypes.data for each in constants), may.ctypes.data, len(may), each.rank,
                each.grid, each.warps, each.shared_bytes, maps, bytes_of_maps,
            )  # fmt: skip
        clocks = np.array(self.clocks or [0], np.uint64)
        plan = _Plan(
            schedule.seed, schedule.limit, schedule.idle_limit, schedule.held_after,
            schedule.stale, schedule.drain, schedule.tick, schedule.quantum, schedule.residents,
            schedule.most_tick, schedule.held, schedule.held_until, len(self.clocks), schedule.shared,
            clocks.ctypes.data,
        )  # fmt: skip
        out, stats = ctypes.create_string_buffer(8192), np.zeros(3, np.uint64)
        if lib.run(ctypes.byref(plan), out, len(out), stats.ctypes.data):
            raise Failed(self._explained(out.value.decode(), waiting))
        return Ran(*map(int, stats))

    @staticmethod
    def _explained(text: str, waiting: Sequence[Waiting]) -> str:
        # The core reports instructions by number, and registers by place.
        found = re.match(r"rank (\d+), launch (\d+), CTA \d+, warp -?\d+, ins (-?\d+)", text)
        if not found:
            return text
        launch = waiting[int(found[2])]
        s = launch.program.source.statements[int(found[3])]
        names = launch.program.names
        text = re.sub(r"register ([wdp])(\d+)", lambda m: f"register {names[m[1]].get(int(m[2]), '?')}", text)
        return f"{launch.name}: {s.text[:200]} ({s.where}): {text}"
