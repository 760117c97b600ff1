"""C sources of this folder, compiled at first use by the C compiler at hand, or by that of the `ziglang` package."""

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
# The compiler of the test dependencies, for where the machine has none.
PACKAGED = (sys.executable, "-m", "ziglang", "cc")
# No contraction: a product and a sum that PTX rounds twice are rounded twice.
_CORE_FLAGS = ("-O3", "-march=native", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-sanitize=undefined", "-lm")


def command() -> list[str]:
    """The C compiler at hand. Raises RuntimeError where there is none."""
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang"):
        return list(PACKAGED)
    raise RuntimeError("the machine is compiled at first use: install a C compiler, or ziglang with pip")


def folder() -> Path:
    """The folder for what is compiled, this user's alone: nobody else may put a library there, as it is loaded."""
    found = Path(tempfile.gettempdir()) / f"fusedtp-virtual-gpu-{os.getuid()}"
    found.mkdir(mode=0o700, exist_ok=True)
    state = found.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise RuntimeError(f"{found} must belong to this user alone")
    return found


def _processor() -> str:
    # What is compiled for this processor may not run on another that shares the folder.
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    return "".join(line for line in text.split("\n\n")[0].splitlines(True) if line.startswith(("flags", "Features")))


@functools.cache
def library(
    name: str, sources: tuple[Path, ...], flags: tuple[str, ...], read: tuple[Path, ...] = (), using: Sequence[str] = ()
) -> Path:
    """A shared library `name` in a folder named by the content of its sources, its flags, the compiler and the
    processor. read: further files that the sources include.
    """
    using = list(using or command())
    version = subprocess.run([*using, "--version"], capture_output=True, check=True).stdout
    parts = [each.read_bytes() for each in (*sources, *read)]
    content = b"".join([*parts, version, " ".join([name, *using, *flags]).encode(), _processor().encode()])
    path = folder() / hashlib.sha256(content).hexdigest()[:24] / name
    if not path.exists():
        # Compiled beside and renamed: several processes may come at once.
        path.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as beside:
            made = Path(beside) / name
            subprocess.run([*using, "-shared", "-fPIC", *map(str, sources), *flags, "-o", str(made)], check=True)
            made.replace(path)
    return path


def shared_object(using: Sequence[str] = ()) -> Path:
    """The core of the machine that executes PTX."""
    return library("machine.so", (CORE / "machine.c",), _CORE_FLAGS, tuple(sorted(CORE.glob("*.h"))), tuple(using))
