"""Rows: one measurement each, with everything needed to judge it, stored as CSV under results/<machine>/.

A file is only replaced as a whole (written beside, then renamed), after the existing file was read. If that file is
malformed or foreign, the error names it, and it stays unchanged. Measuring a case again replaces all its rows of that
machine, so the rows that are compared with each other come from one interleaved run. A file is refused if its rows
contradict that: a median that is not of its own rounds, a ratio that is not of the case's medians, two commits in one
case.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fusedtp.files import read_text, replace, visible
from fusedtp.machine import Machine, gpu_software

from .cases import ALONE, COLLECTIVES, DIRECTIONS, EVERY_DTYPE, EVERY_OP, MODELS, SEQUENTIAL, Case, flops, traffic
from .digest import digest

if TYPE_CHECKING:
    from .intervals import Timing
    from .timing import Verdict

PASSED = "passed"
# Prefix of the gate of a variant that cannot run here, before the reason.
NOT_RUN = "not run: "
# About a hundred thousand rows.
MAX_BYTES = 64 << 20
# Characters that begin a formula in a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")

CaseKey: TypeAlias = tuple[str, int, int, int, str, int, str, str, int, str, tuple[int, ...], bool, bool, int]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One variant of one case in one direction. Times in ms; None if there is no number.

    direction: forward, backward or both (one after the other, timed together). model, tokens, layer: the transformer
    block that the case is a matmul of; empty and 0 for a case of its own. variant: matmul and comm (each alone: the
    bounds), own_matmul (our kernel with every flag already raised), unfused, sequential (our own collective and one
    matmul, which overlap nothing), decomposed, fused, auto, and the baselines of other libraries. rounds_ms: every
    round's time, in the order that the variants of a case share; empty in older files. speedup_vs_unfused and
    speedup_vs_sequential are ratios of medians in this run: what a user gains, and what overlap gains. matmul_fraction:
    the matmul's median over this one's; of a layer, that of a rank's arithmetic (local). tflops: a rank's rate in
    matmuls. algbw_gbps, busbw_gbps: of `comm`, and of a collective alone, by nccl-tests' definitions. bound_ms:
    the longer of matmul and comm. roofline: the share of that in this one's time. tokens_per_s: rows of all ranks in a
    second. hidden: the share of the time that sequential
    takes beyond the matmul, and this variant does not; 0 where nothing overlaps. gate: "passed", "not run: " and the
    reason, or the error; only passed rows have numbers. error_ratio: the largest error over the allowed error.
    interpreted: ran in Triton's interpreter, checked and not timed. predicted: from a model, not a clock.
    digest: of the timed code (`digest`). launches: the number of rounds in each of several launches on fresh ranks, of
    which `rounds_ms` has one after the other; empty for one launch.
    """

    op: str
    variant: str
    M: int
    N: int
    K: int
    dtype: str
    world_size: int
    direction: str
    model: str = ""
    tokens: int = 0
    layer: str = ""
    widths: tuple[int, ...] = ()
    graph: bool = False
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    total_ms: float | None = None
    rounds: int = 0
    rounds_ms: tuple[float, ...] = ()
    launches: tuple[int, ...] = ()
    host_us: float | None = None
    late_rounds: int = 0
    peak_bytes: float | None = None
    tokens_per_s: float | None = None
    speedup_vs_unfused: float | None = None
    speedup_vs_sequential: float | None = None
    matmul_fraction: float | None = None
    tflops: float | None = None
    algbw_gbps: float | None = None
    busbw_gbps: float | None = None
    bound_ms: float | None = None
    roofline: float | None = None
    hidden: float | None = None
    gate: str
    max_error: float | None = None
    error_ratio: float | None = None
    interpreted: bool = False
    predicted: bool = False
    path: str = ""
    seed: int = 0
    machine: str = ""
    cpu: str = ""
    cores: int = 0
    gpu: str = ""
    num_gpus: int = 0
    links: str = ""
    driver: str = ""
    threads: int = 0
    nodes: int = 1
    backend: str = ""
    python: str = ""
    torch: str = ""
    triton: str = ""
    cuda: str = ""
    nccl: str = ""
    nccl_env: str = ""
    commit: str = ""
    dirty: bool = False
    digest: str = ""
    gpu_before: str = ""
    gpu_after: str = ""
    load: float | None = None
    time_utc: str = ""

    @property
    def case(self) -> CaseKey:
        """Return the key that rows of one comparison share."""
        size = self.op, self.M, self.N, self.K, self.dtype, self.world_size
        of_model = self.model, self.tokens, self.layer
        return *size, self.direction, *of_model, self.widths, self.graph, self.interpreted, self.nodes

    @property
    def passed(self) -> bool:
        return self.gate == PASSED

    @property
    def failed(self) -> bool:
        """Return whether the variant ran and failed its check."""
        return not self.passed and not self.gate.startswith(NOT_RUN)


# Pattern and conversion for each kind of cell. The number of digits is bounded, so values are finite. int() alone would
# accept spaces, underscores and digits of any script.
_FLOAT = r"-?[0-9]{1,30}(\.[0-9]{1,30})?(e[+-]?[0-9]{1,2})?"
_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "str": (r"[^\0]*", lambda text: text[1:] if text[:1] == "'" and text[1:].startswith((*_FORMULA, "'")) else text),
    "int": ("[0-9]{1,18}", int),
    "float | None": (f"({_FLOAT})?", lambda text: float(text) if text else None),
    "tuple[float, ...]": (f"({_FLOAT}( {_FLOAT})*)?", lambda text: tuple(map(float, text.split()))),
    "tuple[int, ...]": ("([0-9]{1,18}( [0-9]{1,18})*)?", lambda text: tuple(map(int, text.split()))),
    "bool": ("True|False", "True".__eq__),
}
_WORDS = {
    "str": "text without zero bytes", "int": "a whole number", "float | None": "a number", "bool": "True or False",
    "tuple[float, ...]": "numbers with one space between them",
    "tuple[int, ...]": "whole numbers with one space between them",
}  # fmt: skip
# Annotations are strings here: `from __future__ import annotations`.
_KINDS: dict[str, str] = {field.name: str(field.type) for field in fields(Measurement)}
COLUMNS = tuple(_KINDS)
# Columns that older files lack, and one that they have: the share of what unfused took beyond the matmul.
_NEWER = (
    "rounds_ms", "launches", "speedup_vs_sequential", "hidden", "digest", "widths", "graph", "host_us", "late_rounds",
    "peak_bytes", "tokens_per_s", "roofline", "nodes", "cuda", "nccl", "nccl_env", "gpu_before", "gpu_after", "load",
)  # fmt: skip
_DROPPED = "overlap_efficiency"

# Fields that all timed rows of a case share, as they are from one interleaved run.
_ORIGIN = ("commit", "dirty", "digest", "python", "torch", "triton", "driver", "time_utc")
# Largest relative difference of numbers that are equal but for six digits, and what these digits do to a median.
_EQUAL, _DIGITS = 1e-3, 2e-5

# Valid names and ranges of numbers: outside them a row can be neither drawn nor compared.
_KNOWN = {"op": EVERY_OP, "direction": DIRECTIONS, "dtype": EVERY_DTYPE}
_LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("M", "N", "K", "world_size"), (1, 2**40)),
    **dict.fromkeys(("median_ms", "p20_ms", "p80_ms", "rounds_ms", "bound_ms"), (1e-9, 1e9)),
    **dict.fromkeys(("speedup_vs_unfused", "speedup_vs_sequential", "matmul_fraction", "roofline"), (1e-18, 1e18)),
    **dict.fromkeys(("tflops", "algbw_gbps", "busbw_gbps"), (0, 1e12)),
    **dict.fromkeys(("total_ms", "max_error", "error_ratio", "host_us", "peak_bytes", "load"), (0, math.inf)),
    **dict.fromkeys(("tokens_per_s",), (0, 1e18)),
}


def cell(value: object) -> str:
    """Return a value as CSV text: six digits, empty if not finite, and nothing that a spreadsheet evaluates."""
    if isinstance(value, tuple):
        return " ".join(map(cell, value))
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if not isinstance(value, str):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    # A bare carriage return would end the line for some readers.
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    # A leading apostrophe of the text is escaped too, so that reading removes exactly what writing added.
    return "'" + text if text.startswith((*_FORMULA, "'")) else text


def write(path: Path, rows: Iterable[Measurement]) -> None:
    """Replace `path` by these rows, atomically; folders are made as needed."""
    text = StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([cell(getattr(row, name)) for name in COLUMNS] for row in rows)
    replace(path, text.getvalue().encode())


def read(path: Path) -> list[Measurement]:
    """Return the rows of a file. ValueError names the place that `write` would not write. The file is not changed."""
    foreign = f"{path} is not a CSV file of results, as fusedtp sweep writes them"
    try:
        # A spreadsheet puts a byte order mark before the text.
        text = read_text(path, max_bytes=MAX_BYTES).removeprefix("\ufeff")
        reader = csv.reader(StringIO(text, newline=""), strict=True)
        header = tuple(next(reader, []))
        lines = [(reader.line_num, cells) for cells in reader if cells]
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{foreign}: {error}") from error
    known = [name for name in header if name != _DROPPED]
    if known != [name for name in COLUMNS if name in header or name not in _NEWER]:
        unlike = {
            "missing columns": [name for name in COLUMNS if name not in (*header, *_NEWER)],
            "unknown columns": [name[:80] for name in known if name not in COLUMNS],
        }
        told = [f"{what} {', '.join(names[:8])}{', ..' * (len(names) > 8)}" for what, names in unlike.items() if names]
        raise ValueError(f"{foreign}: {'; '.join(told) or 'columns in another order, or twice'}")
    rows: list[Measurement] = []
    found: dict[str, int] = {}
    for number, (line, cells) in enumerate(lines, 1):
        try:
            row = _row(header, cells)
        except ValueError as error:
            raise ValueError(f"{path}, line {line}, row {number}, column {error}") from None
        # As it is shown, where an escape sequence and its name look alike.
        key = visible("\n".join(map(str, (row.machine, *row.case, row.variant, row.predicted))))
        if (before := found.setdefault(key, number)) != number:
            raise ValueError(f"{path}, line {line}, row {number}: the same case and variant as row {before}")
        rows.append(row)
    by_case: dict[object, dict[int, Measurement]] = {}
    for number, row in enumerate(rows, 1):
        if row.median_ms is not None and not row.predicted:
            by_case.setdefault((row.machine, row.case), {})[number] = row
    for members in by_case.values():
        if wrong := _contradiction(members):
            number, text = wrong
            raise ValueError(f"{path}, line {lines[number - 1][0]}, row {number}, column {text}")
    return rows


def case_of(row: Measurement) -> Case | None:
    """Return the case of a row; None for a block of a model whose sizes are not here."""
    if row.op == "block" and row.model not in MODELS:
        return None
    size = row.op, row.M, row.N, row.K, row.dtype, row.world_size
    return Case(*size, row.seed, row.model, row.tokens, row.layer, row.widths)


def _contradiction(rows: Mapping[int, Measurement]) -> tuple[int, str] | None:
    # Return the number of a timed row that contradicts its own rounds or the other rows of its case, and how.
    from .intervals import Timing

    (first, base), *_ = rows.items()
    medians = {row.variant: row.median_ms for row in rows.values() if row.median_ms is not None}
    for number, row in rows.items():
        for name in _ORIGIN:
            if (own := getattr(row, name)) != (other := getattr(base, name)):
                return number, f"{name}: {own!r}, but {other!r} in row {first} of the same case: not one run"
        expected: dict[str, tuple[float, str]] = {}
        if row.rounds_ms:
            given = vars(Timing.of(row.rounds_ms))
            for name in ("median_ms", "p20_ms", "p80_ms", "total_ms"):
                expected[name] = given[name], f"its rounds give {given[name]:.6g}"
        case = case_of(row)
        for name, ratio in ratios(case, row.direction, row.variant, medians).items() if case else ():
            if ratio is not None:
                expected[name] = ratio, f"the medians of its case give {ratio:.6g}"
        for name, (value, why) in expected.items():
            own = getattr(row, name)
            if own is None:
                continue
            largest, equal = max(abs(own), abs(value)), _EQUAL
            if name == "hidden":
                # A quotient of differences of medians.
                matmul, sequential = medians.get("matmul") or medians["local"], medians[SEQUENTIAL]
                largest, equal = largest + 1, equal + _DIGITS * sequential / (sequential - matmul)
            if abs(own - value) > equal * largest:
                return number, f"{name}: {own:.6g}, but {why}"
    return None


def _row(names: Sequence[str], cells: Sequence[str]) -> Measurement:
    # A ValueError begins with the column's name.
    if len(cells) != len(names):
        raise ValueError(f"{names[min(len(cells), len(names) - 1)]}: {len(cells)} cells, not {len(names)}")
    values: dict[str, Any] = {}
    for name, text in zip(names, cells, strict=True):
        if name == _DROPPED:
            continue
        pattern, value_of = _READERS[_KINDS[name]]
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{name}: {text[:80]!r} is not {_WORDS[_KINDS[name]]}")
        value = values[name] = value_of(text)
        if name in _KNOWN and value not in _KNOWN[name]:
            raise ValueError(f"{name}: {text[:80]!r} is not one of {', '.join(_KNOWN[name])}")
        if name in _LIMITS and value is not None:
            least, most = _LIMITS[name]
            if not all(least <= number <= most for number in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(f"{name}: {text[:80]!r} is not from {least:g} to {most:g}")
    row = Measurement(**values)
    low, middle, high = row.p20_ms, row.median_ms, row.p80_ms
    if middle is not None and not (middle if low is None else low) <= middle <= (middle if high is None else high):
        raise ValueError(f"median_ms: {middle} is not between p20_ms {low} and p80_ms {high}")
    if row.rounds_ms and len(row.rounds_ms) != row.rounds:
        raise ValueError(f"rounds_ms: {len(row.rounds_ms)} times of {row.rounds} rounds")
    if row.launches and (len(row.launches) < 2 or min(row.launches) < 1 or sum(row.launches) != len(row.rounds_ms)):
        raise ValueError(
            f"launches: {cell(row.launches)} rounds in two launches or more, of {len(row.rounds_ms)} times"
        )
    if (middle is not None or row.rounds_ms) and not row.passed:
        raise ValueError(f"gate: {row.gate[:80]!r}, and yet there is a time")
    return row


def update(path: Path, rows: Sequence[Measurement]) -> list[Measurement]:
    """Replace the file's rows of the same machine and cases by `rows`; return all rows, old and new."""
    measured = {(row.machine, row.case) for row in rows}
    before = read(path) if path.exists() else []
    kept = [row for row in before if (row.machine, row.case) not in measured]
    together = [*kept, *rows]
    write(path, together)
    return together


# Variants that run in Triton's interpreter without a GPU.
KERNELS = ("fused", "own_matmul")
# Bytes on a link for each byte of a collective's whole buffer, over n ranks: nccl-tests' busbw / algbw.
_BUS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


@dataclass(frozen=True)
class Outcome:
    """The result of one job for one variant in one direction, the same on every rank."""

    variant: str
    direction: str
    verdict: Verdict | None = None
    timing: Timing | None = None
    path: str = ""
    threads: int = 0
    backend: str = ""
    not_run: str = ""
    peak_bytes: float | None = None
    graph: bool = False
    nodes: int = 1
    gpu_before: str = ""
    gpu_after: str = ""
    load: float | None = None

    @property
    def gate(self) -> str:
        if self.verdict is None:
            return NOT_RUN + self.not_run
        return self.verdict.error or PASSED


def ratios(case: Case, direction: str, variant: str, medians: Mapping[str, float]) -> dict[str, float | None]:
    """Return the columns of `variant`'s row that relate its median to the others; medians are in ms."""
    own, unfused, sequential, comm = (medians.get(name) for name in (variant, "unfused", SEQUENTIAL, "comm"))
    if not own:
        return {}
    matmul, n = medians.get("matmul") or medians.get("local"), case.world_size
    sent = traffic(case, direction) if n > 1 else []
    # A pass that sends nothing has only the matmul as its bound, and nothing to hide.
    bound = None if matmul is None else matmul if not sent else None if comm is None else max(matmul, comm)
    found: dict[str, float | None] = {"bound_ms": bound}
    if sent and (variant == "comm" or case.op in COLLECTIVES):
        # Bytes per ms are kB/s; 1e6 kB/s are 1 GB/s.
        found["algbw_gbps"] = sum(num_bytes for _, num_bytes in sent) / own / 1e6
        found["busbw_gbps"] = sum(num_bytes * _BUS[kind] * (n - 1) / n for kind, num_bytes in sent) / own / 1e6
    whole = variant not in ALONE
    if whole and unfused:
        found["speedup_vs_unfused"] = unfused / own
    if variant == "comm" or case.op in COLLECTIVES:
        return found
    found["tflops"] = flops(case, direction) / own / 1e9
    if (whole or variant == "own_matmul") and matmul:
        found["matmul_fraction"] = matmul / own
    if whole:
        found["tokens_per_s"] = case.M / own * 1e3
        found["roofline"] = bound and bound / own
    if whole and sequential:
        found["speedup_vs_sequential"] = sequential / own
        if sent and matmul and sequential > matmul:
            found["hidden"] = (sequential - own) / (sequential - matmul)
    return found


def origin(machine: Machine, layer: str = "") -> dict[str, Any]:
    """Return the columns that every file of measurements has: machine, versions, commit, digest and time."""
    about = asdict(machine)
    about["machine"] = about.pop("name")
    return about | {"digest": digest(machine.num_gpus, layer), "time_utc": now()}


def rows_of(case: Case, outcomes: Iterable[Outcome], machine: Machine) -> list[Measurement]:
    """Return the rows of a job's outcomes, with the ratios between them."""
    outcomes = list(outcomes)
    medians: dict[str, dict[str, float]] = {}
    for outcome in outcomes:
        if outcome.timing is not None:
            medians.setdefault(outcome.direction, {})[outcome.variant] = outcome.timing.median_ms
    shared = {name: value for name, value in vars(case).items() if name != "sizes"}
    shared |= origin(machine, case.op)
    shared |= gpu_software() if machine.num_gpus else {}
    rows = []
    for outcome in outcomes:
        timing, verdict = outcome.timing, outcome.verdict
        derived = ratios(case, outcome.direction, outcome.variant, medians.get(outcome.direction, {}))
        values = shared | derived | (vars(timing) if timing else {})
        values |= {
            name: getattr(outcome, name)
            for name in ("variant", "direction", "gate", "path", "threads", "backend", "peak_bytes", "graph", "nodes",
                         "gpu_before", "gpu_after", "load")
        }  # fmt: skip
        if verdict is not None and not verdict.error:
            values |= {"max_error": verdict.max_error, "error_ratio": verdict.error_ratio}
        interpreted = outcome.variant in KERNELS and verdict is not None and not machine.num_gpus
        rows.append(Measurement(**values, interpreted=interpreted))
    return rows


def now() -> str:
    """Return the current time in the format of rows."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
