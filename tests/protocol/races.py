"""The race detector: accesses to symmetric memory that nothing orders, by vector clocks over the signals.

The recordings of all ranks are played back together, a wait once the signal that ends it has been raised. Every program
is a thread of its own clock, which a barrier advances: a release publishes what lies behind the program's last barrier
and all that the program has itself acquired; an acquire, and the start of a kernel after others, take that over. Two
accesses to one cell, one of them a store, are a race unless the earlier one is known to the later one's program. (L.
Lamport, Time, clocks and the ordering of events in a distributed system, 1978.)

Where the checker asks whether any order of a model is wrong, this asks whether one run shows an order missing; it needs
no model, and names both accesses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .events import Access, Arrive, Barrier, Event, Kernel, Raise, Wait

_Thread = tuple[int, int, int, int]
_Clock = dict[_Thread, int]
Calls = Sequence[Sequence[Sequence[Kernel]]]


class _Seen(NamedTuple):
    """An access as later ones find it: the thread, its clock then, and where it stands in its program."""

    thread: _Thread
    time: int
    write: bool
    position: int


class Race(NamedTuple):
    """Two accesses to the same cells, and what is missing between them."""

    first: str
    second: str
    missing: str

    def __str__(self) -> str:
        return f"{self.first} | {self.second} | {self.missing}"


@dataclass
class _Running:
    """One program under way."""

    thread: _Thread
    events: Sequence[Event]
    clock: _Clock
    at: int = 0
    # Own accesses up to this time lie behind a barrier.
    fenced: int = 0
    # What it has acquired; without a barrier in between a release publishes this all the same.
    acquired: _Clock = field(default_factory=dict)


def find_races(calls: Calls, first_epoch: int = 0) -> tuple[list[Race], list[str]]:
    """The races of calls[rank][call], one for each pair of programs and kinds, and the waits that nothing has ended."""
    return _Playback(calls, first_epoch).run()


class _Playback:
    def __init__(self, calls: Calls, first_epoch: int) -> None:
        self._calls, self._first_epoch = calls, first_epoch
        self._cells: dict[tuple[int, int], list[_Seen]] = defaultdict(list)
        # Per word, the signals raised so far: epoch and clock.
        self._words: dict[tuple[int, int, int], list[tuple[int, _Clock]]] = defaultdict(list)
        self._ended: dict[tuple[int, int, int], _Clock] = {}
        self._races: dict[tuple[_Thread, _Thread, bool, bool], Race] = {}

    def _starts_after(self, rank: int, call: int, index: int) -> list[tuple[int, int, int]]:
        # The kernels that this one waits for: those it names, the one before it on its stream, and the last call.
        kernels = self._calls[rank][call]
        kernel = kernels[index]
        before = [number for number in range(index) if kernels[number].stream == kernel.stream]
        named = {*kernel.after, *before[-1:]}
        if named:
            return [(rank, call, number) for number in sorted(named)]
        if not call:
            return []
        return [(rank, call - 1, len(self._calls[rank][call - 1]) - 1)]

    def run(self) -> tuple[list[Race], list[str]]:
        waiting = [
            (rank, call, index)
            for rank, ops in enumerate(self._calls)
            for call, kernels in enumerate(ops)
            for index in range(len(kernels))
        ]
        running: dict[tuple[int, int, int], list[_Running]] = {}
        progress = True
        while progress:
            progress = False
            for key in list(waiting):
                after = self._starts_after(*key)
                if all(each in self._ended for each in after):
                    waiting.remove(key)
                    start = _joined([self._ended[each] for each in after])
                    running[key] = [
                        _Running((*key, number), events, dict(start), acquired=dict(start))
                        for number, events in enumerate(self._kernel(key).programs)
                    ]
                    progress = True
            for key, programs in list(running.items()):
                for program in programs:
                    while self._step(program, programs):
                        progress = True
                if all(program.at == len(program.events) for program in programs):
                    clocks = [{**each.clock, each.thread: len(each.events) + 1} for each in programs]
                    self._ended[key] = _joined(clocks)
                    del running[key]
                    progress = True
        stuck = [
            f"{self._name(program.thread)} waits for slot {event.slot} of rank {event.source}, epoch {event.epoch}"
            for programs in running.values()
            for program in programs
            for event in program.events[program.at : program.at + 1]
            if isinstance(event, Wait)
        ]
        return list(self._races.values()), stuck

    def _kernel(self, key: tuple[int, int, int]) -> Kernel:
        return self._calls[key[0]][key[1]][key[2]]

    def _step(self, program: _Running, programs: list[_Running]) -> bool:
        # One event; False where there is none, or a wait has to wait.
        if program.at == len(program.events):
            return False
        event = program.events[program.at]
        if isinstance(event, Wait):
            raised = self._ends(program.thread[0], event)
            if raised is None:
                return False
            if event.acquire:
                _join(program.clock, raised)
                _join(program.acquired, raised)
        elif isinstance(event, Barrier):
            program.fenced = program.clock[program.thread] = program.at + 1
            program.acquired = dict(program.clock)
        elif isinstance(event, Raise):
            published = {**program.acquired, program.thread: program.fenced} if event.release else {}
            self._words[event.owner, event.slot, event.source].append((event.epoch, published))
        elif isinstance(event, Access):
            self._access(program, event)
        elif isinstance(event, Arrive):
            # What comes after that was recorded as done by the last one to arrive.
            leaves = program.at + 1 < len(program.events)
            if leaves and not all(each is program or each.at == len(each.events) for each in programs):
                return False
        program.at += 1
        return True

    def _ends(self, rank: int, wait: Wait) -> _Clock | None:
        # What the first signal to end the wait has published; {} where its word began there; None: not yet.
        if _distance(self._first_epoch, wait.epoch) >= 0:
            return {}
        for epoch, clock in self._words[rank, wait.slot, wait.source]:
            if _distance(epoch, wait.epoch) >= 0:
                return clock
        return None

    def _access(self, program: _Running, access: Access) -> None:
        now = _Seen(program.thread, program.at + 1, access.write, program.at)
        for cell in access.cells:
            history = self._cells[access.owner, cell]
            for old in history:
                known = old.time <= program.clock.get(old.thread, 0) or old.thread == program.thread
                if (old.write or access.write) and not known:
                    key = (old.thread, program.thread, old.write, access.write)
                    if key not in self._races:
                        self._races[key] = self._describe(old, now, access.owner)
            if now not in history:
                history.append(now)

    def _describe(self, old: _Seen, new: _Seen, owner: int) -> Race:
        sides = []
        for seen in (old, new):
            sides.append(f"{self._name(seen.thread)} {'stores to' if seen.write else 'loads from'} rank {owner}")
        events = self._events(old.thread)
        release, fenced = "raises no signal after that", False
        for event in events[old.position :]:
            fenced |= isinstance(event, Barrier)
            if isinstance(event, Raise) and event.release and fenced:
                release = f"next releases slot {event.slot} of rank {event.owner}"
                break
            if isinstance(event, Raise):
                release = f"raises slot {event.slot} of rank {event.owner} without ordering it"
                break
        waits = [event for event in self._events(new.thread)[: new.position] if isinstance(event, Wait)]
        waited = ", ".join(f"slot {each.slot} of rank {each.source} for epoch {each.epoch}" for each in waits)
        return Race(
            sides[0], sides[1], f"the first {release}; the second's program has waited for {waited or 'nothing'}"
        )

    def _events(self, thread: _Thread) -> Sequence[Event]:
        return self._kernel(thread[:3]).programs[thread[3]]

    def _name(self, thread: _Thread) -> str:
        rank, call, _, number = thread
        return f"rank {rank}, call {call}, {self._kernel(thread[:3]).name} program {number}"


def _distance(seen: int, expected: int) -> int:
    return (seen - expected + 2**31) % 2**32 - 2**31


def _join(clock: _Clock, other: _Clock) -> None:
    for thread, time in other.items():
        if time > clock.get(thread, 0):
            clock[thread] = time


def _joined(clocks: Sequence[_Clock]) -> _Clock:
    union: _Clock = {}
    for clock in clocks:
        _join(union, clock)
    return union
