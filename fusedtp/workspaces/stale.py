"""When what is kept from call to call holds no more: one number, which goes up whenever a group's symmetric memory is
made or given back, or a group that calls were prepared for is gone. What was found out under another number is found
out anew.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import ref

version = 0
_watched: dict[int, ref[Any]] = {}


def changed() -> None:
    """Something that calls were prepared from is not as it was."""
    global version
    version += 1


def watch(group: Any) -> ref[Any]:
    """A reference to a group, the end of which is a change: another may be made under its name, or in its place."""
    known = _watched.get(id(group))
    if known is None or known() is not group:
        number = id(group)

        def gone(_: ref[Any]) -> None:
            if not sys.is_finalizing():
                _watched.pop(number, None)
                changed()

        known = _watched[number] = ref(group, gone)
    return known
