"""Models on the meta device: keep what no checkpoint has when `to_empty` gives the model memory.

`to_empty` leaves every parameter and buffer undefined, and makes a parameter that several modules share several ones. A
checkpoint brings the values of parameters and of persistent buffers. Other buffers, such as a rotary embedding's
frequencies, would stay undefined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Lasting = Mapping[str, Tensor]
"""Values of tensors that no checkpoint has, by their names in the model."""


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a parameter or a buffer of the model has no memory."""
    return any(each.is_meta for tensors in (model.parameters(), model.buffers()) for each in tensors)


def ties(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(each), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def tie(model: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Make the parameters with these names one again: the first of each list."""
    for names in tied:
        first = model.get_parameter(names[0])
        for name in names[1:]:
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, first)


def _not_in_checkpoints(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # The module's own buffers that are not persistent, and tensors that are plain attributes.
    for name in module._non_persistent_buffers_set:
        if (buffer := module._buffers.get(name)) is not None:
            yield name, buffer
    yield from [(name, each) for name, each in vars(module).items() if isinstance(each, Tensor)]


def rebuilt(model: nn.Module) -> dict[str, Tensor]:
    """Return the values of tensors that no checkpoint has, if the model is on meta.

    Those on meta are computed by the `_init_weights` of the model, as transformers does after loading. Raises
    NotImplementedError for a tensor that it does not compute. The model is not changed.
    """
    values: dict[str, Tensor] = {}
    for path, module in model.named_modules() if is_on_meta(model) else ():
        own = dict(_not_in_checkpoints(module))
        values |= {f"{path}.{name}".strip("."): each for name, each in own.items() if not each.is_meta}
        if lost := [name for name, each in own.items() if each.is_meta]:
            values |= {f"{path}.{name}".strip("."): each for name, each in _computed(model, path, lost).items()}
    return {name: each.detach().clone() for name, each in values.items()}


def _computed(model: nn.Module, path: str, names: Sequence[str]) -> dict[str, Tensor]:
    # A value that does not depend on what was there before has been computed.
    module = model.get_submodule(path)
    steps = path.split(".")
    above = [model.get_submodule(".".join(steps[:i])) for i in range(len(steps), -1, -1)]
    owner: Any = next((each for each in above if hasattr(type(each), "_init_weights")), None)
    # Parameters that have values would be initialised too.
    can = owner is not None and all(each.is_meta for each in module.parameters())
    tensors = {name: getattr(module, name) for name in names}
    made: list[dict[str, Tensor]] = []
    for value in (0, 1) if can else ():
        try:
            with torch.device("cpu"), torch.no_grad():
                for name, tensor in tensors.items():
                    setattr(module, name, torch.full_like(tensor, value, device="cpu"))
                owner._init_weights(module)
                made.append({name: getattr(module, name) for name in names})
        finally:
            for name, tensor in tensors.items():
                setattr(module, name, tensor)
    for name in names:
        if not made or made[0][name].is_meta or not torch.equal(made[0][name], made[1][name]):
            full, kind = f"{path}.{name}".strip("."), type(module).__name__
            raise NotImplementedError(
                f"parallelize of a model on meta: {full} of {kind} has no value there, no checkpoint has it, and "
                f"{type(owner).__name__ + '._init_weights does not' if can else 'no _init_weights can'} compute it. "
                f"Give it its value before parallelize, as by replacing {path or 'the module'} by one that is made "
                "outside of torch.device('meta'), or make the whole model there"
            )
    return made[0]


def keep(model: nn.Module, values: Lasting, device_type: str) -> None:
    """Give the model these values on that kind of device, and let `to_empty` keep them and what modules share."""
    for name, value in values.items():
        owner, _, own = name.rpartition(".")
        if getattr(model.get_submodule(owner), own).is_meta:
            setattr(model.get_submodule(owner), own, value.to(device_type))
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        mine = {name.removeprefix(prefix): each for name, each in values.items() if name.startswith(prefix)}
        if mine or not path:
            module.to_empty = partial(_to_empty, module, mine)


def _to_empty(module: Any, values: Lasting, *, device: Any, recurse: bool = True) -> Any:
    tied = ties(module)
    type(module).to_empty(module, device=device, recurse=recurse)
    tie(module, tied)
    with torch.no_grad():
        for name, value in values.items():
            owner, _, own = name.rpartition(".")
            tensor: Tensor = getattr(module.get_submodule(owner), own)
            if not tensor.is_meta:
                tensor.copy_(value)
    return module
