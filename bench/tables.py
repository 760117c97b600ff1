"""The report page's tables. Everything that a cell holds is escaped here; numbers stand at the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from . import blocks, digest
from .cases import WHOLE
from .digest import BASELINE, Case, Standing
from .report import SHORT_DTYPES, TITLES, not_run
from .store import Row

# attribute, heading, and the format of a number; None for text
_COLUMNS: tuple[tuple[str, str, str | None], ...] = (
    ("op", "op", None),
    ("direction", "direction", None),
    ("model", "model", None),
    ("layer", "layer", None),
    ("tokens", "tokens", "d"),
    ("world_size", "ranks", "d"),
    ("M", "M", "d"),
    ("N", "N", "d"),
    ("K", "K", "d"),
    ("dtype", "dtype", None),
    ("variant", "variant", None),
    ("median_ms", "median, ms", ".4g"),
    ("p20_ms", "20 %", ".4g"),
    ("p80_ms", "80 %", ".4g"),
    ("rounds", "rounds", "d"),
    ("speedup_vs_unfused", "speed-up", ".2f"),
    ("matmul_fraction", "of matmul", ".2f"),
    ("tflops", "TFLOP/s", ".3g"),
    ("algbw_gbps", "algbw, GB/s", ".3g"),
    ("busbw_gbps", "busbw, GB/s", ".3g"),
    ("ceiling_ms", "ceiling, ms", ".4g"),
    ("overlap_efficiency", "hidden", ".2f"),
    ("error_ratio", "error / allowed", ".2g"),
    ("predicted", "predicted", None),
    ("path", "path", None),
    ("machine", "machine", None),
    ("commit", "commit", None),
    ("time_utc", "when", None),
)
# heading, and whether numbers are below it
Columns = Sequence[tuple[str, bool]]


def _short(dtype: str) -> str:
    return SHORT_DTYPES.get(dtype, dtype)


def grid(columns: Columns, lines: Iterable[Sequence[object]]) -> str:
    """A table that scrolls by itself where it is wider than the page."""
    head = "".join(f"<th{_class(number)}>{escape(name)}</th>" for name, number in columns)
    body = "\n".join(
        "<tr>"
        + "".join(
            f"<td{_class(number)}>{escape(str(cell))}</td>" for (_, number), cell in zip(columns, line, strict=True)
        )
        + "</tr>"
        for line in lines
    )
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _class(number: bool) -> str:
    return ' class="number"' if number else ""


def missing(why: str) -> str:
    """In place of what rows do not have."""
    return f'<p class="missing">Not here: {escape(why)}.</p>'


def summary(cases: Sequence[Case]) -> str:
    """Each schedule over all its cases with two ranks or more."""
    columns = (
        ("schedule", False), ("direction", False), ("cases", True), ("faster / same / slower", True), ("mean", True),
        ("best", True), ("worst", True), ("communication hidden", True),
    )  # fmt: skip
    lines = []
    for each in digest.overall(cases):
        (_, best), (_, worst), share = each.best, each.worst, digest.hidden(each)
        ratios = (f"{value:.2f}x" for value in (each.mean, best.ratio, worst.ratio))
        told = "" if share is None else f"{share:.0%}"
        lines.append((each.variant, each.first.direction, len(each.members), _counts(each), *ratios, told))
    words = (
        f"Speed-ups are over {BASELINE}, the mean is geometric. Faster and slower are counted where the 95 % interval "
        f"of the ratio leaves out 1. Communication hidden: of what {BASELINE} spends beyond the matmul, the share that "
        "a schedule does not, in the median case; negative where it spends more."
    )
    return f'{grid(columns, lines)}<p class="muted">{words}</p>'


def _counts(each: Standing) -> str:
    return f"{each.won} / {len(each.members) - each.won - each.lost} / {each.lost}"


def standings(cases: Sequence[Case]) -> str:
    """From which size on each schedule wins, by op, direction and number of ranks."""
    found = digest.standings(cases)
    if not found:
        return missing(f"no case has both {BASELINE} and another schedule timed with 2 or more ranks")
    columns = (
        ("model", False), ("matmul", False), ("direction", False), ("ranks", True), ("schedule", False),
        ("faster / same / slower", True), ("mean", True), ("shorter median", False), ("worst", False),
    )  # fmt: skip
    lines = []
    for each in found:
        row, (worst, at_worst) = each.first, each.worst
        lines.append(
            (
                row.model, worst.matmul, row.direction, row.world_size, each.variant, _counts(each),
                f"{each.mean:.2f}x", each.crossover(), f"{at_worst.ratio:.2f}x at {worst.where}",
            )
        )  # fmt: skip
    words = (
        "Sizes in the order of a rank's arithmetic; counts and means as above. Shorter median: from which size on a "
        "schedule's median is below that of unfused at every size."
    )
    begin = 0 if any(line[0] for line in lines) else 1
    table = grid(columns[begin:], [line[begin:] for line in lines])
    return f'<p class="muted">{words}</p><div class="tall">{table}</div>'


def totals(cases: Sequence[Case]) -> str:
    """A block's matmuls added up."""
    columns = (
        ("model", False), ("direction", False), ("tokens", True), ("ranks", True), ("dtype", False),
        ("variant", False), ("block, ms", True), ("over unfused", True),
    )  # fmt: skip
    lines = []
    for each in blocks.totals(row for case in cases for row in case.measured.values()):
        block = (each.model, each.direction, each.tokens, each.world_size, _short(each.dtype))
        for name, ms in each.medians.items():
            gain = each.speedup(name) if name in WHOLE and name != BASELINE else None
            lines.append((*block, name, f"{ms:.4g}", "" if gain is None else f"{gain:.2f}x"))
    return f'<div class="tall">{grid(columns, lines)}</div>'


def refused(rows: Sequence[Row]) -> str:
    """What ran and was wrong, row by row; what could not run here, by reason."""
    wrong, notes = [row for row in rows if row.failed], not_run(rows)
    parts = []
    if wrong:
        columns = (
            ("op", False), ("variant", False), ("size", False), ("direction", False), ("ranks", True), ("why", False),
        )  # fmt: skip
        lines = (
            (
                TITLES.get(row.op, row.op), row.variant, f"{row.M} x {row.N} x {row.K} {_short(row.dtype)}",
                row.direction, row.world_size, row.gate,
            )
            for row in wrong
        )  # fmt: skip
        words = f"{len(wrong)} of {len(rows)} rows were refused: a wrong result, or a call that fails, has no time."
        parts.append(f'<p>{words}</p><div class="wrapping">{grid(columns, lines)}</div>')
    else:
        parts.append("<p>Refused: none; every result that was computed passed its check.</p>")
    if notes:
        listed = "\n".join(f"<li>{escape(note)}</li>" for note in notes)
        parts.append(f"<p>Not run here:</p>\n<ul>\n{listed}\n</ul>")
    return "\n".join(parts)


def checked(rows: Sequence[Row]) -> str:
    """What was compared with the float64 product and not timed."""
    groups: dict[tuple[str, str, str, int, bool], list[Row]] = {}
    for row in rows:
        if row.passed and row.median_ms is None:
            kind = (row.op, row.direction, row.variant, row.world_size, row.interpreted)
            groups.setdefault(kind, []).append(row)
    if not groups:
        return missing("every row that passed its check was timed")
    columns = (
        ("op", False), ("direction", False), ("variant", False), ("ranks", True), ("how", False),
        ("checks passed", True), ("largest error / allowed", True),
    )  # fmt: skip
    lines = (
        (
            TITLES.get(op, op), direction, variant, world_size, "interpreted" if interpreted else "compiled",
            len(members), f"{max(row.error_ratio or 0.0 for row in members):.3f}",
        )
        for (op, direction, variant, world_size, interpreted), members in groups.items()
    )  # fmt: skip
    words = (
        "Compared with the float64 product and not timed: a kernel in Triton's interpreter computes what it would on a "
        "GPU, at a speed that says nothing."
    )
    return f'<p class="muted">{words}</p><div class="tall">{grid(columns, lines)}</div>'


def everything(rows: Sequence[Row]) -> str:
    """All rows, timed ones first, with the columns that any has; the page's script sorts and filters them."""
    rows = sorted(rows, key=lambda row: row.median_ms is None)
    shown = [column for column in _COLUMNS if any(getattr(row, column[0]) not in ("", 0, None) for row in rows)]
    head = "".join(
        f'<th{_class(spec is not None)} scope="col"><button type="button">{escape(words)}</button></th>'
        for _, words, spec in shown
    )
    lines = []
    for row in rows:
        cells = "".join(_cell(name, getattr(row, name), spec) for name, _, spec in shown)
        lines.append(f'<tr class="predicted">{cells}</tr>' if row.predicted else f"<tr>{cells}</tr>")
    filtering = '<label hidden>Only rows with <input id="filter" type="search" placeholder="decomposed 2048"></label>'
    body = "\n".join(lines)
    return (
        f'<p>{filtering} <span id="shown" class="muted">{len(rows)} rows</span></p>\n<div class="scroll" tabindex="0">'
        f'<table id="all-rows">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'
    )


def _cell(name: str, value: object, spec: str | None) -> str:
    if spec is None:
        text = ("yes" if value else "") if isinstance(value, bool) else str(value)
        return f"<td>{escape(text)}</td>"
    if value is None or (name in ("tokens", "rounds") and not value):
        return '<td class="number"></td>'
    return f'<td class="number" data-value="{value!r}">{value:{spec}}</td>'
