"""docs/adding.md: what is added is in every list that it belongs to, or a test here fails."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._device import _device_constructors

import fusedtp
import fusedtp.kernels
from fusedtp import cost, float8, memory, schedules
from fusedtp.bench import cases, theme
from fusedtp.bench.ranks import RankPool
from fusedtp.calls.dispatch import Ready
from fusedtp.cost.overlap import FEW_ROWS
from fusedtp.op import OPS
from fusedtp.schedules.verbs import Epilogue
from fusedtp.shards import even_sizes
from fusedtp.workspaces import registry

from . import direct
from .faults import cases as faults
from .operands import FEW, MANY, OPERANDS, TILES, Whole
from .soak import mixed

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("architecture.md", "adding.md")


def run_all(group: ProcessGroup, schedule: str, late: int, shape: tuple[int, int, int, int]) -> None:
    """Every op of the table, by that schedule and each algorithm it has; rank `late` begins later."""
    rank, world_size = group.rank(), group.size()
    for op, row in OPS.items():
        with torch.device("cpu"):
            given = OPERANDS[op](Whole(rank, world_size, shape))
        operands = [None if each is None else each.float() for each in given.operands]
        for algorithm in ("auto", *mixed.algorithms(row, schedule)):
            if late == rank:
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
        # For kernels it is tiles that count.
        for at in ((1, FEW), (3, FEW), (3, TILES if name == "fused" else MANY))
    ],
)  # fmt: skip
def test_every_op_by_every_schedule(
    pool: RankPool, schedule: str, world_size: int, shape: tuple[int, int, int, int]
) -> None:
    pool.run(run_all, schedule, world_size - 2, shape, world_size=world_size)


def run_all_elsewhere(group: ProcessGroup, schedule: str, shape: tuple[int, int, int, int]) -> None:
    """`run_all`, from the group's first op on, and calls beside the table, where the program makes its tensors on meta
    and in float64."""
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
    """`torch.set_default_device` and `set_default_dtype` are the program's."""
    names = {each.__name__ for each in _device_constructors()}
    for module in (fusedtp, fusedtp.kernels):
        for file in Path(inspect.getfile(module)).parent.rglob("*.py"):
            if "bench" in file.parts:
                continue
            for call in ast.walk(ast.parse(file.read_text())):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in {f"torch.{name}" for name in names}:
                    given = {each.arg for each in call.keywords}
                    assert {"device", "dtype"} <= given, f"{file}:{call.lineno}: {ast.unparse(call)}"


def test_every_op_has_operands() -> None:
    assert set(OPERANDS) == set(OPS)


def verbs_of(group: ProcessGroup, schedule: str) -> str:
    """The module whose verbs an op gets."""
    x = torch.ones(2, 2)
    task = direct.task_of("all_gather", x, sizes=(2,) * group.size())
    return type(Ready(task, schedule, group, x.device).prepared().on).__module__


def test_every_schedule_is_a_module_of_its_name(pool: RankPool) -> None:
    for name in schedules.NAMES:
        assert pool.run(verbs_of, name, world_size=2) == [f"fusedtp.schedules.{name}"] * 2


def test_every_schedule_is_known_wherever_there_is_a_list_of_them() -> None:
    predicted = cost.predict("matmul_all_reduce", M=4096, N=4096, K=4096, world_size=8)
    lists = {
        "cost.model.Prediction.times": predicted.times,
        "bench.cases.SCHEDULES": cases.SCHEDULES, "tests.soak.mixed.DTYPES": mixed.DTYPES,
        "tests.soak.mixed.WEIGHTS": mixed.WEIGHTS,
        # `unfused` has no steps between which a fault could be.
        "tests/faults/cases.py": {case.schedule for case in faults.CASES.values()} | {"unfused"},
    }  # fmt: skip
    for where, names in lists.items():
        assert set(names) == set(schedules.NAMES), where
    assert set(theme.COLOURS) >= set(schedules.NAMES)
    assert set(theme.MARKERS) >= set(schedules.NAMES)


class Sum(NamedTuple):
    """What an epilogue is done to: a @ b summed over ranks and blocks, and, behind a gather, X @ b for each b."""

    rows: list[int]
    a: list[list[Tensor]]
    b: list[list[Tensor]]
    x: Tensor
    bias: Tensor
    residual: Tensor
    weight: Tensor

    @classmethod
    def of(cls, world_size: int, rows: int, num_weights: int) -> Sum:
        """The same on every rank."""
        random = torch.Generator().manual_seed(11)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=random)

        a = [[normal(rows, 24) for _ in range(num_weights)] for _ in range(world_size)]
        b = [[normal(24, 40) for _ in range(num_weights)] for _ in range(world_size)]
        sizes = even_sizes(rows, world_size)
        return cls(list(sizes), a, b, normal(rows, 24), normal(40), normal(rows, 40), normal(40))

    def total(self) -> Tensor:
        """In float64."""
        return torch.stack([
            left.double() @ right.double() for lefts, rights in zip(self.a, self.b, strict=True)
            for left, right in zip(lefts, rights, strict=True)
        ]).sum(0)  # fmt: skip


Ended = tuple[str, list[Tensor | None], dict[str, Any], list[Tensor]]


def _gathered(of: Sum, rank: int, ending: Callable[[list[Tensor]], list[Tensor]], bias: bool, **options: Any) -> Ended:
    x = of.x.split(of.rows)[rank]
    operands: list[Tensor | None] = [x]
    for i, b in enumerate(of.b[rank]):
        operands += [b, of.bias + i if bias else None, *((None,) if i == 0 else ())]
    zs = [of.x.double() @ b.double() + (of.bias.double() + i if bias else 0) for i, b in enumerate(of.b[rank])]
    return "all_gather_matmul", operands, {"sizes": of.rows, **options}, ending(zs)


def _summed(of: Sum, rank: int, scatters: bool, bias: bool, residual: bool, norm: bool) -> Ended:
    own = of.residual.split(of.rows)[rank] if scatters else of.residual
    operands: list[Tensor | None] = [of.a[rank][0], of.b[rank][0], of.bias if bias else None]
    operands += [None, None] * scatters + [own if residual else None]
    for a, b in zip(of.a[rank][1:], of.b[rank][1:], strict=True):
        operands += [a, b, *((None,) if scatters else ())]
    y = of.total() + (of.bias.double() if bias else 0) + (of.residual.double() if residual else 0)
    y = y.split(of.rows)[rank] if scatters else y
    options: dict[str, Any] = {"sizes": of.rows} if scatters else {}
    if not norm:
        return "matmul_reduce_scatter" if scatters else "matmul_all_reduce", operands, options, [y]
    normed = torch.nn.functional.rms_norm(y, (40,), of.weight.double(), 1e-6)
    options |= {"norm": "rms_norm", "eps": 1e-6}
    return "matmul_reduce_scatter" if scatters else "matmul_all_reduce", [*operands, of.weight], options, [y, normed]


def _silu(zs: list[Tensor]) -> list[Tensor]:
    return [torch.nn.functional.silu(z) for z in zs]


# For every field of an epilogue: the ops that have it, on what a rank has, and their results in float64.
EPILOGUES: dict[str, Callable[[Sum, int], list[Ended]]] = {
    "bias": lambda of, rank: [
        _gathered(of, rank, list, bias=True), _summed(of, rank, True, bias=True, residual=False, norm=False),
        _summed(of, rank, False, bias=True, residual=False, norm=False),
    ],
    "residual": lambda of, rank: [
        _summed(of, rank, scatters, bias=False, residual=True, norm=False) for scatters in (True, False)
    ],
    "activation": lambda of, rank: [_gathered(of, rank, _silu, bias=True, activation="silu")],
    "keeps": lambda of, rank: [
        _gathered(of, rank, lambda zs: [*_silu(zs), *zs], bias=True, activation="silu", keeps=True)
    ],
    "norm": lambda of, rank: [
        _summed(of, rank, scatters, bias=True, residual=True, norm=True)
        for scatters in (True, False) if len(of.b[0]) == 1
    ],
}  # fmt: skip


def run_epilogues(group: ProcessGroup, schedule: str, field: str) -> int:
    """A field of an epilogue behind few and many rows, of one weight and of several; how many ops had it."""
    count = 0
    for rows, num_weights in ((9, 1), (9, 3), (group.size() * (FEW_ROWS + 40) + 3, 1)):
        for op, operands, options, results in EPILOGUES[field](Sum.of(group.size(), rows, num_weights), group.rank()):
            outs = direct.run(op, schedule, group, *operands, **options)
            what = f"{field} of {op} by {schedule}, {rows} rows, {num_weights} weights"
            for out, result in zip(outs, results, strict=True):
                torch.testing.assert_close(
                    out.double(), result, rtol=1e-4, atol=1e-4, msg=lambda text, what=what: f"{what}: {text}"
                )
            count += 1
    return count


@pytest.mark.parametrize("schedule", schedules.NAMES)
@pytest.mark.parametrize("field", Epilogue._fields)
def test_every_schedule_does_all_of_an_epilogue(pool: RankPool, field: str, schedule: str) -> None:
    assert field in EPILOGUES, f"EPILOGUES of {__name__} needs operands with {field}, and what comes of them"
    assert min(pool.run(run_epilogues, schedule, field, world_size=2))


def run_over(group: ProcessGroup, name: str) -> None:
    """An op over the memory that a group of CPU ranks is given, which is to be this one."""
    given = OPERANDS["all_gather"](Whole(group.rank(), group.size()))
    operands = [None if each is None else each.float() for each in given.operands]
    (out,) = direct.run("all_gather", "fused", group, *operands, **given.options)
    assert torch.equal(out, given.results[0].float())
    assert type(registry.get(group, torch.device("cpu"))._memory).__name__ == name


def over_ranks(pool: RankPool) -> None:
    pool.run(run_over, "PosixMemory", world_size=2)


# An op over each of them; over that of GPUs tests/test_gpu.py runs all.
MEMORIES: dict[str, Callable[[RankPool], None]] = {"PosixMemory": over_ranks}
OF_GPUS = {"CudaMemory"}


def test_every_memory_is_known_here() -> None:
    found = set()
    for each in pkgutil.iter_modules(memory.__path__):
        module = importlib.import_module(f"fusedtp.memory.{each.name}")
        found |= {
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__ and hasattr(value, "allocate")
        }
    assert found == set(MEMORIES) | OF_GPUS, "MEMORIES needs a function that runs an op over each"


@pytest.mark.parametrize("name", MEMORIES)
def test_an_op_over_every_memory(pool: RankPool, name: str) -> None:
    MEMORIES[name](pool)


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
