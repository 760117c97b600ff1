"""Randomly mutated files: refused with file and place, or read correctly; no traceback, no hang.

Ten mutations of each kind here, 1,000 with FUSEDTP_SOAK=large (nox -s soak). Tables are made of readable files.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fusedtp.bench import cases, compare, report, store
from fusedtp.bench.cli_tune import show_table
from fusedtp.bench.store import Measurement
from fusedtp.choose import tuning
from fusedtp.op import OPS

from .harness import LARGE
from .mutations import of_bytes, of_cell, of_json

MakeRow = Callable[..., Measurement]

EXAMPLES = 1000 if LARGE else 10
SECONDS = 60


# Errors about a JSON file as a whole, which name no key.
WHOLE = ("the whole must be", "brackets in brackets", "is there twice", "not a regular file")
KEY = (r"[\w\])'}] (is missing|is not known|must be|is empty|has no|is already)", *WHOLE)


class TookTooLong(BaseException):
    """No error handler catches this exception."""


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    def too_long(*_: object) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, too_long)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def console() -> Console:
    return Console(file=StringIO(), width=180, markup=False, emoji=False)


def refused(error: str, path: Path, *place: str) -> None:
    """Check that the error names the file, and a line, column or key in it."""
    assert str(path) in error
    assert len(error) < 2000, len(error)
    assert any(re.search(each, error) for each in (r"\bline \d", *place)), error


def taken(
    path: Path, how: Callable[..., Any], read: Callable[[Path], Any], is_free: Callable[[bytes, Any], bool],
    places: tuple[str, ...] = KEY,
) -> Iterator[Any]:  # fmt: skip
    """Mutate the file again and again; yield the content read, or None if refused. Each mutation has its own timeout.

    A mutated value may only be accepted if it is free.
    """
    content = path.read_bytes()
    for number in range(EXAMPLES):
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        made = how(content, random.Random(f"{path.name} {how.__name__}/{number}"))
        made, place = (made, ()) if isinstance(made, bytes) else made
        path.write_bytes(made)
        try:
            found = read(path)
        except ValueError as error:
            refused(str(error), path, *places)
            yield None
        else:
            assert not place or is_free(made, place), f"{number}: {place} of {made!r}"
            yield found


def tuning_table() -> bytes:
    ms = {"unfused": 2.0, "decomposed": 1.0}
    noise = {name: 0.9 * ms for name, ms in ms.items()}, {name: 1.1 * ms for name, ms in ms.items()}, ms
    sizes = [(op, n, "float32", 256, 512, 64 if "matmul" in op else 0) for op in OPS for n in (2, 4)]
    samples = [tuning.Sample(*size, ms, *noise) for size in sizes]
    rates = {"matrix_tflops": {"float32": 0.1, "bfloat16": 0.2}, "memory_gbps": 10.0, "host_us": 100.0}
    rates |= {"flag_us": 20.0, "collective_start_us": 1000.0, "collective_gbps": 1.0}
    return tuning.dump(tuning.Table(tuning.identity(), tuple(samples), {2: rates, 4: rates})).encode()


def read_table(path: Path) -> tuple[tuning.Table, str]:
    table, text, why = tuning.load(path)
    if table is None:
        raise ValueError(why)
    return table, text


def left_out(made: bytes, place: tuple[Any, ...]) -> bool:
    """Return whether the mutation removed a schedule, dtype or number of ranks, which leaves a smaller valid table."""
    holder = json.loads(made)
    for key in place[:-1]:
        holder = holder[key]
    noise = ("p25", "p75", "slower")
    is_optional = place[-2] in ("ms", "matrix_tflops", "rates", *noise) or place[-1] in noise
    return is_optional and place[-1] not in holder


def decided(table: tuning.Table) -> None:
    """Check that every op is decided, whatever the table says."""
    sizes = ((0, 5), (1, 1), (300, 7), (1 << 20, 1 << 15))
    for op, dtype, n, size in itertools.product(OPS, ("float32", "bfloat16"), (2, 7, 256), sizes):
        made = tuning.decide(table, None, op, dtype, n, *size, ("decomposed", "unfused"))
        assert made is None or made[0] in ("decomposed", "unfused")
        assert made is None or not re.search(r"\b(nan|inf)\b", made[1]), made
    show_table(table, console())


@pytest.mark.parametrize("how", [of_bytes, of_json])
def test_tuning_tables(how: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, count = tmp_path / "tuning.json", 0
    path.write_bytes(tuning_table())
    monkeypatch.setenv("FUSEDTP_TUNING", str(path))
    for found in taken(path, how, read_table, left_out, (*KEY, "measured with")):
        if found is not None:
            table, text = found
            assert tuning.parse(tuning.dump(table)) == table == tuning.parse(text)
            decided(table)
            count += 1
    assert count < EXAMPLES / 2


def rows(make_row: MakeRow) -> list[Measurement]:
    found = []
    for direction in ("forward", "backward"):
        for M in (256, 1024):
            at = {"M": M, "direction": direction, "cpu": 'Some, "CPU"', "cores": 2, "torch": "2.13", "commit": "01"}
            for variant, ms in (("matmul", 1.0), ("comm", 0.5), ("unfused", 2.0), ("decomposed", 1.4)):
                whole = {"speedup_vs_unfused": 2.0 / ms, "matmul_fraction": 1 / ms}
                found.append(make_row(variant=variant, median_ms=ms, **at, **whole))
            found.append(make_row(variant="fused", interpreted=True, error_ratio=0.1, max_error=0.01, **at))
            found.append(make_row(variant="dtensor", gate="3 of 4 elements\nare wrong", **at))
            found.append(make_row(variant="async_tp", gate=f"{store.NOT_RUN}no GPU", **at))
    found += [make_row(model="llama3-8b", layer=layer, tokens=64, median_ms=3.0) for layer in ("mlp up", "mlp down")]
    return [*found, make_row(variant="unfused", predicted=True, median_ms=2.5, path="predicted for [h100]")]


@pytest.mark.parametrize("how", [of_bytes, of_cell])
def test_rows_at_random(how: Callable[..., Any], make_row: MakeRow, tmp_path: Path) -> None:
    right, path = rows(make_row), tmp_path / "sweep.csv"
    store.write(path, right)
    texts = {field.name for field in fields(Measurement) if str(field.type) == "str"} - {"op", "direction", "dtype"}
    places = ("missing columns", "unknown columns", "another order", "csv", "newline")
    for found in taken(path, how, store.read, lambda _, column: column in texts, places):
        if found is not None:
            used(found, right)


def used(found: list[Measurement], right: list[Measurement]) -> None:
    """Make every table of the rows."""
    assert all(row.op in cases.OPS and row.direction in cases.DIRECTIONS for row in found)
    times = [row.median_ms for row in found if row.median_ms is not None]
    assert all(math.isfinite(time) and time > 0 for time in times)
    report.show(found, console())
    for absolute in (False, True):
        for pair in ((found, right), (right, found)):
            changes = compare.compare(*pair, absolute=absolute)
            compare.show(changes, console(), absolute=absolute, confidence=0.95, everything=True)
