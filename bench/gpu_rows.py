"""What a stage of `bench.gpu` has found, written at once: an item is checked, timed and kept before the next begins.

Rows lie in results/<machine>/gpu-<stage>.csv. An item that passed at this commit, with these versions of
torch and Triton, is not measured again; one that failed is, by the next command. It is down as "did not end" while it
runs, so a process that dies leaves a row that says where.
"""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import itertools
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from . import store
from .cases import Item
from .machine import SOURCES, Machine, describe
from .rows import Outcome, Ratios, rows_of
from .store import Row
from .timing import Timing, Verdict, measure

BEGUN = "did not end"
EMULATED = "emulated: interpreted kernels at tiny sizes, nothing measured"
# Of an item that nothing else bounds.
ITEM_SECONDS = 90.0
# How a stage's process ends, added up; a signal or Python's own 1 is taken for LOST.
WRONG, LEFT_OVER, LOST = 16, 32, 64


def found(variant: str, verdict: Verdict, timing: Timing | None = None, path: str = "", **derived: Any) -> Outcome:
    """One variant of an item. derived: columns of `Ratios`."""
    return Outcome(variant, "forward", verdict, timing, path, derived=Ratios(**derived))


def time_alone(variants: Mapping[str, Sequence[Callable[[], object]]], run: Run, seconds: float) -> dict[str, Timing]:
    """The times of variants, whose calls are the same on different inputs and take turns; one round of a dry run."""
    turns = {name: itertools.cycle(calls) for name, calls in variants.items()}
    runners = {name: functools.partial(lambda calls: next(calls)(), calls) for name, calls in turns.items()}
    return measure(runners, None, run.device, seconds=seconds, rounds=1 if run.emulate else None)


class DeviceLost(RuntimeError):
    """The device takes no more work from this process."""


def sources() -> str:
    """A digest of the files that run: what names them where no commit does."""
    digest = hashlib.sha256()
    for name in SOURCES:
        (at,) = import_module(name if name == "fusedtp" else f"fusedtp.{name}").__path__
        for path in sorted(Path(at).rglob("*.py")):
            parts = path.relative_to(at).parts
            # Installed, the first of the folders holds the others.
            if name != "fusedtp" or parts[0] not in SOURCES:
                digest.update("/".join((name, *parts)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def machine_here(*, emulate: bool) -> Machine:
    """This machine and what runs on it: the commit, or the digest of the files where they are not those of one."""
    here = describe()
    if here.dirty or here.commit.startswith("version "):
        here = replace(here, commit=f"{here.commit} files {sources()}")
    return replace(here, name="emulated", links=EMULATED) if emulate else here


class Run:
    """One process of a stage: where its rows go, what it need not do, and how long it has."""

    def __init__(
        self, path: Path, device: torch.device, machine: Machine, seconds: float, *, since: str = "",
        watched: bool = False, say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        """since: what has failed later than that is not tried again. watched: the process ends with a late item."""
        self.path, self.device, self.machine = path, device, machine
        self.emulate = machine.name == "emulated"
        self.outcome = 0
        self._deadline, self._since, self._watched, self._say = time.monotonic() + seconds, since, watched, say

    def left(self) -> float:
        """Seconds until this process should end."""
        return self._deadline - time.monotonic()

    def rows(self) -> list[Row]:
        """What is kept of this stage, at this commit with these versions of torch and Triton."""
        kept, here = store.read(self.path, of_ops=False) if self.path.exists() else [], self.machine
        of = here.commit, here.name, here.torch, here.triton
        return [row for row in kept if (row.commit, row.machine, row.torch, row.triton) == of]

    def do_all(
        self, items: Sequence[Item], work: Callable[[Item, Run], Sequence[Outcome] | Sequence[Row]], *,
        needs: float = 20.0, most: float = ITEM_SECONDS,
    ) -> None:  # fmt: skip
        """Every item's work, which is given the item and this."""
        for item in items:
            self.do(item, functools.partial(work, item, self), needs=needs, most=most)

    def do(
        self, item: Item, work: Callable[[], Sequence[Outcome] | Sequence[Row]], *, needs: float = 20.0,
        most: float = ITEM_SECONDS,
    ) -> None:  # fmt: skip
        """`work`, unless its rows are there or fewer than `needs` seconds are left. Raises only `DeviceLost`.

        After `most` seconds the process shows its stacks and ends, if it is watched.
        """
        begun = self._rows(item, [found("begun", Verdict(error=BEGUN))])
        key = begun[0].case
        there = [row for row in self.rows() if row.case == key]
        if any(row.passed or (row.time_utc >= self._since and self._since) for row in there):
            self._say(f"have      {item}")
            # One that this command has tried, in a process that ended: it counts as wrong still.
            self.outcome |= 0 if all(row.passed for row in there) else WRONG
            return
        if self.left() < needs:
            self._say(f"left over {item}")
            self.outcome |= LEFT_OVER
            return
        store.update(self.path, begun, of_ops=False)
        begin, error = time.monotonic(), None
        if self._watched:
            faulthandler.dump_traceback_later(min(most, max(1.0, self.left())), exit=True)
        try:
            rows = self._rows(item, work())
        except Exception as raised:
            error = raised
            text = str(raised) if isinstance(raised, AssertionError) else f"{type(raised).__name__}: {raised}"
            rows = self._rows(item, [found("none", Verdict(error=text or type(raised).__name__))])
        finally:
            if self._watched:
                faulthandler.cancel_dump_traceback_later()
        store.update(self.path, rows, of_ops=False)
        self._tell(item, rows, time.monotonic() - begin)
        if error is not None and not isinstance(error, AssertionError):
            self._say("".join(traceback.format_exception(error)))
        if error is not None:
            self._still_there()

    def _tell(self, item: Item, rows: Sequence[Row], seconds: float) -> None:
        wrong = [row for row in rows if not row.passed]
        self.outcome |= WRONG if wrong else 0
        times = "".join(f"  {row.variant} {row.median_ms:.4g} ms" for row in rows if row.median_ms is not None)
        self._say(f"{'WRONG' if wrong else 'right':9} {item}{times}  ({seconds:.1f} s)")
        for row in wrong:
            self._say(f"          {row.variant}: {row.gate}")

    def _still_there(self) -> None:
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
            torch.zeros(1, device=self.device).item()
        except RuntimeError as error:
            raise DeviceLost(str(error)) from error

    def _rows(self, item: Item, made: Sequence[Outcome] | Sequence[Row]) -> list[Row]:
        rows = [
            row for each in made for row in ([each] if isinstance(each, Row) else rows_of(item, [each], self.machine))
        ]
        if not self.emulate:
            return rows
        paths = ["; ".join(filter(None, (row.path, EMULATED))) for row in rows]
        return [replace(row, interpreted=True, path=path) for row, path in zip(rows, paths, strict=True)]
