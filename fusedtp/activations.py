"""Activations at the end of an op, on tensors: their values on products z, and their gradients.

    relu, gelu, gelu_tanh, silu    y = f(z)            dz = dy * f'(z)
    swiglu, geglu                  y = f(gate) * up    dgate = dy * up * f'(gate), dup = dy * f(gate)

gelu is exact, gelu_tanh its approximation. f is silu in swiglu and gelu in geglu. Gradients are torch's own formulas.
relu's gradient is computed from y (`OF_RESULT`); the others need the products.

The library rounds z before the activation. Our kernels have z as a float32 sum and do not round it first, except a
gate, which is stored until `up` is ready.

On a CPU, torch computes the elements after the last whole vector by other code, which gives other last bits for silu
and gelu_tanh in float32. This module pads to whole vectors: an element has the same bits in a tensor of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten

Activation: TypeAlias = Literal["relu", "gelu", "gelu_tanh", "silu"]
GatedActivation: TypeAlias = Literal["swiglu", "geglu"]
# Gated activations: the function of the gate, before `up` is multiplied with it.
GATED: Mapping[str, Activation] = {"swiglu": "silu", "geglu": "gelu"}
ACTIVATIONS = (*get_args(Activation), *GATED)
# Activations whose gradient is computed from the result; others need the product.
OF_RESULT = frozenset({"relu"})


def _approximate(name: str) -> str:
    # Only names other than relu and silu come here.
    if name not in ("gelu", "gelu_tanh"):
        raise NotImplementedError(f"no formula of {name}")
    return "tanh" if name == "gelu_tanh" else "none"


# Elements of the two widest vectors, which torch's loops process at once.
_AT_ONCE = 64


def _in_vectors(x: Tensor) -> bool:
    # True if torch's own code leaves no elements over. A traced tensor may have any size.
    if not x.is_cpu or x.dtype == torch.float64:
        return True
    is_traced = torch.compiler.is_compiling() or type(x) is not Tensor
    return not is_traced and x.numel() % _AT_ONCE == 0 and x.is_contiguous()


def _filled_up(function: Callable[..., Tensor], *xs: Tensor) -> Tensor:
    if all([_in_vectors(x) for x in xs]):
        return function(*xs)
    left = -xs[0].numel() % _AT_ONCE
    return function(*(F.pad(x.reshape(-1), (0, left)) for x in xs))[: xs[0].numel()].view(xs[0].shape)


def apply(name: str, zs: Sequence[Tensor], out: Tensor) -> Tensor:
    """Compute y from z, or from gate and up, into `out`, which may be the first of them; outside of any graph."""
    function = GATED.get(name, name)
    if function == "relu":
        torch.clamp_min(zs[0], 0, out=out)
    elif not _in_vectors(zs[0]) or not out.is_contiguous():
        # torch's gelu writes nothing to an `out` with other strides than z (torch 2.13, by oneDNN).
        out.copy_(_of(function, zs[0]))
    elif function == "silu":
        _aten.silu.out(zs[0], out=out)
    else:
        _aten.gelu.out(zs[0], approximate=_approximate(function), out=out)
    return out.mul_(zs[1]) if name in GATED else out


def _of(function: str, z: Tensor) -> Tensor:
    if function == "relu":
        return F.relu(z)
    if function == "silu":
        return _filled_up(F.silu, z)
    return _filled_up(partial(F.gelu, approximate=_approximate(function)), z)


def _backward(function: str, dy: Tensor, kept: Tensor) -> Tensor:
    if function == "relu":
        return _aten.threshold_backward(dy, kept, 0)  # type: ignore[no-any-return]
    if function == "silu":
        return _filled_up(_aten.silu_backward, dy, kept)
    return _filled_up(partial(_aten.gelu_backward, approximate=_approximate(function)), dy, kept)


def gradients(name: str, dys: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
    """Return dz of every product; `kept` holds the products, or the results for `OF_RESULT`."""
    if name not in GATED:
        return [_backward(name, dy, each) for dy, each in zip(dys, kept, strict=True)]
    function, (gate, up), (dy,) = GATED[name], kept, dys
    return [_backward(function, dy * up, gate), dy * _of(function, gate)]
