"""`fusedtp mlp | grouped | decode | overhead`: results are checked before they are timed, and every speed-up has an
interval.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pandas as pd
import pytest
from torch.distributed import ProcessGroup
from typer.testing import CliRunner

from fusedtp.bench import layers, machine
from fusedtp.bench.cli import app
from fusedtp.bench.intervals import Timing, ratio
from fusedtp.bench.layers import SUITES
from fusedtp.bench.ranks import RankPool

from . import generated

# Small sizes of each, unlike in all lengths; of q, k and v one has one row a rank.
SMALL = {"mlp": ("16,8,32", "4x6x2"), "grouped": ("6,8,8,4,2",), "decode": ("1,8,16", "5,12,8")}


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
    assert (line["M x D x F"], line["speed-up"], line["fusedtp\nis"]) == ("16 x 8 x 32", interval.ratio, told)
    assert line["95 %\ninterval"] == f"{interval.low:.2f} to {interval.high:.2f}"


@pytest.mark.parametrize("name", SUITES)
def test_rows_from_the_command_line(name: str, pool: RankPool, tmp_path: Path) -> None:
    @contextmanager
    def here(ranks: int, timeout: int) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(run_again=lambda *given, told: pool.run(*given, world_size=ranks))

    suite = SUITES[name]
    shapes = [word for size in SMALL[name] for word in ("--shapes", size)]
    given = [name, *shapes, "--world-size", "2", "--seconds", "0", "--out", str(tmp_path)]
    with mock.patch.object(layers, "RankPool", here):
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, given)
    assert done.exit_code == 0, done.output
    assert done.output.count(f"2/{len(SMALL[name])}, ") == len(SMALL[name]) - 1
    assert " x ".join(suite.columns) in done.output
    rows = pd.read_csv(tmp_path / machine.describe().name / f"{name}.csv")
    variants = list(dict.fromkeys(rows["variant"]))
    assert {*suite.over, "fusedtp", "local"} <= set(variants)
    assert list(rows["variant"]) == variants * len(SMALL[name])
    sizes = [",".join(str(cell).replace(" ", ",") for cell in size) for size in rows[list(suite.columns)].to_numpy()]
    assert list(dict.fromkeys(sizes)) == [size.replace("x", ",") for size in SMALL[name]]
    for _, lines in rows.groupby("M"):
        case = lines.set_index("variant")
        ours = case.loc["fusedtp"]
        for other in suite.over:
            expected = case["median_ms"][other] / ours["median_ms"]
            assert ours[f"speedup_vs_{other}"] == pytest.approx(expected)
        assert ours["speedup_low"] <= ours["speedup_vs_dtensor"] <= ours["speedup_high"]
        # The interval can be computed again from what is kept.
        kept = [Timing.of([float(ms) for ms in case["rounds_ms"][each].split()]) for each in ("dtensor", "fusedtp")]
        again = ratio(*kept)
        assert (again.low, again.high) == pytest.approx((ours["speedup_low"], ours["speedup_high"]), rel=1e-3)
    if name == "decode":
        text, ours = generated.decode_table(rows), rows[rows["variant"] == "fusedtp"].set_index("M")
        (line,) = [line for line in text.splitlines() if line.startswith("| 2 | 5 |")]
        assert float(line.split("|")[3]) == pytest.approx(ours["speedup_vs_torch"][5], abs=0.006)
        assert text.count("|\n") == 2 + 3
        assert "of 8 x 16, 12 x 8; float32, " in text


@pytest.mark.parametrize(
    ("name", "size"), [("mlp", "16,8,31"), ("grouped", "6,8,8,4,3"), ("decode", "1,8"), ("mlp", "0,8,2")]
)
def test_sizes_that_ranks_cannot_share_are_refused(name: str, size: str) -> None:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [name, "--shapes", size])
    assert done.exit_code == 2, done.output
    assert "--shapes" in done.output


def test_default_sizes_are_split_by_powers_of_two() -> None:
    for suite in SUITES.values():
        for size in suite.sizes:
            for world_size in (2, 4, 8):
                suite.check_size(size, world_size)


def off_by(group: ProcessGroup, name: str, size: tuple[int, ...]) -> str:
    with mock.patch.object(layers, "TOLERANCE", 0.0), pytest.raises(AssertionError) as caught:
        layers.compare(group, name, size, 0.0)
    return str(caught.value)


@pytest.mark.parametrize("name", SUITES)
def test_what_is_off_is_refused(name: str, pool: RankPool) -> None:
    size = tuple(map(int, SMALL[name][0].split(",")))
    told = pool.run(off_by, name, size, world_size=2)
    assert all(" is off by " in each and f"at {size}" in each for each in told), told


def test_overhead_rows_of_every_size_and_direction_are_appended(tmp_path: Path) -> None:
    out = tmp_path / "overhead.csv"
    columns = "commit,dirty,machine,torch,world_size,direction,rows,features,beside_us,q1_us,q3_us,linear_us"
    out.write_text(f"{columns}\nbefore,False,another,2.11.0,1,forward,8,64,200.0,190.0,210.0,5.0\n")
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["overhead", "--out", str(out), "--rounds", "3"])
    assert done.exit_code == 0, done.output
    rows = pd.read_csv(out)
    assert ",".join(rows.columns) == columns
    assert rows.commit[0] == "before"
    assert list(zip(rows.world_size, rows.direction, strict=True)) == [
        (1, "forward"), (1, "forward"), (1, "both"), (2, "forward"), (2, "both")
    ]  # fmt: skip
    # A call costs its host something, and less than 10 ms even on a busy machine; with peers rounds may differ by more
    # than that.
    assert rows.beside_us.abs().lt(10_000).all(), rows
    assert rows.beside_us[rows.world_size == 1].gt(1).all(), rows
    assert rows.linear_us.between(1, 10_000).all(), rows
    assert (rows.q1_us <= rows.beside_us).all()
    assert (rows.beside_us <= rows.q3_us).all()
