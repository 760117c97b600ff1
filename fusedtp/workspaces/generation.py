"""Generation counter that invalidates cached calls.

`version` goes up when a group's symmetric memory is made or given back, and when a group that calls were prepared for
is gone. Cached calls of an older version are prepared again, and the tables that hold them are emptied: they would also
hold memory that was given back.
"""

from __future__ import annotations

import contextlib
from collections.abc import MutableMapping
from typing import Any, TypeVar
from weakref import ref

CachedTable = TypeVar("CachedTable", bound=MutableMapping[Any, Any])

version = 0
# Watched groups that are gone. The interpreter puts them here: in a function of ours an interruption that comes just
# then would be lost, and with it that the group is gone. Whoever looks a call up by a group's address, or runs one that
# was found before, sees to it that there is none: `if gone: changed()`.
gone: list[ref[Any]] = []
_tables: list[MutableMapping[Any, Any]] = []
_watched: dict[int, ref[Any]] = {}


def table(new: CachedTable) -> CachedTable:
    """Returns `new`, which is emptied from now on whenever the number goes up."""
    _tables.append(new)
    return new


def changed() -> None:
    """Something that calls were prepared from is not as it was."""
    global version
    known = list(gone)
    version += 1
    for each in _tables:
        each.clear()
    for number, group in list(_watched.items()):
        if group() is None:
            _watched.pop(number, None)
    # Last: if this is interrupted, it is done again.
    for group in known:
        with contextlib.suppress(ValueError):
            gone.remove(group)


def watch(group: Any) -> ref[Any]:
    """A weak reference to a group, whose end is a change: another may be made under its name, or at its address."""
    known = _watched.get(id(group))
    if known is None or known() is not group:
        known = _watched[id(group)] = ref(group, gone.append)
    return known
