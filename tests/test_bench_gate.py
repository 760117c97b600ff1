"""The gate refuses what is wrong, in every variant and direction, and passes what is right."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp import reference
from fusedtp.bench import oracle, problem
from fusedtp.bench.cases import BOUNDS, DIRECTIONS, DTYPES, FLOAT8, MXFP8, OPS, Case
from fusedtp.bench.jobs import Job, missing
from fusedtp.bench.machine import describe
from fusedtp.bench.operands import Results, Runner
from fusedtp.bench.problem import Problem
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.store import Outcome, rows_of
from fusedtp.bench.sweep import run_job
from fusedtp.bench.timing import Verdict, gate

from .harness import spread

CPU = torch.device("cpu")
# even on two ranks, which torch's styles need
SHAPE = (70, 66, 96)
VARIANTS = (*BOUNDS, "unfused", "decomposed", "auto", "dtensor")

Plant = Callable[[Tensor, int], Tensor]
Verdicts = dict[tuple[str, str, str], Verdict]


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
    """A problem whose variants all give a result of which `plant` has changed the part at `place`."""

    plant: Plant
    place: int

    def runner(self, variant: str, direction: str = "forward") -> Runner:
        right = super().runner(variant, direction)

        def wrong() -> Results:
            results = list(right())
            part = results[self.place]
            assert isinstance(part, Tensor)
            results[self.place] = type(self).plant(part, self.group.rank())
            return tuple(results)

        return wrong


def verdicts_of(
    group: ProcessGroup,
    kind: type[Problem],
    shape: tuple[int, int, int],
    dtype: str,
    variants: tuple[str, ...],
    directions: tuple[str, ...] = DIRECTIONS,
) -> Verdicts:
    found = {}
    with torch.no_grad():
        for op in OPS:
            case = Case(op, *shape, dtype, group.size())
            operands = kind(case, group, CPU)
            for direction in directions:
                runs = [name for name in variants if not missing(name, case, direction, 0)]
                for variant, verdict in gate(operands, runs, group, direction).items():
                    found[op, direction, variant] = verdict
    return found


def planted(
    group: ProcessGroup, plant: Plant, place: int, variants: tuple[str, ...], directions: tuple[str, ...]
) -> Verdicts:
    kind = type("Wrong", (Planted,), {"plant": staticmethod(plant), "place": place})
    return verdicts_of(group, kind, SHAPE, "float32", variants, directions)


def right(
    group: ProcessGroup, dtype: str, shape: tuple[int, int, int], variants: tuple[str, ...] = VARIANTS
) -> Verdicts:
    return verdicts_of(group, Problem, shape, dtype, variants)


@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("plant", [scaled, tile_missing, last_row_wrong])
def test_every_variant_is_refused_when_a_result_or_gradient_is_wrong(pool: RankPool, plant: Plant, place: int) -> None:
    first, second = pool.run(planted, plant, place, VARIANTS, DIRECTIONS, world_size=2)
    # dtensor has no all-reduce, and the gradients of that op send nothing
    assert len(first) == len(OPS) * len(DIRECTIONS) * len(VARIANTS) - len(DIRECTIONS) - 1
    for which, verdict in first.items():
        assert "elements are wrong" in verdict.error, (which, verdict)
        assert verdict.error == second[which].error
    if plant is tile_missing:
        assert "256 of" in first["all_gather_matmul", "backward", "unfused"].error
    gradient = first["matmul_reduce_scatter", "both", "decomposed"].error
    assert ("y: " if place == 0 else "dw: ") in gradient


@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (nan_on_rank_1, "rank 1: y: 1 of"),
        (short_on_rank_1, "rank 1: y: shape"),
        (refused, "ValueError: planted refusal"),
    ],
)
def test_one_rank_is_enough_to_refuse(pool: RankPool, plant: Plant, text: str) -> None:
    for verdicts in pool.run(planted, plant, 0, ("unfused", "dtensor"), ("forward",), world_size=2):
        for verdict in verdicts.values():
            assert text in verdict.error


def job_with_one_planted(group: ProcessGroup, wrong: str, plant: Plant, job: Job) -> list[Outcome]:
    class OneWrong(Problem):
        def runner(self, variant: str, direction: str = "forward") -> Runner:
            right = super().runner(variant, direction)
            if variant != wrong:
                return right
            return lambda: tuple([plant(part, group.rank()) for part in right() if isinstance(part, Tensor)])

    kept, problem.Problem = problem.Problem, OneWrong  # type: ignore[misc]
    try:
        return run_job(group, job)
    finally:
        problem.Problem = kept  # type: ignore[misc]


@pytest.mark.parametrize("wrong", ["unfused", "decomposed", "dtensor"])
@pytest.mark.parametrize("plant", [scaled, tile_missing, last_row_wrong])
def test_a_wrong_provider_gets_an_error_row_and_no_number(pool: RankPool, plant: Plant, wrong: str) -> None:
    variants = (*BOUNDS, "unfused", "decomposed", "dtensor")
    job = Job(Case("all_gather_matmul", *SHAPE, "float32", 2), variants, True, 0.0, 3, ("forward", "backward"))
    first, second = pool.run(job_with_one_planted, wrong, plant, job, world_size=2)
    assert [(each.gate, each.timing) for each in first] == [(each.gate, each.timing) for each in second]
    rows = rows_of(job.case, first, describe())
    assert [(row.direction, row.variant) for row in rows] == [(d, v) for d in job.directions for v in variants]
    for row in rows:
        assert row.failed is (row.variant == wrong)
        assert (row.median_ms is None) is row.failed
        assert ("elements are wrong" in row.gate) is row.failed
        # nor is there a ratio to what was refused
        assert not (wrong == "unfused" and row.speedup_vs_unfused is not None)


@pytest.mark.parametrize(("dtype", "world_size"), spread(DTYPES, [2, 3, 1]))
def test_what_is_right_passes(pool: RankPool, world_size: int, dtype: str) -> None:
    shape = SHAPE if world_size == 2 else (70, 66, 97)
    everyone = pool.run(right, dtype, shape, world_size=world_size)
    dtensor = {op for op, _, variant in everyone[0] if variant == "dtensor"}
    assert dtensor == ({"all_gather_matmul", "matmul_reduce_scatter"} if world_size == 2 else set())
    for verdicts in everyone:
        assert verdicts == everyone[0]
        for which, verdict in verdicts.items():
            assert not verdict.error, (which, verdict)
            assert 0 <= verdict.error_ratio <= 1, (which, verdict)


def as_a_tree(group: ProcessGroup) -> list[float]:
    """The variant that is timed on GPUs alone, and what is told of others."""
    found = []
    for op, direction in itertools.product(OPS, DIRECTIONS):
        case = Case(op, *SHAPE, "bfloat16", group.size())
        problem = Problem(case, group, CPU)
        found.append(problem.check("tree", problem.runner("tree", direction)(), direction)[1])
        for other, gpus, said in (
            (case, 8, ""), (case, 0, "interpreted on a CPU"), (replace(case, world_size=3), 8, "1, 2, 4 or 8 ranks"),
            (replace(case, N=67, K=97), 8, "as long"), (replace(case, dtype=FLOAT8), 8, "no float8"),
        ):  # fmt: skip
            reason = missing("tree", other, direction, gpus)
            assert said in reason
            assert bool(said) == bool(reason)
    return found


def test_the_order_of_a_tree_passes(pool: RankPool) -> None:
    assert all(0 <= share <= 1 for found in pool.run(as_a_tree, world_size=2) for share in found)


def through_the_switch(group: ProcessGroup) -> list[float]:
    """As above, of the op that it is for."""
    found = []
    for op, direction in itertools.product(OPS, DIRECTIONS):
        case = Case(op, *SHAPE, "bfloat16", group.size())
        problem, is_sum = Problem(case, group, CPU), case.kind == "all_reduce"
        assert ("all-reduces alone" in missing("switch", case, direction, 8)) != is_sum
        if is_sum:
            found.append(problem.check("switch", problem.runner("switch", direction)(), direction)[1])
            assert not missing("switch", case, direction, 8)
            assert "interpreted on a CPU" in missing("switch", case, direction, 0)
            assert "no float8" in missing("switch", replace(case, dtype=FLOAT8), direction, 8)
    return found


def test_sums_in_the_switch_pass(pool: RankPool) -> None:
    for found in pool.run(through_the_switch, world_size=2):
        assert found
        assert all(0 <= share <= 1 for share in found)


def float8(
    group: ProcessGroup, shape: tuple[int, int, int], plant: Plant | None = None, variants: tuple[str, ...] = VARIANTS,
    dtype: str = FLOAT8,
) -> Verdicts:  # fmt: skip
    kind = Problem if plant is None else type("Wrong", (Planted,), {"plant": staticmethod(plant), "place": 0})
    return verdicts_of(group, kind, shape, dtype, variants, ("forward",))


@pytest.mark.parametrize("dtype", [FLOAT8, MXFP8])
@pytest.mark.parametrize(("world_size", "shape"), [(1, (33, 34, 35)), (2, (64, 32, 96)), (3, (70, 66, 97))])
def test_float8_with_scales_passes(
    pool: RankPool, world_size: int, shape: tuple[int, int, int], dtype: str
) -> None:  # fmt: skip
    everyone = pool.run(float8, shape, None, VARIANTS, dtype, world_size=world_size)
    assert {variant for _, _, variant in everyone[0]} == {*BOUNDS, "unfused", "decomposed", "auto"}
    for verdicts in everyone:
        for which, verdict in verdicts.items():
            assert not verdict.error, (which, verdict)
            # What is gathered alone is the same bytes.
            assert (verdict.error_ratio == 0) == (which[0] == OPS[0] and which[2] == "comm"), which


def another_rows_scale(out: Tensor, rank: int) -> Tensor:
    # Scales of random rows are a few percent apart.
    return torch.cat([out[:-1], out[-1:] * 1.03])


def another_blocks_scale(out: Tensor, rank: int) -> Tensor:
    return torch.cat([out[:-1], out[-1:] * 2])


@pytest.mark.parametrize(
    ("dtype", "plant"),
    [*((FLOAT8, plant) for plant in (scaled, tile_missing, another_rows_scale)), (MXFP8, another_blocks_scale)],
)
def test_wrong_float8_is_refused(pool: RankPool, dtype: str, plant: Plant) -> None:
    for verdicts in pool.run(float8, SHAPE, plant, ("matmul", "unfused", "decomposed"), dtype, world_size=2):
        assert len(verdicts) == 3 * len(OPS)
        for which, verdict in verdicts.items():
            assert "elements are wrong" in verdict.error, (which, verdict)


@pytest.mark.parametrize(("world_size", "dtype"), spread([1, 3], ["float32", "bfloat16"]))
def test_own_kernels_with_preset_flags_pass(pool: RankPool, world_size: int, dtype: str) -> None:
    everyone = pool.run(right, dtype, (70, 66, 97), ("own_matmul",), world_size=world_size)
    assert len(everyone[0]) == len(OPS) * len(DIRECTIONS)
    for which, verdict in everyone[0].items():
        assert not verdict.error, (which, verdict)


@pytest.mark.parametrize("block", [1, 100, 1 << 23])
@pytest.mark.parametrize("k_sizes", [(40,), (13, 0, 27)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_oracle_in_blocks_is_the_reference_and_allows_little_more(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, k_sizes: tuple[int, ...], block: int
) -> None:
    monkeypatch.setattr(oracle, "BLOCK", block)
    random = torch.Generator().manual_seed(1)
    a, b = torch.randn(17, 40, generator=random).to(dtype), torch.randn(40, 23, generator=random).to(dtype)
    product = oracle.ExactProduct(a, b, k_sizes)
    torch.testing.assert_close(product.expected, reference.matmul(a, b))
    strict = reference.bound(a, b, dtype, k_sizes=k_sizes, sum_dtype=dtype)
    # just inside what the reference allows passes; a few times as much does not
    out = product.expected + 0.999 * strict
    assert product.check(out, dtype, "inside")[1] <= 1
    out = product.expected.clone()
    out[16, 22] += 6 * strict[16, 22]
    with pytest.raises(AssertionError, match=r"outside: 1 of 391 elements are wrong, the worst at \(16, 22\)"):
        product.check(out, dtype, "outside")
    out[16, 22] = torch.nan
    with pytest.raises(AssertionError, match=r"nan: 1 of 391"):
        product.check(out, dtype, "nan")
