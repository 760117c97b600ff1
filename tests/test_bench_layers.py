"""Layers, blocks and collectives as cases of the sweep: right ones pass, wrong ones are refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pandas as pd
import pytest
import torch
from torch.distributed import ProcessGroup

from fusedtp import machine
from fusedtp.bench import store, sweep
from fusedtp.bench.cases import COLLECTIVES, OPS, Case
from fusedtp.bench.digest import digest
from fusedtp.bench.intervals import measured, ratio
from fusedtp.bench.layers import SPIKE, TOLERANCE
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.store import origin
from fusedtp.bench.suites import SUITE_OF, SUITES, missing
from fusedtp.bench.timing import gate, measure_checked
from fusedtp.machine import describe

from . import generated
from .command import command, folded
from .harness import spread

CPU = torch.device("cpu")
# Small sizes with all lengths different; one of q, k and v has one row for each rank.
SMALL = {"mlp": ("16,8,32", "4x6x2"), "grouped": ("6,8,8,4,2",), "decode": ("1,8,16", "5,12,8")}
SIZES: dict[str, tuple[int, ...]] = {
    "mlp": (16, 8, 32), "grouped": (6, 8, 8, 4, 2), "decode": (5, 12, 8), "block": (18, 1408, 512),
    **dict.fromkeys(COLLECTIVES, (14, 5)),
}  # fmt: skip


def case_of(op: str, world_size: int, dtype: str = "float32") -> Case:
    (case,) = (each for each in SUITE_OF[op].make(SIZES[op], dtype, world_size) if each.op == op)
    return replace(case, model="small", tokens=case.M) if op == "block" else case


def verdicts(group: ProcessGroup, op: str, dtype: str) -> dict[tuple[str, str], tuple[str, float]]:
    """Return (error, share of the allowed error) of every variant, by the gate and then in timed rounds."""
    case, suite, found = case_of(op, group.size(), dtype), SUITE_OF[op], {}
    with torch.no_grad():
        layer = suite.setup(case, group, CPU)
        for direction in suite.directions:
            names = [
                each for each in suite.variants(0, ("decomposed", "auto")) if not missing(each, case, direction, 0)
            ]
            for name, verdict in gate(layer, names, group, direction).items():
                found[name, direction] = verdict.error, verdict.error_ratio
            runners = {name: layer.runner(name, direction) for name in names}
            for name, (_, verdict) in measure_checked(layer, runners, group, direction, rounds=3).items():
                error, share = found[name, direction]
                found[name, direction] = error or verdict.error, max(share, verdict.error_ratio)
            layer.forget_runners()
    return found


@pytest.mark.parametrize(("op", "dtype"), spread(list(SIZES), ["float32", "bfloat16"]))
def test_every_variant_is_right_in_the_gate_and_in_timed_rounds(pool: RankPool, op: str, dtype: str) -> None:
    """The inputs change between rounds."""
    first, second = pool.run(verdicts, op, dtype, world_size=2)
    assert first == second
    names = {name for name, _ in first}
    assert {*SUITE_OF[op].bounds, "unfused", "decomposed"} <= names
    assert {error for error, _ in first.values()} == {""}, first
    for (name, _), (_, share) in first.items():
        assert share <= 0.5, "the bound is not met by little"
        assert share > 0 or name in ("local", "comm") or op == "all_gather"


def planted(group: ProcessGroup, op: str, wrong: str) -> list[str]:
    """Return the errors of variants whose last result has one wrong element, or is that of before."""
    case, suite, said = case_of(op, group.size()), SUITE_OF[op], []
    direction = suite.directions[-1]
    with torch.no_grad():
        layer = suite.setup(case, group, CPU)
        for name in ("unfused", *suite.others, "comm"):
            if name not in suite.variants(0, None) or missing(name, case, direction, 0):
                continue
            run, kept = layer.runner(name, direction), []

            def changed(run: Any = run, kept: list[Any] = kept) -> Any:
                *others, last = (kept and kept[0]) or run()
                kept.append((*others, last)) if wrong == "kept" else None
                if wrong == "element":
                    last = last.clone()
                    # A large result's norm hardly has it.
                    last.view(-1)[0] += 2 * SPIKE * TOLERANCE * last.norm() / last.numel() ** 0.5
                return (*others, last)

            if wrong == "kept":
                found = measure_checked(layer, {name: changed}, group, direction, rounds=2)
                said.append(f"{name}: {found[name][1].error}")
            else:
                try:
                    layer.check(name, changed(), direction)
                    said.append(f"{name}: passed")
                except AssertionError as error:
                    said.append(f"{name}: {error}")
    return said


@pytest.mark.parametrize("wrong", ["element", "kept"])
@pytest.mark.parametrize("op", SIZES)
def test_one_wrong_element_or_a_kept_result_is_refused(pool: RankPool, op: str, wrong: str) -> None:
    for said in pool.run(planted, op, wrong, world_size=2):
        assert said
        for each in said:
            # Collectives alone send the same tensors in every round.
            if wrong == "element" or not each.startswith("comm"):
                assert "of its norm" in each or "are wrong" in each, each


def test_speedups_have_the_intervals_of_their_rounds(tmp_path: Path, pool: RankPool) -> None:
    command("sweep", "--suite", "mlp", "--shape", SMALL["mlp"][0], "--world-size", 2, "--seconds", 0, "--out", tmp_path)
    (path,) = tmp_path.glob("*/mlp.csv")
    rows = {row.variant: row for row in store.read(path)}
    ours, base = measured(rows["auto"]), measured(rows["unfused"])
    assert ours is not None
    assert base is not None
    found = ratio(base, ours)
    assert rows["auto"].speedup_vs_unfused == pytest.approx(found.ratio, rel=1e-3)
    assert found.low <= found.ratio <= found.high
    assert rows["auto"].bound_ms == pytest.approx(
        max(rows[name].median_ms or 0 for name in ("local", "comm")), rel=1e-3
    )
    assert rows["auto"].tokens_per_s == pytest.approx(16e3 / (rows["auto"].median_ms or 1), rel=1e-3)


@pytest.mark.parametrize("name", SMALL)
def test_rows_from_the_command_line(name: str, pool: RankPool, tmp_path: Path) -> None:
    @contextmanager
    def here(ranks: int, **_: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(run=pool.run, close=lambda: None)

    suite, num = SUITES[name], len(SMALL[name])
    shapes = [word for size in SMALL[name] for word in ("--shape", size)]
    path = tmp_path / machine.describe().name / f"{name}.csv"
    with mock.patch.object(sweep, "RankPool", here):
        said = command("sweep", "--suite", name, *shapes, "--world-size", 2, "--seconds", 0, "--out", tmp_path)
    assert f"{num}/{num}, " in said
    rows = store.read(path)
    variants = list(dict.fromkeys(row.variant for row in rows))
    assert {*suite.others, "auto", "unfused", *suite.bounds} == set(variants)
    assert [row.variant for row in rows] == variants * num
    assert {row.gate for row in rows} == {"passed"}
    sizes = {(row.M, row.widths or row.N, row.K) for row in rows}
    assert len(sizes) == num
    assert {row.digest for row in rows} == {digest(0, name)}
    assert all(row.peak_bytes is not None and row.load is not None and row.nodes == 1 for row in rows)
    if name == "decode":
        # A commit may have digits alone.
        frame = pd.read_csv(path, dtype={"commit": str})
        text, ours = generated.decode_table(frame), frame[frame["variant"] == "auto"].set_index("M")["median_ms"]
        (line,) = [line for line in text.splitlines() if line.startswith("| 2 | 5 |")]
        by_hand = frame[(frame["variant"] == "torch") & (frame["M"] == 5)]["median_ms"].iloc[0]
        assert float(line.split("|")[3]) == pytest.approx(by_hand / ours[5], abs=0.006)
        assert text.count("|\n") == 2 + 3
        assert "of 8 x 16, 12 x 8; float32, " in text


def test_sizes_are_those_that_ranks_can_share(tmp_path: Path) -> None:
    """The default sizes can be split over powers of two."""
    for suite in SUITES.values():
        for size, world_size in itertools.product(suite.on_cpu, (2, 4, 8)):
            suite.sized(size, "float32", world_size)
    for name, size in (("mlp", "16,8,31"), ("grouped", "6,8,8,4,3"), ("decode", "1,8"), ("mlp", "0,8,2")):
        given = ("--suite", name, "--shape", size, "--world-size", 2, "--out", tmp_path)
        assert "--shape" in command("sweep", *given, code=2)


@pytest.mark.parametrize(("given", "said"), [
    (("--suite", "mlp", "--op", OPS[0]), "--op chooses among the suite ops"),
    (("--suite", "mlp,block", "--shape", "8,8,8"), "--shape has the lengths of one suite"),
    (("--suite", "block", "--shape", "8,8,8"), "a block has heads besides its lengths: give --model"),
    (("--suite", "mlp", "--shape", "8,8,8", "--tokens", "64"), "--tokens is for the blocks of --model"),
    (("--tokens", "64"), "--tokens is for the blocks of --model"),
    (("--suite", "collectives", "--model", "llama9"), "model must be one of"),
])  # fmt: skip
def test_no_option_is_left_unread(given: tuple[str, ...], said: str, tmp_path: Path) -> None:
    assert said in folded(command("sweep", *given, "--out", tmp_path, code=2))


def test_overhead_rows_of_every_size_and_direction_are_appended(tmp_path: Path) -> None:
    out = tmp_path / "overhead.csv"
    columns = "commit,dirty,machine,torch,world_size,direction,rows,features,overhead_us,q1_us,q3_us,linear_us"
    out.write_text(f"{columns}\nbefore,False,another,2.11.0,1,forward,8,64,200.0,190.0,210.0,5.0\n")
    said = command("overhead", "--out", out, "--rounds", 3)
    rows = pd.read_csv(out)
    # An older row keeps its columns; new rows have every column of a measurement.
    assert list(rows.columns)[: columns.count(",") + 1] == columns.split(",")
    assert rows.commit[0] == "before"
    assert set(origin(describe())) <= set(rows.columns)
    assert (rows.digest[1:] == digest(0)).all()
    assert list(zip(rows.world_size, rows.direction, strict=True)) == [
        (1, "forward"), (1, "forward"), (1, "both"), (2, "forward"), (2, "both")
    ]  # fmt: skip
    # A call has a host cost, below 10 ms even on a busy machine; with peers the noise of rounds may exceed that cost.
    assert rows.overhead_us.abs().lt(10_000).all(), rows
    assert rows.overhead_us[rows.world_size == 1].gt(1).all(), rows
    assert rows.linear_us.between(1, 10_000).all(), rows
    assert (rows.q1_us <= rows.overhead_us).all()
    assert ("Careful, calls took less than their parts" in said) == (rows.q1_us[1:].min() < 0)
    assert (rows.overhead_us <= rows.q3_us).all()
