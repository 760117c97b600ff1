"""Tiny models of every family of transformers that generates text, made by the names of configuration values."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

# What to give a number by its name; the first pattern that matches counts. Others keep their default.
TINY = (
    (r"(pad|unk)_token_id|image_token.*|.*_start_token_id", 0),
    (r"bos_token_id", 1),
    (r"eos_token_id", 2),
    (r".*vocab_size(_per_layer_input)?", 64),
    (r"(num_dense_layers|first_k_dense_replace|num_kv_shared_layers|first_dense_layers|moe_layer_start_index)", 1),
    (r"(num_hidden_layers|n_layers?|num_layers|num_decoder_layers|decoder_layers|encoder_layers|n_layer)", 2),
    (r"(num_attention_heads|n_heads?|num_heads|decoder_attention_heads|encoder_attention_heads|mamba_n_heads"
     r"|mamba_num_heads|linear_num_value_heads|attention_heads)", 4),
    (r"(num_key_value_heads|multi_query_group_num|num_kv_heads|linear_num_key_heads|swa_num_key_value_heads"
     r"|index_n_heads|num_global_key_value_heads)", 2),
    (r"(qk_rope_head_dim|qk_nope_head_dim|v_head_dim|index_head_dim)", 8),
    (r"(global_)?head_dim|attention_head_dim|kv_channels|linear_(key|value)_head_dim", 8),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"qk_head_dim", 16),
    (r"(q|kv|o|w|index)_lora_rank", 16),
    (r"(decay|a|v|gate)_low_rank_dim", 8),
    (r".*(moe|expert)s?_intermediate_size|shared_expert.*size|expert_ffn_hidden_size|expert_dim", 16),
    (r"(n_routed_experts|num_local_experts|num_experts|moe_num_experts|num_routed_experts)", 4),
    (r"(num_experts_per_tok|moe_topk|moe_k|top_k_experts|num_experts_per_token|top_k|moe_top_k|experts_top_k)", 2),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts|zero_expert_num", 1),
    (r"num_nextn_predict_layers", 0),
    (r"hidden_size|n_embd|d_model|dim|embed_dim|attention_hidden_size|model_dim", 32),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|n_inner|mlp_dim|dim_ff|encoder_ffn_dim|lru_width)", 48),
    (r"hidden_size_per_layer_input|word_embed_proj_dim|embedding_size", 32),
    (r"max_position_embeddings|n_positions|max_seq_len(gth)?|n_ctx|max_sequence_length|seq_length", 64),
    (r".*sliding_window|attention_window.*|window_size|local_attention", 8),
    (r"(mamba_d_state|state_size|ssm_state_size|mamba_state_dim)", 8),
    (r"mamba_n_groups|n_groups|mamba_ngroups", 1),
    (r"mamba_expand|expand", 2),
    (r"mamba_dt_rank|time_step_rank", 4),
    (r"mamba_d_conv|conv_kernel.*|conv_L_cache|linear_conv_kernel_dim", 4),
    (r"(mamba_)?chunk_size|chunk_length", 8),
    (r"rotary_dim", 4),
)  # fmt: skip
# Further values of families.
MORE: dict[str, dict[str, Any]] = {
    **{name: {"head_dim": 8} for name in (
        "HunYuanDenseV1Config", "HunYuanMoEV1Config", "MinistralConfig", "NemotronConfig", "DoryConfig",
    )},
    "Mamba2Config": {"head_dim": 16},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "ReformerConfig": {"is_decoder": True},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "XmodConfig": {"default_language": "en_XX"},
    "Dots1Config": {"n_shared_experts": 1},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip
# Larger models are not made.
MOST = 2_000_000


class NotBuiltError(Exception):
    """The values of `TINY` do not make a model of this family that runs in one process."""


def configurations() -> dict[str, Any]:
    """Return the configuration classes of all families that generate text, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return {each.__name__: each for each in sorted(MODEL_FOR_CAUSAL_LM_MAPPING, key=lambda each: each.__name__)}


def _values(config: Any) -> dict[str, Any]:
    """Return the changes that make a configuration tiny, also for the configurations inside it."""
    changes: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        inner = getattr(config, name, None)
        if hasattr(inner, "to_dict"):
            changes[name] = {**_values(inner), **({"model_type": inner.model_type} if inner.model_type else {})}
        elif isinstance(value, int) and not isinstance(value, bool):
            found = next((small for pattern, small in TINY if re.fullmatch(pattern, name)), None)
            if found is not None:
                changes[name] = found
        elif isinstance(value, list) and re.fullmatch("(mlp_)?layer_types|layers_block_type", name):
            # One layer of each kind, if there are two.
            changes[name] = [value[0], next((each for each in value if each != value[0]), value[0])]
    if "kv_lora_rank" in changes and "num_key_value_heads" in changes:
        # Latent attention has keys for every head.
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    return changes


def tiny(name: str, **more: Any) -> Any:
    """Make a float32 model of a family with random weights; NotBuiltError if the values do not fit.

    `more`: further values of the configuration.
    """
    import transformers
    from transformers import AutoModelForCausalLM

    # The list of all families imports all their modules.
    kind = getattr(transformers, name, None) or configurations()[name]
    try:
        config = kind(**{**_values(kind()), **MORE.get(name, {}), **more})
        with torch.device("meta"):
            size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST:
            raise NotBuiltError(f"{size} parameters")
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config).eval()
        for each in model.parameters():
            if each.ndim == 1:
                nn.init.normal_(each, 1.0, 0.1)
        out = model(**inputs())
        out.loss.backward()
        model.zero_grad()
    except NotBuiltError:
        raise
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {error}") from error
    return model


def inputs() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(5))
    return {"input_ids": tokens, "labels": tokens}
