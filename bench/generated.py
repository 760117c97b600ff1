"""Parts of documents that the program writes: what stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.

README's table of measured rows comes from results/, the table of collectives from the planner. Tests compare both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .report import SHORT_DTYPES, TITLES, plain_forward, timed_cases
from .store import Row


def replaced(document: str, name: str, content: str) -> str:
    """The document with the part `name` replaced; ValueError where it does not have exactly one."""
    marks = rf"(<!-- {re.escape(name)}:begin -->\n).*?(<!-- {re.escape(name)}:end -->)"
    text, count = re.subn(marks, lambda found: f"{found[1]}{content.strip()}\n{found[2]}", document, flags=re.DOTALL)
    if count != 1:
        raise ValueError(
            f"the document must have one part between <!-- {name}:begin --> and <!-- {name}:end -->, got {count}"
        )
    return text


def measured_table(rows: Sequence[Row], *, world_size: int = 2, dtype: str = "float32") -> str:
    """Markdown of the forward cases at one world size and dtype: medians in ms, speed-up, share of the matmul alone."""
    lines = [
        "| op | M x N x K | matmul alone | unfused | decomposed | speed-up | of matmul |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    here = plain_forward(timed_cases(rows))
    cases = [case for case in here if (case.first.world_size, case.first.dtype) == (world_size, dtype)]
    for case in cases:
        medians = [case.median(variant) for variant in ("matmul", "unfused", "decomposed")]
        best = case.rows.get("decomposed")
        if best is None or best.speedup_vs_unfused is None or best.matmul_fraction is None:
            continue
        row = case.first
        numbers = " | ".join("" if median is None else f"{median:.3g}" for median in medians)
        lines.append(
            f"| {TITLES[row.op]} | {row.M} x {row.N} x {row.K} | {numbers} | {best.speedup_vs_unfused:.2f} | "
            f"{best.matmul_fraction:.2f} |"
        )
    commits = sorted({case.first.commit[:12] for case in cases})
    first = cases[0].first if cases else None
    if first is None:
        raise ValueError(f"no timed case with {world_size} ranks in {dtype}")
    where = f"{world_size} ranks, one thread each, {SHORT_DTYPES[dtype]}, {first.cpu} ({first.cores} cores)"
    what = "Medians in ms over interleaved rounds, the slowest rank of each"
    columns = (
        "Speed-up: unfused / decomposed. Of matmul: the matmul alone / decomposed; 1 where all communication is "
        "hidden, more where chunks suit the caches better than the whole."
    )
    lines += ["", f"{what}: {where}, torch {first.torch}, commit {', '.join(commits)}. {columns}"]
    return "\n".join(lines)
