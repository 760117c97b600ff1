"""Published times of others, results/published/times.csv, beside the cost model's predictions.

Sizes are global, M x N x K; without a matmul M x N, or a length alone. A way is a schedule, a form of a schedule, or
something else: the library's matmul alone, a multimem kernel, a kernel that adds and normalizes. matmul_us and
kernel_matmul_us are measured matmuls, if published. fitted: a number of `cost.hardware` comes from this row. If the
model cannot predict a time, `why` names the reason, a key of REASONS.
"""

from __future__ import annotations

import csv
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from fusedtp import cost
from fusedtp.cost.hardware import HARDWARE
from fusedtp.cost.overlap import elementwise_us, multicast_us

FILE = Path(__file__).parent.parent / "results" / "published" / "times.csv"

REASONS = {
    "outlier": "alone among its neighbours, of 32 and 59 us: a hiccup of their run",
    "graph": "ten calls in one captured graph, without torch's part of a start; the model is of single calls",
    "one kernel": "theirs is one kernel that reads from its peers, on 4 GPUs with 0.9 of the link; ours stores, with "
    "0.76, and sums in a second one",
    "loop": "NCCL 2.30 in a row of calls without torch: faster than the NCCL above up to 4 MB, by up to 28 %",
    "copies": "their host issues a score of copies and signals, about 210 us at either power; ours is one kernel, and "
    "the model has no such term",
    "waves": "by whole waves of tiles the SMs are idle for a fifth of the model's matmul; their library cuts it better",
    "pipeline": "torch's pipeline on their host takes more than 600 us at any size; the model's time of a chunk is "
    "that of the B300 below and of copies on another H100",
    "rate": "their library's matmul is faster than 0.65 of the data sheet's rate: predictions of all three are high",
    "host": "74 to 96 us at any size: so long their host takes to issue both ops, which the model leaves out, as a "
    "graph does",
    "b300": "for B300 the model has an H100's latencies and its part of the link: too low",
    "half": "their kernel takes some 65 us at any size, and more by half of the link; the model has 5 us, and 0.69 of "
    "the link as on an H100",
    "start": "their kernel takes some 80 us at any size, the model 5",
    "narrow": "their library has 0.7 of this narrower link in the switch; the model has 0.57, an H100's",
}


class Published(NamedTuple):
    source: str
    gpus: str
    hardware: str
    op: str
    way: str
    ranks: int
    dtype: str
    M: int
    N: int
    K: int | None
    us: float
    matmul_us: float | None
    kernel_matmul_us: float | None
    fitted: bool
    why: str

    @property
    def size(self) -> str:
        if self.K is not None:
            return f"{self.M} x {self.N} x {self.K}"
        if self.N > 1:
            return f"{self.M} x {self.N}"
        num_kb = self.M * (4 if self.dtype == "float32" else 2) // 1024
        return f"{num_kb} KB" if num_kb < 1024 else f"{num_kb // 1024} MB"

    @property
    def predicted_us(self) -> float:
        machine, what = HARDWARE[self.hardware], self.op.split(",")[0]
        num_bytes = self.M * self.N * 2
        if self.way == "multicast":
            kind = {"all_gather": "gather", "reduce_scatter": "scatter"}.get(what, what)
            time = multicast_us(kind, num_bytes, self.ranks, machine)
            assert time is not None
            return time
        if self.way == "elementwise":
            # Two tensors, the addend and the sum, are each read and written.
            return elementwise_us(4 * num_bytes, machine)
        form, in_switch = self.way.split()[0], self.way.endswith("in the switch")
        algorithm = "two_shot" if in_switch else form.replace("-", "_") if form.endswith("-shot") else "auto"
        found = cost.predict(
            what, M=self.M, N=self.N, K=self.K or 1, world_size=self.ranks, dtype=self.dtype, hardware=self.hardware,
            matmul_us=self.matmul_us, kernel_matmul_us=self.kernel_matmul_us, algorithm=algorithm, casts=False,
            order="any" if in_switch else "rank",
        )  # fmt: skip
        if form.endswith("-shot"):
            assert found.fused_us is not None
            return found.fused_us + (0.0 if "graph" in self.way else machine.lone_us - machine.launch_us)
        return found.matmul_us if form == "matmul" else found.times[form]

    @property
    def error(self) -> float:
        return self.predicted_us / self.us - 1

    @property
    def allowed(self) -> float:
        """Return the allowed relative error: larger if the published kernel is not ours but another's."""
        return 0.20 if self.way.split()[0] in ("fused", "decomposed", "one-shot", "two-shot") else 0.15


def _read() -> list[Published]:
    with FILE.open(newline="") as file:
        return [
            Published(
                each["source"], each["gpus"], each["hardware"], each["op"], each["way"], int(each["ranks"]),
                each["dtype"], int(each["M"]), int(each["N"]), int(each["K"]) if each["K"] else None, float(each["us"]),
                *(float(each[name]) if each[name] else None for name in ("matmul_us", "kernel_matmul_us")),
                each["fitted"] == "yes", each["why"],
            )
            for each in csv.DictReader(file)
        ]  # fmt: skip


ROWS = _read()


def of(source: str, **fields: object) -> list[Published]:
    """Return the rows whose source ends with `source` and whose fields have these values."""
    rows = [row for row in ROWS if row.source.endswith(source)]
    return [row for row in rows if all(getattr(row, name) == value for name, value in fields.items())]


def markdown() -> str:
    """Return a table for each source and its GPUs: one line for each size, one column for each op and way."""
    lines, marks = [], {name: f"[{number}]" for number, name in enumerate(REASONS, 1)}
    for (source, gpus), group in groupby(ROWS, key=lambda row: (row.source, row.gpus)):
        rows = list(group)
        columns = list(dict.fromkeys((row.op, row.way) for row in rows))
        lines += [f"{gpus}, {rows[0].dtype}, {source}:", ""]
        lines += [
            "| tokens x columns, bytes, or M x N x K | " + " | ".join(_title(*column) for column in columns) + " |",
            "|---|" + "---:|" * len(columns),
        ]
        for size in dict.fromkeys(row.size for row in rows):
            cells = {(row.op, row.way): _cell(row, marks) for row in rows if row.size == size}
            lines.append(f"| {size} | " + " | ".join(cells.get(column, "") for column in columns) + " |")
        lines.append("")
    return "\n".join([*lines, *(f"- {marks[name]} {reason}." for name, reason in REASONS.items())])


def _title(op: str, way: str) -> str:
    return f"{op.replace('_', '-')}, {way}" if op != "add and norm" else op


def _cell(row: Published, marks: dict[str, str]) -> str:
    mark = f" {marks[row.why]}" if row.why else ""
    return f"{row.us:.4g} / {row.predicted_us:.4g}, {row.error:+.0%}{'*' if row.fitted else ''}{mark}".replace(
        "%", " %"
    )
