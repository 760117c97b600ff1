"""Layouts of an operand: equal tensors with other strides and addresses, as the views of users have them.

    contiguous                      as torch.empty makes it
    offset                          the same at an odd address
    sliced                          columns of wider rows, as of a fused weight
    stepped                         each second row and third column, as one of two interleaved weights
    transposed                      contiguous with the dims in reverse; of one dim a column
    diagonal                        the columns run along a diagonal
    one row, one column, one value  expanded: strides of 0. One value is what `y.sum().backward()` passes for dy
    windows                         strides of 1, so that rows overlap, as Tensor.unfold makes them

The last four are of tensors with equal elements: `alike` makes one. Elements beside a view are NaN, so that reading
them shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Layouts of any values, and expanded layouts.
OF_ANY = ("contiguous", "offset", "sliced", "stepped", "transposed", "diagonal")
EXPANDED = ("one row", "one column", "one value")
LAYOUTS = (*OF_ANY, *EXPANDED, "windows")


def _first(x: Tensor, layout: str) -> Tensor:
    # The elements that an expanded layout repeats.
    if layout == "one row":
        return x[:1]
    return x[..., :1] if layout == "one column" else x[(slice(0, 1),) * x.ndim]


def alike(x: Tensor, layout: str) -> Tensor:
    """Return values of x's shape that the layout can hold: x, or some of x's elements, repeated."""
    if layout in EXPANDED:
        return _first(x, layout).expand(x.shape).clone()
    if layout == "windows" and x.numel():
        return x.reshape(-1).as_strided(x.shape, (1,) * x.ndim).clone()
    return x


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return a tensor that is equal to x, which `alike` has made for this layout, and shares no memory with x."""
    *rows, cols = x.shape
    if layout == "contiguous":
        return x.clone(memory_format=torch.contiguous_format)
    if layout in EXPANDED:
        return _first(x, layout).clone().expand(x.shape)
    if layout == "windows":
        return _windows(x)
    if layout == "transposed" and x.ndim > 1:
        return x.permute(*range(x.ndim)[::-1]).clone(memory_format=torch.contiguous_format).permute(
            *range(x.ndim)[::-1]
        )  # fmt: skip
    nan = x.new_full
    if layout == "offset":
        view = nan((x.numel() + 1,), torch.nan)[1:].view(x.shape)
    elif layout == "sliced":
        view = nan((*rows, cols + 5), torch.nan)[..., 3 : 3 + cols]
    elif layout == "stepped":
        view = nan((*(2 * length + 1 for length in rows), 3 * cols + 1), torch.nan)
        view = view[(*(slice(1, None, 2),) * len(rows), slice(1, None, 3))]
    elif layout == "transposed":
        view = nan((cols, 3), torch.nan)[:, 1]
    else:
        assert layout == "diagonal", layout
        view = nan((*rows, cols, cols), torch.nan).diagonal(dim1=-2, dim2=-1)
    return view.copy_(x)


def _windows(x: Tensor) -> Tensor:
    # Element [i, j, ..] is at i + j + ..
    places = torch.zeros(x.shape, dtype=torch.long)
    for dim, length in enumerate(x.shape):
        places += torch.arange(length).view(-1, *[1] * (x.ndim - 1 - dim))
    base = x.new_full((int(places.max()) + 1 if x.numel() else 0,), torch.nan)
    base[places.flatten()] = x.flatten()
    return base.as_strided(x.shape, (1,) * x.ndim)
