"""A timeline as a picture, and in words by what a schedule is slower than unfused where it is."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from . import theme
from .frames import BASELINE
from .intervals import ratio
from .tables import milliseconds
from .timeline import NAMES, Timeline

# Of a kind of time, what a schedule that spends more of it than unfused is slower by.
_REASONS = {
    "multiply": "multiplying took {own} ms against {other}: the same arithmetic, so either chunks multiply more "
    "slowly here than the whole, or the machine did something else meanwhile",
    "wait": "waiting for the others' chunks took {own} ms",
    "sending": "copying took {own} ms, the collective of unfused {other}",
    "add": "adding up partial results took {own} ms against {other}",
    "": "what lies between its parts, the host's own work or a late beginning, took {own} ms against {other}",
}


def remarks(found: Timeline) -> list[str]:
    """Each schedule against unfused: over all recorded calls, and why the call that is shown is slower where it is."""
    lines = []
    called = [schedule for schedule in found.schedules if found.of(schedule, "call")]
    for schedule in called if BASELINE in called else ():
        if schedule == BASELINE:
            continue
        own_ms, other_ms = found.last_ms(schedule), found.last_ms(BASELINE)
        if own_ms > other_ms:
            own, other = found.parts_ms(schedule), found.parts_ms(BASELINE)
            for each in (own, other):
                each["sending"] = each.pop("travel", 0.0) + each.pop("collective", 0.0)
            most = max(_REASONS, key=lambda kind: own[kind] - other[kind])
            why = _REASONS[most].format(own=milliseconds(own[most]), other=milliseconds(other[most]))
            times = f"{milliseconds(own_ms)} ms, {BASELINE} {milliseconds(other_ms)}"
            slower = f"{schedule} is slower than {BASELINE} in the calls shown, {times}"
            lines.append(f"{slower}. The largest part of the difference, of the rank that ends last: {why}.")
        calls, base = found.calls(schedule), found.calls(BASELINE)
        if calls and base and len(calls.rounds) > 1:
            of = ratio(calls, base)
            told = "faster" if of.high < 1 else "slower" if of.low > 1 else "neither can be called the faster"
            interval = f"{of.ratio:.2f} of the time of {BASELINE} (95 % interval {of.low:.2f} to {of.high:.2f})"
            lines.append(f"All {len(calls.rounds)} recorded calls of each: {schedule} takes {interval}: {told}.")
    return lines


def figure(found: Timeline) -> Any:
    """A panel a schedule, a line a rank, all on one axis of time; a number on a bar is the rank whose chunk it is.

    Within `theme.style`.
    """
    names = {mark.rank: f"rank {mark.rank}" for mark in found.marks}
    longest_us = max(mark.begin_us + mark.length_us for mark in found.marks)
    drawn, axes = theme.panels([len(names)] * len(found.schedules), 1, line=0.34, row=0.65, sharex=True)
    for axis, schedule in zip(axes[:, 0], found.schedules, strict=True):
        for mark in found.of(schedule):
            left, length = mark.begin_us / 1e3, mark.length_us / 1e3
            whole = mark.kind == "call"
            edge = {} if whole or mark.kind == "wait" else {"edgecolor": theme.colour("paper"), "linewidth": 0.6}
            face = theme.bar("line" if whole else mark.kind, zorder=1 if whole else 2, **edge)
            axis.barh(mark.rank, length, left=left, height=0.84 if whole else 0.72, **face)
            if mark.peer >= 0 and mark.kind != "wait" and mark.length_us > 0.03 * longest_us:
                style = {"ha": "center", "va": "center_baseline", "fontsize": 7.5, "color": theme.colour("on-bar")}
                axis.text(left + length / 2, mark.rank, f"{mark.peer}", zorder=3, **style)
        last = found.last_ms(schedule)
        axis.axvline(last, color=theme.colour("ink"), linewidth=1.0, ymin=0.02, ymax=0.98)
        axis.set_title(f"{schedule}: {last:.3g} ms")
        theme.named_lines(axis, names, len(names))
    axes[-1, 0].set_xlabel("ms from the first rank's call")
    axes[-1, 0].set_xlim(left=0)
    if said := [line for each in remarks(found) for line in textwrap.wrap(each, 150)]:
        drawn.supxlabel("\n".join(said), fontsize=8, color=theme.colour("ink"), x=0.01, ha="left")
    kinds = {mark.kind for mark in found.marks}
    handles = {name: kind for kind, name in NAMES.items() if kind in kinds} | {"the rest of the call": "line"}
    theme.legend(drawn, handles, title=found.title(), alignment="left")
    return drawn


def picture(found: Timeline, path: Path) -> None:
    """The figure as a PNG."""
    with theme.style():
        theme.save(figure(found), path)
