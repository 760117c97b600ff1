"""An instruction as `uniform` sees it: which registers it writes and reads, and whether it loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# What is known of registers, by name.
State = dict[str, int]

# Of a register: its value may differ between the warps of a program; it is an address that was loaded from a table; it
# is that of the launch's arguments. As a mask it may be anything, all ones, or zero.
DIFFERS, LOADED, ARGUMENTS = 1, 2, 4
ANY, ONES, ZERO = 8, 16, 32


@dataclass(frozen=True)
class Instruction:
    """results: registers written. sources: registers read, the predicate's too. base: those that make the address of a
    load. differs: what it gives is each thread's own. partial: keeps some of what the results held. masked: writes only
    the lanes of `exec`. special: does something else to what is known. is_copy: of one register to another.
    """

    results: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    base: tuple[str, ...] = ()
    loads: bool = False
    loads_address: bool = False
    keeps_address: bool = False
    differs: bool = False
    partial: bool = False
    masked: bool = False
    special: Callable[[State], None] | None = None
    is_copy: bool = False
