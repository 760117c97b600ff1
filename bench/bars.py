"""Where the time goes, case by case, against the ceiling; and what the matmuls of a whole block take.

A schedule's time T is parted by what was measured alone in the same rounds: the matmul's time, then of what is beyond
it at most the communication's (exposed: it was not hidden), then the rest. That is an account, not a trace: a matmul
that communication slows down shows as exposed communication or as the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from . import theme
from .cases import ranks
from .frames import ALONE, BASELINE, blocks, cases, ceiling, parts, timed
from .tables import milliseconds

PARTS = {"multiply": "matmul", "collective": "exposed communication", "wait": "the rest"}


def account(total_ms: float, matmul_ms: float, comm_ms: float) -> dict[str, float]:
    """total_ms by PARTS; without a time for communication (NaN) all excess over the matmul is the rest."""
    matmul = min(total_ms, matmul_ms)
    exposed = 0.0 if math.isnan(comm_ms) else min(total_ms - matmul, comm_ms)
    return dict(zip(PARTS, (matmul, exposed, total_ms - matmul - exposed), strict=True))


@dataclass(frozen=True)
class Bar:
    """A variant's bar: `shares` of 100 % by colour, what is written behind it, and its height."""

    name: str
    shares: Mapping[str, float]
    text: str
    height: float = 0.8


@dataclass(frozen=True)
class Group:
    """The bars of one case below a title. ceiling: across all of them, in %; NaN for none."""

    title: str
    bars: Sequence[Bar]
    ceiling: float = math.nan


def _drawn(columns: Mapping[str, Sequence[Group]]) -> Any:
    # A column of groups each, all on axes of % of unfused.
    from matplotlib.figure import Figure

    lines = max(sum(len(group.bars) + 1.6 for group in groups) for groups in columns.values())
    drawn = Figure(figsize=(9.2, 0.155 * lines + 1.0), layout="constrained")
    axes = drawn.subplots(1, len(columns), squeeze=False, sharex=True)[0]
    for axis, (title, groups) in zip(axes, columns.items(), strict=True):
        _column(axis, groups)
        axis.set(title=title, xlabel="% of unfused", ylim=(lines - 0.5, -0.8))
    longest = max(
        max(sum(bar.shares.values()) for bar in group.bars) for groups in columns.values() for group in groups
    )
    axes[0].set_xlim(0, max(125.0, 1.35 * longest))
    return drawn


def _column(axis: Any, groups: Sequence[Group]) -> None:
    at, ticks = 0.0, {}
    for group in groups:
        axis.text(0.0, at, group.title, fontsize=7, va="center")
        first = at + 0.5
        for bar in group.bars:
            at += 1
            left = 0.0
            for kind, share in bar.shares.items():
                axis.barh(at, share, left=left, height=bar.height, **theme.bar(kind))
                left += share
            # behind the ceiling where that is further on, not across it
            style = {"fontsize": 6.5, "va": "center_baseline", "color": theme.colour("muted")}
            axis.text(max(left, 0.0 if math.isnan(group.ceiling) else group.ceiling) + 2, at, bar.text, **style)
            ticks[at] = bar.name
        if not math.isnan(group.ceiling):
            ends = {"ymin": first, "ymax": at + 0.5}
            axis.vlines(group.ceiling, **ends, color=theme.colour("ink"), linewidth=1.6, zorder=4)
        at += 1.6
    axis.set_yticks(list(ticks), list(ticks.values()), fontsize=6.5)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x")
    axis.spines["left"].set_visible(False)


def figure(frame: pd.DataFrame) -> Any:
    """One direction, model and number of ranks; None where matmul and unfused were not both timed.

    Within `theme.style`.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    columns: dict[str, list[Group]] = {}
    for (matmul,), members in parts(timed(frame[frame["world_size"] > 1]), "matmul"):
        for first, case in cases(members):
            if {"matmul", BASELINE} <= set(case.index):
                title = first["where"] if first["model"] else f"{first['size']} {first['short_dtype']}"
                columns.setdefault(matmul, []).append(Group(title, *_accounts(case)))
    if not columns:
        return None
    drawn = _drawn(columns)
    handles: dict[str, Any] = {label: Patch(**theme.bar(kind)) for kind, label in PARTS.items()}
    line = Line2D([], [], color=theme.colour("ink"), linewidth=1.6)
    theme.legend(drawn, handles | {"ceiling: max(matmul, communication)": line})
    return drawn


def _accounts(case: pd.DataFrame) -> tuple[list[Bar], float]:
    times = case["median_ms"]
    percent = 100 / times[BASELINE]
    bars = []
    for name, ms in times.drop(list(ALONE), errors="ignore").items():
        shares = account(ms, times["matmul"], times.get("comm", math.nan))
        text = f"{milliseconds(ms)} ms"
        bars.append(Bar(str(name), {kind: percent * part for kind, part in shares.items()}, text))
    return bars, percent * ceiling(case)


def block_figure(frame: pd.DataFrame) -> Any:
    """One model, dtype and machine: a column a direction, a group of bars a number of tokens and ranks.

    None where no block is whole. Within `theme.style`.
    """
    columns: dict[str, list[Group]] = {}
    for shared, medians in blocks(frame):
        base, bars = medians.get(BASELINE), []
        for name, ms in medians.items():
            kind, height, label = ("ink", 0.35, "matmul alone") if name == "matmul" else (name, 0.8, name)
            gain = f", {base / ms:.2f}x" if base and name not in ("matmul", BASELINE) else ""
            share = 100 * ms / (base or max(medians.values()))
            if name not in ("comm", "own_matmul"):
                bars.append(Bar(label, {kind: share}, f"{milliseconds(ms)} ms{gain}", height))
        group = Group(f"{shared['tokens']} tokens, {ranks(shared['world_size'])}", bars)
        columns.setdefault(shared["direction"], []).append(group)
    return _drawn(columns) if columns else None
