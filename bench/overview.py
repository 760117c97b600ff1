"""The picture beside the rows: forward cases, a column an op, a row a number of ranks, a line a case.

Time is on a logarithmic axis that all panels share. A tick is the unsplit matmul alone, a marker a schedule's median
with its 20-80 % range, the number on the right the best speed-up over unfused.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from . import theme
from .cases import SCHEDULES, TITLES, ranks
from .frames import cases, each, plain_forward, records


def figure(frame: pd.DataFrame) -> Any:
    """None when no forward row has a time. Within `theme.style`."""
    shown = plain_forward(frame)
    if shown.empty:
        return None
    ops, sizes = sorted(set(shown["op"]), key=list(TITLES).index), sorted(set(shown["world_size"]))
    panels = {(op, size): list(cases(part)) for (op, size), part in shown.groupby(["op", "world_size"], observed=True)}
    heights = [max(len(panels.get((op, size), ())) for op in ops) for size in sizes]
    drawn, axes = theme.panels(heights, len(ops), line=0.27, row=0.9, width=5.0 * len(ops) + 0.5, sharex=True)
    for across, op in enumerate(ops):
        for down, size in enumerate(sizes):
            _panel(axes[down, across], panels.get((op, size), []), heights[down])
            axes[down, across].set_title(f"{TITLES[op]}, {ranks(size)}")
        axes[-1, across].set_xlabel("time, ms (log scale)")
    theme.legend(drawn)
    commits = (shown["commit"] + shown["dirty"].map({True: "+", False: ""})).to_frame("commit")
    where = f"{each(shown, 'hardware')}. torch {each(shown, 'torch')}, commit {each(commits, 'commit')}"
    words = f"{where} (+: with changes). Speed-up: the best over unfused. M x N x K are global sizes."
    drawn.supxlabel(words, fontsize=8, color=theme.colour("muted"), x=0.01, ha="left")
    return drawn


def _panel(axes: Any, lines: list[tuple[dict[str, Any], pd.DataFrame]], height: int) -> None:
    names = {}
    for at, (first, case) in enumerate(lines):
        ours = case.reindex([name for name in SCHEDULES if name in case.index])
        both = case["median_ms"].reindex(["matmul", *ours.index]).dropna()
        axes.plot([both.min(), both.max()], [at, at], color=theme.colour("line"), linewidth=3, zorder=1)
        if "matmul" in both:
            style = {"color": theme.colour("ink"), "markersize": 13, "markeredgewidth": 2, "linestyle": "none"}
            axes.plot(both["matmul"], at, marker="|", label="matmul alone", **style)
        for row in records(ours):
            name, ends = row["variant"], [[row["median_ms"] - row["p20_ms"]], [row["p80_ms"] - row["median_ms"]]]
            style = {"color": theme.colour(name), "markersize": 5.5, "elinewidth": 1.2, "capsize": 2.5, "zorder": 3}
            label = f"{name} (median, 20-80 %)"
            axes.errorbar(row["median_ms"], at, xerr=ends, fmt=theme.marker(name), label=label, **style)
        if (best := ours["speedup_vs_unfused"].drop("unfused", errors="ignore").max()) > 0:
            axes.text(1.02, at, f"{best:.2f}x", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        layer = f"{first['model']} {first['layer']}, " if first["model"] else ""
        names[at] = f"{layer}{first['size']} {first['short_dtype']}"
    axes.text(1.02, 1.02, "speed-up", transform=axes.transAxes, va="bottom", fontsize=8, color=theme.colour("muted"))
    theme.log_scale(axes, "x")
    theme.named_lines(axes, names, height)
    axes.tick_params(axis="x", labelbottom=True)
    axes.grid(axis="x")
