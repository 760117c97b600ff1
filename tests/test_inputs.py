"""Ranks that call a split model with unlike tokens raise the same error, which names the ranks."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench.ranks import RankPool
from fusedtp.hf import inputs

from .harness import few_kernels, mesh_of, on_ranks
from .test_decoders import close, decoder, tokens_of

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


def unlike(group: ProcessGroup) -> list[str]:
    """Return this rank's errors of calls in which the last rank has other values."""
    odd, told = group.rank() == group.size() - 1, []
    dense = decoder("Llama", num_attention_heads=6, hidden_size=24, num_key_value_heads=1)
    model: Any = fusedtp.parallelize(dense, mesh_of(group))
    tokens, mask = tokens_of(), torch.ones(2, 9, dtype=torch.long)
    other = tokens.clone()
    other[1, 4] += 1
    for given in (
        {"input_ids": other if odd else tokens},
        {"input_ids": tokens, "labels": other if odd else tokens},
        {"input_ids": tokens, "attention_mask": mask - odd * torch.eye(2, 9, dtype=torch.long)},
        {"input_ids": tokens[:, :5] if odd else tokens},
        {"inputs_embeds": torch.ones(2, 9, 24, dtype=torch.float64) + odd},
    ):
        (hook,) = (each for each in model._forward_pre_hooks.values() if isinstance(each, inputs.CompareInputs))
        hook.calls = 0
        with pytest.raises(fusedtp.RanksDisagree) as caught:
            model(**given)
        told.append(str(caught.value))
        # Nothing was broken: the same ranks go on.
        model(input_ids=tokens)
    # After the first calls, every 64th is compared.
    while hook.calls < 63:
        hook(model, (other if odd else tokens,), {})
    with pytest.raises(fusedtp.RanksDisagree, match="argument 0"):
        model(other if odd else tokens)
    return told


def test_unlike_tokens_are_named(pool: RankPool) -> None:
    first, *others = pool.run(unlike, world_size=3)
    assert all(each == first for each in others)
    names = ("input_ids", "labels", "attention_mask", "input_ids", "inputs_embeds")
    for name, text in zip(names, first, strict=True):
        assert text.startswith(f"LlamaForCausalLM: the ranks do not agree on the values of {name}: ["), text
        assert "rank 2 against 2 that agree. Every rank of the mesh takes the same batch" in text


@on_ranks(2)
def test_what_is_not_compared(group: ProcessGroup) -> None:
    """The switch turns it off; a compiled call is one graph as before; equal calls are right."""
    dense, tokens = decoder("Llama", num_hidden_layers=1), tokens_of()
    model = fusedtp.parallelize(copy.deepcopy(dense), mesh_of(group), compare_inputs=False, sequence_parallel=False)
    assert not model._forward_pre_hooks
    model = fusedtp.parallelize(copy.deepcopy(dense), mesh_of(group), sequence_parallel=False)
    with few_kernels(), torch.no_grad():
        expected = dense(input_ids=tokens, use_cache=False).logits
        close(model(input_ids=tokens, use_cache=False).logits, expected, "eager")
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(2):
            close(compiled(input_ids=tokens, use_cache=False).logits, expected, "compiled")
    (hook,) = (each for each in model._forward_pre_hooks.values() if isinstance(each, inputs.CompareInputs))
    assert hook.calls == 1
    with pytest.raises(TypeError, match="compare_inputs must be True or False, got 1"):
        fusedtp.parallelize(dense, mesh_of(group), compare_inputs=1)  # type: ignore[arg-type]
