"""Registering an operator with torch: opaque to the compiler, with an exact fake and maybe an autograd formula.

torch's custom_op does the same, but the first call of such an operator imports the compiler, a second for every
process whether it compiles or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import library

Formula: TypeAlias = Callable[..., Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def operator(
    name: str, fake: Formula, backward: Formula | None = None, setup: Formula | None = None
) -> Callable[[Function], Function]:
    """A decorator: `torch.ops.fusedtp.<name>.default`, which runs the function on any device.

    It mutates none of its arguments, and its results share no memory with them. fake: the same function on shapes
    alone. backward, setup: those of torch's register_autograd; without them the result has no gradient.
    """

    def register(function: Function) -> Function:
        qualified = f"fusedtp::{name}"
        schema = library.infer_schema(function, mutates_args=())
        library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(qualified, "CompositeExplicitAutograd", function)
        library.register_fake(qualified, fake)
        formula = backward if backward is not None else _refuse(qualified)
        library.register_autograd(qualified, formula, setup_context=setup)
        registered: Function = getattr(torch.ops.fusedtp, name).default
        return registered

    return register


def _refuse(name: str) -> Formula:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"{name} has no gradient of its own: the functions and modules of fusedtp have one")

    return backward
