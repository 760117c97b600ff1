"""`fusedtp mlp | grouped | decode | overhead`: checks precede timings, and every speed-up has an interval."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pandas as pd
import pytest
from torch.distributed import ProcessGroup

from fusedtp.bench import layers, machine
from fusedtp.bench.digest import digest
from fusedtp.bench.intervals import Timing, ratio
from fusedtp.bench.layers import SUITES
from fusedtp.bench.machine import describe
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.store import origin

from . import generated
from .command import command

# Small sizes with all lengths different; one of q, k and v has one row for each rank.
SMALL = {"mlp": ("16,8,32", "4x6x2"), "grouped": ("6,8,8,4,2",), "decode": ("1,8,16", "5,12,8")}


def test_rounds_that_spread_are_warned_of() -> None:
    """The table's verdict has a warning if the rounds of one size spread."""
    quiet = {name: Timing.of([ms, 1.01 * ms, 1.02 * ms]) for name, ms in (("dtensor", 2.0), ("fusedtp", 1.0))}
    wild = {name: Timing.of([ms, 2.0 * ms, 3.0 * ms]) for name, ms in (("dtensor", 2.0), ("fusedtp", 1.0))}
    suite = SUITES["mlp"]
    for timings, told in ((quiet, False), (wild, True)):
        frame = pd.DataFrame(layers.rows_of(suite, (16, 8, 32), 2, timings))
        assert layers.warnings(suite, frame).startswith("Careful, the machine did something else") is told


@pytest.mark.parametrize(
    ("ours", "told"),
    [([1.0, 1.01, 0.99], "faster"), ([2.5, 1.5, 1.9], "no difference"), ([4.0, 4.1, 4.2], "slower")],
)
def test_speedup_has_the_interval_of_its_rounds(ours: list[float], told: str) -> None:
    timings = {"dtensor": Timing.of([2.0, 2.02, 1.98]), "fusedtp": Timing.of(ours), "local": Timing.of([0.5] * 3)}
    interval = ratio(timings["dtensor"], timings["fusedtp"])
    assert interval.ratio == 2.0 / sorted(ours)[1]
    assert interval.low < interval.ratio < interval.high
    suite = SUITES["mlp"]
    (line,) = layers.table(suite, pd.DataFrame(layers.rows_of(suite, (16, 8, 32), 2, timings))).cells.to_dict("records")
    assert (line["M x D x F"], line["dtensor\nover"], line["against\ndtensor"]) == ("16 x 8 x 32", interval.ratio, told)
    assert line["95 %\ninterval"] == f"{interval.low:.2f}-{interval.high:.2f}"


@pytest.mark.parametrize("name", SUITES)
def test_rows_from_the_command_line(name: str, pool: RankPool, tmp_path: Path) -> None:
    @contextmanager
    def here(ranks: int, timeout: int) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(run_again=lambda *given, told: pool.run(*given, world_size=ranks))

    suite, num = SUITES[name], len(SMALL[name])
    shapes = [word for size in SMALL[name] for word in ("--shape", size)]
    with mock.patch.object(layers, "RankPool", here):
        said = command(name, *shapes, "--world-size", 2, "--seconds", 0, "--out", tmp_path)
    assert said.count(f"2/{num}, ") == num - 1
    assert " x ".join(suite.columns) in said
    rows = pd.read_csv(tmp_path / machine.describe().name / f"{name}.csv")
    variants = list(dict.fromkeys(rows["variant"]))
    assert {*suite.over, "fusedtp", "local"} <= set(variants)
    assert list(rows["variant"]) == variants * num
    sizes = [",".join(str(cell).replace(" ", ",") for cell in size) for size in rows[list(suite.columns)].to_numpy()]
    assert list(dict.fromkeys(sizes)) == [size.replace("x", ",") for size in SMALL[name]]
    for _, lines in rows.groupby("M"):
        case = lines.set_index("variant")
        ours = case.loc["fusedtp"]
        for other in suite.over:
            expected = case["median_ms"][other] / ours["median_ms"]
            assert ours[f"speedup_vs_{other}"] == pytest.approx(expected)
        fastest = case["median_ms"][list(suite.over)].idxmin()
        assert ours["speedup_low"] <= ours[f"speedup_vs_{fastest}"] <= ours["speedup_high"]
        # The interval can be recomputed from the stored rounds.
        kept = [Timing.of([float(ms) for ms in case["rounds_ms"][each].split()]) for each in (fastest, "fusedtp")]
        again = ratio(*kept)
        assert (again.low, again.high) == pytest.approx((ours["speedup_low"], ours["speedup_high"]), rel=1e-3)
    if name == "decode":
        text, ours = generated.decode_table(rows), rows[rows["variant"] == "fusedtp"].set_index("M")
        (line,) = [line for line in text.splitlines() if line.startswith("| 2 | 5 |")]
        assert float(line.split("|")[3]) == pytest.approx(ours["speedup_vs_torch"][5], abs=0.006)
        assert text.count("|\n") == 2 + 3
        assert "of 8 x 16, 12 x 8; float32, " in text


def off_by(group: ProcessGroup, name: str, size: tuple[int, ...]) -> str:
    with mock.patch.object(layers, "TOLERANCE", 0.0), pytest.raises(AssertionError) as caught:
        layers.compare(group, name, size, 0.0)
    return str(caught.value)


@pytest.mark.parametrize("name", SUITES)
def test_what_is_off_is_refused(name: str, pool: RankPool) -> None:
    size = tuple(map(int, SMALL[name][0].split(",")))
    told = pool.run(off_by, name, size, world_size=2)
    assert all(" is off by " in each and f"at {size}" in each for each in told), told


def test_sizes_are_those_that_ranks_can_share() -> None:
    """The default sizes can be split over powers of two."""
    for suite in SUITES.values():
        for size, world_size in itertools.product(suite.sizes, (2, 4, 8)):
            suite.check_size(size, world_size)
    for name, size in (("mlp", "16,8,31"), ("grouped", "6,8,8,4,3"), ("decode", "1,8"), ("mlp", "0,8,2")):
        assert "--shape" in command(name, "--shape", size, code=2)


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
