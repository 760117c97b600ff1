"""Providers: how they are found, what keeps them from a case, the shipped ones on stand-ins, and plugins in a sweep."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fusedtp.bench import generated, machine, notes, providers, store, theme
from fusedtp.bench.cases import DIRECTIONS, DTYPES, EVERY_DTYPE, FLOAT8, OPS, OWN, Case
from fusedtp.bench.peers import flux, nccl_windows
from fusedtp.bench.problem import Problem
from fusedtp.bench.providers import Provider
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.store import Row
from fusedtp.bench.timing import Verdict, gate
from torch.distributed import ProcessGroup

from .stand_ins import NcclGroup, StandIns

GATHER, SCATTER, ALL_REDUCE = OPS
ADDING = Path(__file__).parent.parent / "docs" / "adding.md"
SECTION = ADDING.read_text().partition("## A baseline of your own")[2]
WORLD_SIZE = 4

# Of four ranks. (provider, op); those that torch itself brings are tested with it.
PEERS = [
    ("nccl_windows", GATHER), ("nccl_windows", SCATTER), ("nccl_windows", ALL_REDUCE), ("kraken", GATHER),
    ("kraken", SCATTER), ("kraken", ALL_REDUCE), ("triton_distributed", GATHER), ("triton_distributed", SCATTER),
    ("flux", GATHER), ("flux", SCATTER), ("te_userbuffers", GATHER), ("te_userbuffers", SCATTER),
    ("xformers", GATHER), ("xformers", SCATTER), ("flashinfer", GATHER),
]  # fmt: skip


@pytest.fixture
def fresh() -> Iterator[None]:
    """Entry points are looked for anew, in this test and in the next."""
    providers.found.cache_clear()
    yield
    providers.found.cache_clear()


def on_stand_in(group: ProcessGroup, name: str, op: str, wrong: bool) -> tuple[list[Verdict], list[str]]:
    """Two problems in a row, as in a sweep, and what was set up for them."""
    stands, verdicts = StandIns(group, wrong), []
    flux._started.clear()
    with torch.no_grad(), stands.in_place(name):
        for rows in (128 * group.size(), 512 * group.size()):
            problem = Problem(Case(op, rows, 48, 32, "bfloat16", group.size()), group, torch.device("cpu"))
            if name == "nccl_windows":
                problem.group = NcclGroup(stands)  # type: ignore[assignment]
            verdicts.append(gate(problem, (name,), group)[name])
            problem.forget_runners()
    return verdicts, stands.events


@pytest.mark.parametrize(("name", "op"), PEERS)
def test_a_stand_in_of_the_same_signatures_passes_the_gate(pool: RankPool, name: str, op: str) -> None:
    for verdicts, events in pool.run(on_stand_in, name, op, False, world_size=WORLD_SIZE):
        assert [(each.error, each.missing) for each in verdicts] == [("", "")] * 2
        assert all(0 < each.error_ratio <= 1 for each in verdicts)
        # What is set up for a case is given back after it; of flux nothing can be.
        assert events == {
            "nccl_windows": ["allocates", "registers pool of ncclMemAlloc, symm True", "given back"] * 2,
            "kraken": ["symmetric"] * 2 if op == GATHER else [], "triton_distributed": ["made", "given back"] * 2,
            "flux": ["shared memory"],
            "te_userbuffers": ["made", "given back"] * 2, "xformers": [], "flashinfer": ["symmetric"] * 2,
        }[name]  # fmt: skip


@pytest.mark.parametrize(("name", "op"), PEERS)
def test_a_wrong_stand_in_is_refused_by_name(pool: RankPool, name: str, op: str) -> None:
    for verdicts, _ in pool.run(on_stand_in, name, op, True, world_size=WORLD_SIZE):
        for verdict in verdicts:
            assert re.search(rf"^{op} .* forward, {name}, rank \d: y: \d+ of \d+ elements are wrong", verdict.error)


@pytest.mark.parametrize(
    ("name", "said"), [("kraken", "runs over the world only"), ("te_userbuffers", "made over the whole world")]
)
def test_what_only_ranks_can_know_is_no_failure(pool: RankPool, name: str, said: str) -> None:
    for verdicts, _ in pool.run(on_stand_in, name, GATHER, False, world_size=2):
        for verdict in verdicts:
            assert said in verdict.missing
            assert not verdict.error


def case(op: str = GATHER, M: int = 256, N: int = 256, K: int = 256, dtype: str = "bfloat16", n: int = 2) -> Case:
    return Case(op, M, N, K, dtype, n)


REASONS = [
    ("kraken", case(), "forward", 0, "its fused ops need CUDA"),
    ("kraken", case(), "forward", 2, ""),
    ("kraken", case(dtype="float16"), "forward", 2, "takes bfloat16, not float16"),
    ("kraken", case(M=128), "forward", 2, "multiples of 128 rows a rank"),
    ("kraken", case(SCATTER, M=6, dtype="float32"), "forward", 2, ""),
    ("kraken", case(SCATTER), "both", 2, "no gradient"),
    ("triton_distributed", case(), "forward", 2, ""),
    ("triton_distributed", case(dtype="float32"), "forward", 2, "it takes no float32"),
    ("triton_distributed", case(ALL_REDUCE), "forward", 2, "no matmul + all-reduce"),
    ("flux", case(M=255), "forward", 2, "splits uneven lengths"),
    ("te_userbuffers", case(n=1), "forward", 2, "one rank has nothing to send"),
    ("xformers", case(n=16), "forward", 16, "above 8 ranks it is NCCL"),
    ("xformers", case(dtype=FLOAT8), "forward", 2, "no float8 operands with scales"),
    ("flashinfer", case(), "forward", 2, ""),
    ("flashinfer", case(SCATTER), "forward", 2, "no matmul + reduce-scatter"),
    ("flashinfer", case(N=128), "forward", 2, "wants multiples of 128"),
    ("nccl_windows", case(ALL_REDUCE, dtype="float32"), "forward", 2, ""),
]


@pytest.mark.parametrize(("name", "of", "direction", "num_gpus", "said"), REASONS)
def test_reasons(
    monkeypatch: pytest.MonkeyPatch, name: str, of: Case, direction: str, num_gpus: int, said: str
) -> None:
    monkeypatch.setattr(nccl_windows, "nccl_version", lambda: (2, 28, 3))
    monkeypatch.setenv("TORCH_SYMMMEM", "NVSHMEM")
    provider = providers.named(name)
    assert provider.package == "" or provider.reason(of, direction, num_gpus) == f"{provider.package} is not installed"
    monkeypatch.setattr(providers, "is_there", lambda module: True)
    found = provider.reason(of, direction, num_gpus)
    assert said in found
    assert bool(found) == bool(said)


def test_reasons_of_versions_and_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "is_there", lambda module: True)
    for version, here in (((2, 26, 5), "2.26.5"), ((), "none")):
        monkeypatch.setattr(nccl_windows, "nccl_version", lambda version=version: version)
        found = providers.named("nccl_windows").reason(case(), "forward", 2)
        assert found == f"windows need NCCL 2.27, this torch has {here}"
    monkeypatch.delenv("TORCH_SYMMMEM", raising=False)
    assert "TORCH_SYMMMEM=NVSHMEM" in providers.named("flashinfer").reason(case(), "forward", 2)
    monkeypatch.setenv("DISABLE_FUSED_SEQUENCE_PARALLEL", "1")
    assert "NCCL and a matmul" in providers.named("xformers").reason(case(), "forward", 2)


def raises(*args: Any) -> Any:
    raise KeyError("planted")


@pytest.mark.parametrize(
    ("missing", "said"), [(raises, "its `missing` failed: KeyError: 'planted'"), (lambda *args: None, "gave None")]
)
def test_a_reason_that_fails_is_a_reason(missing: Any, said: str) -> None:
    assert said in Provider("mine", raises, missing).reason(case(), "forward", 0)


def test_a_package_is_found_by_its_files_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("planted_peer", "planted_peer/ops"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "planted_peer" / "fused.py").write_text("")
    (tmp_path / "planted_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("planted_peer", "planted_peer.ops", "planted_peer.fused", "planted_module"):
        assert providers.is_there(name), name
    # Another package of that name has other modules.
    for name in (
        "planted_peer.comm",
        "planted_peer.fused.more",
        "planted_module.ops",
        "planted_none",
        "planted_none.x",
    ):
        assert not providers.is_there(name), name
    assert not [name for name in sys.modules if name.startswith("planted")]


def test_the_shipped_ones_need_nothing_and_look_different() -> None:
    shipped = {name: provider for name, provider in providers.found().providers.items() if name in providers.SHIPPED}
    assert tuple(shipped) == providers.SHIPPED
    assert all(provider.about and provider.name == name for name, provider in shipped.items())
    assert len({(theme.colour(name), theme.marker(name)) for name in shipped}) == len(shipped)
    # Unknown names: the same look at every call, none of ours.
    assert (theme.colour("mine"), theme.marker("mine")) == (theme.colour("mine"), theme.marker("mine"))
    assert not {theme.colour("mine"), *map(theme.colour, shipped)} & {theme.colour(name) for name in OWN[3:]}
    code = "import sys; import fusedtp.bench.providers as p; p.found(); print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    packages = {provider.package.partition(".")[0] for provider in shipped.values() if provider.package}
    assert not packages & set(loaded.split())


def test_importing_the_package_looks_for_no_entry_point() -> None:
    code = """
import importlib.metadata as m
m.entry_points = lambda **given: print("looked for", given) or ()
import fusedtp, fusedtp.bench.cli, fusedtp.bench.jobs
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert providers.GROUP not in done.stdout


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
    reasons = {name: found.providers[name].reason(case(), "forward", 0) for name in ("gone", "exits", "other", "text")}
    assert reasons == {
        "gone": "it does not load: ModuleNotFoundError: No module named 'gone_module'",
        "exits": "it does not load: SystemExit: 3",
        "other": "it does not load: ValueError: planted_plugin:OTHER must be named as its entry point, other, got "
        "'another'",
        "text": "it does not load: TypeError: planted_plugin:TEXT must be a Provider, got str",
    }
    assert len(found.warnings) == 3
    for text, said in zip(found.warnings, ("must match", "another provider", "this package"), strict=True):
        assert text.startswith("planted_plugin:OTHER is left out: ")
        assert said in text
    assert {name for name, _ in providers.listing(0)} == {*found.providers, "left out"}


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no provider 'nccl' in this process, only dtensor, torch_symm_mem"):
        providers.named("nccl")


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


def swept(tmp_path: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[Row]]:
    """The command with the plugin of the document and the faulty ones on PYTHONPATH, and the rows that it leaves."""
    site, out = tmp_path / "site", tmp_path / "results"
    code = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
    (lines,) = re.findall(r"^```toml\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
    assert len(code) == 1
    (entry,) = tomllib.loads(lines)["project"]["entry-points"][providers.GROUP].items()
    distribution(site, "my_package", f"{entry[0]} = {entry[1]}\n")
    (site / "my_package").mkdir()
    (site / "my_package" / "__init__.py").touch()
    (site / "my_package" / "bench.py").write_text(code[0])
    distribution(site, "faulty", f"{FAULTY_ENTRIES}gone = gone_module:PROVIDER\nkraken = faulty:WRONG\n", faulty=FAULTY)
    env = {**os.environ, "PYTHONPATH": str(site), "TERMINAL_WIDTH": "1000"}
    command = [sys.executable, "-P", "-m", "fusedtp.bench.cli", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=env)
    path = out / machine.describe().name / "sweep.csv"
    return done, store.read(path) if path.exists() else []


def test_a_plugin_is_timed_beside_the_others(tmp_path: Path) -> None:
    done, rows = swept(tmp_path, *SWEEP, "--baselines", "mine,dtensor,gone", "--out", "results")
    assert done.returncode == 0, done.stdout + done.stderr
    timed = {row.variant: row for row in rows if row.median_ms is not None}
    assert list(timed) == ["matmul", "comm", "unfused", "mine", "dtensor"]
    assert all(row.passed and row.rounds == 3 for row in timed.values())
    assert timed["mine"].speedup_vs_unfused is not None
    (gone,) = (row for row in rows if row.variant == "gone")
    assert gone.gate == "not run: it does not load: ModuleNotFoundError: No module named 'gone_module'"
    assert "warning: faulty:WRONG is left out: its name, kraken, is taken by another provider" in done.stdout


def test_plugins_that_fail_cost_nobody_else_a_number(tmp_path: Path) -> None:
    faulty = ["--baseline", "wrong,raises,hangs,dies,mine", "--patience", "12", "--shape", "26,20,16"]
    done, rows = swept(tmp_path, *SWEEP, *faulty, "--out", "results")
    assert done.returncode == 1, done.stdout + done.stderr
    good = ("matmul", "comm", "unfused", "mine")
    assert [(row.variant, row.M) for row in rows if row.median_ms is not None] == [
        (v, M) for M in (24, 26) for v in good
    ]
    by_name = {row.variant: row.gate for row in rows if row.M == 24 and row.variant not in good}
    assert set(by_name) == {"raises", "hangs", "dies", "wrong"}
    assert "forward, wrong, rank 0: y:" in by_name["wrong"]
    where = f"{GATHER} 24x20x16 float32 on 2, forward: rank"
    for name, said in (
        ("raises", "KeyError: 'planted'"), ("hangs", "rank 1 gave no answer within 12"),
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


def test_names_are_listed_where_one_is_not_known(tmp_path: Path) -> None:
    done, _ = swept(tmp_path, *SWEEP, "--baseline", "mine,nccl")
    assert done.returncode == 2
    said = " ".join(done.stderr.replace("│", " ").split())
    assert (
        f"--baseline must be among {', '.join(providers.SHIPPED)}, dies, gone, hangs, mine, raises, wrong, none" in said
    )


def test_help_and_doctor_list_them(tmp_path: Path) -> None:
    for command in (["sweep", "--help"], ["doctor"]):
        done, _ = swept(tmp_path / command[0], *command)
        assert done.returncode == 0, done.stderr
        lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
        for said in (
            "dtensor runs", "mine runs", "async_tp does not run: its fused ops need CUDA",
            "kraken does not run: kraken.fused is not installed", "gone does not run: it does not load: "
            "ModuleNotFoundError: No module named 'gone_module'",
        ):  # fmt: skip
            assert said in lines


def test_a_launched_rank_that_hangs_says_where_and_ends() -> None:
    code = """
import time
from fusedtp.bench import notes
with notes.bounded(0.5, "a case"):
    notes.tell("7 forward x")
    time.sleep(60)
"""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "a case: no answer within 0.5 s, at 7 forward x" in done.stderr
    assert 'File "<string>", line 6 in <module>' in done.stderr
    with notes.bounded(60.0, "a case that ends"):
        pass


def table() -> str:
    """The document's, from what the providers say of a machine that has everything."""
    lines = ["| name | what it is | needs | ops | dtypes | gradients |", "|---|---|---|---|---|---|"]
    for name in providers.SHIPPED:
        provider = providers.named(name)

        def runs(op: str, dtype: str = "bfloat16", direction: str = "forward", provider: Provider = provider) -> bool:
            return not provider.reason(case(op, 4096, 4096, 4096, dtype), direction, 8)

        ops = [op for op in OPS if runs(op)]
        dtypes = [dtype for dtype in EVERY_DTYPE if any(runs(op, dtype) for op in ops)]
        needs = f"`{provider.package}`" if provider.package else "torch"
        gpu = "" if not provider.reason(case(ops[0]), "forward", 0) else ", GPUs"
        has = "yes" if all(runs(ops[0], direction=each) for each in DIRECTIONS) else "no"
        said = "all but float8" if dtypes == list(DTYPES) else ", ".join(dtypes)
        lines.append(f"| `{name}` | {provider.about} | {needs}{gpu} | {', '.join(ops)} | {said} | {has} |")
    return "\n".join(lines)


def test_the_documents_table_is_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_windows, "nccl_version", lambda: nccl_windows.NEEDS)
    monkeypatch.setattr(providers, "is_there", lambda module: True)
    monkeypatch.setenv("TORCH_SYMMMEM", "NVSHMEM")
    if os.environ.get("FUSEDTP_PROVIDERS") == "write":
        generated.rewrite(ADDING, "providers", table())
    text = ADDING.read_text()
    assert generated.replaced(text, "providers", table()) == text, "FUSEDTP_PROVIDERS=write writes it anew"
