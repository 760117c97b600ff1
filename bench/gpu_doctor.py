"""What `fusedtp doctor` says of the machine, kept beside its rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .cases import Item
from .gpu_rows import Run, found
from .rows import Outcome
from .timing import Verdict

ITEM = Item("doctor")
DOCTOR_SECONDS = 80.0


def examine(path: Path) -> list[Outcome]:
    """Write it to `path`; AssertionError with its last words where it fails or is late."""
    command = [sys.executable, "-X", "faulthandler", "-m", "fusedtp.bench.cli", "doctor"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOCTOR_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"doctor took more than {DOCTOR_SECONDS:g} s: {error.output!r}") from error
    assert done.returncode == 0, f"doctor ended with status {done.returncode}: {done.stderr[-2000:]}"
    path.write_text(done.stdout)
    print(done.stdout)
    return [found("doctor", Verdict(0.0, 0.0))]


def stage(run: Run) -> None:
    """Once a commit."""
    run.do(ITEM, lambda: examine(run.path.with_name("gpu-doctor.txt")))
