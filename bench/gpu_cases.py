"""Cases of the GPU command (`bench.gpu`): check a launch, time it beside a baseline, add a row at once.

A failed check is WRONG in a row, any other exception ERROR, and neither costs the other variants their rows.
"""

from __future__ import annotations

import csv
import faulthandler
import io
import itertools
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from fusedtp.kernels.loading import only_loading

from . import preset
from .operands import device_here
from .oracle import accumulate_in_float32
from .ranks import RankError, tell
from .store import cell, now
from .timing import measure

PASSED, WRONG, ERROR, NOT_RUN, CUT, NOT_REACHED = "passed", "WRONG", "ERROR", "not run", "cut", "not reached"
# A case that takes longer ends its process; the next process continues after the case.
CASE_SECONDS = 60.0
# Number of equal failures that end an item.
MAX_ALIKE = 3
# No size of a dry run is larger.
DRY_SIZE = 256

# Columns of a row. Times are in ms, for passed rows only. detail: the error, or the answer. baseline_ms: the first
# variant's median in the same interleaved rounds. error_ratio: the largest error over the allowed error.
MEASURED = "error", "error_ratio", "median_ms", "p20_ms", "p80_ms", "baseline_ms", "rounds", "tflops", "gbps"
COLUMNS = (
    "run", "item", "case", "op", "variant", "M", "N", "K", "dtype", "world_size", "status", "detail", *MEASURED,
    "dry_run", "machine", "gpu", "driver", "python", "torch", "triton", "commit", "time_utc",
)  # fmt: skip

Size: TypeAlias = tuple[int, int, int]  # M, N, K as one rank multiplies them
Checked: TypeAlias = tuple[float, float]  # largest error, largest error / allowed error


class RowsFile:
    """The rows of one item: a CSV file to which each row is appended at once. shared: columns equal in all rows."""

    def __init__(self, path: Path, shared: Mapping[str, object]) -> None:
        self.path, self.shared = path, shared
        header = ",".join(COLUMNS) + "\n"
        if path.exists() and not path.read_text().startswith(header):
            path.rename(path.with_suffix(f".{time.time_ns()}.csv"))
        if not path.exists():
            path.write_text(header)

    def add(self, status: str = PASSED, **values: object) -> None:
        """Append a row, and print a short form."""
        row = {**self.shared, "status": status, "time_utc": now(), **values}
        assert not row.keys() - set(COLUMNS), row
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow([cell(row.get(name)) for name in COLUMNS])
        with self.path.open("a") as file:
            file.write(text.getvalue())
        print(status, *(row[name] for name in ("op", "variant", "M", "N", "K", "dtype", "median_ms", "detail")
                        if row.get(name)))  # fmt: skip


class Variant(NamedTuple):
    """A launch and the check of its result.

    - arenas: their waits are bounded during the check.
    - num_bytes: bytes moved, for a launch without a matmul.
    """

    launch: Callable[[], object]
    check: Callable[[], Checked] = lambda: (0.0, 0.0)
    arenas: preset.Arenas | None = None
    num_bytes: int = 0


Variants: TypeAlias = dict[str, Variant]


class ItemEnded(Exception):
    """An item reached its limit of equal failures."""


class Run:
    """One process's work: the cases of an item from `first` on.

    share: (i, n) of a process that only compiles, every n-th case from the i-th on.
    """

    def __init__(
        self, rows: RowsFile, item: str, *, first: int = 0, share: tuple[int, int] | None = None, dry_run: bool = False
    ) -> None:
        self.rows, self.item, self.share, self.dry_run, self.device = rows, item, share, dry_run, device_here()
        self.number, self._first = -1, first
        self._alike: Counter[str] = Counter()
        self._seen: set[object] = set()
        accumulate_in_float32()

    def _attempt(self, work: Callable[[dict[str, Any]], object], **shape: object) -> None:
        # Call `work` with the columns of a case, if the case is new and in this process's share. An exception becomes a
        # row.
        key = (self.item, *shape.values())
        if key in self._seen:
            return
        self._seen.add(key)
        self.number += 1
        if self.number < self._first or (self.share and self.number % self.share[1] != self.share[0]):
            return
        tell(f"{self.number} {' '.join(map(str, key[1:]))}")
        columns = {"item": self.item, "case": self.number, "dry_run": self.dry_run, **shape}
        if self.share is None:
            faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        try:
            work(columns)
        except ItemEnded:
            raise
        except Exception as error:
            self.failed(columns, error)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def failed(self, columns: Mapping[str, Any], error: Exception) -> None:
        """Add the row of a failed check, or of another exception; print the traceback.

        ItemEnded after `MAX_ALIKE` failures that differ only in numbers, SystemExit if the device is lost.
        """
        # The cause of a RankError is the exception of one rank.
        cause = error.__cause__ if isinstance(error, RankError) and error.__cause__ else error
        wrong = isinstance(cause, AssertionError)
        text = (str(cause).strip() or "no message").splitlines()[0][:400]
        detail = text if wrong else f"{type(cause).__name__}: {text}"
        self.rows.add(WRONG if wrong else ERROR, detail=detail, **columns)
        traceback.print_exception(error)
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as lost:
                raise SystemExit(f"the device takes no more work from this process: {lost}") from error
        kind = re.sub(r"[0-9.e+-]*[0-9]", "#", detail)
        self._alike[kind] += 1
        if self._alike[kind] >= MAX_ALIKE:
            raise ItemEnded(detail)

    def case(
        self, op: str, size: Size, dtype: str, make: Callable[..., Variants], *, world_size: int = 1,
        seconds: float = 0.6, launches: int = 1, timed: bool = True,
    ) -> None:  # fmt: skip
        """Check each variant that `make(M, N, K, seed)` returns, then time two draws of it in turns.

        The first variant is the baseline: it is timed alone, and its row added, before another variant is launched.
        """
        M, N, K = (min(n, DRY_SIZE) for n in size) if self.dry_run else size

        def work(columns: dict[str, Any]) -> None:
            if self.share is not None:
                with only_loading():
                    for variant in make(M, N, K, 0).values():
                        variant.launch()
                # One process for each core shares the device's memory.
                torch.cuda.empty_cache()
                return
            draws = [make(M, N, K, seed) for seed in range(2 if timed else 1)]
            checked: dict[str, Checked] = {}

            def add(names: Sequence[str]) -> None:
                times = self._timed(draws, list(checked), seconds, launches) if timed else {}
                for name in names:
                    values: dict[str, Any] = dict(zip(MEASURED, checked[name], strict=False))
                    if (median := times[name]["median_ms"] if name in times else 0.0) > 0:
                        num_bytes = draws[0][name].num_bytes
                        rate = "gbps" if num_bytes else "tflops"
                        values |= times[name] | {rate: (num_bytes or 2e-3 * M * N * K) / median / 1e6}
                        if name != first and first in times:
                            values["baseline_ms"] = times[first]["median_ms"]
                    self.rows.add(variant=name, **columns, **values)

            first, *others = draws[0]
            for name, variant in draws[0].items():
                try:
                    checked[name] = self._checked(variant)
                except Exception as error:
                    self.failed(columns | {"variant": name}, error)
                if name == first and first in checked:
                    add([first])
            if right := [name for name in others if name in checked]:
                add(right)

        self._attempt(work, op=op, M=M, N=N, K=K, dtype=dtype, world_size=world_size)

    def _checked(self, variant: Variant) -> Checked:
        if variant.arenas is None:
            variant.launch()
        else:
            variant.arenas.run(variant.launch)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return variant.check()

    def _timed(
        self, draws: Sequence[Variants], names: Sequence[str], seconds: float, launches: int
    ) -> dict[str, dict[str, Any]]:
        turns = {name: itertools.cycle([draw[name].launch for draw in draws]) for name in names}
        calls = {name: partial(lambda turn: next(turn)(), turn) for name, turn in turns.items()}
        rounds = 2 if self.dry_run else None
        times = measure(calls, None, self.device, seconds=seconds, rounds=rounds, launches=launches)
        return {name: {each: vars(found)[each] for each in MEASURED if hasattr(found, each)}
                for name, found in times.items()}  # fmt: skip

    def ask(self, op: str, answer: Callable[[], object], **shape: object) -> None:
        """Add a row with the text of `answer()`, unless this process only compiles."""
        if self.share is None:
            self._attempt(lambda columns: self.rows.add(detail=str(answer())[:2000], **columns), op=op, **shape)
