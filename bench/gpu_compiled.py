"""Kernels compiled for a GPU that is not there, in a folder that Triton's cache takes on the machine that has it.

The launchers run as they do on that GPU, with tensors that have a shape and no memory, under a driver that names the
target and launches nothing: Triton compiles each kernel with its own key, of which no part is the machine's. What is in
the key and what must be alike: docs/gpu.md.

A folder holds Triton's cache, whose groups name their files by absolute paths, and `about.json`, the compiler that made
it. `take` copies it into the cache of the machine at hand with the paths of their new place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from fusedtp.kernels import INTERPRETED, launch
from fusedtp.kernels.configs import nearest_target
from fusedtp.kernels.loading import only_loading
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver

from . import gpu_kernels, gpu_links, gpu_matmul

TARGETS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
STAGES = (gpu_matmul, gpu_kernels, gpu_links)
ABOUT = "about.json"
_GROUP = "__grp__"
# What a program of these may have; CUDA C++ programming guide, technical specifications by compute capability.
_SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}


class AbsentDriver:
    """A CUDA driver without a device: it loads nothing and launches nothing."""

    def __init__(self, target: str) -> None:
        self._target, shared = target, _SHARED_BYTES[target]
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (None, None, 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": shared, "multiprocessor_count": 1},
        )
        self.launcher_cls: Callable[..., Any] = lambda src, metadata: lambda *args, **kwargs: None

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The only one."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """As that GPU's driver names it."""
        return GPUTarget("cuda", TARGETS[self._target], 32)


@contextlib.contextmanager
def absent(target: str) -> Iterator[torch.device]:
    """Inside, kernels that are launched on the device that this gives are compiled for `target` and not started.

    RuntimeError in a process whose kernels are interpreted.
    """
    if INTERPRETED:
        raise RuntimeError("kernels are interpreted in this process: start it with TRITON_INTERPRET=0")
    before = driver._active, launch._target, launch._num_multiprocessors
    driver.set_active(AbsentDriver(target))
    launch._target, launch._num_multiprocessors = lambda device: target, lambda device: 1  # type: ignore[assignment]
    try:
        with only_loading():
            yield torch.device("meta")
    finally:
        driver._active, launch._target, launch._num_multiprocessors = before


class Counted:
    """How many kernels Triton compiles, and how many it finds in its cache, from here on."""

    def __init__(self) -> None:
        self.compiled = self.found = 0
        triton.knobs.compilation.listener = self

    def __call__(self, *, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            self.found += 1
        else:
            self.compiled += 1

    def __str__(self) -> str:
        return f"{self.compiled} kernels compiled, {self.found} found in Triton's cache"


def compiler() -> dict[str, str]:
    """What a kernel's key has in it besides the kernel and its target."""
    return {
        "triton": triton.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "key": hashlib.sha256(triton_key().encode()).hexdigest(),
    }


def compile_all(target: str, into: Path) -> int:
    """Every kernel of the stages, for `target`, into the folder; how many. Triton's cache must be that folder."""
    assert Path(triton.knobs.cache.dir).resolve() == into.resolve(), (triton.knobs.cache.dir, into)
    counted = Counted()
    with absent(target) as device:
        for stage in STAGES:
            stage.compile_only(device)
    _write(into, target, finished=True)
    return counted.compiled + counted.found


def _write(into: Path, target: str, *, finished: bool) -> None:
    (into / ABOUT).write_text(json.dumps({"target": target, "finished": finished, **compiler()}, indent=1) + "\n")


def begin(target: str, into: Path) -> list[str]:
    """Take a folder for `compile_all`, a new one or one that was left unfinished; why it is not to be taken, if so."""
    if (into / ABOUT).exists() and (other := differences(into, target, unfinished=True)):
        return other
    _write(into, target, finished=False)
    return []


def environment(into: Path) -> dict[str, str]:
    """Of the process that calls `compile_all`."""
    return {
        "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(into.resolve()),
        # Without the steps in between, which nobody reads there: a tenth of the bytes.
        "TRITON_STORE_BINARY_ONLY": "1",
    }  # fmt: skip


def differences(folder: Path, target: str = "", *, unfinished: bool = False) -> list[str]:
    """Why Triton would not find here what is in the folder: empty where it will. target: of the GPU at hand, if any."""
    try:
        about = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError) as error:
        return [f"{folder / ABOUT} cannot be read: {error}"]
    here = compiler()
    different = [f"{name} {about.get(name)} there, {here[name]} here" for name in here if about.get(name) != here[name]]
    if target and about.get("target") != target:
        different.append(f"compiled for {about.get('target')}, not for {target}")
    if not unfinished and not about.get("finished", True):
        different.append("it is unfinished: the same --compile-for goes on with it")
    path = os.environ.get("TRITON_PTXAS_PATH")
    return [*different, f"TRITON_PTXAS_PATH is {path}"] if path else different


def target_here() -> str:
    """What the GPU at hand is compiled for, as the launchers have it; empty without one."""
    return nearest_target(torch.cuda.get_device_capability()[0]) if torch.cuda.is_available() else ""


def take(folder: Path, cache: Path | None = None) -> int:
    """Copy what is not there yet into Triton's cache; how many kernels that were."""
    cache = Path(triton.knobs.cache.dir) if cache is None else cache
    count = 0
    for source in sorted(path for path in folder.iterdir() if path.is_dir()):
        target = cache / source.name
        groups = list(source.glob(f"{_GROUP}*"))
        if not groups or any((target / group.name).exists() for group in groups):
            continue
        target.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            if file.is_file() and file not in groups:
                shutil.copyfile(file, target / file.name)
        for group in groups:
            # Last: a group names files that are there.
            paths = json.loads(group.read_text())["child_paths"]
            moved = {name: str(target.resolve() / Path(path).name) for name, path in paths.items()}
            unfinished = target / f"{group.name}.{os.getpid()}"
            unfinished.write_text(json.dumps({"child_paths": moved}))
            unfinished.replace(target / group.name)
            count += 1
    return count
