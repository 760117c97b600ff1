"""C sources of this folder, compiled at first use by an installed C compiler, or by that of the `ziglang` package."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CORE = Path(__file__).parent / "core"
# The compiler from the test dependencies, for machines without one.
PACKAGED = (sys.executable, "-m", "ziglang", "cc")
# No floating-point contraction: where PTX rounds product and sum, both are rounded.
_CORE_FLAGS = ("-O3", "-march=native", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-sanitize=undefined", "-lm")


def command() -> list[str]:
    """Return the command of an installed C compiler. Raises RuntimeError if there is none."""
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang"):
        return list(PACKAGED)
    raise RuntimeError("the machine is compiled at first use: install a C compiler, or ziglang with pip")


def folder() -> Path:
    """Return the folder for compiled libraries. Only this user may write to it, as the libraries are loaded."""
    found = Path(tempfile.gettempdir()) / f"fusedtp-virtual-gpu-{os.getuid()}"
    found.mkdir(mode=0o700, exist_ok=True)
    state = found.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise RuntimeError(f"{found} must belong to this user alone")
    return found


def _processor() -> str:
    # -march=native code may not run on another processor that shares the folder.
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    return "".join(line for line in text.split("\n\n")[0].splitlines(True) if line.startswith(("flags", "Features")))


@functools.cache
def library(
    name: str, sources: tuple[Path, ...], flags: tuple[str, ...], read: tuple[Path, ...] = (), using: Sequence[str] = ()
) -> Path:
    """Compile a shared library `name`, in a folder named by the content of its sources, flags, compiler and processor.
    read: further files that the sources include.
    """
    using = list(using or command())
    version = subprocess.run([*using, "--version"], capture_output=True, check=True).stdout
    parts = [each.read_bytes() for each in (*sources, *read)]
    content = b"".join([*parts, version, " ".join([name, *using, *flags]).encode(), _processor().encode()])
    path = folder() / hashlib.sha256(content).hexdigest()[:24] / name
    if not path.exists():
        # Compile elsewhere and rename: several processes may do the same at once.
        path.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as beside:
            made = Path(beside) / name
            subprocess.run([*using, "-shared", "-fPIC", *map(str, sources), *flags, "-o", str(made)], check=True)
            made.replace(path)
    return path


def shared_object(using: Sequence[str] = ()) -> Path:
    """Compile the core of the machine that executes PTX."""
    return library("machine.so", (CORE / "machine.c",), _CORE_FLAGS, tuple(sorted(CORE.glob("*.h"))), tuple(using))
