"""Every table that is made of rows: a frame of cells each, printed by rich or put on the page by pandas' Styler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import pandas as pd

from .cases import ALONE, SCHEDULES, SHORT_DTYPES, TITLES
from .frames import BASELINE, blocks, bound, cases, each, overall, parts, records, timed
from .frames import standings as by_size
from .store import COLUMNS, NOT_RUN

if TYPE_CHECKING:
    from rich.table import Table as Printed

Format: TypeAlias = "str | Callable[[Any], str]"


def milliseconds(value: float, digits: int = 3) -> str:
    """So many digits or more, and no power of ten."""
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


# Of a heading, or of its last line, as a variant may have any name; other numbers have three digits.
FORMATS: dict[str, Format] = {
    **dict.fromkeys(("mean", "best", "worst", "speed-up"), "{:.2f}x"),
    **dict.fromkeys(("ratio", "from", "to"), "{:.3f}"),
    **dict.fromkeys(
        ("us", "median_ms", "median, ms", "p20_ms", "p80_ms", "ceiling_ms"), partial(milliseconds, digits=4)
    ),
    **dict.fromkeys(("communication hidden", "hidden"), "{:.0%}"),
    "ms, +- 20-80 %": "{}",
    "ms (quartiles)": "{}",
}
BOUND = (
    "bound: the longer of the matmul and the backend's collective, each alone, and which it is. The matmul bounds "
    "every schedule, but for chunks that suit the caches better than the whole. The collective bounds what sends "
    "through the backend: unfused, and torch's own. decomposed and fused write into memory that the ranks share "
    "instead, and may end before it: bound / shortest is above 1 then."
)


@dataclass(frozen=True)
class CellTable:
    """`note`: how to read it."""

    name: str
    title: str
    cells: pd.DataFrame
    note: str = ""

    @classmethod
    def of(cls, name: str, title: str, lines: Iterable[Mapping[str, Any]] | pd.DataFrame, note: str = "") -> CellTable:
        """From cells by heading, without the columns in which no line has anything."""
        cells: Any = lines if isinstance(lines, pd.DataFrame) else pd.DataFrame(list(lines))
        return cls(name, title, cells.loc[:, ~(cells.isna() | cells.eq("")).all()], note)

    @property
    def numbers(self) -> dict[str, Format]:
        """The formats of the columns at the right; the others are text."""
        known = {str(name): FORMATS.get(str(name).rpartition("\n")[2]) for name in self.cells}
        plain = {str(name): milliseconds for name in self.cells.select_dtypes("number")}
        return plain | {name: how for name, how in known.items() if how}

    def html(self) -> str:
        """Everything that a cell or a heading holds is escaped."""
        from pandas.io.formats.style import Styler

        formats: Any = self.numbers
        styler = Styler(self.cells, uuid=self.name, cell_ids=False).hide(axis="index")
        styler.format(formats, na_rep="", escape="html").format_index(escape="html", axis=1)
        styler.set_table_styles({name: [{"selector": "", "props": "text-align: right"}] for name in formats})
        if "predicted" in self.cells:
            styler.apply(lambda line: ["font-style: italic" if line["predicted"] else ""] * len(line), axis=1)
        return str(styler.to_html())

    def printed(self, *, sections: bool = True) -> Printed:
        """For the terminal, in sections by the first column."""
        from rich import box
        from rich.table import Table as Printed

        made, formats = Printed(title=self.title, title_justify="left", box=box.SIMPLE_HEAD), self.numbers
        for name in map(str, self.cells):
            made.add_column(name, justify="right" if name in formats else "left")
        before = None
        for line in records(self.cells):
            first, *_ = line.values()
            if sections and before not in (None, first):
                made.add_section()
            before = first
            made.add_row(*(_text(value, formats.get(name, "{}")) for name, value in line.items()))
        return made


def _text(value: Any, how: Format) -> str:
    return "-" if pd.isna(value) else how(value) if callable(how) else how.format(value)


def summary(frame: pd.DataFrame) -> CellTable:
    """Each schedule over all its cases with two ranks or more, the best first."""
    note = (
        f"Speed-ups are over {BASELINE}, the mean is geometric. Faster and slower are counted where the 95 % interval "
        f"of the ratio leaves out 1. Communication hidden: of what {BASELINE} spends beyond the matmul, the share that "
        "a schedule does not, in the median case; negative where it spends more."
    )
    cells = overall(frame).drop(columns=["worst at", "shorter median"], errors="ignore")
    return CellTable("summary", "Each schedule over all cases", cells, note)


def standings(frame: pd.DataFrame) -> CellTable:
    """From which size on each schedule wins, by op, direction and number of ranks."""
    found = by_size(frame, "machine", "model", "direction", "matmul", "world_size", "short_dtype").rename(
        columns={"world_size": "ranks", "short_dtype": "dtype"}
    )
    columns = ["model", "matmul", "dtype", "direction", "ranks", "schedule", "faster", "same", "slower", "mean"]
    note = (
        "Sizes in the order of a rank's arithmetic; counts and means as above. Shorter median: from which size on a "
        f"schedule's median is below that of {BASELINE} at every size."
    )
    cells = found.reindex(columns=[*columns, "shorter median", "worst", "worst at"])
    return CellTable.of("standings", "From which size on each schedule is faster", cells, note)


def _about(first: Mapping[str, Any]) -> dict[str, Any]:
    # The columns that say which case it is.
    layer, size = f"{first['model']} {first['layer']}".strip(), f"{first['size']} {first['short_dtype']}"
    return {"op": TITLES.get(first["op"], first["op"]), "layer": layer, "ranks": first["world_size"], "M x N x K": size}


def _spread(row: Any) -> str:
    half = (row["p80_ms"] - row["p20_ms"]) / 2
    return milliseconds(row["median_ms"]) + ("" if pd.isna(half) else f" +-{milliseconds(half, 2)}")


def times(frame: pd.DataFrame, direction: str) -> CellTable:
    """One line a case: times, speed-ups, how much is hidden."""
    shown = timed(frame[frame["direction"] == direction])
    variants = [variant for (variant,), _ in parts(shown, "variant")]
    lines = []
    for first, case in cases(shown):
        line = _about(first)
        for name in variants:
            if name in SCHEDULES:
                line[f"{name}\nms, +- 20-80 %"] = _spread(case.loc[name]) if name in case.index else None
            else:
                line[f"{name}\nms"] = case["median_ms"].get(name)
        for name in SCHEDULES[1:]:
            line[f"{name}\nspeed-up"] = case["speedup_vs_unfused"].get(name)
            line[f"{name}\nof matmul"] = case["matmul_fraction"].get(name)
            line[f"{name}\nhidden"] = case["overlap_efficiency"].get(name)
        lines.append(line)
    note = (
        "Medians in ms, the slowest rank of each round; +- is half the 20-80 % range. M x N x K are global sizes. "
        "matmul, comm: the unsplit library matmul and the backend's collective, each alone. speed-up: unfused / this "
        "schedule, in the same rounds. of matmul: matmul / this schedule (1: no time but the matmul's). hidden: the "
        "share of unfused - matmul, the exposed communication, that this schedule saves."
    )
    title = f"Times, {direction}; each result was compared with a float64 reference first"
    return CellTable.of(f"times-{direction}", title, lines, note)


def rates(frame: pd.DataFrame, direction: str) -> CellTable:
    """One line a case: arithmetic and link rates, the longer of the two bounds, and which of them it is."""
    lines = []
    for first, case in cases(timed(frame[frame["direction"] == direction])):
        line, (longest, what) = _about(first), bound(case)
        line |= {f"{name}\nTFLOP/s": case["tflops"].get(name) for name in ("matmul", "own_matmul", *SCHEDULES)}
        line |= {f"{name}, GB/s": case[f"{name}_gbps"].get("comm") for name in ("algbw", "busbw")}
        shortest = case["median_ms"].drop(list(ALONE), errors="ignore").min()
        lines.append(line | {"bound, ms": longest, "bound": what, "bound / shortest": longest / shortest})
    return CellTable.of(f"rates-{direction}", f"Rates, {direction}", lines, BOUND if lines else "")


def totals(frame: pd.DataFrame) -> CellTable:
    """One line a model's block and direction: sums of its matmuls, and what the fastest schedule gains over unfused."""
    found, lines = blocks(frame), []
    variants = [name for name in frame["variant"].cat.categories if any(name in medians for _, medians in found)]
    for shared, medians in found:
        line = {"ranks" if name == "world_size" else name: value for name, value in shared.items() if name != "machine"}
        line |= {f"{name}\nms": medians.get(name) for name in variants}
        ours = {medians[name]: name for name in SCHEDULES if name in medians}
        base, alone, best_ms = medians.get(BASELINE), medians.get("matmul"), min(ours, default=None)
        line["fastest"] = ours[best_ms] if best_ms else None
        line["speed-up"] = base / best_ms if base and best_ms else None
        line["of matmul"] = alone / best_ms if alone and best_ms else None
        line["auto\nspeed-up"] = base / medians["auto"] if base and "auto" in medians else None
        lines.append(line)
    return CellTable.of("totals", "The matmuls of one transformer block together, ms", lines)


def checked(frame: pd.DataFrame) -> CellTable:
    """One line an op, variant and number of ranks: what was compared with the float64 product and not timed."""
    columns, lines = ("op", "direction", "variant", "interpreted", "world_size"), []
    for (op, direction, variant, interpreted, ranks), members in parts(
        frame[frame["passed"] & frame["median_ms"].isna()], *columns
    ):
        how, dtypes = "interpreted" if interpreted else "compiled", [dtype for (dtype,), _ in parts(members, "dtype")]
        line = {"op": TITLES.get(op, op), "direction": direction, "variant": variant, "how": how, "ranks": ranks}
        line |= {"checks": len(members), "dtypes": " ".join(SHORT_DTYPES.get(each, each) for each in dtypes)}
        lines.append(line | {"error / allowed": members["error_ratio"].max()})
    note = (
        "Checked: compared with a float64 reference and not timed. A kernel in Triton's interpreter computes what it "
        "would on a GPU, at a speed that says nothing about one. error / allowed: the largest error / its tolerance."
    )
    return CellTable.of("checked", "Checked at small and uneven sizes, not timed", lines, note)


def refused(frame: pd.DataFrame) -> CellTable:
    """Return what ran and was wrong, row by row."""
    wrong = records(frame[frame["failed"]])
    lines = [_about(row) | {name: row[name] for name in ("direction", "variant", "gate")} for row in wrong]
    title = f"FAILED: {len(wrong)} of {len(frame)} results were wrong, or their calls failed; these have no time"
    return CellTable.of("refused", title, lines)


def not_run(frame: pd.DataFrame) -> list[str]:
    """Return a line for each variant that could not run here and each reason, with its ops and numbers of ranks."""
    lines = []
    for (variant, gate), members in parts(frame[~frame["passed"] & ~frame["failed"]], "variant", "gate"):
        where = "; ".join(f"{op} on {each(some, 'world_size')}" for (op,), some in parts(members, "op"))
        lines.append(f"{variant}: {gate.removeprefix(NOT_RUN)} ({where})")
    return lines


def everything(frame: pd.DataFrame) -> CellTable:
    """All rows, timed ones first, by the columns of their file that any has; the page's script sorts and filters."""
    rows = frame.iloc[frame["median_ms"].isna().argsort(kind="stable")][list(COLUMNS)].drop(columns="rounds_ms")
    for name in rows.select_dtypes("bool"):
        rows[name] = rows[name].map({True: "yes", False: ""})
    counts = list(rows.select_dtypes("int"))
    return CellTable.of("rows", "All rows", rows.assign(**rows[counts].mask(rows[counts] == 0)))
