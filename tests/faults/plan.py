"""The list of injected faults: all, or a few for a default run, spread over kinds, ops, ranks and steps."""

from __future__ import annotations

import itertools

from .cases import CASES
from .inject import Injection
from .verdict import HARMLESS

WORLD_SIZES = (2, 3, 4)
LIVING = ("raises", "is interrupted", "is late", "is too late", "is stopped", "is stopped too long")
DEADLY = ("is killed", "is killed in a wait", "is killed", "is stopped for good")
# A timeout that no fault may reach, and a timeout that survivors wait for.
AMPLE, SECONDS = 20.0, 0.5
WHERE = (0.0, 0.3, 0.5, 0.8, 1.0)


def living(world_size: int) -> list[Injection]:
    """Return every kind in every case, with varying rank, step and half."""
    injections = []
    for (i, case), (j, kind) in itertools.product(enumerate(CASES), enumerate(LIVING)):
        seconds = AMPLE if kind in HARMLESS else SECONDS
        rank, where, before = (i + j) % world_size, WHERE[(i + j) % len(WHERE)], 1 + (i // 2 + j) % 2
        injections.append(Injection(kind, case, world_size, rank, where, before, seconds))
    return injections


def in_a_wait() -> list[Injection]:
    """Return faults that stop a waiting rank for longer than its own timeout; the signal arrives meanwhile."""
    return [Injection("is stopped in a wait", case, 3, i % 3, 0, 1, 4 * SECONDS) for i, case in enumerate(CASES)]


def deadly(seconds: float = 2 * SECONDS) -> list[list[Injection]]:
    """Return lists that each remove three of four ranks, one by one: world sizes 4, 3 and 2."""
    lists = []
    for first, case in enumerate(CASES):
        chain = []
        for number, world_size in enumerate((4, 3, 2)):
            where = WHERE[(first + 2 * number) % len(WHERE)]
            kind = DEADLY[(first + number) % len(DEADLY)]
            chain.append(Injection(kind, case, world_size, (first + number) % world_size, where, 1, seconds))
        lists.append(chain)
    return lists


def killed_of_three(seconds: float = 2 * SECONDS) -> list[list[Injection]]:
    """Return lists that kill one of three ranks, then one of two, before, amid and after each fused matmul's steps."""
    cases = ("fused: gather rows", "fused: scatter rows", "fused: matmul, two shots")
    return [
        [Injection("is killed", case, size, i % size, where, 1, seconds) for size in (3, 2)]
        for case in cases
        for i, where in enumerate((0.0, 0.5, 1.0))
    ]
