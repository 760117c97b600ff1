"""The picture beside the rows: a column an op, a row a direction and number of ranks, a line a case.

Time is on a logarithmic axis that all panels share. A tick is the unsplit matmul alone, a marker the median of a
schedule or a provider with its 20-80 % range, the number on the right the best schedule's speed-up
over unfused.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from . import theme
from .cases import ALONE, SCHEDULES, TITLES, ranks
from .frames import cases, each, parts, plain, records


def figure(frame: pd.DataFrame) -> Any:
    """None when no row has a time. Within `theme.style`."""
    shown = plain(frame)
    if shown.empty:
        return None
    ops = [op for (op,), _ in parts(shown, "op")]
    rows = [(key, dict(parts(members, "op"))) for key, members in parts(shown, "direction", "world_size")]
    lines = [{op: list(cases(panel)) for (op,), panel in panels.items()} for _, panels in rows]
    heights = [max(map(len, panels.values())) for panels in lines]
    # no less than the legend and the words below take
    width = max(9.2, 5.0 * len(ops) + 0.5)
    drawn, axes = theme.panels(heights, len(ops), line=0.27, row=0.9, width=width, sharex=True)
    for down, ((direction, size), _) in enumerate(rows):
        for axis, op in zip(axes[down], ops, strict=True):
            _panel(axis, lines[down].get(op, []), heights[down])
            axis.set_title(f"{TITLES[op]}, {direction}, {ranks(size)}")
    for axis in axes[-1]:
        axis.set_xlabel("time, ms (log scale)")
    theme.legend(drawn)
    commits = (shown["commit"] + shown["dirty"].map({True: "+", False: ""})).to_frame("commit")
    where = f"{each(shown, 'hardware')}. torch {each(shown, 'torch')}, commit {each(commits, 'commit')}"
    how = "Markers are medians. Speed-up: the best schedule's over unfused. M x N x K are global sizes."
    drawn.supxlabel(f"{where} (+: with changes).\n{how}", fontsize=8, color=theme.colour("muted"), x=0.01, ha="left")
    return drawn


def _panel(axes: Any, lines: list[tuple[dict[str, Any], pd.DataFrame]], height: int) -> None:
    names = {}
    for at, (first, case) in enumerate(lines):
        whole = case.drop([*ALONE, "auto"], errors="ignore")
        both = case["median_ms"].reindex(["matmul", *whole.index]).dropna()
        axes.plot([both.min(), both.max()], [at, at], color=theme.colour("line"), linewidth=3, zorder=1)
        if "matmul" in both:
            style = {"color": theme.colour("ink"), "markersize": 13, "markeredgewidth": 2, "linestyle": "none"}
            axes.plot(both["matmul"], at, marker="|", label="matmul alone", **style)
        for row in records(whole):
            name, ends = row["variant"], [[row["median_ms"] - row["p20_ms"]], [row["p80_ms"] - row["median_ms"]]]
            style = {"color": theme.colour(name), "markersize": 5.5, "elinewidth": 1.2, "capsize": 2.5, "zorder": 3}
            label = f"{name} (20-80 %)"
            axes.errorbar(row["median_ms"], at, xerr=ends, fmt=theme.marker(name), label=label, **style)
        if (best := whole["speedup"].reindex(SCHEDULES[1:]).max()) > 0:
            axes.text(1.02, at, f"{best:.2f}x", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        layer = f"{first['model']} {first['layer']}, " if first["model"] else ""
        names[at] = f"{layer}{first['size']} {first['short_dtype']}"
    if lines:
        style = {"va": "bottom", "fontsize": 8, "color": theme.colour("muted")}
        axes.text(1.02, 1.02, "speed-up", transform=axes.transAxes, **style)
    else:
        theme.not_measured(axes)
    theme.log_scale(axes, "x")
    theme.named_lines(axes, names, height)
    axes.tick_params(axis="x", labelbottom=True)
    axes.grid(axis="x")
