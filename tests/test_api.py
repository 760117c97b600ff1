"""The public names with their signatures equal those in tests/api.txt, so an API change shows as a diff of that file.

FUSEDTP_API=write writes it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import fusedtp

FILE = Path(__file__).with_name("api.txt")


def signatures(name: str, value: object) -> Iterator[str]:
    """Yield a line for a function; for a class, lines for its constructor and its own public methods and properties."""
    if isinstance(value, ModuleType):
        for each in value.__all__:
            yield from signatures(f"{name}.{each}", getattr(value, each))
    elif not inspect.isclass(value):
        yield f"{name}{inspect.signature(value) if callable(value) else ''}"
    else:
        yield f"class {name}{'' if issubclass(value, Exception) else inspect.signature(value)}"
        for each, member in vars(value).items():
            if not each.startswith("_"):
                is_function = inspect.isfunction(member)
                yield f"    {each}{inspect.signature(member) if is_function else ''}"


def test_the_public_names_are_as_written_down() -> None:
    lines = [line for name in sorted(fusedtp.__all__) for line in signatures(name, getattr(fusedtp, name))]
    found = "\n".join(lines) + "\n"
    if os.environ.get("FUSEDTP_API") == "write":
        FILE.write_text(found)
    assert found == FILE.read_text()
