"""What a number was measured on: the machine, the versions and the commit that every row carries."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import unquote, urlparse

# the checkout's folders of which the package is made
SOURCES = ("fusedtp", "kernels", "bench")


@dataclass(frozen=True)
class Machine:
    """`name` tells machines apart in paths and comparisons: kind, model, number of cores or GPUs."""

    name: str
    cpu: str
    cores: int
    gpu: str
    num_gpus: int
    python: str
    torch: str
    triton: str
    commit: str
    dirty: bool


def describe() -> Machine:
    """This machine and this checkout."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu = torch.cuda.get_device_name(0) if num_gpus else ""
    cpu, cores = cpu_model(), len(os.sched_getaffinity(0))
    commit, dirty = checkout()
    return Machine(
        name=slug(f"gpu {gpu} {num_gpus}x") if num_gpus else slug(f"cpu {cpu} {cores}c"),
        cpu=cpu,
        cores=cores,
        gpu=gpu,
        num_gpus=num_gpus,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=installed("triton"),
        commit=commit,
        dirty=dirty,
    )


def slug(text: str) -> str:
    """Lower case letters, digits and dashes: "cpu AMD EPYC 2c" -> "cpu-amd-epyc-2c"."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", " ", text.lower())).strip("-")


def cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.machine()


def installed(package: str) -> str:
    """A package's version, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def checkout() -> tuple[str, bool]:
    """(commit, whether what runs differs from it) of the checkout this package was installed from.

    The installer records that folder for a copy as for an editable install; a copy that is older than the folder counts
    as different. Without a checkout it is the package's version.
    """
    without = f"version {installed('fusedtp')}"
    try:
        recorded = json.loads(distribution("fusedtp").read_text("direct_url.json") or "{}").get("url", "")
    except PackageNotFoundError:
        return without, False
    root = Path(unquote(urlparse(recorded).path))
    if not recorded.startswith("file://") or git(root, "rev-parse", "--show-toplevel") != str(root.resolve()):
        return without, False
    commit = git(root, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return without, True
    return commit, bool(git(root, "status", "--porcelain", "--", *SOURCES)) or not _same_files(root)


def _same_files(root: Path) -> bool:
    """Whether the package that runs has the checkout's files."""
    import fusedtp

    package = Path(fusedtp.__file__).resolve().parent
    if package == (root / "fusedtp").resolve():
        return True
    pairs = {name: package if name == "fusedtp" else package / name for name in SOURCES}
    for name, folder in pairs.items():
        for source in (root / name).rglob("*.py"):
            copy = folder / source.relative_to(root / name)
            if not copy.exists() or copy.read_bytes() != source.read_bytes():
                return False
    return True


def git(root: Path, *arguments: str) -> str:
    """What git says about the checkout at `root`; empty where it cannot say."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
