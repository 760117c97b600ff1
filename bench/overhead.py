"""`fusedtp overhead`: the microseconds that a small call takes on its host beyond its work."""

from __future__ import annotations

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
from fusedtp.files import replace
from fusedtp.machine import describe

from .ranks import RankPool
from .store import origin
from .tables import CellTable

ROWS, FEATURES, CALLS, BATCH = 8, 64, 200, 10


def _us(call: Callable[[], object], times: int = CALLS) -> float:
    # Return the microseconds of a call.
    begin = time.perf_counter_ns()
    for _ in range(times):
        call()
    return (time.perf_counter_ns() - begin) / times / 1e3


def time_overhead(group: ProcessGroup, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return by direction and round the microseconds of `all_gather_linear` beyond its work, and of F.linear.

    On one rank the overhead is the time beyond F.linear, in short batches in turn, as one batch may take many times as
    long on a busy machine. On more ranks it is the time outside of spans (`fusedtp.trace`), measured in separate calls
    right before, as recording takes time. Backward includes torch's autograd engine, like F.linear of the whole rows.
    """
    schedule = "decomposed" if group.size() > 1 else "auto"
    x, weight = torch.randn(ROWS, FEATURES, requires_grad=True), torch.randn(FEATURES, FEATURES, requires_grad=True)
    out = torch.randn(ROWS * group.size(), FEATURES)
    whole = torch.randn(ROWS * group.size(), FEATURES, requires_grad=True)

    def ours() -> Any:
        return fusedtp.all_gather_linear(x, weight, group=group, schedule=schedule)

    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "forward": (ours, lambda: F.linear(whole, weight)),
        "both": (lambda: ours().backward(out), lambda: F.linear(whole, weight).backward(out)),
    }
    found: dict[str, list[tuple[float, float]]] = {direction: [] for direction in calls}
    for turn in range(rounds + 1):
        for direction, (call, linear) in calls.items():
            if group.size() == 1:
                pairs = [(_us(linear, BATCH), _us(call, BATCH)) for _ in range(CALLS // BATCH)]
                linear_us = statistics.median(its for its, _ in pairs)
                each = statistics.median(ours - its for its, ours in pairs), linear_us
            else:
                linear_us = _us(linear)
                with trace.recording() as spans:
                    _us(call)
                inside = sum(span.end_ns - span.begin_ns for span in spans) / CALLS / 1e3
                each = _us(call) - inside, linear_us
            if turn:
                found[direction].append(each)
    return found


def overhead(out: Path, rounds: int, done: Callable[[], object] = lambda: None) -> pd.DataFrame:
    """Append a row for each number of ranks and direction: medians and quartiles of the slowest rank's time.

    `done` is called after each number of ranks.
    """
    machine, rows = describe(), []
    # Rows of an older file may have fewer columns.
    before = [pd.read_csv(out, keep_default_na=False, dtype=str)] if out.exists() else []
    with RankPool(2) as pool:
        for world_size in (1, 2):
            replies = pool.run(time_overhead, rounds, world_size=world_size)
            for direction in replies[0]:
                slowest = [max(each) for each in zip(*(reply[direction] for reply in replies), strict=True)]
                quarters = statistics.quantiles([ours for ours, _ in slowest], n=4)
                linear_us = statistics.median(its for _, its in slowest)
                rows.append({
                    **origin(machine), "world_size": world_size, "direction": direction,
                    "rows": ROWS, "features": FEATURES,
                    "overhead_us": round(quarters[1], 1), "q1_us": round(quarters[0], 1),
                    "q3_us": round(quarters[2], 1), "linear_us": round(linear_us, 1),
                })  # fmt: skip
            done()
    frame = pd.DataFrame(rows)
    replace(out, pd.concat([*before, frame]).to_csv(index=False).encode())
    return frame


def table(frame: pd.DataFrame) -> CellTable:
    """Return the table of a call's overhead."""
    columns = {"world_size": "ranks", "direction": "direction", "overhead_us": "overhead\nus", "q1_us": "25 %\nus",
               "q3_us": "75 %\nus", "linear_us": "F.linear\nus"}  # fmt: skip
    title = f"A call less its matmul, copies and waits, {ROWS} x {FEATURES} a rank"
    return CellTable.of("overhead", title, frame[list(columns)].rename(columns=columns))
