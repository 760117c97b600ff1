"""Check and time the kernels on one GPU within ten minutes: `python -P -m fusedtp.bench.gpu`. See docs/gpu.md.

The command runs the items of `PLAN` in order, each in a child process with a time of its own. A child adds a row as
soon as a case is measured. A child that dies, as after an illegal memory access, is followed by a new one behind the
case that it died in. The run ends in time, and every item has a row.

Kernels are compiled first, by as many children as there are cores: they run the cases of all items inside
`only_loading`, which fills Triton's cache on disk.
"""

from __future__ import annotations

import contextlib
import csv
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import triton
import typer

from . import arguments
from .gpu_cases import COLUMNS, CUT, ERROR, MAX_ALIKE, NOT_REACHED, NOT_RUN, PASSED, ItemEnded, Rows, Run
from .gpu_items import PLAN
from .machine import describe
from .rank_main import die_with_parent
from .rows import now

SECONDS = 540.0
# How long timing waits for kernels to be compiled; what ending the run may take; what an item needs to begin.
LOADING_SECONDS, END_SECONDS, LEAST_SECONDS = 45.0, 5.0, 6.0
# Processes of one item.
MAX_STARTS = 3
KERNELS = "kernels"
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "FUSEDTP_TUNING": "off",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    # Deterministic mode, which poisons fresh memory, asks cuBLAS for it.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
}  # fmt: skip


def age() -> float:
    """Return the seconds since this process began: its imports are part of the run."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def child(item: str, out: Path, place: Path, *, first: int, share: tuple[int, int] | None, dry_run: bool) -> None:
    """Run an item's cases in this process, or compile a share of all items' kernels."""
    die_with_parent(os.getppid())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    told = place / f"{item}.case"
    if share is None:
        told.write_text("-1 beginning")
    if "FUSEDTP_SANITIZED" not in os.environ and not sys.stdin.readline():
        return
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    rows = Rows(out / f"gpu-{item}.csv", json.loads((place / "shared.json").read_text()))
    # Nobody asks where a child that compiles is.
    say = told.write_text if share is None else lambda text: None
    run, begin = Run(rows, item, first=first, share=share, dry_run=dry_run, say=say), time.monotonic()
    for run.item in [item] if share is None else [name for name, each in PLAN.items() if each.loads]:
        try:
            PLAN[run.item].work(run)
        except ItemEnded as error:
            rows.add(
                CUT, item=run.item, case=run.number, detail=f"{MAX_ALIKE} failures alike: {error}", dry_run=dry_run
            )
    found = f"{hits.count(False)} kernels compiled, {hits.count(True)} found, {time.monotonic() - begin:.0f} s"
    rows.add(item=item, op=KERNELS, detail=found, dry_run=dry_run)
    sys.stdout.flush()
    # What a context takes to be taken down is no item's time.
    os._exit(0)


class Child:
    """A process that has imported everything and waits for `go`. What it prints is added to `text`."""

    def __init__(self, command: Sequence[str], text: Path) -> None:
        env = os.environ | ENVIRONMENT | {"TRITON_INTERPRET": str(int(not torch.cuda.is_available()))}
        with text.open("a") as file:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True
            )

    def go(self) -> None:
        """Let it begin, unless it has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()

    def wait(self, seconds: float) -> int | None:
        """Return its exit status; None if it has none after so many seconds. Then its stacks are in the text."""
        try:
            return self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
            return None

    def end(self) -> None:
        """Kill it with all of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


class Conductor:
    """The parent: it runs items one after the other, and ends what is late. It launches nothing itself.

    program: the command of a child, without options.
    """

    def __init__(self, out: Path, seconds: float, *, dry_run: bool, commit: str, program: Sequence[str]) -> None:
        self._end = time.monotonic() + seconds - END_SECONDS
        self._out, self._dry_run, self._commit, self._program = out, dry_run, commit, program
        self._children: list[Child] = []
        self._rows: dict[str, Rows] = {}
        self._before: dict[str, int] = {}

    def run(self, items: Sequence[str]) -> Counter[str]:
        """Run the items; return how many rows there are by status."""
        arguments.folder(self._out, option="--out")
        with tempfile.TemporaryDirectory() as place:
            self._place = Path(place)
            try:
                return self._run_all(items)
            finally:
                for each in self._children:
                    each.end()

    def _child(self, item: str, *options: str) -> Child:
        more = ["--dry-run"] if self._dry_run else []
        places = ["--out", str(self._out), "--place", str(self._place)]
        made = Child([*self._program, "--inside", item, *places, *more, *options], self._out / f"gpu-{item}.txt")
        self._children.append(made)
        return made

    def _run_all(self, items: Sequence[str]) -> Counter[str]:
        compiles = torch.cuda.is_available() and any(PLAN[item].loads for item in items)
        count = len(os.sched_getaffinity(0)) if compiles else 0
        loading = [self._child(KERNELS, "--share", f"{i}/{count}") for i in range(count)]
        behind = self._child(items[0])
        self._open()
        for each in loading:
            each.go()
        for place, item in enumerate(items):
            current = behind
            if place + 1 < len(items):
                # It imports meanwhile.
                behind = self._child(items[place + 1])
            begin = self._ready(item, current)
            self._run(item, current, begin)
            self._tell(item, f"{time.monotonic() - begin:.0f} s")
            for each in loading if place == 0 else ():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    each.process.wait(max(0.0, min(begin + LOADING_SECONDS, self._end) - time.monotonic()))
        codes = Counter(each.process.poll() for each in loading)
        for code, times in codes.items():
            if code != 0:
                how = (CUT, "did not end") if code is None else (ERROR, f"ended with status {code}")
                self._add(KERNELS, how[0], detail=f"{times} of {count} processes {how[1]}")
        if not loading:
            self._add(KERNELS, NOT_RUN, detail="nothing is compiled beforehand")
        self._tell(KERNELS, f"{count} processes")
        return sum((self._counts(item) for item in (*items, KERNELS)), Counter[str]())

    def _open(self) -> None:
        here = describe()
        shared: dict[str, str] = {name: getattr(here, name) for name in ("gpu", "driver", "python", "torch", "triton")}
        shared |= {"run": now(), "machine": here.name, "commit": self._commit or here.commit}
        (self._place / "shared.json").write_text(json.dumps(shared))
        self._rows = {item: Rows(self._out / f"gpu-{item}.csv", shared) for item in (*PLAN, KERNELS)}
        self._before = {item: rows.path.stat().st_size for item, rows in self._rows.items()}
        print(*(f"{name} {value}" for name, value in shared.items() if value), sep=", ")

    def _add(self, item: str, status: str, **values: object) -> None:
        self._rows[item].add(status, item=item, dry_run=self._dry_run, **values)

    def _ready(self, item: str, current: Child) -> float:
        # When the child has imported everything: what that takes on a machine that has just started is no item's time.
        told = self._place / f"{item}.case"
        while not told.exists() and current.process.poll() is None and time.monotonic() < self._end:
            time.sleep(0.05)
        return time.monotonic()

    def _run(self, item: str, current: Child, begin: float) -> None:
        end = min(begin + PLAN[item].seconds, self._end)
        if end - begin < LEAST_SECONDS:
            self._add(item, NOT_REACHED, detail="the run's time is over")
            return
        for start in range(1, MAX_STARTS + 1):
            current.go()
            code = current.wait(end - time.monotonic())
            current.end()
            if code == 0:
                return
            told = self._place / f"{item}.case"
            number, _, case = (told.read_text() if told.exists() else "-1 importing").partition(" ")
            # Nothing, where it was killed while it wrote.
            number = number or "-1"
            where = {"case": int(number), "op": case}
            if code is None:
                self._add(item, CUT, detail=f"after {time.monotonic() - begin:.0f} s", **where)
                return
            how = signal.Signals(-code).name if code < 0 else f"status {code}"
            self._add(item, ERROR, detail=f"its process died: {how}", **where)
            if start < MAX_STARTS and end - time.monotonic() > LEAST_SECONDS:
                current = self._child(item, "--first", str(int(number) + 1))
            else:
                self._add(item, CUT, detail=f"its process died {start} times", **where)
                return

    def _counts(self, item: str) -> Counter[str]:
        with self._rows[item].path.open() as file:
            file.seek(self._before[item])
            return Counter(row["status"] for row in csv.DictReader(file, COLUMNS))

    def _tell(self, item: str, how: str) -> None:
        counts = ", ".join(f"{count} {status}" for status, count in self._counts(item).items())
        print(f"{item:9} {counts}; {how}; {self._rows[item].path}", flush=True)


def gpu(
    list_: Annotated[bool, typer.Option("--list", help="Show the plan.")] = False,
    seconds: Annotated[float, typer.Option(help="Time of the whole run.")] = SECONDS,
    out: Annotated[Path, typer.Option(help="Folder for rows and texts, which are added to.")] = Path("gpu-rows"),
    item: Annotated[list[str] | None, typer.Option(help="Only this item; may be repeated.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Small sizes, two rounds. Without a GPU kernels are interpreted.")
    ] = False,
    commit: Annotated[str, typer.Option(help="The rows' commit, where no checkout says it.")] = "",
    inside: Annotated[str, typer.Option(hidden=True)] = "",
    place: Annotated[Path, typer.Option(hidden=True)] = Path(),
    first: Annotated[int, typer.Option(hidden=True)] = 0,
    share: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Check and time the kernels on one GPU within ten minutes, the most telling first."""
    if inside:
        i, _, count = share.partition("/")
        child(inside, out, place, first=first, share=(int(i), int(count)) if share else None, dry_run=dry_run)
        return
    items = arguments.names(",".join(item or PLAN), tuple(PLAN), "--item")
    if list_:
        print(f"{'s':>4}  {'item':9} what; rows")
        for name in items:
            print(f"{PLAN[name].seconds:4.0f}  {name:9} {PLAN[name].what}; {out / f'gpu-{name}.csv'}")
        return
    if not torch.cuda.is_available() and not dry_run:
        raise typer.BadParameter("this needs a CUDA device, and torch finds none: --dry-run needs none")
    program = (sys.executable, "-P", "-m", "fusedtp.bench.gpu")
    counts = Conductor(out, seconds - age(), dry_run=dry_run, commit=commit, program=program).run(items)
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if set(counts) - {PASSED, NOT_RUN}:
        raise typer.Exit(1)


if __name__ == "__main__":
    arguments.run(gpu)
