"""Pictures of stored rows; each is drawn within `theme.style`."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from . import theme
from .cases import ALONE, COLLECTIVES, SEQUENTIAL, TITLES, ranks
from .frames import BASELINE, OURS, bound, cases, compared, distinct, each, fast_p, in_bytes, parts, records, timed
from .tables import milliseconds


def speedups(frame: pd.DataFrame, most: float = math.inf) -> Any:
    """Return the picture of speed-ups over unfused, a bar a variant of a case; None if there is none.

    There is a panel for each op of its own, and for each model and suite. The line on a bar is the interval; a bar is
    grey if its interval contains 1. Cases are sorted by tokens. All panels share one logarithmic axis. With more cases
    than `most`, each panel keeps its first direction, its most frequent dtype and fewest ranks.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import LogLocator, NullLocator

    shown = distinct(compared(frame))
    if shown.empty:
        return None
    shown = shown.assign(low=shown["low"].clip(lower=_LEAST), high=shown["high"].clip(upper=1 / _LEAST))
    of_model = shown["model"] + (", " + shown["suite"].astype(str)).mask(shown["suite"] == "ops", "")
    titles = shown["op"].map(TITLES).astype(str).mask(shown["model"] != "", of_model)
    panels = [(str(title), panel) for title, panel in shown.groupby(titles, sort=False)]
    left_out = shown["place"].nunique() > most
    found = [(title, list(parts(_typical(panel) if left_out else panel, "direction", "world_size")))
             for title, panel in panels]  # fmt: skip
    heights = [sum(1.2 + len(group) + 0.6 * group["place"].nunique() for _, group in groups) for _, groups in found]
    num_columns = min(2, len(found))
    rows = [max(heights[at : at + num_columns]) for at in range(0, len(found), num_columns)]
    drawn, axes = theme.panels(rows, num_columns, line=0.17, row=0.8, sharex=True)
    drawn.get_layout_engine().set(wspace=0.06)
    for axis, (title, groups), height in zip(axes.flat, found, np.repeat(rows, num_columns), strict=False):
        axis.set_title(title, fontweight="bold")
        axis.axvline(1.0, color=theme.colour("ink"), linewidth=0.9, zorder=1)
        _bars(axis, groups, height)
    for axis in axes.flat[len(found) :]:
        axis.set_axis_off()
    axes[0, 0].set(xscale="log", xlim=(min(0.5, shown["low"].min()) / 1.05, 1.05 * max(2.0, shown["high"].max())))
    axes[0, 0].xaxis.set(major_locator=LogLocator(base=2), minor_locator=NullLocator())
    axes[0, 0].xaxis.set_major_formatter(_in_powers)
    drawn_variants = {row for _, groups in found for _, group in groups for row in group["variant"]}
    handles = {
        name: Patch(facecolor=theme.colour(name)) for (name,), _ in parts(shown, "variant") if name in drawn_variants
    }
    handles["no difference: the interval has 1 in it"] = Patch(facecolor=_GREY, edgecolor=theme.colour("muted"))
    theme.legend(drawn, handles | {"95 % interval": Line2D([], [], color=theme.colour("ink"), linewidth=0.9)})
    commits = (shown["commit"] + shown["dirty"].map({True: "+", False: ""})).to_frame("commit")
    where = f"{each(shown, 'hardware')}. torch {each(shown, 'torch')}, commit {each(commits, 'commit')}"
    how = "Speed-up: the time of unfused over this one's, in the same rounds. M x N x K are global sizes."
    how += " `fusedtp report` draws the other directions, dtypes and numbers of ranks." * left_out
    marked = " (+: with uncommitted changes)" if shown["dirty"].any() else ""
    said = "\n".join(line for text in (f"{where}{marked}.", how) for line in textwrap.wrap(text, 115))
    drawn.supxlabel(said, fontsize=8, color=theme.colour("muted"), x=0.01, ha="left")
    return drawn


def _typical(panel: pd.DataFrame) -> pd.DataFrame:
    for name in ("direction", "world_size"):
        panel = panel[panel[name] == panel[name].min()]
    if (panel["model"] == "").all():
        panel = panel[panel["dtype"] == panel["dtype"].mode()[0]]
    return panel


# Smallest end of an interval that is drawn, and inverse of the largest: an interval may be unbounded.
_LEAST = 1 / 64
_GREY = theme.colour("wait")


def _in_powers(value: float, _: object) -> str:
    # Return a power of two as text, however small.
    return f"{value:g}x" if value >= 0.25 else f"1/{1 / value:g}x"


def _bars(axis: Any, groups: Sequence[tuple[Any, pd.DataFrame]], height: float) -> None:
    # Stack groups of cases by direction and number of ranks.
    at, names = 0.0, {}
    on_left, on_right = {"x": -0.02, "ha": "right", "fontweight": "bold"}, {"x": 1.02, "ha": "left"}
    style = {"transform": axis.get_yaxis_transform(), "va": "center_baseline", "fontsize": 8.5}
    for (direction, size), group in groups:
        axis.text(y=at, s=f"{direction}, {ranks(size)}", **style, **on_left)
        at += 1.2
        for _, case in group.sort_values(["M", "matmul", "gflop", "dtype"], kind="stable").groupby("place", sort=False):
            first = records(case)[0]
            names[at + (len(case) - 1) / 2] = (
                f"{first['layer']}, {first['where']}" if first["layer"] else first["where"]
            )
            for row in records(case):
                known, paint = row["low"] > 1 or row["high"] < 1, theme.colour(row["variant"])
                face = {"facecolor": paint if known else _GREY, "edgecolor": paint, "linewidth": 0.7}
                axis.barh(at, row["speedup"] - 1, left=1.0, height=0.82, zorder=2, **face)
                axis.plot([row["low"], row["high"]], [at, at], color=theme.colour("ink"), linewidth=0.9, zorder=3)
                axis.text(
                    y=at,
                    s=f"{row['speedup']:.2f}x",
                    color=paint if known else theme.colour("muted"),
                    **style,
                    **on_right,
                )
                at += 1
            at += 0.6
    theme.named_lines(axis, names, height)
    axis.tick_params(axis="x", labelbottom=True)
    axis.set_xlabel("speed-up over unfused, log scale", fontsize=8.5)
    axis.grid(axis="x")


# Largest ratio of the longest to the shortest side of a problem that counts as square.
_SQUARE = 2.0
# Factor between the places of two sizes with equal arithmetic.
_APART = 1.16


def time_curves(frame: pd.DataFrame) -> Any:
    """Return the picture of time against size of one dtype, direction and model; None if no panel has two sizes.

    There is a panel for each op (or a model's matmul) and number of ranks, with a line for each variant and bands of
    20-80 %. Lines join only near-square sizes, and sizes that differ in M alone. Other sizes are markers without a
    line. Both axes are logarithmic. Predictions are dashed and hollow, without a band.
    """
    shown = distinct(frame)
    shown = shown[shown["median_ms"].notna() & ~shown["variant"].isin(("own_matmul", "comm"))]
    shown = shown[~shown["op"].isin((*COLLECTIVES, "kernel", "check"))]
    shown = shown.assign(x=shown["M"].where(shown["model"] != "", shown["gflop"]).astype(float))
    # Drop panels with one size, which makes no curve.
    shown = shown[shown.groupby(["matmul", "world_size"], observed=True)["size"].transform("nunique") > 1]
    if shown.empty:
        return None
    sizes, columns = sorted(set(shown["world_size"])), list(parts(shown, "matmul"))
    drawn, axes = theme.panels([1] * len(sizes), len(columns), line=2.15, row=0.1, sharex="col", sharey="col")
    for across, ((matmul,), members) in enumerate(columns):
        for axis, size in zip(axes[:, across], sizes, strict=True):
            axis.set_title(f"{matmul}, {ranks(size)}", fontsize=8.5)
            if (panel := members[members["world_size"] == size]).empty:
                middle = {"ha": "center", "va": "center", "color": theme.colour("muted")}
                axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, **middle)
            else:
                _curves(axis, panel)
        theme.log_scale(axis, "x")
        is_model, values = bool(members["model"].iloc[0]), sorted(set(members["x"]))
        axis.set_xlabel("tokens" if is_model else "GFLOP a rank")
        # Give every number of tokens a tick, unless they would crowd.
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
        if variant in ("matmul", "local"):
            style = {"color": theme.colour("ink"), "linewidth": 0.8, "marker": "_", "markersize": 7, "zorder": 2}
            axis.plot(x, median, label=f"{variant} alone", **style)
        elif predicted:
            style |= {"linestyle": (0, (4, 2.5)), "markerfacecolor": "none", "markersize": 4.5, "linewidth": 1.1}
            axis.plot(x, median, label=f"{variant}, predicted", **style)
        else:
            low, high = line["p20_ms"].fillna(median), line["p80_ms"].fillna(median)
            axis.fill_between(x, low, high, color=paint, alpha=0.22, linewidth=0, zorder=1)
            if len(line) == 1:
                axis.vlines(x, low, high, color=paint, linewidth=2.5, alpha=0.35, zorder=1)
            axis.plot(x, median, label=f"{variant} (20-80 %)", markersize=4, linewidth=1.4, zorder=3, **style)


_RANK_COLOURS = ("decomposed", "peer-1", "peer-2", "fused", "auto", "peer-3")


def by_tokens(frame: pd.DataFrame) -> Any:
    """Return the picture of speed-ups over the fastest other implementation against tokens, on logarithmic axes.

    All lines have one model, direction and dtype. A panel a block or a matmul of it, a line a number of ranks, the
    interval as a band. It is that of `auto`, or of our fastest schedule where `auto` was not timed. None without
    several numbers of tokens.
    """
    lines = timed(frame[(frame["tokens"] > 0) & (frame["world_size"] > 1) & frame["variant"].isin(OURS)])
    lines = lines[lines["over_best"].notna() & (lines["variant"] != SEQUENTIAL)]
    # `auto` first, then the fastest.
    order = lines.assign(other=lines["variant"] != "auto").sort_values(["other", "over_best"], ascending=[True, False])
    best = order.groupby(["matmul", "world_size", "tokens"], observed=True, sort=True).head(1)
    if best["tokens"].nunique() < 2:
        return None
    columns = list(parts(best.sort_values("tokens"), "matmul"))
    across = min(2, len(columns))
    drawn, axes = theme.panels([1] * -(-len(columns) // across), across, line=2.6, row=0.3, sharey=True, sharex=True)
    colours = dict(zip(sorted(set(best["world_size"])), itertools.cycle(_RANK_COLOURS), strict=False))
    for axis, ((matmul,), members) in zip(axes.flat, columns, strict=False):
        axis.set_title(str(matmul))
        axis.axhline(1.0, color=theme.colour("ink"), linewidth=0.9)
        for (size,), line in parts(members, "world_size"):
            paint = theme.colour(colours[size])
            # An interval may be unbounded.
            low, high = (
                line["best_low"].clip(lower=line["over_best"] / 4),
                line["best_high"].clip(upper=4 * line["over_best"]),
            )
            axis.fill_between(line["tokens"], low, high, color=paint, alpha=0.2, linewidth=0)
            axis.plot(line["tokens"], line["over_best"], marker="o", markersize=4, color=paint, label=ranks(int(size)))
        _log2(axis.xaxis, sorted(set(best["tokens"])))
        theme.log_scale(axis, "y", "x")
        axis.grid()
        axis.set_xlabel("tokens")
        axis.tick_params(axis="x", labelbottom=True)
    for axis in axes.flat[len(columns) :]:
        axis.set_axis_off()
    for axis in axes[:, 0]:
        axis.set_ylabel("speed-up over the fastest other")
    theme.legend(drawn)
    return drawn


def _log2(axis: Any, values: Sequence[float], most: int = 8, told: Callable[[float], str] = "{:g}".format) -> None:
    # Give at most so many of the values a tick.
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axis.axes.set_xscale("log", base=2)
    shown = values[:: -(-len(values) // most)]
    axis.set(major_locator=FixedLocator(list(shown)), minor_locator=NullLocator())
    axis.set_major_formatter(FixedFormatter([told(value) for value in shown]))


def bus_rates(frame: pd.DataFrame) -> Any:
    """Return the picture of busbw against bytes: a panel a collective and number of ranks, a line a variant.

    busbw is what a link carries, as nccl-tests counts it. None without collectives of several sizes.
    """
    lines = timed(frame[frame["op"].isin(COLLECTIVES) & frame["busbw_gbps"].notna()])
    lines = distinct(lines)
    if lines["bytes"].nunique() < 2:
        return None
    rows, columns = list(parts(lines, "world_size")), [op for (op,), _ in parts(lines, "op")]
    drawn, axes = theme.panels([1] * len(rows), len(columns), line=2.3, row=0.3, sharex=True, sharey=True)
    for line, ((size,), members) in zip(axes, rows, strict=True):
        for axis, op in zip(line, columns, strict=True):
            axis.set_title(f"{TITLES[op]}, {ranks(int(size))}")
            for (variant,), each_of in parts(members[members["op"] == op].sort_values("bytes"), "variant"):
                style = {"color": theme.colour(variant), "marker": theme.marker(variant), "markersize": 4}
                axis.plot(each_of["bytes"], each_of["busbw_gbps"], label=str(variant), **style)
            _log2(axis.xaxis, sorted(set(lines["bytes"])), 5, in_bytes)
            theme.log_scale(axis, "y")
            axis.grid()
        line[0].set_ylabel("busbw, GB/s")
    for axis in axes[-1]:
        axis.set_xlabel("bytes of the whole tensor")
    theme.legend(drawn)
    return drawn


def fast_curve(frame: pd.DataFrame) -> Any:
    """Return the curve of fast_p: the share of cases that are right and at least p times as fast as the best other.

    None with fewer than three cases.
    """
    found = {name: ratios for name, ratios in fast_p(distinct(frame)).items() if len(ratios) > 2}
    if not found:
        return None
    drawn, ((axis,),) = theme.panels([1], 1, line=2.6, row=0.3, width=5.0)
    for name, ratios in found.items():
        share = 1 - np.arange(len(ratios)) / len(ratios)
        axis.step([_LEAST, *ratios, ratios[-1]], [1.0, *share, 0.0], where="pre", color=theme.colour(name),
                  label=f"{name}, {len(ratios)} cases")  # fmt: skip
    axis.axvline(1.0, color=theme.colour("ink"), linewidth=0.9)
    most = max(ratios[-1] for ratios in found.values())
    axis.set(xlim=(0.5, 1.1 * max(2.0, most)), ylim=(0, 1.03), xlabel="p", ylabel="share of cases")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(_in_powers)
    axis.grid()
    theme.legend(drawn)
    return drawn


def predicted(lines: pd.DataFrame, title: str) -> Any:
    """Return the picture of predictions, time over M, a panel for each N x K.

    lines: columns M, N, K, ranks, unfused_us, best_us, bound_us.
    """
    from matplotlib.lines import Line2D

    groups = list(parts(lines, "N", "K"))
    drawn, axes = theme.panels([1] * len(groups), 1, line=2.4, row=0.5)
    colours = dict(zip(sorted(set(lines["ranks"])), itertools.cycle(_RANK_COLOURS), strict=False))
    styles: dict[str, tuple[str, Any]] = {
        "unfused_us": ("unfused", "--"), "best_us": ("the fastest", "-"), "bound_us": ("bound", ":")
    }  # fmt: skip
    for axis, ((N, K), members) in zip(axes[:, 0], groups, strict=True):
        axis.set_title(f"N = {N}, K = {K}")
        for (num_ranks,), line in parts(members.sort_values("M"), "ranks"):
            for name, (_, dashes) in styles.items():
                marker = "." if name == "best_us" else ""
                paint = theme.colour(colours[num_ranks])
                axis.plot(line["M"], line[name], linestyle=dashes, marker=marker, color=paint, linewidth=1.2)
        theme.log_scale(axis, "x")
        theme.log_scale(axis, "y")
        axis.grid()
        axis.set(xlabel="M, rows of all ranks", ylabel="time, us")
    handles = {ranks(size): Line2D([], [], color=theme.colour(name)) for size, name in colours.items()}
    handles |= {text: Line2D([], [], linestyle=dashes, color=theme.colour("ink")) for text, dashes in styles.values()}
    theme.legend(drawn, handles, title=title, alignment="left", ncols=min(7, len(handles)))
    return drawn


PARTS = {"multiply": "matmul alone", "collective": "beyond it, up to comm alone", "wait": "beyond both"}


def account(total_ms: float, matmul_ms: float, comm_ms: float) -> dict[str, float]:
    """Split total_ms into PARTS; if comm_ms is NaN, all time beyond the matmul is the third part."""
    matmul = min(total_ms, matmul_ms)
    second = 0.0 if math.isnan(comm_ms) else min(total_ms - matmul, comm_ms)
    return dict(zip(PARTS, (matmul, second, total_ms - matmul - second), strict=True))


def time_parts(frame: pd.DataFrame) -> Any:
    """Return the picture of the parts of each case's time, in % of unfused, and its bound.

    All lines have one direction, model and number of ranks. None unless the matmul alone (of a layer a rank's
    arithmetic, `local`) and unfused were both timed. A schedule's time is divided at two times of the same rounds: the
    matmul alone, and that plus the backend's collective alone (`comm`). Lines are at the matmul alone, at the bound,
    and at `sequential`. The parts say how long, not what ran: time beyond the matmul may be communication by any
    transport, a slower matmul, or the host.
    """
    from matplotlib.lines import Line2D

    columns: dict[str, list[tuple[str, pd.DataFrame]]] = {}
    for (matmul,), members in parts(timed(frame[frame["world_size"] > 1]), "matmul"):
        for first, case in cases(distinct(members)):
            case = case.rename(index={"local": "matmul"})
            if {"matmul", BASELINE} <= set(case.index):
                columns.setdefault(matmul, []).append((first["where"], case))
    if not columns:
        return None
    height = max(
        sum(1.6 + len(case.index.difference(list(ALONE))) for _, case in groups) for groups in columns.values()
    )
    drawn, axes = theme.panels([height], len(columns), line=0.155, row=0.5, sharex=True)
    longest, bounds = 0.0, set[str]()
    for axis, (title, groups) in zip(axes[0], columns.items(), strict=True):
        at, names = 0.0, {}
        for where, case in groups:
            axis.text(0.0, at, where, fontsize=7, va="center")
            times = case["median_ms"].drop(list(ALONE), errors="ignore")
            percent, (bound_ms, by) = 100 / times[BASELINE], bound(case)
            drawn_at = {name: case["median_ms"][name] for name in ("matmul", SEQUENTIAL) if name in case.index}
            drawn_at |= {by: bound_ms} if by else {}
            bounds |= drawn_at.keys()
            ends = percent * max(drawn_at.values())
            for line_of, end_ms in drawn_at.items():
                axis.plot([percent * end_ms] * 2, [at + 0.5, at + len(times) + 0.5], zorder=4, **_bound_line(line_of))
            for name, ms in times.items():
                at, left = at + 1, 0.0
                for kind, part in account(
                    ms, case["median_ms"]["matmul"], case["median_ms"].get("comm", math.nan)
                ).items():
                    axis.barh(at, percent * part, left=left, height=0.8, **theme.bar(kind))
                    left += percent * part
                names[at], longest = str(name), max(longest, left, ends)
                # To the right of the bar and of all lines.
                style = {"fontsize": 6.5, "va": "center_baseline", "color": theme.colour("muted")}
                style |= {"xytext": (3.5, 0), "textcoords": "offset points"}
                axis.annotate(f"{milliseconds(ms)} ms", (max(left, ends), at), **style)
            at += 1.6
        theme.named_lines(axis, names, height)
        axis.set(title=title, xlabel="% of unfused")
        axis.grid(axis="x")
    axes[0, 0].set_xlim(0, max(125.0, 1.35 * longest))
    lines = {by if by == SEQUENTIAL else f"{by} alone": Line2D([], [], **_bound_line(by)) for by in sorted(bounds)}
    theme.legend(drawn, {label: kind for kind, label in PARTS.items()} | lines)
    return drawn


def _bound_line(by: str) -> dict[str, Any]:
    # Solid if the matmul bounds all schedules, dashed if a collective bounds some of them.
    styles: dict[str, Any] = {"matmul": "-", SEQUENTIAL: (0, (4.0, 1.5))}
    paint = theme.colour(SEQUENTIAL if by == SEQUENTIAL else "ink")
    return {"color": paint, "linewidth": 1.6, "linestyle": styles.get(by, (0, (1.6, 1.0)))}
