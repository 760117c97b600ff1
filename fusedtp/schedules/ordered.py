"""Products whose contraction is added up as a tree (`kernels.contraction`), of whole local operands.

A rank multiplies these beside a collective, or, on one rank, instead of one. The bits are those that a collective's
kernels give to the same product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .. import turns
from ..kernels import INTERPRETED
from ..kernels.epilogue import epilogue_of
from ..kernels.launch import config_for
from ..kernels.matmul import matmul
from ..torch_private import FakeTensor


def product(
    terms: Sequence[tuple[Tensor, Tensor]], leaves: int, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the sum of terms a [M, K] @ b [K, N] (+ bias [N]), in a's dtype or in `dtype`."""
    (a, b), *more = terms
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype or a.dtype, device=a.device)
    # A compiler's fake tensors have shapes alone.
    if isinstance(out, FakeTensor) or not out.numel():
        return out
    epilogue, config = epilogue_of(bias, per_row=False), config_for(a.device, a.dtype, tree=True)
    multiply = partial(matmul, a, b, out, epilogue, config=config, leaves=leaves, more=more)
    # Beside a collective, the op has the interpreter already.
    if not INTERPRETED or turns.is_mine(turns.INTERPRETER):
        multiply()
    else:
        turns.alone(turns.INTERPRETER, "a product in leaves", multiply)
    return out
