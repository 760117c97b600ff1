"""Eager calls: forward and backward without torch's dispatcher, which takes longer than a small matmul.

A layer's weight and bias are DTensors. The op multiplies their local tensors and returns DTensors as gradients. This
adds one node to the autograd graph. DTensor.to_local would add one more for each parameter. Forward and backward of a
small layer take 290 us, against 440 us with to_local and 190 us with plain tensors (one rank, 8 x 64 x 64, with bias,
an EPYC core).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import activations, groups, norms
from ..groups import Group
from ..locks import one
from ..norms import Norm
from ..options import Options
from ..torch_private import is_batched, is_in_torch_dispatch_mode, transforms_active
from . import arguments, operators, quantized
from . import call as calls_
from .arguments import Biases, Weights
from .call import Call as Compiled
from .call import Prepare
from .parameters import PLAIN, as_gradient, check_versions, holder, keep, local, part, versions
from .registered import refuse_forward_mode
from .settings import normed

# One weight gives one result, a tuple of weights gives a tuple.
_W = TypeVar("_W", Tensor, tuple[Tensor, ...])


class _Eager(torch.autograd.Function):
    # parameters: w and bias of each weight, as `call.parameters` names them.
    @staticmethod
    def forward(
        ctx: Any, call: Compiled, x: Tensor, residual: Tensor | None, norm_weight: Any, norm_bias: Any, *parameters: Any
    ) -> Any:
        _, needs_x, _, _, _, *needs = ctx.needs_input_grad
        # `save_for_backward` takes the plain tensors. The context itself holds the DTensors.
        ctx.call, ctx.dtensors = call, {}
        given, normed = {"x": x}, list[Any]()
        # Local shards only, and only those that a needed gradient reads.
        saved = [x if True in needs[::2] else None]
        for i, each in enumerate(parameters):
            if each is not None and type(each) not in PLAIN:
                ctx.dtensors[i] = each
                each = part(each, 1 if i & 1 else 2)
            if each is not None:
                given[call.parameters[i]] = each
            if not i & 1:
                saved.append(each if needs_x else None)
        if residual is not None:
            given["residual"] = residual
        if norm_weight is not None:
            ctx.norms = [None if type(each) in PLAIN else each for each in (norm_weight, norm_bias)]
            normed = ctx.norms[:1] if ctx.norms[0] is not None else []
            norm = Norm(*call.norm, norm_weight, norm_bias).map(_local_norm)
            given |= norm.given()
        # `Call.forward`, inlined because every call runs this.
        keeps = call.keeps and (needs_x or True in needs)
        outs = call.run((*given, calls_.KEPT) if keeps else tuple(given), given)
        # Autograd refuses in-place changes of a view from a Function, such as nn.ReLU(inplace=True).
        outs = [each.new_empty(0).set_(each) if each._is_view() else each for each in outs]  # type: ignore
        if call.activation:
            # Operands of the activation's gradient: the products; for relu the results.
            saved += outs[call.num_results :] or outs
            del outs[call.num_results :]
        if norm_weight is not None:
            saved += [outs[0], norm.weight, norm.bias]
            outs.reverse()
        # With several results, an unused result has gradient None instead of zeros.
        ctx.set_materialize_grads(len(outs) == 1)
        ctx.versions = versions(saved, [*(w for i, w in ctx.dtensors.items() if needs_x and not i & 1), *normed])
        ctx.save_for_backward(*saved)
        return outs[0] if len(outs) == 1 else tuple(outs)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> tuple[Tensor | None, ...]:
        # Outside `_gradients`, which opens a call: hooks of saved tensors may recompute with calls of their own.
        kept_tensors = ctx.saved_tensors
        return (None, *_gradients(ctx, dys, kept_tensors))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()


@one
def _gradients(ctx: Any, dys: tuple[Any, ...], kept_tensors: Sequence[Any]) -> list[Tensor | None]:
    # Gradients of x, the residual, the norm's two parameters, then w and bias of each weight.
    _, needs_x, needs_residual, _, _, *others = ctx.needs_input_grad
    needs, dtensors = (needs_x, *others), ctx.dtensors
    call, count = ctx.call, len(others) // 2
    of_norm: list[Tensor | None] = [None, None]
    check_versions(kept_tensors, ctx.versions)
    batched = transforms_active()
    for each in dys:
        batched = batched or (each is not None and is_batched(each))
    if batched and (dtensors or count > 1 or call.activation or call.norm[0]):
        raise NotImplementedError(
            "a batch of gradients at once (is_grads_batched, vmap) is not implemented for parameters that are "
            "DTensors, nor for several weights at once, nor with an activation or a norm: go through it in a loop"
        )
    if call.norm[0]:
        dys, of_norm = _through_norm(ctx, dys, *kept_tensors[-3:])
        kept_tensors = kept_tensors[:-3]
    unused = [dy is None for dy in dys]
    if False not in unused:
        return [None] * len(ctx.needs_input_grad[1:])
    if True in unused:
        dys = operators.with_zeros(dys, call.widths)
    x, *ws = [dys[0].new_empty(0) if saved is None else saved for saved in kept_tensors]
    ws, kept = ws[:count], ws[count:]
    found: list[Tensor | None] = [None] * len(needs)
    # create_graph=True and a batch of gradients (is_grads_batched) need the registered operator.
    if torch.is_grad_enabled() or batched:
        if needs[0]:
            ws = [local(dtensors[2 * i], 2) if 2 * i in dtensors else w for i, w in enumerate(ws)]
        for each in (x, *ws):
            keep(each, is_checked=True)
        dzs = activations.gradients(call.activation, dys, kept) if call.activation else dys
        found = operators.gradients(call, dzs, x, ws, needs)
    elif True in needs:
        dzs = activations.gradients(call.activation, dys, kept) if call.activation else dys
        found = call.backward([dz.resolve_neg() for dz in dzs], x, ws, needs)
    for i, is_unused in enumerate(unused):
        if is_unused:
            # Like the parameters of a linear that was not called.
            found[1 + 2 * i] = found[2 + 2 * i] = None
    for i, parameter in dtensors.items():
        if found[1 + i] is not None:
            found[1 + i] = as_gradient(found[1 + i], parameter)
    return [found[0], dys[0] if needs_residual else None, *of_norm, *found[1:]]


def _local_norm(parameter: Any) -> Tensor:
    mine: Tensor = parameter if type(parameter) in PLAIN else part(parameter, 1)
    return mine.resolve_neg()


def _through_norm(
    ctx: Any, dys: tuple[Any, ...], y: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[tuple[Tensor], list[Tensor | None]]:
    # dys: gradients of the normed sum and of the sum. Returns gradients of the sum and of the norm's parameters.
    (name, eps), text = ctx.call.norm, ctx.call.settings.text
    (dnormed, dy), needs = dys, ctx.needs_input_grad[3:5]
    found: Sequence[Tensor | None] = None, None
    if dnormed is not None:
        through, *found = norms.gradients(Norm(name, eps, weight, bias), y, dnormed, (True, *needs))
        dy = through if dy is None else through + dy
    elif any(needs) and normed(text)[0]:
        # Another rank may have a gradient, so this rank joins the sum with zeros.
        pairs = zip((weight, bias), needs, strict=True)
        found = [torch.zeros_like(each) if needed and each is not None else None for each, needed in pairs]
    if any(needs) and normed(text)[0]:
        # Every rank norms its own rows, so the gradients are summed over ranks.
        terms = torch.stack([each for each in found if each is not None])
        sums = iter(operators.summed(terms, text).unbind())
        found = [None if each is None else next(sums) for each in found]
    dtensors = zip(found, ctx.norms, strict=True)
    return (dy,), [each if each is None or of is None else as_gradient(each, of) for each, of in dtensors]


def apply(
    prepare: Prepare, x: Any, w: Any, bias: Any, group: Group, asked: Options, along: tuple[Any, ...] = (),
    residual: Tensor | None = None, norm: Norm | None = None, out_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Make the call that `prepare` checks and describes, without the dispatcher if possible.

    - `w`, `bias`: tensors, or tuples for several weights. Then the result is a tuple too.
    - `along`: further arguments of `prepare` after the options: a dim and its length on every rank.
    - `out_dtype`: dtype of the result if operands are `Scaled`.

    torch.autocast applies.
    """
    if (out_dtype is not None or type(x) is not Tensor) and not quantized.plain(x, w, out_dtype, asked.float8):
        return quantized.apply(prepare, x, w, bias, group, asked, along, out_dtype, residual, norm)
    if type(group) is not ProcessGroup or groups.inherited is not None or not dist.is_initialized():
        group = groups.resolve(group)
    parameters: Sequence[Any] = _interleaved(w, bias) if type(w) is tuple else (w, bias)
    plain = type(x) in PLAIN
    for each in parameters if residual is None else (*parameters, residual):
        plain = plain and (each is None or type(each) in PLAIN)
    if norm is not None:
        plain = plain and all([each is None or type(each) in PLAIN for each in norm[2:]])
    # `arguments.autocasts`, inlined because every call runs this.
    cast = plain and not x.is_meta and torch.is_autocast_enabled(x.device.type)
    dispatched = not plain or torch.compiler.is_compiling()
    if cast or dispatched:
        x, residual, *parameters = arguments.autocast(x, residual, *parameters)
        w, bias = _as_given(w, parameters)
        if norm is not None:
            x, *normed = arguments.autocast(x, *norm[2:])
            norm = Norm(*norm[:2], *normed)
    # Each branch returns the result in the same line: the call is closed by then, and an interruption before a further
    # line would lose the result of an op that has ended.
    if dispatched:
        described = prepare(x, w, bias, group, asked, *along, **calls_.extra(residual, norm))
        return _dispatched(x, parameters, *described, residual, asked.activation or "", norm)
    if type(w) is tuple and transforms_active():
        return _as_one(prepare, x, w, bias, group, asked, along)
    found = calls_.find(prepare, x, w, bias, group, asked, along, residual, norm)
    return run(found, x, residual, *parameters, norm=norm)


def _interleaved(ws: Any, biases: Any) -> list[Any]:
    # `arguments.several` gives each weight a bias or None.
    return [each for pair in zip(ws, biases, strict=True) for each in pair]


def _as_given(w: Weights, parameters: Sequence[Any]) -> tuple[Any, Any]:
    return (tuple(parameters[::2]), tuple(parameters[1::2])) if type(w) is tuple else (parameters[0], parameters[1])


@one
def _as_one(
    prepare: Prepare, x: Tensor, ws: Sequence[Tensor], biases: Any, group: ProcessGroup, asked: Options,
    along: tuple[Any, ...],
) -> Any:  # fmt: skip
    # torch.func takes no lists of tensors, so the weights are concatenated.
    prepare(x, ws, biases, group, asked, *along)
    activation, asked = asked.activation, asked._replace(activation=None)
    widths, given = [w.shape[0] for w in ws], list(zip(ws, biases, strict=True))
    whole = [w.new_zeros(w.shape[0]) if each is None else each for w, each in given]
    bias = torch.cat(whole) if any(each is not None for each in biases) else None
    made: Sequence[Tensor] = apply(prepare, x, torch.cat(list(ws)), bias, group, asked, along).split(widths, -1)
    made = activations.of(activation, made) if activation is not None else made
    return tuple(made) if len(made) > 1 else made[0]


def run_described(x: Tensor, w: Tensor, settings: str, numbers: Sequence[int]) -> Tensor:
    """Run a call that is already described, without a bias."""
    if torch.compiler.is_compiling() or type(x) not in PLAIN or type(w) not in PLAIN:
        return _dispatched(x, (w, None), settings, numbers, None, "")  # type: ignore[no-any-return]
    return run(calls_.of(settings, numbers, x.dtype, x.device), x, None, w, None)  # type: ignore[no-any-return]


def of_parameters(
    prepare: Prepare, x: Tensor, weight: _W, bias: Biases, group: ProcessGroup, asked: Options,
    along: tuple[Any, ...] = (), residual: Tensor | None = None, norm: Norm | None = None,
) -> Any:  # fmt: skip
    """Make a layer's call with its weight and bias, which are DTensors, or plain tensors from torch.func."""
    parameters: list[Any] = _interleaved(weight, bias) if type(weight) is tuple else [weight, bias]
    plain = type(x) in PLAIN and not torch.compiler.is_compiling()
    plain = plain and (residual is None or type(residual) in PLAIN)
    parts: list[Any] = []
    for i, each in enumerate(parameters):
        # torch.func may wrap tensors, which only `local` unwraps.
        plain = plain and (bool(i & 1) or type(each) not in PLAIN)
        parts.append(None if each is None or not plain else part(each, 1 if i & 1 else 2))
    if plain and (x.is_meta or not torch.is_autocast_enabled(x.device.type)):
        w, b = parts if type(weight) is not tuple else _as_given(weight, parts)
        mine = None if norm is None else norm.map(_local_norm)
        found = calls_.find(prepare, x, w, b, group, asked, along, residual, mine)
        return run(found, x, residual, *parameters, norm=norm)
    norm = None if norm is None else norm.map(lambda each: local(each, 1))
    whole = [None if each is None else local(each, 1 if i & 1 else 2) for i, each in enumerate(parameters)]
    w, b = _as_given(weight, whole)
    return apply(prepare, x, w, b, group, asked, along, residual, norm)


@one
def _dispatched(
    x: Tensor, parameters: Sequence[Any], settings: str, numbers: Sequence[int], residual: Tensor | None,
    activation: str, norm: Norm | None = None,
) -> Any:  # fmt: skip
    return operators.matmul(x, parameters, settings, numbers, residual, activation, norm)


@one
def run(call: Compiled, x: Tensor, residual: Tensor | None, *parameters: Any, norm: Norm | None = None) -> Any:
    """Run a prepared call on a plain x, outside of compilers. Parameters may be a layer's DTensors."""
    if is_in_torch_dispatch_mode() or transforms_active() or x.is_meta:
        given = [None if each is None else local(each, 1 if i & 1 else 2) for i, each in enumerate(parameters)]
        if norm is not None:
            norm = norm.map(lambda each: local(each, 1))
        return operators.matmul(x, given, call.settings.text, call.numbers, residual, call.activation, norm)
    negated, inference, plain = x.is_neg(), x.is_inference(), True
    for each in parameters if norm is None else (*parameters, *norm[2:]):
        if each is not None:
            negated = negated or each.is_neg()
            inference = inference or each.is_inference()
            plain = plain and type(each) in PLAIN
    # Kernels read memory and ignore torch's negative bit of a view.
    if negated:
        x, parameters = x.resolve_neg(), tuple(each if each is None else each.resolve_neg() for each in parameters)
    if residual is not None:
        residual = residual.resolve_neg()
    if torch.is_grad_enabled():
        # Autograd would refuse only after the op has run.
        if inference:
            _refuse_inference(x, parameters[::2] if norm is None else (*parameters[::2], norm.weight))
        if call.is_linear and plain and residual is None and holder(x) is holder(parameters[0]) is None:
            return call.linear(x, *parameters)
        normed = (None, None) if norm is None else norm[2:]
        return _Eager.apply(call, x, residual, *normed, *parameters)  # type: ignore[no-untyped-call]
    if not plain:
        parameters = tuple(
            [None if each is None else part(each, 1 if i & 1 else 2) for i, each in enumerate(parameters)]
        )
    if call.is_linear and residual is None:
        return call.linear(x, *parameters)
    if norm is not None:
        y, out = call.forward(call.given(x, parameters, residual, norm.map(_local_norm)))
        return out, y
    outs = call.forward(call.given(x, parameters, residual))
    return outs[0] if len(outs) == 1 else tuple(outs)


def _refuse_inference(x: Tensor, ws: Iterable[Any]) -> None:
    for w in ws:
        if (w.requires_grad and x.is_inference()) or (x.requires_grad and w.is_inference()):
            which = "first operand" if x.is_inference() else "weight"
            raise ValueError(
                f"the {which} was made in torch.inference_mode and cannot be kept for a gradient: clone() it"
            )
