"""The public names with their signatures equal those in tests/api.txt, so an API change shows as a diff of that file.

docs/guide/api.md has them with their docstrings. FUSEDTP_API=write writes both.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import fusedtp

FILE = Path(__file__).with_name("api.txt")
PAGE = Path(__file__).parent.parent / "docs" / "guide" / "api.md"
# A name's mark on the page, and what is generated below it: up to the next mark or section.
MARKED = re.compile(r"^<!-- api: (\S+) -->\n.*?(?=^<!-- api: |^## |\Z)", re.MULTILINE | re.DOTALL)
WIDTH = 100


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


def as_written(path: Path, found: str) -> None:
    if os.environ.get("FUSEDTP_API") == "write":
        path.write_text(found)
    assert found == path.read_text()


def test_the_public_names_are_as_written_down() -> None:
    lines = [line for name in sorted(fusedtp.__all__) for line in signatures(name, getattr(fusedtp, name))]
    as_written(FILE, "\n".join(lines) + "\n")


def parameters(signature: inspect.Signature) -> Iterator[str]:
    """Yield the parameters as they are written in a definition."""
    starred = False
    for each in signature.parameters.values():
        starred |= each.kind is each.VAR_POSITIONAL
        if each.kind is each.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        # An annotation is the text of the source, which `str` would quote.
        plain = str(each.replace(annotation=each.empty, default=each.empty))
        annotated = f"{plain}: {each.annotation}" if isinstance(each.annotation, str) else plain
        yield annotated if each.default is each.empty else f"{annotated} = {each.default!r}"


def definition(name: str, value: object) -> str:
    """Return a function's or constructor's signature as code, a parameter a line if it is long."""
    assert callable(value)
    kind, signature = ("class" if inspect.isclass(value) else "def"), inspect.signature(value)
    returns = signature.return_annotation
    end = ")" if kind == "class" or returns is signature.empty else f") -> {returns}"
    given = list(parameters(signature))
    line = f"{kind} {name}({', '.join(given)}{end}"
    return line if len(line) <= WIDTH else "\n".join((f"{kind} {name}(", *(f"    {each}," for each in given), end))


def entry(mark: re.Match[str]) -> str:
    """Return a name's part of the page: heading, signature, docstring."""
    name = mark[1].removeprefix("fusedtp.")
    value = attrgetter(name)(fusedtp)
    parts = [f"<!-- api: {mark[1]} -->\n### {name}"]
    if callable(value) and not (inspect.isclass(value) and issubclass(value, Exception)):
        # The guide's blocks of ```python are run.
        parts.append(f"```py\n{definition(name.rpartition('.')[2], value)}\n```")
    documented = (value, vars(value).get("__init__")) if inspect.isclass(value) else (value,)
    parts += [inspect.cleandoc(each.__doc__) for each in documented if each is not None and each.__doc__]
    if (forward := vars(value).get("forward")) is not None and forward.__doc__:
        # What a call of the layer takes and returns.
        parts += [f"```py\n{definition('forward', forward)}\n```", inspect.cleandoc(forward.__doc__)]
    return "\n\n".join(parts) + "\n\n"


def test_the_page_has_signatures_and_docstrings() -> None:
    as_written(PAGE, MARKED.sub(entry, PAGE.read_text()).rstrip("\n") + "\n")
