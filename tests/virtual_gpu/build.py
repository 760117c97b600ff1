"""Build the stubs for the torch and Triton of this Python: `python build.py` prints the environment for a process that
uses the stubs, one NAME=value a line.

Every build of torch gets libcuda and NVML; a CUDA build also gets libcudart and NCCL, from its own CUDA headers.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

if __package__:
    from . import compiler
else:
    sys.path.insert(0, str(Path(__file__).parent))
    import compiler

STUB = Path(__file__).parent / "stub"
_READ = tuple(STUB / name for name in ("device.h", "graph.h", "ranges.h"))
_FLAGS = ("-O2", "-w", "-ldl")


def _place(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    return Path(next(iter(spec.submodule_search_locations or ()))) if spec else None


def _named(name: str) -> str:
    return f"-Wl,-soname,{name}"


def libcuda() -> Path:
    """Build the stub of the driver, which is all that Triton needs."""
    triton = _place("triton")
    assert triton is not None
    flags = (*_FLAGS, _named("libcuda.so.1"), f"-I{triton / 'backends/nvidia/include'}")
    return compiler.library("libcuda.so.1", (STUB / "libcuda.c", STUB / "absent.c"), flags, _READ)


def _symbols(*arguments: str) -> set[str]:
    text = subprocess.run(["nm", *arguments], capture_output=True, text=True, check=False).stdout
    return {line.split()[-1] for line in text.splitlines() if line.strip() and not line.endswith(":")}


def _whole(name: str, source: Path, torch: Path, mark: str, error: int, flags: tuple[str, ...] = ()) -> Path:
    """Build a library that torch's own libraries link to. Functions that torch uses, whose names in nm's output match
    `mark`, return an error if the source does not define them.
    """
    taken = (each for path in torch.glob("lib/lib*.so") for each in _symbols("-D", "--undefined-only", str(path)))
    wanted = sorted({each.split("@")[0] for each in taken if re.fullmatch(mark, each)})
    rest = compiler.folder() / f"{name}-{os.getpid()}.c"
    rest.write_text("".join(f"__attribute__((weak)) int {each}() {{ return {error}; }}\n" for each in wanted))
    try:
        return compiler.library(name, (source, rest), (*_FLAGS, _named(name), *flags), _READ)
    finally:
        rest.unlink()


def libcudart(torch: Path) -> Path:
    """Build the stub of the runtime."""
    nvidia, triton = _place("nvidia"), _place("triton")
    assert nvidia is not None
    name, version = "libcudart.so.13", compiler.folder() / "cudart.map"
    version.write_text(f"{name} {{ global: *; }};\n")
    include = (f"-I{nvidia / 'cu13/include'}", f"-I{triton}/backends/nvidia/include")
    not_supported = 801
    flags = (*include, f"-Wl,--version-script={version}")
    return _whole(name, STUB / "libcudart.c", torch, rf"\w+@+{re.escape(name)}", not_supported, flags)


def libnccl(torch: Path) -> Path:
    """Build the stub of NCCL."""
    invalid_usage = 5
    return _whole("libnccl.so.2", STUB / "libnccl.c", torch, r"nccl[A-Z]\w+", invalid_usage, ("-lrt",))


def environment() -> dict[str, str]:
    """Return the environment of a process that uses the stubs."""
    torch = _place("torch")
    assert torch is not None
    nvml = compiler.library("libnvidia-ml.so.1", (STUB / "libnvml.c",), (*_FLAGS, _named("libnvidia-ml.so.1")))
    paths = [libcuda(), nvml]
    preload = []
    if (torch / "lib/libtorch_cuda.so").exists():
        preload = [libcudart(torch), libnccl(torch)]
    site = Path(__file__).parent / "site"
    return {
        "LD_PRELOAD": ":".join(map(str, preload)),
        # torch and Triton open libcuda.so.1 and libnvidia-ml.so.1 by name.
        "LD_LIBRARY_PATH": ":".join([*(str(path.parent) for path in paths), os.environ.get("LD_LIBRARY_PATH", "")]),
        "TRITON_LIBCUDA_PATH": str(paths[0].parent),
        # This cache holds PTX images, which must not mix with a GPU's.
        "TRITON_CACHE_DIR": str(compiler.folder() / "triton"),
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    print("\n".join(f"{name}={value}" for name, value in environment().items()))
