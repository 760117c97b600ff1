"""The registered operators, `torch.ops.fusedtp.*`: opaque to the compiler, with an exact fake and an autograd formula.

    matmul          a call (`autograd`); backward: matmul_backward
    collective      all_gather, reduce_scatter or all_reduce of a matrix
    as_it_is        identity; backward: all_reduce

Groups are passed by name. `problems` and `collectives` check arguments; operators do not. Schedules are chosen when an
operator runs.

torch's custom_op does the same as `operator`. But the first call of such an operator imports the compiler, which takes
a second in every process.

torch.func's transforms do not see tangents and batches of an operator. Inside transforms the same function and formula
run as an autograd.Function. `grad`, `vjp`, `jacrev` and `vmap` are supported there. `vmap` loops over the batch, so
that ranks make the same calls. Forward mode is refused.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, library
from torch.distributed import ProcessGroup

from .. import groups, lanes, locks
from ..op import ALL_GATHER, ALL_REDUCE, AS_ANY, OPS, REDUCE_SCATTER, Op, Task
from ..torch_private import forward_mode_active, transforms_active
from ..workspaces import generation
from .bound import MAX_ROWS, BoundTask
from .problems import MAX_CALLS

Formula: TypeAlias = Callable[..., Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def operator(name: str, fake: Formula, backward: Formula, setup: Formula) -> Callable[[Function], Function]:
    """Register the decorated function as `torch.ops.fusedtp.<name>` for all devices; calls then go to the operator.

    The function's first argument is a tensor or a list of tensors, and no other argument has tensors. The function must
    not mutate its arguments, and its results must not share memory with them.

    - `fake`: the same function, for shapes only.
    - `setup`: takes autograd's context, the tensors, the other arguments and the results.
    - `backward`: takes the context and a gradient or None for each result. Returns one for each tensor.
    """

    def register(function: Function) -> Function:
        qualified = f"fusedtp::{name}"
        schema = library.infer_schema(function, mutates_args=())
        takes_list, returns_list = schema.startswith("(Tensor[]"), schema.endswith("[]")
        num_others = schema.count(",")

        def setup_operator(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            first, *others = inputs
            setup(ctx, first if takes_list else [first], others, output)

        def of_operator(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            made = backward(ctx, *(grads[0] if returns_list else grads))
            return (made if takes_list else made[0], *[None] * num_others)

        library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
        # `locks.one`, because in a compiled graph no other function of this package is around the operator.
        library.impl(qualified, "CompositeExplicitAutograd", locks.one(function))
        library.register_fake(qualified, fake)
        library.register_autograd(qualified, of_operator, setup_context=setup_operator)
        registered = getattr(torch.ops.fusedtp, name).default

        class Transformed(torch.autograd.Function):
            # Takes the tensors one by one, then the other arguments.
            @staticmethod
            def forward(*args: Any) -> Any:
                tensors, others = list(args[:-num_others]), args[-num_others:]
                outs = registered(tensors if takes_list else tensors[0], *others)
                return tuple(outs) if returns_list else outs

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
                setup(ctx, inputs[:-num_others], inputs[-num_others:], output)

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
                return (*backward(ctx, *grads), *[None] * num_others)

            @staticmethod
            def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
                pairs = list(zip(args, in_dims, strict=True))
                # Another transform may be active.
                run = Transformed.apply if transforms_active() else Transformed.forward
                outs = [
                    run(*(arg.select(dim, i) if isinstance(dim, int) else arg for arg, dim in pairs))
                    for i in range(info.batch_size)
                ]
                if not returns_list:
                    return torch.stack(outs), 0
                stacked = tuple(torch.stack(parts) for parts in zip(*outs, strict=True))
                return stacked, (0,) * len(stacked)

            @staticmethod
            def jvp(*args: Any) -> Any:
                refuse_forward_mode()

        @functools.wraps(function)
        def call(*args: Any, finalizing: Any = sys.is_finalizing) -> Any:
            if torch.compiler.is_compiling():
                return registered(*args)
            if not (transforms_active() or forward_mode_active()):
                if finalizing():
                    # torch's table of operators is gone, and its error would be undefined.
                    raise RuntimeError(f"fusedtp.{name}: the interpreter is ending, and torch with it")
                return registered(*args)
            first, *others = args
            return Transformed.apply(*(first if takes_list else [first]), *others)  # type: ignore[no-untyped-call]

        return call  # type: ignore[return-value]

    return register


def refuse_forward_mode() -> None:
    """Raise NotImplementedError, for the `jvp` of an autograd.Function without forward mode."""
    raise NotImplementedError(
        "forward-mode differentiation (torch.func.jvp, jacfwd, hessian, dual tensors) of fusedtp's ops is not "
        "implemented: use reverse mode (torch.func.vjp, jacrev, grad, backward)"
    )


# Cache of collectives, by group and cache key. Then the first of those that differ in their rows alone, and the keys
# of the last ones, by the key without rows.
_ready: WeakKeyDictionary[ProcessGroup, dict[Any, BoundTask]] = generation.table(WeakKeyDictionary())
_firsts: WeakKeyDictionary[ProcessGroup, dict[Any, tuple[BoundTask, deque[Any]]]] = generation.table(
    WeakKeyDictionary()
)


def _fake_collective(x: Tensor, op: str, sizes: Sequence[int], rank: int, *_: object) -> Tensor:
    task = Task(OPS[op], {"a": (x.shape[0], x.shape[1])}, x.dtype, tuple(sizes))
    return x.new_empty(task.results(rank)[0])


# The backward of a gather is a reduce-scatter, and the backward of a reduce-scatter is a gather. The result of an
# all-reduce is one tensor on every rank, and so is its gradient: backward returns it unchanged.


def _setup_collective(ctx: Any, tensors: Sequence[Tensor], others: Sequence[Any], output: Tensor) -> None:
    ctx.op, ctx.sizes, ctx.rank, ctx.group_name, ctx.schedule, *_ = others


def _through(ctx: Any, grad: Tensor) -> list[Tensor]:
    if ctx.op == ALL_REDUCE.name:
        # With create_graph=True: each rank computes with its own copy of the gradient, so the gradient of `grad` is
        # the sum over ranks.
        return [as_it_is(grad, ctx.group_name, ctx.schedule) if torch.is_grad_enabled() else grad]
    other = REDUCE_SCATTER if ctx.op == ALL_GATHER.name else ALL_GATHER
    return [collective(grad, other.name, ctx.sizes, ctx.rank, ctx.group_name, ctx.schedule, "auto", "auto", "", 0)]


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
    ready = ready_for(OPS[op], x, sizes, groups.named(group_name), schedule, algorithm, producer, call, leaves)
    return ready.run({"a": x})[0]


def ready_for(
    op: Op, x: Tensor, sizes: Sequence[int], group: ProcessGroup, schedule: str = "auto", algorithm: str = "auto",
    producer: str = "auto", call: str = "", leaves: int = 0, lane: int = lanes.ORDINARY,
) -> BoundTask:  # fmt: skip
    """Return the collective `op` of x [R, C] in `lane`, with options as in `collective`. It is cached."""
    rows, cols = x.shape
    others = (op.name, cols, x.dtype, x.device, schedule, algorithm, producer, call, leaves, lane)
    kept, key = _ready.setdefault(group, {}), (rows, tuple(sizes), others)
    ready = kept.get(key)
    if ready is not None and not ready.is_stale():
        return ready
    task = Task(
        op, {"a": (rows, cols)}, x.dtype, tuple(sizes), algorithm=algorithm, leaves=max(0, leaves),
        any_order=leaves == AS_ANY,
    )  # fmt: skip
    # Calls without rows have no schedule to share.
    firsts, like = _firsts.setdefault(group, {}), (others, max(sizes, default=rows) == 0)
    first, recent = firsts.get(like, (None, deque[Any]()))
    if first is None or first.is_stale():
        if len(firsts) >= MAX_CALLS:
            firsts.clear()
            kept.clear()
        ready = BoundTask(task, schedule, group, x.device, producer=producer, call=call, lane=lane)
        firsts[like] = ready, recent
    else:
        ready = first.at(task, ())
    if key not in kept:
        recent.append(key)
        if len(recent) > MAX_ROWS:
            kept.pop(recent.popleft(), None)
    kept[key] = ready
    return ready


def summed(x: Tensor, group_name: str, schedule: str) -> Tensor:
    """Return the sum over ranks of x [R, C]."""
    return collective(x, ALL_REDUCE.name, (), 0, group_name, schedule, "auto", "auto", "", 0)


def _setup_as_it_is(ctx: Any, tensors: Sequence[Tensor], others: Sequence[Any], output: Tensor) -> None:
    ctx.group_name, ctx.schedule = others


@operator(
    "as_it_is", lambda x, *_: torch.empty_like(x), lambda ctx, grad: [summed(grad, ctx.group_name, ctx.schedule)],
    _setup_as_it_is,
)  # fmt: skip
def as_it_is(x: Tensor, group_name: str, schedule: str) -> Tensor:
    """Copy x [R, C], the same on every rank. Ranks compute different values from it, so backward sums over ranks."""
    return x.clone()
