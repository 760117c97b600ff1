"""Decisions for the ops of a workspace, cached until the workspace goes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

Decision = TypeVar("Decision")

# Cached decisions of a workspace, at most, because shapes may never repeat. All ranks make a decision again from the
# same data.
_MAX_DECISIONS = 4096


class Decisions(Generic[Decision]):
    """Cache of one kind of decision by workspace and key, whose owner is the module that decides.

    A decision must not refer to its workspace, which would keep both alive.
    """

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[object, dict[Hashable, Decision]] = WeakKeyDictionary()

    def get(self, ws: object, key: Hashable, make: Callable[[], Decision]) -> Decision:
        """Return the cached decision of a workspace for `key`. Call `make` for a new key."""
        made = self.of(ws)
        if key not in made:
            decision = make()
            if len(made) >= _MAX_DECISIONS:
                made.clear()
            made[key] = decision
        return made[key]

    def of(self, ws: object) -> dict[Hashable, Decision]:
        """Return all cached decisions of a workspace by key."""
        made = self._made.get(ws)
        if made is None:
            made = self._made[ws] = {}
        return made
