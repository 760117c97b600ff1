"""In which order a call's terms are added: that of ranks, any, or a tree's, whose bits no number of ranks changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..op import ANY_ORDER, AS_ANY, LEAVES, MOST_LEAVES, RANK_ORDER, TREE_ORDER
from ..options import Options
from .dispatch import FUSED_DTYPES


def leaves_in(order: Any) -> int:
    """The leaves of a tree, a power of two, 0 for the order of ranks, `AS_ANY` for any."""
    if order == RANK_ORDER:
        return 0
    if order == ANY_ORDER:
        return AS_ANY
    name, dash, number = order.partition("-") if isinstance(order, str) else ("", "", "")
    leaves = LEAVES if not dash else int(number) if number.isdecimal() and number.isascii() else 0
    if name != TREE_ORDER or not 1 <= leaves <= MOST_LEAVES or leaves & (leaves - 1):
        raise ValueError(
            f"order must be {RANK_ORDER!r}, {ANY_ORDER!r}, {TREE_ORDER!r}, of {LEAVES} leaves, or {TREE_ORDER}-N of N, "
            f"a power of two up to {MOST_LEAVES}, got {order!r}"
        )
    return leaves


def leaves_of(asked: Options, world_size: int, dtype: torch.dtype | None = None) -> int:
    """As `leaves_in`, for a call that can keep to that order, of operands in a dtype."""
    order, leaves = asked.order, leaves_in(asked.order)
    if leaves <= 0:
        return leaves
    if leaves % world_size:
        raise ValueError(
            f"order {order!r} is for numbers of ranks that divide its {leaves} leaves, got {world_size} ranks"
        )
    if asked.schedule not in ("auto", "fused"):
        raise ValueError(f"order {order!r} is kept by schedule 'fused' alone, got schedule {asked.schedule!r}")
    if asked.float8 is not None:
        raise ValueError(f"order {order!r} is for operands that are not cast, got float8={asked.float8!r}")
    if dtype is not None and dtype not in FUSED_DTYPES:
        raise ValueError(f"order {order!r} is for {', '.join(map(str, FUSED_DTYPES))}, got {dtype}")
    return leaves


def check_even(order: str, sizes: Sequence[int], name: str = "feature_sizes") -> None:
    """Parts of a contraction that leaves can be counted in: as long on every rank."""
    if len(set(sizes)) > 1:
        raise ValueError(f"order {order!r} needs {name} that are as long on every rank, got {tuple(sizes)}")


def of_subtrees(asked: Options, world_size: int, dtype: torch.dtype) -> int:
    """As `leaves_of`, for a collective of what ranks have added up so far."""
    order, leaves = asked.order, leaves_of(asked, world_size)
    if leaves > 0 and dtype != torch.float32:
        raise ValueError(f"order {order!r} of a collective is for subtrees, which are torch.float32, got {dtype}")
    if leaves > 0 and asked.algorithm == "ring":
        raise ValueError(f"order {order!r} is not that of algorithm 'ring', which adds up along the ring")
    return leaves
