"""Hugging Face decoders under `parallelize` equal the same model in one process: logits, every gradient, text."""

from __future__ import annotations

import copy
import io
import re
import warnings
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.styles.grouped import Unpacked

from .harness import LARGE, mesh_of, on_ranks
from .test_layer_state import whole

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")

VOCABULARY = 41
# Lengths are no multiples of two or four ranks if the model allows it.
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
}  # fmt: skip
HEADS = {"head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 8}
EXPERTS = {"experts_implementation": "eager"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama with one key head": ("Llama", {"num_key_value_heads": 1}),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"head_dim": 4}),
    "Gemma2": ("Gemma2", HEADS),
    "Gemma3": ("Gemma3Text", HEADS),
    "Phi3": ("Phi3", {}),
    "Phi3 with two key heads": ("Phi3", {"num_key_value_heads": 2}),
    "GPT-NeoX": ("GPTNeoX", {}),
    "GPT-2": ("GPT2", {}),
    "OLMo, clipped in place": ("Olmo", {"clip_qkv": 0.05}),
    "OLMo2": ("Olmo2", {}),
    "OLMoE, clipped in place": ("Olmoe", {**EXPERTS, "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5}),
    "Cohere, queries and keys normalized": ("Cohere", {"use_qk_norm": True}),
    "Mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 4}),
    "GraniteMoe": ("GraniteMoe", {**EXPERTS, "num_local_experts": 4}),
    "Phimoe": ("Phimoe", {**EXPERTS, "num_local_experts": 4}),
    "HunYuanMoEV1": ("HunYuanMoEV1", {**EXPERTS, "num_experts": 4, "moe_topk": 2, "head_dim": 4}),
    "LongcatFlash": (
        "LongcatFlash",
        {
            "ffn_hidden_size": 44,
            "expert_ffn_hidden_size": 16,
            "num_layers": 1,
            "n_routed_experts": 4,
            "moe_topk": 2,
            "zero_expert_num": 2,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "num_key_value_heads": 8,
            **{f"{each}head_dim": 4 for each in ("", "v_", "qk_rope_", "qk_nope_")},
            **EXPERTS,
        },
    ),
    "Afmoe": ("Afmoe", {"num_dense_layers": 2, "head_dim": 4}),
}


def decoder(name: str, **changes: Any) -> Any:
    """Make a float64 model (some parts compute in float32) with random scales and biases, as ones would hide faults.

    `name`: one of `MODELS`, or a class of transformers without ForCausalLM.
    """
    import transformers

    kind, given = MODELS.get(name, (name, {}))
    settings = {**COMMON, **given, **changes}
    if kind == "GPTNeoX":
        del settings["num_key_value_heads"]
    if kind == "GPT2":
        names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        settings = {names.get(key, key): value for key, value in settings.items()}
        settings = {**settings, "n_positions": 32, "loss_type": "ForCausalLM"}
        for unknown in ("intermediate_size", "num_key_value_heads", "max_position_embeddings"):
            settings.pop(unknown, None)
    torch.manual_seed(11)
    head = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, head)(getattr(transformers, f"{kind}Config")(**settings))
    for p in model.parameters():
        if p.ndim == 1:
            nn.init.normal_(p, 1.0, 0.3)
    return model.double().eval()


# Keep both layers of models whose layers differ, and of Llama, for what passes from layer to layer.
TWO_LAYERS = ("Llama", "Gemma2", "LongcatFlash")


def small(name: str, **changes: Any) -> Any:
    """Make a decoder of one layer, for what each layer does alike."""
    return decoder(name, **({} if name in TWO_LAYERS[1:] else {"num_hidden_layers": 1}), **changes)


def close(out: Tensor, expected: Tensor, name: str) -> None:
    out = out.full_tensor() if isinstance(out, DTensor) else out
    # Parts in float32, as some norms, are right to about 1e-7; a wrong sum differs in the first digits.
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7, msg=lambda text: f"{name}: {text}")


def gradients_are_those_of(model: nn.Module, dense: nn.Module) -> None:
    expected, found = (
        {name: parameter.grad for name, parameter in each.named_parameters() if parameter.requires_grad}
        for each in (dense, model)
    )  # fmt: skip
    for name, module in model.named_modules():
        if isinstance(module, Unpacked):
            lengths = [part.out_features for part in module.parts]
            for of in ("weight", "bias"):
                if (whole := expected.pop(f"{name}.{of}", None)) is None:
                    continue
                transposed = of == "weight" and whole.shape[0] != sum(lengths)
                square = of == "weight" and type(dense.get_submodule(name)).__name__ == "Conv1D"
                rows = whole.t() if transposed or square else whole
                expected |= {f"{name}.parts.{i}.{of}": part for i, part in enumerate(rows.split(lengths))}
    assert expected.keys() == found.keys()
    for name, grad in expected.items():
        assert (grad is None) == (found[name] is None), name
        if grad is not None:
            close(found[name], grad, f"gradient of {name}")


def tokens_of(length: int = 9) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(14))


def alike(model: nn.Module, dense: nn.Module, **given: Any) -> None:
    """Compare logits, the loss and every gradient of one call."""
    expected, got = dense(**given), model(**given)
    for name in expected:
        if name == "loss" or name.endswith("logits"):
            close(got[name], expected[name], name)
    expected.loss.backward()
    got.loss.backward()
    gradients_are_those_of(model, dense)


# Models with the plan of another one, which is tested in their place.
ALIKE = {"Mistral": "Llama", "Qwen2": "Llama", "Phimoe": "Mixtral"}


def _spread() -> list[Any]:
    """Return a few models with one combination of options each; with FUSEDTP_SOAK=large, every model with all."""
    spread = []
    for i, name in enumerate(name for name in MODELS if LARGE or name not in ALIKE):
        # The last norm of the first OLMo has no parameters.
        ranks = (2, 4) if LARGE else (2, 2, 2, 2, 4)
        ways = list(product((False,) if name.startswith("OLMo,") else (True, False), ranks))
        for way in ways if LARGE else [ways[i % len(ways)]]:
            how = f"tokens {'split' if way[0] else 'whole'}, {way[1]} ranks"
            spread.append(pytest.param(name, *way, id=f"{name}, {how}"))
    return spread


@pytest.mark.parametrize(("name", "sequence_parallel", "world_size"), _spread())
@on_ranks()
def test_as_in_one_process(group: ProcessGroup, name: str, sequence_parallel: bool, world_size: int) -> None:
    make = decoder if name in TWO_LAYERS else small
    dense, model = make(name), make(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        assert fusedtp.parallelize(model, mesh_of(group), sequence_parallel=sequence_parallel) is model
    told = [str(each.message) for each in caught if "parallelize leaves" in str(each.message)]
    assert len(told) == (group.rank() == 0 and hasattr(dense.config, "num_experts_per_tok"))
    assert all(re.search(r"whole on every rank, \d\d% of the bytes: .*mlp|moe", each) for each in told)
    # The second text is shorter by two tokens.
    tokens, mask = tokens_of(), torch.ones(2, 9, dtype=torch.long)
    mask[1, -2:] = 0
    alike(model, dense, input_ids=tokens, attention_mask=mask, labels=tokens)
    with torch.inference_mode():
        how = {"max_new_tokens": 3, "do_sample": False}
        assert torch.equal(model.generate(tokens[:, :6], **how), dense.generate(tokens[:, :6], **how))
    # No attention takes the keys and values of heads that it does not have, under any name of the argument.
    with torch.no_grad():
        cache = dense(input_ids=tokens[:, :6], use_cache=True).past_key_values
        more = {"input_ids": tokens[:, 6:], "past_key_values": cache}
        if name in ("Llama with one key head", "LongcatFlash"):
            close(model(**copy.deepcopy(more)).logits, dense(**more).logits, "after another model's keys and values")
        else:
            with pytest.raises(NotImplementedError, match="it was given a cache with keys and values of all heads"):
                model(**more)


@on_ranks(1)
def test_models_that_another_one_stands_for(group: ProcessGroup) -> None:
    for name, other in ALIKE.items():
        mine, its = (fusedtp.decoder_plan(small(each), 2) for each in (name, other))
        assert {key: repr(style) for key, style in mine.items()} == {key: repr(style) for key, style in its.items()}


def decoded(group: ProcessGroup, name: str, sequence_parallel: bool) -> tuple[list[Tensor], list[list[str]]]:
    """Return the logits and the ops of a prompt and of three more steps."""
    from transformers import DynamicCache

    options = {"sequence_parallel": sequence_parallel, "compare_inputs": False}
    model = fusedtp.parallelize(small(name), mesh_of(group), **options)
    tokens, cache, logits, ops = tokens_of(), DynamicCache(config=model.config), [], []
    with torch.no_grad():
        for i, part in enumerate(tokens.split([6, 1, 1, 1], 1)):
            # Steps that select logits by a tensor too.
            kept = {"logits_to_keep": torch.tensor([0])} if i == 2 else {}
            fusedtp.paths()
            logits.append(model(input_ids=part, past_key_values=cache, **kept).logits)
            ops.append([each.op for each in fusedtp.paths()])
    return logits, ops


@pytest.mark.parametrize("name", ["Llama with one key head", "Mixtral", "GPT-2", "Gemma3", "OLMo2", "Phi3"])
@on_ranks(2)
def test_a_step_with_fewer_tokens_than_ranks_splits_none(group: ProcessGroup, name: str) -> None:
    (logits, ops), (expected, whole) = (decoded(group, name, is_split) for is_split in (True, False))
    for ours, theirs in zip(logits, expected, strict=True):
        close(ours, theirs, name)
        # Programs flatten logits by `view`.
        assert ours.is_contiguous()
    assert ops[1] == ops[3] == whole[1]
    # GPT-2's head gets whole hidden states in any call.
    assert ["matmul_reduce_scatter" in each for each in ops] == [True, False, name != "GPT-2", False]


@on_ranks(2)
def test_a_step_without_gradients_between_a_checkpointed_forward_and_its_backward(group: ProcessGroup) -> None:
    dense, model = small("Llama"), small("Llama")
    fusedtp.parallelize(model, mesh_of(group)).train().gradient_checkpointing_enable()
    tokens = tokens_of()
    dense(input_ids=tokens, labels=tokens).loss.backward()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    with torch.no_grad():
        model(input_ids=tokens[:, :1])
    loss.backward()
    gradients_are_those_of(model, dense)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@on_ranks(2)
def test_caches(group: ProcessGroup, sequence_parallel: bool) -> None:
    """Every kind of cache works; gradients pass through one that the model has filled. Others are refused."""
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache

    for name in ("Llama", "Llama with one key head", "GPT-NeoX"):
        dense, model = small(name), small(name)
        fusedtp.parallelize(model, mesh_of(group), sequence_parallel=sequence_parallel)
        tokens = tokens_of()
        # A cache without a configuration makes its layers when they are filled.
        for make in (DynamicCache, partial(DynamicCache, config=dense.config)):
            for each in (dense, model):
                each.zero_grad()
                cache = make()
                each(input_ids=tokens[:, :5], past_key_values=cache)
                each(input_ids=tokens[:, 5:], past_key_values=cache).logits.square().sum().backward()
            gradients_are_those_of(model, dense)
        with torch.no_grad():
            caches = [StaticCache(config=dense.config, max_cache_len=12) for _ in range(2)]
            for part in tokens.split(5, 1):
                ours, theirs = (
                    each(input_ids=part, past_key_values=cache).logits
                    for each, cache in zip((model, dense), caches, strict=True)
                )
                close(ours, theirs, f"{name} with a static cache")
        (attention, *_) = (each for each in model.modules() if hasattr(each, "is_running"))
        foreign = DynamicCache()
        foreign.update(torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4, 4), 0)
        for args, named in (((None, foreign), {}), ((None,), {"a_name": foreign})):
            with pytest.raises(NotImplementedError, match="given a cache with keys and values of 3 heads, and not "):
                attention(*args, **named)
        with pytest.raises(NotImplementedError, match=r"given a EncoderDecoderCache without keys and values: .*layers"):
            attention(None, EncoderDecoderCache(DynamicCache(), DynamicCache()))
        cross = DynamicCache()
        cross.layers.append(object())
        with pytest.raises(NotImplementedError, match=r"given a DynamicCache without keys and values: .*keys"):
            attention(None, cross)


@on_ranks(2)
def test_another_implementation_of_attention_is_set_afterwards(group: ProcessGroup) -> None:
    """The model's mask and its attentions go by one implementation: eager ones would else see all tokens."""
    for before, after in (("eager", "sdpa"), ("sdpa", "eager")):
        dense, model = (small("Llama", attn_implementation=before) for _ in range(2))
        fusedtp.parallelize(model, mesh_of(group))
        for each in (dense, model):
            each.set_attn_implementation(after)
        alike(model, dense, input_ids=tokens_of(), labels=tokens_of())
        # Only eager attentions return their weights.
        assert len(model(input_ids=tokens_of(), output_attentions=True).attentions) == (after == "eager")


@on_ranks(2)
def test_a_checkpoint_of_one_linear(group: ProcessGroup) -> None:
    """Backward repeats a linear of an attention outside of the attention's own code."""
    dense = small("Llama")
    model = fusedtp.parallelize(copy.deepcopy(dense), mesh_of(group))
    for each in (dense, model):
        for layer in each.model.layers:
            layer.self_attn.q_proj = checkpoint_wrapper(layer.self_attn.q_proj)  # type: ignore[no-untyped-call]
        each(input_ids=tokens_of()).logits.square().sum().backward()
    gradients_are_those_of(model, dense)


SHARED = ("layer", "norm", "in a group", "weight")


def shared(name: str) -> Any:
    """Make a decoder whose second layer is the first or has a weight of it; other names share nothing."""
    if name not in SHARED:
        return small(name)
    model = decoder("Llama")
    first, second = model.model.layers
    if name == "layer":
        model.model.layers[1] = first
    elif name == "norm":
        second.input_layernorm.weight = first.post_attention_layernorm.weight
    elif name == "in a group":
        second.mlp.up_proj.weight = second.mlp.gate_proj.weight
    else:
        second.mlp.gate_proj.weight = first.mlp.gate_proj.weight
    return model


def trained(group: ProcessGroup, names: tuple[str, ...], sequence_parallel: bool) -> None:
    """Train two steps of two batches of different lengths, with activation checkpointing, then evaluate."""
    for name in names:
        dense, model = shared(name).train(), shared(name).train()
        fusedtp.parallelize(model, mesh_of(group), sequence_parallel=sequence_parallel)
        assert name not in SHARED or len(list(model.parameters())) == len(list(dense.parameters())), name
        model.gradient_checkpointing_enable()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, foreach=False) for each in (dense, model)]
        for _ in range(2):
            for length in (9, 4):
                alike(model, dense, input_ids=tokens_of(length), labels=tokens_of(length), use_cache=False)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            logits = [each(input_ids=tokens_of(), use_cache=False).logits for each in (model, dense)]
            close(*logits, f"{name} after two steps")


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_training_loop_and_what_modules_share_stays_one(pool: RankPool, sequence_parallel: bool) -> None:
    names = ("norm", "in a group", "Phi3") if sequence_parallel else ("layer", "weight")
    if LARGE:
        names = (*SHARED, "Qwen3", "Phi3") if sequence_parallel else SHARED
    pool.run(trained, names, sequence_parallel, world_size=2)


@on_ranks(2)
def test_ranks_that_are_seeded_unlike(group: ProcessGroup) -> None:
    """Every parameter and buffer is taken from the first rank, split or whole."""
    dense, model = small("GPT-2"), small("GPT-2")
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.add_(group.rank())
    fusedtp.parallelize(model, mesh_of(group), sequence_parallel=False)
    close(model(input_ids=tokens_of()).logits, dense(input_ids=tokens_of()).logits, "logits")


@pytest.mark.parametrize("sequence_parallel", [True, False])
@on_ranks(2)
def test_a_parallel_loss(group: ProcessGroup, sequence_parallel: bool) -> None:
    """Logits are never whole on a rank, and torch's own cross-entropy takes them split."""
    dense, model = small("Llama, tied"), small("Llama, tied")
    fusedtp.parallelize(model, mesh_of(group), sequence_parallel=sequence_parallel, loss_parallel=True)
    with loss_parallel():
        logits = model(input_ids=tokens_of()).logits
        assert isinstance(logits, DTensor)
        assert logits.placements == (Shard(2),)
        with pytest.raises(NotImplementedError, match="generate of this LlamaForCausalLM needs whole logits"):
            model.generate(tokens_of(), max_new_tokens=1)
        alike(model, dense, input_ids=tokens_of(), labels=tokens_of())


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("Llama", "SequenceClassification"), ("Llama", "TokenClassification"), ("Llama", "QuestionAnswering"),
        ("GPT2", "SequenceClassification"),
    ],
)  # fmt: skip
@on_ranks(2)
def test_another_head_than_one_of_the_vocabulary(
    group: ProcessGroup, kind: str, head: str, sequence_parallel: bool
) -> None:
    """The head is plain torch, on all tokens: its parameters and gradients are the same on every rank."""
    import transformers

    settings: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "num_labels": 3, "hidden_size": 32}
    settings |= {"num_attention_heads": 4, "num_hidden_layers": 1}
    settings |= {"intermediate_size": 44} if kind == "Llama" else {}
    torch.manual_seed(15)
    auto = getattr(transformers, f"AutoModelFor{head}")
    dense = auto.from_config(getattr(transformers, f"{kind}Config")(**settings)).double().eval()
    model = fusedtp.parallelize(copy.deepcopy(dense), mesh_of(group), sequence_parallel=sequence_parallel)
    many = {"QuestionAnswering": {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 8])}}
    labels = torch.randint(3, (2, 9) if head == "TokenClassification" else (2,))
    alike(model, dense, input_ids=tokens_of(), **many.get(head, {"labels": labels}))


# torch warns that it cannot compare the storages of DTensors.
@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_saved_whole_and_logits_of_some_tokens(group: ProcessGroup) -> None:
    """torch.save keeps the hooks that split tokens; `logits_to_keep` selects logits."""
    for name in ("Llama with one key head", "OLMo2", "Mixtral"):
        model = fusedtp.parallelize(small(name), mesh_of(group))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        tokens, dense = torch.arange(3, 12)[None], small(name)
        again = torch.load(file, weights_only=False)
        close(again(input_ids=tokens).logits, dense(input_ids=tokens).logits, "logits of a model that was loaded")
        for kept in (torch.tensor([1, 7, 8]), 2):
            given = {"input_ids": tokens, "logits_to_keep": kept}
            close(model(**given).logits, dense(**given).logits, f"logits of {kept}")


@on_ranks(2)
def test_saved_by_hugging_face(group: ProcessGroup, tmp_path: Path) -> None:
    """The whole state, packed linears too, is saved under its original names and loaded; other states are refused."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for name in ("Llama, tied", "Phi3", "GPT-2"):
        dense, model = small(name), fusedtp.parallelize(small(name), mesh_of(group))
        with pytest.raises(NotImplementedError, match=r"takes the whole state: .* get_model_state_dict"):
            model.save_pretrained(tmp_path / name)
        with pytest.raises(NotImplementedError, match="takes the whole state"):
            copy.deepcopy(model).save_pretrained(tmp_path / name, state_dict=model.state_dict())
        with pytest.raises(NotImplementedError, match=f"this {type(dense).__name__}: resize them before parallelize"):
            model.resize_token_embeddings(VOCABULARY + 1)
        assert not (tmp_path / name).exists()
        state = get_model_state_dict(model, options=options)
        if group.rank() == 0:
            model.save_pretrained(tmp_path / name, state_dict=state)
            again = type(dense).from_pretrained(tmp_path / name, dtype=torch.float64).state_dict()
            assert again.keys() == dense.state_dict().keys()
            assert all(torch.equal(again[key], value) for key, value in dense.state_dict().items())
        dist.barrier(group)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(dense.state_dict())
        loaded = get_model_state_dict(model, options=options)
        assert all(torch.equal(loaded[key], value) for key, value in state.items())


DROPOUTS: list[tuple[str, dict[str, Any]]] = [
    ("GPT-2", {"attn_pdrop": 0.0}), ("GPT-2", {"attn_pdrop": 0.2}),
    ("GPT-NeoX", {"hidden_dropout": 0.3, "attention_dropout": 0.0}),
    # Their own code calls F.dropout on hidden states.
    ("SeedOss", {"residual_dropout": 0.2, "attention_dropout": 0.0}),
    ("Starcoder2", {"residual_dropout": 0.2, "embedding_dropout": 0.1, "attention_dropout": 0.1}),
    ("Phi", {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attention_dropout": 0.0}),
    ("Llama", {"attention_dropout": 0.1, "attn_implementation": "sdpa"}),
    ("Mixtral", {"router_jitter_noise": 0.1}),
]  # fmt: skip


# Whole tokens are drawn for as in one process: two cases, of hidden states and of heads, stand for the others.
@pytest.mark.parametrize(
    ("name", "changes", "sequence_parallel"),
    [(*case, True) for case in DROPOUTS] + [(*case, False) for case in (DROPOUTS if LARGE else DROPOUTS[1:4:2])],
)
@on_ranks(2)
def test_dropout(group: ProcessGroup, name: str, changes: dict[str, float], sequence_parallel: bool) -> None:
    """Dropout of hidden states equals that of one process. Dropout in a rank's heads draws the same count on every
    rank: random states stay equal, and so do gradients of replicated parameters, though nine tokens do not divide.
    """
    dense, model = small(name, **changes).train(), small(name, **changes).train()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "parallelize leaves", UserWarning)
        fusedtp.parallelize(model, mesh_of(group), sequence_parallel=sequence_parallel)
    if name == "SeedOss":
        # Layers draw once more in backward, the same numbers.
        model.gradient_checkpointing_enable()
    tokens = tokens_of()[:1]
    torch.manual_seed(17)
    for _ in range(2):
        model.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    grads: list[Any] = [each.grad for each in model.parameters()]
    mine = [torch.get_rng_state(), *(each for each in grads if not isinstance(each, DTensor))]
    mine += [each.to_local() for each in grads if isinstance(each, DTensor) and each.placements == (Replicate(),)]
    mine.append(model.eval().generate(tokens, do_sample=True, max_new_tokens=3))
    for each in mine:
        others = [torch.empty_like(each) for _ in range(group.size())]
        dist.all_gather(others, each, group=group)
        assert all(torch.equal(each, other) for other in others)
    if not changes.get("attn_pdrop", changes.get("attention_dropout")):
        torch.manual_seed(17)
        for _ in range(2):
            dense.zero_grad()
            dense(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        assert torch.equal(torch.get_rng_state(), mine[0])
        gradients_are_those_of(model, dense)


@pytest.mark.parametrize(("name", "recipe"), [("Llama with one key head", "rowwise"), ("Qwen3", "tensorwise")])
@on_ranks(2)
def test_float8(group: ProcessGroup, name: str, recipe: Any) -> None:
    """The error is that of the casts, and no more; the head is not in float8."""
    mesh = DeviceMesh.from_group(group, "cpu")
    dense, model = decoder(name).float(), fusedtp.parallelize(decoder(name).float(), mesh, float8=recipe)
    ours, theirs = (each(input_ids=tokens_of(), labels=tokens_of()) for each in (model, dense))
    off = (ours.logits - theirs.logits).norm() / theirs.logits.norm()
    assert 1e-4 < off < 0.1
    ours.loss.backward()
    theirs.loss.backward()
    # One vector: single gradients nearly cancel in so small a model.
    mine, its = (torch.cat([whole(each.grad).flatten() for each in of.parameters()]) for of in (model, dense))
    assert torch.cosine_similarity(mine, its, 0) > 0.97
    float8_of = {key: each.layouts.options.float8 for key, each in model.named_modules() if hasattr(each, "layouts")}
    assert {recipe, None} == set(float8_of.values())
    assert float8_of["lm_head"] is None


# torch warns that results of FSDP2 modules must not be changed in place.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", ["Llama with one key head", "Llama, tied"])
@on_ranks()
def test_data_parallel_on_the_other_axis(group: ProcessGroup, name: str) -> None:
    """FSDP2 on another axis finds parameters by name, also norms' and shared ones."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    dense, model = small(name), fusedtp.parallelize(small(name), mesh["tp"])
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    tokens = torch.cat([tokens_of(), tokens_of().flip(1)])
    mine = tokens.chunk(2)[mesh.get_local_rank("dp")]
    for turn in (1, 2):
        dense(input_ids=tokens, labels=tokens).loss.backward()
        model(input_ids=mine, labels=mine).loss.backward()
        for (key, parameter), reference in zip(model.named_parameters(), dense.parameters(), strict=True):
            close(parameter.grad, reference.grad, f"gradient of {key}, turn {turn}")
