"""How pictures look, on white paper and on a page that may be dark.

A picture is drawn once, in the colours of `INK` and `SERIES`. As a PNG it stays so; as SVG for a page each of those
colours becomes a variable of the page's style sheet, which has a value for light and one for dark. Text stays text, in
the page's font.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from io import BytesIO, StringIO
from typing import Any

from .report import COLOURS, MARKERS


@dataclass(frozen=True)
class Colour:
    """One colour on white, and what takes its place on a dark page."""

    light: str
    dark: str


# what is no series: text, lesser text, lines of grids, the surface below, text on a bar
INK: Mapping[str, Colour] = {
    "ink": Colour("#1d1e22", "#e7e8ec"),
    "muted": Colour("#5d616b", "#a3a8b4"),
    "line": Colour("#e2e4e9", "#32363f"),
    "paper": Colour("#fdfdfe", "#181a1f"),
    "on-bar": Colour("#fefefe", "#101115"),
}
# Told apart by lightness, marker and label as well as by hue. Variants that are not listed share the last ones.
SERIES: Mapping[str, Colour] = {
    "unfused": Colour(COLOURS["unfused"], "#a2a5ab"),
    "decomposed": Colour(COLOURS["decomposed"], "#4aa8ee"),
    "fused": Colour(COLOURS["fused"], "#f0788a"),
    "auto": Colour("#5b3a8c", "#b598ea"),
    "own_matmul": Colour("#7d5a2b", "#c9a06a"),
    "other-a": Colour("#e09b12", "#f1b843"),
    "other-b": Colour("#2b9483", "#5cc9b6"),
    "other-c": Colour("#8f4a16", "#d98c54"),
}
# where time goes, in the bars and in the timeline
PARTS: Mapping[str, Colour] = {
    "multiply": Colour("#3f6797", "#6f9bd1"),
    "travel": Colour("#e8a33d", "#f0b95f"),
    "wait": Colour("#d3d6dc", "#4a4f5a"),
    "add": Colour("#2f9e8f", "#55c2b2"),
    "collective": Colour("#b8552f", "#e08a62"),
}
_MARKERS = {**MARKERS, "auto": "^", "own_matmul": "P", "other-a": "v", "other-b": "X", "other-c": "<"}
_FONT = "DejaVu Sans"


def series(variant: str, others: tuple[str, ...]) -> str:
    """The name in SERIES of a variant; `others` are all those that are not there, in a fixed order."""
    if variant in SERIES:
        return variant
    return ("other-a", "other-b", "other-c")[others.index(variant) % 3]


def colour(name: str) -> str:
    """To draw with."""
    for group in (INK, SERIES, PARTS):
        if name in group:
            return group[name].light
    raise KeyError(name)


def marker(name: str) -> str:
    return _MARKERS[name]


def variables() -> tuple[str, str]:
    """CSS declarations of every colour: on white, on dark."""
    every = {**INK, **SERIES, **PARTS}
    return (
        " ".join(f"--{name}: {each.light};" for name, each in every.items()),
        " ".join(f"--{name}: {each.dark};" for name, each in every.items()),
    )


@contextmanager
def style() -> Iterator[None]:
    """While a figure is made and saved."""
    import matplotlib

    ink, muted, line = colour("ink"), colour("muted"), colour("line")
    settings: Any = {
        "font.family": _FONT,
        "font.size": 9,
        "text.color": ink,
        "axes.labelcolor": muted,
        "axes.edgecolor": muted,
        "axes.titlecolor": ink,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        # given, it need not be sought: that takes longer than drawing
        "axes.titley": 1.0,
        "axes.labelsize": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "axes.facecolor": "none",
        "grid.color": line,
        "grid.linewidth": 0.8,
        "axes.axisbelow": True,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.labelsize": 7.5,
        "ytick.labelsize": 7.5,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "hatch.color": muted,
        "hatch.linewidth": 0.5,
        "svg.fonttype": "none",
        "svg.hashsalt": "fusedtp",
        # names come out of files: a dollar sign is one
        "text.parse_math": False,
    }
    with matplotlib.rc_context(settings):
        yield


def laid_out(figure: Any) -> Any:
    """The figure with its layout found once, for all the files that it is saved as."""
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")
    return figure


def png(figure: Any) -> bytes:
    """On white."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=130, facecolor="white")
    return drawn.getvalue()


def svg(figure: Any, name: str, label: str) -> str:
    """An <svg> element for a page: colours are the page's variables, and every id begins with `name`."""
    drawn = StringIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = drawn.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    # several pictures share the page, and matplotlib counts from 1 in each
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'xlink:href="#', f'href="#{name}-', text)
    for each in (INK, SERIES, PARTS):
        for key, value in each.items():
            text = re.sub(rf"{value.light}\b", f"var(--{key})", text, flags=re.IGNORECASE)
    text = re.sub(rf"'?{_FONT}'?(, [^;\"]*)?", "var(--font)", text)
    width = float(re.search(r'width="([\d.]+)pt"', text)[1])  # type: ignore[index]
    head = f'<svg role="img" aria-label="{escape(label)}" style="width:{width * 4 / 3:.0f}px"'
    text = re.sub(r'^<svg([^>]*?) width="[^"]*"', rf"{head}\1", text, count=1)
    return re.sub(r'^(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1).strip()
