"""Run torch's own fused ops, `torch.ops.symm_mem.fused_*`, by fusedtp: on CPUs, which have none, and on CUDA.

W is the number of ranks; `gather_dim` and `scatter_dim` split M, one of A's dims but the last, or the last (-1 too).

    fused_all_gather_matmul              A [.., M/W, .., K], Bs [K, N]    -> A whole or None, each whole A @ B
      along the last dim                 A [.., K/W],        Bs [K, N]    -> the same
    fused_matmul_reduce_scatter          A [.., M, .., K],   B [K, N]     -> [.., M/W, .., N] of the sum of A @ B
      along the last dim                 A [.., K],          B [K, N]     -> [.., N/W]
    fused_all_gather_scaled_matmul       the first op on float8: (A @ B) * A_scale * B_scale + bias, no last dim
    fused_scaled_matmul_reduce_scatter   the third op on float8: each rank's term is as above, with its own bias
    A_scale   one number; or [.., M, .., 1], for a gather also [.., M/W, .., 1]
    B_scale   one number; or [1, N]

Results are laid out as torch's meta implementations say: gathered along a dim, that dim is outermost in memory;
scattered, contiguous. "avg" divides the sum by W. The first and third op have gradients, torch's own have none:

    dA  = reduce_scatter(sum of dy @ B.T + d whole A);   dB = whole A.T @ dy
    dA  = all_gather(dy) @ B.T;                          dB = A.T @ all_gather(dy)

Each op is checked before anything is sent, the same on every rank. Where we refuse, a CPU raises the error, and CUDA
runs torch's own op.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import collectives, groups, locks, torch_private
from .calls import arguments, autograd, problems
from .calls.operators import ready_for
from .calls.parameters import PLAIN
from .choose import dispatch
from .float8 import FLOAT8
from .op import ALL_GATHER, Options
from .scaled import Scaled
from .switch import Switch
from .torch_private import is_in_torch_dispatch_mode

# The ops, as they are in torch 2.11 to 2.14.
SCHEMAS = (
    "fused_all_gather_matmul("
    "Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True) -> (Tensor?, Tensor[])",
    "fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor",
    "fused_all_gather_scaled_matmul(Tensor A, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, int gather_dim, "
    "str group_name, Tensor?[] biases, Tensor?[] result_scales, ScalarType?[] out_dtypes, bool[] use_fast_accum) "
    "-> (Tensor, Tensor[])",
    "fused_scaled_matmul_reduce_scatter(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, "
    "int orig_scatter_dim, int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape, "
    "Tensor? bias=None, Tensor? result_scale=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor",
)

# An op that has been checked, ready to be run.
Checked: TypeAlias = Callable[[], Any]
# Errors of a check. On CUDA torch's own op runs then.
_REFUSALS = (ValueError, TypeError, NotImplementedError)


_on: list[Switch[str]] = []
_undo: list[Callable[[], object]] = []
_said: set[tuple[str, str]] = set()


def drop_in(schedule: str = "auto") -> Switch[str]:
    """Run `torch.ops.symm_mem.fused_*` by fusedtp in this process, until `undo()` or the end of a `with` block.

    torch's asynchronous tensor parallelism, and programs that call these ops, then use this package unchanged: in eager
    mode, with gradients, and under torch.compile, whose `_micro_pipeline_tp` takes the ops on a CPU too. The ops:
    `fused_all_gather_matmul`, `fused_matmul_reduce_scatter`, `fused_all_gather_scaled_matmul` and
    `fused_scaled_matmul_reduce_scatter`.

    - `schedule`: as in `all_gather_linear`. While several switches are on, the last one's.

    Call it on every rank. FUSEDTP_DROP_IN=1 calls it when fusedtp is imported. On a CPU `torch.mm` also takes
    `out_dtype`, which programs around these ops use. On CUDA an op that fusedtp refuses, such as one in an unknown
    dtype, runs torch's own code; a warning says so once. In torch's `_test_mode` all run torch's fallbacks.

    Raises ValueError for an unknown schedule, and RuntimeError if this torch's ops differ from those known here.
    """
    dispatch.check_schedule(schedule)
    return Switch(schedule, _on, _install, _undo)


def if_asked() -> None:
    """Call `drop_in` if the environment asks for it."""
    asked = os.environ.get("FUSEDTP_DROP_IN", "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"FUSEDTP_DROP_IN must be 1, 0 or empty, got {asked!r}")
    if asked == "1":
        drop_in()


def _install() -> None:
    for text in SCHEMAS:
        if different := difference(text):
            name = text.partition("(")[0]
            raise RuntimeError(f"torch {torch.__version__} has another {name} than fusedtp.drop_in knows: {different}")
    library = torch.library.Library("symm_mem", "IMPL")
    _undo.append(lambda: torch_private.unregister(library))
    for name, check in _CHECKS.items():
        library.impl(name, _kernel(name, check, falls_back=False), "CPU")
        with warnings.catch_warnings():
            # torch warns that its own implementation is replaced.
            warnings.simplefilter("ignore")
            library.impl(name, _kernel(name, check, falls_back=True), "CUDA", allow_override=True)
    torch.library.register_autograd(
        "symm_mem::fused_all_gather_matmul", _gather_backward, setup_context=_setup_gather, lib=library
    )
    torch.library.register_autograd(
        "symm_mem::fused_matmul_reduce_scatter", _scatter_backward, setup_context=_setup_scatter, lib=library
    )
    if not torch_private.has_kernel("aten::mm.dtype", "CPU"):
        aten = torch.library.Library("aten", "IMPL")
        _undo.append(lambda: torch_private.unregister(aten))
        aten.impl("mm.dtype", lambda a, b, out_dtype: torch.mm(a.to(out_dtype), b.to(out_dtype)), "CPU")
    _undo.append(torch_private.open_micro_pipeline())


def difference(text: str) -> str:
    """Return how torch's op differs from the one with this schema, in words; "" if it does not."""
    ours, theirs = torch_private.symm_mem_schemas(text)
    if theirs is None:
        return "there is none"
    (before, was), (after, now) = map(_by_name, (ours, theirs))
    found = [f"no {each}" for each in before if each not in after]
    found += [f"{after[each]} is new" for each in after if each not in before]
    found += [f"{before[each]} is {after[each]}" for each in before if after.get(each, before[each]) != before[each]]
    if was != now:
        found.append(f"it returns {now} instead of {was}")
    if not found and [*before] != [*after]:
        found.append(f"the order is {', '.join(after)}")
    name = text.partition("(")[0]
    found += [f"no {kind} of it" for kind, fallback in (("code", False), ("fallback", True))
              if torch_private.symm_mem_function(name, fallback=fallback) is None]  # fmt: skip
    return "; ".join(found)


def _by_name(schema: Any) -> tuple[dict[str, str], str]:
    named = {}
    for each in schema.arguments:
        default = f"={each.default_value}" if each.has_default_value() else ""
        named[each.name] = f"{each.type} {each.name}{default}{', by keyword only' * each.kwarg_only}"
    return named, ", ".join([str(each.type) for each in schema.returns])


def _say(name: str, text: str) -> None:
    # Once for each op and kind of message.
    what = text.partition(":")[0]
    if (name, what) not in _said:
        _said.add((name, what))
        warnings.warn(f"torch.ops.symm_mem.{name} {text}", stacklevel=3)


def _kernel(name: str, check: Callable[..., Checked], *, falls_back: bool) -> Callable[..., Any]:
    # The implementation of an op. With `falls_back`, torch has its own one for the device.
    @locks.one
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch_private.in_symm_mem_test_mode():
            return torch_private.symm_mem_function(name, fallback=True)(*args, **kwargs)
        try:
            checked = check(*args, **kwargs)
        except _REFUSALS as error:
            if not falls_back:
                error.add_note(f"in torch.ops.symm_mem.{name}: x is A, a weight is B transposed")
                raise
            _say(name, f"runs torch's own code, as fusedtp refuses: {error}")
            return torch_private.symm_mem_function(name)(*args, **kwargs)
        if falls_back:
            _say(name, "runs fusedtp's code in place of torch's own, by fusedtp.drop_in")
        with torch.no_grad():
            return _no_views(checked())

    return run


def _check(A: Tensor, Bs: Sequence[Tensor], dim: int, what: str, ndim: int | None = None) -> int:
    """Check what torch's ops check, and return the dim counted from the front."""
    ndim = A.ndim if ndim is None else ndim
    if A.ndim < 2:
        raise ValueError(f"A must have at least 2 dimensions, got shape {tuple(A.shape)}")
    for B in Bs:
        if B.ndim != 2:
            raise ValueError(f"B must have 2 dimensions, [K, N], got shape {tuple(B.shape)}")
    if not -1 <= dim < ndim:
        raise ValueError(f"{what} must be in [-1, {ndim - 1}] for {ndim} dimensions, got {dim}")
    return dim % ndim


def _options() -> Options:
    # A graph may outlive the switch that it was compiled under.
    return Options(_on[-1].value if _on else "auto")


def _gather(A: Any, Bs: Sequence[Any], dim: int, group_name: str, biases: Any = None, out: Any = None) -> Any:
    group, biases = groups.resolve(group_name), biases or [None] * len(Bs)
    return autograd.prepared(
        problems.all_gather_problem, A, tuple(Bs), biases, group, _options(), (dim, None), out
    )  # fmt: skip


def _scatter(
    A: Any, B: Any, shape: Sequence[int], dim: int, group_name: str, reduce_op: str, bias: Any = None, out: Any = None
) -> Any:
    # shape: of A @ B.
    group = groups.resolve(group_name)
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"reduce_op must be sum or avg, got {reduce_op!r}")
    if shape[dim] % group.size():
        raise ValueError(f"dim {dim} of {tuple(shape)} must be a multiple of the number of ranks, {group.size()}")
    return autograd.prepared(
        problems.reduce_scatter_problem, A, (B,), [bias], group, _options(), (dim, None), out
    )  # fmt: skip


def _averaged(y: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return _contiguous(y.div_(groups.resolve(group_name).size()) if reduce_op == "avg" else y)


def _contiguous(y: Tensor) -> Tensor:
    # Also with the strides of a new tensor along dims of length 0 and 1, where a contiguous tensor may have any.
    return y.contiguous().view(-1).view(y.shape)


def _no_views(found: Any) -> Any:
    # Autograd refuses to change a view from an op in place.
    if isinstance(found, Tensor):
        return found.new_empty(0).set_(found) if found._is_view() else found  # type: ignore[call-overload]
    return type(found)(map(_no_views, found)) if isinstance(found, tuple | list) else found


def _all_gather_matmul(
    A: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> Checked:
    dim = _check(A, Bs, gather_dim, "gather_dim")
    if not Bs:
        arguments.check_tensor("A", A)
        return lambda: (_whole(A, dim, group_name) if return_A else None, [])
    call, given = _gather(A, [B.t() for B in Bs], dim, group_name)

    def run() -> tuple[Tensor | None, list[Tensor]]:
        ys = call.run(given, whole=return_A)
        return (_as_gathered(ys.pop(), dim, group_name) if return_A else None), ys

    return run


def _whole(A: Tensor, dim: int, group_name: str) -> Tensor:
    group, schedule = groups.resolve(group_name), _options().schedule
    if dim == A.ndim - 1 and group.size() > 1:
        # Straight into a contiguous tensor.
        rows, length = A.reshape(-1, A.shape[-1]), A.shape[-1] * group.size()
        out = A.new_empty(*A.shape[:-1], length)
        ready = ready_for(ALL_GATHER, rows.t(), (A.shape[-1],) * group.size(), group, schedule)
        ready.run({"a": rows.t()}, [out.view(-1, length).t()])
        return out
    whole = collectives.all_gather(A, group=group, gather_dim=dim, schedule=schedule)
    return _as_gathered(whole, dim, group_name)


def _as_gathered(whole: Tensor, dim: int, group_name: str) -> Tensor:
    # The gathered dim is outermost in memory already. torch gathers nothing from one rank, and leaves A as it is.
    alone = groups.resolve(group_name).size() == 1
    return _contiguous(whole) if alone or dim == whole.ndim - 1 else whole


def _matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Checked:
    dim = _check(A, [B], scatter_dim, "scatter_dim")
    call, given = _scatter(A, B.t(), (*A.shape[:-1], B.shape[1]), dim, group_name, reduce_op)
    return lambda: _averaged(call.run(given)[0], reduce_op, group_name)


def _dtype(scalar_type: Any, A: Tensor) -> torch.dtype:
    return torch_private.dtype_of(scalar_type) or A.dtype


def _scaled(data: Tensor, scale: Tensor, name: str) -> Scaled:
    if scale.dtype != torch.float32:
        raise ValueError(f"{name} must be torch.float32, got {scale.dtype}")
    made = Scaled(data, scale.reshape(()) if scale.numel() == 1 and data.shape[:-1] != scale.shape[:-1] else scale)
    made.check(name)
    return made


def _scaled_weight(B: Tensor, scale: Tensor, name: str) -> Scaled:
    return _scaled(B.t(), scale.t() if scale.ndim == 2 else scale, name)


def _all_gather_scaled_matmul(
    A: Tensor, Bs: Sequence[Tensor], A_scale: Tensor, B_scales: Sequence[Tensor], gather_dim: int, group_name: str,
    biases: Sequence[Tensor | None], result_scales: Sequence[Tensor | None], out_dtypes: Sequence[Any],
    use_fast_accum: Sequence[bool],
) -> Checked:  # fmt: skip
    dim = _check(A, Bs, gather_dim, "gather_dim")
    if dim == A.ndim - 1:
        raise ValueError(f"gather_dim of a scaled matmul must not be the last one, got {gather_dim}")
    lists = {"B_scales": B_scales, "biases": biases, "result_scales": result_scales, "out_dtypes": out_dtypes}
    for name, each in (lists | {"use_fast_accum": use_fast_accum}).items():
        if len(each) != len(Bs):
            raise ValueError(f"{name} must be as many as Bs, {len(Bs)}, got {len(each)}")
    if not Bs:
        raise ValueError("Bs must not be empty in a scaled matmul")
    group = groups.resolve(group_name)
    rows = [length * (group.size() if at == dim else 1) for at, length in enumerate(A.shape[:-1])]
    if A_scale.numel() > 1 and A_scale.shape[:-1] != A.shape[:-1] and [*A_scale.shape] == [*rows, 1]:
        A_scale = A_scale.narrow(dim, group.rank() * A.shape[dim], A.shape[dim])
    dtypes = [_dtype(each, A) for each in out_dtypes]
    for dtype, scale in zip(dtypes, result_scales, strict=True):
        _check_result(A, dtype, scale)
    # One gather for all: results of different dtypes are rounded from float32.
    out = dtypes[0] if len({*dtypes}) == 1 and dtypes[0] not in FLOAT8 else torch.float32
    ws = [_scaled_weight(B, scale, "B_scale") for B, scale in zip(Bs, B_scales, strict=True)]
    added = [None if bias is None else bias.to(out) for bias in biases]
    call, given = _gather(_scaled(A, A_scale, "A_scale"), ws, dim, group_name, added, out)

    def run() -> tuple[Tensor, list[Tensor]]:
        *ys, whole = call.run(given, whole=True)
        return _as_gathered(whole, dim, group_name), list(map(_rounded, ys, dtypes, result_scales))

    return run


def _check_result(A: Tensor, dtype: torch.dtype, result_scale: Tensor | None) -> None:
    if dtype not in FLOAT8:
        return
    if A.is_cuda:
        raise ValueError(f"out_dtype on CUDA must not be float8, got {dtype}")
    if result_scale is not None and (result_scale.dtype != torch.float32 or result_scale.numel() != 1):
        raise ValueError(
            f"result_scale must be one torch.float32, got {result_scale.dtype} {tuple(result_scale.shape)}"
        )


def _rounded(y: Tensor, dtype: torch.dtype, result_scale: Tensor | None) -> Tensor:
    """Return y in `dtype`, rounded as torch's scaled matmul rounds it. Only float8 has a result scale."""
    if dtype not in FLOAT8:
        return y.to(dtype)
    y = y if result_scale is None else y / result_scale
    return (y.to(torch.float16) if _rounds_twice() else y).to(dtype)


@functools.cache
def _rounds_twice() -> bool:
    """Return whether torch's scaled matmul rounds to float8 by way of float16 on this CPU, as oneDNN may."""
    one = torch.ones(16, 16, dtype=torch.float8_e4m3fn, device="cpu")
    # Just above the middle of 1 and 1.125; in float16 it is the middle, which rounds to 1.
    above = torch.tensor((1.0625 + 2**-13) / 16, dtype=torch.float32, device="cpu")
    y = torch_private.scaled_mm(one, one.t(), above, above.new_ones(()), out_dtype=one.dtype)
    return bool(y[0, 0].float() == 1)


def _scaled_matmul_reduce_scatter(
    A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, reduce_op: str, orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int, group_name: str, output_shape: Sequence[int] | None,
    bias: Tensor | None = None, result_scale: Tensor | None = None, out_dtype: Any = None, use_fast_accum: bool = False,
) -> Checked:  # fmt: skip
    _check(A, [B], scatter_dim_after_maybe_reshape, "scatter_dim_after_maybe_reshape")
    shape = [*(A.shape if output_shape is None else output_shape)[:-1], B.shape[1]]
    dim = _check(A, [B], orig_scatter_dim, "orig_scatter_dim", len(shape))
    out = _dtype(out_dtype, A)
    if A_scale.numel() > 1:
        if A_scale.shape != (*A.shape[:-1], 1):
            raise ValueError(f"A_scale must be one number or {(*A.shape[:-1], 1)}, got {tuple(A_scale.shape)}")
        A_scale = A_scale.reshape(*shape[:-1], 1)
    x = _scaled(A.reshape(*shape[:-1], A.shape[-1]), A_scale, "A_scale")
    w = _scaled_weight(B, B_scale, "B_scale")
    added = None if bias is None else bias.to(out)
    call, given = _scatter(x, w, shape, dim, group_name, reduce_op, added, out)

    def run() -> Tensor:
        if bias is not None:
            # A bias is added once here, and torch adds each rank's own.
            total = collectives.all_reduce(bias.float(), group=group_name, schedule=_options().schedule)
            given["bias"] = total.to(out)
        return _averaged(call.run(given)[0], reduce_op, group_name)

    return run


_CHECKS: dict[str, Callable[..., Checked]] = {
    "fused_all_gather_matmul": _all_gather_matmul,
    "fused_matmul_reduce_scatter": _matmul_reduce_scatter,
    "fused_all_gather_scaled_matmul": _all_gather_scaled_matmul,
    "fused_scaled_matmul_reduce_scatter": _scaled_matmul_reduce_scatter,
}


# Gradients, by the call's own programs. torch gives the operands as one flat list with flags of which need gradients.


def _setup_gather(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    A, Bs, gather_dim, ctx.group_name = inputs
    ctx.dim, ctx.num_weights, ctx.call = gather_dim % A.ndim, len(Bs), None
    ctx.refusal = ""
    if Bs:
        _save(ctx, "fused_all_gather_matmul", lambda: _gather(A, [B.t() for B in Bs], ctx.dim, ctx.group_name))
    ctx.needs_whole = ctx.needs_input_grad[0]
    ctx.set_materialize_grads(False)


def _save(ctx: Any, name: str, prepare: Callable[[], Any]) -> None:
    # Forward has run torch's own op where we refuse, and that has no gradient.
    ctx.call, ctx.refusal = None, ""
    try:
        call, given = prepare()
    except _REFUSALS as error:
        ctx.refusal = (
            f"torch.ops.symm_mem.{name} ran torch's own code, which has no gradient, as fusedtp refuses: {error}"
        )
        return
    autograd.save(ctx, call, given, ctx.needs_input_grad[: len(given)], ())


def _gather_backward(ctx: Any, d_whole: Tensor | None, dys: Sequence[Tensor | None]) -> tuple[Any, ...]:
    found = _through(ctx, dys) if ctx.call is not None or ctx.refusal else {}
    dA = found.get("x")
    if d_whole is not None and ctx.needs_whole:
        schedule = _options().schedule
        own = collectives.reduce_scatter(d_whole, group=ctx.group_name, scatter_dim=ctx.dim, schedule=schedule)
        dA = own if dA is None else dA + own
    return dA, _of_weights(ctx, found, ctx.num_weights), None, None


def _setup_scatter(ctx: Any, inputs: Any, output: Any) -> None:
    A, B, ctx.reduce_op, scatter_dim, ctx.group_name = inputs
    shape = (*A.shape[:-1], B.shape[1])
    dim = scatter_dim % A.ndim
    _save(ctx, "fused_matmul_reduce_scatter", lambda: _scatter(A, B.t(), shape, dim, ctx.group_name, ctx.reduce_op))


def _scatter_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    if ctx.reduce_op == "avg":
        dy = dy / groups.resolve(ctx.group_name).size()
    found = _through(ctx, [dy])
    return found.get("x"), *_of_weights(ctx, found, 1), None, None, None


def _of_weights(ctx: Any, found: dict[str, Any], count: int) -> list[Tensor | None]:
    each = [found.get(f"w{i or ''}") for i in range(count)]
    return [None if dw is None else dw.t() for dw in each]


@locks.one
def _through(ctx: Any, dys: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    if ctx.refusal:
        raise NotImplementedError(ctx.refusal)
    tensors = ctx.saved_tensors
    plain = all(type(each) in PLAIN for each in (*tensors, *dys) if each is not None)
    by_operator = not plain or torch.is_grad_enabled() or is_in_torch_dispatch_mode()
    return autograd.gradients(ctx, dys, tensors, by_operator=by_operator)
