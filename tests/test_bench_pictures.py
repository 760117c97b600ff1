"""Pictures of rows: nothing that was timed is left out, nothing is cut off, and every axis can be read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from fusedtp.bench import figures, report, theme
from fusedtp.bench.frames import frame_of
from fusedtp.bench.store import Measurement

MakeRow = Callable[..., Measurement]


def test_picture_has_a_panel_an_op_and_a_model_sorted_by_tokens(make_row: MakeRow, tmp_path: Path) -> None:
    names = {"matmul": 1.0, "comm": 2.0, "unfused": 6.0, "decomposed": 4.0, "auto": 5.0, "dtensor": 8.0}
    many = [make_row(variant=name, median_ms=ms, M=2048) for name, ms in names.items()]
    few = [replace(row, M=256) for row in many[:4]]
    model = [replace(row, model="llama3-8b", tokens=1024, layer="mlp up") for row in many[:4]]
    others = [replace(row, op="matmul_all_reduce", direction="both", world_size=4) for row in many]
    alone = [replace(row, M=77, world_size=1) for row in many]
    assert report.picture([*many, *few, *model, *others, *alone], tmp_path / "sweep.png")
    with theme.style():
        drawn = figures.overview(frame_of([*many, *few, *model, *others, *alone]))
    found = {}
    for axes in (each for each in drawn.axes if each.axison):
        words = [text.get_text() for text in axes.texts]
        found[axes.get_title(loc="left")] = [each.get_text() for each in axes.get_yticklabels()], words
    assert found == {
        "all-gather + matmul": (
            ["256 x 1024 x 1024 fp32", "2048 x 1024 x 1024 fp32"],
            ["forward, 2 ranks", "1.50x", "1.50x", "0.75x"],
        ),
        "llama3-8b": (["mlp up, 1024 tokens fp32"], ["forward, 2 ranks", "1.50x"]),
        "matmul + all-reduce": (["2048 x 1024 x 1024 fp32"], ["both, 4 ranks", "1.50x", "0.75x"]),
    }
    assert not report.picture(alone, tmp_path / "none.png")


def test_a_bar_is_grey_where_its_interval_has_one_in_it(make_row: MakeRow) -> None:
    """Also on the map, whose cell is then white; and the axis of ratios has ticks at powers of two."""
    around = {"median_ms": 1.0, "p20_ms": 0.9, "p80_ms": 1.1}
    found = []
    for at, name in itertools.product(
        ({"M": 1024}, {"M": 2048}, {"M": 1024, "world_size": 4}), ("decomposed", "fused")
    ):
        unfused, factor = make_row(**at, **around), {"decomposed": 0.95, "fused": 0.5}[name]
        found += [unfused] * (name == "fused")
        found.append(replace(unfused, variant=name, **{key: factor * ms for key, ms in around.items()}))
    with theme.style():
        drawn, cells = figures.overview(frame_of(found)), figures.speedup_map(frame_of(found))
        drawn.canvas.draw()
    (axes,) = drawn.axes
    faces = [to_hex(bar.get_facecolor()) for bar in axes.patches]
    assert faces == [theme.colour("wait"), theme.colour("fused")] * 3
    low, high = axes.get_xlim()
    ticks = [label.get_text() for label in axes.get_xticklabels() if low < label.get_position()[0] < high]
    assert ticks == ["0.5x", "1x", "2x"]
    decomposed, fused = cells.axes
    assert [text.get_text() for text in decomposed.texts] == ["~1.05", "~1.05", "~1.05", "-"]
    assert decomposed.collections[0].get_array().compressed().tolist() == [0.0] * 3
    assert fused.collections[0].get_array().compressed().tolist() == pytest.approx([math.log(2)] * 3)
    # One size, or one number of ranks, makes no map.
    assert figures.speedup_map(frame_of([row for row in found if row.M == 1024])) is None
    assert figures.speedup_map(frame_of([row for row in found if row.world_size == 2])) is None


def test_nothing_of_the_picture_is_cut_off(make_row: MakeRow) -> None:
    """Of a single op and size, the narrowest, and of two, by rows whose machine and commit have long names."""
    at = {"cpu": "Some Vendor(R) Processor(R) Platinum 0000C CPU @ 2.00GHz", "cores": 128, "torch": "2.13.0+cpu"}
    times = {"matmul": 1.0, "unfused": 2.0, "decomposed": 1.5, "fused": 1.2, "dtensor": 3.0}
    found = [make_row(variant=name, median_ms=ms, commit="0" * 12, dirty=True, **at) for name, ms in times.items()]
    more = [replace(row, op="matmul_reduce_scatter", M=131072, N=131072, K=131072) for row in found]
    with theme.style():
        for rows in (found, found + more):
            drawn = figures.overview(frame_of(rows))
            drawn.draw_without_rendering()
            paper = drawn.bbox
            titles = [axes._left_title for axes in drawn.axes]
            names = [label for axes in drawn.axes for label in axes.get_yticklabels()]
            boxes = [each.get_window_extent() for each in (*titles, *names)]
            for artist in (*drawn.legends, *drawn.texts, drawn._supxlabel, *titles, *names):
                box = artist.get_window_extent()
                assert paper.x0 <= box.x0 <= box.x1 <= paper.x1, artist
            for one, other in itertools.combinations(boxes, 2):
                assert not one.overlaps(other)


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


def test_parts_of_a_time_add_up() -> None:
    def account(*times: float) -> tuple[float, ...]:
        return tuple(figures.account(*times).values())

    assert account(10.0, 6.0, 3.0) == (6.0, 3.0, 1.0)
    assert account(7.0, 6.0, 3.0) == (6.0, 1.0, 0.0)
    assert account(5.0, 6.0, 3.0) == (5.0, 0.0, 0.0)
    assert account(10.0, 6.0, math.nan) == (6.0, 0.0, 4.0)
