"""The parts of a Hugging Face decoder by name, and checks for parts that no plan can handle."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

# Plans for models that have none, by the configuration's model_type.
PLANS = {
    "gpt2": {
        "h.*.attn.c_attn": "colwise", "h.*.attn.c_proj": "rowwise", "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
}  # fmt: skip

# Models whose packed `qkv_proj` or `c_attn` has all queries, then all keys, then all values, by model_type. CodeGen's
# `qkv_proj`, as wide, is not so: it has queries, values and keys of a quarter of the heads, then of the next quarter.
QKV = ("gpt2", "phi3", "phi4_multimodal")

# Attention's linears in models whose own plan covers only experts, by model_type.
_QKVO = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
ATTENTION = {
    "afmoe": {**_QKVO, "gate_proj": "colwise"}, "granitemoe": _QKVO, "granitemoeshared": _QKVO,
    "hunyuan_v1_moe": _QKVO, "jamba": _QKVO, "phimoe": _QKVO,
}  # fmt: skip


OWN_PLAN = "torch's parallelize_module splits it, with fusedtp's styles in a plan of your own"
"""The remedy for models without a plan of parallelize."""


@dataclass(frozen=True)
class Decoder:
    """Names of a decoder's parts.

    - `columns`, `rows`: linears of a layer that the model's plan splits by columns, by rows.
    - `others`: other entries of the plan.
    - `latent`: linears that make keys and values from a latent vector, which is not split.
    """

    model: nn.Module
    layers: str
    base: nn.Module
    prefix: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    others: tuple[str, ...]
    latent: tuple[str, ...] = ()

    @property
    def stack(self) -> nn.ModuleList:
        """Return the layers."""
        stack = self.model.get_submodule(self.layers)
        assert isinstance(stack, nn.ModuleList)
        return stack

    @property
    def kind(self) -> str:
        """Return the configuration's model_type."""
        return str(getattr(getattr(self.base, "config", None), "model_type", ""))

    @property
    def head(self) -> nn.Module | None:
        """Return the module that makes logits of the vocabulary."""
        model: Any = self.model
        head: nn.Module | None = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        return head

    def named(self, name: str) -> str:
        """Return the name in the model of a child of its base."""
        return f"{self.prefix}.{name}" if self.prefix else name

    def beside(self) -> list[str]:
        """Return modules outside the base and the head that have parameters: a classifier, or another head."""
        if not self.prefix:
            return []
        return [
            name for name, module in self.model.named_modules()
            if has_own(module) and module is not self.head and not f"{name}.".startswith(f"{self.prefix}.")
        ]  # fmt: skip


def decoder_of(model: nn.Module) -> Decoder:
    """Return the model's `Decoder`; NotImplementedError if the model is not a decoder with one stack and a plan."""
    kind = type(model).__name__
    layer_classes = tuple(getattr(model, "_no_split_modules", None) or ())
    stacks = [
        name for name, each in model.named_modules()
        if isinstance(each, nn.ModuleList) and len(each) and type(each[0]).__name__ in layer_classes
    ]  # fmt: skip
    if len(stacks) != 1:
        raise NotImplementedError(
            f"parallelize is for decoders of Hugging Face, with one stack of layers: {kind} has {len(stacks)}"
            + (f", {', '.join(stacks)}" if stacks else "")
        )
    prefix, _, name = stacks[0].rpartition(".")
    base = model.get_submodule(prefix) if prefix else model
    config: Any = getattr(base, "config", None)
    kind_of = getattr(config, "model_type", "")
    planned: Mapping[str, str] | None = PLANS.get(kind_of) or getattr(config, "base_model_tp_plan", None)
    if not planned:
        raise NotImplementedError(
            f"parallelize goes by a model's own base_model_tp_plan, and {kind} has none. {OWN_PLAN}"
        )
    planned = {**planned, **{f"{name}.*.self_attn.{key}": how for key, how in ATTENTION.get(kind_of, {}).items()}}
    of: dict[str, list[str]] = {"columns": [], "rows": [], "others": [], "latent": []}
    for pattern, how in planned.items():
        if pattern.startswith(f"{name}.*."):
            split = {"colwise": "columns", "rowwise": "rows", "mla": "latent"}.get(how.split("_")[0], "others")
            of[split].append(pattern.removeprefix(f"{name}.*."))
    return Decoder(model, stacks[0], base, prefix, *(tuple(names) for names in of.values()))


def has_own(module: nn.Module) -> bool:
    """Return whether the module has parameters that are not its children's."""
    return any(True for _ in module.parameters(recurse=False))


def is_norm(module: nn.Module) -> bool:
    """Return whether the module is called a norm and has no children, so that it handles each token or head alone."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def check_alike(of: Decoder) -> None:
    """Raise NotImplementedError unless all layers are alike: they get one plan."""

    def described(layer: nn.Module) -> dict[str, Any]:
        return {
            name: (type(module).__name__, {key: value.shape for key, value in module.named_parameters(recurse=False)})
            for name, module in layer.named_modules()
        }

    first = described(of.stack[0])
    for i, layer in enumerate(of.stack):
        here = described(layer)
        for name in {**first, **here}:
            if first.get(name) != here.get(name):
                one, other = (".".join(filter(None, (of.layers, str(number), name))) for number in (i, 0))
                both = [each.get(name, ("missing", {})) for each in (here, first)]
                differ = [kind for kind, _ in both]
                if differ[0] == differ[1]:
                    differ = [f"{kind} {[*map(list, shapes.values())]}" for kind, shapes in both]
                raise NotImplementedError(
                    f"parallelize is for layers that are alike: {one} differs from {other}, {' and '.join(differ)}. "
                    f"{OWN_PLAN}"
                )


def check_split_tokens(of: Decoder) -> None:
    """Raise NotImplementedError for parameters that the code between attention and MLP uses itself.

    Each rank would use them for its own tokens, and get the gradient of these tokens only.
    """
    names = of.layers.split(".")
    for path in (*(".".join(names[:i]) for i in range(len(names))), f"{of.layers}.0"):
        module = of.model.get_submodule(path)
        for name, _ in module.named_parameters(recurse=False):
            where = f"{of.layers}.*" if path == f"{of.layers}.0" else path
            raise NotImplementedError(
                f"parallelize does not split tokens around {'.'.join(filter(None, (where, name)))}, a parameter that "
                f"{type(module).__name__} has itself: pass sequence_parallel=False"
            )


def check_own(path: str, module: nn.Module, counts: Collection[int]) -> None:
    """Raise NotImplementedError for parameters and buffers that a module uses itself beside its split linears.

    Each rank would get the gradient of its own heads or features only, or read a tensor for all of them. `counts`: the
    numbers of features and heads.
    """
    kind = type(module).__name__
    for name, parameter in module.named_parameters(recurse=False):
        raise NotImplementedError(
            f"parallelize splits the linears of {path}, and does not know what to do with {path}.{name}, a parameter "
            f"of {tuple(parameter.shape)} that {kind} has itself"
        )
    for name, buffer in module.named_buffers(recurse=False):
        lasting = name not in module._non_persistent_buffers_set
        if (lasting or buffer.ndim == 1) and any(length in counts for length in buffer.shape if length > 1):
            raise NotImplementedError(
                f"parallelize splits the linears of {path}, and does not know what to do with {path}.{name}, a buffer "
                f"of {tuple(buffer.shape)} that {kind} has itself, as long as heads or features are many"
            )
