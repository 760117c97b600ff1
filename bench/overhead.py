"""What a call costs its host beside what it is for: python -P -m fusedtp.bench.overhead --out overhead.csv

Small calls, warm, in microseconds: `all_gather_linear` less F.linear on one rank; on more the slowest rank's time
less what it waited, multiplied and copied, which is what spans say (`fusedtp.trace`) of as many calls right before,
as recording them takes time too. With backward torch's own engine is in it, as it is in `linear_us`, which is all that
F.linear of the whole rows takes in the same run. Rows of several checkouts, each run with its own interpreter, may
stand below each other in one file.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import fusedtp
from fusedtp import trace
from fusedtp.bench.machine import describe
from fusedtp.bench.ranks import RankPool

ROWS, FEATURES = 8, 64
CALLS, BATCH = 200, 10


def _timed(call: Callable[[], object], times: int = CALLS) -> float:
    # Microseconds a call.
    begin = time.perf_counter_ns()
    for _ in range(times):
        call()
    return (time.perf_counter_ns() - begin) / times / 1e3


def _over(call: Callable[[], object], linear: Callable[[], object]) -> tuple[float, float]:
    # Microseconds that a call takes beyond F.linear, and those of that: medians of short batches in turn, as on a busy
    # machine one of them may take many times as long.
    pairs = [(_timed(linear, BATCH), _timed(call, BATCH)) for _ in range(CALLS // BATCH)]
    return statistics.median(ours - its for its, ours in pairs), statistics.median(its for its, _ in pairs)


def _in_spans(call: Callable[[], object]) -> float:
    # Microseconds of a call that are in spans.
    with trace.recording() as spans:
        for _ in range(CALLS):
            call()
    return sum(span.end_ns - span.begin_ns for span in spans) / CALLS / 1e3


def measure(group: ProcessGroup, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """By direction: what is beside, and what F.linear takes, a round each."""
    schedule = "decomposed" if group.size() > 1 else "auto"
    x, weight = torch.randn(ROWS, FEATURES, requires_grad=True), torch.randn(FEATURES, FEATURES, requires_grad=True)
    out = torch.randn(ROWS * group.size(), FEATURES)
    whole = torch.randn(ROWS * group.size(), FEATURES, requires_grad=True)

    def ours() -> Any:
        return fusedtp.all_gather_linear(x, weight, group=group, schedule=schedule)

    def linear() -> Any:
        return F.linear(whole, weight)

    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "forward": (ours, linear), "both": (lambda: ours().backward(out), lambda: linear().backward(out)),
    }  # fmt: skip
    found: dict[str, list[tuple[float, float]]] = {direction: [] for direction in calls}
    for turn in range(rounds + 1):
        for direction, (call, theirs) in calls.items():
            if group.size() == 1:
                each = _over(call, theirs)
            else:
                linear_us, inside = _timed(theirs), _in_spans(call)
                each = _timed(call) - inside, linear_us
            if turn:
                found[direction].append(each)
    return found


def main() -> None:
    """Append rows, one a number of ranks and a direction."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    machine, rows = describe(), []
    with RankPool(2) as pool:
        for world_size in (1, 2):
            replies = pool.run(measure, given.rounds, world_size=world_size)
            for direction in replies[0]:
                slowest = [max(each) for each in zip(*(reply[direction] for reply in replies), strict=True)]
                quarters = statistics.quantiles([beside for beside, _ in slowest], n=4)
                linear_us = statistics.median(time for _, time in slowest)
                rows.append({
                    "commit": machine.commit, "dirty": machine.dirty, "machine": machine.name, "torch": machine.torch,
                    "world_size": world_size, "direction": direction, "rows": ROWS, "features": FEATURES,
                    "beside_us": round(quarters[1], 1), "q1_us": round(quarters[0], 1), "q3_us": round(quarters[2], 1),
                    "linear_us": round(linear_us, 1),
                })  # fmt: skip
    frame = pd.DataFrame(rows)
    frame.to_csv(given.out, mode="a", header=not given.out.exists(), index=False)
    print(frame.to_string(index=False))


if __name__ == "__main__":
    main()
