"""Read text files and JSON that others may have written, with limits and checks; replace whole files.

`json` alone accepts duplicate keys, NaN, and integers of any length, which then cause errors far from the file. This
package unpickles none of its files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

# Control characters except newline and tab, and bytes that were no UTF-8, for example in a path.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# Limit of an integer's digits.
_MAX_DIGITS = 30


def read_text(path: Path, *, max_bytes: int) -> str:
    """Return the UTF-8 text of a regular file of at most `max_bytes`.

    Raises ValueError for a larger file, for a pipe or a device, and for text that is not UTF-8; OSError as `open` does.
    """
    # Do not wait for the writer of a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path} is not a regular file")
        content = b""
        if about.st_size <= max_bytes:
            with open(descriptor, "rb", closefd=False) as file:
                # Read one byte more: the file may grow meanwhile.
                content = file.read(max_bytes + 1)
        if max(about.st_size, len(content)) > max_bytes:
            raise ValueError(f"{path} is larger than the {max_bytes} bytes that are read of such a file")
    finally:
        os.close(descriptor)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise ValueError(f"line {line} is not UTF-8: {error}") from error


def replace(path: Path, content: bytes) -> None:
    """Put `content` at `path` so that a reader sees the old file or the new one, never half of it.

    Folders are made as needed. An existing file keeps its mode, and a link still leads to the file. If the file may not
    be written, raises OSError and changes nothing.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    mode: int | None = None
    with contextlib.suppress(FileNotFoundError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    create = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    # The kernel applies the umask to the mode of a new file. The other is private until it has the old file's mode.
    descriptor = os.open(temporary, create, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if mode is not None:
                os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def visible(text: str) -> str:
    """Return the text with its control characters written as in Python, a terminal's escape as "\\x1b".

    Newlines and tabs stay. A terminal or a page obeys control characters, so nothing from outside is shown without
    this.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


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
