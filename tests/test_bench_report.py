"""Pictures and page of rows: everything timed is shown, texts match the rows, and the page fetches nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from statistics import geometric_mean

import pytest
from rich.console import Console

from fusedtp import cost
from fusedtp.bench import figures, report, store, tables, theme
from fusedtp.bench.cases import LAYERS, OPS
from fusedtp.bench.frames import frame_of, standings
from fusedtp.bench.store import Measurement
from fusedtp.bench.timeline import Mark, Timeline
from fusedtp.bench.timeline import write as write_timeline
from fusedtp.cost.hardware import HARDWARE

from .command import command

MakeRow = Callable[..., Measurement]
VOID = {"meta", "link", "br", "input"}
# 512: clearly slower; 1024: no difference within the interval; 2048 and 4096: clearly faster
RATIOS = {512: 0.8, 1024: 1.003, 2048: 1.25, 4096: 1.6}
MORE_RANKS = ("unfused", "decomposed")
TINY = {"M": 8, "N": 8, "K": 8}
MATMUL = ("model", "direction", "matmul", "world_size")


@pytest.fixture(scope="session")
def rows(make_row: MakeRow) -> list[Measurement]:
    """Square gathers, two also on four ranks; a model's block; predictions; a refused row; a checked row."""
    found = []
    for size, ratio in RATIOS.items():
        at = {"M": size, "N": size, "K": size}
        unfused = size / 100
        times = {"matmul": 0.5 * unfused, "comm": 0.4 * unfused, "unfused": unfused, "decomposed": unfused / ratio}
        found += [make_row(variant=name, median_ms=ms, **at) for name, ms in times.items()]
        if size > 1024:
            found += [make_row(variant=name, median_ms=times[name], world_size=4, **at) for name in MORE_RANKS]
        found.append(make_row(variant="decomposed", median_ms=0.9 * unfused, rounds=0, predicted=True, **at))
    for place, layer in enumerate(LAYERS):
        op, share = OPS[place % 2], 1.0 + place
        at = {"op": op, "model": "tiny", "layer": layer, "tokens": 64, "M": 64, "N": 128, "K": 96}
        for name, ms in (("matmul", 1.0), ("comm", 3.0), ("unfused", 4.0), ("decomposed", 2.0), ("dtensor", 5.0)):
            if (name, layer) != ("dtensor", "mlp down"):
                found.append(make_row(variant=name, median_ms=share * ms, **at))
    refused = '[0] 3 of 4 elements are wrong: <i>1 & "so"'
    found.append(make_row(variant="fused", M=96, gate=refused, interpreted=True))
    found.append(make_row(variant="fused", M=97, error_ratio=0.25, interpreted=True))
    found.append(make_row(variant="async_tp", M=98, gate="not run: its fused ops need CUDA"))
    return found


class Page(HTMLParser):
    """A parser that fails on tags not closed in order, and keeps ids, links, text and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def sections(self) -> list[str]:
        """Return the sections in order; each must have a link."""
        links = [value[1:] for tag, name, value in self.attributes if (tag, name) == ("a", "href")]
        assert [each for each in self.ids if each in report.SECTIONS] == links
        return links

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="session")
def written(rows: list[Measurement], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "sweep.csv"
    store.write(path, rows)
    about = {"op": "all_gather_matmul", "M": 4, "N": 5, "K": 6, "dtype": "float32", "world_size": 2}
    marks = (Mark("decomposed", 0, "call", -1, 0.0, 90.0), Mark("decomposed", 0, "wait", 1, 10.0, 50.0))
    write_timeline(Timeline({**about, "format": "fusedtp timeline 1"}, marks), path.with_name("timeline.json"))
    report.write(rows, path)
    return path


def test_page_is_whole_and_fetches_nothing(written: Path) -> None:
    text = written.with_suffix(".html").read_text()
    found = Page(text)
    assert len(found.ids) == len(set(found.ids))
    for tag, name, value in found.attributes:
        if name in ("href", "xlink:href") and value.startswith("#"):
            assert value[1:] in found.ids, value
        elif name in ("src", "href", "xlink:href", "data", "srcset"):
            assert value == "data:,", (tag, name, value)
        for target in re.findall(r"url\((.*?)\)", value):
            assert target.lstrip("#") in found.ids, target
    # the only addresses are names of XML namespaces
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "@import" not in text
    assert "@font-face" not in text


def test_every_section_and_figure_is_there_the_latter_as_png_too(written: Path) -> None:
    found = Page(written.with_suffix(".html").read_text())
    pictures = [*report.PICTURES, "timeline"]
    assert pictures == ["tokens", "fast", "time", "speedup", "parts", "busbw", "timeline"]
    shown = [name for name in pictures if name not in ("tokens", "busbw")]
    assert found.sections == ["short", "sizes", "blocks", *shown, "times", "refused", "checked", "rows"]
    drawn = {path.stem for path in report.folder_of(written).iterdir()}
    assert drawn == {
        "fast-tiny-forward",
        "fast-single-matmuls-forward",
        "time-single-matmuls-forward-fp32",
        "speedup-tiny-forward-2-ranks",
        "speedup-single-matmuls-forward-2-ranks",
        "speedup-single-matmuls-forward-4-ranks",
        "parts-tiny-forward-2-ranks",
        "parts-single-matmuls-forward-2-ranks",
        "timeline-call",
    }
    assert drawn <= set(found.ids)
    labels = [value for tag, name, value in found.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == len(drawn)
    for path in report.folder_of(written).iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


def test_words_come_from_the_rows(written: Path, rows: list[Measurement]) -> None:
    found = Page(written.with_suffix(".html").read_text())
    # The terminal's verdict: square sizes, two also on four ranks, and the block's four matmuls, each twice as fast.
    for text in (
        *tables.verdict(frame_of(rows)),
        "Gain: decomposed is faster than unfused in 8 of 10 cases, slower in 1",
        "from 1024 x 1024 x 1024 fp32",
        # the gate's message is text, not markup
        '3 of 4 elements are wrong: <i>1 & "so"',
        f"1 of {len(rows)} results were wrong",
        "async_tp: its fused ops need CUDA",
    ):
        assert text in found.text
    standing = standings(frame_of(rows), *MATMUL)
    (line,) = standing[(standing["model"] == "") & (standing["world_size"] == 2)].to_dict("records")
    assert (line["faster"], line["slower"], line["cases"]) == (2, 1, 4)
    assert line["mean"] == pytest.approx(geometric_mean(RATIOS.values()), rel=1e-9)
    assert line["shorter median"] == "from 1024 x 1024 x 1024 fp32"
    assert (line["worst at"], line["worst"]) == ("512 x 512 x 512 fp32", pytest.approx(0.8))


def test_cells_and_headings_are_text(make_row: MakeRow) -> None:
    """Names of variants, models and processors may be any text, and must not act as markup or as a column's format."""
    odd = ["<b>bold</b>", "mean", "x\nmean", "{}", "speed-up", "ms"]
    lines = [make_row(variant=name, median_ms=2.0, cpu="<i>", **TINY) for name in ("unfused", "matmul", *odd)]
    found = [*lines]
    for layer, op in zip(LAYERS, OPS[:2] * 2, strict=True):
        at = {"model": "<u>", "layer": layer, "tokens": 64, "op": op}
        found += [make_row(variant=name, median_ms=2.0, **at) for name in ("unfused", *odd)]
    with theme.style():
        drawn = figures.speedups(frame_of(lines))
        picture = report.Picture("x", "<u>", theme.svg(drawn, "x", "<i>"))
    text = report.page(frame_of(found), {"speedup": [picture]})
    Page(text)
    assert "&lt;b&gt;bold&lt;/b&gt;" in text
    assert not re.search("<b>bold|<i>|<u>", text)
    console = Console(file=StringIO(), width=300, markup=False)
    report.show(found, console)
    assert "<b>bold</b>" in console.file.getvalue()  # type: ignore[attr-defined]


def test_command_and_the_cost_model_beside_what_was_measured(make_row: MakeRow, tmp_path: Path) -> None:
    at = {"M": 4096, "N": 4096, "K": 8192, "dtype": "bfloat16", "world_size": 8}
    measured = [make_row(median_ms=1.0, **at), make_row(variant="fused", median_ms=0.5, **at)]
    base = measured[0]
    left_out = [replace(base, world_size=1), replace(base, direction="backward"), replace(base, variant="auto")]
    found = report.predictions([*measured, *left_out], lambda ranks: HARDWARE["h100"])
    model = cost.predict("all_gather_matmul", M=4096, N=4096, K=8192, world_size=8, hardware="h100")
    times = {name: model.times[name] / 1e3 for name in ("unfused", "fused")}
    assert {row.variant: row.median_ms for row in found} == times
    kept = {(row.predicted, row.case, row.rounds, row.p20_ms, row.speedup_vs_unfused) for row in found}
    assert kept == {(True, base.case, 0, None, None)}

    path = tmp_path / "sweep.csv"
    store.write(path, measured)
    command("report", path, "--hardware", "h100")
    text = Page((tmp_path / "sweep.html").read_text()).text
    for said in ("4, of which 2 timed", "predictions cost model, h100", "fused is faster than unfused in 1 of 1"):
        assert said in text
    assert [path.stem for path in report.folder_of(path).iterdir()] == ["speedup-single-matmuls-forward-8-ranks"]
    assert (tmp_path / "sweep.png").exists()
    # predictions are drawn but not stored
    assert store.read(path) == measured
    assert "abacus" in command("report", path, "--hardware", "abacus", code=2)


def test_a_prediction_has_nothing_that_was_measured_and_a_layer_has_none(make_row: MakeRow) -> None:
    measured = {"late_rounds": 20, "host_us": 77.0, "tokens_per_s": 5e6, "roofline": 0.9, "peak_bytes": 123.0,
                "rounds_ms": (1.0,) * 20, "launches": (10, 10), "gpu_before": "SM 1 MHz", "load": 2.0}  # fmt: skip
    row = make_row(median_ms=1.0, variant="fused", torch="2.13", **measured)
    layer = make_row(median_ms=1.0, op="mlp", variant="decomposed")
    (found,) = report.predictions([row, layer], lambda ranks: HARDWARE["h100"])
    empty = make_row()
    assert {name: getattr(found, name) for name in measured} == {name: getattr(empty, name) for name in measured}
    assert (found.case, found.variant, found.torch) == (row.case, row.variant, row.torch)
    assert report.late([row, found]).startswith("Careful, in 1 rows")


def test_verdict_names_what_is_sure(make_row: MakeRow) -> None:
    """The largest is not that of a noisy case; the smallest may be, and says so, if no case is slower for sure."""
    found = []
    for size, p20, median, p80 in (
        (512, 0.49, 0.5, 0.51),
        (1024, 0.79, 0.8, 0.81),
        (2048, 0.2, 0.4, 1.5),
        (4096, 0.5, 1.1, 2),
    ):
        found += [make_row(M=size, median_ms=1.0)]
        found += [make_row(M=size, variant="decomposed", median_ms=median, p20_ms=p20, p80_ms=p80)]
    shown = tables.times(frame_of(found), "forward").cells["speed-up\ndecomposed"]
    assert list(shown) == ["2.00x", "1.25x", "~2.50x", "~0.91x"]
    gain, ends, share = tables.verdict(frame_of(found))
    # unfused is the fastest other implementation here: two of four cases are 1.5 times as fast, by medians.
    assert share.endswith("fastest other's: 75% at p = 1, 75% at p = 1.2, 50% at p = 1.5.")
    assert gain.startswith("Gain: decomposed is faster than unfused in 2 of 4 cases, slower in 0")
    most = r"Largest speed-up beyond noise: 2\.00x \(.* at .*512 x 1024.*; smallest: "
    assert re.match(most + r"0\.91x \(.*, no difference\) at .*4096 x 1024", ends)
    found += [replace(found[0], M=8192)]
    found += [make_row(M=8192, variant="decomposed", median_ms=1.05, p20_ms=1.04, p80_ms=1.06)]
    assert re.match(most + r"0\.95x \([\d. to]*\) at .*8192 x 1024", tables.verdict(frame_of(found))[1])
    found += [replace(row, variant="auto", path=f"fused: {row.M}") for row in found if row.variant == "decomposed"]
    assert tables.verdict(frame_of(found))[2:4] == ["auto takes fused in 5 of 5 cases:", "- in 1, 512."]
    assert tables.verdict(frame_of(found))[5:7] == ["- in 1, 2048.", "- other reasons: 2."]


@pytest.mark.parametrize("range_ms", [(1.0, 1.2), (3.2, 9.5), (1.0, 30.0), (1e-6, 1e4), (5.0, 5.0)])
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
        assert 3 <= len(set(shown)) == len(shown) <= 10, shown


def test_parts_of_a_time_add_up() -> None:
    for times, parts in (
        ((10.0, 6.0, 3.0), (6.0, 3.0, 1.0)), ((7.0, 6.0, 3.0), (6.0, 1.0, 0.0)), ((5.0, 6.0, 3.0), (5.0, 0.0, 0.0)),
        ((10.0, 6.0, math.nan), (6.0, 0.0, 4.0)),
    ):  # fmt: skip
        assert tuple(figures.account(*times).values()) == parts
