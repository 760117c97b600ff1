"""Describe the origin of a number: the machine, the versions and the commit that every row carries."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

# Folders of the checkout that make up the package.
SOURCES = ("fusedtp", "kernels", "bench")


@dataclass(frozen=True)
class Machine:
    """`name` tells machines apart in paths and comparisons: kind, model, number of cores or GPUs.

    links: how ranks reach each other. driver: the GPU driver's version; empty without a GPU.
    """

    name: str
    cpu: str
    cores: int
    gpu: str
    num_gpus: int
    links: str
    driver: str
    python: str
    torch: str
    triton: str
    commit: str
    dirty: bool


def describe() -> Machine:
    """Describe this machine and this checkout."""
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
        links=links(num_gpus),
        driver=driver() if num_gpus else "",
        python=platform.python_version(),
        torch=torch.__version__,
        triton=installed("triton"),
        commit=commit,
        dirty=dirty,
    )


def gpu_software() -> dict[str, str]:
    """Return the columns that rows of GPUs have besides: versions of CUDA and NCCL, and the settings NCCL_*."""
    import torch

    settings = " ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_"))
    return {"cuda": torch.version.cuda or "", "nccl": ".".join(map(str, nccl_version())), "nccl_env": settings}


def nccl_version() -> tuple[int, ...]:
    """Return the version of torch's NCCL, or ()."""
    import torch

    try:
        return tuple(torch.cuda.nccl.version())
    except (AttributeError, RuntimeError):
        return ()


# Reasons for clocks below the highest, by their bits in nvml.h (nvmlClocksEventReason*); idle is none.
_THROTTLED = {
    1 << 1: "clocks set", 1 << 2: "power cap", 1 << 3: "hardware", 1 << 4: "sync boost", 1 << 5: "software thermal",
    1 << 6: "hardware thermal", 1 << 7: "power brake",
}  # fmt: skip


def nvml_of(index: int) -> tuple[Any, ctypes.c_void_p]:
    """Return the library NVML and its handle of a GPU by torch's index; OSError if there is none."""
    nvml, gpu = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    # NVML numbers all GPUs of the machine, CUDA those that are visible, which are given by number or UUID.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = visible[index].strip() if index < len(visible) else ""
    key: int | bytes
    if not named or named.isdecimal():
        find, key = nvml.nvmlDeviceGetHandleByIndex_v2, int(named or index)
    else:
        find, key = nvml.nvmlDeviceGetHandleByUUID, named.encode()
    if nvml.nvmlInit_v2() or find(key, ctypes.byref(gpu)):
        raise OSError(f"NVML does not know GPU {named or index}")
    return nvml, gpu


def gpu_state(index: int) -> str:
    """Return the clocks, power, temperature and throttle reasons of a GPU by NVML, as text; "" without NVML."""
    try:
        nvml, gpu = nvml_of(index)

        def asked(name: str, *given: int, kind: Any = ctypes.c_uint) -> int:
            found = kind()
            if code := getattr(nvml, name)(gpu, *given, ctypes.byref(found)):
                raise OSError(f"{name} failed with error {code}")
            return int(found.value)

        # nvmlClockType_t: SM and memory; nvmlTemperatureSensors_t: the GPU (nvml.h).
        clocks = [asked("nvmlDeviceGetClockInfo", kind) for kind in (1, 2)]
        power, heat = asked("nvmlDeviceGetPowerUsage") / 1e3, asked("nvmlDeviceGetTemperature", 0)
        bits = asked("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
    except (OSError, AttributeError):
        # Not there, not allowed, or another version: what is measured does not depend on it.
        return ""
    reasons = ", ".join(name for bit, name in _THROTTLED.items() if bits & bit)
    return f"SM {clocks[0]} MHz, memory {clocks[1]} MHz, {power:.0f} W, {heat} C, throttled: {reasons or 'no'}"


def slug(text: str) -> str:
    """Return the text as lower case letters, digits and dashes: "cpu AMD EPYC 2c" -> "cpu-amd-epyc-2c"."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", " ", text.lower())).strip("-")


def cpu_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name; with family and model if the name has no number, as some hosts hide it."""
    try:
        lines = info.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    about = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = about.get("model name", "")
    if not name or re.search(r"\d", name) or "cpu family" not in about:
        return name or platform.machine()
    return f"{name} (family {about['cpu family']}, model {about.get('model', '?')})"


def links(num_gpus: int) -> str:
    """Return the link between ranks of this machine: "shared memory", "18 NVLinks", "PCIe (PHB)"."""
    if num_gpus < 2:
        return "one GPU" if num_gpus else "shared memory"
    found = topology(said("nvidia-smi", "topo", "-m"))
    if found:
        return ", ".join(found)
    import torch

    reach = [torch.cuda.can_device_access_peer(a, b) for a in range(num_gpus) for b in range(num_gpus) if a != b]
    return "peer access" if all(reach) else "peer access between some GPUs" if any(reach) else "no peer access"


def driver() -> str:
    """Return the version of the GPU driver, or ""."""
    return said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0].strip()


def topology(matrix: str) -> list[str]:
    """Return the kinds of links in the table of `nvidia-smi topo -m`: ["18 NVLinks"] if all are alike."""
    lines = [line.split() for line in matrix.splitlines()]
    rows = [cells[1:] for cells in lines if cells and re.fullmatch(r"GPU\d+", cells[0]) and "X" in cells]
    kinds = {row[other] for row in rows for other in range(min(len(rows), len(row))) if row[other] != "X"}
    return sorted(f"{kind[2:]} NVLinks" if re.fullmatch(r"NV\d+", kind) else f"PCIe ({kind})" for kind in kinds)


def installed(package: str) -> str:
    """Return a package's version, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def checkout() -> tuple[str, bool]:
    """Return (commit, whether the running code differs) of the checkout this package was installed from.

    The installer records the folder for copies and for editable installs. A copy that is older than the folder counts
    as different. Without a checkout the commit is the package's version.
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
    """Return whether the running package has the checkout's files."""
    package = Path(__file__).resolve().parent
    if package == (root / "fusedtp").resolve():
        return True
    pairs = {name: package if name == "fusedtp" else package / name for name in SOURCES}
    for name, folder in pairs.items():
        for source in (each for kind in ("*.py", "*.toml") for each in (root / name).rglob(kind)):
            copy = folder / source.relative_to(root / name)
            if not copy.exists() or copy.read_bytes() != source.read_bytes():
                return False
    return True


def git(root: Path, *arguments: str) -> str:
    """Return git's output for the checkout at `root`; empty if git fails."""
    return said("git", "-C", str(root), *arguments)


def said(*command: str) -> str:
    """Return a program's output without colours; empty if the program is missing, fails, or takes long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    # nvidia-smi prints colours even into a pipe.
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).strip() if done.returncode == 0 else ""
