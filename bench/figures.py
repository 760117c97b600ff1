"""Which pictures a report has, and the words that say how to read each; a kind that rows lack says why it is out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from . import bars, curves, heatmap, theme, timeline
from .cases import SHORT_DTYPES
from .frames import parts
from .machine import slug
from .timeline import Timeline


@dataclass(frozen=True)
class Picture:
    """`name` is a file's stem and the beginning of an element's id."""

    name: str
    title: str
    svg: str
    png: bytes


@dataclass(frozen=True)
class Section:
    """Pictures of one kind with their caption, or the reason that there are none."""

    name: str
    title: str
    caption: str
    pictures: tuple[Picture, ...]
    missing: str


@dataclass(frozen=True)
class Kind:
    """A picture for each group of rows that are alike in machine, model and these columns."""

    name: str
    title: str
    draw: Callable[[pd.DataFrame], Any]
    columns: tuple[str, ...]
    missing: str
    caption: str


KINDS = (
    Kind(
        "time", "Time against size", curves.figure, ("direction", "dtype"), "no two sizes of one problem were timed",
        "Each marker is the median over rounds of the slowest rank's time, the band holds the rounds from the 20th to "
        "the 80th percentile. The thin line is the unsplit library matmul alone, with nothing sent: no schedule should "
        "be expected below it. Joined are sizes that are one problem grown (near-square ones, or M alone); sizes of "
        "equal arithmetic stand side by side. Both axes are logarithmic. Dashed lines with hollow markers are "
        "predictions of a cost model, not measurements.",
    ),
    Kind(
        "speedup", "Speed-up over unfused", heatmap.figure, ("direction",),
        "no case has both unfused and another schedule timed with 2 or more ranks",
        "The time of unfused over a schedule's, in the same rounds: above 1 (blue) the schedule is faster, below 1 "
        "(orange) it is slower. The thick line parts the two: the crossover. A ratio with a ~ cannot be told from 1 "
        "(its interval has 1 in it), a dash was not measured.",
    ),
    Kind(
        "parts", "Where the time goes", bars.figure, ("direction", "world_size"),
        "no case has the matmul alone and unfused both timed with 2 or more ranks",
        "Bars are shares of the unfused time of the same case, with the time itself beside them. Blue is what the "
        "matmul takes alone, rust what communication adds to it (as far as communication alone takes that long), "
        "hatched the rest: overheads, and ranks that wait for each other. The line across is the ceiling, the longer "
        "of matmul and communication: a schedule that hides everything ends there. Parts are an account from separate "
        "timings, not a trace.",
    ),
    Kind(
        "blocks", "A model's block", bars.block_figure, ("dtype",), "no model has every matmul of its block timed",
        "The matmuls of one transformer block added up, as a share of what they take unfused: what the layer would "
        "take with each schedule, and the gain over unfused. Attention's inner products, norms and activations are not "
        "in it.",
    ),
)  # fmt: skip
_TIMELINE = (
    "One call, the one whose slowest rank is the median of those recorded; all panels share one axis. A number is the "
    "rank whose chunk is multiplied or copied. The vertical line is where the last rank ends. Open timeline.json, "
    "beside this page's rows, in ui.perfetto.dev or chrome://tracing to zoom in."
)


def sections(frame: pd.DataFrame, recorded: Timeline | str) -> list[Section]:
    """All kinds in the order of the page; `recorded` is a timeline, or why there is none."""
    found = []
    with theme.style():
        for kind in KINDS:
            drawings = [(words, kind.draw(part)) for words, part in _groups(frame, kind.columns)]
            found.append(_section(kind.name, kind.title, kind.caption, drawings, kind.missing))
        calls = [] if isinstance(recorded, str) else [(recorded.title(), timeline.figure(recorded))]
        found.append(_section("timeline", "Timeline of one call", _TIMELINE, calls, str(recorded)))
    return found


def _section(name: str, title: str, caption: str, drawings: Iterable[tuple[str, Any]], missing: str) -> Section:
    pictures = []
    for words, figure in drawings:
        if figure is not None:
            stem = "timeline-call" if name == "timeline" else slug(f"{name} {words}")
            # once, for both files
            figure.get_layout_engine().execute(figure)
            figure.set_layout_engine("none")
            pictures.append(Picture(stem, words, theme.svg(figure, stem, f"{title}: {words}"), theme.png(figure)))
    return Section(name, title, caption, tuple(pictures), "" if pictures else missing)


def _groups(frame: pd.DataFrame, columns: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    # With words for what they share; models first, as they are what was asked for.
    machines = frame["machine"].nunique()
    found = parts(frame, "machine", "model", *columns)
    for (machine, model, *values), part in sorted(found, key=lambda each: (each[0][0], not each[0][1])):
        words = [model or "single matmuls"]
        for name, value in zip(columns, values, strict=True):
            words.append(f"{value} ranks" if name == "world_size" else SHORT_DTYPES.get(value, value))
        yield ", ".join([*words, f"on {machine}"] if machines > 1 else words), part
