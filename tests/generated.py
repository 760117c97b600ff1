"""Generated parts of documents, between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.

README's line of measured speed-ups and the tables of docs/measured.md come from results/.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fusedtp.bench.cases import SHORT_DTYPES, TITLES
from fusedtp.bench.frames import CASE, cases, each, frame_of, overall, records, timed
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


def measured_line(rows: Sequence[Measurement]) -> str:
    """Return markdown of the forward speed-ups of `decomposed`: over all single matmuls, and over models' matmuls."""
    frame = timed(frame_of(rows))
    frame = frame[frame["direction"] == "forward"]
    said, of_model = [], frame["model"] != ""
    for what, lines in (("single matmuls", frame[~of_model]), (f"matmuls of {each(frame, 'model')}", frame[of_model])):
        ours, torchs = (
            lines[lines["variant"] == variant].set_index(CASE)["median_ms"] for variant in ("decomposed", "dtensor")
        )
        over_torch = (torchs / ours).dropna()
        (found,) = (line for line in records(overall(lines)) if line["schedule"] == "decomposed")
        ends = f"{found['worst']:.2f} to {found['best']:.2f}"
        counts = f"{found['faster']} faster, {found['same']} the same, {found['slower']} slower"
        said.append(
            f"{found['cases']} {what}: {found['mean']:.2f} times as fast as `unfused` ({ends}; {counts}). On "
            f"the {len(over_torch)} of these that torch's ColwiseParallel and RowwiseParallel can do, "
            f"{statistics.geometric_mean(over_torch):.2f} times as fast as those"
        )
    first = records(frame)[0]
    return (
        f"- Measured on {first['cores']} cores of {first['cpu']}, 2 and 4 ranks, forward, geometric means: "
        "`decomposed` (matmuls by chunk while the next chunk travels) against `unfused` (collective, then matmul). "
        f"{said[0]}.\n- The same for {said[1]}."
    )


def measured_table(rows: Sequence[Measurement], *, world_size: int = 2, dtype: str = "float32") -> str:
    """Return markdown of forward cases at one world size and dtype: medians in ms, speed-up, ratio to the matmul."""
    frame = frame_of(rows)
    shown = timed(frame[(frame["direction"] == "forward") & (frame["model"] == "")])
    shown = shown[(shown["world_size"] == world_size) & (shown["dtype"] == dtype)]
    lines = [
        "| op | M x N x K | matmul alone, ms | unfused, ms | DTensor, ms | decomposed, ms | speed-up | of matmul |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for first, case in cases(shown):
        ours = case.reindex(["decomposed"])[["speedup_vs_unfused", "matmul_fraction"]].iloc[0]
        if ours.notna().all():
            medians = case["median_ms"].reindex(["matmul", "unfused", "dtensor", "decomposed"])
            numbers = ["" if pd.isna(median) else milliseconds(median) for median in medians]
            numbers += [f"{ratio:.2f}" for ratio in ours]
            lines.append(f"| {TITLES[first['op']]} | {first['size']} | {' | '.join(numbers)} |")
    first, commits = records(shown)[0], each(shown.assign(commit=shown["commit"].str[:12]), "commit")
    cpu = f"{first['cpu']} ({first['cores']} cores)"
    lines += [
        "",
        f"Medians over interleaved rounds, the slowest rank of each: {world_size} ranks, one thread each, "
        f"{SHORT_DTYPES[dtype]}, {cpu}, torch {first['torch']}, commit {commits}. DTensor: torch's styles. Speed-up: "
        "unfused / decomposed. Of matmul: the matmul alone / decomposed; 1 where all communication is hidden, more "
        "where chunks suit the caches better than the whole.",
    ]
    return "\n".join(lines)


def decode_table(frame: pd.DataFrame) -> str:
    """Return markdown of the decode rows: for ranks and tokens, geometric means of speed-ups over weight sizes."""
    heads = "ranks", "tokens", "speed-up over torch", "speed-up over DTensor", "at most, over torch"
    lines = [f"| {' | '.join(heads)} |", "|---:|---:|---:|---:|---:|"]
    parts = [*frame.groupby(["world_size", "M"]), (("all", "all"), frame)]
    for (ranks, tokens), part in parts:
        ours, local = (part[part.variant == name] for name in ("fusedtp", "local"))
        columns = ours.speedup_vs_torch, ours.speedup_vs_dtensor, local.speedup_vs_torch
        means = " | ".join(f"{statistics.geometric_mean(each):.2f}" for each in columns)
        lines.append(f"| {ranks} | {tokens} | {means} |")
    first, sizes = frame.iloc[0], frame[["N", "K"]].drop_duplicates().itertuples(index=False)
    lines += [
        "",
        "Linear, all-reduce, residual and RMSNorm of few tokens, forward, 8 calls in a row, host time included: "
        f"speed-ups of medians, geometric means over N x K of {', '.join(f'{N} x {K}' for N, K in sizes)}; "
        f"{first['dtype']}, {first.cpu} ({first.cores} cores), torch {first.torch}, commit {first.commit[:12]}. "
        "torch: F.linear, gloo's all_reduce, +=, F.rms_norm. The last column is torch with nothing sent.",
    ]
    return "\n".join(lines)
