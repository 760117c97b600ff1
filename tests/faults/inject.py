"""What each rank does in an injection: calls that are right, one in which a rank goes wrong at a step, and a recovery.

The ranks meet in the group's store, never in a collective: some of them are stopped, or have given up.
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
# How long a rank is late, or stopped, where that is less than the timeout.
SHORT = 0.2
CALLS = 3
RAISING = ("raises", "is interrupted")
# Groups have threads and sockets of their own: not one for each of hundreds.
FRESH_EVERY = 8


class Planted(Exception):
    """Raised by the rank that is to raise."""


@dataclass(frozen=True)
class Injection:
    """One fault: `kind` strikes rank `rank` in an op's call, before the step `where` (0 the first, 1 the last)."""

    kind: str
    case: str
    world_size: int
    rank: int
    where: float
    # Calls before it, which decide the half that it meets.
    before: int = 1
    seconds: float = 1.0


@dataclass
class Outcome:
    """What one rank saw: how many calls were right, the error after them, and the same call once more."""

    rank: int
    right: int = 0
    wrong: int = 0
    error: BaseException | None = None
    again: BaseException | None = None
    # From the start of the call that failed to its end, and the longest time without a step of its own.
    seconds: float = 0.0
    own_seconds: float = 0.0
    step: str = ""
    recovered: bool = False
    # How many descriptors and mappings of arenas, after `destroy`.
    left: int = 0


class Meeting:
    """The ranks of one injection in the store: who has come where."""

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self._store: Any = dist.distributed_c10d._get_process_group_store(group)
        self.rank, self.world_size, self._name = group.rank(), group.size(), name

    def tell(self, what: str, value: str = "") -> None:
        self._store.set(f"{self._name}/{what}/{self.rank}", value)

    def hear(self, what: str, ranks: list[int]) -> list[str]:
        """Wait until all `ranks` have told it."""
        keys = [f"{self._name}/{what}/{rank}" for rank in ranks]
        self._store.wait(keys, timedelta(seconds=LONG))
        return [self._store.get(key).decode() for key in keys]

    def all(self, what: str) -> None:
        """Go on together."""
        self.tell(what)
        self.hear(what, list(range(self.world_size)))


def _state(pid: int) -> str:
    """ "T" of a stopped process, "Z" of a dead one whose parent has not noticed, "" of none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _stop_for(seconds: float) -> None:
    # A process of its own wakes this one up, once it has been stopped.
    stopped = f"while ! grep -q '^State:.T' /proc/{os.getpid()}/status; do sleep 0.01; done"
    with subprocess.Popen(["sh", "-c", f"{stopped}; sleep {seconds}; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)


class Fault:
    """What happens at the step, on the rank that goes wrong; and what a survivor does about it after its error."""

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
        """What a thread of the rank does: strike as soon as the rank waits for another one, which goes on then."""
        while not int(ws.words[WAITING_FOR]):
            time.sleep(0.001)
        self.meeting.tell("waits")
        if self.injection.kind == "is killed in a wait":
            os.kill(os.getpid(), signal.SIGKILL)
        # Beyond the rank's own budget: what it waits for has come meanwhile.
        _stop_for(1.5 * self.injection.seconds)

    def until_it_waits(self, pid: int) -> None:
        """Of the rank that is waited for: it goes on when the fault is there."""
        self.meeting.hear("waits", [self.injection.rank])
        # On a busy machine some calls may go by between a rank's words and its end.
        while self.injection.kind == "is killed in a wait" and _state(pid) not in ("Z", ""):
            time.sleep(0.001)

    def after(self, pid: int) -> None:
        """A survivor has its error, or no error is to come."""
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
    """Run it on this rank; all ranks of `group` do, and all that live have recovered afterwards."""
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
            # The one that is waited for.
            watch.at, watch.strike = len(watch.steps) + 1, lambda: fault.until_it_waits(pid)
        watch.own_seconds = 0.0
        meeting.all("ready")
        watch.resume()
        while outcome.error is None and number < injection.before + CALLS:
            _call(outcome, lambda number=number: case(group, number))  # type: ignore[misc]
            if outcome.step in NOTHING_SENT and injection.kind in RAISING and outcome.error is not None:
                # Before its first signal an op has left no trace: the call may be made again.
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
    """A new group of those ranks of `group`; no others need take part.

    It stays until the process ends: torch would give its name, and the keys left under it, to the next one. Torch also
    names it by how many groups a rank is in, since 2.14 has asked for, so all are brought to as many first.
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
    """`destroy` on every rank, and the group works again, on both halves."""
    fusedtp.set_timeout(LONG)
    fusedtp.destroy(group)
    return all([CASES[case](group, number) for number in (100, 101)])


def in_turn(group: ProcessGroup, injections: list[Injection], name: str) -> list[Outcome]:
    """Injections after which every rank lives, on the same group for a while and then on a fresh one."""
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
    """Injections each of which takes a rank away; those left go on as a fresh group, until one rank is left.

    That one returns what all survivors of each saw: a rank that will be killed leaves it in the store of `group`.
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
