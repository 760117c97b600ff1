"""The float8 dtypes that are multiplied, and which of them a machine has units for.

    OCP     e4m3fn up to 448, e5m2 up to 57344         NVIDIA since capability 8.9, AMD's gfx950 and gfx12
    FNUZ    e4m3fnuz up to 240, e5m2fnuz up to 57344   AMD's gfx940 to gfx942

fnuz is finite, with one NaN, and an unsigned zero: bytes mean other numbers than OCP's, mostly half of them. What is
made float8 where nothing else is asked for is made what its machine multiplies, `native`; ranks with other machines are
told that they do not agree. (AMD Instinct MI300 instruction set architecture; OCP 8-bit floating point specification,
1.0.)
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Formats(NamedTuple):
    """A pair: of more precision, for operands, and of more range, for gradients."""

    e4m3: torch.dtype
    e5m2: torch.dtype


OCP = Formats(torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ = Formats(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
FLOAT8 = (*OCP, *FNUZ)


def of(dtype: torch.dtype) -> Formats:
    """The pair that one of `FLOAT8` is of."""
    return FNUZ if dtype in FNUZ else OCP


def native(device: torch.device) -> Formats:
    """What this device multiplies; OCP's where it multiplies none, as a CPU, whose products are made of wider ones."""
    return _of_amds(device) if device.type == "cuda" and torch.version.hip else OCP


@cache
def _of_amds(device: torch.device) -> Formats:
    return FNUZ if target_of(device).startswith("gfx94") else OCP


def target_of(device: torch.device | None = None) -> str:
    """What a GPU's kernels are compiled for: "9.0", or on AMD's "gfx942"."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"


def without_float8(dtype: torch.dtype, target: str, *, blocks: bool) -> str:
    """Why kernels cannot take this float8 on a GPU, or "" if they can; "" for a target that is not known. Most need
    units that multiply it, blocks are made 16-bit where there are none.
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
    """Why blocks are made 16-bit in the kernel on a GPU, or "" if a unit multiplies them with their scales."""
    return "" if target.startswith("10.") or not target else f"{target} multiplies no blocks with scales"
