"""ParallelKernelBench on 2 and 4 ranks: each solution returns what its reference does, and its page is generated."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fusedtp
from fusedtp.bench.ranks import RankPool

from .generated import as_written
from .parallel_kernel_bench import solutions
from .parallel_kernel_bench.problems import (
    COLLECTIVES,
    DATA,
    OUTSIDE,
    REFUSED,
    SENT_BY_OURS,
    SOLVED,
    TENSOR,
    Draw,
    Problem,
)

PAGE = Path(__file__).parent.parent / "docs" / "guide" / "parallel-kernel-bench.md"
GROUPS = COLLECTIVES, TENSOR, DATA
WORLD_SIZES = 2, 4
# Other results are compared bit by bit.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}
OWN = {name: each for name, each in vars(solutions).items() if inspect.isfunction(each)}


class Outcome(NamedTuple):
    """A problem's outcome on one rank: what is wrong, or "", and how its ops ran."""

    wrong: str
    paths: list[fusedtp.Path]


@cache
def gated_meshes(rank: int) -> dict[int, DeviceMesh]:
    """Return, by the number of ranks, the mesh of FSDP and tensor parallelism; collective over four ranks."""
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([each]) for each in range(4)][rank]
    made = {4: init_device_mesh("cpu", (2, 2), mesh_dim_names=("D", "T"))}
    if rank < 2:
        made[2] = DeviceMesh.from_group([pair, alone], "cpu", mesh=[[0], [1]], mesh_dim_names=("D", "T"))
    return made


def make_meshes(group: ProcessGroup) -> None:
    gated_meshes(group.rank())


def compare(got: Any, want: Any) -> str:
    """Return what is wrong with results, tensors or sequences of tensors, or ""."""
    ours, theirs = ([each] if isinstance(each, Tensor) else list(each) for each in (got, want))
    try:
        for mine, expected in zip(ours, theirs, strict=True):
            assert mine.dtype == expected.dtype, (mine.dtype, expected.dtype)
            allowed = TOLERANCES.get(mine.dtype, 0)
            wide = (each.detach().to(torch.float32 if each.itemsize == 1 else each.dtype) for each in (mine, expected))
            torch.testing.assert_close(*wide, rtol=allowed, atol=allowed)
    except (AssertionError, ValueError) as error:
        return str(error) or "wrong"
    return ""


def solve(group: ProcessGroup) -> dict[int, Outcome]:
    """Solve every problem on this group's ranks."""
    size, rank = group.size(), group.rank()
    line = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("X",))
    found = {}
    for problem in SOLVED:
        number, inputs = problem.number, problem.inputs
        mesh = gated_meshes(rank)[size] if problem.solution is solutions.fsdp_and_tp else line
        fusedtp.paths()
        got = problem.solution(*inputs(Draw(number, rank, size)), mesh=mesh)
        paths = fusedtp.paths()
        want = problem.reference([inputs(Draw(number, each, size)) for each in range(size)], rank)
        others = problem.reference([inputs(Draw(number + 100, each, size)) for each in range(size)], rank)
        wrong = compare(got, want)
        assert compare(want, others), f"{problem.name}: every input has this result"
        found[number] = Outcome(wrong, paths)
    return found


@pytest.fixture(scope="module")
def outcomes(pool: RankPool) -> dict[int, list[dict[int, Outcome]]]:
    """Return, by the number of ranks and by rank, the outcome of each problem."""
    pool.run(make_meshes)
    return {size: pool.run(solve, world_size=size) for size in WORLD_SIZES}


def is_right(outcomes: Mapping[int, list[dict[int, Outcome]]], problem: Problem, size: int) -> bool:
    return not any(rank[problem.number].wrong for rank in outcomes[size])


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("problem", SOLVED, ids=lambda problem: problem.name)
def test_the_result_is_the_reference(
    outcomes: dict[int, list[dict[int, Outcome]]], problem: Problem, size: int
) -> None:
    by_rank = [rank[problem.number] for rank in outcomes[size]]
    assert [each.wrong for each in by_rank] == [""] * size
    schedules = {path.schedule for each in by_rank for path in each.paths}
    # With two ranks, one axis of the mesh has one rank, and an op over one rank runs unfused.
    assert schedules - ({"unfused"} if (problem.number, size) == (48, 2) else set()) == {"decomposed"}


def test_each_problem_of_the_suite_has_one_place() -> None:
    numbers = [
        *(each.number for each in SOLVED),
        *REFUSED,
        *(each for _, outside in OUTSIDE.values() for each in outside),
    ]
    assert sorted(numbers) == list(range(1, 88))
    assert {*SENT_BY_OURS} < {each for _, outside in OUTSIDE.values() for each in outside}


def shown(problem: Problem) -> Callable[..., Any]:
    return problem.shown or problem.solution


def calls(function: Callable[..., Any]) -> list[str]:
    """Return the public functions that a solution calls, also through others."""
    found = []
    for public, name in re.findall(r"(fusedtp\.)?\b(\w+)\(", inspect.getsource(function)):
        if public:
            found.append(name)
        elif name in OWN and name != function.__name__:
            found += calls(OWN[name])
    return list(dict.fromkeys(found))


def code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def tables(outcomes: Mapping[int, list[dict[int, Outcome]]]) -> str:
    """Return the counts of each group, and a row for each problem."""
    right = {each.number for each in SOLVED if all(is_right(outcomes, each, size) for size in WORLD_SIZES)}
    lines = ["| group | problems | right on 2 and 4 ranks | not solved, and why |", "|---|---:|---:|---|"]
    for group in GROUPS:
        solved = [each.number for each in SOLVED if each.group == group]
        refused = {number: (name, why) for number, (name, of, why) in REFUSED.items() if of == group}
        reasons = "; ".join(f"{number} {name}: {why}" for number, (name, why) in refused.items())
        lines.append(f"| {group} | {len(solved) + len(refused)} | {len(right & {*solved})} | {reasons} |")
    for group, (why, numbers) in OUTSIDE.items():
        lines.append(f"| {group} | {len(numbers)} | 0 | {', '.join(map(str, numbers))}: {why} |")
    lines += [
        "", "| problem | group | solution | our calls | ops that ran on 4 ranks | 2 ranks | 4 ranks |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for each in SOLVED:
        ran = list(dict.fromkeys(path.op for path in outcomes[4][0][each.number].paths))
        verdicts = ["right" if is_right(outcomes, each, size) else "wrong" for size in WORLD_SIZES]
        cells = (
            f"{each.number} {each.name}",
            each.group,
            f"`{shown(each).__name__}`",
            code(calls(shown(each))),
            code(ran),
        )
        lines.append(f"| {' | '.join([*cells, *verdicts])} |")
    numbers = ", ".join(map(str, SENT_BY_OURS))
    lines += [
        "", f"Of the last four groups, {numbers} send sums or gathers of floating-point numbers only:",
        "`all_reduce` and `all_gather` serve these too.",
    ]  # fmt: skip
    return "\n".join(lines)


def programs() -> str:
    """Return the source of all solutions, a block for each group; what they share is in the first block."""
    _, _, source = inspect.getsource(solutions).split('"""', 2)
    group_of = {shown(each).__name__: each.group for each in SOLVED}
    blocks: dict[str, list[str]] = {group: [] for group in ("", *GROUPS)}
    for part in source.strip().split("\n\n\n"):
        name = part.removeprefix("def ").partition("(")[0]
        numbers = ", ".join(str(each.number) for each in SOLVED if shown(each).__name__ == name)
        blocks[group_of.get(name, "")].append(f"# {numbers}\n{part}" if numbers else part)
    said = []
    for group, parts in blocks.items():
        said += [f"## {group[0].upper()}{group[1:]}", ""] if group else []
        said += ["```python", "\n\n\n".join(parts), "```", ""]
    return "\n".join(said)


def test_the_page_is_generated(outcomes: dict[int, list[dict[int, Outcome]]]) -> None:
    as_written(PAGE, "tables", tables(outcomes), "FUSEDTP_PKB")
    as_written(PAGE, "solutions", programs(), "FUSEDTP_PKB")
