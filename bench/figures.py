"""Every picture that is made of rows; each is drawn within `theme.style`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from . import theme
from .cases import ALONE, SCHEDULES, TITLES, ranks
from .frames import BASELINE, blocks, bound, cases, compared, each, parts, plain, records, timed
from .tables import milliseconds


def overview(frame: pd.DataFrame) -> Any:
    """Return the picture beside the rows: a column an op, a row a direction and number of ranks, a line a case.

    None when no row has a time. Time is on a logarithmic axis that all panels share. A tick is the unsplit matmul
    alone, a marker the median of a schedule or a provider with its 20-80 % range, the number on the right the best
    schedule's speed-up over unfused.
    """
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
            _cases(axis, lines[down].get(op, []), heights[down])
            axis.set_title(f"{TITLES[op]}, {direction}, {ranks(size)}")
    for axis in axes[-1]:
        axis.set_xlabel("time, ms (log scale)")
    theme.legend(drawn)
    commits = (shown["commit"] + shown["dirty"].map({True: "+", False: ""})).to_frame("commit")
    where = f"{each(shown, 'hardware')}. torch {each(shown, 'torch')}, commit {each(commits, 'commit')}"
    how = "Markers are medians. Speed-up: the best schedule's over unfused. M x N x K are global sizes."
    drawn.supxlabel(f"{where} (+: with changes).\n{how}", fontsize=8, color=theme.colour("muted"), x=0.01, ha="left")
    return drawn


def _cases(axes: Any, lines: list[tuple[dict[str, Any], pd.DataFrame]], height: int) -> None:
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


# the longest side over the shortest, up to which a problem counts as square
_SQUARE = 2.0
# a size with as much arithmetic as another is set beside it
_APART = 1.16


def time_curves(frame: pd.DataFrame) -> Any:
    """Time against size, of one dtype, direction and model; None where no panel has two sizes.

    A panel an op (or a model's matmul) and number of ranks, a line a variant, bands of 20-80 %. Joined are only sizes
    that are one problem grown: near-square ones, and those that differ in M alone. A size of its own is a marker
    without a line. Both axes are logarithmic. What a model predicts is dashed, hollow and without a band.
    """
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
                _curves(axis, panel)
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


def _curves(axis: Any, panel: pd.DataFrame) -> None:
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


# colours are full at this ratio, or its inverse
_FULL = np.log(2.0)
_SHADES = ("#c96412", "#f6f6f4", "#0b5ca3")
# on pale and on strong cells
_ON_PALE, _ON_STRONG = "#141519", "#fcfcfb"

Border: TypeAlias = tuple[tuple[float, float], tuple[float, float]]


def speedup_map(frame: pd.DataFrame) -> Any:
    """Speed-up over unfused by size and number of ranks, of one direction and model; None without a speed-up.

    A row a schedule, a column an op or a model's matmul. Blue is faster than unfused, orange slower, white the same, as
    far from white as the ratio's logarithm. A thick line parts the sizes where a schedule is the faster from those
    where it is not: the crossover. A ratio whose interval has 1 in it is written with a ~.
    """
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
            _cells(axis, panels.get(matmul, shown.head(0)), ranks, height)
    for axis in axes[-1]:
        axis.set_xlabel("ranks")
    handles = {"faster than unfused": Patch(facecolor=_SHADES[2]), "slower": Patch(facecolor=_SHADES[0])}
    theme.legend(drawn, handles | {"crossover, 1.00x": Line2D([], [], **_border())})
    return drawn


def _cells(axis: Any, panel: pd.DataFrame, ranks: Sequence[int], height: int) -> None:
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
    for ends in borders(cells, list(kinds)):
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


def borders(cells: npt.NDArray[np.float64], kinds: Sequence[str]) -> list[Border]:
    """Return the borders, as (two x, two y), between cells at or above 1 and their neighbours below it; NaN is neither.

    kinds: of each line; lines of different kinds (dtypes) are no neighbours.
    """
    won = np.where(np.isnan(cells), np.nan, cells >= 1.0)
    # a win beside a loss: they differ by one, and what is not measured by NaN
    down, right = (np.argwhere(np.abs(np.diff(won, axis=axis)) == 1) for axis in (0, 1))
    alike = [(line, column) for line, column in down if kinds[line] == kinds[line + 1]]
    across: list[Border] = [((column - 0.5, column + 0.5), (line + 0.5, line + 0.5)) for line, column in alike]
    return across + [((column + 0.5, column + 0.5), (line - 0.5, line + 0.5)) for line, column in right]


PARTS = {"multiply": "matmul", "collective": "exposed communication", "wait": "the rest"}


@dataclass(frozen=True)
class BarGroup:
    """The bars of one case below a title: by name their parts in % by colour, and what is written behind them.

    bound: across all of them, in %; 0 for none. by: what it is, in words.
    """

    title: str
    bars: Mapping[str, tuple[Mapping[str, float], str]]
    bound: float = 0.0
    by: str = ""


def account(total_ms: float, matmul_ms: float, comm_ms: float) -> dict[str, float]:
    """total_ms by PARTS; without a time for communication (NaN) all excess over the matmul is the rest."""
    matmul = min(total_ms, matmul_ms)
    exposed = 0.0 if math.isnan(comm_ms) else min(total_ms - matmul, comm_ms)
    return dict(zip(PARTS, (matmul, exposed, total_ms - matmul - exposed), strict=True))


def time_parts(frame: pd.DataFrame) -> Any:
    """Where the time of one direction, model and number of ranks goes, case by case, against what bounds it.

    None where matmul and unfused were not both timed. A schedule's time is parted by what was measured alone in the
    same rounds: the matmul's time, then of what is beyond it at most the communication's (exposed: it was not hidden),
    then the rest. That is an account, not a trace: a matmul that communication slows down shows as exposed
    communication or as the rest.
    """
    from matplotlib.lines import Line2D

    columns: dict[str, list[BarGroup]] = {}
    for (matmul,), members in parts(timed(frame[frame["world_size"] > 1]), "matmul"):
        for first, case in cases(members):
            times, bars = case["median_ms"], {}
            if not {"matmul", BASELINE} <= set(times.index):
                continue
            percent = 100 / times[BASELINE]
            for name, ms in times.drop(list(ALONE), errors="ignore").items():
                shares = account(ms, times["matmul"], times.get("comm", math.nan))
                bars[str(name)] = {kind: percent * part for kind, part in shares.items()}, f"{milliseconds(ms)} ms"
            longest, by = bound(case)
            columns.setdefault(matmul, []).append(BarGroup(first["where"], bars, percent * longest if by else 0.0, by))
    if not columns:
        return None
    drawn = _bars(columns)
    found = {group.by for groups in columns.values() for group in groups if group.by}
    lines = {f"bound: {by} alone": Line2D([], [], **_bound_line(by)) for by in sorted(found)}
    theme.legend(drawn, {label: kind for kind, label in PARTS.items()} | lines)
    return drawn


def _bound_line(by: str) -> dict[str, Any]:
    # Through where the matmul bounds all schedules, broken where a collective bounds some of them.
    return {"color": theme.colour("ink"), "linewidth": 1.6, "linestyle": "-" if by == "matmul" else (0, (1.6, 1.0))}


def block_parts(frame: pd.DataFrame) -> Any:
    """Return what the matmuls of a whole block take, of one model, dtype and machine; None where no block is whole.

    A column a direction, a group of bars a number of tokens and ranks.
    """
    columns: dict[str, list[BarGroup]] = {}
    for shared, medians in blocks(frame):
        base, bars = medians.get(BASELINE), {}
        whole = base or max(medians.values())
        for name, ms in medians.items():
            gain = f", {base / ms:.2f}x" if base and name not in ("matmul", BASELINE) else ""
            alone = name == "matmul"
            if name not in ("comm", "own_matmul"):
                words = f"{milliseconds(ms)} ms{gain}"
                bars["matmul alone" if alone else name] = {"ink" if alone else name: 100 * ms / whole}, words
        group = BarGroup(f"{shared['tokens']} tokens, {ranks(shared['world_size'])}", bars)
        columns.setdefault(shared["direction"], []).append(group)
    return _bars(columns) if columns else None


def _bars(columns: Mapping[str, list[BarGroup]]) -> Any:
    # A column of groups each, on axes of % of unfused.
    height = max(sum(len(group.bars) + 1.6 for group in groups) for groups in columns.values())
    drawn, axes = theme.panels([height], len(columns), line=0.155, row=0.5, sharex=True)
    longest = 0.0
    for axis, (title, groups) in zip(axes[0], columns.items(), strict=True):
        at, names = 0.0, {}
        for group in groups:
            axis.text(0.0, at, group.title, fontsize=7, va="center")
            if group.bound:
                axis.plot([group.bound] * 2, [at + 0.5, at + len(group.bars) + 0.5], zorder=4, **_bound_line(group.by))
            for name, (shares, words) in group.bars.items():
                at, left = at + 1, 0.0
                for kind, share in shares.items():
                    axis.barh(at, share, left=left, height=0.35 if kind == "ink" else 0.8, **theme.bar(kind))
                    left += share
                names[at], longest = name, max(longest, left, group.bound)
                # behind the bound where that is further on, not across it
                style = {"fontsize": 6.5, "va": "center_baseline", "color": theme.colour("muted")}
                axis.text(max(left, group.bound) + 2, at, words, **style)
            at += 1.6
        theme.named_lines(axis, names, height)
        axis.set(title=title, xlabel="% of unfused")
        axis.grid(axis="x")
    axes[0, 0].set_xlim(0, max(125.0, 1.35 * longest))
    return drawn
