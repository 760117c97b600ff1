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


def path_of(function: Callable[[], object], *, late: float = 0.0) -> list[Step]:
    """Return the functions that `function` calls before the library multiplies or a kernel is launched. `late`: seconds
    to sleep first, so that this rank need not wait; as a peer may be later still, the shortest of three paths counts.
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


# Limits below the public function; a layer adds its forward and the handling of its parameters. Backward begins at the
# node of autograd's graph, and fused has a second kernel there.
CALLS, FILES, LAYER_CALLS, LAYER_FILES, BACKWARD_CALLS = 19, 8, 24, 10, 20
FUNCTIONS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "fsdp_linear")
ROOT = Path(__file__).parent.parent
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
Ways = dict[tuple[str, str], list[Step]]


def paths(group: ProcessGroup) -> Ways:
    """Return the paths of all functions and schedules on rank 0; other ranks call first, so rank 0 never waits.

    The default group is not named, as in most programs.
    """
    given = {} if group is dist.group.WORLD else {"group": group}
    late, found = 0.05 * (group.rank() == 0 and group.size() > 1), {}
    schedules = ("unfused", "decomposed", "fused") if group.size() > 1 else ("auto",)
    x, weight = torch.randn(8, 64), torch.randn(64, 64, requires_grad=True)
    for name, schedule in itertools.product(FUNCTIONS, schedules):
        call = partial(getattr(fusedtp, name), x, weight, **given, schedule=schedule)
        found[name, schedule] = path_of(call, late=late)
        if group.size() > 1:  # On one rank backward is F.linear's own.
            y = call()
            back = partial(y.backward, y.detach(), retain_graph=True)
            found[f"backward of {name}", schedule] = path_of(back, late=late)
    layer = fusedtp.ColumnParallelLinear(64, 128, **given)
    found["layer", "auto"] = path_of(lambda: layer(x), late=late)
    return found


@pytest.fixture(scope="module")
def ways(pool: RankPool) -> dict[int, Ways]:
    return {size: pool.run(paths, world_size=size)[0] for size in (1, 4)}


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_warm_call_is_short(ways: dict[int, Ways], world_size: int) -> None:
    for what, (first, *rest) in ways[world_size].items():
        # A signal or wait for each of several peers counts once.
        below = [step for step, _ in itertools.groupby(rest)]
        if what[0].startswith("backward"):
            assert len(below) < BACKWARD_CALLS, (what, len(below), [each.name for each in below])
            continue
        calls, files = (LAYER_CALLS, LAYER_FILES) if what[0] == "layer" else (CALLS, FILES)
        names = [f"{Path(step.file).stem}.{step.name}" for step in below]
        assert first.name.endswith("forward" if what[0] == "layer" else what[0])
        assert len(below) <= calls, f"{what}: {names}"
        assert len({step.file for step in below}) <= files, f"{what}: {names}"


def test_the_document_follows_a_call(ways: dict[int, Ways]) -> None:
    """The document's steps, except inside the kernel, appear in that order in a call with schedule 'fused'."""
    linked = re.findall(r"^\d+\. \[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)", ARCHITECTURE, re.MULTILINE)
    assert len(linked) == 12
    way = iter(ways[4]["all_gather_linear", "fused"])
    *on_host, (kernel, file) = linked
    for name, path in on_host:
        assert any(step.name == name and step.file.endswith(path.removeprefix("fusedtp/")) for step in way), name
    assert f"def {kernel}(" in (ROOT / file).read_text()
