"""Operands of torch's matmul in 16 bits as CPUs with AMX must be given them.

oneDNN reads an operand's rows up to a multiple of 32 elements there, and multiplies what lies behind a row by zeros.
NaN or an infinity in that place is NaN in the result: whatever a view has beside it (oneDNN issue 5717, mended in
oneDNN by pull request 5723 of July 2026; torch 2.13 still has it). So views whose rows end elsewhere are copied, with
zeros behind their rows. Rows with nothing between them are left alone, as by torch: NaN in one may reach the row of
the result before its own.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# On the shortest ways to a matmul only these pass through here.
NARROW = (torch.bfloat16, torch.float16)
_STEP = 32


@cache
def _has_amx() -> bool:
    try:
        return "amx_" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def reads_beside(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's matmul may read what its operands have beside them."""
    return dtype in NARROW and device.type == "cpu" and _has_amx()


def padded(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a [M, K] and b [K, N], or where it matters copies of them with zeros behind what lies along K."""
    if a.shape[1] % _STEP == 0 or not reads_beside(a.dtype, a.device):
        return a, b
    return _rows(a), _rows(b.t()).t()


def _rows(x: Tensor) -> Tensor:
    rows, K = x.shape
    if x.stride(1) != 1 or x.stride(0) == K:
        return x
    whole = torch.zeros(rows, -(-K // _STEP) * _STEP, dtype=x.dtype, device=x.device)
    return whole[:, :K].copy_(x)
