"""The protocol as a finite transition system, built from recordings.

Memory is weak, and the model asks the most of it. A `Window` is the accesses of one program between two of its
synchronisations. A window may take effect from the moment when its program reaches it until something forces it: a
release that a barrier separates from the window, or the end of its kernel. A signal may become visible to its reader at
any time after its program has raised it, while that program goes on. The exploration covers all orders of the moments
that settle something, the `Commit`s: a signal becomes visible, a kernel ends, a wait passes. Windows stay open as long
as they can, which covers every order in which their accesses could take effect.

A state is the set of commits so far. A state is wrong when a window opens before another window that must come first
has closed:

- a load opens before every store of its own call to the same cells has settled (an old chunk, or half a new one);
- an access of a later call opens before the previous call's accesses to the same cells (overwritten while it is read).

A state that is not final and has no commit left is a deadlock. Some commits only ever open windows earlier: those that
settle nothing that matters, and waits whose condition stays true. They are taken at once (`eager`) if taking them later
reaches nothing new, and are explored like the others if a signal's word may go back. `explore` need not visit every
state where no commit ever makes another impossible.

With several lanes a rank's kernels need all its multiprocessors: one kernel runs at a time, whichever lane it is of, in
any order. Copies and stream operations need none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from .events import Access, Advance, Arrive, Barrier, Event, Kernel, Raise, Wait

# [rank][call] gives the kernels of that call.
Calls = Sequence[Sequence[Sequence[Kernel]]]
# Does a wait that expects `epoch` accept a word? By the word's distance to `epoch`.
Accepts = Callable[[int], bool]
# More slots than an op has.
_LANE = 1 << 20


@dataclass
class Commit:
    """A moment that orders something. `need`: the commits (bits) that must come first."""

    name: str
    need: int
    kind: str  # "signal", "wait", "end", "start"
    word: tuple[int, int, int] | None = None
    epoch: int = 0
    # For a start: each earlier program of the kernel as the commits that end it, and how many programs may run.
    earlier: tuple[int, ...] = ()
    residency: int = 0
    # For the start of a kernel with several lanes: start and end (bits) of the rank's other kernels.
    others: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Window:
    """Cells that a program accesses at some time after `need` (bits) and before any of `closers` (bits)."""

    name: str
    call: int
    program: tuple[int, int, int, int]
    segment: int
    one_thread: bool
    write: bool
    need: int
    cells: set[tuple[int, int]]
    closers: int = 0


@dataclass
class Model:
    """All ranks' calls. `faults`: errors in every order."""

    modulus: int
    accepts: Accepts
    first_epoch: int
    commits: list[Commit] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def commit(self, name: str, need: int, kind: str, **more: object) -> int:
        """Add a commit and return its bit."""
        self.commits.append(Commit(name, need, kind, **more))  # type: ignore[arg-type]
        return 1 << (len(self.commits) - 1)

    def accepted(self, seen: int, expected: int) -> bool:
        """Return whether a wait for `expected` accepts `seen`; epochs are compared in a word of `modulus` values."""
        half = self.modulus // 2
        return self.accepts((seen - expected + half) % self.modulus - half)


class _Program:
    """A walk through one program's events."""

    def __init__(self, model: Model, name: str, key: tuple[int, int, int, int], kernel: Kernel, need: int) -> None:
        self._model, self._name, self._key, self._kernel = model, name, key, kernel
        # `access_need`: commits before the next access. `need`: commits before the next synchronisation. They differ
        # after a wait that does not acquire.
        self.access_need = self.need = need
        self.commits = self._raised = self._unordered = 0
        self.windows: list[Window] = []
        # Windows of other programs, which this one's releases close too.
        self.seen: list[Window] = []
        self._current: dict[bool, Window] = {}
        self._segment = 0
        self.fenced = True

    def walk(self, events: Sequence[Event]) -> None:
        """Add the windows and commits of `events`."""
        for event in events:
            if isinstance(event, Access):
                self._access(event)
            elif isinstance(event, Barrier):
                self._current.clear()
                self._segment += 1
                self._raised, self._unordered = self._raised | self._unordered, 0
                self.fenced = True
            elif isinstance(event, Raise):
                self._raise(event)
            elif isinstance(event, Wait):
                self._current.clear()
                name = f"{self._name} has seen slot {event.slot} of rank {event.source}"
                word = (self._key[0], event.slot, event.source)
                bit = self._model.commit(name, self.need, "wait", word=word, epoch=event.epoch)
                self.commits |= bit
                self.need |= bit
                if event.acquire:
                    self.access_need |= bit

    def _access(self, event: Access) -> None:
        self.fenced = False
        if event.write not in self._current:
            window = Window(
                f"{self._name} {'stores to' if event.write else 'loads from'} rank {event.owner}",
                self._key[1], self._key, self._segment, self._kernel.one_thread, event.write, self.access_need, set(),
            )  # fmt: skip
            self._current[event.write] = window
            self.windows.append(window)
        self._current[event.write].cells |= {(event.owner, cell) for cell in event.cells}

    def _raise(self, event: Raise) -> None:
        # A release comes after the signals before the last barrier; one thread needs no barrier between its atomics.
        need = self.need | (self._raised if event.release else 0)
        name = f"{self._name} signals slot {event.slot} of rank {event.owner}"
        word = (event.owner, event.slot, event.source)
        bit = self._model.commit(name, need, "signal", word=word, epoch=event.epoch)
        self.commits |= bit
        self._unordered |= bit
        behind = [window for window in self.windows if window.segment < self._segment] + self.seen
        for window in behind:
            if event.release and not window.closers & need:
                window.closers |= bit


def build(
    calls: Calls, *, modulus: int = 16, residency: int = 0, accepts: Accepts | None = None, first_epoch: int = 0,
    beside: Sequence[Calls] = (),
) -> Model:  # fmt: skip
    """Return the model of calls[rank][call]. `residency`: the number of programs of a kernel that run at a time, in
    order (0: all). `accepts`: whether a wait accepts a word; by default that of `kernels.signal`, with a LEAD of
    modulus / 4. `beside`: calls of other lanes. Lanes share no memory, so then only deadlocks are looked for.
    """
    model = Model(modulus, accepts or (lambda distance: 0 <= distance < modulus // 4), first_epoch)
    running: list[list[tuple[int, int]]] = [[] for _ in calls]
    for lane, rank, ops in ((lane, *each) for lane, ranks in enumerate((calls, *beside)) for each in enumerate(ranks)):
        last = {0: 0, 1: 0}
        for call, recorded in enumerate(ops):
            kernels = [_in_lane(kernel, lane) for kernel in recorded]
            ends: list[int] = []
            before = last[0]
            for index, kernel in enumerate(kernels):
                start = last[kernel.stream] | (0 if kernel.after else before)
                for each in kernel.after:
                    start |= ends[each]
                begin = start
                if beside and not kernel.one_thread:
                    name = f"rank {rank}, call {call}, {kernel.name} in lane {lane} gets the multiprocessors"
                    begin = model.commit(name, start, "start")
                end = _add_kernel(model, (rank, call, index), kernel, begin, residency)
                if begin != start:
                    running[rank].append((begin, end))
                ends.append(end)
                last[kernel.stream] = end
            _check_end(model, rank, call, kernels)
    if beside:
        model.windows.clear()
    for kernels_of_rank in running:
        for begin, end in kernels_of_rank:
            model.commits[begin.bit_length() - 1].others += [each for each in kernels_of_rank if each != (begin, end)]
    return model


def _in_lane(kernel: Kernel, lane: int) -> Kernel:
    # Every lane has its own words.
    return replace(
        kernel,
        programs=[
            [
                event._replace(slot=event.slot + lane * _LANE) if isinstance(event, (Raise, Wait)) else event
                for event in events
            ]
            for events in kernel.programs
        ],
    )


def _add_kernel(model: Model, key: tuple[int, int, int], kernel: Kernel, start: int, residency: int) -> int:
    # Add a kernel's windows and commits, and return the bit of its end.
    rank, call, _ = key
    title = f"rank {rank}, call {call}, {kernel.name}"
    inside, need = 0, start
    windows: list[Window] = []
    ended: list[int] = []
    tails: list[Sequence[Event]] = []
    for number, events in enumerate(kernel.programs):
        name = f"{title} program {number}"
        begin = start
        if 0 < residency < len(kernel.programs):
            begin |= model.commit(f"{name} starts", start, "start", earlier=tuple(ended), residency=residency)
        arrived = next((i for i, event in enumerate(events) if isinstance(event, Arrive)), len(events))
        program = _Program(model, name, (*key, number), kernel, begin)
        program.walk(events[:arrived])
        if arrived < len(events) and not program.fenced:
            model.faults.append(f"{name} arrives without a barrier after its last access")
        tails.append(events[arrived + 1 :])
        windows += program.windows
        inside |= program.commits | begin
        ended.append(program.need)
        need |= program.need
    # The last program to arrive goes on, as in the recording, whichever program that is.
    if any(tails):
        if any(tails[:-1]):
            model.faults.append(f"{title}: a program that is not the last to arrive leaves")
        tail = _Program(model, f"{title} leaving", (*key, -1), kernel, need)
        if all(event.ordered for events in kernel.programs for event in events if isinstance(event, Arrive)):
            tail.seen = list(windows)
        tail.walk(tails[-1])
        inside |= tail.commits
        windows += tail.windows
    end = model.commit(f"{title} ends", inside | need, "end")
    for window in windows:
        window.closers |= end
    model.windows += windows
    return end


def _check_end(model: Model, rank: int, call: int, kernels: Sequence[Kernel]) -> None:
    # The epoch advances once a call, by one, in the last kernel, after all programs have arrived and all kernels ended.
    where = [
        (number, (event.epoch - model.first_epoch - call - 1) % 2**32 == 0)
        for number, kernel in enumerate(kernels)
        for events in kernel.programs
        for position, event in enumerate(events)
        if isinstance(event, Advance) and (kernel.one_thread or any(isinstance(e, Arrive) for e in events[:position]))
    ]
    if where != [(len(kernels) - 1, True)]:
        model.faults.append(f"rank {rank}, call {call}: the epoch does not move on once, by one, at the end")
    ended, left = {len(kernels) - 1}, [len(kernels) - 1]
    while left:
        last = left.pop()
        stream = kernels[last].stream
        for each in (*kernels[last].after, *(n for n in range(last) if kernels[n].stream == stream)):
            if each not in ended:
                ended.add(each)
                left.append(each)
    for number in set(range(len(kernels))) - ended:
        model.faults.append(f"rank {rank}, call {call}: {kernels[number].name} may still run when the epoch moves on")


def bits(mask: int) -> Iterator[int]:
    """Yield the indices of the set bits."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def closure(commits: Sequence[Commit]) -> list[int]:
    """Return, for each commit, all commits that precede it in every order (a commit needs only earlier numbers)."""
    before: list[int] = []
    for commit in commits:
        mask = commit.need
        for number in bits(commit.need):
            mask |= before[number]
        before.append(mask)
    return before


def required(model: Model) -> dict[int, list[int]]:
    """Return, for each window, the windows that must have closed when it opens, except those that always have."""
    before = closure(model.commits)

    def always(first: Window, second: Window) -> bool:
        if first.program == second.program:
            return first.one_thread or first.segment < second.segment
        needed = second.need
        for number in bits(second.need):
            needed |= before[number]
        return bool(first.closers & needed)

    users: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, window in enumerate(model.windows):
        for cell in window.cells:
            users[cell].append(number)
    pairs: set[tuple[int, int]] = set()
    twice: set[tuple[int, int]] = set()
    unwritten: set[int] = set()
    for numbers in map(tuple, {tuple(each) for each in users.values()}):
        earlier: list[int] = []
        for call in sorted({model.windows[number].call for number in numbers}):
            here = [number for number in numbers if model.windows[number].call == call]
            stores = [number for number in here if model.windows[number].write]
            loads = [number for number in here if not model.windows[number].write]
            twice |= {(one, two) for one in stores for two in stores if one < two}
            if not stores:
                unwritten |= set(loads)
            pairs |= {(store, load) for store in stores for load in loads}
            pairs |= {(old, store) for old in earlier for store in stores}
            earlier = here
    for one, two in sorted(twice):
        model.faults.append(f"{model.windows[one].name} and {model.windows[two].name} the same cells in one call")
    for number in sorted(unwritten):
        model.faults.append(f"{model.windows[number].name} cells that nobody stores to in this call")
    found: dict[int, list[int]] = defaultdict(list)
    for first, second in sorted(pairs):
        if not always(model.windows[first], model.windows[second]):
            found[second].append(first)
    return found
