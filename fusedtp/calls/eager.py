"""Calling the sharded matmul where no compiler traces: its forward and backward without the dispatcher, which takes
longer than a small matmul.

A layer's weight and bias are DTensors. The op takes them as they are, multiplies their local parts and hands DTensors
back as gradients: one node of the graph, where DTensor.to_local would add one for each. Forward and backward of a small
layer take 290 us so, 440 by to_local and 190 with plain tensors (one rank, 8 x 64 x 64, with bias, an EPYC core).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .. import groups
from ..groups import Group
from ..turns import Open, one
from . import arguments
from . import call as calls_
from .call import Call as Compiled
from .call import Prepare
from .operators import sharded_matmul, sharded_matmul_backward
from .parameters import PLAIN, as_gradient, local, part
from .registered import refuse_forward_mode, transforms_active

# Whether is_grads_batched has wrapped a gradient, whose memory is then a batch's; there is no public way to ask.
_is_batched = torch._C._functorch.is_legacy_batchedtensor


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: Compiled) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        # Autograd keeps plain tensors, among what is saved; DTensors are kept here.
        ctx.call, ctx.w, ctx.bias = call, None, None
        if type(w) not in PLAIN:
            ctx.w, w = w, part(w, 2)
        if bias is not None and type(bias) not in PLAIN:
            ctx.bias, bias = bias, part(bias, 1)
        # Local shards only, and only those that a gradient will be made of.
        ctx.save_for_backward(x if needs_w else None, w if needs_x else None)
        given = {"x": x, "w": w} if bias is None else {"x": x, "w": w, "bias": bias}
        return call.run(bias is not None, given)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with Open():
            return _gradients(ctx, dy)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs_x, needs_w, needs_bias = needs = ctx.needs_input_grad[:3]
    x, w = (dy.new_empty(0) if saved is None else saved for saved in ctx.saved_tensors)
    batched = transforms_active() or _is_batched(dy)
    # With create_graph=True, or for a batch of gradients at once (is_grads_batched): the operator knows how.
    if torch.is_grad_enabled() or batched:
        if batched and not (ctx.w is None and ctx.bias is None):
            raise NotImplementedError(
                "a batch of gradients at once (is_grads_batched, vmap) is not implemented for parameters that are "
                "DTensors: go through it in a loop"
            )
        if needs_x and ctx.w is not None:
            w = local(ctx.w, 2)
        dx, dw, db = sharded_matmul_backward(
            dy, x, w, needs_x, needs_w, needs_bias, ctx.call.settings.text, ctx.call.numbers
        )
    else:
        dx, dw, db = ctx.call.backward(dy.resolve_neg(), x, w, needs)
    if needs_w and ctx.w is not None:
        dw = as_gradient(dw, ctx.w)
    if needs_bias and ctx.bias is not None:
        db = as_gradient(db, ctx.bias)
    return dx if needs_x else None, dw if needs_w else None, db if needs_bias else None, None


def apply(
    prepare: Prepare, x: Tensor, w: Tensor, bias: Tensor | None, group: Group, options: tuple[Any, ...]
) -> Tensor:
    """Make the call that `prepare` checks and describes, under torch.autocast in its dtype; without the dispatcher
    where that makes no visible difference.
    """
    if type(group) is not ProcessGroup or groups.inherited is not None or not dist.is_initialized():
        group = groups.resolve(group)
    plain = type(x) in PLAIN and type(w) in PLAIN and (bias is None or type(bias) in PLAIN)
    # `arguments.autocasts`, written out as every call passes here.
    cast = plain and not x.is_meta and torch.is_autocast_enabled(x.device.type)
    dispatched = not plain or torch.compiler.is_compiling()
    if cast or dispatched:
        x, w, bias = arguments.autocast(x, w, bias)
    if dispatched:
        return _dispatched(x, w, bias, *prepare(x, w, bias, group, *options))
    return run(x, w, bias, calls_.find(prepare, x, w, bias, group, options))


def run_described(x: Tensor, w: Tensor, settings: str, numbers: Sequence[int]) -> Tensor:
    """`apply` of a call without a bias that is described already."""
    if torch.compiler.is_compiling() or type(x) not in PLAIN or type(w) not in PLAIN:
        return _dispatched(x, w, None, settings, numbers)
    return run(x, w, None, calls_.of(settings, numbers, x.dtype, x.device))


def of_parameters(
    prepare: Prepare, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, *options: Any
) -> Tensor:
    """`apply` of a layer: its weight and bias are DTensors, or plain where torch.func has put other ones in place."""
    if type(weight) in PLAIN:
        weight, bias = local(weight, 2), None if bias is None else local(bias, 1)
    plain = type(x) in PLAIN and not torch.compiler.is_compiling()
    if plain and (x.is_meta or not torch.is_autocast_enabled(x.device.type)):
        w_part, bias_part = part(weight, 2), None if bias is None else part(bias, 1)
        return run(x, weight, bias, calls_.find(prepare, x, w_part, bias_part, group, options))
    weight, bias = local(weight, 2), None if bias is None else local(bias, 1)
    return apply(prepare, x, weight, bias, group, options)


@one
def _dispatched(x: Tensor, w: Tensor, bias: Tensor | None, settings: str, numbers: Sequence[int]) -> Tensor:
    out: Tensor = sharded_matmul(x, w, bias, settings, numbers)
    return out


def run(x: Tensor, w: Tensor, bias: Tensor | None, call: Compiled) -> Tensor:
    """`apply` where no compiler traces and x is of no subclass; w and bias may be a layer's DTensors."""
    with Open():
        if is_in_torch_dispatch_mode() or transforms_active() or x.is_meta:
            bias = None if bias is None else local(bias, 1)
            out: Tensor = sharded_matmul(x, local(w, 2), bias, call.settings.text, call.numbers)
            return out
        # A kernel reads memory, which torch's bit for a negated view does not change.
        if x.is_neg() or w.is_neg() or (bias is not None and bias.is_neg()):
            x, w, bias = x.resolve_neg(), w.resolve_neg(), None if bias is None else bias.resolve_neg()
        if torch.is_grad_enabled():
            # Autograd would only refuse after the op has run.
            if (w.requires_grad and x.is_inference()) or (x.requires_grad and w.is_inference()):
                _refuse_inference(x)
            out = _Eager.apply(x, w, bias, call)  # type: ignore[no-untyped-call]
            return out
        if type(w) not in PLAIN:
            w, bias = part(w, 2), None if bias is None else part(bias, 1)
        return call.forward(x, w, bias)


def _refuse_inference(x: Tensor) -> NoReturn:
    which = "first operand" if x.is_inference() else "weight"
    raise ValueError(f"the {which} was made in torch.inference_mode and cannot be kept for a gradient: clone() it")
