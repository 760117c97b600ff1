"""Styles for a decoder's modules around the linears: split or gather tokens, count heads, tie a head."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode

from ..styles.linears import TOKENS, Derived, FusedColwiseLinear, FusedColwiseParallel, Tokens, derived, distribute
from ..torch_private import graph_task, is_random

# Hooks are functions of this module, so that torch.save can save a model with them.


def _split(tokens: Tokens, mesh: DeviceMesh, x: Any) -> Tensor:
    # One module may serve as several layers: x may be split already.
    if not tokens.are_whole and not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(placements=[TOKENS])
    return x  # type: ignore[no-any-return]


def _split_first(tokens: Tokens, mesh: DeviceMesh, x: Any) -> Tensor:
    is_split = isinstance(x, DTensor) or tokens.selects
    tokens.short = not is_split and x.shape[TOKENS.dim] < mesh.size() and not torch.is_grad_enabled()
    return _split(tokens, mesh, x)


def _whole(tokens: Tokens, mesh: DeviceMesh, x: Any) -> Tensor:
    # Experts view it as a matrix; torch 2.11 gathers along dim 1 into other strides.
    return x.redistribute(placements=[Replicate()]).to_local().contiguous() if isinstance(x, DTensor) else x


def _own_whole(tokens: Tokens, mesh: DeviceMesh, x: Any) -> Tensor:
    # Copy, as Mixtral changes its input in place, which a view of a DTensor does not allow.
    return _whole(tokens, mesh, x).clone() if torch.is_grad_enabled() else _whole(tokens, mesh, x)


def _before(change: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Hidden states are the first argument, or the one with that name.
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


def _after(change: Any, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def _features_before(mesh: DeviceMesh, dim: int, module: nn.Module, args: tuple[Any, ...]) -> Any:
    return DTensor.from_local(args[0], mesh, [Shard(dim)], run_check=False), *args[1:]


def _local_after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    # Copy, as OLMoE changes the output in place, which a view of a DTensor does not allow.
    return output.to_local().clone()


def _kept_before(
    tokens: Tokens, mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    kept = kwargs.get("logits_to_keep")
    tokens.selects = isinstance(kept, Tensor)
    if isinstance(kept, Tensor) and not isinstance(kept, DTensor):
        kwargs = {**kwargs, "logits_to_keep": DTensor.from_local(kept, mesh, [Replicate()], run_check=False)}
    return args, kwargs


def _cache_before(
    whole: int, here: int, shared: bool, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    # An attention fills an empty cache itself. Keys that were made outside of it may be those of all heads. If ranks
    # share a head, each has a term of the gradient of its keys, and only the linear of the keys adds these terms up.
    from transformers.cache_utils import Cache

    module.is_running, split = True, f"parallelize has split this {type(module).__name__} by heads, and it was given"
    # The name of the argument differs between models and between versions of transformers.
    for cache in (each for each in (*args, *kwargs.values()) if isinstance(each, Cache)):
        try:
            index, layers = module.layer_idx, cache.layers
            made = [layers[index].keys, layers[index].values] if index < len(layers) else []
        except AttributeError as error:
            raise NotImplementedError(f"{split} a {type(cache).__name__} without keys and values: {error}") from error
        made = [each for each in made if isinstance(each, Tensor) and each.numel()]
        filled: set[int] = vars(cache).setdefault("filled_by_attention", set())
        fault = ""
        if not made:
            filled.add(index)
        elif (heads := made[0].shape[1]) != here:
            fault = "of all heads" if heads == whole else f"of {heads} heads, and not {here}"
        elif shared and index not in filled and torch.is_grad_enabled() and any(each.requires_grad for each in made):
            fault = "whose gradients would not be added up over ranks"
        if fault:
            raise NotImplementedError(
                f"{split} a cache with keys and values {fault}, as peft's prefix tuning makes them: use prompt tuning, "
                "whose tokens go through the model, or LoRA"
            )


def _implementation_before(model_config: Any, module: Any, args: tuple[Any, ...]) -> None:
    # The model makes its mask for the implementation that its own configuration names, which may change.
    if module.config._attn_implementation != model_config._attn_implementation:
        module.config._attn_implementation = model_config._attn_implementation


def _attention_after(module: Any, args: tuple[Any, ...], output: Any) -> None:
    module.is_running = False


def _inside(attention: Any, module: nn.Module, args: tuple[Any, ...]) -> None:
    # Code around an attention, such as peft's AdaptionPrompt, has parameters that each rank would use for its heads.
    # In a backward pass, a checkpoint of a linear alone repeats it.
    if not attention.is_running and graph_task() == -1:
        kind = type(attention).__name__
        raise NotImplementedError(
            f"parallelize has split this {kind} by heads, and only the code of {kind} may call its linears: put "
            "adapters that wrap an attention on first, and then call fusedtp.parallelize"
        )


class _DrawnWhole(TorchFunctionMode):
    # On CPUs DTensor draws for a rank's own part only: all ranks would draw the same numbers, and other counts of them
    # if parts are uneven. Draw for the whole on every rank, and keep the own part.
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        split = [x for x in (*args, *named.values()) if isinstance(x, DTensor) and not x.placements[0].is_replicate()]
        if not split or not is_random(func):
            return func(*args, **named)
        mesh, placements = split[0].device_mesh, split[0].placements
        # Copy, as a view of a DTensor does not allow changes in place.
        wholes = {id(x): x.redistribute(placements=[Replicate()]).to_local().clone() for x in split}
        whole_kwargs = {name: wholes.get(id(each), each) for name, each in named.items()}
        out = func(*(wholes.get(id(each), each) for each in args), **whole_kwargs)

        def own(y: Tensor) -> Tensor:
            return DTensor.from_local(y, mesh, [Replicate()], run_check=False).redistribute(placements=placements)

        for x in split:
            if out is wholes[id(x)]:
                # A function that works in place, or has nothing to do.
                return x.copy_(own(out)) if out.is_inference() or out._version else x
        return tuple(map(own, out)) if isinstance(out, tuple) else own(out)


# A compiler that went through the mode would take minutes.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _drawn_whole(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _DrawnWhole():
        return forward(*args, **kwargs)


class DrawnWhole(Derived):
    """Class that DrawWhole gives a layer.

    transformers checkpoints the forward of a layer's class, so the mode is active again when backward repeats it.
    """

    # transformers and others find layers by the name of their class.
    class_name = "{}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward."""
        own: Any = super().forward
        is_split = any(isinstance(each, DTensor) for each in (*args, *kwargs.values()))
        # A compiler leaves layers out that train, and goes through those in evaluation, which seldom draw.
        if not is_split or (torch.compiler.is_compiling() and not self.training):
            return own(*args, **kwargs)
        return _drawn_whole(own, args, kwargs)


class Hooks(ParallelStyle):
    """Base of styles that change the hidden states that a module takes or returns, and leave its parameters.

    `tokens`: what the styles of one decoder share.
    """

    before: Any = None
    after: Any = None
    tokens: Tokens

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.before is not None:
            change = partial(self.before, self.tokens, device_mesh)
            module.register_forward_pre_hook(partial(_before, change), with_kwargs=True)
        if self.after is not None:
            module.register_forward_hook(partial(_after, partial(self.after, self.tokens, device_mesh)))
        return module

    def __repr__(self) -> str:
        return type(self).__name__


class SplitTokens(Hooks):
    """Style for the first layer: hidden states become DTensors, Shard(1), and stay so through all layers.

    In a call without gradients that has fewer tokens than ranks, they stay whole.
    """

    before = staticmethod(_split_first)


class WholeTokens(Hooks):
    """Style for a module that is not split: it runs on all tokens on every rank, and each rank keeps its own part."""

    before, after = staticmethod(_own_whole), staticmethod(_split)


class DrawWhole(Hooks):
    """Style for a layer: random numbers that its code draws for split hidden states are those of one process."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # On GPUs DTensor itself keeps the ranks' random states together.
        if device_mesh.device_type == "cpu":
            module.__class__ = derived((DrawnWhole, type(module)))
        return module


class KeptLogits(Hooks):
    """Style for the model: `logits_to_keep` becomes a DTensor, as it selects tokens of DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_kept_before, self.tokens, device_mesh), with_kwargs=True)
        return module


class WholeOutput(Hooks):
    """Style for the last norm if tokens are not split after it: it returns a plain tensor, the same on every rank.

    Needed by heads that take no DTensors, and by models that reshape the norm's output, which a DTensor with uneven
    parts does not support.
    """

    after = staticmethod(_whole)


class SplitFeatures(ParallelStyle):
    """Style for a norm over features that are split over the ranks, such as OLMo2's of queries and keys.

    Its weights are split like the features, and its sums are added up over the ranks. `dim` -2 is for a norm with
    weights for each head, such as Cohere's.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        distribute(module, device_mesh, self.src_data_rank, **dict.fromkeys(names, Shard(0)))
        module.register_forward_pre_hook(partial(_features_before, device_mesh, self.dim))
        module.register_forward_hook(_local_after)
        return module

    def __repr__(self) -> str:
        return "SplitFeatures" if self.dim == -1 else f"SplitFeatures({self.dim})"


class Heads(ParallelStyle):
    """Style for an attention: set its counts to this rank's numbers of query heads and of key and value heads.

    The attention refuses a cache of keys and values that were made outside of it, for all heads or to be trained. Only
    the attention's own code may call its linears.
    """

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__()
        self.queries, self.keys = queries, keys

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        here: Any = module
        here.is_running = False
        if hasattr(module, "num_key_value_groups"):
            here.num_key_value_groups = self.queries // self.keys
        if hasattr(module, "num_key_value_heads"):
            here.num_key_value_heads = self.keys
        if hasattr(module, "split_size"):
            here.split_size = self.queries * here.head_dim
        whole = getattr(here.config, "num_key_value_heads", None) or here.config.num_attention_heads
        hook = partial(_cache_before, whole, self.keys, whole < device_mesh.size())
        module.register_forward_pre_hook(hook, with_kwargs=True)
        module.register_forward_hook(_attention_after, always_call=True)
        for linear in module.modules():
            if isinstance(linear, FusedColwiseLinear):
                linear.register_forward_pre_hook(partial(_inside, module))
        module.register_forward_pre_hook(partial(_implementation_before, here.config))
        # Copy, as the other modules keep a configuration with all heads.
        here.config = copy.copy(here.config)
        here.config.num_attention_heads = self.queries
        return module

    def __repr__(self) -> str:
        return f"Heads({self.queries}, {self.keys})"


class TiedHead(ParallelStyle):
    """Style for a head that shares the embedding's weight, already split by vocabulary: the weight stays one."""

    def __init__(self, style: FusedColwiseParallel, embedding: nn.Module) -> None:
        super().__init__()
        self.style, self.embedding = style, embedding
        self.tokens: Tokens | None = None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        made: Any = module
        made.weight = self.embedding.weight
        self.style.src_data_rank, self.style.keeps_ties, self.style.tokens = self.src_data_rank, True, self.tokens
        return self.style._apply(module, device_mesh)

    def __repr__(self) -> str:
        return f"TiedHead({self.style!r})"
