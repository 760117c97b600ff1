"""Emitted code as a graph of instructions, and the questions that are asked of it: PTX, SASS and AMD's assembly alike.

A conditional branch may go either way, but for AMD's `s_cbranch_execz`, which skips what no lane of a wave wants to do:
what one lane does counts as done, as a predicated instruction does.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """Instructions, and for each the ones that may follow it."""

    lines: list[str]
    after: list[tuple[int, ...]]

    def matching(self, pattern: str) -> list[int]:
        """Where an instruction matches."""
        return [i for i, line in enumerate(self.lines) if re.search(pattern, line)]

    def count(self, pattern: str) -> int:
        """Return the number of instructions that match."""
        return len(self.matching(pattern))

    def reaches(self, first: str | None, then: str, without: str) -> bool:
        """Return whether a path leads from `first` (None: the entry) to `then` and passes no `without`; patterns."""
        start = [0] if first is None else [j for i in self.matching(first) for j in self.after[i]]
        return self.leads(start, then, without)

    def leads(self, start: list[int], then: str, without: str) -> bool:
        """Return the same for a path that begins at one of the instructions `start`."""
        seen, queue = set(start), deque(start)
        while queue:
            i = queue.popleft()
            if re.search(without, self.lines[i]):
                continue
            if re.search(then, self.lines[i]):
                return True
            for j in self.after[i]:
                if j not in seen:
                    seen.add(j)
                    queue.append(j)
        return False

    def inner_loop(self, pattern: str) -> list[str]:
        """The shortest way from an instruction that matches back to it: the inner loop, with nothing that it may skip.

        Empty where no loop holds such an instruction.
        """
        loops = [cycle for i in self._one_a_run(pattern) if (cycle := self._cycle(i))]
        return min(loops, key=len, default=[])

    def _one_a_run(self, pattern: str) -> Iterator[int]:
        # Matching instructions that follow each other without a branch are on the same cycles.
        last = -1
        for i in self.matching(pattern):
            if last < 0 or any(self.after[j] != (j + 1,) for j in range(last, i)):
                yield i
            last = i

    def _cycle(self, start: int) -> list[str]:
        came_from: dict[int, int] = {}
        queue = deque([start])
        while queue:
            i = queue.popleft()
            for j in self.after[i]:
                if j not in came_from:
                    came_from[j] = i
                    if j == start:
                        path = [i]
                        while path[-1] != start:
                            path.append(came_from[path[-1]])
                        return [self.lines[k] for k in reversed(path)]
                    queue.append(j)
        return []


def _graph(items: list[tuple[str, str]], branch: str, ends: str, always: str, never: str = r"(?!)") -> Code:
    # items: ("label", name) and ("line", instruction). A branch names its target last.
    lines = [text for kind, text in items if kind == "line"]
    labels: dict[str, int] = {}
    at = 0
    for kind, text in items:
        if kind == "label":
            labels[text] = at
        else:
            at += 1
    after: list[tuple[int, ...]] = []
    for i, line in enumerate(lines):
        follow = [] if re.search(ends, line) else [i + 1]
        if found := re.search(branch, line):
            if re.search(always, line):
                follow = []
            if not re.search(never, line):
                follow.append(labels[found[1]])
        after.append(tuple(j for j in follow if j < len(lines)))
    return Code(lines, after)


def sass(text: str) -> Code:
    """Parse the output of `nvdisasm -c`."""
    items = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_[\w.$]+):", line):
            items.append(("label", label[1]))
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            items.append(("line", found[1]))
    # A predicate stands before the name, or as its first operand.
    return _graph(items, r"\bBRA\b.*`\((\.L_[\w.$]+)\)", r"^(EXIT|RET)", r"^BRA(\.U\w*|\.DIV)? `")


def ptx(text: str) -> Code:
    """Parse PTX. Labels inside inline assembly, which waits for a copy of the CTA's own, are left out."""
    items = []
    for line in text.splitlines():
        line = line.split("//")[0].strip()
        if label := re.match(r"(\$L__\w+):", line):
            items.append(("label", label[1]))
        elif line.startswith((".", "{ .reg")) and not line.startswith("{ .reg .pred"):
            continue
        elif "fence.proxy" in line:
            # A fence and the move through it are one.
            items.append(("line", line))
        else:
            for part in line.split(";"):
                if re.match(r"[{(\s]*(@|[a-z])", part) and not part.startswith("."):
                    items.append(("line", part.strip(" {}\t")))
    return _graph(items, r"\bbra(?:\.uni)?\s+(\$L__\w+)", r"^(ret|trap|exit)\b", r"^bra")


def amdgcn(text: str, *, masked: bool = False) -> Code:
    """Parse AMD's assembly. masked: with the branches that a wave without active lanes takes."""
    items = []
    for line in text.split(".section\t.rodata")[0].splitlines():
        line = line.split(";")[0].rstrip()
        if label := re.match(r"(\.LBB\w+):", line):
            items.append(("label", label[1]))
        elif re.match(r"\t[a-z]", line):
            items.append(("line", line.strip()))
    never = r"(?!)" if masked else r"^s_cbranch_execz"
    return _graph(items, r"^s_c?branch\w*\s+(\.LBB\w+)", r"^s_endpgm", r"^s_branch", never)


def sources(code: Code, register: str, through: str) -> set[str]:
    """The instructions of PTX that `register` gets its value from, looked up through moves and selections; those that
    match `through` end a way, and are left out.
    """
    definitions: dict[str, list[str]] = {}
    for line in code.lines:
        if found := re.search(r"(?:^|; )(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(%\w+),", line):
            definitions.setdefault(found[1], []).append(line)
    seen, queue, found_sources = {register}, [register], set()
    while queue:
        for line in definitions.get(queue.pop(), ["nothing"]):
            if re.search(through, line):
                continue
            if not re.match(r"(?:@!?%p\d+\s+)?(mov|selp)\.", line) or re.search(r",\s*-?\d", line):
                found_sources.add(line)
            for source in re.findall(r"%r\w+", line)[1:]:
                if source not in seen:
                    seen.add(source)
                    queue.append(source)
    return found_sources
