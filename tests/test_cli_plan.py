"""`fusedtp plan`: the styles that a configuration's decoder would get, or one line that says why it cannot."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from fusedtp.bench.cli import app
from typer.testing import CliRunner

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


def folder_of(kind: str, folder: Path, **settings: object) -> str:
    import transformers

    getattr(transformers, f"{kind}Config")(**settings).save_pretrained(folder)
    return str(folder)


def test_a_plan_of_a_large_model_takes_no_memory(tmp_path: Path) -> None:
    # Its weights would be 140 GB.
    size = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    config = folder_of("Llama", tmp_path, num_key_value_heads=8, **size)
    done = CliRunner().invoke(app, ["plan", config, "--world-size", "8"])
    assert done.exit_code == 0, done.output
    for text in (
        "LlamaForCausalLM over 8 ranks", "80 x LlamaAttention", "FusedGroup('q_proj', 'k_proj', 'v_proj'",
        "FusedGroup('gate_proj', 'up_proj'", "model.embed_tokens", "FusedEmbeddingParallel",
        "model.layers.*.mlp.down_proj",
        "Heads(8, 1)", "lm_head",
    ):  # fmt: skip
        assert text in done.output, text
    assert "whole on every rank" not in done.output


def test_what_stays_whole_is_named(tmp_path: Path) -> None:
    config = folder_of("Mixtral", tmp_path, num_hidden_layers=2, vocab_size=100)
    done = CliRunner().invoke(app, ["plan", f"{config}/config.json", "--no-sequence-parallel", "--world-size", "16"])
    assert done.exit_code == 0, done.output
    assert "pieces={'k_proj': 8, 'v_proj': 8}" in done.output
    assert "of the bytes: model.layers.*.mlp" in done.output
    assert "SplitTokens" not in done.output


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    config = folder_of("Llama", tmp_path, num_attention_heads=8, num_key_value_heads=8, hidden_size=32)
    for given, said in (
        ([config, "--world-size", "3"], "self_attn: 8 attention heads cannot be shared out evenly over 3 ranks"),
        ([str(tmp_path / "none")], f"there is no such file or folder: {tmp_path / 'none'}"),
        (["none.json"], "there is no such file or folder: none.json"),
        ([config, "--world-size", "0"], "--world-size"),
    ):
        done = CliRunner().invoke(app, ["plan", *given])
        assert done.exit_code == 2, done.output
        assert said in done.output
        assert "Traceback" not in done.output
