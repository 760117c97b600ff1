"""Rows that the cost model gives for cases that were measured, to be drawn beside them; labelled as what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from fusedtp import cost
from fusedtp.cost.hardware import Hardware

from .cases import SCHEDULES
from .store import PASSED, Row


def predictions(rows: Iterable[Row], hardware_of: Callable[[int], Hardware]) -> list[Row]:
    """For every measured forward case with two ranks or more: each schedule that was timed, as the model has it.

    hardware_of: the table's entry for a number of ranks. The model does without the measured times; operands are given
    as they are multiplied, as when measured. ValueError where it has no number for a dtype.
    """
    found = []
    for row in rows:
        if row.variant in SCHEDULES and row.direction == "forward" and row.world_size > 1 and row.median_ms is not None:
            if row.predicted:
                continue
            machine = hardware_of(row.world_size)
            model = cost.predict(
                row.op, M=row.M, N=row.N, K=row.K, world_size=row.world_size, dtype=row.dtype, hardware=machine,
                casts=False,
            )  # fmt: skip
            if row.variant in model.times:
                found.append(_row(row, model.times[row.variant] / 1e3, machine.name))
    return found


def _row(measured: Row, median_ms: float, hardware: str) -> Row:
    nothing: dict[str, Any] = dict.fromkeys(
        ("p20_ms", "p80_ms", "total_ms", "speedup_vs_unfused", "matmul_fraction", "tflops", "algbw_gbps", "busbw_gbps")
    )
    nothing |= dict.fromkeys(("ceiling_ms", "overlap_efficiency", "max_error", "error_ratio"))
    return replace(
        measured, median_ms=median_ms, rounds=0, gate=PASSED, predicted=True, path=f"cost model, {hardware}", **nothing
    )
