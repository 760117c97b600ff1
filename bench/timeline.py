"""Record when each rank multiplies, copies and waits in one call of an op, as a trace for Perfetto.

The schedules mark their spans (`fusedtp.trace`). Here they run on fresh ranks, each schedule after the gate and a few
warm-up calls. Then come recorded rounds, in which the schedules take turns. All ranks enter a round through a barrier.
The round whose slowest rank is the median is shown. On a CPU the host's work is recorded, everything but interpreted
kernels. On a GPU spans are events on the streams that run the work, behind a spin that covers the host, and then a
barrier, which the host does not wait for: ranks begin together to within the barrier's skew.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch.distributed import ProcessGroup

from fusedtp import trace
from fusedtp.files import Entry, entry_of, read_text, replace
from fusedtp.machine import Machine

from . import theme
from .arguments import MAX_RANKS
from .cases import DTYPES, OPS, OWN, SEQUENTIAL, SHORT_DTYPES, TITLES, Case
from .frames import BASELINE
from .intervals import Timing, careful, ratio
from .problem import Problem
from .store import MAX_BYTES, origin
from .tables import milliseconds

# Schedules that the host can record; see above.
SCHEDULES = ("decomposed", SEQUENTIAL, "unfused")
WARM_CALLS = 3
NAMES = {"travel": "copy", "multiply": "multiply", "wait": "wait", "add": "add up", "collective": "collective"}
_FORMAT = "fusedtp timeline 1"
# Range of times in a file: up to an hour, and down to less than a clock resolves.
_MOST_US, _LEAST_MS = 3.6e9, 1e-6


@dataclass(frozen=True)
class Mark:
    """A span of one of trace.KINDS, or "call" for the whole; begin and length in us from the round's first call."""

    schedule: str
    rank: int
    kind: str
    peer: int
    begin_us: float
    length_us: float


@dataclass(frozen=True)
class Timeline:
    """`about`: the case, the machine, the commit and the number of rounds, as the trace's otherData has them.

    Its `calls` (not in older files) are the ms of every recorded call, by schedule and round.
    """

    about: dict[str, Any]
    marks: tuple[Mark, ...]

    @property
    def schedules(self) -> list[str]:
        return list(dict.fromkeys(mark.schedule for mark in self.marks))

    def of(self, schedule: str, kind: str | None = None) -> list[Mark]:
        return [mark for mark in self.marks if mark.schedule == schedule and kind in (None, mark.kind)]

    def last_ms(self, schedule: str) -> float:
        """Return the end of the last rank, in ms from the first rank's call."""
        return max(mark.begin_us + mark.length_us for mark in self.of(schedule)) / 1e3

    def calls(self, schedule: str) -> Timing | None:
        """Return all recorded calls of a schedule, or None if not stored."""
        times = [call["ms"] for call in self.about.get("calls", ()) if call["schedule"] == schedule]
        return Timing.of(times) if times else None

    def parts_ms(self, schedule: str) -> dict[str, float]:
        """Return the ms of each kind in the call of the rank that ends last; "" is the rest of the call."""
        last = max(self.of(schedule, "call"), key=lambda mark: mark.begin_us + mark.length_us)
        found = defaultdict(float, {"": (last.begin_us + last.length_us) / 1e3})
        for mark in self.of(schedule):
            if mark.rank == last.rank and mark.kind != "call":
                found[mark.kind] += mark.length_us / 1e3
                found[""] -= mark.length_us / 1e3
        return found

    def title(self) -> str:
        about = self.about
        size = f"{about['M']} x {about['N']} x {about['K']} {SHORT_DTYPES.get(about['dtype'], about['dtype'])}"
        return f"{TITLES.get(about['op'], about['op'])}, {size} on {about['world_size']} ranks"


# Spans (kind, peer, begin, end in ns) of a call, and the call itself, last.
Recorded: TypeAlias = list[tuple[str, int, int, int]]


def record(group: ProcessGroup, case: Case, schedules: Sequence[str], rounds: int) -> dict[str, list[Recorded]]:
    """Return this rank's spans (kind, peer, begin, end in ns) of every round by schedule, calls last; collective."""
    import torch

    from .operands import device_here
    from .timing import gate

    problem = Problem(case, group, device_here())
    found: dict[str, list[Recorded]] = {schedule: [] for schedule in schedules}
    with torch.no_grad():
        for schedule, verdict in gate(problem, schedules, group).items():
            if verdict.error:
                raise AssertionError(verdict.error)
            for _ in range(WARM_CALLS):
                problem.runner(schedule)()
        # In turns, starting one further every round, so that drift affects all alike.
        for turn in range(rounds * len(schedules)):
            schedule = schedules[(turn + turn // len(schedules)) % len(schedules)]
            run = problem.runner(schedule)
            found[schedule].append((_on_device if problem.device.type == "cuda" else _on_host)(run, group))
    return found


def _on_host(run: Callable[[], object], group: ProcessGroup) -> Recorded:
    import torch.distributed as dist

    dist.barrier(group=group)
    with trace.recording() as spans:
        begin = time.perf_counter_ns()
        result = run()
        end = time.perf_counter_ns()
    del result
    return [*((*span,) for span in spans), ("call", -1, begin, end)]


def _on_device(run: Callable[[], object], group: ProcessGroup) -> Recorded:
    # Nanoseconds from this rank's first event, which follows a spin of 10 ms and a barrier on the stream.
    import torch
    import torch.distributed as dist

    from .timing import FIRST_MS, spin

    def event() -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    token = torch.zeros(1, device="cuda")
    spin(FIRST_MS)
    # Behind the spin, whose end depends on a GPU's clock.
    dist.all_reduce(token, group=group)
    with trace.recording(event) as spans:
        begin = event()
        result = run()
        end = event()
    torch.cuda.synchronize()
    del result

    def ns(mark: Any) -> int:
        return max(0, int(1e6 * begin.elapsed_time(mark)))

    return [*((kind, peer, ns(at), ns(to)) for kind, peer, at, to in spans), ("call", -1, 0, ns(end))]


def timeline(
    case: Case, schedules: Sequence[str], rounds: int, machine: Machine, *, timeout: float = 120.0
) -> Timeline:
    """Record on ranks started here. RankError if a rank fails, with the gate's message for a wrong result."""
    from .ranks import RankPool
    from .sweep import rank_environment

    with RankPool(case.world_size, timeout=timeout, env=rank_environment(machine.num_gpus, case.world_size)) as pool:
        ranks = pool.run(record, case, tuple(schedules), rounds)
    marks: list[Mark] = []
    kept: list[dict[str, Any]] = []
    for schedule in schedules:
        times = []
        for turn in range(rounds):
            calls = [rank[schedule][turn][-1] for rank in ranks]
            times.append((max(end for *_, end in calls) - min(begin for *_, begin, _ in calls), turn))
        kept += [{"schedule": schedule, "round": turn, "ms": length / 1e6} for length, turn in times]
        _, turn = sorted(times)[(rounds - 1) // 2]
        start = min(rank[schedule][turn][-1][2] for rank in ranks)
        for rank, recorded in enumerate(ranks):
            for kind, peer, begin, end in recorded[schedule][turn]:
                marks.append(Mark(schedule, rank, kind, peer, (begin - start) / 1e3, (end - begin) / 1e3))
    about = {**asdict(case), **origin(machine), "rounds": rounds, "calls": kept, "format": _FORMAT}
    return Timeline(about, tuple(marks))


def _label(mark: Mark) -> str:
    name = "call" if mark.kind == "call" else NAMES.get(mark.kind, mark.kind)
    if mark.peer < 0:
        return name
    return f"{name} for rank {mark.peer}" if mark.kind == "wait" else f"{name}, chunk of rank {mark.peer}"


def write(found: Timeline, path: Path) -> None:
    """Write trace events for ui.perfetto.dev and chrome://tracing: a process a schedule, a thread a rank."""
    events: list[dict[str, Any]] = []
    for pid, schedule in enumerate(found.schedules):
        marks = found.of(schedule)
        names = [("process_name", 0, {"name": schedule}), ("process_sort_index", 0, {"sort_index": pid})]
        names += [("thread_name", rank, {"name": f"rank {rank}"}) for rank in sorted({mark.rank for mark in marks})]
        events += [{"ph": "M", "name": name, "pid": pid, "tid": rank, "args": given} for name, rank, given in names]
        events += [
            {
                "ph": "X", "name": _label(mark), "cat": mark.kind, "pid": pid, "tid": mark.rank, "ts": mark.begin_us,
                "dur": mark.length_us, "args": {"peer": mark.peer},
            }
            for mark in marks
        ]  # fmt: skip
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": found.about}
    replace(path, json.dumps(content, indent=1).encode())


def read(path: Path) -> Timeline:
    """Read a file of `write`; ValueError, with the key, for anything else."""
    try:
        content = entry_of(read_text(path, max_bytes=MAX_BYTES)).only("traceEvents", "displayTimeUnit", "otherData")
        about = content.entry("otherData")
        about.text("format", among=(_FORMAT,))
        about.text("op", among=OPS)
        about.text("dtype", among=DTYPES)
        for name in ("M", "N", "K"):
            about.integer(name, 1, 2**40)
        world_size = about.integer("world_size", 1, MAX_RANKS)
        for call in about.entries("calls") if "calls" in about.values else ():
            call.only("schedule", "round", "ms")
            call.text("schedule", among=SCHEDULES)
            call.integer("round", 0, 10**6)
            call.number("ms", _LEAST_MS, _MOST_US / 1e3)
        schedules: dict[int, str] = {}
        marks = []
        for event in content.entries("traceEvents"):
            pid, rank = event.integer("pid", 0, MAX_RANKS), event.integer("tid", 0, world_size - 1)
            if event.text("name") == "process_name":
                name = event.entry("args").text("name", among=SCHEDULES)
                if schedules.setdefault(pid, name) != name:
                    raise ValueError(f"{event.where('pid')} is already that of {schedules[pid]}")
            if event.text("ph", among=("M", "X")) == "X":
                if pid not in schedules:
                    raise ValueError(f"{event.where('pid')} {pid} has no process_name before it")
                marks.append(_mark(event, schedules[pid], rank, world_size))
        if not any(mark.kind == "call" for mark in marks):
            raise ValueError("traceEvents has no call")
    except ValueError as error:
        raise ValueError(f"{path} is not a timeline of fusedtp: {error}") from error
    return Timeline(about.values, tuple(marks))


def _mark(event: Entry, schedule: str, rank: int, world_size: int) -> Mark:
    return Mark(
        schedule, rank, event.text("cat", among=("call", *trace.KINDS)),
        event.entry("args").integer("peer", -1, world_size - 1), event.number("ts", 0, _MOST_US),
        event.number("dur", 0, _MOST_US),
    )  # fmt: skip


# Reasons why a schedule is slower than unfused, by the kind of time that grew most.
_REASONS = {
    "multiply": "multiplying took {own} ms, in unfused {other}: the arithmetic is the same, so chunks multiply more "
    "slowly here than the whole, or the machine was disturbed",
    "wait": "waiting for the others' chunks, or for a rank that began later, took {own} ms",
    "sending": "copying took {own} ms, the collective of unfused {other}",
    "add": "adding partial results took {own} ms, in unfused {other}",
    "": "host work between the parts, or a late start, took {own} ms, in unfused {other}",
}


def remarks(found: Timeline) -> list[str]:
    """Return remarks on each schedule against unfused and sequential, and why the shown call is slower if it is."""
    lines: list[str] = []
    called = [schedule for schedule in found.schedules if found.of(schedule, "call")]
    for schedule in called if BASELINE in called else ():
        if schedule == BASELINE:
            continue
        own_ms, other_ms = found.last_ms(schedule), found.last_ms(BASELINE)
        if own_ms > other_ms:
            own, other = found.parts_ms(schedule), found.parts_ms(BASELINE)
            for each in (own, other):
                each["sending"] = each.pop("travel", 0.0) + each.pop("collective", 0.0)
            most = max(_REASONS, key=lambda kind: own[kind] - other[kind])
            why = _REASONS[most].format(own=milliseconds(own[most]), other=milliseconds(other[most]))
            times = f"{milliseconds(own_ms)} ms, {BASELINE} {milliseconds(other_ms)}"
            slower = f"{schedule} is slower than {BASELINE} in the calls shown, {times}"
            lines.append(f"{slower}. What grew most, on the rank that ends last: {why}.")
        calls = found.calls(schedule)
        for name in (BASELINE, SEQUENTIAL):
            base = found.calls(name)
            if name != schedule and calls and base and calls.rounds > 1:
                of = ratio(calls, base)
                told = "faster" if of.high < 1 else "slower" if of.low > 1 else "neither can be called the faster"
                interval = f"{of.ratio:.2f} times as long as {name} (95 % interval {of.low:.2f} to {of.high:.2f})"
                lines.append(f"All {calls.rounds} recorded calls of each: {schedule} takes {interval}: {told}.")
    warning = careful([[calls for schedule in called if (calls := found.calls(schedule))]]) if lines else ""
    return [*lines, *filter(None, [warning])]


# Kinds in the second lane of a rank, below its compute lane.
_TRANSFERS = ("travel", "collective", "wait")


def figure(found: Timeline) -> Any:
    """Draw a panel for each schedule, unfused first, then sequential. A rank has two lanes: compute, and transfers.

    All panels share one axis of time. Called within `theme.style`.
    """
    from matplotlib.lines import Line2D

    ranks = sorted({mark.rank for mark in found.marks})
    names = {2 * at + lane: f"rank {rank}, {what}" for at, rank in enumerate(ranks)
             for lane, what in enumerate(("compute", "transfers"))}  # fmt: skip
    longest_us = max(mark.begin_us + mark.length_us for mark in found.marks)
    schedules = sorted(found.schedules, key=OWN.index)
    drawn, axes = theme.panels([len(names)] * len(schedules), 1, line=0.24, row=0.6, sharex=True)
    for axis, schedule in zip(axes[:, 0], schedules, strict=True):
        for mark in found.of(schedule):
            left, length, at = mark.begin_us / 1e3, mark.length_us / 1e3, 2 * ranks.index(mark.rank)
            if mark.kind == "call":
                axis.barh(at + 0.5, length, left=left, height=1.86, zorder=1, **theme.bar("line"))
                continue
            at += mark.kind in _TRANSFERS
            edge = {} if mark.kind == "wait" else {"edgecolor": theme.colour("paper"), "linewidth": 0.6}
            axis.barh(at, length, left=left, height=0.78, zorder=2, **theme.bar(mark.kind, **edge))
            if mark.peer >= 0 and mark.kind != "wait" and mark.length_us > 0.03 * longest_us:
                style = {"ha": "center", "va": "center_baseline", "fontsize": 7.5, "color": theme.colour("on-bar")}
                axis.text(left + length / 2, at, f"{mark.peer}", zorder=3, **style)
        last = found.last_ms(schedule)
        axis.axvline(last, color=theme.colour("ink"), linewidth=1.0, ymin=0.02, ymax=0.98)
        axis.set_title(f"{schedule}: {last:.3g} ms")
        theme.named_lines(axis, names, len(names))
    axes[-1, 0].set_xlabel("ms from the first rank's call")
    axes[-1, 0].set_xlim(left=0)
    said = [line for each in remarks(found) for line in textwrap.wrap(each, 120)]
    if said := [*said, *([str(found.about["cpu"])] if found.about.get("cpu") else [])]:
        drawn.supxlabel("\n".join(said), fontsize=8, color=theme.colour("ink"), x=0.01, ha="left")
    kinds = {mark.kind for mark in found.marks}
    handles: dict[str, Any] = {name: kind for kind, name in NAMES.items() if kind in kinds}
    handles |= {
        "the rest of the call": "line",
        "the last rank ends": Line2D([], [], color=theme.colour("ink"), linewidth=1),
    }
    numbers = "; a number is the rank whose chunk it is" if any(mark.peer >= 0 for mark in found.marks) else ""
    theme.legend(drawn, handles, title=f"{found.title()}{numbers}", alignment="left")
    return drawn


def picture(found: Timeline, path: Path) -> None:
    """Save the figure as a PNG."""
    with theme.style():
        theme.save(figure(found), path)
