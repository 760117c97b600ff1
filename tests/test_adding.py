"""docs/adding.md: a new op, schedule or memory must be in every list that it belongs to, or a test here fails."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.utils._device import _device_constructors

import fusedtp
import fusedtp.kernels
from fusedtp import cost, float8, memory, schedules
from fusedtp.bench import cases, theme
from fusedtp.bench.ranks import RankPool
from fusedtp.cost.overlap import AT_ONCE_ROWS
from fusedtp.epilogue import Epilogue
from fusedtp.op import OPS
from fusedtp.workspaces import registry

from . import direct
from .faults import cases as faults
from .harness import LARGE
from .operands import FEW, MANY, OPERANDS, TILES, Whole
from .oracle import Case, Operands
from .soak import mixed

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("architecture.md", "adding.md")


def run_all(group: ProcessGroup, schedule: str, late: int, shape: tuple[int, int, int, int]) -> None:
    """Run every op of the table by the schedule and each of its algorithms; rank `late` begins later."""
    for op, row in OPS.items():
        with torch.device("cpu"):
            given = OPERANDS[op](Whole(group.rank(), group.size(), shape))
        operands = [None if each is None else each.float() for each in given.operands]
        for algorithm in ("auto", *mixed.algorithms(row, schedule)):
            if late == group.rank():
                time.sleep(0.05)
            outs = direct.run(op, schedule, group, *operands, **given.options, algorithm=algorithm)
            for out, result in zip(outs, given.results, strict=True):
                what = f"{op}, {algorithm}, {schedule}"
                torch.testing.assert_close(
                    out, result.float(), rtol=1e-4, atol=1e-4, msg=lambda text, what=what: f"{what}: {text}"
                )


@pytest.mark.parametrize(
    ("schedule", "world_size", "shape"),
    [
        (name, *at) for name in schedules.NAMES
        # For kernels the number of tiles counts.
        for at in ((1, FEW), (3, FEW), (3, TILES if name == "fused" else MANY))
    ],
)  # fmt: skip
def test_every_op_by_every_schedule(
    pool: RankPool, schedule: str, world_size: int, shape: tuple[int, int, int, int]
) -> None:
    pool.run(run_all, schedule, world_size - 2, shape, world_size=world_size)


def run_all_elsewhere(group: ProcessGroup, schedule: str, shape: tuple[int, int, int, int]) -> None:
    """Run `run_all` from the group's first op on, and calls beside the table. The program's default device is meta and
    its default dtype float64.
    """
    x, w, lots = torch.ones(4, 32), torch.ones(16, 32), {"group": group, "schedule": schedule}
    calls: list[Callable[[], Any]] = [
        lambda: fusedtp.all_gather_linear(x, (w, w), activation="swiglu", **lots),
        lambda: fusedtp.linear_all_reduce(x, w, residual=torch.ones_like(x[:, :16]), norm_weight=w[:, 0], **lots)[0],
        lambda: fusedtp.linear_reduce_scatter(x, w, order="any", **lots),
        lambda: fusedtp.ColumnParallelLinear(32, 16, feature_sizes=(9, 7), device="cpu", dtype=x.dtype, **lots)(x),
        lambda: fusedtp.RowParallelLinear(64, 16, norm="rms_norm", device="cpu", dtype=x.dtype, **lots)(x)[0],
    ]
    recipes = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    calls += [lambda each=each: fusedtp.all_gather_linear(x, w, float8=each, **lots) for each in recipes]
    if schedule != "unfused":
        calls.append(lambda: fusedtp.all_gather_linear(x, w, order="tree", group=group))
    for kind in ("rowwise", "mxfp8"):
        given = fusedtp.scaled(x, kind), fusedtp.scaled(w, kind)
        calls.append(lambda given=given: fusedtp.all_gather_linear(*given, **lots))
    fusedtp.destroy(group)
    float8._table.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            outs = [call() for call in calls]
            run_all(group, schedule, -1, shape)
    finally:
        torch.set_default_dtype(before)
        fusedtp.destroy(group)
    for out in outs:
        for each in out if isinstance(out, tuple) else (out,):
            assert each.isfinite().all()
            assert each.dtype in (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("schedule", "shape"), [("unfused", FEW), ("decomposed", FEW), ("decomposed", MANY), ("fused", FEW)]
)
def test_no_op_goes_by_the_default_device_and_dtype(
    pool: RankPool, schedule: str, shape: tuple[int, int, int, int]
) -> None:
    pool.run(run_all_elsewhere, schedule, shape, world_size=2)


def test_every_factory_call_names_its_device_and_dtype() -> None:
    """The program may set `torch.set_default_device` and `set_default_dtype`."""
    names = {each.__name__ for each in _device_constructors()}
    for module in (fusedtp, fusedtp.kernels):
        for file in Path(inspect.getfile(module)).parent.rglob("*.py"):
            if "bench" in file.parts:
                continue
            for call in ast.walk(ast.parse(file.read_text())):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in {f"torch.{name}" for name in names}:
                    given = {each.arg for each in call.keywords}
                    assert {"device", "dtype"} <= given, f"{file}:{call.lineno}: {ast.unparse(call)}"


def test_every_schedule_is_known_wherever_there_is_a_list_of_them() -> None:
    predicted = cost.predict("matmul_all_reduce", M=4096, N=4096, K=4096, world_size=8)
    lists = {
        "cost.model.Prediction.times": predicted.times,
        "bench.cases.SCHEDULES": cases.SCHEDULES, "tests.soak.mixed.DTYPES": mixed.DTYPES,
        "tests.soak.mixed.WEIGHTS": mixed.WEIGHTS,
        # `unfused` has no steps that a fault could strike.
        "tests/faults/cases.py": {case.schedule for case in faults.CASES.values()} | {"unfused"},
    }  # fmt: skip
    for where, names in lists.items():
        assert set(names) == set(schedules.NAMES), where
    assert set(theme.COLOURS) >= set(schedules.NAMES)
    assert set(theme.MARKERS) >= set(schedules.NAMES)


def _cases(*kinds: str, **options: Any) -> list[Case]:
    """Return calls with few and many rows; a gather also with several weights."""
    return [
        Case(kind, torch.float32, (rows,), **{"widths": (40,) * num, "biased": (False,) * num, **options})
        for kind in kinds for rows, num in ((9, 3 if kind == "gather" else 1), (2 * (AT_ONCE_ROWS + 40) + 3, 1))
    ]  # fmt: skip


# For each field of an epilogue: calls of the functions with that field, which `oracle` checks in float64.
EPILOGUES: dict[str, list[Case]] = {
    "bias": [
        *(replace(case, biased=(True,) * len(case.widths)) for case in _cases("gather", "scatter", "all_reduce")),
        # The first weight has none. Five weights are read from a table.
        *(
            replace(case, widths=(40,) * num, biased=(False, *(True,) * (num - 1)))
            for case in _cases("gather")
            for num in (2, 5)
        ),
    ],
    "residual": _cases("scatter", "all_reduce", residual=True),
    # Products are not kept without a gradient.
    "activation": _cases("gather", activation="silu", frozen=("x", "w0", "w1", "w2")),
    "keeps": _cases("gather", activation="silu"),
    "norm": _cases("scatter", "all_reduce", residual=True, norm="rms_norm"),
    "norm_weight": _cases("scatter", norm="rms_norm")[:1],
    "norm_bias": _cases("scatter", norm="layer_norm")[:1],
    "eps": _cases("all_reduce", norm="rms_norm")[:1],
}


def run_epilogues(group: ProcessGroup, schedule: str, field: str) -> None:
    for case in EPILOGUES[field]:
        if schedule == "fused" and not LARGE:
            # For kernels the number of tiles counts.
            case = replace(case, shape=(min(case.shape[0], 150),))
        Operands(case, group).check(schedule, f"{field} by {schedule}, {case}")


@pytest.mark.parametrize("schedule", schedules.NAMES)
# The gathered tensor itself is a result of torch's own op only, which tests/test_drop_in.py runs.
@pytest.mark.parametrize("field", [each for each in Epilogue._fields if each != "whole"])
def test_every_schedule_does_all_of_an_epilogue(pool: RankPool, field: str, schedule: str) -> None:
    assert EPILOGUES.get(field), f"EPILOGUES of {__name__} needs calls with {field}"
    pool.run(run_epilogues, schedule, field, world_size=2)


def run_over(group: ProcessGroup, name: str) -> None:
    """Run an op over the memory that a group of CPU ranks gets, and check the memory's class."""
    given = OPERANDS["all_gather"](Whole(group.rank(), group.size()))
    operands = [None if each is None else each.float() for each in given.operands]
    (out,) = direct.run("all_gather", "fused", group, *operands, **given.options)
    assert torch.equal(out, given.results[0].float())
    assert type(registry.get(group, torch.device("cpu"))._memory).__name__ == name


# A function for each memory that runs an op over it; tests/test_gpu.py covers the memory of GPUs.
MEMORIES: dict[str, Callable[[RankPool], object]] = {
    "PosixMemory": lambda pool: pool.run(run_over, "PosixMemory", world_size=2),
}
OF_GPUS = {"CudaMemory"}


def test_an_op_over_every_memory(pool: RankPool) -> None:
    found = set()
    for each in pkgutil.iter_modules(memory.__path__):
        module = importlib.import_module(f"fusedtp.memory.{each.name}")
        made_here = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
        found |= {value.__name__ for value in made_here if inspect.isclass(value) and hasattr(value, "allocate")}
    assert found == set(MEMORIES) | OF_GPUS, "MEMORIES needs a function that runs an op over each"
    for run in MEMORIES.values():
        run(pool)


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
