"""The gate refuses wrong results in every variant and direction, and passes right ones."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp import reference
from fusedtp.bench import problem
from fusedtp.bench.cases import BOUNDS, DIRECTIONS, DTYPES, EVERY_FLOAT8, FLOAT8, MXFP8, OPS, SEQUENTIAL, Case
from fusedtp.bench.jobs import Job
from fusedtp.bench.operands import Results, Runner
from fusedtp.bench.problem import Problem
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.store import Outcome, rows_of
from fusedtp.bench.suites import missing
from fusedtp.bench.sweep import run_job
from fusedtp.bench.timing import Verdict, gate, measure_checked
from fusedtp.machine import describe

from .harness import LARGE, spread

CPU = torch.device("cpu")
# By number of ranks; even for two, as torch's styles require.
SHAPES = {1: (33, 34, 35), 2: (70, 66, 96), 3: (70, 66, 97)}
SHAPE = SHAPES[2]
VARIANTS = (*BOUNDS, "unfused", SEQUENTIAL, "decomposed", "auto", "dtensor")
SCALED = ("matmul", "unfused", SEQUENTIAL, "decomposed")

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


def another_rows_scale(out: Tensor, rank: int) -> Tensor:
    # Scales of random rows are a few percent apart.
    return torch.cat([out[:-1], out[-1:] * 1.03])


def another_blocks_scale(out: Tensor, rank: int) -> Tensor:
    return torch.cat([out[:-1], out[-1:] * 2])


class Planted(Problem):
    """A problem whose variants all give a result with the part at `place` changed by `plant`."""

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
    group: ProcessGroup, dtype: str, variants: tuple[str, ...], directions: tuple[str, ...], plant: Plant | None = None,
    place: int = 0,
) -> Verdicts:  # fmt: skip
    """Return the gate's verdicts on every op; with `plant`, on changed results."""
    kind = type("Wrong", (Planted,), {"plant": staticmethod(plant), "place": place}) if plant else Problem
    found = {}
    with torch.no_grad():
        for op in OPS:
            case = Case(op, *SHAPES[group.size()], dtype, group.size())
            operands = kind(case, group, CPU)
            for direction in directions:
                runs = [name for name in variants if not missing(name, case, direction, 0)]
                for variant, verdict in gate(operands, runs, group, direction).items():
                    found[op, direction, variant] = verdict
                if plant is None:
                    # Right ones stay right while the operands change.
                    runners = {variant: operands.runner(variant, direction) for variant in runs}
                    timed = measure_checked(operands, runners, group, direction, rounds=2)
                    found |= {(op, direction, variant): verdict for variant, (_, verdict) in timed.items()}
                    assert set(operands.doubled.values()) <= {1, 2}
                    assert bool(operands.doubled) == bool(runs)
                    operands.forget_runners()
                    assert not operands.doubled
    return found


@pytest.mark.parametrize(
    ("plant", "place", "dtype", "variants"),
    [
        (tile_missing, 0, "float32", VARIANTS),
        (last_row_wrong, -1, "float32", VARIANTS),
        (tile_missing, 0, FLOAT8, SCALED),
        (another_rows_scale, 0, FLOAT8, SCALED),
        (another_blocks_scale, 0, MXFP8, SCALED),
    ],
)
def test_every_variant_is_refused_when_a_result_or_gradient_is_wrong(
    pool: RankPool, plant: Plant, place: int, dtype: str, variants: tuple[str, ...]
) -> None:
    directions = DIRECTIONS if dtype == "float32" else ("forward",)
    first, second = pool.run(verdicts_of, dtype, variants, directions, plant, place, world_size=2)
    # dtensor has no all-reduce, and backward of that op sends nothing
    absent = len(DIRECTIONS) + 1 if dtype == "float32" else 0
    assert len(first) == len(OPS) * len(directions) * len(variants) - absent
    for which, verdict in first.items():
        assert "elements are wrong" in verdict.error, (which, verdict)
        assert verdict.error == second[which].error
    if plant is tile_missing:
        assert "256 of" in first["all_gather_matmul", directions[-1], "unfused"].error
    gradient = first["matmul_reduce_scatter", directions[-1], "decomposed"].error
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
    for verdicts in pool.run(verdicts_of, "float32", ("unfused", "dtensor"), ("forward",), plant, world_size=2):
        for verdict in verdicts.values():
            assert text in verdict.error


def job_with_one_planted(group: ProcessGroup, wrong: str, plant: Plant, job: Job) -> list[Outcome]:
    class OneWrong(Problem):
        def runner(self, variant: str, direction: str = "forward") -> Runner:
            right = super().runner(variant, direction)
            if variant != wrong:
                return right
            return lambda: tuple([plant(part, group.rank()) for part in right() if isinstance(part, Tensor)])

    with mock.patch.object(problem, "Problem", OneWrong):
        return run_job(group, job)


def unfinished(out: Tensor, rank: int) -> Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(out)  # type: ignore[no-any-return]


def written_later(out: Tensor, rank: int) -> Tensor:
    late = torch.empty_like(out)
    threading.Timer(0.05, late.copy_, (out,)).start()
    return late


@pytest.mark.parametrize(
    ("plant", "text"),
    [(unfinished, "y is an unfinished AsyncCollectiveTensor"), (written_later, "elements are wrong")],
)
def test_an_unfinished_result_is_refused(pool: RankPool, plant: Plant, text: str) -> None:
    for verdicts in pool.run(verdicts_of, "float32", ("unfused", "dtensor"), ("forward",), plant, world_size=2):
        for verdict in verdicts.values():
            assert text in verdict.error


def kinds_of_results(group: ProcessGroup) -> set[str]:
    """Return the types of all results of torch's styles, and of ours."""
    found = set()
    with torch.no_grad():
        for op, direction in itertools.product(OPS[:2], DIRECTIONS):
            operands = Problem(Case(op, *SHAPE, "float32", group.size()), group, CPU)
            for variant in ("unfused", "decomposed", "dtensor"):
                found |= {type(out).__name__ for out in operands.runner(variant, direction)()}
    return found


def test_every_runner_returns_finished_tensors(pool: RankPool) -> None:
    assert pool.run(kinds_of_results, world_size=2) == [{"Tensor"}] * 2


def ops_of_comm(group: ProcessGroup) -> list[str]:
    """Return the operators that run inside the clock for the backend's all-reduce alone."""
    operands = Problem(Case("matmul_all_reduce", *SHAPE, "float32", group.size()), group, CPU)
    run = operands.runner("comm")
    with torch.no_grad(), torch.profiler.profile() as profile:
        run()
    return [event.name for event in profile.events() if event.name.startswith("aten::")]


def test_the_all_reduce_alone_is_timed_without_a_copy(pool: RankPool) -> None:
    for names in pool.run(ops_of_comm, world_size=2):
        assert not {"aten::clone", "aten::copy_"} & set(names), names


@pytest.mark.parametrize(
    ("wrong", "plant"), spread(["unfused", "decomposed", "dtensor"], [scaled, tile_missing, last_row_wrong])
)
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
        # It has not been timed.
        assert "right at first" not in row.gate
        # no ratio to a refused variant
        assert not (wrong == "unfused" and row.speedup_vs_unfused is not None)


Cheat = Callable[[Runner, Problem], Runner]


def keeps_first(run: Runner, operands: Problem) -> Runner:
    kept: list[Results] = []

    def cheat() -> Results:
        kept[:] = kept or [run()]
        return kept[0]

    return cheat


def every_second_call(run: Runner, operands: Problem) -> Runner:
    kept: list[Results] = []

    def cheat() -> Results:
        kept.append(kept[-1] if len(kept) % 2 else run())
        return kept[-1]

    return cheat


def zeros_later(run: Runner, operands: Problem) -> Runner:
    calls = itertools.count()
    return lambda: run() if next(calls) < 3 else tuple([torch.zeros_like(part) for part in run()])  # type: ignore[arg-type]


def one_number_later(run: Runner, operands: Problem) -> Runner:
    calls = itertools.count()
    return lambda: run() if next(calls) < 3 else (torch.zeros(1),)


def fails_later(run: Runner, operands: Problem) -> Runner:
    calls = itertools.count()
    return lambda: run() if next(calls) < 3 else (None,)  # type: ignore[return-value]


def misses_a_chunk_at_last(run: Runner, operands: Problem) -> Runner:
    # Wrong in the last of 3 rounds alone, in one row.
    calls = itertools.count()
    return lambda: tuple([
        last_row_wrong(part, 0) if next_call == 5 else part  # type: ignore[arg-type]
        for next_call in [next(calls)] for part in run()
    ])  # fmt: skip


CHEATS = [keeps_first, every_second_call, zeros_later, one_number_later, fails_later, misses_a_chunk_at_last]


def job_with_a_cheat(group: ProcessGroup, wrong: str, cheat: Cheat, job: Job) -> list[Outcome]:
    class Cheated(Problem):
        def _runner(self, variant: str, direction: str) -> Runner:
            run = super()._runner(variant, direction)
            return cheat(run, self) if variant == wrong else run

    with mock.patch.object(problem, "Problem", Cheated):
        return run_job(group, job)


@pytest.mark.parametrize(("op", "wrong", "cheat"), spread(OPS, ["decomposed", "unfused"], CHEATS))
def test_what_is_wrong_in_the_timed_rounds_alone_gets_no_number(
    pool: RankPool, op: str, wrong: str, cheat: Cheat
) -> None:
    job = Job(Case(op, *SHAPE, "float32", 2), (*BOUNDS, "unfused", "decomposed"), True, 0.0, 3, DIRECTIONS)
    outcomes, others = pool.run(job_with_a_cheat, wrong, cheat, job, world_size=2)
    assert [each.gate for each in outcomes] == [each.gate for each in others]
    for row in rows_of(job.case, outcomes, describe()):
        if row.variant == wrong:
            assert row.gate.startswith("right at first, but not in the timed rounds: "), (cheat, row)
            assert row.median_ms is row.speedup_vs_unfused is None
        else:
            assert row.passed == (row.median_ms is not None), row


@pytest.mark.parametrize(
    ("dtype", "world_size"),
    [*spread(DTYPES, [2, 1, 3]), *spread([FLOAT8, MXFP8], [3, 1, 2] if LARGE else [3, 1])],
)
def test_what_is_right_passes(pool: RankPool, world_size: int, dtype: str) -> None:
    """The same for our own kernels with preset flags; float8 operands with scales have no backward pass."""
    is_float8 = dtype in EVERY_FLOAT8
    # Interpreted kernels are slow: on several ranks in a long run, and the sweep's tests have float32 on two ranks.
    own = () if is_float8 or dtype == "float32" or (world_size > 1 and not LARGE) else ("own_matmul",)
    variants = (*VARIANTS, *own)
    directions = ("forward",) if is_float8 else DIRECTIONS
    everyone = pool.run(verdicts_of, dtype, variants, directions, world_size=world_size)
    ran = {variant: {op for op, _, each in everyone[0] if each == variant} for variant in variants}
    has_dtensor = world_size == 2 and not is_float8
    assert ran.pop("dtensor") == ({"all_gather_matmul", "matmul_reduce_scatter"} if has_dtensor else set())
    # One rank has nothing to send.
    for name in (SEQUENTIAL, "comm", "decomposed"):
        assert ran.pop(name) == (set(OPS) if world_size > 1 else set())
    assert not own or ran.pop("own_matmul") == set(OPS)
    assert all(ops == set(OPS) for ops in ran.values())
    for verdicts in everyone:
        assert is_float8 or verdicts == everyone[0]
        for which, verdict in verdicts.items():
            assert not verdict.error, (which, verdict)
            assert 0 <= verdict.error_ratio <= 1, (which, verdict)
            if is_float8:
                # A gather alone moves the same bytes.
                assert (verdict.error_ratio == 0) == (which[0] == OPS[0] and which[2] == "comm"), which


def on_gpus_alone(group: ProcessGroup, variant: str) -> list[float]:
    """Return the errors, relative to the bound, of a variant that only GPUs time, in all its ops."""
    found = []
    for op, direction in itertools.product(OPS, DIRECTIONS):
        case = Case(op, *SHAPE, "bfloat16", group.size())
        if not missing(variant, case, direction, 8):
            problem = Problem(case, group, CPU)
            found.append(problem.check(variant, problem.runner(variant, direction)(), direction)[1])
    return found


@pytest.mark.parametrize(("variant", "num_ops"), [("tree", len(OPS)), ("switch", 1)])
def test_what_is_timed_on_gpus_alone_passes(pool: RankPool, variant: str, num_ops: int) -> None:
    for found in pool.run(on_gpus_alone, variant, world_size=2):
        assert len(found) == num_ops * len(DIRECTIONS)
        assert all(0 <= share <= 1 for share in found)


@pytest.mark.parametrize(
    ("dtype", "k_sizes", "block"),
    spread([torch.float32, torch.bfloat16], [(40,), (13, 0, 27)], [1 << 23, 100, 1, 1]),
)
def test_oracle_in_blocks_is_the_reference_and_allows_little_more(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, k_sizes: tuple[int, ...], block: int
) -> None:
    monkeypatch.setattr(reference, "BLOCK", block)
    random = torch.Generator().manual_seed(1)
    a, b = torch.randn(17, 40, generator=random).to(dtype), torch.randn(40, 23, generator=random).to(dtype)
    product = reference.ExactProduct(a, b, k_sizes)
    torch.testing.assert_close(product.expected, reference.matmul(a, b))
    strict = reference.bound(a, b, dtype, k_sizes=k_sizes, sum_dtype=dtype)
    # an error just inside the reference's bound passes; a few times as much does not
    out = product.expected + 0.999 * strict
    assert product.check(out, dtype, "inside")[1] <= 1
    out = product.expected.clone()
    out[16, 22] += 6 * strict[16, 22]
    with pytest.raises(AssertionError, match=r"outside: 1 of 391 elements are wrong, the worst at \(16, 22\)"):
        product.check(out, dtype, "outside")
    out[16, 22] = torch.nan
    with pytest.raises(AssertionError, match=r"nan: 1 of 391"):
        product.check(out, dtype, "nan")
