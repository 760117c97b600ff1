"""Perform random programs on one rank and check the outcome: right numbers, or an error on every rank of the group.

After a step in which something goes wrong the ranks make one more call, which must tell every rank that has not
noticed. Then they exchange their outcomes through torch's store. A program fails on a wrong number, an error on some
ranks alone, a foreign exception, or a wait beyond the timeout.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import random
import resource
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp

from . import interruptions
from .endurance import delay
from .mixed import Call, Operands
from .programs import AXES, Step, grows, probe, program

# Timeouts of calls without faults, as there are more ranks than cores, and of calls with faults.
LONG_SECONDS, SHORT_SECONDS = 60.0, 4.0
# A timeout that a late rank exceeds, or nearly.
LATE_SECONDS = 0.2
# No step waits twice as long as the longest timeout. A longer step is a hang, and ends the rank with its stacks.
WATCH_SECONDS = 2.5 * LONG_SECONDS
# After errors that begin with these words no `destroy` is needed.
CANNOT_GROW = "the workspace cannot grow"
# Number of steps that a failure shows.
LAST = 8
_runs = itertools.count()


def told(error: Exception) -> str:
    """Return the kind of an error by which ranks learn that they have lost each other; raise any other error."""
    from fusedtp.memory import Unreachable

    if str(error).startswith(CANNOT_GROW) and isinstance(error, (fusedtp.RanksDisagree, Unreachable)):
        return CANNOT_GROW
    if isinstance(error, (fusedtp.PeerTimeout, fusedtp.RanksDisagree, Unreachable)):
        return type(error).__name__
    if isinstance(error, RuntimeError) and "call fusedtp.destroy for this group on every rank" in str(error):
        return "left in the middle"
    raise error


def of_all(step: Step) -> bool:
    """Return whether the step gives back the memory of every group, not only of its axis."""
    return step.kind == "destroy" and step.where < 0.3


def interrupted(kind: str, where: float, call: Callable[[], str]) -> list[Callable[[], str]]:
    """Return the attempts of a rank whose `call` is interrupted: a call without a result is repeated."""
    again = False

    def struck() -> str:
        nonlocal again
        came = list[str]()
        if kind == "line":
            _, raised = interruptions.before_line(int(where), lambda: came.append(call()))
        else:
            raised = interruptions.by_signal(where, lambda: came.append(call()))
        if not raised:
            return came[0]
        again = True
        return "interrupted"

    return [struck, lambda: call() if again else "right"]


def limited(name: str, call: Callable[[], str]) -> str:
    """Make the call while the resource limit is used up."""
    kind = getattr(resource, name)
    before = resource.getrlimit(kind)
    # A limit at what this process uses now; any further use fails.
    used = {"RLIMIT_NOFILE": len(os.listdir("/proc/self/fd")) - 1, "RLIMIT_FSIZE": 4096}[name]
    resource.setrlimit(kind, (used, before[1]))
    try:
        return call()
    finally:
        resource.setrlimit(kind, before)


def pause(pids: Sequence[int], seconds: float) -> None:
    """Stop all ranks for `seconds`, from a separate process."""
    everyone = " ".join(map(str, pids))
    script = f"sleep 0.1; kill -STOP {everyone}; sleep {seconds}; kill -CONT {everyone}"
    threading.Thread(target=subprocess.Popen(["sh", "-c", script]).wait, daemon=True).start()


@contextlib.contextmanager
def setting_timeouts(group: ProcessGroup, seed: int) -> Iterator[None]:
    """Set long timeouts from another thread meanwhile, for this group and for all groups."""
    ended, source = threading.Event(), random.Random(seed)

    def set_them() -> None:
        while not ended.wait(0.0002):
            fusedtp.set_timeout(source.uniform(40, 80), group if source.random() < 0.5 else None)

    thread = threading.Thread(target=set_them)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Performer:
    """One rank of a program: its groups, results that still need a backward pass, and the outcome of each step."""

    def __init__(self, world: ProcessGroup, seed: int, number: int) -> None:
        self._world, self._rank, self._seed = world, world.rank(), seed
        self._name = f"programs/{next(_runs)}/{seed}/{number}"
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._groups: list[ProcessGroup | None] = []
        self._kept: list[tuple[int, Operands, Tensor]] = []
        self.counts: Counter[str] = Counter()
        self.steps = 0

    def perform(self, steps: Sequence[Step]) -> None:
        """Perform all steps in new memory."""
        fusedtp.destroy()
        fusedtp.set_timeout(LONG_SECONDS)
        self._groups = [self._world, *(self._made(axis) for axis in range(1, len(self._axes)))]
        for step in steps:
            self.steps += 1
            group = self._groups[step.axis]
            if group is not None or step.kind == "torch" or of_all(step):
                faulthandler.dump_traceback_later(WATCH_SECONDS, exit=True)
                time.sleep(delay(self._seed, self.steps, self._rank))
                self._step(step, group)
        self._all_backward()
        fusedtp.destroy()
        for group in self._groups[1:]:
            if group is not None:
                dist.destroy_process_group(group)
        faulthandler.cancel_dump_traceback_later()

    @property
    def _axes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return AXES[self._world.size()]

    def _made(self, axis: int) -> ProcessGroup | None:
        # Groups are made by all ranks, in one order.
        made = [dist.new_group(list(ranks), timeout=timedelta(seconds=LONG_SECONDS)) for ranks in self._axes[axis]]
        # A rank that destroys its group at once would close connections that a late rank is still making.
        dist.barrier(self._world)
        return next((group for ranks, group in zip(self._axes[axis], made, strict=True) if self._rank in ranks), None)

    def _step(self, step: Step, group: ProcessGroup | None) -> None:
        if step.kind == "torch":
            self._made_anew(step.axis)
        elif step.kind == "destroy":
            fusedtp.destroy(None if of_all(step) else group)
        elif step.kind == "backward":
            self._backward(step.axis)
        elif group is not None and step.kind == "kept":
            operands = Operands(step.call, group.rank())
            self._kept.append((step.axis, operands, operands.call_on(group)))
        elif group is not None and step.kind == "thread":
            self._beside_a_thread(step, group)
        elif group is not None and step.kind in ("call", "growth"):
            call_right(step.call, group, step.mode)
        elif group is not None:
            self._struck(step, group)
            return
        self.counts[f"{step.kind}: right"] += 1

    def _backward(self, axis: int) -> None:
        # The first kept result of that axis; not all ranks take part in other axes.
        for index, (of, operands, y) in enumerate(self._kept):
            if of == axis:
                del self._kept[index]
                grads = torch.autograd.grad(y, operands.leaves, operands.dy)
                operands.check([y.detach(), *grads])
                return

    def _all_backward(self) -> None:
        while self._kept:
            self._backward(self._kept[0][0])

    def _made_anew(self, axis: int) -> None:
        # Torch alone destroys the group, without `fusedtp.destroy`.
        if axis == 0:
            return
        self._all_backward()
        group, self._groups[axis] = self._groups[axis], None
        if group is not None:
            dist.destroy_process_group(group)
            del group
        self._groups[axis] = self._made(axis)

    def _beside_a_thread(self, step: Step, group: ProcessGroup) -> None:
        with setting_timeouts(group, step.call.seed):
            fusedtp.destroy(group)
            for number in range(3):
                call_right(probe(number, group.size()), group)
            call_right(grows(random.Random(step.call.seed), group.size()), group)
            if step.where < 0.5:
                fusedtp.destroy(group)
            call_right(step.call, group)
        fusedtp.set_timeout(LONG_SECONDS)

    def _struck(self, step: Step, group: ProcessGroup) -> None:
        if step.fresh:
            fusedtp.destroy(group)
        fusedtp.set_timeout(LATE_SECONDS if step.kind == "late" else SHORT_SECONDS, group)
        mine = self._attempts(step, group)
        everyone = self._told(step, group, mine)
        fault = wrong(step, everyone)
        assert not fault, f"{fault}: {everyone}"
        came = {each[-1] for each in everyone}
        self.counts[f"{step.kind}: {'right' if came == {'right'} else 'told'}"] += 1
        for each in mine:
            self.counts[f"{step.kind}, on a rank: {each}"] += 1
        # If memory could not grow, all ranks go on with their memory; after other errors the ranks are out of step.
        if came not in ({"right"}, {CANNOT_GROW}):
            fusedtp.destroy(group)
        fusedtp.set_timeout(LONG_SECONDS, group)
        call_right(probe(step.call.seed + 1, group.size()), group)

    def _attempts(self, step: Step, group: ProcessGroup) -> list[str]:
        # Return the outcomes of this rank's calls, up to the first error.
        guilty, call = group.rank() == step.rank, attempt(step.call, group)
        if step.kind == "pause":
            if guilty:
                pause(self._told_pids(), 1.5 * SHORT_SECONDS)
            return calls_in_turn([attempt(probe(number, group.size()), group, 0.01) for number in range(40)])
        calls: list[Callable[[], str]] = [call]
        if guilty and step.kind == "differs":
            assert step.other is not None
            calls = [attempt(step.other, group)]
        elif guilty and step.kind in ("line", "signal"):
            calls = interrupted(step.kind, step.where, call)
        elif guilty and step.kind == "late":
            calls = [attempt(step.call, group, step.where)]
        elif guilty and step.kind == "limit":
            calls = [partial(limited, ("RLIMIT_NOFILE", "RLIMIT_FSIZE")[int(step.where)], call)]
        return calls_in_turn([*calls, partial(self._probe, step, group)])

    def _probe(self, step: Step, group: ProcessGroup) -> str:
        # A lost peer is noticed at once; a slow peer is waited for.
        fusedtp.set_timeout(LONG_SECONDS, group)
        return attempt(probe(step.call.seed, group.size()), group)()

    def _told_pids(self) -> list[int]:
        return [int(self._store.get(f"{self._name}/pid/{rank}")) for rank in range(self._world.size())]

    def tell_pid(self) -> None:
        """Store this process's id, for the rank that stops all ranks."""
        self._store.set(f"{self._name}/pid/{self._rank}", str(os.getpid()))

    def _told(self, step: Step, group: ProcessGroup, mine: list[str]) -> list[list[str]]:
        ranks = dist.get_process_group_ranks(group)
        key = f"{self._name}/{self.steps}"
        self._store.set(f"{key}/{self._rank}", json.dumps(mine))
        keys = [f"{key}/{rank}" for rank in ranks]
        self._store.wait(keys, timedelta(seconds=1.5 * LONG_SECONDS))
        return [json.loads(self._store.get(each)) for each in keys]


@contextlib.contextmanager
def _mode(mode: str) -> Iterator[None]:
    with torch.no_grad() if mode == "no_grad" else torch.inference_mode(mode in ("inference", "made in inference")):
        yield


def call_right(call: Call, group: ProcessGroup, mode: str = "grad") -> None:
    """Make the call and check it."""
    with _mode(mode if mode == "made in inference" else "grad"):
        operands = Operands(call, group.rank())
    with _mode(mode):
        results = operands.run(group)
    operands.check(results)


def attempt(call: Call, group: ProcessGroup, late_seconds: float = 0.0) -> Callable[[], str]:
    """Prepare the operands and return a call that returns "right", "wrong: ..." or the error's kind."""
    operands = Operands(call, group.rank())

    def made() -> str:
        time.sleep(late_seconds)
        try:
            results = operands.run(group)
        except (RuntimeError, ValueError) as error:
            return told(error)
        try:
            operands.check(results)
        except AssertionError as error:
            return f"wrong: {error}"
        return "right"

    return made


def calls_in_turn(calls: Sequence[Callable[[], str]]) -> list[str]:
    """Make calls until one is not right, and return the outcomes."""
    came: list[str] = []
    for call in calls:
        came.append(call())
        if came[-1] not in ("right", "interrupted"):
            break
    return came


def wrong(step: Step, everyone: Sequence[Sequence[str]]) -> str:
    """Return what is wrong in the outcomes of a group's ranks, or ""."""
    if any(each.startswith("wrong") for came in everyone for each in came):
        return "a wrong number"
    if step.kind == "differs" and any(came[0] == "right" for came in everyone):
        return "a number though the ranks disagree"
    if len({came[-1] == "right" for came in everyone}) > 1:
        return "an error on some ranks alone"
    return ""


def perform(
    world: ProcessGroup,
    seed: int,
    first: int,
    count: int,
    weights: Mapping[str, float],
    slow: bool,
    steady: bool = False,
) -> Counter[str]:
    """Perform programs `first` to `first + count - 1` on this rank and return the number of steps by outcome."""
    counts: Counter[str] = Counter()
    for number in range(first, first + count):
        steps = program(seed, number, world.size(), weights=weights, slow=slow, steady=steady)
        performer = Performer(world, seed, number)
        performer.tell_pid()
        dist.barrier(world)
        try:
            performer.perform(steps)
        except BaseException as error:
            last = steps[max(0, performer.steps - LAST) : performer.steps]
            shown = "\n".join(f"  {performer.steps - len(last) + i}: {each}" for i, each in enumerate(last, 1))
            error.add_note(f"in step {performer.steps} of program {number} of seed {seed}, behind\n{shown}")
            raise
        counts += performer.counts
    return counts
