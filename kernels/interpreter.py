"""What Triton's interpreter needs to run the protocol at a bearable pace.

Ranks may outnumber cores, and a program that polls would keep its core for a whole time slice while the rank it waits
for has none: after every atomic the interpreter lets another process run. And it patches the language's functions anew
at every call of a device function, a millisecond each; one patch at the launch is enough, as all our device functions
see the same `triton.language`.
"""

from __future__ import annotations

import os
from typing import Any

from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder


def _give_way_after_atomics() -> None:
    atomic_rmw = InterpreterBuilder.create_atomic_rmw

    def create_atomic_rmw(self: InterpreterBuilder, *args: Any) -> Any:
        result = atomic_rmw(self, *args)
        os.sched_yield()
        return result

    InterpreterBuilder.create_atomic_rmw = create_atomic_rmw


def _patch_once_a_launch() -> None:
    call_and_patch = InterpretedFunction.__call__
    package = __name__.rpartition(".")[0]

    def call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__.rpartition(".")[0] != package:
            return call_and_patch(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except InterpreterError:
            raise
        except Exception as error:
            raise InterpreterError(f"{self.fn.__name__}: {error!r}") from error

    InterpretedFunction.__call__ = call


def prepare() -> None:
    """Called once, where kernels are interpreted, before the first of them runs."""
    _give_way_after_atomics()
    _patch_once_a_launch()
