"""Linears of torchao, which float8 recipes are compared with."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from torch import nn


def converted(model: nn.Module, recipe: Any, under: str = "") -> nn.Module:
    """The model with torchao's Float8Linear in place of those linears whose names begin so."""
    with warnings.catch_warnings():
        # Its own sources have what newer Pythons and torch warn of.
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # A CPU has no matrix unit for float8: operands are cast, then multiplied wider.
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    made: nn.Module = convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name.startswith(under)
    )
    return made
