"""What kernels are given: named tuples, each field of which is known here by one name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

Path = tuple[int, ...]

_TUPLES = {
    "a": ("matmul", "Left"), "b": ("matmul", "Right"), "c": ("matmul", "Result"), "epilogue": ("matmul", "Epilogue"),
    "tiles": ("matmul", "Tiles"), "chunks": ("gather_matmul", "Chunks"), "group": ("signal", "Group"),
    "x": ("push", "Rows"), "out": ("push", "Rows"),
}  # fmt: skip


def tuples_of(kernel: Any, package: str) -> dict[str, Any]:
    """The classes of a kernel's arguments that are tuples."""
    names = [name for name in kernel.arg_names if name in _TUPLES]
    own = {"a": ("gather_matmul", "Shard")} if "chunks" in names else {}
    found = {}
    for name in names:
        module, cls = (_TUPLES | own)[name]
        found[name] = getattr(importlib.import_module(f"{package}.{module}"), cls)
    return found


def name_of(argument: str, field: str) -> str:
    """One field's: `stride_am` is A's from row to row."""
    if field.startswith("stride_"):
        return f"stride_{argument[0]}{field[-1]}"
    if field in ("ptr", "desc", "bias"):
        return f"{argument}_{field}" if field != "bias" else "bias_ptr"
    if field == "BY":
        return f"{argument.upper()}_BY"
    if field == "cols" and argument == "a":
        return "shard_cols"
    return field


def fields(kernel: Any, package: str) -> Iterator[tuple[Path, str]]:
    """Where each of a kernel's values is, and its name."""
    tuples = tuples_of(kernel, package)
    for i, argument in enumerate(kernel.arg_names):
        if argument not in tuples:
            yield (i,), argument
            continue
        for j, field in enumerate(tuples[argument]._fields):
            yield (i, j), name_of(argument, field)


def flat(names: list[str], values: tuple[Any, ...]) -> dict[str, Any]:
    """What a launcher gives, by the names of fields; constants as they are."""
    found: dict[str, Any] = {}
    for argument, value in zip(names, values, strict=True):
        pairs = {argument: value} if not hasattr(value, "_asdict") else value._asdict()
        for field, each in pairs.items():
            name = field if pairs.keys() == {argument} else name_of(argument, field)
            found[name] = getattr(each, "value", each) if type(each).__name__ == "constexpr" else each
    return found
