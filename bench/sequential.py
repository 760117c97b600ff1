"""`sequential`: this package's own collective, then one whole matmul, or one whole matmul, then the collective.

Its transport is that of `decomposed`: the same symmetric memory, on a GPU the copy engine. It splits no matmul, and
nothing overlaps. So unfused / sequential is what the transport gains, and sequential / a schedule what overlap gains.

    kind         forward               dx                     dw
    gather       gather(x) @ w.T       scatter(dy @ w)        dy.T @ gather(x)
    scatter      scatter(x @ w.T)      gather(dy) @ w         gather(dy).T @ x
    all_reduce   reduce(x @ w.T)       dy @ w                 dy.T @ x

As in the schedules, forward keeps its own shards alone, backward gathers again, and dx and dw share a gather.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedtp import collectives, trace
from fusedtp.scaled import Quantized, Scaled, pack_into, packed_bytes, unpacked
from fusedtp.schedules.local import mm

from .operands import Operands

SCHEDULE = "decomposed"


def call(operands: Operands, group: ProcessGroup) -> Callable[[Any, Any], Tensor]:
    """Return y = call(x, w), differentiable unless x and w are float8."""
    given: dict[str, Any] = {"group": group, "schedule": SCHEDULE}
    even = {**given, "sizes": operands.m_sizes}
    gather, scatter = partial(collectives.all_gather, **even), partial(collectives.reduce_scatter, **even)
    reduce = {"scatter": scatter, "all_reduce": partial(collectives.all_reduce, **given)}.get(operands.case.kind)
    if operands.case.is_float8:
        return partial(_float8, operands.dtype, gather, reduce)
    apply: Any = _Sequential.apply
    return lambda x, w: apply(x, w, gather, scatter, reduce)


def _multiplied(a: Any, b: Any) -> Tensor:
    with trace.span("multiply"):
        return mm(a, b)


class _Sequential(torch.autograd.Function):
    """y = x @ w.T with a gather of x, or with a `reduce` of the product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, gather: Any, scatter: Any, reduce: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.gather, ctx.scatter, ctx.reduce = gather, scatter, reduce
        if reduce is None:
            return _multiplied(gather(x), w.t())
        return reduce(_multiplied(x, w.t()))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, w) = grads, ctx.saved_tensors
        if ctx.reduce is ctx.scatter:
            dy = ctx.gather(dy)
        dx = _multiplied(dy, w)
        if ctx.reduce is None:
            dx, x = ctx.scatter(dx), ctx.gather(x)
        return dx, _multiplied(dy.t(), x), None, None, None


def _float8(out: torch.dtype, gather: Any, reduce: Any, x: Scaled, w: Scaled) -> Tensor:
    # Scales travel with rows, in a matrix of bytes that is viewed as the results' dtype, as no collective takes bytes.
    own, other = Quantized.of(x, out), Quantized.of(w, out).t()
    if reduce is not None:
        return reduce(_multiplied(own, other))  # type: ignore[no-any-return]
    rows = own.data.new_zeros(
        own.shape[0], packed_bytes(own.shape[1], blocks=own.blocks is not None), dtype=torch.uint8
    )
    pack_into(rows, own)
    whole = gather(rows.view(out)).view(torch.uint8)
    return _multiplied(unpacked(whole, own.shape[1], own), other)
