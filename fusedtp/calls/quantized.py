"""Calls on float8 operands: x and every weight are `Scaled`. The calls have no gradient.

In a compiled graph a call is the operator `fusedtp::scaled_matmuls` on data and scales. A norm is an op of its own
there.

Other operands and shapes obey the rules for tensors in the result's dtype, `out_dtype`. The checks of `problems` take
stand-ins for the operands: tensors in that dtype with the same shape and one element of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .. import float8, groups, norms
from ..float8 import BLOCK, E8M0
from ..groups import Group
from ..locks import one
from ..norms import Norm
from ..op import ANY_ORDER, RANK_ORDER
from ..options import Options
from ..scaled import Quantized, Scaled, check_dense
from ..shards import offsets
from ..torch_private import transforms_active
from . import call as calls_
from .arguments import check_kind
from .call import Call, Prepare
from .operators import paired
from .parameters import PLAIN
from .registered import operator
from .settings import with_float8, without_norm

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


def _stand_in(x: Scaled, out: torch.dtype) -> Tensor:
    # A tensor with the operand's shape, the result's dtype, and one element of memory.
    return torch.empty(1, dtype=out, device=x.data.device).expand(x.data.shape)


@cache
def _prepare(prepare: Prepare, x: torch.dtype, w: torch.dtype, blocks: bool) -> Prepare:
    def prepared(*args: Any, **more: Any) -> tuple[str, Sequence[int]]:
        text, numbers = prepare(*args, **more)
        return with_float8(text, x, w, blocks=blocks), numbers

    return prepared


def _check_parts(sizes: Sequence[int]) -> None:
    # Parts of one operand are multiplied with slices of the other, which must be whole blocks.
    for begin, size in zip(offsets(sizes), sizes, strict=False):
        if size and begin % BLOCK:
            raise ValueError(
                f"with a scale for each {BLOCK} elements, parts of the gathered features must begin at multiples of "
                f"{BLOCK}, got sizes {tuple(sizes)}"
            )


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


@one
def apply(
    prepare: Prepare, x: Any, weight: Any, bias: Any, group: Group, asked: Options, along: tuple[Any, ...],
    out_dtype: torch.dtype | None, residual: Tensor | None = None, norm: Norm | None = None,
) -> Any:  # fmt: skip
    """Make a call on `Scaled` operands, with the arguments of `eager.apply`."""
    is_dispatched = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    if asked.order not in (RANK_ORDER, ANY_ORDER):
        raise ValueError(f"order {asked.order!r} is for operands that are not float8, got Scaled ones")
    if not torch.compiler.is_compiling() and transforms_active():
        raise NotImplementedError("float8 operands are not implemented in torch.func's transforms: call it outside")
    out, x = check_out_dtype(out_dtype), _check_scaled("x", x)
    several = isinstance(weight, tuple)
    names = [f"weight[{i}]" for i in range(len(weight))] if several else ["weight"]
    ws = [_check_scaled(name, each, x.data.device) for name, each in zip(names, weight if several else (weight,),
                                                                       strict=True)]  # fmt: skip
    blocks = _check_together(x, ws, names)
    biases = bias if isinstance(bias, tuple) else (bias,)
    bias_names = [f"bias[{i}]" for i in range(len(biases))] if several else ["bias"]
    more = () if norm is None else (("norm_weight", norm.weight), ("norm_bias", norm.bias))
    named = *zip(bias_names, biases, strict=True), ("residual", residual), *more
    _check_added(named, out)
    process_group = groups.resolve(group)
    stand_in, in_place = _stand_in(x, out), [_stand_in(w, out) for w in ws]
    w_in_place: Any = tuple(in_place) if several else in_place[0]
    if is_dispatched:
        text, numbers = prepare(
            stand_in, w_in_place, bias, process_group, asked, *along, **calls_.extra(residual, norm)
        )  # fmt: skip
        text = with_float8(without_norm(text), x.data.dtype, ws[0].data.dtype, blocks=blocks)
        outs = scaled_matmuls(
            x.data, x.scale, [w.data for w in ws], [w.scale for w in ws], [each for each in biases if each is not None],
            [each is not None for each in biases], residual, out, text, numbers,
        )  # fmt: skip
    else:
        prepared = _prepare(prepare, x.data.dtype, ws[0].data.dtype, blocks)
        found = calls_.find(prepared, stand_in, w_in_place, bias, process_group, asked, along, residual, norm)
        outs = _forward(found, x, ws, biases, residual, out, norm)
    if norm is not None:
        # The call returns the sum, then the normed sum. The operator returns the sum only.
        return (outs[1], outs[0]) if not is_dispatched else (norms.of(norm, outs[0]), outs[0])
    return outs[0] if len(outs) == 1 else tuple(outs)


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


def _forward(
    call: Call, x: Scaled, ws: Sequence[Scaled], biases: Sequence[Tensor | None], residual: Tensor | None,
    out: torch.dtype, norm: Norm | None = None,
) -> list[Tensor]:  # fmt: skip
    if call.settings.blocks:
        _check_parts(call.gathered_parts)
    parameters: list[Any] = []
    for w, each in zip(ws, biases, strict=True):
        parameters += Quantized.of(w, out), each
    with torch.no_grad():
        return call.forward(call.given(Quantized.of(x, out), parameters, residual, norm))  # type: ignore[arg-type]


def _fake(
    x: Tensor, x_scale: Tensor, ws: Sequence[Tensor], w_scales: Sequence[Tensor], biases: Sequence[Tensor],
    biased: Sequence[bool], residual: Tensor | None, out: torch.dtype, settings: str, numbers: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    x, *ws = (each.new_empty(each.shape, dtype=out) for each in (x, *ws))
    call = calls_.of(settings, numbers, out, x.device)
    if call.settings.blocks:
        _check_parts(call.gathered_parts)
    return call.forward(call.given(x, paired(ws, biases, biased), residual), fake=True)


@operator("scaled_matmuls", _fake)
def scaled_matmuls(
    x: Tensor, x_scale: Tensor, ws: Sequence[Tensor], w_scales: Sequence[Tensor], biases: Sequence[Tensor],
    biased: Sequence[bool], residual: Tensor | None, out: torch.dtype, settings: str, numbers: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """Run a checked call on data and scales of x and of each weight, with results in dtype `out`.

    `biases` has those of the `biased` weights.
    """
    given = [Scaled(w, scale) for w, scale in zip(ws, w_scales, strict=True)]
    call = calls_.of(settings, numbers, out, x.device)
    return _forward(call, Scaled(x, x_scale), given, paired(ws, biases, biased)[1::2], residual, out)
