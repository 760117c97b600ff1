"""Plugins: entry points that are not providers, and the document's plugin and faulty ones in a user's sweep."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from fusedtp.bench import providers, report, store, sweep
from fusedtp.bench.cases import OPS, Case
from fusedtp.bench.ranks import PRELOAD

from .command import command

ADDING = Path(__file__).parent.parent / "docs" / "adding.md"
SECTION = ADDING.read_text().partition("## A baseline of your own")[2]
GATHER = OPS[0]
CASE = Case(GATHER, 8, 8, 8, "float32", 2)


@pytest.fixture(autouse=True)
def _found_anew() -> Iterator[None]:
    """Look up entry points again in each test, and after the last one."""
    providers.found.cache_clear()
    yield
    providers.found.cache_clear()


def distribution(folder: Path, name: str, entries: Mapping[str, str], **modules: str) -> None:
    """Make a distribution as an installer leaves it."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{providers.GROUP}]", *(" = ".join(entry) for entry in entries.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module, code in modules.items():
        (folder / f"{module}.py").write_text(code)


def test_plugins_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"gone": "gone_module:PROVIDER", "exits": "planted_exits:PROVIDER", "text": "planted_plugin:TEXT"}
    names |= dict.fromkeys(("other", "dtensor", "unfused", "a,b"), "planted_plugin:OTHER")
    plugin = "from fusedtp.bench.providers import Provider\nOTHER = Provider('another', print)\nTEXT = 'text'\n"
    distribution(tmp_path, "planted", names, planted_plugin=plugin, planted_exits="raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = providers.found()
    assert providers.named("dtensor").about == "torch's DTensor styles, Colwise- and RowwiseParallel"
    for name, error in {
        "gone": "ModuleNotFoundError: .*'gone_module'", "exits": "SystemExit: 3",
        "other": "ValueError: planted_plugin:OTHER .* other, got 'another'",
        "text": "TypeError: planted_plugin:TEXT .* got str",
    }.items():  # fmt: skip
        assert re.search(f"does not load: {error}", found.providers[name].reason(CASE, "forward", 0))
    for text, said in zip(found.warnings, ("must match", "another provider", "this package"), strict=True):
        assert text.startswith("planted_plugin:OTHER is left out: ")
        assert said in text
    assert {name for name, _ in providers.listing(0)} == {*found.providers, "left out"}


FAULTY = """
import os
import time

import torch.distributed as dist
from fusedtp.bench.operands import passes
from fusedtp.bench.providers import Provider


def made(name, on_rank_1):
    def runner(operands, group, direction):
        def call(x, w):
            if group.rank() == 1:
                on_rank_1()
            parts = [x.new_empty(size, x.shape[1]) for size in operands.m_sizes]
            dist.all_gather(parts, x, group=group)
            return parts[0].new_tensor([]) if name == "empty" else (operands.x_whole @ w.t()) * (1 + (name == "wrong"))

        return passes(call, operands.x, operands.w, operands, direction)

    return Provider(name, runner)


def raises():
    raise KeyError("planted")


def hangs():
    while True:
        time.sleep(0.05)


WRONG, RAISES = made("wrong", lambda: None), made("raises", raises)
HANGS, DIES = made("hangs", hangs), made("dies", lambda: os._exit(7))
"""
FAULTY_ENTRIES = {name: f"faulty:{name.upper()}" for name in ("wrong", "raises", "hangs", "dies")}
SWEEP = [
    "sweep", "--world-size", "2", "--op", GATHER, "--dtype", "float32", "--shape", "24,20,16", "--rounds", "3",
    "--schedule", "unfused",
]  # fmt: skip


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the document's plugin and the faulty ones on PYTHONPATH, for this process and its ranks."""
    (code,), (lines,) = (
        re.findall(rf"^```{kind}\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE) for kind in ("python", "toml")
    )
    entries = tomllib.loads(lines)["project"]["entry-points"][providers.GROUP]
    distribution(tmp_path, "my_package", entries)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    (tmp_path / "my_package" / "bench.py").write_text(code)
    others = {"gone": "gone_module:PROVIDER", "async_tp": "faulty:WRONG"}
    distribution(tmp_path, "faulty", FAULTY_ENTRIES | others, faulty=FAULTY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # The ranks' fork server is for this test alone.
    monkeypatch.setenv(PRELOAD, "")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("site")
def test_plugins_beside_the_others_cost_nobody_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right plugin has times, a missing one a reason; wrong, raising, hanging and dying plugins are reported."""
    asked = ["--baseline", "wrong,raises,hangs,dies,mine,gone", "--patience", 8, "--shape", "26,20,16"]
    monkeypatch.setattr(report, "picture", lambda rows, path: False)
    output = command(*SWEEP, *asked, "--out", tmp_path / "out", code=1)
    (path,) = (tmp_path / "out").glob("*/sweep.csv")
    rows = store.read(path)
    good = ("matmul", "comm", "unfused", "sequential", "mine")
    timed = [row for row in rows if row.median_ms is not None]
    assert [(row.variant, row.M) for row in timed] == [(variant, M) for M in (24, 26) for variant in good]
    assert all(row.passed and row.rounds == 3 for row in timed)
    assert timed[4].speedup_vs_unfused is not None
    gates = {M: {row.variant: row.gate for row in rows if row.M == M and row.variant not in good} for M in (24, 26)}
    # A plugin that cannot run is reported once.
    assert gates[24].pop("gone").startswith("not run: it does not load: ModuleNotFoundError")
    assert "faulty:WRONG is left out: its name, async_tp, is taken" in output
    assert set(gates[24]) == set(gates[26]) == set(FAULTY_ENTRIES)
    assert "forward, wrong, rank 0: y:" in gates[24]["wrong"]
    assert "elements are wrong" in gates[26]["wrong"]
    first = f"{GATHER} 24x20x16 float32 on 2"
    for name, said in (
        ("raises", "KeyError: 'planted'"), ("hangs", "rank 1 gave no answer within 8"),
        ("dies", "rank 1 died: exited with status 7"),
    ):  # fmt: skip
        assert gates[24][name].startswith(f"{name} failed at {first}, forward: rank")
        assert said in gates[24][name]
        assert f"{name} failed at {GATHER} 24x20x16" in output
        assert gates[26][name] == f"not run: not tried again: it failed at {first}"
    # The rows have the stacks of what hangs, and the table says what allows more.
    stack = "in <module>"
    assert (stack in gates[24]["hangs"], stack in output, "(--patience allows more" in output) == (True, False, True)


def test_a_launched_rank_that_hangs_says_where_and_ends() -> None:
    code = """
import time
from fusedtp.bench import ranks, sweep
with sweep.bounded(0.5, "a case"):
    ranks.tell("7 forward x")
    time.sleep(60)
"""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "a case: no answer within 0.5 s, at 7 forward x" in done.stderr
    assert 'File "<string>", line 6 in <module>' in done.stderr
    with sweep.bounded(60.0, "a case that ends"):
        pass
