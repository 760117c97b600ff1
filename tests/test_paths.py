"""How far a public function is from its matmul or kernel: the budget of a warm call, and docs/architecture.md's way."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench.ranks import RankPool

from .paths import Step, path_of

# Below the public function itself.
CALLS, FILES = 20, 8
# A layer's forward, its parameters and what it asks of them come on top.
LAYER_CALLS, LAYER_FILES = 25, 10
FUNCTIONS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "fsdp_linear")
ROOT = Path(__file__).parent.parent
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
# Few rows are put together before they are multiplied, many are multiplied as they come.
ROWS = (8, 512)


def paths(group: ProcessGroup) -> dict[tuple[str, str, int], list[Step]]:
    """Those of every function by every schedule, on rank 0; the others are there before it, so that it never waits."""
    late, found = 0.05 * (group.rank() == 0 and group.size() > 1), {}
    schedules = ("unfused", "decomposed", "fused") if group.size() > 1 else ("auto",)
    weight = torch.randn(64, 64, requires_grad=True)
    for name, schedule, rows in itertools.product(FUNCTIONS, schedules, ROWS):
        if schedule == "fused" and rows > ROWS[0]:
            continue
        x, function = torch.randn(rows, 64), getattr(fusedtp, name)
        way = path_of(lambda x=x, function=function, schedule=schedule: function(  # type: ignore[misc]
            x, weight, group=group, schedule=schedule
        ), late=late)  # fmt: skip
        found[name, schedule, rows] = way
    layer, x = fusedtp.ColumnParallelLinear(64, 128, group=group), torch.randn(8, 64)
    found["layer", "auto", 8] = path_of(lambda: layer(x), late=late)
    return found


@pytest.fixture(scope="module")
def ways(pool: RankPool) -> dict[int, dict[tuple[str, str, int], list[Step]]]:
    return {size: pool.run(paths, world_size=size)[0] for size in (1, 2)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_warm_call_is_short(ways: dict[int, dict[tuple[str, str, int], list[Step]]], world_size: int) -> None:
    for what, way in ways[world_size].items():
        first, *below = way
        calls, files = (LAYER_CALLS, LAYER_FILES) if what[0] == "layer" else (CALLS, FILES)
        names = [f"{Path(step.file).stem}.{step.name}" for step in below]
        assert first.name.endswith("forward" if what[0] == "layer" else what[0])
        assert len(below) <= calls, f"{what}: {names}"
        assert len({step.file for step in below}) <= files, f"{what}: {names}"


def test_the_document_follows_a_call(ways: dict[int, dict[tuple[str, str, int], list[Step]]]) -> None:
    """Its twelve steps, all but what the kernel does, come in that order in a call with schedule 'fused'."""
    linked = re.findall(r"^\d+\. \[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)", ARCHITECTURE, re.MULTILINE)
    assert len(linked) == 12
    way = iter(ways[2]["all_gather_linear", "fused", 8])
    *on_host, (kernel, file) = linked
    for name, path in on_host:
        assert any(step.name == name and step.file.endswith(path.removeprefix("fusedtp/")) for step in way), name
    assert f"def {kernel}(" in (ROOT / file).read_text()
