"""Where the time goes, case by case, against what bounds it; and what the matmuls of a whole block take.

A schedule's time T is parted by what was measured alone in the same rounds: the matmul's time, then of what is beyond
it at most the communication's (exposed: it was not hidden), then the rest. That is an account, not a trace: a matmul
that communication slows down shows as exposed communication or as the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from . import theme
from .cases import ALONE, ranks
from .frames import BASELINE, blocks, bound, cases, parts, timed
from .tables import milliseconds

PARTS = {"multiply": "matmul", "collective": "exposed communication", "wait": "the rest"}


@dataclass(frozen=True)
class Group:
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


def figure(frame: pd.DataFrame) -> Any:
    """One direction, model and number of ranks; None where matmul and unfused were not both timed.

    Within `theme.style`.
    """
    from matplotlib.lines import Line2D

    columns: dict[str, list[Group]] = {}
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
            columns.setdefault(matmul, []).append(Group(first["where"], bars, percent * longest if by else 0.0, by))
    if not columns:
        return None
    drawn = _drawn(columns)
    found = {group.by for groups in columns.values() for group in groups if group.by}
    lines = {f"bound: {by} alone": Line2D([], [], **_line(by)) for by in sorted(found)}
    theme.legend(drawn, {label: kind for kind, label in PARTS.items()} | lines)
    return drawn


def _line(by: str) -> dict[str, Any]:
    # Through where the matmul bounds all schedules, broken where a collective bounds some of them.
    return {"color": theme.colour("ink"), "linewidth": 1.6, "linestyle": "-" if by == "matmul" else (0, (1.6, 1.0))}


def block_figure(frame: pd.DataFrame) -> Any:
    """One model, dtype and machine: a column a direction, a group of bars a number of tokens and ranks.

    None where no block is whole. Within `theme.style`.
    """
    columns: dict[str, list[Group]] = {}
    for shared, medians in blocks(frame):
        base, bars = medians.get(BASELINE), {}
        whole = base or max(medians.values())
        for name, ms in medians.items():
            gain = f", {base / ms:.2f}x" if base and name not in ("matmul", BASELINE) else ""
            alone = name == "matmul"
            if name not in ("comm", "own_matmul"):
                words = f"{milliseconds(ms)} ms{gain}"
                bars["matmul alone" if alone else name] = {"ink" if alone else name: 100 * ms / whole}, words
        group = Group(f"{shared['tokens']} tokens, {ranks(shared['world_size'])}", bars)
        columns.setdefault(shared["direction"], []).append(group)
    return _drawn(columns) if columns else None


def _drawn(columns: Mapping[str, list[Group]]) -> Any:
    # A column of groups each, on axes of % of unfused.
    height = max(sum(len(group.bars) + 1.6 for group in groups) for groups in columns.values())
    drawn, axes = theme.panels([height], len(columns), line=0.155, row=0.5, sharex=True)
    longest = 0.0
    for axis, (title, groups) in zip(axes[0], columns.items(), strict=True):
        at, names = 0.0, {}
        for group in groups:
            axis.text(0.0, at, group.title, fontsize=7, va="center")
            if group.bound:
                axis.plot([group.bound] * 2, [at + 0.5, at + len(group.bars) + 0.5], zorder=4, **_line(group.by))
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
