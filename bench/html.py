"""The report as one page that needs nothing else: no network, no fonts, no files beside it.

Words and pictures come from rows alone, and what came from outside (a gate's words, names, paths) is escaped. A kind of
rows that is missing leaves its section with the reason in place of pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path

from fusedtp.files import replace

from . import digest, figures, page, tables, timeline
from .digest import BASELINE, Case
from .figures import Section
from .report import SHORT_DTYPES, TITLES
from .store import Row

_HOW = (
    "Every rank is a process of its own. A variant's result is first compared with the unsharded product in float64; "
    "one that is wrong gets no number. Then all variants of a case take turns, round by round, and a round's time is "
    "that of its slowest rank. Shown are medians over rounds. <b>unfused</b> runs the collective and the matmul one "
    "after the other through torch.distributed, and the others are measured against it; <b>decomposed</b> multiplies "
    "chunk by chunk while the next one travels; <b>fused</b> does both in one kernel.</p>\n<p>Sizes are global, "
    "y = x w<sup>T</sup> with x [M, K] and w [N, K]. <b>All-gather + matmul</b>: every rank collects all rows of x and "
    "multiplies them by its rows of w. <b>Matmul + reduce-scatter</b>: every rank multiplies its part of K, the "
    "partial results are added up, and each keeps its rows of the sum; with <b>all-reduce</b> each keeps all of it."
)


def folder_of(path: Path) -> Path:
    """Where the pictures of a file of rows go as PNGs."""
    return path.with_name(f"{path.stem}-figures")


def write(rows: Sequence[Row], path: Path) -> None:
    """Beside the rows' file: the page, and its pictures; with the timeline that is there."""
    recorded: timeline.Timeline | str = "no timeline.json is beside the rows; `fusedtp timeline` records one"
    beside = path.with_name("timeline.json")
    if beside.exists():
        try:
            recorded = timeline.read(beside)
        except (ValueError, OSError) as error:
            recorded = str(error)
    cases = digest.cases(rows)
    sections = list(figures.sections(cases, recorded))
    for section in sections:
        for each in section.pictures:
            replace(folder_of(path) / f"{each.name}.png", each.png)
    replace(path.with_suffix(".html"), page_of(rows, cases, sections).encode())


def page_of(rows: Sequence[Row], cases: Sequence[Case], sections: Iterable[Section]) -> str:
    """The whole document. `cases` are those of `rows`."""
    timed = [row for row in rows if row.median_ms is not None and not row.predicted]
    machines = sorted({_machine(row) for row in timed or rows})
    title = f"Tensor-parallel matmuls on {'; '.join(machines) or 'no machine yet'}"
    parts = [
        ("short", "In short", _short(cases)),
        ("sizes", "From which size on each schedule is faster", tables.standings(cases)),
        *((each.name, each.title, _pictures(each, cases)) for each in sections),
        ("refused", "Refused or not run", tables.refused(rows)),
        ("checked", "Checked, not timed", tables.checked(rows)),
        ("rows", "All rows", tables.everything(rows)),
    ]
    links = "\n".join(f'<a href="#{name}">{escape(words)}</a>' for name, words, _ in parts)
    body = "\n".join(
        f'<section id="{name}">\n<h2>{escape(words)}</h2>\n{content}\n</section>' for name, words, content in parts
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{page.style()}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="muted">{escape(_when(timed))}</p>
<p>{_HOW}</p>
{_facts(rows, timed)}
<nav>
{links}
</nav>
{body}
</main>
<script>{page.SCRIPT}</script>
</body>
</html>
"""


def _machine(row: Row) -> str:
    return f"{row.num_gpus}x {row.gpu}" if row.gpu else f"{row.cpu or row.machine}, {row.cores} cores"


def _when(timed: Sequence[Row]) -> str:
    if not timed:
        return "Nothing was timed."
    days = sorted({row.time_utc[:10] for row in timed if row.time_utc})
    commits = sorted({row.commit + (" with changes" if row.dirty else "") for row in timed if row.commit})
    span = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "at an unknown time"
    return f"Measured {span}, commit {', '.join(commits) or 'unknown'}."


def _facts(rows: Sequence[Row], timed: Sequence[Row]) -> str:
    about = timed or rows

    def every(name: str) -> str:
        return ", ".join(sorted({str(getattr(row, name)) for row in about} - {"", "0"}))

    spent = sum(row.total_ms or 0.0 for row in timed) / 1e3
    ranks = ", ".join(str(size) for size in sorted({row.world_size for row in timed}))
    counts = f"{len(rows)}, of which {len(timed)} timed: {len({row.case for row in timed})} cases on {ranks} ranks"
    versions = [f"fusedtp {version('fusedtp')}"]
    versions += [f"{name} {every(name)}" for name in ("torch", "triton", "python", "driver") if every(name)]
    facts = {
        "rows": (counts if timed else f"{len(rows)}, none timed") + (f", {spent:.0f} s on the clock" if spent else ""),
        "ops": ", ".join(TITLES.get(op, op) for op in dict.fromkeys(row.op for row in about)),
        "models": every("model"),
        "dtypes": ", ".join(SHORT_DTYPES.get(each, each) for each in every("dtype").split(", ")),
        "threads a rank": every("threads"),
        "links": every("links"),
        "torch.distributed": every("backend"),
        "versions": ", ".join(versions),
        "predictions": ", ".join(sorted({row.path for row in rows if row.predicted})),
    }
    return (
        "<dl>" + "\n".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts.items() if text) + "</dl>"
    )


def _short(cases: Sequence[Case]) -> str:
    lines = digest.headlines(cases)
    if not digest.overall(cases):
        return tables.missing(f"no case has both {BASELINE} and another schedule timed with 2 or more ranks")
    return "\n".join(f"<p>{escape(line)}</p>" for line in lines) + tables.summary(cases)


def _pictures(section: Section, cases: Sequence[Case]) -> str:
    if section.missing:
        return tables.missing(section.missing)
    parts = [f'<p class="muted">{escape(section.caption)}</p>']
    for each in section.pictures:
        opened = " open" if each.first else ""
        parts.append(
            f'<figure id="{each.name}"><details{opened}><summary>{escape(each.title)}</summary>\n'
            f'<div class="picture">{each.svg}</div></details></figure>'
        )
    if section.name == "blocks":
        parts.append(f"<details><summary>The same as a table</summary>{tables.totals(cases)}</details>")
    return "\n".join(parts)
