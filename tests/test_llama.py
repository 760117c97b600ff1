"""A Hugging Face Llama with the styles, against the same model in one process: logits, loss, every gradient."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel, parallelize_module

import fusedtp
from fusedtp.bench.ranks import RankPool

VOCABULARY, BATCH, LENGTH = 40, 2, 8


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=16, attention_bias=True, mlp_bias=True,
        attn_implementation="eager",
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    # Random biases and scales: those of ones and zeros would hide a gradient that goes the wrong way.
    for p in model.parameters():
        if p.ndim == 1:
            nn.init.normal_(p, 1.0, 0.3)
    return model.double()


def replicated(mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    """Activations between blocks whole on every rank: all-reduces."""
    column, row = fusedtp.FusedColwiseParallel, fusedtp.FusedRowwiseParallel
    plan: dict[str, Any] = {
        **{f"model.layers.*.self_attn.{name}_proj": column() for name in "qkv"},
        "model.layers.*.self_attn.o_proj": row(),
        **{f"model.layers.*.mlp.{name}_proj": column() for name in ("gate", "up")},
        "model.layers.*.mlp.down_proj": row(),
        "lm_head": column(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def sequence_parallel(mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    """Activations between blocks split along the sequence: gathers and scatters inside the matmuls.

    The model makes its mask of the whole embeddings, so they are split behind it; the attention reads the sequence's
    length off its input, so that is gathered before it, once for q, k and v.
    """
    column, row, along = fusedtp.FusedColwiseParallel, fusedtp.FusedRowwiseParallel, Shard(1)
    plan: dict[str, Any] = {
        "model.layers.0": PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(along,), use_local_output=True
        ),
        "model.layers.*.input_layernorm": SequenceParallel(use_local_output=True),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": along},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=True,
        ),
        **{f"model.layers.*.self_attn.{name}_proj": column() for name in "qkv"},
        "model.layers.*.self_attn.o_proj": row(output_layouts=along),
        "model.layers.*.post_attention_layernorm": SequenceParallel(use_local_output=True),
        **{f"model.layers.*.mlp.{name}_proj": column(input_layouts=along) for name in ("gate", "up")},
        "model.layers.*.mlp.down_proj": row(output_layouts=along),
        "model.norm": SequenceParallel(use_local_output=True),
        "lm_head": column(input_layouts=along, output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


PLANS = {"replicated": replicated, "sequence parallel": sequence_parallel}


def against_one_process(group: ProcessGroup, plan: str) -> list[str]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    dense = llama()
    model = PLANS[plan](mesh, llama())
    torch.manual_seed(12)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    expected, got = dense(input_ids=tokens, labels=tokens), model(input_ids=tokens, labels=tokens)

    def check(out: Tensor, ref: Tensor, name: str) -> None:
        # Two layers in float64, sums of at most a few hundred terms; a wrong one differs in the first digits.
        torch.testing.assert_close(out, ref, rtol=1e-9, atol=1e-12, msg=lambda text: f"{name}: {text}")

    check(got.logits, expected.logits, "logits")
    check(got.loss, expected.loss, "loss")
    expected.loss.backward()
    got.loss.backward()
    params = dict(dense.named_parameters())
    assert list(params) == [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        grad, ref = p.grad, params[name].grad
        assert grad is not None, name
        assert ref is not None, name
        check(grad.full_tensor() if isinstance(grad, DTensor) else grad, ref, f"gradient of {name}")
    return list(params)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("plan", PLANS)
def test_llama(pool: RankPool, plan: str) -> None:
    pool.run(against_one_process, plan, world_size=2)
