"""An interruption before any line of any host-driven op, on one of two ranks: the numbers are right, or both ranks have
an error, and after `destroy` the next op is right. This is a sample; `nox -s faults` (FUSEDTP_FAULTS=all) takes every
line.
"""

from __future__ import annotations

import gc
import itertools
import os

import pytest
from torch.distributed import ProcessGroup

import fusedtp
from fusedtp.bench.ranks import RankPool

from .faults import lines
from .faults.cases import CASES
from .faults.lines import Lines

ALL = os.environ.get("FUSEDTP_FAULTS") == "all"
HOST_DRIVEN = [name for name, case in CASES.items() if case.schedule == "decomposed"]
numbers = itertools.count()


def descriptors(group: ProcessGroup) -> int:
    """Return the number of open descriptors after all our memory is freed."""
    fusedtp.destroy()
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def run(pool: RankPool, every: list[Lines]) -> tuple[int, int]:
    """Return the number of interruptions, and after how many of them every number was right."""
    count = right = 0
    for each in every:
        name = f"lines/{next(numbers)}"
        by_rank = pool.run(lines.every_line, each, name, world_size=2, timeout=1500)
        both = list(zip(*by_rank, strict=True))
        assert both
        said = [lines.wrong(each, one) for one in both]
        assert not any(said), "\n".join(filter(None, said))
        count += len(both)
        right += sum(not one[0].error for one in both)
    return count, right


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interruption_at_any_line_of_an_op(pool: RankPool, rank: int) -> None:
    every = 1 if ALL else 67
    cases = HOST_DRIVEN if ALL else HOST_DRIVEN[rank::2]
    spread = [Lines(name, "a workspace", rank, 1 + i % every, every) for i, name in enumerate(cases)]
    count, right = run(pool, spread)
    # If nothing or everything has been sent, no rank notices.
    assert 0 < right < count


@pytest.mark.parametrize("within", ["apply", "call", "run", "begin", "enter", "leave", "end"])
def test_an_interruption_where_an_op_begins_and_ends(pool: RankPool, within: str) -> None:
    """Every line: there the op has been sent, and may have been counted."""
    # A plain collective never runs `apply`.
    case = f"decomposed: {'scatter rows' if within == 'apply' else 'all_reduce, one shot'}"
    count, _ = run(pool, [Lines(case, "a workspace", rank, within=within) for rank in (0, 1)])
    assert count >= 8


@pytest.mark.parametrize("meets", ["no workspace", "one too small"])
def test_an_interruption_while_memory_is_made(pool: RankPool, meets: str) -> None:
    every = 1 if ALL else 199
    spread = [
        Lines("decomposed: all_gather", meets, rank, 1 + first, every) for rank, first in ((0, 0), (1, every // 2))
    ]
    left = pool.run(descriptors)
    count, right = run(pool, spread)
    assert 0 < right < count
    # An interrupted call may keep resources for a while, but the process must not.
    assert pool.run(descriptors) == left
