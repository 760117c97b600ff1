"""Emitted code as blocks: runs of instructions that follow one another, the loops that they form, tails made one."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

from .assembly import Code


@dataclass(frozen=True)
class Block:
    """Instructions `first` .. `last` that run one after another, and the blocks that may follow."""

    first: int
    last: int
    after: tuple[int, ...]


def blocks(code: Code) -> list[Block]:
    """The first begins at the entry."""
    size = len(code.lines)
    starts = {0} | {j for i in range(size) if code.after[i] != (i + 1,) for j in (*code.after[i], i + 1) if j < size}
    order = sorted(starts)
    number = {start: i for i, start in enumerate(order)}
    ends = [*(start - 1 for start in order[1:]), size - 1]
    return [
        Block(first, last, tuple(number[j] for j in code.after[last])) for first, last in zip(order, ends, strict=True)
    ]


def loops(code: Code) -> list[tuple[int, set[int]]]:
    """For each loop its first instruction, by which it is entered, and all that it has; inner loops have their own."""
    all_of = blocks(code)
    before: list[list[int]] = [[] for _ in all_of]
    for i, block in enumerate(all_of):
        for j in block.after:
            before[j].append(i)
    above = _above(before)
    found: dict[int, set[int]] = {}
    for i, block in enumerate(all_of):
        for head in block.after:
            if head in above[i]:
                body, queue = found.setdefault(head, {head}), [i]
                while queue:
                    k = queue.pop()
                    if k not in body:
                        body.add(k)
                        queue += before[k]
    return [
        (all_of[head].first, {k for j in body for k in range(all_of[j].first, all_of[j].last + 1)})
        for head, body in found.items()
    ]


def _above(before: list[list[int]]) -> list[set[int]]:
    """For each block those that every way from the entry to it comes through, and itself."""
    everything = set(range(len(before)))
    above = [{0}, *(set(everything) for _ in before[1:])]
    changed = True
    while changed:
        changed = False
        for i in range(1, len(before)):
            found = {i} | (set.intersection(*(above[j] for j in before[i])) if before[i] else set())
            if found != above[i]:
                above[i], changed = found, True
    return above


def with_tails_made_one(code: Code) -> Code:
    """Return the program with equal runs of instructions that end in the same branch merged.

    The compiler writes the end of a block twice to save a jump. A branch that all threads take alike is two then, which
    those that have parted before come to on ways of their own.
    """

    def destination(i: int) -> int:
        while code.lines[i].startswith("s_branch"):
            (i,) = code.after[i]
        return i

    # By what is asked, where that leads if it holds, and where if not.
    ends: dict[tuple[str, int, int], list[int]] = {}
    for i, after in enumerate(code.after):
        asked = re.match(r"s_cbranch_(vcc|scc|exec)(n?z|[01])", code.lines[i])
        # A mask that is a constant on each way, as a truth, decides each way by itself.
        of_mask = i > 1 and re.match(r"s_cselect_b32 s\d+, 1, 0$", code.lines[i - 2])
        if asked and len(after) == 2 and not of_mask:
            goes_on, jumps = map(destination, after)
            holds, else_ = (jumps, goes_on) if asked[2] in ("nz", "1") else (goes_on, jumps)
            ends.setdefault((asked[1], holds, else_), []).append(i)
    moved: dict[int, int] = {}
    for same in ends.values():
        for i, j in itertools.pairwise(same):
            while i and j and code.lines[i - 1] == code.lines[j - 1] and code.after[i - 1] == (i,):
                if code.after[j - 1] != (j,) or j - 1 == i:
                    break
                i, j = i - 1, j - 1
            moved[j] = i

    def at(i: int) -> int:
        while i in moved:
            i = moved[i]
        return i

    return replace(code, after=[tuple(at(j) for j in after) for after in code.after])
