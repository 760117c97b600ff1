"""What is done to a decoder's modules around their linears: tokens split and gathered, heads counted, a tied head."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from .linears import FusedColwiseParallel

TOKENS = Shard(1)
"""The sequence is the second dim of hidden states, [batch, tokens, features]."""


def _changed(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # The call with its hidden states changed: the first argument, or the one of that name.
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


# Hooks are functions of this module, so that a model that has them can be saved by torch.save.


def _split(x: Tensor, mesh: DeviceMesh) -> Tensor:
    # One module may be several layers.
    if isinstance(x, DTensor):
        return x
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(placements=[TOKENS])


def _whole(x: Any) -> Tensor:
    gathered: Tensor = x.redistribute(placements=[Replicate()]).to_local()
    return gathered


def _split_before(mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _changed(args, kwargs, partial(_split, mesh=mesh))


def _split_after(mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return (_split(output[0], mesh), *output[1:]) if isinstance(output, tuple) else _split(output, mesh)


def _whole_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _changed(args, kwargs, _whole)


def _whole_after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _whole(output)


def _features_before(mesh: DeviceMesh, dim: int, module: nn.Module, args: tuple[Any, ...]) -> Any:
    return DTensor.from_local(args[0], mesh, [Shard(dim)], run_check=False), *args[1:]


def _local_after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    # A copy, as a view of a DTensor could not be changed in place, which OLMoE does.
    return output.to_local().clone()


def _kept_before(mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kept = kwargs.get("logits_to_keep")
    if isinstance(kept, Tensor) and not isinstance(kept, DTensor):
        kwargs = {**kwargs, "logits_to_keep": DTensor.from_local(kept, mesh, [Replicate()], run_check=False)}
    return args, kwargs


class SplitTokens(ParallelStyle):
    """The first layer: what it is given whole becomes a DTensor, Shard(1), as which it goes through all layers."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_split_before, device_mesh), with_kwargs=True)
        return module

    def __repr__(self) -> str:
        return "SplitTokens"


class WholeTokens(ParallelStyle):
    """A module that is not split: it runs on all tokens, alike on every rank, which keeps its own."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(_whole_before, with_kwargs=True)
        module.register_forward_hook(partial(_split_after, device_mesh))
        return module

    def __repr__(self) -> str:
        return "WholeTokens"


class KeptLogits(ParallelStyle):
    """The model: the tokens whose logits are wanted are picked from hidden states that are DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_kept_before, device_mesh), with_kwargs=True)
        return module

    def __repr__(self) -> str:
        return "KeptLogits"


class WholeOutput(ParallelStyle):
    """The last norm of a model whose tokens are not split after it: a plain tensor, the same on every rank.

    For heads that know of no DTensors, and for models that view what it gives in another shape, which a DTensor of
    uneven parts has not.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(_whole_after)
        return module

    def __repr__(self) -> str:
        return "WholeOutput"


class SplitFeatures(ParallelStyle):
    """A norm whose weights are split over the ranks, with the features that it is given, as OLMo2's of queries and keys
    is: its sums are added up. dim -2: a norm of each head that has weights of its own, as Cohere's.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            setattr(module, name, nn.Parameter(value, requires_grad=parameter.requires_grad))

        module.register_forward_pre_hook(partial(_features_before, device_mesh, self.dim))
        module.register_forward_hook(_local_after)
        return module

    def __repr__(self) -> str:
        return "SplitFeatures" if self.dim == -1 else f"SplitFeatures({self.dim})"


class Heads(ParallelStyle):
    """An attention with this rank's heads, as many queries and so many keys and values: what its code counts by."""

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__()
        self.queries, self.keys = queries, keys

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        here: Any = module
        if hasattr(module, "num_key_value_groups"):
            here.num_key_value_groups = self.queries // self.keys
        if hasattr(module, "num_key_value_heads"):
            here.num_key_value_heads = self.keys
        if hasattr(module, "split_size"):
            here.split_size = self.queries * here.head_dim
        # Its own, as the other modules go on with all heads.
        here.config = copy.copy(here.config)
        here.config.num_attention_heads = self.queries
        return module

    def __repr__(self) -> str:
        return f"Heads({self.queries}, {self.keys})"


class TiedHead(ParallelStyle):
    """A head whose weight is the embedding's, split by vocabulary by now: they stay one."""

    def __init__(self, style: FusedColwiseParallel, embedding: nn.Module) -> None:
        super().__init__()
        self.style, self.embedding = style, embedding

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        made: Any = module
        made.weight = self.embedding.weight
        self.style.src_data_rank, self.style.keeps_ties = self.src_data_rank, True
        return self.style._apply(module, device_mesh)

    def __repr__(self) -> str:
        return f"TiedHead({self.style!r})"
