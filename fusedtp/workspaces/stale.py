"""When what is kept from call to call no longer holds: one number, which goes up whenever a group's symmetric memory is
made or given back, or a group that calls were prepared for is gone. What was worked out under an older number is worked
out anew, and the tables that keep it are emptied: they would also keep memory that was given back.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any, TypeVar
from weakref import ref

Table = TypeVar("Table", bound=MutableMapping[Any, Any])

version = 0
_tables: list[MutableMapping[Any, Any]] = []
_watched: dict[int, ref[Any]] = {}


def table(new: Table) -> Table:
    """Returns `new`, which is emptied from now on whenever the number goes up."""
    _tables.append(new)
    return new


def changed() -> None:
    """Something that calls were prepared from is not as it was."""
    global version
    version += 1
    for each in _tables:
        each.clear()


def watch(group: Any) -> ref[Any]:
    """A weak reference to a group, whose end is a change: another may be made under its name, or at its address."""
    known = _watched.get(id(group))
    if known is None or known() is not group:
        number = id(group)

        def gone(_: ref[Any]) -> None:
            if not sys.is_finalizing():
                _watched.pop(number, None)
                changed()

        known = _watched[number] = ref(group, gone)
    return known
