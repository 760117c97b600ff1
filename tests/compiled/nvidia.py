"""Instructions of PTX, as `uniform` asks for them."""

from __future__ import annotations

import re

from .flow import Instruction, State

BARRIER = r"\bbar(rier)?\.(cta\.)?(sync|red)|\bbarrier\.cluster"
_REGISTER = re.compile(r"%(?:rd|rs|r|p|f|fd|h|b)\d+\b")
_OWN = re.compile(r"%(?:tid|laneid|warpid|lanemask)|\belect\.|\bactivemask")
_LINE = re.compile(r"(?:@!?(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)


def decode(line: str) -> Instruction:
    """Parse a line of `assembly.ptx`; a fence and the move behind the fence are one instruction."""
    found = _LINE.match(line.rpartition(";")[2].strip() if "fence.proxy" in line else line)
    if found is None:
        return Instruction()
    predicate, name, rest = found[1], found[2], found[3]
    guard = (predicate,) if predicate else ()
    if rest.startswith(("[", "$")) or name.startswith(("bra", "bar", "ret")):
        return Instruction(sources=guard)
    # The first operand, one register or several in braces.
    end = rest.find("}") if rest.startswith("{") else rest.find(",")
    results, read = tuple(_REGISTER.findall(rest[:end])), tuple(_REGISTER.findall(rest[end:]))
    # Accumulators are read too.
    partial = bool(guard) or name.startswith(("wgmma", "mma"))
    differs = bool(_OWN.search(line)) or name.startswith("atom")
    if name.startswith("ld.") and not name.startswith("ld.param"):
        own_memory = name.startswith("ld.shared")
        return Instruction(
            results, guard if not own_memory else guard + read, () if own_memory else read, loads=not own_memory,
            loads_address="64" in name.rpartition(".")[2], partial=partial,
        )  # fmt: skip
    # An index is 32 bits wide before it is added to an address, and is no address however it came about.
    wide = [register for register in read if register.startswith("%rd")]
    if results and results[0].startswith("%rd") and wide:
        narrow = tuple(register for register in read if not register.startswith("%rd"))
        return Instruction(results, guard + narrow + tuple(wide), keeps_address=True, differs=differs, partial=partial)
    return Instruction(results, guard + read, differs=differs, partial=partial)


def decode_of_one_warp(line: str) -> Instruction:
    """Parse a line of a program of one warp, where what one lane tells by a shuffle is told to all (Triton 3.9)."""
    found = decode(line)
    return (
        Instruction(found.results) if re.search(r"\bshfl\.sync\.idx\.b32\s+%r\d+, %r\d+, \d+, 31, -1", line) else found
    )


def ways(line: str, state: State) -> tuple[bool, bool]:
    """Return whether a branch may go on to the next instruction, and whether it may jump."""
    return True, True
