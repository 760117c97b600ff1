"""Plugins: what is none, and those of the document and faulty ones in a sweep, as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fusedtp.bench import machine, providers, report, store, sweep
from fusedtp.bench.cases import OPS, Case
from fusedtp.bench.cli import app
from fusedtp.bench.store import Measurement

ADDING = Path(__file__).parent.parent / "docs" / "adding.md"
SECTION = ADDING.read_text().partition("## A baseline of your own")[2]
GATHER = OPS[0]
CASE = Case(GATHER, 8, 8, 8, "float32", 2)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Entry points are looked for anew, in this test and in the next."""
    providers.found.cache_clear()
    yield
    providers.found.cache_clear()


def distribution(folder: Path, name: str, entries: str, **modules: str) -> None:
    """A distribution as an installer leaves it."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{providers.GROUP}]\n{entries}")
    for module, code in modules.items():
        (folder / f"{module}.py").write_text(code)


def test_plugins_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    entries = """gone = gone_module:PROVIDER
exits = planted_exits:PROVIDER
other = planted_plugin:OTHER
text = planted_plugin:TEXT
dtensor = planted_plugin:OTHER
unfused = planted_plugin:OTHER
a,b = planted_plugin:OTHER
"""
    plugin = "from fusedtp.bench.providers import Provider\nOTHER = Provider('another', print)\nTEXT = 'text'\n"
    distribution(tmp_path, "planted", entries, planted_plugin=plugin, planted_exits="raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = providers.found()
    assert providers.named("dtensor").about == "torch's DTensor styles, Colwise- and RowwiseParallel"
    reasons = {name: found.providers[name].reason(CASE, "forward", 0) for name in ("gone", "exits", "other", "text")}
    for name, error in {
        "gone": "ModuleNotFoundError: .*'gone_module'", "exits": "SystemExit: 3",
        "other": "ValueError: planted_plugin:OTHER .* other, got 'another'",
        "text": "TypeError: planted_plugin:TEXT .* got str",
    }.items():  # fmt: skip
        assert re.search(f"does not load: {error}", reasons[name]), reasons[name]
    assert len(found.warnings) == 3
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
FAULTY_ENTRIES = "".join(f"{name} = faulty:{name.upper()}\n" for name in ("wrong", "raises", "hangs", "dies"))
SWEEP = [
    "sweep", "--world-size", "2", "--op", GATHER, "--dtype", "float32", "--shape", "24,20,16", "--rounds", "3",
    "--schedule", "unfused",
]  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin of the document and the faulty ones."""
    folder = tmp_path_factory.mktemp("site")
    code = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
    (lines,) = re.findall(r"^```toml\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
    assert len(code) == 1
    (entry,) = tomllib.loads(lines)["project"]["entry-points"][providers.GROUP].items()
    distribution(folder, "my_package", f"{entry[0]} = {entry[1]}\n")
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").touch()
    (folder / "my_package" / "bench.py").write_text(code[0])
    faulty = f"{FAULTY_ENTRIES}gone = gone_module:PROVIDER\nasync_tp = faulty:WRONG\n"
    distribution(folder, "faulty", faulty, faulty=FAULTY)
    return folder


@pytest.fixture
def plugged(site: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """As in a process that was started with the plugins on PYTHONPATH, which the ranks of this one are."""
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(site)


def invoke(*options: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, options)


def stored(out: Path) -> list[Measurement]:
    return store.read(out / machine.describe().name / "sweep.csv")


def test_plugins_beside_the_others_cost_nobody_a_number(
    plugged: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is right has times, one that is gone a reason; what is wrong, raises, hangs or dies is told."""
    asked = ["--baseline", "wrong,raises,hangs,dies,mine,gone", "--patience", "15", "--shape", "26,20,16"]
    monkeypatch.setattr(report, "picture", lambda rows, path: False)
    done = invoke(*SWEEP, *asked, "--out", str(tmp_path))
    assert done.exit_code == 1, done.output
    rows = stored(tmp_path)
    good = ("matmul", "comm", "unfused", "mine")
    timed = [row for row in rows if row.median_ms is not None]
    assert [(row.variant, row.M) for row in timed] == [(variant, M) for M in (24, 26) for variant in good]
    assert all(row.passed and row.rounds == 3 for row in timed)
    assert timed[3].speedup_vs_unfused is not None
    # What cannot run is told once.
    (gone,) = (row.gate for row in rows if row.variant == "gone")
    assert gone.startswith("not run: it does not load: ModuleNotFoundError")
    assert "faulty:WRONG is left out: its name, async_tp, is taken" in done.stdout
    good += ("gone",)
    by_name = {row.variant: row.gate for row in rows if row.M == 24 and row.variant not in good}
    assert set(by_name) == {"raises", "hangs", "dies", "wrong"}
    assert "forward, wrong, rank 0: y:" in by_name["wrong"]
    where = f"{GATHER} 24x20x16 float32 on 2, forward: rank"
    for name, said in (
        ("raises", "KeyError: 'planted'"), ("hangs", "rank 1 gave no answer within 15"),
        ("dies", "rank 1 died: exited with status 7"),
    ):  # fmt: skip
        assert by_name[name].startswith(f"{name} failed at {where}")
        assert said in by_name[name]
        assert f"{name} failed at {GATHER} 24x20x16" in done.stdout
    later = {row.variant: row.gate for row in rows if row.M == 26 and row.variant not in good}
    again = f"not run: not tried again: it failed at {GATHER} 24x20x16 float32 on 2"
    assert {name: later[name] for name in ("raises", "hangs", "dies")} == dict.fromkeys(
        ("raises", "hangs", "dies"), again
    )
    assert "elements are wrong" in later["wrong"]


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
