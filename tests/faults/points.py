"""Where a fault can strike: before every step of an op, of the kernels in Triton's interpreter and of the host.

A step is one of the protocol's (enter, signal, wait, leave), the beginning of an op, the making of room, or the first
touch of a chunk of some rank's half, which is about to be stored or loaded.
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

# Of the host: whose, what, and the name of the step.
HOST = ((Workspace, "require", "require"), (Prepared, "go", "go"), (HostSteps, "enter", "begin"),
        (HostSteps, "signal", "signal"), (HostSteps, "wait", "wait"), (HostSteps, "leave", "leave"),
        (trace, "timed", "timed"), (trace, "span", "span"))  # fmt: skip
# Of kernels, which are loaded by now: one that came later would keep what is announced.
KERNELS = [each for name, each in sys.modules.items() if name.startswith("fusedtp.kernels.")]
assert sys.modules[fused.ring.__module__] in KERNELS
DEVICE = ("enter", "raise_signal", "wait", "leave", "half")
# Before these no peer has seen anything of the op.
NOTHING_SENT = ("require", "go", "begin")


class Watch:
    """The steps of this rank's calls. `strike` is called before the step `at` (counted from 1) with its name."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.at: int | None = None
        self.strike: Callable[[], None] = lambda: None
        # The longest time that this rank itself took from one step to the next, waits apart. A rank that a test held
        # before a step was late, as one that was kept from running.
        self.own_seconds = 0.0
        self._since = time.monotonic()

    def resume(self) -> None:
        """Own time counts from now on."""
        self._since = time.monotonic()

    def pause(self) -> None:
        """It counts no more."""
        self.own_seconds = max(self.own_seconds, time.monotonic() - self._since)

    def before(self, name: str) -> None:
        """The step `name` is about to be done."""
        self.pause()
        self.steps.append(name)
        self.resume()
        if len(self.steps) == self.at:
            self.strike()
            self.pause()
            self.resume()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Every step of this process is announced to `before`."""
        with contextlib.ExitStack() as stack:
            # Whatever is done with a chunk is a span.
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
            # How often a wait is looked at is chance.
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
