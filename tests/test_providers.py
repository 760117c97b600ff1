"""Providers: how they are found, which cases they refuse, and plugins in a sweep."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench import peers, providers, theme
from fusedtp.bench.cases import DIRECTIONS, DTYPES, EVERY_DTYPE, FLOAT8, MXFP8, OPS, OWN, Case
from fusedtp.bench.operands import Operands, Runner
from fusedtp.bench.problem import Problem
from fusedtp.bench.providers import Missing, Provider
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.timing import Verdict, gate

from . import generated

GATHER, SCATTER, ALL_REDUCE = OPS
ADDING = Path(__file__).parent.parent / "docs" / "adding.md"


def by_drop_in(group: ProcessGroup) -> list[tuple[str, str]]:
    """Run torch's fused ops, which `drop_in` gives a CPU, through the gate."""
    wrong = []
    with torch.no_grad(), fusedtp.drop_in():
        for op, dtype in itertools.product((GATHER, SCATTER), ("bfloat16", FLOAT8)):
            problem = Problem(case(op, 64, 32, 96, dtype), group, torch.device("cpu"))
            verdict = gate(problem, ("torch_symm_mem",), group)["torch_symm_mem"]
            if verdict.error or verdict.missing:
                wrong.append((f"{op} {dtype}", verdict.error + verdict.missing))
    return wrong


def test_torchs_fused_ops_pass_the_gate(pool: RankPool) -> None:
    assert pool.run(by_drop_in, world_size=2) == [[], []]


def cannot(group: ProcessGroup) -> Verdict:
    def runner(operands: Operands, group: ProcessGroup, direction: str) -> Runner:
        raise Missing("planted: it runs over the world only")

    with mock.patch.object(providers, "named", lambda name: Provider(name, runner)):
        return gate(Problem(case(), group, torch.device("cpu")), ("mine",), group)["mine"]


def test_what_only_ranks_can_know_is_no_failure(pool: RankPool) -> None:
    for verdict in pool.run(cannot, world_size=2):
        assert (verdict.missing, verdict.error) == ("planted: it runs over the world only", "")


def case(op: str = GATHER, M: int = 256, N: int = 256, K: int = 256, dtype: str = "bfloat16", n: int = 2) -> Case:
    return Case(op, M, N, K, dtype, n)


REASONS = [
    ("dtensor", case(), "both", 0, ""),
    ("dtensor", case(M=255), "forward", 0, "splits uneven lengths"),
    ("dtensor", case(n=1), "forward", 2, "one rank has nothing to send"),
    ("dtensor", case(dtype=FLOAT8), "forward", 2, "no float8 operands with scales"),
    ("async_tp", case(), "backward", 2, ""),
    ("async_tp", case(), "forward", 0, "its fused ops need CUDA"),
    ("nccl_windows", case(), "forward", 0, "its fused ops need CUDA"),
    ("nccl_windows", case(ALL_REDUCE, dtype="float32"), "forward", 2, ""),
    ("nccl_windows", case(M=255), "forward", 2, "splits uneven lengths"),
    ("torch_symm_mem", case(), "forward", 2, ""),
    ("torch_symm_mem", case(SCATTER), "both", 2, "no gradient"),
    ("torch_symm_mem", case(ALL_REDUCE), "forward", 2, "no matmul + all-reduce"),
    ("torch_symm_mem", case(GATHER, 64, 64, 64, FLOAT8), "forward", 2, ""),
    ("torch_symm_mem", case(SCATTER, 64, 64, 64, FLOAT8), "forward", 2, ""),
    ("torch_symm_mem", case(GATHER, 64, 48, 64, FLOAT8), "forward", 2, "multiples of 16"),
    ("torch_symm_mem", case(SCATTER, 64, 64, 48, FLOAT8), "forward", 2, "multiples of 16"),
    ("torch_symm_mem", case(dtype=MXFP8), "forward", 2, "takes no mxfp8"),
    ("tree", case(), "both", 8, ""),
    ("tree", case(), "forward", 0, "interpreted on a CPU"),
    ("tree", case(n=3), "forward", 8, "1, 2, 4 or 8 ranks"),
    ("tree", case(N=67, K=97), "forward", 8, "as long"),
    ("tree", case(K=97), "forward", 8, ""),
    ("tree", case(dtype=FLOAT8), "forward", 8, "no float8"),
    ("switch", case(ALL_REDUCE), "both", 8, ""),
    ("switch", case(), "forward", 8, "all-reduces alone"),
    ("switch", case(ALL_REDUCE), "forward", 0, "interpreted on a CPU"),
    ("switch", case(ALL_REDUCE, dtype=FLOAT8), "forward", 8, "no float8"),
]


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "nccl_version", lambda: peers.NEEDS)
    for name, of, direction, num_gpus, said in REASONS:
        found = providers.named(name).reason(of, direction, num_gpus)
        assert said in found
        assert bool(found) == bool(said), (name, of, direction, found)


def test_a_name_that_is_not_there_and_an_older_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, here in (((2, 26, 5), "2.26.5"), ((), "none")):
        monkeypatch.setattr(peers, "nccl_version", lambda version=version: version)
        assert here in providers.named("nccl_windows").reason(case(), "forward", 2)
    with pytest.raises(ValueError, match="no provider 'nccl' in this process, only dtensor, torch_symm_mem"):
        providers.named("nccl")


def raises(*args: Any) -> Any:
    raise KeyError("planted")


def test_a_reason_that_fails_is_a_reason() -> None:
    for missing, said in ((raises, "its `missing` failed: KeyError: 'planted'"), (lambda *_: None, "gave None")):
        assert said in Provider("mine", raises, missing).reason(case(), "forward", 0)


def test_the_shipped_ones_look_different() -> None:
    shipped = {name: provider for name, provider in providers.found().providers.items() if name in providers.SHIPPED}
    assert tuple(shipped) == providers.SHIPPED
    assert all(provider.about and provider.name == name for name, provider in shipped.items())
    assert len({(theme.colour(name), theme.marker(name)) for name in shipped}) == len(shipped)
    # Unknown names look the same at every call, and unlike ours.
    assert (theme.colour("mine"), theme.marker("mine")) == (theme.colour("mine"), theme.marker("mine"))
    assert not {theme.colour("mine"), *map(theme.colour, shipped)} & {theme.colour(name) for name in OWN[3:]}


def test_importing_the_package_looks_for_no_entry_point() -> None:
    code = """
import importlib.metadata as m
m.entry_points = lambda **given: print("looked for", given) or ()
import fusedtp, fusedtp.bench.cli, fusedtp.bench.jobs
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert providers.GROUP not in done.stdout


# Reasons that other columns show, or that the page gives for all.
SHARED = ("need CUDA", "no gradient", "uneven lengths")


def table(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the document's table, from the providers' reasons in many cases."""
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
            less.setattr(peers, "nccl_version", lambda: (2, 26))
            found += [provider.reason(case(ops[0], N=512), "forward", 2)]
        own = [text for text in dict.fromkeys(found) if text and not any(each in text for each in SHARED)]
        needs = "GPUs" if provider.reason(case(ops[0]), "forward", 0) else ""
        has = "yes" if all(runs(ops[0], direction=each) for each in DIRECTIONS) else "no"
        known = {DTYPES: "all but float8", EVERY_DTYPE: "all"}
        said = known.get(tuple(dtypes), ", ".join(dtypes))
        which = "all" if ops == list(OPS) else ", ".join(ops)
        cells = (f"`{name}`", provider.about, needs, which, said, has, "; ".join(own))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_documents_table_is_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "nccl_version", lambda: peers.NEEDS)
    generated.as_written(ADDING, "providers", table(monkeypatch), "FUSEDTP_PROVIDERS")
