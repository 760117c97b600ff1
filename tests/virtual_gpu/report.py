"""docs/emulation.md: what was executed, and which mutants were found, in the last whole run."""

from __future__ import annotations

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
import triton

from ..generated import replaced
from .evidence import Done, shares
from .mutants import Mutant, reason

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "emulation.md"


def planted(done: Sequence[Done]) -> list[tuple[Mutant, str, int]]:
    """Return mutants, how each was found, and the target."""
    found = [(mutant, how, each.unit.target) for each in done for mutant, how in each.found or ()]
    return sorted(found, key=lambda each: (each[0].kind, each[2], each[0].kernel, each[0].where))


def _executed(done: Sequence[Done]) -> list[str]:
    lines = [
        "| target | kernel | compiled variants | instructions | executed |",
        "|---|---|---:|---:|---:|",
    ]
    for (target, name), (variants, total, ran) in shares(done).items():
        kernel = name.strip("_").removesuffix("_kernel")
        # Rounded down, so that only complete coverage is 100 %.
        lines.append(f"| sm_{target} | {kernel} | {variants} | {total} | {1000 * ran // total / 10} % |")
    plain = [each for each in done if not each.unit.mutated]
    lines += ["", "Code that only an empty contraction reaches is not counted: no launch by descriptors has one."]
    apart = [sum(values) for values in zip(*shares(done, whole=False).values(), strict=True)]
    if apart:
        lines += [
            f"{apart[0]} variants more, of {apart[1]} instructions, are launched by ranks alone that have nothing of "
            "some operand: what they would do with it never runs. "
            f"{1000 * apart[2] // apart[1] / 10} % of these were executed."
        ]
    lines += [
        "",
        f"{len(plain)} ops, and functions with their gradients, by dtype and target, "
        f"{sum(each.runs for each in plain)} runs, "
        f"{sum(each.instructions for each in plain) // 10**6} million instructions of warps, "
        f"{sum(each.stale for each in plain)} loads that saw the past, all results right; "
        f"a budget was spent in {sum(each.gave_up for each in plain)} runs with a late rank. "
        f"Triton {triton.__version__}.",
    ]
    return lines


def _mutants(done: Sequence[Done]) -> list[str]:
    by_kind: dict[str, list[tuple[Mutant, str]]] = defaultdict(list)
    why: dict[str, set[str]] = defaultdict(set)
    for mutant, how, _ in planted(done):
        by_kind[mutant.kind].append((mutant, how))
        if not how:
            # Up to the function of the kernel's tiles or rows: the outer functions are the same for all.
            place = " in ".join(mutant.inside.split(" < ")[:2])
            why[reason(mutant)].add(f"{mutant.kind}, {place}")
    lines = ["| mutant | planted | found | equivalent |", "|---|---:|---:|---:|"]
    for kind, each in sorted(by_kind.items()):
        found = sum(bool(how) for _, how in each)
        lines.append(f"| {kind} | {len(each)} | {found} | {len(each) - found} |")
    total = sum(map(len, by_kind.values()))
    found = sum(bool(how) for each in by_kind.values() for _, how in each)
    lines += [f"| all | {total} | {found} | {total - found} |", "", "Equivalent, as the machine has it:", ""]
    lines += [f"- {text}: {'; '.join(sorted(places))}" for text, places in sorted(why.items())]
    return lines


def compare_or_write(done: Sequence[Done]) -> None:
    """Write the document's tables with FUSEDTP_EMULATION=write, or fail if they differ."""
    before = DOCUMENT.read_text()
    document = replaced(before, "executed", "\n".join(_executed(done)))
    document = replaced(document, "mutants", "\n".join(_mutants(done)))
    if os.environ.get("FUSEDTP_EMULATION") == "write":
        DOCUMENT.write_text(document)
        return
    if (there := re.findall(r"Triton ([\d.]+\d)\.", before)) != [triton.__version__]:
        pytest.skip(f"written with Triton {there}")
    changes = "\n".join(difflib.unified_diff(before.splitlines(), document.splitlines(), "there", "found", n=0))
    assert before == document, f"run `FUSEDTP_EMULATION=write nox -s emulate`:\n{changes}"
