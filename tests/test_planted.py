"""Faults are planted in every source file, in today's text: see planted.py, which runs them."""

from __future__ import annotations

import ast
from pathlib import Path

from .planted import FAULTS, PACKAGE


def sources() -> dict[str, str]:
    """Return the text of every source file that has a function, by its path in the package."""
    folders = (PACKAGE, PACKAGE / "kernels", PACKAGE / "bench")  # the latter two are links
    texts = {str(each.relative_to(PACKAGE)): each.read_text() for folder in folders for each in folder.rglob("*.py")}
    return {file: text for file, text in texts.items() if has_function(text)}


def has_function(text: str) -> bool:
    return any(isinstance(each, ast.FunctionDef) for each in ast.walk(ast.parse(text)))


def test_every_file_with_a_function_has_a_planted_fault() -> None:
    missing = sources().keys() - {file for _, file, *_ in FAULTS}
    assert not missing, f"plant a fault in {', '.join(sorted(missing))}: a line of FAULTS in planted.py"


def test_every_fault_can_be_planted_in_todays_text() -> None:
    assert len({name for name, *_ in FAULTS}) == len(FAULTS)
    for name, file, old, new, _ in FAULTS:
        text = Path(PACKAGE / file).read_text()
        assert text.count(old) == 1, f"{name}: the text stands {text.count(old)} times in {file}"
        ast.parse(text.replace(old, new))
