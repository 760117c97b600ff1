"""The part of each rank in an injection: right calls, one call in which a rank fails at a step, and a recovery.

The ranks meet in the group's store, never in a collective, as some of them are stopped or have given up.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.kernels.signal import WAITING_FOR as _WAITING_FOR
from fusedtp.workspaces import registry
from fusedtp.workspaces.workspace import Workspace

from ..beside import arenas, mappings
from .cases import CASES
from .points import NOTHING_SENT, Watch

WAITING_FOR = _WAITING_FOR.value
LONG = 60.0
# Seconds that a rank is late or stopped, when shorter than the timeout.
SHORT = 0.2
CALLS = 3
RAISING = ("raises", "is interrupted")
# A group has threads and sockets of its own, so hundreds of injections cannot have one group each.
FRESH_EVERY = 8


class Planted(Exception):
    """The exception that the faulty rank raises."""


@dataclass(frozen=True)
class Injection:
    """One fault: `kind` strikes rank `rank` in an op's call, before the step `where` (0 the first, 1 the last)."""

    kind: str
    case: str
    world_size: int
    rank: int
    where: float
    # Number of calls before this one; it decides which half is struck.
    before: int = 1
    seconds: float = 1.0


@dataclass
class Outcome:
    """One rank's outcome: the number of right calls, the error after them, and the error of the same call repeated."""

    rank: int
    right: int = 0
    wrong: int = 0
    error: BaseException | None = None
    again: BaseException | None = None
    # Time from start to end of the failed call, and the longest time between two of the rank's own steps.
    seconds: float = 0.0
    own_seconds: float = 0.0
    step: str = ""
    recovered: bool = False
    # Number of descriptors and mappings of arenas after `destroy`.
    left: int = 0


class Meeting:
    """The progress of each rank of one injection, in the store."""

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self._store: Any = dist.distributed_c10d._get_process_group_store(group)
        self.rank, self.world_size, self._name = group.rank(), group.size(), name

    def tell(self, what: str, value: str = "") -> None:
        self._store.set(f"{self._name}/{what}/{self.rank}", value)

    def hear(self, what: str, ranks: list[int]) -> list[str]:
        """Wait until all `ranks` have told `what`, and return their values."""
        keys = [f"{self._name}/{what}/{rank}" for rank in ranks]
        self._store.wait(keys, timedelta(seconds=LONG))
        return [self._store.get(key).decode() for key in keys]

    def all(self, what: str) -> None:
        """Wait for all ranks."""
        self.tell(what)
        self.hear(what, list(range(self.world_size)))


def _state(pid: int) -> str:
    """Return the state of a process: "T" stopped, "Z" dead but not yet reaped by its parent, "" gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _stop_for(seconds: float) -> None:
    # A separate process continues this process once it is stopped.
    stopped = f"while ! grep -q '^State:.T' /proc/{os.getpid()}/status; do sleep 0.01; done"
    with subprocess.Popen(["sh", "-c", f"{stopped}; sleep {seconds}; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)


class Fault:
    """A fault: strike at the step on the faulty rank, and act on a survivor after its error."""

    def __init__(self, injection: Injection, meeting: Meeting) -> None:
        self.injection, self.meeting = injection, meeting
        self.survivors = [rank for rank in range(injection.world_size) if rank != injection.rank]

    def strike(self) -> None:
        kind = self.injection.kind
        if kind == "raises":
            raise Planted(f"in {self.injection.case}")
        if kind == "is interrupted":
            raise KeyboardInterrupt
        if kind == "is late":
            time.sleep(SHORT)
        elif kind == "is too late":
            self.meeting.hear("given up", self.survivors)
        elif kind == "is stopped":
            _stop_for(SHORT)
        elif kind in ("is stopped too long", "is stopped for good"):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise AssertionError(kind)

    def strike_in_wait(self, ws: Workspace) -> None:
        """Run in a thread of the rank: strike as soon as the rank waits for another rank, which then goes on."""
        while not int(ws.words[WAITING_FOR]):
            time.sleep(0.001)
        self.meeting.tell("waits")
        if self.injection.kind == "is killed in a wait":
            os.kill(os.getpid(), signal.SIGKILL)
        # Longer than the rank's own timeout: the signal has arrived meanwhile.
        _stop_for(1.5 * self.injection.seconds)

    def until_it_waits(self, pid: int) -> None:
        """Hold back the rank that is waited for until the fault has struck."""
        self.meeting.hear("waits", [self.injection.rank])
        # On a busy machine some calls may go by between the rank's message and its end.
        while self.injection.kind == "is killed in a wait" and _state(pid) not in ("Z", ""):
            time.sleep(0.001)

    def after(self, pid: int) -> None:
        """Tell that a survivor has its error, or that no error will come."""
        self.meeting.tell("given up")
        if (
            self.injection.kind in ("is stopped too long", "is stopped for good")
            and self.meeting.rank == self.survivors[0]
        ):
            self.meeting.hear("given up", self.survivors)
            while _state(pid) != "T":
                time.sleep(0.005)
            os.kill(pid, signal.SIGKILL if self.injection.kind == "is stopped for good" else signal.SIGCONT)


def inject(group: ProcessGroup, injection: Injection, name: str) -> Outcome:
    """Run the injection on this rank, as all ranks of `group` do, and return what this rank saw."""
    case, rank, guilty = CASES[injection.case], group.rank(), group.rank() == injection.rank
    meeting, outcome, watch = Meeting(group, name), Outcome(rank), Watch()
    fault = Fault(injection, meeting)
    meeting.tell("pid", str(os.getpid()))
    fusedtp.set_timeout(LONG)
    number = 0
    with watch.watching():
        for _ in range(injection.before):
            outcome.wrong += not case(group, number)
            number += 1
        (pid,) = map(int, meeting.hear("pid", [injection.rank]))
        in_wait = injection.kind.endswith("in a wait")
        if guilty and in_wait:
            fusedtp.set_timeout(injection.seconds)
            ws = registry.get(group, torch.device("cpu"))
            threading.Thread(target=fault.strike_in_wait, args=(ws,), daemon=True).start()
        elif guilty:
            steps = len(watch.steps) // injection.before
            watch.at = len(watch.steps) + 1 + round(injection.where * (steps - 1))
            watch.strike = lambda: _struck(watch, outcome, fault)
        elif injection.kind == "is stopped in a wait":
            fusedtp.set_timeout(LONG)
        else:
            fusedtp.set_timeout(injection.seconds)
        if in_wait and rank == (injection.rank + 1) % injection.world_size:
            # The rank that is waited for.
            watch.at, watch.strike = len(watch.steps) + 1, lambda: fault.until_it_waits(pid)
        watch.own_seconds = 0.0
        meeting.all("ready")
        watch.resume()
        while outcome.error is None and number < injection.before + CALLS:
            _call(outcome, lambda number=number: case(group, number))  # type: ignore[misc]
            if outcome.step in NOTHING_SENT and isinstance(outcome.error, (Planted, KeyboardInterrupt)):
                # Before its first signal an op leaves no trace: the call may be repeated.
                outcome.error, watch.at = None, None
            else:
                number += 1
            if guilty:
                fusedtp.set_timeout(injection.seconds)
        watch.pause()
        outcome.own_seconds = watch.own_seconds
        if not guilty:
            fault.after(pid)
    outcome.again = _error(lambda: case(group, number)) if outcome.error is not None else None
    return outcome


def _struck(watch: Watch, outcome: Outcome, fault: Fault) -> None:
    outcome.step = watch.steps[-1]
    fault.strike()
    fusedtp.set_timeout(fault.injection.seconds)


def _call(outcome: Outcome, call: Callable[[], bool]) -> None:
    started = time.monotonic()
    try:
        if call():
            outcome.right += 1
        else:
            outcome.wrong += 1
    except (Exception, KeyboardInterrupt) as error:
        outcome.error = error.with_traceback(None)
        outcome.seconds = time.monotonic() - started


def _error(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return error.with_traceback(None)
    return None


def fresh(meeting: Meeting, group: ProcessGroup, ranks: list[int]) -> ProcessGroup:
    """Make a new group of these ranks of `group`; other ranks need not take part.

    The group stays until the process ends: torch would give its name, and the keys left under the name, to the next
    group. Torch 2.14 and later also number names by the count of groups a rank has asked for, so all ranks raise their
    counts to the same number first.
    """
    world: Any = dist.distributed_c10d._world
    mine = world.group_count if torch.__version__ >= "2.14" else len(world.pg_names)
    meeting.tell("groups", str(mine))
    for _ in range(max(map(int, meeting.hear("groups", ranks))) - mine):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    members = dist.get_process_group_ranks(group)
    new: ProcessGroup = dist.new_group([members[rank] for rank in ranks], use_local_synchronization=True)
    return new


def recover(group: ProcessGroup, case: str) -> bool:
    """Call `destroy` on every rank and return whether the group works again, on both halves."""
    fusedtp.set_timeout(LONG)
    fusedtp.destroy(group)
    return all([CASES[case](group, number) for number in (100, 101)])


def in_turn(group: ProcessGroup, injections: list[Injection], name: str) -> list[Outcome]:
    """Run injections that every rank survives, on the same group for a while and then on a fresh group."""
    outcomes = []
    for number, injection in enumerate(injections):
        if number % FRESH_EVERY == 0:
            group = fresh(Meeting(group, f"{name}/{number}"), group, list(range(group.size())))
        outcome = inject(group, injection, f"{name}/{number}")
        outcome.recovered = recover(group, injection.case)
        outcomes.append(outcome)
        fusedtp.destroy(group)
    return outcomes


def one_by_one(group: ProcessGroup, injections: list[Injection], name: str) -> list[list[Outcome]]:
    """Run injections that each take a rank away; the rest go on as a fresh group, until one rank is left.

    The last rank returns the outcomes of all survivors: a rank that will be killed leaves its outcome in the store of
    `group`.
    """
    here, store = group, dist.distributed_c10d._get_process_group_store(group)
    for number, injection in enumerate(injections):
        outcome = inject(here, injection, f"{name}/{number}")
        fusedtp.destroy(here)
        outcome.left = len(arenas()) + mappings()
        survivors = [rank for rank in range(here.size()) if rank != injection.rank]
        here = fresh(Meeting(here, f"{name}/{number}"), here, survivors)
        outcome.recovered = recover(here, injection.case)
        store.set(f"{name}/{number}/outcome/{outcome.rank}", pickle.dumps(outcome))
    return [
        [
            pickle.loads(store.get(f"{name}/{number}/outcome/{rank}"))
            for rank in range(injection.world_size)
            if rank != injection.rank
        ]
        for number, injection in enumerate(injections)
    ]
