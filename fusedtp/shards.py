"""Splits of a length over ranks.

`sizes[r]` is the length on rank r. Any split is allowed, with empty shards too; the ranks must agree on the tuple.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Set
from itertools import accumulate
from numbers import Real
from typing import Any


def even_sizes(length: int, world_size: int) -> tuple[int, ...]:
    """Return the split of `torch.tensor_split`: the first `length % world_size` ranks hold one more than the others."""
    if length < 0 or world_size < 1:
        raise ValueError(f"cannot split a length of {length} over {world_size} ranks")
    # torch.compile may leave the length open: it traces neither divmod nor the sum of a number and a comparison.
    base, extra = length // world_size, length % world_size
    return tuple([base + 1 if rank < extra else base for rank in range(world_size)])


def size_class(length: int) -> int:
    """Return the length rounded up to four significant bits: eight classes an octave."""
    step = 1 << max(0, length.bit_length() - 4)
    return -(-length // step) * step


def chunk_sizes(length: int, world_size: int) -> tuple[int, ...]:
    """Return the split of `torch.chunk`, which DTensor uses: pieces of length / ranks rounded up, then the rest.

    The last ranks hold less or nothing. The longest piece is as long as that of `even_sizes`.
    """
    piece = -(-length // world_size)
    return tuple([max(0, min(piece, length - rank * piece)) for rank in range(world_size)])


def offsets(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the offset of each shard, then the whole length: world_size + 1 numbers, the first 0."""
    return tuple(accumulate(sizes, initial=0))


def check_sizes(
    sizes: Iterable[int],
    *,
    world_size: int,
    length: int | None = None,
    rank: int | None = None,
    local: int | None = None,
    name: str = "sizes",
) -> tuple[int, ...]:
    """Return `sizes` as a tuple of ints, or raise a ValueError that shows them.

    Checks one non-negative int per rank, and, if given, the sum against `length` and this rank's entry against `local`.
    """
    # A mapping's keys and a set have no order of ranks.
    if isinstance(sizes, str | bytes | Mapping | Set) or not isinstance(sizes, Iterable):
        raise ValueError(f"{name} must be one length per rank, in their order, got {sizes!r}")
    try:
        given = tuple(sizes)
    except TypeError:
        # A tensor or array without dimensions claims to be iterable.
        raise ValueError(f"{name} must be one length per rank, in their order, got {sizes!r}") from None
    checked: list[int] = []
    for peer, size in enumerate(given):
        try:
            # operator.index refuses 2.0 and "2"; a bool would pass as 0 or 1 and is never meant. A length in a graph is
            # an int, which operator.index would make a constant.
            one: Any = size if not isinstance(size, bool) else None
            checked.append(one if type(one) is int else operator.index(one))
        except TypeError:
            raise ValueError(f"{name}[{peer}] must be an int, got {size!r} in {given}") from None
        if checked[-1] < 0:
            raise ValueError(f"{name}[{peer}] must not be negative, got {size!r} in {given}")
    if len(checked) != world_size:
        raise ValueError(f"{name} must have one entry per rank, {world_size}, got {len(checked)}: {given}")
    if length is not None and sum(checked) != length:
        raise ValueError(f"{name} must add up to {length}, got {sum(checked)}: {given}")
    if rank is not None and local is not None and checked[rank] != local:
        raise ValueError(f"{name}[{rank}] must be this rank's own length, {local}, got {checked[rank]}: {given}")
    return tuple(checked)


def check_count(name: str, value: object, *, least: int = 0) -> int:
    """Return `value` as an int from `least` to 2**63 - 1, a tensor's length; TypeError or ValueError names it."""
    try:
        count = operator.index(value if not isinstance(value, bool) else None)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None
    if not least <= count < 2**63:
        raise ValueError(f"{name} must be {least} or more and below 2**63, got {value!r}")
    return count


def check_number(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
