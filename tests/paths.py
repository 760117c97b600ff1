"""Python calls of ours between a public function and its first matmul or kernel, in a warm call."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import fusedtp
import fusedtp.bench
import fusedtp.kernels

_FOLDERS = [str(Path(str(each.__file__)).parent) for each in (fusedtp, fusedtp.kernels, fusedtp.bench)]
_MATMULS = ("mm", "addmm", "addmm_", "linear")


class Step(NamedTuple):
    """A function, by its module's file and its name in there."""

    file: str
    name: str


def path_of(function: Callable[[], object], *, late: float = 0.0) -> list[Step]:
    """What `function` calls until the library multiplies or a kernel is launched; `late`, so that nobody waits: on a
    busy machine a peer may be later, so the shortest way of three is taken.
    """
    for _ in range(3):
        function()
    return min((_once(function, late) for _ in range(3)), key=len)


def _once(function: Callable[[], object], late: float) -> list[Step]:
    steps: list[Step] = []
    is_there = False

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal is_there
        code = frame.f_code
        if is_there:
            return
        if event == "c_call":
            is_there = getattr(argument, "__name__", "") in _MATMULS
        elif event == "call" and any(code.co_filename.startswith(folder + "/") for folder in _FOLDERS):
            is_there = code.co_filename.endswith("kernels/loading.py") and code.co_name == "launch"
            if not is_there:
                steps.append(Step(code.co_filename, code.co_qualname))

    time.sleep(late)
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    assert is_there, "neither a matmul nor a launch was seen"
    return steps
