"""Load a Hugging Face checkpoint into a decoder that is split over ranks: each rank reads only its part.

The model is made on the meta device and split there. Then every rank copies its own slices from the safetensors files
to its parameters. A rank never has more than its share of the model and one tensor.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..shards import chunk_sizes, offsets
from ..styles.grouped import Unpacked, features
from ..styles.linears import check_mesh
from ..torch_private import local_of
from . import meta
from .decoders import parallelize
from .inputs import compare_given

_OP = "from_pretrained"
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Number of names in a message.
_TOLD = 4
# Buffers of older checkpoints, which transformers ignores in every model.
_OLD = r"rotary_emb\.inv_freq"


def from_pretrained(
    model_class: Any, path: str | PathLike[str], device_mesh: DeviceMesh, *, config: Any = None,
    dtype: torch.dtype | None = None, **options: Any,
) -> nn.Module:  # fmt: skip
    """Load a Hugging Face checkpoint into a model that is split over a 1-D mesh; each rank reads only its part.

    - `model_class`: a class of transformers, such as LlamaForCausalLM or AutoModelForCausalLM.
    - `path`: the checkpoint's folder, with config.json and safetensors files. Every rank reads it.
    - `config`: by default the folder's.
    - `dtype`: of the parameters, by default the configuration's, then the checkpoint's.
    - `options`: those of `parallelize`, except `src_data_rank`.

    A rank needs memory for its share of the parameters and one tensor more. The result is that of `parallelize` for the
    whole model, in evaluation mode. Tied weights stay tied, packed ones are taken apart, and buffers that are not in
    checkpoints are computed.

    Raises, before anything is allocated: FileNotFoundError for a missing file; ValueError for a corrupt head of a file,
    and for tensors that are missing, unknown or have other shapes than the model's; NotImplementedError for quantized
    checkpoints and for tensors that transformers would convert, such as experts; the errors of `parallelize`. If only
    some ranks have an error, or checkpoints differ, the others raise RanksDisagree. A tensor that cannot be read, and
    two unlike tensors for one tied parameter, are errors on every rank while loading.
    """
    check_mesh(device_mesh)
    group, described = device_mesh.get_group(), dict[str, str]()
    with ExitStack() as files:
        with on_all_ranks(group, "checkpoint", described, _OP):
            checkpoint = _Checkpoint(Path(path), files)
            described |= checkpoint.described
            model = _on_meta(model_class, Path(path), config, dtype or checkpoint.dtype, asked_dtype=dtype)
            keys = checkpoint.keys_of(model)
        tied = {name: names[0] for names in meta.ties(model) for name in names}
        parallelize(model, device_mesh, src_data_rank=None, **options)
        model.to_empty(device=device_mesh.device_type)
        with on_all_ranks(group, "tensors", {}, _OP):
            checkpoint.fill(model, keys, tied)
    whole: nn.Module = model.eval()
    return whole


@contextmanager
def on_all_ranks(group: ProcessGroup, step: str, compared: Mapping[str, str], op: str) -> Iterator[None]:
    """Make an error of one rank in the block an error of all, which would wait for this rank, and compare values."""
    try:
        yield
    except Exception as error:
        compare_given(group, {step: f"refused, {error}"}, op)
        raise
    compare_given(group, {step: "done", **compared}, op)


def _on_meta(
    model_class: Any, folder: Path, config: Any, stored: torch.dtype | None, asked_dtype: torch.dtype | None
) -> Any:
    # Make the model without memory, as transformers does before it loads.
    from transformers import AutoConfig, GenerationConfig

    if config is None:
        reads = AutoConfig if hasattr(model_class, "from_config") else model_class.config_class
        config = reads.from_pretrained(folder)
    config = copy.deepcopy(config)
    if getattr(config, "quantization_config", None) is not None:
        raise NotImplementedError(
            f"the checkpoint in {folder} is quantized (quantization_config): from_pretrained loads float weights; its "
            "option float8 casts while it multiplies"
        )
    dtype = asked_dtype or config.dtype or stored or torch.get_default_dtype()
    make = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
    with torch.device("meta"):
        model = make(config, dtype=dtype)
    for kept, narrow in (
        ("_keep_in_fp32_modules", (torch.float16,)), ("_keep_in_fp32_modules_strict", (torch.float16, torch.bfloat16)),
    ):  # fmt: skip
        names: Any = getattr(model, kept, None) if dtype in narrow else None
        for name, tensor in model.state_dict(keep_vars=True).items() if names else ():
            if any(re.search(rf"(^|\.){each}(\.|$)", name) for each in names):
                tensor.data = tensor.data.float()
    if (folder / "generation_config.json").exists() and hasattr(model, "generation_config"):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


class _Checkpoint:
    # The safetensors files of a folder: tensors by their names there, read in slices.

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self.folder = folder
        self._stored: dict[str, Any] = {}
        # Each tensor's dtype and shape as text.
        self.described: dict[str, str] = {}
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is not a folder with a checkpoint: for a model of the hub, pass what "
                "huggingface_hub.snapshot_download(name) returns"
            )
        for name, keys in self._listed().items():
            for key, stored in self._opened(folder / name, keys, files).items():
                self._stored[key] = stored
                self.described[key] = f"{stored.get_dtype()} {list(stored.get_shape())}"

    def _listed(self) -> Mapping[str, list[str] | None]:
        # The names of the files, with their tensors' names; None for all that a file has.
        index = self.folder / _INDEX
        if not index.exists():
            if (self.folder / _ONE).exists():
                return {_ONE: None}
            files = ", ".join(sorted(each.name for each in self.folder.iterdir())[:8]) or "nothing"
            raise FileNotFoundError(
                f"{self.folder} has neither {_INDEX} nor {_ONE}, it has {files}: save the model there with "
                "save_pretrained of transformers"
            )
        try:
            listed: dict[str, list[str]] = {}
            for key, name in json.loads(index.read_text())["weight_map"].items():
                if Path(name).name != name:
                    raise ValueError(f"{name!r} is no name of a file in the folder")
                listed.setdefault(name, []).append(key)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from error
        return listed

    def _opened(self, path: Path, keys: list[str] | None, files: ExitStack) -> dict[str, Any]:
        from safetensors import SafetensorError, safe_open

        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing" + f": {_INDEX} lists it" * (keys is not None))
        try:
            opened = files.enter_context(safe_open(path, framework="pt", device="cpu"))
            return {key: opened.get_slice(key) for key in (opened.keys() if keys is None else keys)}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not the safetensors file that it should be: {error}; copy it anew") from error

    @property
    def dtype(self) -> torch.dtype | None:
        # The dtype of the first tensor of floats.
        return next((_DTYPES[each.get_dtype()] for each in self._stored.values() if each.get_dtype() in _DTYPES), None)

    def keys_of(self, model: Any) -> dict[str, str]:
        """Return the checkpoint's names by the model's names; an error if the two do not fit."""
        wanted, keys = model.state_dict(), dict[str, str]()
        unknown: list[str] = []
        for key, name in _renamed(model, [*self._stored], wanted).items():
            if name not in wanted:
                unknown.append(key)
            elif name in keys:
                raise ValueError(f"{self.folder}: {keys[name]} and {key} are both {name} of {type(model).__name__}")
            else:
                keys[name] = key
        ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), _OLD]
        unknown = [key for key in unknown if not any(re.search(each, key) for each in ignored)]
        shared = {name: names for names in meta.ties(model) for name in names}
        missing = [name for name in wanted if not any(each in keys for each in shared.get(name, [name]))]
        others = [
            f"{key}, {self.described[key]} for {str(wanted[name].dtype).removeprefix('torch.')} "
            f"{list(wanted[name].shape)}"
            for name, key in keys.items()
            if self._stored[key].get_shape() != [*wanted[name].shape]
            or (self._stored[key].get_dtype() in _DTYPES) != wanted[name].is_floating_point()
        ]
        faults = {"does not have": missing, "has unknown": unknown, "has others than the model's": others}
        if problems := "; ".join(f"{fault} {_some(names)}" for fault, names in faults.items() if names):
            raise ValueError(
                f"the checkpoint in {self.folder} is not one of this {type(model).__name__}: it {problems}. Pass the "
                "class and the configuration with which it was saved"
            )
        return keys

    def fill(self, model: nn.Module, keys: Mapping[str, str], tied: Mapping[str, str]) -> None:
        """Copy this rank's part of every tensor to the model, which is split."""
        packed = {
            f"{path}.parts.{i}.": (path, sum(features(each) for each in module.parts[:i]), module.transposed)
            for path, module in model.named_modules() if isinstance(module, Unpacked)
            for i in range(len(module.parts))
        }  # fmt: skip
        done = set[str]()
        for name, tensor in model.state_dict().items():
            owner, _, own = name.rpartition(".")
            path, first, transposed = packed.get(f"{owner}.", (owner, 0, False))
            whole = f"{path}.{own}" if path else own
            if whole not in keys:
                # Another name of the same parameter is in the checkpoint.
                continue
            value = self._part(keys[whole], tensor, first, transposed)
            mine = local_of(tensor) if isinstance(tensor, DTensor) else tensor
            one = tied.get(whole, whole) + name.removeprefix(path)
            if one in done and not torch.equal(mine, value.to(mine)):
                raise ValueError(
                    f"{self.folder}: {keys[whole]} differs from the tensor of {tied[whole]}, and in the model both are "
                    "one parameter: set tie_word_embeddings=False in the configuration"
                )
            done.add(one)
            mine.copy_(value)
            # Not kept while the next one is read.
            del value

    def _part(self, key: str, tensor: Tensor, first: int, transposed: bool) -> Tensor:
        # This rank's part of a tensor of the checkpoint, whose rows from `first` on are those of `tensor`.
        ranges = [(0, length) for length in tensor.shape]
        if isinstance(tensor, DTensor) and isinstance(placement := tensor.placements[0], Shard):
            mesh = tensor.device_mesh
            sizes, rank = chunk_sizes(tensor.shape[placement.dim], mesh.size()), mesh.get_local_rank()
            ranges[placement.dim] = offsets(sizes)[rank], offsets(sizes)[rank + 1]
        if ranges:
            ranges[0] = first + ranges[0][0], first + ranges[0][1]
        flip = transposed and len(ranges) == 2
        value: Tensor = self._stored[key][tuple(slice(*each) for each in (ranges[::-1] if flip else ranges))]
        return value.t() if flip else value


# The names of safetensors for dtypes of floats that a parameter may be cast from.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _renamed(model: Any, keys: list[str], wanted: Mapping[str, Tensor]) -> dict[str, str]:
    # The names that transformers gives to a checkpoint's tensors. These functions are private; read in 5.0 to 5.24.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters: Any = [each for each in transforms if not isinstance(each, WeightRenaming)]
    prefix, named = model.base_model_prefix, dict[str, str]()
    for key in keys:
        name, converted = rename_source_key(key, renamings, converters, prefix, wanted)  # type: ignore[arg-type]
        if name not in wanted and key in wanted:
            name, converted = key, None
        if converted is not None and name in wanted:
            raise NotImplementedError(
                f"from_pretrained reads tensors as they are, and transformers would make {name} of {key} and others: "
                f"load the whole model with {type(model).__name__}.from_pretrained, then call fusedtp.parallelize"
            )
        named[key] = name
    return named


def _some(names: list[str]) -> str:
    more = len(names) - _TOLD
    return ", ".join(names[:_TOLD]) + (f" and {more} more" if more > 0 else "")
