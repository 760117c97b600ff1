"""Pictures of rows: nothing that was timed is left out, nothing is cut off, and every axis can be read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fusedtp.bench import figures, report, theme
from fusedtp.bench.frames import frame_of
from fusedtp.bench.store import Measurement

MakeRow = Callable[..., Measurement]


def test_picture_shows_every_direction_and_every_rival(make_row: MakeRow, tmp_path: Path) -> None:
    names = ("matmul", "comm", "unfused", "decomposed", "auto", "dtensor")
    both = [make_row(variant=name, median_ms=1.0 + at, direction="both") for at, name in enumerate(names)]
    forward = [replace(row, direction="forward", M=512, world_size=4) for row in both[:4]]
    assert report.picture(both, tmp_path / "sweep.png")
    with theme.style():
        drawn = figures.overview(frame_of([*both, *forward]))
        text = theme.svg(drawn, "x", "x")
    assert [axes.get_title(loc="left") for axes in drawn.axes] == [
        "all-gather + matmul, forward, 4 ranks",
        "all-gather + matmul, both, 2 ranks",
    ]
    labels = re.findall(r">([^<>]*) \(20-80 %\)<", text)
    assert labels == ["unfused", "decomposed", "dtensor"]
    # the best of ours, whatever dtensor reaches
    assert "0.75x" in text
    assert not report.picture([make_row(variant="fused", interpreted=True)], tmp_path / "none.png")


def test_picture_has_the_plain_cases_of_each_direction_or_its_models(make_row: MakeRow) -> None:
    plain = make_row(median_ms=1.0, M=512)
    model = make_row(median_ms=1.0, model="llama3-8b", tokens=1024, layer="mlp up")
    both = replace(model, direction="both")
    with theme.style():
        drawn = figures.overview(frame_of([plain, model, both, replace(plain, op="matmul_all_reduce", world_size=4)]))
    found = {}
    for axes in drawn.axes:
        lines = [each.get_text() for each in axes.get_yticklabels()]
        found[axes.get_title(loc="left")] = lines, "not measured" in [text.get_text() for text in axes.texts]
    assert found == {
        "all-gather + matmul, forward, 2 ranks": (["512 x 1024 x 1024 fp32"], False),
        "matmul + all-reduce, forward, 2 ranks": ([], True),
        "all-gather + matmul, forward, 4 ranks": ([], True),
        "matmul + all-reduce, forward, 4 ranks": (["512 x 1024 x 1024 fp32"], False),
        "all-gather + matmul, both, 2 ranks": (["llama3-8b mlp up, 1024 x 1024 x 1024 fp32"], False),
        "matmul + all-reduce, both, 2 ranks": ([], True),
    }


def test_nothing_of_the_picture_is_cut_off(make_row: MakeRow) -> None:
    """Of a single op and size, the narrowest, by rows whose machine and commit have long names."""
    at = {"cpu": "Some Vendor(R) Processor(R) Platinum 0000C CPU @ 2.00GHz", "cores": 128, "torch": "2.13.0+cpu"}
    times = {"matmul": 1.0, "unfused": 2.0, "decomposed": 1.5, "fused": 1.2, "dtensor": 3.0}
    found = [make_row(variant=name, median_ms=ms, commit="0" * 12, dirty=True, **at) for name, ms in times.items()]
    with theme.style():
        drawn = figures.overview(frame_of(found))
        drawn.canvas.draw()
        paper = drawn.bbox
        for artist in (*drawn.legends, *drawn.texts, drawn._supxlabel):
            box = artist.get_window_extent()
            assert paper.x0 <= box.x0 <= box.x1 <= paper.x1, artist


@pytest.mark.parametrize("range_ms", [(1.0, 1.2), (3.2, 9.5), (2.1, 4.9), (1.0, 30.0), (1e-6, 1e4), (5.0, 5.0)])
def test_every_logarithmic_axis_has_ticks(range_ms: tuple[float, float]) -> None:
    with theme.style():
        drawn, panels = theme.panels([3], 1, line=1.0, row=1.0)
        axes = panels[0, 0]
        for which in "xy":
            theme.log_scale(axes, which)
        axes.plot(range_ms, range_ms)
        drawn.canvas.draw()
    for ticks, (low, high) in ((axes.get_xticks(), axes.get_xlim()), (axes.get_yticks(), axes.get_ylim())):
        shown = [f"{tick:g}" for tick in ticks if low <= tick <= high]
        assert 3 <= len(shown) <= 10, shown
        assert len(set(shown)) == len(shown)


def test_crossover_line_parts_faster_from_slower_within_a_dtype() -> None:
    ratios = np.array([[0.9, 1.2], [1.1, 1.3], [0.8, math.nan]])
    below, right = ((-0.5, 0.5), (0.5, 0.5)), ((0.5, 0.5), (-0.5, 0.5))
    assert sorted(figures.borders(ratios, ["a", "a", "b"])) == sorted([below, right])
    assert len(figures.borders(ratios, ["a", "a", "a"])) == 3


def test_parts_of_a_time_add_up() -> None:
    def account(*times: float) -> tuple[float, ...]:
        return tuple(figures.account(*times).values())

    assert account(10.0, 6.0, 3.0) == (6.0, 3.0, 1.0)
    assert account(7.0, 6.0, 3.0) == (6.0, 1.0, 0.0)
    assert account(5.0, 6.0, 3.0) == (5.0, 0.0, 0.0)
    assert account(10.0, 6.0, math.nan) == (6.0, 0.0, 4.0)
