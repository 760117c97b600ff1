"""Published times of others, results/published/times.csv, beside the cost model's predictions.

Sizes are global, M x N x K; without a matmul M x N, or a length alone. A way is a schedule, a form of a schedule, or
something else: the library's matmul alone, a multimem kernel, a kernel that adds and normalizes. matmul_us and
kernel_matmul_us are measured matmuls, if published. `timed` says how, if not by torch on a warm machine:

    without torch      the library's collective by itself, in nccl-tests, in a loop or in a graph
    burst              the library's matmul at burst clocks: 36 calls in a graph on a cool GPU
    burst with cast    the same in float8, behind one kernel that casts x

fitted: a number of `cost.hardware` comes from this row. Rows of NVIDIA AIConfigurator are held out by their hash
(`Published.held_out`), and all others of it are fitted to. If the model cannot predict a time, `why` names the reason,
a key of REASONS.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from hashlib import sha256
from itertools import groupby
from math import inf
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from fusedtp import cost
from fusedtp.bench.cases import SCHEDULES
from fusedtp.choose import tuning
from fusedtp.cost.hardware import BURST_US, HARDWARE
from fusedtp.cost.overlap import elementwise_us, multicast_us, way_of

FILE = Path(__file__).parent.parent / "results" / "published" / "times.csv"

REASONS = {
    "outlier": "alone among its neighbours, of 32 and 59 us: a hiccup of their run",
    "choice": "between short and long messages NCCL does not take its fastest way at once; on Blackwell a gather of "
    "16 MB on 8 GPUs takes twice the model's time",
    "ll128": "NCCL has a third kind of messages between short and long ones, which the model leaves out",
    "tree": "NCCL alone takes 4 to 5 us longer than the tree that torch's rows of 8 KB to 512 KB show",
    "h20": "an H20 has 78 multiprocessors: its sums in the switch reach 0.51 of the link, the model has an H100's 0.65",
    "burst": "a short run, at the clocks of a cool chip; the model's are sustained ones",
    "power": "their chip slows down to 0.4 or 0.6 of its rate within 36 calls of 0.7 ms; the model has 0.7, assumed",
    "tiles": "the library cuts this shape otherwise than the model's three tiles",
    "short": "contractions of 1024 or 1536: their float8 kernel takes longer to begin and to store than the model's",
    "cast": "short casts, or few tiles in float8: their kernels take up to 5 us more, or less, than the model's",
    "one kernel": "theirs is one kernel that reads from its peers, on 4 GPUs with 0.9 of the link; ours stores, with "
    "0.76, and sums in a second one",
    "blackwell": "on Blackwell vLLM's kernel takes up to 2.4 times as long as on H100",
    "barrier": "torch's kernels take 15 or 16 us at least, one-shot or two-shot; the model has 13 and 21",
    "waves": "by whole waves of tiles the SMs are idle for a fifth of the model's matmul; their library cuts it better",
    "pipeline": "torch's pipeline on their host takes more than 600 us at any size; the model's time of a chunk is "
    "that of the B300 below and of copies on another H100",
    "triton": "their kernel takes up to 2.3 times as long as their unfused; the model has ours at 0.97 of the library",
    "rate": "their library's matmul is faster than 0.65 of the data sheet's rate: predictions of all three are high",
    "host": "74 to 96 us at any size: so long their host takes to issue both ops, which the model leaves out, as a "
    "graph does",
    "half": "their kernel takes some 65 us at any size, and more by half of the link; the model has 5 us, and 0.69 of "
    "the link as on an H100",
    "start": "their kernel takes some 80 us at any size, the model 5",
}


AICONFIGURATOR = "aiconfigurator"
# Classes of sizes, each with its largest: MB of a collective, or rows of a matmul.
SIZES = {
    False: (("to 1 MB", 1), ("4 to 16 MB", 16), ("64 MB and more", inf)),
    True: (("64 rows", 64), ("512 to 2048 rows", 2048), ("8192 rows", inf)),
}
_TITLES = {
    "all_gather_matmul": "matmul", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
}  # fmt: skip


class Published(NamedTuple):
    source: str
    gpus: str
    hardware: str
    op: str
    way: str
    timed: str
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
        if self.way.startswith("multicast"):
            kind = {"all_gather": "gather", "reduce_scatter": "scatter"}.get(what, what)
            time = multicast_us(kind, num_bytes, self.ranks, machine)
            assert time is not None
            return time
        if self.way == "elementwise":
            # Two tensors, the addend and the sum, are each read and written.
            return elementwise_us(4 * num_bytes, machine)
        form, in_switch = self.way.split()[0], self.way.endswith("in the switch")
        algorithm = "two_shot" if in_switch else form.replace("-", "_") if form in ("one-shot", "two-shot") else "auto"
        if self.timed.startswith("burst"):
            return self._burst_us
        found = cost.predict(
            what, M=self.M, N=self.N, K=self.K or 1, world_size=self.ranks, dtype=self.dtype, hardware=self.hardware,
            matmul_us=self.matmul_us, kernel_matmul_us=self.kernel_matmul_us, algorithm=algorithm, casts=False,
            order="any" if in_switch else "rank",
        )  # fmt: skip
        if form.startswith(("one-", "two-")):
            assert found.fused_us is not None
            return found.fused_us + (0.0 if "graph" in self.way else machine.lone_us - machine.launch_us)
        if self.timed == "without torch":
            return found.comm_us - machine.torch_us
        return found.matmul_us if form == "matmul" else found.times[form]

    @property
    def _burst_us(self) -> float:
        """Return the time of a matmul that begins at burst clocks, and of the cast of x by one kernel."""
        machine = HARDWARE[self.hardware]
        work = cost.work_of(self.op, M=self.M, N=self.N, K=self.K or 1, world_size=1, dtype=self.dtype)
        casts = self.timed == "burst with cast"
        burst, sustained = (cost.estimate(self.op, work, each, casts=casts) for each in (machine.burst, machine))
        time = burst.matmul_us
        if time > BURST_US:
            time = BURST_US + sustained.matmul_us * (1 - BURST_US / time)
        # The model casts by two kernels.
        return time + max(0.0, burst.cast_us - machine.launch_us)

    @property
    def title(self) -> str:
        """Return the op by its name in the tables of errors."""
        return _TITLES[self.op] + (f" in {self.dtype}, {self.timed}" if self.timed.startswith("burst") else "")

    @property
    def size_class(self) -> str:
        """Return the class of the size: of rows for a matmul, of bytes for a collective."""
        size = self.M if self.timed.startswith("burst") else self.M * self.N * 2 / 2**20
        return next(name for name, most in SIZES[self.timed.startswith("burst")] if size <= most)

    @property
    def schedule(self) -> str:
        """Return the schedule that the way is, or is the form of; "" if none, or if our schedule has another form."""
        form = self.way.split()[0]
        if form in ("one-shot", "two-shot"):
            machine = HARDWARE[self.hardware]
            way = way_of(1, self.M * self.N, self.ranks, self.dtype, machine, "fused", alone=True)
            return "fused" if way == form.replace("-", "_") else ""
        return form if form in SCHEDULES else ""

    @property
    def held_out(self) -> bool:
        """Return whether no number was fitted to this row: 3 of 10 rows of NVIDIA AIConfigurator, by their hash."""
        names = self.source, self.gpus, self.op, self.way, self.ranks, self.dtype, self.M, self.N, self.K or ""
        digest = sha256(",".join(map(str, names)).encode()).hexdigest()
        return AICONFIGURATOR in self.source and int(digest, 16) % 10 < 3

    @property
    def error(self) -> float:
        return self.predicted_us / self.us - 1

    @property
    def allowed(self) -> float:
        """Return the allowed relative error: larger if the published kernel is not ours but another's."""
        return 0.20 if self.way.split()[0] in ("fused", "decomposed", "one-shot", "one-", "two-shot") else 0.15


def _read() -> list[Published]:
    with FILE.open(newline="") as file:
        return [
            Published(
                *(each[name] for name in ("source", "gpus", "hardware", "op", "way", "timed")), int(each["ranks"]),
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


def library_rows() -> list[Published]:
    """Return the rows of NVIDIA AIConfigurator's tables of library ops: too many to show each."""
    return [row for row in ROWS if AICONFIGURATOR in row.source and row.timed]


def within(rows: Sequence[Published]) -> float:
    """Return the part of the rows that is predicted within 15 %."""
    return sum(abs(row.error) <= 0.15 for row in rows) / len(rows)


def errors() -> str:
    """Return tables of errors: by origin and op, fitted and held out; and by op, GPU and size."""
    heads = "rows", "number", "median", "p10", "p90", "within 15 %"
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * 5]
    tables = library_rows()
    groups = {
        f"{title}, {which}": [row for row in tables if row.title == title and row.held_out == (which == "held out")]
        for which in ("fitted to", "held out")
        for title in dict.fromkeys(row.title for row in tables)
    }
    groups |= {
        f"all {which}": [row for row in tables if row.held_out == (which == "held out")]
        for which in ("fitted to", "held out")
    }
    others = [row for row in ROWS if row not in tables]
    groups["other sources, library ops and multimem"] = [row for row in others if row.allowed == 0.15]
    groups["others' kernels beside our schedules"] = [row for row in others if row.allowed != 0.15]
    for name, rows in groups.items():
        found = pd.Series([row.error for row in rows])
        cells = [str(len(rows)), *(f"{found.quantile(q):+.0%}" for q in (0.5, 0.1, 0.9)), f"{within(rows):.0%}"]
        lines.append(f"| {name} | {' | '.join(cells)} |".replace("%", " %"))
    classes = list(dict.fromkeys(name for pair in SIZES.values() for name, _ in pair))
    lines += ["", f"| op | GPU | {' | '.join(classes)} |", "|---|---|" + "---:|" * len(classes)]
    for (title, gpu), group in groupby(sorted(tables, key=_place), key=lambda row: (row.title, row.gpus.split()[1])):
        by_class = pd.DataFrame([(row.size_class, 100 * row.error) for row in group]).groupby(0)[1]
        cells = {
            name: "{:+.0f} ({:+.0f} to {:+.0f}), {}".format(*each.quantile([0.5, 0.1, 0.9]), len(each))
            for name, each in by_class
        }
        lines.append(f"| {title} | {gpu} | {' | '.join(cells.get(name, '') for name in classes)} |")
    return "\n".join(lines)


def _place(row: Published) -> tuple[int, str, int]:
    return list(_TITLES).index(row.op), row.dtype, list(HARDWARE).index(row.hardware)


class Choice(NamedTuple):
    """Times of the schedules that were published for one shape, in us, and the schedule that `auto` takes."""

    row: Published
    us: dict[str, float]
    auto: str

    @property
    def is_right(self) -> bool:
        return self.us[self.auto] == min(self.us.values())

    @property
    def lead(self) -> float:
        """Return the time of the second fastest schedule over that of the fastest."""
        first, second, *_ = sorted(self.us.values())
        return second / first


def choices() -> list[Choice]:
    """Return the choices of `auto` for the published shapes with two schedules or more, each a whole op."""
    found: dict[tuple[object, ...], list[Published]] = {}
    for row in ROWS:
        if row.schedule and "," not in row.op:
            found.setdefault((row.source, row.gpus, row.op, row.size), []).append(row)
    made = []
    for rows in found.values():
        us: dict[str, float] = {}
        for row in rows:
            us[row.schedule] = min(row.us, us.get(row.schedule, row.us))
        if len(us) > 1:
            row = rows[0]
            cols = (row.K or 1) if row.op == "all_gather_matmul" else row.N
            allowed = [name for name in ("fused", "decomposed", "unfused") if name in us]
            auto = tuning.decide(
                None, HARDWARE[row.hardware], row.op, row.dtype, row.ranks, row.M, cols, allowed,
                switch=any(each.way.endswith("in the switch") for each in rows),
            )  # fmt: skip
            assert auto is not None
            made.append(Choice(row, us, auto[0]))
    return made


def chosen() -> str:
    """Return a table of the choices of `auto`, by op and GPU."""
    lines = [
        "| op | GPUs | shapes | `auto` is fastest | best ahead by more than 10 % | of these `auto` is fastest |",
        "|---|---|---:|---:|---:|---:|",
    ]
    made = sorted(choices(), key=lambda choice: (choice.row.op, choice.row.gpus))
    groups = [
        (op, gpus, list(group)) for (op, gpus), group in groupby(made, key=lambda made: (made.row.op, made.row.gpus))
    ]
    for op, gpus, group in [*groups, ("all", "", made)]:
        ahead = [choice for choice in group if choice.lead > 1.1]
        right = [sum(choice.is_right for choice in which) for which in (group, ahead)]
        cells = [op.replace("_", "-"), gpus, *map(str, (len(group), right[0], len(ahead), right[1]))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown() -> str:
    """Return a table for each source and its GPUs: one line for each size, one column for each op and way."""
    lines, marks = [], {name: f"[{number}]" for number, name in enumerate(REASONS, 1)}
    shown = [row for row in ROWS if AICONFIGURATOR not in row.source]
    for (source, gpus), group in groupby(shown, key=lambda row: (row.source, row.gpus)):
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
    told = {name: sum(row.why == name for row in library_rows()) for name in REASONS}
    said = [
        f"- {marks[name]} {reason}{f' ({told[name]} rows of the tables above)' if told[name] else ''}."
        for name, reason in REASONS.items()
    ]
    return "\n".join([*lines, *said])


def _title(op: str, way: str) -> str:
    return f"{op.replace('_', '-')}, {way}" if op != "add and norm" else op


def _cell(row: Published, marks: dict[str, str]) -> str:
    mark = f" {marks[row.why]}" if row.why else ""
    return f"{row.us:.4g} / {row.predicted_us:.4g}, {row.error:+.0%}{'*' if row.fitted else ''}{mark}".replace(
        "%", " %"
    )
