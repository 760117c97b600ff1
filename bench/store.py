"""Rows: one measurement each, with everything needed to judge it, kept as CSV under results/<machine>/.

A file is only ever replaced as a whole (written beside, then renamed) and only after what is there was read: a file
that is malformed, or not ours, is named in the error and left as it is. Measuring a case again replaces all rows of
that case, so the rows that are compared with each other come from one interleaved run.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

from fusedtp.files import read_text

PASSED = "passed"
# how the gate of a variant begins that cannot run here; the reason follows
NOT_RUN = "not run: "
# a few hundred thousand rows
MAX_BYTES = 64 << 20
_INT = re.compile(r"[0-9]{1,18}")
_FLOAT = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]{1,2})?")
# what a spreadsheet takes for the beginning of a formula
_FORMULA = ("=", "+", "-", "@", "\t", "\r")

CaseKey: TypeAlias = tuple[str, int, int, int, str, int, str, str, int, str, bool]


@dataclass(frozen=True)
class Row:
    """One variant of one case in one direction. Times in ms; None where there is no number.

    direction: forward, backward or both (one after the other, timed together). model, tokens, layer: the transformer
    block that the case is a matmul of; empty and 0 for a case of its own. variant: matmul and comm (each alone: the
    bounds), own_matmul (our kernel with every flag already raised), unfused, decomposed, fused, auto, and the
    baselines of others. speedup_vs_unfused is the ratio of medians in this run, matmul_fraction the matmul's median
    over this one's. tflops: a rank's floating-point rate. algbw_gbps, busbw_gbps: of `comm`, by nccl-tests'
    definitions. ceiling_ms: the longer of matmul and comm. overlap_efficiency: the part of what the unfused run adds to
    the matmul that is hidden. gate: "passed", "not run: " and the reason, or what is wrong; only what passed has a
    number. error_ratio: the largest error over what rounding may leave. interpreted: ran in Triton's interpreter,
    checked and not timed. predicted: from a model, not a clock.
    """

    op: str
    variant: str
    M: int
    N: int
    K: int
    dtype: str
    world_size: int
    direction: str
    model: str
    tokens: int
    layer: str
    median_ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    total_ms: float | None
    rounds: int
    speedup_vs_unfused: float | None
    matmul_fraction: float | None
    tflops: float | None
    algbw_gbps: float | None
    busbw_gbps: float | None
    ceiling_ms: float | None
    overlap_efficiency: float | None
    gate: str
    max_error: float | None
    error_ratio: float | None
    interpreted: bool
    predicted: bool
    path: str
    seed: int
    machine: str
    cpu: str
    cores: int
    gpu: str
    num_gpus: int
    links: str
    driver: str
    threads: int
    backend: str
    python: str
    torch: str
    triton: str
    commit: str
    dirty: bool
    time_utc: str

    @property
    def case(self) -> CaseKey:
        """What rows compared with each other share."""
        size = self.op, self.M, self.N, self.K, self.dtype, self.world_size
        return *size, self.direction, self.model, self.tokens, self.layer, self.interpreted

    @property
    def passed(self) -> bool:
        return self.gate == PASSED

    @property
    def failed(self) -> bool:
        """Whether it ran and was refused."""
        return not self.passed and not self.gate.startswith(NOT_RUN)


def _bool(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(text)
    return text == "True"


def _text(text: str) -> str:
    if "\0" in text:
        raise ValueError(text)
    return text[1:] if text.startswith("'") and text[1:].startswith((*_FORMULA, "'")) else text


def _int(text: str) -> int:
    # int() takes spaces, underscores and digits of any script as well
    if not _INT.fullmatch(text):
        raise ValueError(text)
    return int(text)


def _optional(text: str) -> float | None:
    if text and not _FLOAT.fullmatch(text):
        raise ValueError(text)
    return float(text) if text else None


_READERS: dict[str, Callable[[str], Any]] = {
    "str": _text,
    "int": _int,
    "float | None": _optional,
    "bool": _bool,
}
# annotations are strings here: `from __future__ import annotations`
_KINDS: dict[str, str] = {field.name: str(field.type) for field in fields(Row)}
COLUMNS = tuple(_KINDS)


def escaped(text: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    # a bare carriage return would end the line for some readers
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    # an apostrophe of the text's own is escaped too, so that reading takes away exactly what writing added
    return "'" + text if text.startswith((*_FORMULA, "'")) else text


def _cell(value: object, kind: str) -> str:
    # what is not finite is no number either
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if kind == "str":
        return escaped(str(value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Replace `path` by these rows, atomically; folders are made as needed."""
    import pandas as pd

    cells = [[_cell(getattr(row, name), kind) for name, kind in _KINDS.items()] for row in rows]
    replace(path, pd.DataFrame(cells, columns=list(COLUMNS), dtype=str).to_csv(index=False).encode())


def replace(path: Path, content: bytes) -> None:
    """Put `content` at `path` so that a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's files are private; these are to be read by others like any file written here
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def read(path: Path) -> list[Row]:
    """The rows of a file, or ValueError saying where it is not what `write` writes. The file is not touched."""
    import pandas as pd

    try:
        text = read_text(path, max_bytes=MAX_BYTES)
        table = pd.read_csv(StringIO(text), dtype=str, keep_default_na=False, na_filter=False)
    except (ValueError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"{path} is not a table of sweep rows: {error}; move it away to write a new one") from error
    if tuple(table.columns) != COLUMNS:
        missing = [name for name in COLUMNS if name not in table.columns]
        foreign = [str(name) for name in table.columns if name not in COLUMNS]
        what = f"columns missing: {missing}, not known: {foreign}" if missing or foreign else "columns in another order"
        raise ValueError(f"{path} is not a table of sweep rows ({what}); move it away to write a new one")
    rows = []
    for line, cells in enumerate(table.itertuples(index=False, name=None)):
        values = {}
        for (name, kind), cell in zip(_KINDS.items(), cells, strict=True):
            try:
                values[name] = _READERS[kind](cell)
            except (ValueError, TypeError):
                raise ValueError(f"{path}, row {line + 1}, column {name}: {cell[:80]!r} is not {kind}") from None
        rows.append(Row(**values))
    return rows


def update(path: Path, rows: Sequence[Row]) -> list[Row]:
    """Write `rows` into the file in place of its rows of the same cases; all its rows, old and new."""
    measured = {row.case for row in rows}
    kept = [row for row in read(path) if row.case not in measured] if path.exists() else []
    together = [*kept, *rows]
    write(path, together)
    return together
