"""All-gather + matmul on one GPU, its ranks virtual and its link emulated: what overlap looks like, not how fast it is.

Every virtual rank has its arena, its streams and its part of the SMs on the one device. Copies between their arenas
stay in its memory, a dozen times as fast as a link: behind each one its stream spins for what the link would have taken
longer, so that a peer's shard arrives at the link's rate. The same kernels then run *phased* (all copies, then all
matmuls) and *concurrent* (the matmuls wait for copies that are on their way), and the difference is what overlap hides.

Rows say "one GPU, virtual ranks" wherever they are shown: neither NVLink nor several GPUs have been measured, and ranks
share the memory's bandwidth. Run as `nox -s gpu -- --measure`.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from fusedtp import torch_private
from fusedtp.memory.local import local_memories
from fusedtp.op import ALL_GATHER_MATMUL, OPS, Task
from fusedtp.schedules.phases import run_concurrently, run_together
from fusedtp.schedules.prepared import Phases, Prepared
from fusedtp.schedules.transport import settle
from fusedtp.workspaces.workspace import Workspace

from . import arguments, store
from .cases import Case
from .machine import Machine, describe
from .operands import Operands, device_here
from .rows import Outcome, rows_of
from .store import Row
from .timing import Timing, Verdict

LABEL = "one GPU, virtual ranks"
OP = ALL_GATHER_MATMUL.name
# comm and matmul: the two phases; phased: one behind the other; concurrent: one behind the other's back.
VARIANTS = ("comm", "matmul", "phased", "concurrent")
DTYPES = ("bfloat16", "float16", "float32")
MAX_RANKS = 8


def operands_of(case: Case, device: torch.device) -> list[Operands]:
    """Those of every rank."""
    first = Operands(case, 0, device)
    return [first, *map(first.of_rank, range(1, case.world_size))]


def phases_of(
    ranks: Sequence[Workspace], given: Sequence[Operands], *, programs: int = 0,
    paces: Sequence[Callable[[int], object] | None] = (None,) * MAX_RANKS,
) -> list[Phases]:  # fmt: skip
    """The op of every rank, its shard copied, at that rank's pace."""
    found = []
    for ws, each, pace in zip(ranks, given, paces, strict=False):
        task = Task.of(OPS[OP], each.x, each.w.t(), None, sizes=each.m_sizes)
        prepared = Prepared("fused", task, ws=ws, producer="copy", programs=programs, pace=pace)
        found.append(prepared.phases(each.x, each.w.t(), None))
    return found


def check(given: Sequence[Operands], outs: Sequence[Sequence[Tensor]], what: str) -> Verdict:
    """AssertionError naming the rank whose result is wrong."""
    found = [
        each.product("y").check(out, torch.float32, f"{what}, rank {each.rank}")
        for each, (out,) in zip(given, outs, strict=True)
    ]
    return Verdict.worst(found)


class Marks:
    """Milliseconds between marks that wait for all of some streams; on a CPU, which has none, between two readings."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams
        self._events: list[torch.cuda.Event] = []
        self._readings: list[float] = []

    def mark(self) -> None:
        """Here."""
        if not self._streams:
            self._readings.append(time.perf_counter() * 1e3)
            return
        main = torch.cuda.current_stream()
        for stream in self._streams:
            main.wait_stream(stream)
        event = torch.cuda.Event(enable_timing=True)
        event.record(main)
        self._events.append(event)
        for stream in self._streams:
            stream.wait_stream(main)

    def lapses(self) -> list[float]:
        """Between each mark and the next; waits for the device."""
        if not self._streams:
            return [two - one for one, two in zip(self._readings, self._readings[1:], strict=False)]
        self._events[-1].synchronize()
        return [one.elapsed_time(two) for one, two in zip(self._events, self._events[1:], strict=False)]


def programs_of(num_sms: int, world_size: int) -> int:
    """Programs of each virtual rank: an equal part of the SMs, of which one a rank is left to the link's spinning."""
    programs = num_sms // world_size - 1
    if programs < 1:
        raise ValueError(f"{world_size} virtual ranks need two SMs each, and there are {num_sms}")
    return programs


def pause_us(num_bytes: int, link_gbps: float, copy_gbps: float) -> float:
    """Microseconds that a link takes longer for `num_bytes` than a copy inside the device's memory."""
    return max(0.0, num_bytes / (link_gbps * 1e3) - num_bytes / (copy_gbps * 1e3))


def pacing(link_gbps: float, copy_gbps: float, clock_mhz: float) -> Callable[[int], None]:
    """What holds the current stream after each copy, for `fused.Fused`."""

    def pace(num_bytes: int) -> None:
        # Spins for so many cycles of the SMs' clock.
        torch_private.spin(int(pause_us(num_bytes, link_gbps, copy_gbps) * clock_mhz))

    return pace


def clock_mhz(cycles: int = 100_000_000) -> float:
    """Cycles a microsecond of the clock that `pacing` counts, as they pass now."""
    if not torch.cuda.is_available():
        return 1.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch_private.spin(cycles)
    begin.record()
    torch_private.spin(cycles)
    end.record()
    end.synchronize()
    return float(cycles / (begin.elapsed_time(end) * 1e3))


def copy_gbps(
    device: torch.device, streams: Sequence[torch.cuda.Stream], num_bytes: int = 64 << 20, copies: int = 10
) -> float:
    """What a copy inside the device's memory moves, GB/s, while each of `streams` makes such copies, as ranks do."""
    if not streams:
        return math.inf
    memory = torch.zeros(len(streams), 2, num_bytes, dtype=torch.uint8, device=device)
    clock = Marks(streams)
    # The first time is for what happens once.
    for _ in range(2):
        clock.mark()
        for stream, (source, target) in zip(streams, memory, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(copies):
                    target.copy_(source)
    clock.mark()
    return float(copies * num_bytes / (clock.lapses()[-1] * 1e6))


def phased_round(
    ranks: Sequence[Workspace], phases: Sequence[Phases], streams: Sequence[torch.cuda.Stream]
) -> list[float]:
    """Milliseconds of all copies, then of all matmuls."""
    clock = Marks(streams)
    with contextlib.ExitStack() as stack:
        for ws in ranks:
            with _on(streams, ws.rank):
                stack.enter_context(ws.running(OP))
        for each in phases:
            next(each)
        clock.mark()
        for rank, each in enumerate(phases):
            with _on(streams, rank):
                next(each)
                settle(ranks[0])
        clock.mark()
        run_together(phases, streams)
        clock.mark()
    return clock.lapses()


def concurrent_round(
    ranks: Sequence[Workspace], phases: Sequence[Phases], streams: Sequence[torch.cuda.Stream]
) -> list[float]:
    """Milliseconds of the op on all ranks at once."""
    clock = Marks(streams)
    clock.mark()
    at_once(ranks, phases, streams)
    clock.mark()
    return clock.lapses()


def _on(streams: Sequence[torch.cuda.Stream], rank: int) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.stream(streams[rank]) if streams else contextlib.nullcontext()


def at_once(
    ranks: Sequence[Workspace], phases: Sequence[Phases], streams: Sequence[torch.cuda.Stream]
) -> list[list[Tensor]]:
    """The op on all ranks at once; on a CPU, where nothing runs beside anything else, phase by phase."""
    if streams:
        return run_concurrently(ranks, OP, phases, streams)
    return run_together(phases)


def measure(case: Case, link_gbps: Sequence[float], rounds: int, machine: Machine) -> list[Row]:
    """Rows of every variant behind every link: checked first, then timed in turns. Without a CUDA device nothing runs
    at once and nothing is paced, so that only a dry run can show the times.
    """
    device = device_here()
    on_gpu, given = device.type == "cuda", operands_of(case, device)
    ranks = [Workspace(memory, device) for memory in local_memories(case.world_size, device)]
    try:
        streams = [torch.cuda.Stream(device) for _ in ranks] if on_gpu else []
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2 * case.world_size
        programs = programs_of(num_sms, case.world_size)
        copies, clock = copy_gbps(device, streams), clock_mhz()
        rows: list[Row] = []
        for gbps in link_gbps:
            paces = [pacing(gbps, copies, clock) if on_gpu else None] * len(ranks)
            new = partial(phases_of, ranks, given, programs=programs, paces=paces)
            # Everything is compiled, loaded and allocated by the phased rounds, before anything waits for real.
            for _ in range(2):
                phased_round(ranks, new(), streams)
            verdict = _verdict(ranks, given, new(), streams)
            times: dict[str, list[float]] = {name: [] for name in VARIANTS}
            for _ in range(rounds if not verdict.error else 0):
                comm, matmul = phased_round(ranks, new(), streams)
                (both,) = concurrent_round(ranks, new(), streams)
                for name, time in zip(VARIANTS, (comm, matmul, comm + matmul, both), strict=True):
                    times[name].append(time)
            for ws in ranks:
                ws.check()
            rows += rows_for(case, gbps, times, verdict, machine)
        return rows
    finally:
        for ws in ranks:
            ws.close()


def _verdict(
    ranks: Sequence[Workspace], given: Sequence[Operands], phases: Sequence[Phases],
    streams: Sequence[torch.cuda.Stream],
) -> Verdict:  # fmt: skip
    outs = at_once(ranks, phases, streams)
    if streams:
        torch.cuda.synchronize()
    try:
        return check(given, outs, "concurrent")
    except AssertionError as error:
        return Verdict(error=str(error))


def rows_for(
    case: Case, link_gbps: float, times: dict[str, list[float]], verdict: Verdict, machine: Machine
) -> list[Row]:  # fmt: skip
    """Rows of one link's times in ms by variant, each with the label where the link is named and where the path is."""
    outcomes = [
        Outcome(
            name, "forward", verdict, Timing.of(times[name]) if times[name] else None, f"fused, copy, {name}; {LABEL}"
        )
        for name in VARIANTS
    ]
    emulated = replace(machine, links=f"emulated link of {link_gbps:g} GB/s; {LABEL}")
    medians = {name: statistics.median(each) for name, each in times.items() if each}
    hidden = None
    if len(medians) == len(VARIANTS) and medians["phased"] > medians["matmul"]:
        exposed = medians["concurrent"] - medians["matmul"]
        hidden = 1 - exposed / (medians["phased"] - medians["matmul"])
    # A model name tells the links' rows apart in a file that keeps one run of each case.
    case = replace(case, model=f"link {link_gbps:g} GB/s", layer=LABEL)
    rows = rows_of(case, outcomes, emulated)
    return [replace(row, overlap_efficiency=hidden if row.variant == "concurrent" else None) for row in rows]


def shown(rows: Sequence[Row]) -> list[str]:
    """The rows as lines of text, under their label."""
    lines = [f"{LABEL}: emulated links, times of all ranks together"]
    for row in rows:
        time = "not timed" if row.median_ms is None else f"{row.median_ms:8.3f} ms"
        hidden = "" if row.overlap_efficiency is None else f"  {row.overlap_efficiency:.0%} of comm hidden"
        failed = f"  {row.gate}" if row.failed else ""
        lines.append(f"{row.model:16} {row.variant:10} {time}{hidden}{failed}")
    return lines


def virtual(
    world_size: Annotated[int, typer.Option(help="Virtual ranks.")] = 4,
    shape: Annotated[str, typer.Option(help="One global size M,N,K.")] = "8192,3584,8192",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    link_gbps: Annotated[str, typer.Option(help="Links to emulate, GB/s, comma-separated.")] = "50,100,200,400",
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 20,
    out: Annotated[Path, typer.Option(help="Folder for the rows, one folder a machine.")] = Path("results"),
) -> None:
    """Time all-gather + matmul on one GPU with virtual ranks behind emulated links: phased against concurrent."""
    arguments.at_least(2, world_size, "--world-size", most=MAX_RANKS)
    arguments.at_least(1, rounds, "--rounds")
    (dtype,) = arguments.names(dtype, DTYPES, "--dtype")
    links, sizes = arguments.numbers(link_gbps, "--link-gbps"), arguments.shape(shape)
    if not torch.cuda.is_available():
        raise typer.BadParameter("this needs a CUDA device, and torch finds none")
    machine = describe()
    case = Case(OP, *sizes, dtype, world_size)
    rows = measure(case, links, rounds, machine)
    path = arguments.folder(out, machine.name) / "virtual.csv"
    store.update(path, rows)
    for line in (*shown(rows), f"rows: {path}"):
        typer.echo(line)
    if any(row.failed for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    arguments.run(virtual)
