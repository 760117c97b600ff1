"""Split peft's LoRA adapters in a decoder that `parallelize` splits: like the linears that they are for.

    y = x @ W.T + scaling * (x @ A.T) @ B.T

    linear W [N, K]   A [r, K]                                 B [N, r]
    by columns        whole, on this rank's tokens             by columns, with the input and the output of W
    by rows           by rows, with the input of W             whole, on this rank's tokens
    packed            as by columns or by rows                 taken apart as W is
    embedding         whole                                    whole

An adapter sends r numbers per token, not N or K. An adapter that is added later, around a linear that has split
adapters, is split when it is made. This module does not import peft: it knows peft's classes by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from ..calls.parameters import as_dtensor, same_as
from ..styles.embeddings import FusedEmbedding
from ..styles.grouped import FusedGroup, FusedGroupedLinear, Unpack, Unpacked, joined
from ..styles.linears import (
    Derived,
    FusedColwiseParallel,
    FusedLinear,
    FusedRowwiseLinear,
    FusedRowwiseParallel,
    FusedSharedLinear,
    derived,
    distribute,
    share,
)
from ..styles.norms import AsGiven


def model_of(model: nn.Module) -> nn.Module:
    """Return the model that was given to peft, for a PeftModel or a tuner around one; otherwise the model itself."""
    made: Any = model
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        made = made.get_base_model()
    elif "model" in model._modules and hasattr(model, "peft_config") and hasattr(model, "targeted_module_names"):
        made = made.model
    return made  # type: ignore[no-any-return]


def _inner(module: nn.Module) -> str:
    # Return the name of the module that a peft module wraps; "" if it wraps none.
    return next((name for name in ("base_layer", "original_module") if name in module._modules), "")


@contextmanager
def taken_off(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """Put back the model as it was before peft; yield peft's modules by the names of those that they wrap."""
    wrappers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if name and _inner(module) and not any(name.startswith(f"{outer}.") for outer in wrappers):
            wrappers[name] = module
    try:
        for name, module in wrappers.items():
            model.set_submodule(name, module.get_submodule(_inner(module)))
        yield wrappers
    finally:
        for name, module in wrappers.items():
            model.set_submodule(name, module)


def check(model: Any, wrappers: Mapping[str, nn.Module], styled: Mapping[str, Sequence[ParallelStyle]]) -> None:
    """Raise NotImplementedError if a plan splits a module that has other adapters than those described above."""
    for adapter, config in (getattr(model, "peft_config", None) or {}).items():
        if config.peft_type in ("PREFIX_TUNING", "CARTRIDGE"):
            raise NotImplementedError(
                f"parallelize splits attention by heads, and the adapter {adapter!r}, {type(config).__name__}, gives "
                "every rank the keys and values of all heads: use prompt tuning, whose tokens go through the model, or "
                "LoRA"
            )
    seen: dict[int, str] = {}
    for name, module in wrappers.items():
        if not (styles := styled.get(name, ())):
            continue
        kind = type(module)
        copied = not any(type(each).__name__ in ("FusedGroup", "TiedHead", "Unpack") for each in styles)
        is_lora = kind.__module__ == "peft.tuners.lora.layer" and kind.__name__ in ("Linear", "Embedding")
        variants: Any = module.lora_variant if is_lora else {}
        if _inner(getattr(module, _inner(module))) or not (
            (is_lora and not variants) or (kind.__name__ in _COPIES and copied)
        ):
            what = next((type(each).__name__ for each in variants.values()), f"{kind.__module__}.{kind.__name__}")
            if kind.__name__.startswith("TrainableTokens"):
                raise NotImplementedError(
                    f"parallelize splits {name}, around which peft has put {what}: TrainableTokens trains rows of an "
                    "embedding that every rank has whole. Put on LoRA instead, with the embedding in target_modules, "
                    "or in modules_to_save"
                )
            raise NotImplementedError(
                f"parallelize splits {name}, around which peft has put {what}: it splits plain LoRA of linears and "
                "embeddings, LNTuning, and modules_to_save that are neither in a FusedGroup nor tied. Merge others "
                "first, merge_and_unload(), where they can be merged"
            )
        for key, parameter in module.named_parameters():
            # On meta there is no memory to compare.
            if (place := parameter.data_ptr()) and seen.setdefault(place, name) != name and "lora_" in key:
                raise NotImplementedError(
                    f"parallelize does not keep adapters tied, and {name}.{key} is one with {seen[place]}'s"
                )


# peft's modules that use a copy of a module in its place, and their attribute that has the copies.
_COPIES = {"ModulesToSaveWrapper": "modules_to_save", "LNTuningLayer": "ln_tuning_layers"}


def copies(module: nn.Module | None) -> list[nn.Module]:
    """Return the copies of a module, each of which an adapter uses in its place."""
    saved: Any = module._modules.get(_COPIES.get(type(module).__name__, "")) if module is not None else None
    return list(saved.values()) if saved is not None else []


def _parts(module: nn.Module) -> list[Any]:
    # Return the linears, or the embedding, that a peft module wraps.
    base: Any = module._modules.get("base_layer")
    return list(base.parts) if isinstance(base, Unpacked) else [base]


def split(module: nn.Module, device_mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Split the adapters of a peft module whose linear or embedding has been split."""
    layer: Any = module
    base, parts = module._modules.get("base_layer"), _parts(module)
    if not isinstance(base, FusedEmbedding) and not isinstance(parts[0], FusedLinear):
        return
    layer.__class__ = derived((FusedAdapted, type(module), Derived))
    layer.device_mesh, layer.src_data_rank = device_mesh, src_data_rank
    for name in layer.lora_A:
        layer.split_adapter(name)
    for part in parts:
        part.has_adapters = True


@contextmanager
def only_asked() -> Iterator[None]:
    """Let peft read `FusedLinear.base_layer` while it puts no adapter around any linear."""
    FusedLinear.has_adapters = True
    try:
        yield
    finally:
        FusedLinear.has_adapters = False


def unload(name: str, tuner: Any, *args: Any, **options: Any) -> Any:
    """Remove all adapters by the tuner's own method `name`, unload or merge_and_unload."""
    with only_asked():
        model = getattr(type(tuner), name)(tuner, *args, **options)
    for module in model.modules():
        if isinstance(module, FusedLinear):
            module.has_adapters = False
    return model


def with_adapter_names(tuner: Any, *args: Any, **options: Any) -> Any:
    """Prepare a call that may have an adapter for each sequence, as the tuner's own method does."""
    if options.get("adapter_names") is not None and any(
        isinstance(each._modules.get("original_module"), FusedEmbedding | FusedLinear) for each in tuner.modules()
    ):
        # Raise before peft adds hooks, which an exception in the call would leave behind.
        raise NotImplementedError(
            "adapter_names= is not done by modules_to_save of a linear, or an embedding, that fusedtp.parallelize has "
            "split: call the model once for each adapter, after set_adapter"
        )
    return type(tuner)._enable_peft_forward_hooks(tuner, *args, **options)


def add_weighted_adapter(
    tuner: Any, adapters: Any, weights: Any, adapter_name: str, *args: Any, **options: Any
) -> None:
    """Combine adapters into a new one by the tuner's own method, which needs whole factors, and split the new one."""
    layers: list[Any] = [each for each in tuner.modules() if isinstance(each, FusedAdapted)]
    kept = [(each, dict(each._modules)) for layer in layers for each in (layer.lora_A, layer.lora_B)]
    is_new = adapter_name not in tuner.peft_config
    for factors, _ in kept:
        state = joined(factors, {name: each.full_tensor() for name, each in factors.state_dict().items()})
        for name in factors:
            weight = state[f"{name}.weight"]
            factors[name] = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            factors[name].weight = nn.Parameter(weight, requires_grad=False)
    try:
        for layer in layers:
            layer.is_whole = True
        type(tuner).add_weighted_adapter(tuner, adapters, weights, adapter_name, *args, **options)
    finally:
        for factors, own in kept:
            factors._modules.update(own)
        for layer in layers:
            layer.is_whole = False
            if is_new and adapter_name in layer.scaling:
                layer.split_adapter(adapter_name)


class FusedAdapted(Derived):
    """The class of a peft module whose linear or embedding is split, together with its adapters."""

    device_mesh: DeviceMesh
    src_data_rank: int | None
    # True while factors are whole, for `add_weighted_adapter`.
    is_whole = False

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Make an adapter as peft's own method does, and split it."""
        layer: Any = self
        bound = inspect.signature(super().update_layer).bind(adapter_name, *args, **kwargs)  # type: ignore[misc]
        config = bound.arguments["config"]
        how = config.init_lora_weights
        kind = layer.resolve_lora_variant(config=config)
        if kwargs.get("tied_adapter") or kind is not None or how not in (True, False, "gaussian"):
            what = f"init_lora_weights={how!r}" if kind is None else type(kind).__name__
            raise NotImplementedError(
                f"the adapter {adapter_name!r}, with {'a tied weight' if kwargs.get('tied_adapter') else what}, cannot "
                "be put around a linear that is split: put it on before fusedtp.parallelize"
            )
        super().update_layer(adapter_name, *args, **kwargs)  # type: ignore[misc]
        if any(each.is_meta for each in self.parameters()):
            layer.delete_adapter(adapter_name)
            raise NotImplementedError(
                f"the adapter {adapter_name!r} is made of tensors on meta, which cannot be split before they have "
                "values: leave out low_cpu_mem_usage=True"
            )
        if isinstance(layer.base_layer, Unpacked):
            # A packed linear has no weight, from which peft takes the factors' device and dtype.
            weight = layer.base_layer.parts[0].weight
            for factors in (layer.lora_A, layer.lora_B):
                factors[adapter_name].to(weight.device, weight.dtype)
        if not self.is_whole:
            self.split_adapter(adapter_name)

    def split_adapter(self, name: str) -> None:
        """Split one adapter, whose factors are whole on every rank; an embedding's factors stay whole."""
        layer: Any = self
        if isinstance(layer.base_layer, FusedEmbedding):
            for factors in (layer.lora_embedding_A, layer.lora_embedding_B):
                if self.src_data_rank is not None:
                    same_as(self.src_data_rank, factors[name], self.device_mesh)
            return
        for linear in (layer.lora_A[name], layer.lora_B[name]):
            # `add_weighted_adapter` replaces the weights by weights with another r.
            linear.out_features, linear.in_features = linear.weight.shape
        parts = _parts(layer)
        layouts, whole = parts[0].layouts, AsGiven(schedule=parts[0].layouts.options.schedule)
        options: dict[str, Any] = {
            "input_layouts": layouts.input, "output_layouts": layouts.output,
            "use_local_output": layouts.use_local_output, "schedule": layouts.options.schedule,
            "producer": layouts.options.producer, "order": layouts.options.order,
        }  # fmt: skip
        rows = isinstance(parts[0], FusedRowwiseLinear)
        if rows:
            self._style(FusedRowwiseParallel(**options), layer.lora_A[name])
            self._style(whole, layer.lora_B[name])
        else:
            self._style(whole, layer.lora_A[name])
            self._split_columns(layer.lora_B[name], parts, options)
        if type(layer.lora_dropout[name]) is nn.Dropout:
            self._style(whole, layer.lora_dropout[name])
            layer.lora_dropout[name].num_features = rows * parts[0].in_features

    def _style(self, style: ParallelStyle, module: nn.Module) -> None:
        parts = _parts(self)
        vars(style).update(src_data_rank=self.src_data_rank, tokens=parts[0].layouts.tokens if parts else None)
        style._apply(module, self.device_mesh)

    def _split_columns(self, linear: Any, like: Sequence[Any], options: dict[str, Any]) -> None:
        # Split the last factor like the linear's parts.
        style, is_packed = FusedColwiseParallel(**options), isinstance(self.base_layer, Unpacked)
        if is_packed:
            self._style(Unpack([each.out_features for each in like]), linear)
        if len(like) > 1:
            pieces = {
                f"parts.{i}": each.out_features // (each.own_rows.stop - each.own_rows.start)
                for i, each in enumerate(like) if isinstance(each, FusedSharedLinear)
            }  # fmt: skip
            self._style(FusedGroup(*(f"parts.{i}" for i in range(len(like))), pieces=pieces, **options), linear)
        elif isinstance(like[0], FusedSharedLinear):
            distribute(linear, self.device_mesh, self.src_data_rank)
            share(style, linear, self.device_mesh, like[0].own_rows)
        else:
            self._style(style, linear.parts[0] if is_packed else linear)

    def _mixed_batch_forward(self, x: Tensor, *args: Any, adapter_names: Sequence[str], **kwargs: Any) -> Tensor:
        """Compute peft's own forward in one order of adapters on all ranks; peft iterates over a set."""
        layer: Any = self
        if isinstance(layer.base_layer, FusedEmbedding):
            mixed: Tensor = super()._mixed_batch_forward(x, *args, adapter_names=adapter_names, **kwargs)  # type: ignore[misc]
            return mixed
        result: Tensor = layer.base_layer(x)
        for name in dict.fromkeys(adapter_names):
            if name in layer.lora_A:
                own_rows = [i for i, each in enumerate(adapter_names) if each == name]
                rows = torch.tensor(own_rows, device=x.device, dtype=torch.int64)
                own = _like(x, _local(x)[rows].to(layer.lora_A[name].weight.dtype))
                added = layer.lora_B[name](layer.lora_A[name](layer.lora_dropout[name](own))) * layer.scaling[name]
                result = _like(result, _local(result).index_add(0, rows, _local(added).to(result.dtype)))
        return result

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # peft finds a factor's name by the module's parameters, which differ if the linear is `Unpacked`.
        layer: Any = self
        for of in ("weight", "bias"):
            if (whole := state_dict.pop(f"{prefix}lora_B.{of}", None)) is not None:
                (name,) = (each for each in layer.lora_A if f"{prefix}lora_A.{each}.weight" in state_dict)
                state_dict[f"{prefix}lora_B.{name}.{of}"] = whole
        super()._load_from_state_dict(state_dict, prefix, *args)

    def merge(self, safe_merge: bool = False, adapter_names: Sequence[str] | None = None) -> None:
        """Merge like peft's own method, but check here: peft's safe merge sets `.data`, not a DTensor's part."""
        layer: Any = self
        for name in (layer.active_adapters if adapter_names is None else adapter_names) if safe_merge else ():
            if name in layer.scaling:
                added = [self.get_delta_weight(name)]
                if name in layer.lora_B and layer.lora_bias[name]:
                    added.append(layer.lora_B[name].bias)
                finite = torch.stack([torch.isfinite(_local(each)).all() for each in added]).all().float()
                dist.all_reduce(finite, dist.ReduceOp.MIN, group=self.device_mesh.get_group())
                if not finite:
                    raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
        super().merge(False, adapter_names)  # type: ignore[misc]

    def unmerge(self) -> None:
        """Unmerge as peft's own method does, and drop the kept results of a FusedGroup.

        peft writes through `.data`, which a FusedGroup does not see.
        """
        super().unmerge()  # type: ignore[misc]
        base: Any = self.base_layer
        if isinstance(base, FusedGroupedLinear):
            base.together.clear()

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return the change of the weight by merging an adapter, laid out like the weight."""
        layer: Any = self
        if isinstance(layer.base_layer, Unpacked) and not self.is_whole:
            raise NotImplementedError(
                "adapters of packed linears can be merged before fusedtp.parallelize takes these apart, not after"
            )
        delta: Tensor = super().get_delta_weight(adapter)  # type: ignore[misc]
        if self.is_whole or isinstance(delta, DTensor):
            return delta
        whole = DTensor.from_local(delta, self.device_mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=layer.base_layer.weight.placements)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _like(x: Tensor, local: Tensor) -> Tensor:
    # Return `local`, with any number of sequences, as a DTensor laid out like x, which is never split by sequences.
    if not isinstance(x, DTensor):
        return local
    return as_dtensor(local, x.device_mesh, x.placements[0], (len(local), *x.shape[1:]))
