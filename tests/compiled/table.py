"""Rows of compiled kernels, one a case, in results/kernels/offline.csv, and the table of docs/kernels.md."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ..generated import replaced
from . import checks
from .build import Built, build
from .cases import DTYPES, TARGETS, VARIANTS, plain

ROOT = Path(__file__).parent.parent.parent
ROWS, DOCUMENT = ROOT / "results" / "kernels" / "offline.csv", ROOT / "docs" / "kernels.md"
COLUMNS = (
    "triton", "target", "kernel", "lengths", "dtype", "shape", "a_by", "b_by", "tile", "warps", "stages", "one_loop",
    "registers", "spill_bytes", "stack_bytes", "lanes", "shared_bytes", "tensor_core", "tma_loads", "inner_loop",
    "plain_inner_loop", "plain_registers",
)  # fmt: skip


# In the column `lengths`: nothing is known of them; "16" where all are multiples of that.
ANY = "any"


def row(built: Built) -> dict[str, str]:
    """Return the row of a kernel. Instructions are the machine's; an inner loop counts only if it uses tensor cores."""
    import triton

    case, beside = built.case, build(plain(built.case)) if checks.compares(built) else None
    multiplies = VARIANTS[case.variant].multiplies
    by = (case.a_by, case.b_by) if multiplies else ("", "")
    tile, one_loop = "x".join(map(str, built.tile)), int(built.flattened) if multiplies else ""
    values = (
        triton.__version__, case.target, case.variant, ANY if case.loose else "16", case.dtype_name, case.shape,
        *by, tile, built.num_warps, built.num_stages, one_loop,
        built.registers, built.spill_bytes, built.stack_bytes, built.lanes, built.shared_bytes,
        built.code.count(TARGETS[case.target].multiplies),
        built.code.count("UTMALDG"), len(built.inner_loop) or "",
        "" if beside is None else len(beside.inner_loop), "" if beside is None else beside.registers,
    )  # fmt: skip
    return dict(zip(COLUMNS, map(str, values), strict=True))


def as_csv(rows: Sequence[dict[str, str]]) -> str:
    """The file's text."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_markdown(rows: Sequence[dict[str, str]]) -> str:
    """The multiplying kernels of bfloat16 at the table's tile for many rows and columns, as they are launched; then
    what each Triton keeps on the stack.
    """
    pinned = ".".join(map(str, checks.versions()[1]))
    lines = [
        "| target | kernel | tile | warps, stages | reads A, B | registers (plain) | shared | loop (plain) | TMA |",
        "|---|---|---|---|---|---:|---:|---:|---:|",
    ]
    for each in rows:
        main = ("rows", "columns") if TARGETS[each["target"]].described else ("pointers", "pointers")
        chosen = (DTYPES[torch.bfloat16], "many", *main, pinned, "16")
        if tuple(each[name] for name in ("dtype", "shape", "a_by", "b_by", "triton", "lengths")) != chosen:
            continue
        beside = {name: f" ({each[name]})" if each[name] else "" for name in ("plain_registers", "plain_inner_loop")}
        lines.append(
            f"| {each['target']} | {each['kernel']} | {each['tile']} | {each['warps']}, {each['stages']} | "
            f"{each['a_by']}, {each['b_by']} | {each['registers']}{beside['plain_registers']} | "
            f"{each['shared_bytes']} | {each['inner_loop']}{beside['plain_inner_loop']} | {each['tma_loads']} |"
        )
    return "\n".join(
        [*lines, "", f"Triton {pinned}. What lies on the stack of a thread, by Triton and lengths:", ""]
    ) + (_stacks(rows))


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _stacks(rows: Sequence[dict[str, str]]) -> str:
    """Return how many kernels of each kind have a stack, and the largest stack."""
    lines = ["| Triton | target | lengths | kernels | with a stack | bytes at most |", "|---|---|---|---:|---:|---:|"]
    kinds = dict.fromkeys((each["triton"], each["target"], each["lengths"]) for each in rows)
    for kind in sorted(kinds, key=lambda kind: (_number(kind[0]), kind[2]), reverse=True):
        stacks = [
            int(each["stack_bytes"]) for each in rows if (each["triton"], each["target"], each["lengths"]) == kind
        ]
        lengths = "any" if kind[2] == ANY else "multiples of 16"
        with_one = sum(stack > 0 for stack in stacks)
        lines.append(f"| {kind[0]} | {kind[1]} | {lengths} | {len(stacks)} | {with_one} | {max(stacks)} |")
    return "\n".join(lines)


def compare_or_write(built: Sequence[Built]) -> None:
    """Write both, with FUSEDTP_KERNELS=write, or fail where they differ from what is there; rows of other Tritons stay
    as they are.
    """
    written = list(csv.DictReader(io.StringIO(ROWS.read_text()))) if ROWS.exists() else []
    found = [row(each) for each in built]
    others = [each for each in written if each["triton"] != found[0]["triton"]]
    rows = sorted([*others, *found], key=lambda each: _number(each["triton"]), reverse=True)
    text, document = as_csv(rows), replaced(DOCUMENT.read_text(), "compiled", as_markdown(rows))
    if os.environ.get("FUSEDTP_KERNELS") == "write":
        ROWS.parent.mkdir(parents=True, exist_ok=True)
        ROWS.write_text(text)
        DOCUMENT.write_text(document)
    elif len(others) == len(written):
        pytest.skip(f"no rows of Triton {found[0]['triton']}")
    assert ROWS.read_text() == text, "run `FUSEDTP_KERNELS=write nox -s kernels`"
    assert DOCUMENT.read_text() == document, "run `FUSEDTP_KERNELS=write nox -s kernels`"
