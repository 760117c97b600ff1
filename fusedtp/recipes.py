"""How a layer's operands become float8: the recipes of torchao.float8, by name.

    tensorwise            one scale a tensor, the same on every rank that has a part of it; dy in e5m2, the rest in e4m3
    rowwise               one scale a row along what is contracted, a power of two; all in e4m3
    rowwise_with_gw_hp    as rowwise, but w in dx has one scale, and dw is not made in float8

Parameters and gradients stay in the dtype that they have; x, w and dy are cast for each product that they are in,
before they travel. (torchao, float8/config.py, `Float8LinearConfig.from_recipe_name`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .scaled import Quantized, largest_finite, quantized

Float8 = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
NAMES: tuple[str, ...] = get_args(Float8)


@dataclass(frozen=True)
class Cast:
    """One operand of a product, to `dtype`; with one scale if it is `whole`, else one for each index that is kept."""

    dtype: torch.dtype = torch.float8_e4m3fn
    whole: bool = False
    power_of_two: bool = True

    def __call__(self, x: Tensor, contracted: tuple[int, ...], largest: Tensor | None = None) -> Quantized:
        """x with scales along the dims that are not contracted, or one made of `largest`."""
        most = largest_finite(x, contracted) if largest is None else largest.reshape((1,) * x.ndim)
        data, scale = quantized(x, most, self.dtype, power_of_two=self.power_of_two)
        return Quantized(data, scale.expand(data.shape), x.dtype, self.whole)


_ROW, _ONE = Cast(), Cast(whole=True, power_of_two=False)
_E5M2 = Cast(torch.float8_e5m2, whole=True, power_of_two=False)

# By recipe, the result's name and the operand's.
RECIPES: Mapping[str, Mapping[str, Mapping[str, Cast]]] = {
    "tensorwise": {
        "y": {"x": _ONE, "w": _ONE}, "dx": {"dy": _E5M2, "w": _ONE}, "dw": {"x": _ONE, "dy": _E5M2},
    },
    "rowwise": {"y": {"x": _ROW, "w": _ROW}, "dx": {"dy": _ROW, "w": _ROW}, "dw": {"x": _ROW, "dy": _ROW}},
    "rowwise_with_gw_hp": {"y": {"x": _ROW, "w": _ROW}, "dx": {"dy": _ROW, "w": Cast(whole=True)}, "dw": {}},
}  # fmt: skip
