"""Checkpoints into split models: `from_pretrained` equals one process, reads a rank's part, and refuses before that."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

import fusedtp
from fusedtp.bench.ranks import RankPool

from .harness import LARGE, mesh_of, on_ranks
from .test_decoders import alike, close, decoder, small, tokens_of

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")

# Heads for two and three ranks; features and vocabulary divide by neither.
ODD = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 24, "intermediate_size": 35}
ONE = {**ODD, "num_key_value_heads": 1}
SAVED = {"Llama": ONE, "Llama, tied": ODD, "Gemma2": ODD, "Phi3": ONE, "GPT-2": {**ODD, "n_inner": 35}}


def saved(folder: Path, name: str, shard: str = "20KB", **changes: Any) -> Any:
    """Save a decoder as transformers does, in several files unless they are large enough; return it in float32."""
    model = decoder(name, **changes).float()
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def loaded(group: ProcessGroup, folder: str, dense: Any, **options: Any) -> Any:
    return fusedtp.from_pretrained(type(dense), folder, mesh_of(group), dtype=torch.float64, **options)


def as_in_one_process(group: ProcessGroup, folder: str, names: list[str], sequence_parallel: bool) -> None:
    for name in names:
        changes = SAVED[name]
        dense = type(decoder(name, **changes)).from_pretrained(f"{folder}/{name}", dtype=torch.float64)
        model = loaded(group, f"{folder}/{name}", dense, sequence_parallel=sequence_parallel)
        # Bit for bit what `parallelize` makes of the whole model.
        split = fusedtp.parallelize(copy.deepcopy(dense), mesh_of(group), sequence_parallel=sequence_parallel)
        assert not model.training
        assert model.generation_config.to_dict() == dense.generation_config.to_dict()
        assert len(list(model.parameters())) == len(list(split.parameters()))
        for tensors_of in (lambda each: each.state_dict(), lambda each: dict(each.named_buffers())):
            mine, theirs = tensors_of(model), tensors_of(split)
            assert mine.keys() == theirs.keys()
            for key, each in mine.items():
                assert getattr(each, "placements", None) == getattr(theirs[key], "placements", None), key
                assert torch.equal(*(x.to_local() if isinstance(x, DTensor) else x for x in (each, theirs[key]))), key
        alike(model, dense, input_ids=tokens_of(), labels=tokens_of())
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if group.rank() == 0:
            model.save_pretrained(f"{folder}/{name}/again", state_dict=state)
        dist.barrier(group)
        again = type(dense).from_pretrained(f"{folder}/{name}/again", dtype=torch.float64)
        for key, each in dense.state_dict().items():
            assert torch.equal(again.state_dict()[key], each), key


# On each number of ranks: one shared key head, and tied embeddings.
@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (2, list(SAVED) if LARGE else ["Llama", "GPT-2"]),
        (3, list(SAVED) if LARGE else ["Llama, tied", "Gemma2", "Phi3"]),
    ],
)
def test_as_in_one_process_and_back(pool: RankPool, tmp_path: Path, world_size: int, names: list[str]) -> None:
    for name in names:
        saved(tmp_path / name, name, **SAVED[name])
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 1 + (name == "GPT-2")
    pool.run(as_in_one_process, str(tmp_path), names, world_size == 2, world_size=world_size)


def shares(group: ProcessGroup, folder: str) -> tuple[int, int, int, int, int]:
    """Load, and return the bytes read, the largest tensor's, the peak of bytes held, this rank's share, the whole."""
    from fusedtp.hf import pretrained

    read: list[int] = []
    peak = 0

    def held() -> int:
        found: dict[int, int] = {}
        for each in gc.get_objects():
            if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu":
                # Fake tensors of torch's own have no memory to point to.
                with contextlib.suppress(RuntimeError):
                    found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        return sum(found.values())

    own = pretrained._Checkpoint._part

    def counted(*args: Any) -> Tensor:
        nonlocal peak
        part = own(*args)
        read.append(part.nbytes)
        peak = max(peak, held())
        return part

    from transformers import LlamaForCausalLM

    gc.collect()
    # What is there already is not visited again at every part.
    gc.freeze()
    before = held()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pretrained._Checkpoint, "_part", counted)
        model = fusedtp.from_pretrained(LlamaForCausalLM, folder, mesh_of(group))
    local = {name: each.to_local() if isinstance(each, DTensor) else each for name, each in model.named_parameters()}
    share = sum(each.nbytes for each in local.values())
    wholes = [each.numel() * each.itemsize for each in model.parameters()]
    return sum(read), max(wholes), peak - before, share, sum(wholes)


def test_a_rank_reads_and_holds_its_share(pool: RankPool, tmp_path: Path) -> None:
    saved(tmp_path, "Llama", "200KB", hidden_size=64, intermediate_size=256, num_key_value_heads=8)
    for read, largest, peak, share, whole in pool.run(shares, str(tmp_path), world_size=2):
        assert read == share < 0.52 * whole
        # Buffers are a few bytes.
        assert share < peak <= share + largest + 1024


def edited(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of the folder's only file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut(folder: Path) -> None:
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


def other_index(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def configured(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


NORM, DOWN, HEAD = "model.norm.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"
# Faults of a folder: its model, whether it has several files, what makes the fault, and the error.
BAD: list[tuple[str, bool, Callable[[Path], object], type[Exception], str]] = [
    ("Llama", True, shutil.rmtree, FileNotFoundError, r"is not a folder .*snapshot_download"),
    ("Llama", False, lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
     FileNotFoundError, r"has neither .*it has config\.json, generation_config\.json, pytorch_model\.bin"),
    ("Llama", True, lambda f: min(f.glob("*.safetensors")).unlink(),
     FileNotFoundError, r"model-00001-of-0000\d\.safetensors is missing: model\.safetensors\.index\.json lists it"),
    ("Llama", True, cut, ValueError, r"00001-of-0000\d\.safetensors is not the safetensors file .*copy it anew"),
    ("Llama", False, cut, ValueError, r"model\.safetensors is not the safetensors file .*copy it anew"),
    ("Llama", False, lambda f: (f / "model.safetensors").write_bytes(b""), ValueError, "is not the safetensors file"),
    ("Llama", True, lambda f: (f / "model.safetensors.index.json").write_text("{"), ValueError, "is not an index"),
    ("Llama", True, partial(other_index, change=lambda i: i["weight_map"].update({NORM: "../x.safetensors"})),
     ValueError, r"'\.\./x\.safetensors' is no name of a file"),
    ("Llama", True, partial(other_index, change=lambda i: i["weight_map"].update({NORM: i["weight_map"][DOWN], "o":
     i["weight_map"][DOWN]})), ValueError, r"is not the safetensors file .*copy it anew"),
    ("Llama", False, partial(edited, change=lambda t: t.pop(NORM)),
     ValueError, r"not one of this LlamaForCausalLM: it does not have model\.norm\.weight\. Pass the class"),
    ("Llama", False, partial(edited, change=lambda t: t.update(extra=t[NORM].clone())),
     ValueError, r"it has unknown extra\."),
    ("Llama", False, partial(edited, change=lambda t: t.update({NORM: t[NORM][1:].clone()})),
     ValueError, r"others than the model's model\.norm\.weight, F32 \[31\] for float32 \[32\]"),
    ("Llama", False, partial(edited, change=lambda t: t.update({DOWN: t[DOWN].char()})),
     ValueError, r"down_proj\.weight, I8 \[32, 44\] for float32"),
    ("Llama, tied", False, partial(edited, change=lambda t: t.pop("model.embed_tokens.weight")),
     ValueError, r"does not have model\.embed_tokens\.weight, lm_head\.weight"),
    ("Llama, tied", False, partial(edited, change=lambda t: t.update({HEAD: t["model.embed_tokens.weight"] + 1})),
     ValueError, r"lm_head\.weight differs from the tensor of model\.embed_tokens\.weight, .*tie_word_embeddings=F"),
    ("Llama", False, partial(configured, quantization_config={"quant_method": "fp8"}),
     NotImplementedError, "is quantized"),
    ("Llama", False, partial(configured, num_attention_heads=4, num_key_value_heads=1, head_dim=8),
     ValueError, r"others than the model's model\.layers\.0\.self_attn\.k_proj"),
    ("Mixtral", True, lambda f: None, NotImplementedError, r"transformers would make .*experts.* then call fusedtp"),
]  # fmt: skip


def refused(group: ProcessGroup, folder: str) -> None:
    """Every rank is refused alike, before anything is allocated; then one rank only, and the others hear of it."""
    import transformers

    mesh = mesh_of(group)
    for i, (name, _, _, kind, said) in enumerate(BAD):
        head = getattr(transformers, f"{name.split(',')[0]}ForCausalLM")
        with pytest.raises(kind, match=said):
            fusedtp.from_pretrained(head, f"{folder}/{i}", mesh)
    for i in (2, 10):
        with pytest.raises(fusedtp.RanksDisagree, match=rf"done on rank 0, refused, .*{BAD[i][4]}"):
            fusedtp.from_pretrained(transformers.LlamaForCausalLM, f"{folder}/{i if group.rank() else 'right'}", mesh)
    # A folder that is right otherwise, but another checkpoint.
    with pytest.raises(fusedtp.RanksDisagree, match=r"lm_head\.weight: F32 .* rank 0, F16 \[41, 32\] on rank 1"):
        fusedtp.from_pretrained(
            transformers.LlamaForCausalLM, f"{folder}/{'half' if group.rank() else 'right'}", mesh, dtype=torch.float32
        )
    with pytest.raises(fusedtp.RanksDisagree, match="sequence_parallel: True on rank 0, False on rank 1"):
        fusedtp.from_pretrained(
            transformers.AutoModelForCausalLM, f"{folder}/right", mesh, sequence_parallel=not group.rank()
        )
    model: Any = fusedtp.from_pretrained(transformers.AutoModelForCausalLM, f"{folder}/right", mesh)
    assert model.dtype == torch.float32
    close(model.double()(input_ids=tokens_of()).logits, decoder("Llama")(input_ids=tokens_of()).logits, "logits")


def test_refused_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    for i, (name, several, change, _, _) in enumerate(BAD):
        saved(tmp_path / str(i), name, "20KB" if several else "1GB")
        change(tmp_path / str(i))
    right = saved(tmp_path / "right", "Llama", "1GB")
    right.half().save_pretrained(tmp_path / "half")
    pool.run(refused, str(tmp_path), world_size=2)


def meta_model(name: str, **changes: Any) -> Any:
    model = small(name, **changes)
    with torch.device("meta"):
        return type(model)(model.config).double().eval()


@pytest.mark.parametrize("way", ["set_model_state_dict", "load_state_dict", "assigned", "the rotary is real before"])
@on_ranks(2)
def test_on_meta_then_loaded(group: ProcessGroup, way: str) -> None:
    """Parallelize on meta keeps what no checkpoint has, and ties, through `to_empty`, however the state is loaded."""
    # With assign=True torch makes tied parameters two. The root of 64, a buffer of Gemma, has no rounding.
    for name in ("Llama" if way == "assigned" else "Llama, tied", "Gemma3", "GPT-2"):
        changes = {"hidden_size": 64, "tie_word_embeddings": way != "assigned"} if name == "Gemma3" else {}
        # GPT-2's packed linears take a state in one way.
        if name == "GPT-2" and way != "load_state_dict":
            continue
        dense, model = small(name, **changes), meta_model(name, **changes)
        if way.startswith("the rotary"):
            model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
        fusedtp.parallelize(model, mesh_of(group), src_data_rank=None)
        if way != "assigned":
            assert model.to_empty(device="cpu") is model
        state = copy.deepcopy(dense.state_dict())
        if way == "set_model_state_dict":
            set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
        else:
            model.load_state_dict(state, assign=way == "assigned")
        alike(model, dense, input_ids=tokens_of(), labels=tokens_of())


@on_ranks(2)
def test_what_cannot_be_computed_is_refused(group: ProcessGroup) -> None:
    mesh, lost = mesh_of(group), torch.ones(3, device="meta")
    for change, said in (
        (lambda m: m.model.layers[0].register_buffer("table", lost, persistent=False),
         r"layers\.0\.table of LlamaDecoderLayer has no value there, .* and LlamaModel\._init_weights does not"),
        (lambda m: setattr(m.model, "table", lost), r"model\.table of LlamaModel has no value there"),
    ):  # fmt: skip
        model = meta_model("Llama")
        change(model)
        with pytest.raises(NotImplementedError, match=said):
            fusedtp.parallelize(model, mesh)
        assert not any(isinstance(each, DTensor) for each in model.parameters())
    model = decoder("Llama") if group.rank() else meta_model("Llama")
    with pytest.raises(
        fusedtp.RanksDisagree, match=r"float64 \[41, 32\] on meta on rank 0, float64 \[41, 32\] on rank 1"
    ):
        fusedtp.parallelize(model, mesh)
