"""Convert tensors to float8 and back: the formats of a machine, the scale, the cast and the widening.

    OCP     e4m3fn up to 448, e5m2 up to 57344         NVIDIA since capability 8.9, AMD's gfx950 and gfx12
    FNUZ    e4m3fnuz up to 240, e5m2fnuz up to 57344   AMD's gfx940 to gfx942

fnuz is finite, with one NaN and an unsigned zero. Its bytes stand for other numbers than OCP's, mostly half of them. By
default tensors are cast to the `native` dtypes of their machine; ranks with different native dtypes raise
RanksDisagree. (AMD Instinct MI300 instruction set architecture; OCP 8-bit floating point specification, 1.0.)
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, library


class Formats(NamedTuple):
    """Pair of dtypes: `e4m3` has more precision, for operands, and `e5m2` more range, for gradients."""

    e4m3: torch.dtype
    e5m2: torch.dtype


OCP = Formats(torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ = Formats(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
FLOAT8 = (*OCP, *FNUZ)


def formats_of(dtype: torch.dtype) -> Formats:
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


# Elements that share a scale in mxfp8. Scales are powers of two, 8 bits of an exponent (OCP microscaling formats, 1.0,
# section 5).
BLOCK = 32
E8M0 = torch.float8_e8m0fnu


def largest_finite(x: Tensor, over: tuple[int, ...] | None = None) -> Tensor:
    """Return the largest finite magnitude of x over all dims, (), or over some, which are kept with a length of 1."""
    magnitudes = torch.where(x.isfinite(), x.abs(), 0.0)
    if over is None:
        return magnitudes.amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    if any(x.shape[dim] == 0 for dim in over):
        return x.new_zeros([1 if dim in over else length for dim, length in enumerate(x.shape)], dtype=torch.float32)
    return magnitudes.amax(over, keepdim=True).float() if over else magnitudes.float()


# Bits of the mantissa after the point; torch's finfo is wrong for e5m2fnuz.
_MANTISSA = {dtype: 3 if "e4m3" in str(dtype) else 2 for dtype in FLOAT8}


def quantized(x: Tensor, most: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Cast x to float8; return it and the scale that makes the magnitudes `most` the largest that `dtype` has."""
    wide, largest = x.float(), torch.finfo(dtype).max
    if power_of_two:
        scale = _power_of_two(most, largest)
    else:
        # In float64: with a subnormal `most` the quotient is subnormal too, and a GPU may take it for 0.
        scale = (most.double() / largest).clamp_min(torch.finfo(torch.float32).tiny)
    scale = torch.where(most == 0, 1.0, scale).float()
    finite = wide
    if power_of_two:
        # A number near float32's largest would be rounded to 2^128, which float32 does not have.
        highest = (2 - 2.0 ** -_MANTISSA[dtype]) * 2.0**127
        finite = wide.clamp(-highest, highest)
    data = (finite / scale).clamp(-largest, largest)
    lost = float("inf") if dtype == torch.float8_e5m2 else float("nan")
    data = torch.where(wide.isinf(), wide.sign() * lost, data)
    return data.to(dtype), scale


def _power_of_two(most: Tensor, largest: float) -> Tensor:
    """Return the least power of two >= most / largest that is a normal number, computed from the bits of float32."""
    mantissa, exponent = math.frexp(largest)
    bits = most.view(torch.int32)
    # Compare mantissas in [1, 2): if that of `most` is above that of `largest`, the power doubles.
    above = (bits & 0x7FFFFF) > int(mantissa * 2**24) - 2**23
    power = (bits >> 23) - (exponent - 1) + above.int()
    return (power.clamp_min(1) << 23).view(torch.float32)


def in_blocks(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast x [.., K] to float8; return it and a scale for each block of its rows, a power of two."""
    if torch.compiler.is_compiling():
        made: tuple[Tensor, Tensor] = _in_blocks_compiled(x, dtype)
        return made
    # The last block of a row is padded with zeros.
    count = -(-x.shape[-1] // BLOCK)
    blocks = torch.nn.functional.pad(x, (0, count * BLOCK - x.shape[-1])).unflatten(-1, (count, BLOCK))
    data, scale = quantized(blocks, largest_finite(blocks, (blocks.ndim - 1,)), dtype, power_of_two=True)
    return data.flatten(-2)[..., : x.shape[-1]].contiguous(), scale[..., 0].to(E8M0)


def along_blocks(scale: Tensor, length: int, dim: int) -> Tensor:
    """Return the scales of blocks along `dim` in float32, one for each of `length` elements."""
    if torch.compiler.is_compiling():
        found: Tensor = _along_blocks_compiled(scale.view(torch.uint8), length, dim)
        return found
    return scale.view(E8M0).float().repeat_interleave(BLOCK, dim).narrow(dim, 0, length)


# Opaque to compilers, and called by them only: on a CPU, torch's inductor (2.11 to 2.13) computes wrong numbers in a
# row's last block if that block is shorter than the others.
@library.custom_op("fusedtp::scaled_in_blocks", mutates_args=())
def _in_blocks_compiled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return in_blocks(x, dtype)


@_in_blocks_compiled.register_fake
def _(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    blocks = (x.shape[-1] + BLOCK - 1) // BLOCK
    return torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty((*x.shape[:-1], blocks), dtype=E8M0)


@library.custom_op("fusedtp::scales_along_blocks", mutates_args=())
def _along_blocks_compiled(scale: Tensor, length: int, dim: int) -> Tensor:
    return along_blocks(scale, length, dim).contiguous()


@_along_blocks_compiled.register_fake
def _(scale: Tensor, length: int, dim: int) -> Tensor:
    shape = list(scale.shape)
    shape[dim] = length
    return scale.new_empty(shape, dtype=torch.float32)


@cache
def _table(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()


def widened(data: Tensor) -> Tensor:
    """Convert float8 to float32, exactly."""
    if torch.compiler.is_compiling() or type(data) is not Tensor or not data.is_cpu:
        return data.float()
    if data.ndim == 2 and data.stride(0) == 1 and not data.is_contiguous():
        return widened(data.t()).t()
    # By a table: torch's own conversion takes thirty times as long on a CPU.
    index = data.contiguous().view(torch.uint8).view(-1).int()
    return _table(data.dtype).index_select(0, index).view(data.shape)
