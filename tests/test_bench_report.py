"""The page says what rows say, is whole HTML that fetches nothing, and has a section for what there is."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from fusedtp import cost
from fusedtp.bench import figures, report, store, tables, theme
from fusedtp.bench.cases import LAYERS, OPS
from fusedtp.bench.cli import app
from fusedtp.bench.frames import frame_of, standings
from fusedtp.bench.store import Measurement
from fusedtp.bench.timeline import Mark, Timeline
from fusedtp.bench.timeline import write as write_timeline
from fusedtp.cost.hardware import HARDWARE

MakeRow = Callable[..., Measurement]
VOID = {"meta", "link", "br", "input"}
# 512: clearly slower, 1024: the same within its interval, 2048 and 4096: clearly faster
RATIOS = {512: 0.8, 1024: 1.003, 2048: 1.25, 4096: 1.6}
MORE_RANKS = ("unfused", "decomposed")
TINY = {"M": 8, "N": 8, "K": 8}


@pytest.fixture(scope="session")
def rows(make_row: MakeRow) -> list[Measurement]:
    """Square gathers, two of them on four ranks too, a model's block, predictions, a refusal and a check."""
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
    """Fails on a tag that is not closed in order; keeps ids, links, text and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.classes: list[set[str]] = []
        self.boxes: list[tuple[str, set[str]]] = []
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
        if tag in ("table", "svg", "pre", "img"):
            self.boxes.append((tag, set[str]().union(*self.classes)))
        if tag not in VOID:
            self.open.append(tag)
            self.classes.append(set((dict(attrs).get("class") or "").split()))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag
        self.classes.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

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
    # addresses are only names of XML's namespaces
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "@import" not in text
    assert "@font-face" not in text


def test_every_figure_is_there_and_as_png(written: Path) -> None:
    found = Page(written.with_suffix(".html").read_text())
    drawn = {path.stem for path in report.folder_of(written).iterdir()}
    assert drawn == {
        "time-single-matmuls-forward-fp32",
        "speedup-single-matmuls-forward",
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
    # the square sizes, two of them on four ranks too, and the block's four matmuls, each of which is twice as fast
    mean = math.exp(sum(map(math.log, (*RATIOS.values(), 1.25, 1.6, 2, 2, 2, 2))) / 10)
    assert f"decomposed is the fastest on average, at {mean:.2f}x the speed of unfused" in found.text
    assert "over 10 cases with 2 or more ranks; from 0.80x to 2.00x" in found.text
    assert "It is faster in 8, slower in 1, and cannot be told apart in 1." in found.text
    assert "from 1024 x 1024 x 1024 fp32" in found.text
    # a gate's words are text, not markup
    assert '3 of 4 elements are wrong: <i>1 & "so"' in found.text
    assert f"1 of {len(rows)} results were wrong" in found.text
    assert "async_tp: its fused ops need CUDA" in found.text


def test_sections_without_content_are_absent(make_row: MakeRow, rows: list[Measurement], tmp_path: Path) -> None:
    def links(given: list[Measurement]) -> list[str]:
        report.write(given, path)
        found = Page(path.with_suffix(".html").read_text())
        assert [each for each in found.ids if each in report.SECTIONS] == [
            value[1:] for tag, name, value in found.attributes if (tag, name) == ("a", "href")
        ]
        return [each for each in found.ids if each in report.SECTIONS]

    path = tmp_path / "sweep.csv"
    assert links([row for row in rows if row.interpreted]) == ["refused", "checked", "rows"]
    assert "Nothing was timed" in Page(path.with_suffix(".html").read_text()).text
    assert not report.folder_of(path).exists()
    path.with_name("timeline.json").write_text("{}")
    alone = [make_row(variant="comm", median_ms=1.0)]
    assert links(alone) == ["times", "rows"]
    assert "1 results compared with float64, 0 refused" in Page(path.with_suffix(".html").read_text()).text
    # Whoever looks at the terminal is told why there is no timeline.
    store.write(path, alone)
    said = " ".join(invoke(path).output.split())
    assert "no timeline on the page:" in said
    assert "is not a timeline of fusedtp" in said
    assert "its pictures" not in said


def test_a_value_beyond_the_bound_is_explained(make_row: MakeRow) -> None:
    found = [make_row(median_ms=2.0), make_row(variant="fused", median_ms=0.9, matmul_fraction=0.9)]
    assert "above 100 %" not in report.page(frame_of(found), {})
    found[1] = replace(found[1], matmul_fraction=1.09)
    assert "of matmul is above 1, up to 1.09, and hidden above 100 %" in Page(report.page(frame_of(found), {})).text


def test_what_may_be_wide_scrolls_in_a_box_of_its_own(written: Path) -> None:
    """Without a browser: each table and picture is in such a box, and what is not in one is given no least width."""
    text = written.with_suffix(".html").read_text()
    boxes = Page(text).boxes
    assert {tag for tag, _ in boxes} == {"table", "svg"}
    for tag, classes in boxes:
        assert classes & {"scroll", "picture"}, tag
    style = text[text.index("body {") : text.index("</style>")]
    plain = re.sub(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*\s*\}", "", style)
    rules = {
        name.strip(): rule for names, rule in re.findall(r"([^{}]*)\{([^{}]*)\}", plain) for name in names.split(",")
    }
    for name in (".scroll", ".picture"):
        assert "overflow: auto" in rules[name], name
        assert "max-width: 100%" in rules[name], name
    assert "overflow-wrap: anywhere" in rules["body"]
    wide = {name for name, rule in rules.items() if re.search(r"(?<![\w-])(min-)?width:|nowrap", rule)}
    assert wide == {".picture svg", "#rows td"}


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.mark.parametrize("width", [400, 1200])
def test_page_in_a_browser_is_no_wider_than_its_window(written: Path, tmp_path: Path, width: int) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the PATH")
    report_it = (
        "const page = this.contentDocument.documentElement, names = this.contentWindow.performance;"
        "document.title = [page.clientWidth, page.scrollWidth, names.getEntriesByType('resource').length].join(' ')"
    )
    page = escape(written.with_suffix(".html").read_text())
    frame = f'<iframe style="border: 0" width="{width}" height="900" onload="{report_it}" srcdoc="{page}"></iframe>'
    (tmp_path / "frame.html").write_text(f"<!DOCTYPE html><title></title>{frame}")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND")
    command = [browser, *options, f"--user-data-dir={tmp_path}", "--dump-dom", f"file://{tmp_path}/frame.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search("<title>(.*)</title>", done.stdout)
    assert title is not None, done.stderr
    inner, content, fetched = map(int, title[1].split())
    assert 0.9 * width < inner <= width
    assert content <= inner
    assert fetched == 0


MATMUL = ("model", "direction", "matmul", "world_size")


def test_standing_and_crossover(rows: list[Measurement]) -> None:
    found = standings(frame_of(rows), *MATMUL)
    (standing,) = found[(found["model"] == "") & (found["world_size"] == 2)].to_dict("records")
    assert (standing["faster"], standing["slower"], standing["cases"]) == (2, 1, 4)
    assert standing["mean"] == pytest.approx(math.exp(sum(map(math.log, RATIOS.values())) / len(RATIOS)), rel=1e-9)
    assert standing["shorter median"] == "from 1024 x 1024 x 1024 fp32"
    assert (standing["worst at"], standing["worst"]) == ("512 x 512 x 512 fp32", pytest.approx(0.8))


def test_sizes_of_another_dtype_have_a_crossover_of_their_own(make_row: MakeRow) -> None:
    found = []
    for dtype, ratio in (("float32", 1.5), ("float16", 0.5)):
        for tokens in (512, 1024):
            at = {"M": tokens, "tokens": tokens, "model": "llama3-8b", "layer": "mlp up", "dtype": dtype}
            found += [make_row(median_ms=1.0, **at), make_row(variant="fused", median_ms=1.0 / ratio, **at)]
    frame = frame_of(found)
    lines = tables.standings(frame).cells.to_dict("records")
    assert {line["dtype"]: line["shorter median"] for line in lines} == {"fp32": "always", "fp16": "never"}
    # A cell of the picture each.
    assert frame["where"].nunique() == 4


def test_block_is_listed_only_where_it_is_whole(written: Path, rows: list[Measurement]) -> None:
    text = written.with_suffix(".html").read_text()
    begin = text.index('<section id="blocks">')
    block = Page(text[begin : text.index("</section>", begin) + len("</section>")])
    # of the table: matmul, comm, unfused, decomposed, the fastest and its speed-up
    assert "10 30 40 20 decomposed 2.00x" in block.text
    # dtensor was not timed for one of the four
    assert "dtensor" not in block.text


def test_predicted_is_drawn_dashed_and_never_counted(rows: list[Measurement]) -> None:
    plain = [row for row in rows if not row.model]
    measured = [row for row in plain if not row.predicted]
    with theme.style():
        drawn = theme.svg(figures.time_curves(frame_of(plain)), "x", "x")
        without = theme.svg(figures.time_curves(frame_of(measured)), "x", "x")
    assert "decomposed, predicted" in drawn
    assert "stroke-dasharray: 4" in drawn
    assert "predicted" not in without
    assert "stroke-dasharray: 4" not in without
    pd.testing.assert_frame_equal(standings(frame_of(plain), *MATMUL), standings(frame_of(measured), *MATMUL))


def test_table_has_every_row_and_its_numbers(written: Path, rows: list[Measurement]) -> None:
    text = written.with_suffix(".html").read_text()
    table = text[text.index('<table id="T_rows">') :]
    assert table.count("<tr") == 1 + len(rows)
    assert table.count(">yes</td>") == sum(row.predicted + row.interpreted for row in rows)
    # what is predicted stands in another style
    (style,) = re.findall(r"((?:#T_rows_row\d+_col\d+,?\s*)+)\{\s*font-style: italic", text)
    lines = {each.strip().partition("_col")[0] for each in style.split(",")}
    assert len(lines) == sum(row.predicted for row in rows)
    assert ">5.12</td>" in table
    # a column that no row has is left out
    assert "busbw" not in table[: table.index("</thead>")]


def test_cells_and_headings_are_text(make_row: MakeRow) -> None:
    """Whatever a file calls a variant, a model or a processor: it is no markup and no column's format."""
    odd = ["<b>bold</b>", "mean", "x\nmean", "{}", "speed-up", "ms"]
    found = [make_row(variant=name, median_ms=2.0, cpu="<i>", **TINY) for name in ("unfused", "matmul", *odd)]
    found += [
        make_row(variant=name, median_ms=2.0, model="<u>", layer=layer, tokens=64, op=op)
        for layer, op in zip(LAYERS, OPS[:2] * 2, strict=True)
        for name in ("unfused", *odd)
    ]
    with theme.style():
        lines = found[: 2 + len(odd)]
        lines += [replace(row, M=16) for row in lines]
        drawn = figures.speedup_map(frame_of([*lines, *(replace(row, world_size=4) for row in lines)]))
        picture = report.Picture("x", "<u>", theme.svg(drawn, "x", "<i>"))
    text = report.page(frame_of(found), {"speedup": [picture]})
    Page(text)
    assert "&lt;b&gt;bold&lt;/b&gt;" in text
    assert not re.search("<b>bold|<i>|<u>", text)
    console = Console(file=StringIO(), width=300, markup=False)
    report.show(found, console)
    assert "<b>bold</b>" in console.file.getvalue()  # type: ignore[attr-defined]


def test_old_rows_are_told_apart_by_their_ranges(make_row: MakeRow) -> None:
    """Without their rounds: 20-80 % of one against those of the other, and the page says so."""
    base, ours = make_row(median_ms=1.0), make_row(variant="fused", median_ms=0.98)

    def told(rows: list[Measurement]) -> bool:
        return "without their rounds" in Page(report.page(frame_of(rows), {})).text

    for low, faster in ((0.9, 0), (0.97, 1)):
        rows = [replace(base, p20_ms=0.985), replace(ours, p20_ms=low, p80_ms=0.99 if low < 0.95 else 0.98)]
        assert standings(frame_of(rows), *MATMUL)["faster"].tolist() == [faster]
        assert told(rows)
    assert not told([replace(row, rounds=5, rounds_ms=(1.0,) * 5) for row in (base, ours)])


def invoke(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["report", *map(str, arguments)])


def test_command_and_the_cost_model_beside_what_was_measured(make_row: MakeRow, tmp_path: Path) -> None:
    at = {"M": 4096, "N": 4096, "K": 8192, "dtype": "bfloat16", "world_size": 8}
    measured = [make_row(median_ms=1.0, **at), make_row(variant="fused", median_ms=0.5, **at)]
    base = measured[0]
    left_out = [replace(base, world_size=1), replace(base, direction="backward"), replace(base, variant="auto")]
    found = report.predictions([*measured, *left_out], lambda ranks: HARDWARE["h100"])
    model = cost.predict("all_gather_matmul", M=4096, N=4096, K=8192, world_size=8, hardware="h100")
    assert [(row.variant, row.median_ms) for row in found] == [
        ("unfused", model.unfused_us / 1e3),
        ("fused", (model.fused_us or 0.0) / 1e3),
    ]
    kept = {(row.predicted, row.case, row.rounds, row.p20_ms, row.speedup_vs_unfused) for row in found}
    assert kept == {(True, base.case, 0, None, None)}

    path = tmp_path / "sweep.csv"
    store.write(path, measured)
    done = invoke(path, "--hardware", "h100")
    assert done.exit_code == 0, done.output
    text = Page((tmp_path / "sweep.html").read_text()).text
    assert "4, of which 2 timed" in text
    assert "predictions cost model, h100" in text
    assert "at 2.00x the speed of unfused" in text
    assert not (tmp_path / "sweep-figures").exists()
    assert (tmp_path / "sweep.png").exists()
    # a prediction is drawn, not kept
    assert store.read(path) == measured
    done = invoke(path, "--hardware", "abacus")
    assert done.exit_code == 2
    assert "abacus" in done.output


def test_sections_are_those_of_the_page(written: Path) -> None:
    found = Page(written.with_suffix(".html").read_text())
    links = [value[1:] for tag, name, value in found.attributes if (tag, name) == ("a", "href")]
    pictures = [*report.PICTURES, "timeline"]
    assert pictures == ["time", "speedup", "parts", "timeline"]
    assert links == ["short", "sizes", "blocks", *pictures, "times", "refused", "checked", "rows"]
    assert [each for each in found.ids if each in links] == links


def test_tables_but_that_of_all_rows_fit_on_the_page(make_row: MakeRow) -> None:
    """Where a line is too long its words go below each other: no column is out of sight."""
    names = ("matmul", "own_matmul", "comm", "unfused", "decomposed", "fused", "auto", "dtensor")
    at = {"op": "matmul_reduce_scatter", "M": 16384, "N": 16384, "K": 16384, "model": "llama3-70b", "tokens": 16384}
    ratios = dict.fromkeys(("speedup_vs_unfused", "matmul_fraction", "overlap_efficiency", "tflops"), 0.123)
    layers = ({"variant": name, "layer": layer} for name in names for layer in LAYERS)
    found = [make_row(median_ms=1234.5, backend="gloo", bound_ms=9.0, **at, **ratios, **each) for each in layers]
    page = report.page(frame_of(found), {})
    style = page[: page.index("</style>")]
    assert re.findall(r"([^{}]*) \{[^{}]*white-space: nowrap", style)[0].split("\n")[-1] == "#rows td"
    for table in (tables.times(frame_of(found), "forward"), tables.rates(frame_of(found), "forward")):
        cells = table.cells.astype(str)
        words = [max(len(word) for text in (name, *cells[name]) for word in text.split()) for name in cells]
        # a window of 80rem, of which the wide ones take 96 %; .4rem at each side of a column, a letter of 13 px about 7
        assert 7 * sum(words) + 0.8 * 16 * len(words) < 0.96 * 80 * 16, (table.name, words)
