"""Time against size: a panel an op (or a model's matmul) and number of ranks, a line a variant, bands of 20-80 %.

Joined are only sizes that are one problem grown: near-square ones, and those that differ in M alone. A size of its own
is a marker without a line. Both axes are logarithmic. What a model predicts is dashed, hollow and without a band.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from . import theme
from .digest import Case, matmuls, variants

# the longest side over the shortest, up to which a problem counts as square
_SQUARE = 2.0
# a size with as much arithmetic as another is set beside it
_APART = 1.16


def panels(cases: Sequence[Case]) -> dict[str, dict[int, list[Case]]]:
    """Cases by matmul, then by ranks; those of one size alone are left out, they make no curve."""
    found: dict[str, dict[int, list[Case]]] = {name: {} for name in matmuls(cases)}
    for case in cases:
        found[case.matmul].setdefault(case.first.world_size, []).append(case)
    curved = {
        key: {size: members for size, members in by_size.items() if len({case.size for case in members}) > 1}
        for key, by_size in found.items()
    }
    return {key: by_size for key, by_size in curved.items() if by_size}


def figure(cases: Sequence[Case]) -> Any:
    """One dtype, direction and model; None where no panel has two sizes. Within `theme.style`."""
    from matplotlib.figure import Figure

    grid = panels(cases)
    if not grid:
        return None
    sizes = sorted({size for by_size in grid.values() for size in by_size})
    drawn = Figure(figsize=(9.2, 2.15 * len(sizes) + 0.9), layout="constrained")
    axes = drawn.subplots(len(sizes), len(grid), squeeze=False, sharex="col", sharey="col")
    others = _others(cases)
    handles: dict[str, Any] = {}
    for across, (name, by_size) in enumerate(grid.items()):
        for down, size in enumerate(sizes):
            axis = axes[down][across]
            ranks = f"{size} rank" + "s" * (size > 1)
            axis.set_title(f"{name}, {ranks}", fontsize=8.5)
            if size not in by_size:
                axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color=theme.colour("muted"))
                continue
            for label, handle in _panel(axis, by_size[size], others):
                handles.setdefault(label, handle)
        in_all = [case for members in by_size.values() for case in members]
        _size_axis(axes[-1][across], in_all)
    for down in range(len(sizes)):
        axes[down][0].set_ylabel("time, ms")
    # what was measured first
    names = sorted(handles, key=lambda name: name.endswith("predicted"))
    drawn.legend([handles[name] for name in names], names, loc="outside upper left", ncols=min(5, len(names)))
    return drawn


def _others(cases: Sequence[Case]) -> tuple[str, ...]:
    every = {name for case in cases for name in variants([*case.measured.values(), *case.predicted.values()])}
    return tuple(sorted(every - set(theme.SERIES)))


def _x(case: Case) -> float:
    return float(case.first.M) if case.first.model else case.gflop


def _families(cases: Sequence[Case]) -> list[list[Case]]:
    # what a line joins: near-square sizes, then those with one N and K
    groups: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        row = case.first
        sides = (row.M, row.N, row.K)
        square = not row.model and max(sides) <= _SQUARE * min(sides)
        groups.setdefault((0, 0) if square else (row.N, row.K), []).append(case)
    return [sorted(members, key=_x) for members in groups.values()]


def _panel(axis: Any, cases: Sequence[Case], others: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.grid()
    taken: dict[int, int] = {}
    for family in _families(cases):
        place = {}
        for case in family:
            step = round(_x(case) * 1e6)
            place[id(case)] = _x(case) * _APART ** taken.get(step, 0)
            taken[step] = taken.get(step, 0) + 1
        alone = [(place[id(case)], ms) for case in family if (ms := case.ms("matmul")) is not None]
        if alone:
            style = {"color": theme.colour("ink"), "linewidth": 0.8, "marker": "_", "markersize": 7, "zorder": 2}
            yield "matmul alone", axis.plot(*zip(*alone, strict=True), **style)[0]
        for predicted in (True, False):
            by_case = [case.predicted if predicted else case.measured for case in family]
            for name in variants(row for rows in by_case for row in rows.values()):
                points = [
                    (place[id(case)], row.median_ms, row.p20_ms or row.median_ms, row.p80_ms or row.median_ms)
                    for case, rows in zip(family, by_case, strict=True)
                    if (row := rows.get(name)) is not None
                ]
                yield from _line(axis, name, theme.series(name, others), points, predicted)


def _line(axis: Any, name: str, series: str, points: Sequence[Any], predicted: bool) -> Iterator[tuple[str, Any]]:
    x, median, low, high = zip(*points, strict=True)
    paint = theme.colour(series)
    if predicted:
        style = {"linestyle": (0, (4, 2.5)), "markerfacecolor": "none", "markersize": 4.5, "linewidth": 1.1}
        yield f"{name}, predicted", axis.plot(x, median, color=paint, marker=theme.marker(series), **style)[0]
        return
    if len(points) > 1:
        axis.fill_between(x, low, high, color=paint, alpha=0.22, linewidth=0, zorder=1)
    else:
        axis.vlines(x, low, high, color=paint, linewidth=2.5, alpha=0.35, zorder=1)
    line = axis.plot(x, median, color=paint, marker=theme.marker(series), markersize=4, linewidth=1.4, zorder=3)[0]
    yield f"{name} (20-80 %)", line


def _size_axis(axis: Any, cases: Sequence[Case]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    model = bool(cases[0].first.model)
    axis.set_xlabel("tokens" if model else "GFLOP a rank")
    axis.xaxis.set_minor_locator(NullLocator())
    values = sorted({_x(case) for case in cases})
    # every size has its tick unless that would crowd them
    if model and len(values) <= 6:
        axis.xaxis.set_major_locator(FixedLocator(values))
    else:
        axis.xaxis.set_major_locator(LogLocator(numticks=6))
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_major_formatter(plain)
    axis.yaxis.set_major_locator(LogLocator(numticks=6))
    axis.yaxis.set_major_formatter(plain)
    axis.yaxis.set_minor_locator(NullLocator())
