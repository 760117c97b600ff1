"""Calls from a public function to its matmul or kernel: the limit, and the path in docs/architecture.md."""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedtp
import fusedtp.bench
import fusedtp.kernels
from fusedtp.bench.ranks import RankPool

_FOLDERS = [str(Path(str(each.__file__)).parent) for each in (fusedtp, fusedtp.kernels, fusedtp.bench)]
_MATMULS = ("mm", "addmm", "addmm_", "linear")


class Step(NamedTuple):
    """A function, by its module's file and its name there."""

    file: str
    name: str


def paths_in_turn(call: Callable[[], Tensor], *, late: float = 0.0, has_backward: bool = True) -> list[list[Step]]:
    """Return the functions that a call, and then its backward, call before the library multiplies or a kernel starts.

    Forward and backward run in turn, as in training. `late`: seconds to sleep first, so that this rank need not wait.
    A peer may be later still, so the shortest of three paths counts.
    """
    turns = []
    # The first calls fill caches, whoever is late.
    for seconds in (0.0, 0.0, 0.0, late, late, late):
        forward, y = _once(call, seconds)
        back = partial(y.backward, torch.ones_like(y))
        turns.append([forward, _once(back, seconds)[0]] if has_backward else [forward])
    return [min(each, key=len) for each in zip(*turns[3:], strict=True)]


def _once(function: Callable[[], Any], late: float) -> tuple[list[Step], Any]:
    steps: list[Step] = []
    is_there = False

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal is_there
        code = frame.f_code
        if event == "c_call":
            is_there = getattr(argument, "__name__", "") in _MATMULS
        elif event == "call" and any(code.co_filename.startswith(folder + "/") for folder in _FOLDERS):
            is_there = code.co_filename.endswith("kernels/loading.py") and code.co_name == "launch"
            if not is_there:
                steps.append(Step(code.co_filename, code.co_qualname))
        if is_there:
            # Not at every call of an interpreted kernel.
            sys.setprofile(None)

    time.sleep(late)
    sys.setprofile(look)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    assert is_there, "neither a matmul nor a launch was seen"
    # A signal or wait for each of several peers counts once.
    return [step for step, _ in itertools.groupby(steps)], result


# Limits of calls and files, with the function itself: to a launch, and to a matmul of the library, before which the
# host signals and waits. A layer also reads and unwraps its parameters. Backward begins at the node of a graph.
LAUNCH_CALLS, LAUNCH_FILES, CALLS, FILES, LAYER_CALLS, LAYER_FILES, BACKWARD_CALLS = 18, 9, 19, 10, 23, 11, 20
# On one rank, to a matmul of the library.
CALLS_ALONE, FILES_ALONE, LAYER_CALLS_ALONE, LAYER_FILES_ALONE = 7, 6, 17, 8
FUNCTIONS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "fsdp_linear")
ROOT = Path(__file__).parent.parent
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
Ways = dict[tuple[str, str], list[Step]]


def paths(group: ProcessGroup) -> Ways:
    """Return the paths of all functions and schedules on rank 0; other ranks call first, so rank 0 never waits.

    The default group is not named, as in most programs.
    """
    given = {} if group is dist.group.WORLD else {"group": group}
    late, found = 0.02 * (group.rank() == 0 and group.size() > 1), {}
    # On one rank backward is F.linear's own.
    has_backward = group.size() > 1
    schedules = ("unfused", "decomposed", "fused") if has_backward else ("auto",)
    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((8, 32), (32, 32)))
    layer = fusedtp.ColumnParallelLinear(32, 64, **given)
    calls = {
        (name, schedule): partial(getattr(fusedtp, name), x, weight, **given, schedule=schedule)
        for name, schedule in itertools.product(FUNCTIONS, schedules)
    }
    for (name, schedule), call in {**calls, ("layer", "auto"): partial(layer, x)}.items():
        ways = paths_in_turn(call, late=late, has_backward=has_backward)
        found |= zip(((name, schedule), (f"backward of {name}", schedule)), ways, strict=False)
    return found


@pytest.fixture(scope="module")
def ways(pool: RankPool) -> dict[int, Ways]:
    return {size: pool.run(paths, world_size=size)[0] for size in (1, 4)}


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_warm_call_is_short(ways: dict[int, Ways], world_size: int) -> None:
    limits, matmul = {"layer": (LAYER_CALLS, LAYER_FILES), "backward": (BACKWARD_CALLS, None)}, (CALLS, FILES)
    if world_size == 1:
        limits, matmul = {"layer": (LAYER_CALLS_ALONE, LAYER_FILES_ALONE)}, (CALLS_ALONE, FILES_ALONE)
    for what, way in ways[world_size].items():
        own = (LAUNCH_CALLS, LAUNCH_FILES) if what[1] == "fused" else matmul
        calls, files = limits.get(what[0].split()[0], own)
        names = [f"{Path(step.file).stem}.{step.name}" for step in way]
        assert names[0].split(".")[-1] in (what[0], "forward", "backward")
        assert len(way) <= calls, f"{what}: {len(way)} calls: {names}"
        assert files is None or len({step.file for step in way}) <= files, f"{what}: {names}"


def test_the_document_follows_a_call(ways: dict[int, Ways]) -> None:
    """The document's steps, except inside the kernel, appear in that order in a call with schedule 'fused'."""
    linked = re.findall(r"^\d+\. \[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)", ARCHITECTURE, re.MULTILINE)
    assert len(linked) == 12
    way = iter(ways[4]["all_gather_linear", "fused"])
    *on_host, (kernel, file) = linked
    for name, path in on_host:
        assert any(step.name == name and step.file.endswith(path.removeprefix("fusedtp/")) for step in way), name
    assert f"def {kernel}(" in (ROOT / file).read_text()
