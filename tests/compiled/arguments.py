"""What kernels are given: named tuples, each field of which is known here by one name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

Path = tuple[int, ...]

_TUPLES = {
    "a": ("operands", "Left"), "b": ("operands", "Right"), "c": ("operands", "Outputs"),
    "epilogue": ("epilogue", "TileEpilogue"),
    "tiles": ("operands", "Tiles"), "chunks": ("gather_matmul", "Chunks"), "group": ("signal", "RankGroup"),
    "x": ("push", "LocalRows"), "out": ("push", "LocalRows"), "residual": ("operands", "Outputs"),
    "scales": ("operands", "Scales"),
}  # fmt: skip
# Tuples whose fields, but for constants, have an entry for each block.
_TABLES = ("Left", "Right", "Outputs", "TileEpilogue", "Scales")


def name_of(argument: str, field: str) -> str:
    """One field's: `stride_am` is A's from row to row."""
    if field.startswith("stride_"):
        return f"stride_{argument[0]}{field[-1]}"
    if field in ("ptr", "desc"):
        return f"{argument}_{field}"
    if field in ("bias", "z"):
        return f"{field}_ptr"
    if argument == "scales" and field != "END":
        return f"scale_{field}"
    if field in ("BY", "UNIT", "COUNT"):
        return f"{argument.upper()}_{field}"
    if field == "cols" and argument == "a":
        return "shard_cols"
    return field


def named(
    kernel: Any, package: str, more: int = 0, *, adds: bool = False, scaled: bool = False
) -> dict[str, Any]:  # fmt: skip
    """What a kernel is given, by argument: the name of each value, in tuples as the launchers make them. more: how many
    further blocks there are. adds: whether there is a residual. scaled: whether operands have scales.
    """
    own = {"a": ("gather_matmul", "Shard")} if "chunks" in kernel.arg_names else {}
    if "epilogue" in kernel.arg_names:
        own["out"] = ("operands", "Outputs")

    def of(argument: str) -> Any:
        if argument not in _TUPLES or (argument == "scales" and not scaled):
            return argument
        module, name = (_TUPLES | own)[argument]
        cls = getattr(importlib.import_module(f"{package}.{module}"), name)
        # The results of a sum, and float8 rows that travel, are one.
        one = argument == "residual" or (argument in ("c", "epilogue") and "chunks" not in kernel.arg_names)
        fields = {}
        for field in cls._fields:
            entry: Any = name_of(argument, field)
            if name in _TABLES and (not field.isupper() or field in ("K", "N")) and field not in ("out", "residual"):
                alone = one or (argument == "scales" and field == "a" and "a" in own)
                entry = (entry,) * (1 if alone else 1 + more)
            fields[field] = entry
        return cls(**fields | ({"residual": of("residual")} if adds and "residual" in fields else {}))

    return {argument: of(argument) for argument in kernel.arg_names}


def mapped(tree: Any, change: Callable[[Path, str], Any], path: Path = ()) -> Any:
    """The tree of names with each replaced by what `change` makes of its place and itself."""
    if isinstance(tree, str):
        return change(path, tree)
    parts = [mapped(each, change, (*path, i)) for i, each in enumerate(tree)]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)


def flat(names: list[str], values: tuple[Any, ...]) -> dict[str, Any]:
    """What a launcher gives, by the names of fields, of the first block; constants as they are."""
    found: dict[str, Any] = {}
    for argument, value in zip(names, values, strict=True):
        pairs = {argument: value} if not hasattr(value, "_asdict") else value._asdict()
        for field, each in pairs.items():
            name = field if pairs.keys() == {argument} else name_of(argument, field)
            first = each[0] if type(each) is tuple else each
            found[name] = getattr(first, "value", first) if type(first).__name__ == "constexpr" else first
    return found
