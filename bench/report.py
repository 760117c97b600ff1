"""What a person reads, all of it made of rows: tables in the terminal, a picture, and a page that needs nothing else.

The page fetches nothing: no network, no fonts, no files beside it. What came from outside (a gate's words, names,
paths) is escaped. A kind of rows that is missing leaves its section with the reason in place of pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from fusedtp.files import replace

from . import figures, overview, tables, theme, timeline
from .cases import DIRECTIONS, TITLES
from .figures import Section
from .frames import CASE, frame_of, parts, timed
from .standings import headlines
from .store import Row

if TYPE_CHECKING:
    from rich.console import Console


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the timed cases, the totals of blocks, the checks without a time, what was not run, and every failure."""
    frame = frame_of(rows)
    timings = [make(frame, each) for each in DIRECTIONS for make in (tables.times, tables.rates)]
    shown = [*timings, tables.totals(frame), tables.summary(frame), tables.checked(frame)]
    for table in (each for each in shown if not each.cells.empty):
        console.print(table.printed())
    for note in dict.fromkeys(each.note for each in shown if not each.cells.empty and each.note):
        console.print(note, style="dim", highlight=False)
    for line in tables.not_run(frame):
        console.print(f"not run: {line}", style="dim", highlight=False)
    if not (refused := tables.refused(frame)).cells.empty:
        console.print(refused.printed(), style="bold red", highlight=False)


def picture(rows: Sequence[Row], path: Path) -> bool:
    """Draw the forward cases as a PNG; False, and no file, if none has a time."""
    with theme.style():
        drawn = overview.figure(frame_of(rows))
        if drawn is not None:
            theme.save(drawn, path)
    return drawn is not None


def folder_of(path: Path) -> Path:
    """Where the pictures of a file of rows go as PNGs."""
    return path.with_name(f"{path.stem}-figures")


def write(rows: Sequence[Row], path: Path) -> None:
    """Beside the rows' file: the page, and its pictures; with the timeline that is there."""
    recorded: timeline.Timeline | str = "no timeline.json is beside the rows; `fusedtp timeline` records one"
    beside = path.with_name("timeline.json")
    if beside.exists():
        try:
            recorded = timeline.read(beside)
        except (ValueError, OSError) as error:
            recorded = str(error)
    frame = frame_of(rows)
    sections = figures.sections(frame, recorded)
    for each in (drawn for section in sections for drawn in section.pictures):
        replace(folder_of(path) / f"{each.name}.png", each.png)
    replace(path.with_suffix(".html"), page(frame, sections).encode())


def page(frame: pd.DataFrame, sections: Sequence[Section]) -> str:
    """The whole document."""
    from jinja2 import Environment, PackageLoader

    lines = timed(frame)
    environment = Environment(loader=PackageLoader("fusedtp.bench"), autoescape=True, trim_blocks=True)
    return environment.get_template("page.html").render(
        machines=_each(frame if lines.empty else lines, "hardware", "; "),
        when=_when(lines),
        facts=_facts(frame, lines),
        frame=frame,
        sections=sections,
        tables=tables,
        headlines=headlines(frame),
        directions=DIRECTIONS,
        colours=theme.COLOURS,
    )


def _each(lines: pd.DataFrame, name: str, between: str = ", ") -> str:
    # What a column has, each once.
    return between.join(sorted({str(value) for value in lines[name]} - {"", "0"}))


def _when(lines: pd.DataFrame) -> str:
    if lines.empty:
        return "Nothing was timed."
    days = sorted({when[:10] for when in lines["time_utc"] if when})
    span = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "at an unknown time"
    commits = (lines["commit"] + lines["dirty"].map({True: " with changes", False: ""})).where(
        lines["commit"] != "", ""
    )
    return f"Measured {span}, commit {_each(commits.to_frame('commit'), 'commit') or 'unknown'}."


def _facts(frame: pd.DataFrame, lines: pd.DataFrame) -> dict[str, str]:
    about = frame if lines.empty else lines
    counts = f"{len(frame)}, none timed"
    if len(lines):
        num_cases, ranks = len(list(parts(lines, *CASE))), ", ".join(map(str, sorted(set(lines["world_size"]))))
        counts = f"{len(frame)}, of which {len(lines)} timed: {num_cases} cases on {ranks} ranks"
        counts += f", {spent:.0f} s on the clock" if (spent := lines["total_ms"].sum() / 1e3) else ""
    versions = [f"fusedtp {version('fusedtp')}"]
    versions += [
        f"{name} {_each(about, name)}" for name in ("torch", "triton", "python", "driver") if _each(about, name)
    ]
    return {
        "rows": counts,
        "ops": ", ".join(TITLES.get(op, op) for (op,), _ in parts(about, "op")),
        "models": _each(about, "model"),
        "dtypes": _each(about, "short_dtype"),
        "threads a rank": _each(about, "threads"),
        "links": _each(about, "links"),
        "torch.distributed": _each(about, "backend"),
        "versions": ", ".join(versions),
        "predictions": _each(frame[frame["predicted"]], "path"),
    }
