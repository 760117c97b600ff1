"""Records that ranks leave each other: who is named where one is missing, came late, or was interrupted."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import fusedtp
from fusedtp.workspaces.records import Exchange

KEYS = ("a/0", "a/1", "a/2")


def exchange(store: Any, rank: int, seconds: float = 0.05) -> list[dict[str, str]]:
    end = time.monotonic() + seconds
    return Exchange("op", rank, store, KEYS, seconds, end, "it has not come", "in call 4")({"mine": str(rank)})


def told(store: Any, rank: int, seconds: float = 0.05) -> tuple[int, str]:
    with pytest.raises(fusedtp.PeerTimeout) as caught:
        exchange(store, rank, seconds)
    assert (caught.value.op, caught.value.rank) == ("op", rank)
    return caught.value.peer, caught.value.detail


def leave(store: Any, rank: int) -> None:
    store.set(KEYS[rank], f'{{"mine": "{rank}"}}')


def test_what_every_rank_has_left() -> None:
    store = dist.HashStore()
    leave(store, 0)
    leave(store, 2)
    assert exchange(store, 1) == [{"mine": "0"}, {"mine": "1"}, {"mine": "2"}]


def test_a_rank_that_comes_later_names_the_one_that_is_missing() -> None:
    store = dist.HashStore()
    assert told(store, 0) == (1, "it has not come")
    assert told(store, 2) == (1, "it has not come; rank 0 had given up on it")
    # It comes after all.
    assert told(store, 1) == (0, "it had given up on rank 1 in call 4")


def test_a_rank_that_came_after_all_is_not_the_one_that_is_missing() -> None:
    store = dist.HashStore()
    assert told(store, 0) == (1, "it has not come")
    leave(store, 1)
    assert told(store, 2) == (0, "it had given up on rank 1 in call 4")


def test_an_interruption_is_told() -> None:
    store = dist.HashStore()
    with mock.patch.object(dist.HashStore, "wait", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        exchange(store, 0)
    leave(store, 2)
    assert told(store, 1) == (0, "it was interrupted in call 4")


def test_a_rank_that_was_ahead_of_all_is_named_by_all() -> None:
    """It made one call more than the others, who come to that call one after another."""
    store = dist.HashStore()
    assert told(store, 2) == (0, "it has not come")
    with ThreadPoolExecutor() as threads:
        early = threads.submit(told, store, 1, 20.0)
        time.sleep(0.1)
        assert told(store, 0) == (2, "it had given up on rank 0 in call 4")
        assert early.result() == (2, "it had given up on rank 0 in call 4")
