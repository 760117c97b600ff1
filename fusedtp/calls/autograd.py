"""Forward and backward of a call, written once, and the ways to them.

    forward     the call's program (`call`); kept are this rank's own shards that a needed gradient reads
    backward    the gradient of an activation or a norm, by torch's formulas, then the call's program for gradients

Eager calls go around torch's dispatcher, which takes longer than a small matmul: `_Eager` is the node of autograd's
graph. Under a compiler, in a dispatch mode, on meta and in torch.func's transforms a call is an operator,
`torch.ops.fusedtp.matmul`, whose gradients are `matmul_backward`. Both have the same `save` and `gradients`.

A layer's weight and bias are DTensors. The node multiplies their local tensors and returns DTensors as gradients.
DTensor.to_local would add one more node for each parameter. Forward and backward of a small layer take 290 us, against
440 us with to_local and 190 us with plain tensors (one rank, 8 x 64 x 64, with bias, an EPYC core).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import activations, groups, norms
from ..epilogue import NO_EPILOGUE, NORM, OPERANDS, RESULT, Epilogue
from ..groups import Group
from ..locks import one
from ..op import Options
from ..scaled import Quantized, Scaled
from ..torch_private import (
    add_batch,
    is_batched,
    is_in_torch_dispatch_mode,
    outside_compiler,
    remove_batch,
    transforms_active,
)
from . import arguments, operators
from . import call as calls_
from .call import Call, ProblemFunction
from .operators import operator, refuse_forward_mode
from .parameters import PLAIN, as_gradient, check_kept, check_versions, holder, keep, local, part, versions
from .problems import Described, Settings


@one
def apply(
    problem: ProblemFunction, x: Any, w: Any, operands: Mapping[str, Any], group: Group, options: Options,
    dims: tuple[Any, ...] = (), epilogue: Epilogue = NO_EPILOGUE, out_dtype: torch.dtype | None = None, *,
    of_layer: bool = False,
) -> Any:  # fmt: skip
    """Make the call that `problem` checks and describes, without the dispatcher if possible.

    - `w`: a tensor, or a tuple of several weights. Then the result is a tuple too.
    - `operands`: of the epilogue, by name: tensors or None, or tuples for several weights.
    - `dims`: further arguments of `problem` after the options: a dim and its length on every rank.
    - `epilogue`: its options.
    - `out_dtype`: dtype of the result if operands are `Scaled`.
    - `of_layer`: whether parameters are a layer's: DTensors, or plain tensors from torch.func.

    torch.autocast applies.
    """
    # One function for all calls, because every call runs it.
    if (out_dtype is not None or type(x) is not Tensor) and not arguments.is_plain(x, w, out_dtype, options.float8):
        return _scaled(problem, x, w, operands, group, options, dims, epilogue, out_dtype)
    if group is None:
        group = dist.group.WORLD
    if type(group) is not ProcessGroup or groups.inherited is not None or not dist.is_initialized():
        group = groups.resolve(group)
    if type(w) is tuple:
        tensors = calls_.named(x, w, operands)
    else:
        # As `call.named`, inlined.
        tensors = {"x": x, "w": w}
        for name, each in operands.items():
            if each is not None:
                tensors[name] = each
    # The parameters of a layer are unwrapped once: outside of autograd for `_Eager`, else by to_local.
    compiling = torch.compiler.is_compiling()
    in_graph = compiling or is_in_torch_dispatch_mode() or transforms_active()
    parts = _parts(tensors) if of_layer and not in_graph else None
    if parts is None:
        if of_layer:
            tensors = _local(tensors)
        special = compiling
        for each in tensors.values():
            special = special or type(each) not in PLAIN
        # As in `arguments.autocast`, inlined.
        if special or (not x.is_meta and torch.is_autocast_enabled(x.device.type)):
            tensors = dict(zip(tensors, arguments.autocast(*tensors.values()), strict=True))
        if special:
            return _by_operator(tensors, *calls_.describe(problem, tensors, group, options, dims, epilogue))
        parts = tensors
    call = calls_.find(problem, parts, group, options, dims, epilogue)
    if in_graph or x.is_meta:
        return _by_operator(tensors, call.settings, call.numbers)
    if any(map(_is_neg, tensors.values())):
        # Kernels read memory and ignore torch's negative bit of a view.
        plain, parts = tensors is parts, {name: each.resolve_neg() for name, each in parts.items()}
        tensors = parts if plain else {name: each.resolve_neg() for name, each in tensors.items()}
    if torch.is_grad_enabled():
        # Autograd would refuse only after the op has run.
        if any(map(_is_inference, tensors.values())):
            _refuse_inference(call, tensors)
        is_linear = call.is_linear and _LINEAR.issuperset(tensors) and tensors is parts
        if is_linear and holder(parts["x"]) is None and holder(parts["w"]) is None:
            return call.linear(parts)
        return _Eager.apply(call, parts, *tensors.values())  # type: ignore[no-untyped-call]
    if call.is_linear and _LINEAR.issuperset(tensors):
        return call.linear(parts)
    return _results(call, call.run(parts))


def _parts(tensors: Mapping[str, Any]) -> dict[str, Tensor] | None:
    # Return the local tensors of a layer's call, outside of any graph. None if x is on meta or needs a cast, or if a
    # tensor other than a parameter has a special type. torch.func may wrap weights, which only `local` unwraps.
    parts, x = {**tensors}, tensors["x"]
    if type(x) not in PLAIN or x.is_meta or torch.is_autocast_enabled(x.device.type):
        return None
    for name, each in tensors.items():
        if type(each) in PLAIN:
            if name[0] == "w":
                return None
        elif OPERANDS.get(name) == RESULT:
            return None
        else:
            parts[name] = part(each, 2 if name[0] == "w" else 1)
    return parts


def _local(tensors: Mapping[str, Any]) -> dict[str, Any]:
    # Replace parameters by their local tensors, differentiably.
    made = dict(tensors)
    for name, each in tensors.items():
        if name != "x" and OPERANDS.get(name) != RESULT:
            made[name] = local(each, 2 if name[0] == "w" else 1)
    return made


_is_neg, _is_inference = Tensor.is_neg, Tensor.is_inference
# The tensors that F.linear takes.
_LINEAR = frozenset(("x", "w", "bias"))


def _refuse_inference(call: Call, tensors: Mapping[str, Tensor]) -> None:
    x = tensors["x"]
    for name in (*call.weights, "norm_weight"):
        w = tensors.get(name)
        if w is not None and ((w.requires_grad and x.is_inference()) or (x.requires_grad and w.is_inference())):
            which = "first operand" if x.is_inference() else "weight"
            raise ValueError(
                f"the {which} was made in torch.inference_mode and cannot be kept for a gradient: clone() it"
            )


class _Eager(torch.autograd.Function):
    # tensors: those of `parts`. Parameters may be DTensors, of which `parts` has the local tensors.
    @staticmethod
    def forward(ctx: Any, call: Call, parts: dict[str, Tensor], *tensors: Any) -> Any:
        needs = ctx.needs_input_grad[2:]
        outs = call.run(parts, keeps=call.keeps and True in needs)
        # Autograd refuses in-place changes of a view from a Function, such as nn.ReLU(inplace=True).
        outs = [each.new_empty(0).set_(each) if each._is_view() else each for each in outs]  # type: ignore
        saved = save(ctx, call, parts, needs, outs)
        # `save_for_backward` takes the plain tensors. The context itself holds the DTensors.
        ctx.dtensors = {name: each for name, each in zip(parts, tensors, strict=True) if type(each) not in PLAIN}
        ctx.versions = versions([*saved.values()], [each for name, each in ctx.dtensors.items() if name in saved])
        return _results(call, outs)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> tuple[Tensor | None, ...]:
        # Outside `_eager_gradients`, which opens a call: hooks of saved tensors may recompute with calls of their own.
        run = _gradients_outside if torch.compiler.is_compiling() else _eager_gradients
        grads = run(ctx, dys, ctx.saved_tensors)
        return (None, None, *map(grads.get, ctx.needs))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()


def _results(call: Call, outs: Sequence[Tensor]) -> Any:
    # Without the products; a normed sum before the sum.
    if call.epilogue.norm:
        return outs[1], outs[0]
    return outs[0] if call.num_results == 1 else tuple(outs[: call.num_results])


@one
def _eager_gradients(ctx: Any, dys: Sequence[Any], tensors: Sequence[Any]) -> dict[str, Tensor | None]:
    call, dtensors, transformed, batched = ctx.call, ctx.dtensors, transforms_active(), False
    check_versions(tensors, ctx.versions)
    for dy in dys:
        batched = batched or (dy is not None and is_batched(dy))
    ends = call.epilogue.activation or call.epilogue.norm
    if (batched or transformed) and (dtensors or len(call.weights) > 1 or ends):
        raise NotImplementedError(
            "a batch of gradients at once (is_grads_batched, vmap) is not implemented for parameters that are "
            "DTensors, nor for several weights at once, nor with an activation or a norm: go through it in a loop"
        )
    # create_graph=True and torch.func's vmap need the operator.
    by_operator = torch.is_grad_enabled() or transformed
    if by_operator:
        tensors = [local(dtensors[name], 2) if name in dtensors else each
                   for name, each in zip(ctx.saved, tensors, strict=True)]  # fmt: skip
        for name, each in zip(ctx.saved, tensors, strict=True):
            if name == "x" or name in call.weights:
                keep(each, is_checked=True)
    if batched:
        rows, level = remove_batch(dys[0])
        made = [gradients(ctx, (row,), tensors, by_operator=by_operator) for row in rows]
        batches = {name: torch.stack([each[name] for each in made]) for name in made[0]}  # type: ignore[misc]
        return {name: add_batch(each, level) for name, each in batches.items()}
    grads = gradients(ctx, dys, tensors, by_operator=by_operator)
    for name, parameter in dtensors.items():
        if (each := grads.get(name)) is not None:
            grads[name] = as_gradient(each, parameter)
    return grads


# Compiled autograd compiles an eager node's `backward`.
_gradients_outside = outside_compiler(_eager_gradients)


def save(
    ctx: Any, call: Call, tensors: Mapping[str, Tensor], needs: Sequence[bool], outs: Sequence[Tensor]
) -> dict[str, Tensor]:  # fmt: skip
    """Save and return the tensors that the needed gradients read. `needs`: which of `tensors` need a gradient."""
    ctx.call, ctx.needs = call, dict(zip(tensors, needs, strict=True))
    saved: dict[str, Tensor] = {}
    for name in call.weights:
        if ctx.needs[name]:
            saved["x"] = tensors["x"]
    for name in call.weights if needs[0] else ():
        saved[name] = tensors[name]
    if call.epilogue.activation and True in needs:
        # The last results: the products, or for `OF_RESULT` the results themselves.
        saved.update(zip(call.products, outs[-len(call.products) :], strict=True))
    if "norm_weight" in tensors:
        saved["y"] = outs[0]
        saved |= {name: each for name, each in tensors.items() if OPERANDS.get(name) == NORM}
    ctx.saved = tuple(saved)
    # With several results, an unused result has gradient None instead of zeros.
    ctx.set_materialize_grads(call.num_results == 1 and not call.epilogue.norm)
    ctx.save_for_backward(*saved.values())
    return saved


def gradients(
    ctx: Any, dys: Sequence[Tensor | None], tensors: Sequence[Tensor], *, by_operator: bool
) -> dict[str, Tensor | None]:
    """Return the gradients of the tensors that the call was given, by name; `tensors` are those that were saved."""
    call, needs, kept = ctx.call, ctx.needs, dict(zip(ctx.saved, tensors, strict=True))
    grads: dict[str, Tensor | None] = {}
    if "norm_weight" in needs:
        dys = _through_norm(ctx, dys, kept, grads)
    zs: list[Any] = list(dys[: call.num_results])
    unused: list[int] = []
    for i, dy in enumerate(zs):
        if dy is None:
            unused.append(i)
    if len(unused) == len(zs):
        return {}
    like = next(dy for dy in zs if dy is not None) if unused else zs[0]
    for i in unused:
        zs[i] = like.new_zeros(*like.shape[:-1], call.widths[i])
    if needs.get("residual"):
        grads["residual"] = like
    if activation := call.epilogue.activation:
        zs = activations.gradients(activation, zs, [kept[z] for z in call.products])
    wanted = [*map(bool, map(needs.get, ("x", *call.parameters)))]
    if True in wanted:
        if by_operator:
            read = dict(zip(call.dys, zs, strict=True))
            read |= {name: kept[name] for name in ("x", *call.weights) if name in kept}
            made = matmul_backward([*read.values()], " ".join(read), wanted, call.settings.to_handle(), call.numbers)
        else:
            for dy, z in zip(call.dys, zs, strict=True):
                kept[dy] = z.resolve_neg()
            made = call.run(kept, tuple(wanted))
        grads |= zip(compress(("x", *call.parameters), wanted), made, strict=True)
    for i in unused:
        # None, like the gradients of a linear that was not called.
        grads[call.parameters[2 * i]] = grads[call.parameters[2 * i + 1]] = None
    return grads


def _through_norm(
    ctx: Any, dys: Sequence[Tensor | None], kept: Mapping[str, Tensor], grads: dict[str, Tensor | None]
) -> tuple[Tensor | None]:
    # dys: gradients of the normed sum and of the sum. Returns the gradient of the sum.
    (dnormed, dy), settings = dys, ctx.call.settings
    norm = ctx.call.epilogue.filled(kept, 1)
    wanted = {name: each for name, each in norm.given(NORM).items() if ctx.needs[name]}
    if dnormed is not None:
        needs = True, "norm_weight" in wanted, "norm_bias" in wanted
        through, *made = norms.gradients(
            norm.norm, kept["y"], norm.norm_weight, norm.norm_bias, norm.eps, dnormed, needs
        )
        assert through is not None
        dy = through if dy is None else through + dy
        grads |= zip(wanted, [each for each in made if each is not None], strict=True)
    elif settings.splits_rows:
        # Another rank may have a gradient, so this rank joins the sum with zeros.
        grads |= {name: torch.zeros_like(each) for name, each in wanted.items()}
    if wanted and settings.splits_rows:
        # Every rank norms its own rows, so the gradients are summed over ranks.
        mine = torch.stack([grads[name] for name in wanted])  # type: ignore[misc]
        sums = operators.summed(mine, settings.group_names[0], settings.options.schedule)
        # A gradient has memory of its own: a DTensor around a view at an offset cannot be copied by copy.deepcopy.
        grads |= zip(wanted, map(torch.clone, sums), strict=True)
    return (dy,)


def _setup(ctx: Any, tensors: Sequence[Tensor], others: Sequence[Any], outs: Sequence[Tensor]) -> None:
    names, keeps, settings, numbers = others
    call = calls_.of(Settings.of(settings), numbers, tensors[0].dtype, tensors[0].device)
    if call.keeps and not keeps:
        raise RuntimeError("a gradient of fusedtp::matmul is made of what `keeps` adds to its results")
    save(ctx, call, dict(zip(names.split(), tensors, strict=True)), ctx.needs_input_grad[: len(tensors)], outs)


def _of_operator(ctx: Any, *dys: Tensor | None) -> list[Tensor | None]:
    # Read once: a checkpoint recomputes saved tensors for one reader.
    return list(map(gradients(ctx, dys, ctx.saved_tensors, by_operator=True).get, ctx.needs))


def _forward(
    tensors: Sequence[Tensor], names: str, keeps: bool, settings: int, numbers: Sequence[int], *, fake: bool = False
) -> list[Tensor]:
    operands: dict[str, Any] = dict(zip(names.split(), tensors, strict=True))
    call = calls_.of(Settings.of(settings), numbers, tensors[0].dtype, tensors[0].device)
    if (out := call.settings.out_dtype) is not None:
        for name in ("x", *call.weights):
            data, scale = operands[name], operands.pop(f"{name}.scale")
            operands[name] = data.new_empty(data.shape, dtype=out) if fake else Quantized.of(Scaled(data, scale), out)
    elif not fake:
        # In a compiled graph no other code sees these tensors.
        for name in ("x", *call.weights):
            keep(operands[name])
    return call.run(operands, keeps=keeps, fake=fake)


@operator("matmul", partial(_forward, fake=True), _of_operator, _setup)
def matmul(tensors: Sequence[Tensor], names: str, keeps: bool, settings: int, numbers: Sequence[int]) -> list[Tensor]:
    """Run a call on tensors with these names, see `Call.run`.

    - `names`: with spaces between them, x first. `x.scale` and `w.scale` are scales of float8.
    - `keeps`: return the products before the activation too. Gradients need them, except those of `OF_RESULT`.
    - `settings`, `numbers`: as in `call.of`, the settings by `Settings.to_handle`. The numbers may be symbolic.
    """
    return _forward(tensors, names, keeps, settings, numbers)


def _backward(
    tensors: Sequence[Tensor], names: str, needs: Sequence[bool], settings: int, numbers: Sequence[int], *,
    fake: bool = False,
) -> list[Tensor]:  # fmt: skip
    operands = dict(zip(names.split(), tensors, strict=True))
    call = calls_.of(Settings.of(settings), numbers, tensors[0].dtype, tensors[0].device)
    if not fake:
        check_kept([each for name, each in operands.items() if name not in call.dys])
    return call.run(operands, tuple(needs), fake=fake)


def _refuse_second(ctx: Any, *grads: Any) -> Any:
    # torch.autograd.grad returns zeros for an input without a path to it, so leaving out the formula would lose terms.
    raise NotImplementedError(
        "second derivatives of fusedtp's matmuls are not implemented: what was computed with create_graph=True can be "
        "used, but not differentiated with respect to what they were given"
    )


@operator("matmul_backward", partial(_backward, fake=True), _refuse_second, lambda *_: None)
def matmul_backward(
    tensors: Sequence[Tensor], names: str, needs: Sequence[bool], settings: int, numbers: Sequence[int]
) -> list[Tensor]:
    """Return the needed gradients: of x, then of w and bias of each weight. `names` begins with those of gradients."""
    return _backward(tensors, names, needs, settings, numbers)


def _by_operator(tensors: Mapping[str, Tensor], settings: Settings, numbers: Sequence[int]) -> Any:
    """Run a call by its operator. A norm is an op of its own, which a compiler may fuse with others."""
    epilogue = settings.epilogue
    if epilogue.norm is not None:
        own = {name: each for name, each in tensors.items() if OPERANDS.get(name) == NORM}
        summed = {name: each for name, each in tensors.items() if name not in own}
        y = _by_operator(summed, settings._replace(epilogue=epilogue._replace(norm=None, eps=0.0)), numbers)
        if settings.splits_rows:
            group_name, schedule = settings.group_names[0], settings.options.schedule
            # Each rank norms its own rows, so backward sums the gradients of the norm's parameters over ranks.
            own = {name: operators.as_it_is(each[None], group_name, schedule)[0] for name, each in own.items()}
        return norms.of(epilogue.norm, y, own["norm_weight"], own.get("norm_bias"), epilogue.eps), y
    values, keeps = [*tensors.values()], False
    if epilogue.needs_products:
        # Inside of transforms a tensor does not tell whether it needs a gradient.
        transformed = not torch.compiler.is_compiling() and transforms_active()
        keeps = transformed or (torch.is_grad_enabled() and any([each.requires_grad for each in values]))
    ys = matmul(values, " ".join(tensors), keeps, settings.to_handle(), numbers)
    if epilogue.is_gated:
        return ys[0]
    ys = ys[: len(ys) // 2] if keeps else ys
    return ys[0] if len(ys) == 1 else tuple(ys)


def _named(dtypes: Sequence[torch.dtype]) -> tuple[str, ...]:
    return tuple([str(dtype).replace("torch.", "") for dtype in dtypes])


@cache
def _in_float8(problem: ProblemFunction, dtypes: tuple[torch.dtype, ...], blocks: bool) -> ProblemFunction:
    # `problem` for operands and results in these dtypes, the same function each time.
    def in_float8(*args: Any, **more: Any) -> Described:
        settings, numbers = problem(*args, **more)
        return settings._replace(dtypes=_named(dtypes), blocks=blocks), numbers

    return in_float8


def _scaled(
    problem: ProblemFunction, x: Any, w: Any, operands: Mapping[str, Any], group: Group, options: Options,
    dims: tuple[Any, ...], epilogue: Epilogue, out_dtype: torch.dtype | None,
) -> Any:  # fmt: skip
    # A call on `Scaled` operands, without a gradient.
    tensors, scaled, dtypes, blocks = _stand_ins(x, w, operands, options, epilogue, out_dtype)
    group = groups.resolve(group)
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        settings, numbers = calls_.describe(problem, tensors, group, options, dims, epilogue)
        settings = settings._replace(dtypes=_named(dtypes), blocks=blocks)
        tensors |= {name: each.data for name, each in scaled.items()}
        tensors |= {f"{name}.scale": each.scale for name, each in scaled.items()}
        return _by_operator(tensors, settings, numbers)
    call = calls_.find(_in_float8(problem, dtypes, blocks), tensors, group, options, dims, epilogue)
    # As in `apply`.
    tensors = {name: each.resolve_neg() for name, each in tensors.items()}
    tensors |= {name: Quantized.of(each, dtypes[2]) for name, each in scaled.items()}
    with torch.no_grad():
        return _results(call, call.run(tensors))


def _stand_ins(
    x: Any, w: Any, operands: Mapping[str, Any], options: Options, epilogue: Epilogue, out_dtype: torch.dtype | None
) -> tuple[dict[str, Any], dict[str, Scaled], tuple[torch.dtype, ...], bool]:
    # Check `Scaled` operands. Other operands and shapes obey the rules for tensors in the result's dtype: a problem
    # takes stand-ins in that dtype, with the same shape and one element of memory. Returns the call's tensors with
    # stand-ins, the operands, the dtypes of x, weights and result, and whether scales are of blocks.
    ws = w if type(w) is tuple else (w,)
    with_tensors = epilogue.filled(calls_.named(x, w, operands), len(ws))
    out, blocks = arguments.check_scaled(x, w, with_tensors, options, out_dtype)
    stand_ins = tuple([torch.empty(1, dtype=out, device=x.data.device).expand(each.shape) for each in (x, *ws)])
    tensors = calls_.named(stand_ins[0], stand_ins[1:] if type(w) is tuple else stand_ins[1], operands)
    scaled = {"x": x} | {f"w{i or ''}": each for i, each in enumerate(ws)}
    return tensors, scaled, (x.data.dtype, ws[0].data.dtype, out), blocks


def prepared(
    problem: ProblemFunction, x: Any, ws: tuple[Any, ...], biases: Sequence[Tensor | None], group: ProcessGroup,
    options: Options, dims: tuple[Any, ...], out_dtype: torch.dtype | None = None,
) -> tuple[Call, dict[str, Any]]:  # fmt: skip
    """Check a call without sending anything. Return the call and the tensors to run it on, outside of compilers.

    The operands are tensors or `Scaled`. torch.autocast does not apply.
    """
    w, bias = (ws, tuple(biases)) if len(ws) > 1 else (ws[0], biases[0])
    operands: dict[str, Any] = {"bias": bias}
    if isinstance(x, Scaled):
        tensors, scaled, dtypes, blocks = _stand_ins(x, w, operands, options, NO_EPILOGUE, out_dtype)
        call = calls_.find(_in_float8(problem, dtypes, blocks), tensors, group, options, dims)
        return call, tensors | {name: Quantized.of(each, dtypes[2]) for name, each in scaled.items()}
    tensors = calls_.named(x, w, operands)
    if any(type(each) not in PLAIN for each in tensors.values()):
        # A compiler's tensors: their lengths may be symbols, which cannot be looked up.
        described = calls_.describe(problem, tensors, group, options, dims, NO_EPILOGUE)
        return calls_.of(*described, x.dtype, x.device), tensors
    return calls_.find(problem, tensors, group, options, dims), tensors
