"""The registered operators, `torch.ops.fusedtp.*`: opaque to the compiler, with exact fakes.

    sharded_matmul      a call (`call`) with one weight; backward: sharded_matmul_backward
    sharded_matmuls     the same with several weights; backward: sharded_matmuls_backward
    activated_matmuls   one or several weights, with an activation; backward: sharded_matmuls_backward
    collective          all_gather, reduce_scatter or all_reduce of a matrix
    as_it_is            identity; backward: all_reduce

`quantized` has scaled_matmuls, for float8 operands with scales. A call is one string and a list of lengths, which may
be symbolic. Groups are passed by name. `functional` checks arguments; operators do not. Schedules are chosen when an
operator runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import activations, groups, norms
from ..norms import Norm
from ..op import ALL_GATHER, ALL_REDUCE, AS_ANY, GATED, OF_RESULT, OPS, REDUCE_SCATTER, Task
from ..torch_private import transforms_active
from ..workspaces import generation
from . import call as calls_
from .dispatch import Ready
from .parameters import check_kept, keep
from .registered import operator
from .settings import Settings, normed, without_activation, without_norm


def matmul(
    x: Tensor, parameters: Sequence[Any], settings: str, numbers: Sequence[int], residual: Tensor | None,
    activation: str, norm: Norm | None = None,
) -> Any:  # fmt: skip
    """Run a call by its operator and return the result, or a tuple of results for several weights.

    `parameters` has w and bias of each weight in turn. A norm is an op of its own, which a compiler may fuse with
    others.
    """
    if norm is not None:
        y = matmul(x, parameters, without_norm(settings), numbers, residual, activation)
        return norms.of(_with_gradients_summed(norm, settings), y), y
    if activation:
        return _activated(x, parameters, settings, numbers, activation)
    if len(parameters) == 2:
        return sharded_matmul(x, parameters[0], parameters[1], residual, settings, numbers)
    biases = [each for each in parameters[1::2] if each is not None]
    biased = [each is not None for each in parameters[1::2]]
    return tuple(sharded_matmuls(x, parameters[::2], biases, biased, settings, numbers))


def _with_gradients_summed(norm: Norm, settings: str) -> Norm:
    # If each rank norms rows of its own, backward sums the gradients of the norm's parameters over ranks.
    is_split, group_name, schedule = normed(settings)
    if not is_split:
        return norm
    return norm.map(lambda each: as_it_is(each[None], group_name, schedule)[0])


def summed(terms: Tensor, settings: str) -> Tensor:
    """Sum the ranks' gradients of a norm's parameters, [R, N], over a call's group."""
    _, group_name, schedule = normed(settings)
    return collective(terms, ALL_REDUCE.name, (), 0, group_name, schedule, "auto", "auto", "", 0)


def _activated(x: Tensor, parameters: Sequence[Any], settings: str, numbers: Sequence[int], activation: str) -> Any:
    ws, given = parameters[::2], [each for each in (x, *parameters) if each is not None]
    if transforms_active() and not torch.compiler.is_compiling():
        # torch.func takes no lists of tensors, so the activation is an op of its own.
        zs = matmul(x, parameters, without_activation(settings), numbers, None, "")
        ys = activations.of(activation, zs if isinstance(zs, tuple) else (zs,))
    else:
        biases = [each for each in parameters[1::2] if each is not None]
        biased = [each is not None for each in parameters[1::2]]
        keep = activation not in OF_RESULT and torch.is_grad_enabled() and any([each.requires_grad for each in given])
        ys = activated_matmuls(x, ws, biases, biased, keep, settings, numbers)
        ys = ys[: 1 if activation in GATED else len(ws)]
    return ys[0] if len(ys) == 1 else tuple(ys)


def gradients(
    call: calls_.Call, dys: Sequence[Tensor], x: Tensor, ws: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Run `call.Call.backward` by its operator."""
    text, numbers = call.settings.text, call.numbers
    found: Sequence[Tensor]
    if len(ws) == 1:
        found = sharded_matmul_backward(dys[0], x, ws[0], needs[0], needs[1], needs[2], text, numbers)
    else:
        found = sharded_matmuls_backward(dys, x, ws, needs, text, numbers)
    return [each if needed else None for each, needed in zip(found, needs, strict=True)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, _, ctx.settings, ctx.numbers = inputs
    needs_x, needs_w = ctx.needs_input_grad[:2]
    # Local shards only, and only those that a needed gradient reads.
    ctx.save_for_backward(x if needs_w else None, w if needs_x else None)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad[:3]
    x, w = (dy.new_empty(0) if saved is None else saved for saved in ctx.saved_tensors)
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if any(needs):
        out = sharded_matmul_backward(dy, x, w, needs[0], needs[1], needs[2], ctx.settings, ctx.numbers)
        grads = tuple(grad if needed else None for grad, needed in zip(out, needs, strict=True))
    return (*grads, dy if ctx.needs_input_grad[3] else None, None, None)


def _forward(
    x: Tensor, parameters: Sequence[Tensor | None], settings: str, numbers: Sequence[int],
    residual: Tensor | None = None, products: bool = False, *, fake: bool = False,
) -> list[Tensor]:  # fmt: skip
    call = calls_.of(settings, numbers, x.dtype, x.device)
    if not fake:
        # In a compiled graph no other code sees these tensors.
        for each in (x, *parameters[::2]):
            keep(each)
    return call.forward(call.given(x, parameters, residual), products, fake=fake)


def _backward(
    dys: Sequence[Tensor], x: Tensor, ws: Sequence[Tensor], needs: Sequence[bool], settings: str,
    numbers: Sequence[int], *, fake: bool = False,
) -> list[Tensor]:  # fmt: skip
    # A new tensor for each gradient that is not needed: an operator's results may not share memory.
    call = calls_.of(settings, numbers, dys[0].dtype, dys[0].device)
    if not fake:
        check_kept((x, *ws))
    found = call.backward(dys, x, ws, tuple(needs), fake=fake)
    return [dys[0].new_empty(0) if each is None else each for each in found]


def _fake(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, settings: str, numbers: Sequence[int]
) -> Tensor:
    return _forward(x, (w, bias), settings, numbers, residual, fake=True)[0]


@operator("sharded_matmul", _fake, _gradients, _setup)
def sharded_matmul(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, settings: str, numbers: Sequence[int]
) -> Tensor:
    """Compute y = x @ w + bias + residual on shards; see `settings.Settings` and `call.Call`."""
    return _forward(x, (w, bias), settings, numbers, residual)[0]


def _fake_backward(
    dy: Tensor, x: Tensor, w: Tensor, needs_x: bool, needs_w: bool, needs_bias: bool, settings: str,
    numbers: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dw, db = _backward([dy], x, [w], (needs_x, needs_w, needs_bias), settings, numbers, fake=True)
    return dx, dw, db


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
    """Return (dx, dw, db), of shape [0] if not needed. x and w may have shape [0] if no needed gradient reads them."""
    dx, dw, db = _backward([dy], x, [w], (needs_x, needs_w, needs_bias), settings, numbers)
    return dx, dw, db


# Operators with several weights, whose columns are concatenated. torch.func does not support them. Autograd finds
# tensors only in lists without None, so `biases` has the given biases, and `biased` tells which weights have one.


def paired(ws: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[bool]) -> list[Tensor | None]:
    """Return each weight, followed by its bias or None."""
    given = iter(biases)
    return [each for w, has in zip(ws, biased, strict=True) for each in (w, next(given) if has else None)]


def with_zeros(dys: Sequence[Tensor | None], widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Replace missing gradients, of results with `widths` columns, by zeros. At least one must be given."""
    given = next(dy for dy in dys if dy is not None)
    return tuple(
        given.new_zeros(*given.shape[:-1], width) if dy is None else dy
        for dy, width in zip(dys, widths, strict=True)
    )  # fmt: skip


def _setup_several(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ws, _, ctx.biased, ctx.settings, ctx.numbers = inputs
    ctx.widths = [each.shape[-1] for each in output]
    # The weight of an unused result has gradient None instead of zeros.
    ctx.set_materialize_grads(False)
    needs_x, *needs = ctx.needs_input_grad
    ctx.save_for_backward(x if any(needs[: len(ws)]) else None, *(w if needs_x else None for w in ws))


def _several_gradients(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    if all(dy is None for dy in grads):
        return (None,) * 6
    dys = with_zeros(grads, ctx.widths)
    x, *ws = (dys[0].new_empty(0) if saved is None else saved for saved in ctx.saved_tensors)
    return (*_gradients_of_several(ctx, dys, x, ws, grads), None, None, None)


def _gradients_of_several(
    ctx: Any, dys: Sequence[Tensor], x: Tensor, ws: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    needs_x, needs_w, needs_given, *_ = ctx.needs_input_grad
    given = iter(needs_given)
    needs_bias = [next(given) if has else False for has in ctx.biased]
    needs = [needs_x, *(each for pair in zip(needs_w, needs_bias, strict=True) for each in pair)]
    found = sharded_matmuls_backward(dys, x, ws, needs, ctx.settings, ctx.numbers)
    dx, *others = (each if needed else None for each, needed in zip(found, needs, strict=True))
    if len(grads) == len(ws):
        others = [each if grads[i // 2] is not None else None for i, each in enumerate(others)]
    return dx, others[::2], [db for db, has in zip(others[1::2], ctx.biased, strict=True) if has]


def _fake_several(
    x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[bool], settings: str,
    numbers: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    return _forward(x, paired(ws, biases, biased), settings, numbers, fake=True)


@operator("sharded_matmuls", _fake_several, _several_gradients, _setup_several)
def sharded_matmuls(
    x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[bool], settings: str,
    numbers: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """Compute y = x @ w + bias for each of several weights; `biases` has those of the `biased` weights."""
    return _forward(x, paired(ws, biases, biased), settings, numbers)


def _fake_several_backward(
    dys: Sequence[Tensor], x: Tensor, ws: Sequence[Tensor], needs: Sequence[bool], settings: str,
    numbers: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    return _backward(dys, x, ws, needs, settings, numbers, fake=True)


@operator("sharded_matmuls_backward", _fake_several_backward, _refuse_second)
def sharded_matmuls_backward(
    dys: Sequence[Tensor], x: Tensor, ws: Sequence[Tensor], needs: Sequence[bool], settings: str,
    numbers: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """Return dx, then dw and db of each weight, of shape [0] if not needed, as in `sharded_matmul_backward`."""
    return _backward(dys, x, ws, needs, settings, numbers)


def _setup_activated(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    x, ws, _, ctx.biased, keep, ctx.settings, ctx.numbers = inputs
    needs_x, *needs = ctx.needs_input_grad
    if not keep and Settings.of(ctx.settings).activation not in OF_RESULT:
        raise RuntimeError("a gradient of fusedtp::activated_matmuls is made of what `keep` adds to its results")
    # The last results: the products, or for `OF_RESULT` the results themselves. The products get no gradient.
    ctx.num_kept = len(ws)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        *output[-len(ws) :], x if any(needs[: len(ws)]) else None, *(w if needs_x else None for w in ws)
    )


def _activated_gradients(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    # Read once: a checkpoint recomputes saved tensors for one reader.
    every = ctx.saved_tensors
    kept = every[: ctx.num_kept]
    x, *ws = (kept[0].new_empty(0) if saved is None else saved for saved in every[ctx.num_kept :])
    activation = Settings.of(ctx.settings).activation
    count = 1 if activation in GATED else len(ws)
    dys = [torch.zeros_like(z) if dy is None else dy for dy, z in zip(grads[:count], kept, strict=False)]
    dzs = activations.gradients(activation, dys, kept)
    return (*_gradients_of_several(ctx, dzs, x, ws, grads[:count]), *[None] * 4)


def _fake_activated(
    x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[bool], keep: bool,
    settings: str, numbers: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    return _forward(x, paired(ws, biases, biased), settings, numbers, None, keep, fake=True)


@operator("activated_matmuls", _fake_activated, _activated_gradients, _setup_activated)
def activated_matmuls(
    x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[bool], keep: bool,
    settings: str, numbers: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """Compute the activated results; with `keep`, return the products x @ w + bias after them."""
    return _forward(x, paired(ws, biases, biased), settings, numbers, None, keep)


# Cache of collectives, by group and cache key.
_ready: WeakKeyDictionary[ProcessGroup, dict[Any, Ready]] = generation.table(WeakKeyDictionary())
_MAX_READY = 4096


def _fake_collective(x: Tensor, op: str, sizes: Sequence[int], rank: int, *_: object) -> Tensor:
    task = Task(OPS[op], ((x.shape[0], x.shape[1]),), x.dtype, tuple(sizes))
    return x.new_empty(task.results(rank)[0])


# The backward of a gather is a reduce-scatter, and the backward of a reduce-scatter is a gather. The result of an
# all-reduce is one tensor on every rank, and so is its gradient: backward returns it unchanged.


def _setup_collective(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.op, ctx.sizes, ctx.rank, ctx.group_name, ctx.schedule, _, *_ = inputs


def _through(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.op == ALL_REDUCE.name:
        if torch.is_grad_enabled():
            # With create_graph=True: each rank computes with its own copy of the gradient, so the gradient of `grad` is
            # the sum over ranks.
            grad = as_it_is(grad, ctx.group_name, ctx.schedule)
    else:
        other = REDUCE_SCATTER if ctx.op == ALL_GATHER.name else ALL_GATHER
        grad = collective(grad, other.name, ctx.sizes, ctx.rank, ctx.group_name, ctx.schedule, "auto", "auto", "", 0)
    return grad, *[None] * 9


@operator("collective", _fake_collective, _through, _setup_collective)
def collective(
    x: Tensor, op: str, sizes: Sequence[int], rank: int, group_name: str, schedule: str, algorithm: str,
    producer: str, call: str, leaves: int,
) -> Tensor:  # fmt: skip
    """Run the collective `op` on x [R, C].

    - `sizes`: every rank's number of rows, () for an all-reduce.
    - `rank`: this rank's number in the group; only the fake reads it.
    - `call`: see `agreement`.
    - `leaves`: leaves of a tree order, in which each rank's x is the sum of a subtree; 0 for rank order, `AS_ANY` for
      any order.
    """
    group = groups.named(group_name)
    shape = (x.shape[0], x.shape[1])
    key = (op, shape, x.dtype, x.device, tuple(sizes), schedule, algorithm, producer, call, leaves)
    kept = _ready.setdefault(group, {})
    ready = kept.get(key)
    if ready is None or ready.is_stale():
        if len(kept) >= _MAX_READY:
            kept.clear()
        task = Task(
            OPS[op], (shape,), x.dtype, tuple(sizes), algorithm=algorithm, leaves=max(0, leaves),
            any_order=leaves == AS_ANY,
        )  # fmt: skip
        ready = kept[key] = Ready(task, schedule, group, x.device, producer=producer, call=call)
    return ready.run((x,))[0]


def _summed(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    out = collective(grad, ALL_REDUCE.name, (), 0, ctx.group_name, ctx.schedule, "auto", "auto", "", 0)
    return out, *[None] * 2


def _setup_as_it_is(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group_name, ctx.schedule = inputs


def _fake_as_it_is(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@operator("as_it_is", _fake_as_it_is, _summed, _setup_as_it_is)
def as_it_is(x: Tensor, group_name: str, schedule: str) -> Tensor:
    """Copy x [R, C], the same on every rank. Ranks compute different values from it, so backward sums over ranks."""
    return x.clone()
