"""The digest of the timed code covers what timed calls enter, and changes only if that code does."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench import digest
from fusedtp.bench.cases import BOUNDS, COLLECTIVES, DIRECTIONS, FLOAT8, MXFP8, OPS, Case
from fusedtp.bench.problem import Problem
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.suites import SUITE_OF, missing

from . import generated

VARIANTS = (*BOUNDS, "unfused", "sequential", "decomposed", "auto", "dtensor")
SIZES: dict[str, tuple[int, ...]] = {
    "decode": (4, 64, 64), "mlp": (16, 32, 64), "grouped": (16, 32, 32, 16, 16), "block": (16, 1408, 512),
    **dict.fromkeys(COLLECTIVES, (16, 32)),
}  # fmt: skip


class Watch:
    """Modules of the package, as paths in it, whose functions ran in the third call of what was `called`."""

    def __init__(self) -> None:
        package = Path(fusedtp.__file__).parent
        self._roots = {os.path.realpath(package / name): name for name in ("bench", "kernels")}
        self._roots[os.path.realpath(package)] = ""
        self._files: set[str] = set()

    @property
    def seen(self) -> set[str]:
        found = set()
        for path in map(os.path.realpath, self._files):
            for root, name in self._roots.items():
                if path.startswith(root + os.sep):
                    found.add(str(Path(name) / Path(path).relative_to(root)))
                    break
        return found

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self._files.add(frame.f_code.co_filename)

    def call(self, run: Callable[[], object]) -> None:
        for _ in range(2):
            run()
        sys.setprofile(self._profile)
        threading.setprofile(self._profile)
        try:
            run()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def entered(group: ProcessGroup) -> dict[str, set[str]]:
    """Return the modules that timed calls enter, of the sweep (\"\") and of each suite of layers."""
    found = {"": Watch()} | {name: Watch() for name in SIZES}
    with torch.no_grad():
        for op, dtype, size in itertools.product(OPS, ("float32", FLOAT8, MXFP8), ((64, 64, 64), (66, 68, 62))):
            case = Case(op, *size, dtype, group.size())
            problem = Problem(case, group, torch.device("cpu"))
            for direction, variant in itertools.product(DIRECTIONS if dtype == "float32" else DIRECTIONS[:1], VARIANTS):
                if not missing(variant, case, direction, 0):
                    found[""].call(problem.runner(variant, direction))
        for name, size in SIZES.items():
            suite = SUITE_OF[name]
            (case,) = (each for each in suite.make(size, "float32", group.size()) if each.op == name)
            case = replace(case, model="small", tokens=16) if name == "block" else case
            layer = suite.setup(case, group, torch.device("cpu"))
            for direction, variant in itertools.product(suite.directions, suite.variants(0, None)):
                if not missing(variant, case, direction, 0):
                    found[name].call(layer.runner(variant, direction))
    return {name: watch.seen for name, watch in found.items()}


def test_timed_calls_enter_no_module_that_is_not_in_the_digest(pool: RankPool) -> None:
    everyone = pool.run(entered, world_size=2)
    for layer, seen in everyone[0].items():
        assert "schedules/decomposed.py" in seen
        assert seen <= {*digest.modules(0, layer), *digest.READ}, layer
    # and the list names nothing that no call enters
    seen = set[str]().union(*(each for found in everyone for each in found.values()))
    assert {name for layer in SIZES for name in digest.modules(0, layer)} - {"bench/timing.py"} <= seen


SOURCE = '''"""Doc."""
import os

LIMIT = 3


class Some:
    """Doc."""

    def run(self, x: int, y=2) -> int:
        """Doc."""
        # Why.
        if x > LIMIT:
            raise ValueError(f"too many: {x}")
        assert y, "none"
        return x + y
'''
FREE = {
    "comment": ("# Why.", "# Because."), "docstring": ('"""Doc."""', '"""Other."""'), "annotation": ("x: int", "x"),
    "result": (" -> int", ""), "message": ("too many: {x}", "{x} is too many"), "assertion": ('"none"', '"no"'),
    "import": ("import os", "import re"), "space": ("x + y", "(x  +  y)"),
}  # fmt: skip
TIMED = {
    "constant": ("LIMIT = 3", "LIMIT = 4"), "default": ("y=2", "y=3"), "operator": ("x + y", "x - y"),
    "comparison": ("x > LIMIT", "x >= LIMIT"), "name": ("x + y", "y + x"), "statement": ("return x", "x = 1; return x"),
    "kind of error": ("ValueError", "TypeError"), "condition": ("assert y", "assert x"), "method": ("run", "go"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), FREE.values(), ids=FREE)
def test_what_takes_no_time_changes_no_digest(old: str, new: str) -> None:
    assert SOURCE.count(old)
    assert digest.of_sources({"a": SOURCE}) == digest.of_sources({"a": SOURCE.replace(old, new)})


@pytest.mark.parametrize(("old", "new"), TIMED.values(), ids=TIMED)
def test_what_runs_changes_the_digest(old: str, new: str) -> None:
    assert SOURCE.count(old)
    changed = SOURCE.replace(old, new)
    assert len({digest.of_sources(each) for each in ({"a": SOURCE}, {"a": changed}, {"b": SOURCE}, {})}) == 4


def test_a_cpus_digest_leaves_out_kernels_and_a_gpus_has_them() -> None:
    on_cpu, on_gpu = set(digest.modules(0)), set(digest.modules(1))
    assert on_cpu < on_gpu
    assert not any(name.startswith("kernels/") for name in on_cpu)
    kernels = {f"kernels/{path.name}" for path in (digest.ROOT / "kernels").glob("*.py")}
    assert kernels <= on_gpu
    assert "kernels/gather_matmul.py" in kernels
    assert len({digest.digest(0), digest.digest(1), *(digest.digest(0, layer) for layer in digest.LAYERS)}) == 7


def test_rows_of_other_code_are_said_to_be() -> None:
    now = digest.digest(0)
    assert generated.stale([now, now]) == ""
    said = generated.stale([now, "0123456789ab", ""])
    assert said == "The timed code has changed since these rows were measured (their digest: 0123456789ab, unknown)."
