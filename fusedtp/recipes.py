"""How a layer's operands become float8: the recipes of torchao.float8, by name.

    tensorwise            one scale a tensor, the same on every rank that has a part of it; dy in e5m2, the rest in e4m3
    rowwise               one scale a row along what is contracted, a power of two; all in e4m3
    rowwise_with_gw_hp    as rowwise, but w in dx has one scale, and dw is not made in float8

Parameters and gradients stay in the dtype that they have; x, w and dy are cast for each product that they are in,
before they travel. e4m3 and e5m2 are those that the machine multiplies, OCP's or fnuz (`formats`). (torchao,
float8/config.py, `Float8LinearConfig.from_recipe_name`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from .float8 import largest_finite, quantized
from .formats import Formats
from .scaled import Quantized

Float8 = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
NAMES: tuple[str, ...] = get_args(Float8)


@dataclass(frozen=True)
class Cast:
    """One operand of a product, to `dtype`; with one scale if it is `whole`, else one for each index that is kept."""

    dtype: torch.dtype
    whole: bool = False
    power_of_two: bool = True

    def __call__(self, x: Tensor, contracted: tuple[int, ...], largest: Tensor | None = None) -> Quantized:
        """x with scales along the dims that are not contracted, or one made of `largest`."""
        most = largest_finite(x, contracted) if largest is None else largest.reshape((1,) * x.ndim)
        data, scale = quantized(x, most, self.dtype, power_of_two=self.power_of_two)
        return Quantized(data, scale.expand(data.shape), x.dtype, self.whole)


# By the result's name and the operand's.
Casts: TypeAlias = Mapping[str, Mapping[str, Cast]]


@cache
def of(name: str, formats: Formats) -> Casts:
    """What the recipe of this name casts to; of "" nothing."""
    row, one = Cast(formats.e4m3), Cast(formats.e4m3, whole=True, power_of_two=False)
    dy, w = Cast(formats.e5m2, whole=True, power_of_two=False), Cast(formats.e4m3, whole=True)
    recipes: Mapping[str, Casts] = {
        "": {},
        "tensorwise": {"y": {"x": one, "w": one}, "dx": {"dy": dy, "w": one}, "dw": {"x": one, "dy": dy}},
        "rowwise": {"y": {"x": row, "w": row}, "dx": {"dy": row, "w": row}, "dw": {"x": row, "dy": row}},
        "rowwise_with_gw_hp": {"y": {"x": row, "w": row}, "dx": {"dy": row, "w": w}, "dw": {}},
    }
    return recipes[name]
