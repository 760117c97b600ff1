"""Reports made from rows: tables in the terminal, pictures, and a self-contained page.

The page fetches nothing: no network, no fonts, no files beside it. Text from outside (a gate's words, names, paths) is
escaped. A section is shown if the rows have data for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from fusedtp import cost
from fusedtp.cost.hardware import Hardware
from fusedtp.files import replace, visible
from fusedtp.machine import slug

from . import figures, tables, theme, timeline
from .cases import DIRECTIONS, SCHEDULES, SHORT_DTYPES, TITLES
from .frames import CASE, compared, each, frame_of, parts, records, timed
from .intervals import busy
from .store import COLUMNS, PASSED, Measurement

if TYPE_CHECKING:
    from rich.console import Console


class Picture(NamedTuple):
    """A picture on the page. `name`: also of its PNG."""

    name: str
    title: str
    svg: str


# For each section of the page: the function that draws, and the columns that group its rows, besides machine, suite
# and model.
PICTURES: Mapping[str, tuple[Callable[[pd.DataFrame], Any], tuple[str, ...]]] = {
    "tokens": (figures.by_tokens, ("direction", "dtype")),
    "fast": (figures.fast_curve, ("direction",)),
    "time": (figures.time_curves, ("direction", "dtype")),
    "speedup": (figures.speedups, ("direction", "world_size")),
    "parts": (figures.time_parts, ("direction", "world_size")),
    "busbw": (figures.bus_rates, ("dtype",)),
}


def show(rows: Sequence[Measurement], console: Console, *, verbose: bool = False) -> None:
    """Print the timed cases, totals of blocks, checked cases, cases not run, failures, and the verdict.

    verbose: also rates, each check, each reason why something was not run, and how to read the tables.
    """
    frame = frame_of(rows)
    makers = (tables.times, tables.rates) if verbose else (tables.times,)
    shown = [make(frame, direction) for direction in DIRECTIONS for make in makers]
    checked, refused = tables.checked(frame), tables.refused(frame)
    shown += [tables.totals(frame), tables.summary(frame), *([checked] if verbose else [])]
    shown = [table for table in shown if not table.cells.empty]
    for table in shown:
        by = "op" if table.name.startswith(("times", "rates")) else ""
        table.print(console, by)
        if not by:
            console.print()
    lines = []
    if not checked.cells.empty and not verbose:
        names, worst = ", ".join(dict.fromkeys(checked.cells["variant"])), checked.cells["error / allowed"].max()
        how = "interpreted" if "interpreted" in set(checked.cells["how"]) else "compiled"
        lines.append(f"Checked, {how}, not timed: {names}; the largest error is {worst:.2g} of what is allowed.")
    if any(table.cells.map(lambda cell: str(cell).startswith("~")).any(axis=None) for table in shown):
        lines.append(tables.NOISE)
    absent = tables.not_run(frame)
    if verbose:
        lines += [*dict.fromkeys(filter(None, (table.note for table in shown)))]
        lines += [f"not run: {line}" for each in absent.values() for line in each]
    elif absent:
        ran = set(frame["variant"][frame["passed"]])
        told = ", ".join(f"{name} in some cases" if name in ran else name for name in absent)
        lines.append(f"Not run here: {told} (--verbose says why).")
    if not refused.cells.empty:
        console.print(refused.title, style="bold red")
        for row in records(refused.cells):
            console.print(", ".join(str(value) for value in row.values()), style="red")
    for line in [*lines, *tables.verdict(frame)]:
        console.print(line)
    for warning in warnings(rows):
        console.print(warning, style="bold yellow")


def warnings(rows: Sequence[Measurement]) -> list[str]:
    """Return what makes the rows doubtful: a busy machine, a late host, calls beside graphs."""
    return [*filter(None, (busy(rows), late(rows), uncaptured(rows)))]


def late(rows: Sequence[Measurement]) -> str:
    """Return a warning about rows that the host may have made longer, or ""."""
    found = [row for row in rows if row.late_rounds > row.rounds / 2]
    if not found:
        return ""
    names = ", ".join(dict.fromkeys(row.variant for row in found))
    return (
        f"Careful, in {len(found)} rows ({names}) the host took longer to issue the call than the GPU waited ahead of "
        "it: their times may be the host's, not the GPU's. --graph takes the host out where a call can be captured."
    )


def uncaptured(rows: Sequence[Measurement]) -> str:
    """Return a warning about rows that were asked for as graphs and timed as calls, or ""."""
    found = [row for row in rows if row.graph and row.median_ms and "not captured: " in row.path]
    if not found:
        return ""
    names = ", ".join(dict.fromkeys(row.variant for row in found))
    return (
        f"Careful, {len(found)} rows ({names}) could not be captured as graphs and were timed as calls, beside graphs "
        "of other variants: `path` says why."
    )


# Cases of the picture beside the rows, which with more has the typical ones: the page has them all.
MOST_CASES = 24


def picture(rows: Sequence[Measurement], path: Path) -> bool:
    """Draw the timed cases as a PNG; False, and no file, if there is none."""
    with theme.style():
        drawn = figures.speedups(frame_of(rows), MOST_CASES)
        if drawn is not None:
            theme.save(drawn, path)
    return drawn is not None


def folder_of(path: Path) -> Path:
    """Return the folder for the PNGs of a file of rows."""
    return path.with_name(f"{path.stem}-figures")


def write(rows: Sequence[Measurement], path: Path) -> str:
    """Write the page and its pictures beside the rows' file, with the stored timeline if any.

    Return why the timeline is not drawn if malformed.
    """
    recorded, malformed = None, ""
    if (beside := path.with_name("timeline.json")).exists():
        try:
            recorded = timeline.read(beside)
        except (ValueError, OSError) as error:
            malformed = str(error)
    frame, drawn = frame_of(rows), {}
    with theme.style():
        for section, (draw, columns) in PICTURES.items():
            pairs = ((words, draw(part)) for words, part in _groups(frame, columns))
            drawn[section] = [_kept(section, *pair, path) for pair in pairs if pair[1] is not None]
        drawn["timeline"] = [_kept("timeline", "call", timeline.figure(recorded), path)] if recorded else []
    replace(path.with_suffix(".html"), page(frame, drawn, warnings(rows)).encode())
    return malformed


def _kept(section: str, words: str, figure: Any, path: Path) -> Picture:
    # Compute the layout once, for both files.
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")
    name = slug(f"{section} {words}")
    theme.save(figure, folder_of(path) / f"{name}.png")
    return Picture(name, words, theme.svg(figure, name, f"{section}: {words}"))


def _groups(frame: pd.DataFrame, columns: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    # Yield groups with a title; models first, as users ask for them.
    found = sorted(
        parts(frame, "machine", "model", "suite", *columns), key=lambda group: (group[0][0], not group[0][1])
    )
    for (machine, model, suite, *values), part in found:
        named = zip(columns, values, strict=True)
        words = [f"{value} ranks" if name == "world_size" else SHORT_DTYPES.get(value, value) for name, value in named]
        on = [f"on {machine}"] if frame["machine"].nunique() > 1 else []
        of = filter(None, [model, suite if suite != "ops" else "" if model else "single matmuls"])
        yield ", ".join([*of, *words, *on]), part


# The page's sections, in its order.
SECTIONS = {
    "short": "In short", "sizes": "From which size on each schedule's median is shorter", "blocks": "A model's block",
    "tokens": "Speed-up against tokens", "fast": "How many cases are how much faster", "time": "Time against size",
    "speedup": "Speed-up over unfused", "parts": "Where the time goes", "busbw": "Collectives against their bytes",
    "timeline": "Timeline of one call", "times": "Times and rates", "refused": "Refused or not run",
    "checked": "Checked, not timed", "rows": "All rows",
}  # fmt: skip


def page(frame: pd.DataFrame, pictures: Mapping[str, Sequence[Picture]], warnings: Sequence[str] = ()) -> str:
    """Return the whole document. warnings: beside the verdict."""
    from jinja2 import Environment, PackageLoader

    lines = timed(frame)
    environment = Environment(loader=PackageLoader("fusedtp.bench"), autoescape=True, trim_blocks=True)
    about = frame if lines.empty else lines
    crowded = (lines["gpu"] == "") & (lines["cores"] > 0) & (lines["world_size"] * lines["threads"] > lines["cores"])
    commits = (lines["commit"] + lines["dirty"].map({True: " with changes", False: ""})).mask(lines["commit"] == "", "")
    summary, standings, refused = tables.summary(frame), tables.standings(frame), tables.refused(frame)
    checked, not_run = tables.checked(frame), [line for each in tables.not_run(frame).values() for line in each]
    has = {"short": len(summary.cells), "sizes": len(standings.cells), "times": len(lines), "rows": len(frame)}
    totals = tables.totals(frame)
    has |= {"refused": len(refused.cells) + len(not_run), "checked": len(checked.cells), "blocks": len(totals.cells)}
    has |= {name: len(drawn) for name, drawn in pictures.items()}
    made = environment.get_template("page.html").render(
        frame=frame, lines=lines, about=about, each=each, tables=tables, pictures=pictures, summary=summary,
        standings=standings, refused=refused, checked=checked, not_run=not_run, totals=totals,
        all=tables.everything(frame),
        titles={name: title for name, title in SECTIONS.items() if has.get(name)},
        num_cases=len(list(parts(lines, *CASE))), ops=[TITLES.get(op, op) for (op,), _ in parts(about, "op")],
        days=sorted({when[:10] for when in lines["time_utc"] if when}),
        commits=each(lines.assign(commit=commits), "commit"),
        verdict=tables.verdict(frame),
        all_rounds=compared(frame)["rounds_ms"].map(bool).all(), crowded=each(lines[crowded], "world_size"),
        warnings=warnings, version=version("fusedtp"), directions=DIRECTIONS, colours=theme.COLOURS,
    )  # fmt: skip
    return visible(made)


def predictions(rows: Iterable[Measurement], hardware_of: Callable[[int], Hardware]) -> list[Measurement]:
    """Return predicted rows of each timed schedule, for every measured forward case on two ranks or more.

    hardware_of: the table's entry for a number of ranks. The model does not use measured times. Operands are already in
    the dtype of the matmul, as in the measurement. Layers have no prediction. ValueError if the hardware has no
    number for a dtype.
    """
    found = []
    for row in rows:
        if row.variant in SCHEDULES and row.direction == "forward" and row.world_size > 1 and row.median_ms is not None:
            if row.predicted or row.op not in cost.OPS:
                continue
            machine = hardware_of(row.world_size)
            model = cost.predict(
                row.op, M=row.M, N=row.N, K=row.K, world_size=row.world_size, dtype=row.dtype, hardware=machine,
                casts=False,
            )  # fmt: skip
            if row.variant in model.times:
                found.append(_row(row, model.times[row.variant] / 1e3, machine.name))
    return found


# Columns of a prediction that are those of the measurement: the case, and its origin.
_KEPT = (
    *COLUMNS[: COLUMNS.index("median_ms")], *COLUMNS[COLUMNS.index("seed") : COLUMNS.index("gpu_before")],
    "interpreted", "time_utc",
)  # fmt: skip


def _row(measured: Measurement, median_ms: float, hardware: str) -> Measurement:
    kept = {name: getattr(measured, name) for name in _KEPT}
    return Measurement(**kept, median_ms=median_ms, gate=PASSED, predicted=True, path=f"cost model, {hardware}")
