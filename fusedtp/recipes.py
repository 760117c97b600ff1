"""Recipes that cast a layer's operands to float8: those of torchao.float8, by name.

    tensorwise            one scale a tensor, the same on every rank that has a part of it; dy in e5m2, the rest in e4m3
    rowwise               one scale a row along the contraction, a power of two; all in e4m3
    rowwise_with_gw_hp    as rowwise, but w in dx has one scale, a power of two, and dw is not made in float8

Parameters and gradients keep their dtype; x, w and dy are cast for each product that they are in, before they travel.
e4m3 and e5m2 are those that the machine multiplies, OCP's or fnuz (`float8`). (torchao, float8/config.py,
`Float8LinearConfig.from_recipe_name`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from .float8 import Formats, largest_finite, quantized
from .scaled import Quantized

Float8 = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
NAMES: tuple[str, ...] = get_args(Float8)


@dataclass(frozen=True)
class Cast:
    """Cast of one operand of a product to `dtype`, with one scale if `whole`, else one for each index that is kept."""

    dtype: torch.dtype
    whole: bool = False
    power_of_two: bool = True

    def __call__(self, x: Tensor, contracted: tuple[int, ...], largest: Tensor | None = None) -> Quantized:
        """Return x with scales along the dims that are not contracted, or one scale made from `largest`."""
        most = largest_finite(x, contracted) if largest is None else largest.reshape((1,) * x.ndim)
        data, scale = quantized(x, most, self.dtype, power_of_two=self.power_of_two)
        return Quantized(data, scale.expand(data.shape), x.dtype, self.whole)


# Keys: the result's name, then the operand's.
Casts: TypeAlias = Mapping[str, Mapping[str, Cast]]


@cache
def of(name: str, formats: Formats) -> Casts:
    """Return the casts of the recipe with this name; "" has none."""
    row, one = Cast(formats.e4m3), Cast(formats.e4m3, whole=True, power_of_two=False)
    dy, w = Cast(formats.e5m2, whole=True, power_of_two=False), Cast(formats.e4m3, whole=True)
    recipes: Mapping[str, Casts] = {
        "": {},
        "tensorwise": {"y": {"x": one, "w": one}, "dx": {"dy": dy, "w": one}, "dw": {"x": one, "dy": dy}},
        "rowwise": {"y": {"x": row, "w": row}, "dx": {"dy": row, "w": row}, "dw": {"x": row, "dy": row}},
        "rowwise_with_gw_hp": {"y": {"x": row, "w": row}, "dx": {"dy": row, "w": w}, "dw": {}},
    }
    return recipes[name]
