"""Helpers for ranks that do two things at once: a thread, a second group, flags outside any group."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import fusedtp

CPU = torch.device("cpu")
X = torch.ones(4, 4)


def arenas() -> list[int]:
    """Return the file descriptors of this process's arenas."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += [int(fd)] * ("memfd:fusedtp" in os.readlink(f"/proc/self/fd/{fd}"))
    return found


def mappings() -> int:
    """Return the number of arenas that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:fusedtp")


class InThread(threading.Thread):
    """Run a call in a thread of its own; `result` joins the thread and returns or raises what the call did."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        super().__init__(name="the other thread")
        self._fn = fn
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._fn()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(60)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
        return self._value


class Flags:
    """Flags that ranks raise through torch's store, which no op of a group waits for."""

    def __init__(self, name: str) -> None:
        self._store, self._name = dist.distributed_c10d._get_default_store(), name  # type: ignore[attr-defined]

    def raise_(self, flag: str) -> None:
        self._store.set(f"{self._name}/{flag}", "")

    def wait(self, flag: str) -> None:
        self._store.wait([f"{self._name}/{flag}"], timedelta(seconds=60))


@contextlib.contextmanager
def own_group(group: ProcessGroup, **options: Any) -> Iterator[ProcessGroup]:
    """Make a second group of the same ranks, which must be all ranks of the pool: `new_group` is collective."""
    made = dist.new_group(dist.get_process_group_ranks(group), **options)
    yield made
    fusedtp.destroy(made)
    dist.destroy_process_group(made)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
