"""Parts of documents that the program writes: what stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.

README's line of measured speed-ups and the tables of docs/measured.md come from results/, the table of collectives from
the planner. Tests compare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import pandas as pd

from fusedtp.files import read_text, replace

from .cases import SHORT_DTYPES, TITLES
from .frames import cases, each, frame_of, overall, plain, records, timed
from .store import MAX_BYTES, Measurement
from .tables import milliseconds


class NoCase(ValueError):
    """Rows without what a table is made of."""


def replaced(document: str, name: str, content: str) -> str:
    """Return the document with the part `name` replaced; ValueError where it does not have exactly one.

    The ends of its lines stay as they are.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    lines = document.splitlines(keepends=True)
    places = [[at for at, line in enumerate(lines) if mark in line] for mark in (begin, end)]
    for mark, found in zip((begin, end), places, strict=True):
        if len(found) != 1 or document.count(mark) != 1:
            where = f" in lines {', '.join(str(at + 1) for at in found[:8])}" if found else ""
            raise ValueError(f"there must be one line with {mark}, got {document.count(mark)}{where}")
    (first,), (last,) = places
    if first >= last:
        raise ValueError(f"line {first + 1} with {begin} must come before line {last + 1} with {end}")
    for mark, at in ((begin, first), (end, last)):
        if lines[at].strip() != mark:
            raise ValueError(f"line {at + 1} must be {mark} and no more, got {lines[at].strip()[:80]!r}")
    ending = "\r\n" if lines[first].endswith("\r\n") else "\n"
    made = "".join(line + ending for line in content.strip().splitlines())
    return "".join((*lines[: first + 1], made, *lines[last:]))


def rewrite(path: Path, name: str, content: str) -> None:
    """Replace the document at `path`, as a whole, by one with the part `name` replaced; ValueError naming it."""
    try:
        text = replaced(read_text(path, max_bytes=MAX_BYTES), name, content)
    except ValueError as error:
        raise ValueError(f"{path} stays as it is: {error}") from error
    replace(path, text.encode())


def measured_line(rows: Sequence[Measurement]) -> str:
    """Markdown of what `decomposed` gains forward: over all single matmuls, and over those of the models."""
    frame = timed(frame_of(rows))
    frame = frame[frame["direction"] == "forward"]
    said = []
    for name, lines in (("single matmuls", frame[frame["model"] == ""]), (None, frame[frame["model"] != ""])):
        for found in records(overall(lines)):
            if found["schedule"] == "decomposed":
                ends = f"{found['worst']:.2f} to {found['best']:.2f}"
                counts = f"{found['faster']} faster, {found['same']} the same, {found['slower']} slower"
                what = name or f"matmuls of {_plain(each(lines, 'model'))}"
                said.append(f"{found['mean']:.2f}x over {found['cases']} {what} ({ends}; {counts})")
    if not said:
        raise NoCase("no timed case on two ranks or more")
    first = records(frame)[0]
    return (
        f"- Measured, {first['cores']} cores of {_plain(first['cpu'])}, 2 and 4 ranks, forward, `decomposed` over "
        f"`unfused`: {' and '.join(said)}. Means are geometric."
    )


def measured_table(rows: Sequence[Measurement], *, world_size: int = 2, dtype: str = "float32") -> str:
    """Markdown of the forward cases at one world size and dtype: medians in ms, speed-up, share of the matmul alone."""
    frame = frame_of(rows)
    shown = plain(frame[frame["direction"] == "forward"])
    shown = shown[(shown["world_size"] == world_size) & (shown["dtype"] == dtype)]
    if shown.empty:
        raise NoCase(f"no timed case with {world_size} ranks in {dtype}")
    lines = [
        "| op | M x N x K | matmul alone | unfused | decomposed | speed-up | of matmul |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for first, case in cases(shown):
        ours = case.reindex(["decomposed"])[["speedup_vs_unfused", "matmul_fraction"]].iloc[0]
        if ours.notna().all():
            medians = case["median_ms"].reindex(["matmul", "unfused", "decomposed"])
            numbers = ["" if pd.isna(median) else milliseconds(median) for median in medians]
            numbers += [f"{ratio:.2f}" for ratio in ours]
            lines.append(f"| {TITLES[first['op']]} | {first['size']} | {' | '.join(numbers)} |")
    first, commits = records(shown)[0], each(shown.assign(commit=shown["commit"].str[:12]), "commit")
    cpu = f"{_plain(first['cpu'])} ({first['cores']} cores)"
    lines += [
        "",
        f"Medians in ms over interleaved rounds, the slowest rank of each: {world_size} ranks, one thread each, "
        f"{SHORT_DTYPES[dtype]}, {cpu}, torch {_plain(first['torch'])}, commit {_plain(commits)}. Speed-up: unfused / "
        "decomposed. Of matmul: the matmul alone / decomposed; 1 where all communication is hidden, more where chunks "
        "suit the caches better than the whole.",
    ]
    return "\n".join(lines)


def _plain(text: str) -> str:
    # Rows may come from elsewhere: no element, no mark, no line of a document comes out of a cell.
    return escape(" ".join(text.split()), quote=False)
