"""The jobs of a request; models' matmuls; ratios of medians; totals of blocks."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusedtp import machine
from fusedtp.bench import arguments, peers, providers, tables
from fusedtp.bench.cases import (
    BOUNDS,
    CHECK_SHAPES,
    DIRECTIONS,
    FLOAT8,
    LAYERS,
    MODELS,
    MXFP8,
    OPS,
    BlockSizes,
    Case,
    block,
    flops,
    sizes_of,
    traffic,
)
from fusedtp.bench.frames import frame_of
from fusedtp.bench.intervals import Timing
from fusedtp.bench.jobs import JOB_SECONDS, Request, estimate, plan, seconds_of, world_sizes
from fusedtp.bench.store import Outcome, ratios, rows_of
from fusedtp.bench.suites import SUITE_OF, SUITES, missing
from fusedtp.bench.sweep import OVER_MEMORY, Launched
from fusedtp.bench.timing import Verdict

MACHINE = machine.Machine("m", "cpu", 2, "", 0, "shared memory", "", "3", "2", "3", "0123", False)
GATHER, SCATTER, ALL_REDUCE = OPS


def test_plan_never_times_kernels_without_a_gpu_for_every_rank() -> None:
    for num_gpus in (0, 1, 2):
        for job in plan(Request(world_sizes=(1, 2, 4)), num_gpus):
            if job.timed:
                assert not {"fused", "own_matmul"} & set(job.variants) or job.case.world_size <= num_gpus
                assert {"matmul", "comm", "unfused", "auto"} <= set(job.variants)
            else:
                assert (job.case.M, job.case.N, job.case.K) in CHECK_SHAPES
                assert {"fused", "own_matmul"} <= set(job.variants)
    for models in ((), ("llama3-8b",)):
        assert not any(job.timed for job in plan(Request(world_sizes=(2,), models=models, tokens=(64,)), 1))


def test_plan_covers_by_default_every_op_world_size_dtype_and_direction_and_else_what_is_asked() -> None:
    jobs, dtypes = plan(Request(), 0), ("float32", "bfloat16", "float16")
    timed, checked = ([job for job in jobs if job.timed is is_timed] for is_timed in (True, False))
    assert {(job.case.op, job.case.world_size) for job in timed} == {(op, w) for op in OPS for w in (1, 2, 4)}
    assert {(job.case.op, job.case.world_size, job.case.dtype) for job in checked} == {
        (op, w, dtype) for op in OPS for w in (2, 4) for dtype in dtypes
    }
    assert {job.case.dtype for job in timed} == set(dtypes)
    assert {(job.case.op, direction) for job in timed for direction in job.directions} == {
        (op, direction) for op in OPS for direction in DIRECTIONS
    }
    request = Request((2,), OPS[:1], ("decomposed",), (), shapes=((8, 8, 8), (16, 8, 8)))
    jobs = plan(request, 0)
    assert [(job.case.M, job.case.N, job.case.K) for job in jobs] == [(8, 8, 8), (16, 8, 8)]
    asked = {(job.variants, job.directions) for job in jobs}
    assert asked == {((*BOUNDS, "unfused", "sequential", "decomposed"), ("forward",))}
    both = plan(replace(request, directions=("backward", "both")), 0)
    assert {job.directions for job in both} == {("backward", "both")}


@pytest.mark.parametrize("suite", SUITES)
def test_what_is_asked_for_twice_runs_once(suite: str) -> None:
    """The rows of a case that ran twice would be refused as a file."""
    name, size = ("shapes", (8, 8, 8)) if suite == "ops" else ("sizes", (64,) * len(SUITES[suite].lengths))
    model = Request((2,), suites=(suite,), models=("small",), tokens=(64,))
    shape: Any = replace(Request((2,), suites=(suite,)), **{name: (size,)})
    for once, twice in (
        (model, replace(model, world_sizes=(2, 2), models=("small",) * 2, tokens=(64, 64))),
        *([(shape, replace(shape, world_sizes=(2, 2), **{name: (size, size)}))] if suite != "block" else []),
    ):
        assert plan(twice, 0) == plan(once, 0)
    assert arguments.ranks("2,4,2") == (2, 4)


@pytest.mark.parametrize("dtype", [FLOAT8, MXFP8])
def test_float8_runs_where_it_is_asked_for_and_forward_alone(dtype: str) -> None:
    request = Request(world_sizes=(2,), dtypes=(dtype, "float32"))
    blocks = plan(replace(request, models=("llama3-8b",), tokens=(64,)), 0)
    sizes, in_blocks = ([job for job in jobs if job.case.dtype == dtype] for jobs in (plan(request, 0), blocks))
    for is_timed in (True, False):
        assert {job.case.op for job in sizes if job.timed is is_timed} == set(OPS)
    for job in (*sizes, *in_blocks):
        assert job.directions == ("forward",)
        assert not {"own_matmul", *providers.SHIPPED} & set(job.variants_of("forward"))
    assert {job.directions for job in blocks} == {("forward",), ("forward", "backward")}
    for directions in (("backward",), ("forward", "both")):
        with pytest.raises(ValueError, match="fp8 and mxfp8 operands have no gradient: with either"):
            plan(replace(request, directions=directions), 0)
    assert plan(replace(request, directions=("forward",)), 0)


def test_what_cannot_run_is_said_once_an_op_world_size_and_direction() -> None:
    jobs = plan(Request(world_sizes=(1, 2), directions=("forward", "backward")), 0)
    absent = [(job.case.op, job.case.world_size, each.variant, each.direction, each.not_run)
              for job in jobs for each in job.absent]  # fmt: skip
    assert len(absent) == len(set(absent))
    assert (GATHER, 2, "async_tp", "forward", "its fused ops need CUDA") in absent
    assert (GATHER, 1, "dtensor", "forward", "one rank has nothing to send") in absent
    assert not [each for each in absent if each[:3] == (GATHER, 2, "dtensor")]
    assert (ALL_REDUCE, 2, "comm", "backward", "backward of matmul_all_reduce sends nothing") in absent
    # and no variant runs where it is missing
    for job in jobs:
        for direction in job.directions:
            assert not [name for name in job.variants_of(direction) if missing(name, job.case, direction, 0)]


def test_async_tp_is_refused_unless_the_code_calls_the_fused_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    code = ["def call(args):\n    torch.ops.symm_mem.fused_all_gather_matmul.default(x, [w], 0, '0')\n"]
    # A stand-in: importing the compiler takes seconds.
    compiled = SimpleNamespace(run_and_get_code=lambda run: (run(), code))
    monkeypatch.setitem(sys.modules, "torch._inductor.utils", compiled)
    peers.compiles(lambda: ran.append(1), ("fused_all_gather_matmul",))
    with pytest.raises(RuntimeError, match="has no fused_matmul_reduce_scatter"):
        peers.compiles(lambda: ran.append(1), ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"))
    assert len(ran) == 2


def test_a_job_may_take_as_long_as_its_arithmetic_or_as_is_asked() -> None:
    small, large = (plan(Request((1,), OPS[:1], shapes=((size,) * 3,)), 0)[0] for size in (64, 8192))
    assert JOB_SECONDS < seconds_of(small) < JOB_SECONDS + 30
    # 1.1 TFLOP a matmul at 60 GFLOP/s on one core: 18 s, some 12 times, and ten times that
    assert 1000 < seconds_of(large) < 5000
    # --patience is the whole limit, whatever the arithmetic.
    assert {seconds_of(replace(job, patience=20.0)) for job in (small, large)} == {20.0}
    assert large.is_long
    assert not small.is_long
    # a long job does not time the same library call again
    assert small.variants_of("forward") == ("matmul", "unfused", "auto")
    assert large.variants_of("forward") == ("matmul", "unfused")
    absent = {"comm", "sequential", "decomposed", "auto", *providers.usual()}
    assert {each.variant for each in large.absent} == absent


H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(("num_gpus", "minutes"), [(1, 4), (2, 8), (4, 12), (8, 15)])
def test_the_plan_of_gpus_is_estimated_by_their_rates(num_gpus: int, minutes: float) -> None:
    """On 8 H100s about a quarter of an hour; a case that hangs is given up after minutes."""
    jobs = plan(Request(), num_gpus, H100)
    sizes = [size for size in (1, 2, 4, 8) if size <= num_gpus]
    assert list(dict.fromkeys(job.case.world_size for job in jobs)) == sizes
    assert sum(map(estimate, jobs)) / 60 == pytest.approx(minutes, rel=0.3)
    assert max(map(seconds_of, jobs)) < 600
    # A case of a layer has fifty rounds at most, whatever its suite would spend.
    layers = {name: sum(map(estimate, plan(Request(suites=(name,)), num_gpus, H100))) for name in ("mlp", "grouped")}
    assert layers["grouped"] < 1.25 * layers["mlp"]
    # A GPU that the table lacks is taken for an older one.
    assert sum(map(estimate, plan(Request(), num_gpus, "Some GPU"))) < 3 * sum(map(estimate, jobs))


def test_two_nodes_of_eight_gpus_are_planned_by_the_launchers_world() -> None:
    here = Launched(3, 16, "host", 29500, local=8)
    assert (here.num_gpus(8), here.num_gpus(4), here.num_gpus(0)) == (16, 4, 0)
    for suites in (("ops",), ("block",), ("decode",), ("collectives",)):
        jobs = plan(Request(suites=suites, models=("llama3-70b",)), 16, H100, 16)
        wanted = {1, 2, 4, 8, 16} - {("collectives",): {1}, ("block",): {16}}.get(suites, set())
        # 70B has 8 key-value heads, which 16 ranks share in matmuls but not in a block.
        assert {job.case.world_size for job in jobs if job.timed} == wanted
        for job in jobs:
            assert {"unfused", "auto"} <= set(job.variants)
            # What is left where ranks do not share memory sends through NCCL, or nothing.
            over_nccl = {"unfused", "auto", "dtensor", "dtensor_once", "concatenated", "torch", "comm", "nccl_windows"}
            assert set(job.variants) - set(OVER_MEMORY) <= {*over_nccl, "matmul", "own_matmul", "local"}
            assert not set(OVER_MEMORY) & over_nccl
    assert world_sizes(6) == (1, 2, 4, 6)


@pytest.mark.parametrize("num_gpus", [0, 8])
@pytest.mark.parametrize("name", SUITES)
def test_every_suite_has_cases_on_cpus_and_on_gpus(name: str, num_gpus: int) -> None:
    suite, jobs = SUITES[name], plan(Request(suites=(name,)), num_gpus, H100 * bool(num_gpus))
    assert {job.case.op for job in jobs} == set(suite.ops)
    for job in (job for job in jobs if job.timed):
        assert ("fused" in job.variants) == bool(num_gpus)
        assert {*suite.bounds, "unfused", *suite.others} <= set(job.variants)
        assert SUITE_OF[job.case.op] is suite
        for direction in job.directions:
            assert flops(job.case, direction) > 0 or name == "collectives"


@pytest.mark.parametrize("num_gpus", [0, 8])
@pytest.mark.parametrize("name", [name for name in SUITES if name != "ops"])
def test_models_and_tokens_give_the_sizes_of_every_suite(name: str, num_gpus: int) -> None:
    """Tokens alone are those of the models by default; a collective sends the tokens' hidden features."""
    for models in ((), ("qwen3-8b",)):
        request = Request((2,), models=models, tokens=(32, 64), suites=(name,))
        cases = [job.case for job in plan(request, num_gpus, H100 * bool(num_gpus))]
        assert {case.M for case in cases} == {case.tokens for case in cases} == {32, 64}
        by_default = ("llama3-8b", "llama3-70b") if num_gpus else ("small",)
        assert {case.model for case in cases} == set(models or by_default)
        if name == "collectives":
            assert {case.N for case in cases} == {MODELS[case.model].hidden for case in cases}


def test_sizes_come_from_a_file_of_hugging_face(tmp_path: Path) -> None:
    given = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 8,
             "num_key_value_heads": 4, "num_hidden_layers": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(given))
    for path in (tmp_path, tmp_path / "config.json"):
        name, sizes = sizes_of(str(path))
        assert name == "llama-64x160"
        assert sizes == BlockSizes(64, 160, 8, 4, 8, 2, True, str(tmp_path / "config.json"))
    jobs = plan(Request((2,), models=(str(tmp_path),), tokens=(32,), suites=("ops", "block", "decode")), 0)
    assert {(job.case.op, job.case.N, job.case.K) for job in jobs} == {
        (GATHER, 128, 64), (SCATTER, 64, 64), (GATHER, 320, 64), (SCATTER, 64, 160), ("block", 160, 64),
        ("decode", 64, 64), ("decode", 64, 160),
    }  # fmt: skip
    assert {job.case.model for job in jobs} == {"llama-64x160"}
    for change in ({"hidden_size": None}, {"hidden_size": "64"}, {"num_attention_heads": 0}, {"hidden_size": True}):
        (tmp_path / "config.json").write_text(json.dumps(given | change))
        with pytest.raises(ValueError, match=r"config\.json is no configuration of a decoder: .* must be a positive"):
            sizes_of(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="is no configuration of a decoder"):
        sizes_of(str(tmp_path))
    with pytest.raises(ValueError, match=r"model must be one of .*llama3-8b.*, or a config\.json"):
        sizes_of("llama9")


def test_models_have_their_published_number_of_parameters() -> None:
    """For all blocks: the published size in billions, less its embeddings."""
    published = {
        "llama3-8b": 8.03 - 2 * 128256 * 4096 / 1e9,
        "llama3-70b": 70.55 - 2 * 128256 * 8192 / 1e9,
        "llama3-405b": 405.85 - 2 * 128256 * 16384 / 1e9,
        "qwen3-8b": 6.95,
        "qwen3-32b": 31.2,
        "gpt3-175b": 174.6 - (50257 + 2048) * 12288 / 1e9,
    }
    assert {"small"} == set(MODELS) - set(published)
    for model, billions in published.items():
        in_block = sum(case.N * case.K for case in block(model, 1, 1, "bfloat16"))
        assert in_block * MODELS[model].num_blocks / 1e9 == pytest.approx(billions, rel=0.002), model


def test_block_of_a_model() -> None:
    cases = block("llama3-8b", 512, 4, "float32")
    assert [(case.layer, case.op, case.M, case.N, case.K) for case in cases] == [
        ("attention qkv", GATHER, 512, 4096 + 2 * 1024, 4096),
        ("attention out", SCATTER, 512, 4096, 4096),
        ("mlp up", GATHER, 512, 2 * 14336, 4096),
        ("mlp down", SCATTER, 512, 4096, 14336),
    ]
    assert {(case.model, case.tokens, case.world_size) for case in cases} == {("llama3-8b", 512, 4)}
    # Qwen3's heads are wider than hidden / heads
    assert [case.K for case in block("qwen3-32b", 1, 1, "float32")] == [5120, 64 * 128, 5120, 25600]
    # 16 ranks share 8 key-value heads, so ranks hold copies
    assert block("llama3-8b", 1, 16, "float32")[0].N == 4096 + 2 * 16 * 128


def test_traffic_and_flops() -> None:
    case = Case(GATHER, 8, 6, 4, "bfloat16", 2)
    assert flops(case, "forward") == 2 * 8 * 6 * 4 / 2
    assert flops(case, "both") == flops(case, "forward") + flops(case, "backward") == 3 * flops(case, "forward")
    x = 8 * 4 * 2
    assert traffic(case, "both") == [("all_gather", x), ("reduce_scatter", x), ("all_gather", x)]
    assert traffic(replace(case, op=SCATTER), "backward") == [("all_gather", 8 * 6 * 2)]
    assert traffic(replace(case, op=ALL_REDUCE), "backward") == []
    with pytest.raises(ValueError, match="direction must be one of"):
        flops(case, "sideways")


def test_ratios_by_hand() -> None:
    case = Case(ALL_REDUCE, 1000, 1000, 1000, "float32", 4)
    medians = {"matmul": 10.0, "comm": 4.0, "unfused": 14.0, "sequential": 12.0, "decomposed": 11.0}

    def found(variant: str, direction: str = "forward", case: Case = case, **given: float) -> dict[str, Any]:
        return ratios(case, direction, variant, given or medians)

    expected = {
        "speedup_vs_unfused": 14 / 11,
        "speedup_vs_sequential": 12 / 11,
        "matmul_fraction": 10 / 11,
        "hidden": 1 / 2,
    }
    expected |= {"bound_ms": 10.0, "tflops": 2e9 / 4 / 11e-3 / 1e12, "roofline": 10 / 11, "tokens_per_s": 1e6 / 11}
    got = found("decomposed")
    assert {name: got.get(name) for name in expected} == pytest.approx(expected)
    comm = found("comm")
    assert comm.get("algbw_gbps") == pytest.approx(4e6 / 4e-3 / 1e9)
    assert comm.get("busbw_gbps") == pytest.approx(4e6 / 4e-3 / 1e9 * 2 * 3 / 4)
    assert {comm.get(name) for name in ("tflops", "speedup_vs_unfused", "hidden")} == {None}
    # What overlaps nothing hides nothing, whatever its transport gains over unfused.
    assert (found("sequential")["hidden"], found("sequential")["speedup_vs_unfused"]) == (0.0, 14 / 12)
    assert found("unfused")["hidden"] == pytest.approx(-1.0)
    # Without `sequential` nothing is said of overlap, nor where it takes no longer than the matmul.
    without = found("decomposed", **{name: ms for name, ms in medians.items() if name != "sequential"})
    assert {without.get("hidden"), without.get("speedup_vs_sequential")} == {None}
    assert found("decomposed", **{**medians, "sequential": 9.5}).get("hidden") is None
    # backward sends nothing: the bound is the matmul alone, and there is nothing to hide
    backward = found("decomposed", "backward", **{**medians, "unfused": 10.5})
    assert (backward.get("bound_ms"), backward.get("hidden")) == (10.0, None)
    # no ratio to a bound or baseline that was refused
    alone = found("decomposed", decomposed=11.0, comm=4.0)
    assert {alone.get(name) for name in ("speedup_vs_unfused", "matmul_fraction", "bound_ms")} == {None}
    gathered = found("comm", "backward", replace(case, op=GATHER), comm=4.0)
    assert gathered.get("busbw_gbps") == pytest.approx(2 * 4e6 * 3 / 4 / 4e-3 / 1e9)


def block_rows(refused: str = "") -> list[Any]:
    rows = []
    for case in block("llama3-8b", 512, 2, "float32"):
        outcomes = []
        for place, variant in enumerate(("matmul", "comm", "unfused", "decomposed")):
            wrong = refused == variant and case.layer == "mlp down"
            timing = None if wrong else Timing(10.0 + place, 1.0, 2.0, 3.0, 5)
            outcomes.append(Outcome(variant, "forward", Verdict(0.0, 0.0, "wrong" if wrong else ""), timing))
        rows += rows_of(case, outcomes, MACHINE)
    return rows


def test_block_totals_are_sums_of_rows_that_all_passed() -> None:
    def totals(rows: list[Any]) -> list[dict[str, Any]]:
        return tables.totals(frame_of(rows)).cells.to_dict("records")

    rows = block_rows()
    assert totals(rows) == [{
        "model": "llama3-8b", "tokens": 512, "ranks": 2, "dtype": "float32", "direction": "forward",
        "matmul\nms": 40.0, "comm\nms": 44.0, "unfused\nms": 48.0, "decomposed\nms": 52.0,
        "our\nfastest": "unfused", "speed-up": "1.00x", "of matmul": 40 / 48,
    }]  # fmt: skip
    (total,) = totals([replace(row, median_ms=9.0) if row.variant == "decomposed" else row for row in rows])
    # No matmul of the block is faster beyond noise, by the percentiles of its rows.
    assert (total["our\nfastest"], total["speed-up"]) == ("decomposed", "~1.33x")
    steady = {"p20_ms": 9.0, "p80_ms": 9.0, "median_ms": 9.0}
    others = [row if row.variant != "unfused" else replace(row, p20_ms=12.0, p80_ms=12.0) for row in rows]
    (total,) = totals([replace(row, **steady) if row.variant == "decomposed" else row for row in others])
    assert total["speed-up"] == "1.33x"
    (total,) = totals(block_rows(refused="decomposed"))
    assert {name for name in total if name.endswith("ms")} == {"matmul\nms", "comm\nms", "unfused\nms"}
    assert total["our\nfastest"] == "unfused"
    assert totals([row for row in rows if row.layer != LAYERS[0]]) == []
    # rows of two commits, or of two states of a tree with changes, are not added
    for changed in ("commit", "digest", "torch"):
        assert totals([replace(row, **{changed: row.layer}) for row in rows]) == []
    assert totals([replace(row, dirty=row.layer == LAYERS[0]) for row in rows]) == []
    # with graphs and without are two totals
    assert [each.get("graph") for each in totals([*rows, *(replace(row, graph=True) for row in rows)])] == ["", "yes"]
