"""The gate refuses what is wrong, and the ranks agree on verdicts, rounds and times."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from fusedtp.bench.cases import BOUNDS, CHECK_SHAPES, DTYPES, OPS, SHAPES, Case, Problem
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.sweep import Request, plan
from fusedtp.bench.timing import MAX_ROUNDS, MIN_ROUNDS, Timing, Verdict, gate, measure
from torch import Tensor
from torch.distributed import ProcessGroup

CPU = torch.device("cpu")
SHAPE = (70, 66, 96)


def scaled(out: Tensor, rank: int) -> Tensor:
    return out / 2


def tile_missing(out: Tensor, rank: int) -> Tensor:
    out = out.clone()
    out[:16, :16] = 0
    return out


def last_row_wrong(out: Tensor, rank: int) -> Tensor:
    out = out.clone()
    out[-1] = out[0]
    return out


def nan_on_rank_1(out: Tensor, rank: int) -> Tensor:
    out = out.clone()
    if rank == 1:
        out[3, 4] = torch.nan
    return out


def short_on_rank_1(out: Tensor, rank: int) -> Tensor:
    return out[:-1] if rank == 1 else out


def refused(out: Tensor, rank: int) -> Tensor:
    raise ValueError("planted refusal")


class Planted(Problem):
    """A problem whose variants all give a result that `plant` has changed."""

    plant: Callable[[Tensor, int], Tensor]

    def runner(self, variant: str) -> Callable[[], Tensor]:
        right = super().runner(variant)
        return lambda: type(self).plant(right(), self.group.rank())


def planted_verdict(group: ProcessGroup, op: str, plant: Callable[[Tensor, int], Tensor], variant: str) -> Verdict:
    kind = type("Wrong", (Planted,), {"plant": staticmethod(plant)})
    with torch.no_grad():
        return gate(kind(Case(op, *SHAPE, "float32", group.size()), group, CPU), [variant], group)[variant]


def true_verdicts(group: ProcessGroup, case: Case, variants: tuple[str, ...]) -> dict[str, Verdict]:
    with torch.no_grad():
        return gate(Problem(case, group, CPU), variants, group)


def sleeping(group: ProcessGroup, rounds: int | None) -> tuple[dict[str, Timing], list[str]]:
    """Rank 1 is five times slower than rank 0; the calls in order."""
    calls: list[str] = []

    def runner(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            time.sleep(seconds * (5 if dist.get_rank(group) == 1 else 1))

        return run

    runners = {"a": runner("a", 0.001), "b": runner("b", 0.002)}
    return measure(runners, group, CPU, seconds=0.12, rounds=rounds), calls


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (scaled, "elements are wrong"),
        (tile_missing, "256 of"),
        (last_row_wrong, "elements are wrong"),
        (nan_on_rank_1, "rank 1: 1 of"),
        (short_on_rank_1, "rank 1: shape"),
        (refused, "ValueError: planted refusal"),
    ],
)
def test_gate_refuses_what_is_wrong(pool: RankPool, op: str, plant: Callable[[Tensor, int], Tensor], text: str) -> None:
    verdicts = pool.run(planted_verdict, op, plant, "unfused", world_size=2)
    assert [text in verdict.error for verdict in verdicts] == [True, True], verdicts
    assert verdicts[0].error == verdicts[1].error


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("variant", BOUNDS)
def test_gate_judges_the_bounds_too(pool: RankPool, op: str, variant: str) -> None:
    for verdict in pool.run(planted_verdict, op, last_row_wrong, variant, world_size=2):
        assert "wrong" in verdict.error


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("op", OPS)
def test_gate_passes_what_is_right(pool: RankPool, op: str, world_size: int) -> None:
    for dtype in DTYPES:
        case = Case(op, 70, 66, 97, dtype, world_size)
        everyone = pool.run(true_verdicts, case, (*BOUNDS, "unfused", "decomposed"), world_size=world_size)
        for verdicts in everyone:
            assert verdicts == everyone[0]
            for variant, verdict in verdicts.items():
                assert not verdict.error, (variant, verdict)
                assert 0 <= verdict.error_ratio <= 1, (variant, verdict)


@pytest.mark.parametrize("rounds", [None, 7])
def test_ranks_run_the_same_rounds_and_report_the_slowest(pool: RankPool, rounds: int | None) -> None:
    (first, calls), (second, other_calls) = pool.run(sleeping, rounds, world_size=2)
    assert first == second
    assert calls == other_calls
    assert {timing.rounds for timing in first.values()} == {(len(calls) - 2) // 2}
    # one round takes at least 3 ms on rank 0, which decides: alone, rank 1 would stop at fewer
    assert first["a"].rounds == rounds if rounds else MIN_ROUNDS < first["a"].rounds <= MAX_ROUNDS
    # sleep never ends early: each time is rank 1's
    assert first["a"].p20_ms >= 5
    assert first["b"].p20_ms >= 10
    assert all(timing.p20_ms <= timing.median_ms <= timing.p80_ms <= timing.total_ms for timing in first.values())


def test_variants_take_turns(pool: RankPool) -> None:
    ((_, calls),) = pool.run(sleeping, 4, world_size=1)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab" + "ba"


def test_plan_never_times_fused_without_a_gpu_for_every_rank() -> None:
    for num_gpus in (0, 1, 2):
        for job in plan(Request(world_sizes=(1, 2, 4)), num_gpus):
            if job.timed:
                assert "fused" not in job.variants or job.case.world_size <= num_gpus
                assert {"matmul", "comm", "unfused"} <= set(job.variants)
            else:
                assert (job.case.M, job.case.N, job.case.K) in CHECK_SHAPES
    assert not any(job.timed for job in plan(Request(world_sizes=(2,)), 1))


def test_plan_of_named_and_given_sizes() -> None:
    request = Request(
        world_sizes=(2,), ops=OPS[:1], schedules=("decomposed",), shape_sets=("comm",), shapes=((8, 8, 8),)
    )
    jobs = plan(request, 0)
    assert [(job.case.M, job.case.N, job.case.K) for job in jobs] == [*SHAPES["comm"][OPS[0]], (8, 8, 8)]
    assert {job.variants for job in jobs} == {(*BOUNDS, "unfused", "decomposed")}


def test_plan_by_default_covers_every_op_world_size_and_dtype() -> None:
    jobs = plan(Request(), 0)
    assert {(job.case.op, job.case.world_size) for job in jobs if job.timed} == {
        (op, w) for op in OPS for w in (1, 2, 4)
    }
    assert {(job.case.op, job.case.world_size, job.case.dtype) for job in jobs if not job.timed} == {
        (op, w, dtype) for op in OPS for w in (1, 2, 4) for dtype in ("float32", "bfloat16", "float16")
    }
    assert {job.case.dtype for job in jobs if job.timed} == {"float32", "bfloat16", "float16"}


@pytest.mark.parametrize("bad", [{"op": "all"}, {"dtype": "float64"}, {"M": 0}])
def test_case_refuses(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Case(**{"op": OPS[0], "M": 1, "N": 1, "K": 1, "dtype": "float32", "world_size": 1, **bad})  # type: ignore[arg-type]
