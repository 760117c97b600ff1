"""Problems for the machine: sizes, how operands lie in memory, and an op's launches on one virtual rank."""

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
# An op on virtual ranks: rank -> its phases; and per rank what it must give, with the error allowed.
Op = tuple[Callable[[Workspace, int], Phases], list[Tensor], list[Tensor]]


class Both(tuple[Tensor, ...]):
    """Several results of an op, which nothing has written yet."""


def value_of(result: Any) -> Tensor:
    """What an op has given, in one tensor."""
    if isinstance(result, Both):
        return torch.cat([value_of(each).flatten() for each in result])
    # Float8 rows that were gathered for the library: what they stand for, in float32.
    return widened(result.data) * result.scale if isinstance(result, Quantized) else result


@dataclass(frozen=True)
class Shape:
    """Sizes of the whole problem, how rows are split ("even", "uneven", "empty"), and how operands lie in memory.

    a, b: "rows" or "columns", which of them are contiguous; "strided", none.
    """

    M: int
    N: int
    K: int
    split: str = "uneven"
    a: str = "rows"
    b: str = "columns"
    bias: bool = True


def split(length: int, world_size: int, how: str, unit: int = 1) -> tuple[int, ...]:
    """Shares of `length`: rank 1 has nothing in "empty", less than half of its share in "uneven"."""
    share = [unit * n for n in even_sizes(length // unit, world_size)]
    share[0] += length - sum(share)
    if how != "even":
        moved = share[1] if how == "empty" else share[1] // (2 * unit) * unit
        share[0], share[1] = share[0] + moved, share[1] - moved
    return tuple(share)


def laid_out(x: Tensor, how: str) -> Tensor:
    """The same values, with contiguous rows or columns, or neither."""
    if not x.numel():
        # As a part of what has some, or torch would take any strides and other code would be compiled for it alone.
        whole = laid_out(x.new_empty([length or 16 for length in x.shape]), how)
        return whole[: x.shape[0], : x.shape[1]]
    if how == "strided":
        return torch.stack([x, x], -1).flatten(1)[:, ::2]
    return x.contiguous() if how == "rows" else x.t().contiguous().t()


def launches_of(op: str, ws: Workspace, *operands: Any, **options: Any) -> Phases:
    """A task on one rank; it ends with its results."""
    outs = yield from direct.results(op, ws, *operands, **options)
    return outs[0] if len(outs) == 1 else Both(outs)
