"""Library products of float8 operands with scales: torch's scaled matmul if it takes them, else a wider matmul."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .float8 import BLOCK, E8M0, FNUZ
from .scaled import Quantized
from .torch_private import scaled_mm


def term(a: Quantized, b: Quantized) -> Tensor:
    """Return a [M, K] @ b [K, N] with a's scales in float32: one part of a contraction that `finish` ends."""
    if a.data.is_cuda and a.blocks is None and _multiplied_by_library(a, b):
        return of_data(a, b).mul_(a.row_scales()[:, None])
    wide = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    # With `out`: otherwise torch.autocast would make both bfloat16.
    torch.mm(a.widened(), b.widened(), out=wide)
    return wide if a.blocks is not None else wide.mul_(a.row_scales()[:, None])


def _times_columns(wide: Tensor, b: Quantized) -> Tensor:
    # Apply b's scales, unless they are of blocks and applied already.
    return wide if b.blocks is not None else wide.mul_(b.t().row_scales())


def summed(terms: Sequence[tuple[Quantized, Quantized]], bias: Tensor | None = None) -> Tensor:
    """Return the sum of several a @ b (+ bias), rounded once."""
    wides = [_times_columns(term(a, b), b) for a, b in terms]
    wide = wides[0]
    for other in wides[1:]:
        wide.add_(other)
    return (wide if bias is None else wide.add_(bias)).to(terms[0][0].dtype)


def finish(wide: Tensor, b: Quantized, bias: Tensor | None = None) -> Tensor:
    """Return a sum of terms with b's scales (+ bias, [N] or as the result), rounded."""
    wide = _times_columns(wide, b)
    return (wide if bias is None else wide.add_(bias)).to(b.dtype)


def mm(a: Quantized, b: Quantized, bias: Tensor | None = None) -> Tensor:
    """Return a [M, K] @ b [K, N] (+ bias, [N] or as the result), in the operands' result dtype."""
    if a.data.is_cuda and a.dtype == torch.bfloat16 and _multiplied_by_library(a, b):
        return by_library(a, b, bias)
    if a.data.is_cuda and a.blocks is not None and a.dtype == torch.bfloat16:
        # Both are exact in bfloat16, and the library adds in float32.
        return in_bfloat16(a, b, bias)
    return finish(term(a, b), b, bias)


def in_bfloat16(a: Quantized, b: Quantized, bias: Tensor | None = None) -> Tensor:
    """Compute `mm` of blocks by a matmul in bfloat16."""
    left, right = a.widened(torch.bfloat16), b.widened(torch.bfloat16)
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def _multiplied_by_library(a: Quantized, b: Quantized) -> bool:
    # cuBLAS and CUTLASS, as torch has them: multiples of 16, and not two e5m2; a scale a row since capability 9.0,
    # whole blocks with scales on 10.x alone. AMD's libraries are not known here, and no NVIDIA GPU takes fnuz.
    if torch.version.hip is not None or a.data.dtype in FNUZ:
        return False
    (M, K), N = a.shape, b.shape[1]
    both = a.data.dtype == b.data.dtype == torch.float8_e5m2
    fits = M > 0 and K > 0 and N > 0 and K % 16 == N % 16 == 0
    capability = torch.cuda.get_device_capability(a.device)
    known = capability >= (9, 0) if a.blocks is None else capability[0] == 10 and K % BLOCK == 0
    return fits and not both and known


def _laid_out(a: Quantized, b: Quantized) -> tuple[Tensor, Tensor]:
    """Return the data as the library reads it, a by rows, b by columns; gradients are copied, a byte an element."""
    left, right = a.data, b.data.t()
    left = left if left.stride(1) == 1 and left.stride(0) % 16 == 0 else left.contiguous()
    right = right if right.stride(1) == 1 and right.stride(0) % 16 == 0 else right.contiguous()
    return left, right.t()


def of_data(a: Quantized, b: Quantized) -> Tensor:
    """Return the product of the data alone by torch's scaled matmul, in float32."""
    one = torch.ones((), dtype=torch.float32, device=a.device)
    out: Tensor = scaled_mm(*_laid_out(a, b), one, one, out_dtype=torch.float32)
    return out


def by_library(a: Quantized, b: Quantized, bias: Tensor | None = None) -> Tensor:
    if a.blocks is not None:
        scales = blocks_for_library(a.scale), blocks_for_library(b.t().scale)
    else:
        scales = a.row_scales()[:, None], b.t().row_scales()[None, :]
    if bias is not None and bias.ndim > 1:
        return by_library(a, b).add_(bias)
    out: Tensor = scaled_mm(*_laid_out(a, b), *scales, bias=bias, out_dtype=a.dtype)
    return out


def blocks_for_library(scale: Tensor) -> Tensor:
    """Return scales [R, B] of blocks in cuBLAS's layout: tiles of 128 rows and 4 columns, by rows of tiles.

    In a tile, the scale of row r and column c is at byte 16 (r % 32) + 4 (r // 32) + c (cuBLAS, "1D block scaling
    factors layout").
    """
    rows, cols = scale.shape
    down, across = -(-rows // 128), -(-cols // 4)
    padded = scale.new_zeros(down * 128, across * 4)
    padded[:rows, :cols] = scale
    tiles = padded.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(E8M0)
