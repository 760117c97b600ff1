"""float8 operands: 8-bit data with scales that restore the range.

    value = data * scale        scale () for the whole tensor, [.., 1] one for each row,
                                [.., ceil(K / 32)] in e8m0 one for each block of 32 along the row: mxfp8

A product multiplies the data alone, in float32, and is scaled before it is rounded: (a @ b) * a.scale * b.scale. So a
scale must be constant along the contraction. If ranks have different parts of the contraction, as in a reduce-scatter,
each rank scales its own terms before they are added; scales need not agree. Block scales vary along the contraction:
each block is multiplied with its scale, by a matrix unit that supports this or beforehand.

Callers pass `Scaled`. Schedules use `Quantized`: a matrix with its dims in any order, and a scale for every element
(strides of 0, so it takes no memory).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from . import float8, groups
from .float8 import BLOCK, E8M0, Formats, along_blocks, in_blocks, largest_finite, quantized, widened
from .torch_private import c10d

Recipe = Literal["tensorwise", "rowwise", "mxfp8"]

# A matrix of an op: a tensor, or `Quantized`, which has the methods that schedules need.
Matrix: TypeAlias = Any

# A received row is its data padded to 16 bytes, then its scale in 16 more bytes: the next row is aligned.
SCALE_BYTES = 16


@dataclass(frozen=True, eq=False, slots=True)
class Scaled:
    """float8 data [.., K] with a scale.

    The scale is float32, () for the whole tensor or [.., 1], one for each row. Or it is float8_e8m0fnu, [.., ceil(K /
    32)], one for each 32 elements of a row. The values are data * scale. Functions take one `Scaled` for x and one for
    each weight. A `Scaled` gets no gradient.
    """

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return data * scale, computed in float32 and rounded to `dtype`."""
        self.check()
        scale = self.scale
        if scale.dtype == E8M0:
            scale = along_blocks(scale, self.data.shape[-1], -1)
        return (widened(self.data) * scale).to(dtype)

    def check(self, name: str = "Scaled") -> None:
        """Raise ValueError if the scale's dtype or shape do not fit the data; `name` is the operand's in errors."""
        data, scale = self.data, self.scale
        if data.dtype not in float8.FLOAT8:
            raise ValueError(f"{name}.data must be one of {', '.join(map(str, float8.FLOAT8))}, got {data.dtype}")
        rows = (*data.shape[:-1], 1)
        if scale.dtype == E8M0:
            blocks = (*data.shape[:-1], -(-data.shape[-1] // BLOCK)) if data.ndim else ()
            if scale.shape != blocks:
                raise ValueError(
                    f"{name}.scale in {E8M0} must be of shape {blocks}, one for each {BLOCK} of a row of "
                    f"{tuple(data.shape)}, got {tuple(scale.shape)}"
                )
        elif scale.dtype != torch.float32 or (scale.ndim and scale.shape != rows):
            raise ValueError(
                f"{name}.scale must be torch.float32 of shape () or {rows}, one for each row of {tuple(data.shape)}, "
                f"or {E8M0}, got {scale.dtype} of shape {tuple(scale.shape)}"
            )

    def narrow(self, dim: int, start: int, length: int) -> Scaled:
        """Return a view of these elements along `dim` with their scales, like torch.narrow.

        A row with scales of blocks is cut between blocks of 32 only: ValueError for another start, or for another end
        than that of the row.
        """
        self.check()
        data = self.data.narrow(dim, start, length)
        dim, size = dim % self.data.ndim, self.data.shape[dim]
        start = start % size if start < 0 else start
        if not self.scale.ndim or (dim == self.data.ndim - 1 and self.scale.dtype != E8M0):
            return Scaled(data, self.scale)
        if dim < self.data.ndim - 1:
            return Scaled(data, self.scale.narrow(dim, start, length))
        if start % BLOCK or (length % BLOCK and start + length != size):
            raise ValueError(
                f"with a scale for each {BLOCK} elements a row is cut at multiples of {BLOCK}, got {start} to "
                f"{start + length} of {size}"
            )
        return Scaled(data, self.scale.narrow(dim, start // BLOCK, -(-length // BLOCK)))

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Scaled, ...]:
        """Return parts of these lengths along `dim`, or of `sizes` each, cut by `narrow`, like torch.split."""
        self.check()
        size = self.data.shape[dim]
        if isinstance(sizes, int):
            if sizes < 1:
                raise ValueError(f"sizes must be 1 or more, or the parts' lengths, got {sizes}")
            sizes = [min(sizes, size - begin) for begin in range(0, size, sizes)] or [0]
        if sum(sizes) != size:
            raise ValueError(f"sizes must add up to {size}, the length of dim {dim}, got {tuple(sizes)}")
        return tuple(self.narrow(dim, sum(sizes[:i]), each) for i, each in enumerate(sizes))


def scaled(
    x: Tensor, recipe: Recipe = "rowwise", *, dtype: torch.dtype | None = None, group: Any = None,
    power_of_two: bool = False,
) -> Scaled:  # fmt: skip
    """Cast x [.., K] to float8 with scales: the largest finite magnitude becomes the largest that `dtype` has.

    - `recipe`: "rowwise", one scale for each row. "tensorwise", one scale. "mxfp8", one for each 32 elements of a row,
      always a power of two.
    - `dtype`: one of `float8.FLOAT8`. By default the e4m3 that x's machine multiplies: e4m3fnuz on AMD's gfx942,
      e4m3fn elsewhere. mxfp8 is OCP's, and gfx942 has no units for it: its default is e4m3fn on every machine.
    - `group`: for "tensorwise". The scale is that of the largest magnitude on any of its ranks, which exchange one
      number through torch.distributed.
    - `power_of_two`: whether a scale is rounded up to a power of two, and so adds no rounding of its own (as the
      rowwise recipes of torchao do).

    All zeros have the scale 1. NaN stays NaN. An infinity stays one in e5m2, and is NaN in the others, which have none.
    Neither affects a scale, so a value that is not finite spoils its own row of a product only. Scales are normal
    numbers: a magnitude too small for float8 with the smallest scale becomes 0.

    Raises ValueError or TypeError for arguments that do not fit.
    """
    _check(x, recipe, dtype, group, power_of_two)
    if dtype is None:
        dtype = (float8.OCP if recipe == "mxfp8" else float8.native(x.device)).e4m3
    if recipe == "mxfp8":
        return Scaled(*in_blocks(x.detach(), dtype))
    if recipe == "rowwise":
        most = largest_finite(x.detach(), (x.ndim - 1,))
    else:
        most = largest_finite(x.detach())
        if group is not None:
            name = groups.resolve(group).group_name
            most = c10d.wait_tensor(c10d.all_reduce(most.reshape(1), "max", name)).reshape(())
    return Scaled(*quantized(x.detach(), most, dtype, power_of_two=power_of_two))


def check_dense(name: str, value: object) -> None:
    """Raise TypeError unless the value is a dense tensor: not for a `Scaled`, a nested, quantized or sparse tensor."""
    if isinstance(value, Scaled):
        raise TypeError(
            f"{name} must be a tensor here, got Scaled: the linear functions take x and every weight Scaled, or neither"
        )
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.is_nested:
        got, use = "a nested one", f"torch.nested.to_padded_tensor({name}, 0.0)"
    elif value.is_quantized:
        got, use = f"a quantized one, {value.dtype}", f"{name}.dequantize()"
    elif value.layout is not torch.strided:
        got, use = f"one of layout {value.layout}", f"{name}.to_dense()"
    else:
        return
    raise TypeError(f"{name} must be a dense tensor, got {got}: use {use}")


def _check(x: Any, recipe: Any, dtype: Any, group: Any, power_of_two: Any) -> None:
    check_dense("x", x)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"x must be a tensor of float32, bfloat16 or float16, got {x.dtype}")
    if x.ndim < 1:
        raise ValueError("x must have at least 1 dimension, [.., K], got a scalar")
    if recipe not in get_args(Recipe):
        raise ValueError(f"recipe must be one of {', '.join(get_args(Recipe))}, got {recipe!r}")
    if dtype is not None and dtype not in float8.FLOAT8:
        raise ValueError(f"dtype must be None or one of {', '.join(map(str, float8.FLOAT8))}, got {dtype}")
    if group is not None and recipe != "tensorwise":
        raise ValueError(f"group is for recipe 'tensorwise': a row's scale is of that row alone, got {recipe!r}")
    if not isinstance(power_of_two, bool):
        raise TypeError(f"power_of_two must be True or False, got {power_of_two!r}")


@dataclass(eq=False, slots=True)
class Quantized:
    """`Scaled` operand of an op, with its dims in any order.

    - `dtype`: of the products.
    - `scale`: of data's shape, with strides of 0 along the contraction.
    - `whole`: whether the scale is the same everywhere, on all ranks.
    - `blocks`: the contraction's dim, if scales are block scales; else None. With block scales, scale is bytes, and a
      32nd as long as data along that dim.
    """

    data: Tensor
    scale: Tensor
    dtype: torch.dtype
    whole: bool = False
    blocks: int | None = None

    def _like(self, data: Tensor, scale: Tensor, blocks: int | None = None) -> Quantized:
        return Quantized(data, scale, self.dtype, self.whole, blocks)

    @classmethod
    def of(cls, x: Scaled, out: torch.dtype) -> Quantized:
        if x.scale.dtype == E8M0:
            return cls(x.data, x.scale.view(torch.uint8), out, blocks=x.data.ndim - 1)
        return cls(x.data, x.scale.expand(x.data.shape), out)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def device(self) -> torch.device:
        return self.data.device

    def stride(self, dim: int) -> int:
        return self.data.stride(dim)

    def permute(self, order: tuple[int, ...]) -> Quantized:
        blocks = None if self.blocks is None else order.index(self.blocks)
        return self._like(self.data.permute(order), self.scale.permute(order), blocks)

    def reshape(self, shape: Sequence[int]) -> Quantized:
        if self.blocks is None:
            return self._like(self.data.reshape(shape), self.scale.reshape(shape))
        # Dims before or after the contraction are merged or split; the contraction is first or last.
        blocks = 0 if self.blocks == 0 else len(shape) - 1
        scales = [self.scale.shape[self.blocks] if dim == blocks else length for dim, length in enumerate(shape)]
        return self._like(self.data.reshape(shape), self.scale.reshape(scales), blocks)

    def t(self) -> Quantized:
        return self._like(self.data.t(), self.scale.t(), None if self.blocks is None else 1 - self.blocks)

    def __getitem__(self, part: slice | tuple[slice, ...]) -> Quantized:
        """Return a slice of each of the first dims; a slice of the contraction has whole blocks, except at the end."""
        if self.blocks is None:
            return self._like(self.data[part], self.scale[part])
        scales = []
        for dim, its in enumerate(part if isinstance(part, tuple) else (part,)):
            if dim == self.blocks:
                begin, end, _ = its.indices(self.data.shape[dim])
                assert begin % BLOCK == 0 or begin == end
                its = slice(begin // BLOCK, -(-end // BLOCK))
            scales.append(its)
        return self._like(self.data[part], self.scale[tuple(scales)], self.blocks)

    def new_empty(self, *shape: Any) -> Tensor:
        """Return a tensor for a product of this operand."""
        return self.data.new_empty(*shape, dtype=self.dtype)

    def row_scales(self) -> Tensor:
        """Return the scales [R] of a matrix whose contraction is its columns."""
        # Without columns there are no scales to read, and nothing to scale.
        return self.scale[:, 0].contiguous() if self.shape[1] else self.scale.new_ones(self.shape[0])

    def for_kernels(self) -> Tensor:
        """Return the scales of a matrix whose contraction is its columns, as `operands.Scales` has them."""
        if self.blocks is None:
            return self.row_scales()
        rows, count = self.scale.shape
        padded = scale_bytes(self.shape[1])
        if padded == count and self.scale.is_contiguous():
            return self.scale
        scales = self.scale.new_zeros(rows, padded)
        scales[:, :count] = self.scale
        return scales

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the operand of a product in `dtype`: the data, times block scales if any."""
        if self.blocks is None:
            return widened(self.data).to(dtype)
        if self.blocks == 0:
            return self.t().widened(dtype).t()
        length = self.shape[1]
        if dtype == torch.float32 or length % BLOCK:
            return (widened(self.data) * along_blocks(self.scale, length, 1)).to(dtype)
        # In place, which reads and writes 7 bytes an element, a quarter of the above.
        wide = self.data.to(dtype)
        wide.unflatten(1, (length // BLOCK, BLOCK)).mul_(self.scale.view(E8M0).to(dtype)[..., None])
        return wide


def _up_to_16(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def scale_bytes(cols: int) -> int:
    """Return the bytes from one row's block scales to the next row's: those of `cols` elements, padded to 16."""
    return _up_to_16(-(-cols // BLOCK))


def packed_bytes(cols: int, *, blocks: bool = False) -> int:
    """Return the bytes of a row of `cols` elements with its scale, or with those of its blocks."""
    return _up_to_16(cols) + (scale_bytes(cols) if blocks else SCALE_BYTES)


def _packed_scales(rows: Tensor, like: Quantized, cols: int) -> Tensor:
    # Return the scales in rows of bytes: one scale at the row's end, or block scales after the data. Zeros follow block
    # scales, which are read as scales of the elements past the row's end.
    if like.blocks is not None:
        at = _up_to_16(cols)
        return rows[:, at : at + scale_bytes(cols)]
    at = rows.shape[1] - SCALE_BYTES
    return rows[:, at : at + 4].view(torch.float32)


def pack_into(rows: Tensor, x: Quantized) -> None:
    """Store x [R, C] and its rows' scales into `rows` [R, packed_bytes(..)] of bytes."""
    rows[:, : x.shape[1]].view(x.data.dtype).copy_(x.data)
    scales = x.for_kernels()
    _packed_scales(rows, x, x.shape[1]).copy_(scales if x.blocks is not None else scales[:, None])


def unpacked(rows: Tensor, cols: int, like: Quantized) -> Quantized:
    """Return a view of `cols` columns that `pack_into` has stored in `rows`."""
    data, scale = rows[:, :cols].view(like.data.dtype), _packed_scales(rows, like, cols)
    if like.blocks is not None:
        return Quantized(data, scale[:, : -(-cols // BLOCK)], like.dtype, blocks=1)
    return Quantized(data, scale.expand(rows.shape[0], cols), like.dtype, like.whole)


def by_columns(x: Matrix) -> Matrix:
    """Return x [R, C] as an operand that is contracted over its rows: with a scale for each column.

    Only float8 with different row scales changes: the data is rounded again. If both scales are powers of two, only
    numbers that become too small are lost.
    """
    if type(x) is not Quantized or x.whole or x.blocks == 0:
        return x
    # One row has the same scale along it whatever its stride: a dim of one element may have any.
    if x.blocks is None and (x.shape[0] == 1 or x.scale.stride(0) == 0):
        return x
    assert x.blocks is None, "what is contracted along its rows has no scales of blocks"
    wide = widened(x.data) * x.row_scales()[:, None]
    data, scale = quantized(wide, largest_finite(wide, (0,)), x.data.dtype, power_of_two=True)
    return Quantized(data, scale.expand(data.shape), x.dtype)


# Recipes that cast operands: those of torchao.float8, by name.
Float8 = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
RECIPES: tuple[str, ...] = get_args(Float8)


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
def casts_of(name: str, formats: Formats) -> Casts:
    """Return the casts of a recipe of torchao.float8 (`Float8LinearConfig.from_recipe_name`); "" has none.

        tensorwise            one scale a tensor, the same on every rank that has a part of it; dy in e5m2, others e4m3
        rowwise               one scale a row along the contraction, a power of two; all in e4m3
        rowwise_with_gw_hp    as rowwise, but w in dx has one scale, a power of two, and dw is not made in float8

    Parameters and gradients keep their dtype; x, w and dy are cast for each product that they are in, before they
    travel. `formats` has the machine's e4m3 and e5m2.
    """
    row, one = Cast(formats.e4m3), Cast(formats.e4m3, whole=True, power_of_two=False)
    dy, w = Cast(formats.e5m2, whole=True, power_of_two=False), Cast(formats.e4m3, whole=True)
    recipes: Mapping[str, Casts] = {
        "": {},
        "tensorwise": {"y": {"x": one, "w": one}, "dx": {"dy": dy, "w": one}, "dw": {"x": one, "dy": dy}},
        "rowwise": {"y": {"x": row, "w": row}, "dx": {"dy": row, "w": row}, "dw": {"x": row, "dy": row}},
        "rowwise_with_gw_hp": {"y": {"x": row, "w": row}, "dx": {"dy": row, "w": w}, "dw": {}},
    }
    return recipes[name]
