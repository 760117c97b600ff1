"""The picture beside the rows: forward cases, a column an op, a row a number of ranks, a line a case.

Time is on a logarithmic axis that all panels share. A tick is the unsplit matmul alone, a marker a schedule's median
with its 20-80 % range, the number on the right the best speed-up over unfused.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from . import theme
from .cases import SCHEDULES, TITLES, ranks
from .frames import cases, plain_forward, records


def origin(lines: pd.DataFrame) -> str:
    """Where the numbers come from, in one line."""
    commits = lines["commit"] + lines["dirty"].map({True: "+", False: ""})
    machines, torches, all_commits = (
        ", ".join(sorted(set(each))) for each in (lines["hardware"], lines["torch"], commits)
    )
    where = f"{machines}. torch {torches}, commit {all_commits} (+: with changes)."
    return f"{where} Speed-up: the best over unfused. M x N x K are global sizes."


def figure(frame: pd.DataFrame) -> Any:
    """None when no forward row has a time. Within `theme.style`."""
    from matplotlib.figure import Figure

    shown = plain_forward(frame)
    if shown.empty:
        return None
    ops, sizes = (list(dict.fromkeys(shown[name].sort_values())) for name in ("op", "world_size"))
    panels = {key: list(cases(part)) for key, part in shown.groupby(["op", "world_size"], observed=True)}
    heights = [max(len(panels.get((op, size), ())) for op in ops) for size in sizes]
    height = 0.27 * sum(heights) + 0.75 * len(sizes) + 1.1
    drawn = Figure(figsize=(5.0 * len(ops) + 0.5, height), layout="constrained")
    axes = drawn.subplots(len(sizes), len(ops), sharex=True, squeeze=False, height_ratios=heights)
    for across, op in enumerate(ops):
        for down, size in enumerate(sizes):
            _panel(axes[down][across], panels.get((op, size), []), heights[down])
            axes[down][across].set_title(f"{TITLES[op]}, {ranks(size)}")
        axes[-1][across].set_xlabel("time, ms (log scale)")
    theme.legend(drawn)
    drawn.supxlabel(origin(shown), fontsize=8, color=theme.colour("muted"), x=0.01, ha="left")
    return drawn


def _panel(axes: Any, lines: list[tuple[Any, pd.DataFrame]], height: int) -> None:
    names = []
    for at, (first, case) in enumerate(lines):
        ours = case.reindex([name for name in SCHEDULES if name in case.index])
        both = case["median_ms"].reindex(["matmul", *ours.index]).dropna()
        axes.plot([both.min(), both.max()], [at, at], color=theme.colour("line"), linewidth=3, zorder=1)
        if "matmul" in both:
            style = {"color": theme.colour("ink"), "markersize": 13, "markeredgewidth": 2, "linestyle": "none"}
            axes.plot(both["matmul"], at, marker="|", label="matmul alone", **style)
        for row in records(ours):
            name = row["variant"]
            ends = [[row["median_ms"] - row["p20_ms"]], [row["p80_ms"] - row["median_ms"]]]
            style = {"color": theme.colour(name), "markersize": 5.5, "elinewidth": 1.2, "capsize": 2.5, "zorder": 3}
            label = f"{name} (median, 20-80 %)"
            axes.errorbar(row["median_ms"], at, xerr=ends, fmt=theme.marker(name), label=label, **style)
        best = ours["speedup_vs_unfused"].drop("unfused", errors="ignore").max()
        if best == best:
            axes.text(1.02, at, f"{best:.2f}x", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        size = f"{first['size']} {first['short_dtype']}"
        names.append(f"{first['model']} {first['layer']}, {size}" if first["model"] else size)
    axes.text(1.02, 1.02, "speed-up", transform=axes.transAxes, va="bottom", fontsize=8, color=theme.colour("muted"))
    theme.log_scale(axes, "x")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(height - 0.4, -0.6)
    axes.tick_params(axis="x", labelbottom=True)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
