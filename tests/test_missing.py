"""The rank that a timeout names, from the ranks' headers."""

from __future__ import annotations

import pytest

from fusedtp.kernels import signal
from fusedtp.workspaces.failures import explain, missing

WORLD_SIZE = 4


def says(
    *, waits_for: int | None = None, has_it: bool = False, gave_up_on: int | None = None, left: int = 0
) -> list[int]:
    """Return a header at epoch 7, in the eighth op, waiting in slot 2."""
    words = [0] * (signal.SIGNALS.value + 3 * WORLD_SIZE)
    words[signal.EPOCH.value] = 7
    words[signal.LEFT.value] = left
    if waits_for is not None:
        words[signal.WAITING_FOR.value], words[signal.WAITING_SLOT.value] = waits_for + 1, 2
        words[signal.SIGNALS.value + 2 * WORLD_SIZE + waits_for] = 8 if has_it else 7
    if gave_up_on is not None:
        words[signal.GIVEN_UP.value] = gave_up_on + 1
    return words


def grows(behind: int) -> list[int]:
    """Return a header before the eighth op, waiting for rank `behind` to grow the workspace."""
    words = says(waits_for=behind)
    words[signal.WAITING_SLOT.value], words[signal.GROWING.value] = signal.GROWTH_SLOT.value, 1
    return words


BUSY = says()
# (headers of ranks 0, 1 and 2; the rank that rank 3 names after waiting for rank 2)
NAMED = {
    "nobody says anything": ((BUSY, BUSY, BUSY), 2),
    "each waits for the one before": ((BUSY, says(waits_for=0), says(waits_for=1)), 0),
    "each has given up on the one before": ((BUSY, says(gave_up_on=0), says(gave_up_on=1)), 0),
    "killed with what it was waiting for": ((BUSY, BUSY, says(waits_for=1, has_it=True)), 2),
    "all have given up on the one that asks": ((says(gave_up_on=3), says(gave_up_on=3), says(gave_up_on=3)), 2),
    "it waits for the one that asks": ((BUSY, BUSY, says(waits_for=3)), 2),
    "left by an exception": ((BUSY, says(waits_for=2), says(waits_for=1, left=2)), 2),
    "about to grow behind a third": ((BUSY, BUSY, grows(behind=0)), 0),
    "a circle behind another one's victim": ((says(gave_up_on=1), BUSY, says(gave_up_on=3)), 1),
    "left, having given up": ((BUSY, says(gave_up_on=0), says(gave_up_on=1, left=1)), 0),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_who_is_named(case: str) -> None:
    words, expected = NAMED[case]
    assert missing(3, [*words, BUSY], 2) == expected


def test_garbage_in_a_header_names_who_was_waited_for() -> None:
    """Arbitrary words in a peer's memory raise no other exception, and the named rank exists."""
    words = [[seed * 2654435761 % 2**32 - 2**31 for seed in range(rank, rank + len(BUSY))] for rank in range(3)]
    for value in (-5, WORLD_SIZE + 1, 2**31 - 1):
        waits = says(waits_for=0)
        waits[signal.WAITING_FOR.value] = value
        gave_up = says(waits_for=0)
        gave_up[signal.GIVEN_UP.value] = value
        far = says(waits_for=0)
        far[signal.WAITING_SLOT.value] = value
        for peers in ([waits] * 3, [gave_up] * 3, [far] * 3, words):
            each = [*peers, BUSY]
            named = missing(3, each, 2)
            assert 0 <= named < WORLD_SIZE
            explain(3, each, 2, named)
