"""Problems for the machine: sizes, memory layouts of operands, and an op's launches on one virtual rank."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedtp.float8 import widened
from fusedtp.scaled import Quantized
from fusedtp.shards import even_sizes
from fusedtp.workspaces.workspace import Workspace

from .. import direct

Phases = Generator[None, None, Any]
# An op on virtual ranks: a function from workspace and rank to its phases; expected results and allowed errors by rank.
Op = tuple[Callable[[Workspace, int], Phases], list[Tensor], list[Tensor]]


class Both(tuple[Tensor, ...]):
    """Several results of an op, not written yet."""


def value_of(result: Any) -> Tensor:
    """Return an op's results in one tensor."""
    if isinstance(result, Both):
        return torch.cat([value_of(each).flatten() for each in result])
    # Gathered float8 rows for the library: their values in float32.
    return widened(result.data) * result.scale if isinstance(result, Quantized) else result


@dataclass(frozen=True)
class Shape:
    """Sizes of the whole problem, the split of rows ("even", "uneven", "empty"), and memory layouts of operands.

    a, b: "rows" or "columns" are contiguous; "strided": neither.
    """

    M: int
    N: int
    K: int
    split: str = "uneven"
    a: str = "rows"
    b: str = "columns"
    bias: bool = True


def split(length: int, world_size: int, how: str, unit: int = 1) -> tuple[int, ...]:
    """Return shares of `length`: "empty" leaves rank 1 without elements, "uneven" with less than half of its share."""
    share = [unit * n for n in even_sizes(length // unit, world_size)]
    share[0] += length - sum(share)
    if how != "even":
        moved = share[1] if how == "empty" else share[1] // (2 * unit) * unit
        share[0], share[1] = share[0] + moved, share[1] - moved
    return tuple(share)


def laid_out(x: Tensor, how: str) -> Tensor:
    """Return the same values with contiguous rows or columns, or neither."""
    if not x.numel():
        # A slice of a larger tensor: torch would give an empty tensor other strides, for which other code is compiled.
        whole = laid_out(x.new_empty([length or 16 for length in x.shape]), how)
        return whole[: x.shape[0], : x.shape[1]]
    if how == "strided":
        return torch.stack([x, x], -1).flatten(1)[:, ::2]
    return x.contiguous() if how == "rows" else x.t().contiguous().t()


def launches_of(op: str, ws: Workspace, *operands: Any, **options: Any) -> Phases:
    """Launch a task on one rank, and return its results at the end."""
    outs = yield from direct.results(op, ws, *operands, **options)
    return outs[0] if len(outs) == 1 else Both(outs)
