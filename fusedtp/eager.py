"""Calling the sharded matmul where no compiler traces: its forward and backward without the dispatcher, which takes
longer than a small matmul.

A layer's weight and bias are DTensors. The op takes them as they are, multiplies their local parts and hands DTensors
back as gradients: one node of the graph, where DTensor.to_local would add one for each. Forward and backward of a small
layer take 290 us so, 440 by to_local and 190 with plain tensors (one rank, 8 x 64 x 64, with bias, an EPYC core).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .calls import Call, one
from .parameters import PLAIN, as_gradient, local, part
from .registered import refuse_forward_mode, transforms_active
from .sharded import Problem, backward, forward, sharded_matmul, sharded_matmul_backward

# What is_grads_batched makes of a gradient, whose memory is not that of one; there is no public way.
_is_batched = torch._C._functorch.is_legacy_batchedtensor


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, problem: Problem) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        w_part = part(w, 2)
        # Local shards only, and only those that a gradient will be made of.
        ctx.save_for_backward(x if needs_w else None, w_part if needs_x else None)
        ctx.problem = problem
        # Where they are plain autograd knows them by what is saved.
        ctx.w = w if type(w) not in PLAIN else None
        ctx.bias = bias if bias is not None and type(bias) not in PLAIN else None
        return forward(x, w_part, None if bias is None else part(bias, 1), problem)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with Call():
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
        dx, dw, db = sharded_matmul_backward(dy, x, w, *needs, *ctx.problem.arguments)
    else:
        dx, dw, db = backward(dy.resolve_neg(), x, w, needs, ctx.problem)
    if needs_w and ctx.w is not None:
        dw = as_gradient(dw, ctx.w)
    if needs_bias and ctx.bias is not None:
        db = as_gradient(db, ctx.bias)
    return dx if needs_x else None, dw if needs_w else None, db if needs_bias else None, None


def apply(x: Tensor, w: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """The operator; where nobody could tell, without the dispatcher. The arguments are those of `Problem.of`."""
    plain = type(x) in PLAIN and type(w) in PLAIN and (bias is None or type(bias) in PLAIN)
    if not plain or torch.compiler.is_compiling():
        return _dispatched(x, w, bias, *arguments)
    return run(x, w, bias, Problem.of(*arguments))


@one
def _dispatched(x: Tensor, w: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    out: Tensor = sharded_matmul(x, w, bias, *arguments)
    return out


def run(x: Tensor, w: Tensor, bias: Tensor | None, problem: Problem) -> Tensor:
    """`apply` where no compiler traces, of an x of no subclass; w and bias may be a layer's DTensors."""
    with Call():
        return _run(x, w, bias, problem)


def _run(x: Tensor, w: Tensor, bias: Tensor | None, problem: Problem) -> Tensor:
    if is_in_torch_dispatch_mode() or transforms_active() or x.is_meta:
        bias = None if bias is None else local(bias, 1)
        out: Tensor = sharded_matmul(x, local(w, 2), bias, *problem.arguments)
        return out
    # A kernel reads memory, which torch's bit for a negated view does not change.
    if x.is_neg() or w.is_neg() or (bias is not None and bias.is_neg()):
        x, w, bias = x.resolve_neg(), w.resolve_neg(), None if bias is None else bias.resolve_neg()
    if not torch.is_grad_enabled():
        return forward(x, part(w, 2), None if bias is None else part(bias, 1), problem)
    # Autograd would say so after the op has run.
    if (w.requires_grad and x.is_inference()) or (x.requires_grad and w.is_inference()):
        which = "first operand" if x.is_inference() else "weight"
        raise ValueError(f"the {which} was made in torch.inference_mode and cannot be kept for a gradient: clone() it")
    eager: Tensor = _Eager.apply(x, w, bias, problem)  # type: ignore[no-untyped-call]
    return eager
