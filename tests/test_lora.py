"""peft's LoRA on a decoder that `parallelize` splits, compared with one process: losses, gradients, merges."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import parallelize_module

import fusedtp
from fusedtp.hf import decoders, lora

from .harness import LARGE, mesh_of, on_ranks
from .test_decoders import VOCABULARY, close, decoder, gradients_are_those_of, small

pytestmark = [
    pytest.mark.skipif(
        find_spec("peft") is None or find_spec("transformers") is None, reason="needs peft and transformers"
    ),
    # peft reads a deprecated attribute of transformers.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# 45 features split unevenly over two ranks.
CASES: dict[str, tuple[str, list[str] | str, dict[str, Any], dict[str, Any]]] = {
    "every linear": ("Llama with one key head", [*LLAMA, "embed_tokens", "lm_head"], {}, {"intermediate_size": 45}),
    "tied": ("Llama, tied", ["q_proj", "embed_tokens", "down_proj"], {}, {}),
    "biases": ("Llama", ["up_proj", "o_proj"], {"lora_bias": True}, {}),
    "some layers": ("Qwen3", LLAMA, {"layers_to_transform": [1], "rank_pattern": {"q_proj": 5}}, {}),
    "packed": ("Phi3 with two key heads", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], {}, {}),
    "transposed": ("GPT-2", ["c_attn", "c_proj", "c_fc"], {"fan_in_fan_out": True}, {"attn_pdrop": 0}),
    "modules to save": ("Llama", ["q_proj"], {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}, {}),
    "attention alone": ("Mixtral", ["q_proj", "o_proj"], {}, {}),
    "norms": ("Llama", ["input_layernorm", "norm"], {}, {}),
}
# Cases that also run with whole sequences: split vocabularies, packed linears, norms.
WHOLE = ("every linear", "packed", "norms")


def adapted(name: str, **more: Any) -> Any:
    """Return the case's model in training mode, with adapters of random values; dropout is active."""
    import peft

    kind, targets, options, changes = CASES[name]
    options = {"r": 3, "lora_dropout": 0.3, **options, **more}
    torch.manual_seed(21)
    if name == "norms":
        config = peft.LNTuningConfig(target_modules=targets, task_type="CAUSAL_LM")
    else:
        config = peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **options)
    # Adapters may be those of some layers.
    model = peft.get_peft_model((decoder if "layers_to_transform" in options else small)(kind, **changes), config)
    for key, parameter in model.named_parameters():
        if "lora_" in key or "ln_tuning" in key:
            nn.init.normal_(parameter, 0, 0.3)
    return model.train()


def outputs_of(model: nn.Module, **options: Any) -> Any:
    """Call the model from a fixed random state: dropout of split tokens or features equals that of one process."""
    torch.manual_seed(22)
    tokens = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(23))
    return model(input_ids=tokens, labels=tokens, **options)


def loss_of(model: nn.Module, **options: Any) -> Any:
    return outputs_of(model, **options).loss


def logits_of(model: nn.Module, **options: Any) -> Any:
    # Entirely wrong logits were once seen with the right loss, to six digits.
    return outputs_of(model, **options).logits


def learn_alike(model: nn.Module, dense: nn.Module) -> None:
    """Compare the loss and every gradient of one call."""
    expected, got = loss_of(dense), loss_of(model)
    close(got, expected, "loss")
    expected.backward()
    got.backward()
    gradients_are_those_of(model, dense)


def put_on_later(dense: Any, model: Any, rank: int) -> None:
    """Compare a second adapter, weighted combinations, two adapters in one batch, and a loaded adapter."""
    from peft.tuners.lora import layer
    from peft.utils.hotswap import hotswap_adapter

    class OtherOrder(set[Any]):
        # Ranks of a pool are forks, whose sets have the same order; ranks of torchrun have sets in different orders.
        def __iter__(self) -> Any:
            return iter(sorted(super().__iter__(), reverse=rank > 0))

    both = dense, model
    config = copy.deepcopy(dense.peft_config["default"])
    config.init_lora_weights, config.modules_to_save = False, None
    for each in both:
        # The first rank's random values count.
        torch.manual_seed(24 if each is dense or rank == 0 else 99)
        each.add_adapter("second", config)
        each.set_adapter("second")
    learn_alike(model, dense)
    for each in both:
        each.eval().zero_grad()
    # Adapters of every linear are combined in each way, others in one.
    is_every = set(LLAMA) <= set(dense.peft_config["default"].target_modules)
    for kind in ("cat", "svd", "dare_linear") if LARGE or is_every else ("cat",):
        density = {"density": 0.5} if kind == "dare_linear" else {}
        for each in both:
            torch.manual_seed(25)
            each.add_weighted_adapter(["default", "second"], [0.7, -0.3], kind, combination_type=kind, **density)
            each.set_adapter(kind)
        close(logits_of(model), logits_of(dense), kind)
    names = {"adapter_names": ["second", "default"]}
    if saved := dense.peft_config["default"].modules_to_save:
        with pytest.raises(NotImplementedError, match="adapter_names= is not done by modules_to_save"):
            loss_of(model, **names)
    else:
        expected = logits_of(dense, **names)
        with patch.object(layer, "set", OtherOrder, create=True), patch.object(lora, "set", OtherOrder, create=True):
            close(logits_of(model, **names), expected, "a batch of two adapters")
    with TemporaryDirectory() as folder, implicit_replication():
        dense.save_pretrained(folder, selected_adapters=["second"], save_embedding_layers=False)
        dense.set_adapter("second")
        for name in ("third",) if saved else ("third", "default"):
            model.load_adapter(f"{folder}/second", name)
            model.set_adapter(name)
            close(logits_of(model), logits_of(dense), f"loaded as {name}")
        # peft finds no names of packed linears and ignores embeddings.
        if not saved and not any(".parts." in key or "embedding_A" in key for key, _ in model.named_parameters()):
            for each in both:
                for key, parameter in each.named_parameters():
                    if ".default." in key:
                        nn.init.zeros_(parameter)
                hotswap_adapter(each, f"{folder}/second", adapter_name="default", torch_device="cpu")
                each.set_adapter("default")
            close(logits_of(model), logits_of(dense), "swapped")


def merged_and_back(dense: Any, model: Any) -> None:
    """Compare with adapters disabled, merged into the weights, and unmerged."""
    with dense.disable_adapter(), model.disable_adapter():
        close(logits_of(model), logits_of(dense), "without adapters")
    for step in ("merge_adapter", "unmerge_adapter"):
        for each in (dense, model):
            getattr(each, step)()
        close(logits_of(model), logits_of(dense), step)
        # peft unmerges each adapter at its linear's first call.
        with dense.disable_adapter(), model.disable_adapter():
            close(logits_of(model), logits_of(dense), f"without adapters after {step}")
    dense, model = dense.merge_and_unload(safe_merge=True), model.merge_and_unload(safe_merge=True)
    close(logits_of(model), logits_of(dense), "unloaded")


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [
        *((name, True) for name in (CASES if LARGE else list(CASES)[2::2])),
        *((name, False) for name in (WHOLE if LARGE else WHOLE[:1])),
    ],
)  # fmt: skip
@on_ranks(2)
def test_as_in_one_process(group: ProcessGroup, name: str, sequence_parallel: bool) -> None:
    dense = adapted(name)
    model = copy.deepcopy(dense)
    assert fusedtp.parallelize(model, mesh_of(group), sequence_parallel=sequence_parallel) is model
    learn_alike(model, dense)
    for each in (dense.eval(), model.eval()):
        each.zero_grad()
    if name != "norms":
        put_on_later(copy.deepcopy(dense), copy.deepcopy(model), group.rank())
    if name in ("packed", "transposed"):
        with pytest.raises(NotImplementedError, match="packed linears can be merged before"):
            model.merge_adapter()
    else:
        merged_and_back(dense, model)


@pytest.mark.parametrize("name", ["every linear", "packed"])
@on_ranks(2)
def test_merged_before_it_is_split(group: ProcessGroup, name: str) -> None:
    dense = adapted(name).eval()
    dense.merge_adapter()
    model = fusedtp.parallelize(copy.deepcopy(dense), mesh_of(group))
    close(logits_of(model), logits_of(dense), "merged")
    if name == "every linear":
        model, dense = model.merge_and_unload(), dense.merge_and_unload()
        close(logits_of(model), logits_of(dense), "unloaded")


@on_ranks(2)
def test_put_on_afterwards(group: ProcessGroup) -> None:
    """Adapters of split linears are refused; adapters of replicated modules work as usual."""
    import peft

    mesh = mesh_of(group)
    for targets in (["down_proj"], ["q_proj"], "all-linear"):
        model = fusedtp.parallelize(small("Llama"), mesh, sequence_parallel=False)
        with pytest.raises(NotImplementedError, match=r"put adapters on first, .* then call fusedtp\.parallelize"):
            peft.get_peft_model(model, peft.LoraConfig(target_modules=targets))
    split = parallelize_module(nn.ModuleDict({"up": nn.Linear(4, 4)}), mesh, {"up": fusedtp.FusedColwiseParallel()})
    with pytest.raises(NotImplementedError, match="put adapters on first"):
        peft.inject_adapter_in_model(peft.IA3Config(target_modules=["up"], feedforward_modules=[]), split)
    model = fusedtp.parallelize(adapted("every linear"), mesh, sequence_parallel=False)
    for said, options in {
        "init_lora_weights='pissa'": {"init_lora_weights": "pissa"},
        "Dora": {"use_dora": True},
    }.items():
        with pytest.raises(NotImplementedError, match=f"'second', with {said}.* put it on before fusedtp"):
            model.add_adapter("second", peft.LoraConfig(target_modules=["down_proj"], **options))
    with pytest.raises(NotImplementedError, match=r"'second' is made of tensors on meta, .*: leave out low_cpu_mem"):
        model.add_adapter("second", peft.LoraConfig(target_modules=["down_proj"]), low_cpu_mem_usage=True)
    few = fusedtp.parallelize(adapted("biases"), mesh).eval()
    few.add_adapter("head", peft.LoraConfig(target_modules=["up_proj"], modules_to_save=["lm_head"]))
    few.set_adapter("head")
    with pytest.raises(NotImplementedError, match="adapter_names= is not done by modules_to_save"):
        loss_of(few, adapter_names=["head", "default"])
    with pytest.raises(NotImplementedError, match="put adapters on first"):
        few.add_adapter("second", peft.LoraConfig(target_modules=["down_proj"]))
    dense = small("Mixtral")
    model = fusedtp.parallelize(copy.deepcopy(dense), mesh)
    both = [peft.get_peft_model(each, peft.LoraConfig(target_modules=["embed_tokens"])) for each in (dense, model)]
    for key, parameter in [pair for each in both for pair in each.named_parameters()]:
        if "lora_" in key:
            nn.init.constant_(parameter, 0.2)
    learn_alike(both[1], both[0])


@on_ranks(2)
def test_prefix_tuning_put_on_afterwards(group: ProcessGroup) -> None:
    """With one shared key head each rank has one term of a prefix's gradient. If heads are split, the prefix is not.

    A prompt passes through the model and works.
    """
    import peft

    one_head, config = small("Llama with one key head").train(), peft.PrefixTuningConfig(num_virtual_tokens=2)
    config.task_type = "CAUSAL_LM"
    tokens = torch.arange(3, 12)[None]
    for sequence_parallel in (True, False):
        options = {"sequence_parallel": sequence_parallel}
        dense, model = one_head, fusedtp.parallelize(copy.deepcopy(one_head), mesh_of(group), **options)
        for each in (dense, model):
            # Two segments, with gradients through a cache that the model has filled.
            each.zero_grad()
            cache = each(input_ids=tokens[:, :5], use_cache=True).past_key_values
            each(input_ids=tokens[:, 5:], past_key_values=cache).logits.square().sum().backward()
        gradients_are_those_of(model, dense)
        torch.manual_seed(26)
        prefixed = peft.get_peft_model(copy.deepcopy(dense), copy.deepcopy(config))
        torch.manual_seed(26)
        model = peft.get_peft_model(model, copy.deepcopy(config))
        with torch.no_grad():
            close(logits_of(model), logits_of(prefixed), "not trained")
        with pytest.raises(NotImplementedError, match=r"whose gradients would not .*: use prompt tuning"):
            loss_of(model)
        heads = peft.get_peft_model(fusedtp.parallelize(small("Llama"), mesh_of(group), **options), config)
        with torch.no_grad(), pytest.raises(NotImplementedError, match="keys and values of all heads, as peft"):
            loss_of(heads)
        for prompt in (
            peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
            peft.PromptEncoderConfig(num_virtual_tokens=2, encoder_hidden_size=8, task_type="CAUSAL_LM"),
        ):
            both = []
            for each in (prefixed.get_base_model(), model.get_base_model()):
                each.zero_grad()
                torch.manual_seed(27)
                both.append(peft.get_peft_model(each, copy.deepcopy(prompt)))
                loss_of(both[-1]).backward()
            gradients_are_those_of(both[1], both[0])


@pytest.mark.parametrize("sequence_parallel", [True, False])
@on_ranks(2)
def test_adapters_around_an_attention(group: ProcessGroup, sequence_parallel: bool) -> None:
    """An adapter that calls the linears of an attention works if it is put on before, and is refused afterwards."""
    import peft

    def around(model: Any) -> Any:
        torch.manual_seed(28)
        made = peft.get_peft_model(
            model, peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=2, task_type="CAUSAL_LM")
        )
        for parameter in made.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, 0, 0.3)
        return made.double()

    options: Any = {"sequence_parallel": sequence_parallel}
    dense = around(decoder("Llama"))
    with pytest.warns(UserWarning, match="self_attn") if group.rank() == 0 else nullcontext():
        model = fusedtp.parallelize(copy.deepcopy(dense), mesh_of(group), **options)
    learn_alike(model, dense)
    model = around(fusedtp.parallelize(decoder("Llama"), mesh_of(group), **options))
    with pytest.raises(NotImplementedError, match="only the code of LlamaAttention may call its linears: put adapters"):
        loss_of(model)


def test_methods_that_are_replaced_exist() -> None:
    """Methods of transformers and peft are replaced by name."""
    from peft import LoraModel
    from transformers import PreTrainedModel

    known = dir(PreTrainedModel) + dir(LoraModel)
    assert [name for name in decoders._REPLACED if name not in known] == []


@on_ranks(1)
def test_other_adapters_are_refused_by_name(group: ProcessGroup) -> None:
    import peft

    def refused(model: Any, said: str) -> None:
        before = [type(each) for each in model.modules()]
        with pytest.raises(NotImplementedError, match=said):
            fusedtp.decoder_plan(model, 2)
        assert [type(each) for each in model.modules()] == before

    refused(adapted("biases", use_dora=True, lora_bias=False), r"layers\.0\.self_attn\.o_proj, .* DoraLinearVariant")
    refused(
        adapted("attention alone", modules_to_save=["v_proj"]), r"self_attn\.v_proj, .* put peft.*ModulesToSaveWrapper"
    )
    tied = r"lm_head\.lora_[AB].default.weight is one with model.embed_tokens's"
    refused(adapted("tied", ensure_weight_tying=True), tied)
    refused(adapted("tied", modules_to_save=["lm_head"]), "lm_head, .*ModulesToSaveWrapper")
    prefix = peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    refused(
        peft.get_peft_model(decoder("Llama"), prefix), "'default', PrefixTuningConfig, gives every rank .* of all heads"
    )
    ia3 = peft.IA3Config(target_modules=["up_proj"], feedforward_modules=[])
    tokens = peft.TrainableTokensConfig(token_indices=[1], target_modules=["embed_tokens"])
    refused(peft.get_peft_model(decoder("Llama"), tokens), "TrainableTokensLayer: .* in target_modules, or in modules_")
    refused(adapted("biases", trainable_token_indices=[1]), "TrainableTokensWrapper: .* in target_modules, or in modu")
    refused(peft.get_peft_model(decoder("Llama"), ia3), r"mlp\.up_proj, around which peft has put peft.*ia3.*Linear:")
