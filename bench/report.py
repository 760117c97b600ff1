"""What a person reads: the table and the picture, both drawn from rows and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedtp.files import replace

from .cases import BASELINES, DIRECTIONS, DTYPES, OPS, SCHEDULES, WHOLE
from .store import NOT_RUN, Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TITLES = {
    "all_gather_matmul": "all-gather + matmul",
    "matmul_reduce_scatter": "matmul + reduce-scatter",
    "matmul_all_reduce": "matmul + all-reduce",
}
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# told apart by lightness as well as by hue
COLOURS = {"unfused": "#8a8a8a", "decomposed": "#0b6fb8", "fused": "#d1495b"}
MARKERS = {"unfused": "o", "decomposed": "D", "fused": "s"}


@dataclass
class CaseRows:
    """The timed rows of one case in one direction, by variant."""

    first: Row
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def size(self) -> str:
        row = self.first
        return f"{row.M} x {row.N} x {row.K} {SHORT_DTYPES[row.dtype]}"

    @property
    def layer(self) -> str:
        """Whose matmul it is, "llama3-8b mlp up", or ""."""
        return f"{self.first.model} {self.first.layer}".strip()

    def median(self, variant: str) -> float | None:
        row = self.rows.get(variant)
        return row.median_ms if row else None


def timed_cases(rows: Iterable[Row]) -> list[CaseRows]:
    """Cases with a measured number, in the order of direction, op, world size, model, dtype and arithmetic."""
    cases: dict[Any, CaseRows] = {}
    for row in rows:
        if row.median_ms is not None and not row.predicted:
            cases.setdefault(row.case, CaseRows(row)).rows[row.variant] = row
    return sorted(cases.values(), key=_order)


def _order(case: CaseRows) -> tuple[Any, ...]:
    row = case.first
    where = DIRECTIONS.index(row.direction), OPS.index(row.op), row.world_size, row.model, row.tokens
    return *where, DTYPES.index(row.dtype), row.M * row.N * row.K, row.M


def plain_forward(cases: Sequence[CaseRows]) -> list[CaseRows]:
    """The forward cases that belong to no model, or all forward ones if there are no others."""
    forward = [case for case in cases if case.first.direction == "forward"]
    return [case for case in forward if not case.first.model] or forward


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the timed cases, the totals of blocks, the checks without a time, what was not run, and every failure."""
    from . import blocks

    cases = timed_cases(rows)
    for direction in DIRECTIONS:
        if chosen := [case for case in cases if case.first.direction == direction]:
            console.print(timed_table(chosen, direction))
            console.print(rates_table(chosen, direction))
    if cases:
        console.print(
            "Medians in ms, the slowest rank of each round; +- is half the 20-80 % range. M x N x K are global sizes.\n"
            "matmul, comm: the unsplit library matmul and the backend's collective, each alone. speed-up: over\n"
            "unfused in the same rounds. of matmul: the matmul's time over the schedule's (1: only that is left).\n"
            "hidden: the part of what unfused adds to the matmul that is gone. ceiling: the longer of matmul, comm.\n"
            "dtensor multiplies with torch's library, which is not always the faster one on a CPU: docs/choosing.md.",
            style="dim",
        )
    if totals := blocks.totals(rows):
        console.print(blocks.table(totals))
    unclocked = [row for row in rows if row.passed and row.median_ms is None]
    if unclocked:
        console.print(checked_table(unclocked))
    for note in not_run(rows):
        console.print(f"not run: {note}", style="dim", highlight=False)
    for row in rows:
        if row.failed:
            size = f"{row.M}x{row.N}x{row.K} {row.dtype} on {row.world_size}"
            console.print("FAILED", style="bold red", end=" ")
            console.print(f"{row.op} {row.direction} {row.variant} {size}: {row.gate}", highlight=False)


def not_run(rows: Iterable[Row]) -> list[str]:
    """What could not run here, a line for each variant and reason, with the ops and numbers of ranks it is about."""
    said: dict[tuple[str, str], dict[str, set[int]]] = {}
    for row in rows:
        if not row.passed and not row.failed:
            reason = row.gate.removeprefix(NOT_RUN)
            said.setdefault((row.variant, reason), {}).setdefault(row.op, set()).add(row.world_size)
    return [
        f"{variant}: {reason} ({'; '.join(f'{op} on {_list(sizes)}' for op, sizes in where.items())})"
        for (variant, reason), where in said.items()
    ]


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _table(title: str, cases: Sequence[CaseRows]) -> Table:
    # With the columns that say which case it is.
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("op")
    if any(case.layer for case in cases):
        table.add_column("layer")
    table.add_column("ranks", justify="right")
    table.add_column("M x N x K")
    return table


def _add(table: Table, cases: Sequence[CaseRows], cells: Sequence[Sequence[str]]) -> None:
    # The lines of a table begun by `_table`, in sections by op.
    layers = any(case.layer for case in cases)
    for before, case, more in zip([None, *cases[:-1]], cases, cells, strict=True):
        if before is not None and before.first.op != case.first.op:
            table.add_section()
        layer = [case.layer] if layers else []
        table.add_row(TITLES[case.first.op], *layer, str(case.first.world_size), case.size, *more)


def _named(cases: Sequence[CaseRows], names: Iterable[str]) -> list[str]:
    # Those of the variants that some case has.
    return [name for name in names if any(name in case.rows for case in cases)]


def timed_table(cases: Sequence[CaseRows], direction: str = "forward") -> Table:
    """One line a case: times, speed-ups, how much is hidden."""
    schedules = _named(cases, SCHEDULES)
    faster = [name for name in schedules if name != "unfused"]
    plain = _named(cases, ("matmul", "own_matmul", "comm"))
    others = _named(cases, ("auto", *BASELINES))
    table = _table(f"Timed on this machine, {direction}; every number behind a passed check", cases)
    for name in (*plain, *schedules, *others):
        table.add_column(name, justify="right")
    for name in faster:
        for what in ("speed-up", "of matmul", "hidden"):
            table.add_column(what if len(faster) == 1 else f"{what}\n{name}", justify="right")
    lines = []
    for case in cases:
        cells = [_ms(case.median(name)) for name in plain]
        cells += [_spread(case.rows.get(name)) for name in schedules]
        cells += [_ms(case.median(name)) for name in others]
        for name in faster:
            row = case.rows.get(name)
            cells += [_ratio(row.speedup_vs_unfused if row else None, "x")]
            cells += [_ratio(row.matmul_fraction if row else None, "")]
            cells += [_ratio(row.overlap_efficiency if row else None, "")]
        lines.append(cells)
    _add(table, cases, lines)
    return table


def rates_table(cases: Sequence[CaseRows], direction: str = "forward") -> Table:
    """One line a case: arithmetic and link rates, and the longer of the two bounds."""
    names = _named(cases, ("matmul", "own_matmul", *SCHEDULES))
    table = _table(f"Rates, {direction}", cases)
    for name in names:
        table.add_column(f"{name}\nTFLOP/s", justify="right")
    for what in ("comm algbw\nGB/s", "comm busbw\nGB/s", "ceiling\nms", "best of\nceiling"):
        table.add_column(what, justify="right")
    lines = []
    for case in cases:
        comm = case.rows.get("comm")
        medians = [median for name in WHOLE if (median := case.median(name)) is not None]
        ceiling = next((row.ceiling_ms for row in case.rows.values() if row.ceiling_ms is not None), None)
        rates = [row.tflops if (row := case.rows.get(name)) else None for name in names]
        cells = ["-" if rate is None else f"{rate:.3g}" for rate in rates]
        cells += [_ratio(comm.algbw_gbps if comm else None, ""), _ratio(comm.busbw_gbps if comm else None, "")]
        cells += [_ms(ceiling), _ratio(ceiling / min(medians) if ceiling and medians else None, "")]
        lines.append(cells)
    _add(table, cases, lines)
    return table


def checked_table(rows: Sequence[Row]) -> Table:
    """One line an op, schedule and world size: what was compared with the float64 product and not timed."""
    from rich import box
    from rich.table import Table

    table = Table(title="Checked at small and uneven sizes, not timed", box=box.SIMPLE_HEAD)
    for name in ("op", "direction", "variant", "how"):
        table.add_column(name)
    for name in ("ranks", "checks passed", "dtypes", "largest error / allowed"):
        table.add_column(name, justify="right")
    groups: dict[tuple[str, str, str, int, bool], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.direction, row.variant, row.world_size, row.interpreted), []).append(row)
    for (op, direction, variant, world_size, interpreted), members in groups.items():
        table.add_row(
            TITLES[op],
            direction,
            variant,
            "interpreted" if interpreted else "compiled",
            str(world_size),
            str(len(members)),
            " ".join(SHORT_DTYPES[name] for name in DTYPES if any(row.dtype == name for row in members)),
            f"{max(row.error_ratio or 0.0 for row in members):.3f}",
        )
    return table


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _spread(row: Row | None) -> str:
    if row is None or row.median_ms is None:
        return "-"
    half = ((row.p80_ms or 0.0) - (row.p20_ms or 0.0)) / 2
    return f"{_ms(row.median_ms)} +-{half:.2g}" if half < 10 else f"{_ms(row.median_ms)} +-{half:.0f}"


def _ratio(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def picture(rows: Sequence[Row], path: Path) -> None:
    """Draw the forward cases as a PNG: a column an op, a row a world size, a line a case, time on a log axis.

    A black tick is the unsplit matmul alone, a marker a schedule's median with its 20-80 % range, and the number on the
    right the best speed-up over unfused; all panels share one axis. ValueError when no row has a number.
    """
    cases = plain_forward(timed_cases(rows))
    if not cases:
        raise ValueError("no forward row has a time: nothing to draw")
    import matplotlib
    from matplotlib.figure import Figure

    sizes = sorted({case.first.world_size for case in cases})
    ops = [op for op in OPS if any(case.first.op == op for case in cases)]
    panels = {
        (op, size): [c for c in cases if (c.first.op, c.first.world_size) == (op, size)] for op in ops for size in sizes
    }
    heights = [max(len(panels[op, size]) for op in ops) for size in sizes]
    # Names come out of files: a dollar sign is one.
    with matplotlib.rc_context({"text.parse_math": False}):
        figure = Figure(
            figsize=(5.0 * len(ops) + 0.5, 0.27 * sum(heights) + 0.75 * len(sizes) + 1.1), layout="constrained"
        )
        axes = figure.subplots(len(sizes), len(ops), sharex=True, squeeze=False, height_ratios=heights)
        for across, op in enumerate(ops):
            for down, size in enumerate(sizes):
                _panel(axes[down][across], panels[op, size], heights[down])
                ranks = f"{size} rank" + "s" * (size > 1)
                axes[down][across].set_title(f"{TITLES[op]}, {ranks}", fontsize=10, loc="left")
            axes[-1][across].set_xlabel("time, ms (log scale)")
        handles: dict[str, Any] = {}
        for axis in figure.axes:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=len(handles), frameon=False)
        figure.supxlabel(_origin(rows), fontsize=8, color="#555555", x=0.01, ha="left")
        drawn = BytesIO()
        figure.savefig(drawn, format="png", dpi=130)
    replace(path, drawn.getvalue())


def _panel(axis: Any, cases: Sequence[CaseRows], lines: int) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    for line, case in enumerate(cases):
        medians = [value for name in ("matmul", *SCHEDULES) if (value := case.median(name)) is not None]
        axis.plot(
            [min(medians), max(medians)], [line, line], color="#d5d5d5", linewidth=3, zorder=1, solid_capstyle="butt"
        )
        if (alone := case.median("matmul")) is not None:
            axis.plot(alone, line, "|", color="black", markersize=13, markeredgewidth=2, zorder=2, label="matmul alone")
        for name in SCHEDULES:
            row = case.rows.get(name)
            if row is None or row.median_ms is None:
                continue
            ends = [[row.median_ms - (row.p20_ms or 0.0)], [(row.p80_ms or 0.0) - row.median_ms]]
            axis.errorbar(
                row.median_ms,
                line,
                xerr=ends,
                fmt=MARKERS[name],
                color=COLOURS[name],
                markersize=5.5,
                elinewidth=1.2,
                capsize=2.5,
                zorder=3,
                label=f"{name} (median, 20-80 %)",
            )
        speedups = [
            row.speedup_vs_unfused for name, row in case.rows.items() if name in SCHEDULES and name != "unfused"
        ]
        best = max((value for value in speedups if value is not None), default=None)
        if best is not None:
            place = axis.get_yaxis_transform()
            axis.text(1.02, line, f"{best:.2f}x", transform=place, va="center", fontsize=8)
    axis.text(1.02, 1.02, "speed-up", transform=axis.transAxes, va="bottom", fontsize=8, color="#555555")
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_locator(LogLocator(subs=()))
    names = [f"{case.first.layer}, {case.size}" if case.layer else case.size for case in cases]
    axis.set_yticks(range(len(cases)), names, fontsize=8)
    axis.set_ylim(lines - 0.4, -0.6)
    axis.tick_params(axis="x", labelsize=8, labelbottom=True)
    axis.grid(axis="x", color="#ececec", zorder=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _origin(rows: Sequence[Row]) -> str:
    """Where the numbers come from, in one line."""
    timed = [row for row in rows if row.median_ms is not None]
    machines = sorted({(f"{row.num_gpus}x {row.gpu}" if row.gpu else f"{row.cpu}, {row.cores} cores") for row in timed})
    commits = sorted({row.commit + ("+" if row.dirty else "") for row in timed})
    torches = sorted({row.torch for row in timed})
    return (
        f"{'; '.join(machines)}. torch {', '.join(torches)}, commit {', '.join(commits)} (+: with changes). "
        "Speed-up: the best over unfused. M x N x K are global sizes."
    )
