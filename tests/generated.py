"""Generated parts of documents, between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.

README's line of measured speed-ups and the tables of docs/measured.md come from results/.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path

import pandas as pd

from fusedtp.bench.cases import ALONE, SCHEDULES, SEQUENTIAL, SHORT_DTYPES, TITLES
from fusedtp.bench.digest import digest
from fusedtp.bench.frames import CASE, blocks, cases, each, frame_of, overall, records, timed
from fusedtp.bench.store import Measurement
from fusedtp.bench.tables import milliseconds


def replaced(document: str, name: str, content: str) -> str:
    """Return the document with the part `name` replaced."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->\n"
    assert document.count(begin) == document.count(end) == 1, name
    before, _, rest = document.partition(begin)
    return f"{before}{begin}{content.strip()}\n{end}{rest.partition(end)[2]}"


def as_written(path: Path, name: str, content: str, variable: str) -> None:
    """Check that the document has this content, or write it if the environment has `variable`=write."""
    text = path.read_text()
    made = replaced(text, name, content)
    if os.environ.get(variable) == "write":
        path.write_text(made)
    else:
        assert text == made, f"{variable}=write writes it anew"


def stale(digests: Collection[str], layer: str = "") -> str:
    """Return a sentence if rows of these digests timed other code than today's, else "".

    It is the same whatever today's digest is, so only the first change makes a document out of date.
    """
    others = sorted({each or "unknown" for each in digests} - {digest(0, layer)})
    if not others:
        return ""
    return f"The timed code has changed since these rows were measured (their digest: {', '.join(others)})."


WORLD_SIZE = 2
# Ours, and what is no whole op: other variants are other implementations.
_OURS = (*ALONE, SEQUENTIAL, *SCHEDULES[1:], "auto")


def _shown(rows: Sequence[Measurement]) -> pd.DataFrame:
    # Return the forward lines on two ranks, one a core: more ranks than cores take turns.
    frame = timed(frame_of(rows))
    return frame[(frame["direction"] == "forward") & (frame["world_size"] == WORLD_SIZE)]


def measured_line(rows: Sequence[Measurement]) -> str:
    """Return markdown of the forward speed-ups of `decomposed` on two ranks: over single matmuls, and of a block."""
    frame = _shown(rows)
    lines = frame[frame["model"] == ""]
    by_case = lines.set_index(CASE)["median_ms"]
    medians = {name: by_case[(lines["variant"] == name).values] for name in ("unfused", SEQUENTIAL, "decomposed")}
    medians["other"] = by_case[~lines["variant"].isin(_OURS).values].groupby(CASE, observed=True).min()
    ratios = {name: (median / medians["decomposed"]).dropna() for name, median in medians.items() if len(median)}
    assert {len(each) for each in ratios.values()} == {len(medians["decomposed"])}, "a variant is missing in some cases"
    mean = {name: f"{statistics.geometric_mean(each):.2f}" for name, each in ratios.items()}
    (found,) = (line for line in records(overall(lines)) if line["schedule"] == "decomposed")
    counts = f"{found['faster']} faster, {found['same']} the same, {found['slower']} slower"
    first = records(lines)[0]
    # Rows from before there was `sequential` cannot say what overlap gains.
    overlap = "What of this is overlap was not measured."
    if SEQUENTIAL in mean:
        overlap = (
            f"Of this, overlap gains {mean[SEQUENTIAL]}: that is its speed over `sequential`, our own collective over "
            "the same shared memory, then one matmul. The rest is transport: shared memory in place of torch's gloo."
        )
    said = [
        f"- Measured on {first['cores']} cores of {first['cpu']}, {WORLD_SIZE} ranks, forward, {found['cases']} single "
        f"matmuls, geometric means: `decomposed` (matmuls by chunk, over shared memory) is {mean['unfused']} times as "
        f"fast as `unfused` (torch's collective, then the matmul; {found['worst']:.2f} to {found['best']:.2f}; "
        f"{counts}), and {mean['other']} times as fast as the fastest other in each case, `unfused` or torch's "
        f"ColwiseParallel and RowwiseParallel. {overlap}"
    ]
    for shared, totals in blocks(frame):
        other = min(ms for name, ms in totals.items() if name not in _OURS)
        over = {"`unfused`": totals["unfused"], "`sequential`": totals.get(SEQUENTIAL), "the fastest other": other}
        told = ", ".join(f"{ms / totals['decomposed']:.2f} over {name}" for name, ms in over.items() if ms)
        said.append(f"- A block of {shared['model']}, its four matmuls together, at {shared['tokens']} tokens: {told}.")
    if old := stale(set(frame["digest"])):
        said.append(f"- {old}")
    return "\n".join(said)


def measured_table(rows: Sequence[Measurement], *, dtype: str = "float32") -> str:
    """Return markdown of forward cases on two ranks in one dtype: medians in ms, speed-ups, ratio to the matmul."""
    shown = _shown(rows)
    shown = shown[(shown["model"] == "") & (shown["dtype"] == dtype)]
    names = ["matmul", "unfused", "dtensor", SEQUENTIAL, "decomposed"]
    ratios = ["speedup_vs_unfused", "speedup_vs_sequential", "matmul_fraction"]
    lines = [
        "| op | M x N x K | matmul alone, ms | unfused, ms | DTensor, ms | sequential, ms | decomposed, ms "
        "| over unfused | over sequential | of matmul |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for first, case in cases(shown):
        ours = case.reindex(["decomposed"])[ratios].iloc[0]
        if ours.notna().any():
            numbers = ["" if pd.isna(median) else milliseconds(median) for median in case["median_ms"].reindex(names)]
            numbers += ["" if pd.isna(ratio) else f"{ratio:.2f}" for ratio in ours]
            lines.append(f"| {TITLES[first['op']]} | {first['size']} | {' | '.join(numbers)} |")
    first, commits = records(shown)[0], each(shown.assign(commit=shown["commit"].str[:12]), "commit")
    cpu = f"{first['cpu']} ({first['cores']} cores)"
    lines += [
        "",
        f"Medians over interleaved rounds, the slowest rank of each: {WORLD_SIZE} ranks, one thread each, "
        f"{SHORT_DTYPES[dtype]}, {cpu}, torch {first['torch']}, commit {commits}, digest of the timed code "
        f"{each(shown, 'digest')}. DTensor: torch's styles. sequential: our own collective over shared memory, and one "
        "matmul, in turn. Over unfused: unfused / decomposed, what a user gains. Over sequential: sequential / "
        "decomposed, what overlap gains. Of matmul: the matmul alone / decomposed; 1 where all communication is "
        "hidden, more where chunks suit the caches better than the whole.",
    ]
    if old := stale(set(shown["digest"])):
        lines += ["", old]
    return "\n".join(lines)


def decode_table(frame: pd.DataFrame) -> str:
    """Return markdown of the decode rows: for ranks and tokens, geometric means of speed-ups over weight sizes."""
    # Files from before there was one registry of cases have another name for `auto`.
    frame = frame[frame["world_size"] > 1].assign(variant=frame["variant"].replace({"fusedtp": "auto"}))
    heads = "ranks", "tokens", "speed-up over torch", "speed-up over DTensor", "at most, over torch"
    lines = [f"| {' | '.join(heads)} |", "|---:|---:|---:|---:|---:|"]
    # Ranks that outnumber the cores take turns, which says little of a larger machine.
    cores = frame["cores"].iloc[0]
    fitting = frame[frame["world_size"] <= cores]
    parts = [*frame.groupby(["world_size", "M"]), ((f"at most {cores}", "all"), fitting)]
    for (ranks, tokens), part in parts:
        by_size = part.set_index(["world_size", "M", "N", "K"])
        ms = {name: by_size["median_ms"][by_size["variant"] == name] for name in ("auto", "local", "torch", "dtensor")}
        columns = ms["torch"] / ms["auto"], ms["dtensor"] / ms["auto"], ms["torch"] / ms["local"]
        means = " | ".join(f"{statistics.geometric_mean(each):.2f}" for each in columns)
        lines.append(f"| {ranks} | {tokens} | {means} |")
    first, sizes = frame.iloc[0], frame[["N", "K"]].drop_duplicates().itertuples(index=False)
    lines += [
        "",
        "Linear, all-reduce, residual and RMSNorm of few tokens, forward, 8 calls in a row, host time included: "
        f"speed-ups of medians, geometric means over N x K of {', '.join(f'{N} x {K}' for N, K in sizes)}; "
        f"{first['dtype']}, {first.cpu} ({first.cores} cores), torch {first.torch}, commit {first.commit[:12]}. "
        "torch: F.linear, gloo's all_reduce, +=, F.rms_norm. The last column is torch with nothing sent. "
        "The last line leaves out ranks that outnumber the cores: they take turns, and their times say little about a "
        "larger machine.",
    ]
    digests = set(frame["digest"]) if "digest" in frame else {""}
    if old := stale(digests, "decode"):
        lines += ["", old]
    return "\n".join(lines)
