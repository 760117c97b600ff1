"""Speed-up over unfused by size and number of ranks: a row a schedule, a column an op or a model's matmul.

Blue is faster than unfused, orange slower, white the same, as far from white as the ratio's logarithm. A thick line
parts the sizes where a schedule is the faster from those where it is not: the crossover. A ratio whose interval has 1
in it is written with a ~.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import theme
from .cases import DTYPES
from .digest import BASELINE, Case, matmuls, position, variants
from .report import SHORT_DTYPES

# colours are full at this ratio, or its inverse
_FULL = 2.0
_FASTER, _SLOWER, _SAME = (11, 92, 163), (201, 100, 18), (246, 246, 244)
# on cells, which look alike on white and dark
_ON_PALE, _ON_STRONG = "#141519", "#fcfcfb"

Cell = tuple[float, bool]


def grids(cases: Sequence[Case]) -> dict[str, dict[str, list[Case]]]:
    """By variant, then by matmul: the cases with a speed-up of it, two ranks or more."""
    found: dict[str, dict[str, list[Case]]] = {}
    for name in variants(row for case in cases for row in case.measured.values()):
        by_op: dict[str, list[Case]] = {}
        for case in cases:
            if name != BASELINE and case.first.world_size > 1 and case.speedup(name) is not None:
                by_op.setdefault(case.matmul, []).append(case)
        if by_op:
            found[name] = by_op
    return found


def _label(case: Case) -> str:
    row = case.first
    return f"{row.tokens}" if row.model else f"{case.size} {SHORT_DTYPES.get(row.dtype, row.dtype)}"


def figure(cases: Sequence[Case]) -> Any:
    """One direction and model; None without a speed-up. Within `theme.style`."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    by_variant = grids(cases)
    if not by_variant:
        return None
    columns = matmuls(case for by_op in by_variant.values() for members in by_op.values() for case in members)
    ranks = sorted({case.first.world_size for by_op in by_variant.values() for m in by_op.values() for case in m})
    lines = {
        name: max(len({_label(case) for case in members}) for members in by_op.values())
        for name, by_op in by_variant.items()
    }
    height = sum(0.215 * count + 0.75 for count in lines.values()) + 0.4
    drawn = Figure(figsize=(9.2, height), layout="constrained")
    axes = drawn.subplots(len(by_variant), len(columns), squeeze=False, height_ratios=[*lines.values()])
    for down, (name, by_op) in enumerate(by_variant.items()):
        for across, key in enumerate(columns):
            axis = axes[down][across]
            axis.set_title(f"{name}\n{key}", fontsize=8.5)
            _panel(axis, by_op.get(key, []), name, ranks, lines[name])
            if down == len(by_variant) - 1:
                axis.set_xlabel("ranks")
            if across == 0 and cases[0].first.model:
                axis.set_ylabel("tokens")
    handles = [
        Patch(facecolor=_shade(_FULL)[0], label="faster than unfused"),
        Patch(facecolor=_shade(1 / _FULL)[0], label="slower"),
        Line2D([], [], label="crossover, 1.00x", **_border()),
    ]
    drawn.legend(handles=handles, loc="outside upper left", ncols=3)
    return drawn


def _panel(axis: Any, cases: Sequence[Case], name: str, ranks: Sequence[int], lines: int) -> None:
    from matplotlib.patches import Rectangle

    labels = list(dict.fromkeys(_label(case) for case in sorted(cases, key=_by_size)))
    cells: dict[tuple[int, int], Cell] = {}
    for case in cases:
        interval = case.speedup(name)
        if interval is not None:
            place = labels.index(_label(case)), ranks.index(case.first.world_size)
            cells[place] = (interval.ratio, interval.above or interval.below)
    for (line, column), (value, clear) in cells.items():
        shade, strength = _shade(value)
        axis.add_patch(Rectangle((column - 0.5, line - 0.5), 1, 1, facecolor=shade, linewidth=0))
        text = f"{value:.2f}" if clear else f"~{value:.2f}"
        paint = _ON_STRONG if strength > 0.62 else _ON_PALE
        axis.text(column, line, text, ha="center", va="center_baseline", fontsize=7, color=paint)
    for line, column in ((line, column) for line in range(len(labels)) for column in range(len(ranks))):
        if (line, column) not in cells:
            axis.text(column, line, "-", ha="center", va="center", fontsize=7, color=theme.colour("muted"))
    dtypes = {_label(case): case.first.dtype for case in cases}
    kinds = [dtypes[label] for label in labels]
    for ends in crossover({place: value for place, (value, _) in cells.items()}, kinds):
        axis.plot(*ends, zorder=3, **_border())
    axis.set_xlim(-0.5, len(ranks) - 0.5)
    axis.set_ylim(lines - 0.5, -0.5)
    axis.set_xticks(range(len(ranks)), [str(size) for size in ranks])
    axis.set_yticks(range(len(labels)), labels, fontsize=6.5)
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)


def _border() -> dict[str, Any]:
    # dark with a pale edge, as cells are pale or strong on any page
    from matplotlib.patheffects import withStroke

    edge = withStroke(linewidth=4.2, foreground=_ON_STRONG)
    return {"color": _ON_PALE, "linewidth": 2.2, "solid_capstyle": "projecting", "path_effects": [edge]}


def _by_size(case: Case) -> tuple[object, ...]:
    row = case.first
    return position(row.dtype, DTYPES), row.M, row.N * row.K, row.N


def crossover(
    ratios: dict[tuple[int, int], float], kinds: Sequence[str]
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The borders, as (two x, two y), between cells (line, column) at or above 1 and their neighbours below it.

    kinds: of each line; lines of different kinds (dtypes) are no neighbours.
    """
    borders = []
    for (line, column), value in ratios.items():
        below, right = ratios.get((line + 1, column)), ratios.get((line, column + 1))
        if below is not None and kinds[line] == kinds[line + 1] and (below >= 1.0) != (value >= 1.0):
            borders.append(((column - 0.5, column + 0.5), (line + 0.5, line + 0.5)))
        if right is not None and (right >= 1.0) != (value >= 1.0):
            borders.append(((column + 0.5, column + 0.5), (line - 0.5, line + 0.5)))
    return borders


def _shade(ratio: float) -> tuple[str, float]:
    """A colour, and how strong it is from 0 to 1."""
    strength = min(1.0, abs(math.log(ratio)) / math.log(_FULL))
    end = _FASTER if ratio >= 1.0 else _SLOWER
    mixed = (round(same + strength * (full - same)) for same, full in zip(_SAME, end, strict=True))
    return "#" + "".join(f"{each:02x}" for each in mixed), strength
