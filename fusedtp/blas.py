"""Matmuls of one rank, alone: torch's, or NumPy's where that is the faster of the two that are installed.

torch multiplies on an x86 CPU with MKL, whose best code is for Intel's processors; NumPy's wheels bring OpenBLAS. On
one core of an EPYC of family 26 in float32 OpenBLAS reaches 110-115 GFLOP/s where MKL reaches 92, and is ahead down to
sides of 24, or 16 where B's rows are contiguous, as in both gradients of a linear layer (torch 2.13, NumPy 2.4); in
float64 neither is. Every schedule, `unfused` too, and the bounds of the benchmarks multiply by these functions, so that
what is compared is never the library.

OpenBLAS has threads of its own, which `torch.set_num_threads` does not reach, so it is used by ranks of one thread, as
torchrun starts them (OMP_NUM_THREADS=1). What decides is the machine, the environment and shapes, never a clock:
repeated runs give the same bits. FUSEDTP_CPU_MATMUL=torch keeps to torch.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ENVIRONMENT = "FUSEDTP_CPU_MATMUL"
# No side of what NumPy multiplies is shorter; where B's columns are contiguous.
SHORTEST, SHORTEST_BY_COLUMNS = 16, 24
# Nor are there fewer multiplications: a call through NumPy takes 3 us more.
FEWEST = 1 << 20
# What a product that is added is held in: so many bytes, or so many rows where that is more.
ADDED_BYTES, ADDED_ROWS = 4 << 20, 64
# Neither fakes nor other subclasses, whose matmuls torch must see.
_PLAIN = (Tensor, torch.nn.Parameter)
# What OpenBLAS takes its number of threads from, the first that is set.
_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")


def wanted() -> str:
    """What the environment asks for, auto or torch; ValueError for anything else."""
    given = os.environ.get(ENVIRONMENT, "auto")
    if given not in ("auto", "torch"):
        raise ValueError(f"{ENVIRONMENT} must be auto or torch, got {given!r}")
    return given


wanted()  # a wrong one is told on import, not in the middle of an op


def choice() -> tuple[str, str]:
    """("numpy" or "torch", why) of large float32 matmuls on this CPU with one thread a rank."""
    if wanted() == "torch":
        return "torch", f"{ENVIRONMENT}=torch"
    if not torch.backends.mkl.is_available():
        return "torch", "this torch multiplies without MKL"
    vendor = _vendor()
    if vendor in ("", "GenuineIntel"):
        return "torch", f"MKL on a processor of {vendor or 'an unknown vendor'}"
    blas = _blas_of_numpy()
    if "openblas" not in blas:
        return "torch", f"NumPy multiplies with {blas or 'an unknown library'}, not with OpenBLAS"
    threads = next((os.environ[name] for name in _THREADS if os.environ.get(name)), "")
    if threads != "1":
        return "torch", f"OpenBLAS may use several threads: OMP_NUM_THREADS is {threads or 'not set'}, not 1"
    return "numpy", f"OpenBLAS is faster than MKL on a processor of {vendor}"


def mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [M, K] @ b [K, N] (+ bias [N]) -> [M, N]."""
    if _by_numpy(a, b):
        out = a.new_empty(a.shape[0], b.shape[1])
        _multiply(a, b, out)
        return out if bias is None else out.add_(bias)
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def mm_into(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out = a @ b (+ bias). out may be a slice of columns; only rows with a unit stride are written without a copy."""
    if _by_numpy(a, b) and _lies_well(out):
        _multiply(a, b, out)
        if bias is not None:
            out.add_(bias)
    elif bias is not None:
        torch.addmm(bias, a, b, out=out)
    else:
        torch.mm(a, b, out=out)


def add_mm_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a @ b."""
    if _by_numpy(a, b):
        # NumPy has no matmul that adds. By rows, so that what is added is still in the cache.
        rows = min(a.shape[0], max(ADDED_ROWS, ADDED_BYTES // (b.shape[1] * a.element_size())))
        products = a.new_empty(rows, b.shape[1])
        for part, whole in zip(a.split(rows), out.split(rows), strict=True):
            product = products[: part.shape[0]]
            _multiply(part, b, product)
            whole.add_(product)
    else:
        out.addmm_(a, b)


def _by_numpy(a: Tensor, b: Tensor) -> bool:
    (m, k), n = a.shape, b.shape[1]
    return (
        m * k * n >= FEWEST
        and a.dtype is torch.float32
        and a.is_cpu
        and type(a) in _PLAIN
        and type(b) in _PLAIN
        and min(m, k, n) >= (SHORTEST if b.stride(1) == 1 else SHORTEST_BY_COLUMNS)
        and _chosen()
        and torch.get_num_threads() == 1
        and _lies_well(a)
        and _lies_well(b)
    )


@cache
def _chosen() -> bool:
    return choice()[0] == "numpy"


def _lies_well(x: Tensor) -> bool:
    # What BLAS takes as it lies. NumPy multiplies anything else, an expanded tensor say, number by number.
    rows, cols = x.stride()
    return (cols == 1 and rows >= x.shape[1]) or (rows == 1 and cols >= x.shape[0])


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    import numpy

    numpy.matmul(a.detach().numpy(), b.detach().numpy(), out=out.detach().numpy())


def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def _blas_of_numpy() -> str:
    import numpy

    try:
        config: Any = numpy.show_config(mode="dicts")
        return str(config["Build Dependencies"]["blas"]["name"])
    except (TypeError, KeyError):  # before NumPy 1.26, or a build that does not say
        return ""
