"""Check the arguments of functions and layers, once, before anything is sent.

Ranks with the same mistake raise the same error. A TypeError or ValueError names the argument and shows its value.
`workspaces.agreement` finds arguments that differ between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import groups
from ..activations import ACTIVATIONS, GATED
from ..choose import dispatch
from ..choose.dispatch import FUSED_DTYPES
from ..cost.overlap import MULTICAST, PRODUCERS
from ..epilogue import EACH, NO_EPILOGUE, NORM, RESULT, Epilogue
from ..float8 import E8M0, FLOAT8, formats_of
from ..op import ANY_ORDER, AS_ANY, LEAVES, MOST_LEAVES, RANK_ORDER, TREE_ORDER, Op, Options
from ..scaled import RECIPES, Float8, Scaled, check_dense
from ..schedules import SCHEDULES
from ..sharding.notation import Spec
from ..shards import check_count, check_sizes, even_sizes
from ..torch_private import is_tracing, transforms_active
from .parameters import PLAIN


# Reduction order: by rank, any, or a tree. A tree's bits do not depend on the number of ranks.
def leaves_in(order: Any) -> int:
    """Return the number of leaves of a tree order, a power of two; 0 for rank order, `AS_ANY` for any order."""
    if order == RANK_ORDER:
        return 0
    if order == ANY_ORDER:
        return AS_ANY
    name, dash, number = order.partition("-") if isinstance(order, str) else ("", "", "")
    leaves = LEAVES if not dash else int(number) if number.isdecimal() and number.isascii() else 0
    if name != TREE_ORDER or not 1 <= leaves <= MOST_LEAVES or leaves & (leaves - 1):
        raise ValueError(
            f"order must be {RANK_ORDER!r}, {ANY_ORDER!r}, {TREE_ORDER!r}, of {LEAVES} leaves, or {TREE_ORDER}-N of N, "
            f"a power of two up to {MOST_LEAVES}, got {order!r}"
        )
    return leaves


def leaves_of(options: Options, world_size: int, dtype: torch.dtype | None = None) -> int:
    """Return `leaves_in` of the order, or raise ValueError if the call cannot keep a tree order."""
    order, leaves = options.order, leaves_in(options.order)
    if leaves <= 0:
        return leaves
    if leaves % world_size:
        raise ValueError(
            f"order {order!r} is for numbers of ranks that divide its {leaves} leaves, got {world_size} ranks"
        )
    if options.schedule not in ("auto", "fused"):
        raise ValueError(f"order {order!r} is kept by schedule 'fused' alone, got schedule {options.schedule!r}")
    if options.float8 is not None:
        raise ValueError(f"order {order!r} is for operands that are not cast, got float8={options.float8!r}")
    if dtype is not None and dtype not in FUSED_DTYPES:
        raise ValueError(f"order {order!r} is for {', '.join(map(str, FUSED_DTYPES))}, got {dtype}")
    return leaves


def check_even(order: str, sizes: Sequence[int], name: str = "feature_sizes") -> None:
    """Raise ValueError unless every rank's part of the contraction has the same length."""
    if len(set(sizes)) > 1:
        remedy = f"pad them, or take order {RANK_ORDER!r}"
        raise ValueError(f"order {order!r} needs {name} that are as long on every rank, got {tuple(sizes)}: {remedy}")


def of_subtrees(options: Options, world_size: int, dtype: torch.dtype) -> int:
    """Return `leaves_of` for a collective, in which each rank's tensor is the sum of a subtree."""
    order, leaves = options.order, leaves_of(options, world_size)
    if leaves > 0 and dtype != torch.float32:
        raise ValueError(f"order {order!r} of a collective is for subtrees, which are torch.float32, got {dtype}")
    if leaves > 0 and options.algorithm == "ring":
        raise ValueError(f"order {order!r} is not that of algorithm 'ring', which adds up along the ring")
    return leaves


# A weight, or a tuple of several.
Weights: TypeAlias = "Tensor | tuple[Tensor, ...]"

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Kernels count rows and columns of all ranks together in int32.
MANY = 2**31
# On meta, a call sends nothing and computes shapes only.
DEVICES = ("cpu", "cuda", "meta")


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast the tensors to torch.autocast's dtype; return them unchanged without autocast, in float64 or on meta."""
    x = tensors[0]
    is_on = isinstance(x, Tensor) and (x.is_cpu or x.is_cuda) and torch.is_autocast_enabled(x.device.type)
    if not is_on or x.dtype not in DTYPES[:3]:
        return tensors
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each for each in tensors)


def check_tensor(name: str, value: object, x: Tensor | None = None, *, than: str = "x") -> None:
    """Check that `value` is a dense tensor in a supported dtype and on a supported device, or like x if given."""
    (check_dense if type(value) in PLAIN else check_kind)(name, value)
    assert isinstance(value, Tensor)
    dtype, device = value.dtype, value.device
    if dtype not in DTYPES:
        scaled = (
            ": float8 takes scales, fusedtp.Scaled(data, scale), in a matmul; a collective moves its bytes as bfloat16"
        )
        hint = scaled if dtype in FLOAT8 else ""
        raise ValueError(f"{name} must be one of {', '.join(map(str, DTYPES))}, got {dtype}{hint}")
    if x is None:
        if device.type not in DEVICES:
            raise ValueError(f"{name} must be on a CPU or a CUDA device, got {device}")
        return
    if dtype != x.dtype:
        raise ValueError(f"{name} must have {than}'s dtype, {x.dtype}, got {dtype}")
    if device != x.device:
        raise ValueError(f"{name} must be on {than}'s device, {x.device}, got {device}")


def check_kind(name: str, value: object) -> None:
    """Check that `value` is a dense tensor with values, and no DTensor."""
    check_dense(name, value)
    assert isinstance(value, Tensor)
    if nn.parameter.is_lazy(value):
        raise ValueError(f"{name} must have values, got an {type(value).__name__}: a lazy module's first call makes it")
    # A late import: most callers do not need DTensor.
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        raise TypeError(
            f"{name} must be this rank's own tensor, got a DTensor of placements {value.placements}: use "
            f"{name}.to_local(), or the styles FusedColwiseParallel and FusedRowwiseParallel"
        )


def several(weights: Sequence[Any], name: str, given: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Return the weights, and for each its tensor of the operand `name`, or None. Tensors are checked later."""
    if not weights:
        raise ValueError(f"weight must be a tensor or some, got {weights!r}")
    if given is None:
        return tuple(weights), (None,) * len(weights)
    if not isinstance(given, list | tuple):
        raise TypeError(f"{name} must be as many tensors as weight, or None, got {type(given).__name__}")
    if len(given) != len(weights):
        raise ValueError(f"{name} must be as many tensors as weight, {len(weights)}, got {len(given)}")
    return tuple(weights), tuple(given)


def _each(weight: Any, epilogue: Epilogue, name: str) -> list[tuple[str, Any, list[tuple[str, Any]]]]:
    # Each weight with its name in errors, and its operands of the epilogue with theirs.
    added = epilogue.given(EACH).items()
    if not isinstance(weight, tuple):
        return [(name, weight, list(added))]
    return [
        (f"{name}[{i}]", one, [(f"{its}[{i}]", each[i]) for its, each in added if each[i] is not None])
        for i, one in enumerate(weight)
    ]


def check_linear(
    x: Tensor,
    weight: Weights,
    epilogue: Epilogue,
    options: Options,
    *,
    num_out: int | None = None,
    name: str = "weight",
) -> None:
    """Check x [..., K], each weight [N, K] (called `name` in errors), its bias [N] or [num_out], and the options."""
    for its, one, added in _each(weight, epilogue, name):
        check_tensor("x", x)
        check_tensor(its, one, x)
        if x.ndim < 2:
            raise ValueError(f"x must have at least 2 dimensions, [..., K], got shape {tuple(x.shape)}")
        check_matrix(one, its)
        for added_name, other in added:
            check_tensor(added_name, other, x)
            length = one.shape[0] if num_out is None else num_out
            if other.shape != (length,):
                raise ValueError(f"{added_name} must have shape ({length},), {its}'s rows, got {tuple(other.shape)}")
        check_options(options, x)


def check_matrix(weight: Tensor, name: str = "weight") -> None:
    """Check that a weight has two dimensions."""
    if weight.ndim != 2:
        raise ValueError(f"{name} must have 2 dimensions, [N, K], got shape {tuple(weight.shape)}")


def check_features(who: str, num_in: int, weight: Weights, give: str, name: str = "weight") -> int:
    """Check that each weight has a column for each of x's features; return their total number of rows.

    `give` is the remedy in the error.
    """
    named = _each(weight, NO_EPILOGUE, name)
    for its, each, _ in named:
        if each.shape[1] != num_in:
            raise ValueError(
                f"{who} {num_in} features, and {its} of shape {tuple(each.shape)} takes {each.shape[1]}: give x {give}"
            )
    return sum([each.shape[0] for _, each, _ in named])


def activation_of(activation: str | None, num_weights: int) -> str | None:
    """Check and return an activation or None. A gated activation takes two weights."""
    if activation is None:
        return None
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation must be None or one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if activation in GATED and num_weights != 2:
        raise ValueError(f"activation {activation!r} is of two weights, gate and up, got {num_weights}")
    return activation


def check_activation(activation: str | None, weight: Weights) -> None:
    """Check an activation or None. A gated activation takes two weights with the same number of rows."""
    several = weight if isinstance(weight, tuple) else (weight,)
    if activation_of(activation, len(several)) not in GATED:
        return
    gate, up = (each.shape[0] for each in several)
    if gate != up:
        raise ValueError(f"activation {activation!r} is of two weights with as many rows, got {gate} and {up}")


def float8_of(float8: str | None, dtype: torch.dtype | None = None, of: str = "dtype") -> Float8 | None:
    """Check and return a float8 recipe or None. `dtype` is that of the operands, `of` their name in the error."""
    if float8 is not None and (not isinstance(float8, str) or float8 not in RECIPES):
        hint = ", which is for operands of functions: fusedtp.scaled(x, 'mxfp8')" if float8 == "mxfp8" else ""
        raise ValueError(f"float8 must be None or one of {', '.join(RECIPES)}, got {float8!r}{hint}")
    if float8 is not None and dtype == torch.float64:
        raise ValueError(f"float8 is for {of} in {', '.join(map(str, DTYPES[:3]))}, got {dtype}")
    return float8  # type: ignore[return-value]


def check_like_result(epilogue: Epilogue, x: Tensor, shape: Sequence[int]) -> None:
    """Check that a residual, if any, has the shape of this rank's result."""
    for name, each in epilogue.given(RESULT).items():
        check_tensor(name, each, x)
        if tuple(each.shape) != tuple(shape):
            raise ValueError(f"{name} must have the result's shape, {tuple(shape)}, got {tuple(each.shape)}")


def check_collective(op: Op, x: Tensor, options: Options) -> None:
    """Check x and the options of a collective without a matmul."""
    check_tensor("x", x)
    if x.ndim < 1:
        raise ValueError("x must have at least 1 dimension, got a scalar")
    check_options(options, x)
    check_algorithm(op, options, x)


def check_options(options: Options, x: Tensor) -> None:
    """Check that the schedule is known and works in x's dtype, and that it can use the producer."""
    dispatch.check_schedule(options.schedule)
    if options.producer != "auto":
        check_producer(options.producer, options.schedule)
    if options.schedule != "auto" and SCHEDULES[options.schedule].has_kernels:
        dispatch.check_dtype(x.dtype)


def check_producer(producer: str, schedule: str) -> None:
    """Check that a producer is known and that the schedule has a choice of producers."""
    known = ("auto", *PRODUCERS, MULTICAST)
    if producer not in known:
        raise ValueError(f"producer must be one of {', '.join(known)}, got {producer!r}")
    if producer != "auto" and schedule not in ("auto", "fused"):
        raise ValueError(f"producer {producer!r} is for schedule 'fused', got schedule {schedule!r}")


def check_reach(schedule: str, x: Tensor, groups_used: Sequence[ProcessGroup], lengths: Sequence[int]) -> None:
    """Check that the groups carry x, and that lengths of all ranks together fit int32 if kernels may run.

    `lengths` ends with K and N. The lengths before them are those of x's other dims.
    """
    # A traced graph runs with the same groups as the call that it is traced from.
    if torch.compiler.is_compiling():
        return
    kind = x.device.type
    for group in groups_used:
        groups.check_device(group, kind)
    if schedule != "fused" and (schedule != "auto" or kind != "cuda"):
        return
    num_ranks = math.prod(group.size() for group in groups_used)
    lengths = (math.prod(lengths[:-2]), *lengths[-2:])
    if num_ranks * max(lengths) >= MANY:
        raise ValueError(
            f"schedule {schedule!r} has kernels for less than 2**31 rows or columns on all ranks together, got lengths "
            f"{lengths} on {num_ranks} ranks: use 'decomposed' or 'unfused'"
        )


def check_algorithm(op: Op, options: Options, x: Tensor) -> None:
    """Check that the op has the algorithm in this schedule."""
    algorithm, schedule, algorithms = options.algorithm, options.schedule, ("auto", *op.algorithms)
    if algorithm not in algorithms:
        raise ValueError(f"algorithm must be one of {', '.join(algorithms)}, got {algorithm!r}")
    by_auto = "decomposed" if x.device.type == "cpu" else "fused"
    SCHEDULES[by_auto if schedule == "auto" else schedule].check_algorithm(algorithm, schedule)


def dim(name: str, value: int, x: Tensor) -> int:
    """Check the dim `value` of x and return it counted from the front."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if not -x.ndim <= value < x.ndim:
        raise ValueError(f"{name} must be in [{-x.ndim}, {x.ndim - 1}] for x of shape {tuple(x.shape)}, got {value}")
    return value % x.ndim


def call_of(dim: int, x: Tensor) -> str:
    """Return, as text for `agreement`, the dim of a collective and the lengths of x's other dims.

    The collective's matrix, which has `dim` as rows, does not show them, and ranks must agree on them.
    """
    # A traced graph may have symbolic lengths.
    if torch.compiler.is_compiling():
        return ""
    return "x of " + " x ".join(f"{'any' if at == dim else length}" for at, length in enumerate(x.shape))


def sequence_dim(name: str, value: int) -> int:
    """Check and return the dim that a layer's input or output is split along: 0 or 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value not in (0, 1):
        raise ValueError(f"{name} must be 0, for [sequence, batch, features], or 1, for [batch, ...], got {value!r}")
    return value


def sequence_sizes(sizes: Sequence[int] | None, group: ProcessGroup) -> tuple[int, ...] | None:
    """Check and return every rank's length of a layer's sequence; None if each call has its own."""
    return None if sizes is None else check_sizes(sizes, world_size=group.size(), name="sequence_sizes")


def flag(name: str, value: bool) -> bool:
    """Check that `value` is a bool and return it."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def features(**lengths: int) -> tuple[int, ...]:
    """Check and return lengths of a parameter's dims, given by name."""
    return tuple(check_count(name, length) for name, length in lengths.items())


def parameter_options(device: torch.device | str | int | None, dtype: torch.dtype | None) -> None:
    """Check the device and dtype of a layer's parameters; None for torch's default."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    if device is not None:
        try:
            kind = torch.device(device).type
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device must be a torch.device, its name or its number, got {device!r}") from error
        if kind not in DEVICES:
            raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")


def gather_sizes(sizes: Sequence[int] | None, group: ProcessGroup, local: int) -> tuple[int, ...]:
    """Return every rank's length of the gathered dim, by default this rank's length on all ranks."""
    if sizes is None:
        return (local,) * group.size()
    return check_sizes(sizes, world_size=group.size(), rank=group.rank(), local=local)


def scatter_sizes(sizes: Sequence[int] | None, group: ProcessGroup, length: int) -> tuple[int, ...]:
    """Return every rank's length of the scattered dim, by default as even as possible."""
    if sizes is None:
        return even_sizes(length, group.size())
    return check_sizes(sizes, world_size=group.size(), length=length)


def lengths(
    spec: Spec, a: Tensor, b: Tensor, ranks: Mapping[str, int], sizes: Mapping[str, int | Sequence[int]] | None
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the global length of every dim of the spec, and the dim's explicit split, () for none."""
    for name, tensor, sharding in (("a", a, spec.a), ("b", b, spec.b)):
        if tensor.ndim != len(sharding.dims):
            raise ValueError(f"{name} must have {len(sharding.dims)} dimensions, {sharding}, got {tuple(tensor.shape)}")
    if sizes is not None and not isinstance(sizes, Mapping):
        raise TypeError(f"sizes must map dims to lengths, got {sizes!r}")
    by_name = dict(sizes or {})
    if unknown := set(by_name) - set(spec.dim_names):
        raise ValueError(f"sizes names {', '.join(sorted(map(str, unknown)))}, which {spec} does not have")
    here: dict[str, tuple[int, int]] = {}  # dim -> (number of parts, length), from the operand with the fewest parts
    for tensor, sharding in ((a, spec.a), (b, spec.b)):
        for length, dim in zip(tensor.shape, sharding.dims, strict=True):
            parts = math.prod(ranks[axis] for axis in dim.axes)
            here[dim.name] = min(here.get(dim.name, (parts, parts * length)), (parts, parts * length))
    whole: list[int] = []
    splits: list[tuple[int, ...]] = []
    for name in spec.dim_names:
        value = by_name.get(name)
        if value is None or not isinstance(value, Iterable):
            whole.append(here[name][1] if name not in by_name else check_count(f"sizes[{name!r}]", value))
            splits.append(())
            continue
        tensors = [sharding for sharding in (spec.a, spec.b, spec.c) if name in sharding.names]
        first = {axes[0] for axes in (sharding.axes(name) for sharding in tensors) if axes}
        if len(first) != 1:
            raise ValueError(f"sizes[{name!r}] must be one length: {spec} has no one axis that splits it first")
        explicit = check_sizes(value, world_size=ranks[first.pop()], name=f"sizes[{name!r}]")
        whole.append(sum(explicit))
        splits.append(explicit)
    return whole, splits


def refuse_tracing() -> None:
    """Raise NotImplementedError under torch.jit.trace: sizes are tensors there, which ranks cannot agree on."""
    if is_tracing() and not torch.compiler.is_compiling():
        raise NotImplementedError("torch.jit.trace does not trace fusedtp's ops: use torch.compile or torch.export")


# Calls on float8 operands: x and every weight are `Scaled`, and no tensor has a gradient.
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


def is_plain(x: Any, weight: Any, out_dtype: torch.dtype | None, float8: str | None) -> bool:
    """Return whether no operand is `Scaled`. Then results have the operands' dtype."""
    several = weight if isinstance(weight, list | tuple) else (weight,)
    if isinstance(x, Scaled) or any([isinstance(each, Scaled) for each in several]):
        if float8 is not None:
            raise ValueError(f"float8 is for tensors that are to be cast, Scaled operands are: got {float8!r}")
        return False
    if out_dtype is not None and isinstance(x, Tensor) and out_dtype != x.dtype:
        raise ValueError(f"out_dtype must be None or x's dtype, {x.dtype}, but for Scaled operands, got {out_dtype!r}")
    return True


def check_scaled(
    x: Any, weight: Any, epilogue: Epilogue, options: Options, out_dtype: torch.dtype | None
) -> tuple[torch.dtype, bool]:
    """Check what a call on `Scaled` operands is given. Return the result's dtype, and whether scales are of blocks."""
    if options.order not in (RANK_ORDER, ANY_ORDER):
        raise ValueError(f"order {options.order!r} is for operands that are not float8, got Scaled ones")
    if not torch.compiler.is_compiling() and transforms_active():
        raise NotImplementedError("float8 operands are not implemented in torch.func's transforms: call it outside")
    if out_dtype is not None and out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype must be None or one of {', '.join(map(str, OUT_DTYPES))}, got {out_dtype!r}")
    out = out_dtype or torch.bfloat16
    x, named = _check_scaled("x", x), _each(weight, epilogue, "weight")
    blocks = _check_together(x, {name: _check_scaled(name, each, x.data.device) for name, each, _ in named})
    others = (epilogue.given(RESULT) | epilogue.given(NORM)).items()
    _check_added([*(pair for _, _, added in named for pair in added), *others], out)
    return out, blocks


def _check_together(x: Scaled, ws: Mapping[str, Scaled]) -> bool:
    """Raise ValueError unless one product takes x and all weights. Return whether they have block scales."""
    (first_name, first_w), blocks = next(iter(ws.items())), x.scale.dtype == E8M0
    first = first_w.data.dtype
    for name, w in ws.items():
        if w.data.dtype != first:
            raise ValueError(f"all weights must have one dtype, got {first_name} in {first}, {name} in {w.data.dtype}")
        if (w.scale.dtype == E8M0) != blocks:
            raise ValueError(
                f"x and weight must both have scales of blocks, in {E8M0}, or neither, got x.scale in {x.scale.dtype} "
                f"and {name}.scale in {w.scale.dtype}: make both by fusedtp.scaled with recipe 'mxfp8', or neither"
            )
    if formats_of(first) != formats_of(x.data.dtype):
        raise ValueError(
            f"x and weight must be of one kind of float8, OCP's or fnuz, as no machine multiplies both, got "
            f"{x.data.dtype} and {first}: make both by fusedtp.scaled, from values()"
        )
    return blocks


def _check_added(named: Sequence[tuple[str, Any]], out: torch.dtype) -> None:
    """Raise ValueError unless the operands of an epilogue have dtype `out` and need no gradient."""
    for name, each in named:
        if type(each) not in PLAIN:
            check_kind(name, each)
        if each.dtype != out:
            raise ValueError(f"{name} must be in out_dtype, {out}, got {each.dtype}")
    tensors = [each for _, each in named if isinstance(each, Tensor)]
    if torch.is_grad_enabled() and any([each.requires_grad for each in tensors]):
        raise ValueError(
            "results of float8 operands have no gradient, but a bias, a residual or a norm's parameter requires one: "
            "call under torch.no_grad, or detach it"
        )
