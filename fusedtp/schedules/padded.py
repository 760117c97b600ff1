"""Padded operands for torch's 16-bit matmul on CPUs with AMX.

There oneDNN reads an operand's rows up to a multiple of 32 elements, and multiplies the elements past a row's end by
zeros. NaN or infinity past the end is NaN in the result, whatever tensor it belongs to (oneDNN issue 5717, fixed in
oneDNN by pull request 5723 of July 2026; torch 2.13 still has the bug). So views whose rows end elsewhere are copied
and padded with zeros. Contiguous rows are left alone, as by torch: NaN in one may reach the result's previous row.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# The fast paths to a matmul call `padded` only for these.
NARROW = (torch.bfloat16, torch.float16)
_STEP = 32


@cache
def _has_amx() -> bool:
    try:
        return "amx_" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def reads_beside(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch's matmul may read past the rows of its operands."""
    return dtype in NARROW and device.type == "cpu" and _has_amx()


def padded(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a [M, K] and b [K, N], or copies padded with zeros along K if torch reads past their rows."""
    if a.shape[1] % _STEP == 0 or not reads_beside(a.dtype, a.device):
        return a, b
    return _rows(a), _rows(b.t()).t()


def _rows(x: Tensor) -> Tensor:
    rows, K = x.shape
    if x.stride(1) != 1 or x.stride(0) == K:
        return x
    whole = torch.zeros(rows, -(-K // _STEP) * _STEP, dtype=x.dtype, device=x.device)
    return whole[:, :K].copy_(x)
