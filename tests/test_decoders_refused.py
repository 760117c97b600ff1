"""What `parallelize` does not split, or not so, is refused by name before anything is changed, on every rank."""

from __future__ import annotations

import time
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
from fusedtp.styles.decoders import decoder_plan

from .test_decoders import COMMON, decoder, mesh_of

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


def other(kind: str, **changes: Any) -> Any:
    """A model that is not among those that are split, with no weights."""
    import transformers

    settings = {**COMMON, **changes}
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(getattr(transformers, f"{kind}Config")(**settings))


def with_parameter(where: str, *shape: int, buffer: bool | None = None, name: str = "Llama") -> Any:
    """The decoder whose layers, or what is in them at `where`, have one more tensor; buffer: one that lasts, or not."""
    model = decoder(name)
    for layer in model.get_submodule("model.layers"):
        module = layer.get_submodule(where)
        if buffer is None:
            module.register_parameter("extra", nn.Parameter(torch.ones(shape)))
        else:
            module.register_buffer("extra", torch.ones(shape), persistent=buffer)
    return model


def test_heads_that_cannot_be_shared_out() -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.\*\.self_attn: 8 attention heads .* over 3 ranks"):
        decoder_plan(decoder("Llama"), 3)
    with pytest.raises(ValueError, match=r"self_attn: 6 key and value heads and 4 ranks, neither is a multiple"):
        decoder_plan(decoder("Llama", num_attention_heads=12, hidden_size=48, num_key_value_heads=6), 4)
    few = r"splits model\.layers\.\*\.self_attn\.k_norm with the heads of k_proj, .* 2, fewer than 4 ranks"
    for name in ("OLMo2", "Cohere, queries and keys normalized"):
        with pytest.raises(NotImplementedError, match=few):
            decoder_plan(decoder(name, num_key_value_heads=2), 4)


def test_other_models() -> None:
    with pytest.raises(NotImplementedError, match="decoders of Hugging Face, with one stack of layers: Linear has 0"):
        decoder_plan(nn.Linear(2, 2), 2)
    with pytest.raises(TypeError, match="sequence_parallel must be True or False, got 1"):
        decoder_plan(decoder("Llama"), 2, sequence_parallel=1)  # type: ignore[arg-type]
    # Its norms have no parameters.
    with pytest.raises(NotImplementedError, match="OlmoModel, it has none: pass sequence_parallel=False"):
        decoder_plan(other("Olmo"), 2)
    decoder_plan(other("Olmo"), 2, sequence_parallel=False)


def test_layers_that_are_not_alike() -> None:
    odd = decoder("Llama")
    odd.model.layers[1].self_attn.v_proj = nn.Linear(32, 16, bias=False)
    with pytest.raises(
        NotImplementedError, match=r"1\.self_attn\.v_proj differs .*, Linear \[\[16, 32\]\] and Linear \[\["
    ):
        decoder_plan(odd, 2)
    odd = decoder("Llama")
    odd.model.layers[1].extra = nn.Parameter(torch.ones(1))
    with pytest.raises(NotImplementedError, match=r"alike: model\.layers\.1 differs from model\.layers\.0, Llama"):
        decoder_plan(odd, 2)
    experts = other("Glm4Moe", n_routed_experts=4, moe_intermediate_size=8)
    with pytest.raises(
        NotImplementedError, match=r"1\.mlp differs .*, Glm4MoeMoE and Glm4MoeMLP\. .* a plan of your own"
    ):
        decoder_plan(experts, 2)


def test_a_parameter_shared_by_what_is_split_otherwise() -> None:
    odd = decoder("Llama", intermediate_size=32)
    odd.model.layers[1].mlp.down_proj.weight = odd.model.layers[0].mlp.up_proj.weight
    shared = r"model\.layers\.0\.mlp\.up_proj\.weight, model\.layers\.1\.mlp\.down_proj\.weight, one parameter, are not"
    with pytest.raises(NotImplementedError, match=shared):
        decoder_plan(odd, 2)


def test_linears_that_compute_something_else() -> None:
    normed = decoder("Llama")
    nn.utils.parametrizations.weight_norm(normed.model.layers[1].mlp.up_proj)
    nn.utils.parametrizations.weight_norm(normed.model.layers[0].mlp.up_proj)
    with pytest.raises(NotImplementedError, match=r"model\.layers\.0\.mlp\.up_proj is one with a parametrization"):
        decoder_plan(normed, 2)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_parameters_of_a_module_whose_linears_are_split(sequence_parallel: bool) -> None:
    for where, shape in (("self_attn", (1,)), ("self_attn", (8,)), ("mlp", (1,)), ("mlp", (44,))):
        said = rf"splits the linears of model\.layers\.\*\.{where}, .* model\.layers\.\*\.{where}\.extra, a parameter"
        with pytest.raises(NotImplementedError, match=said):
            decoder_plan(with_parameter(where, *shape), 2, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize(("kind", "name"), [("GraniteSWA", "sinks"), ("Beam", "gate_bias"), ("Doge", "A")])
def test_models_with_such_parameters(kind: str, name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"model\.layers\.\*\.self_attn\.{name}, a parameter"):
        decoder_plan(other(kind), 2)


def test_buffers_as_long_as_heads_or_features() -> None:
    for where, shape, lasting in (("self_attn", (1, 8, 1), True), ("self_attn", (4,), False), ("mlp", (44,), True)):
        with pytest.raises(NotImplementedError, match=rf"{where}\.extra, a buffer of \({shape[0]},.*as long as heads"):
            decoder_plan(with_parameter(where, *shape, buffer=lasting), 2)
    # A causal mask for as many tokens, and a number.
    decoder_plan(with_parameter("self_attn", 1, 1, 8, 8, buffer=False), 2)
    decoder_plan(with_parameter("self_attn", 1, buffer=True), 2)


def test_parameters_that_would_see_split_tokens() -> None:
    """Each rank would have the gradient of its own tokens."""
    model = with_parameter("", 32)
    with pytest.raises(NotImplementedError, match=r"around model\.layers\.\*\.extra, .*: pass sequence_parallel=False"):
        decoder_plan(model, 2)
    decoder_plan(model, 2, sequence_parallel=False)
    for module, said in ((decoder("Llama"), r"around extra,"), (decoder("Llama").model, r"around extra,")):
        module.extra = nn.Parameter(torch.ones(32))
        with pytest.raises(NotImplementedError, match=said):
            decoder_plan(module, 2)
    model = decoder("Llama")
    model.model.extra = nn.Parameter(torch.ones(32))
    with pytest.raises(NotImplementedError, match=r"around model\.extra,"):
        decoder_plan(model, 2)


def test_what_is_no_norm_sees_all_tokens() -> None:
    """A convolution over tokens has parameters and no modules in it, as a norm has."""
    model = decoder("Llama")
    for layer in model.model.layers:
        layer.mix = nn.Conv1d(32, 32, 3)
    assert list(map(repr, decoder_plan(model, 2)["model.layers.*.mix"])) == ["WholeTokens"]
    model = decoder("Llama")
    model.model.norm = nn.Conv1d(32, 32, 3)
    with pytest.raises(NotImplementedError, match=r"one norm with parameters .*it has norm: pass sequence_parallel"):
        decoder_plan(model, 2)


def disagreeing(group: ProcessGroup) -> list[str]:
    """What this rank is told by calls in which rank 1 means something else."""
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


def alike_refused(group: ProcessGroup) -> None:
    model = decoder("Llama", num_attention_heads=3, hidden_size=12, num_key_value_heads=1)
    with pytest.raises(ValueError, match="3 attention heads"):
        fusedtp.parallelize(model, mesh_of(group))


def test_ranks_that_are_refused_alike_have_their_own_error(pool: RankPool) -> None:
    pool.run(alike_refused, world_size=2)


def late(group: ProcessGroup) -> None:
    """Rank 1 comes when rank 0 has given up: it does not go on alone, and the next call works."""
    mesh, model = mesh_of(group), decoder("Llama")
    # Rank 0 calls while the other one sleeps, however busy the machine is.
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


def test_a_rank_that_does_not_come(pool: RankPool) -> None:
    pool.run(late, world_size=2)
