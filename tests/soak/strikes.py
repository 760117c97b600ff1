"""What goes wrong on one rank of a random program: interruptions, limits, pauses, budgets set beside a call."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence

from torch.distributed import ProcessGroup

import fusedtp

from . import interruptions


def interrupted(kind: str, where: float, call: Callable[[], str]) -> list[Callable[[], str]]:
    """The attempts of a rank whose `call` is interrupted: it has no result, and makes it again."""
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
    """The call, with what the limit allows used up."""
    kind = getattr(resource, name)
    before = resource.getrlimit(kind)
    # What this process has by now is enough for what it has by now.
    used = {"RLIMIT_NOFILE": len(os.listdir("/proc/self/fd")) - 1, "RLIMIT_FSIZE": 4096}[name]
    resource.setrlimit(kind, (used, before[1]))
    try:
        return call()
    finally:
        resource.setrlimit(kind, before)


def pause(pids: Sequence[int], seconds: float) -> None:
    """Have the whole job stopped soon, for so long, by a process of its own."""
    everyone = " ".join(map(str, pids))
    script = f"sleep 0.1; kill -STOP {everyone}; sleep {seconds}; kill -CONT {everyone}"
    threading.Thread(target=subprocess.Popen(["sh", "-c", script]).wait, daemon=True).start()


@contextlib.contextmanager
def setting_timeouts(group: ProcessGroup, seed: int) -> Iterator[None]:
    """Another thread sets budgets meanwhile, long ones, of this group and of all."""
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
