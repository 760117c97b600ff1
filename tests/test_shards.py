"""Splits of a length over ranks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.shards import check_sizes, even_sizes, offsets


@settings(deadline=None)
@given(length=st.integers(0, 1000), world_size=st.integers(1, 20))
def test_even_sizes_are_those_of_tensor_split(length: int, world_size: int) -> None:
    split = torch.zeros(length).tensor_split(world_size)
    assert even_sizes(length, world_size) == tuple(len(part) for part in split)


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
