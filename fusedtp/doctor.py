"""Find which schedules run on this machine and why, from its compiler, GPUs, links and memory."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import torch
from torch.distributed import ProcessGroup

from .choose import tuning
from .choose.tuning import Table, version_here
from .cost.hardware import of_gpu
from .machine import Machine, installed, said
from .memory.cuda import Driver
from .workspaces import registry

UNKNOWN = "not in the hardware table: numbers of an H100 decide what the schedules choose by themselves"
MODES = {
    "exclusive process": ": one process at a time; ranks that share this GPU cannot start, nor can a rank while "
    "another process has it. `nvidia-smi -c DEFAULT` (as root) lets several",
    "prohibited": ": no process may use it. `nvidia-smi -c DEFAULT` (as root) lets them",
}


PACKAGES = ("fusedtp", "torch", "triton", "numpy", "pandas", "scipy", "typer", "rich", "matplotlib", "jinja2")


def sections(machine: Machine) -> dict[str, list[tuple[str, str]]]:
    """Return what this process finds out alone: lines (name, text) by title."""
    return {
        "Machine": [
            ("name", machine.name), ("cpu", f"{machine.cpu}, {machine.cores} cores for this process"),
            ("gpus", f"{machine.num_gpus}x {machine.gpu}" if machine.num_gpus else "none that torch can use"),
            ("commit", machine.commit + " with changes" * machine.dirty),
        ],
        "Versions": [
            ("python", machine.python),
            ("packages", ", ".join(f"{package} {installed(package)}" for package in PACKAGES)),
            ("cuda", torch.version.cuda or "this torch is built without it"),
        ],
        "Compiler": [*compiler_lines()], "GPUs": [*mode_lines()], "Links": [*link_lines()],
        "Memory": [*memory_lines()],
    }  # fmt: skip


def compiler() -> tuple[str, str]:
    """Return (C compiler, missing parts), either may be "": Triton builds kernels' launchers with the compiler.

    triton/runtime/build.py of 3.6 to 3.9 takes $CC, one word, else gcc, else clang, and Python's headers.
    """
    chosen = os.environ.get("CC")
    if chosen is None:
        chosen = shutil.which("gcc") or shutil.which("clang")
        if chosen is None:
            return "", "no C compiler: install gcc or clang, or name one in CC"
    elif shutil.which(chosen) is None:
        return "", f"CC names {chosen!r}, which is no program here; it takes no options"
    scheme = sysconfig.get_default_scheme()
    paths = sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)
    headers = os.path.join(paths["include"], "Python.h")
    if not os.path.exists(headers):
        return chosen, f"no {headers}: install Python's development files (python3-dev)"
    return chosen, ""


def compiler_lines() -> Iterator[tuple[str, str]]:
    chosen, missing = compiler()
    if chosen:
        yield "C compiler", chosen
    if missing:
        yield "missing", f"{missing}; without it Triton runs no kernel on a GPU"


def mode_lines() -> Iterator[tuple[str, str]]:
    """Yield each GPU's entry in the table of hardware, and its compute mode unless default."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in range(count):
        name = torch.cuda.get_device_name(device)
        known = of_gpu(name)
        yield f"gpu {device}", f"{name}, {f'predicted as {known.title}' if known else UNKNOWN}"
        try:
            mode = "" if torch.version.hip else Driver().compute_mode(device)
        except RuntimeError as error:
            mode = f"unknown: {error}"
        if mode not in ("", "default"):
            yield "compute mode", f"{mode}{MODES.get(mode, '')}"


def link_lines() -> Iterator[tuple[str, str]]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return
    try:
        driver = Driver()
        for device in range(count):
            ways = {peer: driver.peers(device, peer) for peer in range(count) if peer != device}
            peers = [str(peer) for peer, (access, atomics) in ways.items() if access and atomics]
            yield f"gpu {device}", f"can read, write and signal in the memory of {', '.join(peers) or 'no other GPU'}"
            lacking = [str(peer) for peer, (access, atomics) in ways.items() if access and not atomics]
            if lacking:
                without = "without native atomics, as over PCIe: these run unfused"
                yield "", f"can read and write that of {', '.join(lacking)}, {without}"
    except RuntimeError as error:
        yield "gpu to gpu", f"unknown: {error}"
    yield "topology", said("nvidia-smi", "topo", "-m") or "nvidia-smi did not answer"


def memory_lines() -> Iterator[tuple[str, str]]:
    try:
        os.close(os.memfd_create("fusedtp doctor"))
        yield "posix", "memfd_create works, which is what ranks on one machine share"
    except (AttributeError, OSError) as error:
        yield "posix", f"no memfd_create: {error}"
    if torch.cuda.is_available():
        try:
            import_module("torch.distributed._symmetric_memory")
            yield "cuda", "torch.distributed._symmetric_memory is there"
        except ImportError as error:
            yield "cuda", f"this torch has no symmetric memory: {error}"


def reachable(group: ProcessGroup) -> tuple[bool, str]:
    """Return whether these ranks reach each other's memory, and why (not); collective."""
    on = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return registry.reachable(group, on)


@dataclass(frozen=True)
class Findings:
    """Facts of this machine that decide which schedules run.

    - `reached`, `detail`: whether two ranks share memory, and why (not).
    - `missing`: what Triton lacks to compile for a GPU.
    - `ignored`: why a table of measurements is not used.
    """

    gpu: str
    num_gpus: int
    cores: int
    reached: bool
    detail: str
    missing: str = ""
    table: Table | None = None
    ignored: str = ""

    @property
    def lacks(self) -> str:
        """Return why `decomposed` and `fused` do not run, or "". On a GPU both start kernels."""
        # If a rank raised, its traceback follows the first line.
        return self.missing if self.reached else f"ranks do not share memory: {self.detail.splitlines()[0]}"

    @property
    def auto(self) -> str:
        """Return what `auto` does for several ranks."""
        from fusedtp.cost.hardware import of_gpu

        if self.lacks:
            return 'fails: ask for "unfused"' if self.reached else "takes unfused"
        if self.table is not None and self.table.samples:
            return f"takes the fastest by {len(self.table.samples)} measurements of this machine"
        known = of_gpu(self.gpu) if self.num_gpus else None
        first = f"the fastest as predicted for {known.title}" if known else "fused" if self.num_gpus else "decomposed"
        return f"takes {first}, until `fusedtp tune` has measured here"

    @property
    def verdict(self) -> str:
        """Return one line: the hardware, the schedules that run, and what `auto` does."""
        where = f"CPU, {self.cores} cores"
        if self.num_gpus:
            where = f"{self.num_gpus}x {self.gpu}, symmetric memory {'' if self.reached else 'not '}reachable"
        if self.lacks:
            runs = f"unfused runs at full speed, decomposed and fused do not run ({self.lacks})"
        elif self.num_gpus == 0:
            runs = "decomposed and unfused run at full speed, fused is interpreted (checked, never timed)"
        elif self.num_gpus == 1:
            runs = "one rank has nothing to send, several share the GPU (all schedules are checked, never timed)"
        else:
            runs = "unfused, decomposed and fused run at full speed"
        return f"Verdict: {where}: {runs}; auto {self.auto}"


def findings(machine: Machine, reached: bool, detail: str) -> Findings:
    """Return the facts of this machine. reached, detail: what two ranks have found by `reachable`."""
    table, _, ignored = tuning.load()
    missing = compiler()[1] if machine.num_gpus else ""
    return Findings(machine.gpu, machine.num_gpus, machine.cores, reached, detail, missing, table, ignored)


def schedule_lines(found: Findings) -> Iterator[tuple[str, str]]:
    """Yield each schedule, and whether ranks on this machine can run it: one for each GPU, two at least."""
    told = found.detail if found.reached else f"cannot reach each other's memory: {found.detail}"
    yield f"{max(2, found.num_gpus)} ranks", told
    yield "unfused", "runs: torch.distributed alone"
    not_run = f"does not run: {found.lacks}" if found.lacks else ""
    yield "decomposed", not_run or "runs"
    shared = "; several ranks would share the one GPU: checked, never timed" if found.num_gpus == 1 else ""
    fused = f"runs{shared}" if found.num_gpus else "runs in Triton's interpreter: checked, never timed"
    yield "fused", not_run or fused
    yield "auto", f"{found.auto}; {found.ignored}" if found.ignored else found.auto
    if found.reached and found.table is not None:
        yield "measured", str(tuning.path())
        if kernels := found.table.kernels:
            here = sum(each.version == version_here() and each.choice is not None for each in kernels)
            yield "tiles", f"{here} sizes have another than the table's, of {len(kernels)} that were tuned"
