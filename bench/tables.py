"""Tables made from rows: each a frame of cells, printed by rich or put on the page by pandas' Styler."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import pandas as pd

from .cases import ALONE, COLLECTIVES, LAYERED, SCHEDULES, SEQUENTIAL, SHORT_DTYPES, TITLES
from .frames import (
    BASELINE,
    blocks,
    bound,
    cases,
    compared,
    distinct,
    each,
    fast_p,
    in_bytes,
    overall,
    parts,
    records,
    timed,
)
from .frames import standings as by_size
from .store import COLUMNS, NOT_RUN

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Printed

Format: TypeAlias = "str | Callable[[Any], str]"


def milliseconds(value: float, digits: int = 3) -> str:
    """Return at least `digits` digits, without an exponent."""
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def times_as_fast(ratio: Any, is_noise: Any = False) -> str:
    """Return a speed-up as text, "1.20x"; with `is_noise` marked, "~1.20x"."""
    return ratio if isinstance(ratio, str) else f"{'~' * bool(is_noise)}{ratio:.2f}x"


NOISE = "~: no difference beyond noise, as the 95 % interval has 1 in it; of a block: in none of its matmuls."
SIZE = "M x N x K"
# Formats by a heading's last line, or by the line above a variant's name, which may be any. Other numbers have three
# digits.
FORMATS: dict[str, Format] = {
    **dict.fromkeys(("mean", "best", "worst", "speed-up", "over", "over sequential"), times_as_fast),
    **dict.fromkeys(("ratio", "from", "to"), "{:.3f}"),
    **dict.fromkeys(("us", "median_ms", "median, ms", "p20_ms", "p80_ms", "bound_ms"), partial(milliseconds, digits=4)),
    **dict.fromkeys(("communication hidden", "hidden", "scaling", "of bound"), "{:.0%}"),
    **dict.fromkeys(("ms, +-", "25 to 75 %"), "{}"),
}
BOUND = (
    "bound: the longer of the matmul and the backend's collective, each alone, and which it is. bound / shortest is "
    "above 1 where chunks fit the caches better than the whole matmul, or where the collective is the bound: "
    "decomposed and fused do not send through the backend, but write into memory that the ranks share."
)


@dataclass(frozen=True)
class CellTable:
    """A table. `note`: how to read it. `optional`: headings, or lines of them, that a narrow console leaves out."""

    name: str
    title: str
    cells: pd.DataFrame
    note: str = ""
    optional: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, name: str, title: str, lines: Iterable[Mapping[str, Any]] | pd.DataFrame, note: str = "",
        optional: tuple[str, ...] = (),
    ) -> CellTable:  # fmt: skip
        """Make a table from cells by heading, without empty columns."""
        cells: Any = lines if isinstance(lines, pd.DataFrame) else pd.DataFrame(list(lines))
        return cls(name, title, cells.loc[:, ~(cells.isna() | cells.eq("")).all()], note, optional)

    @property
    def numbers(self) -> dict[str, Format]:
        """Return the formats of the numeric columns at the right; the others are text."""
        ends = {str(name): str(name).split("\n") for name in self.cells}
        known = {
            name: FORMATS.get(line[0] if line[-1] in (*SCHEDULES, "auto") else line[-1]) for name, line in ends.items()
        }
        plain = {str(name): milliseconds for name in self.cells.select_dtypes("number")}
        return plain | {name: how for name, how in known.items() if how}

    def html(self) -> str:
        """Return the table as HTML, with cells and headings escaped."""
        from pandas.io.formats.style import Styler

        formats: Any = self.numbers
        styler = Styler(self.cells, uuid=self.name, cell_ids=False).hide(axis="index")
        styler.format(formats, na_rep="", escape="html").format_index(escape="html", axis=1)
        styler.set_table_styles({name: [{"selector": "", "props": "text-align: right"}] for name in formats})
        if "predicted" in self.cells:
            styler.apply(lambda line: ["font-style: italic" if line["predicted"] else ""] * len(line), axis=1)
        return str(styler.to_html())

    def print(self, console: Console, by: str = "", style: str | None = None) -> None:
        """Print the table below its title, or a table for each value of the column `by`.

        If the console is too narrow, columns of `optional` are left out, the first ones first.
        """
        if by and by in self.cells:
            console.print(self.title, style=style or "bold")
            for value, cells in self.cells.groupby(by, sort=False):
                part = CellTable.of(self.name, str(value), cells.drop(columns=by), optional=self.optional)
                part.print(console, style=style)
                console.print()
            return
        cells, left_out = self.cells, dict[str, None]()
        for word in (*self.optional, None):
            made = self._made(cells, int(word is not None))
            if made.__rich_measure__(console, console.options.update(width=1000)).maximum <= console.width:
                break
            if gone := [name for name in cells if word in str(name).split("\n")]:
                cells = cells.drop(columns=gone)
                left_out |= dict.fromkeys(str(name).replace("\n", " ") for name in gone)
        console.print(self.title, style=style or "bold")
        console.print(made, style=style)
        if left_out:
            console.print(f"left out in {console.width} columns: {', '.join(left_out)}", style="dim")

    def _made(self, cells: pd.DataFrame, padding: int) -> Printed:
        from rich import box
        from rich.table import Table as Printed

        made, formats = Printed(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, padding, 0, 0)), self.numbers
        for name in map(str, cells):
            is_number = name in formats
            made.add_column(
                name,
                justify="right" if is_number else "left",
                overflow="fold",
                no_wrap=is_number or name in (SIZE, "M x N", "module"),
            )
        for line in records(cells):
            made.add_row(*(_text(value, formats.get(name, "{}")) for name, value in line.items()))
        return made


def _text(value: Any, how: Format) -> str:
    return "-" if pd.isna(value) else how(value) if callable(how) else how.format(value)


_ABOUT_SEQUENTIAL = "our own collective and one matmul in turn, which overlap nothing"


def without_one_suite(lines: pd.DataFrame) -> pd.DataFrame:
    """Return the lines without the column `suite` if all have the same."""
    return lines.drop(columns="suite") if "suite" in lines and lines["suite"].nunique() == 1 else lines


def summary(frame: pd.DataFrame) -> CellTable:
    """Return a line for each suite and schedule over all its cases on two ranks or more, the best first."""
    note = (
        f"Speed-ups are over {BASELINE}, the mean is geometric: what a user gains. Faster and slower are counted where "
        f"the 95 % interval of the ratio leaves out 1. Over {SEQUENTIAL}: the mean speed-up over {_ABOUT_SEQUENTIAL}: "
        f"what overlap gains. Communication hidden: of what {SEQUENTIAL} spends beyond the matmul, the share that a "
        "schedule does not, in the median case; negative where it spends more."
    )
    cells = without_one_suite(overall(frame)).drop(columns=["worst at", "shorter median"], errors="ignore")
    optional = ("best", "worst", "communication hidden", "over sequential")
    return CellTable("summary", "Each schedule over all cases", cells, note, optional)


def standings(frame: pd.DataFrame) -> CellTable:
    """Return the size from which on each schedule wins, by op, direction and number of ranks."""
    found = by_size(frame, "machine", "model", "suite", "direction", "matmul", "world_size", "short_dtype").rename(
        columns={"world_size": "ranks", "short_dtype": "dtype"}
    )
    columns = [
        "model",
        "suite",
        "matmul",
        "dtype",
        "direction",
        "ranks",
        "schedule",
        "faster",
        "same",
        "slower",
        "mean",
    ]
    note = (
        "Sizes in the order of a rank's arithmetic; counts and means as above. Shorter median: from which size on a "
        f"schedule's median is below that of {BASELINE} at every size."
    )
    cells = without_one_suite(found.reindex(columns=[*columns, "shorter median", "worst", "worst at"]))
    return CellTable.of("standings", "From which size on each schedule's median is shorter", cells, note)


def _about(first: Mapping[str, Any]) -> dict[str, Any]:
    # Columns that identify the case.
    op = ", ".join(filter(None, (TITLES.get(first["op"], first["op"]), first["model"])))
    size = f"{first['size']} {first['short_dtype']}"
    is_alone = first["op"] in COLLECTIVES
    of_size = {"bytes": in_bytes(first["bytes"]), "M x N": size} if is_alone else {SIZE: size}
    return {"op": op, "layer": first["layer"], **of_size, "ranks": first["world_size"]}


def _spread(row: Any) -> str:
    half = (row["p80_ms"] - row["p20_ms"]) / 2
    return milliseconds(row["median_ms"]) + ("" if pd.isna(half) else f" +-{milliseconds(half, 2)}")


def times(frame: pd.DataFrame, direction: str) -> CellTable:
    """Return a line for each case: times, speed-ups, part of the communication hidden."""
    shown = timed(frame[frame["direction"] == direction])
    variants = [variant for (variant,), _ in parts(shown, "variant")]
    # `auto` stands for our schedules where it alone was timed.
    ours_alone = ("auto",) if not set(SCHEDULES[1:]) & set(variants) else ()
    rivals = [variant for variant in variants if variant not in (*ALONE, SEQUENTIAL, *SCHEDULES, *ours_alone)]
    columns = (BASELINE, SEQUENTIAL, *SCHEDULES[1:])
    lines = []
    for first, case in cases(shown):
        line = _about(first)
        for name in columns:
            line[f"{name}\nms, +-"] = _spread(case.loc[name]) if name in case.index else None
        ours = [name for name in SCHEDULES[1:] if name in case.index] or ["auto"] * ("auto" in case.index)
        for name in ours if first["world_size"] > 1 or ours != ["auto"] else ():
            row = case.loc[name]
            is_noise = first["world_size"] == 1 or row["low"] <= 1 <= row["high"]
            line[f"speed-up\n{name}"] = times_as_fast(row["speedup"], is_noise) if row["speedup"] > 0 else None
            line[f"scaling\n{name}"] = row["scaling"]
            if first["op"] in LAYERED:
                line[f"tokens/s\n{name}"] = row["tokens_per_s"]
        for name in (name for name in SCHEDULES[1:] if name in case.index):
            row = case.loc[name]
            is_noise = row["overlap_low"] <= 1 <= row["overlap_high"]
            line[f"over sequential\n{name}"] = times_as_fast(row["overlap"], is_noise) if row["overlap"] > 0 else None
        for name, what in ((name, what) for what in _RATIOS for name in SCHEDULES[1:]):
            line[f"{what}\n{name}"] = case[_RATIOS[what]].get(name)
        line |= {f"{name}\nms": case["median_ms"].get(name) for name in variants if name not in columns}
        lines.append(line)
    note = (
        "Medians in ms over the rounds, the slowest rank's time; +- is half the 20-80 % range. M x N x K are global "
        "sizes. matmul, comm: the unsplit library matmul and the backend's collective, each alone. speed-up: unfused / "
        f"this schedule, what a user gains. sequential: {_ABOUT_SEQUENTIAL}. over sequential: sequential / this "
        "schedule, what overlap gains; the rest of a speed-up is the transport's. of matmul: matmul / this schedule "
        "(1: no time but the matmul's). hidden: the share of sequential - matmul, the exposed communication, that this "
        "schedule saves."
    )
    if (beyond := shown["matmul_fraction"].where(shown["variant"].isin(SCHEDULES)).max()) > 1:
        note += (
            f" of matmul is above 1, up to {beyond:.2f}, and hidden above 100 %, where a schedule multiplies chunk by "
            "chunk and chunks fit the caches better than the whole."
        )
    optional = ("scaling", "hidden", "of matmul", "comm", *rivals[::-1], "own_matmul", "matmul", SEQUENTIAL)
    return CellTable.of(f"times-{direction}", f"Times, {direction}", lines, note, optional)


# Columns of rows that relate a schedule's time to others, by heading.
_RATIOS = {"of matmul": "matmul_fraction", "hidden": "hidden"}


# Further columns of rates, by heading.
_SHARES = {"tokens/s": "tokens_per_s", "of bound": "roofline", "scaling": "scaling"}


def _fastest(case: pd.DataFrame) -> Any:
    ours = case["median_ms"].drop(list(ALONE), errors="ignore").reindex([*SCHEDULES, "auto"]).dropna()
    return None if ours.empty else ours.idxmin()


def rates(frame: pd.DataFrame, direction: str) -> CellTable:
    """Return a line for each case: arithmetic and link rates, the longer of the two bounds, and its name."""
    lines = []
    for first, case in cases(timed(frame[frame["direction"] == direction])):
        line, (longest, what) = _about(first), bound(case)
        line |= {f"{name}\nTFLOP/s": case["tflops"].get(name) for name in ("matmul", "own_matmul", *SCHEDULES)}
        line |= {f"{name}\nGB/s": case[f"{name}_gbps"].get("comm") for name in ("algbw", "busbw")}
        shortest = case["median_ms"].drop(list(ALONE), errors="ignore").min()
        if first["op"] in COLLECTIVES:
            line |= {f"busbw\n{name}": rate for name, rate in case["busbw_gbps"].items()}
        for what_of, column in _SHARES.items():
            line |= {
                f"{what_of}\n{name}": case[column].get(name) for name in (*SCHEDULES, "auto") if name in case.index
            }
        fastest = _fastest(case)
        line |= {"peak\nMB": case["peak_bytes"].get(fastest, math.nan) / 1e6, "host\nus": case["host_us"].get(fastest)}
        lines.append(line | {"bound\nms": longest, "bound": what, "bound /\nshortest": longest / shortest})
    optional = ("scaling", "of bound", "tokens/s", "peak", "host", "algbw", "busbw", "own_matmul", "unfused", "matmul",
                "decomposed", "fused", "auto")  # fmt: skip
    return CellTable.of(f"rates-{direction}", f"Rates, {direction}", lines, BOUND if lines else "", optional)


def totals(frame: pd.DataFrame) -> CellTable:
    """Return a line for each block and direction: sums of its matmuls, and the fastest schedule's gain over unfused."""
    found, lines = blocks(frame), []
    names = [*found[0][0], "variant"] if found else []
    clear = set(frame.loc[(frame["low"] > 1) | (frame["high"] < 1), names].itertuples(index=False, name=None))
    variants = [name for name in frame["variant"].cat.categories if any(name in medians for _, medians in found)]
    for shared, medians in found:
        line = {"ranks" if name == "world_size" else name: value for name, value in shared.items() if name != "machine"}
        line |= {"graph": "yes" * bool(shared["graph"]), "nodes": shared["nodes"] if shared["nodes"] > 1 else None}
        line |= {f"{name}\nms": medians.get(name) for name in variants}
        # On one rank all schedules are the library's matmul, and what differs is noise.
        several = shared["world_size"] > 1
        ours = {medians[name]: name for name in SCHEDULES if several and name in medians}
        base, alone, best_ms = medians.get(BASELINE), medians.get("matmul"), min(ours, default=None)
        best = None if best_ms is None else ours[best_ms]
        line["our\nfastest"] = best
        if base and best_ms:
            line["speed-up"] = times_as_fast(base / best_ms, best != BASELINE and (*shared.values(), best) not in clear)
        line["of matmul"] = alone / best_ms if alone and best_ms else None
        if best_ms and several and (sequential := medians.get(SEQUENTIAL)):
            line["over\nsequential"] = times_as_fast(sequential / best_ms)
        if several and base and "auto" in medians:
            line["speed-up\nauto"] = times_as_fast(base / medians["auto"], (*shared.values(), "auto") not in clear)
        lines.append(line)
    optional = ("of matmul", "auto", "comm", "own_matmul", "dtype", "matmul")
    return CellTable.of("totals", "The matmuls of one transformer block together", lines, optional=optional)


def checked(frame: pd.DataFrame) -> CellTable:
    """Return a line for each op, variant and number of ranks: cases that were checked against float64 and not timed."""
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
    title = "Checked at small and uneven sizes, not timed"
    return CellTable.of("checked", title, lines, note, ("dtypes", "how"))


# The lines of stacks that a rank's signal handler has written, and empty ones.
_STACKS = re.compile(r'^(?:(?:Current thread|Thread) 0x.*|  File ".*", line \d+ in .*|)\n?', re.MULTILINE)


def _without_stacks(gate: str) -> str:
    # Of ranks that took too long. The stacks of each are pages long.
    if "gave no answer within" not in gate:
        return gate
    return f"{_STACKS.sub('', gate).strip()}\n(--patience allows more; the file of rows has the stacks)"


def refused(frame: pd.DataFrame) -> CellTable:
    """Return the rows that failed their check."""
    wrong = records(frame[frame["failed"]])
    lines = [
        _about(row) | {name: row[name] for name in ("direction", "variant")} | {"gate": _without_stacks(row["gate"])}
        for row in wrong
    ]
    told = "results were wrong, or their calls failed or took too long"
    title = f"FAILED: {len(wrong)} of {len(frame)} {told}; these have no time"
    return CellTable.of("refused", title, lines)


def not_run(frame: pd.DataFrame) -> dict[str, list[str]]:
    """Return the reasons why each variant could not run here, a line each, with ops and numbers of ranks."""
    lines = dict[str, list[str]]()
    for (variant, gate), members in parts(frame[~frame["passed"] & ~frame["failed"]], "variant", "gate"):
        where = "; ".join(f"{op} on {each(some, 'world_size')}" for (op,), some in parts(members, "op"))
        lines.setdefault(variant, []).append(f"{variant}: {gate.removeprefix(NOT_RUN)} ({where})")
    return lines


def verdict(frame: pd.DataFrame) -> list[str]:
    """Return a few lines a suite: which schedules gain in which cases, and which schedule `auto` takes and why."""
    suites, lines = list(parts(compared(frame), "suite")), list[str]()
    for (suite,), shown in suites:
        lines += [f"Suite {suite}:"] * (len(suites) > 1) + _verdict(shown, frame[frame["suite"] == suite])
    lines = lines or ["No verdict: no schedule was timed beside unfused on two ranks or more."]
    alone = timed(frame)["world_size"] == 1
    return [*lines, *(["On 1 rank nothing is sent: its rows are in the tables alone."] if alone.any() else [])]


# The share of cases without a difference whose 95 % interval lies above 1.
_BY_CHANCE = 0.025


def beyond_chance(faster: int, count: int) -> bool:
    """Return whether so many cases are faster in fewer than one of twenty sweeps of code that does not differ."""
    from scipy import stats

    return bool(stats.binom.sf(faster - 1, count, _BY_CHANCE) < 0.05)


def _verdict(shown: pd.DataFrame, frame: pd.DataFrame) -> list[str]:
    # Return the lines of one suite. shown: its compared lines.
    lines = list[str]()
    by_launch = shown["launches"].map(bool).all()
    # `auto` stands for our schedules where it alone was timed.
    schedules = set(SCHEDULES[1:]) & set(shown["variant"]) or {"auto"}
    for (name,), members in parts(shown[shown["variant"].isin(schedules)], "variant"):
        rows, count = records(members), len(members)
        faster, slower = int((members["low"] > 1).sum()), int((members["high"] < 1).sum())
        gain = "Gain" if faster > slower and beyond_chance(faster, count) else "No clear gain" if faster else "No gain"
        basis = (
            f"over launches; about {_BY_CHANCE * count:.1f} are faster by chance" if by_launch
            else "over the rounds of one launch; launches differ by more: --launches 3"
        )  # fmt: skip
        lines.append(
            f"{gain}: {name} is faster than {BASELINE} in {faster} of {count} cases, slower in {slower}, no difference "
            f"in the others (95 % intervals {basis})."
        )
        # A case without a significant difference may have any median.
        most = max([row for row in rows if row["low"] > 1] or rows, key=lambda row: row["speedup"])
        least = min([row for row in rows if row["high"] < 1] or rows, key=lambda row: row["speedup"])
        beyond = " beyond noise" if most["low"] > 1 else ""
        lines.append(
            f"Largest speed-up{beyond}: {_ratio(most)}{f'; smallest: {_ratio(least)}' if len(rows) > 1 else ''}."
        )
        beside = members[members["overlap"].notna()]
        if len(beside):
            counts = f"{(beside['overlap_low'] > 1).sum()} of {len(beside)} cases, slower in "
            counts += f"{(beside['overlap_high'] < 1).sum()}; mean {statistics.geometric_mean(beside['overlap']):.2f}x"
            transport = statistics.geometric_mean(beside["speedup"] / beside["overlap"])
            lines.append(
                f"By overlap: {name} is faster than {SEQUENTIAL} ({_ABOUT_SEQUENTIAL}) in {counts}. The rest is "
                f"transport: {SEQUENTIAL} is {transport:.2f}x as fast as {BASELINE}."
            )
    # Strip the op and dtype of the case from the reason.
    of_case = re.compile(r" for \w+ in \w+ \(`fusedtp tune --dtype \w+` ")
    auto = shown["path"][shown["variant"] == "auto"]
    taken = [of_case.sub(" (`fusedtp tune` ", path) for path in auto if path]
    of = Counter(path.partition(": ")[0] for path in taken)
    for schedule, count in of.most_common():
        # Reasons of one kind differ in sizes and ratios: show the first of each.
        reasons: dict[str, list[str]] = {}
        for reason in (path.partition(": ")[2] for path in taken if path.startswith(f"{schedule}: ")):
            reasons.setdefault(reason.partition(":")[0], []).append(reason)
        kinds = sorted(reasons.values(), key=len, reverse=True)
        told = [f"- in {len(alike)}, {alike[0]}{', for example' * (len(set(alike)) > 1)}." for alike in kinds[:3]]
        told += [f"- other reasons: {len(kinds) - 3}."] if len(kinds) > 3 else []
        first = f"auto takes {schedule} in {count} of {len(taken)} cases:"
        lines += [first, *told] if len(told) > 1 else [f"{first} {told[0].partition(', ')[2]}"]
    for name, found in fast_p(distinct(frame)).items():
        if name != SEQUENTIAL and len(found) > 1:
            shares = [f"{sum(each >= p for each in found) / len(found):.0%} at p = {p:g}" for p in (1, 1.2, 1.5)]
            what = f"fast_p of {name}, right and with a median p times as fast as the fastest other's"
            lines.append(f"{what}: {', '.join(shares)}.")
    return lines


def _ratio(row: Any) -> str:
    told = f"{row['matmul']} {row['where']}, {row['direction']}, {row['world_size']} ranks"
    same = ", no difference" if row["low"] <= 1 <= row["high"] else ""
    return f"{row['speedup']:.2f}x ({row['low']:.2f} to {row['high']:.2f}{same}) at {told}"


def everything(frame: pd.DataFrame) -> CellTable:
    """Return all rows, timed rows first, with every non-empty column; the page's script sorts and filters."""
    rows = frame.iloc[frame["median_ms"].isna().argsort(kind="stable")][list(COLUMNS)].drop(columns="rounds_ms")
    for name in rows.select_dtypes("bool"):
        rows[name] = rows[name].map({True: "yes", False: ""})
    counts = list(rows.select_dtypes("int"))
    return CellTable.of("rows", "All rows", rows.assign(**rows[counts].mask(rows[counts] == 0)))
