"""Speed-up over unfused by size and number of ranks: a row a schedule, a column an op or a model's matmul.

Blue is faster than unfused, orange slower, white the same, as far from white as the ratio's logarithm. A thick line
parts the sizes where a schedule is the faster from those where it is not: the crossover. A ratio whose interval has 1
in it is written with a ~.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from . import theme
from .frames import compared, records

# colours are full at this ratio, or its inverse
_FULL = 2.0
_SHADES = ("#c96412", "#f6f6f4", "#0b5ca3")
# on cells, which look alike on white and dark
_ON_PALE, _ON_STRONG = "#141519", "#fcfcfb"


def figure(frame: pd.DataFrame) -> Any:
    """One direction and model; None without a speed-up. Within `theme.style`."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = compared(frame)
    if shown.empty:
        return None
    shown = shown.assign(label=shown["where"].str.removesuffix(" tokens"))
    variants, matmuls = (list(dict.fromkeys(shown[name].sort_values())) for name in ("variant", "matmul"))
    ranks = sorted(shown["world_size"].unique())
    panels = {key: panel for key, panel in shown.groupby(["variant", "matmul"], observed=True)}
    lines = [max(panel["label"].nunique() for key, panel in panels.items() if key[0] == name) for name in variants]
    drawn = Figure(figsize=(9.2, sum(0.215 * count + 0.75 for count in lines) + 0.4), layout="constrained")
    axes = drawn.subplots(len(variants), len(matmuls), squeeze=False, height_ratios=lines)
    for down, variant in enumerate(variants):
        for across, matmul in enumerate(matmuls):
            axis = axes[down][across]
            axis.set_title(f"{variant}\n{matmul}", fontsize=8.5)
            _panel(axis, panels.get((variant, matmul), shown.head(0)), ranks, lines[down])
    for axis in axes[-1]:
        axis.set_xlabel("ranks")
    if shown["model"].iloc[0]:
        drawn.supylabel("tokens", fontsize=8, color=theme.colour("muted"))
    ends = zip(("faster than unfused", "slower"), (_SHADES[2], _SHADES[0]), strict=True)
    handles: dict[str, Any] = {label: Patch(facecolor=shade) for label, shade in ends}
    theme.legend(drawn, handles | {"crossover, 1.00x": Line2D([], [], **_border())})
    return drawn


def _panel(axis: Any, panel: pd.DataFrame, ranks: Sequence[int], lines: int) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    kinds = panel.sort_values(["dtype", "M", "gflop"]).drop_duplicates("label").set_index("label")["dtype"]
    labels = list(kinds.index)
    cells = np.full((len(labels), len(ranks)), np.nan)
    for row in records(panel):
        line, column, speedup = labels.index(row["label"]), ranks.index(row["world_size"]), row["speedup"]
        cells[line, column] = speedup
        strong = abs(np.log(speedup)) > 0.62 * np.log(_FULL)
        text = f"{speedup:.2f}" if row["low"] > 1 or row["high"] < 1 else f"~{speedup:.2f}"
        style = {"ha": "center", "va": "center_baseline", "fontsize": 7}
        axis.text(column, line, text, color=_ON_STRONG if strong else _ON_PALE, **style)
    for line, column in np.argwhere(np.isnan(cells)):
        axis.text(column, line, "-", ha="center", va="center", fontsize=7, color=theme.colour("muted"))
    if labels:
        shades, most = LinearSegmentedColormap.from_list("speed-up", _SHADES), np.log(_FULL)
        edges = (np.arange(len(each) + 1) - 0.5 for each in (ranks, labels))
        axis.pcolormesh(*edges, np.ma.masked_invalid(np.log(cells)), cmap=shades, vmin=-most, vmax=most)
    for ends in crossover(cells, list(kinds)):
        axis.plot(*ends, zorder=3, **_border())
    axis.set_xlim(-0.5, len(ranks) - 0.5)
    axis.set_ylim(lines - 0.5, -0.5)
    axis.set_xticks(range(len(ranks)), [str(size) for size in ranks])
    axis.set_yticks(range(len(labels)), labels, fontsize=6.5)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def _border() -> dict[str, Any]:
    # dark with a pale edge, as cells are pale or strong on any page
    from matplotlib.patheffects import withStroke

    edge = withStroke(linewidth=4.2, foreground=_ON_STRONG)
    return {"color": _ON_PALE, "linewidth": 2.2, "solid_capstyle": "projecting", "path_effects": [edge]}


Border: TypeAlias = tuple[tuple[float, float], tuple[float, float]]


def crossover(cells: npt.NDArray[np.float64], kinds: Sequence[str]) -> list[Border]:
    """The borders, as (two x, two y), between cells at or above 1 and their neighbours below it; NaN is neither.

    kinds: of each line; lines of different kinds (dtypes) are no neighbours.
    """
    won = np.where(np.isnan(cells), np.nan, cells >= 1.0)
    # a win beside a loss: they differ by one, and what is not measured by NaN
    down, right = (np.argwhere(np.abs(np.diff(won, axis=axis)) == 1) for axis in (0, 1))
    return [
        ((column - 0.5, column + 0.5), (line + 0.5, line + 0.5))
        for line, column in down if kinds[line] == kinds[line + 1]
    ] + [((column + 0.5, column + 0.5), (line - 0.5, line + 0.5)) for line, column in right]  # fmt: skip
