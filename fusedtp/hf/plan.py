"""The plan of a Hugging Face decoder from its configuration alone: no weight is read or made."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ..styles.embeddings import FusedEmbeddingParallel
from ..styles.linears import FusedColwiseParallel, FusedRowwiseParallel
from .decoders import decoder_plan, matching, told, whole
from .tokens import TiedHead

# Limits: bytes and counts of a configuration, CPU time and memory to make the modules, characters of an error.
_MOST_BYTES, _MOST_MODULES, _MOST_SECONDS, _MOST_KIB, _MOST_TEXT = 4 << 20, 30_000, 60, 4 << 20, 400
_COUNT = re.compile("layer|label|expert|block|depth|stage")


def plan_of(config: str, world_size: int, *, sequence_parallel: bool = True) -> tuple[list[str], list[str]]:
    """Return the lines of a plan, and notes on keys of the configuration that do not show in it.

    config: a config.json or its folder, or a model's name on the hub. A line that begins with blanks belongs to the
    module of the line before. ValueError if no plan can be made; ImportError without transformers; OSError for a file
    that cannot be read.
    """
    try:
        with _bounded(), _without_torchao():
            model, notes = _without_weights(config)
            styles = decoder_plan(model, world_size, sequence_parallel=sequence_parallel)
            return list(_lines(model, styles, world_size)), notes
    except (ImportError, OSError, ValueError, NotImplementedError):
        raise
    except Exception as error:
        raise ValueError(f"{config}: no plan can be made of it: {_in_short(error)}") from error


def _without_weights(config: str) -> tuple[nn.Module, list[str]]:
    # Return the model on the meta device, and notes on keys of the file that do not show in the model.
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers import logging as logging_
    except ImportError as error:
        raise ImportError(
            f"fusedtp plan reads configurations by transformers ({error}): pip install transformers"
        ) from error
    # A name on the hub is one word, or two.
    is_path = config.endswith(".json") or config.count("/") > 1 or config.startswith((".", "/", "~"))
    if is_path and not Path(config).exists():
        raise FileNotFoundError(f"there is no such file or folder: {config}")
    is_file = Path(config).exists()
    given, online = _read(Path(config)) if is_file else {}, not is_file and _reaches_hub()
    auto: Any = AutoModelForCausalLM
    # transformers warns about running a model, which nothing here does.
    said: Any = logging_
    said.set_verbosity_error()
    try:
        # By default transformers asks the user whether to run code beside the file.
        known = AutoConfig.from_pretrained(config, trust_remote_code=False, local_files_only=not online)
        with torch.device("meta"):
            model: nn.Module = auto.from_config(known, trust_remote_code=False)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{config}: its model is made by code of its own (auto_map), which is never run"
            ) from error
        if not (is_file or online) and isinstance(error, OSError):
            raise ValueError(f"{config}: cannot reach the hub, and its cache has none: give a config.json") from error
        named = [name for name, value in given.items() if isinstance(error, KeyError) and value == error.args[0]]
        about = f"{named[0]}: " if named else ""
        raise ValueError(f"{config}: transformers makes no model of it: {about}{_in_short(error)}") from error
    return model, _notes(given, known)


def _reaches_hub() -> bool:
    # Ask once: huggingface_hub would try six times. A model in its cache needs no hub.
    from huggingface_hub import constants, get_session

    with contextlib.suppress(Exception):
        get_session().head(constants.ENDPOINT, timeout=10)
        return True
    return False


def _read(path: Path) -> dict[str, Any]:
    # Check the file before transformers reads it.
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file} is no file")
    if (size := file.stat().st_size) > _MOST_BYTES:
        raise ValueError(f"{file} has {size} bytes, a configuration at most {_MOST_BYTES}")

    def no_number(text: str) -> Any:
        raise ValueError(f"{text} is no number")

    try:
        given = json.loads(file.read_bytes(), parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {_in_short(error)}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{file} must be an object, got {type(given).__name__}")
    for part in (given, *(each for each in given.values() if isinstance(each, dict))):
        for name, value in part.items():
            if isinstance(value, int | float) and _COUNT.search(name) and not abs(value) <= _MOST_MODULES:
                raise ValueError(f"{file}: {name} must be at most {_MOST_MODULES}, got {value!r}")
    return given


def _notes(given: dict[str, Any], known: Any) -> list[str]:
    """Return notes on keys of the file that the configuration does not know or that change no module."""
    notes, usual = [], type(known)()
    # Keys that transformers stores under another name.
    taken = {"auto_map", "quantization_config", "torch_dtype", "rope_theta", "rope_scaling", "partial_rotary_factor"}
    names = {*usual.to_dict(), *vars(usual), *usual.attribute_map, *taken}
    if unknown := sorted(name for name in given if name not in names and not name.startswith("_")):
        listed = ", ".join(unknown[:20]) + f" and {len(unknown) - 20} more" * (len(unknown) > 20)
        notes.append(f"{type(known).__name__} does not know these, the plan is made without them: {listed}")
    if (quantized := given.get("quantization_config")) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        notes.append(
            f"quantization_config ({method or 'unnamed'}) is left out: the plan is that of unquantized weights"
        )
    if "auto_map" in given:
        notes.append(f"auto_map is left out: the model is transformers' own {type(known).__name__}, not the code's")
    return notes


def _in_short(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ..."


@contextlib.contextmanager
def _without_torchao() -> Iterator[None]:
    # transformers imports it if it can, which takes a second and prints warnings. No plan needs it.
    modules: dict[str, Any] = sys.modules
    if "torchao" in modules:
        yield
        return
    modules["torchao"] = None
    try:
        yield
    finally:
        del modules["torchao"]


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Raise TimeoutError or MemoryError if the body takes too much time or memory.

    The TimeoutError replaces any exception that other code converted it to.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # CPU time, as a busy machine takes longer for the same modules.
    ends, begun_kib = time.process_time() + _MOST_SECONDS, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    late = TimeoutError(
        f"the model's modules are not made within {_MOST_SECONDS} s of CPU time: the configuration may have very many"
    )

    def look(*_: object) -> None:
        if time.process_time() > ends:
            raise late
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun_kib > _MOST_KIB:
            raise MemoryError(f"the model's modules alone take more than {_MOST_KIB} KiB")

    before = signal.signal(signal.SIGALRM, look)
    # Repeat, as other code may swallow the exception.
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    try:
        yield
    except Exception as error:
        if time.process_time() > ends:
            raise late from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _lines(model: nn.Module, styles: dict[str, list[ParallelStyle]], world_size: int) -> Iterator[str]:
    yield f"{type(model).__name__} over {world_size} ranks"
    hidden, logits = 0, 0
    for pattern, each in styles.items():
        found = [module for _, module in matching(model, pattern)]
        # A packed linear is unpacked first, so its parts do not exist yet.
        kind = f"{len(found)} x {type(found[0]).__name__}" if found else "a part of the packed linear"
        yield f"{pattern or 'the model'}: {kind}"
        for style in each:
            yield f"    {style!r}"
            of_hidden, of_logits = _moved(style, found)
            hidden, logits = hidden + of_hidden, logits + of_logits
    yield "\nR is Replicate(): every rank has all; S(d) is Shard(d): split along dim d. Styles:"
    for made in dict.fromkeys(type(style) for each in styles.values() for style in each):
        first = (made.__doc__ or "").partition("\n")[0].removeprefix("Style ")
        yield f"- {made.__name__}: {first}"
    dtype = next(model.parameters()).dtype
    num_bytes, left = sum(each.nbytes for each in model.parameters()), whole(model, styles)
    share = sum(left.values())
    own = num_bytes * (share + (1 - share) / world_size)
    name = str(dtype).removeprefix("torch.")
    yield (
        f"\nParameters, {name}: {_size(num_bytes)} in all, about {_size(own)} on each rank, "
        f"{_size(4 * own)} with gradients and AdamW's two moments, all in {name}; activations are not counted."
    )
    if hidden and world_size > 1:
        each_bytes = dtype.itemsize * (world_size - 1) / world_size
        more = f", and {_size(logits * each_bytes)} for each token's logits" if logits else ""
        yield f"Each rank sends about {_size(hidden * each_bytes)} for each token in forward{more}."
    if left:
        yield told(left)


def _moved(style: ParallelStyle, modules: list[Any]) -> tuple[int, int]:
    """Return the elements of hidden states and of logits that a style moves for a token.

    A rank sends (n-1)/n of them. A row-parallel linear counts the gather before it too.
    """
    style = style.style if isinstance(style, TiedHead) else style
    if isinstance(style, FusedRowwiseParallel):
        return 2 * sum(getattr(each, "out_features", None) or each.nf for each in modules), 0
    if isinstance(style, FusedEmbeddingParallel):
        return 2 * sum(each.embedding_dim for each in modules), 0
    if isinstance(style, FusedColwiseParallel):
        gathered = 0 if style.input_layouts.is_replicate() else sum(each.in_features for each in modules)
        return gathered, sum(each.out_features for each in modules) if style.output_layouts.is_replicate() else 0
    return 0, 0


def _size(num_bytes: float) -> str:
    unit, scale = next(((unit, scale) for unit, scale in (("GB", 1e9), ("MB", 1e6)) if num_bytes >= scale), ("kB", 1e3))
    return f"{num_bytes / scale:.3g} {unit}"
