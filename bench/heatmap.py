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
from .frames import compared, parts, records

# colours are full at this ratio, or its inverse
_FULL = np.log(2.0)
_SHADES = ("#c96412", "#f6f6f4", "#0b5ca3")
# on pale and on strong cells
_ON_PALE, _ON_STRONG = "#141519", "#fcfcfb"

Border: TypeAlias = tuple[tuple[float, float], tuple[float, float]]


def figure(frame: pd.DataFrame) -> Any:
    """One direction and model; None without a speed-up. Within `theme.style`."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = compared(frame)
    if shown.empty:
        return None
    ranks, matmuls = sorted(set(shown["world_size"])), [key for key, _ in parts(shown, "matmul")]
    rows = [(variant, dict(parts(members, "matmul"))) for (variant,), members in parts(shown, "variant")]
    lines = [max(panel["where"].nunique() for panel in panels.values()) for _, panels in rows]
    drawn, axes = theme.panels(lines, len(matmuls), line=0.215, row=0.75)
    for line, (variant, panels), height in zip(axes, rows, lines, strict=True):
        for axis, matmul in zip(line, matmuls, strict=True):
            axis.set_title(f"{variant}\n{matmul[0]}", fontsize=8.5)
            _panel(axis, panels.get(matmul, shown.head(0)), ranks, height)
    for axis in axes[-1]:
        axis.set_xlabel("ranks")
    handles = {"faster than unfused": Patch(facecolor=_SHADES[2]), "slower": Patch(facecolor=_SHADES[0])}
    theme.legend(drawn, handles | {"crossover, 1.00x": Line2D([], [], **_border())})
    return drawn


def _panel(axis: Any, panel: pd.DataFrame, ranks: Sequence[int], height: int) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    kinds = panel.sort_values(["dtype", "M", "gflop"]).drop_duplicates("where").set_index("where")["dtype"]
    cells = np.full((len(kinds), len(ranks)), np.nan)
    style = {"ha": "center", "va": "center_baseline", "fontsize": 7}
    for row in records(panel):
        line, column, speedup = list(kinds.index).index(row["where"]), ranks.index(row["world_size"]), row["speedup"]
        cells[line, column] = speedup
        paint = _ON_STRONG if abs(np.log(speedup)) > 0.62 * _FULL else _ON_PALE
        known = row["low"] > 1 or row["high"] < 1
        axis.text(column, line, f"{speedup:.2f}" if known else f"~{speedup:.2f}", color=paint, **style)
    for line, column in np.argwhere(np.isnan(cells)):
        axis.text(column, line, "-", color=theme.colour("muted"), **style)
    if kinds.empty:
        theme.not_measured(axis)
    else:
        shades = LinearSegmentedColormap.from_list("speed-up", _SHADES)
        edges = [np.arange(length + 1) - 0.5 for length in reversed(cells.shape)]
        axis.pcolormesh(*edges, np.ma.masked_invalid(np.log(cells)), cmap=shades, vmin=-_FULL, vmax=_FULL)
    for ends in crossover(cells, list(kinds)):
        axis.plot(*ends, zorder=3, **_border())
    theme.named_lines(axis, dict(enumerate(kinds.index)), height)
    axis.set(xlim=(-0.5, len(ranks) - 0.5), ylim=(height - 0.5, -0.5))
    shown = [] if kinds.empty else ranks
    axis.set_xticks(range(len(shown)), [str(size) for size in shown])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def _border() -> dict[str, Any]:
    # dark with a pale edge, as cells are pale or strong
    from matplotlib.patheffects import withStroke

    edge = withStroke(linewidth=4.2, foreground=_ON_STRONG)
    return {"color": _ON_PALE, "linewidth": 2.2, "solid_capstyle": "projecting", "path_effects": [edge]}


def crossover(cells: npt.NDArray[np.float64], kinds: Sequence[str]) -> list[Border]:
    """The borders, as (two x, two y), between cells at or above 1 and their neighbours below it; NaN is neither.

    kinds: of each line; lines of different kinds (dtypes) are no neighbours.
    """
    won = np.where(np.isnan(cells), np.nan, cells >= 1.0)
    # a win beside a loss: they differ by one, and what is not measured by NaN
    down, right = (np.argwhere(np.abs(np.diff(won, axis=axis)) == 1) for axis in (0, 1))
    alike = [(line, column) for line, column in down if kinds[line] == kinds[line + 1]]
    across: list[Border] = [((column - 0.5, column + 0.5), (line + 0.5, line + 0.5)) for line, column in alike]
    return across + [((column + 0.5, column + 0.5), (line - 0.5, line + 0.5)) for line, column in right]
