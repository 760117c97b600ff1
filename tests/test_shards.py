"""Splits of a length over ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.shards import check_sizes, even_sizes, offsets


@settings(deadline=None)
@given(length=st.integers(0, 1000), world_size=st.integers(1, 20))
def test_even_sizes_are_those_of_tensor_split(length: int, world_size: int) -> None:
    split = torch.zeros(length).tensor_split(world_size)
    assert even_sizes(length, world_size) == tuple(len(part) for part in split)


@pytest.mark.parametrize(("length", "world_size"), [(-1, 2), (4, 0)])
def test_even_sizes_refuses(length: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"{length} over {world_size}"):
        even_sizes(length, world_size)


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_offsets_cut_where_split_cuts(sizes: list[int]) -> None:
    cuts = offsets(sizes)
    whole = torch.arange(sum(sizes))
    assert len(cuts) == len(sizes) + 1
    for rank, part in enumerate(whole.split(sizes)):
        assert torch.equal(whole[cuts[rank] : cuts[rank + 1]], part)


def test_check_sizes_returns_plain_ints() -> None:
    checked = check_sizes([np.int64(3), 0, 4], world_size=3, length=7, rank=2, local=4)
    assert checked == (3, 0, 4)
    assert all(type(size) is int for size in checked)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 4), r"sizes must have one entry per rank, 3, got 2: \(3, 4\)"),
        ((3, 4, 5), r"sizes must add up to 7, got 12: \(3, 4, 5\)"),
        ((8, -1, 0), r"sizes\[1\] must not be negative, got -1"),
        ((3, 4.0, 0), r"sizes\[1\] must be an int, got 4\.0"),
        ((3, "4", 0), r"sizes\[1\] must be an int, got '4'"),
        ((True, 6, 0), r"sizes\[0\] must be an int, got True"),
        (7, r"sizes must be one length per rank, in their order, got 7"),
        ("340", r"sizes must be one length per rank, in their order, got '340'"),
        ((4, 3, 0), r"sizes\[0\] must be this rank's own length, 3, got 4"),
    ],
)
def test_check_sizes_shows_what_is_wrong(sizes: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_sizes(sizes, world_size=3, length=7, rank=0, local=3)  # type: ignore[arg-type]
