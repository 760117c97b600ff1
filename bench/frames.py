"""Rows as one pandas frame: the grouping, the order and the names that tables, pictures and the page share.

A line is a row with derived columns:
- `suite`: the suite that the op belongs to.
- `matmul`: the op in words, or the layer of a model.
- `size`, `where`: M x N x K, and the tokens or the size with the dtype. `bytes`: of a collective's whole tensor.
- `gflop`: of a rank.
- `speedup`, `low`, `high`: unfused over the variant, medians of the same interleaved rounds, and the interval.
- `overlap`, `overlap_low`, `overlap_high`: the same of sequential over the variant.
- `over_best`, `best_low`, `best_high`: the same of the fastest implementation that is not ours.
- `scaling`: the time of one rank, of the same whole problem and code, over this one's and over the number of ranks.

Names are categories, so lines and the parts of every `groupby` come in the order in which they are shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from fusedtp.files import visible
from fusedtp.sharding.plan import ITEMSIZE

from .cases import (
    ALONE,
    COLLECTIVES,
    DIRECTIONS,
    EVERY_DTYPE,
    EVERY_OP,
    LAYERS,
    OPS,
    OWN,
    SCHEDULES,
    SEQUENTIAL,
    SHORT_DTYPES,
    TITLES,
    flops,
)  # fmt: skip
from .intervals import measured, ratio
from .store import Measurement, case_of
from .suites import SUITES

BASELINE = "unfused"
# Variants of this package. Others are implementations to compare with, `unfused` among them.
OURS = (SEQUENTIAL, *OWN[OWN.index("decomposed") :], "concatenated", "tree", "switch")
# Columns that the lines of one case share, in sort order; `place` is the case's first position among the rows.
CASE = ["machine", "model", "direction", "op", "world_size", "dtype", "gflop", "M", "place"]
_SUITE = {op: name for name, suite in SUITES.items() for op in suite.ops}
_KNOWN = {
    "op": EVERY_OP,
    "suite": tuple(SUITES),
    "direction": DIRECTIONS,
    "dtype": EVERY_DTYPE,
    "variant": OWN,
    "matmul": tuple(TITLES[op] for op in EVERY_OP),
}


def frame_of(rows: Iterable[Measurement]) -> pd.DataFrame:
    """Return all rows as a frame, also predicted rows and rows without a time."""
    rows = list(rows)
    bases = {
        (row.machine, row.case, row.variant): row
        for row in rows if row.variant in (BASELINE, SEQUENTIAL) and not row.predicted
    }  # fmt: skip
    best: dict[Any, Measurement] = {}
    alone: dict[Any, float] = {}
    for row in rows:
        if row.median_ms and not row.predicted and row.variant not in (*OURS, *ALONE):
            best[row.machine, row.case] = min(
                best.get((row.machine, row.case), row), row, key=lambda each: each.median_ms or math.inf
            )
        if row.median_ms and not row.predicted and row.world_size == 1:
            alone[_whole(row), row.variant] = row.median_ms
    places: dict[Any, int] = {}
    lines = []
    for row in rows:
        case = row.machine, row.case
        base, sequential = (bases.get((*case, name)) for name in (BASELINE, SEQUENTIAL))
        line = _line(row, base, sequential) | {"place": places.setdefault(case, len(places))}
        other = best.get(case) if row.variant in OURS else None
        line |= dict(zip(("over_best", "best_low", "best_high"), _over(other, row), strict=True))
        reference = alone.get((_whole(row), row.variant)) or alone.get((_whole(row), BASELINE))
        line["scaling"] = math.nan
        if reference and row.median_ms and row.variant not in ALONE and not row.predicted:
            line["scaling"] = reference / row.median_ms / row.world_size
        # Text as pictures can draw it.
        lines.append({name: visible(value) if isinstance(value, str) else value for name, value in line.items()})
    # Without rows: the columns without lines.
    made = pd.DataFrame(lines or [_line(_ANY, None, None) | _NOTHING]).head(len(rows))
    optional = [name for name, kind in Measurement.__annotations__.items() if kind == "float | None"]
    made = made.astype(dict.fromkeys(optional, "float64"))
    for name, known in _KNOWN.items():
        # Unknown names, such as layers, follow in the order of the rows.
        made[name] = pd.Categorical(made[name], list(dict.fromkeys((*known, *made[name]))), ordered=True)
    return made.sort_values([*CASE, "variant", "predicted"], kind="stable", ignore_index=True)


_NOTHING = {"place": 0, "over_best": 1.0, "best_low": 1.0, "best_high": 1.0, "scaling": 1.0}


# Columns that tell timed code apart: trees with changes have one commit.
_CODE = ("commit", "dirty", "digest", "torch")


def _whole(row: Measurement) -> tuple[Any, ...]:
    # What rows on different numbers of ranks share, the code that was timed among it.
    case = row.op, row.M, row.N, row.K, row.dtype, row.direction, row.model, row.layer, row.widths
    return row.machine, *(getattr(row, name) for name in _CODE), *case, row.graph


_ANY = Measurement(
    op=OPS[0], variant="", M=1, N=1, K=1, dtype=EVERY_DTYPE[0], world_size=1, direction=DIRECTIONS[0], gate=""
)


def _over(base: Measurement | None, row: Measurement) -> tuple[float, float, float]:
    # Return the base's time over the row's, and the interval.
    own, other = measured(row), measured(base)
    if own and other:
        found = ratio(other, own)
        return found.ratio, found.low, found.high
    if base and base.median_ms and row.median_ms and not row.predicted:
        return base.median_ms / row.median_ms, 0.0, math.inf
    return math.nan, 0.0, math.inf


def in_bytes(number: float) -> str:
    """Return a number of bytes as text: "16 KB"."""
    units = ((2**30, "GB"), (2**20, "MB"), (2**10, "KB"), (1, "B"))
    unit, name = next((unit, name) for unit, name in units if number >= unit)
    return f"{number / unit:.4g} {name}"


def lengths(row: Measurement) -> str:
    """Return a row's M x N x K as text, M x N of a collective, and the features of each of several weights."""
    features = f"({'+'.join(map(str, row.widths))})" if row.widths else str(row.N)
    return f"{row.M} x {features}" + f" x {row.K}" * (row.op not in COLLECTIVES)


def _line(row: Measurement, base: Measurement | None, sequential: Measurement | None) -> dict[str, Any]:
    sent = float(row.M * row.N * ITEMSIZE[row.dtype])
    size, short, case = lengths(row), SHORT_DTYPES.get(row.dtype, row.dtype), case_of(row)
    where = f"{row.tokens} tokens" if row.model else in_bytes(sent) if row.op in COLLECTIVES else size
    gpus = f"{row.num_gpus}x {row.gpu}" + f" on each of {row.nodes} nodes" * (row.nodes > 1)
    return vars(row) | {
        "passed": row.passed,
        "failed": row.failed,
        "suite": _SUITE.get(row.op, row.op),
        "matmul": row.layer or TITLES.get(row.op, row.op),
        "short_dtype": short,
        "size": size,
        "where": f"{where} {short}",
        "hardware": gpus if row.gpu else f"{row.cpu or row.machine}, {row.cores} cores",
        "bytes": sent,
        "gflop": flops(case, "forward") / 1e9 if case else 0.0,
        **dict(zip(("speedup", "low", "high"), _over(base, row), strict=True)),
        **dict(zip(("overlap", "overlap_low", "overlap_high"), _over(sequential, row), strict=True)),
    }


def timed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the measured lines."""
    return frame[frame["median_ms"].notna() & ~frame["predicted"]]


def compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the measured schedules and providers beside unfused, on two ranks or more."""
    rivals = ~frame["variant"].isin((*ALONE, BASELINE))
    return timed(frame[rivals & frame["speedup"].notna() & (frame["world_size"] > 1)])


def distinct(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the lines without those of `auto` that ran the same code as another line of their case.

    A line that does not say what ran counts as one of them beside any other schedule of ours.
    """
    taken = [str(path).partition(":")[0] for path in frame["path"]]
    keys = ["machine", "place", "direction"]
    there = set(
        frame.loc[frame["median_ms"].notna(), [*keys, "variant"]].astype(str).itertuples(index=False, name=None)
    )
    own = zip(frame[keys].astype(str).itertuples(index=False, name=None), taken, strict=True)
    names = {"": SCHEDULES[1:]}
    found = [any((*key, name) in there for name in names.get(ran, (ran,))) for key, ran in own]
    same = pd.Series(found, index=frame.index, dtype=bool)
    return frame[~((frame["variant"] == "auto") & same)]


def fast_p(frame: pd.DataFrame) -> dict[str, list[float]]:
    """Return by variant of ours the speed-ups over the fastest other implementation, sorted; 0 for wrong results.

    The share of these that is at least p is fast_p.
    """
    lines = frame[frame["variant"].isin(OURS) & ~frame["predicted"] & (frame["world_size"] > 1)]
    lines = lines[lines["over_best"].notna() | lines["failed"]]
    found = lines.assign(over_best=lines["over_best"].fillna(0.0))
    return {str(name): sorted(members["over_best"]) for (name,), members in parts(found, "variant")}


def parts(frame: Any, *columns: str) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Return each combination of values in these columns with its lines, in order."""
    return iter(() if frame.empty else frame.groupby(list(columns), observed=True, sort=True))


def each(lines: pd.DataFrame, name: str) -> str:
    """Return the distinct values of a column, joined."""
    return ", ".join(sorted({str(value) for value in lines[name]} - {"", "0"}))


def records(frame: Any) -> list[dict[str, Any]]:
    """Return the lines as dicts by column."""
    return list(frame.to_dict("records"))


def cases(frame: pd.DataFrame) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Yield the first line of every case, and its lines by variant."""
    for _, part in parts(frame, *CASE):
        yield records(part)[0], part.set_index(part["variant"].astype(str))


def bound(case: pd.DataFrame) -> tuple[float, str]:
    """Return the longer of the matmul and the backend's collective, each alone, in ms, and which of them it is.

    (NaN, "") if unknown. The matmul bounds every schedule. The collective bounds only schedules that send through the
    backend: not decomposed and fused.
    """
    medians, given = (
        case["median_ms"].rename({"local": "matmul"}).reindex(["matmul", "comm"]),
        case["bound_ms"].dropna(),
    )
    longest = float(given.iloc[0]) if not given.empty else float(medians.max(skipna=False))
    if math.isnan(longest):
        return longest, ""
    # A pass that sends nothing has NaN for its collective, which compares as False.
    is_collective = medians["comm"] > medians["matmul"]
    return longest, f"{case['backend'].get('comm') or 'the backend'}'s collective" if is_collective else "matmul"


def blocks(frame: pd.DataFrame) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """Return for each model's block and direction what its cases share, and the total ms of its matmuls by variant.

    A variant has a total only if every matmul of the block passed its check and has a time, of the same code on
    one machine. Norms, attention itself and activations are not included.
    """
    shared = ["model", "tokens", "world_size", "dtype", "direction", "machine", "graph", "nodes"]
    lines = timed(frame)
    lines = lines[(lines["suite"] == "ops") & (lines["model"] != "") & lines["layer"].isin(LAYERS)]
    found: Any = lines.groupby([*shared, "variant"], observed=True).agg(
        ms=("median_ms", "sum"), rows=("layer", "size"), layers=("layer", "nunique"),
        **{name: (name, "nunique") for name in _CODE},
    )  # fmt: skip
    whole = (found["rows"] == len(LAYERS)) & (found["layers"] == len(LAYERS)) & (found[list(_CODE)] == 1).all(axis=1)
    totals = found.loc[whole, "ms"].unstack("variant")
    return [
        (dict(zip(shared, key, strict=True)), {str(name): ms for name, ms in medians.dropna().items()})
        for key, medians in totals.iterrows()
    ]


def crossover(ratios: Sequence[float], where: Sequence[str]) -> str:
    """Return in words the size from which on a speed-up is at least 1; sizes in the order of their arithmetic."""
    wins = [ratio >= 1.0 for ratio in ratios]
    if all(wins) or not any(wins):
        return "always" if all(wins) else "never"
    if not wins[-1]:
        return f"at {sum(wins)} of {len(wins)}, not the largest"
    return f"from {where[len(wins) - wins[::-1].index(False)]}"


def standings(frame: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Return every schedule against unfused over the cases on two ranks or more that share these columns, a line each.

    A case is won or lost if the interval of its speed-up excludes 1, else a tie.
    """
    from scipy import stats

    lines = []
    for key, members in parts(compared(frame), *columns, "variant"):
        ratios = members["speedup"]
        least = min(records(members), key=lambda line: line["speedup"])
        won, lost = (members["low"] > 1).sum(), (members["high"] < 1).sum()
        line = dict(zip((*columns, "schedule"), key, strict=True))
        line |= {"cases": len(members), "faster": won, "same": len(members) - won - lost, "slower": lost}
        line |= {"mean": stats.gmean(ratios), "best": ratios.max(), "worst": least["speedup"]}
        line["worst at"] = least["where"]
        over = members["overlap"].dropna()
        line["over sequential"] = stats.gmean(over) if len(over) and key[-1] != SEQUENTIAL else math.nan
        line["communication hidden"] = members["hidden"].median() if key[-1] != SEQUENTIAL else math.nan
        line["shorter median"] = crossover(list(ratios), list(members["where"]))
        lines.append(line)
    return pd.DataFrame(lines)


def overall(frame: pd.DataFrame) -> pd.DataFrame:
    """Return `standings` by suite and direction, the best first."""
    found = standings(frame, "suite", "direction")
    ordered = [part.sort_values("mean", ascending=False) for _, part in parts(found, "suite", "direction")]
    return pd.concat(ordered, ignore_index=True) if ordered else found
