"""The points where a fault can strike: before every step of an op, in interpreted kernels and on the host.

A step is a step of the protocol (enter, signal, wait, leave), the beginning of an op, the making of room, or the first
load or store of a chunk of some rank's half.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from fusedtp import trace
from fusedtp.kernels import signal
from fusedtp.schedules import fused
from fusedtp.schedules.forms import Prepared
from fusedtp.workspaces.steps import HostSteps
from fusedtp.workspaces.workspace import Workspace

# Steps of the host: owner, attribute, and the name of the step.
HOST = ((Workspace, "require", "require"), (Prepared, "go", "go"), (HostSteps, "enter", "begin"),
        (HostSteps, "signal", "signal"), (HostSteps, "wait", "wait"), (HostSteps, "leave", "leave"),
        (trace, "timed", "timed"), (trace, "span", "span"))  # fmt: skip
# Modules of kernels loaded by now. A module imported later would keep the patched functions.
KERNELS = [each for name, each in sys.modules.items() if name.startswith("fusedtp.kernels.")]
assert sys.modules[fused.ring.__module__] in KERNELS
DEVICE = ("enter", "raise_signal", "raise_to_all", "wait", "leave", "half")
# Before these steps no peer has seen anything of the op.
NOTHING_SENT = ("require", "go", "begin")


class Watch:
    """The steps of this rank's calls. `strike` is called before step number `at` (from 1)."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.at: int | None = None
        self.strike: Callable[[], None] = lambda: None
        # The longest time of this rank between two steps, without waits. A rank that a test held counts as late.
        self.own_seconds = 0.0
        self._since = time.monotonic()

    def resume(self) -> None:
        """Start to count own time."""
        self._since = time.monotonic()

    def pause(self) -> None:
        """Stop to count own time."""
        self.own_seconds = max(self.own_seconds, time.monotonic() - self._since)

    def before(self, name: str) -> None:
        """Record that the step `name` comes next, and strike if it is step `at`."""
        self.pause()
        self.steps.append(name)
        self.resume()
        if len(self.steps) == self.at:
            self.strike()
            self.pause()
            self.resume()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Call `before` ahead of every step of this process."""
        with contextlib.ExitStack() as stack:
            # Every load or store of a chunk is a span.
            stack.enter_context(trace.recording())
            for owner, attribute, name in HOST:
                self._announce(stack, owner, attribute, name)
            for name in DEVICE:
                original = getattr(signal, name)
                for module in [each for each in KERNELS if getattr(each, name, None) is original]:
                    self._announce(stack, module, name, name)
            yield

    def _announce(self, stack: contextlib.ExitStack, owner: Any, attribute: str, name: str) -> None:
        original = getattr(owner, attribute)
        stack.callback(setattr, owner, attribute, original)
        setattr(owner, attribute, self._announced(name, original))

    def _announced(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            # The number of polls of a wait is random, so polls are no steps.
            if not (name == "span" and args[0] == "wait"):
                self.before(name)
            if name != "wait":
                return original(*args, **options)
            self.pause()
            try:
                return original(*args, **options)
            finally:
                self.resume()

        return step
