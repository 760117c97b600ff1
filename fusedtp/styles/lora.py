"""Split peft's LoRA adapters in a decoder that `parallelize` splits: like the linears that they are for.

    y = x @ W.T + scaling * (x @ A.T) @ B.T

    linear W [N, K]   A [r, K]                                 B [N, r]
    by columns        whole, on this rank's tokens             by columns, with the input and the output of W
    by rows           by rows, with the input of W             whole, on this rank's tokens
    packed            as by columns or by rows                 taken apart as W is
    embedding         whole                                    whole

An adapter sends r numbers per token, not N or K. This module does not import peft: it knows peft's classes by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from .embeddings import FusedEmbedding
from .grouped import FusedGroup, FusedGroupedLinear
from .linears import FusedColwiseParallel, FusedLinear, FusedRowwiseLinear, FusedRowwiseParallel
from .norms import AsGiven, FusedNorm
from .packed import Unpack, Unpacked
from .shared import Derived, FusedSharedLinear, derived, replicate, share


def model_of(model: nn.Module) -> nn.Module:
    """Return the model that was given to peft, for a PeftModel or a tuner around one; otherwise the model itself."""
    made: Any = model
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        made = made.get_base_model()
    elif "model" in model._modules and hasattr(model, "peft_config") and hasattr(model, "targeted_module_names"):
        made = made.model
    return made  # type: ignore[no-any-return]


def _inner(module: nn.Module) -> str:
    # The name of the module that this one, of peft, wraps; "" if it wraps none.
    return next((name for name in ("base_layer", "original_module") if name in module._modules), "")


@contextmanager
def taken_off(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """Put back the model as it was before peft; yield peft's modules by the names of those that they wrap."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if name and _inner(module) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    try:
        for name, module in found.items():
            model.set_submodule(name, module.get_submodule(_inner(module)))
        yield found
    finally:
        for name, module in found.items():
            model.set_submodule(name, module)


def check(found: Mapping[str, nn.Module], styled: Mapping[str, Sequence[ParallelStyle]]) -> None:
    """Raise NotImplementedError if a plan splits a module that has other adapters than those described above."""
    seen: dict[int, str] = {}
    for name, module in found.items():
        if not (styles := styled.get(name, ())):
            continue
        kind = type(module)
        variants: Any = getattr(module, "lora_variant", None) or {}
        copied = not any(type(each).__name__ in ("FusedGroup", "TiedHead", "Unpack") for each in styles)
        is_lora = kind.__module__ == "peft.tuners.lora.layer" and kind.__name__ in ("Linear", "Embedding")
        if _inner(getattr(module, _inner(module))) or not (
            (is_lora and not variants) or (kind.__name__ == "ModulesToSaveWrapper" and copied)
        ):
            what = next((type(each).__name__ for each in variants.values()), f"{kind.__module__}.{kind.__name__}")
            raise NotImplementedError(
                f"parallelize splits {name}, around which peft has put {what}: it splits plain LoRA of linears and "
                "embeddings, and modules_to_save that are neither in a FusedGroup nor tied"
            )
        for key, parameter in module.named_parameters():
            # On meta there is no memory to compare.
            if (place := parameter.data_ptr()) and seen.setdefault(place, name) != name and "lora_" in key:
                raise NotImplementedError(
                    f"parallelize does not keep adapters tied, and {name}.{key} is one with {seen[place]}'s"
                )


def copies(module: nn.Module | None) -> list[nn.Module]:
    """Return the copies of a module in modules_to_save, each of which one adapter uses in its place."""
    saved: Any = module._modules.get("modules_to_save") if module is not None else None
    return list(saved.values()) if saved is not None else []


def split(module: nn.Module, device_mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Split the adapters of a peft module whose linear or embedding has been split."""
    layer: Any = module
    base: Any = module._modules.get("base_layer")
    parts: list[Any] = list(base.parts) if isinstance(base, Unpacked) else [base]
    if not isinstance(base, FusedEmbedding) and not isinstance(parts[0], FusedLinear):
        return
    layer.__class__ = derived((FusedAdapted, type(module), Derived))
    layer.device_mesh = device_mesh
    for name in layer.lora_A:
        apply = _Apply(device_mesh, src_data_rank, parts[0].layouts)
        rows = isinstance(parts[0], FusedRowwiseLinear)
        if rows:
            apply(FusedRowwiseParallel(**apply.options), layer.lora_A[name])
            apply.whole(layer.lora_B[name])
        else:
            apply.whole(layer.lora_A[name])
            apply.columns(layer.lora_B[name], parts, isinstance(base, Unpacked))
        if type(layer.lora_dropout[name]) is nn.Dropout:
            apply.whole(layer.lora_dropout[name])
            layer.lora_dropout[name].num_features = rows * parts[0].in_features
    for part in parts:
        part.has_adapters = True


class _Apply:
    # Applies styles to the parts of an adapter of a linear that has these layouts.
    def __init__(self, device_mesh: DeviceMesh, src_data_rank: int | None, layouts: Any) -> None:
        self.mesh, self.src = device_mesh, src_data_rank
        self.options: dict[str, Any] = {
            "input_layouts": layouts.input, "output_layouts": layouts.output,
            "use_local_output": layouts.use_local_output, "schedule": layouts.options.schedule,
            "producer": layouts.options.producer, "order": layouts.options.order,
        }  # fmt: skip

    def __call__(self, style: ParallelStyle, module: nn.Module) -> None:
        style.src_data_rank = self.src
        style._apply(module, self.mesh)

    def whole(self, module: nn.Module) -> None:
        self(AsGiven(schedule=self.options["schedule"]), module)

    def columns(self, linear: Any, like: Sequence[Any], packed: bool) -> None:
        style, shared = FusedColwiseParallel(**self.options), isinstance(like[0], FusedSharedLinear)
        if packed:
            self(Unpack([each.out_features for each in like]), linear)
        if len(like) > 1:
            pieces = {
                f"parts.{i}": each.out_features // (each.own_rows.stop - each.own_rows.start)
                for i, each in enumerate(like) if isinstance(each, FusedSharedLinear)
            }  # fmt: skip
            self(FusedGroup(*(f"parts.{i}" for i in range(len(like))), pieces=pieces, **self.options), linear)
        elif shared:
            replicate(linear, self.mesh, self.src)
            share(style, linear, self.mesh, like[0].own_rows)
        else:
            self(style, linear.parts[0] if packed else linear)


@contextmanager
def only_asked() -> Iterator[None]:
    """Let peft read `FusedLinear.base_layer` while it puts no adapter around any linear."""
    FusedLinear.has_adapters = True
    try:
        yield
    finally:
        FusedLinear.has_adapters = False


def unload(tuner: Any, *args: Any, **options: Any) -> Any:
    """Take all adapters off, as the tuner's own `unload` does."""
    return _without_adapters(tuner, "unload", args, options)


def merge_and_unload(tuner: Any, *args: Any, **options: Any) -> Any:
    """Merge all adapters and take them off, as the tuner's own `merge_and_unload` does."""
    return _without_adapters(tuner, "merge_and_unload", args, options)


def _without_adapters(tuner: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    with only_asked():
        model = getattr(type(tuner), name)(tuner, *args, **options)
    for module in model.modules():
        if isinstance(module, FusedLinear):
            module.has_adapters = False
    return model


class FusedAdapted(Derived):
    """The class of a peft module whose linear or embedding is split, together with its adapters."""

    device_mesh: DeviceMesh

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run peft's own forward; NotImplementedError if an active adapter was added after `parallelize`."""
        layer: Any = self
        for name in layer.active_adapters:
            if name in layer.lora_A and not isinstance(layer.lora_A[name], FusedNorm | FusedRowwiseLinear):
                raise NotImplementedError(
                    f"the adapter {name!r} was put on after fusedtp.parallelize, which splits those that it finds: "
                    "put all adapters on first"
                )
        return super().forward(x, *args, **kwargs)

    def unmerge(self) -> None:
        """Unmerge as peft's own method does, and drop the kept results of a FusedGroup.

        peft writes through `.data`, which a FusedGroup does not see.
        """
        super().unmerge()  # type: ignore[misc]
        base: Any = self.base_layer
        if isinstance(base, FusedGroupedLinear):
            base.together.clear()

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return what merging an adapter adds to the weight, laid out like the weight."""
        layer: Any = self
        if isinstance(layer.base_layer, Unpacked):
            raise NotImplementedError(
                "adapters of packed linears can be merged before fusedtp.parallelize takes these apart, not after"
            )
        delta: Any = super().get_delta_weight(adapter)  # type: ignore[misc]
        if isinstance(delta, DTensor):
            return delta
        whole = DTensor.from_local(delta, self.device_mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=layer.base_layer.weight.placements)
