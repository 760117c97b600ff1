"""The registered operators, `torch.ops.fusedtp.*`: opaque to the compiler, with exact fakes.

    sharded_matmul      a call: one string, and lengths, which a compiler may leave open (`call`)
    sharded_matmul_backward
    collective          all_gather, reduce_scatter or all_reduce of a matrix

Groups travel by name. Arguments are checked by the functions of `functional`, not here; schedules are chosen when an
operator runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import groups
from ..op import ALL_GATHER, ALL_REDUCE, OPS, REDUCE_SCATTER, Task
from ..workspaces import stale
from . import call as calls_
from .dispatch import Ready
from .registered import operator


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, ctx.settings, ctx.numbers = inputs
    needs_x, needs_w = ctx.needs_input_grad[:2]
    # Local shards only, and only those that a gradient will be made of.
    ctx.save_for_backward(x if needs_w else None, w if needs_x else None)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad[:3]
    x, w = (dy.new_empty(0) if saved is None else saved for saved in ctx.saved_tensors)
    out = sharded_matmul_backward(dy, x, w, needs[0], needs[1], needs[2], ctx.settings, ctx.numbers)
    return (*(grad if needed else None for grad, needed in zip(out, needs, strict=True)), None, None)


def _fake(x: Tensor, w: Tensor, bias: Tensor | None, settings: str, numbers: Sequence[int]) -> Tensor:
    return calls_.of(settings, numbers, x.dtype, x.device).forward(x, w, bias, fake=True)


@operator("sharded_matmul", _fake, _gradients, _setup)
def sharded_matmul(x: Tensor, w: Tensor, bias: Tensor | None, settings: str, numbers: Sequence[int]) -> Tensor:
    """y = x @ w + bias on shards; see `call.Settings` and `call.Call`."""
    return calls_.of(settings, numbers, x.dtype, x.device).forward(x, w, bias)


def _each(found: Sequence[Tensor | None], dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # A tensor for each: an operator's results may not share memory.
    dx, dw, db = (dy.new_empty(0) if each is None else each for each in found)
    return dx, dw, db


def _fake_backward(
    dy: Tensor, x: Tensor, w: Tensor, needs_x: bool, needs_w: bool, needs_bias: bool, settings: str,
    numbers: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    needs = (needs_x, needs_w, needs_bias)
    return _each(calls_.of(settings, numbers, dy.dtype, dy.device).backward(dy, x, w, needs, fake=True), dy)


def _refuse_second(ctx: Any, *grads: Tensor) -> Any:
    raise NotImplementedError(
        "second derivatives of fusedtp's matmuls are not implemented: what was computed with create_graph=True can be "
        "used, but not differentiated with respect to what they were given"
    )


@operator("sharded_matmul_backward", _fake_backward, _refuse_second)
def sharded_matmul_backward(
    dy: Tensor, x: Tensor, w: Tensor, needs_x: bool, needs_w: bool, needs_bias: bool, settings: str,
    numbers: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dw, db), of shape [0] where not needed; x and w may be of shape [0] where they are not needed."""
    needs = (needs_x, needs_w, needs_bias)
    return _each(calls_.of(settings, numbers, dy.dtype, dy.device).backward(dy, x, w, needs), dy)


# Collectives that have run, by group and all that was checked.
_ready: WeakKeyDictionary[ProcessGroup, dict[Any, Ready]] = stale.table(WeakKeyDictionary())
_MAX_READY = 4096


def _fake_collective(x: Tensor, op: str, sizes: Sequence[int], rank: int, *_: object) -> Tensor:
    task = Task(OPS[op], ((x.shape[0], x.shape[1]),), x.dtype, tuple(sizes))
    return x.new_empty(task.results(rank)[0])


# The gradient of a gather is the scatter of its sum and the other way round. The sum of an all-reduce is the same
# tensor on every rank, and so is its gradient, which is therefore passed on as it is.


def _setup_collective(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.op, ctx.sizes, ctx.rank, ctx.group_name, ctx.schedule, _, ctx.debug, *_ = inputs


def _through(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.op == ALL_REDUCE.name:
        if torch.is_grad_enabled():
            # With create_graph=True: from here on the gradient is each rank's own, and its own gradient is the sum of
            # the ranks'.
            grad = as_it_is(grad, ctx.group_name, ctx.schedule, ctx.debug)
    else:
        other = REDUCE_SCATTER if ctx.op == ALL_GATHER.name else ALL_GATHER
        grad = collective(
            grad, other.name, ctx.sizes, ctx.rank, ctx.group_name, ctx.schedule, "auto", ctx.debug, "auto", ""
        )
    return grad, *[None] * 9


@operator("collective", _fake_collective, _through, _setup_collective)
def collective(
    x: Tensor, op: str, sizes: Sequence[int], rank: int, group_name: str, schedule: str, algorithm: str, debug: bool,
    producer: str, call: str,
) -> Tensor:  # fmt: skip
    """The collective `op` of x [R, C]. sizes: of rows that are gathered or scattered. call: see `meaning`."""
    group = groups.named(group_name)
    shape = (x.shape[0], x.shape[1])
    key = (op, shape, x.dtype, x.device, tuple(sizes), schedule, algorithm, debug, producer, call)
    kept = _ready.setdefault(group, {})
    ready = kept.get(key)
    if ready is None or ready.is_stale():
        if len(kept) >= _MAX_READY:
            kept.clear()
        task = Task(OPS[op], (shape,), x.dtype, tuple(sizes), algorithm=algorithm)
        ready = kept[key] = Ready(task, schedule, group, x.device, producer=producer, call=call, debug=debug)
    return ready.run((x,))[0]


def _summed(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    out = collective(grad, ALL_REDUCE.name, (), 0, ctx.group_name, ctx.schedule, "auto", ctx.debug, "auto", "")
    return out, *[None] * 3


def _setup_as_it_is(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group_name, ctx.schedule, ctx.debug = inputs


def _fake_as_it_is(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@operator("as_it_is", _fake_as_it_is, _summed, _setup_as_it_is)
def as_it_is(x: Tensor, group_name: str, schedule: str, debug: bool) -> Tensor:
    """x [R, C], the same on every rank; what is computed with it is each rank's own."""
    return x.clone()
