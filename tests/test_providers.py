"""Providers: how they are found, what keeps them from a case, the shipped ones on stand-ins, and plugins in a sweep."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fusedtp.bench import generated, providers, theme
from fusedtp.bench.cases import DIRECTIONS, DTYPES, EVERY_DTYPE, FLOAT8, OPS, OWN, Case
from fusedtp.bench.peers import flux, nccl_windows
from fusedtp.bench.problem import Problem
from fusedtp.bench.providers import Provider
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.timing import Verdict, gate
from torch.distributed import ProcessGroup

from .stand_ins import NcclGroup, StandIns

GATHER, SCATTER, ALL_REDUCE = OPS
ADDING = Path(__file__).parent.parent / "docs" / "adding.md"
WORLD_SIZE = 4

# Of four ranks. (provider, op); those that torch itself brings are tested with it.
PEERS = [
    ("nccl_windows", GATHER), ("nccl_windows", SCATTER), ("nccl_windows", ALL_REDUCE), ("kraken", GATHER),
    ("kraken", SCATTER), ("kraken", ALL_REDUCE), ("triton_distributed", GATHER), ("triton_distributed", SCATTER),
    ("flux", GATHER), ("flux", SCATTER), ("te_userbuffers", GATHER), ("te_userbuffers", SCATTER),
    ("xformers", GATHER), ("xformers", SCATTER), ("flashinfer", GATHER),
]  # fmt: skip


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
    ("flashinfer", case(N=512), "forward", 2, ""),
    ("flashinfer", case(SCATTER), "forward", 2, "no matmul + reduce-scatter"),
    ("flashinfer", case(), "forward", 2, "of 256 columns a rank"),
    ("nccl_windows", case(ALL_REDUCE, dtype="float32"), "forward", 2, ""),
]


@pytest.mark.parametrize(("name", "of", "direction", "num_gpus", "said"), REASONS)
def test_reasons(
    monkeypatch: pytest.MonkeyPatch, name: str, of: Case, direction: str, num_gpus: int, said: str
) -> None:
    provider = providers.named(name)
    assert provider.package == "" or provider.reason(of, direction, num_gpus) == f"{provider.package} is not installed"
    has_all(monkeypatch)
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
    assert "TORCH_SYMMMEM=NVSHMEM" in providers.named("flashinfer").reason(case(N=512), "forward", 2)
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


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no provider 'nccl' in this process, only dtensor, torch_symm_mem"):
        providers.named("nccl")


# What other columns say, and what the page says of all.
SHARED = ("need CUDA", "no gradient", "uneven lengths")


def has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with every package."""
    monkeypatch.setattr(nccl_windows, "nccl_version", lambda: nccl_windows.NEEDS)
    monkeypatch.setattr(providers, "is_there", lambda module: True)
    monkeypatch.setenv("TORCH_SYMMMEM", "NVSHMEM")
    monkeypatch.delenv("DISABLE_FUSED_SEQUENCE_PARALLEL", raising=False)


def table(monkeypatch: pytest.MonkeyPatch) -> str:
    """The document's, from what the providers say of many cases."""
    columns = ("name", "what it is", "needs", "ops", "dtypes", "gradients", "does not run, as it says")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name in providers.SHIPPED:
        provider = providers.named(name)

        def runs(op: str, dtype: str = "bfloat16", direction: str = "forward", provider: Provider = provider) -> bool:
            return not provider.reason(case(op, 4096, 4096, 4096, dtype), direction, 8)

        ops = [op for op in OPS if runs(op)]
        dtypes = [dtype for dtype in EVERY_DTYPE if any(runs(op, dtype) for op in ops)]
        sizes = itertools.product(ops, (4096, 4128), (4096, 4128), dtypes, (2, 16))
        found = [provider.reason(case(op, M, K, K, dtype, n), "forward", 16) for op, M, K, dtype, n in sizes]
        with monkeypatch.context() as less:
            less.setattr(nccl_windows, "nccl_version", lambda: (2, 26))
            less.delenv("TORCH_SYMMMEM")
            less.setenv("DISABLE_FUSED_SEQUENCE_PARALLEL", "1")
            found += [provider.reason(case(ops[0], N=512), "forward", 2)]
        own = [text for text in dict.fromkeys(found) if text and not any(each in text for each in SHARED)]
        needs = f"`{provider.package}`" if provider.package else "torch"
        gpu = "" if not provider.reason(case(ops[0]), "forward", 0) else ", GPUs"
        has = "yes" if all(runs(ops[0], direction=each) for each in DIRECTIONS) else "no"
        known = {DTYPES: "all but float8", EVERY_DTYPE: "all"}
        said = known.get(tuple(dtypes), ", ".join(dtypes))
        which = "all" if ops == list(OPS) else ", ".join(ops)
        cells = (f"`{name}`", provider.about, needs + gpu, which, said, has, "; ".join(own))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_documents_table_is_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    has_all(monkeypatch)
    if os.environ.get("FUSEDTP_PROVIDERS") == "write":
        generated.rewrite(ADDING, "providers", table(monkeypatch))
    text = ADDING.read_text()
    assert generated.replaced(text, "providers", table(monkeypatch)) == text, "FUSEDTP_PROVIDERS=write writes it anew"
