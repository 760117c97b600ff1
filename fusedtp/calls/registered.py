"""Register operators with torch: opaque to the compiler, with an exact fake and an optional autograd formula.

torch's custom_op does the same. But the first call of such an operator imports the compiler, which takes a second in
every process.

torch.func's transforms do not see tangents and batches of an operator. Inside transforms the same function and formula
run as an autograd.Function. `grad`, `vjp`, `jacrev` and `vmap` are supported there. `vmap` loops over the batch, so
that ranks make the same calls. Forward mode is refused.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, library

from .. import locks
from ..torch_private import forward_mode_active, transforms_active

Formula: TypeAlias = Callable[..., Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def operator(
    name: str, fake: Formula, backward: Formula | None = None, setup: Formula | None = None
) -> Callable[[Function], Function]:
    """Register the decorated function as `torch.ops.fusedtp.<name>` for all devices; calls then go to the operator.

    The function must not mutate its arguments, and its results must not share memory with them.

    - `fake`: the same function, for shapes only.
    - `backward`, `setup`: arguments of torch's register_autograd. Without `backward`, backward raises RuntimeError.
    """

    def register(function: Function) -> Function:
        qualified = f"fusedtp::{name}"
        schema = library.infer_schema(function, mutates_args=())
        library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
        # `locks.one`, because in a compiled graph no other function of this package is around the operator.
        library.impl(qualified, "CompositeExplicitAutograd", locks.one(function))
        library.register_fake(qualified, fake)
        formula = backward if backward is not None else _refuse(qualified)
        library.register_autograd(qualified, formula, setup_context=setup)
        registered = getattr(torch.ops.fusedtp, name).default
        transformed = _transformed(name, registered, formula, setup)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, finalizing: Any = sys.is_finalizing) -> Any:
            if torch.compiler.is_compiling():
                return registered(*args)
            if not (transforms_active() or forward_mode_active()):
                if finalizing():
                    # torch's table of operators is gone, and its error would be undefined.
                    raise RuntimeError(f"fusedtp.{name}: the interpreter is ending, and torch with it")
                return registered(*args)
            given = signature.bind(*args)
            given.apply_defaults()
            return transformed.apply(*given.args)

        return call  # type: ignore[return-value]

    return register


def refuse_forward_mode(*args: Any) -> Any:
    """Raise NotImplementedError, as the `jvp` of an autograd.Function without forward mode."""
    raise NotImplementedError(
        "forward-mode differentiation (torch.func.jvp, jacfwd, hessian, dual tensors) of fusedtp's ops is not "
        "implemented: use reverse mode (torch.func.vjp, jacrev, grad, backward)"
    )


def _transformed(name: str, registered: Formula, formula: Formula, setup: Formula | None) -> Any:
    function: Any = None

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if setup is not None:
            setup(ctx, inputs, output)

    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        outs = []
        for i in range(info.batch_size):
            batched = (isinstance(arg, Tensor) and dim is not None for arg, dim in zip(args, in_dims, strict=True))
            each = (
                arg.select(dim, i) if is_batched else arg
                for arg, dim, is_batched in zip(args, in_dims, batched, strict=True)
            )
            # Another transform may be active.
            outs.append(function.apply(*each) if transforms_active() else registered(*each))
        if isinstance(outs[0], Tensor):
            return torch.stack(outs), 0
        stacked = tuple(torch.stack(parts) for parts in zip(*outs, strict=True))
        return stacked, (0,) * len(stacked)

    methods: dict[str, Callable[..., Any]] = {
        "forward": registered,
        "setup_context": setup_context,
        "backward": formula,
        "vmap": vmap,
        "jvp": refuse_forward_mode,
    }
    function = type(name, (torch.autograd.Function,), {key: staticmethod(each) for key, each in methods.items()})
    return function


def _refuse(name: str) -> Formula:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"{name} has no gradient of its own: the functions and modules of fusedtp have one")

    return backward
