"""Activations that an epilogue applies before it rounds."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(z, NAME: tl.constexpr):
    """Return the activation of z, in float32; NaN stays NaN."""
    if NAME == "relu":
        return tl.where(z < 0.0, 0.0, z)
    elif NAME == "silu":
        return z / (1.0 + tl.exp(-z))
    elif NAME == "gelu":
        # erf of Abramowitz and Stegun, 7.1.26: error at most 1.5e-7, no branch, no cancellation in the tail.
        a = tl.abs(z) * 0.7071067811865476
        t = 1.0 / (1.0 + 0.3275911 * a)
        series = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
        tail = 0.5 * t * series * tl.exp(-a * a)
        return z * tl.where(z < 0.0, tail, 1.0 - tail)
    else:
        tl.static_assert(NAME == "gelu_tanh")
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), with u = sqrt(2 / pi) (z + 0.044715 z^3).
        return z / (1.0 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
