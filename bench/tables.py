"""Every table that is made of rows: a frame of cells each, printed by rich or put on the page by pandas' Styler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import pandas as pd

from .cases import SCHEDULES, SHORT_DTYPES, TITLES
from .frames import ALONE, BASELINE, blocks, cases, ceiling, parts, records, timed
from .standings import overall
from .standings import standings as by_size
from .store import NOT_RUN

if TYPE_CHECKING:
    from rich.table import Table as Printed

Format: TypeAlias = "str | Callable[[Any], str]"


def milliseconds(value: float, digits: int = 3) -> str:
    """So many digits or more, and no power of ten."""
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


# How a number is written below a heading that is this, or whose last line is: a variant may have any name.
FORMATS: dict[str, Format] = {
    **dict.fromkeys(
        ("cases", "faster", "same", "slower", "ranks", "tokens", "M", "N", "K", "rounds", "checks"), "{:.0f}"
    ),
    **dict.fromkeys(("mean", "best", "worst", "speed-up"), "{:.2f}x"),
    **dict.fromkeys(("over unfused", "of matmul", "hidden", "algbw, GB/s", "busbw, GB/s", "best of ceiling"), "{:.2f}"),
    **dict.fromkeys(("ms", "ceiling, ms"), milliseconds),
    **dict.fromkeys(("median, ms", "20 %, ms", "80 %, ms"), partial(milliseconds, digits=4)),
    **dict.fromkeys(("ratio", "from", "to"), "{:.3f}"),
    **dict.fromkeys(("TFLOP/s", "error / allowed"), "{:.3g}"),
    "ms, +- 20-80 %": "{}",
    "communication hidden": "{:.0%}",
}


@dataclass(frozen=True)
class Table:
    """`note`: how to read it, or why it is empty."""

    name: str
    title: str
    cells: pd.DataFrame
    note: str = ""

    @classmethod
    def of(cls, name: str, title: str, lines: Iterable[Mapping[str, Any]], note: str = "") -> Table:
        """From cells by heading, without the columns in which no line has anything."""
        return cls(name, title, _filled(pd.DataFrame(list(lines))), note)

    @property
    def numbers(self) -> dict[str, Format]:
        """The formats of the columns at the right; the others are text."""
        return {name: how for name in map(str, self.cells) if (how := FORMATS.get(name.rpartition("\n")[2]))}

    def html(self) -> str:
        """Everything that a cell or a heading holds is escaped."""
        from pandas.io.formats.style import Styler

        styler = Styler(self.cells, uuid=self.name, cell_ids=False).hide(axis="index")
        formats: Any = self.numbers
        styler.format(formats, na_rep="", escape="html").format_index(escape="html", axis=1)
        styler.set_table_styles({name: [{"selector": "", "props": "text-align: right"}] for name in self.numbers})
        return str(styler.to_html())

    def printed(self, *, sections: bool = True) -> Printed:
        """For the terminal, in sections by the first column."""
        from rich import box
        from rich.table import Table as Printed

        made, numbers = Printed(title=self.title, box=box.SIMPLE_HEAD), self.numbers
        names = [str(name) for name in self.cells]
        for name in names:
            made.add_column(name, justify="right" if name in numbers else "left")
        before = None
        for line in self.cells.itertuples(index=False):
            if sections and before not in (None, line[0]):
                made.add_section()
            before = line[0]
            made.add_row(*(_text(value, numbers.get(name, "{}")) for name, value in zip(names, line, strict=True)))
        return made


def _filled(cells: Any) -> pd.DataFrame:
    made: pd.DataFrame = cells.loc[:, ~(cells.isna() | cells.eq("")).all()]
    return made


def _text(value: Any, how: Format) -> str:
    return "-" if pd.isna(value) else how(value) if callable(how) else how.format(value)


def summary(frame: pd.DataFrame) -> Table:
    """Each schedule over all its cases with two ranks or more, the best first."""
    note = (
        f"Speed-ups are over {BASELINE}, the mean is geometric. Faster and slower are counted where the 95 % interval "
        f"of the ratio leaves out 1. Communication hidden: of what {BASELINE} spends beyond the matmul, the share that "
        "a schedule does not, in the median case; negative where it spends more."
    )
    cells = overall(frame).drop(columns=["worst at", "shorter median"], errors="ignore")
    return Table("summary", "Every schedule over all its cases", cells, note)


def standings(frame: pd.DataFrame) -> Table:
    """From which size on each schedule wins, by op, direction and number of ranks."""
    found = by_size(frame, "machine", "model", "direction", "matmul", "world_size")
    columns = ["model", "matmul", "direction", "world_size", "schedule", "faster", "same", "slower", "mean"]
    cells = found.reindex(columns=[*columns, "shorter median", "worst", "worst at"]).rename(
        columns={"world_size": "ranks"}
    )
    note = (
        "Sizes in the order of a rank's arithmetic; counts and means as above. Shorter median: from which size on a "
        f"schedule's median is below that of {BASELINE} at every size."
    )
    return Table.of("standings", "From which size on each schedule is faster", records(cells), note)


def _about(first: Any) -> dict[str, Any]:
    # The columns that say which case it is.
    size = f"{first['size']} {first['short_dtype']}"
    layer = f"{first['model']} {first['layer']}".strip()
    return {"op": TITLES.get(first["op"], first["op"]), "layer": layer, "ranks": first["world_size"], "M x N x K": size}


def _spread(row: Any) -> str:
    half = (row["p80_ms"] - row["p20_ms"]) / 2
    return milliseconds(row["median_ms"]) + (
        "" if pd.isna(half) else f" +-{half:.2g}" if half < 10 else f" +-{half:.0f}"
    )


def times(frame: pd.DataFrame, direction: str) -> Table:
    """One line a case: times, speed-ups, how much is hidden."""
    shown = timed(frame[frame["direction"] == direction])
    variants = [name for name in frame["variant"].cat.categories if name in set(shown["variant"])]
    lines = []
    for first, case in cases(shown):
        line = _about(first)
        for name in variants:
            row = case.loc[name] if name in case.index else None
            if name in SCHEDULES:
                line[f"{name}\nms, +- 20-80 %"] = None if row is None else _spread(row)
            else:
                line[f"{name}\nms"] = None if row is None else row["median_ms"]
        for name in SCHEDULES[1:]:
            line[f"{name}\nspeed-up"] = case["speedup_vs_unfused"].get(name)
            line[f"{name}\nof matmul"] = case["matmul_fraction"].get(name)
            line[f"{name}\nhidden"] = case["overlap_efficiency"].get(name)
        lines.append(line)
    note = (
        "Medians in ms, the slowest rank of each round; +- is half the 20-80 % range. M x N x K are global sizes. "
        "matmul, comm: the unsplit library matmul and the backend's collective, each alone. speed-up: over unfused in "
        "the same rounds. of matmul: the matmul's time over the schedule's (1: only that is left). hidden: the part of "
        "what unfused adds to the matmul that is gone. ceiling: the longer of matmul, comm. dtensor multiplies with "
        "torch's library, which is not always the faster one on a CPU: docs/choosing.md."
    )
    title = f"Timed on this machine, {direction}; every number behind a passed check"
    return Table.of(f"times-{direction}", title, lines, note)


def rates(frame: pd.DataFrame, direction: str) -> Table:
    """One line a case: arithmetic and link rates, and the longer of the two bounds."""
    lines = []
    for first, case in cases(timed(frame[frame["direction"] == direction])):
        line, bound = _about(first), ceiling(case)
        line |= {f"{name}\nTFLOP/s": case["tflops"].get(name) for name in ("matmul", "own_matmul", *SCHEDULES)}
        line |= {f"{name}, GB/s": case[f"{name}_gbps"].get("comm") for name in ("algbw", "busbw")}
        shortest = case["median_ms"].drop(list(ALONE), errors="ignore").min()
        lines.append(line | {"ceiling, ms": bound, "best of ceiling": bound / shortest})
    return Table.of(f"rates-{direction}", f"Rates, {direction}", lines)


def totals(frame: pd.DataFrame) -> Table:
    """One line a model's block and direction: sums of its matmuls, and what the fastest schedule gains over unfused."""
    found, lines = blocks(frame), []
    variants = [name for name in frame["variant"].cat.categories if any(name in medians for _, medians in found)]
    for shared, medians in found:
        line: dict[str, Any] = {"model": shared["model"], "tokens": shared["tokens"], "ranks": shared["world_size"]}
        line |= {"dtype": shared["dtype"], "direction": shared["direction"]}
        line |= {f"{name}\nms": medians.get(name) for name in variants}
        ours = {name: medians[name] for name in SCHEDULES if name in medians}
        base, alone, best_ms = medians.get(BASELINE), medians.get("matmul"), min(ours.values(), default=None)
        line["fastest"] = min(ours, key=ours.__getitem__, default="")
        line["speed-up"] = base / best_ms if base and best_ms else None
        line["of matmul"] = alone / best_ms if alone and best_ms else None
        line["auto\nspeed-up"] = base / medians["auto"] if base and "auto" in medians else None
        lines.append(line)
    return Table.of("totals", "The matmuls of one transformer block together, ms", lines)


def checked(frame: pd.DataFrame) -> Table:
    """One line an op, variant and number of ranks: what was compared with the float64 product and not timed."""
    lines = []
    found = frame[frame["passed"] & frame["median_ms"].isna()]
    for (op, direction, variant, ranks, interpreted), members in parts(
        found, "op", "direction", "variant", "world_size", "interpreted"
    ):
        known = [
            SHORT_DTYPES.get(name, name) for name in members["dtype"].cat.categories if name in set(members["dtype"])
        ]
        how = "interpreted" if interpreted else "compiled"
        line = {"op": TITLES.get(op, op), "direction": direction, "variant": variant, "how": how, "ranks": ranks}
        line |= {"checks": len(members), "dtypes": " ".join(known), "error / allowed": members["error_ratio"].max()}
        lines.append(line)
    note = (
        "Compared with the float64 product and not timed: a kernel in Triton's interpreter computes what it would on a "
        "GPU, at a speed that says nothing. error / allowed: the largest."
    )
    return Table.of("checked", "Checked at small and uneven sizes, not timed", lines, note)


def refused(frame: pd.DataFrame) -> Table:
    """What ran and was wrong, row by row."""
    wrong = frame[frame["failed"]]
    lines = [
        {**_about(row), "direction": row["direction"], "variant": row["variant"], "why": row["gate"]}
        for row in records(wrong)
    ]
    title = f"FAILED: {len(wrong)} of {len(frame)} rows were refused; a wrong result, or a call that fails, has no time"
    return Table.of("refused", title, lines)


def not_run(frame: pd.DataFrame) -> list[str]:
    """What could not run here, a line for each variant and reason, with the ops and numbers of ranks it is about."""
    absent = frame[~frame["passed"] & ~frame["failed"]]
    lines = []
    for (variant, gate), members in parts(absent, "variant", "gate"):
        where = [
            f"{op} on {', '.join(map(str, sorted(set(each['world_size']))))}" for (op,), each in parts(members, "op")
        ]
        lines.append(f"{variant}: {gate.removeprefix(NOT_RUN)} ({'; '.join(where)})")
    return lines


def everything(frame: pd.DataFrame) -> Table:
    """All rows, timed ones first, with the columns that any has; the page's script sorts and filters them."""
    columns = {
        "op": "op", "direction": "direction", "model": "model", "layer": "layer", "tokens": "tokens",
        "world_size": "ranks", "M": "M", "N": "N", "K": "K", "dtype": "dtype", "variant": "variant",
        "median_ms": "median, ms", "p20_ms": "20 %, ms", "p80_ms": "80 %, ms", "rounds": "rounds",
        "speedup_vs_unfused": "over unfused", "matmul_fraction": "of matmul", "tflops": "TFLOP/s",
        "algbw_gbps": "algbw, GB/s", "busbw_gbps": "busbw, GB/s", "ceiling_ms": "ceiling, ms",
        "overlap_efficiency": "hidden", "error_ratio": "error / allowed", "predicted": "predicted", "path": "path",
        "machine": "machine", "commit": "commit", "time_utc": "when",
    }  # fmt: skip
    rows = frame.iloc[frame["median_ms"].isna().argsort(kind="stable")][list(columns)].rename(columns=columns)
    rows["predicted"] = rows["predicted"].map({True: "yes", False: ""})
    rows[["tokens", "rounds"]] = rows[["tokens", "rounds"]].mask(rows[["tokens", "rounds"]] == 0)
    return Table("rows", "All rows", _filled(rows))
