"""Which pictures a report has, and the words that say how to read each; a kind that rows lack says why it is out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import bars, blocks, curves, heatmap, theme, timeline
from .cases import DIRECTIONS
from .digest import Case, position
from .machine import slug
from .report import SHORT_DTYPES
from .timeline import Timeline


@dataclass(frozen=True)
class Picture:
    """`name` is a file's stem and the beginning of an element's id; `first` ones are open when the page is."""

    name: str
    title: str
    svg: str
    png: bytes
    first: bool


@dataclass(frozen=True)
class Section:
    """Pictures of one kind with their caption, or the reason that there are none."""

    name: str
    title: str
    caption: str
    pictures: tuple[Picture, ...]
    missing: str


_TIME = (
    "Each marker is the median over rounds of the slowest rank's time, the band holds the rounds from the 20th to the "
    "80th percentile. The thin line is the unsplit library matmul alone, with nothing sent: no schedule should be "
    "expected below it. Joined are sizes that are one problem grown (near-square ones, or M alone); sizes of equal "
    "arithmetic stand side by side. Both axes are logarithmic. Dashed lines with hollow markers are predictions of a "
    "cost model, not measurements."
)
_SPEEDUP = (
    "The time of unfused over a schedule's, in the same rounds: above 1 (blue) the schedule is faster, below 1 "
    "(orange) it is slower. The thick line parts the two: the crossover. A ratio with a ~ cannot be told from 1 (its "
    "95 % interval has 1 in it), a dash was not measured."
)
_PARTS = (
    "Bars are shares of the unfused time of the same case, with the time itself beside them. Blue is what the matmul "
    "takes alone, rust what communication adds to it (as far as communication alone takes that long), hatched the "
    "rest: overheads, and ranks that wait for each other. The line across is the ceiling, the longer of matmul and "
    "communication: a schedule that hides everything ends there. Parts are an account from separate timings, not a "
    "trace."
)
_BLOCKS = (
    "The matmuls of one transformer block added up, as a share of what they take unfused: what the layer would take "
    "with each schedule, and the gain over unfused. Attention's inner products, norms and activations are not in it."
)
_TIMELINE = (
    "One call, the one whose slowest rank is the median of those recorded; all panels share one axis. A number is the "
    "rank whose chunk is multiplied or copied. The vertical line is where the last rank ends. Open timeline.json, "
    "beside this page's rows, in ui.perfetto.dev or chrome://tracing to zoom in."
)


def sections(cases: Sequence[Case], recorded: Timeline | str) -> Iterator[Section]:
    """All kinds in the order of the page; `recorded` is a timeline, or why there is none."""
    yield _section("time", "Time against size", _TIME, _time(cases), "no two sizes of one problem were timed")
    yield _section(
        "speedup", "Speed-up over unfused", _SPEEDUP, _speedup(cases),
        "no case has both unfused and another schedule timed with 2 or more ranks",
    )  # fmt: skip
    yield _section(
        "parts", "Where the time goes", _PARTS, _parts(cases),
        "no case has the matmul alone and unfused both timed with 2 or more ranks",
    )  # fmt: skip
    yield _section("blocks", "A model's block", _BLOCKS, _blocks(cases), "no model has every matmul of its block timed")
    yield _section(
        "timeline", "Timeline of one call", _TIMELINE, _timeline(recorded),
        recorded if isinstance(recorded, str) else "",
    )  # fmt: skip


_Drawing = tuple[str, str, Callable[[], Any]]


def _section(name: str, title: str, caption: str, drawings: Iterator[_Drawing], missing: str) -> Section:
    pictures: list[Picture] = []
    with theme.style():
        for which, words, draw in drawings:
            figure = draw()
            if figure is not None:
                theme.laid_out(figure)
                stem = slug(f"{name} {which}")
                drawn = theme.svg(figure, stem, f"{title}: {words}")
                pictures.append(Picture(stem, words, drawn, theme.png(figure), not pictures))
    return Section(name, title, caption, tuple(pictures), "" if pictures else missing)


def _groups(cases: Sequence[Case], *columns: str) -> list[tuple[str, list[Case]]]:
    # Cases alike in machine, model, direction and these columns, with words for what they share; models first, as they
    # are what was asked for.
    found: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        row = case.first
        key = (row.machine, row.model, row.direction, *(getattr(row, name) for name in columns))
        found.setdefault(key, []).append(case)
    machines = {case.first.machine for case in cases}
    named = []
    order = sorted(found, key=lambda key: (key[0], not key[1], key[1], position(key[2], DIRECTIONS)))
    for machine, model, direction, *values in order:
        words = [model or "single matmuls", direction]
        for name, value in zip(columns, values, strict=True):
            words.append(SHORT_DTYPES.get(value, value) if name == "dtype" else f"{value} ranks")
        if len(machines) > 1:
            words.append(f"on {machine}")
        named.append((", ".join(words), found[machine, model, direction, *values]))
    return named


def _time(cases: Sequence[Case]) -> Iterator[_Drawing]:
    for words, members in _groups(cases, "dtype"):
        yield words, words, lambda members=members: curves.figure(members)  # type: ignore[misc]


def _measured(cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if case.measured]


def _speedup(cases: Sequence[Case]) -> Iterator[_Drawing]:
    for words, members in _groups(_measured(cases)):
        yield words, words, lambda members=members: heatmap.figure(members)  # type: ignore[misc]


def _parts(cases: Sequence[Case]) -> Iterator[_Drawing]:
    shared = [case for case in _measured(cases) if case.first.world_size > 1]
    for words, members in _groups(shared, "world_size"):
        yield words, words, lambda members=members: bars.figure(members)  # type: ignore[misc]


def _blocks(cases: Sequence[Case]) -> Iterator[_Drawing]:
    found = blocks.totals(row for case in cases for row in case.measured.values())
    for machine, model, dtype in dict.fromkeys((each.machine, each.model, each.dtype) for each in found):
        members = [each for each in found if (each.machine, each.model, each.dtype) == (machine, model, dtype)]
        words = f"{model}, {SHORT_DTYPES.get(dtype, dtype)}"
        yield f"{words} {machine}", words, lambda members=members: bars.blocks(members)  # type: ignore[misc]


def _timeline(recorded: Timeline | str) -> Iterator[_Drawing]:
    if isinstance(recorded, Timeline):
        yield "call", recorded.title(), lambda: timeline.figure(recorded)
