"""Packed linears: take apart several linears in one, or a transposed weight, so that each part can be split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


def is_conv1d(module: nn.Module) -> bool:
    """Return whether the module is Hugging Face's Conv1D, a linear with the weight [in, out]."""
    return type(module).__name__ == "Conv1D" and {"nf", "nx"} <= vars(module).keys()


def features(module: nn.Module) -> int:
    """Return the number of output features of a linear or a Conv1D."""
    made: Any = module.nf if is_conv1d(module) else module.out_features
    return int(made)


class Unpacked(nn.Module):
    """The class of a packed linear that was taken apart: its `parts` are nn.Linear, whose results are concatenated.

    In a state_dict the parts have entries of their own, such as `parts.0.weight`. Loading takes an entry under the
    linear's own name apart.
    """

    parts: nn.ModuleList
    # True if it was a Conv1D.
    transposed: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., features]: all parts' features that this rank has."""
        outs = [part(x) for part in self.parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("weight", "bias"):
            if (whole := state_dict.pop(f"{prefix}{name}", None)) is not None:
                rows = whole.t() if self.transposed and whole.ndim == 2 else whole
                for i, own in enumerate(rows.split([features(each) for each in self.parts])):
                    here: Any = self.parts[i]._parameters[name]
                    if isinstance(here, DTensor) and not isinstance(own, DTensor):
                        own = distribute_tensor(own, here.device_mesh, here.placements, src_data_rank=None)
                    state_dict[f"{prefix}parts.{i}.{name}"] = own
        super()._load_from_state_dict(state_dict, prefix, *args)


def joined(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a whole state with the names and shapes that parameters had before `Unpack`."""
    state = dict(state)
    for name, module in model.named_modules():
        if isinstance(module, Unpacked):
            for of in ("weight", "bias"):
                keys = [f"{name}.parts.{i}.{of}" for i in range(len(module.parts))]
                if parts := [state.pop(key) for key in keys if key in state]:
                    whole = torch.cat(parts)
                    state[f"{name}.{of}"] = whole.t().contiguous() if module.transposed and whole.ndim == 2 else whole
    return state


class Unpack(ParallelStyle):
    """Style that takes an nn.Linear or a Conv1D apart into linears with these numbers of output features."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.lengths = tuple(lengths)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight, bias = module._parameters.pop("weight"), module._parameters.pop("bias")
        assert weight is not None
        rows, parts = weight.t() if is_conv1d(module) else weight, []
        begin = 0
        for length in self.lengths:
            part = nn.Linear(rows.shape[1], length, bias is not None, device="meta")
            for name, whole in (("weight", rows), ("bias", bias)):
                if whole is not None:
                    own = whole.detach()[begin : begin + length].clone(memory_format=torch.contiguous_format)
                    part._parameters[name] = nn.Parameter(own, requires_grad=whole.requires_grad)
            parts.append(part)
            begin += length
        made: Any = module
        made.transposed = is_conv1d(module)
        made.__class__ = Unpacked
        made.parts = nn.ModuleList(parts)
        return module

    def __repr__(self) -> str:
        return f"Unpack({', '.join(map(str, self.lengths))})"
