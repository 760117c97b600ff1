"""Generation counter that invalidates cached calls.

`version` goes up when:

- a group's symmetric memory is made or given back;
- a group that calls were prepared for is gone;
- measurements change the hardware model of a group;
- `fusedtp.require` is called;
- the process is forked.

Cached calls of an older version are prepared again. Their tables are emptied, because they hold memory that was given
back.
"""

from __future__ import annotations

import contextlib
from collections.abc import MutableMapping
from typing import Any, TypeVar
from weakref import ref

CachedTable = TypeVar("CachedTable", bound=MutableMapping[Any, Any])

version = 0
# Watched groups that are gone. The callback of their references is `gone.append`, because an interruption inside a
# Python callback would be lost. Code that looks up a cached call or runs one must check: `if gone: changed()`.
gone: list[ref[Any]] = []
_tables: list[MutableMapping[Any, Any]] = []
_watched: dict[int, ref[Any]] = {}


def table(new: CachedTable) -> CachedTable:
    """Register a table, which every `changed` empties, and return it."""
    _tables.append(new)
    return new


def changed() -> None:
    """Invalidate all cached calls."""
    global version
    known = list(gone)
    version += 1
    for each in _tables:
        each.clear()
    for number, group in list(_watched.items()):
        if group() is None:
            _watched.pop(number, None)
    # Last, so that an interruption before this makes the next check call `changed` again.
    for group in known:
        with contextlib.suppress(ValueError):
            gone.remove(group)


def watch(group: Any) -> ref[Any]:
    """Return a weak reference to a group. Its end invalidates cached calls.

    A later group may have the same name or address.
    """
    known = _watched.get(id(group))
    if known is None or known() is not group:
        known = _watched[id(group)] = ref(group, gone.append)
    return known
