"""How long a wait for a peer may take: one budget a group, from `set_timeout`."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from ..shards import check_number

_seconds = 30.0
# Of the groups that were given a budget of their own.
_seconds_of: WeakKeyDictionary[ProcessGroup, float] = WeakKeyDictionary()


def of(group: ProcessGroup | None) -> float:
    """The budget of `group`, in seconds; None: of every group that has none of its own."""
    return _seconds if group is None else _seconds_of.get(group, _seconds)


def own(group: ProcessGroup) -> float | None:
    """The budget that `group` was given for itself, if any."""
    return _seconds_of.get(group)


def set_for(group: ProcessGroup | None, seconds: float) -> None:
    """Set the budget of `group`, or (None) of every group: see `registry.set_timeout` for the errors."""
    global _seconds
    check_number("seconds", seconds)
    if not 0 < seconds <= 2_000_000:
        raise ValueError(f"seconds must be above 0 and at most 2,000,000, got {seconds!r}")
    if group is not None:
        _seconds_of[group] = float(seconds)
        return
    _seconds = float(seconds)
    _seconds_of.clear()
