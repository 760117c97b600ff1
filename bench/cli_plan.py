"""`fusedtp plan`: how a Hugging Face decoder would be split, from its configuration; no weight is read or made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import arguments

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle


def plan(
    config: Annotated[str, typer.Argument(help="A config.json or its folder, or a model's name on the hub.")],
    world_size: Annotated[int, typer.Option(help="Ranks to split over.")] = 2,
    sequence_parallel: Annotated[bool, typer.Option(help="Split tokens between the matmuls.")] = True,
) -> None:
    """Show what fusedtp.parallelize would make of a Hugging Face decoder: a style for each module, or why it cannot."""
    from fusedtp.styles.decoders import decoder_plan

    arguments.at_least(1, world_size, "--world-size")
    try:
        model = _without_weights(config)
        styles = decoder_plan(model, world_size, sequence_parallel=sequence_parallel)
    except (ImportError, OSError, ValueError, NotImplementedError) as error:
        typer.echo(f"{error}", err=True)
        raise typer.Exit(2) from error
    _show(model, styles, f"{type(model).__name__} over {world_size} ranks")


def _without_weights(config: str) -> nn.Module:
    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ImportError(f"fusedtp plan reads configurations by transformers: {error}") from error
    # A name on the hub is one word, or two.
    is_path = config.endswith(".json") or config.count("/") > 1 or config.startswith((".", "/", "~"))
    if is_path and not Path(config).exists():
        raise FileNotFoundError(f"there is no such file or folder: {config}")
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: nn.Module = auto.from_config(AutoConfig.from_pretrained(config))
    return model


def _show(model: nn.Module, styles: dict[str, list[ParallelStyle]], title: str) -> None:
    from fusedtp.styles.decoders import matching, told, whole

    from .tables import Table

    lines = []
    for pattern, each in styles.items():
        found = [module for _, module in matching(model, pattern)]
        # What is packed is taken apart first; its parts are not there yet.
        kind = f"{len(found)} x {type(found[0]).__name__}" if found else "a part of the packed one"
        lines += [{"module": pattern, "is": kind, "style": repr(style)} for style in each]
    console = arguments.console(160)
    console.print(Table.of("plan", title, lines).printed(sections=False))
    if left := whole(model, styles):
        console.print(told(left), highlight=False)
