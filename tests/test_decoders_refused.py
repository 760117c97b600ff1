"""Models that `parallelize` cannot split are refused by name on every rank, before anything changes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.hf.decoders import decoder_plan

from .harness import mesh_of, on_ranks
from .test_decoders import COMMON, decoder

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


def other(kind: str, **changes: Any) -> Any:
    """Make an unsupported model, without weights."""
    import transformers

    settings = {**COMMON, **changes}
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(getattr(transformers, f"{kind}Config")(**settings))


def with_parameter(where: str, *shape: int, buffer: bool | None = None, name: str = "Llama") -> Any:
    """Make the decoder with one more tensor in each layer at `where`: a parameter, or a buffer (persistent or not)."""
    model = decoder(name)
    for layer in model.get_submodule("model.layers"):
        module = layer.get_submodule(where)
        if buffer is None:
            module.register_parameter("extra", nn.Parameter(torch.ones(shape)))
        else:
            module.register_buffer("extra", torch.ones(shape), persistent=buffer)
    return model


def changed(change: Callable[[Any], object], name: str = "Llama", **settings: Any) -> Any:
    model = decoder(name, **settings)
    change(model)
    return model


def one_weight(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[0].mlp.up_proj.weight


def normed(model: Any) -> None:
    for layer in model.model.layers:
        nn.utils.parametrizations.weight_norm(layer.mlp.up_proj)


def unscaled(model: Any) -> None:
    for layer in model.model.layers:
        del layer.self_attn.scaling


def scaled(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.scaling = 2.0


def without_its_head() -> Any:
    # The head is a part of a model that lives on.
    KEPT.append(decoder("Llama", tie_word_embeddings=True))
    return KEPT[-1].model


def extra() -> nn.Parameter:
    return nn.Parameter(torch.ones(32))


KEPT: list[Any] = []
# Models that a plan for two ranks refuses: the maker, and the message.
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: nn.Linear(2, 2), "with one stack of layers: Linear has 0"),
    # The norms of OLMo have no parameters.
    (lambda: other("Olmo"), "OlmoModel, it has none: pass sequence_parallel=False"),
    (lambda: changed(lambda m: setattr(m.model.layers[1].self_attn, "v_proj", nn.Linear(32, 16, bias=False))),
     r"1\.self_attn\.v_proj differs .*, Linear \[\[16, 32\]\] and Linear \[\["),
    (lambda: changed(lambda m: setattr(m.model.layers[1], "extra", extra())),
     r"alike: model\.layers\.1 differs from model\.layers\.0, Llama"),
    (lambda: other("Glm4Moe", n_routed_experts=4, moe_intermediate_size=8),
     r"1\.mlp differs .*, Glm4MoeMoE and Glm4MoeMLP\. .* a plan of your own"),
    # As wide as queries, keys and values, in another order.
    (lambda: other("CodeGen", rotary_dim=4, num_key_value_heads=8),
     r"what the 96 features of transformer\.h\.\*\.attn\.qkv_proj are"),
    (lambda: changed(one_weight, intermediate_size=32),
     r"model\.layers\.0\.mlp\.up_proj\.weight, model\.layers\.1\.mlp\.down_proj\.weight, one parameter, are not"),
    (without_its_head, r"splits embed_tokens\.weight, which a module outside this LlamaModel has too"),
    (lambda: changed(unscaled), r"whether model\.layers\.\*\.self_attn, LlamaAttention, is an attention: it has no sc"),
    (lambda: changed(scaled), r"whether model\.layers\.\*\.mlp, LlamaMLP, is an attention: it has a scaling\. torch's"),
    (lambda: changed(lambda m: setattr(m.model.layers[1].mlp, "activation_sparsity", 0.9)),
     r"the features of model\.layers\.1\.mlp, and its activation_sparsity needs all"),
    (lambda: changed(normed), r"model\.layers\.0\.mlp\.up_proj is one with a parametrization"),
    *[(lambda kind=kind: other(kind), rf"model\.layers\.\*\.self_attn\.{name}, a parameter")
      for kind, name in (("GraniteSWA", "sinks"), ("Beam", "gate_bias"), ("Doge", "A"))],
    *[(lambda where=where, shape=shape, lasts=lasts: with_parameter(where, *shape, buffer=lasts),
       rf"{where}\.extra, a buffer of \({shape[0]},.*as long as heads")
      for where, shape, lasts in (("self_attn", (1, 8, 1), True), ("self_attn", (4,), False), ("mlp", (44,), True))],
    # Each rank would only have the gradient of its own tokens.
    (lambda: with_parameter("", 32), r"around model\.layers\.\*\.extra, .*: pass sequence_parallel=False"),
    (lambda: changed(lambda m: setattr(m, "extra", extra())), "around extra,"),
    (lambda: changed(lambda m: setattr(m.model, "extra", extra())), r"around model\.extra,"),
    (lambda: changed(lambda m: setattr(m.model, "extra", extra())).model, "around extra,"),
    (lambda: changed(lambda m: setattr(m.model, "norm", nn.Conv1d(32, 32, 3))),
     "one norm with parameters .*it has norm: pass sequence_parallel"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "said"), BAD, ids=[said for _, said in BAD])
def test_refused_by_name(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(NotImplementedError, match=said):
        decoder_plan(make(), 2)


def test_options_that_the_parameters_do_not_allow() -> None:
    parts = r"order 'tree' needs parts of the 75 features of model\.layers\.\*\.mlp\.gate_proj .*, got \(38, 37\)"
    with pytest.raises(ValueError, match=parts):
        decoder_plan(decoder("Llama", intermediate_size=75).float(), 2, order="tree")
    with pytest.raises(ValueError, match=r"parts of the 97 features of lm_head .*, got \(49, 48\)"):
        decoder_plan(decoder("Llama", vocab_size=97).float(), 2, order="tree")
    with pytest.raises(ValueError, match=r"order 'tree' is for .*, got torch\.float64"):
        decoder_plan(decoder("Llama").double(), 2, order="tree")
    with pytest.raises(ValueError, match=r"float8 is for parameters in .*, got torch\.float64"):
        decoder_plan(decoder("Llama").double(), 2, float8="rowwise")


def test_heads_that_cannot_be_shared_out() -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.\*\.self_attn: 8 attention heads .* over 3 ranks"):
        decoder_plan(decoder("Llama"), 3)
    with pytest.raises(ValueError, match=r"self_attn: 6 key and value heads and 4 ranks, neither is a multiple"):
        decoder_plan(decoder("Llama", num_attention_heads=12, hidden_size=48, num_key_value_heads=6), 4)
    few = r"splits model\.layers\.\*\.self_attn\.k_norm with the heads of k_proj, .* 2, fewer than 4 ranks"
    for name in ("OLMo2", "Cohere, queries and keys normalized"):
        with pytest.raises(NotImplementedError, match=few):
            decoder_plan(decoder(name, num_key_value_heads=2), 4)


def test_a_parameter_of_a_module_whose_linears_are_split() -> None:
    for where, shape in (("self_attn", (1,)), ("self_attn", (8,)), ("mlp", (44,))):
        said = rf"splits the linears of model\.layers\.\*\.{where}, .* model\.layers\.\*\.{where}\.extra, a parameter"
        for sequence_parallel in (True, False):
            with pytest.raises(NotImplementedError, match=said):
                decoder_plan(with_parameter(where, *shape), 2, sequence_parallel=sequence_parallel)


def test_what_is_not_refused() -> None:
    for model in (other("Olmo"), with_parameter("", 32)):
        decoder_plan(model, 2, sequence_parallel=False)
    # A causal mask for eight tokens, and a scalar.
    decoder_plan(with_parameter("self_attn", 1, 1, 8, 8, buffer=False), 2)
    decoder_plan(with_parameter("self_attn", 1, buffer=True), 2)
    # A convolution over tokens has parameters and no submodules, like a norm, but needs all tokens.
    model = decoder("Llama")
    for layer in model.model.layers:
        layer.mix = nn.Conv1d(32, 32, 3)
    assert list(map(repr, decoder_plan(model, 2)["model.layers.*.mix"])) == ["WholeTokens"]
    with pytest.raises(TypeError, match="sequence_parallel must be True or False, got 1"):
        decoder_plan(decoder("Llama"), 2, sequence_parallel=1)  # type: ignore[arg-type]


def disagreeing(group: ProcessGroup) -> list[str]:
    """Return this rank's errors of calls in which rank 1 means something else."""
    mesh, odd = mesh_of(group), group.rank() == 1
    start, told = time.monotonic(), []
    for changes, options in (
        ({}, {"sequence_parallel": odd}),
        ({}, {"src_data_rank": 1 if odd else 0}),
        ({"intermediate_size": 48 if odd else 44}, {}),
        ({"num_attention_heads": 3 if odd else 4, "hidden_size": 12, "num_key_value_heads": 1}, {}),
        ({"rms_norm_eps": 1e-2 if odd else 1e-6}, {}),
    ):
        model = decoder("Llama", **changes)
        with pytest.raises(fusedtp.RanksDisagree) as caught:
            fusedtp.parallelize(model, mesh, **options)
        assert not any(isinstance(each, DTensor) for each in model.parameters())
        told.append(str(caught.value))
    assert time.monotonic() - start < 20
    # If all ranks are refused alike, each gets its own error.
    with pytest.raises(ValueError, match="3 attention heads"):
        fusedtp.parallelize(decoder("Llama", num_attention_heads=3, hidden_size=12, num_key_value_heads=1), mesh)
    split = fusedtp.parallelize(decoder("Llama"), mesh)
    with pytest.raises(
        NotImplementedError, match=r"embed_tokens\.weight of this LlamaForCausalLM is a DTensor: it has"
    ):
        fusedtp.parallelize(split, mesh)
    return told


def test_ranks_that_mean_different_things(pool: RankPool) -> None:
    mine, other = pool.run(disagreeing, world_size=2)
    assert mine == other
    flag, source, wide, heads, eps = mine
    assert flag == "parallelize: the ranks do not agree on sequence_parallel: False on rank 0, True on rank 1"
    assert "src_data_rank: 0 on rank 0, 1 on rank 1" in source
    assert "layers.0.mlp.gate_proj.weight: float64 [44, 32] on rank 0, float64 [48, 32] on rank 1" in wide
    assert "plan: made on rank 0, refused, model.layers.*.self_attn: 3 attention heads cannot be" in heads
    assert "config.rms_norm_eps: 1e-06 on rank 0, 0.01 on rank 1" in eps


@on_ranks(2)
def test_a_rank_that_does_not_come(group: ProcessGroup) -> None:
    """Rank 1 comes after rank 0 has given up: rank 1 does not go on alone, and the next call works."""
    mesh, model = mesh_of(group), decoder("Llama")
    # Rank 0 calls while rank 1 sleeps, however busy the machine is.
    dist.barrier(group)
    fusedtp.set_timeout(0.5, group=group)
    try:
        if group.rank():
            time.sleep(3)
        said = f"rank {1 - group.rank()}, .* not called parallelize"
        with pytest.raises(fusedtp.PeerTimeout, match=said):
            fusedtp.parallelize(model, mesh)
    finally:
        fusedtp.set_timeout(110, group=group)
    fusedtp.parallelize(model, mesh)


@on_ranks(2)
def test_around_a_split_model(group: ProcessGroup) -> None:
    model = fusedtp.parallelize(decoder("Llama"), mesh_of(group))
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(
            NotImplementedError, match=r"takes no model that fusedtp\.parallelize has split: .* fully_sh"
        ):
            nn.parallel.DistributedDataParallel(each, process_group=group)
