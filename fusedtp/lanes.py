"""Lanes: several ops of one group in flight at once.

A lane is a workspace of its own for a group and a device, with its own arenas, epochs, lock and failures. Inside a lane
ops run one after another, and nothing of the protocol changes. Ops of different lanes run beside each other. All ranks
number lanes alike, by what uses them.

Rule: an op in another lane than `ORDINARY` never waits inside a kernel. It waits by stream operations and sends by the
copy engine; on a CPU it waits on a thread. Otherwise a kernel of one lane could fill the multiprocessors of one rank,
and a kernel of another lane those of its peer. Each would wait forever for a kernel that cannot start.
"""

from __future__ import annotations

# Ordinary calls; FSDP2's gathers; FSDP2's reduce-scatters.
ORDINARY, GATHERS, REDUCTIONS = 0, 1, 2
_USES = ("ordinary calls", "FSDP2's gathers", "FSDP2's reduce-scatters")


def said(lane: int) -> str:
    """Return the end of a message about an op in `lane`, "" for an ordinary one."""
    return f" in lane {lane}, {_USES[lane]}" if lane else ""


def lock(group_name: str, lane: int) -> tuple[str, str]:
    """Return the key of the lock (`locks.alone`) that an op of a group holds in `lane`."""
    return ("lane", f"{group_name!r}{said(lane)}") if lane else ("group", group_name)
