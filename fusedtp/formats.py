"""float8 dtypes that are multiplied, and which of them a machine has units for.

    OCP     e4m3fn up to 448, e5m2 up to 57344         NVIDIA since capability 8.9, AMD's gfx950 and gfx12
    FNUZ    e4m3fnuz up to 240, e5m2fnuz up to 57344   AMD's gfx940 to gfx942

fnuz is finite, with one NaN and an unsigned zero: its bytes mean other numbers than OCP's, mostly half of them. By
default tensors are cast to the `native` dtypes of their machine; ranks on different machines get an error that they do
not agree. (AMD Instinct MI300 instruction set architecture; OCP 8-bit floating point specification, 1.0.)
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Formats(NamedTuple):
    """Pair of dtypes: `e4m3` has more precision, for operands, and `e5m2` more range, for gradients."""

    e4m3: torch.dtype
    e5m2: torch.dtype


OCP = Formats(torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ = Formats(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
FLOAT8 = (*OCP, *FNUZ)


def of(dtype: torch.dtype) -> Formats:
    """Return the pair that contains `dtype`, one of `FLOAT8`."""
    return FNUZ if dtype in FNUZ else OCP


def native(device: torch.device) -> Formats:
    """Return the formats that this device multiplies, or OCP's if it has no units, as a CPU, which widens operands."""
    return _of_amds(device) if device.type == "cuda" and torch.version.hip else OCP


@cache
def _of_amds(device: torch.device) -> Formats:
    return FNUZ if target_of(device).startswith("gfx94") else OCP


def target_of(device: torch.device | None = None) -> str:
    """Return the target that a GPU's kernels are compiled for: "9.0", or on AMD's "gfx942"."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"


def without_float8(dtype: torch.dtype, target: str, *, blocks: bool) -> str:
    """Return why kernels cannot take this float8 on a GPU, or "" if they can or the target is unknown.

    Most need units that multiply the dtype. gfx94 takes blocks of any float8, which kernels convert to 16 bits.
    """
    theirs, ocp = (" and ".join(map(str, formats)) for formats in (FNUZ, OCP))
    if target.startswith("gfx94"):
        return "" if blocks or dtype in FNUZ else f"{target} multiplies {theirs}"
    if target.startswith(("gfx95", "gfx12")):
        return f"{target} multiplies {ocp}" if dtype in FNUZ else ""
    if target.startswith("gfx"):
        return f"{target} multiplies no float8"
    if target and dtype in FNUZ:
        return f"NVIDIA's GPUs multiply {ocp}"
    if target and tuple(map(int, target.split("."))) < (8, 9):
        return f"float8 is multiplied since capability 8.9, this GPU has {target}"
    return ""


def widens_blocks(target: str) -> str:
    """Return why kernels convert blocks to 16 bits on a GPU, or "" if a unit multiplies them with their scales."""
    return "" if target.startswith("10.") or not target else f"{target} multiplies no blocks with scales"
