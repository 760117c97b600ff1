"""What kernels are given: named tuples, each field of which is known here by one name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

Path = tuple[int, ...]

_TUPLES = {
    "a": ("operands", "Left"), "b": ("operands", "Right"), "c": ("operands", "Result"),
    "epilogue": ("operands", "Epilogue"),
    "tiles": ("operands", "Tiles"), "chunks": ("gather_matmul", "Chunks"), "group": ("signal", "Group"),
    "x": ("push", "Rows"), "out": ("push", "Rows"), "residual": ("operands", "Result"),
    "scales": ("operands", "Scales"),
}  # fmt: skip


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
    if field == "BY":
        return f"{argument.upper()}_BY"
    if field == "cols" and argument == "a":
        return "shard_cols"
    return field


def named(
    kernel: Any, package: str, blocks: int = 0, *, adds: bool = False, scaled: bool = False
) -> dict[str, Any]:  # fmt: skip
    """What a kernel is given, by argument: the name of each value, in tuples as the launchers make them. blocks: how
    many further B there are. adds: whether there is a residual. scaled: whether operands have scales.
    """
    own = {"a": ("gather_matmul", "Shard")} if "chunks" in kernel.arg_names else {}

    def tuple_of(argument: str, cls: Any) -> Any:
        fields = {field: name_of(argument, field) for field in cls._fields}
        return cls(**fields | ({"residual": of("residual")} if adds and "residual" in fields else {}))

    def of(argument: str) -> Any:
        if argument == "more":
            of_package = importlib.import_module(f"{package}.operands")
            left, right = tuple_of("a", of_package.Left), tuple_of("b", of_package.Right)
            result = tuple_of("c", of_package.Result)
            a_scale, b_scale = ("scale_a", "scale_b") if scaled else ("none", "none")
            # Where columns lie side by side there is one A; where products are added, one result, in arenas.
            block = (
                of_package.Block("none", right, result, "bias_ptr", "z_ptr", "none", b_scale, "END")
                if own
                else of_package.Block(left, right, "none", "none", "none", a_scale, b_scale, "END")
            )
            return of_package.More((block,) * blocks, "COUNT", "A_UNIT", "B_UNIT", "C_UNIT")
        if argument not in _TUPLES or (argument == "scales" and not scaled):
            return argument
        module, cls = (_TUPLES | own)[argument]
        return tuple_of(argument, getattr(importlib.import_module(f"{package}.{module}"), cls))

    return {argument: of(argument) for argument in kernel.arg_names}


def mapped(tree: Any, change: Callable[[Path, str], Any], path: Path = ()) -> Any:
    """The tree of names with each replaced by what `change` makes of its place and itself."""
    if isinstance(tree, str):
        return change(path, tree)
    parts = [mapped(each, change, (*path, i)) for i, each in enumerate(tree)]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)


def flat(names: list[str], values: tuple[Any, ...]) -> dict[str, Any]:
    """What a launcher gives, by the names of fields; constants as they are."""
    found: dict[str, Any] = {}
    for argument, value in zip(names, values, strict=True):
        pairs = {argument: value} if not hasattr(value, "_asdict") else value._asdict()
        for field, each in pairs.items():
            if field == "blocks":
                continue
            name = field if pairs.keys() == {argument} else name_of(argument, field)
            found[name] = getattr(each, "value", each) if type(each).__name__ == "constexpr" else each
    return found
