"""Read a JSON file key by key, with a check of each value's type and limits. Errors name the key.

`json` alone accepts duplicate keys, NaN, and integers of any length, which then cause errors far from the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any

# Limit of an integer's digits.
_MAX_DIGITS = 30


class Entry:
    """JSON object. `at` is its place in the file, such as "samples[3]"; "" for the whole file."""

    def __init__(self, values: object, at: str = "") -> None:
        if not isinstance(values, dict):
            raise ValueError(f"{at or 'the whole'} must be an object, got {brief(values)}")
        self.values: dict[str, Any] = values
        self.at = at

    def where(self, name: str) -> str:
        """Return the place of a key, as errors name it."""
        name = name if name.isprintable() and name.strip() == name != "" else repr(name)
        return f"{self.at}.{name}" if self.at else name

    def only(self, *names: str) -> Entry:
        """Return this entry. Raise ValueError unless it has exactly these keys."""
        for name in names:
            self.value(name)
        if other := next((name for name in self.values if name not in names), None):
            raise ValueError(f"{self.where(other[:80])} is not known")
        return self

    def value(self, name: str) -> Any:
        if name not in self.values:
            raise ValueError(f"{self.where(name)} is missing")
        return self.values[name]

    def text(self, name: str, among: Collection[str] | None = None) -> str:
        """Return a line of text, which must be one of `among` if that is given."""
        value = self.value(name)
        if not isinstance(value, str) or not value.isprintable():
            raise ValueError(f"{self.where(name)} must be a line of text, got {brief(value)}")
        if among is not None and value not in among:
            raise ValueError(f"{self.where(name)} must be one of {', '.join(among)}, got {brief(value)}")
        return value

    def integer(self, name: str, least: int, most: int) -> int:
        value = self.value(name)
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{self.where(name)} must be an integer from {least} to {most}, got {brief(value)}")
        return value

    def number(self, name: str, least: float, most: float) -> float:
        value = self.value(name)
        if type(value) not in (int, float) or not least <= value <= most:
            raise ValueError(f"{self.where(name)} must be a number from {least:g} to {most:g}, got {brief(value)}")
        return float(value)

    def numbers(self, name: str, least: float, most: float, among: Collection[str] | None = None) -> dict[str, float]:
        """Return an object with at least one value, all of them numbers."""
        entry = self.entry(name)
        if not entry.values:
            raise ValueError(f"{entry.at} is empty")
        for each in entry.values:
            if not each.isprintable() or (among is not None and each not in among):
                raise ValueError(f"{entry.where(each[:80])} is not known")
        return {each: entry.number(each, least, most) for each in entry.values}

    def entry(self, name: str) -> Entry:
        return Entry(self.value(name), self.where(name))

    def entries(self, name: str) -> list[Entry]:
        """Return a list of objects."""
        values = self.value(name)
        if not isinstance(values, list):
            raise ValueError(f"{self.where(name)} must be a list, got {brief(values)}")
        return [Entry(value, f"{self.where(name)}[{number}]") for number, value in enumerate(values)]


def brief(value: object) -> str:
    """Return a short text of a value."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}.."


def entry_of(text: str) -> Entry:
    """Parse a file's text as an object. A ValueError names the line of a JSON error, or a duplicate key."""
    try:
        return Entry(json.loads(text, object_pairs_hook=_once, parse_int=_integer))
    except RecursionError:
        raise ValueError("more brackets in brackets than a file of ours has") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{brief(twice)} is there twice")
    return found


def _integer(digits: str) -> int | float:
    # A longer integer becomes infinity. Its key's check then refuses it and names the key.
    return int(digits) if len(digits) <= _MAX_DIGITS else math.copysign(math.inf, -1 if digits[0] == "-" else 1)
