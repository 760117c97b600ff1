"""Further checks of compiled kernels that multiply float8."""

from __future__ import annotations

import re

import torch

from .assembly import Code
from .blocks import loops
from .build import Built
from .cases import VARIANTS

# sm_90's matrix unit keeps 14 bits of a sum: so much of the contraction goes into one, then it is added in float32.
LONGEST = 128
# By target, what multiplies, and what else might: all that multiplies is of the first kind.
_MULTIPLIES = {
    "sm_90": (r"\bwgmma\.mma_async\S*\.e4m3\.e4m3\b", r"\b(wgmma\.mma_async|mma\.sync)"),
    "sm_100": (r"\btcgen05\.mma\S*kind::f8f6f4\b", r"\b(tcgen05\.mma|mma\.sync)"),
    "gfx942": (r"^v_mfma_f32_\w+_({a}_{b}|{b}_{a})\b", r"^v_(mfma|smfmac)"),
}
# What AMD's assembler calls them; products may be made transposed.
_AMDS = {torch.float8_e4m3fnuz: "fp8", torch.float8_e5m2fnuz: "bf8"}
# Of blocks with scales: what multiplies them with these, or what multiplies what was made of both.
_MULTIPLIES_BLOCKS = {
    "sm_90": r"\bwgmma\.mma_async\S*\.f32\.bf16\.bf16\b",
    "sm_100": r"\btcgen05\.mma\S*kind::mxf8f6f4\S*block_scale",
    "gfx942": r"^v_mfma_f32_\w+_bf16",
}
_QGMMA = re.compile(r"\bQGMMA\.64x(\d+)x(\d+)\.F32\.E4M3\.E4M3 (R\d+), gdesc\S+, (RZ|R\d+)")


def multiplied(built: Built) -> None:
    """Operands are multiplied as they are, by the target's instruction for them, and summed in float32."""
    case = built.case
    if not case.is_float8 or not VARIANTS[case.variant].multiplies:
        return
    own, anything = _MULTIPLIES[case.target]
    own = _MULTIPLIES_BLOCKS[case.target] if case.blocks else own
    if case.target == "gfx942" and not case.blocks:
        own = own.format(a=_AMDS[case.dtype], b=_AMDS[case.b_dtype or case.dtype])
    assert built.ordered.count(own), "no multiplication of float8"
    others = [line for line in built.ordered.lines if re.search(anything, line) and not re.search(own, line)]
    assert not others, f"multiplied otherwise: {others}"
    if case.blocks:
        return
    if case.target == "sm_90":
        _promoted(built.inner_loop, built.code)
        _waited_for(built.ordered.inner_loop(own))
    else:
        loop = built.ordered.inner_loop(own)
        assert not [line for line in loop if re.match(r"add\S*\.f32|v_(pk_)?add_f32", line)], "added beside"


def _promoted(loop: list[str], code: Code) -> None:
    # Of the machine's code: each sum begins with zero and has LONGEST of the contraction at most; all of it is added to
    # other registers before the loop is at its begin again.
    found = [_QGMMA.search(line) for line in loop if "GMMA" in line and "WARPGROUP" not in line]
    assert found, "no sum in the inner loop"
    assert all(found), "another multiplication in the inner loop"
    assert code.count(r"\b[HQ]GMMA") == len(found), "multiplied outside of the inner loop"
    lengths: dict[str, int] = {}
    widths: dict[str, int] = {}
    for each in filter(None, found):
        columns, depth, to, before = int(each[1]), int(each[2]), each[3], each[4]
        assert before == ("RZ" if to not in lengths else to), f"a sum that goes on from {before}"
        lengths[to] = lengths.get(to, 0) + depth
        widths[to] = columns
    assert max(lengths.values()) <= LONGEST, f"sums of {max(lengths.values())} of the contraction"
    sums = {f"R{int(to[1:]) + i}" for to, columns in widths.items() for i in range(columns // 2)}
    added = set()
    for line in loop:
        if adds := re.search(r"\bFADD (R\d+), (R\d+), (R\d+)", line):
            added |= {adds[2], adds[3]} & sums if adds[1] not in sums else set()
    assert added == sums, f"{len(sums - added)} of {len(sums)} registers are not added in float32"


def _waited_for(loop: list[str]) -> None:
    # Of PTX, which has no meaning where a sum is read before the wait for it; the loop begins with its first product.
    sums = {each for line in loop if "wgmma.mma_async" in line for each in re.findall(r"%\w+", line.split("}")[0])}
    waits = [i for i, line in enumerate(loop) if re.search(r"wgmma\.wait_group\S* 0\b", line)]
    reads = [
        i for i, line in enumerate(loop)
        if "wgmma" not in line and sums & set(re.findall(r"%\w+", line.partition(",")[2]))
    ]  # fmt: skip
    assert waits, "no wait for a sum"
    assert reads, "no sum is read"
    assert min(reads) > min(waits), "a sum is read before the wait for it"


def precedes(code: Code, first: list[int], then: list[int]) -> bool:
    """Whether, in the innermost loop that has both, a way leads from each of `first` to one of `then` in one turn."""
    around = [(head, body) for head, body in loops(code) if set(first) <= body and set(then) & body]
    if not around:
        return False
    head, body = min(around, key=lambda loop: len(loop[1]))
    for start in first:
        seen, queue = {start}, [start]
        while queue:
            for j in code.after[queue.pop()]:
                if j in body and j != head and j not in seen:
                    seen.add(j)
                    queue.append(j)
        if not seen & set(then):
            return False
    return True
