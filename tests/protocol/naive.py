"""The memory model again, without any reduction: small random programs whose every access is executed by itself.

Each program has a buffer of issued events that have not taken effect yet; any event that may take effect next does so
in some order. Memory holds the number of the call that wrote last. `model` must agree with these results.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from .events import Access, Advance, Barrier, Event, Kernel, Raise, Wait
from .model import Calls

# For each rank: its call, and for each program the number of events issued and those that have not taken effect.
_Progress = tuple[int, tuple[tuple[int, frozenset[int]], ...]]
# All ranks' progress; cell -> call; word -> epoch.
_State = tuple[tuple[_Progress, ...], tuple[tuple[object, int], ...]]


def random_calls(seed: int) -> Calls:
    """Draw two to four calls of two ranks, each of one kernel. One rank stores to the other's cells or its own, the
    other loads; the events that order both may be missing.
    """
    draw = random.Random(seed)
    style = [draw.random() < 0.85 for _ in range(4)]
    halves, num_calls, owner = draw.choice((1, 2, 2)), draw.choice((2, 3, 4)), draw.choice((0, 1))

    def often(index: int) -> bool:
        # Most bugs are in every call, as a kernel's bugs are; a few are in single calls.
        return style[index] != (draw.random() < 0.04)

    def ops(rank: int) -> list[list[Kernel]]:
        calls = []
        for call in range(num_calls):
            epoch, cells = call + 1, frozenset({call % halves})
            enter: list[Event] = [Raise(1 - rank, 0, rank, epoch, True)]
            leave: list[Event] = [Wait(0, 1 - rank, epoch, True)] if often(0) else []
            work: list[Event] = []
            if rank == 0:
                work.append(Access(True, owner, cells))
                work += [Barrier()] if often(1) else []
                work += [Raise(1, 1, 0, epoch, often(2))] if draw.random() < 0.97 else []
            else:
                wait = Wait(1, 0, epoch if often(3) else epoch - 1, True)
                work += [wait, Access(False, owner, cells)]
            events = [enter + work] if draw.random() < 0.5 else [enter, work]
            kernel = Kernel("random", 0, (), False, events)
            kernel.programs[-1] += leave
            # The epoch advances in a kernel of its own, as after the arrival of all programs.
            calls.append([kernel, Kernel("leaving", 0, (0,), True, [[Advance(epoch)]])])
        return calls

    return [ops(0), ops(1)]


def explore_naively(calls: Calls) -> str:
    """Return an error that some order has, or ""."""
    start: _State = (tuple((0, _begin(ops, 0)) for ops in calls), ())
    seen, left = {start}, [start]
    while left:
        state = left.pop()
        moved = False
        for after, wrong in _steps(calls, state):
            moved = True
            if wrong:
                return wrong
            if after not in seen:
                seen.add(after)
                left.append(after)
        if not moved and any(call < len(ops) for (call, _), ops in zip(state[0], calls, strict=True)):
            return "deadlock"
    return ""


def _begin(ops: Sequence[Sequence[Kernel]], call: int) -> tuple[tuple[int, frozenset[int]], ...]:
    return tuple((0, frozenset()) for _ in ops[call][0].programs) if call < len(ops) else ()


def _steps(calls: Calls, state: _State) -> Iterator[tuple[_State, str]]:
    ranks, memory = state
    values = dict(memory)
    for rank, (call, programs) in enumerate(ranks):
        if call == len(calls[rank]):
            continue
        kernel = calls[rank][call][0]
        if all(at == len(kernel.programs[i]) and not buffer for i, (at, buffer) in enumerate(programs)):
            yield _moved(state, rank, (call + 1, _begin(calls[rank], call + 1)), values), ""
        for number, (at, buffer) in enumerate(programs):
            events = kernel.programs[number]
            if at < len(events):
                event = events[at]
                waits = isinstance(event, Wait) and values.get((rank, event.slot, event.source), 0) < event.epoch
                later = buffer if isinstance(event, (Wait, Barrier)) else buffer | {at}
                if not waits:
                    yield _moved(state, rank, (call, _put(programs, number, (at + 1, later))), values), ""
            for each in buffer:
                if not _may_take_effect(events, each, buffer):
                    continue
                event, changed, wrong = events[each], dict(values), ""
                if isinstance(event, Raise):
                    changed[event.owner, event.slot, event.source] = event.epoch
                elif isinstance(event, Access):
                    for cell in event.cells:
                        if event.write:
                            changed[event.owner, cell] = call
                        elif values.get((event.owner, cell), -1) != call:
                            wrong = f"rank {rank}, call {call} reads what call {values.get((event.owner, cell))} wrote"
                yield _moved(state, rank, (call, _put(programs, number, (at, buffer - {each}))), changed), wrong


def _may_take_effect(events: list[Event], number: int, buffer: frozenset[int]) -> bool:
    event = events[number]
    if not isinstance(event, Raise) or not event.release:
        return True
    barriers = [i for i in range(number) if isinstance(events[i], Barrier)]
    return not any(each < barriers[-1] for each in buffer) if barriers else True


def _put(
    programs: tuple[tuple[int, frozenset[int]], ...], number: int, value: tuple[int, frozenset[int]]
) -> tuple[tuple[int, frozenset[int]], ...]:
    return (*programs[:number], value, *programs[number + 1 :])


def _moved(state: _State, rank: int, progress: _Progress, values: dict[object, int]) -> _State:
    ranks = (*state[0][:rank], progress, *state[0][rank + 1 :])
    return ranks, tuple(sorted(values.items(), key=repr))
