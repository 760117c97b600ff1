"""Data flow through PTX and AMD's code: do all threads of a program decide alike where a barrier depends on it?

A value may differ between warps if it is made of a thread's number, or of a word that others write and that every
thread has loaded by itself: at a change of the word some have loaded the old value and some the new one. It may not if
it is made of the launch's arguments, of a table that these point to, of a program's number, or of shared memory at an
address that may not differ, which is how what one thread has read is told to all. A word that others write is one whose
address comes out of such a table: all in arenas and in the host block.

A branch on a value that may differ must have no barrier between it and the place where all its ways meet again, which
for one that leaves a loop is behind the loop. What is written in between may differ as well, but for a register that is
put aside and back there: it is what it was for those who took another way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from heapq import heappop, heappush
from operator import or_

from . import amd, nvidia
from .assembly import Code
from .blocks import Block
from .blocks import blocks as all_blocks
from .flow import ANY, ARGUMENTS, DIFFERS, LOADED, Instruction, State


def _meeting_places(blocks: list[Block]) -> list[set[int]]:
    """For each block those that lie on every way from its end to the end of the program."""
    everything = set(range(len(blocks)))
    on_all_ways = [set(everything) for _ in blocks]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(blocks))):
            behind = [on_all_ways[j] | {j} for j in blocks[i].after]
            found = set.intersection(*behind) if behind else set()
            if found != on_all_ways[i]:
                on_all_ways[i], changed = found, True
    return on_all_ways


def _between(blocks: list[Block], start: int, meet: set[int]) -> set[int]:
    """The blocks that some way from the end of `start` comes through before all its ways have met."""
    found: set[int] = set()
    queue = deque(j for j in blocks[start].after if j not in meet)
    while queue:
        i = queue.popleft()
        if i not in found:
            found.add(i)
            queue.extend(j for j in blocks[i].after if j not in meet)
    return found


def _value(instruction: Instruction, state: State, apart: bool) -> int:
    """Return the facts of an instruction's results: DIFFERS, LOADED, both or neither."""
    flags = reduce(or_, (state.get(name, 0) for name in instruction.sources), 0)
    base = reduce(or_, (state.get(name, 0) for name in instruction.base), 0)
    differs = (flags | base) & DIFFERS or apart or instruction.differs
    if base & ARGUMENTS:
        loaded = 0
    elif instruction.loads:
        # From a table that the launch was given, or from what such a table points to.
        differs = differs or base & LOADED
        loaded = instruction.loads_address
    else:
        loaded = instruction.keeps_address and (flags & LOADED)
    return ANY | (DIFFERS if differs else 0) | (LOADED if loaded else 0)


def _put_aside(instructions: Iterable[Instruction]) -> set[tuple[str, str]]:
    """The pairs of registers of which the first holds the second for a while: copied there and back."""
    copies = {(each.results[0], each.sources[0]) for each in instructions if each.is_copy}
    return {(to, source) for to, source in copies if (source, to) in copies}


def _step(instruction: Instruction, state: State, apart: bool, aside: set[tuple[str, str]]) -> None:
    # "a=b": DIFFERS unless register a surely holds what b was for all threads; "a:b": what was known of b.
    pair = (instruction.results[0], instruction.sources[0]) if instruction.is_copy else ("", "")
    back = f"{pair[1]}={pair[0]}"
    if pair[::-1] in aside and not state.get(back, 0):
        state[pair[0]] = state.get(f"{pair[1]}:{pair[0]}", 0)
        return
    for holder, held in aside:
        if holder in instruction.results:
            is_held = (holder, held) == pair and not state.get(held, 0) & DIFFERS
            state[f"{holder}={held}"] = 0 if is_held else DIFFERS
            state[f"{holder}:{held}"] = state.get(held, 0)
    if instruction.special is not None:
        instruction.special(state)
        return
    value = _value(instruction, state, apart)
    masked = instruction.masked and state.get("exec", 0) & DIFFERS
    for name in instruction.results:
        kept = state.get(name, 0) | DIFFERS if masked else state.get(name, 0) if instruction.partial else 0
        state[name] = value | kept


@dataclass(frozen=True)
class Dialect:
    """A target's parser of instructions, its ways of a branch, the state at the entry, and the pattern of a barrier."""

    decode: Callable[[str], Instruction]
    ways: Callable[[str, State], tuple[bool, bool]]
    entry: State
    barrier: str


def _deciding(instructions: list[Instruction], branches: Iterable[int]) -> set[int]:
    """The instructions whose results may reach a branch: of a matmul's data, none."""
    makers: dict[str, list[int]] = {}
    for k, instruction in enumerate(instructions):
        for name in instruction.results:
            makers.setdefault(name, []).append(k)
    found: set[int] = set()
    queue = [*makers.get("exec", ()), *branches]
    while queue:
        k = queue.pop()
        if k not in found:
            found.add(k)
            queue += [j for name in instructions[k].sources + instructions[k].base for j in makers.get(name, ())]
    return found


def _flow(
    code: Code, dialect: Dialect, blocks: list[Block], instructions: list[list[Instruction]], apart: set[int]
) -> tuple[list[Block], list[State]]:
    """The blocks with the ways that may be taken, and what is known at the end of each; what is written in blocks
    `apart` may differ.
    """
    begin: list[State] = [{} for _ in blocks]
    end: list[State] = [{} for _ in blocks]
    taken: list[set[int]] = [set() for _ in blocks]
    aside = _put_aside(each for block in instructions for each in block)
    begin[0].update(dialect.entry, **{f"{holder}={held}": DIFFERS for holder, held in aside})
    queue, visited = [0], {0}
    while queue:
        i = heappop(queue)
        block, state = blocks[i], dict(begin[i])
        for instruction in instructions[i]:
            _step(instruction, state, i in apart, aside)
        end[i] = state
        open_ways = dialect.ways(code.lines[block.last], state) if len(block.after) == 2 else (True, True)
        for j in (each for each, is_open in zip(block.after, open_ways, strict=False) if is_open):
            taken[i].add(j)
            more = [name for name, flags in state.items() if flags & ~begin[j].get(name, 0)]
            for name in more:
                begin[j][name] = begin[j].get(name, 0) | state[name]
            if more or j not in visited:
                visited.add(j)
                if j not in queue:
                    heappush(queue, j)
    return [replace(block, after=tuple(sorted(taken[i]))) for i, block in enumerate(blocks)], end


def _apart(code: Code, dialect: Dialect) -> Iterator[tuple[int, set[int]]]:
    """Branches that threads may take apart, each with the instructions that are then run apart."""
    blocks, instructions = all_blocks(code), [dialect.decode(line) for line in code.lines]
    deciding = _deciding(instructions, [block.last for block in blocks if len(block.after) > 1])
    in_block = [
        [instructions[k] for k in range(block.first, block.last + 1) if k in deciding] for block in blocks
    ]  # fmt: skip
    regions: dict[int, set[int]] = {}
    while True:
        known = set().union(*regions.values())
        live, end = _flow(code, dialect, blocks, in_block, known)
        meeting = _meeting_places(live)
        regions = {
            i: _between(live, i, meeting[i])
            for i, block in enumerate(live)
            if len(block.after) > 1
            and any(end[i].get(name, 0) & DIFFERS for name in instructions[block.last].sources)
        }  # fmt: skip
        if set().union(*regions.values()) <= known:
            break
    for i, region in regions.items():
        yield blocks[i].last, {k for j in region for k in range(blocks[j].first, blocks[j].last + 1)}


PTX = Dialect(nvidia.decode, nvidia.ways, {}, nvidia.BARRIER)
PTX_OF_ONE_WARP = replace(PTX, decode=nvidia.decode_of_one_warp)
AMDGCN = Dialect(amd.decode, amd.ways, amd.ENTRY, amd.BARRIER)


def barriers_apart(code: Code, dialect: Dialect) -> list[tuple[int, int]]:
    """(branch, barrier) where threads may take the branch apart and the barrier lies on one of its ways only."""
    barriers = set(code.matching(dialect.barrier))
    return [(branch, min(found)) for branch, region in _apart(code, dialect) if (found := region & barriers)]
