"""Check calls on float8 operands: x and every weight are `Scaled`. The calls have no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import float8
from ..float8 import E8M0
from ..norms import Norm
from ..op import ANY_ORDER, RANK_ORDER, Options
from ..scaled import Scaled, check_dense
from ..torch_private import transforms_active
from .arguments import check_kind
from .call import Prepare
from .parameters import PLAIN
from .settings import with_float8

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _check_scaled(name: str, x: Any, device: torch.device | None = None) -> Scaled:
    if not isinstance(x, Scaled):
        raise TypeError(f"x and weight must both be Scaled or neither, got {type(x).__name__} for {name}")
    for part, each in (("data", x.data), ("scale", x.scale)):
        (check_dense if type(each) in PLAIN else check_kind)(f"{name}.{part}", each)
        # Compiled graphs give operators no negated views.
        if not torch.compiler.is_compiling() and each.is_neg():
            raise ValueError(f"{name}.{part} must not be a negated view: use resolve_neg()")
        if each.device != (device or x.data.device):
            raise ValueError(f"{name}.{part} must be on {device or x.data.device} as x, got {each.device}")
    x.check(name)
    return x


def check_out_dtype(out_dtype: torch.dtype | None) -> torch.dtype:
    """Check and return the dtype of the result, bfloat16 by default."""
    if out_dtype is not None and out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype must be None or one of {', '.join(map(str, OUT_DTYPES))}, got {out_dtype!r}")
    return out_dtype or torch.bfloat16


@cache
def prepared(prepare: Prepare, x: torch.dtype, w: torch.dtype, out: torch.dtype, blocks: bool) -> Prepare:
    """Return `prepare` for operands in these dtypes, the same function each time."""

    def prepares(*args: Any, **more: Any) -> tuple[str, Sequence[int]]:
        text, numbers = prepare(*args, **more)
        return with_float8(text, x, w, out, blocks=blocks), numbers

    return prepares


def plain(x: Any, weight: Any, out_dtype: torch.dtype | None, float8: str | None) -> bool:
    """Return whether no operand is `Scaled`. Then results have the operands' dtype."""
    several = weight if isinstance(weight, list | tuple) else (weight,)
    if isinstance(x, Scaled) or any([isinstance(each, Scaled) for each in several]):
        if float8 is not None:
            raise ValueError(f"float8 is for tensors that are to be cast, Scaled operands are: got {float8!r}")
        return False
    if out_dtype is not None and isinstance(x, Tensor) and out_dtype != x.dtype:
        raise ValueError(f"out_dtype must be None or x's dtype, {x.dtype}, but for Scaled operands, got {out_dtype!r}")
    return True


def check(
    x: Any, weight: Any, bias: Any, asked: Options, out_dtype: torch.dtype | None, residual: Tensor | None,
    norm: Norm | None,
) -> tuple[torch.dtype, bool]:  # fmt: skip
    """Check what a call on `Scaled` operands is given. Return the result's dtype, and whether scales are of blocks."""
    if asked.order not in (RANK_ORDER, ANY_ORDER):
        raise ValueError(f"order {asked.order!r} is for operands that are not float8, got Scaled ones")
    if not torch.compiler.is_compiling() and transforms_active():
        raise NotImplementedError("float8 operands are not implemented in torch.func's transforms: call it outside")
    out, x = check_out_dtype(out_dtype), _check_scaled("x", x)
    several = isinstance(weight, tuple)
    names = [f"weight[{i}]" for i in range(len(weight))] if several else ["weight"]
    ws = [
        _check_scaled(name, each, x.data.device)
        for name, each in zip(names, weight if several else (weight,), strict=True)
    ]
    blocks = _check_together(x, ws, names)
    biases = bias if isinstance(bias, tuple) else (bias,)
    bias_names = [f"bias[{i}]" for i in range(len(biases))] if several else ["bias"]
    more = () if norm is None else (("norm_weight", norm.weight), ("norm_bias", norm.bias))
    _check_added((*zip(bias_names, biases, strict=True), ("residual", residual), *more), out)
    return out, blocks


def _check_together(x: Scaled, ws: Sequence[Scaled], names: Sequence[str]) -> bool:
    """Raise ValueError unless one product takes x and all weights. Return whether they have block scales."""
    first, blocks = ws[0].data.dtype, x.scale.dtype == E8M0
    for name, w in zip(names, ws, strict=True):
        if w.data.dtype != first:
            raise ValueError(f"all weights must have one dtype, got {names[0]} in {first}, {name} in {w.data.dtype}")
        if (w.scale.dtype == E8M0) != blocks:
            raise ValueError(
                f"x and weight must both have scales of blocks, in {E8M0}, or neither, got x.scale in {x.scale.dtype} "
                f"and {name}.scale in {w.scale.dtype}: make both by fusedtp.scaled with recipe 'mxfp8', or neither"
            )
    if float8.formats_of(first) != float8.formats_of(x.data.dtype):
        raise ValueError(
            f"x and weight must be of one kind of float8, OCP's or fnuz, as no machine multiplies both, got "
            f"{x.data.dtype} and {first}: make both by fusedtp.scaled, from values()"
        )
    return blocks


def _check_added(named: Sequence[tuple[str, Tensor | None]], out: torch.dtype) -> None:
    """Raise ValueError unless biases, residual and norm parameters have dtype `out` and need no gradient."""
    for name, each in named:
        if each is not None and type(each) not in PLAIN:
            check_kind(name, each)
        if each is not None and each.dtype != out:
            raise ValueError(f"{name} must be in out_dtype, {out}, got {each.dtype}")
    given = [each for _, each in named if isinstance(each, Tensor)]
    if torch.is_grad_enabled() and any([each.requires_grad for each in given]):
        raise ValueError(
            "results of float8 operands have no gradient, but a bias, a residual or a norm's parameter requires one: "
            "call under torch.no_grad, or detach it"
        )
