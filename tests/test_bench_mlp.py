"""`fusedtp mlp` and `fusedtp.bench.grouped`: the sizes that are asked for, and an interval for every speed-up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pandas as pd
import pytest
from torch.distributed import ProcessGroup
from typer.testing import CliRunner

from fusedtp.bench import grouped, machine, mlp, ranks
from fusedtp.bench.cli import app
from fusedtp.bench.intervals import Interval
from fusedtp.bench.mlp import Result
from fusedtp.bench.ranks import RankPool
from fusedtp.bench.timing import Timing


def result(dtensor: list[float], ours: list[float], size: tuple[int, int, int] = (16, 8, 32)) -> Result:
    times = {"dtensor": dtensor, "fusedtp": ours, "local": [0.5] * len(ours)}
    return Result(*size, 2, {name: Timing.of(rounds_ms) for name, rounds_ms in times.items()})


@pytest.mark.parametrize(
    ("ours", "told"),
    [([1.0, 1.01, 0.99], "faster"), ([2.5, 1.5, 1.9], "cannot be told apart"), ([4.0, 4.1, 4.2], "slower")],
)
def test_speedup_has_the_interval_of_its_rounds(ours: list[float], told: str) -> None:
    found = result([2.0, 2.02, 1.98], ours)
    interval = found.speedup()
    assert interval.ratio == 2.0 / sorted(ours)[1]
    assert interval.low < interval.ratio < interval.high
    assert str(interval) in str(found)
    assert str(found).endswith(told)
    assert found.speedup("dtensor").low <= 1.0 <= found.speedup("dtensor").high


def test_command_times_the_sizes_it_is_given(pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []

    def run(compare: Callable[..., Result], *arguments: Any, told: Any) -> list[Result]:
        sizes.append(arguments[:3])
        return pool.run(compare, *arguments, world_size=2)

    @contextmanager
    def started(world_size: int, **_: Any) -> Any:
        yield SimpleNamespace(run_again=run)

    monkeypatch.setattr(ranks, "RankPool", started)
    shapes = ("--shapes", "16,8,32", "--shapes", "4,6,2", "--shapes", "16x8x32")
    done = CliRunner().invoke(app, ["mlp", *shapes, "--seconds", "0", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert sizes == [(16, 8, 32), (4, 6, 2)]
    assert done.output.count("95 % interval in brackets") == 2
    rows = pd.read_csv(tmp_path / machine.describe().name / "mlp.csv")
    assert list(rows["variant"]) == ["dtensor", "fusedtp", "local"] * 2
    assert set(zip(rows["M"], rows["D"], rows["F"], strict=True)) == set(sizes)
    assert (rows["speedup_low"] <= rows["speedup_vs_dtensor"]).all()
    assert (rows["speedup_vs_dtensor"] <= rows["speedup_high"]).all()
    # the interval can be computed again from what is kept
    ours = rows[(rows["variant"] == "fusedtp") & (rows["M"] == 16)].iloc[0]
    dtensor = rows[(rows["variant"] == "dtensor") & (rows["M"] == 16)].iloc[0]
    rounds = [[float(ms) for ms in row["rounds_ms"].split()] for row in (dtensor, ours)]
    again = result(*rounds).speedup()
    assert isinstance(again, Interval)
    assert (again.low, again.high) == pytest.approx((ours["speedup_low"], ours["speedup_high"]), rel=1e-3)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_default_sizes_are_split_by_powers_of_two(world_size: int) -> None:
    for size in mlp.SIZES:
        mlp.check_size(*size, world_size)


def off_by(group: ProcessGroup, size: tuple[Any, ...]) -> str:
    with mock.patch.object(grouped, "TOLERANCE", 0.0), pytest.raises(AssertionError) as caught:
        grouped.compare(group, *size, 0.0)
    return str(caught.value)


def test_grouped_projections_that_are_off_are_refused(pool: RankPool) -> None:
    told = pool.run(off_by, (6, 8, (4, 4, 2)), world_size=2)
    assert all(" is off by " in each and "at 6, 8, (4, 4, 2)" in each for each in told), told


def test_grouped_projections_from_the_command_line(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def started(world_size: int, **_: Any) -> Any:
        yield SimpleNamespace(run_again=partial(pool.run, world_size=world_size))

    monkeypatch.setattr(grouped, "RankPool", started)
    # q, k and v of unlike widths, one of them with one row a rank.
    command = ["grouped", "--out", str(tmp_path), "--seconds", "0", "--size", "6,8,8,4,2"]
    monkeypatch.setattr(sys, "argv", command)
    grouped.main()
    rows = pd.read_csv(tmp_path / machine.describe().name / "grouped.csv")
    medians = rows.set_index("variant")["median_ms"]
    assert list(rows["variant"]) == ["dtensor", "dtensor_once", "fusedtp", "concatenated", "local"]
    assert set(rows["widths"]) == {"8 4 2"}
    assert (rows["rounds"] >= 2).all()
    assert rows["speedup_vs_dtensor"][2] == pytest.approx(medians["dtensor"] / medians["fusedtp"])
    assert (rows["speedup_low"] <= rows["speedup_vs_dtensor"]).all()
    assert (rows["speedup_vs_dtensor"] <= rows["speedup_high"]).all()
    with pytest.raises(ValueError, match="6,8,8,4,3"):
        grouped.size("6,8,8,4,3")
