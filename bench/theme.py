"""Style pictures, and save them as PNG, or as SVG for the page, in the page's font."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from html import escape
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from fusedtp.files import replace

# Series are told apart by lightness, marker and label as well as by hue.
COLOURS = {
    # Not series: text, minor text, grid lines, background, text on a bar.
    "ink": "#1d1e22",
    "muted": "#5d616b",
    "line": "#e2e4e9",
    "paper": "#fdfdfe",
    "on-bar": "#fefefe",
    "unfused": "#8a8a8a",
    "sequential": "#7fb2d6",
    "decomposed": "#0b6fb8",
    "fused": "#d1495b",
    "auto": "#5b3a8c",
    "own_matmul": "#7d5a2b",
    # Other variants, chosen by their names.
    "peer-1": "#e09b12",
    "peer-2": "#2b9483",
    "peer-3": "#8f4a16",
    "peer-4": "#6b7f2a",
    "peer-5": "#a23b8f",
    # Parts of time, in the bars and in the timeline.
    "multiply": "#3f6797",
    "travel": "#e8a33d",
    "wait": "#d3d6dc",
    "add": "#2f9e8f",
    "collective": "#b8552f",
}
MARKERS = {"unfused": "o", "sequential": "h", "decomposed": "D", "fused": "s", "auto": "^", "own_matmul": "P"}
PEER_MARKERS = "vX<>*d"
_PEERS = tuple(name for name in COLOURS if name.startswith("peer-"))
RC: dict[str, Any] = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.color": COLOURS["ink"],
    **dict.fromkeys(("axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), COLOURS["muted"]),
    # Fix the title's place, as matplotlib's search for one takes longer than drawing.
    "axes.titlecolor": COLOURS["ink"], "axes.titlesize": 9, "axes.titlelocation": "left", "axes.titley": 1.0,
    "axes.labelsize": 8, "xtick.labelsize": 7.5, "ytick.labelsize": 7.5, "legend.fontsize": 8, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "axes.facecolor": "none",
    "axes.axisbelow": True, "grid.color": COLOURS["line"], "grid.linewidth": 0.8,
    "hatch.color": COLOURS["muted"], "hatch.linewidth": 0.5,
    # The layout uses this resolution too, as it is computed once for all files.
    "figure.dpi": 160, "svg.fonttype": "none", "svg.hashsalt": "fusedtp",
    # Names from files may contain dollar signs.
    "text.parse_math": False,
}  # fmt: skip


def style() -> AbstractContextManager[None]:
    """Return the context in which a figure is made and saved."""
    import matplotlib

    settings: Any = RC
    return matplotlib.rc_context(settings)


def colour(name: str) -> str:
    """Return the colour of a series or part; a provider of any name has one look in every picture."""
    return COLOURS[name if name in COLOURS else _PEERS[_place(name) % len(_PEERS)]]


def marker(variant: str) -> str:
    """Return the marker of a variant. Two names may share a colour or a marker, seldom both."""
    if variant in MARKERS:
        return MARKERS[variant]
    return PEER_MARKERS[_place(variant) // len(_PEERS) % len(PEER_MARKERS)]


def _place(name: str) -> int:
    return zlib.crc32(name.encode())


def bar(kind: str, **more: Any) -> dict[str, Any]:
    """Return the style of a bar for this kind of time; waiting is hatched."""
    hatched = {"hatch": "////", "edgecolor": colour("muted")} if kind == "wait" else {}
    return {"facecolor": colour(kind), "linewidth": 0.0, **hatched, **more}


def panels(rows: Sequence[float], num_columns: int, *, line: float, row: float, width: float = 8.0, **more: Any) -> Any:
    """Return a figure and its axes, [rows, columns]; a row is its number of lines x `line` + `row` inches high."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, line * sum(rows) + row * len(rows) + 0.5), layout="constrained")
    return figure, figure.subplots(len(rows), num_columns, squeeze=False, height_ratios=rows, **more)


def named_lines(axes: Any, names: Mapping[Any, str], lines: float) -> None:
    """Put names in place of a y axis, by place from above, in a panel with room for `lines` lines."""
    axes.set_yticks(list(names), list(names.values()))
    axes.set_ylim(lines - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def log_scale(axes: Any, which: str, unit: str = "") -> None:
    """Make the x or y axis logarithmic, with plain numbers and their unit at three ticks or more, as many as fit."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    class Ticks(LogLocator):
        def tick_values(self, vmin: float, vmax: float) -> Any:
            # Powers of ten if the axis has enough of them, else more ticks between them, as the range may contain none.
            coarse = [LogLocator(subs=subs, numticks=8) for subs in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0))]
            for locator in (*coarse, MaxNLocator(5)):
                values = locator.tick_values(vmin, vmax)
                if sum(vmin <= value <= vmax for value in values) >= 4:
                    break
            return values

    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set(major_locator=Ticks(), minor_locator=NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}"))


def legend(figure: Any, handles: Mapping[str, Any] | None = None, **options: Any) -> None:
    """Draw the legend above all panels, each label once: of `handles` (artists, or kinds of bars), or of the panels."""
    from matplotlib.patches import Patch

    if handles is None:
        pairs = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
        handles = {label: handle for panel in pairs for handle, label in panel}
    artists = [Patch(**bar(each)) if isinstance(each, str) else each for each in handles.values()]
    figure.legend(artists, handles, **{"loc": "outside upper left", "ncols": min(5, len(artists)), **options})


def save(figure: Any, path: Path) -> None:
    """Save the figure as a PNG on white; replace the file as a whole."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", facecolor="white")
    replace(path, drawn.getvalue())


def svg(figure: Any, name: str, label: str) -> str:
    """Return an <svg> element for a page; all its ids begin with `name`."""
    drawn = StringIO()
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(drawn, format="svg", transparent=True, metadata=none)
    text = drawn.getvalue()
    # Several pictures share the page, and matplotlib counts ids from 1 in each.
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", text[text.index("<svg") :])
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
