"""Where the time goes, case by case, against the ceiling; and what the matmuls of a whole block take.

A schedule's time T is parted by what was measured alone in the same rounds: the matmul's time, then of what is beyond
it at most the communication's (exposed: it was not hidden), then the rest. That is an account, not a trace: a matmul
that communication slows down shows as exposed communication or as the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import theme
from .blocks import Total
from .cases import DIRECTIONS, WHOLE
from .digest import BASELINE, Case, matmuls, milliseconds, variants
from .report import SHORT_DTYPES

PARTS = (("multiply", "matmul"), ("collective", "exposed communication"), ("wait", "the rest"))


def parts(total_ms: float, matmul_ms: float, comm_ms: float | None) -> tuple[float, float, float]:
    """total_ms as (matmul, exposed communication, the rest); without a time for communication all excess is rest."""
    matmul = min(total_ms, matmul_ms)
    exposed = min(total_ms - matmul, comm_ms or 0.0)
    return matmul, exposed, total_ms - matmul - exposed


def figure(cases: Sequence[Case]) -> Any:
    """One direction, model and number of ranks; None where matmul and unfused were not both timed.

    Within `theme.style`.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = [case for case in cases if case.ms("matmul") is not None and case.ms(BASELINE) is not None]
    columns = {name: [case for case in shown if case.matmul == name] for name in matmuls(shown)}
    if not columns:
        return None
    lines = max(sum(len(variants(case.measured.values())) + 1.6 for case in members) for members in columns.values())
    drawn = Figure(figsize=(9.2, 0.155 * lines + 1.0), layout="constrained")
    axes = drawn.subplots(1, len(columns), squeeze=False, sharex=True)[0]
    for axis, (name, members) in zip(axes, columns.items(), strict=True):
        _panel(axis, members, lines)
        axis.set_title(name, fontsize=9)
    handles: list[Any] = [
        Patch(facecolor=theme.colour(part), hatch="////" if part == "wait" else None, label=label)
        for part, label in PARTS
    ]
    handles.append(
        Line2D([], [], color=theme.colour("ink"), linewidth=1.6, label="ceiling: max(matmul, communication)")
    )
    drawn.legend(handles=handles, loc="outside upper left", ncols=len(handles))
    return drawn


def _panel(axis: Any, cases: Sequence[Case], lines: float) -> None:
    at, ticks, labels = 0.0, [], []
    for case in cases:
        base, matmul = case.ms(BASELINE), case.ms("matmul")
        assert base is not None
        assert matmul is not None
        row = case.first
        size = f"{row.tokens} tokens" if row.model else f"{case.size} {SHORT_DTYPES.get(row.dtype, row.dtype)}"
        axis.text(0.0, at, size, fontsize=7, va="center", color=theme.colour("ink"))
        first, ceiling = at + 0.5, case.ceiling_ms()
        across = 100 * ceiling / base if ceiling is not None else 0.0
        for name in variants(case.measured.values()):
            total = case.ms(name)
            if total is None:
                continue
            at += 1
            left = 0.0
            for (part, _), value in zip(PARTS, parts(total, matmul, case.ms("comm")), strict=True):
                share = 100 * value / base
                style = {"facecolor": theme.colour(part), "linewidth": 0}
                if part == "wait":
                    style |= {"hatch": "////", "edgecolor": theme.colour("muted")}
                axis.barh(at, share, left=left, height=0.8, **style)
                left += share
            # behind the ceiling where that is further on, not across it
            style = {"fontsize": 6.5, "va": "center_baseline", "color": theme.colour("muted")}
            axis.text(max(left, across) + 2, at, f"{milliseconds(total)} ms", **style)
            ticks.append(at)
            labels.append(name)
        if ceiling is not None:
            axis.plot([across, across], [first, at + 0.5], color=theme.colour("ink"), linewidth=1.6, zorder=4)
        at += 1.6
    axis.set_yticks(ticks, labels, fontsize=6.5)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(lines - 0.5, -0.8)
    axis.set_xlim(0, 100 * max(1.25, 1.2 * _longest(cases)))
    axis.set_xlabel("% of unfused")
    axis.grid(axis="x")
    axis.spines["left"].set_visible(False)


def _longest(cases: Sequence[Case]) -> float:
    return max(
        max(case.ceiling_ms() or 0.0, case.ms(name) or 0.0) / (case.ms(BASELINE) or 1.0)
        for case in cases
        for name in variants(case.measured.values())
    )


def blocks(found: Sequence[Total]) -> Any:
    """One model and dtype: a column a direction, a group of bars a number of tokens and ranks. Within `theme.style`."""
    from matplotlib.figure import Figure

    directions = [name for name in DIRECTIONS if any(total.direction == name for total in found)]
    by_direction = {name: [total for total in found if total.direction == name] for name in directions}
    others = tuple(sorted({name for total in found for name in _shown(total)} - set(theme.SERIES) - {"matmul"}))
    lines = max(sum(len(_shown(total)) + 1.6 for total in members) for members in by_direction.values())
    drawn = Figure(figsize=(9.2, 0.155 * lines + 0.8), layout="constrained")
    axes = drawn.subplots(1, len(directions), squeeze=False)[0]
    for axis, (direction, members) in zip(axes, by_direction.items(), strict=True):
        at, ticks, labels = 0.0, [], []
        for total in members:
            ranks = f"{total.world_size} rank" + "s" * (total.world_size > 1)
            axis.text(0.0, at, f"{total.tokens} tokens, {ranks}", fontsize=7, va="center")
            for name in _shown(total):
                at += 1
                alone, ms, gain = name == "matmul", total.medians[name], total.speedup(name)
                paint = theme.colour("ink" if alone else theme.series(name, others))
                share = 100 * ms / _whole(total)
                axis.barh(at, share, height=0.35 if alone else 0.8, color=paint, linewidth=0)
                words = f"{milliseconds(ms)} ms" + (
                    "" if gain is None or name in ("matmul", BASELINE) else f", {gain:.2f}x"
                )
                style = {"fontsize": 6.5, "va": "center_baseline", "color": theme.colour("muted")}
                axis.text(share + 2, at, words, **style)
                ticks.append(at)
                labels.append("matmul alone" if alone else name)
            at += 1.6
        axis.set_yticks(ticks, labels, fontsize=6.5)
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(lines - 0.5, -0.8)
        longest = max(total.medians[name] / _whole(total) for total in members for name in _shown(total))
        axis.set_xlim(0, max(145.0, 140 * longest))
        axis.set_xlabel("% of unfused")
        axis.set_title(direction)
        axis.grid(axis="x")
        axis.spines["left"].set_visible(False)
    return drawn


def _shown(total: Total) -> list[str]:
    """The matmul alone, then what runs the whole block."""
    return [name for name in ("matmul", *WHOLE) if name in total.medians]


def _whole(total: Total) -> float:
    """What is 100 %: unfused, or the longest where that was not timed."""
    return total.medians.get(BASELINE) or max(total.medians.values())
