"""docs/adding.md: what is added is in every list that it belongs to, or a test here fails."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from fusedtp.bench.ranks import RankPool
from torch.distributed import ProcessGroup

from fusedtp import memory, schedules
from fusedtp.memory.local import local_memories
from fusedtp.op import OPS
from fusedtp.schedules import alone
from fusedtp.schedules.phases import run_together
from fusedtp.schedules.verbs import Epilogue
from fusedtp.workspaces.workspace import Workspace

from . import direct
from .operands import OPERANDS, Whole

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("architecture.md", "adding.md")
# By where an op over each of them is run: here, by `pool` everywhere, on a GPU (tests/test_gpu.py).
MEMORIES = {"LocalMemory": "virtual ranks", "PosixMemory": "ranks of a CPU", "CudaMemory": "ranks of GPUs"}


def run_all(group: ProcessGroup, schedule: str) -> None:
    """Every op of the table, by that schedule."""
    for op in OPS:
        given = OPERANDS[op](Whole(group.rank(), group.size()))
        operands = [None if each is None else each.float() for each in given.operands]
        outs = direct.run(op, schedule, group, *operands, **given.options)
        for out, result in zip(outs, given.results, strict=True):
            torch.testing.assert_close(
                out, result.float(), rtol=1e-4, atol=1e-4, msg=lambda text, op=op: f"{op}: {text}"
            )


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("schedule", schedules.NAMES)
def test_every_op_by_every_schedule(pool: RankPool, schedule: str, world_size: int) -> None:
    pool.run(run_all, schedule, world_size=world_size)


def test_every_op_has_operands() -> None:
    assert set(OPERANDS) == set(OPS)


def _with_what_they_call(names: list[str]) -> list[str]:
    # Functions of `alone`, and those that they call in turn.
    found: list[str] = []
    for name in names:
        if name not in found:
            found.append(name)
            names += [
                node.func.id
                for node in ast.walk(ast.parse(inspect.getsource(getattr(alone, name))))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and hasattr(alone, node.func.id)
            ]
    return [name for name in found if inspect.isfunction(getattr(alone, name))]


@pytest.mark.parametrize("module", ["alone", "unfused", "decomposed", "fused"])
def test_every_schedule_reads_all_of_an_epilogue(module: str) -> None:
    tree = ast.parse(inspect.getsource(importlib.import_module(f"fusedtp.schedules.{module}")))
    # With what it calls of `alone`.
    taken = [
        each.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "alone"
        for each in node.names
    ]
    tree.body += [ast.parse(inspect.getsource(getattr(alone, name))) for name in _with_what_they_call(taken)]  # type: ignore[misc]
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "epilogue"
    }
    assert read >= set(Epilogue._fields)


def test_every_memory_is_known_here() -> None:
    found = set()
    for each in pkgutil.iter_modules(memory.__path__):
        module = importlib.import_module(f"fusedtp.memory.{each.name}")
        found |= {
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__ and hasattr(value, "allocate")
        }
    assert found == set(MEMORIES)


def test_an_op_over_memory_of_one_process() -> None:
    ranks = [Workspace(each, torch.device("cpu")) for each in local_memories(2, torch.device("cpu"))]
    given = [OPERANDS["all_gather"](Whole(rank, 2)) for rank in range(2)]
    try:
        outs = run_together([
            direct.phases("all_gather", ws, *(x.float() for x in each.operands if x is not None), **each.options)
            for ws, each in zip(ranks, given, strict=True)
        ])  # fmt: skip
    finally:
        for ws in ranks:
            ws.close()
    for out, each in zip(outs, given, strict=True):
        assert torch.equal(out, each.results[0].float())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_document_links_to_is_there(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    links = re.findall(r"\[`?([\w./]+)`?\]\(([^)]+)\)", text)
    assert links
    for words, target in links:
        path = (ROOT / "docs" / target).resolve()
        assert path.is_file(), f"{name}: {target}"
        if "`" + words + "`](" in text and "/" not in words and path.suffix == ".py":
            # A name of the module, or the module itself.
            last = words.removesuffix(".py").split(".")[-1]
            source = path.read_text()
            is_there = re.search(rf"\b(def|class) {last}\b|^{last}\b", source, re.MULTILINE)
            assert is_there or last in (path.stem, path.parent.name), f"{name}: {words} in {target}"
    for path in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (ROOT / path).is_file(), f"{name}: {path}"
