"""Time against size: a panel an op (or a model's matmul) and number of ranks, a line a variant, bands of 20-80 %.

Joined are only sizes that are one problem grown: near-square ones, and those that differ in M alone. A size of its own
is a marker without a line. Both axes are logarithmic. What a model predicts is dashed, hollow and without a band.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from . import theme
from .cases import ranks
from .frames import parts

# the longest side over the shortest, up to which a problem counts as square
_SQUARE = 2.0
# a size with as much arithmetic as another is set beside it
_APART = 1.16


def figure(frame: pd.DataFrame) -> Any:
    """One dtype, direction and model; None where no panel has two sizes. Within `theme.style`."""
    shown = frame[frame["median_ms"].notna() & ~frame["variant"].isin(("own_matmul", "comm"))]
    shown = shown.assign(x=shown["M"].where(shown["model"] != "", shown["gflop"]).astype(float))
    # of one panel: a size alone makes no curve
    shown = shown[shown.groupby(["matmul", "world_size"], observed=True)["size"].transform("nunique") > 1]
    if shown.empty:
        return None
    sizes, columns = sorted(set(shown["world_size"])), list(parts(shown, "matmul"))
    drawn, axes = theme.panels([1] * len(sizes), len(columns), line=2.15, row=0.1, sharex="col", sharey="col")
    for across, ((matmul,), members) in enumerate(columns):
        for axis, size in zip(axes[:, across], sizes, strict=True):
            axis.set_title(f"{matmul}, {ranks(size)}", fontsize=8.5)
            if (panel := members[members["world_size"] == size]).empty:
                theme.not_measured(axis)
            else:
                _panel(axis, panel)
        theme.log_scale(axis, "x")
        is_model, values = bool(members["model"].iloc[0]), sorted(set(members["x"]))
        axis.set_xlabel("tokens" if is_model else "GFLOP a rank")
        # every number of tokens has its tick unless that would crowd them
        if is_model and len(values) <= 6:
            axis.set_xticks(values)
    for axis in axes[:, 0]:
        axis.set_ylabel("time, ms")
    theme.legend(drawn)
    return drawn


def _panel(axis: Any, panel: pd.DataFrame) -> None:
    theme.log_scale(axis, "y")
    axis.grid()
    sides = panel[["M", "N", "K"]]
    square = (panel["model"] == "") & (sides.max(axis=1) <= _SQUARE * sides.min(axis=1))
    lines = panel.assign(family=(panel["N"].astype(str) + " " + panel["K"].astype(str)).mask(square, ""))
    lines["x"] *= _APART ** lines.groupby("x")["size"].transform(lambda sizes: pd.factorize(sizes)[0])
    for (predicted, _, variant), line in parts(lines, "predicted", "family", "variant"):
        x, median, paint = line["x"], line["median_ms"], theme.colour(variant)
        style: dict[str, Any] = {"color": paint, "marker": theme.marker(variant)}
        if variant == "matmul":
            style = {"color": theme.colour("ink"), "linewidth": 0.8, "marker": "_", "markersize": 7, "zorder": 2}
            axis.plot(x, median, label="matmul alone", **style)
        elif predicted:
            style |= {"linestyle": (0, (4, 2.5)), "markerfacecolor": "none", "markersize": 4.5, "linewidth": 1.1}
            axis.plot(x, median, label=f"{variant}, predicted", **style)
        else:
            low, high = line["p20_ms"].fillna(median), line["p80_ms"].fillna(median)
            axis.fill_between(x, low, high, color=paint, alpha=0.22, linewidth=0, zorder=1)
            if len(line) == 1:
                axis.vlines(x, low, high, color=paint, linewidth=2.5, alpha=0.35, zorder=1)
            axis.plot(x, median, label=f"{variant} (20-80 %)", markersize=4, linewidth=1.4, zorder=3, **style)
