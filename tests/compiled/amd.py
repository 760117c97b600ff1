"""Instructions of AMD's assembly for gfx942, as `uniform` asks for them.

A wave's threads share its branches, and what they do apart is masked by `exec`: what may differ is a value between the
waves. Scalars differ so too: `v_readfirstlane` makes one of what this wave's first lane has.
"""

from __future__ import annotations

import re
from functools import partial, reduce
from operator import or_

from .flow import ANY, ARGUMENTS, DIFFERS, ONES, ZERO, Instruction, State

BARRIER = r"^s_barrier"
# At the entry: a thread's number, and where the arguments are.
ENTRY = {"v0": DIFFERS, "s0": ARGUMENTS, "s1": ARGUMENTS}
_OPERAND = re.compile(r"\b(?:([vsa])\[(\d+):(\d+)\]|([vsa]\d+)\b|(vcc|exec|scc|m0)(?:_lo|_hi)?\b)")
_NO_RESULT = re.compile(
    r"(global|flat|buffer|scratch)_store|ds_write|s_barrier|s_waitcnt|s_nop|s_endpgm|buffer_(inv|wbl2)|s_set|s_sleep"
    r"|s_branch|s_icache|s_trap|s_code_end"
)
_TWO_RESULTS = re.compile(r"_co_|v_mad_(u64_u32|i64_i32)|v_div_scale")
_KEEPS_ADDRESS = re.compile(
    r"v_lshl_add_u64|[vs]_mov|v_readfirstlane|v_readlane|v_writelane|v_accvgpr|v_cndmask|s_cselect|s_addc?_u32"
    r"|v_addc?_co_u32|v_pk_mov"
)
_NO_CARRY = re.compile(r"s_(mov|cmov|mul_i32|mul_hi|cselect|load|bfm|pack|sext|getreg|getpc|movk|buffer_load)")
_READS_CARRY = re.compile(r"s_(addc|subb|cselect|cmov)")


def _registers(operand: str) -> tuple[str, ...]:
    found: list[str] = []
    for kind, first, last, single, named in _OPERAND.findall(operand):
        found += [f"{kind}{i}" for i in range(int(first), int(last) + 1)] if kind else [single or named]
    return tuple(found)


def _all(names: tuple[str, ...], state: State) -> int:
    return reduce(or_, (state.get(name, ANY) for name in names), 0)


def _save_exec(saved: tuple[str, ...], mask: tuple[str, ...], state: State) -> None:
    before, flags = state.get("exec", 0), _all(mask, state) & DIFFERS
    state.update(dict.fromkeys(saved, before | ANY))
    state["exec"] = state["scc"] = before | flags


def _restore_exec(saved: tuple[str, ...], state: State) -> None:
    state["exec"] = state["scc"] = _all(saved, state) & DIFFERS


def _copy(to: tuple[str, ...], source: str, state: State) -> None:
    constant = {"-1": ONES, "0": ZERO}.get(source)
    state.update(dict.fromkeys(to, _all(_registers(source), state) if constant is None else constant))


def _to_vcc(mask: tuple[str, ...], inverted: bool, state: State) -> None:
    # Of the lanes that are there.
    flags = _all(mask, state)
    known = flags & (ANY | ONES | ZERO)
    if inverted:
        known = {ONES: ZERO, ZERO: ONES}.get(known, ANY)
    state["vcc"] = known | (flags | state.get("exec", 0)) & DIFFERS
    state["scc"] = state["vcc"] & DIFFERS


def _and_exec(to: tuple[str, ...], mask: tuple[str, ...], state: State) -> None:
    # Of the lanes that are there; `scc` tells whether any is left.
    flags = _all(mask, state)
    known = flags & (ANY | ONES | ZERO)
    state["scc"] = (known if known in (ONES, ZERO) else ANY) | (flags | state.get("exec", 0)) & DIFFERS
    state.update(dict.fromkeys(to, state["scc"]))


def _truth(to: str, state: State) -> None:
    # The compiler compares what it has selected at once: `_of_truth` forgets it.
    state[to] = ANY | state.get("scc", ANY) & DIFFERS
    state[f"{to}.truth"] = state.get("scc", ANY)


def _of_truth(source: str, state: State) -> None:
    # Whether a truth of 1 or 0 is not 1.
    flags = state.pop(f"{source}.truth", state.get(source, ANY) & DIFFERS | ANY)
    state["scc"] = {ONES: ZERO, ZERO: ONES}.get(flags & (ANY | ONES | ZERO), ANY) | flags & DIFFERS


def ways(line: str, state: State) -> tuple[bool, bool]:
    """Return whether a branch may go on to the next instruction, and whether it may jump.

    The compiler leaves branches that always go one way: on a mask that is a constant on every way there, and on `exec`
    where no lane has been masked.
    """
    name, known = line.split()[0], state.get("vcc", ANY) & (ANY | ONES | ZERO)
    if name in ("s_cbranch_execz", "s_cbranch_execnz") and not state.get("exec", 0) & DIFFERS:
        return name.endswith("z") and not name.endswith("nz"), name.endswith("nz")
    if name in ("s_cbranch_vccz", "s_cbranch_vccnz") and known in (ONES, ZERO):
        jumps = (known == ZERO) != name.endswith("nz")
        return not jumps, jumps
    known = state.get("scc", ANY) & (ANY | ONES | ZERO)
    if name in ("s_cbranch_scc0", "s_cbranch_scc1") and known in (ONES, ZERO):
        jumps = (known == ONES) == name.endswith("1")
        return not jumps, jumps
    return True, True


def _of_branch(name: str) -> Instruction:
    for kind in ("vcc", "scc", "exec"):
        if kind in name:
            return Instruction(sources=(kind,))
    return Instruction()


def _of_load(name: str, operands: list[str]) -> Instruction:
    results, base = _registers(operands[0]), _registers(",".join(operands[1:]))
    return Instruction(
        results, base=base, loads=True, loads_address=len(results) > 1, masked=not name.startswith("s_")
    )  # fmt: skip


def _of_lane(name: str, result: str, source: str, lane: str) -> Instruction:
    # Scalars that do not fit are kept in lanes of a vector register, one in each, whatever `exec` has; a lane keeps
    # what is known of all that were in it. Beside them the whole register, if something else writes it.
    if name == "v_readlane_b32":
        return Instruction(_registers(result), (f"{source}.{lane}", source), keeps_address=True)
    return Instruction((f"{result}.{lane}", f"{result}.lanes"), _registers(source), keeps_address=True, partial=True)


def decode(line: str) -> Instruction:
    """Parse a line of `assembly.amdgcn`."""
    name, _, rest = line.partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    if name.startswith("s_cbranch"):
        return _of_branch(name)
    if _NO_RESULT.match(name):
        return Instruction()
    if re.match(r"(global|flat|buffer)_atomic", name):
        returns = re.search(r"\bsc0\b", rest)
        return Instruction(_registers(operands[0]), differs=True) if returns else Instruction()
    if re.match(r"(global|flat|buffer|scratch|s)_load", name):
        return _of_load(name, operands) if "lds" not in rest.split() else Instruction()
    if name.endswith("_saveexec_b64"):
        saved, mask = _registers(operands[0]), _registers(operands[1])
        return Instruction((*saved, "exec", "scc"), mask, special=partial(_save_exec, saved, mask))
    if name == "s_mov_b64":
        to = _registers(operands[0])
        return Instruction(to, _registers(operands[1]), special=partial(_copy, to, operands[1]))
    if name in ("s_and_b64", "s_andn2_b64") and operands[:2] == ["vcc", "exec"]:
        mask = _registers(operands[2])
        return Instruction(("vcc", "scc"), mask, special=partial(_to_vcc, mask, name == "s_andn2_b64"))
    if name == "s_or_b64" and operands[:2] == ["exec", "exec"]:
        saved = _registers(operands[2])
        return Instruction(("exec", "scc"), saved, special=partial(_restore_exec, saved))
    if name == "s_and_b64" and operands[2] == "exec":
        to, mask = _registers(operands[0]), _registers(operands[1])
        return Instruction((*to, "scc"), (*mask, "exec"), special=partial(_and_exec, to, mask))
    if name == "s_cselect_b32" and operands[1:] == ["1", "0"]:
        return Instruction((operands[0],), ("scc",), special=partial(_truth, operands[0]))
    if name == "s_cmp_lg_u32" and operands[1] == "1":
        return Instruction(("scc",), (operands[0],), special=partial(_of_truth, operands[0]))
    if name.startswith(("s_cmp", "s_bitcmp")):
        return Instruction(("scc",), _registers(rest))
    if name in ("v_writelane_b32", "v_readlane_b32") and operands[-1].isdigit():
        return _of_lane(name, *operands)
    count = 2 if _TWO_RESULTS.search(name) else 1
    results, sources = _registers(",".join(operands[:count])), _registers(",".join(operands[count:]))
    sources += tuple(f"{each}.lanes" for each in sources if each.startswith("v") and each != "vcc")
    if name.startswith("s_"):
        results += () if _NO_CARRY.match(name) else ("scc",)
        sources += ("scc",) if _READS_CARRY.match(name) else ()
    return Instruction(
        results,
        sources,
        keeps_address=bool(_KEEPS_ADDRESS.match(name)),
        differs=name.startswith(("v_mbcnt", "ds_bpermute")),
        partial=name.startswith(("v_writelane", "v_mfma")),
        masked=name.startswith(("v_", "ds_")) and "readfirst" not in name,
        is_copy=name == "s_mov_b32" and len(results) == len(sources) == 1,
    )
