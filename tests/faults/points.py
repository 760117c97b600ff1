"""Where a fault can strike: before every step of an op, of the kernels in Triton's interpreter and of the host.

A step is one of the protocol's (enter, signal, wait, leave), the making of room, or the first touch of a chunk of some
rank's half, which is about to be stored or loaded.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from fusedtp.kernels import signal

from fusedtp.schedules import decomposed
from fusedtp.workspaces.steps import HostSteps
from fusedtp.workspaces.workspace import Workspace

HOST = ((HostSteps, "enter"), (HostSteps, "signal"), (HostSteps, "wait"), (HostSteps, "leave"),
        (Workspace, "require"), (Workspace, "view"), (decomposed, "_sum_into"))  # fmt: skip
DEVICE = ("enter", "raise_signal", "wait", "leave", "half")


class Watch:
    """The steps of this rank's calls. `strike` is called before the step `at` (counted from 1) with its name."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.at: int | None = None
        self.strike: Callable[[], None] = lambda: None
        # The longest time that this rank itself took from one step to the next, waits and strikes apart.
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
        if len(self.steps) == self.at:
            self.strike()
        self.resume()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Every step of this process is announced to `before`."""
        with contextlib.ExitStack() as stack:
            for owner, name in HOST:
                self._announce(stack, owner, name)
            modules = [each for name, each in sys.modules.items() if name.startswith("fusedtp.kernels.")]
            for name in DEVICE:
                original = getattr(signal, name)
                for module in [each for each in modules if getattr(each, name, None) is original]:
                    self._announce(stack, module, name)
            yield

    def _announce(self, stack: contextlib.ExitStack, owner: Any, name: str) -> None:
        original = getattr(owner, name)
        stack.callback(setattr, owner, name, original)
        setattr(owner, name, self._announced(name, original))

    def _announced(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            self.before(name)
            if name != "wait":
                return original(*args, **options)
            self.pause()
            try:
                return original(*args, **options)
            finally:
                self.resume()

        return step
