"""Calls like one that was made before.

A layer makes the same call at every step, and checking its arguments and writing down its spec takes longer than a
small matmul: what they come to is remembered, by all that was looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import arguments, eager
from .parameters import PLAIN, local, part
from .sharded import Problem

# From (x, weight, bias, group, *options) to the arguments of `eager.apply` after its tensors.
Prepare: TypeAlias = Callable[..., tuple[Any, ...]]

_MAX_CALLS = 4096

_calls: dict[tuple[Any, ...], Problem] = {}


def call(
    prepare: Prepare, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, *options: Any
) -> Tensor:
    """The layer that `prepare` checks the arguments of and describes, once for all calls that are alike."""
    key = _key(prepare, x, weight, bias, group, options)
    if key is None:
        return eager.apply(x, weight, bias, *prepare(x, weight, bias, group, *options))
    problem = _calls.get(key) or _known(key, prepare(x, weight, bias, group, *options))
    return eager.run(x, weight, bias, problem)


def of_parameters(
    prepare: Prepare, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, *options: Any
) -> Tensor:
    """`call` of a layer: its weight and bias are DTensors, or plain where torch.func has put other ones in place."""
    if type(weight) in PLAIN:
        weight, bias = local(weight, 2), None if bias is None else local(bias, 1)
    key = None
    if type(x) in PLAIN and not torch.compiler.is_compiling() and not torch.is_autocast_enabled(x.device.type):
        w_part, bias_part = part(weight, 2), None if bias is None else part(bias, 1)
        key = _key(prepare, x, w_part, bias_part, group, options)
    if key is None:
        weight, bias = local(weight, 2), None if bias is None else local(bias, 1)
        return call(prepare, *arguments.autocast(x, weight, bias), group, *options)
    problem = _calls.get(key) or _known(key, prepare(x, w_part, bias_part, group, *options))
    return eager.run(x, weight, bias, problem)


def _known(key: tuple[Any, ...], described: tuple[Any, ...]) -> Problem:
    if len(_calls) >= _MAX_CALLS:
        _calls.clear()
    problem = _calls[key] = Problem.of(*described)
    return problem


def _key(
    prepare: Prepare, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, options: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    # None where a check looks at more than what is here, or where what is here could pass for something else.
    if torch.compiler.is_compiling():
        return None
    kinds = []
    for option in options:
        kind = type(option)
        kinds.append(kind)
        if kind is tuple:
            # (True, 2.0) is (1, 2) to a dictionary.
            if any(type(each) is not int for each in option):
                return None
        elif kind not in _OPTIONS:
            return None
    key = (prepare, group.group_name, group.size(), group.rank(), options, *kinds)
    for each in (x, weight) if bias is None else (x, weight, bias):
        if type(each) not in PLAIN or each.is_nested:
            return None
        key += each.shape, each.dtype, each.device, each.layout
    return key


_OPTIONS = (int, bool, str, type(None))
