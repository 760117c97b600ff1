"""The machine's core, compiled at first use by the machine's C compiler, or by that of the `ziglang` package."""

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
from pathlib import Path

CORE = Path(__file__).parent / "core"
# The compiler of the test dependencies, for where the machine has none.
PACKAGED = (sys.executable, "-m", "ziglang", "cc")
# No contraction: a product and a sum that PTX rounds twice are rounded twice.
_FLAGS = (
    "-O3",
    "-march=native",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-sanitize=undefined",
    "-shared",
    "-fPIC",
    "-lm",
)


def command() -> list[str]:
    """The C compiler at hand. Raises RuntimeError where there is none."""
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang"):
        return list(PACKAGED)
    raise RuntimeError("the machine is compiled at first use: install a C compiler, or ziglang with pip")


def _folder() -> Path:
    # Nobody else may put a library there, as it is loaded.
    folder = Path(tempfile.gettempdir()) / f"fusedtp-emulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise RuntimeError(f"{folder} must belong to this user alone")
    return folder


def _processor() -> str:
    # What is compiled for this processor may not run on another that shares the folder.
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    return "".join(line for line in text.split("\n\n")[0].splitlines(True) if line.startswith(("flags", "Features")))


@functools.cache
def shared_object(compiler: tuple[str, ...] = ()) -> Path:
    """The compiled core, by the content of its sources, the compiler and the processor."""
    using = list(compiler or command())
    sources = sorted(CORE.iterdir())
    version = subprocess.run([*using, "--version"], capture_output=True, check=True).stdout
    parts = [each.read_bytes() for each in sources]
    content = b"".join([*parts, version, " ".join([*using, *_FLAGS]).encode(), _processor().encode()])
    path = _folder() / f"{hashlib.sha256(content).hexdigest()[:24]}.so"
    if not path.exists():
        # Compiled beside and renamed: several processes may come at once.
        with tempfile.TemporaryDirectory(dir=path.parent) as beside:
            made = Path(beside) / "machine.so"
            subprocess.run([*using, CORE / "machine.c", *_FLAGS, "-o", made], check=True)
            made.replace(path)
    return path
