"""`paths` lists the ops that ran, `require` refuses other schedules, and a profiler shows a range for each op."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.choose import paths

from .harness import on_ranks

SCHEDULES = ("fused", "decomposed", "unfused")
# Forward and backward of a column-parallel linear with a weight's gradient, and a row-parallel one.
STEP = ["all_gather_matmul", "matmul_reduce_scatter", "all_gather_matmul", "matmul_reduce_scatter"]


def step(group: ProcessGroup, schedule: str = "auto", seed: int = 0) -> None:
    n = group.size()
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(8, 16, generator=generator).requires_grad_()
    up, down = torch.rand(32, 16, generator=generator), torch.rand(16, 32, generator=generator)
    h = fusedtp.all_gather_linear(x, up, group=group, schedule=schedule)
    y = fusedtp.linear_reduce_scatter(h, down, group=group, schedule=schedule)
    y.sum().backward()
    assert y.shape == (8, 16)
    assert h.shape == (8 * n, 32)


def all_of_a_step(group: ProcessGroup) -> None:
    for schedule in SCHEDULES:
        for _ in range(2):
            fusedtp.paths()
            step(group, schedule)
            ran = fusedtp.paths()
            assert [each.op for each in ran] == STEP
            assert {each.schedule for each in ran} == {schedule}
            assert {each.reason for each in ran} == {"asked for"}
            assert ran[-1] == fusedtp.last_path()
            assert fusedtp.paths() == []
            n = group.size()
            assert ran[0].shapes == f"a [8, 16], b [16, 32], float32, {n} ranks"
            assert ran[1].shapes == f"a [{8 * n}, 32], b [32, 16], float32, {n} ranks"


@pytest.mark.parametrize("world_size", [2, 3])
def test_paths_are_those_of_all_ops_of_a_step(pool: RankPool, world_size: int) -> None:
    pool.run(all_of_a_step, world_size=world_size)


@on_ranks(2)
def test_paths_of_a_long_run_are_bounded(group: ProcessGroup) -> None:
    x = torch.ones(1, 1)
    for _ in range(paths.MOST + 10):
        paths.record(fusedtp.Path("all_reduce", "unfused", "planted"))
    fusedtp.all_reduce(x, group=group)
    ran = fusedtp.paths()
    assert len(ran) == paths.MOST
    assert ran[-1].op == "all_reduce"
    assert ran[-1].schedule != "unfused"


def refuses(group: ProcessGroup) -> list[str]:
    """Return the errors of ops that may not run, which ran before and run again afterwards."""
    found = []
    for wanted in (("fused",), ("unfused",), ("fused", "unfused")):
        step(group)
        fusedtp.paths()
        with fusedtp.require(*wanted), pytest.raises(RuntimeError) as error:
            step(group)
        found.append(str(error.value))
        assert fusedtp.paths() == [], "an op ran"
        step(group)
    with fusedtp.require("decomposed"), fusedtp.require("fused", "decomposed"):
        step(group)
        with pytest.raises(RuntimeError, match=r"would run unfused.*require\('decomposed'\).*: asked for"):
            step(group, "unfused")
    requirement = fusedtp.require("fused")
    for _ in range(2):
        requirement.undo()
    step(group)
    return found


def test_an_op_that_would_run_otherwise_is_refused_with_the_reason(pool: RankPool) -> None:
    results = pool.run(refuses, world_size=2)
    assert results[0] == results[1]
    for told, wanted in zip(results[0], ("'fused'", "'unfused'", "'fused', 'unfused'"), strict=True):
        assert "all_gather_matmul of a [8, 16], b [16, 32], float32, 2 ranks would run decomposed" in told
        assert f"fusedtp.require({wanted}) is on" in told
        assert "ranks share memory" in told


@on_ranks(1)
def test_one_rank_is_no_exception(group: ProcessGroup) -> None:
    step(group)
    with fusedtp.require("fused"), pytest.raises(RuntimeError, match="one rank has nothing to send"):
        step(group)


@pytest.mark.parametrize("wanted", [(), ("auto",), ("fused", "fast"), (["fused"],)])
def test_other_schedules_are_refused(wanted: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="one or more of 'fused', 'decomposed', 'unfused'"):
        fusedtp.require(*wanted)


def ranges(group: ProcessGroup) -> None:
    step(group)
    for schedule in SCHEDULES:
        fusedtp.paths()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step(group, schedule)
        expected = Counter(map(paths.profiled_as, fusedtp.paths()))
        names = Counter(event.name for event in profiled.events() if event.name.startswith("fusedtp::"))
        assert names & expected == expected, (names, expected)


def test_a_profiler_has_a_range_of_each_op(pool: RankPool) -> None:
    pool.run(ranges, world_size=2)


def named_alone(group: ProcessGroup) -> str:
    fusedtp.all_gather(torch.ones(2, 2), group=group, schedule="fused")
    return str(fusedtp.last_path())


def test_one_rank_says_so_also_where_a_schedule_is_named(pool: RankPool) -> None:
    (said,) = pool.run(named_alone, world_size=1)
    assert "schedule='fused', reason='asked for; one rank has nothing to send'" in said
