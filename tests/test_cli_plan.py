"""`fusedtp plan`: the styles for a configuration's decoder, or one line that says why there is no plan."""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fusedtp.hf import plan

from .command import command, folded

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


def folder_of(kind: str, folder: Path, **settings: object) -> str:
    import transformers

    getattr(transformers, f"{kind}Config")(**settings).save_pretrained(folder)
    return str(folder)


def test_a_plan_of_a_large_model_takes_no_memory(tmp_path: Path) -> None:
    # The weights would take 140 GB.
    size = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    said = command("plan", folder_of("Llama", tmp_path, num_key_value_heads=8, **size), "--world-size", 8)
    for text in (
        "LlamaForCausalLM over 8 ranks", "80 x LlamaAttention", "FusedGroup('q_proj', 'k_proj', 'v_proj'",
        "FusedGroup('gate_proj', 'up_proj'", "model.embed_tokens", "FusedEmbeddingParallel",
        "model.layers.*.mlp.down_proj", "Heads(8, 1)", "lm_head", "- Heads: for an attention",
        "Each rank sends about 9.26 MB for each token in forward, and 112 kB for each token's logits",
    ):  # fmt: skip
        assert text in said, text
    assert "whole on every rank" not in said


def test_no_name_is_folded_in_eighty_columns(tmp_path: Path) -> None:
    said = command("plan", folder_of("Llama", tmp_path, num_hidden_layers=2), columns=80)
    assert max(map(len, said.splitlines())) <= 80
    for name in ("FusedEmbeddingParallel(output_layouts=", "model.layers.*.post_attention_layernorm: 2 x LlamaRMSNorm"):
        assert name in said
    named = "FusedEmbeddingParallel", "FusedColwiseParallel", "FusedRowwiseParallel", "FusedNormParallel", "FusedGroup"
    found = set(re.findall(r"\w*(?:Fused|Parallel)\w*", said))
    assert found == {*named, "SequenceParallel"}


def test_what_stays_whole_is_named(tmp_path: Path) -> None:
    config = folder_of("Mixtral", tmp_path, num_hidden_layers=2, vocab_size=100)
    said = command("plan", f"{config}/config.json", "--no-sequence-parallel", "--world-size", 16)
    assert "pieces={'k_proj': 8, 'v_proj': 8}" in said
    assert "of the bytes: model.layers.*.mlp" in said
    # Several ranks use the same key and value head, and each has all of them.
    assert "model.layers.*.self_attn.k_proj, model.layers.*.self_attn.v_proj" in " ".join(said.split())
    assert "SplitTokens" not in said


def test_what_cannot_be_split_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_reaches_hub", lambda: False)
    config = folder_of("Llama", tmp_path, num_attention_heads=8, num_key_value_heads=8, hidden_size=32)
    for given, said in (
        ((config, "--world-size", "3"), "self_attn: 8 attention heads cannot be shared out evenly over 3 ranks"),
        ((tmp_path / "none",), f"there is no such file or folder: {tmp_path / 'none'}"),
        (("some/model",), "some/model: cannot reach the hub"),
        ((config, "--world-size", "0"), "--world-size"),
    ):
        assert said in command("plan", *given, code=2)


LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 64,
}  # fmt: skip
CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
ODD: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    "an activation that is none": ({"hidden_act": "swiglu"}, "hidden_act: KeyError: 'swiglu'"),
    "heads as text": ({"num_attention_heads": "4"}, "num_attention_heads"),
    "no heads": ({"num_attention_heads": 0}, "transformers makes no model of it"),
    "a head of a fraction": ({"hidden_size": 33}, "transformers makes no model of it"),
    "negative": ({"vocab_size": -5}, "transformers makes no model of it"),
    "too wide": ({"hidden_size": 2**63}, "transformers makes no model of it"),
    "an unknown kind": ({"model_type": "swallow"}, "swallow"),
    "labels without end": ({"num_labels": 10**9}, "num_labels must be at most"),
    "layers of a part": ({"text_config": {"num_hidden_layers": 1e300}}, "num_hidden_layers must be at most"),
    "code of its own": ({"model_type": "code", "auto_map": CODE}, "code of its own (auto_map), which is never run"),
    "a list": (b"[1, 2]", "must be an object, got list"),
    "NaN": (b'{"model_type": "llama", "initializer_range": NaN}', "NaN is no number"),
    "brackets without end": (b"[" * 200_000, "is no JSON: RecursionError"),
    "not text": (b"\xff\xfe\x00", "is no JSON: UnicodeDecodeError"),
    "large": (b"{}" + b" " * 5_000_000, "has 5000002 bytes"),
}


@pytest.mark.parametrize("case", ODD)
def test_an_odd_configuration_is_refused_in_a_few_lines(tmp_path: Path, case: str) -> None:
    changed, said = ODD[case]
    written(tmp_path, changed)
    output = command("plan", tmp_path, code=2)
    assert said in folded(output)
    assert "\n\nError: Invalid value: " in output
    assert len(output) < 1000


def written(folder: Path, changed: dict[str, Any] | bytes) -> None:
    """Write a configuration, and a model's own code that fails if it is imported."""
    content = changed if isinstance(changed, bytes) else json.dumps(LLAMA | changed).encode()
    (folder / "config.json").write_bytes(content)
    (folder / "code.py").write_text("raise SystemExit('the code was run')")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    for given in (tmp_path, tmp_path / "config.json", "/dev/zero"):
        assert "is no file" in command("plan", given, code=2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_modules_that_take_too_long_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first check may raise in a callback of the garbage collector, which swallows exceptions; a later check works.
    monkeypatch.setattr(plan, "_MOST_SECONDS", 1)
    written(tmp_path, {"num_hidden_layers": 29_000})
    said = command("plan", tmp_path, code=2)
    assert "not made within 1 s of CPU time" in said
    assert str(tmp_path) not in said


def test_what_the_plan_leaves_out_is_told(tmp_path: Path) -> None:
    """Unknown names of sizes, for which defaults are used; quantization; code of a model's own."""
    written(tmp_path, {"d_model": 8, "n_heads": 8, "quantization_config": {"quant_method": "gptq"}, "auto_map": CODE})
    said = command("plan", tmp_path)
    for text in (
        "LlamaConfig does not know these, the plan is made without them: d_model, n_heads\n",
        "quantization_config (gptq) is left out",
        "auto_map is left out",
    ):
        assert text in said
    written(tmp_path, {"rope_theta": 5e5, "torch_dtype": "bfloat16"})
    assert "does not know" not in command("plan", tmp_path)
