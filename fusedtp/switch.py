"""A switch that a function turns on in this process, and that `undo` or the end of a `with` block turns off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Switch(Generic[Value]):
    """Switch that is on: `undo()` turns it off, as does the end of a `with` block.

    - `value`: what it was turned on with.
    - `on`: the switches of its kind that are on, the last one at the end.
    - `undone`: what turning the last one off calls.
    """

    def __init__(
        self, value: Value, on: list[Switch[Value]], install: Callable[[], object] | None = None,
        undone: list[Callable[[], object]] | None = None,
    ) -> None:  # fmt: skip
        """Turn the switch on, by `install` if it is the first one. An `install` that fails is undone."""
        self.value, self._on, self._undone = value, on, [] if undone is None else undone
        if not on and install is not None:
            try:
                install()
            except BaseException:
                self._give_back()
                raise
        on.append(self)

    def undo(self) -> None:
        """Give back what was replaced, unless another switch of this kind is on. A second call does nothing."""
        if self in self._on:
            self._on.remove(self)
            if not self._on:
                self._give_back()

    def _give_back(self) -> None:
        while self._undone:
            self._undone.pop()()

    def __enter__(self) -> Switch[Value]:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()
